"""What compressed messages bring over a real, slow link: the error after so many seconds.

    python benchmarks/reproduce/slow_link.py --json slow_link.json

Strom (Interspeech 2015) compresses what workers send since links are slow. strom.py has that in
virtual time; here two worker processes are on hosts of their own (network namespaces, so Linux and
root), each behind a link of `--megabits` in each direction; chief and ps, which hold the weights,
are on a third. Every case trains the same network 128-512-512-10 (333,834 parameters, 1.3 MB) for
`--seconds` after its first epoch: SGD at one rate for all, mini-batches of 64, a push after every
mini-batch and a fetch after every fourth, but where a case says otherwise; peers send to one
another and fetch nothing. The classes are what a random network 128-16-10 says, a tenth of the
labels are wrong; no example comes twice in 12,000 mini-batches. Held-out error and mini-batches are
counted at the end; bytes are those of the workers' network devices, with the chief's mini-batches
(33 KB each), TCP's and IP's headers in them.
"""

import setting  # isort: skip (finds the package and `runs`)

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import hosts
import keras
import numpy as np
import runs

import tf_dsgd
from tf_dsgd import compression

SIZE, BATCH, HELD_OUT, EPOCH, MOST = 128, 64, 10_000, 32, 12_000
RATE = 0.2
TIMEOUT_SECONDS = 300.0
PEERS = "peers, Threshold 0.064"  # of the gradient, as the others'


def downpour(codec=None, push_every=1):
    return tf_dsgd.DownpourStrategy(
        tf_dsgd.TFCluster(), push_every=push_every, fetch_every=4, compression=codec
    )


CASES = {
    "none": downpour,
    "none, pushes every 4": lambda: downpour(push_every=4),
    "Cast, bfloat16": lambda: downpour(compression.Cast("bfloat16")),
    "OneBit": lambda: downpour(compression.OneBit()),
    "PowerSGD, rank 4": lambda: downpour(compression.PowerSGD(4)),
    "TopK, 1 %": lambda: downpour(compression.TopK(0.01)),
    "Threshold 0.016": lambda: downpour(compression.Threshold(0.016, entropy=True)),
    "Threshold 0.064": lambda: downpour(compression.Threshold(0.064, entropy=True)),
    PEERS: lambda: tf_dsgd.CompressedAsyncStrategy(
        tf_dsgd.TFCluster(), compression=compression.Threshold(0.064 * RATE, entropy=True)
    ),
}


# -- the chief -------------------------------------------------------------------------------------
def taught(seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes; those held out, at the end, have right labels."""
    random = np.random.default_rng(seed)
    first = random.standard_normal((SIZE, 16)) / SIZE**0.5
    second = random.standard_normal((16, 10))
    x = random.standard_normal((number + HELD_OUT, SIZE)).astype("float32")
    y = np.argmax(np.tanh(2 * x @ first) @ second, 1)
    wrong = random.random(len(y)) < 0.1
    wrong[-HELD_OUT:] = False
    return x, np.where(wrong, random.integers(0, 10, len(y)), y)


class ForSoLong(keras.callbacks.Callback):
    """Ends `fit` so many seconds after the first epoch, in which everything is traced."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.began, self.took, self.epochs = seconds, None, 0.0, 0

    def on_epoch_end(self, epoch, logs=None):
        now = time.monotonic()
        if self.began is None:
            self.began = now
            print("BEGUN", flush=True)
            return
        self.epochs, self.took = self.epochs + 1, now - self.began
        self.model.stop_training = self.took > self.seconds


def train(name: str, seed: int, seconds: float) -> None:
    """Trains as the chief, and prints what came of it."""
    keras.utils.set_random_seed(seed)
    x, y = taught(seed, MOST * BATCH)
    strategy = CASES[name]()
    with strategy.scope():
        hidden = [keras.layers.Dense(512, "relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((SIZE,)), *hidden, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(RATE), loss, metrics=["accuracy"])
    watch = ForSoLong(seconds)
    batches = (
        (x[at : at + BATCH], y[at : at + BATCH])
        for n in itertools.count()
        for at in [n % MOST * BATCH]
    )
    model.fit(batches, steps_per_epoch=EPOCH, epochs=MOST, verbose=0, callbacks=[watch])
    print("DONE", flush=True)
    _, right = model.evaluate(x[-HELD_OUT:], y[-HELD_OUT:], batch_size=5000, verbose=0)
    found = {
        "seconds": round(watch.took, 2),
        "mini_batches": watch.epochs * EPOCH,
        "error": round(100.0 * (1.0 - right), 3),
    }
    print("RESULT", json.dumps(found), flush=True)


# -- all of it -------------------------------------------------------------------------------------
def run(name: str, seed: int, megabits: float, seconds: float) -> dict:
    """A cluster on hosts of its own, and what its chief and the workers' devices count."""
    with contextlib.ExitStack() as stack:
        weights, *workers = stack.enter_context(hosts.made(3))
        for host in workers:
            host.limit(megabits)
        cluster = {
            "chief": [f"{weights.address}:5000"],
            "worker": [f"{host.address}:5000" for host in workers],
            "ps": [f"{weights.address}:5001"],
        }
        if name == PEERS:
            del cluster["ps"]

        def start(job: str, index: int, host: hosts.Host, *program: str) -> subprocess.Popen:
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            process = subprocess.Popen(
                host.within(sys.executable, *program),
                stdout=subprocess.PIPE if job == "chief" else subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                text=True,
                env={**runs.environment(), "TF_CONFIG": config},
            )
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
            return process

        for job in ("ps", "worker"):
            for index, _ in enumerate(cluster.get(job, [])):
                start(job, index, weights if job == "ps" else workers[index], "-m", "tf_dsgd.serve")
        chief = start(
            "chief",
            0,
            weights,
            __file__,
            "--case",
            name,
            "--seed",
            str(seed),
            "--seconds",
            str(seconds),
        )
        deadline = threading.Timer(TIMEOUT_SECONDS + seconds, chief.kill)
        stack.callback(deadline.cancel)
        deadline.start()
        counts, said = {}, []
        for line in chief.stdout:
            said.append(line)
            if line.strip() in ("BEGUN", "DONE"):
                counts[line.strip()] = sum(sum(host.counted()) for host in workers)
            if line.startswith("RESULT"):
                found = json.loads(line.removeprefix("RESULT"))
                moved = counts["DONE"] - counts["BEGUN"]
                # What one worker sends another passes two of the devices.
                found["bytes_per_mini_batch"] = round(moved / found["mini_batches"])
                return {"case": name, "seed": seed, "megabits": megabits, **found}
        raise RuntimeError(f"{name} ended without a result: {''.join(said)}")


def report(results: list[dict]) -> str:
    """Means and standard errors over the seeds."""
    lines = []
    for megabits in dict.fromkeys(row["megabits"] for row in results):
        lines += [
            f"Links of {megabits:g} Mbit/s:",
            "",
            "| what is sent | KB a mini-batch | mini-batches/s | error after that, % |",
            "|---|---|---|---|",
        ]
        for name in CASES:
            rows = [r for r in results if r["case"] == name and r["megabits"] == megabits]
            if not rows:
                continue
            sent = [row["bytes_per_mini_batch"] / 1e3 for row in rows]
            speed = [row["mini_batches"] / row["seconds"] for row in rows]
            errors = [row["error"] for row in rows]
            cells = [name, _mean(sent, 0), _mean(speed, 1), _mean(errors, 2)]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _mean(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:,.{digits}f}"
    error = np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):,.{digits}f} ± {error:.{digits}f}"


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--megabits", default="100", help="of each link; several with commas")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # as the chief of one run
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        train(options.case, options.seed, options.seconds)
        return
    results = []
    if options.json and Path(options.json).exists():  # goes on where it was cut off
        results = json.loads(Path(options.json).read_text())["results"]
    done = {(row["megabits"], row["seed"], row["case"]) for row in results}
    for which in itertools.product(
        setting.numbers(options.megabits, float), setting.numbers(options.seeds), CASES
    ):
        megabits, seed, name = which
        if which in done or options.only not in name:
            continue
        try:
            results.append(run(name, seed, megabits, options.seconds))
        except PermissionError as error:
            parser.error(f"hosts of their own need Linux, root, ip and tc. {error}")
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        runs.write_json(options.json, {**runs.provenance(), "results": results})
    setting.finish(options, results, report, None)


if __name__ == "__main__":
    main()
