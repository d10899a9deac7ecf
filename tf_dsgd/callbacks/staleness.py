"""`StalenessMonitor`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_dsgd._requirements import installed
from tf_dsgd.callbacks.measuring import Measures, Meter
from tf_dsgd.callbacks.run_files import TENSORBOARD_MISSING, Events, Records
from tf_dsgd.callbacks.sending import SendingMeter, Sent
from tf_dsgd.checks import called, folder, positive_seconds, truth
from tf_dsgd.engine import traffic
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.strategies.base import DistributedStrategy

# However slow a sample is, samples take at most about this share of the main thread's time.
_MOST_TIME = 0.02


@called()
class StalenessMonitor(keras.callbacks.Callback):
    """Measures how stale updates are, how fast each worker is, and what its time goes to.

    Use it to see whether asynchrony costs accuracy or a worker lags. It reads what the shards count
    under their locks, so every applied message is in exactly one interval, and it waits for no
    worker. With tau the staleness of a message, over the messages of an interval::

        staleness_mean, _p50, _p99, _max    of tau
        effective_rate                      learning rate * mean of f(tau), f = `staleness_scaling`
        steps_per_second                    mini-batches applied / seconds of training

    In `fit` these are in the epoch's logs, for History and for the callbacks *after* this one in
    the list; the interval is the epoch's training, without its validation. `steps_per_second` is
    that of all workers, and `steps_per_second_worker_0`, `_1` ... that of each; with more than 16
    workers `steps_per_second_worker_min`, `_median` and `_max`. A number that the interval has
    no message for is NaN.

    With `compression=` also, over the messages that workers have encoded::

        message_bytes, dense_ratio    bytes of a message; how many times more they are without codec
        fraction_emitted              share of elements that is in a message
        residual_norm                 root mean square of workers' `strategy.residual()`, at the end
        residual_to_gradient          the same / root mean square of the norms of messages' tensors
        residuals_lost                workers that were lost, with what they held back, since ever
        fraction_overdue              of `Threshold`: share of elements above tau after sending

    On a cluster of processes these are taken at the ends of epochs, where workers are at rest. If
    `fraction_overdue`, or with the same fraction the residual, grows over an epoch (the first: from
    its first sample with messages on), and the fraction is above 1 %, a warning says so, once.

    With `run_dir`, and at most every `every_seconds`, it also appends a line to
    `run_dir/monitor.jsonl`, and scalars and histograms to event files under
    `run_dir/tensorboard`. `python -m tf_dsgd.report RUN_DIR` draws the lines. A run that is
    started again in its folder appends.

    In a loop of your own call `start`, then `sample_if_due` after each step or `sample` whenever
    you like, and `stop`, which waits for the mini-batches handed out.

    A lost worker's messages count until the last that was applied; its rate is then 0. Percentiles
    and the maximum are exact below 16,383 updates; the mean is exact always. The learning rate is
    that at the end of the interval. On a simulated cluster seconds are virtual.

    Args:
        run_dir: folder of this run; made if it is not there. None for logs alone.
        every_seconds: least time between two samples, above 0 and below 1e9; by the clock of the
            cluster, which is virtual if that is simulated. If sampling is slow, as with many
            workers, it is done less often than that, so that it takes at most 2 % of the main
            thread's time.
        tensorboard: whether event files are written to `run_dir`; None for: if TensorBoard is
            installed.

    Raises:
        ValueError: for a wrong argument; and, when training begins, for a model that is not under a
            `tf_dsgd` strategy.
        ImportError: with `tensorboard=True`, if TensorBoard is not installed.

    Example:

    >>> strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(optimizer="adagrad", loss="mse")
    >>> monitor = tf_dsgd.callbacks.StalenessMonitor()
    >>> x, y = np.ones((64, 3)), np.ones((64, 1))
    >>> history = model.fit(x, y, batch_size=8, callbacks=[monitor], verbose=0).history
    >>> history["staleness_mean"][0] == strategy.staleness().mean
    True
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        every_seconds: float = 1.0,
        tensorboard: bool | None = None,
    ):
        super().__init__()
        every_seconds = positive_seconds("every_seconds", every_seconds)
        if run_dir is not None:
            folder("run_dir", run_dir, "None for no files")
        if tensorboard is not None:
            tensorboard = truth("tensorboard", tensorboard, "None")
        if tensorboard and run_dir is None:
            raise ValueError("tensorboard=True needs a run_dir to write to. Received: None.")
        if tensorboard and not installed("tensorboard"):
            raise ImportError(TENSORBOARD_MISSING)
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.every_seconds = every_seconds
        self._tensorboard = tensorboard
        self._meter: Meter | None = None
        self._sending: SendingMeter | None = None
        self._sent: Sent | None = None
        self._sent_at_epoch: Sent | None = None
        self._held_at_first: Sent | None = None
        """As the epoch began, or the first sample in it that had messages."""
        self._records: Records | None = None
        self._events: Events | None = None
        self._start: Snapshot | None = None
        self._due = 0.0
        self._epoch: int | None = None
        self._epoch_start: Snapshot | None = None
        self._epoch_end: tuple[Measures, Snapshot, dict[str, float]] | None = None
        self._latest: Mapping[str, Any] | None = None

    # -- by plain calls ---------------------------------------------------------------------

    def start(
        self, strategy: DistributedStrategy, optimizer: keras.optimizers.Optimizer | None = None
    ) -> None:
        """Begins to measure; what it measured before ends.

        Args:
            strategy: what trains.
            optimizer: whose learning rate is meant by `effective_rate`, which is NaN without, and
                under a `MultiOptimizer`.
        """
        if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                f"optimizer must be a Keras optimizer, or None. Received: {optimizer!r}."
            )
        if self._start is not None:
            self.stop()
        self._open(strategy, optimizer)
        self._begin()

    def sample(self, logs: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Measures the interval since the last sample, and writes it to the files.

        Args:
            logs: numbers, such as the loss, that go into the record.

        Returns:
            What `fit` would have in its logs, by the same names.
        """
        if logs is not None and not isinstance(logs, Mapping):
            raise TypeError(f"logs must be a dict of numbers, or None. Received: {logs!r}.")
        measures, _, sent = self._sample(logs or {})
        return measures.logs() | sent

    def sample_if_due(self, logs: Mapping[str, Any] | None = None) -> dict[str, float] | None:
        """Does the same if the last sample is `every_seconds` ago; cheap if not."""
        meter = self._running()
        if meter.clock() < self._due:
            return None
        began = time.perf_counter()
        measured = None
        try:
            measured = self.sample(logs)
        except tf.errors.OpError as error:
            # A task that holds the counts does not answer. Training finds out by itself, and then
            # says what was lost and what to do.
            logging.info("tf_dsgd: no sample: %s", error.message)
        least = 0.0 if meter.virtual else (time.perf_counter() - began) / _MOST_TIME
        self._due = meter.clock() + max(self.every_seconds, least)
        return measured

    def stop(self) -> None:
        """Ends measuring, with a last sample of what came since, once all of that was applied."""
        meter = self._running()
        meter.strategy.settle()
        now = meter.snapshot()
        if any(shard.applied.any() for shard in now.since(self._last).shards):
            self._sample({}, now, at_rest=True)
        self._write({"kind": "end", "seconds": now.seconds - self._begun().seconds})
        self._close()

    # -- called by `fit` --------------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._open(self.model.distribute_strategy, self.model.optimizer)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._begin()  # not earlier: another callback may restore the strategy's counts
        self._epoch, self._epoch_start, self._epoch_end = epoch, self._last, None

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._latest = logs
        self.sample_if_due(logs)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._epoch_start is not None and self._epoch_end is None:
            self._end_epoch(self._latest or {})  # the time of validation is not training's

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        measures, now, sent = self._epoch_end or self._end_epoch(logs)
        own = measures.logs() | sent
        logs.update(own)
        shown = {name: value for name, value in logs.items() if name not in own}
        record = self._running().record("epoch", measures, self._begun(), now, shown)
        self._write({**record, "epoch": epoch, **_messages(sent)})
        self._epoch_start = None

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._start is None:
            self._close()  # no epoch was to be done
        else:
            self.stop()

    # -- inside -----------------------------------------------------------------------------

    def _open(self, strategy: Any, optimizer: Any) -> None:
        if not isinstance(strategy, DistributedStrategy):
            raise ValueError(
                "StalenessMonitor measures a tf_dsgd strategy, such as "
                "tf_dsgd.DownpourStrategy(). Make and compile the model inside `with "
                f"strategy.scope():`. Received a model under: {type(strategy).__name__}."
            )
        self._close()  # what a broken run left
        self._meter = Meter(strategy, optimizer)
        self._sending = SendingMeter(strategy)
        if self.run_dir is None:
            return
        self._records = Records(self.run_dir)
        if installed("tensorboard") and self._tensorboard is not False:
            self._events = Events(self.run_dir)
        elif self._tensorboard is None:
            logging.warning("tf_dsgd: %s (tensorboard=False: no such message)", TENSORBOARD_MISSING)

    def _begin(self) -> None:
        """From now on counts."""
        meter = self._running()
        self._last = meter.snapshot()
        self._sent = self._sent_at_epoch = None if self._sending is None else self._sending.read()
        self._held_at_first = _if_sent(self._sent)
        self._epoch = self._latest = None
        self._due = self._last.seconds + self.every_seconds
        if self._start is None:
            self._start = self._last
            self._write(meter.header(self._last, self.every_seconds))

    def _end_epoch(self, logs: Mapping[str, Any]) -> tuple[Measures, Snapshot, dict[str, float]]:
        """The epoch's last sample, and the measures of the whole epoch."""
        meter, sending, begun = self._running(), self._sending, self._sent_at_epoch
        sent: dict[str, float] = {}
        if sending is not None and sending.measures_codec:
            meter.strategy.settle()  # as it is where an epoch ends, if not yet where one is judged
        _, now, _ = self._sample(logs, at_rest=True)
        if self._epoch_start is None:
            raise RuntimeError("on_epoch_end was called before on_epoch_begin.")
        if sending is not None and self._sent is not None and begun is not None:
            sent = self._sent.since(begun).measures()
            if self._held_at_first is not None:
                sending.warn(self._held_at_first, self._sent)
        self._epoch_end = meter.measure(now.since(self._epoch_start)), now, sent
        return self._epoch_end

    def _sample(
        self, logs: Mapping[str, Any], now: Snapshot | None = None, at_rest: bool = False
    ) -> tuple[Measures, Snapshot, dict[str, float]]:
        meter = self._running()
        now = meter.snapshot() if now is None else now
        measures = meter.measure(now.since(self._last))
        first = self._last if self._epoch_start is None else self._epoch_start
        # Until a worker is done with its first round, logs are zeros or an earlier epoch's.
        shown = logs if now.steps > first.steps or self._epoch is None else {}
        record = meter.record("sample", measures, self._begun(), now, shown)
        self._last = now  # only now: had the record failed, the next one would have it all
        sent = self._sample_of_messages(at_rest)
        self._write({**record, "epoch": self._epoch, **_messages(sent)})
        if self._events is not None:
            self._events.append(measures, now.steps)
            self._events.scalars(_messages(sent), now.steps)
        return measures, now, sent

    def _sample_of_messages(self, at_rest: bool) -> dict[str, float]:
        """Of those encoded since the last time; nothing where that would wait for a process."""
        sending, before = self._sending, self._sent
        if sending is None or before is None or not (at_rest or sending.at_any_time):
            return {}
        self._sent = sending.read()
        if self._held_at_first is None:
            self._held_at_first = _if_sent(self._sent)
        return {} if self._sent is None else self._sent.since(before).measures()

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._records is not None:
            self._records.append(record)

    def _running(self) -> Meter:
        if self._meter is None:
            raise RuntimeError(
                "StalenessMonitor is not measuring. Outside of `fit`, call start(strategy) first."
            )
        return self._meter

    def _begun(self) -> Snapshot:
        if self._start is None:
            raise RuntimeError("StalenessMonitor has not begun to measure.")
        return self._start

    def _close(self) -> None:
        if self._events is not None:
            self._events.close()
        self._meter = self._sending = self._records = self._events = None
        self._start = self._epoch_start = self._epoch_end = None


def _if_sent(sent: Sent | None) -> Sent | None:
    """None where there was no message: nothing is held back before the first."""
    return sent if sent is not None and sent.rows[:, traffic.MESSAGES].any() else None


def _messages(sent: dict[str, float]) -> dict[str, dict[str, float]]:
    """In a record; nothing without a codec."""
    return {"messages": sent} if sent else {}
