"""What the studies of this directory share: n-softsync's workers, and the command line."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `runs`
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import runs

import tf_dsgd

WORKERS = 30
# A message takes this long on average; a mini-batch takes a second.
MESSAGE_SECONDS = 0.05


def workers(compute: object = 1.0, seed: int = 1) -> tf_dsgd.SimulatedCluster:
    """Thirty workers on a virtual clock, by default of one speed."""
    return tf_dsgd.SimulatedCluster(
        WORKERS,
        compute_seconds=compute,
        network_seconds=tf_dsgd.Exponential(MESSAGE_SECONDS),
        seed=seed,
    )


def softsync(n: int, cluster: tf_dsgd.SimulatedCluster, scaling: str | None):
    """n-softsync: floor(30 / n) gradients in an update."""
    return tf_dsgd.SoftsyncStrategy(
        cluster, gradients_per_update=WORKERS // n, staleness_scaling=scaling
    )


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--json", help="file for the numbers")
    parser.add_argument("--plot", help="PNG file (needs matplotlib)")
    return parser


def finish(options, results: list[dict], report, plot, *more: object) -> None:
    """Writes the numbers, prints `report`'s table, and draws `plot`; both are given `more`."""
    origin = runs.provenance()
    runs.write_json(options.json, {**origin, "results": results})
    print(runs.heading(origin), report(results, *more), sep="\n\n")
    if options.plot:
        plot(results, *more, options.plot)


def numbers(text: str, kind: type = int) -> list:
    """Of an argument that lists numbers by commas."""
    return [kind(part) for part in text.split(",")]


def pyplot():
    """matplotlib's, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
