"""How `fit` reaches the workers: a `tf.distribute.Strategy` over an engine.

Keras asks a strategy for four things, and that is all the way there is into `fit`:

1. `experimental_distribute_dataset`: we give tokens in place of batches (`dataset.py`);
2. `run(train_step, (token,))`, while Keras traces its own step: we trace `train_step` for a worker
   and the optimizer for the shard, and leave Keras a step that only counts and shows all workers'
   metrics (`step.py`, `capture.py`, `engine/program.py`, `engine/running.py`);
3. variables, created in the scope: ours (`variable.py`);
4. `extended.update`, by which an optimizer changes a variable: it does so on the shard.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf, _tf_autograph
from tf_dsgd.algorithm import Algorithm
from tf_dsgd.cluster import Cluster, resolve
from tf_dsgd.engine.interrupts import TRACES, held_back, not_swallowed, not_where_it_does_harm
from tf_dsgd.engine.ledger import Ledger, Staleness
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.running import Resets
from tf_dsgd.engine.schedule import Recorder
from tf_dsgd.engine.shard import Shard
from tf_dsgd.strategies import unused
from tf_dsgd.strategies.building import build_without_call
from tf_dsgd.strategies.capture import Optimizers
from tf_dsgd.strategies.checkpoint import Checkpoint
from tf_dsgd.strategies.compiling import make_functions_without_xla
from tf_dsgd.strategies.dataset import Token, TokenDataset, TokenSpec, sample
from tf_dsgd.strategies.description import describe
from tf_dsgd.strategies.eager import EagerPrograms, Given
from tf_dsgd.strategies.extended import Extended, Scope
from tf_dsgd.strategies.handing_out import FitProgram, HandingOut
from tf_dsgd.strategies.here import run_here
from tf_dsgd.strategies.pipelines import Source
from tf_dsgd.strategies.placement import Placement, ShardInfo
from tf_dsgd.strategies.position import Passes
from tf_dsgd.strategies.refused import check_arguments, check_dataset, check_step
from tf_dsgd.strategies.rows.tables import SplitTable
from tf_dsgd.strategies.schedules import Schedules
from tf_dsgd.strategies.step import TracedStep, is_distributed, is_train_step
from tf_dsgd.strategies.stream import make_pull
from tf_dsgd.strategies.variable import Kind, ReplicaVariable, is_moving_statistic, kind_of


class DistributedStrategy(tf.distribute.Strategy):
    """Trains a Keras model by the three rules of an algorithm.

    Subclass it to make a strategy of an algorithm: pass the rules to `__init__`.

    Args:
        cluster: where workers and shards are; see `tf_dsgd.LocalCluster`.
        algorithm: the rules.
        shard_optimizer: what `Shard.optimize` applies where the compiled optimizer runs on workers;
            it is copied.
    """

    needs_ps: ClassVar[bool] = True
    """Whether the shards of a cluster of processes must be on ps tasks."""

    def __init__(
        self,
        cluster: Any,
        algorithm: Algorithm,
        shard_optimizer: keras.optimizers.Optimizer | None = None,
    ):
        cluster = resolve(cluster)
        self.cluster: Cluster = cluster
        self.algorithm = algorithm
        peers = algorithm.between_peers is not None
        cluster.arrange(needs_ps=self.needs_ps, between_workers=peers)
        cluster.configure()
        super().__init__(Extended(self))
        self.shard_devices = cluster.shard_devices()
        self.lends_metrics = self.shard_devices[0] != cluster.host_device() and not peers
        """Whether metrics are changed on shards in other processes; see `engine.lent`."""
        self._announced: list[tuple[int, int]] = []
        self.engine = cluster.make_engine(algorithm.exchange)
        most, forget = cluster.most_bytes_of_a_variable, self.engine.store.forget
        self.placement = Placement(self.num_shards, most, forget)
        self._checkpoint = Checkpoint(self.engine, algorithm.codec.keeps)
        self.passes = Passes()
        self._optimizers = Optimizers()
        with self.engine.explained():
            self._schedules = Schedules(
                self._optimizers,
                self._counter,
                self._checkpoint.number_of,
                lambda: algorithm.steps_per_iteration(self.num_workers),
            )
            resets = self._counter("resets", self.lends_metrics)
            self._resets = Resets(resets) if cluster.locked_in_graph else None
            self._shards = [
                Shard(
                    s,
                    self.engine.num_workers,
                    device,
                    self._schedules.steps.on_shard(s),
                    remote=cluster.locked_in_graph,
                    rule=algorithm.server,
                )
                for s, device in enumerate(self.shard_devices)
            ]
        self.engine.shards = self._shards
        self.batches = HandingOut(self.engine, self.passes)
        self._eager = EagerPrograms()
        self._pulls: dict[Any, Any] = {}
        not_swallowed()
        if shard_optimizer is not None:
            # Its rate and its count of updates must be this strategy's variables.
            with self.scope():
                self._optimizers.for_shards = type(shard_optimizer).from_config(
                    shard_optimizer.get_config()
                )
        unused.made(self, self._optimizers)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        check_arguments(cls, args, kwargs)
        return super().__new__(cls)

    # -- what users read --------------------------------------------------------------------

    def __repr__(self) -> str:
        return describe(self) if "_shards" in vars(self) else super().__repr__()

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.engine.num_workers

    @property
    def num_shards(self) -> int:
        """Number of shards: of ps tasks on a cluster, else 1."""
        return len(self.shard_devices)

    @property
    def steps(self) -> int:
        """Mini-batches whose gradients or updates were applied, over all workers.

        Counted by the shard at the moment of reading, without `train_on_batch`; `settle` waits.
        """
        with self.engine.explained():
            return self._shards[0].steps_done()

    @property
    def updates(self) -> int:
        """Updates made to the weights: the first shard's version."""
        with self.engine.explained():
            return int(self._shards[0].version)

    def staleness(self) -> Staleness:
        """Staleness of all messages so far, in updates.

        The staleness of a message is the number of updates applied between the fetch before its
        *first* gradient and its arrival.

        Returns:
            `Staleness` with `count`, `mean`, `p50`, `p99` and `max`.
        """
        with self.engine.explained():
            return self._shards[0].staleness()

    @property
    def examples_per_step(self) -> float:
        """Mean number of examples in a mini-batch handed out so far.

        NaN before the first one, and where the chief does not see the mini-batches because
        workers make them.
        """
        examples, handed_out = self.batches.examples, self.batches.handed_out
        return examples / handed_out if examples else float("nan")

    def ledger(self) -> Ledger:
        """Where every message went, in all, per worker and per shard, as the shards counted it.

        Returns:
            `Ledger`; after `fit`, `sent == applied + refused` and `in_flight == 0`.
        """
        with self.engine.explained():
            sent = self.engine.messages_sent()
            shards = tuple(shard.ledger(sent) for shard in self._shards)
        return Ledger(shards[0].workers, shards)

    def residual(self) -> tuple[float, ...]:
        """The 2-norm of what each worker's codec was given and has not sent, after a drain.

        0 where none holds anything back; NaN for a lost worker, as `print(strategy)` counts.
        """
        self.settle()
        with self.engine.explained():
            return self.engine.store.norms(self.algorithm.codec.held_back)

    def shards(self) -> tuple[ShardInfo, ...]:
        """Where the variables are: for each shard its device, and what it holds.

        Returns:
            One `ShardInfo` per shard, with `device`, `variables` and `bytes` (weights, state of
            layers, the optimizer's slots, and what it remembers of workers' fetches).
        """
        return tuple(
            ShardInfo(device, *held)
            for device, held in zip(self.shard_devices, self.placement.held(), strict=True)
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[tuple[Any, ...]]]:
        """Within, takes down who fetched and sent in which order, and who used which mini-batches.

        `SimulatedCluster(num_workers, schedule=...)` plays what was recorded: the same model on the
        same data gets the same weights.

        Yields:
            A list of entries as `SimulatedCluster` describes them, complete when the block ends.

        Raises:
            ValueError: on a cluster of processes, where nobody sees the order on every shard, and
                for several workers and tables that are split.
        """
        if not self.engine.can_record:
            said = "A schedule can be recorded where workers are threads or simulated. Received: "
            raise ValueError(f"{said}{self.cluster!r}.")
        self.placement.split.check_recorded(self.num_workers)
        self.settle()
        recorder = self.engine.recorder = Recorder(self.num_workers)
        try:
            yield recorder.entries
            self.settle()
        finally:
            self.engine.recorder = None

    def settle(self) -> None:
        """Drains: waits until every mini-batch handed out is done and every message is applied.

        Reading a weight does this by itself.
        """
        with self.engine.explained():
            self.batches.settle()

    # -- what TensorFlow and Keras call -----------------------------------------------------

    def scope(self) -> Any:
        """Within, models, layers, metrics and optimizers are created for this strategy."""
        make_functions_without_xla()
        return Scope(super().scope(), self)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Gives a dataset of tokens, one for each mini-batch of `dataset`.

        Args:
            dataset: a `tf.data.Dataset` whose elements are mini-batches. Each goes, whole, to one
                worker.
            options: not used.

        Returns:
            An iterable of tokens for `strategy.run`.
        """
        del options
        check_dataset(dataset)
        build_without_call()
        make_functions_without_xla()
        not_where_it_does_harm()  # a notebook sets Python's own handler again for each cell
        return self._tokens(dataset)

    def _tokens(self, dataset: tf.data.Dataset, source: Source | None = None) -> TokenDataset:
        key = (str(dataset.element_spec), type(dataset.element_spec))
        if key not in self._pulls:
            self._pulls[key] = make_pull(dataset)
        return TokenDataset(self, dataset, self._pulls[key], source)

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """Gives a dataset of tokens for pipelines, one per worker, that the workers run themselves.

        Pass it to `fit`. On a cluster no batch then passes through the chief. Together the
        pipelines hold an epoch: each takes its part, for instance by `dataset.shard`. Every random
        operation of a pipeline gets its seed from here, another one each epoch, so that a pipeline
        gives the same batches on whichever worker goes on with it. Where workers are threads or
        simulated, and in `evaluate` and `predict`, the pipelines run here, one after the other.

        Args:
            dataset_fn: from a `tf.distribute.InputContext`, with `input_pipeline_id` and
                `num_input_pipelines`, to the pipeline's `tf.data.Dataset` of mini-batches. Called
                for every pipeline, and once more to be traced (at every epoch where a map's
                function calls `tf.random.uniform` or its like). How many batches it gives must be
                known (`tf.data.experimental.assert_cardinality`); else the chief sends all of them.
            options: not used.

        Returns:
            A dataset for `fit`, `evaluate`, or `strategy.run`.

        Example:

        >>> def dataset_fn(context):
        ...     dataset = tf.data.Dataset.range(1000)
        ...     dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        ...     return dataset.shuffle(100).batch(10)
        >>> strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
        >>> strategy.distribute_datasets_from_function(dataset_fn).cardinality
        100
        """
        del options
        source = Source(dataset_fn, self.num_workers)
        on_workers = self.cluster.runs_pipelines and source.can_run_on_workers
        if on_workers:
            self.passes.add(source)
        return self._tokens(source.dataset, source if on_workers else None)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces what `run` gave. Of a token: a sample batch's types, for the symbolic build."""
        if isinstance(value, Token):
            return tf.nest.map_structure(sample, value.element_spec)
        return super().reduce(reduce_op, value, axis)

    @_tf_autograph.as_written
    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs a step.

        A step that is given a token of `experimental_distribute_dataset` and applies gradients is
        trained by the workers; what `run` then returns are the *latest* outputs of a worker.
        Every other step runs here, at once, on the model at rest.
        """
        tokens = [x for x in tf.nest.flatten((args, kwargs)) if isinstance(x, Token)]
        if not tokens:
            here = functools.partial(super().run, fn, args, kwargs, options)
            return run_here(here, fn, bool(args or kwargs), self._optimizers, self._schedules)
        if len(tokens) > 1:
            raise ValueError(
                f"strategy.run takes one batch of a distributed dataset. Received: {len(tokens)}. "
                "Zip the datasets with tf.data.Dataset.zip."
            )
        check_step(fn, self._optimizers)
        token = tokens[0]

        def with_batch(batch: Any) -> tuple[Any, Any]:
            return tf.nest.map_structure(
                lambda x: batch if isinstance(x, Token) else x, (args, kwargs)
            )

        if is_distributed(fn):
            with held_back(at_most=1, said=TRACES, until_a_point=True), self.batches.tracing:
                program = self._known(fn, token, with_batch, (args, kwargs))
            if program is not None:
                if not tf.executing_eagerly():
                    token.check_alone_in(tf.compat.v1.get_default_graph(), "trains")
                    with tf.init_scope():
                        self.batches.traced(program)
                token.make_ready()
                return program.step_of_chief(token.ran)
        return super().run(fn, *with_batch(token.batch()), options)

    def trace(self, fn: Callable[[Any], Any], element_spec: Any) -> Program:
        """The functions of a step that takes one batch and applies gradients."""
        traced = self._known(fn, TokenSpec(element_spec), lambda batch: ((batch,), {}), ())
        if traced is None:
            raise ValueError("The step applies no gradients.")
        return traced.program

    def _known(self, fn: Any, token: Any, with_batch: Any, given: Any) -> FitProgram | None:
        if not tf.executing_eagerly():
            return self._program(fn, token, with_batch)
        call = Given(fn, token.element_spec, given)
        program = self._eager.find(call)
        if program is None:
            program = self._program(fn, token, with_batch)
            if program is not None:
                self._eager.keep(call, program)
        return program

    def _program(self, fn: Any, token: Any, with_batch: Any) -> FitProgram | None:
        self._schedules.follow()
        spec = token.element_spec
        run, written = super().run, _tf_autograph.rewritten(fn)

        def call(batch: Any) -> Any:
            args, kwargs = with_batch(batch)
            return run(written, args, kwargs)

        with self.engine.tracing():
            model = fn.__self__ if is_train_step(fn) else None
            step = TracedStep(
                run, call, spec, self.algorithm, self._optimizers, self._schedules, model
            )
            if not step.weights:
                return None
            with tf.init_scope():
                # Not `self.settle`: this very token's step is not run yet.
                tf.autograph.experimental.do_not_convert(self.engine.drain)()
            if self._resets is not None:
                step.fetch_resets(self._resets)
            program = Program(
                step, self.algorithm, self.engine.store, self._shards, self.cluster.host_device()
            )
            self.engine.prepare(program)
            fit_program = FitProgram(program, step, fn, spec, self.batches.free_number())
        if (held := self.placement.held()) != self._announced:
            self._announced = held
            self.cluster.announce(held, self.placement.parts is not None)
        self.batches.add(fit_program)
        if not tf.executing_eagerly():
            # The graph of the caller's function uses the program's variables: as long as it lives.
            graph = tf.compat.v1.get_default_graph()
            graph.add_to_collection("tf_dsgd", fit_program)
        return fit_program

    # -- variables --------------------------------------------------------------------------

    def _counter(self, name: str, lent: bool = False) -> ReplicaVariable:
        device = self.cluster.host_device() if lent else self.shard_devices[0]
        zero = _tf.make_variable(tf.zeros([], tf.int64), device=device, name=name)
        counter = ReplicaVariable(self, zero, Kind.CONTROL, lent=lent)
        self.placement.hold(0, counter, size=0, variables=0)
        return counter

    def adopt(self, primary: tf.Variable, shard: int, lent: bool = False) -> ReplicaVariable:
        """Makes a variable of the strategy from one just created on a shard."""
        unused.used(self)
        creator = _tf.creating_object()
        self._optimizers.note(creator)
        kind = kind_of(primary, creator)
        variable = ReplicaVariable(self, primary, kind, shard, lent)
        self.placement.hold(shard, variable)
        if kind is Kind.STATISTIC and is_moving_statistic(primary, creator):
            variable.layer = creator
        if self.algorithm.local.sends == "state" and (kind is Kind.SLOT or not primary.shape.rank):
            variable.note_first()
        self._checkpoint.add(variable, creator)
        return variable

    def adopt_table(self, table: SplitTable) -> SplitTable:
        """As `adopt`, of a table that is split."""
        unused.used(self)
        self.placement.hold(0, table, size=0, variables=0)  # its parts have the bytes
        for part in table.parts:
            self.placement.hold(part.shard, part)
        creator = _tf.creating_object()
        self._optimizers.note(creator)
        self._checkpoint.add(table, creator)
        return table

    def written_outside(self, variable: ReplicaVariable) -> None:
        """Called after a variable was assigned from outside: workers have to see it."""
        for program in self.batches.programs:
            if variable.kind is Kind.WEIGHT or variable.may_rest:
                program.program.forget_fetched(variable)
            elif program.begins_anew_with(variable):
                program.program.running.were_written = True
        if variable.kind is Kind.CONTROL:
            self._schedules.written(variable)

    # -- checkpoints ------------------------------------------------------------------------

    def state(self, held: Collection[int] | None = None) -> dict[str, np.ndarray]:
        """The strategy's own state, which no model holds.

        Versions, counts, staleness, what each worker keeps for itself, an outer optimizer.

        Args:
            held: ids of the strategy's variables that are saved elsewhere: all others are part of
                the state, metrics as well. None for those of any model and its optimizer.

        Returns:
            Arrays by name, for `restore`.
        """
        self.settle()
        with self.engine.explained():
            arrays = self._checkpoint.take(self._optimizers.for_shards, held)
        return {**arrays, **self.batches.state(), **self._schedules.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets the strategy's own state to what `state` gave, with as many workers.

        Raises:
            ValueError: if the state is of another number of workers, or does not fit;
                nothing is changed then.
        """
        self.check(state)
        self._checkpoint.restore(state)
        self.batches.restore(state)
        self._schedules.restore(state)
        for program in self.batches.programs:
            program.program.forget_fetched()

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises the ValueError that `restore` would raise, and changes nothing."""
        self.settle()
        self.batches.check(state)
        self._checkpoint.check(state)

    def restore_metrics(self) -> None:
        """Gives metrics, which `fit` has reset since, the values that were restored."""
        self._checkpoint.restore_metrics()
