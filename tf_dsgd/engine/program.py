"""A step and an algorithm, traced into the functions that engines call.

    work(n, queue)            worker   n local steps, gradients used by the local rule
    collect() -> message      worker   what is to be sent
    deliver(header, *message) shards   applied at most once, by the server rule
    fetch()                   both     the shards' state into the worker's copies
    push(), exchange()        both     collect + deliver [+ fetch]
    flush()                   shards   partial collections, at a drain

and where batches are sent to workers in other processes:

    work_on(*batches)         worker   local steps on these batches
    ahead_on(*batches, *message)   both   local steps; meanwhile the shards take a message
    round_on(*batches)        both     fetch + local steps + push, in one call

The last three give the last step's outputs in a bundle, for `unbundle`.

Each is traced once, with one worker's variables, and bound to every worker. What runs on a shard
runs under its lock.
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
    INCARNATION,
    SEQUENCE,
    STEPS,
    WORKER,
    Replicated,
    Store,
    clock_parts,
    headers,
)
from tf_dsgd.engine.step import Step
from tf_dsgd.engine.timing import Laps
from tf_dsgd.engine.views import ShardView, WorkerView

# (values, other state, merged state, version)
_Fetched = tuple[list[Gradient], list[tf.Tensor], list[tf.Tensor], tf.Tensor]


class Program:
    """All functions of one step under one algorithm.

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
        self._turns: dict[tuple[bool, bool, bool], list[_tf.BoundFunction]] = {}
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
        self._delivery_traced = True
        count = len(self.step.weights)
        fresh = []
        for shard, header in zip(self.shards, heads, strict=True):
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

    def _read_shard(self, shard: Shard, worker: tf.Tensor) -> _Fetched:
        """Everything a worker fetches from one shard, at one moment."""
        mine = self._weights_of(shard.index)
        unsent = {
            i: self.step.on_worker(
                functools.partial(self.algorithm.local.unsent_rows, self._worker, i)
            )
            for i in mine
            if self._fetches_rows(i)
        }
        given = [worker, {i: tf.cast(r, tf.int64) for i, r in unsent.items() if r is not None}]
        read: list[Any] = []

        def body(flat: Any) -> list[tf.Tensor]:
            worker, unsent = tf.nest.pack_sequence_as(given, flat)
            rows = {
                i: self._changed_rows(i, worker, unsent.get(i))
                for i in mine
                if self._fetches_rows(i)
            }
            view = self._views[shard.index]
            view.fetched_rows = rows
            changed = self.step.on_shard(
                shard.index, lambda: self.algorithm.server.fetched(view, worker)
            )
            shard.count_version(changed)
            values = [self._answer(view, worker, n, i, rows.get(i)) for n, i in enumerate(mine)]
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

    def _fetch(self) -> tf.Tensor:
        """Fetches from every shard; gives the first one's version."""
        if not self._work_traced:
            raise RuntimeError("Local steps are traced first: they show what a fetch must bring.")
        clock = self.clock.template.read_value()
        parts = [self._read_shard(shard, clock[WORKER]) for shard in self.shards]
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

    # -- bound functions, traced when an engine first needs them ----------------------------

    @functools.cached_property
    def work(self) -> list[_tf.BoundFunction]:
        """(steps, queue); keeps the last outputs in `logs`."""

        def work(steps: tf.Tensor, queue: tf.Tensor) -> None:
            outputs = self._work(steps, lambda _: self.step.take_batch(queue))
            for variable, value in zip(self.logs, outputs, strict=True):
                variable.assign(value, read_value=False)

        return self._bind(work, tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource))

    @functools.cached_property
    def work_of(self) -> list[_tf.BoundFunction]:
        """(batch) -> its outputs."""

        def work_of(batch: Any) -> list[tf.Tensor]:
            return self._work(tf.constant(1), lambda _: batch)

        return self._bind(work_of, self.step.element_spec)

    @functools.cached_property
    def work_on(self) -> list[_tf.BoundFunction]:
        """(*packed batches) -> the last one's outputs."""
        return self._bind(self._work_on, *self.step.packing.specs)

    def _work_on(self, *packed: tf.Tensor) -> list[tf.Tensor]:
        steps, batch = self.step.packing.unpack(packed)
        return self._outputs.pack(self._work(steps, batch))

    @functools.cached_property
    def round_on(self) -> list[_tf.BoundFunction]:
        """(*packed batches) -> the last one's outputs; fetches before, and pushes after."""
        _ = self.work_on, self.fetch  # each shows the next what it must do

        def round_on(*packed: tf.Tensor) -> list[tf.Tensor]:
            laps = Laps()
            self._fetch()
            laps.lap()
            outputs = self._work_on(*packed)
            laps.lap()
            self._deliver(*self._collect())
            laps.add_to(self.store.laps.template)
            return outputs

        return self._bind(round_on, *self.step.packing.specs)

    @functools.cached_property
    def work_from(self) -> list[_tf.BoundFunction]:
        """(iterator, steps) -> the last outputs; on batches of an iterator on the worker."""
        return self._bind(self._work_from, *self._iterator_specs())

    @functools.cached_property
    def round_from(self) -> list[_tf.BoundFunction]:
        """(iterator, steps) -> the last outputs; fetches before, and pushes after."""
        _ = self.work_from, self.fetch

        def round_from(iterator: Any, steps: tf.Tensor) -> list[tf.Tensor]:
            laps = Laps()
            self._fetch()
            laps.lap()
            outputs = self._work_from(iterator, steps)
            laps.lap()
            self._deliver(*self._collect())
            laps.add_to(self.store.laps.template)
            return outputs

        return self._bind(round_from, *self._iterator_specs())

    @functools.cached_property
    def ahead_on(self) -> list[_tf.BoundFunction]:
        """(*packed batches, *message) -> the last outputs; a message travels meanwhile."""
        return self._bind_ahead(self._work_on, self.step.packing.specs)

    @functools.cached_property
    def ahead_from(self) -> list[_tf.BoundFunction]:
        """(iterator, steps, *message) -> the last outputs; a message travels meanwhile."""
        return self._bind_ahead(self._work_from, self._iterator_specs())

    def _bind_ahead(self, work: Any, specs: Sequence[Any]) -> list[_tf.BoundFunction]:
        """Local steps, and the delivery of what was collected before them, at the same time.

        The two share no variable, so that TensorFlow does not order them.
        """

        def ahead(*inputs: Any) -> list[tf.Tensor]:
            self._take_in(inputs[len(specs) :])
            return work(*inputs[: len(specs)])

        return self._bind(ahead, *specs, *self._message_specs)

    def _iterator_specs(self) -> list[Any]:
        return [tf.data.IteratorSpec(self.step.element_spec), tf.TensorSpec([], tf.int32)]

    def _work_from(self, iterator: Any, steps: tf.Tensor) -> list[tf.Tensor]:
        return self._outputs.pack(self._work(steps, lambda _: iterator.get_next()))

    def unbundle(self, outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The outputs of a step, from what `round_on` and its like gave; call it on the host."""
        return self._outputs.unpack(outputs)

    @functools.cached_property
    def collect(self) -> list[_tf.BoundFunction]:
        """() -> (headers, message)."""
        return self._bind(self._collect)

    @functools.cached_property
    def fetch(self) -> list[_tf.BoundFunction]:
        """() -> version."""
        if self.row_logs and not self._delivery_traced:
            _ = self.deliver  # which shows whether an update writes only the rows it was sent
        return self._bind(self._fetch)

    def turn(self, fetches: bool, sends: bool, arrived: bool = False) -> list[_tf.BoundFunction]:
        """(steps, queue) -> (version fetched, headers, message): a round but for its delivery.

        Without a fetch the version is -1; without sending there is nothing behind it. With
        `arrived` it is (steps, queue, *message): before, the shards take a message of any worker.
        """
        key = fetches, sends, arrived
        if key not in self._turns:
            work = self.work[0].traced
            fetch = self.fetch[0].traced if fetches else lambda: tf.constant(-1, tf.int64)
            collect = self.collect[0].traced if sends else lambda: ()

            def turn(steps: tf.Tensor, queue: tf.Tensor, *message: tf.Tensor) -> Any:
                # A step that fails must not leave the message half applied.
                with tf.control_dependencies([self._take_in(message)] if arrived else []):
                    # Each knows nothing of the others: TensorFlow orders them by the variables.
                    version = fetch()
                    work(steps, queue)
                    return version, *collect()

            specs = [tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource)]
            self._turns[key] = self._bind(turn, *specs, *(self._message_specs if arrived else []))
        return self._turns[key]

    @property
    def _message_specs(self) -> list[tf.TensorSpec]:
        parts = tf.nest.flatten(self.collect[0].outputs, expand_composites=True)
        return [tf.TensorSpec(part.shape, part.dtype) for part in parts]

    def _take_in(self, message: Sequence[tf.Tensor]) -> tf.Tensor:
        """Delivers, in another function's trace, what `collect` gave, flat."""
        collected = self.collect[0].outputs
        packed = tf.nest.pack_sequence_as(collected, list(message), expand_composites=True)
        return self.delivery(*packed)

    @functools.cached_property
    def push(self) -> list[_tf.BoundFunction]:
        """(valid) -> whether the message was applied; one that is not valid is refused."""

        def push(valid: tf.Tensor) -> tf.Tensor:
            heads, message = self._collect()
            for s, head in enumerate(heads):
                incarnation = tf.where(valid, head[INCARNATION], -1)
                heads[s] = tf.stack([head[0], incarnation, *tf.unstack(head[2:], 3)])
            return self._deliver(heads, message)

        return self._bind(push, tf.TensorSpec([], tf.bool))

    @functools.cached_property
    def exchange(self) -> list[_tf.BoundFunction]:
        """() -> (version fetched, the moment between them); a push and at once a fetch."""

        def exchange() -> tuple[tf.Tensor, tf.Tensor]:
            laps = Laps()
            self._deliver(*self._collect())
            pushed = laps.lap()
            return self._fetch(), pushed

        return self._bind(exchange)

    @functools.cached_property
    def delivery(self) -> Any:
        """`deliver` as it was traced, to be called in another function."""
        return tf.function(self._deliver, autograph=False).get_concrete_function(
            *self.collect[0].outputs
        )

    @functools.cached_property
    def deliver(self) -> Callable[..., tf.Tensor]:
        """(headers, message) -> whether the message was applied."""
        bound = _tf.BoundFunction(self.delivery, self.delivery.captured_inputs)
        return lambda heads, message: bound(
            *tf.nest.flatten([heads, message], expand_composites=True)
        )

    @functools.cached_property
    def flush(self) -> Callable[[], Any] | None:
        """Uses partial collections; None where the server rule has none."""
        collects = []

        def flush_shard(shard: Shard) -> tf.Tensor:
            changed = self.step.on_shard(
                shard.index, lambda: self.algorithm.server.flush(self._views[shard.index])
            )
            collects.append(changed is not None)
            if changed is not None:
                shard.count_version(changed)
            return tf.zeros([])

        def flush() -> list[tf.Tensor]:
            return [shard.locked([], lambda _, s=shard: flush_shard(s)) for shard in self.shards]

        concrete = tf.function(flush, autograph=False).get_concrete_function()
        if not any(collects):
            return None
        return _tf.BoundFunction(concrete, concrete.captured_inputs)

    def forget_rows(self) -> None:
        """After tables were assigned from outside: workers fetch them whole."""
        for log in self.row_logs.values():
            log.forget()
