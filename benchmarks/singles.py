"""Single figures that stand within sentences of README.md and docs/, for `figures.py`.

Between `<!--figure: NAME-->` and `<!--end-->` stands what `INLINE` says of a name, from the runs
that are committed. Other names are those of studies: `reproduce/prose.py`.
"""

import functools
import statistics
import sys
from collections.abc import Sequence

import accuracy_tables
import aims
import cluster_throughput
import fit_throughput
import own_loops
import quickstart
import recommender
import runs
import sandblaster
from aims import published

sys.path.insert(0, str(runs.HERE / "reproduce"))

import pages

PLAIN = fit_throughput.PLAIN
PLAIN_20 = f"{PLAIN}, steps_per_execution=20"
IN_SHORT = {
    cluster_throughput.EVERY_20: "periods of 20",
    cluster_throughput.EXECUTION_20: "periods of 20, `steps_per_execution=20`",
    cluster_throughput.PIPELINES_20: "the same, workers read files",
    cluster_throughput.EVERY_STEP: "periods of 1",
}
"""README's rows of two processes."""


def ratio(results: dict, name: str, baseline: list[float]) -> str:
    """One's speed beside others', in short."""
    return runs.spread(runs.beside(results, name, baseline), 2)


def threads_times(name: str) -> str:
    """Mini-batches a second of two threads, beside plain `fit` at its better setting."""
    (group,) = published("fit_throughput")["groups"]
    return ratio(group["results"], name, runs.better(group["results"], PLAIN, PLAIN_20))


def processes_times(name: str, *beside: str, inverse: bool = False) -> str:
    """Mini-batches a second of two processes beside the better of others; `inverse`: theirs."""
    (group,) = published("cluster_throughput")["groups"]
    results = group["results"]
    if inverse:
        (other,) = beside
        return ratio(results, other, runs.better(results, name))
    return ratio(results, name, runs.better(results, *beside))


def of_bare() -> str:
    """The least and the most of README's rows beside bare threads and processes."""
    (group,) = published("fit_throughput")["groups"]
    found = [
        runs.beside(group["results"], name, runs.better(group["results"], group["limits"][name]))
        for name in (f"Downpour, periods of {period}" for period in (20, 5, 1))
    ]
    (group,) = published("cluster_throughput")["groups"]
    found += [_beside_bare(group["results"], name) for name in IN_SHORT]
    return ends(found, 1)


def _beside_bare(results: dict, name: str) -> list[float]:
    limit = cluster_throughput.LIMIT_OF[name]
    return runs.beside(results, name, runs.better(results, limit))


def processes_of_bare(name: str) -> str:
    """Of two processes, beside bare ones."""
    (group,) = published("cluster_throughput")["groups"]
    return f"{statistics.median(_beside_bare(group['results'], name)):.2f}"


def ends(found: Sequence[Sequence[float]], digits: int) -> str:
    """The least and the largest of the medians."""
    medians = [statistics.median(each) for each in found]
    return f"{min(medians):.{digits}f} to {max(medians):.{digits}f}"


def by_hand_times() -> str:
    """A loop written by hand beside ours, at periods of 20 on threads and processes."""
    ours = "Downpour, periods of 20"
    pairs = {
        "threads": [(own_loops.OWN_THREADS_20, ours)],
        "processes": [
            (loop, f"{ours}{files}{epochs}")
            for loop, files in (
                (own_loops.OWN_ARRAYS_20, ""),
                (own_loops.OWN_FILES_20, ", workers read files"),
            )
            for epochs in ("", ", epochs of 2,000")
        ],
    }
    return ends(
        [aims.in_loops(group, *pair)() for group, found in pairs.items() for pair in found], 1
    )


def models_times(*without: str) -> str:
    """The best of ours beside the best plain `fit`, of the model with the least and the most."""
    found = []
    for group in published("models")["groups"]:
        ours = [
            name
            for name in group["results"]
            if name.startswith(("Downpour, periods of 20", "averaging"))
            and not any(word in name for word in without)
        ]
        times = (_beside_plain(group["results"], name) for name in ours)
        found.append(max(times, key=statistics.median))
    return ends(found, 1)


def model_times(index: int, name: str) -> str:
    """One of ours beside the best plain `fit`."""
    results = published("models")["groups"][index]["results"]
    return runs.spread(_beside_plain(results, name), 2)


def _beside_plain(results: dict, name: str) -> list[float]:
    plain = [each for each in results if each.startswith(PLAIN)]
    return runs.beside(results, name, runs.better(results, *plain))


def batch_methods(problem: str, name: str) -> str:
    """Seconds of a second run, in those of SciPy at its best."""
    found = {group["problem"]: group["results"] for group in published("sandblaster")["groups"]}
    results = found[problem]
    faster = sandblaster.scipy_at_its_best(results)
    return runs.spread(runs.ratios(results, name, faster, "again"), 2)


def accuracy_cost(group: str, name: str = "", measure: str = "cpu_seconds") -> str:
    """What it takes until a model is accurate, in what the best plain `fit` takes."""
    return accuracy_tables.cost(published("time_to_accuracy"), group, name, measure)


def by_rows(place: str, kind: recommender.Kind, rows: int) -> list[dict]:
    """Runs of `recommender.py` with Adagrad, at periods of 20."""
    (found,) = (
        group["results"]
        for group in published(f"recommender_{place}")["groups"]
        if f"adagrad, two tables of {rows:,} x" in group["title"]
    )
    return found[recommender.named(kind, 20)]


def examples_by_rows(kind: recommender.Kind) -> str:
    """Thousand examples a second of one process, with tables of a million rows."""
    values = [run[recommender.SPEED] / 1e3 for run in by_rows("local", kind, 1_000_000)]
    return runs.spread(values, 0)


def average_of_many(contender: str, seconds: str) -> str:
    """Milliseconds that equal processes take for 25 million parameters."""
    _, large = published("spmd_averaging")["groups"]
    return runs.spread([1e3 * run[seconds] for run in large["results"][contender]], 0)


def library_times(measure: str) -> str:
    """How many times scikit-learn's milliseconds Hogwild!'s are: the least and the largest."""
    results = pages.results_of(pages.known("hogwild"))
    found = []
    for ours in results.conditions():
        if (ours["contender"], ours["problem"]) == ("Hogwild!", "logistic"):
            sides = (ours, {**ours, "contender": "scikit-learn"})
            a, b = (results.judged(side, measure, results.seeds(ours)) for side in sides)
            found.append([statistics.geometric_mean(a / b)])
    return ends(found, 0)


def processor_by_rows(kind: recommender.Kind) -> str:
    """Milliseconds of the processor, a mini-batch, of the same."""
    found = by_rows("local", kind, 1_000_000)
    milliseconds = [1e3 * sum(run["cpu_seconds"].values()) / run["steps"] for run in found]
    median = statistics.median(milliseconds)
    return f"{median:.1f}" if median < 10 else f"{median:.0f}"


def memory_by_rows() -> str:
    """GB of the largest worker, with tables of ten million rows on two ps processes."""
    found = by_rows("cluster", recommender.SPLIT, 10_000_000)
    return f"{max(recommender.peaks(found, 'workers')) / 1e3:.1f}"


def struck_without_loss() -> str:
    """How many configurations were struck, each without a loss."""
    found = published("faults")["runs"]
    for run in found:
        lost = [run[when][what] for when in ("disturbed", "undisturbed") for what in _LOSSES]
        if any(lost):
            raise ValueError(f"faults.json: {run['strategy']} lost or doubled something.")
    return str(len(found))


_LOSSES = ("doubled", "lost")


def until_accurate(name: str) -> str:
    """How many times as fast as plain `fit` one is with the network of README's speeds."""
    return accuracy_tables.faster(published("time_to_accuracy"), "prototypes", "threads", name)


def accuracy_took(name: str, measure: str) -> str:
    """Seconds of digits with a worker four times slower."""
    return accuracy_tables.took(published("time_to_accuracy"), "digits", "straggler", name, measure)


def mean(study: str, measure: str, digits: int, **condition: object) -> str:
    """Of a study's condition, over its seeds, at the rates that the others choose."""
    found = pages.results_of(pages.known(study))
    values = found.judged(condition, measure, found.seeds(condition))
    return f"{sum(values) / len(values):.{digits}f}"


def straggler(measure: str, digits: int, bound: object, slow: str = "yes") -> str:
    """Of eight simulated workers, one four times slower, kept or left out."""
    return mean("staleness_bound", measure, digits, straggler=slow, bound=bound)


_EXECUTION = cluster_throughput.EXECUTION_20
_PLAIN = (cluster_throughput.PLAIN, cluster_throughput.PLAIN_20)
_PSS = (cluster_throughput.PSS_1, cluster_throughput.PSS_20)
INLINE = {
    "threads 20": lambda: threads_times("Downpour, periods of 20"),
    "threads 1": lambda: threads_times("Downpour, periods of 1"),
    "first script": lambda: quickstart.ratios(published("quickstart"), "first script"),
    "quickstart": lambda: quickstart.ratios(published("quickstart"), "quickstart"),
    "quickstart's date": lambda: published("quickstart")["date"],
    "torch": lambda: processes_times(_EXECUTION, cluster_throughput.AVERAGING, inverse=True),
    "pss 20": lambda: processes_times(_EXECUTION, *_PSS),
    "pss 1": lambda: processes_times(cluster_throughput.EVERY_STEP, *_PSS),
    "plain, processes 20": lambda: processes_times(_EXECUTION, *_PLAIN),
    "of bare": of_bare,
    "of bare, processes 20": lambda: processes_of_bare(_EXECUTION),
    "of bare, plain twice": lambda: processes_of_bare(cluster_throughput.PLAIN_PAIR),
    "by hand": by_hand_times,
    "models": lambda: models_times("processes", "jit_compile"),
    "models, CNN, XLA": lambda: model_times(0, f"{_EXECUTION}, jit_compile"),
    "models, block, XLA": lambda: model_times(2, f"{_EXECUTION}, jit_compile"),
    "batch methods, synthetic": lambda: batch_methods("synthetic", "Sandblaster, 2 threads"),
    "batch methods, digits": lambda: batch_methods("digits", "Sandblaster, 1 thread"),
    **{
        f"link {measure}, {sent}": functools.partial(
            mean, "slow_link", measure, digits, link=100, sent=sent
        )
        for measure, digits in (("error", 1), ("mini_batches_per_second", 0))
        for sent in ("none", "none, pushes every 4", "none, both every 20", "OneBit")
    },
    "rows, ours": lambda: examples_by_rows(recommender.THREADS),
    "rows, plain": lambda: examples_by_rows(recommender.PLAIN),
    "rows, not split": lambda: examples_by_rows(recommender.WHOLE_THREADS),
    "rows, TensorFlow": lambda: examples_by_rows(recommender.BARE),
    "rows, ours, processor": lambda: processor_by_rows(recommender.THREADS),
    "rows, not split, processor": lambda: processor_by_rows(recommender.WHOLE_THREADS),
    "rows, plain, processor": lambda: processor_by_rows(recommender.PLAIN),
    "rows, a worker's memory": memory_by_rows,
    "average of 25 million": lambda: average_of_many("average(model)", "seconds"),
    "all_reduce of 25 million": lambda: average_of_many("bare", "seconds"),
    "all_reduce of 25 million, by variable": lambda: average_of_many("bare", "seconds_many"),
    "scikit-learn, clock": lambda: library_times("ms"),
    "scikit-learn, processor": lambda: library_times("cpu_ms"),
    "struck": struck_without_loss,
    **{
        f"until accurate, prototypes, {name}": functools.partial(until_accurate, name)
        for name in ("Downpour, every 20", "averaging, every 20")
    },
    "cost of our best": lambda: accuracy_cost("threads"),
    "cost of our best, processes": lambda: accuracy_cost("processes"),
    "seconds of our best, straggler": lambda: accuracy_cost("straggler", measure="seconds"),
    "cost of softsync": lambda: accuracy_cost("threads", "softsync"),
    **{
        f"{name}, {measure}": functools.partial(accuracy_took, name, measure)
        for name in ("averaging, every 1", "Downpour, every 1")
        for measure in ("seconds", "cpu_seconds")
    },
    **{
        f"strom seconds, {codec}": functools.partial(
            mean, "strom", "seconds", 0, link=10, codec=codec
        )
        for codec in ("Threshold 0.064", "none", "none, pushes every 4", "none, both every 20")
    },
    "straggler batches": lambda: straggler("batches", 0, "none"),
    "straggler batches, bulk": lambda: straggler("batches", 0, 0),
    "left out batches, bulk": lambda: straggler("batches", 0, 0, "left out"),
    "straggler error": lambda: straggler("error", 1, "none"),
    "straggler error, bulk": lambda: straggler("error", 1, 0),
    "left out error": lambda: straggler("error", 1, "none", "left out"),
    "left out error, bulk": lambda: straggler("error", 1, 0, "left out"),
}
"""Single figures, between `<!--figure: NAME-->` and `<!--end-->`; others are prose.py's."""
