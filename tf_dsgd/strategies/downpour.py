"""`DownpourStrategy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tf_dsgd.algorithm import Algorithm, Codec, LocalRule, ServerRule
from tf_dsgd.algorithms.downpour import AccrueGradient, CompiledOptimizer, Periods
from tf_dsgd.algorithms.updates import AddUpdate, CompiledOptimizerOnWorker
from tf_dsgd.checks import called, integer, one_of, positive_int, real
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


@called(examples={"learning_rate": "0.01"})
@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Plain SGD at a rate of its own, as a local rule.

    Args:
        learning_rate: alpha of the local steps; at least 0, where 0 means no local step, and below
            1e9.

    Raises:
        ValueError: for a wrong rate, naming it.

    Example:

    >>> tf_dsgd.LocalSGD(0.01)
    LocalSGD(learning_rate=0.01)
    """

    learning_rate: float

    def __post_init__(self) -> None:
        rate = self.learning_rate
        if not 0 <= real(rate) < 1e9:
            raise ValueError(
                "LocalSGD's learning_rate must be a number of at least 0, below 1e9. "
                f"Received: {rate!r}."
            )


class DownpourStrategy(DistributedStrategy):
    """Downpour SGD: asynchronous workers around a shared model.

    Use it to train one model with several workers that wait for each other by `max_staleness`
    alone. Each worker computes gradients on its own copy of the weights, sends their sum every
    `push_every` mini-batches and fetches fresh weights every `fetch_every`; the *compiled Keras
    optimizer* runs on the shard, once per message::

        worker:  if step % n_fetch == 0:  w_local <- fetch()
                 g <- gradient(w_local);  accrued <- accrued + g
                 w_local <- w_local - alpha g            (the local rule)
                 step <- step + 1
                 if step % n_push == 0:  push(accrued);  accrued <- 0
        shard:   w <- optimizer(w, accrued)

    with n_push = `push_every`, n_fetch = `fetch_every`, alpha = the compiled optimizer's learning
    rate or that of `LocalSGD`. A push that is due together with a fetch comes first.

    One worker with periods of 1 does what plain Keras does. With longer periods a message is a
    *sum* of gradients: under an optimizer that does not normalise them (SGD), a period of n makes
    n times larger steps, as if each gradient were applied by itself.

    - `optimizer.iterations` counts updates made by the optimizer: messages applied, or, with
      `local_rule="optimizer"`, mini-batches. Learning-rate schedules and `strategy.steps` count
      mini-batches.
    - A learning rate that a callback sets at a mini-batch reaches the workers' next fetches and the
      messages that arrive from then on. Several mini-batches are under way at any moment, so which
      ones it meets differs from run to run; set at the end of an epoch it is exact, and so is a
      schedule (`keras.optimizers.schedules`) at every mini-batch.
    - Where shards run the optimizer, a sparse gradient that names a row several times is applied as
      the sum that it stands for. Keras squares each of them, where it squares: its Adagrad adds 2
      for a row that is named twice with a gradient of 1, and 4 where that gradient is dense, which
      is what is added here.
    - Clipping: with a period above 1, and with `global_clipnorm` on several ps tasks, each
      mini-batch's gradient is clipped, on the worker, for its local step, too; otherwise the shard
      clips, as Keras does.
    - A step that applies gradients more than once (a GAN's) computes all of them on the weights it
      began with; `local_rule="optimizer"` keeps the step's own order. A step that assigns a
      trainable weight itself (`SpectralNormalization`) needs that rule, and is refused otherwise.
    - `train_on_batch` runs one plain Keras step on the shard's weights, in the main thread.
      Schedules count it; `steps` and `updates`, which are about workers' messages, do not. It is
      refused where workers have slots of their own (`local_rule="optimizer"`).
    - Reading a weight or a metric anywhere outside a step drains the workers: all batches handed
      out are trained on, what is accrued is sent, and every worker's periods start anew with a
      fetch. A callback that reads weights at every batch makes training synchronous.
      The learning rate and `iterations` are read without waiting.
    - A worker that raises ends `fit` with its error; what the other workers had sent is kept, and
      its own unfinished message is counted as refused. Workers of `LocalCluster` are threads of
      this process and are not lost singly; a worker process of a `TFCluster` may be, see there.

    Args:
        cluster: `tf_dsgd.LocalCluster`, `tf_dsgd.TFCluster`, `tf_dsgd.SimulatedCluster`; a
            `ClusterSpec` or resolver stands for the `TFCluster` of it; None for the cluster of
            TF_CONFIG if that is set, else `LocalCluster()`.
        push_every: mini-batches between pushes of one worker; at least 1.
        fetch_every: mini-batches between fetches of one worker; at least 1.
        local_rule: what a worker does to its copy between fetches. `"sgd"`: a plain SGD step
            at the compiled optimizer's rate, as in the paper; that rate can be far too large for
            plain SGD (Adadelta's is 1), so a rate may be given: `tf_dsgd.LocalSGD(0.01)`.
            `"none"`: nothing. `"optimizer"`: each worker runs the compiled optimizer, on slots of
            its own, and pushes the change of its weights instead of the gradient (update-based
            asynchronous SGD; W <- W + dW).
        staleness_scaling: factor f(tau) for the *step* of a message that is tau updates stale; it
            multiplies the learning rate (or the update), so it works under every optimizer.
            `"inverse"` is 1 / max(tau, 1); or a callable from an int64 scalar tensor to a
            float scalar tensor; None for no scaling.
        max_staleness: a worker starts a round only if it has sent at most this many messages more
            than the slowest worker (bounded staleness, SSP); at least 0; None for no bound. A lost
            worker is not waited for, and a worker that joins starts from the slowest one's count.
        wire_dtype: type in which floating-point weights and gradients travel between workers and
            shards: `"bfloat16"` or `"float16"` halve the bytes of float32, and round; None for the
            variables' own. Shards keep and update weights in their own type. Another spelling of
            `compression=tf_dsgd.compression.Cast(...)`.
        warm_start_steps: mini-batches that worker 0 does alone before the others join; at least 0.
        sparse: what an update does with rows of an embedding that have no gradient. `"dense"`: what
            the compiled optimizer does with a gradient of zero, as plain Keras: under Adam or
            momentum all rows move, and each message costs the whole table. `"lazy"`: nothing; a
            message costs its rows. Under Adagrad, and SGD without momentum, both are the same
            numbers, at the cost of the rows.
        placement: which weights are split by rows over the shards, so that no worker has a copy:
            a dict from regular expressions, each of which matches the end of a weight's path from
            one of its names on, to `tf_dsgd.Rows()`; or `"auto"`, each `keras.layers.Embedding` of
            100 MB and more. See "Large tables" in the documentation for what can be split.
        compression: what a worker sends in place of a message's tensors: a codec of
            `tf_dsgd.compression`, as `Threshold(0.002)`; None for the tensors themselves. What is
            fetched travels as it is (but for `Cast`).
        model_parallel: which layers are on which of each worker's devices, a
            `tf_dsgd.ModelParallel`, on a cluster with `devices_per_worker`, or a `TFCluster` with
            `tasks_per_worker`; None: each worker has one device.

    Raises:
        ValueError, TypeError: for a wrong argument, naming it, what was received, and the remedy.

    Deviations from the paper: a worker waits for its fetch, and before a fetch for its push, so
    that it sees its own updates (on a cluster other pushes travel while it computes on); and on one
    machine there is one shard, so that a fetch is consistent, while the paper's many shards are not
    consistent with each other (those of a cluster are not, either).

    Reference: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.1 and
    algorithm 1.1 of the appendix.

    Example:

    >>> strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2), push_every=4, fetch_every=4)
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(optimizer="adagrad", loss="mse")
    >>> history = model.fit(np.ones((64, 3)), np.ones((64, 1)), batch_size=8, verbose=0)
    >>> strategy.steps
    8
    """

    def __init__(
        self,
        cluster: Any = None,
        *,
        push_every: int = 1,
        fetch_every: int = 1,
        local_rule: str | LocalSGD = "sgd",
        staleness_scaling: str | Callable[[tf.Tensor], tf.Tensor] | None = None,
        max_staleness: int | None = None,
        warm_start_steps: int = 0,
        wire_dtype: str | None = None,
        sparse: str = "dense",
        placement: Mapping[str, Rows] | str | None = None,
        compression: Codec | None = None,
        model_parallel: ModelParallel | None = None,
    ):
        lazy = one_of("sparse", sparse, ("dense", "lazy")) == "lazy"
        messages = codec(compression, wire_dtype)
        exchange = Periods(
            push_every=positive_int("push_every", push_every),
            fetch_every=positive_int("fetch_every", fetch_every),
            warm_start_steps=integer("warm_start_steps", warm_start_steps, 0),
            max_staleness=staleness_bound(max_staleness),
        )
        scaling = staleness_factor(staleness_scaling)
        local = _local_rule(local_rule, exchange)
        server: ServerRule = (
            AddUpdate(scaling) if local.sends == "update" else CompiledOptimizer(scaling)
        )
        if lazy and local.sends == "update":
            raise ValueError(
                'sparse="lazy" is for optimizers that run on shards; with local_rule="optimizer" '
                "they run on workers, who send changes of whole tables. Leave one of the two out."
            )
        split = Patterns(placement)
        if split and local.sends == "update":
            raise ValueError(
                "placement splits tables whose optimizer runs on shards; with "
                'local_rule="optimizer" it runs on workers, who have whole tables. Leave one of '
                "the two out."
            )
        check_codec_of_tables(messages, split)
        cluster = model_parallels.checked(model_parallel, cluster, split=bool(split))
        super().__init__(cluster, Algorithm(local, exchange, server, messages))
        replica_parts.use(self, model_parallel)
        self.placement.split = split
        self._optimizers.lazy = lazy
        check_staleness_factor(staleness_scaling, scaling)


def _local_rule(value: Any, exchange: Periods) -> LocalRule:
    periods = {"push_every": exchange.push_every, "fetch_every": exchange.fetch_every}
    if isinstance(value, LocalSGD):
        return AccrueGradient(rate=float(value.learning_rate), **periods)
    rule = one_of("local_rule", value, ("sgd", "none", "optimizer"), "a tf_dsgd.LocalSGD")
    if rule == "optimizer":
        return CompiledOptimizerOnWorker()
    return AccrueGradient(rate=None if rule == "sgd" else 0.0, **periods)
