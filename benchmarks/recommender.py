"""Two embedding tables of a recommender: ours split by rows, beside all that there is.

    python benchmarks/recommender.py --tf_keras_python peers/bin/python
    python benchmarks/recommender.py --rows 1e4,1e7 --optimizers adagrad --groups cluster
    python benchmarks/recommender.py --rows 1e4,1e7 --live 10000 --only split

Two tables of `--rows` x 32, mini-batches of 1,024, ids by Zipf's law (recommender_task.py). The
group `cluster` has processes, two workers and two ps: ours with tables split by rows (`Rows`), by
Downpour and half-synchronous (all else is averaged), ours with each table whole on one ps, and
tf_keras's ParameterServerStrategy with tables in two shards. The chief sends ours its mini-batches
from arrays; tf_keras's workers have theirs ready, as those of a second contender of ours have. The
group `local` is one process: ours on two threads, Keras's `fit`, and TensorFlow alone. A period is
`push_every`, `fetch_every` (or `average_every`) and `steps_per_execution` of ours, and
`steps_per_execution` of all others. Adam is ours with `sparse="lazy"`, and so is TensorFlow's
alone. Keras's Adagrad and Adam and tf_keras's Adam change all rows at each step, and are measured
on fewer mini-batches.

Contenders of one table of results run one after the other, and a ratio is taken between two runs of
one repetition. One that needs more memory than the machine has free is left out, and so is tf_keras
where its interpreter is not given, or lacks it: each by a line that says why.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import cluster_throughput
import recommender_task as task
import runs
import traffic

PROGRAM = "recommender_contenders.py"
TIMEOUT_SECONDS = 900.0
LAUNCH = ("--workers", "2", "--ps", "2")
FEW_STEPS = 40
"""Of an epoch of who changes all rows at each step."""
SHARE_OF_MEMORY = 0.8
PROCESS_BYTES = 600e6
"""That a process of TensorFlow takes without any table, and somewhat more."""

Results = dict[str, list[dict]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A contender but for its rows, optimizer and period."""

    name: str
    kind: str
    launched: bool = False
    processes: int = 1
    copies: float = 1.0
    """Of the tables without slots, at the peak: what all processes hold, besides the slots."""
    whole: tuple[str, ...] = ()
    """Which optimizers change all rows at each step."""


SPLIT = Kind("ours, split", "split", True, 5, 1.0)
WHOLE = Kind("ours, not split", "unsplit", True, 5, 7.0)
READY = Kind("ours, split, mini-batches ready on workers", "ready", True, 5, 1.0)
HALF = Kind("ours, half-synchronous", "half", True, 5, 1.0)
PSS = Kind("tf_keras ParameterServerStrategy", "parameter_server", False, 5, 2.5, ("adam",))
THREADS = Kind("ours, split, two threads", "split", False, 1, 1.0)
HALF_THREADS = Kind("ours, half-synchronous, two threads", "half", False, 1, 1.0)
WHOLE_THREADS = Kind("ours, not split, two threads", "unsplit", False, 1, 4.0)
PLAIN = Kind("plain fit", "plain", False, 1, 2.5, ("adagrad", "adam"))
BARE = Kind("TensorFlow alone", "bare", False, 1, 2.0)

GROUP_KINDS = {
    "cluster": (SPLIT, READY, HALF, WHOLE, PSS),
    "local": (THREADS, HALF_THREADS, WHOLE_THREADS, PLAIN, BARE),
}
BESIDE = {"cluster": PSS, "local": BARE}
SLOTS = {"sgd": 0, "adagrad": 1, "adam": 2}


def named(kind: Kind, period: int) -> str:
    return f"{kind.name}, {period}"


def spec_of(kind: Kind, optimizer: str, rows: int, period: int, options) -> task.Spec:
    few = optimizer in kind.whole
    return task.Spec(
        kind=kind.kind,
        optimizer=optimizer,
        rows=rows,
        live=options.live,
        period=period,
        steps=min(options.steps, FEW_STEPS) if few else options.steps,
        seconds=options.seconds,
    )


def needed_bytes(kind: Kind, optimizer: str, rows: int) -> float:
    """Of all its processes at their peak, as far as can be said before."""
    tables = 2 * rows * task.WIDTH * 4
    # Slots are made beside what they are made from, at worst.
    return kind.processes * PROCESS_BYTES + tables * (kind.copies + 1.3 * SLOTS[optimizer])


def available_bytes() -> float:
    """What the kernel believes that new programs can have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024.0 * int(line.split()[1])
    raise SystemExit("/proc/meminfo has no MemAvailable")


def command(kind: Kind, spec: task.Spec, options) -> list[str]:
    contender = cluster_throughput.Contender(
        dataclasses.asdict(spec),
        python=options.tf_keras_python if kind is PSS else sys.executable,
        program=PROGRAM,
        launch=LAUNCH if kind.launched else (),
    )
    return traffic.alone(contender.command())


def left_out(kind: Kind, optimizer: str, rows: int, options) -> str | None:
    """Why a contender does not run, if it does not."""
    if kind is PSS:
        reason = cluster_throughput.missing(options.tf_keras_python, "tf_keras")
        if reason is not None:
            return f"{reason} (--tf_keras_python)"
    needed, free = needed_bytes(kind, optimizer, rows), SHARE_OF_MEMORY * available_bytes()
    if needed > free:
        return f"needs about {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB can be had"
    return None


def measure(group: str, optimizer: str, rows: int, options) -> tuple[Results, dict[str, str]]:
    """The runs of one table, and why who is left out is."""
    chosen, out = {}, {}
    for kind in GROUP_KINDS[group]:
        for period in options.periods:
            name = named(kind, period)
            if name not in runs.chosen({name: kind}, options.only):
                continue
            reason = left_out(kind, optimizer, rows, options)
            if reason is None:
                chosen[name] = kind, spec_of(kind, optimizer, rows, period, options)
            else:
                out[kind.name] = reason
    results: Results = {name: [] for name in chosen}
    for repetition in range(options.repetitions):
        for name, (kind, spec) in chosen.items():
            where = f"{optimizer}, {rows:,} rows: {name}"
            print(f"  {repetition + 1}/{options.repetitions} {where}", file=sys.stderr, flush=True)
            results[name].append(runs.run_process(command(kind, spec, options), TIMEOUT_SECONDS))
    return results, out


# -- tables ----------------------------------------------------------------------------------------

SPEED, CPU = "examples_per_second", "cpu_seconds"


def beside(results: Results, name: str, other: str) -> list[float]:
    """The ratios of speed, none where one of the two did not run."""
    if not results.get(name) or not results.get(other):
        return []
    return runs.ratios(results, name, other, SPEED)


def sent(outcomes: Sequence[dict]) -> list[float]:
    """Bytes a mini-batch."""
    return [
        outcome["sent_bytes"] / outcome["steps"] for outcome in outcomes if "sent_bytes" in outcome
    ]


def peaks(outcomes: Sequence[dict], role: str) -> list[float]:
    """Megabytes of the largest process of a role."""
    return [
        outcome["peak_bytes"][role] / 1e6 for outcome in outcomes if role in outcome["peak_bytes"]
    ]


def cell(values: list[float], digits: int) -> str:
    return runs.spread(values, digits) if values else ""


def speed_table(group: str, results: Results, periods: Sequence[int]) -> str:
    roles = runs.cpu_roles(results)
    rows = []
    for name, outcomes in results.items():
        period = int(name.rsplit(", ", 1)[1])
        rows.append(
            [
                name,
                cell([outcome[SPEED] / 1e3 for outcome in outcomes], 1),
                cell(beside(results, name, named(BESIDE[group], period)), 2),
                *runs.cpu_cells(outcomes, roles),
                cell([value / 1e3 for value in sent(outcomes)], 0),
                *(cell(peaks(outcomes, role), 0) for role in roles),
                cell([o["staleness_mean"] for o in outcomes if "staleness_mean" in o], 1),
            ]
        )
    header = ["contender, period", "thousand examples/s", f"beside {BESIDE[group].name}"]
    header += [*runs.cpu_header(roles), "kB/mini-batch", *(f"peak of {r}, MB" for r in roles)]
    return runs.table([*header, "mean staleness"], rows)


Cells = dict[tuple[str, int], Results]


def speed_aims(group: str, cells: Cells, periods: Sequence[int]) -> list[list[str]]:
    """Ours, split, beside tf_keras, or beside TensorFlow alone."""
    rows = []
    for (optimizer, size), results in cells.items():
        where = f"{optimizer}, {size:,} rows"
        if group == "local":
            ratio = beside(results, named(THREADS, 20), named(BARE, 20))
            if ratio:
                rows.append([where, "20, beside TensorFlow alone", cell(ratio, 2), "at least 0.7"])
            continue
        for period in periods:
            ours = results.get(named(SPLIT, period))
            settings = [1] if period == 1 else periods
            theirs = [results[named(PSS, p)] for p in settings if results.get(named(PSS, p))]
            if not ours or not theirs or period not in (1, 20):
                continue
            ratio = [o[SPEED] / max(run[i][SPEED] for run in theirs) for i, o in enumerate(ours)]
            aim = {1: "at least 1.5", 20: "at least 3"}[period] if size >= 1_000_000 else ""
            whose = "" if period == 1 else " at its better setting"
            rows.append([where, f"{period}, beside {PSS.name}{whose}", cell(ratio, 2), aim])
    return rows


def growth_aims(cells: Cells, periods: Sequence[int], options) -> list[list[str]]:
    """From the smallest to the largest table: bytes, beside the rows that are named; memory."""
    rows = []
    for optimizer in dict.fromkeys(optimizer for optimizer, _ in cells):
        sizes = sorted(size for o, size in cells if o == optimizer)
        few, many = sizes[0], sizes[-1]
        for period in periods:
            ends = [cells[optimizer, size].get(named(SPLIT, period)) for size in (few, many)]
            if few == many or not all(ends):
                continue
            where = f"{optimizer}, {many:,} rows beside {few:,}"
            specs = [spec_of(SPLIT, optimizer, size, period, options) for size in (few, many)]
            names = task.rows_per_step(specs[1]) / task.rows_per_step(specs[0])
            if all(sent(end) for end in ends):
                ratio = cell([b / a for a, b in zip(*map(sent, ends), strict=True)], 2)
                what = f"{period}, bytes; {names:.2f} times as many different rows are named"
                rows.append([where, what, ratio, "at most 1.3"])
            grown = [b - a for a, b in zip(*(peaks(end, "workers") for end in ends), strict=True)]
            rows.append(
                [where, f"{period}, a worker's peak, MB more", cell(grown, 0), "at most 20"]
            )
    return rows


def run_group(group: str, options, record: dict) -> None:
    cells: Cells = {}
    for optimizer in options.optimizers:
        for rows in options.rows:
            results, out = measure(group, optimizer, rows, options)
            cells[optimizer, rows] = results
            title = f"{group}: {optimizer}, two tables of {rows:,} x {task.WIDTH}"
            record["groups"].append({"title": title, "left_out": out, "results": results})
            runs.write_json(options.json, record)
            lines = "\n".join(f"Left out: {name}: {reason}." for name, reason in out.items())
            table = speed_table(group, results, options.periods) if results else ""
            for part in (f"### {title}", table, lines):
                if part:
                    print(f"\n{part}", flush=True)
    aims = speed_aims(group, cells, options.periods)
    if group == "cluster":
        aims += growth_aims(cells, options.periods, options)
    if aims:
        print(f"\n### {group}: ours, split, beside the aims\n")
        print(runs.table(["", "period, and what", "", "aim"], aims), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument

    def numbers(text: str) -> list[int]:
        return [int(float(number)) for number in text.split(",")]

    def optimizers(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(SLOTS)):
            raise argparse.ArgumentTypeError(f"no such optimizer: {unknown}; there are {[*SLOTS]}")
        return names

    add("--groups", default=",".join(GROUP_KINDS), help=f"of {', '.join(GROUP_KINDS)}, with commas")
    add("--rows", type=numbers, default="1e4,1e5,1e6,1e7", help="of each table, with commas")
    add("--optimizers", type=optimizers, default=",".join(SLOTS), help="with commas")
    add("--periods", type=numbers, default="1,20", help="with commas")
    add("--only", default="", help="a regular expression of names: 'contender, period'")
    add("--tf_keras_python", help="interpreter of an environment with tensorflow and tf_keras")
    add("--repetitions", type=int, default=3)
    add(
        "--steps",
        type=int,
        default=200,
        help="mini-batches of an epoch; a few epochs come untimed before",
    )
    add("--seconds", type=float, default=5.0, help="that each is timed, in whole epochs")
    add("--live", type=int, default=0, help="so many of the rows occur; 0: any of them")
    add("--json", help="where to write all single runs")
    groups = {
        group: lambda options, record, group=group: run_group(group, options, record)
        for group in GROUP_KINDS
    }
    if not traffic.can_be_counted():
        print("No bytes are counted: `unshare --map-root-user --net` does not work here.")
    runs.run_groups(parser, groups)


if __name__ == "__main__":
    main()
