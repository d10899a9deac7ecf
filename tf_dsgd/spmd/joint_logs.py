"""Logs of an epoch over all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tf_dsgd.spmd.collectives import Group
from tf_dsgd.spmd.exchange import Spec, exchange
from tf_dsgd.spmd.model_state import assign, spec, values


class JointLogs:
    """The results that a model's metrics have over the data of all workers.

    A metric's variables say how their values on several devices make one (`aggregation`); "sum" is
    Keras's default, and right for all metrics of Keras: totals and counts.

    Args:
        model: a compiled model.
        group: the workers.
    """

    def __init__(self, model: keras.Model, group: Group):
        self._model = model
        self._group = group

    def describe(self) -> list[str]:
        """One line for each thing that must be equal in all workers."""
        variables = self._model.metrics_variables
        names = sorted(self._model.get_metrics_result())
        lines = [f"metric {v.name} {tuple(v.shape)} {v.dtype}" for v in variables]
        return [f"metrics {', '.join(names)}", *lines]

    def results(self) -> dict[str, Any]:
        """Adds up the metrics' states, in place, and gives their results."""
        variables = self._model.metrics_variables
        specs = [spec(v, _how(v)) for v in variables]
        assign(variables, exchange(self._group, specs)(values(variables)))
        return {name: _plain(value) for name, value in self._model.get_metrics_result().items()}

    def mean(self, logs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """The means of other numbers in the logs."""
        arrays = [np.asarray(logs[name], np.float64) for name in names]
        specs = [Spec(a.shape, "float64", "mean") for a in arrays]
        means = exchange(self._group, specs)(arrays)
        return {name: _plain(value) for name, value in zip(names, means, strict=True)}


def is_number(value: Any) -> bool:
    """Whether a log's value can be averaged."""
    return np.asarray(value).dtype.kind in "biuf"


def _how(variable: Any) -> str:
    """By the variable's own word."""
    return {"sum": "sum", "mean": "mean"}.get(variable.aggregation, "first")


def _plain(value: Any) -> Any:
    """A Python number where it is one, as Keras's logs have."""
    array = keras.ops.convert_to_numpy(value) if not isinstance(value, np.ndarray) else value
    return array.item() if array.ndim == 0 else array.copy()
