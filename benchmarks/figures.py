"""Writes tables of README.md, benchmarks/README.md and docs/ from the runs that are committed.

    python benchmarks/figures.py
    python benchmarks/figures.py --plots   # also the plots in docs/images

Between `<!-- figures: NAME -->` and `<!-- end of figures -->` stands what `BLOCKS` makes of
`benchmarks/published/*.json`, which are what `--json` of the benchmarks wrote, and of
`benchmarks/reproduce/results/*.json`, which are the studies' own. A test compares the two, so a
figure there is one of those runs. To publish others, for instance:

    python benchmarks/fit_throughput.py --groups periods --repetitions 3 \
        --json benchmarks/published/fit_throughput.json
"""

import functools
import re
import sys
from pathlib import Path

import accuracy_tables
import aims
import cluster_throughput
import epoch_cost
import first_fit
import fit_throughput
import growth
import long_run
import own_loops
import runs

sys.path.insert(0, str(runs.HERE / "reproduce"))

import pages
import prose
from aims import published

ROOT = runs.HERE.parent
FILES = (
    "README.md",
    "benchmarks/README.md",
    "docs/is_it_for_me.md",
    "docs/reproduced.md",
    "docs/reproduced_averaging.md",
    "docs/tables.md",
)
PLAIN = fit_throughput.PLAIN
PLAIN_20 = f"{PLAIN}, steps_per_execution=20"


def _ratio(results: dict, name: str, baseline: list[float]) -> str:
    return runs.spread(runs.beside(results, name, baseline), 2)


def threads_in_short() -> str:
    """Two threads, beside plain `fit` as it is and at its better setting."""
    record = published("fit_throughput")
    (group,) = record["groups"]
    results = group["results"]
    best = runs.better(results, PLAIN, PLAIN_20)
    rows = [
        [
            f"`push_every={period}, fetch_every={period}`",
            _ratio(results, name, runs.better(results, PLAIN)),
            _ratio(results, name, best),
            _ratio(results, name, runs.better(results, group["limits"][name])),
        ]
        for period in (20, 5, 1)
        for name in [f"Downpour, periods of {period}"]
    ]
    header = ["two threads", "beside plain `fit`", "at its better setting", "of bare threads"]
    return f"{runs.table(header, rows)}\n\n{_origin(record)}"


def processes_in_short() -> str:
    """Two processes and a ps, beside plain `fit` at its better setting and the peers."""
    record = published("cluster_throughput")
    (group,) = record["groups"]
    results = group["results"]
    servers = runs.better(results, cluster_throughput.PSS_1, cluster_throughput.PSS_20)
    rows = [
        [
            title,
            _ratio(results, name, servers),
            _ratio(results, name, runs.better(results, cluster_throughput.AVERAGING)),
            _ratio(results, name, runs.better(results, cluster_throughput.LIMIT_OF[name])),
        ]
        for title, name in (
            ("periods of 20", cluster_throughput.EVERY_20),
            ("periods of 20, `steps_per_execution=20`", cluster_throughput.EXECUTION_20),
            ("the same, workers read files", cluster_throughput.PIPELINES_20),
            ("periods of 1", cluster_throughput.EVERY_STEP),
        )
    ]
    header = [
        "two processes and a ps",
        "beside tf_keras `ParameterServerStrategy`",
        "beside PyTorch, averaging every 20",
        "of bare processes",
    ]
    return f"{runs.table(header, rows)}\n\n{_origin(record)}"


def threads() -> str:
    """All contenders of `fit_throughput.py --groups periods`."""
    record = published("fit_throughput")
    (group,) = record["groups"]
    table = fit_throughput.speed_table(group["results"], group["limits"])
    return f"{runs.heading(record)}\n\n{group['title']}:\n\n{table}"


def processes() -> str:
    """All contenders of `cluster_throughput.py --groups peers`."""
    record = published("cluster_throughput")
    (group,) = record["groups"]
    results = group["results"]
    parts = (cluster_throughput.speed_table(results), cluster_throughput.aims_table(results))
    return "\n\n".join([runs.heading(record), f"{group['title']}:", *parts])


def models() -> str:
    """All contenders of `fit_throughput.py --groups models`, a table for each model."""
    record = published("models")
    tables = [
        f"{group['title']}:\n\n{fit_throughput.speed_table(group['results'], group['limits'])}"
        for group in record["groups"]
    ]
    return "\n\n".join([runs.heading(record), *tables])


def loops() -> str:
    """All contenders of `own_loops.py`."""
    parts = []
    for name in own_loops.GROUPS:
        record = published(f"own_loops_{name}")
        (group,) = record["groups"]
        parts += [runs.heading(record), f"{group['title']}:", own_loops.table(group)]
    return "\n\n".join(parts)


def first_fits() -> str:
    """All contenders of `first_fit.py`."""
    record = published("first_fit")
    return f"{runs.heading(record)}\n\n{first_fit.table(record['results'])}"


def epochs() -> str:
    """All kinds of `epoch_cost.py`."""
    record = published("epoch_cost")
    return f"{runs.heading(record)}\n\n{epoch_cost.table(record['results'])}"


def how_costs_grow() -> str:
    """All groups of `growth.py`."""
    record = published("growth")
    tables = [f"{group['title']}:\n\n{growth.table(group)}" for group in record["groups"]]
    return "\n\n".join([runs.heading(record), *tables])


def long_runs() -> str:
    """All ways of `long_run.py`."""
    records = [published(f"long_run_{place}") for place in ("threads", "processes")]
    return "\n\n".join(f"{runs.heading(each)}\n\n{long_run.table(each)}" for each in records)


def accuracy() -> str:
    """All contenders of `time_to_accuracy.py`."""
    record = published("time_to_accuracy")
    return "\n\n".join([accuracy_tables.heading(record), *accuracy_tables.all_tables(record)])


def accuracy_in_short() -> str:
    """Ours beside what one would do otherwise, by task and workers."""
    record = published("time_to_accuracy")
    where = f"{record['date']}, {record['cores']} cores: `{record['command']}`"
    where += (
        ", and what went on from it (in `benchmarks/README.md`)." if record["continued"] else "."
    )
    where += accuracy_tables.said_of(record)
    return f"{accuracy_tables.in_short(record)}\n\n{where}"


def _origin(record: dict) -> str:
    (repetitions,) = {len(runs) for g in record["groups"] for runs in g["results"].values()}
    return (
        f"Medians of {repetitions} (smallest-largest), {record['date']}, {record['cores']} cores: "
        f"`{record['command']}`."
    )


BLOCKS = {
    "threads in short": threads_in_short,
    "processes in short": processes_in_short,
    "threads": threads,
    "processes": processes,
    "models": models,
    "growth": how_costs_grow,
    "own loops": loops,
    "aims": aims.table,
    "first fit": first_fits,
    "epoch cost": epochs,
    "long runs": long_runs,
    "time to accuracy": accuracy,
    "time to accuracy in short": accuracy_in_short,
    "claims": pages.all_claims,
    "claims on one screen": pages.on_one_screen,
    **{f"study {name}": functools.partial(pages.study, name) for name in pages.STUDIES},
}


def threads_times(name: str) -> str:
    """Mini-batches a second of two threads, beside plain `fit` at its better setting."""
    (group,) = published("fit_throughput")["groups"]
    return _ratio(group["results"], name, runs.better(group["results"], PLAIN, PLAIN_20))


def processes_times(name: str, *beside: str, inverse: bool = False) -> str:
    """Mini-batches a second of two processes beside the better of others; `inverse`: theirs."""
    (group,) = published("cluster_throughput")["groups"]
    results = group["results"]
    if inverse:
        (other,) = beside
        return _ratio(results, other, runs.better(results, name))
    return _ratio(results, name, runs.better(results, *beside))


def accuracy_cost(group: str, name: str = "") -> str:
    """Processor seconds until a model is accurate, beside the best plain `fit`."""
    return accuracy_tables.cost(published("time_to_accuracy"), group, name)


def accuracy_took(name: str, measure: str) -> str:
    """Seconds of digits with a worker four times slower."""
    return accuracy_tables.took(published("time_to_accuracy"), "digits", "straggler", name, measure)


def strom_seconds(codec: str) -> str:
    """Virtual seconds on links of 10 Mbit/s."""
    found = pages.results_of(pages.known("strom"))
    condition = {"codec": codec, "link": 10}
    return f"{found.judged(condition, 'seconds', found.seeds(condition)).mean():.0f}"


def straggler(measure: str, bound: object) -> str:
    """A measure of eight simulated workers, one four times slower, in the mean over seeds."""
    found = pages.results_of(pages.known("staleness_bound"))
    condition = {"straggler": "yes", "bound": bound}
    values = found.judged(condition, measure, found.seeds(condition))
    return f"{sum(values) / len(values):.{1 if measure == 'error' else 0}f}"


def is_published(block: str) -> bool:
    """Whether there are results of it; else no page may have it."""
    kind, _, name = block.partition(" ")
    return kind != "study" or pages.read(name) is not None


_EXECUTION, _PSS = (
    cluster_throughput.EXECUTION_20,
    (cluster_throughput.PSS_1, cluster_throughput.PSS_20),
)
INLINE = {
    "threads 20": lambda: threads_times("Downpour, periods of 20"),
    "threads 1": lambda: threads_times("Downpour, periods of 1"),
    "torch": lambda: processes_times(_EXECUTION, cluster_throughput.AVERAGING, inverse=True),
    "pss 20": lambda: processes_times(_EXECUTION, *_PSS),
    "pss 1": lambda: processes_times(cluster_throughput.EVERY_STEP, *_PSS),
    "cost of our best": lambda: accuracy_cost("threads"),
    "cost of our best, processes": lambda: accuracy_cost("processes"),
    "cost of softsync": lambda: accuracy_cost("threads", "softsync"),
    **{
        f"{name}, {measure}": functools.partial(accuracy_took, name, measure)
        for name in ("averaging, every 1", "Downpour, every 1")
        for measure in ("seconds", "cpu_seconds")
    },
    **{
        f"strom seconds, {codec}": functools.partial(strom_seconds, codec)
        for codec in ("Threshold 0.064", "none", "none, pushes every 4")
    },
    "straggler batches": lambda: straggler("batches", "none"),
    "straggler batches, bulk": lambda: straggler("batches", 0),
    "straggler error": lambda: straggler("error", "none"),
    "straggler error, bulk": lambda: straggler("error", 0),
}
"""Single figures, between `<!--figure: NAME-->` and `<!--end-->`; others are prose.py's."""

_INLINE = re.compile(r"(<!--figure: (.+?)-->).*?(<!--end-->)")
_BLOCK = re.compile(r"(<!-- figures: (.+?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def written(text: str) -> str:
    """A page with its blocks made anew."""
    text = _BLOCK.sub(lambda m: f"{m[1]}\n{BLOCKS[m[2]]()}\n\n{m[3]}", text)
    return _INLINE.sub(lambda m: f"{m[1]}{single(m[2])}{m[3]}", text)


def single(name: str) -> str:
    """One of `INLINE`, or what `prose.py` finds in a study."""
    return INLINE[name]() if name in INLINE else prose.figure(name)


def main() -> None:
    for file in FILES:
        path = Path(ROOT / file)
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    if "--plots" in sys.argv[1:]:
        record, path = published("time_to_accuracy"), ROOT / "docs/images/time_to_accuracy.png"
        accuracy_tables.plot(record, str(path), pages.stamp(record))
        record = published("growth")
        growth.plot(record, str(ROOT / "docs/images/growth.png"), pages.stamp(record))
        for name in pages.PLOTS:
            if pages.read(name):
                pages.plot(name, str(ROOT / f"docs/images/{name}.png"))


if __name__ == "__main__":
    main()
