"""A user's step, traced for a worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithm import Algorithm, Message
from tf_dsgd.algorithms.hogwild import AddInPlace
from tf_dsgd.arithmetic import Gradient, is_number
from tf_dsgd.engine.running import Resets
from tf_dsgd.optimizers.delay import Delay, DelayTolerantOptimizer, applying
from tf_dsgd.strategies.capture import Application, Optimizers
from tf_dsgd.strategies.dataset import take_batch, with_none
from tf_dsgd.strategies.optimizer_state import on_shards, state_of
from tf_dsgd.strategies.packing import Packing
from tf_dsgd.strategies.refused import (
    check_adds,
    check_applied,
    check_averaged,
    check_changes,
    check_delay_is_known,
    check_empty,
    check_foreign,
    check_graph,
    check_owner,
    check_side_by_side,
    warn_of_momentum,
    warn_of_order,
)
from tf_dsgd.strategies.repeatable import check_compiled, check_repeatable
from tf_dsgd.strategies.rows.rounds import RowsOfRounds
from tf_dsgd.strategies.rows.tables import Part
from tf_dsgd.strategies.schedules import Schedules
from tf_dsgd.strategies.tracing import Trace, tracing
from tf_dsgd.strategies.variable import Kind, ReplicaVariable

_MERGED = (Kind.STATISTIC, Kind.METRIC)


class TracedStep:
    """`engine.program.Step` for a step function given to `strategy.run`.

    `function` maps a batch to (flat outputs, flat gradients); `structure` packs the outputs as the
    user's step returned them.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        call: Callable[[Any], Any],
        element_spec: Any,
        algorithm: Algorithm,
        optimizers: Optimizers,
        schedules: Schedules,
        model: keras.Model | None = None,
    ):
        self._model = model
        self.compiled = model is not None and bool(model.jit_compile)
        self.shows_own_logs = False
        self.resets: Resets | None = None
        self._run = run
        self._optimizers = optimizers
        self._schedules = schedules
        self._steps = steps = schedules.steps
        self._shards: dict[int, Trace] = {}
        self.element_spec = element_spec
        self._local = algorithm.local
        self.sends = algorithm.local.sends
        self.packing = Packing(element_spec)
        # A shard sees a part of a gradient; the norm of all is known on the worker.
        in_parts = steps.distribute_strategy.num_shards > 1
        exchange = algorithm.exchange
        # Of a message with several each gradient, and what a local step makes use of.
        clip = exchange.push_every > 1 or exchange.fetch_every > 1
        adds = check_adds if isinstance(algorithm.server, AddInPlace) else None
        self._captured = functools.partial(optimizers.captured, clip, in_parts, adds)
        parts = steps.distribute_strategy.placement.parts
        self._laid = None if parts is None else parts.step(call, model, optimizers)
        self._rows: RowsOfRounds | None = None
        self._reads_ahead = (
            steps.distribute_strategy.cluster.reads_rows_by_round and self._laid is None
        )
        self._trace(self._laid or call)
        check_applied(algorithm, self.applications)
        if self.sends == "update":
            assigned = [v.name for v in self.weights if id(v) in self._worker.assigned]
            workers = steps.distribute_strategy.num_workers
            check_changes(algorithm.codec, optimizers, model, assigned, workers)
        warn_of_momentum(algorithm.codec, optimizers)
        sparse = [] if self.compiled else self._sparse_weights()
        if not all(v.no_copy for v in sparse):
            # Now that the tables are known, trace again so that reading one copies nothing.
            for variable in sparse:
                variable.no_copy = True
            self._trace(self._laid or call)

    def _sparse_weights(self) -> list[ReplicaVariable]:
        return [v for v, sparse in zip(self.weights, self.sparse, strict=True) if sparse]

    # -- tracing the worker's step ----------------------------------------------------------

    def _trace(self, call: Callable[[Any], Any]) -> None:
        box: dict[str, Any] = {}
        self._worker = Trace("worker", compiled=self.compiled)
        self._worker.lookups = [] if self._reads_ahead else None

        def body(batch: Any) -> tuple[list[tf.Tensor], list[Gradient]]:
            batch = with_none(batch)
            graph = tf.compat.v1.get_default_graph()
            if self.sends == "gradient":
                with self._captured() as applications:
                    outputs = call(batch)
                gradients = [g for a in applications for g in a.gradients]
                check_graph(gradients, graph)
                if self._optimizers.objective is not None and applications:
                    gradients = self._optimizers.objective.add(batch, gradients)
            else:
                with self._optimizers.divided() as applications:
                    outputs = call(batch)
                gradients = [g for a in applications for g in a.gradients]
                check_graph(gradients, graph)
            box["counts"] = [self._steps, *self._schedules.of(self._applied(applications))]
            for count in box["counts"]:
                count.assign_add(1)
            box["applications"] = applications
            box["structure"] = outputs
            if self._model is not None and isinstance(outputs, dict):
                self.shows_own_logs = set(outputs) != set(self._model.get_metrics_result())
            flat = [tf.convert_to_tensor(x) for x in tf.nest.flatten(outputs) if x is not None]
            return flat, [_int64_rows(g) for g in gradients]

        with tracing(self._worker):
            self.function = tf.function(
                body, autograph=False, jit_compile=self.compiled or None
            ).get_concrete_function(self.element_spec)
        if self._worker.lookups:
            self._rows = RowsOfRounds(self.function, self._worker.lookups)
            if not self._rows.known:
                self._rows, self._reads_ahead = None, False
                self._trace(call)
                return
        if self._laid is not None:
            self._laid.traced(self.function)
        for optimizer in self._optimizers:
            for variable in _tf.own_scalars(optimizer):
                if isinstance(variable, ReplicaVariable):
                    variable.kind = Kind.CONTROL
        self.applications: list[Application] = box["applications"]
        self._counts: list[ReplicaVariable] = box["counts"][1:]
        """What schedules follow of the optimizers that the step applies."""
        self._of_tables: list[Application] = []
        """What shards apply to tables, where workers run the optimizer on all else."""
        self._structure = box["structure"]
        self.metrics = self._metrics_shown()
        outputs = [] if self.metrics else self.function.structured_outputs[0]
        self.outputs = [tf.TensorSpec(t.shape, t.dtype) for t in outputs]
        gradients = self.function.structured_outputs[1]
        if self.sends == "gradient":
            self.weights = [v for a in self.applications for v in a.weights]
            warn_of_order(self.applications)
            check_owner(self.weights, self._steps.distribute_strategy)
            self.sparse = [isinstance(g, tf.IndexedSlices) for g in gradients]
        else:
            self._of_tables, self.applications = self.applications, []
            self.weights = [v for v in self._worker.written.values() if v.kind is Kind.WEIGHT]
            tables = [part for a in self._of_tables for part in a.weights]
            check_averaged(self.weights, tables)
            self._keep_optimizers_state()
            self.weights = [*tables, *self.weights]
            self.sparse = [not v.copied for v in self.weights]
        self._check_written()
        if self._optimizers.objective is not None and self.applications:
            check_compiled(self._model, self.applications)
            check_repeatable(self._model, self._worker.written.values(), self.function.graph)
        self._check_tables()
        check_foreign(self.function.graph, self._worker, self._steps.distribute_strategy)

    def _applied(self, applications: Sequence[Application]) -> list[keras.optimizers.Optimizer]:
        """The optimizers that the step applies, wherever they run."""
        captured, written = [a.inner for a in applications], self._worker.written
        return [
            optimizer
            for optimizer in self._optimizers
            if optimizer in captured or id(_tf.iterations_variable(optimizer)) in written
        ]

    def _metrics_shown(self) -> list[ReplicaVariable]:
        """Variables of the model's metrics, if the step's outputs are those metrics' results."""
        if self._model is None or not isinstance(self._structure, dict) or self.shows_own_logs:
            return []
        metrics = [_replica(v) for metric in self._model.metrics for v in metric.variables]
        fit = (id(v) in self._worker.written and v.kind is Kind.METRIC for v in metrics)
        return metrics if all(fit) and all(is_number(v.dtype) for v in metrics) else []

    def fetch_resets(self, resets: Resets) -> None:
        """Has workers fetch which reset of the metrics it is."""
        self.resets = resets
        self._worker.touched[id(resets.variable)] = resets.variable

    def _keep_optimizers_state(self) -> None:
        """Decides what of the state of layers and optimizers travels, and what workers keep."""
        if not self.weights:
            return
        trained, written = list(self.weights), self._worker.written.values()
        for variable in trained:
            variable.kept_by_workers = self._local.keeps_weights
        if self._local.sends_statistics:
            self.weights += [
                v
                for v in written
                if v.kind is Kind.STATISTIC and v.dtype.is_floating and v.momentum is None
            ]
        self._resets: list[ReplicaVariable] = []
        counts = [self._steps, *self._counts]
        unsorted = [v for v in written if not any(v is count for count in counts)]
        for optimizer in self._optimizers:
            if optimizer is self._optimizers.for_shards:
                continue
            state = state_of(optimizer, unsorted)
            # One inside another (LossScaleOptimizer's) is among the optimizers itself.
            unsorted = [v for v in unsorted if v not in state]
            owned = state.others
            if self._local.sends_slots:
                self.weights += [*state.momenta, *state.averages]
            else:
                self._resets += [*state.momenta, *state.counters]
                owned = [*owned, *state.momenta, *state.averages, *state.counters]
            for variable in owned:
                variable.owned_by_workers = True
        if self._optimizers.for_shards is not None:
            self.applications = [on_shards(self._optimizers.for_shards, trained, self._optimizers)]

    def _check_written(self) -> None:
        if self.sends != "gradient" or not self.weights:
            return
        for variable in self._worker.written.values():
            if variable.kind is Kind.WEIGHT:
                raise ValueError(
                    f"The step assigns the trainable variable {variable.name!r} itself (as "
                    "SpectralNormalization does), besides what its optimizer does, so the change "
                    "would stay on one worker. Use DownpourStrategy(local_rule='optimizer'), which "
                    "sends the change of the weights, or create the variable with trainable=False."
                )

    def _check_tables(self) -> None:
        self._steps.distribute_strategy.placement.split.check()
        tables = [v.name for v in self.weights if isinstance(v, Part)]
        if tables and self.compiled:
            raise ValueError(
                "jit_compile=True does not go with tables that are split by rows: XLA compiles "
                "nothing that is on several devices, or as large as the ids of a mini-batch have "
                f"it. Leave one of the two out. Received: {tables[0]}."
            )

    def pack(self, flat: Sequence[Any]) -> Any:
        """Outputs in the structure that the user's step returned."""
        values = iter(flat)
        return tf.nest.map_structure(lambda x: None if x is None else next(values), self._structure)

    # -- what an engine asks for ------------------------------------------------------------

    def before_round(
        self, steps: tf.Tensor | None, batch: Callable[[tf.Tensor], Any]
    ) -> Callable[[tf.Tensor], Any]:
        """`batch`, after the worker has read what the steps on all of them look up."""
        return batch if self._rows is None else self._rows.read(steps, batch)

    def on_worker(self, fn: Callable[[], Any]) -> Any:
        """Runs `fn` in a replica context in which variables are the worker's."""
        if self._laid is not None:
            self._laid.lay_rule()
        with tracing(self._worker):
            return self._run(fn)

    def on_part(self, part: int, fn: Callable[[], Any]) -> Any:
        """Runs `fn`, whose operations are on that part of the worker."""
        if self._laid is None:
            return fn()
        with tracing(self._worker):
            return self._laid.on_part(part, fn)

    def on_shard(self, shard: int, fn: Callable[[], Any]) -> Any:
        """Runs `fn` in a replica context in which variables are what that shard has of them."""
        with tracing(self._shards.setdefault(shard, Trace("shard", shard))):
            return self._run(fn)

    def take_batch(self, queue: tf.Tensor) -> Any:
        """The next batch of a stream's queue."""
        return take_batch(queue, self.element_spec)

    def rewrites(self, variable: ReplicaVariable) -> bool:
        """Whether the update writes other than the rows of its sparse gradient."""
        return any(id(variable) in trace.rewritten for trace in self._shards.values())

    def _owner(self, index: int) -> Application:
        for application in self.applications:
            if index < len(application.variables):
                return application
            index -= len(application.variables)
        raise IndexError(index)

    def rate(self, index: int) -> tf.Tensor:
        """The learning rate for weight `index`."""
        return tf.convert_to_tensor(self._owner(index).optimizer.learning_rate)

    def local_gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Clipped, and zero where float16 overflowed, so that a local copy stays finite."""
        result: list[Gradient] = []
        for application, part, _ in self._parts(gradients):
            part = application.clipped_locally(part)
            if application.inner is not application.optimizer:
                values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in part]
                finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])
                part = [_where(finite, g) for g in part]
            result.extend(part)
        return result

    def optimize(
        self,
        shard: int,
        gradients: Sequence[Gradient],
        scale: Any = 1.0,
        message: Message | None = None,
        side_by_side: bool = False,
    ) -> None:
        """Traces `optimizer.apply` for every call of it in the user's step, for one shard."""
        if side_by_side:
            check_side_by_side(self.applications)
        for application in self.applications:
            check_delay_is_known(application.inner, message)
        with applying(None if message is None else _delay_of(message)):
            self._optimize(shard, gradients, scale, side_by_side)

    def update_tables(self, shard: int, gradients: Sequence[Gradient]) -> None:
        """Traces the compiled optimizer's update of one shard's tables, where workers run it."""
        for application, part, variables in self._parts(gradients, shard, self._of_tables):
            application.apply(part, variables, shard, self._optimizers.lazy)

    def remember(self, shard: int, worker: tf.Tensor, rows: Mapping[int, tf.Tensor]) -> None:
        """Traces that optimizers remember what a worker fetches from one shard."""
        if not self.applications:  # the optimizer runs on the workers
            return
        for i, variable in enumerate(self.weights):
            optimizer = self._owner(i).inner
            if variable.shard != shard or not isinstance(optimizer, DelayTolerantOptimizer):
                continue
            source = optimizer.remembered(variable)
            if source is not None:
                _replica(source).snapshots.take(worker, rows.get(i))

    def _optimize(
        self, shard: int, gradients: Sequence[Gradient], scale: Any, side_by_side: bool
    ) -> None:
        for application, part, variables in self._parts(gradients, shard):
            if not variables:
                check_empty(application, shard)
                counter = _tf.iterations_variable(application.inner)
                counter.on_shard(shard).assign_add(1, read_value=False)
                application.count_whole(shard)
                continue
            lazy = self._optimizers.lazy
            if isinstance(scale, float) and scale == 1.0:
                application.apply(part, variables, shard, lazy, side_by_side)
                continue
            inner = application.inner
            rate = functools.partial(_scaled_rate, inner.learning_rate, scale)
            with _tf.method_replaced(inner, "_get_current_learning_rate", rate):
                application.apply(part, variables, shard, lazy, side_by_side)

    def _parts(
        self,
        gradients: Sequence[Gradient],
        shard: int | None = None,
        applications: Sequence[Application] | None = None,
    ) -> list[tuple[Application, list[Gradient], list[Any]]]:
        """(application, its gradients, its variables), on all shards or on one."""
        rest = iter(gradients)
        parts = []
        for application in self.applications if applications is None else applications:
            variables = [
                v
                for v, weight in zip(application.variables, application.weights, strict=True)
                if shard is None or weight.shard == shard
            ]
            parts.append((application, [next(rest) for _ in variables], variables))
        return parts

    def reset_optimizer(self) -> None:
        """Gives what the worker's optimizer keeps there its first values."""
        for optimizer in self._optimizers:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if optimizer is not self._optimizers.for_shards and inner.gradient_accumulation_steps:
                raise ValueError(
                    'optimizer_state="reset" would throw away gradients that wait in an '
                    'accumulator. Use "average" or "local", or no accumulation. Received: '
                    f"gradient_accumulation_steps={inner.gradient_accumulation_steps}."
                )
            if optimizer is not self._optimizers.for_shards and inner.use_ema:
                raise ValueError(
                    f'optimizer_state="reset" does not go with use_ema=True of {inner.name}: Keras '
                    "begins the average of weights anew where `iterations` is 0, as it is after a "
                    'reset. Use "average" or "local".'
                )
        for variable in self._resets:
            first = np.broadcast_to(variable.first, variable.shape)
            variable.on_workers().template.assign(first, read_value=False)

    def count_updates(self, shard: int, number: Any) -> None:
        """`iterations += number`, natively: Keras's own `assign_add` reads, then assigns."""
        for optimizer in self._optimizers:
            counter = _tf.iterations_variable(optimizer)
            if id(counter) in self._worker.written:
                counter = counter.on_shard(shard)
                counter.assign_add(tf.cast(number, counter.dtype), read_value=False)

    def count_steps(self, shard: int, number: tf.Tensor) -> None:
        """Traces that a shard has applied so many mini-batches, for schedules to follow."""
        for count in self._counts:
            count.on_shard(shard).assign_add(number, read_value=False)

    def fetched_state(self) -> list[ReplicaVariable]:
        """What a worker reads and does not own, the weights of the message aside."""
        weights = {id(v) for v in self.weights}
        return [
            v
            for v in self._worker.touched.values()
            if id(v) not in weights
            and v.copied
            and not v.owned_by_workers
            and not (v.kind in _MERGED and id(v) in self._worker.written)
        ]

    def leaves(self, variable: ReplicaVariable) -> bool:
        """Whether training leaves a variable of `fetched_state` as it is."""
        traces = [self._worker, *self._shards.values()]
        return variable.may_rest and all(id(variable) not in each.written for each in traces)

    def merged_state(self) -> list[ReplicaVariable]:
        """Moving statistics and counts that the step changes, and metrics, unless workers' own."""
        weights = {id(v) for v in self.weights}
        return [
            v
            for v in self._worker.written.values()
            if v.kind in _MERGED and not v.owned_by_workers and id(v) not in weights
        ]


def _replica(variable: Any) -> ReplicaVariable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _delay_of(message: Message) -> Delay:
    def seen(variable: Any, rows: tf.Tensor | None) -> tf.Tensor:
        return _replica(variable).snapshots.of(message.worker, rows)

    return Delay(message.staleness, seen)


def _scaled_rate(rate: Any, scale: Any) -> tf.Tensor:
    """In double precision: optimizers cast the rate to the type of each variable."""
    return tf.cast(rate, tf.float64) * tf.cast(scale, tf.float64)


def _where(finite: tf.Tensor, gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.where(finite, gradient.values, tf.zeros_like(gradient.values))
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.where(finite, gradient, tf.zeros_like(gradient))


def _int64_rows(gradient: Gradient) -> Gradient:
    """One index type for all messages; shapes as the variable's."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    return tf.IndexedSlices(
        gradient.values, tf.cast(gradient.indices, tf.int64), gradient.dense_shape
    )


def is_train_step(fn: Callable[..., Any]) -> bool:
    """Whether this is the step that `Model.fit` runs."""
    owner = getattr(fn, "__self__", None)
    return isinstance(owner, keras.Model) and getattr(fn, "__name__", "") == "train_step"


def is_distributed(fn: Callable[..., Any]) -> bool:
    """Whether a step may be one that trains; Keras's evaluation and prediction are not."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, keras.Model):
        return getattr(fn, "__name__", "") != "test_step"
    return not _tf.is_keras_predict_step(fn)
