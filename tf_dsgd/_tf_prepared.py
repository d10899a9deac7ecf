"""What TensorFlow makes of a traced function before its first call: passes, partitions.

As in `_tf`, each private name says why it is needed and in which versions it was seen to work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context as _context


@contextlib.contextmanager
def fewer_passes() -> Iterator[None]:
    """Functions that this thread calls within are prepared by those passes that matter to a shard.

    A function that exchanges hundreds of variables is elementwise arithmetic of thousands of
    operations, and half of its first call is TensorFlow's graph optimizer. What makes it faster,
    and what its numbers depend on, is left: operations that are there twice, constants, arithmetic,
    edges that order nothing. Not made: all of it a second time, and what looks for layouts of
    convolutions and for memory to spare. It has to be so in every call of a function: TensorFlow
    prepares one anew under other options.

    `Context.function_call_options` is the thread's; `tf.config.optimizer` is the process's, and
    the user's. TF 2.21.
    """
    context = _context.context()
    usual = context.function_call_options
    try:
        context.function_call_options = _fewer(usual.config_proto_serialized, usual.executor_type)
        yield
    finally:
        context.function_call_options = usual


@functools.lru_cache(maxsize=8)
def _fewer(config: bytes, executor_type: str | None) -> Any:
    """The options of these, but for the passes."""
    chosen = config_pb2.ConfigProto.FromString(config)
    passes = chosen.graph_options.rewrite_options
    values = rewriter_config_pb2.RewriterConfig
    passes.meta_optimizer_iterations = values.ONE
    passes.memory_optimization = values.NO_MEM_OPT
    passes.layout_optimizer = values.OFF
    passes.disable_tfg_optimizer = True
    return _context.FunctionCallOptions(executor_type=executor_type, config_proto=chosen)


def partitions(function: Any, device: str, args: Sequence[tf.Tensor]) -> list[Any]:
    """What TensorFlow makes of a bound function called on `device`: a GraphDef for every device.

    Runs the function once. TensorFlow keeps the partitioned graphs of functions that this process
    instantiates, so the function is put into one of its own, whose default device stays here
    (`enable_run_metadata`, TF 2.21).
    """
    concrete = function.traced
    graph_def = concrete.graph.as_graph_def()
    names = [tensor.name for tensor in concrete.inputs]

    def outer(*tensors: tf.Tensor) -> Any:
        graph = tf.compat.v1.get_default_graph()
        inputs = [*tensors, *(graph.capture(handle) for handle in function.captures)]
        with tf.device(device):
            must_run = tf.graph_util.import_graph_def(
                graph_def,
                input_map=dict(zip(names, inputs, strict=True)),
                return_elements=[op.name for op in concrete.graph.control_outputs],
            )
            with tf.control_dependencies(must_run):
                return tf.constant(0)

    context = _context.context()
    # Not tf.function, which would put operations into an order of its own.
    traced = tf.compat.v1.wrap_function(outer, [tf.TensorSpec.from_tensor(t) for t in args])
    context.enable_run_metadata()
    try:
        traced(*args)
        metadata = context.export_run_metadata()
    finally:
        context.disable_run_metadata()
    # Other functions that ran meanwhile are in it, too: what was imported tells this one.
    return [
        graph
        for entry in metadata.function_graphs
        if any(node.name.startswith("import/") for g in entry.partition_graphs for node in g.node)
        for graph in entry.partition_graphs
    ]
