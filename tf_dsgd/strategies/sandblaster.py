"""`SandblasterStrategy`."""

from __future__ import annotations

from typing import Any

from tf_dsgd.algorithm import Algorithm
from tf_dsgd.algorithms.batch_methods import Iteration, Settings
from tf_dsgd.algorithms.directions import METHODS
from tf_dsgd.algorithms.sandblaster import AddUp, OncePerEvaluation, SumGradient
from tf_dsgd.checks import integer, one_of, positive_int, real
from tf_dsgd.cluster import resolve
from tf_dsgd.strategies.base import DistributedStrategy
from tf_dsgd.strategies.iterations import Iterations
from tf_dsgd.strategies.objective import Objective

_LINE_SEARCHES = ("wolfe", "armijo")
_MOST_PAIRS = 1000
"""The coordinator has a matrix of (2 m + 1)^2 dot products."""


class SandblasterStrategy(DistributedStrategy):
    """Batch methods: L-BFGS and conjugate gradients, on all data, under `fit`.

    Use it where the data are few enough that a pass over them is cheap, or workers many enough, and
    where the last digits of the loss count: it needs no learning rate. Where the data are many and
    alike, `DownpourStrategy` gets far before a batch method has made its first step.

    An epoch is an iteration::

        d <- -H g                     "lbfgs": the two-loop recursion on the last m pairs (s, y)
        d <- -g + beta d              "cg-fr", "cg-pr", "cg-hs": Fletcher-Reeves, Polak-Ribiere,
                                      Hestenes-Stiefel;  "gd": beta = 0
        a <- line search              f and g'd at w + a d: a pass over all data for each a
        w <- w + a d

    m = `history`. The function f is the loss that `evaluate` gives on the training data: the mean
    over examples, sample weights and regularisation included. A mini-batch (`batch_size`) is the
    portion that a free worker takes next, and counts with its examples times its mean loss: where
    a mask reaches the loss, or `reduction` is not Keras's default, pass `shuffle=False`, so that
    each pass has the same mini-batches. Workers fetch once an evaluation and send once, the sum of
    their gradients; the vectors (gradient, direction, history) stay on the shards, which give the
    coordinator dot products. All of a direction's come in one round trip (VL-BFGS).

    - The line search looks for the strong Wolfe conditions; `"armijo"` takes what decreases the
      loss enough. Losses and dot products are in double precision. A pair with s'y <= 0 is left
      out and counted. Where the function is not finite, the step is shortened.
    - Where a line search finds nothing, it is tried again along the steepest descent; then, or when
      a tolerance is met, training ends as by `EarlyStopping`, and a line says why. See
      `last_iteration()`.
    - The mini-batches of a first pass are kept for the next ones, if they take at most 1 GiB; else
      the data are read in each pass.
    - The compiled optimizer plays no part. Keras's default (`compile` without one) is ignored; any
      other is refused.
    - The same weights must give the same loss: dropout, noise and BatchNormalization in training
      mode are refused, naming the layer.
    - Metrics and loss of an epoch are of the weights at its end. A call of `fit` begins with one
      evaluation more, and with no pairs, since its data may be others; so does an epoch whose
      weights a callback has changed.
    - A worker that is lost takes its sum along, and others compute its mini-batches. On processes,
      and on simulated workers with `late_after_seconds`, those of one that is late are computed by
      another as well, and the first result counts.

    Args:
        cluster: `tf_dsgd.LocalCluster`, `tf_dsgd.TFCluster`, `tf_dsgd.SimulatedCluster`; a
            `ClusterSpec` or resolver stands for the `TFCluster` of it; None for the cluster of
            TF_CONFIG if that is set, else `LocalCluster()`.
        method: `"lbfgs"`, `"cg-fr"`, `"cg-pr"`, `"cg-hs"` or `"gd"`.
        history: m, pairs that L-BFGS keeps, at most 1,000; 0 is steepest descent. Shards hold
            2 m + 5 vectors of the model's size. Other methods keep one pair, or none.
        line_search: `"wolfe"` or `"armijo"`.
        max_evaluations: most evaluations of a line search, at least 1; the best step so far is
            taken then, which is evaluated once more if it was not the last.
        gradient_tolerance: training ends when the gradient's Euclidean norm is at most this.
        loss_tolerance: training ends when an iteration lowers the loss by at most this, relative
            to max(1, loss); not where it is 0.

    Raises:
        ValueError, TypeError: for a wrong argument, naming it, what was received, and the remedy.

    Deviations from the paper: a worker sends its sum once per evaluation, and not per portion; the
    paper does not say which line search it used.

    References: Dean et al., Large scale distributed deep networks, NIPS 2012, section 4.2 and
    algorithm 1.2; Nocedal, Wright, Numerical optimization, 2nd edition, algorithms 7.4, 3.5 and
    3.6, and (5.41), (5.44), (5.46); Chen, Wang, Zhou, Large-scale L-BFGS using MapReduce, NIPS
    2014.

    Example:

    >>> strategy = tf_dsgd.SandblasterStrategy(tf_dsgd.LocalCluster(2))
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(loss="mse")
    >>> x = np.random.default_rng(0).normal(size=(64, 3))
    >>> history = model.fit(x, x @ [[1.0], [2.0], [3.0]], batch_size=16, epochs=10, verbose=0)
    >>> strategy.last_iteration().loss < 1e-6
    True
    """

    def __init__(
        self,
        cluster: Any = None,
        *,
        method: str = "lbfgs",
        history: int = 10,
        line_search: str = "wolfe",
        max_evaluations: int = 20,
        gradient_tolerance: float = 0.0,
        loss_tolerance: float = 0.0,
    ):
        settings = Settings(
            method=one_of("method", method, METHODS),
            history=integer("history", history, 0, below=_MOST_PAIRS + 1),
            line_search=one_of("line_search", line_search, _LINE_SEARCHES),
            max_evaluations=positive_int("max_evaluations", max_evaluations),
            gradient_tolerance=_tolerance("gradient_tolerance", gradient_tolerance),
            loss_tolerance=_tolerance("loss_tolerance", loss_tolerance),
        )
        if settings.line_search == "armijo" and method.startswith("cg"):
            raise ValueError(
                "Conjugate gradients need the strong Wolfe conditions: else a direction need not "
                f'lead downhill. Use line_search="wolfe", or method="lbfgs". Received: method='
                f"{method!r}, line_search={line_search!r}."
            )
        cluster = resolve(cluster)
        exchange = OncePerEvaluation(at_once=cluster.batches_a_call)
        super().__init__(cluster, Algorithm(SumGradient(), exchange, AddUp()))
        objective = Objective(self)
        self._optimizers.objective = objective
        self._iterations = Iterations(self.engine, settings, objective)
        self.batches.iterations = self._iterations

    def last_iteration(self) -> Iteration | None:
        """How the last iteration went; None before the first one has ended.

        Returns:
            `Iteration`, with `number`, `loss`, `gradient_norm`, `step`, `evaluations`, `restarts`,
            `skipped_pairs`, `reason` and `is_last`.
        """
        return self._iterations.last

    @property
    def shard_calls(self) -> int:
        """Round trips of the coordinator to the shards so far, beside the passes over the data."""
        return self._iterations.shard_calls


def _tolerance(name: str, value: Any) -> float:
    found = real(value)
    if not 0 <= found < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0. Received: {value!r}.")
    return found
