"""One page, as a PNG file, of what `StalenessMonitor` wrote.

    python -m tf_dsgd.report RUN_DIR

draws `RUN_DIR/monitor.jsonl` to `RUN_DIR/report.png`: staleness over time and in all, loss against
seconds and against samples, the rate of each worker, what workers' time went to, and, if messages
were compressed, what codecs sent and held back. It reads what is there: of a run that goes on or
was killed, everything up to now.

This file imports neither TensorFlow nor the rest of the package. Where those are missing, run the
file itself: `python tf_dsgd/report.py RUN_DIR`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RECORDS = "monitor.jsonl"
SCHEMA = 1
# What a record of each kind has at least; others are not the monitor's.
_FIELDS = {
    "start": {"schema", "num_workers", "steps"},
    "sample": {"seconds", "steps", "workers"},
    "epoch": {"seconds", "steps", "workers"},
    "end": {"kind"},
}
PAGE = "report.png"
KINDS = ("fetch", "compute", "push", "wait")

_MATPLOTLIB_MISSING = 'matplotlib is not installed. Run: pip install "tf_dsgd[plot]"'

# Okabe and Ito's colours, which those who do not see all colours tell apart; yellow is replaced.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F4F24")
_KIND_COLOURS = dict(zip(KINDS, ("#56B4E9", "#0072B2", "#E69F00", "#D9D9D9"), strict=True))

# A line or a bar for each worker up to here; with more, their range.
_MOST_LINES = len(_COLOURS)
# Points that a line is drawn with; more samples than that are joined.
_POINTS = 150


# -- what was written -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """The records of a run: samples follow each other in time, epochs summarise them."""

    header: dict[str, Any]
    samples: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    ended: bool


def read(run_dir: str | Path) -> Run:
    """Reads a run's records, in the order of training.

    Lines that a killed process left incomplete are left out. Where a run was started again, its
    records take the place of those that came after the checkpoint, and its seconds go on.

    Args:
        run_dir: folder that `StalenessMonitor` wrote to.

    Raises:
        ValueError: if there is no such file, or nothing in it.
    """
    path = Path(run_dir) / RECORDS
    if not path.is_file():
        raise ValueError(
            f"There is no {path}. Train with tf_dsgd.callbacks.StalenessMonitor({str(run_dir)!r})."
        )
    header: dict[str, Any] | None = None
    kept: list[dict[str, Any]] = []
    offset, ended, fits = 0.0, False, 0
    for record in _records(path):
        if record["kind"] == "start":
            if record["schema"] != SCHEMA:
                raise ValueError(
                    f"{path} was written by another version of the package: its schema is "
                    f"{record['schema']!r}, and this one reads {SCHEMA}."
                )
            begun = record["steps"]
            kept = [r for r in kept if begun and r["steps"] <= begun]
            offset = kept[-1]["seconds"] if kept else 0.0
            header, ended, fits = record, False, fits + 1
        elif record["kind"] == "end":
            ended = True
        elif header is not None:
            kept.append({**record, "seconds": record["seconds"] + offset, "fit": fits})
    if header is None:
        raise ValueError(f"{path} holds no run: it has no record of a start.")
    kept = [r for r in kept if len(r["workers"]["steps"]) == header["num_workers"]]
    return Run(
        header,
        [r for r in kept if r["kind"] == "sample"],
        [r for r in kept if r["kind"] == "epoch"],
        ended,
    )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict):
            continue
        fields = _FIELDS.get(str(record.get("kind")))
        if fields is None or not record.keys() >= fields:
            continue
        if "seconds" in fields and not _is_number(record["seconds"]):
            continue
        if "workers" in fields and not isinstance(record["workers"], dict):
            continue
        logs = record.get("logs")
        logs = logs if isinstance(logs, dict) else {}
        yield {**record, "logs": {name: logs[name] for name in logs if _is_number(logs[name])}}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Window:
    """Samples that follow each other, joined; all counts are sums."""

    seconds: float
    """At its end."""
    length: float
    """Seconds of training in it."""
    messages: collections.Counter[int]
    """Messages by staleness."""
    steps: np.ndarray
    """Mini-batches of each worker."""
    spent: np.ndarray
    """Seconds of each worker: `[kinds, workers]`."""

    @classmethod
    def of(cls, sample: dict[str, Any]) -> Window:
        """One sample."""
        workers = sample["workers"]
        return cls(
            seconds=sample["seconds"],
            length=sample["interval_seconds"],
            messages=collections.Counter(dict(sample["staleness"]["histogram"])),
            steps=np.array(workers["steps"], float),
            spent=np.array([workers[f"{kind}_seconds"] for kind in KINDS], float),
        )

    def __add__(self, later: Window) -> Window:
        return Window(
            later.seconds,
            self.length + later.length,
            self.messages + later.messages,
            self.steps + later.steps,
            self.spent + later.spent,
        )

    def staleness(self) -> dict[str, float]:
        """Mean, percentiles and maximum."""
        if not self.messages:
            return dict.fromkeys(("mean", "p50", "p99", "max"), math.nan)
        taus = np.array(sorted(self.messages))
        counts = np.array([self.messages[tau] for tau in taus])
        below = np.cumsum(counts)

        def percentile(share: float) -> float:
            return float(taus[np.searchsorted(below, share * below[-1])])

        return {
            "mean": float((taus * counts).sum() / below[-1]),
            "p50": percentile(0.5),
            "p99": percentile(0.99),
            "max": float(taus[-1]),
        }


def windows(samples: Sequence[dict[str, Any]], least_seconds: float) -> list[Window]:
    """Joins samples until each window is at least that long: counts over little time are noise."""
    joined: list[Window] = []
    for sample in samples:
        window = Window.of(sample)
        if joined and joined[-1].length < least_seconds:
            joined[-1] += window
        else:
            joined.append(window)
    if len(joined) > 1 and joined[-1].length < least_seconds:
        last = joined.pop()
        joined[-1] += last
    return joined


# -- the page -------------------------------------------------------------------------------


def figure(run: Run) -> Any:
    """Draws a run.

    Returns:
        A `matplotlib.figure.Figure` with six axes; eight of a run with compressed messages.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise ImportError(_MATPLOTLIB_MISSING) from None
    sent = [r for r in run.samples if "messages" in r] or [r for r in run.epochs if "messages" in r]
    page = Figure(figsize=(12.0, 17.0 if sent else 12.8), dpi=100)
    page.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(page)
    page.suptitle(_title(run), fontsize=11.5, x=0.02, ha="left", linespacing=1.5)
    axes = page.subplots(4 if sent else 3, 2)
    trained = sum(sample["interval_seconds"] for sample in run.samples)
    every = run.header["every_seconds"]
    parts = windows(run.samples, max(trained / _POINTS, min(every, trained / 8) / 2))
    _draw_staleness(axes[0, 0], run, parts)
    _draw_histogram(axes[0, 1], parts)
    _draw_loss(axes[1, 0], run, "seconds", _seconds(run))
    counted = any(r["samples"] is not None for r in [*run.samples, *run.epochs])
    if counted:
        _draw_loss(axes[1, 1], run, "samples", "examples trained on")
    else:
        _draw_loss(axes[1, 1], run, "steps", "mini-batches trained on")
    _draw_rates(axes[2, 0], run, parts)
    _draw_spent(axes[2, 1], run, parts)
    if sent:
        _draw_sent(axes[3, 0], run, sent, "Sent", ("dense_ratio", "fraction_emitted"))
        held = ("residual_to_gradient", "fraction_overdue")
        _draw_sent(axes[3, 1], run, sent, "Held back by codecs", held)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return page


def _title(run: Run) -> str:
    header, rules = run.header, run.header["rules"]
    exchange = rules["exchange"]
    lines = textwrap.wrap(f"{header['strategy']} on {header['cluster']}", 130, max_lines=3)
    periods = [name for name in exchange if name.endswith("_every")]
    settings = [f"{name}={exchange[name]}" for name in periods]
    scaling = rules["server"].get("scaling")
    settings += [f"staleness scaled by {scaling}"] if scaling else []
    settings += [f"optimizer {header['optimizer']}"] if header["optimizer"] else []
    lines.append(", ".join(settings))
    if run.samples:
        whole = windows(run.samples, math.inf)[0]
        staleness = whole.staleness()
        last = run.samples[-1]
        lines.append(
            f"{last['steps']:,} mini-batches, {last['updates']:,} updates; staleness mean "
            f"{staleness['mean']:.2f}, p99 {staleness['p99']:g}; "
            f"{whole.steps.sum() / whole.length:,.4g} mini-batches/{_second(run)}"
            + ("" if run.ended else "; not at its end")
        )
    return "\n".join(lines)


def _second(run: Run) -> str:
    return "virtual s" if run.header["clock"] == "virtual" else "s"


def _seconds(run: Run) -> str:
    return "virtual seconds" if run.header["clock"] == "virtual" else "seconds (wall clock)"


def _empty(ax: Any, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="0.4")


def _finish(ax: Any, title: str, x: str, y: str, **legend: Any) -> None:
    ax.set_title(title[:1].upper() + title[1:], fontsize=11, loc="left", fontweight="bold")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=9, frameon=False, **legend)


def _from_zero(ax: Any, room: float) -> None:
    """Both axes from 0, with room for a legend: that share of the height, at the top."""
    ax.set_xlim(left=0)
    ax.set_ylim(0, ax.get_ylim()[1] / (1 - room) or 1.0)


def _draw_staleness(ax: Any, run: Run, parts: Sequence[Window]) -> None:
    parts = [part for part in parts if part.messages]
    if not parts:
        _empty(ax, "no message was applied")
    seconds = [part.seconds for part in parts]
    values = {name: [p.staleness()[name] for p in parts] for name in ("mean", "p50", "p99", "max")}
    marker = "." if len(parts) < 25 else None
    ax.fill_between(seconds, values["p50"], values["p99"], color="#0072B2", alpha=0.12, linewidth=0)
    for name, colour, style in (
        ("p99", "#D55E00", "-"),
        ("mean", "#0072B2", "-"),
        ("p50", "#009E73", "--"),
        ("max", "0.2", ":"),  # over p99, with which it may coincide
    ):
        ax.plot(seconds, values[name], style, color=colour, label=name, marker=marker)
    _from_zero(ax, 0.12)
    _finish(
        ax, "Staleness over time", _seconds(run), "staleness (updates)", ncols=4, loc="upper left"
    )


def _draw_histogram(ax: Any, parts: Sequence[Window]) -> None:
    total: collections.Counter[int] = collections.Counter()
    for part in parts:
        total += part.messages
    if not total:
        _empty(ax, "no message was applied")
        _finish(ax, "Staleness of all messages", "staleness (updates)", "% of messages")
        return
    most = max(total)
    width = max(1, math.ceil((most + 1) / 60))
    shares = np.zeros(most // width + 1)
    for tau, count in total.items():
        shares[tau // width] += 100.0 * count / total.total()
    left = np.arange(len(shares)) * width - 0.5
    ax.bar(left, shares, width=0.92 * width, align="edge", color="#0072B2")
    mean = sum(tau * count for tau, count in total.items()) / total.total()
    ax.axvline(mean, color="#D55E00", linewidth=1.5, label=f"mean {mean:.2f}")
    if most < 1:
        ax.set_xlim(-1.5, 1.5)
    ax.xaxis.get_major_locator().set_params(integer=True)
    title = f"Staleness of all {total.total():,} messages"
    _finish(ax, title, "staleness (updates)", "% of messages")


def _draw_loss(ax: Any, run: Run, axis: str, label: str) -> None:
    name = _loss(run)
    title = f"{name or 'Loss'} against {'wall clock' if axis == 'seconds' else axis}"
    if axis == "seconds" and run.header["clock"] == "virtual":
        title = f"{name or 'Loss'} against virtual time"
    elif axis == "steps":
        title = f"{name or 'Loss'} against mini-batches"
    if name is None:
        _empty(ax, "no loss was logged")
        _finish(ax, title, label, "loss")
        return
    epochs: dict[Any, list[tuple[float, float]]] = {}
    for sample in run.samples:
        if sample["logs"].get(name) is not None and sample[axis] is not None:
            point = (sample[axis], sample["logs"][name])
            epochs.setdefault((sample["fit"], sample.get("epoch")), []).append(point)
    loop = all(epoch is None for _, epoch in epochs)
    for i, points in enumerate(epochs.values()):
        what = "at samples" if loop else "running mean within an epoch"
        ax.plot(
            *zip(*points, strict=True),
            color="#0072B2",
            alpha=1.0 if loop else 0.45,
            linewidth=1.2,
            label=what if not i else None,
        )
    values = [value for points in epochs.values() for _, value in points]
    for key, colour, style, what in (
        (name, "#0072B2", "o-", "training, whole epochs"),
        (f"val_{name}", "#D55E00", "s--", "validation"),
    ):
        ends = [
            (epoch[axis], epoch["logs"][key])
            for epoch in run.epochs
            if epoch["logs"].get(key) is not None and epoch[axis] is not None
        ]
        if ends:
            size = 4.5 if len(ends) < 40 else 0
            ax.plot(*zip(*ends, strict=True), style, color=colour, label=what, markersize=size)
            values += [value for _, value in ends]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        ax.set_yscale("log")
    ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter("{x:,.0f}" if axis != "seconds" else "{x:g}")
    ax.locator_params(axis="x", nbins=7)
    _finish(ax, title, label, name)


def _loss(run: Run) -> str | None:
    """The log that is drawn: `loss`, or the first there is."""
    names = [name for record in [*run.epochs, *run.samples] for name in record["logs"]]
    return "loss" if "loss" in names else next(iter(names), None)


def _draw_rates(ax: Any, run: Run, parts: Sequence[Window]) -> None:
    parts = [part for part in parts if part.length > 0]
    seconds = [part.seconds for part in parts]
    rates = np.array([part.steps / part.length for part in parts])
    marker = "." if len(parts) < 25 else None
    if not parts:
        _empty(ax, "no mini-batch was trained on")
    elif rates.shape[1] <= _MOST_LINES:
        for m, rate in enumerate(rates.T):
            style = "-" if m < 4 else "--"
            ax.plot(seconds, rate, style, color=_COLOURS[m], label=f"worker {m}", marker=marker)
    else:
        low, first, median, third, high = np.quantile(rates, [0, 0.25, 0.5, 0.75, 1], axis=1)
        blue = "#0072B2"
        label = f"all {rates.shape[1]} workers"
        ax.fill_between(seconds, low, high, color=blue, alpha=0.12, linewidth=0, label=label)
        ax.fill_between(
            seconds, first, third, color=blue, alpha=0.3, linewidth=0, label="middle half"
        )
        ax.plot(seconds, median, color=blue, label="median", marker=marker)
    rows = math.ceil(rates.shape[-1] / 4) if rates.shape[-1] <= _MOST_LINES else 1
    _from_zero(ax, 0.08 * rows + 0.02)
    y = f"mini-batches per {'virtual ' * (run.header['clock'] == 'virtual')}second"
    _finish(ax, "Rate per worker", _seconds(run), y, ncols=4, loc="upper left")


def _draw_spent(ax: Any, run: Run, parts: Sequence[Window]) -> None:
    spent = sum((part.spent for part in parts), np.zeros([len(KINDS), run.header["num_workers"]]))
    steps = sum((part.steps for part in parts), np.zeros(run.header["num_workers"]))
    names = [f"worker {m}" for m in range(spent.shape[1])]
    if spent.shape[1] > _MOST_LINES:
        order = np.argsort(steps, kind="stable")
        slow, fast = int(order[0]), int(order[-1])
        spent = np.stack([spent.mean(1), spent[:, slow], spent[:, fast]], 1)
        names = ["mean of all", f"slowest: {slow}", f"fastest: {fast}"]
    total = spent.sum(0)
    if not total.any():
        _empty(ax, "not measured")
    with np.errstate(invalid="ignore"):
        shares = np.nan_to_num(100.0 * spent / total)
    left = np.zeros(len(names))
    place = np.arange(len(names))[::-1]
    for kind, share in zip(KINDS, shares, strict=True):
        bars = ax.barh(place, share, left=left, color=_KIND_COLOURS[kind], label=kind, height=0.7)
        texts = [f"{value:.0f} %" if value >= 7 else "" for value in share]
        colour = "white" if kind == "compute" else "black"
        ax.bar_label(bars, texts, label_type="center", fontsize=9, color=colour)
        left = left + share
    ax.set_yticks(place, names)
    ax.set_xlim(0, 100)
    ax.set_ylim(-0.6, len(names) - 0.4 + 0.16 * len(names))
    _finish(
        ax,
        "What workers' time went to",
        f"% of a worker's {_seconds(run).split(' (')[0]}",
        "",
        ncols=4,
        loc="upper center",
    )


def _draw_sent(ax: Any, run: Run, sent: Sequence[dict[str, Any]], title: str, names: Any) -> None:
    for name, colour in zip(names, _COLOURS, strict=False):
        shown = [(r["seconds"], r["messages"].get(name)) for r in sent]
        shown = [point for point in shown if point[1]]  # zeros are not on a logarithmic axis
        if shown:
            label = f"{name.replace('_', ' ')}, at last {shown[-1][1]:.3g}"
            ax.plot(*zip(*shown, strict=True), ".-", color=colour, label=label)
            ax.set_yscale("log")
    if not ax.lines:
        _empty(ax, "nothing")
    ax.set_xlim(left=0)
    size = sent[-1]["messages"]["message_bytes"]
    title += f": {size:,.0f} bytes a message" if size and title == "Sent" else ""
    _finish(ax, title, _seconds(run), "")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_dsgd.report", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder given to StalenessMonitor")
    parser.add_argument("--output", help=f"the page; RUN_DIR/{PAGE} by default")
    options = parser.parse_args(arguments)
    output = Path(options.output) if options.output else Path(options.run_dir) / PAGE
    try:
        page = figure(read(options.run_dir))
        page.savefig(output, format="png", pil_kwargs={"optimize": True})
    except (ImportError, ValueError) as error:
        sys.exit(f"tf_dsgd: {error}")
    except OSError as error:
        sys.exit(f"tf_dsgd: {error}. Name another file by --output.")
    print(output)


if __name__ == "__main__":
    main()
