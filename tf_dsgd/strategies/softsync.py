"""`SoftsyncStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tf_dsgd.algorithm import Algorithm, Codec
from tf_dsgd.algorithms.downpour import AccrueGradient, Periods
from tf_dsgd.algorithms.softsync import CollectGradients
from tf_dsgd.checks import one_of, positive_int
from tf_dsgd.strategies.arguments import (
    check_codec_of_tables,
    check_staleness_factor,
    codec,
    staleness_bound,
    staleness_factor,
)
from tf_dsgd.strategies.base import DistributedStrategy
from tf_dsgd.strategies.parts import model_parallel as model_parallels
from tf_dsgd.strategies.parts import replica_parts
from tf_dsgd.strategies.parts.model_parallel import ModelParallel
from tf_dsgd.strategies.rows.splitting import Patterns
from tf_dsgd.strategies.rows.tables import Rows


class SoftsyncStrategy(DistributedStrategy):
    """n-softsync: an update for every c gradients, whoever sends them; no worker waits.

    Use it to choose a place between synchronous and fully asynchronous training. Each worker
    computes the gradient of one mini-batch after the other, on weights fetched before each. The
    shard waits until c gradients are there, from whichever workers; the workers do not wait for
    it, nor for each other. More gradients in an update mean fewer updates of less noise, and less
    staleness::

        worker:  w_local <- fetch();  push(gradient(w_local));  again
        shard:   collect c messages;  w <- w - (1/c) sum_l alpha(tau_l) g_l
                 alpha(tau) = alpha_0 f(tau);  f(tau) = 1 / tau, and 1 where tau = 0

    with c = `gradients_per_update`, alpha_0 = the compiled optimizer's learning rate and f =
    `staleness_scaling`. tau_l counts the updates between the fetch before the gradient and its
    arrival at the shard.

    The paper's n-softsync on lambda workers is c = floor(lambda / n), so write
    `gradients_per_update=num_workers // n`. 1-softsync (c = lambda) is near synchronous training:
    in the paper's runs, of workers of one speed, staleness is 0, 1 or 2. lambda-softsync (c = 1) is
    `DownpourStrategy` with periods of 1. The mean staleness is about n. Nobody waits for a certain
    number of workers, so c may be larger than lambda: some workers then have several gradients in
    one update.

    Under an optimizer that is not linear in the gradient the equation is read as follows: the
    optimizer is given the weighted mean gradient, sum f(tau_l) g_l / sum f(tau_l), and its step
    is multiplied by (1/c) sum f(tau_l). For SGD, with or without momentum, the two together are the
    paper's sum; under Adagrad, RMSprop or Adam a gradient's scale has little effect and the
    step's has.

    - A partial collection: when the run of mini-batches ends (end of an epoch, a checkpoint,
      someone reads the weights), the shard makes one update with the messages it has, with their
      number in place of c. Nothing is left over for later, and nothing is thrown away.
    - `strategy.updates` and `optimizer.iterations` count updates of the weights; the ledger's
      `applied` counts messages; `strategy.steps` and learning-rate schedules count mini-batches.
    - Gradients of embeddings stay sparse: a collection holds the rows that its messages touched.
    - Clipping: the shard clips the mean, as Keras does a batch's gradient; with `global_clipnorm`,
      on a cluster of several shards, each mini-batch's gradient is clipped on the worker.
    - Under float16 loss scaling a gradient that overflowed has its whole collection skipped.
    - On a cluster of several ps tasks each shard has a collection of its own; messages may arrive
      in another order at another shard.
    - What a worker had sent before it was lost stays in the collection and is used; the batches of
      what it had not sent go to others. No collection waits for a certain worker.

    Args:
        cluster: `tf_dsgd.LocalCluster`, `tf_dsgd.TFCluster`, `tf_dsgd.SimulatedCluster`; a
            `ClusterSpec` or resolver stands for the `TFCluster` of it; None for the cluster of
            TF_CONFIG if that is set, else `LocalCluster()`.
        gradients_per_update: c, messages in an update; at least 1.
        staleness_scaling: f(tau), the weight of a gradient that is tau updates stale. `"inverse"`
            is 1 / max(tau, 1), as in the paper; or a callable from an int64 scalar tensor to a
            float scalar tensor of at least 0; None for equal weights.
        max_staleness: a worker starts a round only if it has sent at most this many messages more
            than the slowest worker (bounded staleness, SSP); at least 0; None for no bound. With a
            bound workers do wait, for each other.
        sparse: what an update does with rows of an embedding that have no gradient; as of
            `DownpourStrategy`.
        placement: which tables are split by rows over the shards; as of `DownpourStrategy`.
        compression: what a worker sends in place of a message's tensors: a codec of
            `tf_dsgd.compression`, as `Threshold(0.002)`; None for the tensors themselves. A
            collection is a sum of what was decoded.
        model_parallel: which layers are on which of each worker's devices, a
            `tf_dsgd.ModelParallel`, on a cluster with `devices_per_worker`, or a `TFCluster` with
            `tasks_per_worker`; None: each worker has one device.

    Raises:
        ValueError, TypeError: for a wrong argument, naming it, what was received, and the remedy.

    Deviations from the paper: the reading for nonlinear optimizers above; alpha(0) is alpha_0; a
    worker fetches before every mini-batch, also where no update was made since its last.

    Reference: Zhang, Gupta, Lian, Liu, Staleness-Aware Async-SGD for Distributed Deep Learning,
    IJCAI 2016: the n-softsync protocol, and equation 6 for alpha(tau).

    Example:

    >>> cluster = tf_dsgd.SimulatedCluster(4, compute_seconds=tf_dsgd.Exponential(1.0), seed=0)
    >>> strategy = tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=4)
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    >>> history = model.fit(np.ones((80, 3)), np.ones((80, 1)), batch_size=8, verbose=0)
    >>> strategy.steps, strategy.updates  # two updates of four gradients, one of the last two
    (10, 3)
    """

    def __init__(
        self,
        cluster: Any = None,
        *,
        gradients_per_update: int,
        staleness_scaling: str | Callable[[tf.Tensor], tf.Tensor] | None = "inverse",
        max_staleness: int | None = None,
        sparse: str = "dense",
        placement: Mapping[str, Rows] | str | None = None,
        compression: Codec | None = None,
        model_parallel: ModelParallel | None = None,
    ):
        lazy = one_of("sparse", sparse, ("dense", "lazy")) == "lazy"
        count = positive_int("gradients_per_update", gradients_per_update)
        scaling = staleness_factor(staleness_scaling)
        exchange = Periods(max_staleness=staleness_bound(max_staleness))
        server = CollectGradients(count, scaling)
        split = Patterns(placement)
        local, messages = AccrueGradient(rate=0.0), codec(compression)
        check_codec_of_tables(messages, split)
        cluster = model_parallels.checked(model_parallel, cluster, split=bool(split))
        super().__init__(cluster, Algorithm(local, exchange, server, messages))
        replica_parts.use(self, model_parallel)
        self.placement.split = split
        self._optimizers.lazy = lazy
        check_staleness_factor(staleness_scaling, scaling)
