"""What a Spark task of `DeepDist` does. Travels to it by value, as `frames` does."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tf_dsgd.transport import frames


@dataclasses.dataclass(frozen=True)
class Job:
    """What all tasks of an epoch are told."""

    address: tuple[str, int]
    token: bytes
    number: int
    epoch: int
    names: list[str] | None
    """Of the model's arrays; None of a Keras model."""
    keras_json: str | None


def work(
    job: Job, gradient: Callable[[Any, Iterator[Any]], Any]
) -> Callable[[int, Iterator[Any]], Iterator[int]]:
    """What Spark calls with the number of a partition and its rows."""

    def run(partition: int, rows: Iterator[Any]) -> Iterator[int]:
        from pyspark import TaskContext

        first = list(itertools.islice(rows, 1))
        if not first:
            return
        base = {"job": job.number, "epoch": job.epoch, "partition": partition}
        fetched = frames.ask(job.address, job.token, {"do": "fetch", **base})
        model = model_of(job, fetched.arrays)
        form, arrays = take_apart(gradient(model, itertools.chain(first, rows)), partition)
        stage = TaskContext.get().stageId()
        header = {"do": "update", **base, "stage": stage, "form": form}
        frames.ask(job.address, job.token, header | fetched.header, arrays)
        yield partition

    return run


def model_of(job: Job, arrays: list[np.ndarray]) -> Any:
    """The model for `gradient`: a dict, or a Keras model."""
    if job.names is not None:
        return dict(zip(job.names, arrays, strict=True))
    import os

    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras

    model = keras.models.model_from_json(job.keras_json)
    model.set_weights(arrays)
    return model


def take_apart(update: Any, partition: int) -> tuple[Any, list[np.ndarray]]:
    """An update's form, in JSON, and its arrays."""
    if update is None:
        raise TypeError(
            f"gradient has returned nothing for partition {partition}. It must return a dict of "
            "arrays, a list of arrays, or an array."
        )
    if isinstance(update, Mapping):
        return sorted(update), [np.asarray(update[name]) for name in sorted(update)]
    if isinstance(update, (list, tuple)):
        return "list", [np.asarray(array) for array in update]
    return "array", [np.asarray(update)]


def put_together(form: Any, arrays: list[np.ndarray]) -> Any:
    """The update of this form."""
    if isinstance(form, list):
        return dict(zip(form, arrays, strict=True))
    return arrays if form == "list" else arrays[0]
