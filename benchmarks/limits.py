"""What TensorFlow alone can do on this machine: the limits that the contenders are beside.

    python benchmarks/limits.py
    python benchmarks/limits.py --groups settings --repeats 3   # which settings are the best here

Without Keras and without this package (`bare.py`, `bare_cluster.py`): steps only, of one process,
two threads and two processes; steps whose gradients two threads push to one model; and the exchange
of two worker processes with a ps, at periods of 1 and 20. All train one network; each limit has
the setting that was the fastest where it was tried (`LIMITS`), which the group `settings` tries
again: threads within an operation and operations at a time, six tensors or one vector. Pushes of
the limits are locked, as this package's are; what they are without a lock, the group shows beside.

Each run is a process of its own; the repetitions are interleaved, and a ratio is taken within one.
The processor time is that of all processes of a role, read at the beginning and the end of the
interval that is measured.

The throughput benchmarks run the limits of their contenders beside them, and say how much of its
limit each reaches: `of_threads` and `of_processes` say which limit is whose.
"""

import argparse
import os
from collections.abc import Mapping, Sequence

import runs

PROGRAM = "bare.py"
TITLES = {
    "mlp": "MLP 784-512-512-10",
    "wide": "MLP 784-4096-4096-10",
    "deep": "MLP 784-64-64-10",
}

ONE = "bare steps, one process"
THREADS = "bare steps, two threads"
PROCESSES = "bare steps, two processes"
PUSHES_1 = "bare threads, locked pushes, periods of 1"
PUSHES_20 = "bare threads, locked pushes, periods of 20"
EXCHANGE_1 = "bare exchange, periods of 1, a call a step"
EXCHANGE_1_CALL_20 = "bare exchange, periods of 1, 20 steps a call"
EXCHANGE_20 = "bare exchange, periods of 20"

LIMITS: dict[str, dict] = {
    ONE: {"kind": "steps", "workers": 1, "intra": 0},
    THREADS: {"kind": "steps", "workers": 2},
    PROCESSES: {"kind": "processes", "workers": 2},
    PUSHES_1: {"kind": "pushes", "period": 1},
    PUSHES_20: {"kind": "pushes", "period": 20},
    EXCHANGE_1: {"kind": "exchange", "period": 1, "steps_per_call": 1, "flat": True},
    EXCHANGE_1_CALL_20: {"kind": "exchange", "period": 1, "steps_per_call": 20, "flat": True},
    EXCHANGE_20: {"kind": "exchange", "period": 20, "flat": True},
}
"""Each with the setting that was the fastest, among locked ones; `bare.Spec` has the others."""

_POOLS = {
    f"{intra or 'all'} threads within an operation, {inter or 'all'} operations at a time": {
        "intra": intra,
        "inter": inter,
    }
    for intra, inter in ((1, 0), (1, 4), (2, 0), (0, 0))
}
"""Of which TensorFlow takes "all" to be one for each core."""
_TRAVEL = {
    f"{form}, {lock}": {"flat": form == "one vector", "locked": lock == "locked"}
    for form in ("six tensors", "one vector")
    for lock in ("locked", "not locked")
} | {"one vector, locked, all threads within an operation": {"flat": True, "intra": 0}}
_LOCKS = {"locked": {"locked": True}, "not locked": {"locked": False}}

SETTINGS: dict[str, dict[str, dict]] = {
    ONE: _POOLS,
    THREADS: _POOLS,
    PROCESSES: _POOLS,
    PUSHES_1: _LOCKS,
    PUSHES_20: _LOCKS,
    EXCHANGE_1: _TRAVEL,
    EXCHANGE_1_CALL_20: _TRAVEL,
    EXCHANGE_20: _TRAVEL,
}

Results = Mapping[str, Sequence[dict]]


def spec_of(limit: str, **common) -> dict:
    """What `runs.run_contender` takes."""
    kind = LIMITS[limit]["kind"]
    program = "bare_cluster.py" if kind == "exchange" else PROGRAM
    return {"program": program, **common, **LIMITS[limit]}


# -- whose limit is which --------------------------------------------------------------------------


def of_threads(spec: Mapping) -> tuple[str, dict]:
    """The limit of a contender of `contenders.py`: its name, and what runs it.

    With more workers than cores it is that of as many as there are cores: no more can be had.
    """
    model = {"dense_embedding": "embedding"}.get(spec.get("model", "mlp"), spec.get("model", "mlp"))
    same = {name: spec[name] for name in ("variables", "rows", "batch_size") if name in spec}
    common = {"model": model, "seconds": spec.get("limit_seconds", 5.0), **same}
    workers = min(spec.get("workers", 2), os.cpu_count() or 1)
    if spec.get("kind", "keras") == "keras":
        limit = ONE
    else:
        limit = PUSHES_1 if spec.get("period", 20) == 1 else THREADS
    if limit == ONE or workers == 2:
        return limit, spec_of(limit, **common)
    name = f"{limit.replace('two threads', 'threads')}, {workers} worker{'s'[: workers > 1]}"
    return name, {**spec_of(limit, **common), "workers": workers}


def beside_threads(specs: Mapping[str, dict]) -> tuple[dict[str, dict], dict[str, str]]:
    """The contenders and their limits, and whose is which."""
    found = {name: of_threads(spec) for name, spec in specs.items()}
    own = {
        name: {key: value for key, value in spec.items() if key != "limit_seconds"}
        for name, spec in specs.items()
    }
    return {**own, **dict(found.values())}, {name: limit for name, (limit, _) in found.items()}


def of_processes(period: int, steps_per_call: int = 1) -> str:
    """The limit of two workers and a ps that exchange every so many steps."""
    if period > 1:
        return PROCESSES
    return EXCHANGE_1_CALL_20 if steps_per_call > 1 else EXCHANGE_1


# -- in tables -------------------------------------------------------------------------------------

HEADER = ["of the limit", "limit"]


def cells(results: Results, name: str, limits: Mapping[str, str]) -> list[str]:
    """How much a contender reaches of its limit, and which that is."""
    if name in limits.values():
        return ["1.00", "is one"]
    if limits.get(name) not in results:
        return ["", ""]
    limit = limits[name]
    return [runs.spread(runs.ratios(results, name, limit), 2), limit]


def table(results: Results, limits: Mapping[str, str] | None = None) -> str:
    """Speed and processor time; beside `limits`, or the fastest."""
    roles = runs.cpu_roles(results)
    if limits is None:
        best = fastest(results)
        limits = dict.fromkeys(results, best)
    rows = [
        [
            name,
            runs.speed(name, outcomes),
            *cells(results, name, limits)[:1],
            *runs.cpu_cells(outcomes, roles),
        ]
        for name, outcomes in results.items()
    ]
    beside = f"of {next(iter(limits.values()))}"
    return runs.table(["", "mini-batches/s", beside, *runs.cpu_header(roles)], rows)


def limits_table(results: Results) -> str:
    """Beside two processes, or what was measured first."""
    baseline = PROCESSES if PROCESSES in results else next(iter(results))
    return table(results, dict.fromkeys(results, baseline))


def fastest(results: Results) -> str:
    """Whose median is the largest."""
    return max(results, key=lambda name: runs.median(results[name]))


# -- the command -----------------------------------------------------------------------------------


def common_of(options: argparse.Namespace) -> dict:
    return {
        "model": options.model,
        "batch_size": options.batch_size,
        "seconds": options.seconds,
    }


def run_limits(options: argparse.Namespace, record: dict) -> None:
    chosen = [name for name in LIMITS if options.only in name]
    specs = {name: spec_of(name, **common_of(options)) for name in chosen}
    results = runs.interleaved(PROGRAM, specs, options.repeats)
    title = f"Limits: {TITLES[options.model]}, batch {options.batch_size}, SGD, TensorFlow alone"
    record["groups"].append({"title": title, "results": results})
    print(f"\n### {title}\n\n{limits_table(results)}", flush=True)


def run_settings(options: argparse.Namespace, record: dict) -> None:
    for limit, settings in SETTINGS.items():
        if options.only not in limit:
            continue
        specs = {
            name: {**spec_of(limit, **common_of(options)), **setting}
            for name, setting in settings.items()
        }
        results = runs.interleaved(PROGRAM, specs, options.repeats)
        record["groups"].append({"title": limit, "results": results})
        print(f"\n### {limit}\n\n{table(results)}\n\nThe fastest: {fastest(results)}.", flush=True)


GROUPS = {"limits": run_limits, "settings": run_settings}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--groups", default="limits", help=f"of {', '.join(GROUPS)}, with commas")
    add("--repeats", type=int, default=5, help="of each limit, interleaved")
    add("--seconds", type=float, default=5.0, help="that each is measured")
    add("--model", choices=list(TITLES), default="mlp")
    add("--batch_size", type=int, default=64)
    add("--only", default="", help="limits whose name has this in it")
    add("--json", help="where to write all single runs")
    runs.run_groups(parser, GROUPS)


if __name__ == "__main__":
    main()
