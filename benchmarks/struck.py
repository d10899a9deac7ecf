"""A training on processes that can be struck: its launcher, its tasks, and what its chief counts.

`faults.py` and `soak.py` strike it. What trains, and writes the counts down, is `faulty_chief.py`.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import runs

WORKERS, PS = 3, 2
COPIES, SOAK_COPIES = 8, 16
"""Of the examples: an epoch has 719 mini-batches, or 1437."""
TIMEOUT = 5.0
"""`worker_timeout_seconds`."""
LATE, SOAK_LATE = 10.0, 1.0
"""`late_after_seconds`."""
START_SECONDS = 240.0
BACK_SECONDS = 180.0
"""A deadline for struck workers to work again."""
END_SECONDS = 600.0
"""The same for the end of an epoch, and for the undisturbed run."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of progress: what the chief knew at a moment."""

    at: float
    applied: list[int]
    """Of each worker, its messages."""
    present: list[bool]
    incarnations: list[int]
    changes: int
    """How often TensorFlow was told of other tasks."""


@dataclasses.dataclass
class Fault:
    """Who was struck, and when."""

    kind: str
    """`kill` or `stop`."""
    workers: list[int]
    at: float
    before: Row
    """The last line of progress before it."""
    goes_on_at: float
    """Of a stop, its end; of a kill, as `at`."""

    def others(self, rows: Sequence[Row]) -> float:
        """The longest pause of the others until all work again; `rows` reach beyond that."""
        end, last, longest = self._all_again(rows), self.at, 0.0
        before = self._of_others(self.before)
        for row in rows:
            if row.at <= self.at or self._of_others(row) == before:
                continue
            before = self._of_others(row)
            longest, last = max(longest, row.at - last), row.at
            if end is not None and row.at >= end:
                break
        return longest

    def _of_others(self, row: Row) -> list[int]:
        return [n for m, n in enumerate(row.applied) if m not in self.workers]

    def struck(self, rows: Sequence[Row]) -> float | None:
        """Seconds until all of the struck work again; None: not yet."""
        end = self._all_again(rows)
        return None if end is None else end - self.goes_on_at

    def _all_again(self, rows: Sequence[Row]) -> float | None:
        found = [at for m in self.workers if (at := self._again(m, rows)) is not None]
        return max(found) if len(found) == len(self.workers) else None

    def _again(self, m: int, rows: Sequence[Row]) -> float | None:
        back: int | None = None
        for row in rows:
            if row.at < self.goes_on_at:
                continue
            new = row.incarnations[m] > self.before.incarnations[m]
            if not row.present[m] or (self.kind == "kill" and not new):
                back = None
            elif back is None:
                back = row.applied[m]
            elif row.applied[m] > back:
                return row.at
        return None


class Cluster:
    """A launcher, its chief and its servers, and what the chief writes down."""

    def __init__(self, folder: Path, strategy: str, undisturbed: bool):
        self.folder, self.rows = folder, list[Row]()
        self.results: list[dict] = []
        self.done = False
        self._stopped: dict[int, psutil.Process] = {}
        self._read_to = 0
        spec = {
            "folder": str(folder),
            "strategy": strategy,
            "worker_timeout_seconds": TIMEOUT,
            "late_after_seconds": LATE if undisturbed else SOAK_LATE,
            "undisturbed": undisturbed,
            "copies": COPIES if undisturbed else SOAK_COPIES,
        }
        launch = ["-m", "tf_dsgd.launch", "--workers", str(WORKERS), "--ps", str(PS)]
        chief = [str(runs.HERE / "faulty_chief.py"), json.dumps(spec)]
        paths = filter(None, [str(runs.HERE.parent), os.environ.get("PYTHONPATH")])
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        self.popen = subprocess.Popen(
            [sys.executable, *launch, "--restart_workers", "9999", *chief],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **quiet},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.launcher = psutil.Process(self.popen.pid)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with (self.folder / "log").open("a", buffering=1) as log:
            for line in self.popen.stdout:
                log.write(f"{time.monotonic():.2f} {line}")
                if line.startswith("RESULT "):
                    self.results.append(json.loads(line.removeprefix("RESULT ")))

    def progress(self) -> list[Row]:
        """All lines so far."""
        path = self.folder / "progress.jsonl"
        if path.exists():
            with path.open() as file:
                file.seek(self._read_to)
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read_to += len(whole)
            self.rows += [Row(*json.loads(line)) for line in whole.splitlines()]
        return self.rows

    def epochs(self) -> list[dict]:
        """What was counted at the end of each epoch so far."""
        path = self.folder / "epochs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def processes(self) -> dict[tuple[str, int], psutil.Process]:
        """The tasks that run now."""
        found = {}
        for process in self.launcher.children():
            with contextlib.suppress(psutil.Error, KeyError):
                task = json.loads(process.environ()["TF_CONFIG"])["task"]
                found[task["type"], task["index"]] = process
        return found

    def kill(self, workers: Iterable[int]) -> Fault:
        here, before = self.processes(), self.progress()[-1]
        victims = [m for m in workers if ("worker", m) in here]
        at = time.monotonic()
        for m in victims:
            self._stopped.pop(m, None)
            here["worker", m].kill()
        return Fault("kill", victims, at, before, at)

    def stop(self, m: int, seconds: float) -> Fault:
        """`go_on` is to be called after those seconds."""
        process, before = self.processes()["worker", m], self.progress()[-1]
        at = time.monotonic()
        process.suspend()
        self._stopped[m] = process
        return Fault("stop", [m], at, before, at + seconds)

    def go_on(self, m: int) -> None:
        process = self._stopped.pop(m, None)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def wait(self, what: str, done: Any, seconds: float) -> Any:
        """What `done()` gives, once it gives something."""
        deadline = time.monotonic() + seconds
        while (found := done()) is None:
            if self.popen.poll() is not None:
                raise RuntimeError(f"The chief ended before {what}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"No {what} within {seconds:g} s:\n{self.tail()}")
            time.sleep(0.05)  # between two looks
        return found

    def wait_for_all_to_train(self) -> None:
        def all_train() -> bool | None:
            rows = self.progress()
            return True if rows and min(rows[-1].applied) >= 5 else None

        self.wait("messages of every worker", all_train, START_SECONDS)

    def finish(self, results: int) -> None:
        """Ends training with its epoch, and waits for that."""
        (self.folder / "stop").touch()
        what = f"{results} results"
        self.wait(what, lambda: len(self.results) >= results or None, END_SECONDS * results)
        self.done = True

    def tail(self) -> str:
        log = self.folder / "log"
        return "".join(log.read_text().splitlines(keepends=True)[-40:]) if log.exists() else ""

    def close(self) -> None:
        """Ends all that was started."""
        for m in list(self._stopped):
            self.go_on(m)
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = self.launcher.children(recursive=True)
        if self.popen.poll() is None:
            if self.done:  # the chief still frees what it had on workers that died
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.popen.wait(30.0)
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(15.0)
        self.popen.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.wait()
        self._reader.join(10.0)


@contextlib.contextmanager
def started(strategy: str, undisturbed: bool) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="tf_dsgd_faults_") as folder:
        cluster = Cluster(Path(folder), strategy, undisturbed)
        try:
            yield cluster
        finally:
            cluster.close()


def is_right(counts: dict) -> bool:
    """Nothing lost, nothing doubled, every message accounted for."""
    wrong = counts["doubled"] or counts["lost"] or counts["unaccounted"]
    return not wrong and counts["steps"] == counts["expected"]
