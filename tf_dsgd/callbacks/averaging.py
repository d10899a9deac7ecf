"""`PeriodicAveraging`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from absl import logging

from tf_dsgd import _tf
from tf_dsgd.checks import called, integer, one_of, period, positive_seconds
from tf_dsgd.spmd import collectives
from tf_dsgd.spmd.joint_logs import JointLogs, is_number
from tf_dsgd.spmd.model_state import POLICIES, ModelState
from tf_dsgd.spmd.optimizers import build_first, optimizers_of, overrides
from tf_dsgd.strategies.base import DistributedStrategy

# What a worker is at when all meet. Each is a number in the message that tells the others.
_PLACES = (
    "begins to train",
    "averages",
    "is at the end of an epoch's training",
    "is at the end of an epoch's validation",
    "is at the end of an epoch",
    "ends training",
    "is in average(model)",
)
_BEGIN, _AVERAGE, _TRAINED, _VALIDATED, _EPOCH, _END, _CALLED = range(len(_PLACES))


@dataclasses.dataclass
class _Progress:
    """Where a worker is in its `fit`; steps are its mini-batches since that began."""

    begun: bool = False
    before: int = 0  # what the optimizer had counted then
    epoch: int = -1
    in_epoch: bool = False
    step: int = 0
    first_step: int = 0  # of the epoch
    counted: int | None = None  # what the optimizer had counted as the epoch began
    latest: int = 0  # when models were averaged
    due: int | None = None  # when they will be, once that was asked
    logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the latest step's
    trained: dict[str, Any] | None = None  # joint results of the epoch's training
    validated: dict[str, Any] | None = None


@called()
class PeriodicAveraging(keras.callbacks.Callback):
    """Averages the models of equal processes, each of which runs the same plain Keras script.

    Use it to train one model with several processes or machines where a script exists already: put
    this callback *first* in the list, give every process its own part of the data, and start the
    script once per process with a TF_CONFIG of workers alone, on one machine by
    `python -m tf_dsgd.launch --workers 4 --spmd train.py`. There is no scope and no other change.
    With w_k the weights of worker k, M = `num_workers` and tau = `average_every`::

        step:             w_k <- optimizer(w_k, gradient(w_k))
        every tau steps:  w_k <- (1 / M) sum over workers j of w_j

    (local SGD, parameter averaging). With tau = 1 and plain SGD this is synchronous SGD on the
    joint mini-batch.

    - Before the first epoch all weights and the optimizer's state are copied from worker 0, so that
      only worker 0 needs to load a checkpoint. Models, optimizers, the number of mini-batches and
      this callback's arguments are compared first.
    - At the end of an epoch's training the models are averaged, too, so that validation,
      checkpoints and the model that `fit` leaves behind are the same in all processes.
    - Moving statistics, as those of BatchNorm, are averaged like weights. Integer weights are
      worker 0's. Random states stay different: where a seed made them equal, each worker's is
      changed, or dropout would leave out the same units everywhere.
    - Logs at the end of an epoch (`val_...` as well) are those of all processes together: the
      states of Keras's metrics are summed before their results are taken, so they are as exact as
      one process would compute them; any other number is averaged, such as a loss that a model's
      own `train_step` computed itself and returned in the metric's place. Callbacks *after*
      this one, and History, see these, so that EarlyStopping, ReduceLROnPlateau and ModelCheckpoint
      do the same everywhere. Let only one process write files:
      `if averaging.worker_index == 0: callbacks.append(ModelCheckpoint(...))`.
    - `optimizer.iterations` counts each process's own steps. Learning-rate schedules follow it.
    - With `steps_per_execution` above 1, what is due is done at the end of an execution.
    - Without TF_CONFIG, or with one worker, nothing is averaged, and that is said once.

    In a loop of your own call `start(model)` before the first step, and `average(model)` whenever
    an average is due, the same number of times in all processes.

    Seeds: what `keras.utils.set_random_seed` makes equal, such as the order of `shuffle`, stays
    so. Give each process its own, as in `set_random_seed(7 + averaging.worker_index)`: the first
    weights are worker 0's anyway.

    A lost worker ends training: the others raise a ConnectionError that names it, soon if its
    process ended, else a TimeoutError after `timeout_seconds`. No process waits for ever, and none
    goes on alone. Start all again, with `keras.callbacks.BackupAndRestore` after this callback in
    the list of every process, each with a folder of its own.

    Args:
        average_every: mini-batches of a worker between averages, counted from the latest; at least
            1. Or a callable from the steps that a worker had done at the latest average, those of
            earlier or resumed runs included (as `optimizer.iterations` has them when `fit`
            begins), to the number of steps until the next, such as
            `lambda step: 1 if step < 500 else 16` (post-local SGD). The end of an epoch averages in
            any case.
        optimizer_state: what becomes of momentum and the like, of all optimizers that the model has
            (compiled, and as attributes) and that are used. `"average"`: averaged with the
            weights. `"local"`: each process keeps its own. `"reset"`: at every average as when the
            optimizer was made (Adagrad's accumulators begin at 0.1, not 0), and bias correction
            begins anew: `iterations` then counts from the latest average within an epoch, and all
            steps between epochs, where it is saved; schedules go on.
        timeout_seconds: how long a process waits for the others; above 0, below 1e9. It should be
            above the longest thing that one does alone, such as writing a checkpoint, or starting.

    Raises:
        ValueError: for a wrong argument or TF_CONFIG; for a model under a strategy; for `"reset"`
            under an optimizer with `use_ema`; in all processes, naming them, if their models,
            optimizers, arguments or numbers of mini-batches differ.
        ConnectionError, TimeoutError: if a worker is lost.

    Deviations from the paper: averages at the ends of epochs, as said; slots of the optimizer,
    which the paper does not have.

    Reference: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, algorithm 1; Lin
    et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, for post-local SGD.

    Example:

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(optimizer="adam", loss="mse")
    >>> averaging = tf_dsgd.callbacks.PeriodicAveraging(average_every=16)
    >>> x, y = np.ones((64, 3)), np.ones((64, 1))
    >>> mine = slice(averaging.worker_index, None, averaging.num_workers)
    >>> history = model.fit(x[mine], y[mine], callbacks=[averaging], verbose=0)
    >>> averaging.num_workers
    1
    """

    def __init__(
        self,
        average_every: int | Callable[[int], int] = 16,
        *,
        optimizer_state: str = "average",
        timeout_seconds: float = 60.0,
    ):
        super().__init__()
        if callable(average_every):
            period(average_every, 0)  # whether it gives a period at all
        else:
            average_every = integer("average_every", average_every, 1, ", or a callable")
        self.average_every = average_every
        self.optimizer_state = one_of("optimizer_state", optimizer_state, POLICIES)
        self.timeout_seconds = positive_seconds("timeout_seconds", timeout_seconds)
        group = collectives.group(self.timeout_seconds)
        self._group = group if group is not None and group.size > 1 else None
        if self._group is None:
            logging.log_first_n(
                logging.WARNING,
                "tf_dsgd: PeriodicAveraging has no other process to average with (%s). Start the "
                'script by "python -m tf_dsgd.launch --workers 4 --spmd".',
                1,
                "TF_CONFIG is not set" if group is None else "TF_CONFIG names one worker",
            )
        self._averages = 0
        self._state: ModelState | None = None
        self._of: tuple[Any, ...] = ()
        self._logs: JointLogs | None = None
        self._at = _Progress()

    @property
    def num_workers(self) -> int:
        """How many processes there are."""
        return 1 if self._group is None else self._group.size

    @property
    def worker_index(self) -> int:
        """Which of them this is, from 0; a chief, if TF_CONFIG names one, is 0."""
        return 0 if self._group is None else self._group.rank

    @property
    def averages(self) -> int:
        """How often models were averaged since this callback was made."""
        return self._averages

    # -- by plain calls ---------------------------------------------------------------------

    def start(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None
    ) -> None:
        """Compares the models of all processes and copies the first one's weights and optimizer.

        Args:
            model: a built model, trained by a loop of your own.
            optimizer: what trains it; by default the compiled one, if there is one, and those that
                are attributes of the model. Its state is copied, and averaged by policy.
        """
        self._at = _Progress()
        self._open(_BEGIN, model, optimizer)
        if self._group is not None:
            self._running().copy_first()
            self._retrace(model)

    def average(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None
    ) -> None:
        """Averages the model now. Without `start` before, the models are compared first.

        Args:
            model: as for `start`.
            optimizer: as for `start`.
        """
        if self._group is None:
            return
        if self._of != self._identity(model, optimizer):
            self._open(_CALLED, model, optimizer)
        self._running().offer()
        self._meet(_CALLED)
        self._running().average()
        self._retrace(model)
        self._averages += 1
        self._the_group().meet()  # or a process that now ends takes away what others still read

    # -- called by `fit` --------------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._at = _Progress()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._group is None:
            return
        self._at.epoch = epoch
        if not self._at.begun:  # not earlier: another callback may restore a checkpoint
            self._begin_fit()
        self._at.trained = self._at.validated = None
        self._at.logs = {}
        self._at.in_epoch = True
        self._at.first_step = self._at.step
        self._at.counted = self._counted()
        self._running().begin_steps()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._group is None:
            return
        self._at.logs = logs or {}
        self._at.step = self._at.first_step + batch + 1
        if self._at.due is None:  # not when the average was made: it may have been the last
            self._at.due = self._at.latest + self._period()
        if self._at.step >= self._at.due:
            self._count_execution()
        if self._at.step >= self._at.due:
            self._running().offer()
            self._meet(_AVERAGE)
            self._average()

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._at.in_epoch and self._at.trained is None:
            self._end_training()  # validation is to see the averaged model

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._at.in_epoch and self._at.validated is None and self._logs is not None:
            self._at.validated = self._meet_with(_VALIDATED, self._logs, logs or {})()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._logs is None or not self._at.in_epoch:
            return
        if self._at.trained is None:
            self._end_training()
        logs = {} if logs is None else logs
        joint = dict(self._at.trained or {})
        joint |= {f"val_{name}": value for name, value in (self._at.validated or {}).items()}
        logs.update({name: value for name, value in joint.items() if name in logs})
        others = sorted(name for name in logs if name not in joint and is_number(logs[name]))
        self._meet(_EPOCH, [f"number in logs {name}" for name in others])
        logs.update(self._logs.mean(logs, others))
        self._at.in_epoch = False

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._at.begun:
            self._meet(_END)
        elif self._group is not None:  # no epoch was left for this worker: for others there may be
            self._at.epoch = self.params.get("epochs") or 0
            with self._beginning():
                self._meet(_BEGIN, self._arguments())
        self._at, self._logs = _Progress(), None

    # -- inside -----------------------------------------------------------------------------

    def _arguments(self) -> list[str]:
        """Of `fit` and `compile`, one line each."""
        return [
            f"mini-batches an epoch {self.params.get('steps')}",
            f"epochs {self.params.get('epochs')}",
            f"loss {_named(getattr(self.model, 'loss', None))}",
        ]

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        """Within, workers compare where they begin.

        After an error no `BackupAndRestore`, which comes later in the list, takes back where `fit`
        began: the next one would begin there, too.
        """
        try:
            yield
        except BaseException:
            _tf.set_initial_epoch(self.model, 0)
            raise

    def _begin_fit(self) -> None:
        with self._beginning():
            self._open(_BEGIN, self.model, None, self._arguments())
        self._at.before = self._running().copy_first()
        self._logs = JointLogs(self.model, self._the_group())
        self._retrace(self.model)
        self._at.begun = True

    def _retrace(self, model: keras.Model) -> None:
        """Has Keras trace anew what it has traced with constants or schedules of before."""
        if self._running().retrace():
            for kind in ("train", "test", "predict"):
                if getattr(model, f"{kind}_function", None) is not None:
                    getattr(model, f"make_{kind}_function")(force=True)

    def _open(self, place: int, model: keras.Model, optimizer: Any, lines: Any = ()) -> None:
        """Compares what all train, and how."""
        if self._group is None:
            return
        if not model.built:
            raise ValueError(
                f"PeriodicAveraging needs a model that has its weights. Received: {model.name}, "
                "which is not built. Call it on a batch, or model.build(input_shape), before."
            )
        strategy = model.distribute_strategy
        if isinstance(strategy, DistributedStrategy) or strategy.num_replicas_in_sync > 1:
            raise ValueError(
                "PeriodicAveraging averages models of which each process has one, made outside of "
                "any strategy's scope; with several GPUs start a process for each. Received a "
                f"model under: {type(strategy).__name__}."
            )
        build_first(model, optimizer)
        identity = self._identity(model, optimizer)
        if self._of != identity:
            self._state = ModelState(model, optimizer, self.optimizer_state, self._group)
            self._of = identity
        period = "a callable" if callable(self.average_every) else self.average_every
        own = [f"average_every {period}", f"optimizer_state {self.optimizer_state}"]
        self._meet(place, [*lines, *own, *self._running().describe()])

    def _identity(self, model: keras.Model, optimizer: Any) -> tuple[Any, ...]:
        """What a `ModelState` is made of."""
        optimizers = [("", optimizer)] if optimizer is not None else optimizers_of(model)
        return model, len(model.trainable_variables), *(each for _, each in optimizers)

    def _counted(self) -> int | None:
        """What the optimizer has counted, if Keras may count steps that were not made.

        None as well where a step of the model's own may update at one worker and not at another.
        """
        model = self.model
        own = overrides(model, keras.Model, "train_step", "make_train_function")
        return None if own or model.steps_per_execution == 1 else self._running().counted()

    def _count_execution(self) -> None:
        """Sets the steps right after an execution that may have come to the end of the data.

        With `steps_per_execution` Keras counts each as a whole one. The optimizer's count tells, if
        it counts every step; else `fit` may know the number beforehand.
        """
        whole, done = self.model.steps_per_execution, self._at.step - self._at.first_step
        if whole == 1:
            return
        known = self.params.get("steps")
        steps = min(done, known or done)
        count = self._counted()
        if count is not None and self._at.counted is not None:
            counted = count - self._at.counted
            steps = counted if max(done - whole, 0) < counted <= done else steps
        self._at.step = self._at.first_step + steps

    def _average(self) -> None:
        self._running().average()
        self._averages += 1
        self._at.latest, self._at.due = self._at.step, None

    def _period(self) -> int:
        """Mini-batches from the latest average to the next."""
        every = self.average_every
        if not callable(every):
            return every
        step = self._at.before + self._at.latest
        return period(every, step)

    def _end_training(self) -> None:
        """The end of an epoch's training: joint logs, and the average that validation sees."""
        if self._logs is None:
            return
        self._count_execution()
        due = self._at.step > self._at.latest
        if due:
            self._running().offer()
        results = self._meet_with(_TRAINED, self._logs, self._at.logs)
        if due:
            self._average()
        self._running().end_steps()
        self._at.trained = results()

    def _meet_with(
        self, place: int, joint: JointLogs, logs: Mapping[str, Any]
    ) -> Callable[[], dict[str, Any]]:
        """Meets with the last step's logs, and gives what then makes the joint results of them."""
        names = sorted(logs)
        returned = self._meet(place, joint.describe(names), joint.returned(logs))
        return lambda: joint.results(names, returned)

    def _meet(self, place: int, lines: list[str] | None = None, bits: int = 0) -> int:
        """Waits for all workers, and sees to it that they are at the same place, with equal lines.

        Gives the bits that all of them have.

        The message has the same shape wherever a worker is, so that different places show.
        """
        text = "\n".join(lines or [])
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        group = self._the_group()
        rows = group.meet(place, self._at.epoch, self._at.step, digest, bits)
        if not (rows[:, :3] == rows[0, :3]).all():
            raise ValueError(_different_places(group.names, rows))
        if not (rows[:, 3] == rows[0, 3]).all():
            raise ValueError(_first_difference(group.names, group.texts(text)))
        return int(np.bitwise_and.reduce(rows[:, 4]))

    def _the_group(self) -> collectives.Group:
        if self._group is None:
            raise RuntimeError("There is no other process.")
        return self._group

    def _running(self) -> ModelState:
        if self._state is None:
            raise RuntimeError("PeriodicAveraging has not begun.")
        return self._state


def _named(loss: Any) -> Any:
    """What a loss is called, in whichever way it was given."""
    if isinstance(loss, Mapping):
        return {str(key): _named(value) for key, value in loss.items()}
    if isinstance(loss, (list, tuple)):
        return [_named(value) for value in loss]
    if loss is None or isinstance(loss, str):
        return loss
    return getattr(loss, "__name__", type(loss).__name__)


def _different_places(names: list[str], rows: np.ndarray) -> str:
    """Who is where."""
    where = []
    for name, (place, epoch, step, *_) in zip(names, rows.tolist(), strict=True):
        at = f", step {step} (epoch {epoch})" if epoch >= 0 else ""
        where.append(f"{name} {_PLACES[place]}{at}")
    text = f"The workers are not at the same place: {'; '.join(where)}. "
    if (rows[:, 0] == _BEGIN).all():
        return (
            f"{text}All must begin at the same epoch. Backups of different epochs, or of some "
            "workers only, do that: give every process keras.callbacks.BackupAndRestore with a "
            "folder of its own, and copy one worker's folder over the others', or delete all of "
            "them."
        )
    return (
        f"{text}Each must make as many steps in every epoch, validate and stop at the same epochs, "
        "and begin at the same: give every process the same number of mini-batches, for instance "
        "by dataset.repeat() and steps_per_epoch, or dataset.take(n), and the same callbacks that "
        "may stop training. A callback that stops one worker alone does that, too, as "
        "TerminateOnNaN does, which acts on the logs of its own process's mini-batches."
    )


def _first_difference(names: list[str], texts: list[str]) -> str:
    """What differs between the first worker and another."""
    other = next(k for k, text in enumerate(texts) if text != texts[0])
    pairs = itertools.zip_longest(*(text.split("\n") for text in (texts[0], texts[other])))
    mine, theirs = next((a, b) for a, b in pairs if a != b)
    return (
        f"The workers do not train the same model in the same way: {names[0]} has "
        f'"{mine or "nothing more"}", and {names[other]} has "{theirs or "nothing more"}". All '
        "processes must run the same script, and differ only in their data and seeds."
    )
