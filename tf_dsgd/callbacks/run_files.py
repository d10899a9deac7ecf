"""The files in which a run's measures are kept: lines of JSON, and TensorBoard's event files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd._requirements import installed
from tf_dsgd.callbacks.measuring import SHOWN_WORKERS, Measures, per_worker
from tf_dsgd.engine.ledger import STALENESS_BINS, WORKER_EDGES, Counters

RECORDS = "monitor.jsonl"
EVENTS = "tensorboard"

TENSORBOARD_MISSING = (
    'TensorBoard is not installed, so no event files are written. Run: pip install "tf_dsgd'
    '[tensorboard]"'
)


class Records:
    """One JSON object a line.

    The file is opened for each line and closed again, so that whatever ends the process, all
    lines are there. A line that an earlier process was killed in stays alone.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / RECORDS
        self._begun = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record."""
        line = json.dumps(_plain(record), allow_nan=False, separators=(",", ":")) + "\n"
        with self.path.open("ab+") as file:
            if not self._begun and file.tell():
                file.seek(-1, 2)
                line = line if file.read(1) == b"\n" else "\n" + line
            self._begun = True
            file.write(line.encode())


def _plain(value: Any) -> Any:
    """As JSON has it: what is not a finite number is null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic, tf.Tensor)):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else repr(value)


class Events:
    """TensorBoard's scalars and histograms."""

    def __init__(self, directory: Path):
        if not installed("tensorboard"):
            raise ImportError(TENSORBOARD_MISSING)
        from tensorboard.plugins.histogram import metadata

        self._histogram = metadata.create_summary_metadata(display_name=None, description=None)
        self._writer = tf.summary.create_file_writer(str(directory / EVENTS))

    def append(self, measures: Measures, steps: int) -> None:
        """Writes the measures of one interval, at a number of mini-batches."""
        shards = measures.interval.shards
        scalars = {
            **_of_staleness("staleness", shards[0]),
            "rate/learning": measures.learning_rate,
            "rate/effective": measures.effective_rate,
            "steps_per_second/all": float(measures.steps_per_second.sum()),
            **per_worker("steps_per_second/worker", measures.steps_per_second),
            **per_worker("staleness_of_workers/mean", measures.worker_staleness),
        }
        edges = np.arange(STALENESS_BINS + 1)
        histograms = {}
        for s, counters in enumerate(shards):
            if len(shards) > 1:
                scalars |= _of_staleness(f"staleness_of_shards/{s}", counters)
            histograms[f"staleness/shard_{s}"] = _buckets(counters.bins, edges)
        workers = shards[0].worker_bins
        if len(workers) <= SHOWN_WORKERS:
            ends = np.append(WORKER_EDGES, STALENESS_BINS)
            for m, bins in enumerate(workers):
                histograms[f"staleness/worker_{m}"] = _buckets(bins, ends)
        with self._writer.as_default(step=steps):
            for name, value in scalars.items():
                if not math.isnan(value):
                    tf.summary.scalar(name, value)
            for name, buckets in histograms.items():
                tf.summary.write(name, buckets, metadata=self._histogram)
        self._writer.flush()

    def scalars(self, groups: Mapping[str, Mapping[str, float]], steps: int) -> None:
        """Writes numbers by group and name."""
        with self._writer.as_default(step=steps):
            for group, values in groups.items():
                for name, value in values.items():
                    if not math.isnan(value):
                        tf.summary.scalar(f"{group}/{name}", value)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


def _of_staleness(name: str, counters: Counters) -> dict[str, float]:
    staleness = counters.staleness()
    return {f"{name}/{key}": getattr(staleness, key) for key in ("mean", "p50", "p99", "max")}


def _buckets(bins: np.ndarray, edges: np.ndarray) -> tf.Tensor:
    """Rows of (from, to, messages), as TensorBoard's histograms want; from the first bin used on.

    Staleness is an integer: tau is drawn about its value, from tau - 1/2 to tau + 1/2.
    """
    used = np.flatnonzero(bins)
    if not len(used):
        return tf.zeros([0, 3], tf.float64)
    kept = slice(used[0], used[-1] + 1)
    rows = np.stack([edges[:-1][kept] - 0.5, edges[1:][kept] - 0.5, bins[kept]], 1)
    return tf.constant(rows, tf.float64)
