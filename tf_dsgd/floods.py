"""Lines of TensorFlow's that tell a user nothing go to a file, which is named; the rest passes.

TensorFlow's C++ writes to file descriptor 2, past Python. The launcher reads what its processes
write there and sifts it. A chief has a small process of its own do so (`sift`): this file, run as a
program, which needs nothing else of the package. A thread of the chief's would not do: it could not
pass a crash's last words, and would stop whoever writes while he holds Python's lock.

Where the user has set TF_CPP_MIN_LOG_LEVEL, which is TensorFlow's own switch, nothing is sifted.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

KEPT = "TF_DSGD_KEPT"
"""Of the launcher's script: the file for such lines, or that the launcher itself sifts."""
SIFTED = "-"
LEVEL = "TF_CPP_MIN_LOG_LEVEL"

# A progress bar, or a question, has no end of line.
_QUIET_SECONDS = 0.05
_END = re.compile(rb"(?<=[\r\n])")
# The launcher stops a script by these; whoever passes on its last words ends after it.
_OUTLIVED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def wanted() -> bool:
    """Whether lines are to be sifted."""
    return not os.environ.get(LEVEL)


def kept() -> str:
    """The path of a file for lines that are taken out, which the first of them makes."""
    name = f"tf_dsgd-tensorflow-{secrets.token_hex(4)}.txt"
    return os.environ.get(KEPT) or os.path.join(tempfile.gettempdir(), name)


class Sieve:
    """Takes known lines out of one process's output, piece by piece as `pieces` gives them.

    Args:
        heads: matches the first line of a message that is taken out.
        tails: matches the lines that may follow one.
    """

    def __init__(self, heads: str, tails: str):
        self._heads, self._tails = re.compile(heads.encode()), re.compile(tails.encode())
        self._follows = False  # what comes next follows a line that was taken out
        self._within = False  # ... is the rest of a line that has passed

    def takes(self, piece: bytes) -> bool:
        """Whether the next piece is one of those lines."""
        known = self._tails if self._follows else self._heads
        taken = not self._within and bool(known.match(piece) or self._heads.match(piece))
        self._follows = taken
        self._within = not taken and not piece.endswith((b"\r", b"\n"))
        return taken


class Kept:
    """The file of the lines that were taken out; several processes may add to one.

    Args:
        path: of the file.
        greetings: is found in lines that wait for the first other one: a run that ends well, and
            in which TensorFlow said nothing else, leaves no file, and names none.
    """

    def __init__(self, path: str, greetings: str):
        self.path = path
        self._greetings = re.compile(greetings.encode())
        self._waiting: list[bytes] = []
        self._file: int | None = None

    def add(self, line: bytes) -> bool:
        """Whether this is the first line for which the file is made.

        Raises:
            OSError: if it cannot be written.
        """
        first = False
        if self._file is None:
            if self._greetings.search(line):
                self._waiting.append(line)
                return False
            flags = os.O_WRONLY | os.O_APPEND
            try:
                self._file = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                first = True
            except FileExistsError:
                self._file = os.open(self.path, flags)
        os.write(self._file, b"".join([*self._waiting, line]))
        self._waiting.clear()
        return first

    def words(self) -> str:
        """What is said when it has its first line."""
        return (
            f"TensorFlow's lines on what tf_dsgd handles go to {self.path} "
            f"({LEVEL}=0 shows them here)"
        )


def pieces(source: int, seconds: float | None = None) -> Iterator[bytes]:
    """What comes from a file descriptor, in whole lines, to its end.

    Args:
        source: the file descriptor.
        seconds: what has no end of line is given, too, once nothing more came for so long; a
            carriage return then ends a piece as well. None: it waits for its end.
    """
    held = b""
    while True:
        if held and seconds is not None and not select.select([source], [], [], seconds)[0]:
            yield held
            held = b""
        data = os.read(source, 1 << 16)
        if not data:
            break
        held += data
        if seconds is None:
            *whole, held = held.split(b"\n") if b"\n" in data else [held]
            yield from (line + b"\n" for line in whole)
        else:
            *whole, held = _END.split(held)
            yield from whole
    if held:
        yield held


def sift(heads: str, tails: str, greetings: str) -> None:
    """From here on this process's file descriptor 2 is sifted, by a process that ends after it.

    Python's own `sys.stderr` goes where it went, at once. If the sieve is killed, what is written
    to file descriptor 2 is lost, and nobody waits.
    """
    possible = sys.executable and not getattr(sys, "frozen", False)
    if not (possible and wanted()) or os.environ.get(KEPT) == SIFTED:
        return
    try:
        own = os.dup(2)
    except OSError:  # it is closed
        return
    read, write = os.pipe()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
    try:
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, heads, tails, greetings, kept()],
            stdin=read,
            stdout=subprocess.DEVNULL,
        ).returncode = 0  # nobody waits for it
    except OSError:  # no process, no sieve
        os.close(write)
        os.close(own)
        return
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        os.close(read)
    _python_keeps(own)
    os.dup2(write, 2)
    os.close(write)


def _python_keeps(own: int) -> None:
    """Has `sys.stderr` write to a copy of file descriptor 2, if it writes there."""
    stream = sys.stderr
    number = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        number = stream.fileno()
    if number != 2:
        os.close(own)
        return
    stream.flush()
    sys.stderr = open(  # noqa: SIM115, it lives as long as this process
        own, "w", buffering=1, encoding=stream.encoding, errors=stream.errors
    )


def _write(data: bytes) -> None:
    """To this process's standard error; nobody who writes to the sieve may wait for its reader."""
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:
            select.select([], [2], [])
        except OSError:
            return


def main(heads: str, tails: str, greetings: str, path: str) -> None:
    """Sifts standard input into standard error."""
    sieve, file = Sieve(heads, tails), Kept(path, greetings)
    for piece in pieces(0, _QUIET_SECONDS):
        taken = sieve.takes(piece)
        if taken:
            try:
                if file.add(piece):
                    _write(f"tf_dsgd: {file.words()}\n".encode())
            except OSError:
                taken = False
        if not taken:
            _write(piece)


if __name__ == "__main__":
    main(*sys.argv[1:])
