"""Two equal processes whose models `PeriodicAveraging` averages, beside two that train alone.

    python benchmarks/spmd_averaging.py --tf_keras_python peers/bin/python
    python benchmarks/spmd_averaging.py --groups large --repetitions 3

Group `throughput`: mini-batches per second of both processes, averaging every 20 and every 200
steps, beside the same two processes without the callback, side by side; and beside tf_keras 2 on
MultiWorkerMirroredStrategy, if an interpreter with it is given. Group `large`: the time of one
average of a large model beside TensorFlow's bare `all_reduce`. All run under the same launcher.
"""

import argparse
import sys
from collections.abc import Collection

import limits
import runs
from cluster_throughput import (
    MIRRORED,
    SPMD,
    Contender,
    Results,
    interleaved,
    missing,
    with_limits,
)

PROGRAM = "spmd_contenders.py"

ALONE = "two that train alone"
EVERY_20, EVERY_200 = "averaging every 20", "averaging every 200"
AIMS = {EVERY_20: 0.75, EVERY_200: 0.95}


def contender(python: str = sys.executable, **spec) -> Contender:
    """Two processes that each run the contender; worker 0 prints the result."""
    return Contender(spec, python=python, program=PROGRAM, launch=SPMD)


def run_throughput(options, record: dict) -> None:
    common = {"examples": options.examples, "epochs": options.epochs}
    contenders = {
        EVERY_20: contender(kind="averaging", period=20, **common),
        ALONE: contender(kind="alone", **common),
        EVERY_200: contender(kind="averaging", period=200, **common),
    }
    reason = missing(options.tf_keras_python, "tf_keras")
    if reason is None:
        contenders[MIRRORED] = contender(options.tf_keras_python, kind="mirrored", **common)
    contenders = runs.chosen(contenders, options.only, ALONE)
    whose = dict.fromkeys(contenders, limits.PROCESSES)
    contenders = with_limits(contenders, whose, options.limit_seconds)
    results = interleaved(contenders, options.repetitions)
    title = "MLP 784-512-512-10, batch 64, SGD(0.01): two processes"
    record["groups"].append({"title": title, "results": results})
    print(f"\n### {title}\n\n{throughput_table(results)}", flush=True)
    if reason is not None:
        print(f"\nLeft out: {MIRRORED}: {reason} (--tf_keras_python).", flush=True)


def throughput_table(results: Results, elsewhere: Collection[str] = ()) -> str:
    """All contenders; without the speed of those that another table has."""
    whose = {name: limits.PROCESSES for name in results if name != limits.PROCESSES}
    rows, roles = [], runs.cpu_roles(results)
    for name, outcomes in results.items():
        speeds = runs.speed(name, outcomes, elsewhere)
        ratio = runs.spread(runs.ratios(results, name, ALONE), 2)
        aim = f"at least {AIMS[name]}" if name in AIMS else ""
        peer = ""
        if MIRRORED in results and name != MIRRORED:
            peer = runs.spread(runs.ratios(results, name, MIRRORED), 2)
        limit = limits.cells(results, name, whose)[:1]
        rows.append([name, speeds, ratio, aim, peer, *limit, *runs.cpu_cells(outcomes, roles)])
    header = [
        "",
        "mini-batches/s",
        f"beside {ALONE}",
        "aim",
        "beside tf_keras MultiWorkerMirroredStrategy",
    ]
    header += [f"of the limit: {limits.PROCESSES}", *runs.cpu_header(roles)]
    return runs.table(header, rows)


def run_large(options, record: dict) -> None:
    size = {"parameters": options.parameters, "variables": options.variables}
    contenders = {
        "average(model)": contender(kind="large", **size),
        "bare": contender(kind="bare", **size),
    }
    results = interleaved(contenders, options.repetitions)
    title = (
        f"{options.parameters / 1e6:g} million parameters in {options.variables} variables, two "
        "processes"
    )
    record["groups"].append({"title": title, "results": results})
    print(f"\n### {title}\n\n{large_table(results)}", flush=True)


def large_table(results: Results) -> str:
    """Of one average beside bare ones."""
    ours = [outcome["seconds"] for outcome in results["average(model)"]]
    rows = []
    for name, seconds in {
        "average(model)": ours,
        "bare all_reduce, one tensor": [outcome["seconds"] for outcome in results["bare"]],
        "bare all_reduce, a tensor a variable": [
            outcome["seconds_many"] for outcome in results["bare"]
        ],
    }.items():
        ratio = [mine / each for mine, each in zip(ours, seconds, strict=True)]
        rows.append([name, runs.spread([1e3 * s for s in seconds], 0), runs.spread(ratio, 2)])
    return runs.table(["", "ms", "average(model) beside it"], rows)


GROUPS = {"throughput": run_throughput, "large": run_large}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--groups", default="throughput,large", help=f"of {', '.join(GROUPS)}, with commas")
    add("--tf_keras_python", help="interpreter of an environment with tensorflow and tf_keras")
    add("--only", default="", help="a regular expression of names, for the group throughput")
    add("--repetitions", type=int, default=5)
    add("--epochs", type=int, default=5, help="timed ones, after one that is not")
    add("--examples", type=int, default=12_800, help="of each process")
    add("--limit_seconds", type=float, default=5.0, help="that the limit is measured")
    add("--parameters", type=int, default=25_000_000)
    add("--variables", type=int, default=150)
    add("--json", help="where to write all single runs")
    runs.run_groups(parser, GROUPS)


if __name__ == "__main__":
    main()
