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
again. Of a search the epochs count alone, so searches may run at the same time, each with
`--seeds 0` and a file of its own, and `--take` brings them together. With `--rates_of processes` a
contender that has none yet takes the rate of its like in that group.
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
"""The first rates of a search, of every contender of a task.

On digits, with 360 images to validate on, plain `fit` does not reach 0.97 in 40 epochs on all
splits: of the three of the search one is missed at 0.1, at 0.2 and at 0.4, and none at 0.8, which
is chosen; of the five measured, four are missed at it. A run that does not get
there counts as later than any that did.
"""
SMALLER = (0.025, 0.05, 0.1, 0.2, 0.4)
TASKS = {
    "digits": {"target": 0.97, "epochs": 40, "batch_size": 32, "rates": list(GRID)},
    "prototypes": {"target": 0.97, "epochs": 20, "batch_size": 64, "rates": list(SMALLER)},
    "cnn": {"target": 0.97, "epochs": 20, "batch_size": 32, "rates": list(SMALLER)},
    "recommender": {"target": 0.9, "epochs": 25, "batch_size": 32, "rates": [0.4, 0.8, 1.6]},
}
SEARCH_SEEDS = (101, 102, 103)

PLAIN = {
    "plain fit": {"kind": "keras"},
    "plain fit, steps_per_execution=20": {"kind": "keras", "steps_per_execution": 20},
    "plain fit, steps_per_execution=20, all workers' examples": {
        "kind": "keras",
        "steps_per_execution": 20,
        "shares": True,
    },
}
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"


def contenders(group: str) -> dict[str, dict]:
    """By name."""

    def of(kind: str, *periods: int) -> dict[str, dict]:
        title = {"downpour": "Downpour", "averaging": "averaging", "elastic": "elastic averaging"}
        return {f"{title[kind]}, every {p}": {"kind": kind, "period": p} for p in periods}

    softsync = {"softsync": {"kind": "softsync"}}
    if group == "threads":
        return {
            **PLAIN,
            **of("downpour", 1, 5, 20),
            **softsync,
            **of("averaging", 5, 20),
            **of("elastic", 5),
            "MirroredStrategy": {"kind": "mirrored"},
        }
    if group == "processes":
        found = {
            **of("downpour", 1, 20),
            **softsync,
            **of("averaging", 5, 20),
            **of("elastic", 5),
        }
    else:
        found = {
            **of("averaging", 1, 20),
            **of("downpour", 1, 20),
            **softsync,
            **of("elastic", 5, 20),
        }
    common = {"processes": True, "slow": group == "straggler"}
    return {name: {**spec, **common} for name, spec in found.items()}


GROUPS = ("threads", "processes", "straggler")


@dataclasses.dataclass
class Book:
    """All runs, those of earlier times, too, as `--json` has them."""

    path: str | None
    record: dict

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
        for each in self.record["contenders"]:
            if (each["task"], each["group"], each["spec"]) == (task, group, spec):
                return each
        entry = {"task": task, "group": group, "name": name, "spec": spec}
        entry |= {"rate": None, "search": [], "runs": [], "startup_seconds": []}
        self.record["contenders"].append(entry)
        return entry

    def rate_of(self, entry: dict, group: str) -> None:
        """Its rate is that of the contender of the same name in another group, if it has none."""
        for each in self.record["contenders"]:
            like = (each["task"], each["group"], each["name"]) == (
                entry["task"],
                group,
                entry["name"],
            )
            if like and entry["rate"] is None:
                entry["rate"], entry["rate_of"] = each["rate"], group

    def take(self, path: str) -> None:
        """The contenders of another record, of this machine, that were begun there alone."""
        if not Path(path).exists():
            raise SystemExit(f"--take: there is no file {path}: give what --json wrote elsewhere.")
        other = Book.opened(path).record
        for each in other["contenders"]:
            entry = self.entry(each["task"], each["group"], each["name"], each["spec"])
            if entry["rate"] is None:
                entry.update(each)
        self.record["continued"].append(other["command"])
        self.record["shared"] = self.record["shared"] or other["shared"]

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
    parser.add_argument("--take", nargs="+", default=[], help="add what other --json files have")
    parser.add_argument("--rates_of", choices=GROUPS, help="whose rates are taken, not searched")
    parser.add_argument("--plot", help="PNG file (needs matplotlib)")
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.seeds, options.one_process = "digits", 1, True
    # As Ctrl-C does: SIGTERM, from `timeout` for instance, ends what was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    search = {"search_seeds": list(SEARCH_SEEDS)}
    if options.quick:
        search = {"rates": [0.4, 0.8], "search_seeds": [SEARCH_SEEDS[0]]}

    book = Book.opened(options.json)
    book.record["shared"] = book.record.get("shared", False) or options.shared
    for path in options.take:
        book.take(path)
        book.write()
    print(accuracy_tables.heading(book.record), flush=True)
    seeds = list(range(1, options.seeds + 1))
    end = None if options.minutes is None else time.time() + 60.0 * options.minutes
    for task in chosen(options.tasks, TASKS, "--tasks"):
        entries = []
        for group in chosen(options.groups, GROUPS, "--groups"):
            known = runs.chosen(contenders(group), options.only)
            for name, spec in known.items():
                settings = {"task": task, **TASKS[task], "workers": options.workers, **search}
                settings |= spec
                if spec.get("processes") and options.ps != 1:
                    settings["ps"] = options.ps
                entries.append(book.entry(task, group, name, settings))
        if options.rates_of:
            for entry in entries:
                book.rate_of(entry, options.rates_of)
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
