"""`BackupAndRestore`, with the strategy's own state."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf, resuming
from tf_dsgd.callbacks.checkpoint_files import Checkpoints, read_arrays, write_arrays
from tf_dsgd.callbacks.checkpoint_origin import check_origin, origin_of
from tf_dsgd.checks import called, folder, positive_int, truth
from tf_dsgd.console import before_training, say
from tf_dsgd.strategies.base import DistributedStrategy

_WEIGHTS, _METADATA, _STATE = "latest.weights.h5", "training_metadata.json", "strategy.npz"
# Measured: 1 kB for a variable's names and places, 150 kB for the strategy's counts, rounded up.
_BESIDE_EACH, _BESIDE_ALL = 2_000, 200_000


@called(hands_on=True, examples={"backup_dir": '"backups/today"'})
class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Keras's `BackupAndRestore`, whose checkpoints are complete under a `tf_dsgd` strategy.

    Use it in place of `keras.callbacks.BackupAndRestore` under a `tf_dsgd` strategy. Besides the
    weights, the optimizer and the epoch it keeps what only the strategy knows: the counts of
    messages, mini-batches and staleness; what each worker has of its own (slots, seeds, weights);
    an outer optimizer; a simulated cluster's clock; metrics; and the position in the data. A run
    that was broken off goes on where it was: on a simulated cluster it ends, bit for bit, where an
    unbroken one with the same callback does.

    A checkpoint is a folder, `backup_dir/checkpoint-00000012`, of one moment at rest: all
    mini-batches handed out are done. It is written whole or not at all: under a hidden name,
    brought to the disk, and then renamed; only then earlier ones are deleted. Before anything of
    the model is changed, every file is compared with its digest, and all of it with the model, the
    optimizer and the strategy. Nothing is unpickled.

    - The position: with an integer `save_freq` a checkpoint is in the middle of an epoch. The
      resumed epoch's first steps then hand out nothing, and take their mini-batches from the data
      and drop them; callbacks see these steps go by quickly. This is exact for data in a fixed
      order, and for shuffled ones that come in the same order in a new process: one endless
      dataset with a seed (`shuffle(n, seed=1).repeat()`, `steps_per_epoch`), or pipelines that
      workers run, whose seeds are kept. `shuffle=True` of `fit`, and a dataset that shuffles anew
      each epoch, begin with another order, so that of the resumed epoch some examples are seen
      twice and others not. Finite data longer than `steps_per_epoch` begin anew with the epoch.
    - Each checkpoint drains the workers, which ends their periods early; the more often, the more
      this shows.
    - Settings may be other than before (periods, rates, `fit`'s arguments, the number of shards).
      The learning rate is that of the checkpoint. The strategy's class, the number of workers, the
      optimizer's class, and all variables must be the same.
    - Not kept: other callbacks' state, the state of Python's, NumPy's and TensorFlow's own random
      numbers, and what workers' time went to.
    - Weights that are not finite are not written: a run on NaN leaves the last finite checkpoint,
      also with `delete_checkpoint`, and a line says so.
    - On a cluster that lost a worker, it is saved as one that begins anew.
    - Without a `tf_dsgd` strategy it does what Keras's does, in a folder that no other run has.

    Args:
        backup_dir: folder of this run alone, on a file system; made if it is not there.
        on_error: what becomes of training where a checkpoint cannot be written, on a full disk for
            instance; the one before stays whole. `"stop"`: an OSError ends it. `"warn"`: a line
            says so each time, and training goes on.
        **options: those of `keras.callbacks.BackupAndRestore`: `save_freq`, mini-batches between
            two checkpoints, or `"epoch"`; `double_checkpoint`, whether the last two are kept, and
            a torn one gives way to that before it, with a line in the log; `delete_checkpoint`,
            whether those of a run that came to its end are deleted (and the folder, if there is
            nothing else in it).

    Raises:
        ValueError, TypeError: for a wrong argument, naming it and what was received.
        OSError: when training begins, if the folder cannot be written, or is full.
        ValueError: when training begins, if another run that trains now has the folder, naming that
            one. Where it was killed, its claim ended with it.
        ValueError: when training begins, naming the file and what to do: for a torn checkpoint, one
            of another model, optimizer, strategy or number of workers, one with pickled objects,
            and one of another format, which those of Keras's own callback are.

    Example: the second run goes on after the second epoch of the first.

    >>> def train(epochs):
    ...     strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    ...     with strategy.scope():
    ...         model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...         model.compile(optimizer="adam", loss="mse")
    ...     x, y = np.ones((64, 3)), np.ones((64, 1))
    ...     backup = tf_dsgd.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    ...     model.fit(x, y, epochs=epochs, callbacks=[backup], verbose=0)
    ...     return strategy.steps
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(epochs=2), train(epochs=3)
    (4, 6)
    """

    def __init__(
        self, backup_dir: str | os.PathLike[str], *, on_error: str = "stop", **options: Any
    ):
        backup_dir = folder("backup_dir", backup_dir)
        if on_error not in ("stop", "warn"):
            raise ValueError(f'on_error must be "stop" or "warn". Received: {on_error!r}.')
        self._on_error = on_error
        for name in ("double_checkpoint", "delete_checkpoint"):
            if name in options:
                options[name] = truth(name, options[name])
        every = options.get("save_freq", "epoch")
        if not isinstance(every, str) or every != "epoch":
            options["save_freq"] = positive_int("save_freq", every, '"epoch"')
        super().__init__(backup_dir, **options)
        self._checkpoints = Checkpoints(backup_dir, keep=2 if self.double_checkpoint else 1)
        self._forget()

    def _forget(self) -> None:
        self._epoch = 0
        self._begun = 0
        """The strategy's count of mini-batches as the epoch began."""
        self._seen = -1
        """Keras's number of the epoch's last mini-batch."""
        self._unsaved = 0
        """Mini-batches since the last checkpoint."""
        self._warned = False
        self._resumed: tuple[int, int] | None = None
        """The epoch in whose middle the checkpoint was, and Keras's number of its mini-batch."""

    @property
    def _strategy(self) -> DistributedStrategy | None:
        strategy = self.model.distribute_strategy
        return strategy if isinstance(strategy, DistributedStrategy) else None

    # -- called by `fit` --------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        with before_training():
            self._begin(logs)

    def _begin(self, logs: Any) -> None:
        # As `fit` was told, unless there is a checkpoint: an earlier `fit` may have ended by an
        # error before this callback's `on_epoch_begin`.
        _tf.set_initial_epoch(self.model, 0)
        strategy = self._strategy
        if strategy is None:
            self._checkpoints.check_none()
            if "://" not in str(self.backup_dir):
                self._checkpoints.claim(_bytes_of_checkpoint(self._held()))
            super().on_train_begin(logs)
            return
        if "://" in str(self.backup_dir):
            raise ValueError(
                "backup_dir must be a folder of a file system, in which a folder is renamed at "
                f"once. Received: {self.backup_dir!r}."
            )
        self._forget()
        self._checkpoints.claim(_bytes_of_checkpoint(self._held()))
        strategy.passes.restore(None)
        try:
            self._restore(strategy)
        except BaseException:
            self._checkpoints.release()
            raise

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Keras has read it once `on_train_begin` was over. A `fit` that ends by an error has no
        # `on_train_end`, and the next one would begin there, too.
        _tf.set_initial_epoch(self.model, 0)
        strategy = self._strategy
        if strategy is None:
            super().on_epoch_begin(epoch, logs)
            return
        strategy.settle()
        self._epoch, self._begun, self._seen = epoch, strategy.passes.tokens, -1
        if self._resumed is not None and self._resumed[0] == epoch:
            self._seen = self._resumed[1]
            strategy.restore_metrics()  # `fit` has just reset them

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._strategy is None:
            super().on_train_batch_end(batch, logs)
            return
        if batch <= self._seen:
            return  # it was done before this run was started again
        self._unsaved += batch - self._seen
        self._seen = batch
        if self.save_freq != "epoch" and self.save_freq and self._unsaved >= self.save_freq:
            self._save(self._epoch, batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._strategy is None:
            super().on_epoch_end(epoch, logs)
        elif self.save_freq == "epoch":
            epochs = (self.params or {}).get("epochs", epoch + 1)
            self._save(epoch + 1, -1, last=self.model.stop_training or epoch + 1 >= epochs)

    def on_train_end(self, logs: Any = None) -> None:
        strategy = self._strategy
        _tf.set_initial_epoch(self.model, 0)  # where there was no epoch left to begin
        if strategy is None:
            super().on_train_end(logs)
            self._checkpoints.release()
            return
        strategy.passes.restore(None)
        if self.delete_checkpoint and self._is_finite():
            self._checkpoints.delete()
            self._say_where(strategy, None)
        self._checkpoints.release()

    # -- writing ----------------------------------------------------------------------------

    def _save(self, epoch: int, batch: int, last: bool = False) -> None:
        """Writes all at one moment at rest: the main thread hands out nothing meanwhile."""
        strategy, model = self._strategy, self.model
        if strategy is None:
            raise RuntimeError("The model is under no tf_dsgd strategy.")
        state = strategy.state(held={id(v.value) for v in self._held()})
        if not self._is_finite():
            self._unsaved = 0
            return
        done = strategy.passes.tokens - self._begun if batch >= 0 else 0
        state |= strategy.passes.take(done, last)

        def fill(folder: Path) -> None:
            model.save_weights(folder / _WEIGHTS)
            write_arrays(folder / _STATE, state)
            metadata = {"epoch": epoch, "batch": batch}
            (folder / _METADATA).write_text(json.dumps(metadata), encoding="utf-8")

        try:
            written = self._checkpoints.write(origin_of(model, strategy), fill)
        except OSError as error:
            if self._on_error == "stop":
                raise
            say(f"{error.strerror or error}. Training goes on; the last checkpoint is whole")
            return
        self._unsaved = 0
        self._say_where(strategy, written)

    def _is_finite(self) -> bool:
        """Whether all weights are: who resumes from one that is not gains nothing."""
        name = next((w.path for w in self.model.trainable_weights if not _finite(w)), None)
        if name is not None and not self._warned:
            say(f"{name} is not finite: no checkpoint is written, and the last finite one stays")
            self._warned = True
        return name is None

    def _held(self) -> list[Any]:
        """What Keras saves: the model's variables and the optimizer's."""
        optimizer = self.model.optimizer
        return [*self.model.weights, *(optimizer.variables if optimizer else [])]

    def _say_where(self, strategy: DistributedStrategy, folder: Path | None) -> None:
        """For errors that end training: where it can go on from."""
        strategy.engine.last_backup = None if folder is None else str(folder.absolute())
        resuming.note(strategy.engine.last_backup)

    # -- reading ----------------------------------------------------------------------------

    def _restore(self, strategy: DistributedStrategy) -> None:
        """Goes on from the newest checkpoint, if there is one; changes nothing before all fits."""
        model = self.model
        if not model.built:
            raise ValueError(
                "BackupAndRestore needs a model that is built before `fit`: call it on a batch of "
                f"data, or begin it with keras.Input. Received: {model!r}."
            )
        checkpoint = self._checkpoints.newest()
        if checkpoint is None:
            return
        here = origin_of(model, strategy)
        alike = checkpoint.origin.get("optimizer") == here["optimizer"]
        if alike and model.optimizer is not None and not model.optimizer.built:
            with strategy.scope():
                model.optimizer.build(model.trainable_variables)
            here = origin_of(model, strategy)
        check_origin(checkpoint.path / "manifest.json", checkpoint.origin, here)
        path, weights = checkpoint.file(_STATE), checkpoint.file(_WEIGHTS)
        state = read_arrays(path)
        epoch, batch = _metadata(checkpoint.file(_METADATA))
        try:
            strategy.check(state)
            strategy.passes.check(state)
        except ValueError as error:
            raise _refused(path, error) from error
        self._load_weights(weights)
        strategy.restore(state)
        position = strategy.passes.restore(state)
        if position.steps:
            self._resumed = (epoch, batch)
        _tf.set_initial_epoch(model, epoch)
        self._say_where(strategy, checkpoint.path)

    def _load_weights(self, path: Path) -> None:
        try:
            self.model.load_weights(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _refused(path, error) from error


def _finite(weight: Any) -> bool:
    return bool(np.isfinite(keras.ops.convert_to_numpy(weight)).all())


def _bytes_of_checkpoint(variables: list[Any]) -> int:
    """About the size of its files: of a small model most is not in the variables."""
    sizes = [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables]
    return sum(sizes) + _BESIDE_EACH * len(sizes) + _BESIDE_ALL


def _metadata(path: Path) -> tuple[int, int]:
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        epoch, batch = int(metadata["epoch"]), int(metadata["batch"])
        if epoch < 0 or batch < -1:
            raise ValueError(f"epoch {epoch}, mini-batch {batch} is no place in training.")
        return epoch, batch
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is not of this run: {error} Delete {path.parent}, or give another backup_dir."
    )
