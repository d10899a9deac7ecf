"""Mini-batches per second with processes, beside TensorFlow's and PyTorch's own ways of doing it.

    python benchmarks/cluster_throughput.py \
        --tf_keras_python peers/bin/python --torch_python torch/bin/python
    python benchmarks/cluster_throughput.py --groups large,overlap --repetitions 2

Ours is started by `python -m tf_dsgd.launch`, a chief, two workers and a ps, and trained by plain
`fit`. The peers have two workers as well, and run in environments of their own: tf_keras 2 beside
the same TensorFlow, and PyTorch. One whose interpreter is not given, or lacks the package, is left
out. The repetitions are interleaved, and a ratio is taken between two runs of one repetition: the
ratios are what counts.
"""

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Collection

import limits
import runs

PROGRAM = "cluster_contenders.py"
SPMD = ("--workers", "2", "--spmd")
TIMEOUT_SECONDS = 600.0

PLAIN = "plain fit, one process"
PLAIN_20 = f"{PLAIN}, steps_per_execution=20"
PLAIN_PAIR = "plain fit, two processes, each a model of its own, steps_per_execution=20"
EVERY_STEP, EVERY_20 = "Downpour, periods of 1", "Downpour, periods of 20"
EXECUTION_20 = "Downpour, periods of 20, steps_per_execution=20"
PIPELINES_20 = "Downpour, periods of 20, steps_per_execution=20, workers read files"
PIPELINES_1 = "Downpour, periods of 1, steps_per_execution=20, workers read files"
PSS_1 = "tf_keras ParameterServerStrategy, steps_per_execution=1"
PSS_20 = "tf_keras ParameterServerStrategy, steps_per_execution=20"
AVERAGING = "PyTorch, averaging every 20"
DDP = "PyTorch DDP, gloo"
MIRRORED = "tf_keras MultiWorkerMirroredStrategy"

# 60 % of what the loopback of the machine gave on which the aim was set.
EXCHANGE_AIM_MB = 0.6 * 1800

Results = dict[str, list[dict]]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A process to start: what it does, by which Python, under how many workers of the launcher."""

    spec: dict
    python: str = sys.executable
    program: str = PROGRAM
    launch: tuple[str, ...] = ()

    def command(self) -> list[str]:
        return runs.command(self.program, self.spec, self.launch, self.python)

    def run(self) -> dict:
        """What it measured; the package is imported from this checkout."""
        try:
            return runs.run_process(self.command(), TIMEOUT_SECONDS)
        except SystemExit as failure:
            if self.python == sys.executable:
                raise
            print(f"A peer is run once more: {failure}", file=sys.stderr)  # DDP's end may abort
            return runs.run_process(self.command(), TIMEOUT_SECONDS)


def launched(workers: int, ps: int = 1, **spec) -> Contender:
    return Contender(spec, launch=("--workers", str(workers), "--ps", str(ps)))


def bare(limit: str, seconds: float) -> Contender:
    """A limit, to run beside the contenders."""
    spec = limits.spec_of(limit, seconds=seconds)
    return Contender(spec, program=spec.pop("program"))


def with_limits(
    contenders: dict[str, Contender], whose: dict[str, str], seconds: float
) -> dict[str, Contender]:
    """The contenders, and the limits that are theirs."""
    names = dict.fromkeys(limit for name, limit in whose.items() if name in contenders)
    return {**contenders, **{name: bare(name, seconds) for name in names}}


def interleaved(contenders: dict[str, Contender], repetitions: int) -> Results:
    """Each contender once, then each again ...: a slow minute of the machine hits all alike."""
    results: Results = {name: [] for name in contenders}
    for repetition in range(repetitions):
        for name, contender in contenders.items():
            print(f"  {repetition + 1}/{repetitions} {name}", file=sys.stderr, flush=True)
            results[name].append(contender.run())
    return results


# -- beside the peers ------------------------------------------------------------------------------


def missing(python: str | None, package: str) -> str | None:
    """Why a peer cannot run, if it cannot."""
    if python is None:
        return "its Python was not given"
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    try:
        found = subprocess.run([python, "-c", find], capture_output=True, check=False)
    except OSError as error:
        return f"{python} cannot be started: {error.strerror}"
    return f"{python} has no {package}" if found.returncode else None


def peers(options) -> tuple[dict[str, Contender], list[str]]:
    """The contenders, and a line for each that is left out."""
    common = {"examples": options.examples, "epochs": options.epochs}
    pythons = {"tf_keras": options.tf_keras_python, "torch": options.torch_python}
    reasons = {package: missing(python, package) for package, python in pythons.items()}
    left_out = []

    def peer(name: str, package: str, **spec) -> dict[str, Contender]:
        if reasons[package] is None:
            return {name: Contender({**spec, **common}, python=pythons[package])}
        left_out.append(f"Left out: {name}: {reasons[package]} (--{package}_python).")
        return {}

    # Those of one ratio run one after the other; plain fit is what all are beside.
    contenders = {
        **peer(AVERAGING, "torch", kind="averaging", period=20),
        EVERY_20: launched(2, kind="downpour", period=20, **common),
        EXECUTION_20: launched(2, kind="downpour", period=20, steps_per_execution=20, **common),
        PIPELINES_20: launched(
            2, kind="downpour", period=20, steps_per_execution=20, pipelines=True, **common
        ),
        **peer(PSS_20, "tf_keras", kind="parameter_server", steps_per_execution=20),
        **peer(PSS_1, "tf_keras", kind="parameter_server", steps_per_execution=1),
        EVERY_STEP: launched(2, kind="downpour", period=1, **common),
        PIPELINES_1: launched(
            2, kind="downpour", period=1, steps_per_execution=20, pipelines=True, **common
        ),
        PLAIN: Contender({"kind": "keras", **common}, program="contenders.py"),
        PLAIN_20: Contender(
            {"kind": "keras", "steps_per_execution": 20, **common}, program="contenders.py"
        ),
        PLAIN_PAIR: Contender(
            {"kind": "keras", "processes": 2, "steps_per_execution": 20, **common},
            program="contenders.py",
        ),
        **peer(DDP, "torch", kind="ddp"),
    }
    return runs.chosen(contenders, options.only, PLAIN), left_out


LIMIT_OF = {
    AVERAGING: limits.PROCESSES,
    **{name: limits.of_processes(20) for name in (EVERY_20, EXECUTION_20, PIPELINES_20)},
    PSS_20: limits.of_processes(1, steps_per_call=20),
    PSS_1: limits.of_processes(1),
    EVERY_STEP: limits.of_processes(1),
    PIPELINES_1: limits.of_processes(1, steps_per_call=20),
    PLAIN: limits.ONE,
    PLAIN_20: limits.ONE,
    PLAIN_PAIR: limits.PROCESSES,
    DDP: limits.PROCESSES,
}
"""The limit of a contender: what TensorFlow alone does as often as it does."""


LIMIT_AIMS = {
    **dict.fromkeys((EVERY_20, EXECUTION_20, PIPELINES_20), 0.75),
    **dict.fromkeys((EVERY_STEP, PIPELINES_1), 0.85),
}


def best_plain(results: Results) -> list[float]:
    """The speed of plain `fit` in one process at its better setting, by repetition."""
    return runs.better(results, *(name for name in (PLAIN, PLAIN_20) if name in results))


def speed_table(results: Results, elsewhere: Collection[str] = ()) -> str:
    """All contenders; without the speed of those that another table has."""
    roles, plain = runs.cpu_roles(results), best_plain(results)
    rows = []
    for name, outcomes in results.items():
        staleness = [o["staleness_mean"] for o in outcomes if "staleness_mean" in o]
        rows.append(
            [
                name,
                runs.speed(name, outcomes, elsewhere),
                runs.spread(runs.beside(results, name, plain), 2),
                *limits.cells(results, name, LIMIT_OF),
                *runs.cpu_cells(outcomes, roles),
                runs.spread(staleness, 1) if staleness else "",
            ]
        )
    header = ["", "mini-batches/s", "beside plain fit at its better setting"]
    header += [*limits.HEADER, *runs.cpu_header(roles)]
    return runs.table([*header, "mean staleness"], rows)


def aims_table(results: Results) -> str:
    """Ours beside the peers that ran and the limits, each ratio within one repetition."""

    def speeds(name: str) -> list[float]:
        return [outcome["steps_per_second"] for outcome in results.get(name, [])]

    better = [max(pair) for pair in zip(speeds(PSS_1), speeds(PSS_20), strict=True)]
    best_pss = "tf_keras ParameterServerStrategy at its better setting"
    pairs = [
        *((ours, best_pss, better, 6.0) for ours in (EVERY_20, EXECUTION_20, PIPELINES_20)),
        *(
            (ours, AVERAGING, speeds(AVERAGING), 1.0)
            for ours in (EVERY_20, EXECUTION_20, PIPELINES_20)
        ),
        (PIPELINES_20, DDP, speeds(DDP), None),
        *((ours, PSS_1, speeds(PSS_1), 1.0) for ours in (EVERY_STEP, PIPELINES_1)),
        *(
            (ours, PLAIN_PAIR, speeds(PLAIN_PAIR), None)
            for ours in (EVERY_20, EXECUTION_20, PIPELINES_20)
        ),
        *((ours, LIMIT_OF[ours], speeds(LIMIT_OF[ours]), aim) for ours, aim in LIMIT_AIMS.items()),
    ]
    rows = [
        [
            ours,
            theirs,
            runs.spread([a / b for a, b in zip(speeds(ours), baseline, strict=True)], 2),
            "" if aim is None else f"at least {aim}",
        ]
        for ours, theirs, baseline, aim in pairs
        if baseline and speeds(ours)
    ]
    return runs.table(["", "beside", "ratio", "aim"], rows) if rows else ""


def run_peers(options, record: dict) -> None:
    contenders, left_out = peers(options)
    contenders = with_limits(contenders, LIMIT_OF, options.limit_seconds)
    results = interleaved(contenders, options.repetitions)
    title = "MLP 784-512-512-10, batch 64, SGD(0.01): two workers and one ps, processes"
    record["groups"].append({"title": title, "left_out": left_out, "results": results})
    for part in (f"### {title}", speed_table(results), aims_table(results), "\n".join(left_out)):
        if part:
            print(f"\n{part}", flush=True)


# -- a large model ---------------------------------------------------------------------------------


def run_large(options, record: dict) -> None:
    spec = {"kind": "exchange", "parameters": options.parameters, "variables": options.variables}
    results = interleaved({"large": launched(1, **spec)}, options.repetitions)
    outcomes = results["large"]
    size = outcomes[0]["bytes"]
    title = f"{size / 4e6:.1f} million parameters in {options.variables} variables, one worker"
    record["groups"].append({"title": title, "results": results})
    beside = {"fetch": "bare read", "push": "bare assign_add"}
    rows = []
    for name in outcomes[0]["seconds"]:
        seconds = [outcome["seconds"][name] for outcome in outcomes]
        ratio = []
        if name in beside:
            ratio = [
                outcome["seconds"][beside[name]] / outcome["seconds"][name] for outcome in outcomes
            ]
        rows.append(
            [
                name,
                runs.spread([1e3 * s for s in seconds], 0),
                runs.spread([size / 1e6 / s for s in seconds], 0),
                f"{runs.spread(ratio, 2)} of {beside[name]}" if ratio else "",
                f"at least {EXCHANGE_AIM_MB:.0f} MB/s, or 1.00" if ratio else "",
            ]
        )
    header = ["", "ms", "MB/s", "speed beside a bare function", "aim"]
    print(f"\n### {title}\n\n{runs.table(header, rows)}", flush=True)


# -- a push while the next mini-batch is computed --------------------------------------------------


def run_overlap(options, record: dict) -> None:
    spec = {
        "kind": "overlap",
        "parameters": options.parameters,
        "variables": options.variables,
        "examples": 64 * 40,
        "epochs": 1,
    }
    results = interleaved({"overlap": launched(1, **spec)}, options.repetitions)
    title = (
        f"{options.parameters / 1e6:g} million parameters in {options.variables} variables, one "
        "worker, batch 64, push_every=1, fetch_every=10"
    )
    record["groups"].append({"title": title, "results": results})
    outcomes = [outcome["results"] for outcome in results["overlap"]]
    rows = []
    for name in outcomes[0]:
        seconds = [outcome[name]["seconds"] / outcome[name]["steps"] for outcome in outcomes]
        first = [outcome["in turns"]["steps_per_second"] for outcome in outcomes]
        ratio = [o[name]["steps_per_second"] / f for o, f in zip(outcomes, first, strict=True)]
        rows.append([name, runs.spread([1e3 * s for s in seconds], 0), runs.spread(ratio, 2)])
    header = ["push and compute", "ms/mini-batch", "speed beside in turns"]
    print(f"\n### {title}\n\n{runs.table(header, rows)}", flush=True)


# -- periodic averaging, and how it travels --------------------------------------------------------


def run_averaging(options, record: dict) -> None:
    common = {"examples": options.examples, "epochs": options.epochs}
    ours = {"one ps": 1, "two ps": 2, "no ps: the workers hold the weights": 0}
    ours = runs.chosen(ours, options.only)
    contenders = {
        f"averaging every 20, {name}": launched(2, ps, kind="periodic", period=20, **common)
        for name, ps in ours.items()
    }
    left_out = []
    for name, package, python, contender in (
        (
            AVERAGING,
            "torch",
            options.torch_python,
            Contender({"kind": "averaging", "period": 20, **common}),
        ),
        (
            MIRRORED,
            "tf_keras",
            options.tf_keras_python,
            Contender({"kind": "mirrored", **common}, program="spmd_contenders.py", launch=SPMD),
        ),
    ):
        reason = missing(python, package)
        if reason is None:
            contenders[name] = dataclasses.replace(contender, python=python)
        else:
            left_out.append(f"Left out: {name}: {reason} (--{package}_python).")
    whose = dict.fromkeys(contenders, limits.PROCESSES)
    contenders = with_limits(contenders, whose, options.limit_seconds)
    results = interleaved(contenders, options.repetitions)
    title = "Averaging every 20: MLP 784-512-512-10, batch 64, SGD(0.01), two workers, processes"
    record["groups"].append({"title": title, "left_out": left_out, "results": results})
    peers = [name for name in (AVERAGING, MIRRORED) if name in results]
    roles = runs.cpu_roles(results)
    rows = []
    for name, outcomes in results.items():
        speeds = runs.spread([outcome["steps_per_second"] for outcome in outcomes], 0)
        beside = [runs.spread(runs.ratios(results, name, peer), 2) for peer in peers]
        limit = limits.cells(results, name, whose)[:1]
        cpu = runs.cpu_cells(outcomes, roles)
        rows.append([name, speeds, *beside, *limit, *cpu, *time_shares(outcomes)])
    header = ["", "mini-batches/s", *(f"beside {peer}" for peer in peers)]
    header += [f"of the limit: {limits.PROCESSES}", *runs.cpu_header(roles), *SHARES]
    for part in (f"### {title}", runs.table(header, rows), "\n".join(left_out)):
        if part:
            print(f"\n{part}", flush=True)
    run_meetings(options, record, ours)


SHARES = ("fetch", "compute", "push", "wait")


def time_shares(outcomes: list[dict], digits: int = 0) -> list[str]:
    """Of the workers' time, in percent."""
    if "worker_seconds" not in outcomes[0]:
        return [""] * len(SHARES)
    parts = [outcome["worker_seconds"] for outcome in outcomes]
    return [
        runs.spread([100 * part[kind] / sum(part.values()) for part in parts], digits) + " %"
        for kind in SHARES
    ]


def run_meetings(options, record: dict, ours: dict[str, int]) -> None:
    spec = {
        "kind": "meetings",
        "parameters": options.parameters,
        "variables": options.variables,
        "examples": 20,
        "epochs": 1,
    }
    results = interleaved(
        {name: launched(2, ps, **spec) for name, ps in ours.items()}, options.repetitions
    )
    title = (
        f"Averaging at every step: {options.parameters / 1e6:g} million parameters in "
        f"{options.variables} variables, batch 4, two workers"
    )
    record["groups"].append({"title": title, "results": results})
    rows = []
    for name, outcomes in results.items():
        # Of one worker, between two averages.
        milliseconds = [
            [1e3 * o["worker_seconds"][kind] / o["steps"] for o in outcomes] for kind in SHARES
        ]
        whole = [2e3 * outcome["seconds"] / outcome["steps"] for outcome in outcomes]
        rows.append([name, runs.spread(whole, 0), *(runs.spread(v, 0) for v in milliseconds)])
    header = ["", "ms from average to average", *(f"{kind}, ms" for kind in SHARES)]
    print(f"\n### {title}\n\n{runs.table(header, rows)}", flush=True)


GROUPS = {
    "peers": run_peers,
    "averaging": run_averaging,
    "large": run_large,
    "overlap": run_overlap,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--groups", default="peers", help=f"of {', '.join(GROUPS)}, with commas")
    add("--tf_keras_python", help="interpreter of an environment with tensorflow and tf_keras")
    add("--torch_python", help="interpreter of an environment with torch and numpy")
    add("--repetitions", type=int, default=5)
    add("--epochs", type=int, default=10, help="timed ones, after one that is not")
    add("--examples", type=int, default=12_800)
    add("--only", default="", help="a regular expression of names, for the groups peers, averaging")
    add("--limit_seconds", type=float, default=5.0, help="that a limit is measured")
    add("--parameters", type=int, default=25_000_000, help="for the groups large and overlap")
    add("--variables", type=int, default=150, help="for the groups large and overlap")
    add("--json", help="where to write all single runs")
    runs.run_groups(parser, GROUPS)


if __name__ == "__main__":
    main()
