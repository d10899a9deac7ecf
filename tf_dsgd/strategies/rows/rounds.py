"""Rows of split tables, read once for all mini-batches of a round.

Where shards are other processes, a lookup is a call to each of them, and costs both sides more than
its rows do. So a worker takes all mini-batches of a round, finds the ids that they will look up,
and reads their rows before the first step, each once; the steps take them from there. Each shard
reads them once it has given what the round fetches: so a row is as fresh as that, or fresher.

What ids a step looks up is seen in its graph: they must follow from the mini-batch alone, by
operations without a state. Where they do not (ids drawn at random, or by a table of strings), each
step reads its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd.strategies.rows import reading
from tf_dsgd.strategies.rows.tables import SplitTable


class RowsOfRounds:
    """Of a traced step: the ids that a mini-batch's lookups name, and their rows.

    Args:
        function: the step; what it is given is the mini-batch.
        lookups: in its graph, tables and the ids of each lookup.
    """

    def __init__(self, function: Any, lookups: Sequence[tuple[SplitTable, tf.Tensor]]):
        self._inputs = function.inputs[: len(function.inputs) - len(function.captured_inputs)]
        self._spec = tf.OptionalSpec(function.structured_input_signature[0][0])
        self._tables = {id(table): table for table, _ in lookups}
        self._ids = [ids for _, ids in lookups]
        self._of = [id(table) for table, _ in lookups]
        nodes = _leading_to(self._ids, self._inputs, function.graph)
        self.known = nodes is not None
        """Whether the ids follow from the mini-batch alone."""
        self._graph = tf.compat.v1.GraphDef(versions=function.graph.graph_def_versions)
        self._graph.node.extend(op.node_def for op in nodes or ())
        names = {name for op in nodes or () for name in op.node_def.input}
        names |= {_name(ids) for ids in self._ids}
        self._used = [_name(tensor) in names for tensor in self._inputs]

    def _looked_up(self, batch: Any) -> list[tf.Tensor]:
        """Of each table the ids that a step on this mini-batch will look up."""
        given = tf.nest.flatten(batch, expand_composites=True)
        found = tf.graph_util.import_graph_def(
            self._graph,
            input_map={
                tensor.name: value
                for tensor, value, used in zip(self._inputs, given, self._used, strict=True)
                if used
            },
            return_elements=[tensor.name for tensor in self._ids],
            name="ids",
        )
        of_tables: dict[int, list[tf.Tensor]] = {key: [] for key in self._tables}
        for key, ids in zip(self._of, found, strict=True):
            of_tables[key].append(tf.cast(ids, tf.int64))
        return [tf.concat(ids, 0) for ids in of_tables.values()]

    def read(
        self, steps: tf.Tensor | None, batch: Callable[[tf.Tensor], Any]
    ) -> Callable[[tf.Tensor], Any]:
        """Takes `batch(0)`, `batch(1)` ..., reads their rows, and gives them by number again.

        Without `steps` it is one, and needs no loop.
        """
        tables = list(self._tables.values())
        if steps is None:
            only = batch(tf.constant(0))
            reading.keep(tables, self._looked_up(only))
            return lambda _: only
        drawn = tf.TensorArray(tf.variant, steps, element_shape=[])
        named = [
            tf.TensorArray(tf.int64, steps, element_shape=[None], infer_shape=False)
            for _ in self._tables
        ]

        def draw(k: tf.Tensor, drawn: Any, named: Any) -> Any:
            one = batch(k)
            (variant,) = tf.nest.flatten(
                tf.experimental.Optional.from_value(one), expand_composites=True
            )
            ids = self._looked_up(one)
            named = [a.write(k, i) for a, i in zip(named, ids, strict=True)]
            return k + 1, drawn.write(k, variant), named

        _, drawn, named = tf.while_loop(
            lambda k, *_: k < steps, draw, (tf.constant(0), drawn, named), parallel_iterations=1
        )
        reading.keep(tables, [ids.concat() for ids in named])

        def again(k: tf.Tensor) -> Any:
            optional = tf.nest.pack_sequence_as(self._spec, [drawn.read(k)], expand_composites=True)
            return optional.get_value()

        return again


def _name(tensor: tf.Tensor) -> str:
    """As a node names what it takes in."""
    name, _, output = tensor.name.partition(":")
    return name if output == "0" else tensor.name


def _leading_to(
    ids: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], graph: tf.Graph
) -> list[tf.Operation] | None:
    """Operations between the mini-batch and ids; None where others or a state have a part."""
    given = {tensor.op.name for tensor in inputs}
    found: dict[str, tf.Operation] = {}
    left = [tensor.op for tensor in ids]
    while left:
        op = left.pop()
        if op.name in given or op.name in found:
            continue
        calls = any(attr.HasField("func") for attr in op.node_def.attr.values())
        if (
            op.graph is not graph
            or op.type.startswith("Placeholder")
            or op.op_def.is_stateful
            or op.control_inputs
            or calls
        ):
            return None
        found[op.name] = op
        left.extend(tensor.op for tensor in op.inputs)
    return list(found.values())
