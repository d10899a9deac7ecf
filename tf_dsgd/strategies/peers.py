"""`CompressedAsyncStrategy`."""

from __future__ import annotations

from typing import Any

from tf_dsgd.algorithm import Algorithm, Codec
from tf_dsgd.algorithms.downpour import Periods
from tf_dsgd.algorithms.peers import MOST_AHEAD, AddToOwn, SendChange
from tf_dsgd.cluster import resolve
from tf_dsgd.strategies.arguments import codec
from tf_dsgd.strategies.base import DistributedStrategy


class CompressedAsyncStrategy(DistributedStrategy):
    """Strom's compressed SGD: workers send each other what has grown large, and there is no server.

    Use it to study training without a server, where bytes between processes cost time, and on one
    machine where `DownpourStrategy`'s lock is what workers wait for. Each worker has a model of its
    own and runs the *compiled optimizer*, on slots of its own. It sends what a codec makes of its
    change, after each mini-batch, to all, and takes in what the others sent before the next one::

        worker k:  for each message that came, its own too, in one order:  w_k <- w_k + sent
                   dw <- optimizer_k(w_k, g) - w_k
                   send C(dw) to all;  what C holds back stays in worker k's residual

    with C = `compression`. Messages are updates, and are added. A worker applies of its own step
    what it sent, too, and no more; the rest is in its residual, and comes later.

    - **Copies.** All workers take in all messages in the same order. So after a drain all copies
      are equal, to the bit; before it they differ by what is on its way. What was sent and all
      residuals are together the sum of all changes.
    - **What is read outside**, by `evaluate`, `save` or a callback, is the model of the first
      worker that is there, after a drain, which is everybody's. It is without the residuals:
      `strategy.residual()` tells how large they are.
    - **Choose a threshold** by the size of a change, which is about the learning rate times a
      gradient. The updates of all workers are added: where one worker trains well at some rate,
      take a smaller one for several. Of M workers each sees M - 1 steps of others between two of
      its own, which acts as momentum: compile an optimizer without.
    - **State of layers.** BatchNorm's moving statistics come with the messages, and each mini-batch
      counts in them as in one process; of other floats the mean over workers of their changes is
      added, of integers the sum; of strings the last one sent counts. Every worker takes them in
      in the order of the messages, so they are equal, too.
    - **Tables** are sent whole, by elements: of a threshold's message that is what has grown,
      wherever it is. Each worker has all of them.
    - `optimizer.iterations` counts mini-batches of all workers; a worker's own optimizer counts its
      own, for its bias correction. Momenta and the like are each worker's; outside their mean is
      read. Learning-rate schedules follow mini-batches over all workers.
    - **A slow worker** holds messages in memory until it has read them. So nobody begins a
      mini-batch who has sent more than 16 messages more than the slowest worker that has work: it
      waits for that one. A drain empties the log.
    - **A lost worker** (a process, or simulated) takes its residual along; that is all that is
      lost. Its unfinished mini-batches go to others, and `strategy.ledger()` counts what it had
      sent. Where it comes back it begins with a peer's model, at a message's number, and with a
      residual of zeros. When all are lost at once, so is what they did since the last drain: that
      ends training, with an error that says how many updates.
    - **On processes** (`TFCluster`) there are no ps tasks. A message goes from its sender to each
      other worker, and not through the chief, which counts it once all have it. So a worker that
      is stopped holds up the others until it counts as lost (`worker_timeout_seconds`). A message
      whose sender is lost before that is nobody's, and its mini-batches go to another worker.
    - A change that is not finite ends training with an error that names the weight, and nothing of
      it is sent (but by `Cast`, which sends it as it is).

    Args:
        cluster: `tf_dsgd.LocalCluster` or `tf_dsgd.SimulatedCluster` with one shard, or a
            `tf_dsgd.TFCluster` without ps tasks; None for `LocalCluster()`.
        compression: what is sent of a change: a codec of `tf_dsgd.compression`, as
            `Threshold(0.002)`. `TopK(1.0)` sends everything.

    Raises:
        ValueError, TypeError: for a wrong argument, naming it, what was received, and the remedy.

    Deviations from the paper: a worker begins its next mini-batch when its message is where all
    read it, in the log or in every mailbox; the paper's sends are not waited for. Messages are read
    in one order by all, so that copies are equal to the bit and not only up to rounding.

    Reference: Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing,
    Interspeech 2015, algorithm 1.

    Example:

    >>> codec = tf_dsgd.compression.Threshold(0.002)
    >>> strategy = tf_dsgd.CompressedAsyncStrategy(tf_dsgd.LocalCluster(2), compression=codec)
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(keras.optimizers.SGD(0.05), loss="mse")
    >>> history = model.fit(np.ones((64, 3)), np.ones((64, 1)), batch_size=8, verbose=0)
    >>> strategy.steps, strategy.updates
    (8, 8)
    """

    needs_ps = False

    def __init__(self, cluster: Any = None, *, compression: Codec):
        if compression is None:
            raise TypeError(
                "CompressedAsyncStrategy needs a codec, as "
                "compression=tf_dsgd.compression.Threshold(0.002), or TopK(1.0), which sends "
                "everything. Received: None."
            )
        messages = codec(compression)
        cluster = resolve(cluster)
        exchange = Periods(max_staleness=MOST_AHEAD)
        super().__init__(cluster, Algorithm(SendChange(), exchange, AddToOwn(), messages))
        if self.num_shards > 1:
            raise ValueError(
                "CompressedAsyncStrategy divides no weights among shards: each worker has all of "
                f"them. Leave out num_shards of {cluster!r}. Received: "
                f"num_shards={self.num_shards}."
            )
