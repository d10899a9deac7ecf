"""What a round is made of: local steps, a message, its delivery, a fetch; traced by `Program`.

What runs on a shard runs under its lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf, arithmetic
from tf_dsgd.algorithm import Algorithm, Message
from tf_dsgd.arithmetic import Gradient
from tf_dsgd.engine.bundles import Bundle
from tf_dsgd.engine.rows import RowLog
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.state import (
    SEQUENCE,
    STEPS,
    WORKER,
    Replicated,
    Store,
    clock_parts,
    headers,
)
from tf_dsgd.engine.step import Step
from tf_dsgd.engine.views import ShardView, WorkerView

# (values, other state, merged state, version)
_Fetched = tuple[list[Gradient], list[tf.Tensor], list[tf.Tensor], tf.Tensor]


class Parts:
    """What rounds are made of: to be called while a function is traced with one worker's variables.

    Args:
        step: the user's step.
        algorithm: the three rules.
        store: what workers own.
        shards: all shards; each of the step's variables is on one.
        host_device: where the latest outputs are kept.
    """

    def __init__(
        self,
        step: Step,
        algorithm: Algorithm,
        store: Store,
        shards: Sequence[Shard],
        host_device: str | None,
    ):
        self.step = step
        self.algorithm = algorithm
        self.keeps_weights = algorithm.local.keeps_weights
        self.store = store
        self.shards = list(shards)
        self._shard_cells: dict[Any, tf.Variable] = {}
        exchange = algorithm.exchange
        at_once = exchange.push_every >= exchange.fetch_every  # else messages are kept for a while
        self.can_be_late = store.may_be_late and at_once and algorithm.local.repeatable
        """Whether a worker may be overtaken by another that sends its message."""
        self._rule_waits = not exchange.may_start(1 << 62, 0)
        self._work_traced = False
        self._delivery_traced = False
        self._worker = WorkerView(self)
        self._views = [ShardView(self, shard.index) for shard in shards]
        self.clock = store.clock
        self.logs = [
            _tf.make_variable(
                functools.partial(tf.zeros, [d or 0 for d in spec.shape.as_list()], spec.dtype),
                device=host_device,
                dtype=spec.dtype,
                shape=spec.shape,
                name="log",
            )
            for spec in step.outputs
        ]
        self._outputs = Bundle.of(step.outputs)
        self._base = [
            store.cell(
                ("base", _tf.unique_id(v)),
                functools.partial(self._copies_of, v),
            )
            for v in step.merged_state()
        ]
        self.row_logs = {
            i: RowLog(v.primary, store.num_workers, shards[v.shard].device)
            for i, v in enumerate(step.weights)
            if step.sparse[i]
        }

    def _copies_of(self, variable: Any) -> Replicated:
        copies = variable.on_workers().copies
        return self.store.replicate(
            lambda m: copies[m].read_value(), dtype=variable.dtype, name="base"
        )

    def shard_cell(
        self, shard: int, key: Any, shape: Sequence[int | None], dtype: tf.DType
    ) -> tf.Variable:
        """Memory of a shard, zero at first."""
        if (shard, key) not in self._shard_cells:
            with tf.init_scope():
                self._shard_cells[shard, key] = _tf.make_variable(
                    tf.zeros([d or 0 for d in shape], dtype),
                    device=self.shards[shard].device,
                    dtype=dtype,
                    shape=shape,
                    name=str(key[0]),
                )
        return self._shard_cells[shard, key]

    @property
    def shard_cells(self) -> list[tf.Variable]:
        """What rules keep on shards."""
        return list(self._shard_cells.values())

    def _bind(self, fn: Callable[..., Any], *specs: Any) -> list[_tf.BoundFunction]:
        return self.store.bind(tf.function(fn, autograph=False).get_concrete_function(*specs))

    # -- worker -----------------------------------------------------------------------------

    def _one_step(self, batch: Any) -> list[tf.Tensor]:
        outputs, gradients = self.step.function(batch)
        self.step.on_worker(lambda: self.algorithm.local.step(self._worker, gradients))
        return outputs

    def _work(self, steps: tf.Tensor, batch: Callable[[tf.Tensor], Any]) -> list[tf.Tensor]:
        """Local steps on `batch(0)`, `batch(1)` ...; gives the last one's outputs."""
        self._work_traced = True
        exchange = self.algorithm.exchange
        if exchange.push_every == 1 or exchange.fetch_every == 1:
            outputs = self._one_step(batch(tf.constant(0)))
        else:
            first = [
                tf.zeros([d or 0 for d in spec.shape.as_list()], spec.dtype)
                for spec in self.step.outputs
            ]
            _, outputs = tf.while_loop(
                lambda k, _: k < steps,
                lambda k, _: (k + 1, self._one_step(batch(k))),
                (tf.constant(0), first),
                shape_invariants=(tf.TensorShape([]), [s.shape for s in self.step.outputs]),
                parallel_iterations=1,
            )
        clock = self.clock.template.read_value()
        fixed, versions, fetched = clock_parts(clock, len(self.shards))
        versions = tf.where(clock[STEPS] == 0, fetched, versions)
        self._set_clock({STEPS: clock[STEPS] + tf.cast(steps, tf.int64)}, fixed, versions, fetched)
        return outputs

    def _set_clock(
        self,
        changes: dict[int, tf.Tensor],
        fixed: tf.Tensor,
        versions: tf.Tensor,
        fetched: tf.Tensor,
    ) -> None:
        fixed = tf.stack([changes.get(i, fixed[i]) for i in range(fixed.shape[0])])
        clock = tf.concat([fixed, versions, fetched], 0)
        self.clock.template.assign(clock, read_value=False)

    def _collect(self) -> tuple[list[tf.Tensor], list[Gradient]]:
        message = self.step.on_worker(lambda: self.algorithm.local.message(self._worker))
        for variable, base in zip(self.step.merged_state(), self._base, strict=True):
            now = tf.identity(variable.on_workers().template.read_value())
            additive = now.dtype.is_floating or now.dtype.is_integer
            message.append(now - base.template.read_value() if additive else now)
            base.template.assign(now, read_value=False)
        clock = self.clock.template.read_value()
        changes = {SEQUENCE: clock[SEQUENCE] + 1, STEPS: tf.zeros([], tf.int64)}
        self._set_clock(changes, *clock_parts(clock, len(self.shards)))
        return headers(clock, len(self.shards)), message

    # -- shards -----------------------------------------------------------------------------

    def _weights_of(self, shard: int) -> list[int]:
        return [i for i, v in enumerate(self.step.weights) if v.shard == shard]

    def _merged_of(self, shard: int) -> list[int]:
        return [j for j, v in enumerate(self.step.merged_state()) if v.shard == shard]

    def _deliver(self, heads: Sequence[tf.Tensor], message: Sequence[Gradient]) -> tf.Tensor:
        """Whether all shards applied the message."""
        return self._deliver_to(range(len(self.shards)), heads, message)

    def _deliver_to(
        self, shards: Sequence[int], heads: Sequence[tf.Tensor], message: Sequence[Gradient]
    ) -> tf.Tensor:
        """Whether these shards applied the message."""
        self._delivery_traced = True
        count = len(self.step.weights)
        fresh = []
        for shard, header in ((self.shards[s], heads[s]) for s in shards):
            tensors = [message[i] for i in self._weights_of(shard.index)]
            dtypes = [tensor.dtype for tensor in tensors]
            tensors = [self._for_wire(tensor) for tensor in tensors]
            changes = [message[count + j] for j in self._merged_of(shard.index)]
            structure = [header, tensors, changes]
            flat = tf.nest.flatten(structure, expand_composites=True)
            bundle = shard.bundle(flat)

            def body(
                sent: Any,
                shard: Shard = shard,
                bundle: Bundle = bundle,
                structure: Any = structure,
                dtypes: Any = dtypes,
            ) -> tf.Tensor:
                header, tensors, changes = tf.nest.pack_sequence_as(
                    structure, bundle.unpack(sent), expand_composites=True
                )
                tensors = [arithmetic.cast(t, d) for t, d in zip(tensors, dtypes, strict=True)]
                return shard.receive(
                    header,
                    lambda staleness: self._apply(shard, header, staleness, tensors, changes),
                )

            fresh.append(shard.locked(bundle.pack(flat), body))
        return fresh[0] if len(fresh) == 1 else tf.reduce_all(tf.stack(fresh))

    def _for_wire(self, value: Gradient) -> Gradient:
        dtype = self.algorithm.exchange.wire_dtype
        return arithmetic.cast(value, dtype) if dtype and value.dtype.is_floating else value

    def _apply(
        self,
        shard: Shard,
        header: tf.Tensor,
        staleness: tf.Tensor,
        tensors: Sequence[Gradient],
        changes: Sequence[tf.Tensor],
    ) -> tf.Tensor | bool:
        worker, _, _, version, steps = tf.unstack(header, 5)
        view = self._views[shard.index]
        view.noted = False
        changed = self.step.on_shard(
            shard.index,
            lambda: self.algorithm.server.receive(
                view, Message(worker, version, steps, staleness, tensors)
            ),
        )
        if not view.noted:  # the rule itself writes, and no rows but those it was sent
            view.note_rows(tensors)
        state = self.step.merged_state()
        for change, j in zip(changes, self._merged_of(shard.index), strict=True):
            variable = state[j]
            if change.dtype.is_floating and variable.averaged:
                # Workers' sums would diverge (11 workers, period 20): average instead.
                variable.primary.assign_add(change / self.store.num_workers, read_value=False)
            elif change.dtype.is_floating or change.dtype.is_integer:
                variable.primary.assign_add(change, read_value=False)
            else:
                variable.primary.assign(change, read_value=False)
        return changed

    def _read_shard(
        self, shard: Shard, worker: tf.Tensor, name: tf.Tensor, sequence: tf.Tensor
    ) -> _Fetched:
        """Everything a worker fetches from one shard, at one moment.

        To the server rule it is worker `name` that fetches, whose last message was `sequence`.
        """
        mine = self._weights_of(shard.index)
        unsent = {
            i: self.step.on_worker(
                functools.partial(self.algorithm.local.unsent_rows, self._worker, i)
            )
            for i in mine
            if self._fetches_rows(i)
        }
        given = [
            worker,
            name,
            sequence,
            {i: tf.cast(r, tf.int64) for i, r in unsent.items() if r is not None},
        ]
        read: list[Any] = []

        def body(flat: Any) -> list[tf.Tensor]:
            worker, name, sequence, unsent = tf.nest.pack_sequence_as(given, flat)
            rows = {
                i: self._changed_rows(i, worker, unsent.get(i))
                for i in mine
                if self._fetches_rows(i)
            }
            view = self._views[shard.index]
            view.fetched_rows = rows
            changed = self.step.on_shard(
                shard.index, lambda: self._fetched(shard, view, name, sequence)
            )
            shard.count_version(changed)
            values = [self._answer(view, name, n, i, rows.get(i)) for n, i in enumerate(mine)]
            fetched: _Fetched = (
                [self._for_wire(value) for value in values],
                [
                    v.primary.read_value()
                    for v in self.step.fetched_state()
                    if v.shard == shard.index
                ],
                [
                    self.step.merged_state()[j].primary.read_value()
                    for j in self._merged_of(shard.index)
                ],
                shard.version.read_value(),
            )
            flat = tf.nest.flatten(fetched, expand_composites=True)
            bundle = shard.bundle(flat)
            read[:] = fetched, bundle
            return bundle.pack(flat)

        sent = shard.locked(tf.nest.flatten(given), body)
        structure, bundle = read
        return tf.nest.pack_sequence_as(structure, bundle.unpack(sent), expand_composites=True)

    def _fetched(
        self, shard: Shard, view: ShardView, worker: tf.Tensor, sequence: tf.Tensor
    ) -> tf.Tensor | bool:
        """What a fetch changes on a shard: nothing once a later message came in its name."""
        fetched = functools.partial(self.algorithm.server.fetched, view, worker)
        if not (self.can_be_late and self._rule_waits):
            return fetched()  # what it remembers is remembered anew before it counts
        return tf.cond(shard.last_message(worker) <= sequence, fetched, lambda: False)

    def _fetches_rows(self, i: int) -> bool:
        return i in self.row_logs and not self.step.rewrites(self.step.weights[i])

    def _changed_rows(self, i: int, worker: tf.Tensor, unsent: tf.Tensor | None) -> tf.Tensor:
        """Rows of a table in which the worker's copy may differ from the shard's."""
        changed, whole = self.row_logs[i].changed(worker)
        if unsent is not None:
            changed = tf.unique(tf.concat([changed, unsent], 0))[0]
        size = self.step.weights[i].primary.shape[0]
        return tf.cond(whole, lambda: tf.range(size, dtype=tf.int64), lambda: changed)

    def _answer(
        self, view: ShardView, worker: tf.Tensor, n: int, i: int, rows: tf.Tensor | None
    ) -> Gradient:
        """What a fetch gives of weight `i`, the shard's `n`-th."""
        answer = self.step.on_shard(
            view.index, lambda: self.algorithm.server.answer(view, worker, n)
        )
        if answer is not None:
            return answer
        primary = self.step.weights[i].primary
        if rows is None:
            return primary.read_value()
        shape = tf.constant(primary.shape.as_list())
        return tf.IndexedSlices(primary.sparse_read(rows), rows, shape)

    def _fetch(self, name: tf.Tensor | None = None) -> tf.Tensor:
        """Fetches from every shard; gives the first one's version.

        With `name` it is, to the server rule, that worker who fetches, and before its next message.
        """
        if not self._work_traced:
            raise RuntimeError("Local steps are traced first: they show what a fetch must bring.")
        clock = self.clock.template.read_value()
        worker, sequence = clock[WORKER], clock[SEQUENCE]
        if name is None:
            name = worker
        else:
            sequence = tf.constant(tf.int64.max)
        parts = [self._read_shard(shard, worker, name, sequence) for shard in self.shards]
        values: list[Any] = [None] * len(self.step.weights)
        merged: list[Any] = [None] * len(self._base)
        versions = []
        fetched_state = self.step.fetched_state()
        for shard, (weights, state, merges, version) in zip(self.shards, parts, strict=True):
            for i, value in zip(self._weights_of(shard.index), weights, strict=True):
                values[i] = arithmetic.cast(value, self.step.weights[i].dtype)
            for j, value in zip(self._merged_of(shard.index), merges, strict=True):
                merged[j] = value
            versions.append(version)
            here = [v for v in fetched_state if v.shard == shard.index]
            for variable, value in zip(here, state, strict=True):
                variable.on_workers().template.assign(value, read_value=False)
        self.step.on_worker(lambda: self.algorithm.local.fetched(self._worker, values))
        for variable, base, value in zip(self.step.merged_state(), self._base, merged, strict=True):
            copy = variable.on_workers().template
            if value.dtype.is_floating or value.dtype.is_integer:
                copy.assign(value + (copy.read_value() - base.template.read_value()))
            else:
                copy.assign(value)
            base.template.assign(value, read_value=False)
        fixed, begun, _ = clock_parts(clock, len(self.shards))
        self._set_clock({}, fixed, begun, tf.stack(versions))
        return versions[0]
