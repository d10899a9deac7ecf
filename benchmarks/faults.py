"""Strikes workers of every strategy while it trains on processes, and counts what came of it.

    python benchmarks/faults.py --json benchmarks/results/faults.json
    python benchmarks/faults.py --strategies "Downpour,elastic averaging" --faults 10
    python benchmarks/faults.py --soak 30

Three workers and two ps tasks of `tf_dsgd.launch` train a network of 85 thousand parameters on
scikit-learn's digits (`faulty_chief.py`). This process kills workers (SIGKILL; the launcher starts
them again), one or two of three at a time, and stops one for longer than `worker_timeout_seconds`
(SIGSTOP, SIGCONT), at random moments, each once the tasks struck before work again. When the last
ones do, training ends with its epoch, and a run of as many epochs follows that nobody disturbs.

**Seconds until steps go on**. *Of the others*: the longest time without a message applied of a
worker that was not struck, from the signal until the struck ones work again. Where a rule waits
(averaging, `max_staleness`, the end of an epoch under any rule) it has the timeout in it if the
fault is a stop. *Of the struck*: from the signal until each has had a message applied of its new
incarnation; for a stop counted from SIGCONT, and of the old incarnation if it was not found to be
lost. After a kill it has the start of a process with TensorFlow in it. Seen to 0.02 s. The table
has medians, and in brackets the longest.

**Doubled** and **lost** come from outside of the ledger: a layer counts how often each example was
trained on, in what the shards applied. They are the sums of what it counted above and below the
number of epochs. **Sent**, **applied** and **refused** are the ledger's, over both shards.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
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

STRATEGIES = (
    "Downpour",
    "Downpour, pushes under way",
    "update-based",
    "bounded staleness",
    "bounded staleness, two fetches a push",
    "softsync",
    "AdaptiveRevision",
    "DelayCompensatedSGD",
    "FASGD",
    "averaging, state averaged",
    "averaging, state local",
    "averaging, state reset",
    "BMUF",
    "DiLoCo",
    "elastic averaging",
)
"""Of faulty_chief.py, which this process does not import: it would start TensorFlow."""


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


def one_fault(cluster: Cluster, kind: str, chance: random.Random) -> Fault:
    """Strikes at once; waits until everybody works again."""
    workers = chance.sample(range(WORKERS), 2 if kind == "kill two" else 1)
    if kind == "stop":
        seconds = TIMEOUT + chance.uniform(1.0, 4.0)
        fault = cluster.stop(workers[0], seconds)
        cluster.wait(
            "end of a stop",
            lambda: True if time.monotonic() >= fault.goes_on_at else None,
            seconds + 5.0,
        )
        cluster.go_on(workers[0])
        fault.goes_on_at = time.monotonic()
    else:
        fault = cluster.kill(workers)
    first = len(cluster.rows)

    def again() -> float | None:
        return fault.struck(cluster.progress()[max(0, first - 1) :])

    cluster.wait(f"message of workers {fault.workers} after a {kind}", again, BACK_SECONDS)
    return fault


def with_faults(strategy: str, count: int, seed: int) -> dict:
    """A run with that many faults and one without any."""
    chance, faults = random.Random(f"{seed} {strategy}"), []
    kinds = ["kill", "stop", "kill two"]
    with started(strategy, undisturbed=True) as cluster:
        cluster.wait_for_all_to_train()
        for number in range(count):
            pause = time.monotonic() + chance.uniform(0.2, 1.5)
            cluster.wait("next fault", lambda at=pause: time.monotonic() > at or None, 10.0)
            kind = kinds[number % len(kinds)]
            faults.append(one_fault(cluster, kind, chance))
            print(f"  {strategy}: {kind} {faults[-1].workers}", file=sys.stderr, flush=True)
        cluster.finish(2)
        rows, results = list(cluster.progress()), list(cluster.results)
    return {
        "strategy": strategy,
        "faults": [
            {
                "kind": fault.kind,
                "workers": fault.workers,
                "seconds_of_others": fault.others(rows),
                "seconds_of_struck": fault.struck(rows),
            }
            for fault in faults
        ],
        "disturbed": results[0],
        "undisturbed": results[1],
    }


def _seconds(faults: list[dict], kind: str, of: str) -> str:
    values = [f[f"seconds_of_{of}"] for f in faults if f["kind"] == kind]
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else ""


HEADER = [
    "",
    "faults: workers killed, stopped",
    "seconds until steps go on, after kills: of the others",
    "of the struck",
    "after stops: of the others",
    "of the struck",
    "steps done",
    "expected",
    "messages sent",
    "applied",
    "refused",
    "doubled",
    "lost",
    "accuracy",
    "undisturbed",
]


def table_row(run: dict) -> list[str]:
    faults, disturbed = run["faults"], run["disturbed"]
    struck = {k: sum(len(f["workers"]) for f in faults if f["kind"] == k) for k in ("kill", "stop")}
    counts = ["steps", "expected", "sent", "applied", "refused", "doubled", "lost"]
    return [
        run["strategy"],
        f"{struck['kill']}, {struck['stop']}",
        *(_seconds(faults, kind, of) for kind in ("kill", "stop") for of in ("others", "struck")),
        *(str(disturbed[name]) for name in counts),
        f"{disturbed['accuracy']:.3f}",
        f"{run['undisturbed']['accuracy']:.3f}",
    ]


def is_right(counts: dict) -> bool:
    """Nothing lost, nothing doubled, every message accounted for."""
    wrong = counts["doubled"] or counts["lost"] or counts["unaccounted"]
    return not wrong and counts["steps"] == counts["expected"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", default="all", help=f"of: {'; '.join(STRATEGIES)}")
    parser.add_argument("--faults", type=int, default=6, help="for each strategy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="where to write every single figure")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="one long run: see soak.py")
    parser.add_argument(
        "--every", type=float, default=10.0, help="seconds between faults of a soak; 0: none"
    )
    options = parser.parse_args()
    # As Ctrl-C does: SIGTERM, from `timeout` for instance, ends what was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    names = STRATEGIES if options.strategies == "all" else split(options.strategies)
    unknown = sorted(set(names) - set(STRATEGIES))
    if unknown:
        parser.error(f"--strategies: no such strategy: {unknown}; there are {STRATEGIES}")
    origin = runs.provenance()
    print(runs.heading(origin), flush=True)
    if options.soak is not None:
        import soak

        strategy = names[0]
        sys.exit(soak.run(strategy, options, origin))
    found: list[dict] = []
    wrong = False
    print("\n" + runs.table(HEADER, []), flush=True)
    for name in names:
        try:
            run = with_faults(name, options.faults, options.seed)
        except (RuntimeError, TimeoutError) as error:
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            wrong = True
            continue
        found.append(run)
        runs.write_json(options.json, {**origin, "runs": found})
        print("| " + " | ".join(table_row(run)) + " |", flush=True)
        wrong |= not (is_right(run["disturbed"]) and is_right(run["undisturbed"]))
    sys.exit(int(wrong))


def split(text: str) -> list[str]:
    """Names separated by commas, some of which have commas."""
    names, rest = [], text
    while rest:
        name = max((n for n in STRATEGIES if rest.startswith(n)), key=len, default="")
        if not name:
            return [*names, rest]
        names.append(name)
        rest = rest.removeprefix(name).lstrip(", ")
    return names


if __name__ == "__main__":
    main()
