"""What compressed messages bring over a real, slow link: the error after so many seconds.

    python benchmarks/reproduce/slow_link.py

Strom (Interspeech 2015) compresses what workers send since links are slow. strom.py has that in
virtual time; here two worker processes are on hosts of their own (network namespaces, so Linux and
root), each behind a link of so many Mbit/s in each direction; chief and ps, which hold the weights,
are on a third. Every case trains the same network 128-512-512-10 (333,834 parameters, 1.3 MB) for
so many seconds after its first epoch: SGD at one rate for all, mini-batches of 64, a push after
every mini-batch and a fetch after every fourth, but where a case says otherwise; peers send to one
another and fetch nothing. The classes are what a random network 128-16-10 says, a tenth of the
labels are wrong; no example comes twice in 12,000 mini-batches. Held-out error and mini-batches are
counted at the end; bytes are those of the workers' network devices, with the chief's mini-batches
(33 KB each), TCP's and IP's headers in them.
"""

import driver  # isort: skip (finds the package)

import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time

import hosts
import keras
import numpy as np
import runs

import tf_dsgd
from tf_dsgd import compression

SIZE, BATCH, HELD_OUT, EPOCH, MOST = 128, 64, 10_000, 32, 12_000
RATE = 0.2
TIMEOUT_SECONDS = 300.0
AS_CHIEF = "--as-chief"
PEERS = "peers, Threshold 0.064"  # of the gradient, as the others'


def downpour(codec=None, push_every=1, fetch_every=4):
    return tf_dsgd.DownpourStrategy(
        tf_dsgd.TFCluster(), push_every=push_every, fetch_every=fetch_every, compression=codec
    )


CASES = {
    "none": downpour,
    "none, pushes every 4": lambda: downpour(push_every=4),
    "none, both every 20": lambda: downpour(push_every=20, fetch_every=20),
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
def over_links(name: str, seed: int, megabits: float, seconds: float) -> dict:
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
            *(__file__, AS_CHIEF, name, str(seed), str(seconds)),
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
                return found
        raise RuntimeError(f"{name} ended without a result: {''.join(said)}")


def run(condition, seeds, rates, options) -> dict:
    """On a machine with nothing beside it."""
    each = []
    for seed in seeds:
        found = over_links(condition["sent"], seed, condition["link"], options.for_seconds)
        each.append(
            {
                "error": found["error"],
                "mini_batches_per_second": found["mini_batches"] / found["seconds"],
                "kilobytes_per_mini_batch": found["bytes_per_mini_batch"] / 1e3,
            }
        )
    return {name: [[found[name] for found in each]] for name in each[0]}


STUDY = driver.Study(
    name="slow_link",
    conditions=[{"sent": name, "link": 100} for name in CASES],
    grid=lambda condition: (0, 0),
    run=run,
    options={"for_seconds": (30, 5)},
    seeds=5,
)

if __name__ == "__main__":
    if sys.argv[1:2] == [AS_CHIEF]:
        case, number, length = sys.argv[2:]
        train(case, int(number), float(length))
    else:
        try:
            driver.main(STUDY, __doc__)
        except PermissionError as error:
            raise SystemExit(f"Hosts of their own need Linux, root, ip and tc. {error}") from error
