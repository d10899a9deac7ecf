"""Trains for some seconds on threads and on processes, and compares with plain Keras.

    python -m tf_dsgd selfcheck

Says for each check what it found; the exit code is 0 if all is well, else 1. It takes about half a
minute, and needs no data, no network but this machine's loopback, and no other package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import keras
import numpy as np

from tf_dsgd.cluster import LocalCluster, TFCluster
from tf_dsgd.installed import here
from tf_dsgd.strategies.downpour import DownpourStrategy

EXAMPLES, BATCH, EPOCHS = 512, 16, 3
STEPS = EXAMPLES // BATCH
PROCESSES_SECONDS = 180.0


def _model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def _data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).standard_normal((EXAMPLES, 8)).astype("float32")
    return x, np.tanh(x[:, :1] - x[:, 1:2])


def _fit(model: keras.Model) -> list[float]:
    fitted = model.fit(*_data(), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return [float(loss) for loss in fitted.history["loss"]]


def _train(cluster: Any) -> dict[str, Any]:
    """A fit on a cluster: its losses, and what was counted."""
    strategy = DownpourStrategy(cluster)
    with strategy.scope():
        model = _model()
    losses, ledger = _fit(model), strategy.ledger()
    return {
        "losses": losses,
        "weights": [w.tolist() for w in model.get_weights()],
        "steps": strategy.steps,
        "whole": ledger.sent == ledger.applied + ledger.refused,
    }


def _on_processes() -> dict[str, Any]:
    command = [sys.executable, "-m", "tf_dsgd.launch", "--workers", "2"]
    ended = subprocess.run(
        [*command, "-m", "tf_dsgd.selfcheck", "chief"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=PROCESSES_SECONDS,
        check=False,
    )
    found = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode or not found:
        raise RuntimeError(f"it ended with code {ended.returncode}: {ended.stderr[-2000:]}")
    return dict(json.loads(found[0]))


class _Checks:
    """Says what was found, a line each."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, well: bool, text: str) -> None:
        self.failed += not well
        print("ok    " if well else "FAILED", text, flush=True)

    def training(self, where: str, found: dict[str, Any], plain: list[float]) -> None:
        expected = STEPS * EPOCHS
        counted = found["steps"] == expected and found["whole"]
        self(counted, f"{where}: {found['steps']} of {expected} mini-batches applied, each once")
        first, last, loss = plain[0], plain[-1], found["losses"][-1]
        learnt = loss < 0.5 * (first + last)
        self(learnt, f"{where}: loss {loss:.4f}, plain Keras {first:.4f} to {last:.4f}")


def main() -> int:
    """The program; gives the exit code."""
    if sys.argv[1:] == ["chief"]:
        print(json.dumps(_train(TFCluster())), flush=True)
        return 0
    print(here(), flush=True)
    check, start = _Checks(), time.monotonic()
    model = _model()
    plain, weights = _fit(model), model.get_weights()

    one = _train(LocalCluster(1))
    pairs = zip(one["weights"], weights, strict=True)
    difference = max(float(np.abs(np.array(a) - b).max()) for a, b in pairs)
    check(difference < 1e-6, f"one worker: weights of plain Keras within {difference:.1e}")
    check.training("two threads", _train(LocalCluster(2)), plain)
    try:
        check.training("two processes and a ps", _on_processes(), plain)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        check(False, f"two processes and a ps: {error}")
    print(
        f"{'all is well' if not check.failed else 'not all is well'}, "
        f"after {time.monotonic() - start:.0f} s"
    )
    return min(1, check.failed)


if __name__ == "__main__":
    sys.exit(main())
