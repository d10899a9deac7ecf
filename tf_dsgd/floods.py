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
from typing import TextIO

KEPT = "TF_DSGD_KEPT"
"""Of the launcher's script: the file for such lines, or that the launcher itself sifts."""
SIFTED = "-"
LEVEL = "TF_CPP_MIN_LOG_LEVEL"

# A progress bar, or a question, has no end of line.
_QUIET_SECONDS = 0.05
_END = re.compile(rb"(?<=[\r\n])")
# A line of TensorFlow's, whatever it says.
_MESSAGE = re.compile(rb"[IWEF]\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+\] ")
# TensorFlow's library for logs (absl) cuts a message after 15,000 bytes less those of its ends.
_CUT_BYTES = 14_980
_SAID_LINES = 30
_REMEMBERED = 100
_TRACEBACK = re.compile(rb"(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_CAUSE = re.compile(
    rb"(?:The above exception was the direct cause of|During handling of) the (?:following|above) "
    rb"exception"
)
# The launcher stops a script by these; whoever passes on its last words ends after it.
_OUTLIVED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_sifts = False  # this process's lines
_ours: TextIO | None = None  # `sys.stderr`, past the sieve


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
        raised: matches the first line of a message on an error of Python code, which has that
            code's traceback; its group is what the error says. Whatever repeats that has it, too.
    """

    def __init__(self, heads: str, tails: str, raised: str):
        self._heads, self._tails = re.compile(heads.encode()), re.compile(tails.encode())
        self._raised = re.compile(raised.encode())
        self._said: set[bytes] = set()  # by errors of Python code
        self._traceback: _Traceback | None = None  # what comes next may belong to it
        self._follows = False  # what comes next follows a line that was taken out
        self._within = False  # ... is the rest of a line that has passed

    def takes(self, piece: bytes) -> bool:
        """Whether the next piece is one of those lines."""
        taken = not self._within and (self._goes_on(piece) or self._begins(piece))
        self._follows = taken
        self._within = not taken and not piece.endswith((b"\r", b"\n"))
        return taken

    def _goes_on(self, piece: bytes) -> bool:
        """Whether this belongs to the message that was taken out before."""
        if self._traceback is not None and self._traceback.has(piece):
            return True
        self._traceback = None
        return self._follows and bool(self._tails.match(piece))

    def _begins(self, piece: bytes) -> bool:
        raised = self._raised.match(piece)
        if raised is not None:
            if len(self._said) >= _REMEMBERED:
                self._said.clear()
            self._said.add(b": " + raised[1] + b"\n")
        elif not self._heads.match(piece):
            return False
        if piece.endswith(tuple(self._said)):
            self._traceback = _Traceback(piece)
        return True


class _Traceback:
    """What follows the first line of a message on an error of Python code.

    First the other lines of what the error says. Then Python's traceback as TensorFlow writes it:
    with an empty line between its parts, by which it is told from one of the script's own, and two
    at its end. The traceback of a cause may come before it.

    Args:
        head: the first line.
    """

    def __init__(self, head: bytes):
        self._bytes = len(head)
        self._lines = 0  # of what the error says
        self._next = self._says

    def has(self, line: bytes) -> bool:
        """Whether the next line belongs to the message."""
        if _MESSAGE.match(line):
            return False
        if self._bytes >= _CUT_BYTES:  # between two lines, perhaps
            return line == b"\n"
        self._bytes += len(line)
        return self._next(line)

    def _says(self, line: bytes) -> bool:
        if _TRACEBACK.match(line):
            self._next = self._begun
        self._lines += 1
        return self._lines <= _SAID_LINES

    def _begun(self, line: bytes) -> bool:
        self._next = self._part
        return line == b"\n"

    def _part(self, line: bytes) -> bool:
        self._next = self._between if line == b"\n" else self._part
        return True

    def _between(self, line: bytes) -> bool:
        self._next = self._cause if line == b"\n" else self._part
        return True

    def _cause(self, line: bytes) -> bool:
        self._next = self._caused
        return bool(_CAUSE.match(line))

    def _caused(self, line: bytes) -> bool:
        if _TRACEBACK.match(line):
            self._next = self._begun
            return True
        return line == b"\n"


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


def sift(heads: str, tails: str, raised: str, greetings: str) -> None:
    """From here on this process's file descriptor 2 is sifted, by a process that ends after it.

    Python's own `sys.stderr` goes where it went, at once. If the sieve is killed, what is written
    to file descriptor 2 is lost, and nobody waits.
    """
    global _sifts
    possible = sys.executable and not getattr(sys, "frozen", False)
    if _sifts or not (possible and wanted()) or os.environ.get(KEPT) == SIFTED:
        return
    try:
        own = os.dup(2)
    except OSError:  # it is closed
        return
    read, write = os.pipe()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
    try:
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, heads, tails, raised, greetings, kept()],
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
    _sifts = True


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
    global _ours
    _ours = sys.stderr = open(  # noqa: SIM115, it lives as long as this process
        own, "w", buffering=1, encoding=stream.encoding, errors=stream.errors
    )


def say_behind(text: str) -> None:
    """Writes to standard error, behind what TensorFlow has written and a sieve may not have yet."""
    sys.stderr.flush()
    if sys.stderr is _ours:
        _write(text.encode())
    else:
        print(text, end="", file=sys.stderr, flush=True)


def _write(data: bytes) -> None:
    """To file descriptor 2; nobody who writes to the sieve may wait for its reader."""
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:
            select.select([], [2], [])
        except OSError:
            return


def main(heads: str, tails: str, raised: str, greetings: str, path: str) -> None:
    """Sifts standard input into standard error."""
    sieve, file = Sieve(heads, tails, raised), Kept(path, greetings)
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
