"""Logs of an epoch over all workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tf_dsgd.spmd.arrays import assign, spec, values
from tf_dsgd.spmd.collectives import Group
from tf_dsgd.spmd.exchange import Spec, exchange

_BITS = 62  # of a number in a message; logs beyond are taken for others than metrics


class JointLogs:
    """The results that a model's metrics have over the data of all workers.

    A metric's variables say how their values on several devices make one (`aggregation`); "sum" is
    Keras's default, and right for all metrics of Keras: totals and counts.

    A step of the model's own may return other things than its metrics, even under a metric's name:
    a model always has a metric "loss". Keras takes the metrics' results where the step returns
    exactly their names, and what the step returned otherwise. So does this, but that it takes the
    result of each metric that all workers' last steps returned as it was.

    Args:
        model: a compiled model.
        group: the workers.
    """

    def __init__(self, model: keras.Model, group: Group):
        self._model = model
        self._group = group

    def describe(self, names: Sequence[str]) -> list[str]:
        """One line for each thing that must be equal in all workers.

        Args:
            names: what the steps returned, sorted.
        """
        variables = self._model.metrics_variables
        lines = [f"metric {v.name} {tuple(v.shape)} {v.dtype}" for v in variables]
        metrics = f"metrics {', '.join(self._names())}"
        return [metrics, *lines, f"logs of a step {', '.join(names)}"]

    def returned(self, logs: Mapping[str, Any]) -> int:
        """Which of the last step's logs are a metric's result: a bit for each, by sorted names."""
        results = self._results()
        places = enumerate(sorted(logs)[:_BITS])
        return sum(1 << k for k, name in places if _is_close(logs[name], results.get(name)))

    def results(self, names: Sequence[str], returned: int) -> dict[str, Any]:
        """Adds up the metrics' states, in place, and gives the results of those that logs have.

        Args:
            names: what the steps returned, sorted; equal in all workers.
            returned: the bits that all workers have of these.
        """
        taken = list(names)
        if taken != self._names():
            taken = [name for k, name in enumerate(names[:_BITS]) if returned >> k & 1]
        if not taken:
            return {}
        variables = self._model.metrics_variables
        specs = [spec(v, _how(v)) for v in variables]
        assign(variables, exchange(self._group, specs)(values(variables)))
        results = self._results()
        return {name: _plain(results[name]) for name in taken}

    def _names(self) -> list[str]:
        return sorted(self._results())

    def _results(self) -> dict[str, Any]:
        return dict(_flat(self._model.get_metrics_result()))

    def mean(self, logs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """The means of other numbers in the logs."""
        arrays = [np.asarray(logs[name], np.float64) for name in names]
        specs = [Spec(a.shape, "float64", "mean") for a in arrays]
        means = exchange(self._group, specs)(arrays)
        return {name: _plain(value) for name, value in zip(names, means, strict=True)}


def is_number(value: Any) -> bool:
    """Whether a log's value can be averaged."""
    return np.asarray(value).dtype.kind in "biuf"


def _flat(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """As Keras has them in logs: a metric's result may be a dict."""
    for name, value in results.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value


def _is_close(logged: Any, result: Any) -> bool:
    """But for rounding, as a step that is compiled may round otherwise."""
    if result is None or not is_number(logged):
        return False
    logged, result = np.asarray(logged), np.asarray(_plain(result))
    return logged.shape == result.shape and np.allclose(logged, result, 1e-5, 0.0, equal_nan=True)


def _how(variable: Any) -> str:
    """By the variable's own word."""
    return {"sum": "sum", "mean": "mean"}.get(variable.aggregation, "first")


def _plain(value: Any) -> Any:
    """A Python number where it is one, as Keras's logs have."""
    array = keras.ops.convert_to_numpy(value) if not isinstance(value, np.ndarray) else value
    return array.item() if array.ndim == 0 else array.copy()
