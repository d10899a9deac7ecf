"""What StalenessMonitor costs: mini-batches per second of `fit` with it, beside the same without.

    python benchmarks/monitor_cost.py --json benchmarks/results/monitor_cost.json
    python benchmarks/monitor_cost.py --of ledger     # what the shards' counters and audits cost
    python benchmarks/monitor_cost.py --of ledger --model deep --periods 1 --examples 64000

The last trains three small layers: what is the same for every model is a larger part of its
mini-batch, and so is measured better.

The monitor writes lines of JSON every second, and event files if TensorBoard is installed. Beside
it is a callback that does nothing at each batch: what Keras takes to call one. Every contender runs
in a process of its own; repetitions are interleaved, and a ratio is taken between two runs of one
repetition. The processor time of a mini-batch, of all threads, is less noisy than its seconds.
"""

import argparse
import importlib.util

import fit_throughput
import limits
import runs

MODELS = {
    "mlp": ("MLP 784-512-512-10", {}),
    "deep": ("Three layers of 64 units", {"model": "deep", "variables": 6}),
}


def contenders(of: str, period: int, common: dict) -> dict[str, dict]:
    ours = {"kind": "downpour", "period": period, **common}
    if of == "ledger":
        return {"without": {**ours, "books": False}, "ledger and audits": ours}
    return {
        "without": ours,
        "StalenessMonitor": {**ours, "callback": "monitor"},
        "an empty callback": {**ours, "callback": "empty"},
    }


def table(results: dict[str, list[dict]], whose: dict[str, str]) -> str:
    baseline = next(iter(results))
    rows = [
        [
            name,
            runs.spread([o["steps_per_second"] for o in outcomes], 0),
            runs.spread(runs.ratios(results, name, baseline), 3),
            *limits.cells(results, name, whose)[:1],
            *cpu_cells(results, name, baseline),
        ]
        for name, outcomes in results.items()
    ]
    beside, limit = f"beside {baseline}", f"of the limit: {whose[baseline]}"
    heads = ["mini-batches/s", beside, limit, "CPU, ms a mini-batch", beside]
    return runs.table(["", *heads], rows)


def cpu_cells(results: dict[str, list[dict]], name: str, baseline: str) -> list[str]:
    milliseconds = {
        name: [1e3 * sum(o["cpu_seconds"].values()) / o["steps"] for o in results[name]]
        for name in (name, baseline)
    }
    ratios = [a / b for a, b in zip(milliseconds[name], milliseconds[baseline], strict=True)]
    return [runs.spread(milliseconds[name], 3), runs.spread(ratios, 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", choices=["monitor", "ledger"], default="monitor")
    parser.add_argument("--periods", default="20,1")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=20, help="timed ones, after one that is not")
    parser.add_argument("--examples", type=int, default=12_800)
    parser.add_argument("--limit_seconds", type=float, default=5.0, help="that a limit is measured")
    parser.add_argument("--json", help="where to write all single runs")
    options = parser.parse_args()

    tensorboard = importlib.util.find_spec("tensorboard") is not None
    record = {**runs.provenance(), "tensorboard": tensorboard, "groups": []}
    print(runs.heading(record))
    if options.of == "monitor":
        print(f"\nEvent files: {'yes' if tensorboard else 'no, TensorBoard is not installed'}.")
    common = {
        "examples": options.examples,
        "epochs": options.epochs,
        "workers": options.workers,
        "limit_seconds": options.limit_seconds,
        **MODELS[options.model][1],
    }
    for period in (int(text) for text in options.periods.split(",")):
        name = MODELS[options.model][0]
        title = f"{name}, batch 64, {options.workers} local workers, periods of {period}"
        specs, whose = limits.beside_threads(contenders(options.of, period, common))
        results = runs.interleaved(fit_throughput.PROGRAM, specs, options.repetitions)
        record["groups"].append({"title": title, "results": results})
        print(f"\n### {title}\n\n{table(results, whose)}", flush=True)
        runs.write_json(options.json, record)


if __name__ == "__main__":
    main()
