"""DeepDist: gradients on Spark's workers, descent in the driver.

After the DeepDist project (github.com/dirkneumann/deepdist), which is Downpour SGD with a partition
as the mini-batch: for each partition of an RDD a task fetches the model, computes an update from
its rows, and sends it; the driver applies updates as they come, one at a time.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
from pyspark import cloudpickle

from tf_dsgd.checks import called, positive_int
from tf_dsgd.console import say
from tf_dsgd.membership.lease import Lease, LeaseState
from tf_dsgd.spark import gradient_task
from tf_dsgd.spark.gradient_task import Job
from tf_dsgd.spark.session import check_runs, driver, jobs, session, waits_for_spark
from tf_dsgd.transport import frames
from tf_dsgd.transport.answering import Server
from tf_dsgd.transport.heartbeat import Heartbeat

# Tasks get these functions with their code, and so import neither the package nor TensorFlow.
cloudpickle.register_pickle_by_value(frames)
cloudpickle.register_pickle_by_value(gradient_task)

_LOOK_SECONDS = 10.0
"""A `descent` that is longer may be one that waits for Spark."""
_NO_SLOT = (
    "descent has waited for Spark for {seconds:.0f} s. A job that it starts gets no slot while the "
    "tasks of this training have all of them, which they keep until descent has ended. If nothing "
    "goes on, interrupt; start such jobs after train, or give Spark more slots than the data have "
    "partitions."
)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What became of the partitions of a `DeepDist.train`."""

    updates: int
    """Updates that `descent` was given."""
    again: int
    """Updates that came a second time, and were not applied: of a task that Spark ran again, or
    whose connection failed."""
    empty: int
    """Partitions without rows, which send nothing."""
    staleness: tuple[int, ...]
    """Of each update, in their order: how many others were applied since its model was fetched."""


@called()
class DeepDist:
    """Trains a model by updates that Spark's tasks compute, one for each partition.

    Use it where the data are in an RDD, and the rule is yours: two functions. For Keras's `fit` on
    Spark take `tf_dsgd.spark.Distributor`.

    For each partition a task

    1. fetches the model from the driver,
    2. calls `gradient(model, rows)`, which gives an update,
    3. sends it; the driver calls `descent(model, update)`, one call at a time.

    Tasks do not wait for each other: while one computes, others' updates are applied, and its own
    is then stale by so many. A fetched model is always that after a whole number of updates.

    A partition is leased to the task that fetches for it, by its job, stage and epoch. Where Spark
    runs a task twice, as it was lost or slow, the two share the lease: the update that comes first
    counts and the other is refused. A lost executor thus changes nothing but the order. An epoch
    has ended when each of its leases is counted. Without the driver training ends.

    Arrays alone travel between tasks and driver, as bytes with their types and shapes; each message
    is authenticated by a token that tasks get with their code. It is not encrypted.

    Args:
        model: a dict of arrays, or a built Keras model. `descent` changes it in place.
        most_update_bytes: largest update that is taken, in bytes, at least 1; 2**30 if not given.

    Raises:
        TypeError: if the model is something else, or holds other things than numbers.
        ValueError: if a Keras model has no weights yet.
        RuntimeError: without Java, or in a session of Spark Connect.

    Example:

    >>> def gradient(model, rows):  # of the mean square of x - w
    ...     return {"w": np.mean([model["w"] - x for x in rows], axis=0)}
    >>> def descent(model, update):
    ...     model["w"] -= 0.1 * update["w"]
    >>> model = {"w": np.zeros(2)}
    >>> rows = spark.sparkContext.parallelize(points, 8)  # doctest: +SKIP
    >>> with tf_dsgd.spark.DeepDist(model) as d:  # doctest: +SKIP
    ...     d.train(rows, gradient, descent, epochs=10)
    """

    def __init__(
        self,
        model: keras.Model | MutableMapping[str, Any],
        *,
        most_update_bytes: int = frames.MOST_BODY_BYTES,
    ):
        self.model = model
        self._most_bytes = positive_int("most_update_bytes", most_update_bytes)
        self._weights = _checked(model)
        self._mutex = threading.Lock()
        """Guards the model and all below."""
        self._version = 0
        self._fetched: tuple[int, list[np.ndarray]] | None = None
        self._job = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._leases: dict[tuple[int, int, int], Lease] = {}
        """Of this epoch, by name: a partition, the stage that computes it, the epoch from 1 on."""
        self._epoch = 0
        self._staleness: list[int] = []
        self._descent: Callable[[Any, Any], Any] | None = None
        self._error: BaseException | None = None
        self._server: Server | None = None
        self._training = threading.Lock()
        """Held while `train` is at work."""
        self._descends: tuple[int, float] | None = None
        """The thread that runs `descent`, if one does, and since when."""

    def __enter__(self) -> DeepDist:
        if self._server is not None:
            raise RuntimeError("This DeepDist is in a with statement already. Make another one.")
        self._spark = session()
        self._server = Server(
            **driver(self._spark.sparkContext),  # type: ignore[arg-type]
            answer=self._answer,
            most_bytes=self._most_bytes,
        )
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.__exit__(*error)

    def train(
        self,
        rdd: Any,
        gradient: Callable[[Any, Iterator[Any]], Any],
        descent: Callable[[Any, Any], Any],
        *,
        epochs: int = 1,
    ) -> Counts:
        """Goes through an RDD, or a DataFrame, `epochs` times.

        Args:
            rdd: the data; each partition with rows gives one update an epoch.
            gradient: from the model as fetched (a copy, of the same kind) and an iterator of a
                partition's rows to the update: a dict of arrays, a list of arrays, or one array.
                Runs in tasks.
            descent: changes the model by an update, in place. Runs in the driver.
            epochs: at least 1. An epoch begins when the last one is at its end.

        Returns:
            Counts.

        Raises:
            RuntimeError: outside of `with`; if another `train` of this DeepDist is at work; if the
                RDD's Spark session was stopped.
            ValueError: if the RDD has no partitions.
            TypeError: if `descent` leaves something else than the model's arrays, or if others
                changed it since.
            BaseException: what `descent` raised; a `sys.exit` in it ends the program, as anywhere.
                What `gradient` raised comes as Spark's error.
        """
        if self._server is None:
            raise RuntimeError(
                "The driver takes updates only in a with statement. Write: with "
                "tf_dsgd.spark.DeepDist(model) as d: d.train(rdd, gradient, descent)."
            )
        epochs = positive_int("epochs", epochs)
        for name, function in (("gradient", gradient), ("descent", descent)):
            if not callable(function):
                raise TypeError(f"{name} must be a function. Received: {function!r}.")
        if not hasattr(rdd, "mapPartitionsWithIndex") and not hasattr(rdd, "mapInArrow"):
            raise TypeError(f"rdd must be an RDD or a DataFrame. Received: {rdd!r}.")
        check_runs(rdd)
        rows = getattr(rdd, "rdd", rdd)
        if not rows.getNumPartitions():
            raise ValueError(
                "The RDD has no partitions, so there is nothing to train on. Give one that has: "
                "spark.sparkContext.parallelize(data, 8)."
            )
        if not self._training.acquire(blocking=False):
            raise RuntimeError(
                "This DeepDist is training already, in descent or in another thread. Let that end "
                "first; another DeepDist, with a model of its own, may train beside it, but not in "
                "descent."
            )
        watch = Heartbeat(self._look, _LOOK_SECONDS)
        watch.start()
        try:
            return self._train(rows, gradient, descent, epochs)
        finally:
            watch.end()
            watch.join(_LOOK_SECONDS)
            self._training.release()

    def _train(
        self,
        rows: Any,
        gradient: Callable[[Any, Iterator[Any]], Any],
        descent: Callable[[Any, Any], Any],
        epochs: int,
    ) -> Counts:
        self._begin(descent)
        try:
            for epoch in range(epochs):
                self._run(rows, gradient, epoch)
        finally:
            with self._mutex:  # from here on no task of this training changes the model
                self._job += 1
                self._return_open()
        with self._mutex:
            return Counts(
                self._counts["updates"],
                self._counts["again"],
                self._counts["empty"],
                tuple(self._staleness),
            )

    def _begin(self, descent: Callable[[Any, Any], Any]) -> None:
        with self._mutex:
            self._weights()  # which may have been changed since
            self._job += 1
            self._descent, self._error = descent, None
            self._fetched = None
            self._counts.clear()
            self._leases.clear()
            self._epoch = 0
            self._staleness.clear()

    def _run(self, rows: Any, gradient: Callable[[Any, Iterator[Any]], Any], epoch: int) -> None:
        server = self._server
        if server is None:
            raise RuntimeError("The with statement has ended while train was at work.")
        names, text = self._names(), self._keras_json()
        job = Job(server.address, server.token, self._job, epoch, names, text, self._most_bytes)
        work = gradient_task.work(job, gradient)
        try:
            with jobs(rows.context):
                sent = rows.mapPartitionsWithIndex(work).collect()
        except Exception:
            with self._mutex:
                if self._error is not None:
                    raise self._error from None  # Spark's has it as text, among its own lines
            raise
        with self._mutex:
            self._counts["empty"] += rows.getNumPartitions() - len(sent)
            self._end_epoch(sent)

    def _end_epoch(self, sent: Sequence[int]) -> None:
        """All partitions are done; of those that are not in `sent` no task, or the last, had rows.

        From here on who still comes for one of them is too late.
        """
        left = self._return_open()
        lost = sorted({lease.owner for lease in left} & set(sent))
        if lost:
            raise RuntimeError(
                f"Spark has ended epoch {self._epoch}, and of the partitions {lost} no update "
                "counts. That is a defect of tf_dsgd; please report it."
            )
        self._leases.clear()
        self._epoch += 1

    def _return_open(self) -> list[Lease]:
        """Of the leases those that do not count, and never will."""
        found = [lease for lease in self._leases.values() if not lease.has_ended()]
        for lease in found:
            lease.become(LeaseState.RETURNED)
        return found

    def _look(self) -> float | None:
        """Says once if a `descent` waits for Spark, maybe for a job that gets no slot."""
        found = self._descends
        if found is None:
            return _LOOK_SECONDS
        thread, began = found
        seconds = time.monotonic() - began
        waits = seconds > _LOOK_SECONDS and waits_for_spark(thread) and self._descends is found
        if waits:
            say(_NO_SLOT.format(seconds=seconds))
        return None if waits else _LOOK_SECONDS

    def _names(self) -> list[str] | None:
        return None if isinstance(self.model, keras.Model) else sorted(self.model)

    def _keras_json(self) -> str | None:
        return self.model.to_json() if isinstance(self.model, keras.Model) else None

    # -- in the server's threads ---------------------------------------------------------------

    def _answer(
        self, header: dict[str, Any], arrays: list[np.ndarray]
    ) -> tuple[dict[str, Any], Sequence[np.ndarray]]:
        if not self._mutex.acquire(timeout=header["seconds"]):
            return {"done": False}, ()
        try:
            if header.get("job") != self._job:
                raise RuntimeError("This task's training has ended in the driver.")
            lease = self._lease(header)
            if header["do"] == "fetch":
                return {"done": True, "version": self._version}, self._current()
            return {"done": True, "counted": self._apply(lease, header, arrays)}, ()
        finally:
            self._mutex.release()

    def _current(self) -> list[np.ndarray]:
        """The model's arrays, as copies that stay as they are; made once between two updates."""
        if self._fetched is None or self._fetched[0] != self._version:
            self._fetched = self._version, [np.array(array) for array in self._weights()]
        return self._fetched[1]

    def _lease(self, header: dict[str, Any]) -> Lease | None:
        """A partition's, which whoever fetches for it has; None if its epoch has ended."""
        if header["epoch"] != self._epoch:
            return None
        name = header["partition"], header["stage"], self._epoch + 1
        lease = self._leases.setdefault(name, Lease(*name))
        if header["do"] == "fetch":
            if lease.steps and lease.state is LeaseState.OPEN:
                lease.become(LeaseState.SHARED)
            lease.steps = 1
        return lease

    def _apply(self, lease: Lease | None, header: dict[str, Any], arrays: list[np.ndarray]) -> bool:
        if lease is None or lease.has_ended():
            self._counts["again"] += 1
            return False
        if self._descent is None:
            raise RuntimeError("There is no training in the driver.")
        if self._error is not None:  # Spark runs a task that failed again, and so would a descent
            raise RuntimeError(f"descent has failed before: {self._error!r}")
        self._descends = threading.get_ident(), time.monotonic()
        try:
            self._descent(self.model, gradient_task.put_together(header["form"], arrays))
            self._weights()
        except BaseException as error:  # of whatever kind, `train` raises it where the user is
            self._error = error
            self._fetched = None  # it may be half changed
            raise RuntimeError(f"descent has failed: {error!r}") from None
        finally:
            self._descends = None
        lease.become(LeaseState.COUNTED)
        self._staleness.append(self._version - header["version"])
        self._version += 1
        self._counts["updates"] += 1
        return True


def _checked(model: Any) -> Callable[[], list[np.ndarray]]:
    """What gives the model's arrays, in the order in which they travel."""
    if isinstance(model, keras.Model):
        if not model.built or not model.weights:
            raise ValueError(
                f"The Keras model {model.name!r} has no weights yet. Give its first layer a "
                "keras.Input, or call model.build."
            )
        for weight in model.weights:
            if np.asarray(weight.numpy()).dtype.kind not in "biufc":
                raise TypeError(
                    f"The Keras model's {weight.path!r} is of {weight.dtype}, which is none of "
                    "NumPy's own types and does not travel. Make it of float32, as with the policy "
                    'keras.DTypePolicy("mixed_bfloat16").'
                )
        return lambda: [np.asarray(weight) for weight in model.get_weights()]
    if not isinstance(model, MutableMapping) or not model:
        raise TypeError(
            "model must be a Keras model, or a dict of arrays with at least one. Received: "
            f"{model!r}."
        )
    names = list(model)

    def arrays() -> list[np.ndarray]:
        if set(model) != set(names):
            raise TypeError(
                "A model's arrays must keep their names. It had "
                f"{sorted(names)}, and descent, or who else changed it, left {list(model)}."
            )
        for name in names:
            if not isinstance(name, str) or np.asarray(model[name]).dtype.kind not in "biufc":
                raise TypeError(
                    "A dict that is a model has names as keys and arrays of numbers as values. "
                    f"Received: {name!r}: {model[name]!r}."
                )
        return [np.asarray(model[name]) for name in sorted(names)]

    arrays()
    return arrays
