"""What rounds are made of: parts, each of which runs in one place.

    one_step(batch)                worker   a step on a batch, its gradients used by the local rule
    collection() -> message        worker   what is to be sent
    wrapping(message) -> parcels   worker   one for each shard, as they travel
    receiving[s](parcel)           shard    applied at most once, by the server rule
    asking() -> who, rows          worker   who fetches, and what it needs in any case
    reading[s](who) -> parcel      shard    its state, at one moment
    taking(parcels)                worker   into the worker's copies

Each is traced once, with one worker's variables, and called in the functions of `Program`. What
runs on a shard runs under its lock. Since a part is in one place, TensorFlow, which lets a function
begin and end as a whole, sends nothing between places but what parts give each other.

What a part has to know of others it asks for, so that they are traced before: `reading` brings the
variables that `one_step` and `collection` read, and of a table the rows that changed, unless
`receiving` shows that an update writes others, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf, _tf_order
from tf_dsgd.algorithm import Algorithm, Codec, Message, ServerRule
from tf_dsgd.arithmetic import Gradient, no_rows
from tf_dsgd.engine import traffic
from tf_dsgd.engine.bundles import Bundle, On, anywhere
from tf_dsgd.engine.merged import Collected, Merged, merged
from tf_dsgd.engine.parcels import Parcel, are_rows, parts_of
from tf_dsgd.engine.peers import PeerParts
from tf_dsgd.engine.read_state import ReadState
from tf_dsgd.engine.rows import RowLog
from tf_dsgd.engine.running import RunningMetrics
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.state import (
    SEQUENCE,
    STEPS,
    WORKER,
    Store,
    clock_parts,
    headers,
    traced,
)
from tf_dsgd.engine.step import Step
from tf_dsgd.engine.views import ShardView, WorkerView


class Parts:
    """What rounds are made of: to be called while a function is traced with one worker's variables.

    Args:
        step: the user's step.
        algorithm: the three rules.
        store: what workers own.
        shards: all shards; each of the step's variables is on one.
        host_device: where the latest outputs, and sums of metrics, are kept.
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
        self._codec = algorithm.codec
        self.store = store
        self.shards = list(shards)
        self._shard_cells: dict[Any, tf.Variable] = {}
        exchange = algorithm.exchange
        # Else messages are kept for a while; and in turn nobody sends in another's name.
        at_once = exchange.push_every >= exchange.fetch_every and not exchange.in_turn
        repeatable = algorithm.local.repeatable and algorithm.codec.repeatable
        self.has_backup_tasks = store.has_backup_tasks and at_once and repeatable
        """Whether another worker may send a straggler's message."""
        self._rule_waits = exchange.bounds_staleness
        self.worker_view = WorkerView(self)
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
        self.running = RunningMetrics(
            step.metrics, step.resets, store, host_device, other_logs=bool(step.outputs)
        )
        self._outputs = Bundle.of([*step.outputs, *self.running.specs])
        rule = algorithm.between_peers
        self._peers = None if rule is None or shards[0].remote else PeerParts(self, rule)
        self.ends_with_fetch = algorithm.local.keeps_weights or rule is not None
        """Whether each worker's last fetch before a drain's end is of that end."""
        self.merged = [self._merged_as(v) for v in step.merged_state()]
        """What workers change besides the weights, and how it becomes one."""
        self._encoded: list[int] = []
        """How many tensors of a message are each weight's."""
        self._sent: dict[int, Parcel] = {}
        self._fetched_from: dict[int, Parcel] = {}
        self.row_logs = {
            i: RowLog(v.primary, v.edition, store.num_workers, shards[v.shard].device)
            for i, v in enumerate(step.weights)
            if step.sparse[i] and v.copied and not shards[v.shard].lock_free
            # Without the lock two notes at once would lose rows.
        }

    @property
    def _server(self) -> ServerRule:
        return self.algorithm.on_shards

    def _merged_as(self, variable: Any) -> Merged:
        own = variable.on_workers()
        copies = functools.partial(self.store.copy_of, own, variable.dtype, "base")
        base = self.store.cell(("base", _tf.unique_id(variable)), copies)
        cells = functools.partial(self.shard_cell, variable.shard)
        peers = self.algorithm.between_peers is not None
        together = not peers and self._server.averages_statistics
        return merged(variable, base, self.store.num_workers, cells, together)

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

    # -- the parts --------------------------------------------------------------------------

    @functools.cached_property
    def one_step(self) -> Any:
        """(batch) -> its outputs. Rows kept for a message change their number: not for XLA."""
        compiled = self.step.compiled and not any(self.step.sparse)
        return traced(self._one_step, self.step.element_spec, compiled=compiled)

    @functools.cached_property
    def collection(self) -> Any:
        """() -> (headers, message)."""
        return traced(self._collect)

    @functools.cached_property
    def wrapping(self) -> Any:
        """(headers, message) -> a parcel for each shard."""
        wrap = functools.partial(self._wrap, self.step.on_part)
        return traced(wrap, *self.collection.structured_outputs)

    @functools.cached_property
    def wrapping_anywhere(self) -> Any:
        """The same, for a message of any worker."""
        wrap = functools.partial(self._wrap, anywhere)
        return traced(wrap, *self.collection.structured_outputs)

    @functools.cached_property
    def receiving(self) -> list[Any]:
        """Of each shard: (parcel) -> whether it was applied."""
        parcels = self.wrapping.structured_outputs
        return [
            traced(functools.partial(self._receive, shard), parcel)
            for shard, parcel in zip(self.shards, parcels, strict=True)
        ]

    @functools.cached_property
    def asking(self) -> Any:
        """() -> (who fetches, rows of the tables that it needs in any case)."""
        return traced(self._ask)

    @functools.cached_property
    def reading(self) -> list[Any]:
        """Of each shard: (who fetches, rows of its tables) -> parcel."""
        who, rows = self.asking.structured_outputs
        return [
            traced(functools.partial(self._read, shard), who, self._rows_of(shard, rows))
            for shard in self.shards
        ]

    @functools.cached_property
    def _is_asked(self) -> bool:
        """Whether a shard makes use of who fetches, or which rows."""
        given = len(tf.nest.flatten(self.asking.structured_outputs))
        return any(any(_tf_order.uses(each)[:given]) for each in self.reading)

    @functools.cached_property
    def taking(self) -> Any:
        """(a parcel from each shard) -> the first shard's version."""
        return traced(self._take, [reading.structured_outputs for reading in self.reading])

    @functools.cached_property
    def read_by_workers(self) -> list[Any]:
        """Variables, the weights aside, that a worker reads and a fetch brings."""
        _ = self.one_step, self.collection  # which show it
        return self.step.fetched_state()

    @functools.cached_property
    def _read_state(self) -> list[ReadState]:
        """The same, by shards."""
        if any(map(self.step.leaves, self.read_by_workers)):
            _ = self.receiving  # which shows what an update writes
        with tf.init_scope():
            return [ReadState(s, self.read_by_workers, self.step, self.store) for s in self.shards]

    @functools.cached_property
    def _by_rows(self) -> set[int]:
        """The step's weights of which a fetch brings the rows that changed."""
        if not self.row_logs:
            return set()
        _ = self.receiving  # which shows what an update writes
        return {i for i in self.row_logs if not self.step.rewrites(self.step.weights[i])}

    # -- what they make together, while another function is traced ---------------------------

    def delivery(self, heads: Sequence[tf.Tensor], message: Sequence[Gradient]) -> tf.Tensor:
        """Whether all shards applied the message."""
        return self._received(range(len(self.shards)), self.wrapping(heads, message))

    def delivery_of_fetched(self) -> list[tf.Operation]:
        """Sends what was collected after a fetch in the same function.

        The message says what was fetched, so that it need not be told, by a tensor from each shard,
        when that is read.
        """
        parcels = self.wrapping(*self.collection())
        calls = zip(self.shards, self.receiving, parcels, strict=True)
        sent = [shard.call(receiving, parcel).op for shard, receiving, parcel in calls]
        for operation in sent:
            _tf_order.run_independently(operation)
        return sent

    def _delivery_to(
        self, shards: Sequence[int], heads: Sequence[tf.Tensor], message: Sequence[Gradient]
    ) -> tf.Tensor:
        """The same, of any worker's message, to these shards."""
        return self._received(shards, self.wrapping_anywhere(heads, message))

    def _received(self, shards: Sequence[int], parcels: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        fresh = [self.shards[s].call(self.receiving[s], parcels[s]) for s in shards]
        return fresh[0] if len(fresh) == 1 else tf.reduce_all(tf.stack(fresh))

    def fetching(self, name: tf.Tensor | None = None) -> tf.Tensor:
        """Fetches from every shard; gives the first one's version.

        With `name` it is, to the server rule, that worker who fetches, and before its next message.
        Where workers send to one another, this one takes in what they sent.
        """
        if self._peers is not None:
            return self._peers.fetching()
        return self.taking(self.asked(name)[0])

    def asked(self, name: tf.Tensor | None = None) -> tuple[list[Any], list[tf.Operation]]:
        """(what a fetch brings from each shard, the operations that read it there)."""
        # What nobody needs is not asked for: TensorFlow would have the answers wait for its end.
        who, rows = self.asking() if self._is_asked else (tf.zeros([3], tf.int64), {})
        if name is not None:
            who = tf.stack([who[0], name, tf.int64.max])
        parcels = [
            shard.call(reading, who, self._rows_of(shard, rows))
            for shard, reading in zip(self.shards, self.reading, strict=True)
        ]
        calls = [parcel[0].op for parcel in parcels]
        if self.store.num_parts == 1 and self.shards[0].remote:
            # Or a second fetch in a function would have the shards told that the worker is ready.
            parcels = [[tf.identity(tensor) for tensor in parcel] for parcel in parcels]
        return parcels, calls

    # -- worker -----------------------------------------------------------------------------

    def _one_step(self, batch: Any) -> list[tf.Tensor]:
        outputs, gradients = self.step.function(batch)
        self.step.on_worker(lambda: self.algorithm.local.step(self.worker_view, gradients))
        return outputs[: len(self.step.outputs)]

    def _work(self, steps: tf.Tensor, batch: Callable[[tf.Tensor], Any]) -> list[tf.Tensor]:
        """Local steps on `batch(0)`, `batch(1)` ...; gives the last one's outputs."""
        exchange = self.algorithm.exchange
        if exchange.push_every == 1 or exchange.fetch_every == 1:
            batch = self.step.before_round(None, batch)
            outputs = self.one_step(batch(tf.constant(0)))
        else:
            batch = self.step.before_round(steps, batch)
            first = [
                tf.zeros([d or 0 for d in spec.shape.as_list()], spec.dtype)
                for spec in self.step.outputs
            ]
            _, outputs = tf.while_loop(
                lambda k, _: k < steps,
                lambda k, _: (k + 1, self.one_step(batch(k))),
                (tf.constant(0), first),
                shape_invariants=(tf.TensorShape([]), [s.shape for s in self.step.outputs]),
                parallel_iterations=1,
            )
        clock = self.clock.template.read_value()
        _, begun, fetched = clock_parts(clock, len(self.shards))
        begun = tf.where(clock[STEPS] == 0, fetched, begun)
        self.store.set_clock(clock, {STEPS: clock[STEPS] + tf.cast(steps, tf.int64)}, begun)
        return outputs

    def _collect(self) -> tuple[list[tf.Tensor], list[Gradient]]:
        """Headers, and the message: of each weight what the codec makes of it, then changes."""

        def encoded() -> list[list[Gradient]]:
            tensors = self.algorithm.local.message(self.worker_view)
            self.worker_view.said = {}
            sent = [self._codec.encode(self.worker_view, i, t) for i, t in enumerate(tensors)]
            if type(self._codec) is not Codec:
                row = traffic.row(tensors, sent, self.worker_view.said)
                self.store.traffic.template.assign_add(row, read_value=False)
            return sent

        of_weights = self.step.on_worker(encoded)
        self._encoded = [len(tensors) for tensors in of_weights]
        message = [tensor for tensors in of_weights for tensor in tensors]
        take_out = self.algorithm.between_peers is not None
        message.extend(each.collect(take_out=take_out) for each in self.merged)
        clock = self.clock.template.read_value()
        changes = {SEQUENCE: clock[SEQUENCE] + 1, STEPS: tf.zeros([], tf.int64)}
        self.store.set_clock(clock, changes)
        return headers(clock, len(self.shards)), message

    # -- shards -----------------------------------------------------------------------------

    def _weights_of(self, shard: int) -> list[int]:
        return [i for i, v in enumerate(self.step.weights) if v.shard == shard]

    def _merged_of(self, shard: int) -> list[Merged]:
        return [each for each in self.merged if each.variable.shard == shard]

    def _wrap(
        self, on: On, heads: Sequence[tf.Tensor], message: Sequence[Gradient]
    ) -> list[list[tf.Tensor]]:
        """A parcel for each shard: header, tensors and changes as they travel."""
        rest = iter(message)
        of_weights = [[next(rest) for _ in range(number)] for number in self._encoded]
        all_changes = list(rest)
        parcels = []
        for shard, header in zip(self.shards, heads, strict=True):
            tensors = [of_weights[i] for i in self._weights_of(shard.index)]
            here = self._merged_of(shard.index)
            changes = [c for c, m in zip(all_changes, self.merged, strict=True) if m in here]
            content = [header, tensors, changes]
            flat = tf.nest.flatten(content, expand_composites=True)
            weights = [self.step.weights[i] for i in self._weights_of(shard.index)]
            parts = [0, *parts_of(self.store, weights, tensors)]
            parts += parts_of(self.store, [each.variable for each in here], changes)
            bundle = shard.bundle(flat, parts, are_rows(content))
            self._sent[shard.index] = Parcel(content, bundle)
            parcels.append(bundle.pack(flat, on))
        return parcels

    def _receive(self, shard: Shard, parcel: Sequence[tf.Tensor]) -> tf.Tensor:
        apply = functools.partial(self._apply, shard)
        return shard.receive(parcel, self._sent[shard.index].unpack, apply)

    def unpacked(self, shard: int, parcel: Sequence[tf.Tensor]) -> Any:
        """(header, tensors, changes) of a shard's parcel."""
        return self._sent[shard].unpack(parcel)

    def _apply(self, shard: Shard, content: Any, staleness: tf.Tensor) -> tf.Tensor | bool:
        if self._peers is not None:
            return self._peers.appending(content)
        header, tensors, changes = content
        worker, _, _, version, steps = tf.unstack(header, 5)
        view = self._views[shard.index]
        view.noted = False
        decoded = [self._codec.decode(view, n, sent) for n, sent in enumerate(tensors)]
        message = Message(worker, version, steps, staleness, decoded)
        changed = self.step.on_shard(shard.index, lambda: self._server.receive(view, message))
        if not view.noted:  # the rule itself writes, and no rows but those it was sent
            view.note_rows(decoded)
        for change, each in zip(changes, self._merged_of(shard.index), strict=True):
            each.apply(change, shard)
        self.step.count_steps(shard.index, steps)
        return changed

    def average_statistics(self, shard: int) -> None:
        """Traces that the moving statistics collected on a shard are averaged."""
        for each in self._merged_of(shard):
            if isinstance(each, Collected):
                each.average()

    def _read(self, shard: Shard, who: tf.Tensor, needed: dict[str, tf.Tensor]) -> list[tf.Tensor]:
        """Everything a worker fetches from one shard, at one moment."""
        mine = self._weights_of(shard.index)
        given = [who, needed]

        def body(flat: Any) -> list[tf.Tensor]:
            who, needed = tf.nest.pack_sequence_as(given, flat)
            worker, name, sequence = tf.unstack(who, 3)
            rows = {
                i: self.row_logs[i].differ(worker, needed.get(str(i)), name != worker)
                for i in mine
                if i in self._by_rows
            }
            view = self._views[shard.index]
            view.fetched_rows, view.for_another = rows, name != worker
            changed = self.step.on_shard(
                shard.index, lambda: self._fetched(shard, view, name, sequence)
            )
            shard.count_version(changed)
            values = [self._answer(view, name, n, i, rows.get(i)) for n, i in enumerate(mine)]
            state = self._read_state[shard.index]
            weights = [self.step.weights[i] for i in mine]
            statistics = [each.variable for each in self._merged_of(shard.index)]
            found = [
                [self._codec.encode_fetched(view, n, v) for n, v in enumerate(values)],
                state.read(worker, name != worker),
                [v.on_shard(shard.index).read_value() for v in statistics],
            ]
            content = [*found, shard.version.read_value()]
            flat = tf.nest.flatten(content, expand_composites=True)
            whose = zip([weights, state.variables, statistics], found, strict=True)
            parts = [part for pair in whose for part in parts_of(self.store, *pair)]
            bundle = shard.bundle(flat, [*parts, 0])
            self._fetched_from[shard.index] = Parcel(content, bundle)
            return bundle.pack(flat)

        return shard.locked(tf.nest.flatten(given), body)

    def _fetched(
        self, shard: Shard, view: ShardView, worker: tf.Tensor, sequence: tf.Tensor
    ) -> tf.Tensor | bool:
        """What a fetch changes on a shard: nothing once a later message came in its name."""
        fetched = functools.partial(self._server.fetched, view, worker)
        if not (self.has_backup_tasks and self._rule_waits):
            return fetched()  # what it remembers is remembered anew before it counts
        return tf.cond(shard.last_message(worker) <= sequence, fetched, lambda: False)

    def _answer(
        self, view: ShardView, worker: tf.Tensor, n: int, i: int, rows: tf.Tensor | None
    ) -> Gradient:
        """What a fetch gives of weight `i`, the shard's `n`-th."""
        if not self.step.weights[i].copied:
            return no_rows(self.step.weights[i])
        answer = self.step.on_shard(view.index, lambda: self._server.answer(view, worker, n))
        if answer is not None:
            return answer
        primary = self.step.weights[i].primary
        if rows is None:
            return primary.read_value()
        shape = tf.constant(primary.shape.as_list())
        return tf.IndexedSlices(primary.sparse_read(rows), rows, shape)

    def _ask(self) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Who fetches: the worker, who that is to the server rule, its last message's number."""
        clock = self.clock.template.read_value()
        needed = {
            i: self.step.on_worker(
                functools.partial(self.algorithm.local.unsent_rows, self.worker_view, i)
            )
            for i in sorted(self._by_rows)
        }
        who = tf.stack([clock[WORKER], clock[WORKER], clock[SEQUENCE]])
        return who, {str(i): tf.cast(r, tf.int64) for i, r in needed.items() if r is not None}

    def _rows_of(self, shard: Shard, rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {i: r for i, r in rows.items() if self.step.weights[int(i)].shard == shard.index}

    def _take(self, parcels: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        clock = self.clock.template.read_value()
        values: list[Any] = [None] * len(self.step.weights)
        merges: list[tuple[Merged, tf.Tensor]] = []
        versions = []
        for shard, parcel in zip(self.shards, parcels, strict=True):
            sent = self._fetched_from[shard.index]
            weights, state, merged_here, version = sent.unpack(parcel, self.step.on_part)
            for i, value in zip(self._weights_of(shard.index), weights, strict=True):
                values[i] = self._codec.decode_fetched(self.worker_view, i, value)
            merges += zip(self._merged_of(shard.index), merged_here, strict=True)
            versions.append(version)
            self._read_state[shard.index].take(state, self.step.on_part)
        self.step.on_worker(lambda: self.algorithm.local.fetched(self.worker_view, values))
        for each, value in merges:
            each.take(value)
        if self.store.counts_fetched:
            total = tf.cast(traffic.bytes_of(list(parcels)), tf.int64)
            self.store.fetched.template.assign(total, read_value=False)
        self.store.set_clock(clock, fetched=tf.stack(versions))
        return versions[0]
