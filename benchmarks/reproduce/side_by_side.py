"""Many runs in one model: of several rates and several seeds, under one schedule.

What the optimizers of these studies do to a weight depends on that weight's own gradients alone.
So runs that differ in rate, first weights and data, and in nothing else, can be trained together:
every weight has two axes more, `[rates, seeds, ...]`, every run sees its own seed's data, and the
loss is the sum of all runs' losses, of which each run's gradient is its own. The learning rate is a
tensor. One run of `tf_dsgd.simulation.study` does what would be `rates * seeds` of them.
"""

import setting  # isort: skip (finds the package)

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tf_dsgd
from tf_dsgd.simulation.study import Study

_ = setting


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """Of each run its own; constant."""

    def __init__(self, rates: Sequence[float]):
        self.rates = [float(rate) for rate in rates]

    def __call__(self, step: Any) -> tf.Tensor:
        return tf.constant(self.rates)[:, None, None, None]

    def get_config(self) -> dict:
        return {"rates": self.rates}


class Drawn(keras.layers.Layer):
    """A layer whose first weights follow from a seed."""

    def draw(self, seeds: Sequence[int]) -> None:
        """The first weights of other seeds, as many as before."""
        raise NotImplementedError


class Dense(Drawn):
    """`[..., seeds, batch, inputs]` by `[rates, seeds, inputs, outputs]`.

    `glorot` with a seed of its own for each seed of the study, the same for all rates; else 0.
    """

    def __init__(
        self, rates: int, seeds: Sequence[int], units: int, activation=None, glorot=True, bias=True
    ):
        super().__init__()
        self.rates, self.seeds, self.units = rates, list(seeds), units
        self.activation = keras.activations.get(activation)
        self.glorot, self.with_bias = glorot, bias

    def build(self, shape: Sequence[int]) -> None:
        self._whole = [self.rates, len(self.seeds), shape[-1], self.units]
        first = self._drawn(self.seeds)
        self.kernel = self.add_weight(
            shape=self._whole,
            initializer=lambda whole, dtype=None: ops.convert_to_tensor(first, dtype),
        )
        if self.with_bias:
            runs = self._whole[:2]
            self.bias = self.add_weight(shape=[*runs, 1, self.units], initializer="zeros")

    def _drawn(self, seeds: Sequence[int]) -> np.ndarray:
        if not self.glorot:
            return np.zeros(self._whole)
        inputs, outputs = self._whole[2:]
        limit = np.sqrt(6.0 / (inputs + outputs))
        draws = [
            np.random.default_rng([seed, inputs, outputs]).uniform(-limit, limit, (inputs, outputs))
            for seed in seeds
        ]
        return np.broadcast_to(np.stack(draws), self._whole)

    def draw(self, seeds: Sequence[int]) -> None:
        self.kernel.assign(self._drawn(seeds))

    def call(self, x: Any) -> Any:
        y = ops.matmul(x, self.kernel)
        return self.activation(y + self.bias if self.with_bias else y)


class Convolution(Drawn):
    """Three by three pixels of a square image `[..., seeds, batch, pixels]`, without padding."""

    def __init__(self, rates: int, seeds: Sequence[int], side: int, filters: int):
        super().__init__()
        self.dense = Dense(rates, seeds, filters, "relu")
        places = np.arange(side * side).reshape(side, side)
        windows = np.lib.stride_tricks.sliding_window_view(places, (3, 3))
        self.places = windows.reshape(-1).astype("int32")

    def build(self, shape: Sequence[int]) -> None:
        self.dense.build((*shape[:-2], None, 9))

    def draw(self, seeds: Sequence[int]) -> None:
        self.dense.draw(seeds)

    def call(self, x: Any) -> Any:
        shape = ops.shape(x)
        count = len(self.places) // 9
        windows = ops.take(x, self.places, -1)
        y = self.dense(ops.reshape(windows, [*shape[:-2], shape[-2] * count, 9]))
        return ops.reshape(y, [*ops.shape(y)[:2], shape[-2], count * self.dense.units])


class Recurrent(Drawn):
    """h = tanh(x_t W + h U + b) over `steps` equal parts of the inputs; the last h."""

    def __init__(self, rates: int, seeds: Sequence[int], steps: int, units: int):
        super().__init__()
        self.steps = steps
        self.of_input = Dense(rates, seeds, units)
        self.of_state = Dense(rates, seeds, units, bias=False)

    def build(self, shape: Sequence[int]) -> None:
        self.of_input.build((*shape[:-1], shape[-1] // self.steps))
        self.of_state.build((*shape[:-1], self.of_state.units))

    def draw(self, seeds: Sequence[int]) -> None:
        self.of_input.draw(seeds)
        self.of_state.draw(seeds)

    def call(self, x: Any) -> Any:
        first, *others = (self.of_input(part) for part in ops.split(x, self.steps, -1))
        state = ops.tanh(first)
        for part in others:
            state = ops.tanh(part + self.of_state(state))
        return state


class Losses(keras.metrics.Metric):
    """The sum of each run's losses, in training; `[rates, seeds]`."""

    def __init__(self, loss: Callable[[Any, Any], Any], runs: Sequence[int]):
        super().__init__(name="losses")
        self.loss = loss
        self.total = self.add_variable(runs, "zeros", name="total")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        del sample_weight
        self.total.assign(self.total + self.loss(y, prediction))

    def result(self) -> Any:
        return ops.mean(self.total)


def cross_entropy(y: Any, logits: Any) -> Any:
    """Each run's mean over the mini-batch: y `[batch, seeds]`, logits `[rates, seeds, batch, k]`.

    With one logit y is 0 or 1, with several the class.
    """
    y = ops.swapaxes(y, 0, 1)
    if logits.shape[-1] == 1:
        y = ops.cast(y, "float32")
        each = tf.nn.sigmoid_cross_entropy_with_logits(
            tf.broadcast_to(y, ops.shape(logits)[:-1]), logits[..., 0]
        )
    else:
        hot = ops.one_hot(ops.cast(y, "int32"), logits.shape[-1])
        each = -ops.sum(hot * ops.log_softmax(logits), axis=-1)
    return ops.mean(each, axis=-1)


class Runs:
    """A study of `rates x seeds` runs; x `[examples, seeds, inputs]`, y `[examples, seeds]`.

    Args:
        strategy: whose rules are meant.
        num_workers: number of workers.
        optimizer: from a learning rate to an optimizer.
        layers: from (rates, seeds) to the layers.
        jit_compile: whether XLA compiles the loop: faster for mini-batches of one, slower for
            larger ones, whose products of matrices it does one by one.
    """

    def __init__(
        self,
        strategy: tf_dsgd.DownpourStrategy,
        num_workers: int,
        optimizer: Callable[[Any], keras.optimizers.Optimizer],
        rates: Sequence[float],
        seeds: Sequence[int],
        layers: Callable[[int, Sequence[int]], list[Any]],
        x: np.ndarray,
        y: np.ndarray,
        batch_size: int,
        jit_compile: bool = False,
    ):
        def make_model() -> keras.Model:
            to_front = keras.layers.Lambda(lambda x: ops.swapaxes(x, 0, 1)[None])
            model = keras.Sequential(
                [keras.Input(x.shape[1:]), to_front, *layers(len(rates), seeds)]
            )
            self._losses = Losses(cross_entropy, [len(rates), len(seeds)])
            model.compile(
                optimizer(Rates(rates)),
                loss=lambda y, logits: ops.sum(cross_entropy(y, logits)),
                metrics=[self._losses],
            )
            return model

        self.study = Study(
            strategy.algorithm, num_workers, make_model, x, y, batch_size, jit_compile
        )

    def train(self, schedule: Sequence[Any]) -> np.ndarray:
        """Each run's mean loss in training, `[rates, seeds]`."""
        self.study.run(schedule)
        return np.array(self._losses.total) / self.study.strategy.updates

    def logits(self, x: np.ndarray) -> np.ndarray:
        """`[rates, seeds, examples, k]`."""
        return np.array(self.study.model(x))


def round_robin(delay: int, updates: int) -> list[tuple[int, str]]:
    """A schedule in which every gradient is applied `delay` updates after its weights were read.

    Of delay + 1 workers each in turn pushes and at once fetches anew. The first delay + 1 messages
    are computed on the first weights, so that the k-th of them, from 0, is only k updates stale.
    """
    workers = delay + 1
    turns = [(k % workers, action) for k in range(updates) for action in ("push", "fetch")]
    return [*((m, "fetch") for m in range(workers)), *turns]


def joined(timetable: Sequence[Any]) -> list[tuple]:
    """A timetable in which every push names its mini-batches, so that it can be cut anywhere."""
    taken: dict[int, list[int]] = {}
    entries: list[tuple] = []
    for worker, action, *what in timetable:
        if action == "fetch":
            entries.append((worker, action))
            continue
        taken.setdefault(worker, []).extend(what[0] if what else ())
        if action == "push":
            entries.append((worker, action, tuple(taken.pop(worker))))
    return entries


def cut(schedule: Sequence[tuple], counts: Sequence[int]) -> list[list[tuple]]:
    """The schedule cut after so many pushes of it, and what is left."""
    pushes = [place for place, entry in enumerate(schedule) if entry[1] == "push"]
    ends = [pushes[count - 1] + 1 if count else 0 for count in counts]
    # A push and the fetch after it stay together.
    ends = [
        e + (0 < e < len(schedule) and schedule[e][:2] == (schedule[e - 1][0], "fetch"))
        for e in ends
    ]
    return [list(schedule[a:b]) for a, b in itertools.pairwise([0, *ends, len(schedule)])]


def pieces(schedule: Sequence[tuple], count: int) -> list[list[tuple]]:
    """The schedule cut into this many pieces of equally many pushes."""
    pushes = sum(entry[1] == "push" for entry in schedule)
    return cut(schedule, [pushes * k // count for k in range(1, count)])


def digits(seeds: Sequence[int], epochs: int) -> tuple[np.ndarray, ...]:
    """x, y in each seed's own order, anew in every epoch, and each seed's held-out part.

    scikit-learn's handwritten digits: 1,437 images of 64 pixels to train on, 360 held out.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    parts = []
    for seed in seeds:
        split = train_test_split(x, y, test_size=360, random_state=seed, stratify=y)
        random = np.random.default_rng(seed)
        order = np.concatenate([random.permutation(len(split[0])) for _ in range(epochs)])
        parts.append((split[0][order], split[2][order], split[1], split[3]))
    return tuple(np.stack(part, 1) for part in zip(*parts, strict=True))
