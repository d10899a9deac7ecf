"""As `averaging.py`: models, optimizers and backups of a user's own, and fits that go wrong.

Usage: averaging_own.py FOLDER [WAY ...].
"""

import sys
from pathlib import Path

import keras

from tests.cluster import spmd_models as models
from tests.cluster.scripts.averaging import ME, averaged, error_of, fit, run_ways

WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


def backup(name, **options):
    """A worker's own, in a list."""
    path = folder(name)
    return [keras.callbacks.BackupAndRestore(str(path), **options)]


def folder(name):
    return Path(sys.argv[1]) / f"backup_{name}_{ME}"


@way
def no_epoch_left():
    """Worker 1's backup is of the last epoch; then those of both are."""

    def train(epochs, more=()):
        return fit(models.linear("sgd"), averaged(3), epochs=epochs, more=more)

    train(2, backup("all", delete_checkpoint=False))
    errors = {"epochs": error_of(lambda: train(2 * ME))}
    train(2, backup("one", delete_checkpoint=False) if ME else ())
    errors["one"] = error_of(lambda: train(2, backup("one") if ME else ()))
    train(0)
    history = train(2, backup("all"))
    return {
        "errors": errors,
        "epochs": len(history.get("loss", [])),
        "left": [name for name in ("all", "one") if folder(name).exists()],
    }


if __name__ == "__main__":
    run_ways(WAYS)
