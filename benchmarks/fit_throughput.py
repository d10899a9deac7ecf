"""Mini-batches per second of `fit` under DownpourStrategy beside plain Keras, and memory.

    python benchmarks/fit_throughput.py --json benchmarks/results/fit_throughput.json
    python benchmarks/fit_throughput.py --groups periods --repetitions 3

Every contender runs in a process of its own with TensorFlow's default threads. The repetitions are
interleaved, and a ratio is taken between two runs of one repetition: the ratios are what counts.
The limit of each, what TensorFlow alone does in threads of one process, runs beside it: see
`limits.py`. Of the group `models` it is two processes of plain `fit`, each with a model of its own;
that group has workers in other processes, too.
"""

import argparse
from collections.abc import Collection

import limits
import runs

PROGRAM = "contenders.py"
MODELS = {
    "cnn": "A CNN: 32 x 32 x 3, two convolutions of 32 and 64 filters",
    "lstm": "An LSTM of 64 units, 32 places of 64 values",
    "transformer": "A transformer's block: width 64, 4 heads, 32 places",
}
NOT_COMPILED = {"lstm"}  # Keras does not have XLA compile it
PAIR = "two processes of plain fit, each a model of its own, steps_per_execution=20"
PLAIN = "plain fit"
DOWNPOUR_20 = "Downpour, periods of 20, steps_per_execution=20"
PROCESSES = {"program": "cluster_contenders.py", "launch": ["--workers", "2", "--ps", "1"]}
"""What is run on them has no number of workers of its own."""


def periods(common: dict) -> tuple[str, dict[str, dict]]:
    title = "MLP 784-512-512-10, batch 64, SGD(0.01), two local workers"
    specs = {
        "plain fit": {"kind": "keras"},
        "plain fit, steps_per_execution=20": {"kind": "keras", "steps_per_execution": 20},
        "Downpour, periods of 20": {"kind": "downpour", "period": 20},
        "Downpour, periods of 20, steps_per_execution=20": {
            "kind": "downpour",
            "period": 20,
            "steps_per_execution": 20,
        },
        "Downpour, periods of 5": {"kind": "downpour", "period": 5},
        "Downpour, periods of 1": {"kind": "downpour", "period": 1},
    }
    return title, with_common(specs, common)


def averaging(common: dict) -> tuple[str, dict[str, dict]]:
    title = "Averaging: the same MLP, two local workers"
    specs = {}
    for period in (20, 5):
        for kind in ("downpour", "averaging", "elastic"):
            specs[f"{kind}, periods of {period}"] = {"kind": kind, "period": period}
    return title, with_common(specs, common)


def compression(common: dict) -> tuple[str, dict[str, dict]]:
    title = "Threshold: the same MLP, two local workers"
    specs = {
        f"periods of {period}{codec}": {"kind": "downpour", "period": period, **given}
        for period in (20, 1)
        for codec, given in (
            ("", {}),
            (", Threshold(0.002)", {"tau": 0.002}),
            (", Threshold(0.1)", {"tau": 0.1}),
        )
    }
    # A peer sends what the optimizer, at a rate of 0.01, made of a gradient.
    specs["peers, Threshold(0.001)"] = {"kind": "peers", "period": 1, "tau": 0.001}
    return title, with_common(specs, common)


def workers(common: dict) -> tuple[str, dict[str, dict]]:
    title = "Number of workers: the same MLP"
    specs = {"plain fit": {"kind": "keras"}}
    for period in (20, 1):
        for count in (1, 2, 4, 8):
            name = f"{count} worker{'s'[: count > 1]}, periods of {period}"
            specs[name] = {"kind": "downpour", "workers": count, "period": period}
    return title, with_common(specs, common)


def variables(common: dict, count: int) -> tuple[str, dict[str, dict]]:
    title = f"Number of variables: {count} (layers of 64 units), two local workers"
    specs = {
        "plain fit": {"kind": "keras"},
        "Downpour, periods of 20": {"kind": "downpour", "period": 20},
        "Downpour, periods of 1": {"kind": "downpour", "period": 1},
    }
    return title, with_common(specs, {**common, "model": "deep", "variables": count})


def embedding(common: dict, rows: int) -> tuple[str, dict[str, dict]]:
    title = f"Embedding of {rows:,} rows of 64, 20 ids an example, two local workers, periods of 20"
    specs = {
        "dense accrual": {"kind": "downpour", "model": "dense_embedding"},
        "sparse accrual": {"kind": "downpour", "model": "embedding"},
        "plain fit, sparse": {"kind": "keras", "model": "embedding"},
    }
    return title, with_common(specs, {**common, "rows": rows, "epochs": 1})


def memory(common: dict) -> tuple[str, dict[str, dict]]:
    title = "Memory: MLP 784-4096-4096-10, batch 8, SGD without slots, periods of 20"
    specs = {"plain fit": {"kind": "keras"}}
    for count in (1, 2, 4):
        name = f"{count} worker{'s'[: count > 1]}"
        specs[name] = {"kind": "downpour", "workers": count, "period": 20}
    small = {"model": "wide", "batch_size": 8, "examples": 1280, "epochs": 1}
    return title, with_common(specs, {**common, **small})


def models(common: dict, model: str) -> tuple[str, dict[str, dict]]:
    title = (
        f"{MODELS[model]}: batch 64, SGD(0.01), two workers, threads but where it says processes"
    )
    at_once = {"steps_per_execution": 20}
    specs = {
        PLAIN: {},
        f"{PLAIN}, steps_per_execution=20": at_once,
        "Downpour, periods of 20": {"kind": "downpour"},
        DOWNPOUR_20: {"kind": "downpour", **at_once},
        "Downpour, periods of 1": {"kind": "downpour", "period": 1},
        "averaging, periods of 20": {"kind": "averaging"},
        f"{DOWNPOUR_20}, processes": {"kind": "downpour", **at_once, **PROCESSES},
        "Downpour, periods of 1, processes": {"kind": "downpour", "period": 1, **PROCESSES},
        "averaging, periods of 20, processes": {"kind": "periodic", **at_once, **PROCESSES},
    }
    if model not in NOT_COMPILED:
        compiled = {"jit_compile": True, **at_once}
        specs[f"{PLAIN}, steps_per_execution=20, jit_compile"] = compiled
        specs[f"{DOWNPOUR_20}, jit_compile"] = {"kind": "downpour", **compiled}
        name = f"{DOWNPOUR_20}, jit_compile, processes"
        specs[name] = {"kind": "downpour", **compiled, **PROCESSES}
    specs[PAIR] = {"processes": 2, **at_once}
    return title, with_common(specs, {**common, "model": model})


def with_common(specs: dict[str, dict], common: dict) -> dict[str, dict]:
    return {name: {**common, **spec} for name, spec in specs.items()}


def chosen_groups(options) -> list[tuple[str, dict[str, dict]]]:
    common = {
        "examples": options.examples,
        "epochs": options.epochs,
        "limit_seconds": options.limit_seconds,
    }
    groups = {
        "periods": lambda: [periods(common)],
        "averaging": lambda: [averaging(common)],
        "embedding": lambda: [embedding(common, options.rows)],
        "compression": lambda: [compression(common)],
        "workers": lambda: [workers(common)],
        "variables": lambda: [variables(common, count) for count in (6, 30, 78, 150)],
        "memory": lambda: [memory(common)],
        "models": lambda: [models(common, model) for model in MODELS],
    }
    names = options.groups.split(",")
    unknown = set(names) - set(groups)
    if unknown:
        raise SystemExit(f"--groups: no such group: {sorted(unknown)}; there are {sorted(groups)}")
    return [group for name in names for group in groups[name]()]


def beside(specs: dict[str, dict]) -> tuple[dict[str, dict], dict[str, str]]:
    """The contenders and their limits, and whose is which."""
    if next(iter(specs.values())).get("model") not in MODELS:
        return limits.beside_threads(specs)
    own = {
        name: {key: value for key, value in spec.items() if key != "limit_seconds"}
        for name, spec in specs.items()
    }
    return own, dict.fromkeys(own, PAIR)


def best_plain(results: dict[str, list[dict]]) -> str:
    """Plain `fit` in one process at the setting whose median is the largest."""
    plain = [name for name in results if name.startswith(PLAIN)]
    return max(plain, key=lambda name: runs.median(results[name]))


def speed_table(
    results: dict[str, list[dict]], whose: dict[str, str], elsewhere: Collection[str] = ()
) -> str:
    """All contenders; without the speed of those that another table has."""
    of_models = PAIR in whose.values()
    baseline = best_plain(results) if of_models else next(iter(results))
    roles = runs.cpu_roles(results)
    limit = 1 if of_models else 2  # where all have the same its name is in the header
    rows = []
    for name, outcomes in results.items():
        staleness = [o["staleness_mean"] for o in outcomes if "staleness_mean" in o]
        rows.append(
            [
                name,
                runs.speed(name, outcomes, elsewhere),
                runs.spread(runs.ratios(results, name, baseline), 2),
                *limits.cells(results, name, whose)[:limit],
                *runs.cpu_cells(outcomes, roles),
                runs.spread(staleness, 1) if staleness else "",
            ]
        )
    header = ["of two processes"] if of_models else limits.HEADER
    header = ["", "mini-batches/s", f"beside {baseline}", *header, *runs.cpu_header(roles)]
    return runs.table([*header, "mean staleness"], rows)


def memory_table(results: dict[str, list[dict]]) -> str:
    rows = []
    for name, outcomes in results.items():
        if "live_copies" not in outcomes[0]:
            continue
        size = outcomes[0]["parameter_bytes"]
        rows.append(
            [
                name,
                f"{size / 1e6:.0f} MB",
                runs.spread([outcome["live_copies"] for outcome in outcomes], 2),
                runs.spread([outcome["peak_growth_bytes"] / size for outcome in outcomes], 2),
                runs.spread([outcome["peak_growth_bytes"] / 1e6 for outcome in outcomes], 0)
                + " MB",
            ]
        )
    header = ["", "parameters", "copies held", "peak growth / parameters", "peak growth"]
    return runs.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", default="periods,embedding,workers,variables,memory")
    parser.add_argument("--only", default="", help="a regular expression of contenders' names")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5, help="timed ones, after one that is not")
    parser.add_argument("--examples", type=int, default=12_800)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the embedding")
    parser.add_argument("--limit_seconds", type=float, default=5.0, help="that a limit is measured")
    parser.add_argument("--json", help="where to write all single runs")
    options = parser.parse_args()

    record = {**runs.provenance(), "groups": []}
    print(runs.heading(record))
    for title, specs in chosen_groups(options):
        specs = runs.chosen(specs, options.only, next(iter(specs)))
        contenders, whose = beside(specs)
        results = runs.interleaved(PROGRAM, contenders, options.repetitions)
        record["groups"].append({"title": title, "limits": whose, "results": results})
        print(f"\n### {title}\n\n{speed_table(results, whose)}", flush=True)
        if specs[next(iter(specs))].get("model") in ("wide", "dense_embedding"):
            print(f"\n{memory_table(results)}", flush=True)
        runs.write_json(options.json, record)


if __name__ == "__main__":
    main()
