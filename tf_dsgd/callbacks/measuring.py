"""What `StalenessMonitor` computes from the difference of two snapshots of a strategy."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd._version import __version__
from tf_dsgd.engine.ledger import Counters
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.timing import KINDS

SCHEMA = 1
"""Of the records; a change that a reader would notice makes it another number."""

SHOWN_WORKERS = 16
"""With more workers, logs and event files have the least, median and greatest, not each."""


class MeanFactor:
    """The mean of f(tau) over messages, f being a strategy's `staleness_scaling`."""

    def __init__(self, scaling: Callable[[tf.Tensor], tf.Tensor] | None):
        self._known: dict[int, float] = {}
        self._f = None
        if scaling is not None:
            self._f = tf.function(
                lambda taus: tf.map_fn(
                    lambda tau: tf.cast(scaling(tau), tf.float32),
                    taus,
                    fn_output_signature=tf.float32,
                ),
                autograph=False,
                input_signature=[tf.TensorSpec([None], tf.int64)],
            )

    def __call__(self, bins: np.ndarray) -> float:
        """The mean over `bins[tau]` messages of each staleness tau; 1 without scaling."""
        if self._f is None:
            return 1.0
        taus = np.flatnonzero(bins)
        if not len(taus):
            return float("nan")
        new = [tau for tau in taus.tolist() if tau not in self._known]
        if new:
            values = self._f(tf.constant(new, tf.int64)).numpy().tolist()
            self._known.update(zip(new, values, strict=True))
        factors = np.array([self._known[tau] for tau in taus.tolist()])
        return float((factors * bins[taus]).sum() / bins[taus].sum())


class Meter:
    """Reads a strategy and its optimizer, and turns intervals into numbers.

    Args:
        strategy: the strategy.
        optimizer: whose learning rate is meant; None if that is of no interest.
    """

    def __init__(self, strategy: Any, optimizer: keras.optimizers.Optimizer | None):
        self.strategy = strategy
        self._optimizer = optimizer
        # A property of the server rules that scale; of others, a message's step is the whole one.
        self._mean_factor = MeanFactor(getattr(strategy.algorithm.server, "scaling", None))

    def clock(self) -> float:
        """The strategy's clock: seconds of this machine, or virtual ones."""
        return self.strategy.engine.clock()

    @property
    def virtual(self) -> bool:
        """Whether that clock is virtual."""
        return self.strategy.engine.virtual_clock

    def snapshot(self) -> Snapshot:
        """All counts now."""
        return self.strategy.engine.snapshot()

    def _learning_rate(self) -> float:
        # A MultiOptimizer has none: each of its parts has its own.
        rate = getattr(self._optimizer, "learning_rate", None)
        return float("nan") if rate is None else float(tf.convert_to_tensor(rate))

    def measure(self, interval: Snapshot) -> Measures:
        """The numbers of an interval that ends now."""
        counters = interval.shards[0]
        rate = self._learning_rate()
        seconds = interval.seconds if interval.seconds > 0 else float("nan")
        return Measures(
            interval,
            learning_rate=rate,
            effective_rate=rate * self._mean_factor(counters.bins),
            steps_per_second=counters.steps / seconds,
        )

    def header(self, at: Snapshot, every_seconds: float) -> dict[str, Any]:
        """The record with which a run begins."""
        strategy, algorithm = self.strategy, self.strategy.algorithm
        return {
            "kind": "start",
            "schema": SCHEMA,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            "strategy": type(strategy).__name__,
            "cluster": repr(strategy.cluster),
            "num_workers": strategy.num_workers,
            "num_shards": strategy.num_shards,
            "clock": "virtual" if self.virtual else "wall",
            "every_seconds": every_seconds,
            "rules": {
                name: _described(getattr(algorithm, name))
                for name in ("local", "exchange", "server")
            },
            "optimizer": None if self._optimizer is None else type(self._optimizer).__name__,
            "steps": at.steps,
            "updates": at.shards[0].version,
        }

    def record(
        self, kind: str, measures: Measures, start: Snapshot, now: Snapshot, logs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The record of an interval."""
        counters = measures.interval.shards[0]
        # Steps done before a run was resumed count as if their mini-batches had been as large.
        samples = now.steps * self.strategy.examples_per_step
        return {
            "kind": kind,
            "seconds": now.seconds - start.seconds,
            "wall_seconds": now.wall_seconds - start.wall_seconds,
            "steps": now.steps,
            "updates": now.shards[0].version,
            "samples": samples if np.isnan(samples) else round(samples),
            "interval_seconds": measures.interval.seconds,
            "staleness": {**_summary(counters), "histogram": histogram(counters)},
            "learning_rate": measures.learning_rate,
            "effective_rate": measures.effective_rate,
            "steps_per_second": float(measures.steps_per_second.sum()),
            "workers": {
                "steps": counters.steps,
                "messages": counters.applied,
                "refused": counters.refused,
                "steps_per_second": measures.steps_per_second,
                "staleness_mean": measures.worker_staleness,
                **{
                    f"{kind}_seconds": measures.interval.spent[:, i] for i, kind in enumerate(KINDS)
                },
            },
            "shards": [_summary(shard) for shard in measures.interval.shards],
            "logs": dict(logs),
        }


@dataclasses.dataclass(frozen=True)
class Measures:
    """The numbers of one interval."""

    interval: Snapshot
    learning_rate: float
    effective_rate: float
    steps_per_second: np.ndarray
    """Of each worker."""

    @property
    def worker_staleness(self) -> np.ndarray:
        """Mean staleness of each worker's messages."""
        counters = self.interval.shards[0]
        with np.errstate(invalid="ignore", divide="ignore"):
            return counters.staleness_sums / counters.applied

    def logs(self) -> dict[str, float]:
        """What goes into a callback's logs."""
        staleness = self.interval.shards[0].staleness()
        return {
            "staleness_mean": staleness.mean,
            "staleness_p50": staleness.p50,
            "staleness_p99": staleness.p99,
            "staleness_max": staleness.max,
            "effective_rate": self.effective_rate,
            "steps_per_second": float(self.steps_per_second.sum()),
            **per_worker("steps_per_second_worker", self.steps_per_second),
        }


def per_worker(name: str, values: np.ndarray) -> dict[str, float]:
    """`name_0`, `name_1` ...; or `name_min`, `name_median`, `name_max` of many workers."""
    if len(values) <= SHOWN_WORKERS:
        return {f"{name}_{m}": float(value) for m, value in enumerate(values)}
    return {
        f"{name}_min": float(np.min(values)),
        f"{name}_median": float(np.median(values)),
        f"{name}_max": float(np.max(values)),
    }


def histogram(counters: Counters) -> list[list[int]]:
    """`[[tau, messages], ...]` of the staleness that occurred."""
    return [[tau, int(counters.bins[tau])] for tau in np.flatnonzero(counters.bins).tolist()]


def _summary(counters: Counters) -> dict[str, float]:
    return {**dataclasses.asdict(counters.staleness()), "refused": int(counters.refused.sum())}


def _described(rule: Any) -> dict[str, Any]:
    """A rule's class and settings; of functions the names."""
    fields = dataclasses.fields(rule) if dataclasses.is_dataclass(rule) else ()
    settings = {field.name: getattr(rule, field.name) for field in fields}
    return {
        "class": type(rule).__name__,
        **{k: getattr(v, "__name__", v) if callable(v) else v for k, v in settings.items()},
    }


def _versions() -> dict[str, str]:
    return {
        "tf_dsgd": __version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
