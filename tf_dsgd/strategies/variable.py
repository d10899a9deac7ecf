"""A strategy's variable: a primary on one shard, and a copy on each worker that uses it.

What becomes of each kind of state:

`WEIGHT`, trainable weights: a worker has a copy; a fetch overwrites it; the algorithm decides what
a push does; outside, the primary is read.

`STATISTIC`, BatchNorm's moving statistics and other state of layers: a worker has a copy; a fetch
brings the primary's value; outside, the primary is read. A push has each of the worker's
mini-batches count in BatchNorm's statistics as it would in one process (`engine.statistics`). To
other floats it adds the mean over workers of their changes, which lags with their number, and to
integers the sum.

`SEED`, state of seed generators (`keras.random.SeedGenerator`, `tf.random.Generator`): each worker
has its own and keeps it; outside, worker 0's is read.

`OWN`, a variable of the user's, made with `synchronization=ON_READ` and
`aggregation=ONLY_FIRST_REPLICA`: each worker has its own and keeps it, and nothing of it travels;
outside, worker 0's is read, or all by `strategy.experimental_local_results`. A worker that comes
back begins with the value that the variable was made with, or was last assigned outside.

`METRIC`, sums and counts of metrics: each worker has its own and keeps it; outside, the sum is
read. Where workers can be lost, their changes travel with their messages instead, and a fetch
brings the sum, so that what a lost worker had sent counts, and nothing else of it. Where shards are
other processes, too, the primary is the chief's, and *lent* to a shard while workers work
(`engine.lent`).

`SLOT`, momenta and the like: a worker has its own only if it runs the optimizer; then the mean over
workers is read outside, else the primary.

`CONTROL`, an optimizer's scalars (rate, counters, loss scale): every shard has its own and changes
it by its own updates; a fetch brings the first shard's; outside, that is read at once, and an
assignment changes all.

Everything read outside a worker waits for the work under way, except `CONTROL`.
"""

from __future__ import annotations

import enum
import functools
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf, _tf_random
from tf_dsgd.engine import interrupts
from tf_dsgd.engine.bundles import is_small
from tf_dsgd.engine.state import Replicated
from tf_dsgd.strategies.snapshots import Snapshots
from tf_dsgd.strategies.tracing import check_distributed, current_trace
from tf_dsgd.strategies.uncopied import NoCopy


class Kind(enum.Enum):
    """How a variable is treated; see the table above."""

    WEIGHT = enum.auto()
    STATISTIC = enum.auto()
    SEED = enum.auto()
    OWN = enum.auto()
    METRIC = enum.auto()
    SLOT = enum.auto()
    CONTROL = enum.auto()


class ReplicaVariable(_tf.BaseResourceVariable):
    """A variable created in a strategy's scope.

    While a worker's step is traced it is the worker's copy; while a shard's function is traced,
    or anywhere else, it is the primary.
    """

    copied = True
    """Whether workers have copies, which a fetch brings up to date; see `tables.Part`."""

    def __init__(
        self,
        strategy: Any,
        primary: tf.Variable,
        kind: Kind,
        shard: int = 0,
        lent: bool = False,
    ):
        super().__init__(
            trainable=primary.trainable,
            shape=primary.shape,
            dtype=primary.dtype,
            handle=primary.handle,
            synchronization=primary.synchronization,
            aggregation=primary.aggregation,
            distribute_strategy=strategy,
            handle_name=_tf.handle_name(primary),
            unique_id=_tf.unique_id(primary),
            in_graph_mode=False,
        )
        self.distribute_strategy = strategy
        self.primary = primary
        self.kind = kind
        self.shard = shard
        self.averaged = kind is Kind.STATISTIC
        large = primary.shape.rank and not is_small(primary)
        self.may_rest = bool(large) and kind in (Kind.WEIGHT, Kind.STATISTIC)
        """Whether, frozen, it is fetched only where it was written since."""
        self.copied = kind is not Kind.WEIGHT or not strategy.algorithm.local.shares_weights
        self.layer: Any = None
        """The BatchNormalization whose moving statistic it is."""
        self.copies: Replicated | None = None
        self.part: int | None = None
        """On which part of a worker its copy is; None until that is known."""
        self.beside: Any = None
        """Of an optimizer's slot: the weight that it is of."""
        self.first: Any = None
        """Of an optimizer's variable, where it runs on workers: what it was created with."""
        self._restored: np.ndarray | None = None
        """What workers' copies begin with, where that came from a checkpoint."""
        self._snapshots: Snapshots | None = None
        self.lent = lent
        """Whether the primary is the chief's, and a shard has another one while workers work."""
        self.known_there: np.ndarray | None = None
        """Of one that is lent: what its shard has at rest, if that is known."""
        self._on_shards: dict[int, tf.Variable] = {} if lent else {shard: primary}
        self._workers_can_leave = strategy.cluster.workers_can_leave
        self.owned_by_workers = kind in (Kind.SEED, Kind.OWN) or (
            kind is Kind.METRIC and not self._workers_can_leave
        )
        self.kept_by_workers = False
        """Whether a fetch does not overwrite the workers' copies: an assignment has to."""
        self.no_copy = False
        """Whether workers read it without the copy that TensorFlow makes once rows were written."""
        self.hinted = False
        """Whether it was said that each update takes all its rows."""

    # -- where it is ------------------------------------------------------------------------

    @property
    def handle(self) -> tf.Tensor:
        """The resource that operations now being traced or run act on."""
        trace = current_trace()
        if trace is None:
            if tf.executing_eagerly() and self.kind is not Kind.CONTROL:
                self.distribute_strategy.settle()
            return self.primary.handle
        trace.touched[id(self)] = self
        if trace.side == "shard":
            return self.on_shard(trace.shard).handle
        if trace.side == "chief" or not self.copied:
            return self.primary.handle
        return self.on_workers().template.handle

    @property
    def device(self) -> str:
        """Where the primary is."""
        return self.primary.device

    def is_on(self, shard: int) -> bool:
        """Whether its primary is on that shard."""
        return shard == self.shard

    def on_shard(self, shard: int) -> tf.Variable:
        """What a shard has of it: the primary; its own, if it is lent or an optimizer's scalar."""
        own = self.kind is Kind.CONTROL or (self.lent and shard == self.shard)
        if own and shard not in self._on_shards:
            device = self.distribute_strategy.shard_devices[shard]
            with tf.init_scope():
                self._on_shards[shard] = _tf.make_variable(
                    self.primary.read_value(), device=device, name=_tf.handle_name(self.primary)
                )
        return self._on_shards.get(shard, self.primary)

    def on_workers(self) -> Any:
        """The workers' copies, created when first asked for; a `NoCopy` where they have none."""
        if not self.copied:
            return NoCopy(self.primary, self.primary.name)
        if self.copies is None:
            store = self.distribute_strategy.engine.store
            with tf.init_scope(), tf.name_scope(""):  # or of the layer that is traced
                first = [self.primary.numpy()]  # read once for all workers that are there now
                this = weakref.ref(self)  # what workers have of it does not keep it

                def value(m: int) -> Any:
                    variable = this()
                    if variable is None:  # nobody has it any more, and `forget` follows
                        return tf.zeros(shape, dtype)
                    return variable.begins(m, first[0] if first else None)

                shape, dtype = first[0].shape, self.dtype
                self.part = self._part_of_copies()
                where = {"name": _tf.handle_name(self.primary), "part": self.part}  # errors name it
                owner = _tf.unique_id(self)
                self.copies = store.replicate(value, dtype=dtype, owner=owner, **where)
                first.clear()
        return self.copies

    def begins(self, worker: int, value: np.ndarray | None) -> np.ndarray:
        """What a worker's copy begins with, where the primary has that value, or is to be asked."""
        incarnation = self.distribute_strategy.engine.store.incarnations[worker]
        if self._restored is not None and incarnation == 0:
            return self._restored[worker]
        now = self.primary.numpy() if value is None else value
        return _initial(now, self.kind, self.owned_by_workers, worker, incarnation)

    def _part_of_copies(self) -> int:
        """That of its layer, of the layer that is traced, or, of a slot, of its weight."""
        if self.part is not None:
            return self.part
        if isinstance(self.beside, ReplicaVariable):
            return self.beside.on_workers().part
        trace = current_trace()
        return 0 if trace is None or trace.part is None else trace.part

    @property
    def momentum(self) -> float | None:
        """Of a moving statistic: how much of it an assignment keeps."""
        momentum = getattr(self.layer, "momentum", None)
        return float(momentum) if momentum is not None and 0.0 <= momentum <= 1.0 else None

    @property
    def times(self) -> Replicated:
        """How often each worker assigned it since it sent it; of a moving statistic."""
        store = self.distribute_strategy.engine.store
        key = "times", _tf.unique_id(self.primary)
        where = {"dtype": tf.int64, "name": "times", "part": self.on_workers().part}
        return store.cell(key, lambda: store.replicate(lambda _: np.int64(0), **where))

    def at_rest_on(self, shard: int) -> tf.Variable:
        """What at rest is a shard's value of it."""
        return self.primary if self.lent else self.on_shard(shard)

    @functools.cached_property
    def edition(self) -> tf.Variable:
        """Counts what functions of the caller's write to it, for those who fetch what is new."""
        with tf.init_scope():
            return _tf.make_variable(np.int64(0), device=self.primary.device, name="edition")

    def restore_copies(self, values: np.ndarray) -> None:
        """Sets the workers' copies to `values[m]`, or has them begin so."""
        self._restored = values
        if self.copies is not None:
            self.copies.each(lambda m, copy: copy.assign(values[m]))

    def of_workers(self) -> np.ndarray | None:
        """What each worker has of its own, `[workers, ...]`; None where they keep nothing."""
        if self.copies is None:
            return self._restored
        if not (self.owned_by_workers or self.kept_by_workers):
            return None
        found, first = self.copies.read(), self.primary.numpy()
        incarnations = self.distribute_strategy.engine.store.incarnations

        def of(m: int) -> np.ndarray:
            if m in found:
                return found[m]
            # One that is not there: as it will begin when it comes back.
            after = incarnations[m] + 1
            return _initial(first, self.kind, self.owned_by_workers, m, after)

        return np.stack([of(m) for m in range(self.distribute_strategy.num_workers)])

    def each_at_rest(self) -> tuple[tf.Tensor, ...]:
        """Of `OWN`: what each worker has, or will begin with; a drain comes first."""
        self.distribute_strategy.settle()
        with self.distribute_strategy.engine.explained():
            found, workers = self.of_workers(), self.distribute_strategy.num_workers
            values = [self.primary.numpy()] * workers if found is None else list(found)
        return tuple(tf.convert_to_tensor(value) for value in values)

    def note_first(self) -> None:
        """Keeps the value that it was created with: a number, where it is one throughout."""
        with tf.init_scope():
            value = self.primary.numpy()
        constant = value.size and (value == value.flat[0]).all()
        self.first = value.flat[0] if constant else value

    def first_value(self, worker: int) -> np.ndarray:
        """What a worker's copy begins with."""
        return _initial(self.primary.numpy(), self.kind, self.owned_by_workers, worker, 0)

    @property
    def snapshots(self) -> Snapshots:
        """What each worker last fetched of the primary, kept from when it is first asked for."""
        if self._snapshots is None:
            strategy = self.distribute_strategy
            self._snapshots = Snapshots(self.primary, strategy.num_workers)
            strategy.placement.hold(self.shard, self, size=self._snapshots.bytes)
        return self._snapshots

    # -- reading ----------------------------------------------------------------------------

    def _outside(self) -> bool:
        return current_trace() is None and tf.executing_eagerly()

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        trace = current_trace()
        if trace is not None:
            interrupts.point()
        if trace is not None and id(self) in trace.values:
            return trace.values[id(self)]
        if trace is not None and trace.view is not None and trace.view.has(self):
            return trace.view.read(self)
        if not self._outside():
            return super()._read_variable_op(no_copy or self._read_without_copy())
        if self.kind is not Kind.CONTROL:
            self.distribute_strategy.settle()
        with self.distribute_strategy.engine.explained():
            return self.value_at_rest()

    def value_at_rest(self) -> tf.Tensor:
        """What is read outside, where it is known that nothing is under way."""
        if self.kind is Kind.METRIC and self.copies is None and self._restored is not None:
            return self.primary.read_value() + self._restored.sum(axis=0)  # workers begin so
        if not self.owned_by_workers or self.copies is None:
            return self.primary.read_value()
        if self.kind is Kind.SEED:
            # A worker in another process may be gone by now.
            seen = self.primary if self._workers_can_leave else self.copies.template
            return seen.read_value()
        found = self.copies.read()
        if self.kind is Kind.OWN:
            return tf.convert_to_tensor(found[0]) if 0 in found else self.primary.read_value()
        values = list(found.values())
        if self.kind is Kind.METRIC:
            return tf.add_n([self.primary.read_value(), *values])
        has_mean = self.dtype.is_floating and values
        return tf.add_n(values) / len(values) if has_mean else self.primary.read_value()

    def _read_without_copy(self) -> bool:
        trace = current_trace()
        # What XLA compiles reads every variable where it is.
        return self.no_copy and trace is not None and trace.side == "worker" and not trace.compiled

    def value(self) -> tf.Tensor:
        """The value for the worker or shard that is traced; read outside, the value at rest."""
        return self._read_variable_op()

    def read_value(self) -> tf.Tensor:
        """As `value`, as a tensor of its own."""
        return tf.identity(self._read_variable_op())

    def numpy(self) -> np.ndarray:
        """The value at rest: a drain comes first."""
        with self.distribute_strategy.engine.explained():
            return self.read_value().numpy()

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: Any = None, as_ref: bool = False
    ) -> Any:
        value = self._read_variable_op()
        return value if dtype is None or dtype == value.dtype else NotImplemented

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(tf.reshape(restored_tensors["VARIABLE_VALUE"], self.shape))

    # -- rows, while their update is traced -------------------------------------------------

    def read_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Rows of the primary."""
        return self.primary.sparse_read(rows)

    def add_rows(self, rows: tf.Tensor, values: tf.Tensor) -> None:
        """Adds to rows of the primary."""
        self.scatter_add(tf.IndexedSlices(values, rows))

    def write_rows(self, rows: tf.Tensor, values: tf.Tensor) -> None:
        """Sets rows of the primary."""
        self.scatter_update(tf.IndexedSlices(values, rows))

    # -- writing ----------------------------------------------------------------------------

    def _write(self, method: str, *args: Any, **kwargs: Any) -> Any:
        trace = current_trace()
        if trace is not None and trace.view is not None and trace.view.has(self):
            trace.view.write(self, method, args[0] if args else kwargs["value"])
            return self
        check_distributed()
        if trace is not None:
            interrupts.point()
            trace.written[id(self)] = self
            if not method.startswith("scatter_"):
                trace.rewritten.add(id(self))
                trace.assigned |= {id(self)} if method == "assign" else set()
            if trace.side == "worker" and self.momentum is not None:
                self.times.template.assign_add(1, read_value=False)
        elif tf.executing_eagerly():
            with self.distribute_strategy.engine.explained():
                return self._write_outside(method, *args, **kwargs)
        elif self.kind is Kind.CONTROL:
            self._write_on_other_shards(method, *args, **kwargs)
        elif self.kind is Kind.WEIGHT or self.may_rest:
            return self._write_in_function(method, *args, **kwargs)
        return getattr(_tf.BaseResourceVariable, method)(self, *args, **kwargs)

    def _write_on_other_shards(self, method: str, *args: Any, **kwargs: Any) -> None:
        """In a function of the caller's, such as `train_on_batch`; it may outlive this call."""
        for shard in range(self.distribute_strategy.num_shards):
            if shard != self.shard:
                getattr(self.on_shard(shard), method)(*args, **kwargs)

    def _write_in_function(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As above: who sees the next edition finds what was written."""
        result = getattr(_tf.BaseResourceVariable, method)(self, *args, **kwargs)
        written = result if isinstance(result, tf.Operation) else result.op
        with tf.control_dependencies([written]):
            self.edition.assign_add(1, read_value=False)
        return result

    def _write_outside(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.kind is not Kind.CONTROL:
            self.distribute_strategy.settle()
        if self.owned_by_workers and self.copies is not None and method != "assign":
            self.primary.assign(self._read_variable_op())
        self._restored = None
        for variable in [self.primary] if self.lent else self._on_shards.values():
            getattr(variable, method)(*args, **kwargs)
        if (self.owned_by_workers or self.kept_by_workers) and self.copies is not None:
            value = self.primary.numpy()
            incarnations = self.distribute_strategy.engine.store.incarnations
            kind, own = self.kind, self.owned_by_workers
            self.copies.each(
                lambda m, copy: copy.assign(_initial(value, kind, own, m, incarnations[m]))
            )
        self.distribute_strategy.written_outside(self)
        return self


def _add_write(method: str) -> None:
    def write(self: ReplicaVariable, *args: Any, **kwargs: Any) -> Any:
        return self._write(method, *args, **kwargs)

    write.__name__ = method
    write.__doc__ = getattr(_tf.BaseResourceVariable, method).__doc__
    setattr(ReplicaVariable, method, write)


for _method in (
    *("assign", "assign_add", "assign_sub"),
    *("scatter_add", "scatter_sub", "scatter_update", "scatter_max", "scatter_min"),
    *("scatter_mul", "scatter_div", "batch_scatter_update"),
    *("scatter_nd_add", "scatter_nd_sub", "scatter_nd_update", "scatter_nd_max", "scatter_nd_min"),
):
    _add_write(_method)


def kind_of(primary: tf.Variable, creator: Any) -> Kind:
    """How a variable is treated that `creator` makes."""
    if isinstance(creator, keras.optimizers.Optimizer):
        return Kind.SLOT if primary.shape.rank else Kind.CONTROL
    if primary.synchronization == tf.VariableSynchronization.ON_READ:
        if primary.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return Kind.OWN
        mean = primary.aggregation == tf.VariableAggregation.MEAN
        if mean or primary.dtype.is_bool:
            raise ValueError(
                f"{_tf.handle_name(primary)!r} has "
                + ('aggregation="mean"' if mean else "the type bool")
                + ", and what workers add to a metric is summed. Keep a sum, a count or both, and "
                "make of them in result() what is to be shown; or use "
                'aggregation="only_first_replica", for what one worker has.'
            )
        return Kind.METRIC
    seeds = isinstance(creator, keras.random.SeedGenerator)
    if seeds or _tf_random.is_state_of_generator(primary):
        return Kind.SEED
    return Kind.WEIGHT if primary.trainable else Kind.STATISTIC


def is_moving_statistic(primary: tf.Variable, creator: Any) -> bool:
    """Whether a layer's variable is one of BatchNorm's two, and not one that a subclass adds."""
    name = _tf.handle_name(primary).rpartition("/")[2]
    named = name.startswith(("moving_mean", "moving_variance"))
    known = isinstance(creator, keras.layers.BatchNormalization)
    return known and named and bool(primary.dtype.is_floating)


def _initial(
    value: np.ndarray, kind: Kind, owned: bool, worker: int, incarnation: int
) -> np.ndarray:
    """A worker's first value of a variable whose primary has `value`."""
    if kind is Kind.METRIC and owned:
        return np.zeros_like(value)
    if kind is Kind.SEED:
        return _worker_seed(value, worker, incarnation)
    return value


def _worker_seed(seed: np.ndarray, worker: int, incarnation: int) -> np.ndarray:
    """Worker 0 keeps the seed, so that one worker repeats plain Keras; others get their own."""
    if worker == incarnation == 0:
        return seed
    entropy = [worker, *[incarnation] * (incarnation > 0)]
    mixed = np.random.SeedSequence([*entropy, *np.ravel(seed).astype(np.uint64).tolist()])
    info = np.iinfo(seed.dtype)
    words = mixed.generate_state(seed.size, np.uint32 if seed.itemsize <= 4 else np.uint64)
    return (words.astype(np.uint64) % np.uint64(info.max)).astype(seed.dtype).reshape(seed.shape)
