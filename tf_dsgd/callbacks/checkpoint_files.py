"""Checkpoints as folders, each written whole or not at all, and read only if nothing was changed.

A checkpoint is written into a hidden folder, brought to the disk, and renamed to
`checkpoint-00000012`; then earlier ones are deleted. Whenever the writer dies, the last checkpoint
is there, complete. `manifest.json` names what the checkpoint is of, and every file's size and
digest. Nothing that is read is unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from absl import logging

from tf_dsgd import _tf_errors, resuming
from tf_dsgd._version import __version__

try:
    import fcntl
except ImportError:  # not on Windows: nobody is kept from a folder there
    fcntl = None  # type: ignore[assignment]

FORMAT = 2
MANIFEST = "manifest.json"
OWNER = ".owner"
_FIELDS = {"format", "tf_dsgd", "number", "origin", "files"}
_NAME = re.compile(r"checkpoint-(\d{8,})")
_HIDDEN = re.compile(r"\.(partial|deleted)-checkpoint-\d{8,}")
# What earlier versions of this package, and Keras's own callback, write.
_OLDER = tuple(
    name + end
    for name in ("latest.weights.h5", "training_metadata.json", "strategy.npz")
    for end in ("", ".bkp")
)


_claimed: weakref.WeakValueDictionary[str, Checkpoints] = weakref.WeakValueDictionary()
"""Of this process, by the folder's path without links."""


def _claim_nothing() -> None:
    """In a fork: the claims stay its parent's, and end with that."""
    for checkpoints in list(_claimed.values()):
        checkpoints.drop_claim()
    _claimed.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_claim_nothing)


class TornCheckpoint(ValueError):
    """A file of a checkpoint is not as it was written."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One that was read, each file as it was written."""

    path: Path
    origin: dict[str, Any]
    """What it is of, as `Checkpoints.write` was told."""
    names: frozenset[str]
    """Of the files that the manifest knows, which are as they were written."""

    def file(self, name: str) -> Path:
        """The path of a file that was looked at.

        Raises:
            ValueError: if the manifest does not know it.
        """
        if name not in self.names:
            raise ValueError(
                f"{self.path / MANIFEST} does not name {name}, and this version of tf_dsgd would "
                f"have. Delete {self.path}, or give another backup_dir."
            )
        return self.path / name


def _told(error: OSError, words: str) -> OSError:
    """The same error in our words, which a script that it ends says without a traceback."""
    told = type(error)(error.errno, words, *filter(None, [error.filename]))
    told.add_note(resuming.ENDS_TRAINING)
    return told


class Checkpoints:
    """The checkpoints of one run, in a folder.

    Args:
        directory: the folder.
        keep: how many of them are kept. If more than one, a torn one gives way to that before it.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 1):
        self._claim: IO[str] | None = None
        self.directory = Path(directory)
        self._keep = keep
        self._good: list[int] = []
        """Those that were written or read here, the last one last."""

    # -- whose the folder is ----------------------------------------------------------------

    def claim(self, needed_bytes: int) -> None:
        """Keeps other runs from the folder, until `release` or until this process ends.

        The claim is a lock of the operating system's on a file in the folder, which ends with the
        process that has it, however it ends; on a network file system its server sees to that, and
        where that knows no locks there is no claim. Another callback of this process takes it over.

        Raises:
            OSError: if the folder cannot be written, or has fewer than `needed_bytes` left.
            ValueError: if another run has it, naming that.
        """
        self.release()
        former = _claimed.pop(self._key, None)
        if former is not None:
            former.release()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._claim = self._locked()
            _claimed[self._key] = self
            free = shutil.disk_usage(self.directory).free
            if free < needed_bytes:
                what = (
                    f"a checkpoint takes {needed_bytes / 1e6:.1f} MB, and {free / 1e6:.1f} are left"
                )
                raise OSError(errno.ENOSPC, what)
        except OSError as error:
            self.release()
            words = f"no checkpoint can be written to {self.directory}: {error.strerror or error}"
            raise _told(error, words) from error

    def release(self) -> None:
        """Others may have the folder."""
        if self._claim is not None:
            _claimed.pop(self._key, None)
            with contextlib.suppress(OSError):
                if self._is_there(self._claim):
                    (self.directory / OWNER).unlink()
            self.drop_claim()

    def __del__(self) -> None:
        self.release()

    def drop_claim(self) -> None:
        """Closes the file of the claim, which in a fork is its parent's."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _is_there(self, file: IO[str]) -> bool:
        """Whether an open file is the folder's still, and not one that was deleted."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), (self.directory / OWNER).stat())
        except FileNotFoundError:
            return False

    @property
    def _key(self) -> str:
        return os.path.realpath(self.directory)

    def _locked(self) -> IO[str] | None:
        path = self.directory / OWNER
        while True:
            file = path.open("a+", encoding="utf-8")
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there(file):
                    break  # else another run has deleted it meanwhile
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "it does not say which"
                file.close()
                raise ValueError(
                    f"{self.directory} is the backup_dir of another run ({owner}), which trains, "
                    "or whose process has not ended: each would delete the other's checkpoints. "
                    "Give each run a folder of its own."
                ) from None
            except OSError as error:
                logging.warning(
                    "tf_dsgd: %s cannot be locked (%s): see to it that no other run has this "
                    "backup_dir.",
                    path,
                    error.strerror,
                )
                break
            file.close()
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
        file.flush()
        return file

    # -- writing ----------------------------------------------------------------------------

    def write(self, origin: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
        """Writes one, whole or not at all.

        Args:
            origin: what it is of; as JSON has it.
            fill: writes the files into the folder that it is given.

        Returns:
            Its folder.

        Raises:
            OSError: if it cannot be written; the one before is whole.
        """
        try:
            return self._write(origin, fill)
        except OSError as error:
            why = _tf_errors.why_not_written(error)
            words = f"no checkpoint could be written to {self.directory}: {why}"
            raise _told(error, words) from error

    def _write(self, origin: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._tidy()
        number = max(self._numbers(), default=0) + 1
        final = self._folder(number)
        partial = self.directory / f".partial-{final.name}"
        partial.mkdir()
        try:
            fill(partial)
            files = {path.name: _measure(path) for path in sorted(partial.iterdir())}
            text = _manifest({"number": number, "origin": dict(origin), "files": files})
            (partial / MANIFEST).write_text(text, encoding="utf-8")
            for path in (*partial.iterdir(), partial):
                _to_disk(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(final)
        _to_disk(self.directory)
        self._good = [*self._good, number][-self._keep :]
        for other in self._numbers():
            if other not in self._good:
                self._remove(other)
        return final

    def delete(self) -> None:
        """Deletes all of them, and the folder if there is nothing else in it."""
        for number in self._numbers():
            self._remove(number)
        self._tidy()
        self._good = []
        self.release()
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def _remove(self, number: int) -> None:
        # First the name: what has one is complete, whenever this process ends.
        folder = self._folder(number)
        hidden = self.directory / f".deleted-{folder.name}"
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)

    def _tidy(self) -> None:
        """Deletes what a writer that was killed has left."""
        if self.directory.is_dir():
            for path in list(self.directory.iterdir()):
                if _HIDDEN.fullmatch(path.name):
                    shutil.rmtree(path)

    def _folder(self, number: int) -> Path:
        return self.directory / f"checkpoint-{number:08d}"

    def _numbers(self) -> list[int]:
        """Of all that are there, the newest last."""
        if not self.directory.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    # -- reading ----------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The newest one, every file of which was looked at; None if there is none.

        Raises:
            ValueError: naming the file that is torn or of another format.
        """
        self._check_older()
        self._tidy()
        numbers = self._numbers()[::-1]
        for number in numbers:
            try:
                checkpoint = self._read(number)
            except TornCheckpoint as error:
                if self._keep < 2 or number == numbers[-1]:
                    raise
                logging.warning("tf_dsgd: %s Taking the one before.", error)
                continue
            self._good = [number]
            return checkpoint
        return None

    def check_none(self) -> None:
        """Raises an error if there is a checkpoint of this form."""
        for number in self._numbers()[::-1]:
            raise ValueError(
                f"{self._folder(number)} was written under a tf_dsgd strategy, and this model is "
                "under none. Compile it in such a strategy's scope, or give it another backup_dir."
            )

    def _check_older(self) -> None:
        for name in _OLDER:
            path = self.directory / name
            if path.exists():
                raise ValueError(
                    f"{path} is of an older form: keras.callbacks.BackupAndRestore, or an earlier "
                    "version of tf_dsgd, wrote it. Go on with what wrote it, or give another "
                    "backup_dir; model.load_weights reads the weights alone."
                )

    def _read(self, number: int) -> Checkpoint:
        folder = self._folder(number)
        path = folder / MANIFEST
        try:
            raw = path.read_bytes()
            manifest = json.loads(raw)
            given = manifest.pop("digest")
            if not manifest.keys() >= _FIELDS:
                raise KeyError(_FIELDS - manifest.keys())
            kinds = {"format": int, "origin": dict, "files": dict}
            if not all(isinstance(manifest[name], kind) for name, kind in kinds.items()):
                raise TypeError(kinds)
            if not all(isinstance(each, dict) for each in manifest["files"].values()):
                raise TypeError(manifest["files"])
            outside = [name for name in manifest["files"] if not _is_within(name)]
            whole = _text({**manifest, "digest": given}) == raw.decode()
            whole = whole and given == _digest(manifest)
        except OSError as error:
            raise _torn(path, f"cannot be read ({error.strerror})", self._keep) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _torn(path, "is no manifest of a checkpoint", self._keep) from error
        if outside:
            raise _torn(path, f"names a file outside of its folder, {outside[0]!r}", self._keep)
        if not whole:
            raise _torn(path, "is not as it was written", self._keep)
        if manifest["format"] != FORMAT:
            age = "an older" if manifest["format"] < FORMAT else "a newer"
            raise ValueError(
                f"{path} is of {age} format, {manifest['format']}, written by tf_dsgd "
                f"{manifest['tf_dsgd']}; this version, {__version__}, reads format {FORMAT}. Go on "
                "with the version that wrote it, or give another backup_dir."
            )
        if manifest["number"] != number:
            raise _torn(path, f"is that of checkpoint {manifest['number']}", self._keep)
        for name, expected in manifest["files"].items():
            self._check_file(folder / name, expected)
        return Checkpoint(folder, manifest["origin"], frozenset(manifest["files"]))

    def _check_file(self, path: Path, expected: Mapping[str, Any]) -> None:
        try:
            size = path.stat().st_size
            if size != expected.get("bytes"):
                what = f"has {size} bytes, and {expected.get('bytes')} were written"
                raise _torn(path, what, self._keep)
            if _measure(path) != expected:
                raise _torn(path, "is not as it was written: its digest is another", self._keep)
        except OSError as error:
            raise _torn(path, f"cannot be read ({error.strerror})", self._keep) from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file of NumPy's. Refuses one that would have to be unpickled.

    Raises:
        ValueError: naming the file.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # whatever a file made by others brings about
        raise ValueError(
            f"{path} is no file of plain arrays ({error}). It was not written by tf_dsgd. Delete "
            f"{path.parent}, or give another backup_dir."
        ) from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as `read_arrays` reads them.

    Raises:
        ValueError: for an array of Python objects, naming it.
    """
    for name, array in arrays.items():
        if np.asarray(array).dtype.hasobject:
            raise ValueError(
                f"The variable {name!r} holds Python objects, such as texts, which a checkpoint "
                "cannot hold. Make it outside of the strategy's scope."
            )
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _is_within(name: str) -> bool:
    """Whether it is the name of a file, and no path that leads elsewhere."""
    return name not in ("", "..") and "\0" not in name and Path(name).name == name


def _torn(path: Path, what: str, keep: int) -> TornCheckpoint:
    remedy = "" if keep > 1 else "; double_checkpoint=True would keep two"
    return TornCheckpoint(
        f"{path} {what}. The checkpoint is torn: delete {path.parent} to go on from the one before "
        f"it, or to begin anew if there is none{remedy}."
    )


def _manifest(content: Mapping[str, Any]) -> str:
    whole = {"format": FORMAT, "tf_dsgd": __version__, **content}
    return _text({**whole, "digest": _digest(whole)})


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(content).encode()).hexdigest()


def _measure(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _to_disk(path: Path) -> None:
    """Waits until a file, or a folder's list of them, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
