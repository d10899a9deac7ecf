"""How what training costs grows: with workers, with variables, and with bytes of weights.

    python benchmarks/growth.py --json benchmarks/published/growth.json
    python benchmarks/growth.py --groups weights --repetitions 3

All in processes that the launcher starts, with one ps. Of workers and variables: the processor time
that the chief takes for a mini-batch, where workers have next to nothing to compute (`chief` of
`cluster_contenders.py`), so that what is theirs does not hide it. Of weights: how fast a fetch and
a push are, beside functions of TensorFlow alone that move as many bytes in as many tensors, and do
nothing else.
"""

import argparse
from collections.abc import Sequence

import cluster_throughput
import runs

BATCH = 4
GROUPS = {
    "workers": "workers, one ps, Dense(16, 1)",
    "variables": "variables, two workers, layers of eight units",
    "weights": "MB of weights in six variables, one worker",
}
"""What grows, as a title."""
BESIDE = {"fetch": "bare read", "push": "bare assign_add"}
VARIABLES = 6
"""Of weights."""


def contenders(group: str, sizes: Sequence[int], steps: int) -> dict:
    """By what grows."""
    made = {}
    for size in sizes:
        if group == "weights":
            spec = {"kind": "exchange", "variables": VARIABLES, "parameters": size * 250_000}
            made[str(size)] = cluster_throughput.launched(1, **spec)
            continue
        workers, hidden = (size, 0) if group == "workers" else (2, size // 2 - 1)
        spec = {"kind": "chief", "batch_size": BATCH, "examples": BATCH * steps, "epochs": 2}
        launch = ("--workers", str(workers), "--ps", "1", "--threads_per_worker", "1")
        made[str(size)] = cluster_throughput.Contender({**spec, "hidden": hidden}, launch=launch)
    return made


def periods(results: dict[str, list[dict]]) -> list[str]:
    return list(next(iter(results.values()))[0]["periods"])


def chief(results: dict[str, list[dict]], size: str, period: str) -> list[float]:
    """Milliseconds of the chief's processor time for a mini-batch."""
    return [1e3 * run["periods"][period]["chief_cpu_seconds_per_step"] for run in results[size]]


def beside_bare(results: dict[str, list[dict]], size: str, name: str) -> list[float]:
    """Speed in that of a function that does nothing but move the bytes."""
    return [run["seconds"][BESIDE[name]] / run["seconds"][name] for run in results[size]]


def table(group: dict) -> str:
    """One group's runs."""
    results = group["results"]
    if group["name"] == "weights":
        rows = []
        for size in results:
            cells = [size]
            for name in BESIDE:
                speed = [run["bytes"] / 1e6 / run["seconds"][name] for run in results[size]]
                cells += [runs.spread(speed, 0), runs.spread(beside_bare(results, size, name), 2)]
            rows.append(cells)
        header = [part for name in BESIDE for part in (f"{name}, MB/s", f"of a {BESIDE[name]}")]
        return runs.table(["MB", *header], rows)
    first = next(iter(results))
    rows = []
    for period in periods(results):
        for size in results:
            cpu = chief(results, size, period)
            ratios = [a / b for a, b in zip(cpu, chief(results, first, period), strict=True)]
            elapsed = [
                1e3 * run["periods"][period]["seconds"] / run["periods"][period]["steps"]
                for run in results[size]
            ]
            cells = [runs.spread(cpu, 2), runs.spread(ratios, 2), runs.spread(elapsed, 2)]
            rows.append([period, size, *cells])
    header = ["periods of", group["name"], "CPU of the chief, ms", f"beside {first}", "elapsed, ms"]
    return runs.table(header, rows)


def plot(record: dict, path: str, metadata: dict[str, str] | None = None) -> None:
    """A panel for each group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = record["groups"]
    figure, axes = pyplot.subplots(1, len(groups), figsize=(5 * len(groups), 4), squeeze=False)
    for axis, group in zip(axes.flat, groups, strict=True):
        results = group["results"]
        sizes = list(results)
        for label in BESIDE if group["name"] == "weights" else periods(results):
            if group["name"] == "weights":
                values, words = [beside_bare(results, s, label) for s in sizes], label
            else:
                values = [chief(results, s, label) for s in sizes]
                words = f"periods of {label}"
            middles = [sorted(each)[len(each) // 2] for each in values]
            below = [m - min(each) for m, each in zip(middles, values, strict=True)]
            above = [max(each) - m for m, each in zip(middles, values, strict=True)]
            where = [int(size) for size in sizes]
            axis.errorbar(where, middles, yerr=[below, above], marker="o", capsize=3, label=words)
        axis.set_xscale("log")
        axis.set_xticks([int(size) for size in sizes], sizes)
        axis.minorticks_off()
        axis.set_ylim(bottom=0.0)
        axis.set_xlabel(group["title"])
        of_weights = group["name"] == "weights"
        axis.set_ylabel("speed, of bare" if of_weights else "CPU of the chief, ms/mini-batch")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata=metadata)
    pyplot.close(figure)


def numbers(text: str) -> list[int]:
    """Of an option; with commas."""
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--groups", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}, with commas")
    add("--workers", type=numbers, default="1,2,4,8,16,32,64")
    add("--variables", type=numbers, default="4,12,40,120,300", help="even numbers")
    add("--weights", type=numbers, default="1,4,16,100", help="in MB")
    add("--steps", type=int, default=2000, help="mini-batches an epoch")
    add("--repetitions", type=int, default=2)
    add("--json", help="where to write all single runs")

    def run(name: str, options: argparse.Namespace, record: dict) -> None:
        made = contenders(name, getattr(options, name), options.steps)
        results = cluster_throughput.interleaved(made, options.repetitions)
        record["groups"].append({"name": name, "title": GROUPS[name], "results": results})
        print(f"\n### {GROUPS[name]}\n\n{table(record['groups'][-1])}", flush=True)

    of_groups = {name: (lambda o, r, name=name: run(name, o, r)) for name in GROUPS}
    runs.run_groups(parser, of_groups)


if __name__ == "__main__":
    main()
