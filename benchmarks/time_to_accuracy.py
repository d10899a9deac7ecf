"""Seconds, processor seconds and epochs until a model is accurate, beside the best plain `fit`.

    python benchmarks/time_to_accuracy.py --json benchmarks/results/time_to_accuracy.json
    python benchmarks/time_to_accuracy.py --quick
    python benchmarks/time_to_accuracy.py --one_process --minutes 4 --json FILE   # again: goes on
    python benchmarks/time_to_accuracy.py --workers 8 --ps 2 --tasks prototypes --groups threads

What is measured is training alone, until the validation accuracy first reaches a target after an
epoch: making the model and tracing it has a column of its own, and the clocks stop while a model is
validated. Seconds of the processor are of all threads and processes. Each contender has a learning
rate of its own, searched for from one grid, on seeds that are not those measured, by the mean
number of epochs; a grid at whose edge the best rate is, is extended. A seed draws the split, the
initial weights and the order.

Groups: `threads`: plain `fit`, MirroredStrategy and workers that are threads of one process;
`processes`: those of `tf_dsgd.launch`, with a ps; `straggler`: the same, one of which is four times
slower. A worker's mini-batch has the size that plain `fit` has, too; with *all workers' examples*
plain `fit` has as many in one as the workers have together, as MirroredStrategy does.

Every contender is a process of its own. Its search comes first, then each contender trains once, by
the first seed, then each by the next ...; with `--one_process` all runs of a contender are in one
process, one after the other, which takes less time. A run that stands in `--json` is not done
again. Of a search the epochs count alone, so searches may run beside other programs, each with
`--seeds 0` and a file of its own; `--searches` takes the rates and the searches of such files, and
nothing that was measured there.
"""

import argparse
import dataclasses
import json
import signal
import sys
import time
from pathlib import Path

import accuracy_tables
import runs

PROGRAM = "accuracy_contenders.py"
TIMEOUT_SECONDS = 1800.0

GRID = (0.1, 0.2, 0.4, 0.8, 1.6)
"""The first rates of a search, of every contender of a task. A run that does not reach the target
counts as later than any that did.
"""
SMALLER = (0.025, 0.05, 0.1, 0.2, 0.4)
SEARCH_SEEDS = (101, 102, 103)
TASKS = {
    "digits": {
        "target": 0.97,
        "epochs": 40,
        "batch_size": 32,
        "rates": list(GRID),
        "search_seeds": [*SEARCH_SEEDS, 104, 105],
    },
    "prototypes": {"target": 0.97, "epochs": 20, "batch_size": 64, "rates": list(SMALLER)},
    "cnn": {"target": 0.97, "epochs": 20, "batch_size": 32, "rates": list(SMALLER)},
    "recommender": {"target": 0.9, "epochs": 25, "batch_size": 32, "rates": [0.4, 0.8, 1.6]},
}
"""Settings of all contenders of a task. Digits has 360 images to validate on, so two more seeds."""

PLAIN = {
    "plain fit": {"kind": "keras"},
    "plain fit, steps_per_execution=20": {"kind": "keras", "steps_per_execution": 20},
    "plain fit, steps_per_execution=20, all workers' examples": {
        "kind": "keras",
        "steps_per_execution": 20,
        "shares": True,
    },
}


def contenders(group: str, task: str) -> dict[str, dict]:
    """By name."""

    def of(kind: str, period: int) -> dict[str, dict]:
        title = {"downpour": "Downpour", "averaging": "averaging", "elastic": "elastic averaging"}
        return {f"{title[kind]}, every {period}": {"kind": kind, "period": period}}

    ours = {
        **of("averaging", 20),
        **of("downpour", 20),
        "softsync": {"kind": "softsync"},
        **of("elastic", 5),
    }
    if group == "threads":
        return {**PLAIN, **ours, "MirroredStrategy": {"kind": "mirrored"}}
    if group == "straggler" and task == "digits":
        ours |= {**of("averaging", 1), **of("downpour", 1)}
    common = {"processes": True, "slow": group == "straggler"}
    return {name: {**spec, **common} for name, spec in ours.items()}


GROUPS = ("threads", "processes", "straggler")


@dataclasses.dataclass
class Book:
    """All runs, those of earlier times, too, as `--json` has them."""

    path: str | None
    record: dict
    searches: list[dict] = dataclasses.field(default_factory=list)
    """Of other records: entries with a rate."""

    @classmethod
    def opened(cls, path: str | None) -> "Book":
        origin = runs.provenance()
        record = {**origin, "continued": [], "contenders": []}
        if path is not None and Path(path).exists():
            found = json.loads(Path(path).read_text())
            for name in ("versions", "machine", "cores"):
                if found[name] != origin[name]:
                    raise SystemExit(
                        f"{path} has runs with {name} {found[name]}, and here it is "
                        f"{origin[name]}: give another --json."
                    )
            record = {**found, "continued": [*found.get("continued", []), origin["command"]]}
        return cls(path, record)

    def entry(self, task: str, group: str, name: str, spec: dict) -> dict:
        """Of a contender: what was searched and measured of just these settings."""

        def same(each: dict) -> bool:
            return (each["task"], each["group"], each["spec"]) == (task, group, spec)

        entry = next(filter(same, self.record["contenders"]), None)
        if entry is None:
            entry = {"task": task, "group": group, "name": name, "spec": spec}
            entry |= {"rate": None, "search": [], "runs": [], "startup_seconds": []}
            self.record["contenders"].append(entry)
        found = next(filter(same, self.searches), None)
        if entry["rate"] is None and found is not None:
            entry |= {key: found[key] for key in ("rate", "search", "searched")}
        return entry

    def take_searches(self, path: str) -> None:
        """The rates that another record has, for contenders that have none here."""
        if not Path(path).exists():
            raise SystemExit(f"--searches: there is no file {path}: give what --json wrote.")
        try:
            other = json.loads(Path(path).read_text())
            found = [each for each in other["contenders"] if each["search"]]
            self.searches += [{"searched": other["date"], **each} for each in found]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"--searches: {path} is not what --json wrote: {error!r}") from None

    def write(self) -> None:
        runs.write_json(self.path, self.record)


def missing(entry: dict, seeds: list[int]) -> list[int]:
    """The seeds that a contender has still to be measured by."""
    done = {run["seed"] for run in entry["runs"]}
    return [seed for seed in seeds if seed not in done]


def train(entry: dict, seeds: list[int], until: float | None) -> None:
    """Starts the contender, and adds to its entry what came out."""
    spec = {**entry["spec"], "seeds": seeds, "rate": entry["rate"], "started": time.time()}
    spec["until"] = until
    command = [sys.executable]
    if spec.get("processes"):
        command += ["-m", "tf_dsgd.launch", "--workers", str(spec["workers"])]
        command += ["--ps", str(spec.get("ps", 1))]
    command += [str(runs.HERE / PROGRAM), json.dumps(spec)]
    result = runs.run_process(command, TIMEOUT_SECONDS)
    if result["rate"] is None:  # the time was over
        return
    if entry["rate"] is None:
        entry["rate"], entry["search"] = result["rate"], result["search"]
    entry["runs"] += result["runs"]
    entry["startup_seconds"].append(result["startup_seconds"])


def jobs(entries: list[dict], seeds: list[int], one_process: bool):
    """(entry, seeds) to train next, in order; none of what is there already."""
    if one_process:
        for entry in entries:
            if entry["rate"] is None or missing(entry, seeds):
                yield entry, missing(entry, seeds)
        return
    for entry in entries:
        if entry["rate"] is None:
            yield entry, []
    for seed in seeds:
        for entry in entries:
            if missing(entry, [seed]):
                yield entry, [seed]


def chosen(text: str, known, option: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SystemExit(f"{option}: no such ones: {unknown}; there are {list(known)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--only", default="", help="a regular expression of contenders' names")
    parser.add_argument("--seeds", type=int, default=5, help="how many are measured")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=1, help="for workers that are processes")
    parser.add_argument("--one_process", action="store_true", help="for each contender")
    parser.add_argument("--minutes", type=float, help="after which no run is begun any more")
    parser.add_argument("--shared", action="store_true", help="note that others compute here")
    parser.add_argument("--quick", action="store_true", help="digits, one seed, two rates")
    parser.add_argument("--json", help="every single run; those that are there are not done again")
    parser.add_argument(
        "--searches", nargs="+", default=[], help="--json files whose rates to take"
    )
    parser.add_argument("--plot", help="PNG file (needs matplotlib)")
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.seeds, options.one_process = "digits", 1, True
    # As Ctrl-C does: SIGTERM, from `timeout` for instance, ends what was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    search = {}
    if options.quick:
        search = {"rates": [0.4, 0.8], "search_seeds": [SEARCH_SEEDS[0]]}

    book = Book.opened(options.json)
    book.record["shared"] = book.record.get("shared", False) or options.shared
    for path in options.searches:
        book.take_searches(path)
    print(accuracy_tables.heading(book.record), flush=True)
    seeds = list(range(1, options.seeds + 1))
    end = None if options.minutes is None else time.time() + 60.0 * options.minutes
    for task in chosen(options.tasks, TASKS, "--tasks"):
        entries = []
        for group in chosen(options.groups, GROUPS, "--groups"):
            known = runs.chosen(contenders(group, task), options.only)
            for name, spec in known.items():
                settings = {"search_seeds": list(SEARCH_SEEDS), "workers": options.workers}
                settings |= {"task": task, **TASKS[task], **search, **spec}
                if spec.get("processes") and options.ps != 1:
                    settings["ps"] = options.ps
                entries.append(book.entry(task, group, name, settings))
        if not entries:
            names = {name for group in GROUPS for name in contenders(group, task)}
            raise SystemExit(f"--only {options.only}: finds none of {sorted(names)}")
        for entry, seeds_now in jobs(entries, seeds, options.one_process):
            if end is not None and time.time() >= end:
                print("The time is over: the same command goes on from here.", file=sys.stderr)
                break
            print(f"  {task}, {entry['group']}: {entry['name']}", file=sys.stderr, flush=True)
            train(entry, seeds_now, end)
            book.write()
    for part in accuracy_tables.all_tables(book.record):
        print(f"\n{part}", flush=True)
    if options.plot:
        accuracy_tables.plot(book.record, options.plot)


if __name__ == "__main__":
    main()
