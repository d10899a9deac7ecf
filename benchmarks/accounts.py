"""Where the processor time of a mini-batch goes: with threads, with arrays, with files.

    python benchmarks/accounts.py
    python benchmarks/accounts.py --kinds threads --period 1
    python benchmarks/accounts.py --pairs 5 --against ../before

`threads` are two workers of one process, `arrays` two processes to which the chief sends what it
reads from arrays, `files` two processes that read files themselves by a tf.data pipeline; MLP
784-512-512-10, SGD, Downpour. All figures are milliseconds a mini-batch, of all processes together:

    step         forward, backward and update with TensorFlow alone (`bare.py`): two threads, or two
                 processes
    accrual      what is saved where what is to be pushed is not summed up, nor kept
    metrics      what is saved where the model is compiled without metrics; the loss stays
    exchange     what is saved where there is one exchange, at the end of an epoch; where each step
                 has one, also that each is a call of its own, less the local update it then has;
                 with longer periods, that calls become as long as the package makes them
    input        what is saved where one mini-batch comes again and again, not from arrays or files
    Python       of the chief: of `stripped`, which has nothing of these four; with threads that of
                 the main thread, with processes that of all threads which TensorFlow has not made
    TensorFlow   the rest of `stripped`, less the step: its calls, its queues, its threads' waking

Each saving is the difference between two trainings of one turn, in one process or cluster. `sum` is
the sum of the parts, `in all` what the training takes that has everything: parts that are left out
together may save more, or less, than one by one, and the difference is printed. A part that is
smaller than what two equal trainings differ by may come out negative. The second table has the
same training by processes, and the chief's by kinds of threads, by their names.

With `--against`, another checkout's package is measured by the same programs, each pair one after
the other, in turn the one and the other first: run it before and after a change, five pairs on a
machine with nothing else to do. The ratios are this one's to the other's.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import limits
import processor_time
import runs

PROGRAM = "account_contenders.py"
TIMEOUT_SECONDS = 1200.0
KINDS = ("threads", "arrays", "files")
LAUNCH = ("-m", "tf_dsgd.launch", "--workers", "2", "--ps", "1")

FULL, STRIPPED = "full", "stripped"
SAVED = ("accrual", "metrics", "exchange", "input")
STEP, PYTHON, TENSORFLOW, SUM, WHOLE = "step", "Python", "TensorFlow", "sum", "in all"
LINES = (STEP, *SAVED, PYTHON, TENSORFLOW, SUM, WHOLE)
SPEED = "mini-batches/s"

Account = dict[str, float]
Turn = Mapping[str, dict]


# -- one account -----------------------------------------------------------------------------------


def milliseconds(outcome: Mapping) -> float:
    """A mini-batch's, of all processes."""
    return 1e3 * sum(outcome["cpu_seconds"].values()) / outcome["steps"]


def account(turn: Turn, step: float) -> Account:
    """The parts of a mini-batch, from a turn's trainings and the milliseconds of a bare step."""
    whole, stripped = milliseconds(turn[FULL]), milliseconds(turn[STRIPPED])
    found = {STEP: step}
    for name in SAVED:
        found[name] = whole - milliseconds(turn[name])
    found[PYTHON] = 1e3 * turn[STRIPPED]["python_seconds"] / turn[STRIPPED]["steps"]
    found[TENSORFLOW] = stripped - step - found[PYTHON]
    found[SUM] = sum(found.values())
    found[WHOLE] = whole
    return found


def places(turn: Turn) -> Account:
    """The whole, by processes, and the chief's by kinds of threads."""
    full = turn[FULL]
    found = processor_time.per_step(full["cpu_seconds"], full["steps"])
    kinds = processor_time.per_step(full["kinds"], full["steps"])
    return {**found, **{f"chief: {kind}": value for kind, value in sorted(kinds.items())}}


# -- measuring -------------------------------------------------------------------------------------


THIS, OTHER = "this", "the other"
"""Checkouts: the one that this program is in, and that of `--against`."""


def measure(kind: str, options: argparse.Namespace, root: Path) -> dict:
    """The turns of one kind, with the package that is at `root`."""
    spec = {
        "kind": kind,
        "period": options.period,
        "steps_per_execution": options.steps_per_execution,
        "batch_size": options.batch_size,
        "examples": options.examples,
        "epochs": options.epochs,
        "turns": options.turns,
    }
    launch = () if kind == "threads" else LAUNCH
    program = str(runs.HERE / PROGRAM)
    command = [sys.executable, *launch, program, json.dumps(spec)]
    result = runs.run_process(command, TIMEOUT_SECONDS, root)
    if Path(result["package"]).resolve() != root / "tf_dsgd":
        raise SystemExit(f"The package measured is {result['package']}, not that of {root}.")
    return result


def measure_step(kind: str, options: argparse.Namespace) -> dict:
    limit = limits.THREADS if kind == "threads" else limits.PROCESSES
    common = {"seconds": options.seconds, "batch_size": options.batch_size}
    return runs.run_contender(limits.PROGRAM, limits.spec_of(limit, **common))


def pairs(options: argparse.Namespace, kind: str, roots: Sequence[Path]) -> list[dict]:
    """Of each pair: the bare step, and of each checkout its turns."""
    found = []
    for pair in range(options.pairs):
        in_turn = roots if pair % 2 == 0 else [*reversed(roots)]
        turns = {}
        for root in in_turn:
            print(f"  {pair + 1}/{options.pairs} {kind} {root.name}", file=sys.stderr, flush=True)
            turns[THIS if root is roots[0] else OTHER] = measure(kind, options, root)["turns"]
        found.append({"step": measure_step(kind, options), "turns": turns})
    return found


# -- tables ----------------------------------------------------------------------------------------


def over_turns(pair: Mapping, checkout: str, of: Callable[[Turn, float], Account]) -> Account:
    """The medians of a checkout's turns in one pair."""
    step = milliseconds(pair["step"])
    accounts = [of(turn, step) for turn in pair["turns"][checkout]]
    return {
        line: statistics.median(each.get(line, 0.0) for each in accounts) for line in accounts[0]
    }


def with_speed(turn: Turn, step: float) -> Account:
    return {**account(turn, step), SPEED: turn[FULL]["steps_per_second"]}


def spreads(accounts: Sequence[Account], line: str) -> str:
    return runs.spread([each.get(line, 0.0) for each in accounts], 0 if line == SPEED else 2)


def account_table(found: Mapping[str, list[dict]]) -> str:
    """A column for each kind."""
    columns = {
        kind: [over_turns(pair, THIS, with_speed) for pair in measured]
        for kind, measured in found.items()
    }
    rows = [[line, *(spreads(column, line) for column in columns.values())] for line in LINES]
    apart = [runs.spread([a[WHOLE] - a[SUM] for a in column], 2) for column in columns.values()]
    rows.append(["not accounted for", *apart])
    return runs.table(["CPU, ms/mini-batch", *columns], rows)


def place_table(found: Mapping[str, list[dict]]) -> str:
    """The same time by who spent it."""
    columns = {
        kind: [over_turns(pair, THIS, lambda turn, _: places(turn)) for pair in measured]
        for kind, measured in found.items()
    }
    lines = dict.fromkeys(line for column in columns.values() for each in column for line in each)
    order = [*processor_time.in_order(line for line in lines if ":" not in line)]
    order += sorted(line for line in lines if ":" in line)
    rows = [[line, *(spreads(column, line) for column in columns.values())] for line in order]
    return runs.table(["CPU, ms/mini-batch", *columns], rows)


def ratio(ours: float, theirs: float) -> float | None:
    """None where the other's is too small, or negative, to say anything."""
    return ours / theirs if theirs > 0.05 and ours > 0.0 else None


def ratio_table(measured: Sequence[dict]) -> str:
    """Each line of this checkout beside the other's, pair by pair."""
    mine, other = (
        [over_turns(pair, checkout, with_speed) for pair in measured] for checkout in (THIS, OTHER)
    )
    rows = []
    for line in (*LINES, SPEED):
        ratios = [ratio(a[line], b[line]) for a, b in zip(mine, other, strict=True)]
        known = [each for each in ratios if each is not None]
        complete = runs.spread(known, 2) if len(known) == len(ratios) else "too small to say"
        rows.append([line, spreads(mine, line), spreads(other, line), complete])
    return runs.table(["CPU, ms/mini-batch", THIS, OTHER, "ratio"], rows)


# -- the command -----------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}, with commas")
    add("--pairs", type=int, default=1, help="how often each is measured, in processes of its own")
    add("--against", type=Path, help="another checkout, to measure beside this one")
    add("--period", type=int, default=20)
    add("--steps_per_execution", type=int, default=1)
    add("--batch_size", type=int, default=64)
    add("--examples", type=int, default=12_800)
    add("--epochs", type=int, default=5, help="of a turn of each training")
    add("--turns", type=int, default=3, help="in one process")
    add("--seconds", type=float, default=5.0, help="that the bare step is measured")
    add("--json", help="where to write all single runs")
    options = parser.parse_args()
    unknown = sorted(set(options.kinds.split(",")) - set(KINDS))
    if unknown:
        parser.error(f"--kinds: no such kind: {unknown}; there are {list(KINDS)}")
    if options.against is not None and not (options.against / "tf_dsgd").is_dir():
        parser.error(f"--against: there is no tf_dsgd in {options.against}")
    return options


def main() -> None:
    options = parsed()
    here = runs.HERE.parent
    roots = [here] if options.against is None else [here, options.against.resolve()]
    record = {**runs.provenance(), "checkouts": [root.name for root in roots], "kinds": {}}
    print(runs.heading(record), flush=True)
    for kind in options.kinds.split(","):
        record["kinds"][kind] = pairs(options, kind, roots)
        runs.write_json(options.json, record)
    found = record["kinds"]
    title = f"Downpour, periods of {options.period}, two workers, batch {options.batch_size}"
    print(f"\n### {title}\n\n{account_table(found)}\n\n{place_table(found)}", flush=True)
    if options.against is not None:
        for kind, measured in found.items():
            print(f"\n### {kind}: beside {roots[1].name}\n\n{ratio_table(measured)}")


if __name__ == "__main__":
    main()
