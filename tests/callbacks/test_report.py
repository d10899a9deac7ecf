"""The page that `python -m tf_dsgd.report` draws holds what the records say."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests import helpers
from tf_dsgd import report
from tf_dsgd.callbacks import measuring, run_files
from tf_dsgd.engine import timing

pytest.importorskip("matplotlib", reason="matplotlib is an extra")

HEADER = {
    "kind": "start",
    "schema": 1,
    "versions": {"tf_dsgd": "0.1.0"},
    "strategy": "DownpourStrategy",
    "cluster": "LocalCluster(num_workers=2)",
    "num_workers": 2,
    "clock": "wall",
    "every_seconds": 1.0,
    "rules": {
        "local": {"class": "AccrueGradient"},
        "exchange": {"class": "Periods", "push_every": 2, "fetch_every": 3},
        "server": {"class": "CompiledOptimizer", "scaling": "inverse_staleness"},
    },
    "optimizer": "SGD",
    "steps": 0,
}


def record(kind, seconds, steps, histogram, worker_steps, loss, **more):
    """One record of a run whose mini-batches have ten examples."""
    workers = {"steps": worker_steps}
    for place, name in enumerate(report.KINDS):
        workers[f"{name}_seconds"] = [0.1 * (place + 1)] * len(worker_steps)
    return {
        "kind": kind,
        "seconds": seconds,
        "steps": steps,
        "updates": steps,
        "samples": 10 * steps,
        "interval_seconds": 1.0,
        "staleness": {"histogram": histogram},
        "workers": workers,
        "logs": {"loss": loss},
        "epoch": 0,
        **more,
    }


def three_samples():
    return [
        HEADER,
        record("sample", 1.0, 4, [[0, 2], [1, 2]], [3, 1], 8.0),
        record("sample", 2.0, 10, [[1, 1], [2, 5]], [3, 3], 4.0),
        record("sample", 3.0, 12, [[7, 2]], [0, 2], 2.0),
        record("epoch", 3.0, 12, [], [6, 6], 3.0, logs={"loss": 3.0, "val_loss": 2.5}),
    ]


def written(directory, records):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    (directory / "monitor.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def axes(directory):
    """The axes of the page by the beginning of their titles."""
    page = report.figure(report.read(directory))
    assert len(page.axes) == 6
    return {ax.get_title(loc="left").split()[0] + str(i): ax for i, ax in enumerate(page.axes)}


def line(ax, label):
    (found,) = [x for x in ax.lines if x.get_label() == label]
    return found.get_xdata().tolist(), found.get_ydata().tolist()


def test_names_are_the_monitors():
    assert report.SCHEMA == measuring.SCHEMA
    assert report.RECORDS == run_files.RECORDS
    assert report.KINDS == timing.KINDS


def test_the_page_shows_the_numbers_of_the_records(tmp_path):
    page = axes(written(tmp_path, three_samples()))
    staleness = page["Staleness0"]
    assert line(staleness, "mean") == ([1.0, 2.0, 3.0], [0.5, 11 / 6, 7.0])
    assert line(staleness, "p50")[1] == [0.0, 2.0, 7.0]
    assert line(staleness, "p99")[1] == line(staleness, "max")[1] == [1.0, 2.0, 7.0]
    bars = [bar.get_height() for bar in page["Staleness1"].patches]
    np.testing.assert_allclose(bars, 100 * np.array([2, 3, 5, 0, 0, 0, 0, 2]) / 12)
    seconds, samples = page["Loss2"], page["Loss3"]
    running = "running mean within an epoch"
    assert line(seconds, running) == ([1.0, 2.0, 3.0], [8.0, 4.0, 2.0])
    assert line(samples, running) == ([40, 100, 120], [8.0, 4.0, 2.0])
    assert line(samples, "training, whole epochs") == ([120], [3.0])
    assert line(seconds, "validation") == ([3.0], [2.5])
    assert line(page["Rate4"], "worker 0") == ([1.0, 2.0, 3.0], [3.0, 3.0, 0.0])
    assert line(page["Rate4"], "worker 1") == ([1.0, 2.0, 3.0], [1.0, 3.0, 2.0])
    widths = [bar.get_width() for bar in page["What5"].patches]
    np.testing.assert_allclose(widths, np.repeat([10, 20, 30, 40], 2))
    for ax in page.values():
        assert ax.get_xlabel()
        assert ax.get_ylabel() or ax is page["What5"]


def test_epochs_of_two_fits_are_not_joined(tmp_path):
    """The second begins to number its epochs anew, where the counts of the first go on."""
    samples = three_samples()
    again = {**HEADER, "steps": samples[-1]["steps"]}
    later = record("sample", 1.0, 200, [[0, 8]], [60, 60], 1.5)
    page = axes(written(tmp_path, [*samples, again, {**later, "epoch": samples[1]["epoch"]}]))
    running = [x for x in page["Loss2"].lines if x.get_color() == "#0072B2" and x.get_alpha()]
    assert [len(x.get_xdata()) for x in running] == [3, 1]


def test_many_workers_are_drawn_as_ranges(tmp_path):
    """Worker m of 20 does m mini-batches in a second: median 9.5, and 0 is the slowest."""
    many = record("sample", 1.0, 190, [[3, 190]], list(range(20)), 1.0)
    page = axes(written(tmp_path, [{**HEADER, "num_workers": 20}, many]))
    assert line(page["Rate4"], "median") == ([1.0], [9.5])
    labels = [label.get_text() for label in page["What5"].get_yticklabels()]
    assert labels == ["mean of all", "slowest: 0", "fastest: 19"]


def test_samples_are_joined_until_a_window_is_long_enough():
    """Five samples of a second, windows of two: 2 and 3, as the one left over is too short."""
    samples = [record("sample", float(t), 2 * t, [[t, 2]], [1, 1], 0.0) for t in range(1, 6)]
    first, second = report.windows(samples, 2.0)
    assert (first.seconds, first.length, dict(first.messages)) == (2.0, 2.0, {1: 2, 2: 2})
    assert (second.seconds, second.length, second.steps.tolist()) == (5.0, 3.0, [3.0, 3.0])
    np.testing.assert_allclose(second.spent[:, 0], [0.3, 0.6, 0.9, 1.2])
    assert second.staleness() == {"mean": 4.0, "p50": 4.0, "p99": 5.0, "max": 5.0}


def test_a_run_started_again_replaces_what_came_after_its_checkpoint(tmp_path):
    start, one, two, *_ = three_samples()
    again = {**HEADER, "steps": 4}
    later = record("sample", 0.5, 9, [[0, 5]], [5, 0], 1.0)
    run = report.read(written(tmp_path, [start, one, two, again, later, {"kind": "end"}]))
    assert [(s["seconds"], s["steps"]) for s in run.samples] == [(1.0, 4), (1.5, 9)]
    assert run.ended
    fresh = report.read(written(tmp_path, [start, one, two, start, later]))
    assert [(s["seconds"], s["steps"]) for s in fresh.samples] == [(0.5, 9)]
    assert not fresh.ended


@pytest.mark.parametrize("count", [1, 2])
def test_a_page_of_a_run_that_has_just_begun(count, tmp_path):
    """The header alone, and one sample in which no message was applied; the last line is cut."""
    empty = record("sample", 1.0, 0, [], [0, 0], None, samples=None, logs={})
    page = axes(written(tmp_path, [*[HEADER, empty][:count], '{"kind":"sam']))
    texts = {text.get_text() for text in page["Staleness0"].texts}
    assert texts == {"no message was applied"}
    assert {text.get_text() for text in page["Loss2"].texts} == {"no loss was logged"}


# -- the command ------------------------------------------------------------------------------

# TensorFlow, Keras and the package cannot be imported, nor what a test names.
BLOCKED = """
import importlib.abc, runpy, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
sys.argv = ["report.py", {directory!r}]
runpy.run_path({path!r}, run_name="__main__")
"""


def run_file(directory, *blocked):
    code = BLOCKED.format(
        blocked={"tensorflow", "keras", "tf_dsgd", *blocked},
        directory=str(directory),
        path=str(helpers.ROOT / "tf_dsgd" / "report.py"),
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_page_is_drawn_without_tensorflow(tmp_path):
    """A PNG file with more than one colour in it, where the command says."""
    import matplotlib.image

    done = run_file(written(tmp_path, three_samples()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "report.png")]
    pixels = matplotlib.image.imread(tmp_path / "report.png")
    assert pixels.shape[:2] == (1280, 1200)
    # One of the four colours of what workers' time went to, a tenth of two bars and a legend.
    orange = np.abs(pixels[..., :3] - np.array([0xE6, 0x9F, 0x00]) / 255).max(-1) < 0.01
    assert orange.sum() > 2000


def test_missing_matplotlib_is_said_in_one_line(tmp_path):
    done = run_file(written(tmp_path, three_samples()), "matplotlib")
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert 'pip install "tf_dsgd[plot]"' in said


def test_lines_of_another_shape_are_left_out(tmp_path):
    folder = written(tmp_path, three_samples())
    before = report.read(folder)
    with (folder / "monitor.jsonl").open("a") as file:
        file.write('[1, 2]\n{"kind": "sample"}\n{"kind": "other"}\n{"kind": ["start"]}\n')
        fields = {**before.samples[-1], "seconds": "a"}
        file.write(json.dumps(fields) + "\n" + json.dumps({**fields, "seconds": 1, "workers": 5}))
    assert report.read(folder) == before


def test_logs_that_are_no_numbers_are_not_drawn(tmp_path):
    records = three_samples()
    for record in records:
        if "logs" in record:
            record["logs"] = {**record["logs"], "note": "x", "loss": 1.5}
    folder = written(tmp_path, records)
    assert {name for sample in report.read(folder).samples for name in sample["logs"]} >= {"loss"}
    assert all("note" not in sample["logs"] for sample in report.read(folder).samples)
    report.main([str(folder)])
    assert (folder / "report.png").stat().st_size > 10_000


def test_a_file_of_another_version_is_refused(tmp_path):
    record = json.dumps({**HEADER, "schema": 99, "steps": 0})
    (tmp_path / "monitor.jsonl").write_text(record + "\n")
    with pytest.raises(SystemExit, match=r"another version.*99.*reads 1"):
        report.main([str(tmp_path)])


@pytest.mark.parametrize("content", [None, "", "not json\n"])
def test_a_folder_without_a_run_is_an_error_that_names_the_file(content, tmp_path):
    if content is not None:
        (tmp_path / "monitor.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=r"monitor\.jsonl"):
        report.main([str(tmp_path)])
