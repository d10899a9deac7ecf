"""Fewer passes of the graph optimizer: which, for whom, and what is left of them."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tf_dsgd import _tf_prepared

_PASSES = _tf_prepared.rewriter_config_pb2.RewriterConfig


def passes():
    """What this thread's calls of functions have prepared."""
    options = _tf_prepared._context.context().function_call_options
    config = _tf_prepared.config_pb2.ConfigProto.FromString(options.config_proto_serialized)
    return config.graph_options.rewrite_options


def operations(function, *arguments):
    """The types of operations that TensorFlow's graph optimizer leaves of a first call."""
    context = _tf_prepared._context.context()
    context.enable_run_metadata()
    try:
        function(*arguments)
        metadata = context.export_run_metadata()
    finally:
        context.disable_run_metadata()
    return [n.op for g in metadata.function_graphs for n in g.post_optimization_graph.node]


def test_the_users_passes_are_as_before_and_kept_within():
    tf.config.optimizer.set_experimental_options({"constant_folding": False})
    try:
        before = passes()
        with contextlib.suppress(ZeroDivisionError), _tf_prepared.fewer_passes():
            within = passes()
            raise ZeroDivisionError
        assert passes() == before
    finally:
        tf.config.optimizer.set_experimental_options({"constant_folding": True})
    off = _PASSES.OFF
    assert before.constant_folding == within.constant_folding == off
    assert within.layout_optimizer == off != before.layout_optimizer
    assert within.meta_optimizer_iterations == _PASSES.ONE
    assert not before.disable_tfg_optimizer and within.disable_tfg_optimizer


def test_what_is_there_twice_is_computed_once():
    def twice(x, y):
        return tf.exp(x * y) + tf.exp(x * y), tf.sqrt(tf.constant(4.0)) * x

    x = tf.constant([0.5, 1.0])
    with _tf_prepared.fewer_passes():
        found = operations(tf.function(twice, autograph=False), x, x)
    assert (found.count("Exp"), found.count("Sqrt")) == (1, 0)


def test_exchanges_are_prepared_with_fewer_and_steps_are_not():
    """A step is to have the kernels, and the numbers, that it has in plain Keras."""
    strategy = tf_dsgd.SoftsyncStrategy(tf_dsgd.LocalCluster(1), gradients_per_update=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((12, 2), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    program = strategy.engine.program
    exchanges = [getattr(program, name)[0] for name in ("fetch", "push", "exchange", "collect")]
    for function in (*exchanges, program.flush):
        assert function._around is _tf_prepared.fewer_passes
    for function in (program.work[0], program.turn(True, True)[0]):
        assert function._around is contextlib.nullcontext
