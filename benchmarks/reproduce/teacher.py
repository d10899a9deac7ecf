"""A task made by a random network, and training on it through `fit`.

A network 32-16-10 (tanh) of each seed's own says which class a standard normal input has: that of
its largest output, and with probability 0.1 any class. 20,000 examples are there to train on and
10,000 to judge by, whose labels are not replaced. The student is a network 32-64-10 (relu).

Runs that differ in rate and seed alone are trained together (side_by_side.py).
"""

import setting  # isort: skip (finds the package and `runs`)

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import side_by_side
import tensorflow as tf
from keras import ops

import tf_dsgd

_ = setting

BATCH = 16
"""Of one worker's mini-batch."""
INPUTS, TEACHER, STUDENT, CLASSES = 32, 16, 64, 10
TRAINED, HELD_OUT, NOISE = 20_000, 10_000, 0.1


class Falling(side_by_side.Rates):
    """To a tenth at half, and again at three quarters, of the steps."""

    def __init__(self, rates: list[float], steps: int):
        super().__init__(rates)
        self.steps = steps

    def __call__(self, step: Any) -> tf.Tensor:
        drops = sum(tf.cast(step >= self.steps * k // 4, tf.float32) for k in (2, 3))
        return super().__call__(step) * 0.1**drops


def taught(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes; the held-out ones, last, have no noise."""
    random = np.random.default_rng(seed)
    first = random.standard_normal((INPUTS, TEACHER)) / INPUTS**0.5
    second = random.standard_normal((TEACHER, CLASSES))
    x = random.standard_normal((TRAINED + HELD_OUT, INPUTS))
    y = np.argmax(np.tanh(2 * x @ first) @ second, 1)
    wrong = random.random(len(y)) < NOISE
    wrong[TRAINED:] = False
    return x.astype("float32"), np.where(wrong, random.integers(0, CLASSES, len(y)), y)


def order(seed: int, count: int) -> np.ndarray:
    """The first `count` examples in a seed's order of training, each once before any again."""
    random = np.random.default_rng([seed, TRAINED])
    epochs = -(-count // TRAINED)
    return np.concatenate([random.permutation(TRAINED) for _ in range(epochs)])[:count]


def of_seeds(seeds: Sequence[int], count: int) -> tuple[dict, dict]:
    """Of each seed its `count` examples in the order of training, and its held-out ones."""
    trained, held = {}, {}
    for seed in seeds:
        x, y = taught(seed)
        rows = order(seed, count)
        trained[seed], held[seed] = (x[rows], y[rows]), (x[TRAINED:], y[TRAINED:])
    return trained, held


class Task:
    """Every seed's data: x `[examples, seeds, inputs]`, y `[examples, seeds]`."""

    def __init__(self, seeds: Sequence[int]):
        self.seeds = list(seeds)
        x, y = (np.stack(part, 1) for part in zip(*map(taught, self.seeds), strict=True))
        self.x, self.x_held = x[:TRAINED], x[TRAINED:]
        self.y, self.y_held = y[:TRAINED], y[TRAINED:]

    def order(self, count: int) -> np.ndarray:
        """Each seed's first `count` examples in its order of training, `[count, seeds]`."""
        return np.stack([order(seed, count) for seed in self.seeds], 1)

    def batches(self, batch_size: int, steps: int) -> tf.data.Dataset:
        """All mini-batches as one epoch, so that nothing meets early at the ends of epochs."""
        x, y = tf.constant(np.swapaxes(self.x, 0, 1)), tf.constant(self.y.T)
        data = tf.data.Dataset.from_tensor_slices(self.order(batch_size * steps))
        data = data.batch(batch_size, drop_remainder=True)

        def of_each_seed(whole: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
            found = tf.gather(whole, tf.transpose(rows), batch_dims=1)
            return tf.transpose(found, [1, 0, *range(2, len(whole.shape))])

        return data.map(lambda i: (of_each_seed(x, i), of_each_seed(y, i))).prefetch(64)


def simulated(workers: int, compute: object = 1.0) -> tf_dsgd.SimulatedCluster:
    """Workers on a virtual clock, by default of one speed; messages take no time."""
    return tf_dsgd.SimulatedCluster(workers, compute_seconds=compute, seed=1)


def train(
    strategy: Any,
    optimizer: Callable[[Any], keras.optimizers.Optimizer],
    rates: Sequence[float],
    task: Task,
    batch_size: int,
    steps: int,
) -> dict:
    """Trains every rate and seed through `fit`, for `steps` mini-batches over all workers.

    Args:
        strategy: None for plain Keras.
        optimizer: from a learning rate to an optimizer.
        rates: the first ones; they fall with the mini-batches.
        task: the data.
        batch_size: of one worker's mini-batch.
        steps: mini-batches.

    Returns:
        `error`, held out, in per cent; `loss`, the held-out cross-entropy in the mean over the
        noise that training labels have; both `[rates][seeds]`, where what is not finite counts as
        wrong everywhere.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    scope = contextlib.nullcontext() if strategy is None else strategy.scope()
    with scope:
        model = keras.Sequential(
            [
                keras.Input((len(task.seeds), INPUTS)),
                keras.layers.Lambda(lambda x: ops.swapaxes(x, 0, 1)[None]),
                side_by_side.Dense(len(rates), task.seeds, STUDENT, "relu"),
                side_by_side.Dense(len(rates), task.seeds, CLASSES),
            ]
        )
        model.compile(
            optimizer(Falling(list(rates), steps)),
            loss=lambda y, logits: ops.sum(side_by_side.cross_entropy(y, logits)),
            steps_per_execution=min(steps, 32),
        )
    model.fit(task.batches(batch_size, steps), shuffle=False, verbose=0)
    if strategy is not None and strategy.steps != steps:
        raise RuntimeError(f"{strategy.steps} mini-batches were done, not {steps}.")
    return judge(np.array(model(task.x_held)), task.y_held.T)


def judge(logits: np.ndarray, y: np.ndarray) -> dict:
    """Errors and losses of logits `[rates, seeds, examples, k]` where y `[seeds, examples]`."""
    finite = np.isfinite(logits).all(-1)
    logits = np.where(finite[..., None], logits, 0.0)
    logs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logs -= logits.max(-1, keepdims=True)
    right = np.take_along_axis(logs, np.broadcast_to(y, logs.shape[:-1])[..., None], -1)[..., 0]
    loss = -(1 - NOISE) * right - NOISE * logs.mean(-1)
    wrong = (logits.argmax(-1) != y) | ~finite
    return {"error": (100.0 * wrong.mean(-1)).tolist(), "loss": loss.mean(-1).tolist()}
