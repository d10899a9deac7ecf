"""Writes tables of README.md, benchmarks/README.md and docs/ from the runs that are committed.

    python benchmarks/figures.py
    python benchmarks/figures.py --plots   # also the plots in docs/images
    python benchmarks/figures.py --check   # nothing is written; fails where a page differs

Between `<!-- figures: NAME -->` and `<!-- end of figures -->` stands what `BLOCKS` makes of
`benchmarks/published/*.json`, which are what `--json` of the benchmarks wrote, and of
`benchmarks/reproduce/results/*.json`, which are the studies' own. A test compares the two, so a
figure there is one of those runs. To publish others, for instance:

    python benchmarks/fit_throughput.py --groups periods --repetitions 3 \
        --json benchmarks/published/fit_throughput.json
"""

import argparse
import functools
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import accounts
import accuracy_tables
import aims
import cluster_throughput
import epoch_cost
import faults
import first_fit
import fit_throughput
import growth
import limits
import long_run
import model_parallel_table
import own_loops
import quickstart
import recommender
import runs
import sandblaster
import server_rules_table
import simulator_rate_table
import singles
import spmd_averaging

sys.path.insert(0, str(runs.HERE / "reproduce"))

import elastic_order
import pages
import prose
from aims import published

ROOT = runs.HERE.parent
FILES = (
    "README.md",
    "benchmarks/README.md",
    "docs/averaging.md",
    "docs/batch_methods.md",
    "docs/cluster.md",
    "docs/hogwild.md",
    "docs/is_it_for_me.md",
    "docs/model_parallelism.md",
    "docs/reproduced.md",
    "docs/reproduced_averaging.md",
    "docs/sending_less.md",
    "docs/tables.md",
    "docs/which_period.md",
)


def threads_in_short() -> str:
    """Two threads, beside plain `fit` as it is and at its better setting."""
    record = published("fit_throughput")
    (group,) = record["groups"]
    results = group["results"]
    best = runs.better(results, singles.PLAIN, singles.PLAIN_20)
    rows = [
        [
            f"`push_every={period}, fetch_every={period}`",
            singles.ratio(results, name, runs.better(results, singles.PLAIN)),
            singles.ratio(results, name, best),
            singles.ratio(results, name, runs.better(results, group["limits"][name])),
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
            singles.ratio(results, name, cluster_throughput.best_plain(results)),
            singles.ratio(results, name, servers),
            singles.ratio(results, name, runs.better(results, cluster_throughput.AVERAGING)),
            singles.ratio(results, name, runs.better(results, cluster_throughput.LIMIT_OF[name])),
        ]
        for name, title in singles.IN_SHORT.items()
    ]
    header = [
        "two processes and a ps",
        "beside plain `fit` at its better setting",
        "beside tf_keras `ParameterServerStrategy`",
        "beside PyTorch, averaging every 20",
        "of bare processes",
    ]
    return f"{runs.table(header, rows)}\n\n{_origin(record)}"


def threads() -> str:
    """All contenders of `fit_throughput.py --groups periods`."""
    record = published("fit_throughput")
    (group,) = record["groups"]
    table = fit_throughput.speed_table(group["results"], group["limits"], limits.LIMITS)
    return f"{runs.heading(record)}\n\n{group['title']}:\n\n{table}"


def processes() -> str:
    """All contenders of `cluster_throughput.py --groups peers`."""
    record = published("cluster_throughput")
    (group,) = record["groups"]
    results = group["results"]
    elsewhere = {*limits.LIMITS, cluster_throughput.PLAIN, cluster_throughput.PLAIN_20}
    table = cluster_throughput.speed_table(results, elsewhere)
    parts = [f"{group['title']}:", table, cluster_throughput.aims_table(results)]
    return "\n\n".join([runs.heading(record), *parts])


def groups(names: Sequence[str], table: Callable[[dict], str]) -> str:
    """A table for each group of these files."""
    parts = []
    for record in map(published, names):
        parts.append(runs.heading(record))
        parts += [f"{group['title']}:\n\n{table(group)}" for group in record["groups"]]
    return "\n\n".join(parts)


def models() -> str:
    """All contenders of `fit_throughput.py --groups models`, a table for each model."""
    return groups(["models"], lambda g: fit_throughput.speed_table(g["results"], g["limits"]))


def loops() -> str:
    """All contenders of `own_loops.py`."""
    return groups([f"own_loops_{name}" for name in own_loops.GROUPS], own_loops.table)


def bare() -> str:
    """All limits."""
    return groups(["limits"], lambda group: limits.limits_table(group["results"]))


def account() -> str:
    """Where a mini-batch's processor time goes: both tables of `accounts.py`."""
    record = published("accounts")
    found = record["kinds"]
    tables = (accounts.account_table(found), accounts.place_table(found))
    return "\n\n".join([runs.heading(record), *tables])


def batch_methods() -> str:
    """Both problems of `sandblaster.py`."""
    record = published("sandblaster")
    return f"{runs.heading(record)}\n\n{sandblaster.table(record['groups'])}"


def struck() -> str:
    """All strategies of `faults.py`."""
    record = published("faults")
    return f"{runs.heading(record)}\n\n{faults.table(record['runs'])}"


def tables_by_rows() -> str:
    """All sizes of `recommender.py --groups local`."""

    def table(group: dict) -> str:
        return recommender.speed_table("local", group["results"], ())

    return groups(["recommender_local"], table)


def tables_on_processes() -> str:
    """Speed, processor time and memory of two workers and two ps, by `recommender.py`."""
    record = published("recommender_cluster")
    rows = []
    for group in record["groups"]:
        size = group["title"].partition("tables of ")[2].partition(" x ")[0]
        results = group["results"]
        for name, found in results.items():
            other = recommender.named(recommender.PSS, int(name.rpartition(", ")[2]))
            speeds = [run[recommender.SPEED] / 1e3 for run in found]
            processor = [1e3 * sum(run["cpu_seconds"].values()) / run["steps"] for run in found]
            cells = [size, name, runs.spread(speeds, 0)]
            cells += [runs.spread(recommender.beside(results, name, other), 2)]
            cells += [runs.spread(processor, 1)]
            memory = [recommender.peaks(found, role) for role in ("workers", "ps")]
            rows.append([*cells, " / ".join(f"{statistics.median(each):,.0f}" for each in memory)])
    header = ["R", "contender, period", "thousand examples a second", "beside tf_keras"]
    header += ["CPU ms a mini-batch", "peak MB of a worker / of a ps"]
    table = runs.table(header, rows)
    return f"{table}\n\n{_origin(record)}"


def rules() -> str:
    """Both sizes of `server_rules.py`."""
    record = published("server_rules")
    parts = [runs.heading(record)]
    for group in record["groups"]:
        parts.append(f"A weight of {group['parameters'] / 1e6:g} million parameters:")
        parts.append(server_rules_table.table(group["results"]))
    return "\n\n".join(parts)


def in_parts(table: Callable[[Sequence[dict]], str]) -> str:
    """One table of `model_parallel.py`."""
    return table(published("model_parallel")["records"])


def of_results(name: str, table: Callable[[dict], str]) -> str:
    """A benchmark's runs, all of one command."""
    record = published(name)
    return f"{runs.heading(record)}\n\n{table(record['results'])}"


def equal_processes() -> str:
    """Both groups of `spmd_averaging.py`."""
    record = published("spmd_averaging")
    whole, large = record["groups"]
    tables = (
        spmd_averaging.throughput_table(whole["results"], limits.LIMITS),
        spmd_averaging.large_table(large["results"]),
    )
    parts = [
        f"{group['title']}:\n\n{table}" for group, table in zip((whole, large), tables, strict=True)
    ]
    return "\n\n".join([runs.heading(record), *parts])


def how_costs_grow() -> str:
    """All groups of `growth.py`."""
    return groups(["growth"], growth.table)


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
    where = f"{record['date']}, {record['cores']} cores, {runs.where(record)}"
    where += f": `{record['command']}`"
    where += (
        ", and what went on from it (in `benchmarks/README.md`)." if record["continued"] else "."
    )
    where += accuracy_tables.said_of(record)
    return f"{accuracy_tables.in_short(record)}\n\n{where}"


def _origin(record: dict) -> str:
    (repetitions,) = {len(runs) for g in record["groups"] for runs in g["results"].values()}
    return (
        f"Medians of {repetitions} (smallest-largest), {record['date']}, {record['cores']} cores, "
        f"{runs.where(record)}: `{record['command']}`."
    )


def readmes_script(first: int, last: int | None) -> str:
    """What README's first script prints."""
    return quickstart.shown(published("quickstart"), "first script", first, last)


def readmes_quickstart() -> str:
    """The last lines of examples/quickstart.py."""
    return quickstart.shown(published("quickstart"), "quickstart", -3)


BLOCKS = {
    "first script": functools.partial(readmes_script, 0, -1),
    "first script, speed": functools.partial(readmes_script, -1, None),
    "quickstart": readmes_quickstart,
    "threads in short": threads_in_short,
    "processes in short": processes_in_short,
    "threads": threads,
    "processes": processes,
    "models": models,
    "growth": how_costs_grow,
    "own loops": loops,
    "limits": bare,
    "accounts": account,
    "batch methods": batch_methods,
    "faults": struck,
    "recommender, one process": tables_by_rows,
    "tables on processes": tables_on_processes,
    "server rules": rules,
    "equal processes": equal_processes,
    "simulator": functools.partial(of_results, "simulator_rate", simulator_rate_table.table),
    "parts on processes": functools.partial(in_parts, model_parallel_table.tasks),
    "pieces": functools.partial(in_parts, model_parallel_table.pieces),
    "one part": functools.partial(in_parts, model_parallel_table.one_part),
    "passes on processes": functools.partial(
        of_results, "sandblaster_processes", sandblaster.passes_table
    ),
    "iterations by size": functools.partial(
        of_results, "sandblaster_sizes", sandblaster.sizes_table
    ),
    "first gradient": lambda: elastic_order.table((4, 16), (1, 16), (0.1, 1.0, 1.9)),
    "aims": aims.table,
    "first fit": functools.partial(of_results, "first_fit", first_fit.table),
    "epoch cost": functools.partial(of_results, "epoch_cost", epoch_cost.table),
    "long runs": long_runs,
    "time to accuracy": accuracy,
    "time to accuracy in short": accuracy_in_short,
    "claims": pages.all_claims,
    "claims on one screen": pages.on_one_screen,
    **{f"study {name}": functools.partial(pages.study, name) for name in pages.STUDIES},
}


def is_published(block: str) -> bool:
    """Whether there are results of it; else no page may have it."""
    kind, _, name = block.partition(" ")
    return kind != "study" or pages.read(name) is not None


_INLINE = re.compile(r"(<!--figure: (.+?)-->).*?(<!--end-->)")
_BLOCK = re.compile(r"(<!-- figures: (.+?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def written(text: str) -> str:
    """A page with its blocks made anew."""
    text = _BLOCK.sub(lambda m: f"{m[1]}\n{BLOCKS[m[2]]()}\n\n{m[3]}", text)
    return _INLINE.sub(lambda m: f"{m[1]}{single(m[2])}{m[3]}", text)


def single(name: str) -> str:
    """One of `singles.INLINE`, or what `prose.py` finds in a study."""
    return singles.INLINE[name]() if name in singles.INLINE else prose.figure(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plots", action="store_true", help="write the plots in docs/images, too")
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    options = parser.parse_args()
    differing = []
    for file in FILES:
        path = Path(ROOT / file)
        there = path.read_text(encoding="utf-8")
        made = written(there)
        differing += [file] if made != there else []
        if not options.check:
            path.write_text(made, encoding="utf-8")
    if options.check:
        raise SystemExit(f"Not as the runs have it: {', '.join(differing)}" if differing else 0)
    if options.plots:
        record, path = published("time_to_accuracy"), ROOT / "docs/images/time_to_accuracy.png"
        accuracy_tables.plot(record, str(path), pages.stamp(record))
        record = published("growth")
        growth.plot(record, str(ROOT / "docs/images/growth.png"), pages.stamp(record))
        for name in pages.PLOTS:
            if pages.read(name):
                pages.plot(name, str(ROOT / f"docs/images/{name}.png"))


if __name__ == "__main__":
    main()
