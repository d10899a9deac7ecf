"""The tables and the plot of time_to_accuracy.py, from what its `--json` has."""

import math
from collections.abc import Sequence

import accuracy_statistics as statistics
import runs

TITLES = {
    "digits": "scikit-learn's digits, a CNN of two convolutions, 1,437 examples",
    "prototypes": "made-up data of MNIST's size, MLP 784-512-512-10, 20,000 examples",
    "cnn": "made-up data of CIFAR-10's size, a CNN of two convolutions, 5,000 examples",
    "recommender": "made-up likes of 200 users and 150 items, two embeddings, 16,000 pairs",
}
GROUPS = {
    "threads": "one process",
    "processes": "{workers} worker processes and {ps} ps",
    "straggler": "the same, one worker four times slower",
}
WORDS = {1: "a", 2: "two", 4: "four", 8: "eight"}
SHARED = (
    "**Others computed on the same cores all the time: seconds of the processor and epochs count, "
    "seconds by the clock say little.**"
)
DIGITS = {"seconds": 2, "cpu_seconds": 2, "epochs": 0}


def heading(record: dict) -> str:
    """What ran, and where; with the commands that went on from what earlier ones left."""
    later = [command for command in record["continued"] if command != record["command"]]
    added = f" Continued by `{'`, `'.join(dict.fromkeys(later))}`." if later else ""
    return runs.heading(record) + added + said_of(record)


def said_of(record: dict) -> str:
    """Where seconds by the clock say little."""
    return f" {SHARED}" if record["shared"] else ""


def title_of(group: str, entries: Sequence[dict]) -> str:
    """Where the contenders of a group run."""
    spec = entries[0]["spec"]
    counts = {"workers": spec["workers"], "ps": spec.get("ps", 1)}
    title = GROUPS[group].format(**{k: WORDS.get(n, str(n)) for k, n in counts.items()})
    if group == "threads" and spec["workers"] != 2:
        title += f", {WORDS.get(spec['workers'], spec['workers'])} workers"
    return title


def of_task(record: dict, task: str) -> list[dict]:
    """The contenders of a task that were measured."""
    return [each for each in record["contenders"] if each["task"] == task and each["runs"]]


def _ours(entries: Sequence[dict], group: str) -> list[dict]:
    """Contenders of a group under a strategy of this package."""
    others = ("keras", "mirrored")
    return [e for e in entries if e["group"] == group and e["spec"]["kind"] not in others]


def plain(entries: Sequence[dict], target: float) -> list[list[dict]]:
    """The runs of plain `fit` at each of its settings, to this accuracy."""
    return [
        each["runs"]
        for each in entries
        if each["spec"]["kind"] == "keras" and each["spec"]["target"] == target
    ]


def tasks(record: dict) -> list[str]:
    return [task for task in TITLES if of_task(record, task)]


def shown(values: Sequence[float], digits: int) -> str:
    """Median and interval; an infinite end is a run that did not get there."""

    def number(value: float) -> str:
        return "never" if math.isinf(value) else f"{value:.{digits}f}"

    middle = number(statistics.median(values))
    if len(values) == 1:
        return middle
    low, high, _ = statistics.interval(values)
    return f"{middle} ({number(low)}-{number(high)})"


def measured(entry: dict, measure: str) -> list[float]:
    return [statistics.value(run, measure) for run in entry["runs"]]


def times(entry: dict, base: Sequence[Sequence[dict]], measure: str) -> str:
    """Ratios with their interval, by the seeds that both did."""
    found = statistics.ratios(entry["runs"], base, measure)
    return shown(found, 2) if found else ""


def rate_cell(entry: dict) -> str:
    edge = entry["search"] and statistics.at_the_edge(entry["search"], entry["rate"])
    return f"{entry['rate']:g}" + (", edge" if edge else "")


def row(entry: dict, entries: Sequence[dict]) -> list[str]:
    lost = sum(not run["reached"] for run in entry["runs"])
    cells = [shown(measured(entry, m), DIGITS[m]) for m in statistics.MEASURES]
    base = plain(entries, entry["spec"]["target"])
    cells += [times(entry, base, m) for m in ("seconds", "cpu_seconds")]
    startup = statistics.median(entry["startup_seconds"])
    lost_cell = f"{lost} of {len(entry['runs'])}" if lost else ""
    return [entry["name"], *cells, f"{startup:.1f}", rate_cell(entry), lost_cell]


def header(seeds: int) -> list[str]:
    return [
        f"{seeds} seeds",
        "seconds",
        "CPU seconds",
        "epochs",
        "times as fast as the best plain `fit`",
        "times as little CPU",
        "start-up, s",
        "rate",
        "not reached",
    ]


def task_table(record: dict, task: str) -> str:
    """One table for each group."""
    entries = of_task(record, task)
    target = entries[0]["spec"]["target"]
    parts = [f"**{TITLES[task]}**, to a validation accuracy of {target:g}:"]
    for group in GROUPS:
        own = [each for each in entries if each["group"] == group]
        if own:
            title = title_of(group, own)
            seeds = max(len(each["runs"]) for each in own)
            parts.append(f"*{title[0].upper()}{title[1:]}*")
            parts.append(runs.table(header(seeds), [row(each, entries) for each in own]))
    return "\n\n".join(parts)


def all_tables(record: dict) -> list[str]:
    return [task_table(record, task) for task in tasks(record)]


# -- in short --------------------------------------------------------------------------------------


def nearest(entries: Sequence[dict], base: Sequence[Sequence[dict]], measure: str) -> dict:
    """The contender of the largest median ratio."""
    return max(
        entries,
        key=lambda each: statistics.median(
            statistics.ratios(each["runs"], base, measure) or [0.0],
        ),
    )


def in_short(record: dict) -> str:
    """A row for each task and situation: our best contender beside what one would do otherwise.

    The best by seconds, or by those of the processor where others computed at the same time.
    """
    rows = []
    by = "cpu_seconds" if record["shared"] else "seconds"
    for task in tasks(record):
        entries = of_task(record, task)
        for group in GROUPS:
            own = _ours(entries, group)
            synchronous = [each for each in own if each["spec"]["kind"] == "averaging"]
            if not own:
                continue
            base = plain(entries, own[0]["spec"]["target"])
            against = "plain `fit` at its best setting"
            if group == "straggler":
                own = [each for each in own if each not in synchronous]
                base = [each["runs"] for each in synchronous]
                names = " or ".join(each["name"] for each in synchronous)
                against = f"{names}, with the same straggler"
            if own and base:
                best = nearest(own, base, by)
                cells = [times(best, base, m) for m in statistics.MEASURES]
                rows.append([f"{task}, {title_of(group, own)}", against, best["name"], *cells])
    ours = f"our best, by {'CPU seconds' if record['shared'] else 'seconds'}"
    header = ["task, workers", "beside", ours, "seconds", "CPU seconds", "epochs"]
    return runs.table(header, rows)


def faster(record: dict, task: str, group: str, name: str) -> str:
    """How many times as fast as the best plain `fit` a contender comes to the accuracy."""
    entries = of_task(record, task)
    (entry,) = [e for e in entries if (e["group"], e["name"]) == (group, name)]
    return times(entry, plain(entries, entry["spec"]["target"]), "seconds")


def cost(record: dict, group: str, name: str = "", measure: str = "cpu_seconds") -> str:
    """How many times the best plain `fit`'s (processor) seconds we take: of all tasks, the medians.

    Of our best contender of each task, or of those with this name.
    """
    found = []
    for task in tasks(record):
        entries = of_task(record, task)
        own = _ours(entries, group)
        own = [each for each in own if each["name"] == name] if name else own
        if own:
            base = plain(entries, own[0]["spec"]["target"])
            best = nearest(own, base, measure)
            ratio = statistics.median(statistics.ratios(best["runs"], base, measure))
            found.append(f"{1 / ratio:.1f}")
    low, high = min(found, key=float), max(found, key=float)
    return low if low == high else f"{low} to {high}"


def took(record: dict, task: str, group: str, name: str, measure: str) -> str:
    """A contender's median."""
    (entry,) = (each for each in _ours(of_task(record, task), group) if each["name"] == name)
    return f"{statistics.median(measured(entry, measure)):.1f}"


def plot(record: dict, path: str, metadata: dict[str, str] | None = None) -> None:
    """Ratios to the best plain `fit`, with their intervals: a panel for each task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = tasks(record)
    rows = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(
        rows, 2, figsize=(14, 6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    styles = (("seconds", "o", "seconds"), ("cpu_seconds", "s", "CPU seconds"))
    for axis, task in zip(axes.flat, panels, strict=False):
        entries = of_task(record, task)[::-1]
        base = plain(entries, entries[0]["spec"]["target"])
        for shift, (measure, marker, label) in enumerate(styles):
            places, middles, errors = [], [], [[], []]
            for place, entry in enumerate(entries):
                found = statistics.ratios(entry["runs"], base, measure)
                middle = statistics.median(found) if found else 0.0
                if middle > 0.0:
                    low, high, _ = statistics.interval(found)
                    places.append(place + 0.16 - 0.32 * shift)
                    middles.append(middle)
                    errors[0].append(middle - low)
                    errors[1].append(high - middle)
            axis.errorbar(middles, places, xerr=errors, fmt=marker, capsize=3, label=label)
        names = [
            each["name"] + ("" if each["group"] == "threads" else f" ({each['group']})")
            for each in entries
        ]
        axis.set_yticks(range(len(entries)), names)
        axis.axvline(1.0, color="grey", linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel("best plain fit / this one (right is better)")
        axis.set_title(f"{task}: to {entries[0]['spec']['target']:g}")
        ticks = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=2)
    figure.savefig(path, dpi=80, metadata=metadata)
