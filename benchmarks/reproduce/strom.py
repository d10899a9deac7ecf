"""What compressed messages cost in accuracy, and what they save in bytes and in time.

    python benchmarks/reproduce/strom.py --json strom.json --plot strom.png
    python benchmarks/reproduce/strom.py --part large --json strom_large.json

Strom (Interspeech 2015) trains a network of 14.6 M parameters: 58.4 MB a message dense, 0.21 MB at
tau = 2, 4.5 KB at tau = 15, where accuracy suffers; entropy coding is a further 3 times less.

`--part small` (the default): four simulated workers train a network 32-256-256-10 (76,810
parameters, relu). The classes are given by a network 32-16-10 (tanh), of which each seed has its
own, and a tenth of the labels are wrong; no example comes twice. Downpour, SGD at a rate that falls
along a cosine and is the same for all: the best of three without a codec, on one seed. A worker
pushes after every mini-batch and fetches after every fourth. Every mini-batch takes 10 ms
(log-normal, sigma 0.2), a message or a fetch 1 ms and its bytes over a link of `--megabits`.
After every 400
mini-batches all workers meet, and 10,000 held-out examples, whose labels are right, are looked at.
Bytes are those that workers count as they encode; a threshold's without entropy coding are 4 for
each element that it emits. What a codec computes takes no virtual time.

`--part large`: two workers train a network of 14.6 M parameters (429 inputs, five hidden layers of
1,633, 2,000 classes that a random network gives) for `--messages` mini-batches; the second half
of the messages is counted.
"""

import setting  # isort: skip (finds the package and `runs`)

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import runs
import teacher
import tensorflow as tf

import tf_dsgd
from tf_dsgd import compression
from tf_dsgd.algorithm import Codec
from tf_dsgd.engine import traffic

WORKERS, BATCH, STEPS, LOOK_EVERY, RATE, HELD_OUT = 4, 32, 4_000, 400, 0.2, 10_000
TAUS = (0.016, 0.064, 0.25, 1.0, 4.0)
OTHERS = "none,none; pushes every 4,Cast; bfloat16,Threshold 0.064"
LARGE_TAUS = (0.002, 0.004, 0.0055, 0.008, 0.016, 0.032)


def threshold(tau: float) -> Codec:
    return compression.Threshold(tau, entropy=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is sent, and how often."""

    codec: Codec = dataclasses.field(default_factory=Codec)
    push_every: int = 1
    fetch_every: int = 4


CODECS = {
    "none": Case(),
    "none, pushes every 4": Case(push_every=4),
    "Cast, bfloat16": Case(compression.Cast("bfloat16")),
    "QSGD, 64 levels": Case(compression.QSGD(64)),
    "QSGD, 4 levels": Case(compression.QSGD(4)),
    "OneBit": Case(compression.OneBit()),
    "EFSign": Case(compression.EFSign()),
    "PowerSGD, rank 4": Case(compression.PowerSGD(4)),
    "PowerSGD, rank 1": Case(compression.PowerSGD(1)),
    "TopK, 1 %": Case(compression.TopK(0.01)),
    "TopK, 0.1 %": Case(compression.TopK(0.001)),
    **{f"Threshold {tau:g}": Case(threshold(tau)) for tau in TAUS},
}


def taught(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes; those held out, 10,000 at the end, are without noise."""
    random = np.random.default_rng(seed)
    first = random.standard_normal((32, 16)) / 32**0.5
    second = random.standard_normal((16, 10))
    x = random.standard_normal((STEPS * BATCH + HELD_OUT, 32)).astype("float32")
    y = np.argmax(np.tanh(2 * x @ first) @ second, 1)
    wrong = random.random(len(y)) < 0.1
    wrong[-HELD_OUT:] = False
    return x, np.where(wrong, random.integers(0, 10, len(y)), y)


class Looks(keras.callbacks.Callback):
    """The held-out error, and the virtual time until then."""

    def __init__(self, strategy: Any, x: np.ndarray, y: np.ndarray):
        super().__init__()
        self.strategy, self.x, self.y = strategy, x, y
        self.curve: list[tuple[float, float]] = []

    def on_epoch_end(self, epoch, logs=None):
        _, right = self.model.evaluate(self.x, self.y, batch_size=5000, verbose=0)
        seconds = float(self.strategy.engine.clock())
        self.curve.append((round(seconds, 3), round(100.0 * (1.0 - right), 3)))


def counted(strategy: Any) -> np.ndarray:
    """All workers' counts, together."""
    return np.sum(list(strategy.engine.store.traffic.read().values()), 0)


def train(name: str, case: Case, seed: int, megabits: float, rate: float) -> dict:
    """One run."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    x, y = taught(seed)
    cluster = tf_dsgd.SimulatedCluster(
        WORKERS,
        compute_seconds=tf_dsgd.LogNormal(0.01, sigma=0.2),
        network_seconds=0.001,
        network_bytes_per_second=megabits * 1e6 / 8,
        seed=seed,
    )
    strategy = tf_dsgd.DownpourStrategy(
        cluster,
        push_every=case.push_every,
        fetch_every=case.fetch_every,
        compression=case.codec,
    )
    with strategy.scope():
        layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu")]
        model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        falling = keras.optimizers.schedules.CosineDecay(rate, STEPS)
        model.compile(keras.optimizers.SGD(falling), loss, metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((x[:-HELD_OUT], y[:-HELD_OUT])).batch(BATCH)
    looks = Looks(strategy, x[-HELD_OUT:], y[-HELD_OUT:])
    began = time.process_time()
    model.fit(
        data,
        epochs=STEPS // LOOK_EVERY,
        steps_per_epoch=LOOK_EVERY,
        shuffle=False,
        callbacks=[looks],
        verbose=0,
    )
    dense = 4 * model.count_params()
    found = {"messages": strategy.ledger().sent, "bytes": float(dense), "emitted": 1.0}
    if type(case.codec) is not Codec:
        counts = counted(strategy)
        found["bytes"] = float(counts[traffic.BYTES] / counts[traffic.MESSAGES])
        found["emitted"] = float(counts[traffic.EMITTED] / counts[traffic.ELEMENTS])
    return {
        "case": name,
        "seed": seed,
        "megabits": megabits,
        "rate": rate,
        "steps": strategy.steps,
        **found,
        "error": looks.curve[-1][1],
        "curve": looks.curve,
        "residual": [round(norm, 4) for norm in strategy.residual()],
        "processor_seconds": round(time.process_time() - began, 1),
    }


def mean_bytes(results: list[dict], name: str) -> float:
    return float(np.mean([r["bytes"] for r in results if r["case"] == name]))


def uncoded(results: list[dict], name: str) -> float:
    """Bytes of a threshold's message without entropy coding."""
    dense = 4 * 76_810
    return dense * float(np.mean([r["emitted"] for r in results if r["case"] == name]))


def errors(results: list[dict], name: str) -> np.ndarray:
    return np.array([r["error"] for r in results if r["case"] == name])


def until(result: dict, target: float) -> float:
    """Virtual seconds until the held-out error is at most that, at a look; infinite if never."""
    return next((seconds for seconds, error in result["curve"] if error <= target), np.inf)


def report(results: list[dict], names: list[str], links: list[float], margin: float) -> str:
    first = [r for r in results if r["megabits"] == links[0]]
    dense = mean_bytes(first, "none")
    base = errors(first, "none")
    rows = []
    aims = {r["seed"]: r["error"] + margin for r in first if r["case"] == "none"}
    for name in names:
        found, size = errors(first, name), mean_bytes(first, name)
        if name.startswith("Threshold"):
            plain = uncoded(first, name)
            text = f"{size:,.0f} ({plain:,.0f} without entropy coding)"
        else:
            text = f"{size:,.0f}"
        row = [name, text, f"{dense / size:,.1f}", teacher.spread(found)]
        row.append("" if name == "none" else teacher.spread(found - base))
        for link in links:
            mine = [r for r in results if r["case"] == name and r["megabits"] == link]
            row.append(_seconds([until(r, aims[r["seed"]]) for r in mine]))
        rows.append(row)
    heads = ["codec", "bytes a message", "times less", "error, %", "beside none, paired"]
    heads += [f"virtual s, {link:g} Mbit/s" for link in links]
    said = (
        f"Seconds are until the error is at most {margin:g} points above none's last, in the mean."
    )
    return f"{runs.table(heads, rows)}\n\n{said} {len(base)} seeds."


def _seconds(times: list[float]) -> str:
    reached = [t for t in times if np.isfinite(t)]
    if not times or not reached:
        return "never" if times else ""
    some = f" ({len(reached)} of {len(times)})" if len(reached) < len(times) else ""
    return f"{np.mean(reached):.1f}{some}"


def plot(results: list[dict], names: list[str], links: list[float], margin: float, path: str):
    pyplot = setting.pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.4))
    first = [r for r in results if r["megabits"] == links[0]]
    thresholds = [name for name in names if name.startswith("Threshold")]
    taus = [float(name.split()[1]) for name in thresholds]
    teacher.curve(axes[0], taus, [errors(first, n) for n in thresholds], "o-", "held-out error")
    axes[0].axhline(np.mean(errors(first, "none")), color="0.5", label="without a codec")
    axes[0].set(xscale="log", xlabel="tau", ylabel="held-out error, %")
    other = axes[0].twinx()
    coded = [mean_bytes(first, n) for n in thresholds]
    other.plot(taus, coded, "s--", color="C1", label="bytes, entropy coded")
    other.plot(taus, [uncoded(first, n) for n in thresholds], "s:", color="C2", label="bytes")
    other.set(yscale="log", ylabel="bytes a message")
    lines = [*axes[0].get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    axes[0].legend(handles=lines, loc="upper center", fontsize=7)
    for k, name in enumerate(n for n in names if n not in thresholds):
        found = errors(first, name)
        bar = np.std(found, ddof=1) / len(found) ** 0.5
        size = mean_bytes(first, name)
        mark = "osv^D<>phX*"[k % 11]
        axes[1].errorbar([size], [found.mean()], [bar], fmt=mark, label=name)
    sizes = [mean_bytes(first, n) for n in thresholds]
    teacher.curve(axes[1], sizes, [errors(first, n) for n in thresholds], "k.-", "Threshold")
    axes[1].set(xscale="log", xlabel="bytes a message", ylabel="held-out error, %")
    axes[1].legend(fontsize=7)
    slow = [r for r in results if r["megabits"] == links[-1]]
    for name in dict.fromkeys(r["case"] for r in slow):
        curves = np.array([r["curve"] for r in slow if r["case"] == name])
        axes[2].plot(curves[..., 0].mean(0), curves[..., 1].mean(0), ".-", label=name)
    axes[2].axhline(np.mean(errors(first, "none")) + margin, color="0.8")
    axes[2].set(xscale="log", ylabel="held-out error, %")
    axes[2].set_xlabel(f"virtual seconds, links of {links[-1]:g} Mbit/s")
    axes[2].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


# -- 14.6 M parameters -----------------------------------------------------------------------------


def large(tau: float, options) -> dict:
    """Bytes of a large network's messages."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)
    count = options.messages * BATCH
    x = random.standard_normal((count, 429)).astype("float32")
    hidden = np.tanh(x @ random.standard_normal((429, 64)) / 429**0.5 * 2)
    y = np.argmax(hidden @ random.standard_normal((64, 2000)), 1)
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 1.1]), compression=threshold(tau)
    )
    with strategy.scope():
        layers = [keras.layers.Dense(1633, "relu") for _ in range(5)]
        model = keras.Sequential([keras.Input((429,)), *layers, keras.layers.Dense(2000)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    half = count // 2
    model.fit(x[:half], y[:half], batch_size=BATCH, verbose=0)
    before = counted(strategy)
    model.fit(x[half:], y[half:], batch_size=BATCH, verbose=0)
    counts = counted(strategy) - before
    size = float(counts[traffic.BYTES] / counts[traffic.MESSAGES])
    emitted = float(counts[traffic.EMITTED] / counts[traffic.ELEMENTS])
    return {
        "tau": tau,
        "parameters": model.count_params(),
        "messages": int(counts[traffic.MESSAGES]),
        "dense": float(counts[traffic.DENSE] / counts[traffic.MESSAGES]),
        "emitted": emitted,
        "uncoded": 4 * emitted * model.count_params(),
        "bytes": size,
    }


def report_large(results: list[dict]) -> str:
    rows = [
        [
            f"{r['tau']:g}",
            f"{r['dense'] / 1e6:.1f} MB",
            f"{100 * r['emitted']:.4f} %",
            f"{r['uncoded'] / 1e3:,.1f} KB",
            f"{r['dense'] / r['uncoded']:,.0f}",
            f"{r['bytes'] / 1e3:,.1f} KB",
            f"{r['uncoded'] / r['bytes']:.2f}",
        ]
        for r in results
    ]
    heads = ["tau", "dense", "emitted", "32 bits each", "times less", "entropy coded"]
    return runs.table([*heads, "a further times less"], rows)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--part", choices=["small", "large"], default="small")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--megabits", default="100,10", help="links; all codecs on the first one")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--margin", type=float, default=2.0, help="points above none's last error")
    parser.add_argument("--only", default="", help="a part of the codecs' names")
    parser.add_argument("--on_others", default=OTHERS)
    parser.add_argument("--messages", type=int, default=40, help="of the large network")
    options = parser.parse_args()
    if options.part == "large":
        results = []
        for tau in LARGE_TAUS:
            results.append(large(tau, options))
            print(results[-1], flush=True)
        setting.finish(options, results, report_large, lambda results, path: None)
        return
    names = [name for name in CODECS if options.only in name]
    links = setting.numbers(options.megabits, float)
    others = [name.replace(";", ",") for name in options.on_others.split(",")]
    # A run that was broken off goes on.
    begun = options.json is not None and Path(options.json).exists()
    results = json.loads(Path(options.json).read_text())["results"] if begun else []
    seeds = setting.numbers(options.seeds)
    results = [r for r in results if r["case"] in names and r["seed"] in seeds]
    done = {(r["case"], r["seed"], r["megabits"]) for r in results}
    for seed in seeds:
        for link in links:
            for name in names if link == links[0] else others:
                if (name, seed, link) in done:
                    continue
                results.append(train(name, CODECS[name], seed, link, options.rate))
                print({k: v for k, v in results[-1].items() if k != "curve"}, flush=True)
                runs.write_json(options.json, {**runs.provenance(), "results": results})
    results.sort(key=lambda r: (r["seed"], -r["megabits"]))
    setting.finish(options, results, report, plot, names, links, options.margin)


if __name__ == "__main__":
    main()
