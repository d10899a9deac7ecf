"""`HogwildStrategy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_dsgd.algorithm import Algorithm
from tf_dsgd.algorithms.downpour import AccrueGradient, Periods
from tf_dsgd.algorithms.hogwild import (
    AddInPlace,
    AddInTurn,
    AddUnderLocksOfRows,
    GradientAtShared,
    InTurn,
)
from tf_dsgd.checks import one_of
from tf_dsgd.cluster import TFCluster, resolve
from tf_dsgd.strategies.base import DistributedStrategy
from tf_dsgd.strategies.rows.splitting import Patterns
from tf_dsgd.strategies.rows.tables import Rows


class HogwildStrategy(DistributedStrategy):
    """Hogwild!: workers that change shared weights side by side, without a lock.

    Use it on one machine for models that are mostly tables, of which a mini-batch touches few rows:
    threads then seldom meet in a row. Each thread reads the rows of its mini-batch, and the dense
    weights, where they are, and adds its update there::

        worker:  sample e;  read x_e;  for v in e:  x_v <- x_v - gamma (G_e)_v

    with x = the weights, e = the rows and dense weights of a mini-batch, gamma = the compiled
    optimizer's rate.

    One worker does what plain Keras does. What the name promises with several:

    - **Rows** of tables are read and changed without a lock; an id that a mini-batch names several
      times is added once, as the sum. TensorFlow's addition to a row is not atomic between threads:
      two that add to one row in the same moment may keep one of the two additions. Where threads
      touch different rows nothing is lost. With `lock="rows"` nothing is lost in any case: an
      update holds the locks of its rows.
    - **Dense weights** are read in place as well. TensorFlow adds to a dense variable as a whole,
      under that variable's own lock (the paper's AIG), so nothing is lost there.
    - A thread may read some weights before another's update and some after it.
    - Each mini-batch is a message that is counted once, under a lock: `strategy.steps`,
      `strategy.updates`, `optimizer.iterations` and the ledger are exact, whatever is lost in rows.

    On a cluster, whose processes share no memory, the weights of the parameter servers are shared:
    a worker fetches the dense weights and the rows of its mini-batch, and each shard applies its
    message beside those of others, up to 64 at once, where `DownpourStrategy` applies one after
    another. A message of a lost worker is applied whole or not at all, as everywhere: what a shard
    has begun it ends, and only then the worker's mini-batches are given to others.

    Args:
        cluster: `tf_dsgd.LocalCluster`, `tf_dsgd.TFCluster`, or `tf_dsgd.SimulatedCluster`, on
            which updates come one after another; None for the launched cluster, or else
            `LocalCluster()`.
        lock: `"none"`; or `"rows"`, the paper's AIG: the rows of a mini-batch are locked for its
            update, one by one in ascending order, and read before without a lock. There are 1,024
            locks, which rows share, each with a thread of TensorFlow's; taking one costs 0.1 to 0.2
            ms. Or `"round-robin"`: worker k mod n has mini-batch k and waits with its update until
            mini-batches 0 to k - 1 have made theirs (counted from the last drain, as at the end of
            an epoch), so nothing is lost and updates come in the order of the data. Rows are read
            meanwhile, without a lock. On a `TFCluster` only `"none"`.
        placement: which tables are read and changed by rows: a dict from regular expressions on
            paths to `tf_dsgd.Rows()`, or `"auto"`, each `keras.layers.Embedding` that has no
            constraint and no regularizer.

    Raises:
        ValueError, TypeError: for a wrong argument, naming it, what was received, and the remedy.
            When the step is traced: for optimizers other than SGD without momentum and Adagrad,
            and options of them that write over what others have added.

    Deviations from the paper: a mini-batch in place of an example; a row of several columns is not
    added atomically; the update of a row is one addition, and Adagrad's two (its accumulator's, and
    the row's by the accumulator that it read).

    Reference: Niu, Recht, Re, Wright, Hogwild!: A Lock-Free Approach to Parallelizing Stochastic
    Gradient Descent, NIPS 2011, algorithm 1.

    Example:

    >>> strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(2))
    >>> with strategy.scope():
    ...     ids = keras.Input((2,), dtype="int32")
    ...     rows = keras.layers.Embedding(1000, 4)(ids)
    ...     model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    ...     model.compile(optimizer="adagrad", loss="mse")
    >>> data = np.arange(64).reshape(32, 2), np.ones((32, 1))
    >>> history = model.fit(*data, batch_size=8, verbose=0)
    >>> strategy.steps, strategy.updates
    (4, 4)
    """

    def __init__(
        self,
        cluster: Any = None,
        *,
        lock: str = "none",
        placement: Mapping[str, Rows] | str = "auto",
    ):
        exchange, server = _rules(lock)
        cluster = resolve(cluster)
        local: AccrueGradient = GradientAtShared()
        if isinstance(cluster, TFCluster):
            if lock != "none":
                raise ValueError(
                    f"lock={lock!r} is for threads, which share one memory. On {cluster!r} use "
                    'lock="none", or tf_dsgd.DownpourStrategy, whose shards have a lock.'
                )
            local = AccrueGradient(rate=0.0)
        split = Patterns(placement, auto_bytes=0)
        super().__init__(cluster, Algorithm(local, exchange, server))
        self.placement.split = split


def _rules(lock: Any) -> tuple[Periods, AddInPlace]:
    lock = one_of("lock", lock, ("none", "rows", "round-robin"))
    if lock == "round-robin":
        return InTurn(), AddInTurn()
    return Periods(), AddUnderLocksOfRows() if lock == "rows" else AddInPlace()
