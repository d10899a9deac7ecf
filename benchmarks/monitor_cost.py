"""What StalenessMonitor costs: mini-batches per second of `fit` with it, beside the same without.

    python benchmarks/monitor_cost.py --json benchmarks/results/monitor_cost.json
    python benchmarks/monitor_cost.py --of ledger     # what the shards' books cost, and the audits
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


def table(results: dict[str, list[dict]]) -> str:
    baseline = next(iter(results))
    rows = [
        [
            name,
            runs.spread([o["steps_per_second"] for o in outcomes], 0),
            runs.spread(runs.ratios(results, name, baseline), 3),
            runs.spread([1e3 * o["cpu_seconds_per_step"] for o in outcomes], 3),
            runs.spread(runs.ratios(results, name, baseline, of="cpu_seconds_per_step"), 3),
        ]
        for name, outcomes in results.items()
    ]
    heads = ["mini-batches/s", f"beside {baseline}", "CPU, ms a mini-batch", f"beside {baseline}"]
    return runs.table(["", *heads], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", choices=["monitor", "ledger"], default="monitor")
    parser.add_argument("--periods", default="20,1")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=20, help="timed ones, after one that is not")
    parser.add_argument("--examples", type=int, default=12_800)
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
        **MODELS[options.model][1],
    }
    for period in (int(text) for text in options.periods.split(",")):
        name = MODELS[options.model][0]
        title = f"{name}, batch 64, {options.workers} local workers, periods of {period}"
        results = runs.interleaved(
            fit_throughput.PROGRAM, contenders(options.of, period, common), options.repetitions
        )
        record["groups"].append({"title": title, "results": results})
        print(f"\n### {title}\n\n{table(results)}", flush=True)
        runs.write_json(options.json, record)


if __name__ == "__main__":
    main()
