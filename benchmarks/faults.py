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
import random
import signal
import statistics
import sys
import time

import runs
import soak
from struck import BACK_SECONDS, TIMEOUT, WORKERS, Cluster, Fault, is_right, started

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


def table(found: list[dict]) -> str:
    """All strategies that were struck."""
    return runs.table(HEADER, [table_row(run) for run in found])


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
