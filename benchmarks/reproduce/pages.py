"""Tables and plots of the studies, from what is in `results/`, for `benchmarks/figures.py`.

Nothing here trains, or needs TensorFlow.
"""

import ast
import dataclasses
import hashlib
import io
import json
import math
import re
import statistics
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import evidence
import numpy as np
from claims import CLAIMS
from evidence import Claim, Results

HERE = Path(__file__).resolve().parent
SHARED = ("seeded", "side_by_side", "teacher")
"""Modules that studies share, of which some runs are made."""
STUDIES = tuple(dict.fromkeys(claim.study for claim in CLAIMS))


def read(name: str) -> dict[str, Any] | None:
    """A study's file, or None where it has none."""
    path = HERE / "results" / f"{name}.json"
    return loaded(path) if path.exists() else None


def loaded(path: Path) -> dict[str, Any]:
    """A file that the driver wrote, with its runs one by one."""
    content = json.loads(path.read_text())
    return {**content, "runs": evidence.unpacked(content["runs"])}


def known(name: str) -> dict[str, Any]:
    """A study's file."""
    content = read(name)
    if content is None:
        raise ValueError(f"There are no results of {name!r}.")
    return content


def program(path: Path) -> str:
    """What a program says, in a few letters: without its docstrings, comments and white space.

    A study's file keeps it, so that runs of an earlier version are not taken for this one's. What
    studies share is in it, where this one imports it; the driver and the package are not.
    """
    said = "".join(_said(each.read_text()) for each in (path, *_shared(path)))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _shared(path: Path) -> list[Path]:
    """What it imports of `SHARED`, and what that imports."""
    found: set[str] = set()
    new = [path]
    while new:
        text = new.pop().read_text()
        names = {n for n in SHARED if re.search(rf"^import {n}$", text, re.MULTILINE)} - found
        found |= names
        new += [HERE / f"{name}.py" for name in names]
    return [HERE / f"{name}.py" for name in sorted(found)]


def _said(text: str) -> str:
    kept = [list(line) for line in text.splitlines(keepends=True)]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            for line in range(first.lineno - 1, first.end_lineno or first.lineno):
                kept[line] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0] - 1
        if token.type == tokenize.COMMENT and kept[line]:
            kept[line] = kept[line][: token.start[1]]
    return "".join("".join("".join(line) for line in kept).split())


def results_of(content: Mapping[str, Any]) -> Results:
    return Results(content["runs"], content["tuned"], content["chosen_by"])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


# -- claims ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Judged:
    """A claim, and what the runs say of its cells."""

    claim: Claim
    outcomes: list[evidence.Outcome]
    said: list[tuple[float, str]]
    missing: int

    @property
    def verdict(self) -> str:
        if self.missing:
            return "not run whole"
        words = [word for _, word in self.said]
        if self.claim.computed:
            how = "" if all(word == evidence.YES for word in words) else "not "
            return f"computed, {how}as expected"
        return evidence.verdict(words, self.claim.some)


def judged(claim: Claim, results: Results) -> Judged:
    found = [evidence.compared(results, cell) for cell in claim.cells]
    outcomes = [outcome for outcome in found if outcome is not None]
    return Judged(claim, outcomes, evidence.said(outcomes), found.count(None))


def claims_about(study: str) -> list[Claim]:
    return [claim for claim in CLAIMS if claim.study == study]


def claims_of(content: Mapping[str, Any]) -> list[Judged]:
    results = results_of(content)
    return [judged(claim, results) for claim in claims_about(content["study"])]


def cells_table(found: Sequence[Judged]) -> str:
    """Every comparison of a study's claims."""
    rows = []
    for each in found:
        digits = each.claim.digits
        for outcome, (p, word) in zip(each.outcomes, each.said, strict=True):
            cell = outcome.cell
            expected = {
                "<": "less",
                ">": f"more by {cell.margin:g}" if cell.margin else "more",
                "=": f"within {cell.margin:g}",
                "<=": f"at most {cell.margin:g} more",
            }[cell.expected]
            rows.append([each.claim.name, cell.title, expected, evidence.shown(outcome, digits)])
            rows[-1] += ["" if each.claim.computed else evidence.p_text(p), word]
    return table(["claim", "compared", "expected", "difference (95 %)", "p, Holm", ""], rows)


def measured(each: Judged) -> str:
    """In a few words, for the table of all claims."""
    if not each.outcomes:
        return ""
    words = [word for _, word in each.said]
    count = words.count(evidence.YES)
    text = f"{count} of {len(words)} as expected"
    if words.count(evidence.NO):
        text += f", {words.count(evidence.NO)} the opposite"
    shown = each.outcomes[:1]
    if each.claim.some:  # the one that says most
        shown = [min(each.outcomes, key=lambda o: o.p)]
    elif each.verdict == "partly":  # one that bears it out, and one that does not
        other = evidence.NO if evidence.NO in words else evidence.UNKNOWN
        shown = [each.outcomes[words.index(word)] for word in (evidence.YES, other)]
    for outcome in shown:
        text += f"; {outcome.cell.title}: {evidence.shown(outcome, each.claim.digits)}"
    return text


def link(claim: Claim) -> str:
    """The paper, among the references."""
    if not claim.source:
        return "nobody's"
    anchor = claim.source.lower().replace(",", "").replace(".", "").replace(" ", "-")
    return f"[{claim.source}](references.md#{anchor})"


def all_judged() -> list[Judged]:
    """Each claim whose study has results."""
    contents = [read(study) for study in STUDIES]
    return [each for content in contents if content is not None for each in claims_of(content)]


def all_claims() -> str:
    """One line for each of them."""
    rows = []
    for each in all_judged():
        row = [each.claim.name, link(each.claim), each.claim.expected]
        rows.append([*row, measured(each), f"**{each.verdict}**"])
    return table(["claim", "whose", "expected", "measured (95 %)", "verdict"], rows)


VERDICTS = (
    *("reproduced", "partly", "cannot tell", "not reproduced"),
    *("computed, as expected", "computed, not as expected", "not run whole"),
)


def on_one_screen() -> str:
    """Each claim's name, by verdict and whose it is."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for each in all_judged():
        papers, ours = found.setdefault(each.verdict, ([], []))
        name = each.claim.name
        if each.verdict == "partly":
            words = [word for _, word in each.said]
            name += f" ({words.count(evidence.YES)} of {len(words)})"
        (papers if each.claim.source else ours).append(name)
    rows = []
    for word in sorted(found, key=VERDICTS.index):
        cells = [f"{len(names)}: {'; '.join(names)}" if names else "0" for names in found[word]]
        rows.append([f"**{word}**", *cells])
    return table(["verdict", "of papers", "of nobody but this page"], rows)


# -- values ---------------------------------------------------------------------------------------


def rate_text(rate: float) -> str:
    return f"$2^{{{math.log2(rate):.2g}}}$"


def number(values: np.ndarray) -> str:
    """Mean and the half of its interval, with digits that fit."""
    mean, low, _ = evidence.interval(values)
    digits = 2 if mean - low >= 0.1 or not mean > low else 4
    return (
        f"{mean:.{digits}f} ± {mean - low:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"
    )


PIVOTS = {"machines": ("network", ("size", "otherwise"), "machines")}
"""Studies whose conditions are too many for a line each: a table for each value of the first
field, in which the second ones make lines and the third columns; in the cells all measures."""


def pivot(content: Mapping[str, Any]) -> str:
    """What `PIVOTS` says of a study."""
    results = results_of(content)
    table_of, lines_of, columns_of = PIVOTS[content["study"]]
    tables = []
    conditions = results.conditions()
    for which in dict.fromkeys(c[table_of] for c in conditions):
        inside = [c for c in conditions if c[table_of] == which]
        columns = sorted({c[columns_of] for c in inside})
        lines: dict[tuple, dict[Any, str]] = {}
        for c in inside:
            found = [results.judged(c, m, results.seeds(c)) for m in results.measures]
            cell = ", ".join(f"{np.mean(values):.1f}" for values in found)
            lines.setdefault(tuple(c[name] for name in lines_of), {})[c[columns_of]] = cell
        rows = [[*line, *(cells.get(k, "") for k in columns)] for line, cells in lines.items()]
        header = [f"{which}: {', '.join(lines_of)}", *[""] * (len(lines_of) - 1)]
        tables.append(table([*header, *map(str, columns)], rows))
    return "\n\n".join(tables)


def values_table(content: Mapping[str, Any]) -> str:
    """Of each condition what was chosen, and its measures at the choices of the other seeds."""
    if content["study"] in PIVOTS:
        return pivot(content)
    results = results_of(content)
    conditions = results.conditions()
    fields = list(dict.fromkeys(name for c in conditions for name in c))
    measures = list(content["runs"][0]["values"])
    has_rate = len({run["rate"] for run in content["runs"]}) > 1
    rows = []
    for condition in conditions:
        seeds = results.seeds(condition)
        if not seeds:
            continue
        *tuned, rate = results.best(condition)
        edge = ", edge" if any(results.edges(condition)) else ""
        row = [str(condition.get(name, "")) for name in fields]
        row += [f"{value:g}" if value is not None else "" for value in tuned]
        some = rate_text(rate) if len(results.settings(condition)) > 1 else ""
        row += [some + edge] * has_rate + [str(len(seeds))]
        rows.append(row + [number(results.judged(condition, m, seeds)) for m in measures])
    header = [*fields, *content["tuned"], *["rate"] * has_rate, "seeds"]
    header += [measure.replace("_", " ") for measure in measures]
    return table(header, rows)


def origin(content: Mapping[str, Any]) -> str:
    """What ran, where and when."""
    origins = content["origins"]
    commands = dict.fromkeys(f"`{o['command']}`" for o in origins)
    last = origins[-1]
    dates = list(dict.fromkeys(o["date"] for o in origins))
    processors = list(dict.fromkeys(o.get("processor", "") for o in origins))
    some = "" if len(processors) == 1 else "in part "  # earlier programs did not note it
    where = ", ".join([last["machine"], *(some + name for name in processors if name)])
    name = content["study"]
    of_today = content.get("program") == program(HERE / f"{name}.py")
    earlier = "" if of_today else f"**By an earlier version of `{name}.py`.** "
    return earlier + (
        f"{', '.join(commands)}, {' and '.join(dates)}, {last['cores']} cores, {where}; "
        f"{', '.join(last['versions'])}. Raw results: "
        f"`benchmarks/reproduce/results/{name}.json`."
    )


def study(name: str) -> str:
    """A study's block of a page."""
    content = known(name)
    parts = [cells_table(claims_of(content)), values_table(content), origin(content)]
    return "\n\n".join(parts)


def printed(content: Mapping[str, Any]) -> str:
    """What a study's program says at its end."""
    lines = [f"{each.claim.name}: {each.verdict}" for each in claims_of(content) if each.outcomes]
    return "\n\n".join([cells_table(claims_of(content)), values_table(content), "\n".join(lines)])


# -- plots ----------------------------------------------------------------------------------------

PLOTS: dict[str, tuple[str, str | None, str]] = {
    # What is along the axis ("rate": all of them; "seconds": measures at quarters of the time; a
    # field of conditions, or a measure), what makes panels, what makes curves.
    "softsync_staleness": ("message", "mini-batch", "n"),
    "softsync_learning": ("rate", "n", "scaling"),
    "downpour_adagrad": ("rate", "task", "workers, optimizer"),
    "staleness_bound": ("seconds", "straggler", "bound"),
    "implicit_momentum": ("workers", None, "mini-batch"),
    "explicit_momentum": ("rate", "workers", "momentum"),
    "warm_start": ("rate", "optimizer", "warm_start"),
    "delay_tolerance": ("delay", None, "method"),
    "fasgd": ("workers", "batch", "method"),
    "delay_compensation": ("rate", "workers", "method"),
    "averaging_period": ("rate", None, "period"),
    "averaging_seconds": ("period", None, "workers"),
    "averaging_policies": ("period", "optimizer", "state"),
    "bmuf": ("workers", "period", "method"),
    "bmuf_seconds": ("workers", "time", "period"),
    "elastic": ("period", "workers", "method"),
    "diloco": ("period", None, "method"),
    "sandblaster_seconds": ("until", None, "method, replicas"),
    "strom": ("bytes", None, "codec"),
    "a3c": ("workers", None, "workers"),
    "half_sync": ("virtual_seconds", None, "way"),
    "hogwild": ("density", "problem", "contender"),
}
"""Of each study with results."""
MANY = 6
"""Curves in a panel up to which intervals are drawn."""
LOGARITHMIC = {"delay_tolerance", "a3c", "hogwild", "sandblaster_seconds"}
"""Studies whose values are far from one another."""
LINES = {"softsync_staleness": 1e-4}
"""Studies whose claim is a number that is near zero on their vertical axis."""
RANGES = {"softsync_learning": (0.0, 95.0)}
"""Of the vertical axis, where the worst is what matters."""


def stamp(results: Any) -> dict[str, str]:
    """What a plot's file says of the results that it shows."""
    text = json.dumps(results, sort_keys=True)
    return {"results": hashlib.sha256(text.encode()).hexdigest()[:16]}


def plot(name: str, path: str) -> None:
    """Means with 95 % intervals: over all rates, or at the choices of the other seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    content = known(name)
    results, measure = results_of(content), content["chosen_by"]
    along, panel, curves = PLOTS[name]
    conditions = results.conditions()
    # What has no place along the axis, or no panel, is beside all curves: one worker, synchronous.
    alone = [c for c in conditions if 0 in (c.get(along), c.get(panel))]
    conditions = [c for c in conditions if c not in alone]
    baselines = {
        ", ".join(str(c.get(part)) for part in curves.split(", ")): float(
            np.mean(results.judged(c, measure, results.seeds(c)))
        )
        for c in alone
    }
    panels = list(dict.fromkeys(c.get(panel) for c in conditions)) if panel else [None]
    size = (3.4 * len(panels) + 1.4, 3.6)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    names: list[str] = []  # of curves: each has one colour in all panels
    for axis, value in zip(axes[0], panels, strict=True):
        inside = [c for c in conditions if panel is None or c.get(panel) == value]
        groups: dict[str, list[dict]] = {}
        for condition in inside:
            label = ", ".join(str(condition.get(part)) for part in curves.split(", "))
            groups.setdefault(label, []).append(condition)
        for label, group in groups.items():
            points = _points(results, group, measure, along)
            if points:
                names += [label] * (label not in names)
                number = names.index(label)
                x, means, lows, highs = zip(*sorted(points), strict=True)
                # Where curves are many, intervals (in the table) would hide them.
                few = len(groups) <= MANY or len(points) == 1
                spread = [np.subtract(means, lows), np.subtract(highs, means)] if few else None
                marker = "osD^"[number // 10 % 4]  # after ten colours come again
                style = {"color": f"C{number % 10}", "marker": marker, "markersize": 3}
                axis.errorbar(x, means, spread, **style, capsize=2, label=label)
        for number, (label, mean) in enumerate(baselines.items()):
            style = ("--", ":")[number % 2]
            axis.axhline(mean, color="grey", linestyle=style, linewidth=1, label=label)
        if along != "seconds":
            axis.set_xscale("log", base=2)
        axis.set_xlabel(_ALONG.get(along, along))
        if panel:
            axis.set_title(f"{panel}: {value}", fontsize=9)
    if name in LOGARITHMIC:
        axes[0][0].set_yscale("log")
    elif name in LINES:
        # Linear below the line, so that zeros have a place.
        axes[0][0].set_yscale("symlog", linthresh=LINES[name])
        axes[0][0].set_ylim(0.0, 1.0)
        for axis in axes[0]:
            axis.axhline(LINES[name], color="grey", linestyle="--", linewidth=1)
    else:
        axes[0][0].set_ylim(RANGES.get(name) or _range(results, conditions, measure))
    axes[0][0].set_ylabel(_LABELS.get(measure, measure))
    # That of the last panel, or of one with more curves; beside the panels, and on no curve.
    whole = max(reversed(axes[0]), key=lambda axis: len(axis.get_legend_handles_labels()[1]))
    handles, labels = whole.get_legend_handles_labels()
    figure.tight_layout()
    axes[0][-1].legend(
        handles,
        labels,
        fontsize=7,
        title=curves,
        title_fontsize=7,
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        borderaxespad=0.0,
    )
    figure.savefig(path, dpi=90, bbox_inches="tight", metadata=stamp(content["runs"]))
    pyplot.close(figure)


_LABELS = {
    "error": "held-out error, %",
    "loss": "held-out loss",
    "cost": "mean held-out cross-entropy",
    "regret": "regret, online",
    "above_2n": "share of messages above 2n",
    "ms": "milliseconds a mini-batch",
    "worker_seconds": "worker-seconds a mini-batch",
    "gap": "what is missing to the best AUC",
}
_ALONG = {
    "rate": "learning rate",
    "seconds": "virtual seconds, share of all",
    "virtual_seconds": "virtual seconds",
    "until": "virtual seconds",
    "bytes": "bytes of a message",
    "message": "seconds of a message",
}


def _points(results: Results, group: Sequence[Mapping], measure: str, along: str) -> list[tuple]:
    points = []
    for condition in group:
        seeds = results.seeds(condition)
        if not seeds:
            continue
        if along == "rate":
            values = results.values(condition, measure, seeds)
            settings = results.settings(condition)
            best = results.best(condition)[:-1]  # of tuned fields the chosen ones
            for setting, row in zip(settings, values, strict=True):
                if setting[:-1] == best:
                    points.append((setting[-1], *evidence.interval(row)))
        elif along == "seconds":
            for share, part in ((0.25, "_1"), (0.5, "_2"), (0.75, "_3"), (1.0, "")):
                values = results.judged(condition, measure + part, seeds)
                points.append((share, *evidence.interval(values)))
        elif along in results.measures:
            x = float(np.mean(results.judged(condition, along, seeds)))
            points.append((x, *evidence.interval(results.judged(condition, measure, seeds))))
        elif condition.get(along):
            points.append(
                (condition[along], *evidence.interval(results.judged(condition, measure, seeds)))
            )
    return points


def _range(results: Results, conditions: Sequence[Mapping], measure: str) -> tuple[float, float]:
    """From the least to what is well above the worst of those at their best."""
    best = [
        float(np.mean(results.judged(c, measure, results.seeds(c))))
        for c in conditions
        if results.seeds(c)
    ]
    low, high = min(best), max(best)
    room = max(high - low, 0.15 * abs(statistics.median(best)))
    return low - 0.25 * room, high + 1.0 * room
