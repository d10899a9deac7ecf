"""A step and an algorithm, traced into the functions that engines call.

    work(n, queue)            worker   n local steps, gradients used by the local rule
    collect() -> message      worker   what is to be sent
    deliver(header, *message) shards   applied at most once, by the server rule
    fetch()                   both     the shards' state into the worker's copies
    fetch_as(worker)          both     the same, to compute that one's message
    push(), exchange()        both     collect + deliver [+ fetch]
    push_as(name)             both     the same, as another worker's message
    flush()                   shards   partial collections, at a drain
    show(), begin_anew()      both     peers: the model that is read outside, at a drain

and where batches are sent to workers in other processes:

    work_on(*batches)         worker   local steps on these batches
    ahead_on(*batches, *message)   both   local steps; meanwhile the shards take a message
    round_on(*batches)        both     fetch + local steps + push, in one call

The last three leave what the chief may want to read with the worker, for `tell`.

Each is traced once, with one worker's variables, and bound to every worker. `Parts` are what they
are made of. An engine names what it may call, by `prepare`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_dsgd import _tf, _tf_order
from tf_dsgd._tf_prepared import fewer_passes
from tf_dsgd.engine import in_a_row
from tf_dsgd.engine.lent import Lent
from tf_dsgd.engine.mail import MailParts
from tf_dsgd.engine.parts import Parts
from tf_dsgd.engine.shard import WITHDRAWN, Shard
from tf_dsgd.engine.state import INCARNATION, Replicated, named, traced
from tf_dsgd.engine.timing import Laps


class Carrier(Protocol):
    """What is called in place of functions of a worker and the shards, where it is several calls.

    As workers in several processes send to one another: `engine.carrier`.
    """

    fetch: Sequence[Any]
    push: Sequence[Any]
    show: Sequence[Any]

    def rounds(self, work: list[_tf.BoundFunction], specs: Sequence[Any]) -> Sequence[Any]:
        """Of each worker a whole round with that work."""

    def begin_anew(self) -> None:
        """At rest, after a model was shown: all workers begin anew with that."""


class Program(Parts):
    """All functions of one step under one algorithm, traced when an engine first needs them."""

    _carrier: Carrier | None = None

    def carried_by(self, carrier: Carrier) -> None:
        """Whole rounds, and what is done at rest, are this one's from now on."""
        self._carrier = carrier

    @functools.cached_property
    def _turns(self) -> dict[tuple[bool, bool, bool], list[_tf.BoundFunction]]:
        return {}

    def prepare(self, *names: str) -> None:
        """Traces these functions now: on the thread, and in the context, of the step.

        An engine names all that it may call. The order does not matter: what a function depends on
        is traced with it.
        """
        for name in names:
            getattr(self, name)

    def _bind(self, fn: Callable[..., Any], *specs: Any) -> list[_tf.BoundFunction]:
        return self.store.bind(traced(fn, *specs))

    def _bind_exchange(self, fn: Callable[..., Any], *specs: Any) -> list[_tf.BoundFunction]:
        """Of what has no step in it; TensorFlow prepares it with fewer passes."""
        return self.store.bind(traced(fn, *specs), fewer_passes)

    # -- a worker's round -------------------------------------------------------------------

    @functools.cached_property
    def work(self) -> list[_tf.BoundFunction]:
        """(steps, queue); keeps the last outputs in `logs`, and adds to the `running` metrics."""

        def work(steps: tf.Tensor, queue: tf.Tensor) -> None:
            before = self.running.state()
            outputs = self._work(steps, lambda _: self.step.take_batch(queue))
            self.running.add(before)
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
        """(*packed batches)."""
        return self._bind(self._work_on, *self.step.packing.specs)

    def _work_on(self, *packed: tf.Tensor) -> None:
        self._work_there(*self.step.packing.unpack(packed))

    @functools.cached_property
    def work_from(self) -> list[_tf.BoundFunction]:
        """(iterator, steps); on batches of an iterator on the worker."""
        return self._bind(self._work_from, *self._iterator_specs)

    def _work_from(self, iterator: Any, steps: tf.Tensor) -> None:
        self._work_there(steps, lambda _: iterator.get_next())

    def _work_there(self, steps: tf.Tensor, batch: Callable[[tf.Tensor], Any]) -> None:
        """Local steps on a worker in another process; keeps what the chief may want to read.

        It is kept there, as a call that gave it would tell the chief of it, and the chief the
        worker that it is not used, each time.
        """
        before = self.running.state()
        outputs = self._work(steps, batch)
        told = self._outputs.pack([*outputs, *self.running.worker_total(before)])
        for kept, value in zip(self._told, told, strict=True):
            kept.template.assign(value, read_value=False)

    @functools.cached_property
    def tell(self) -> list[_tf.BoundFunction]:
        """() -> what a worker in another process has kept, for `unbundle`."""
        return self._bind(lambda: [kept.template.read_value() for kept in self._told])

    @functools.cached_property
    def _told(self) -> list[Replicated]:
        return [
            self.store.cell(
                ("told", k, spec.dtype.name, str(spec.shape)),
                functools.partial(self._kept_there, spec),
            )
            for k, spec in enumerate(self._outputs.sent)
        ]

    def _kept_there(self, spec: tf.TensorSpec) -> Replicated:
        def first(_: int) -> tf.Tensor:
            return tf.zeros([d or 0 for d in spec.shape.as_list()], spec.dtype)

        return self.store.replicate(first, dtype=spec.dtype, shape=spec.shape, name="told")

    @property
    def _iterator_specs(self) -> list[Any]:
        return [tf.data.IteratorSpec(self.step.element_spec), tf.TensorSpec([], tf.int32)]

    @functools.cached_property
    def round_on(self) -> Sequence[Any]:
        """(*packed batches); fetches before, and pushes after."""
        return self._bind_round(self.work_on, self._work_on, self.step.packing.specs)

    @functools.cached_property
    def round_from(self) -> Sequence[Any]:
        """(iterator, steps); fetches before, and pushes after."""
        return self._bind_round(self.work_from, self._work_from, self._iterator_specs)

    def _bind_round(
        self, work: list[_tf.BoundFunction], trace: Callable[..., None], specs: Sequence[Any]
    ) -> Sequence[Any]:
        """Of each worker a whole round with that work, which `trace` traces into another."""
        if self._carrier is not None:
            return self._carrier.rounds(work, specs)

        def whole_round(*inputs: Any) -> None:
            # On the worker from the first: what a function is given, it takes when it begins.
            inputs = tuple(_here(value) for value in inputs)
            self._round(lambda: trace(*inputs))

        return self._bind(whole_round, *specs)

    def _round(self, work: Callable[[], None]) -> list[tf.Operation]:
        """Traces a whole round with that work; gives the operation of each shard's message."""
        laps = Laps()
        parcels, fetches = self.asked()
        self.taking(parcels)
        laps.lap()
        # Not called, as it reads rows of split tables on their shards: those would have to be
        # told of its beginning and its end.
        _, worked = _tf_order.traced(work)
        # Or a row could miss an update that the fetch, which waits for the lock, counts as known.
        _tf_order.begin_after_there(fetches, worked)
        laps.lap()
        sent = self.delivery_of_fetched()
        laps.add_to(self.store.laps.template)
        return sent

    @functools.cached_property
    def rounds_a_call(self) -> int:
        """Rounds of one mini-batch each that `rounds_on` and `rounds_from` make in one call."""
        few = len(self.one_step.graph.get_operations()) <= in_a_row.MOST_OPERATIONS
        whole = self.store.num_parts == 1 and self._carrier is None
        return in_a_row.ROUNDS if few and whole else 1

    @functools.cached_property
    def rounds_on(self) -> list[_tf.BoundFunction]:
        """(*packed batches, `rounds_a_call` of them); a whole round on each."""

        def rounds(*packed: tf.Tensor) -> None:
            packed = tuple(_here(value) for value in packed)
            _, batch = self.step.packing.unpack(packed)
            self._rounds_in_a_row(batch)

        return self._bind(rounds, *self.step.packing.specs)

    @functools.cached_property
    def rounds_from(self) -> list[_tf.BoundFunction]:
        """(iterator, steps); a whole round on each of its next `rounds_a_call` batches."""

        def rounds(iterator: Any, _: tf.Tensor) -> None:
            self._rounds_in_a_row(lambda k: iterator.get_next())

        return self._bind(rounds, *self._iterator_specs)

    def _rounds_in_a_row(self, batch: Callable[[tf.Tensor], Any]) -> None:
        """Not in a loop, each of whose iterations would have to be told of to all processes."""

        def work(k: int) -> None:
            self._work_there(tf.constant(1), lambda _: batch(tf.constant(k)))

        before: list[tf.Operation] = []
        for k in range(self.rounds_a_call):
            round_of_k = functools.partial(self._round, functools.partial(work, k))
            sent, made = _tf_order.traced(round_of_k)
            # Which TensorFlow does not know to be of its variables.
            _tf_order.begin_after_there(before, made)
            before = sent

    @functools.cached_property
    def ahead_on(self) -> list[_tf.BoundFunction]:
        """(*packed batches, *message); a message travels meanwhile."""
        return self._bind_ahead(self.work_on, self.step.packing.specs)

    @functools.cached_property
    def ahead_from(self) -> list[_tf.BoundFunction]:
        """(iterator, steps, *message); a message travels meanwhile."""
        return self._bind_ahead(self.work_from, self._iterator_specs)

    def _bind_ahead(
        self, work: list[_tf.BoundFunction], specs: Sequence[Any]
    ) -> list[_tf.BoundFunction]:
        """Local steps, and the delivery of what was collected before them, at the same time.

        The two share no variable, so that TensorFlow does not order them; but for tables of which
        workers have no copy, where it does, and one waits for the other.
        """

        def ahead(*inputs: Any) -> None:
            self._take_in(inputs[len(specs) :])
            work[0].traced(*inputs[: len(specs)])

        return self._bind(ahead, *specs, *self._message_specs)

    def unbundle(self, told: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """(outputs of a step, the worker's running metrics), of what `tell` gave.

        Call it on the host.
        """
        values = self._outputs.unpack(told)
        number = len(self.step.outputs)
        return values[:number], values[number:]

    @functools.cached_property
    def collect(self) -> list[_tf.BoundFunction]:
        """() -> (headers, message)."""
        return self.store.bind(self.collection, fewer_passes)

    @functools.cached_property
    def fetch(self) -> Sequence[Any]:
        """() -> version."""
        if self._carrier is not None:
            return self._carrier.fetch
        return self._bind_exchange(self.fetching)

    @functools.cached_property
    def fetch_as(self) -> list[_tf.BoundFunction]:
        """(another worker) -> version; to the server rule it is that one who fetches."""
        return self._bind_exchange(self.fetching, tf.TensorSpec([], tf.int64))

    def turn(self, fetches: bool, sends: bool, arrived: bool = False) -> list[_tf.BoundFunction]:
        """(steps, queue) -> (version fetched, headers, message): a round but for its delivery.

        Without a fetch the version is -1; without sending there is nothing behind it. With
        `arrived` it is (steps, queue, *message): before, the shards take a message of any worker.
        """
        key = fetches, sends, arrived
        if key not in self._turns:
            work = self.work[0].traced
            fetch = self.fetch[0].traced if fetches else lambda: tf.constant(-1, tf.int64)
            collect = self.collection if sends else lambda: ()

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
        parts = tf.nest.flatten(self.collection.structured_outputs, expand_composites=True)
        return [tf.TensorSpec(part.shape, part.dtype) for part in parts]

    def _take_in(self, message: Sequence[tf.Tensor]) -> tf.Tensor:
        """Delivers, in another function's trace, what `collect` gave, flat."""
        collected = self.collection.structured_outputs
        packed = tf.nest.pack_sequence_as(collected, list(message), expand_composites=True)
        return self.delivery(*packed)

    # -- messages ---------------------------------------------------------------------------

    @functools.cached_property
    def push(self) -> Sequence[Any]:
        """(valid) -> whether the message was applied; one that is not valid is refused."""
        if self._carrier is not None:
            return self._carrier.push

        def push(valid: tf.Tensor) -> tf.Tensor:
            heads, message = self.collection()
            for s, head in enumerate(heads):
                incarnation = tf.where(valid, head[INCARNATION], WITHDRAWN)
                heads[s] = tf.stack([head[0], incarnation, *tf.unstack(head[2:], 3)])
            return self.delivery(heads, message)

        return self._bind_exchange(push, tf.TensorSpec([], tf.bool))

    @functools.cached_property
    def push_as(self) -> list[_tf.BoundFunction]:
        """(name) -> whether the message was applied; it goes in another's name, see `Again`."""

        def push_as(name: tf.Tensor) -> tf.Tensor:
            heads, message = self.collection()
            return self.delivery(named(heads, name), message)

        return self._bind_exchange(push_as, tf.TensorSpec([3], tf.int64))

    @functools.cached_property
    def exchange(self) -> list[_tf.BoundFunction]:
        """() -> (version fetched, the moment between them); a push and at once a fetch."""

        def exchange() -> tuple[tf.Tensor, tf.Tensor]:
            laps = Laps()
            self.delivery(*self.collection())
            pushed = laps.lap()
            return self.fetching(), pushed

        return self._bind_exchange(exchange)

    @functools.cached_property
    def deliver(self) -> Callable[..., tf.Tensor]:
        """(headers, message) -> whether the message was applied."""
        return self._on_shards(range(len(self.shards)))

    def _on_shards(self, shards: Sequence[int]) -> Callable[..., tf.Tensor]:
        deliver = functools.partial(self._delivery_to, shards)
        concrete = tf.function(deliver, autograph=False).get_concrete_function(
            *self.collection.structured_outputs
        )
        bound = _tf.BoundFunction(concrete, concrete.captured_inputs, fewer_passes)
        return lambda heads, message: bound(
            *tf.nest.flatten([heads, message], expand_composites=True)
        )

    @functools.cached_property
    def _partial(self) -> dict[tuple[int, ...], Callable[..., tf.Tensor]]:
        return {}

    def deliver_to(self, shards: tuple[int, ...]) -> Callable[..., tf.Tensor]:
        """`deliver` to these shards alone, as where the sender ends half-way."""
        if shards not in self._partial:
            self._partial[shards] = self._on_shards(shards)
        return self._partial[shards]

    @functools.cached_property
    def flush(self) -> Callable[[], Any] | None:
        """Uses partial collections; None where the server rule has none."""
        if self.algorithm.between_peers is not None:
            return None
        collects = []

        def flush_shard(shard: Shard) -> tf.Tensor:
            changed = self.step.on_shard(
                shard.index, lambda: self._server.flush(self._views[shard.index])
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
        return _tf.BoundFunction(concrete, concrete.captured_inputs, fewer_passes)

    def on_shards(
        self,
        function: Callable[..., Any],
        *specs: tf.TensorSpec,
        only: int | None = None,
        new_version: bool = False,
    ) -> _tf.BoundFunction:
        """A rule's `function(shard, *arguments)` on every shard, or one: for each what it gives.

        It runs under the shard's lock. A coordinator calls it at rest.
        """

        def on_one(shard: Shard, arrived: Sequence[tf.Tensor]) -> Any:
            view = self._views[shard.index]
            result = self.step.on_shard(shard.index, lambda: function(view, *arrived))
            if new_version:
                shard.count_version(True)
            return result

        def on_all(*arguments: tf.Tensor) -> list[Any]:
            return [
                shard.locked(list(arguments), functools.partial(on_one, shard))
                for shard in self.shards
                if only in (None, shard.index)
            ]

        concrete = tf.function(on_all, autograph=False).get_concrete_function(*specs)
        return _tf.BoundFunction(concrete, concrete.captured_inputs)

    # -- at rest ----------------------------------------------------------------------------

    @functools.cached_property
    def lent(self) -> Lent:
        """Metrics that are the chief's at rest."""
        variables: list[Any] = []
        if self.shards[0].remote:  # and else everything is in this process
            state = [*(each.variable for each in self.merged), *self.read_by_workers]
            variables = [v for v in state if v.lent]
        return Lent(variables, [shard.device for shard in self.shards])

    # -- where workers send to one another --------------------------------------------------

    @functools.cached_property
    def mail(self) -> MailParts | None:
        """What such workers' rounds are made of where they are processes; None where not."""
        rule = self.algorithm.between_peers
        if rule is None or not self.shards[0].remote:
            return None
        return MailParts(self, rule, self._bind)

    @functools.cached_property
    def show(self) -> Sequence[Any] | None:
        """() -> nothing; the worker's model is what is read outside. None where shards have it."""
        if self._carrier is not None:
            return self._carrier.show
        return None if self._peers is None else self._bind(self._peers.showing)

    @functools.cached_property
    def begin_anew(self) -> Callable[[], Any] | None:
        """At rest, after `show`: all workers begin anew with that."""
        if self._carrier is not None:
            return self._carrier.begin_anew
        return None if self._peers is None else self._peers.resting()

    def forget_fetched(self, variable: Any = None) -> None:
        """After a table or a frozen layer was assigned from outside, or all were: fetched whole."""
        for i, log in self.row_logs.items():
            if variable is None or self.step.weights[i] is variable:
                log.forget()
        for state in self.__dict__.get("_read_state", ()):  # else nobody has fetched
            state.forget(variable)


def _here(value: Any) -> Any:
    """The value where the function runs, if it is a tensor and came from elsewhere."""
    plain = isinstance(value, tf.Tensor) and value.dtype != tf.resource
    return tf.identity(value) if plain else value
