"""The chief of `Distributor.run`: calls the function, and writes what became of it.

    python -m tf_dsgd.spark.chief FOLDER

reads FOLDER/payload, and writes FOLDER/outcome.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

from tf_dsgd.resuming import ENDS_TRAINING, PARENT_FD
from tf_dsgd.spark.partitions import Place, within


def place(arguments: Sequence[Any], keys: Sequence[str], places: Sequence[Any]) -> None:
    """Tells data sets among the arguments where each worker has their rows: (paths, bytes)."""
    for data in within(arguments):
        number = keys.index(data.key)
        size = data.layout.dtype().itemsize
        data.places = [Place(worker[number][0], worker[number][1] // size) for worker in places]


def outcome_of(payload: bytes, places: Sequence[Any]) -> bytes | None:
    """What `train` returned or raised, pickled; None of a lost task, which ends the stage."""
    try:
        train, arguments, keys = pickle.loads(payload)
    except Exception as error:  # unpickling runs the code of any class, and imports modules
        return _failed(
            RuntimeError(
                f"train and its arguments cannot be read in the chief: {type(error).__name__}: "
                f"{error}. Executors must have the modules that these come from: install them "
                "there, or give them by spark.sparkContext.addPyFile."
            )
        )
    place(arguments, keys, places)
    try:
        found = train(*arguments)
    except Exception as error:
        traceback.print_exc()
        if ENDS_TRAINING in getattr(error, "__notes__", ()):
            return None
        return _failed(error)
    except BaseException as error:  # SystemExit and its like would end the driver, too
        return _failed(RuntimeError(f"train has ended itself, by {error!r}."))
    try:
        return bytes(cloudpickle.dumps((True, found)))
    except Exception as error:  # pickling runs the code of any class
        return _failed(
            TypeError(
                f"train has returned what cannot be pickled ({error}): {type(found)}. Return a "
                "history or arrays, and save a model to a file."
            )
        )


def _failed(error: Exception) -> bytes:
    """An error that can be read in the driver: itself, or where it cannot travel its text."""
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    note = f"In the chief of the training:\n{text}"
    error.add_note(note)
    try:
        written = bytes(cloudpickle.dumps((False, error)))
        pickle.loads(written)
    except Exception:
        said = f"train has raised what cannot be pickled: {type(error).__qualname__}: {error}"
        alike = RuntimeError(said)
        alike.add_note(note)
        return bytes(cloudpickle.dumps((False, alike)))
    return written


def end_with_parent() -> None:
    """Ends this process when the pipe from the one that started it closes, if there is one."""
    lifeline = os.environ.get(PARENT_FD)
    if not lifeline:
        return

    def watch() -> None:
        os.read(int(lifeline), 1)
        os._exit(1)

    threading.Thread(target=watch, name="tf_dsgd parent", daemon=True).start()


def main() -> None:
    """The program."""
    folder = Path(sys.argv[1])
    end_with_parent()
    payload, places = pickle.loads((folder / "payload").read_bytes())
    outcome = outcome_of(payload, places)
    if outcome is None:
        sys.exit(1)
    (folder / "outcome.part").write_bytes(outcome)
    (folder / "outcome.part").rename(folder / "outcome")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
