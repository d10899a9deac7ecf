"""One long fit under random faults, and whether memory, threads and files stay flat.

    python benchmarks/faults.py --soak 30
    python benchmarks/faults.py --soak 30 --strategies "bounded staleness, two fetches a push"

Every `--every` seconds a fault at random: one worker is killed; two are, at the same moment; one is
stopped for 1 to 10 s, which is shorter or longer than `worker_timeout_seconds`, and longer than
`late_after_seconds`, a second here; or one is stopped and another killed. One worker at least is
always left that was not struck, or works again; a fault that would leave none strikes fewer. Every
30 s a row: resident memory, threads and file descriptors of the chief, of each ps, of the launcher,
and the sum over the workers that run; and what the witness and the ledger had counted at the end of
the last epoch (see faults.py).

**Flat** is a series whose median over the last sixth of the rows is at most 5 % above that over the
second sixth, or above it by no more than 5 threads or files. The sum over workers is shown and not
judged: it depends on how many of them have just started. The others are the same processes from
beginning to end.

Of threads those are judged that are there beside 4 for each change of the cluster: one as a
worker joins that was killed, two as one does that was stopped, and leaves before. TensorFlow 2.21
makes four in the chief and in each ps task with each (`GrpcEagerClientCache`, in
grpc_eager_client.cc: one ends only after a further call came to it, which most never get), and
nothing outside of it can end them.

The exit code is 1 if something is not flat, lost, doubled or unaccounted for, or if no fault
struck.

What grows with what: the chief's memory is fitted by least squares, over the rows after the first
sixth, as a + b x (mini-batches) + c x (changes of the cluster); both slopes are printed.
"""

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

import numpy as np
import psutil
import runs
import struck

ROW_SECONDS = 30.0
SHARE = 0.05
FEW = 5
THREADS_OF_A_CHANGE = 4
"""TensorFlow's, in every task that was there before."""
STOP_SECONDS = (1.0, 10.0)
MEASURES = ("MB", "threads", "files")


def measured(process: psutil.Process) -> list[float]:
    with process.oneshot():
        return [process.memory_info().rss / 1e6, process.num_threads(), process.num_fds()]


def resources(cluster: struck.Cluster) -> dict[str, list[float]]:
    """Of each process that is judged, and the sum over workers: MB, threads, files."""
    found: dict[str, list[float]] = {"launcher": measured(cluster.launcher)}
    workers = [0.0, 0.0, 0.0]
    for (job, index), process in sorted(cluster.processes().items()):
        try:
            now = measured(process)
        except psutil.Error:
            continue  # killed meanwhile
        if job == "worker":
            workers = [a + b for a, b in zip(workers, now, strict=True)]
        else:
            found["chief" if job == "chief" else f"{job} {index}"] = now
    return {**found, "workers": workers}


class Striker:
    """Random faults, one at a time."""

    def __init__(self, cluster: struck.Cluster, seed: int):
        self.cluster, self.chance = cluster, random.Random(seed)
        self.away: dict[int, struck.Fault] = {}
        """The last fault of each worker that was struck and has not worked since."""
        self.since: dict[int, int] = {}
        """The line of progress from which on that is looked for."""
        self.counts = {"kill": 0, "stop": 0}
        self.slow = 0
        """Faults that struck nobody, since all others were still away."""

    def look(self) -> None:
        """Lets stopped workers go on whose time is over; notes who works again."""
        rows = self.cluster.progress()
        for m, fault in list(self.away.items()):
            if fault.kind == "stop" and time.monotonic() >= fault.goes_on_at:
                self.cluster.go_on(m)
            if time.monotonic() < fault.goes_on_at:
                continue
            if fault.struck(rows[self.since[m] :]) is not None:
                del self.away[m], self.since[m]

    def strike(self) -> None:
        what = self.chance.choice(["kill", "stop", "kill two", "both"])
        working = [m for m in range(struck.WORKERS) if m not in self.away]
        self.chance.shuffle(working)
        victims = working[: min(2 if what in ("kill two", "both") else 1, len(working) - 1)]
        if not victims:
            self.slow += 1
            return
        if what in ("stop", "both"):
            self._note(self.cluster.stop(victims[0], self.chance.uniform(*STOP_SECONDS)))
            victims = victims[1:]
        if victims:
            self._note(self.cluster.kill(victims))

    def _note(self, fault: struck.Fault) -> None:
        for m in fault.workers:
            self.counts[fault.kind] += 1
            alone = struck.Fault(fault.kind, [m], fault.at, fault.before, fault.goes_on_at)
            self.away[m], self.since[m] = alone, max(0, len(self.cluster.rows) - 1)


def joined(rows: list[struck.Row]) -> int:
    """How often a worker came back: incarnations, but for those who are away."""
    return sum(rows[-1].incarnations) - sum(not here for here in rows[-1].present)


def soak(cluster: struck.Cluster, minutes: float, every: float, seed: int) -> list[dict[str, Any]]:
    """The rows."""
    cluster.wait_for_all_to_train()
    cluster.wait("first epoch", lambda: cluster.epochs() or None, struck.END_SECONDS)
    striker = Striker(cluster, seed)
    table: list[dict[str, Any]] = []
    begin = time.monotonic()
    next_row, next_fault = begin, begin + (every or float("inf"))
    while (now := time.monotonic()) - begin < 60.0 * minutes:
        striker.look()
        if now >= next_fault:
            striker.strike()
            next_fault += every
        if now >= next_row:
            next_row += ROW_SECONDS
            table.append(
                {
                    "seconds": now - begin,
                    **cluster.epochs()[-1],
                    "joined": joined(cluster.progress()),
                    "changes": cluster.progress()[-1].changes,
                    "killed": striker.counts["kill"],
                    "stopped": striker.counts["stop"],
                    "not_struck": striker.slow,
                    "resources": resources(cluster),
                }
            )
            print("| " + " | ".join(shown(table[-1])) + " |", flush=True)
        if cluster.popen.poll() is not None:
            raise RuntimeError(f"The chief ended:\n{cluster.tail()}")
        time.sleep(0.1)  # between two looks
    for m in list(striker.away):
        cluster.go_on(m)
    cluster.finish(1)
    return table


COUNTS = ("expected", "steps", "sent", "applied", "refused", "doubled", "lost")


def header(processes: list[str]) -> list[str]:
    names = [f"{process}: {', '.join(MEASURES)}" for process in processes]
    return ["seconds", "killed, stopped, joined", *COUNTS, *names]


def shown(row: dict[str, Any]) -> list[str]:
    each = [" ".join(f"{value:.0f}" for value in now) for now in row["resources"].values()]
    struck = f"{row['killed']}, {row['stopped']}, {row['joined']}"
    return [f"{row['seconds']:.0f}", struck, *(str(row[name]) for name in COUNTS), *each]


def judged(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each series the medians of the second and of the last sixth, and whether it is flat."""
    sixth = max(1, len(table) // 6)
    found = []
    for process in table[0]["resources"]:
        for i, measure in enumerate(MEASURES):
            series = [row["resources"][process][i] - beside(process, measure, row) for row in table]
            first = statistics.median(series[sixth : 2 * sixth] or series)
            last = statistics.median(series[-sixth:])
            few = FEW if measure != "MB" else 0.0
            found.append(
                {
                    "process": process,
                    "measure": measure,
                    "second": first,
                    "last": last,
                    "judged": process != "workers",
                    "beside": beside(process, measure, {"changes": 1}) > 0,
                    "flat": last <= first * (1.0 + SHARE) or last <= first + few,
                }
            )
    return found


def beside(process: str, measure: str, row: dict[str, Any]) -> float:
    """What is not judged of a figure."""
    is_told = process == "chief" or process.startswith("ps ")
    return THREADS_OF_A_CHANGE * row["changes"] if is_told and measure == "threads" else 0.0


def slopes(table: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Of the chief's memory: kB a mini-batch, and MB a change of the cluster."""
    rows = table[max(1, len(table) // 6) :]
    x = np.array([[1.0, row["steps"], row["changes"]] for row in rows])
    y = np.array([row["resources"]["chief"][0] for row in rows])
    if len(rows) < 6 or np.linalg.matrix_rank(x) < 3:
        return None
    _, step, join = np.linalg.lstsq(x, y, rcond=None)[0]
    return 1000.0 * float(step), float(join)


def run(strategy: str, options: argparse.Namespace, origin: dict[str, Any]) -> int:
    """The exit code."""
    names = ["launcher", "chief", *(f"ps {s}" for s in range(struck.PS)), "workers"]
    print(f"\n{strategy}; a fault every {options.every:g} s.\n\n" + runs.table(header(names), []))
    with struck.started(strategy, undisturbed=False) as cluster:
        try:
            table = soak(cluster, options.soak, options.every, options.seed)
        except BaseException:
            print(cluster.tail(), file=sys.stderr)
            raise
        result = cluster.results[0]
    verdicts = judged(table)
    record = {**origin, "strategy": strategy, "rows": table, "end": result, "flat": verdicts}
    runs.write_json(options.json, record)
    rows = [
        [
            v["process"],
            v["measure"] + ", beside changes" * v["beside"],
            f"{v['second']:.0f}",
            f"{v['last']:.0f}",
            _verdict(v),
        ]
        for v in verdicts
    ]
    print("\n" + runs.table(["process", "", "second sixth", "last sixth", ""], rows))
    found = slopes(table)
    if found is not None:
        print(f"\nchief: {found[0]:.2f} kB a mini-batch, {found[1]:.2f} MB a change of the cluster")
    print("\nat the end: " + json.dumps(result))
    flat = all(verdict["flat"] for verdict in verdicts if verdict["judged"])
    right = struck.is_right(result) and all(not row["doubled"] and not row["lost"] for row in table)
    some = table[-1]["killed"] + table[-1]["stopped"] > 0 or not options.every
    print(f"flat: {flat}; nothing lost or doubled: {right}")
    return int(not (flat and right and some))


def _verdict(verdict: dict[str, Any]) -> str:
    if not verdict["judged"]:
        return "not judged"
    return "flat" if verdict["flat"] else "**not flat**"
