"""A step and an algorithm, traced into the functions that engines call.

    work(n, queue)            worker   n local steps, gradients used by the local rule
    collect() -> message      worker   what is to be sent
    deliver(header, *message) shard    applied at most once, by the server rule
    fetch()                   both     the shard's state into the worker's copies
    push(), exchange()        both     collect + deliver [+ fetch], where both share memory
    flush()                   shard    partial collections, at a drain

Each is traced once, with the first worker's variables, and bound to every worker. `deliver`,
`fetch`, `push`, `exchange` and `flush` run under the shard's lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithm import Algorithm, Message
from tf_dsgd.arithmetic import Gradient
from tf_dsgd.engine.rows import RowLog
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.state import (
    CLOCK_LENGTH,
    FETCHED,
    INCARNATION,
    SEQUENCE,
    STEPS,
    VERSION,
    WORKER,
    Replicated,
    Store,
)


class Step(Protocol):
    """A user's step as an engine needs it: traced for a worker, with its weights and state."""

    function: Any
    """Concrete function: a batch to (outputs, gradients)."""
    outputs: list[tf.TensorSpec]
    weights: list[Any]
    """Variables with `.primary` and `.on_workers()`, in the order of the gradients."""
    sparse: list[bool]
    slots: list[Any]
    """What the optimizer keeps on the worker, if it runs there."""

    def take_batch(self, queue: tf.Tensor) -> Any:
        """The next batch of a queue."""

    def rate(self, index: int) -> tf.Tensor:
        """The optimizer's rate for weight `index`, traced for the side that is open."""

    def local_gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Gradients fit for a local step."""

    def optimize(self, gradients: Sequence[Gradient], scale: Any) -> None:
        """The compiled optimizer's update, traced on the shard."""

    def count_update(self) -> None:
        """Counts an update that `optimize` did not make."""

    def on_worker(self, fn: Callable[[], Any]) -> Any:
        """Runs `fn` while variables resolve to a worker's copies."""

    def on_shard(self, fn: Callable[[], Any]) -> Any:
        """Runs `fn` while variables resolve to their primaries."""

    def rewrites(self, variable: Any) -> bool:
        """Whether the traced update writes more of `variable` than the rows it was sent."""

    def fetched_state(self) -> list[Any]:
        """Other variables that a fetch copies."""

    def averaged_state(self) -> list[Any]:
        """Moving statistics and counts that workers change."""


class _WorkerView:
    """`algorithm.Worker` while the first worker's functions are traced."""

    def __init__(self, program: Program):
        self._program = program
        self.weights = [v.on_workers().template for v in program.step.weights]
        self.slots = [v.on_workers().template for v in program.step.slots]

    def cell(
        self,
        name: str,
        index: int,
        *,
        shape: Any = None,
        dtype: Any = None,
        copy_weight: bool = False,
    ) -> tf.Variable:
        weight = self._program.step.weights[index]
        shape = weight.shape if shape is None else tf.TensorShape(shape)
        dtype = dtype or weight.dtype

        def make() -> Replicated:
            if copy_weight:
                copies = weight.on_workers().copies
                return self._program.store.replicate(
                    lambda m: copies[m].read_value(), dtype=dtype, shape=shape, name=name
                )
            zeros = np.zeros([d or 0 for d in shape.as_list()], tf.as_dtype(dtype).as_numpy_dtype)
            return self._program.store.replicate(
                lambda _: zeros, dtype=dtype, shape=shape, name=name
            )

        return self._program.store.cell((name, _tf.unique_id(weight), dtype), make).template

    def is_sparse(self, index: int) -> bool:
        return self._program.step.sparse[index]

    def rate(self, index: int) -> tf.Tensor:
        return self._program.step.rate(index)

    def local_gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        return self._program.step.local_gradients(gradients)


class _ShardView:
    """`algorithm.Shard` while a shard's function is traced."""

    def __init__(self, program: Program):
        self._program = program
        self.weights = [v.primary for v in program.step.weights]
        self.num_workers = program.store.num_workers

    @property
    def version(self) -> tf.Tensor:
        return self._program.shard.version.read_value()

    def cell(
        self,
        name: str,
        index: int,
        *,
        shape: Any = None,
        dtype: Any = None,
        per_worker: bool = False,
    ) -> tf.Variable:
        weight = self._program.step.weights[index]
        shape = weight.shape.as_list() if shape is None else list(shape)
        return self._program.shard_cell(
            (name, _tf.unique_id(weight)),
            [self.num_workers] * per_worker + shape,
            dtype or weight.dtype,
        )

    def counter(self, name: str) -> tf.Variable:
        return self._program.shard_cell((name, "counter"), [], tf.int64)

    def optimize(self, gradients: Sequence[Gradient], scale: Any = 1.0) -> None:
        self._program.step.optimize(gradients, scale)

    def count_update(self) -> None:
        self._program.step.count_update()


class Program:
    """All functions of one step under one algorithm."""

    def __init__(
        self, step: Step, algorithm: Algorithm, store: Store, shard: Shard, device: str | None
    ):
        self.step = step
        self.algorithm = algorithm
        self.store = store
        self.shard = shard
        self._device = device
        self._shard_cells: dict[Any, tf.Variable] = {}
        self._delivery_traced = False
        self._worker = _WorkerView(self)
        self._shard_view = _ShardView(self)
        self.clock = store.clock
        self.logs = [
            _tf.make_variable(
                functools.partial(tf.zeros, [d or 0 for d in spec.shape.as_list()], spec.dtype),
                device=device,
                dtype=spec.dtype,
                shape=spec.shape,
                name="log",
            )
            for spec in step.outputs
        ]
        self.work = self._bind(
            self._work, tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource)
        )
        self._base = [
            store.cell(
                ("base", _tf.unique_id(v)),
                functools.partial(self._copies_of, v),
            )
            for v in step.averaged_state()
        ]
        self.row_logs = {
            i: RowLog(v.primary, store.num_workers, device)
            for i, v in enumerate(step.weights)
            if step.sparse[i]
        }

    def _copies_of(self, variable: Any) -> Replicated:
        copies = variable.on_workers().copies
        return self.store.replicate(
            lambda m: copies[m].read_value(), dtype=variable.dtype, name="base"
        )

    def shard_cell(self, key: Any, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        """Memory of the shard, zero at first."""
        if key not in self._shard_cells:
            with tf.init_scope():
                self._shard_cells[key] = _tf.make_variable(
                    tf.zeros(shape, dtype), device=self._device, name=str(key[0])
                )
        return self._shard_cells[key]

    def _bind(self, fn: Callable[..., Any], *specs: Any) -> list[_tf.BoundFunction]:
        return self.store.bind(tf.function(fn, autograph=False).get_concrete_function(*specs))

    # -- worker -----------------------------------------------------------------------------

    def _one_step(self, queue: tf.Tensor) -> list[tf.Tensor]:
        outputs, gradients = self.step.function(self.step.take_batch(queue))
        self.step.on_worker(lambda: self.algorithm.local.step(self._worker, gradients))
        return outputs

    def _work(self, steps: tf.Tensor, queue: tf.Tensor) -> None:
        exchange = self.algorithm.exchange
        if exchange.push_every == 1 or exchange.fetch_every == 1:
            outputs = self._one_step(queue)
        else:
            first = [
                tf.zeros([d or 0 for d in spec.shape.as_list()], spec.dtype)
                for spec in self.step.outputs
            ]
            _, outputs = tf.while_loop(
                lambda k, _: k < steps,
                lambda k, _: (k + 1, self._one_step(queue)),
                (tf.constant(0), first),
                shape_invariants=(tf.TensorShape([]), [s.shape for s in self.step.outputs]),
                parallel_iterations=1,
            )
        for variable, value in zip(self.logs, outputs, strict=True):
            variable.assign(value, read_value=False)
        clock = self.clock.template.read_value()
        version = tf.where(clock[STEPS] == 0, clock[FETCHED], clock[VERSION])
        self._set_clock(clock, {VERSION: version, STEPS: clock[STEPS] + tf.cast(steps, tf.int64)})

    def _set_clock(self, clock: tf.Tensor, changes: dict[int, tf.Tensor]) -> tf.Tensor:
        clock = tf.stack([changes.get(i, clock[i]) for i in range(CLOCK_LENGTH)])
        self.clock.template.assign(clock, read_value=False)
        return clock

    def _collect(self) -> tuple[tf.Tensor, list[Gradient]]:
        message = self.step.on_worker(lambda: self.algorithm.local.message(self._worker))
        for variable, base in zip(self.step.averaged_state(), self._base, strict=True):
            now = tf.identity(variable.on_workers().template.read_value())
            additive = now.dtype.is_floating or now.dtype.is_integer
            message.append(now - base.template.read_value() if additive else now)
            base.template.assign(now, read_value=False)
        clock = self.clock.template.read_value()
        header = tf.stack(
            [clock[WORKER], clock[INCARNATION], clock[SEQUENCE] + 1, clock[VERSION], clock[STEPS]]
        )
        self._set_clock(clock, {SEQUENCE: clock[SEQUENCE] + 1, STEPS: tf.zeros([], tf.int64)})
        return header, message

    # -- shard ------------------------------------------------------------------------------

    def _deliver(self, header: tf.Tensor, message: Sequence[Gradient]) -> tf.Tensor:
        self._delivery_traced = True
        count = len(message) - len(self.step.averaged_state())
        tensors, changes = message[:count], message[count:]

        def apply(staleness: tf.Tensor) -> tf.Tensor | bool:
            changed = self.step.on_shard(
                lambda: self.algorithm.server.receive(
                    self._shard_view,
                    Message(header[WORKER], header[VERSION], header[STEPS], staleness, tensors),
                )
            )
            for i, log in self.row_logs.items():
                log.note(tensors[i].indices)
            for variable, change in zip(self.step.averaged_state(), changes, strict=True):
                if change.dtype.is_floating:
                    # Workers' sums would diverge (11 workers, period 20): average instead.
                    variable.primary.assign_add(change / self.store.num_workers, read_value=False)
                elif change.dtype.is_integer:
                    variable.primary.assign_add(change, read_value=False)
                else:
                    variable.primary.assign(change, read_value=False)
            return changed

        return self.shard.receive(header, apply)

    def _fetched_values(self, worker: tf.Tensor) -> list[Gradient]:
        values: list[Gradient] = []
        for i, variable in enumerate(self.step.weights):
            if i not in self.row_logs or self.step.rewrites(variable):
                values.append(variable.primary.read_value())
                continue
            changed, whole = self.row_logs[i].changed(worker)
            unsent = self.step.on_worker(
                functools.partial(self.algorithm.local.unsent_rows, self._worker, i)
            )
            if unsent is not None:
                changed = tf.unique(tf.concat([changed, tf.cast(unsent, tf.int64)], 0))[0]
            shape = variable.primary.shape.as_list()
            rows = tf.cond(
                whole, lambda n=shape[0]: tf.range(n, dtype=tf.int64), lambda c=changed: c
            )
            values.append(
                tf.IndexedSlices(variable.primary.sparse_read(rows), rows, tf.constant(shape))
            )
        return values

    def _fetch(self) -> tf.Tensor:
        clock = self.clock.template.read_value()
        worker = clock[WORKER]
        values = self._fetched_values(worker)
        extras = self.step.on_shard(lambda: self.algorithm.server.fetched(self._shard_view, worker))
        self.step.on_worker(lambda: self.algorithm.local.fetched(self._worker, values, extras))
        for variable in self.step.fetched_state():
            variable.on_workers().template.assign(variable.primary.read_value(), read_value=False)
        for variable, base in zip(self.step.averaged_state(), self._base, strict=True):
            value, copy = variable.primary.read_value(), variable.on_workers().template
            if value.dtype.is_floating or value.dtype.is_integer:
                copy.assign(value + (copy.read_value() - base.template.read_value()))
            else:
                copy.assign(value)
            base.template.assign(value, read_value=False)
        version = self.shard.version.read_value()
        self._set_clock(clock, {FETCHED: version})
        return version

    # -- bound functions, traced when an engine first needs them ----------------------------

    @functools.cached_property
    def collect(self) -> list[_tf.BoundFunction]:
        """() -> (header, message)."""
        return self._bind(self._collect)

    @functools.cached_property
    def fetch(self) -> list[_tf.BoundFunction]:
        """() -> version."""
        if self.row_logs and not self._delivery_traced:
            _ = self.deliver  # which shows whether an update writes only the rows it was sent
        return self._bind(self._fetch)

    @functools.cached_property
    def push(self) -> list[_tf.BoundFunction]:
        """(valid) -> whether the message was applied; one that is not valid is refused."""

        def push(valid: tf.Tensor) -> tf.Tensor:
            header, message = self._collect()
            incarnation = tf.where(valid, header[INCARNATION], -1)
            header = tf.stack([header[0], incarnation, *tf.unstack(header[2:], 3)])
            return self._deliver(header, message)

        return self._bind(push, tf.TensorSpec([], tf.bool))

    @functools.cached_property
    def exchange(self) -> list[_tf.BoundFunction]:
        """() -> version; a push and at once a fetch."""

        def exchange() -> tf.Tensor:
            self._deliver(*self._collect())
            return self._fetch()

        return self._bind(exchange)

    @functools.cached_property
    def deliver(self) -> Callable[..., tf.Tensor]:
        """(header, *message components) -> whether the message was applied."""
        header, message = self.collect[0].outputs
        concrete = tf.function(self._deliver, autograph=False).get_concrete_function(
            header, message
        )
        bound = _tf.BoundFunction(concrete, concrete.captured_inputs)
        return lambda header, message: bound(
            header, *tf.nest.flatten(message, expand_composites=True)
        )

    @functools.cached_property
    def flush(self) -> Callable[[], Any] | None:
        """Uses partial collections; None where the server rule has none."""

        def flush() -> tf.Tensor | None:
            changed = self.step.on_shard(lambda: self.algorithm.server.flush(self._shard_view))
            if changed is not None:
                self.shard.version.assign_add(tf.cast(changed, tf.int64))
            return changed

        concrete = tf.function(flush, autograph=False).get_concrete_function()
        if concrete.structured_outputs is None:
            return None
        return _tf.BoundFunction(concrete, concrete.captured_inputs)

    def forget_rows(self) -> None:
        """After tables were assigned from outside: workers fetch them whole."""
        for log in self.row_logs.values():
            log.forget()
