"""`PeriodicAveragingStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from tf_dsgd.algorithm import Algorithm
from tf_dsgd.algorithms.averaging import SendWeights, Together, WeightedMean
from tf_dsgd.checks import one_of, positive_int
from tf_dsgd.optimizers import BlockMomentum
from tf_dsgd.optimizers.delay import DelayTolerantOptimizer
from tf_dsgd.strategies.base import DistributedStrategy
from tf_dsgd.strategies.parts import model_parallel as model_parallels
from tf_dsgd.strategies.parts import replica_parts
from tf_dsgd.strategies.parts.model_parallel import ModelParallel
from tf_dsgd.strategies.rows.splitting import Patterns
from tf_dsgd.strategies.rows.tables import Rows

_POLICIES = ("average", "local", "reset")


class PeriodicAveragingStrategy(DistributedStrategy):
    """Parameter averaging: workers train by themselves, and every tau steps meet at their mean.

    Use it where communication is dear, or staleness does harm: it is local SGD, and with an outer
    optimizer BMUF or DiLoCo. Each worker runs the *compiled Keras optimizer*, on slots of its own,
    for `average_every` mini-batches; then all wait for each other, and go on from the mean::

        worker k:  w_k <- optimizer_k(w_k, g)        tau times
        shard:     mean = sum_k n_k w_k / sum_k n_k
                   w <- mean,  or  w <- outer(w, w - mean)
        worker k:  w_k <- w

    tau = `average_every`, outer = `outer_optimizer`, n_k = the mini-batches that worker k has done
    since the last average. That is tau for every worker, except where the data of an epoch end or a
    worker is lost; a worker's part in the mean goes by its work, as in FedAvg.

    What becomes of the optimizer's own state (`optimizer_state`):

    - `"average"`: momenta, second moments and the like are averaged with the weights. The state is
      that of one optimizer, which is saved with the model and goes on in plain Keras.
    - `"local"`: each worker keeps its own. What is saved with the model is their mean.
    - `"reset"`: every worker begins each period with fresh state, its count for bias correction
      included; this is what BMUF's authors do with momentum.

    `optimizer.iterations` counts one worker's steps, as the bias corrections of Adam want it: all
    mini-batches divided by the number of workers. `"reset"` starts the workers' own counts anew.
    Learning-rate schedules follow mini-batches over all workers, under every policy. Averages of
    weights (`use_ema`) are averaged under `"average"`, local under `"local"`, and refused under
    `"reset"`; the state of `LossScaleOptimizer` is each worker's own. In BatchNorm's moving
    statistics each mini-batch counts as it would in one process.

    With one worker, or with plain SGD and `average_every=1` on M workers, this is exactly training
    with the mean gradient of M mini-batches, one worker's with M = 1.

    - The model that is validated, saved and read is the averaged one; reading it drains the
      workers, so that an average is made of what is there, and the period starts anew. A callback
      that reads weights at every batch averages at every batch.
    - `train_on_batch` makes a step in the main thread. It is refused where workers have an
      optimizer's state of their own (`"local"`, `"reset"`, a `LossScaleOptimizer`).
    - `strategy.updates` counts averages; staleness is 0 but for a worker that joins in mid-round.
    - Clipping, weight decay, EMA, constraints, accumulation: all in the compiled optimizer, on
      the worker. Embeddings are averaged whole, but for those of `placement`.
    - Tables of `placement` are not averaged: training is half-synchronous. A worker reads the rows
      of each mini-batch from their shards, and sends the sum of their gradients together with its
      weights. The shard runs the compiled optimizer on these rows as each message comes, and waits
      with the mean of all else. So a period of 1 sends rows at every mini-batch, and a longer one
      keeps them back as long. There is one set of slots of a table, on its shards, whatever
      `optimizer_state` says. A message counts once, and whole: what a lost worker had not sent is
      not in the tables either, and its mini-batches go to others.
    - A worker that raises ends `fit` with its error. On a `TFCluster` a lost worker is not waited
      for: the mean is over the others, its unfinished batches go to them, and when it comes back it
      begins with the weights of that moment (under `"local"`, with the mean state).
    - Without ps tasks the shards are on the workers: each adds up and averages its part of the
      variables, and sends it to the others (a reduce-scatter and an all-gather). Then a lost
      worker is an error, since its part of the model is lost with it.

    Args:
        cluster: `tf_dsgd.LocalCluster`, `tf_dsgd.TFCluster`, `tf_dsgd.SimulatedCluster`; a
            `ClusterSpec` or resolver stands for the `TFCluster` of it; None for the cluster of
            TF_CONFIG if that is set, else `LocalCluster()`.
        average_every: tau, mini-batches of one worker between averages; at least 1. Or a callable
            from the mini-batches that one worker has done to the number until the next average:
            `lambda step: 1 if step < 1000 else 16` is post-local SGD.
        optimizer_state: `"average"`, `"local"` or `"reset"`.
        outer_optimizer: a Keras optimizer that takes w - mean for the gradient, on the shard, for
            the trainable weights; None for w <- mean. `tf_dsgd.optimizers.BlockMomentum()` is BMUF;
            `keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`, with AdamW compiled and
            `optimizer_state="local"`, is DiLoCo; `SGD(1.0)` is the plain mean. It is copied: see
            `strategy.outer_optimizer`. Its schedules follow mini-batches, too.
        sparse: what an update does with rows of such a table that have no gradient; as of
            `DownpourStrategy`. Under Adagrad, and SGD without momentum, `"dense"` and `"lazy"` are
            the same numbers; all others need `"lazy"`. Tables that are averaged do not go by it.
        placement: which tables are split by rows over the shards, as of `DownpourStrategy`; None:
            all are averaged. Not with `LossScaleOptimizer`.
        model_parallel: which layers are on which of each worker's devices, a
            `tf_dsgd.ModelParallel`, on a cluster with `devices_per_worker`, or a `TFCluster` with
            `tasks_per_worker`; None: each worker has one device.

    Raises:
        ValueError, TypeError: for a wrong argument, naming it, what was received, and the remedy.

    Deviations from the papers: the mean by work, above; the period ends early at the end of an
    epoch.

    References: Stich, Local SGD converges fast and communicates little, ICLR 2019, algorithm 1;
    McMahan et al., AISTATS 2017, algorithm 1 (the mean by work); Lin, Stich, Patel, Jaggi, Don't
    use large mini-batches, use local SGD, ICLR 2020 (post-local SGD); Chen, Huo, ICASSP 2016
    (BMUF); Douillard et al., DiLoCo, arXiv:2311.08105, algorithm 1; Lian et al., Persia, KDD 2022
    (tables asynchronous, all else synchronous).

    Example:

    >>> strategy = tf_dsgd.PeriodicAveragingStrategy(tf_dsgd.LocalCluster(2), average_every=4)
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(optimizer="adam", loss="mse")
    >>> history = model.fit(np.ones((64, 3)), np.ones((64, 1)), batch_size=4, verbose=0)
    >>> strategy.steps, strategy.updates, int(model.optimizer.iterations)
    (16, 2, 8)
    """

    needs_ps = False

    def __init__(
        self,
        cluster: Any = None,
        *,
        average_every: int | Callable[[int], int] = 16,
        optimizer_state: str = "average",
        outer_optimizer: keras.optimizers.Optimizer | None = None,
        sparse: str = "dense",
        placement: Mapping[str, Rows] | str | None = None,
        model_parallel: ModelParallel | None = None,
    ):
        one_of("optimizer_state", optimizer_state, _POLICIES)
        _check_outer(outer_optimizer)
        split, lazy = Patterns(placement), _is_lazy(sparse, placement)
        cluster = model_parallels.checked(model_parallel, cluster, split=bool(split))
        super().__init__(
            cluster,
            Algorithm(SendWeights(optimizer_state), _exchange(average_every), WeightedMean()),
            outer_optimizer,
        )
        replica_parts.use(self, model_parallel)
        self.placement.split = split
        self._optimizers.lazy = lazy
        outer = self._optimizers.for_shards
        if isinstance(outer, BlockMomentum):
            outer.for_workers(self.num_workers)

    @property
    def outer_optimizer(self) -> keras.optimizers.Optimizer | None:
        """The strategy's own copy of the outer optimizer, whose rate may be set."""
        return self._optimizers.for_shards


def _exchange(average_every: Any) -> Together:
    if callable(average_every):
        exchange = Together(period=average_every)
        exchange.steps_to_event(0)  # whether it gives a period at all
        return exchange
    every = positive_int("average_every", average_every)
    return Together(every, every)


def _is_lazy(sparse: Any, placement: Any) -> bool:
    lazy = one_of("sparse", sparse, ("dense", "lazy")) == "lazy"
    if lazy and not placement:
        raise ValueError(
            'sparse="lazy" is for tables that shards train, which are those of `placement`; on all '
            "others workers run the compiled optimizer, as plain Keras does. Give a placement, or "
            f"leave it out. Received: sparse={sparse!r}, placement={placement!r}."
        )
    return lazy


def _check_outer(optimizer: Any) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "outer_optimizer must be a Keras optimizer, such as keras.optimizers.SGD(0.7, "
            f"momentum=0.9, nesterov=True), or None. Received: {optimizer!r}."
        )
    name = type(optimizer).__name__
    if isinstance(optimizer, (DelayTolerantOptimizer, keras.optimizers.LossScaleOptimizer)):
        raise ValueError(
            "outer_optimizer takes the difference between weights and their mean for the gradient, "
            f"which has no delay and no loss scale. Received: {name}. Use SGD with momentum, or "
            "tf_dsgd.optimizers.BlockMomentum."
        )
