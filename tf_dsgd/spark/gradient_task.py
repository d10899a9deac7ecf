"""What a Spark task of `DeepDist` does. Travels to it by value, as `frames` does."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tf_dsgd.transport import frames

LATER_SECONDS = 100.0
"""After which the driver says that it still is at other updates. These are sent again then."""


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
    most_bytes: int
    """Of an update."""


def work(
    job: Job, gradient: Callable[[Any, Iterator[Any]], Any]
) -> Callable[[int, Iterator[Any]], Iterator[int]]:
    """What Spark calls with the number of a partition and its rows."""

    def run(partition: int, rows: Iterator[Any]) -> Iterator[int]:
        from pyspark import TaskContext

        first = list(itertools.islice(rows, 1))
        if not first:
            return
        stage = TaskContext.get().stageId()
        base = {"job": job.number, "epoch": job.epoch, "partition": partition, "stage": stage}
        fetch = {"do": "fetch", **base}
        fetched = frames.ask_until_done(job.address, job.token, fetch, seconds=LATER_SECONDS)
        model = model_of(job, fetched.arrays)
        try:
            update = gradient(model, itertools.chain(first, rows))
        except (SystemExit, KeyboardInterrupt) as error:  # of which Spark would show a code alone
            raise RuntimeError(
                f"gradient has ended itself for partition {partition}, by {error!r}."
            ) from None
        form, arrays = take_apart(update, partition)
        size = sum(array.nbytes for array in arrays)
        if size > job.most_bytes:
            raise ValueError(
                f"The update of partition {partition} has {size} bytes, and DeepDist takes "
                f"{job.most_bytes}. Give it a larger most_update_bytes, or a smaller model."
            )
        header = fetched.header | {"do": "update", **base, "form": form}
        frames.ask_until_done(job.address, job.token, header, arrays, seconds=LATER_SECONDS)
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
    must = "It must return a dict of arrays, a list of arrays, or an array."
    if update is None or (isinstance(update, (Mapping, list, tuple)) and not update):
        raise TypeError(
            f"gradient has returned nothing for partition {partition}. {must} Received: {update!r}."
        )
    if isinstance(update, Mapping):
        if not all(isinstance(name, str) for name in update):
            raise TypeError(
                f"gradient has returned a dict whose keys are no names for partition {partition}: "
                f"{list(update)}. {must}"
            )
        named = {repr(name): update[name] for name in update}
        form: Any = list(update)
    elif isinstance(update, (list, tuple)):
        named, form = {f"number {n}": each for n, each in enumerate(update)}, "list"
    else:
        named, form = {"all of it": update}, "array"
    arrays = []
    for name, value in named.items():
        try:
            array = np.asarray(value)
        except ValueError:  # lists of several lengths
            array = np.asarray(None)
        if array.dtype.kind not in "biufc":
            raise TypeError(
                f"gradient has returned what is not of numbers for partition {partition}: {name} "
                f"is {value!r}. {must}"
            )
        arrays.append(array)
    return form, arrays


def put_together(form: Any, arrays: list[np.ndarray]) -> Any:
    """The update of this form."""
    if isinstance(form, list):
        return dict(zip(form, arrays, strict=True))
    return arrays if form == "list" else arrays[0]
