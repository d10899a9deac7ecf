"""What a loop written by hand reaches, beside this package and TensorFlow alone.

    python benchmarks/own_loops.py --torch_python torch/bin/python
    python benchmarks/own_loops.py --groups threads --repetitions 3

The aims of speed were set beside steps of TensorFlow alone (`limits.py`), which have no Keras, no
metrics and no data that come from anywhere. `own_loop.py` has these, and nothing of this package:
what it reaches of the limit is what is left for `fit` under a strategy. Beside them are settings of
ours that were tried in order to come nearer: more workers than cores, two threads within an
operation, twenty steps an execution.
"""

import argparse
from collections.abc import Mapping

import cluster_throughput
import limits
import runs
from cluster_throughput import Contender, launched

PLAIN_20 = "plain fit, steps_per_execution=20"
OWN_THREADS_20 = "own loop, two threads, periods of 20"
OWN_SUMS_20 = "own loop, two threads, periods of 20, gradients added up, fit's dataset"
OWN_THREADS_1 = "own loop, two threads, periods of 1"
OWN_FIT_1 = "own loop, two threads, periods of 1, a call a step, fit's dataset"
OWN_ARRAYS_20 = "own loop, two processes, periods of 20"
OWN_FILES_20 = "own loop, two processes, periods of 20, workers read files"
OWN_ARRAYS_1 = "own loop, two processes, periods of 1"
OWN_FILES_1 = "own loop, two processes, periods of 1, 20 steps a call, workers read files"
LONG = 10
"""Times as many examples in an epoch, where it says so."""

Group = dict[str, tuple[Contender, str, str]]
"""By name: how it is run, and, where there are, the limit and the own loop that it is beside."""


def own(kind: str, seconds: float, **spec) -> Contender:
    return Contender({"kind": kind, "seconds": seconds, **spec}, program="own_loop.py")


def fitted(**spec) -> Contender:
    """A `fit` in one process."""
    return Contender(spec, program="contenders.py")


def threads(options: argparse.Namespace) -> Group:
    common = {"examples": options.examples, "epochs": options.epochs}
    every_20 = {"kind": "downpour", "period": 20, **common}
    every_1 = {"kind": "downpour", "period": 1, **common}
    far, near = (limits.THREADS, OWN_THREADS_20), (limits.PUSHES_1, OWN_THREADS_1)
    ours = "Downpour, periods of 20"
    return {
        OWN_THREADS_20: (own("threads", options.seconds, period=20), limits.THREADS, ""),
        OWN_SUMS_20: (
            own("threads", options.seconds, period=20, sums=True, data="adapter"),
            *far,
        ),
        ours: (fitted(**every_20), *far),
        f"{ours}, steps_per_execution=20": (fitted(**every_20, steps_per_execution=20), *far),
        f"{ours}, 3 workers": (fitted(**every_20, workers=3), *far),
        f"{ours}, 4 workers": (fitted(**every_20, workers=4), *far),
        OWN_THREADS_1: (own("threads", options.seconds, period=1), limits.PUSHES_1, ""),
        OWN_FIT_1: (
            own("threads", options.seconds, period=1, steps_per_call=1, data="adapter"),
            *near,
        ),
        "Downpour, periods of 1": (fitted(**every_1), *near),
        "Downpour, periods of 1, steps_per_execution=20": (
            fitted(**every_1, steps_per_execution=20),
            *near,
        ),
        "Downpour, periods of 1, 4 workers": (fitted(**every_1, workers=4), *near),
        PLAIN_20: (fitted(kind="keras", steps_per_execution=20, **common), limits.THREADS, ""),
    }


def processes(options: argparse.Namespace) -> Group:
    size = {"examples": options.examples, "epochs": options.epochs}
    common = {"kind": "downpour", **size}
    every_20 = {**common, "period": 20, "steps_per_execution": 20}
    long = {**every_20, "examples": LONG * options.examples, "epochs": 1}
    files = {"pipelines": True}
    two_threads = ("--workers", "2", "--ps", "1", "--threads_per_worker", "2")
    far, far_files = (limits.PROCESSES, OWN_ARRAYS_20), (limits.PROCESSES, OWN_FILES_20)
    near = (limits.EXCHANGE_1, OWN_ARRAYS_1)
    near_files = (limits.EXCHANGE_1_CALL_20, OWN_FILES_1)
    ours, read, epochs = "Downpour, periods of 20", "workers read files", "epochs of 2,000"

    def loop(**spec) -> Contender:
        return own("processes", options.seconds, **spec)

    peers, reason = {}, cluster_throughput.missing(options.torch_python, "torch")
    if reason:
        print(f"Left out: {cluster_throughput.AVERAGING}: {reason} (--torch_python).", flush=True)
    else:
        spec = {"kind": "averaging", "period": 20, **size}
        peer = Contender(spec, python=options.torch_python)
        peers = {cluster_throughput.AVERAGING: (peer, *far)}
    pair = {"kind": "keras", "processes": 2, **size}
    return {
        OWN_ARRAYS_20: (loop(period=20), limits.PROCESSES, ""),
        ours: (launched(2, **every_20), *far),
        f"{ours}, {epochs}": (launched(2, **long), *far),
        f"{ours}, 3 workers": (launched(3, **every_20), *far),
        f"{ours}, 4 workers": (launched(4, **every_20), *far),
        f"{ours}, two threads within an operation": (Contender(every_20, launch=two_threads), *far),
        OWN_FILES_20: (loop(period=20, data="files"), limits.PROCESSES, ""),
        f"{ours}, {read}": (launched(2, **every_20, **files), *far_files),
        f"{ours}, {read}, {epochs}": (launched(2, **long, **files), *far_files),
        f"{ours}, {read}, 3 workers": (launched(3, **every_20, **files), *far_files),
        OWN_ARRAYS_1: (loop(period=1, steps_per_call=1), limits.EXCHANGE_1, ""),
        "Downpour, periods of 1": (launched(2, **common, period=1), *near),
        "Downpour, periods of 1, 3 workers": (launched(3, **common, period=1), *near),
        OWN_FILES_1: (
            loop(period=1, steps_per_call=20, data="files"),
            limits.EXCHANGE_1_CALL_20,
            "",
        ),
        f"Downpour, periods of 1, steps_per_execution=20, {read}": (
            launched(2, **{**every_20, "period": 1}, **files),
            *near_files,
        ),
        cluster_throughput.PLAIN_PAIR: (
            fitted(**pair, steps_per_execution=20),
            limits.PROCESSES,
            "",
        ),
        **peers,
    }


GROUPS = {
    "threads": ("two threads, MLP 784-512-512-10, batch 64, SGD(0.01)", threads),
    "processes": ("two workers and a ps, the same model", processes),
}


def table(group: Mapping) -> str:
    """One group's runs: beside TensorFlow alone, and beside the loop written by hand.

    Without mini-batches a second: those of ours and of the limits have other programs' tables, and
    a speed stands in one.
    """
    results, roles = group["results"], runs.cpu_roles(group["results"])
    rows = []
    for name, outcomes in results.items():
        others = group["beside"].get(name, ("", ""))
        shares = [runs.spread(runs.ratios(results, name, o), 2) if o else "" for o in others]
        rows.append([name, *shares, *runs.cpu_cells(outcomes, roles)])
    header = ["", "of TensorFlow alone", "of the own loop"]
    return runs.table([*header, *runs.cpu_header(roles)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--groups", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}, with commas")
    add("--only", default="", help="a regular expression of contenders' names")
    add("--repetitions", type=int, default=3)
    add("--epochs", type=int, default=3, help="timed ones of fit")
    add("--examples", type=int, default=12_800, help="of an epoch of fit")
    add("--seconds", type=float, default=5.0, help="that a loop or a limit is measured")
    add("--torch_python", help="interpreter of an environment with torch and numpy")
    add("--json", help="where to write all single runs")

    def run(name: str, options: argparse.Namespace, record: dict) -> None:
        title, make = GROUPS[name]
        group = runs.chosen(make(options), options.only)
        found = {each: contender for each, (contender, _, _) in group.items()}
        whose = {each: limit for each, (_, limit, _) in group.items()}
        with_limits = cluster_throughput.with_limits(found, whose, options.seconds)
        results = cluster_throughput.interleaved(with_limits, options.repetitions)
        beside = {
            each: (limit, loop if loop in results else "")
            for each, (_, limit, loop) in group.items()
        }
        record["groups"].append(
            {"name": name, "title": title, "beside": beside, "results": results}
        )
        print(f"\n### {title}\n\n{table(record['groups'][-1])}", flush=True)

    of_groups = {name: (lambda o, r, name=name: run(name, o, r)) for name in GROUPS}
    runs.run_groups(parser, of_groups)


if __name__ == "__main__":
    main()
