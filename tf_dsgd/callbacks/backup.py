"""`BackupAndRestore`, with the strategy's own state."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np

_FILE = "strategy.npz"


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Keras's `BackupAndRestore`, which also keeps what only the strategy knows.

    Use it in place of `keras.callbacks.BackupAndRestore` under a `tf_dsgd` strategy. Keras's
    saves the weights, the optimizer and the epoch; this one adds the shard's version, the count of
    mini-batches (which learning-rate schedules follow), staleness, and the numbering of messages,
    in `strategy.npz` beside them. Weights and state are written at the same, settled, moment; the
    file is replaced atomically. Without a `tf_dsgd` strategy it does what Keras's does.

    Args:
        backup_dir: folder of this run alone.
        **options: those of `keras.callbacks.BackupAndRestore`.

    Raises:
        ValueError: if the backup is of another number of workers.

    Example:

    >>> callback = tf_dsgd.callbacks.BackupAndRestore("/tmp/backup")
    """

    def __init__(self, backup_dir: str, **options: Any):
        super().__init__(backup_dir, **options)
        self._state_path = os.path.join(backup_dir, _FILE)

    def _strategy(self) -> Any:
        strategy = self.model.distribute_strategy
        return strategy if hasattr(strategy, "restore") and hasattr(strategy, "ledger") else None

    def _load_model(self) -> None:
        super()._load_model()
        strategy = self._strategy()
        if strategy is not None and os.path.exists(self._state_path):
            with np.load(self._state_path, allow_pickle=False) as state:
                strategy.restore(dict(state))
            strategy.engine.last_backup = self.backup_dir

    def _save_model(self) -> None:
        super()._save_model()
        strategy = self._strategy()
        if strategy is not None:
            partial = self._state_path + ".partial.npz"
            np.savez(partial, **strategy.state())
            os.replace(partial, self._state_path)
            strategy.engine.last_backup = self.backup_dir
