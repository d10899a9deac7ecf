"""`ElasticAveragingStrategy`."""

from __future__ import annotations

from typing import Any

from tf_dsgd.algorithm import Algorithm
from tf_dsgd.algorithms.downpour import Periods
from tf_dsgd.algorithms.elastic import Elastic, KeepWeights
from tf_dsgd.checks import positive_int, real
from tf_dsgd.strategies.base import DistributedStrategy
from tf_dsgd.strategies.parts import model_parallel as model_parallels
from tf_dsgd.strategies.parts import replica_parts
from tf_dsgd.strategies.parts.model_parallel import ModelParallel


class ElasticAveragingStrategy(DistributedStrategy):
    """Elastic averaging, EASGD and EAMSGD: workers on a spring to a common center, no barrier.

    Use it where workers should explore by themselves and still not wait for each other: they keep
    weights of their own, and every tau mini-batches each is drawn to the center, and the center
    to it, by the same force::

        worker i:  every tau steps:   E = a (x_i - xc);   x_i <- x_i - E
                   x_i <- optimizer_i(x_i, g)             slots of its own
        shard:     with the same E:   xc <- xc + E

    tau = `average_every`, a = `elasticity`. With SGD compiled this is EASGD, with
    `SGD(momentum=..., nesterov=True)` EAMSGD; any other Keras optimizer may be compiled.

    - The model that is validated, saved and read is the center xc.
    - Reading it, or the end of an epoch, drains the workers: each is drawn to the center with what
      it has done, and its period starts anew. Workers keep their own weights, and slots, over
      epochs and drains. Weights that are assigned from outside (`load_weights`) go to all.
    - `strategy.updates` counts the forces that moved the center; staleness counts how many others
      did since a worker's last. `optimizer.iterations` are those of one worker: all mini-batches
      divided by the number of workers. Learning-rate schedules follow all mini-batches.
    - What is saved of the optimizer is the mean of the workers' slots. In BatchNorm's moving
      statistics each mini-batch counts as in one process. Embeddings travel whole.
    - Memory on the shard: with M workers M times the weights, besides these.
    - A lost worker takes with it what it has learnt since the center last drew it; when it comes
      back it begins at the center. Its unfinished batches go to others.

    Args:
        cluster: `tf_dsgd.LocalCluster`, `tf_dsgd.TFCluster`, `tf_dsgd.SimulatedCluster`; a
            `ClusterSpec` or resolver stands for the `TFCluster` of it; None for the cluster of
            TF_CONFIG if that is set, else `LocalCluster()`.
        average_every: tau, mini-batches of one worker between forces; at least 1.
        elasticity: a, the paper's alpha = eta rho; above 0 and below 1; None for 0.9 / M with M
            workers, the paper's choice of beta = M a = 0.9.
        model_parallel: which layers are on which of each worker's devices, a
            `tf_dsgd.ModelParallel`, on a cluster with `devices_per_worker`, or a `TFCluster` with
            `tasks_per_worker`; None: each worker has one device.

    Raises:
        ValueError, TypeError: for a wrong argument, naming it, what was received, and the remedy.

    Deviations from the paper: E is computed by the shard when a worker's weights arrive, and the
    worker moves when it has fetched E, so that both move by the same E exactly. The first gradient
    after that is taken where the worker then is; the paper takes it at the x_i from before. On a
    quadratic function with noise the two differ by at most 2 % in the center's variance up to a
    rate times curvature of 0.1, and at a period of 1 this one is stable where the paper's is not
    (`benchmarks/reproduce/elastic_order.py`).

    Reference: Zhang, Choromanska, LeCun, Deep learning with Elastic Averaging SGD, NIPS 2015,
    algorithm 1 (EASGD) and algorithm 2 (EAMSGD).

    Example:

    >>> strategy = tf_dsgd.ElasticAveragingStrategy(tf_dsgd.LocalCluster(2), average_every=4)
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), loss="mse")
    >>> history = model.fit(np.ones((64, 3)), np.ones((64, 1)), batch_size=4, verbose=0)
    >>> strategy.steps
    16
    """

    def __init__(
        self,
        cluster: Any = None,
        *,
        average_every: int = 16,
        elasticity: float | None = None,
        model_parallel: ModelParallel | None = None,
    ):
        every = positive_int("average_every", average_every)
        share = None if elasticity is None else _elasticity(elasticity)
        rules = Algorithm(KeepWeights(), Periods(every, every), Elastic(share))
        cluster = model_parallels.checked(model_parallel, cluster)
        super().__init__(cluster, rules)
        replica_parts.use(self, model_parallel)


def _elasticity(value: Any) -> float:
    share = real(value)
    if not 0 < share < 1:
        raise ValueError(
            "elasticity must be a number above 0 and below 1, or None for 0.9 / workers. "
            f"Received: {value!r}."
        )
    return share
