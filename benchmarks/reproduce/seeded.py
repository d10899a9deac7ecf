"""One traced study for many seeds: each with data, order, first weights and delays of its own.

The rates of a seed are trained side by side (side_by_side.py), one seed after the other. A seed's
timetable is its own, so that its delays are; between seeds every variable gets back what it had.
"""

import setting  # isort: skip (finds the package and `runs`)

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import side_by_side
import teacher

import tf_dsgd
from tf_dsgd.simulation.study import Timetable, timetable

_ = setting


class Seeds:
    """A strategy's rules on simulated workers, for one seed at a time.

    Args:
        strategy: whose rules are meant.
        cluster: from a seed to the simulated cluster that makes its delays.
        optimizer: from a learning rate to an optimizer.
        rates: of the runs side by side.
        layers: from (rates, [seed]) to the layers.
        data: of each seed x `[examples, ...]` and y `[examples]`, in the order of training; all
            have as many. Mini-batches begin anew when no whole one is left.
        batch_size: of one worker's mini-batch.
        jit_compile: whether XLA compiles the loop.
    """

    def __init__(
        self,
        strategy: tf_dsgd.DownpourStrategy,
        cluster: Callable[[int], tf_dsgd.SimulatedCluster],
        optimizer: Callable[[Any], keras.optimizers.Optimizer],
        rates: Sequence[float],
        layers: Callable[[int, Sequence[int]], list[Any]],
        data: Mapping[int, tuple[np.ndarray, np.ndarray]],
        batch_size: int,
        jit_compile: bool = False,
    ):
        self.seeds = list(data)
        self._exchange = strategy.algorithm.exchange
        self._cluster = cluster
        whole = {seed: len(x) // batch_size for seed, (x, _) in data.items()}
        (self._batches,) = set(whole.values())
        kept = self._batches * batch_size
        x, y = (
            np.concatenate([part[which][:kept] for part in data.values()])[:, None]
            for which in (0, 1)
        )
        self._runs = side_by_side.Runs(
            strategy,
            cluster(self.seeds[0]).num_workers,
            optimizer,
            rates,
            self.seeds[:1],
            layers,
            x,
            y,
            batch_size,
            jit_compile,
        )
        self._runs.study.begin_anew()  # so that it knows what is first

    def timetable(self, seed: int, updates: int) -> Timetable:
        """Of this many mini-batches over all workers."""
        return timetable(self._cluster(seed), self._exchange, updates)

    def train(self, seed: int, updates: int) -> np.ndarray:
        """Each rate's mean loss in training, from first weights on."""
        self.begin(seed)
        return self.go(self.entries(seed, self.timetable(seed, updates)))

    def begin(self, seed: int) -> None:
        """All is as it was at first; the first weights are this seed's."""

        def draw() -> None:
            for layer in self.model.layers:
                if isinstance(layer, side_by_side.Drawn):
                    layer.draw([seed])

        self._runs.study.begin_anew(draw)

    def entries(self, seed: int, schedule: Sequence[Any]) -> list[tuple]:
        """A schedule on this seed's mini-batches, which can be cut after any fetch."""
        whole, all_batches = self._batches, self._batches * len(self.seeds)
        offset = self.seeds.index(seed) * whole

        def of_seed(worker: int, action: str, numbers: Sequence[int] | None = None) -> tuple:
            if numbers is None:
                return worker, action
            # A study takes them modulo all that there are; each number may be used once.
            turns = (divmod(b, whole) for b in numbers)
            return worker, action, tuple(turn * all_batches + offset + b for turn, b in turns)

        return [of_seed(*entry) for entry in side_by_side.joined(schedule)]

    def go(self, entries: Sequence[tuple]) -> np.ndarray:
        """Goes on by these; the mean loss in training so far."""
        return self._runs.train(entries)[:, 0]

    def judged(
        self, updates: int, held: Mapping[int, tuple[np.ndarray, np.ndarray]], parts: int = 1
    ) -> dict:
        """All seeds in turn, each from its first weights on, judged at the end: `merged`.

        And before, as `error_1` and so on, at the ends of so many equal parts.
        """
        each = []
        for seed in self.seeds:
            self.begin(seed)
            whole = self.entries(seed, self.timetable(seed, updates))
            values = {}
            for k, part in enumerate(side_by_side.pieces(whole, parts), 1):
                self.go(part)
                at = judged(self.logits(held[seed][0]), held[seed][1])
                values |= at if k == parts else {f"error_{k}": at["error"]}
            each.append(values)
        return merged(each)

    @property
    def model(self) -> keras.Model:
        return self._runs.study.model

    @property
    def strategy(self) -> Any:
        return self._runs.study.strategy

    def logits(self, x: np.ndarray) -> np.ndarray:
        """`[rates, examples, k]`, of a seed's x."""
        return self._runs.logits(x[:, None])[:, 0]


def judged(logits: np.ndarray, y: np.ndarray) -> dict[str, list[list[float]]]:
    """Error in per cent and cross-entropy, `[rates][1]`; what is not finite knows nothing.

    A loss above 100 counts as 100, so that one run that diverged does not stand for all seeds.
    """
    finite = np.isfinite(logits).all((-1, -2))
    logits = np.where(finite[:, None, None], logits, 0.0).astype("float64")
    logs = logits - logits.max(-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    right = np.take_along_axis(logs, np.broadcast_to(y, logs.shape[:-1])[..., None], -1)
    chance = 100.0 * (1.0 - 1.0 / logits.shape[-1])
    error = np.where(finite, 100.0 * (logits.argmax(-1) != y).mean(-1), chance)
    loss = np.minimum(-right.mean((1, 2)), 100.0)
    return {"error": error[:, None].tolist(), "loss": loss[:, None].tolist()}


def merged(each: Sequence[Mapping[str, list[list[float]]]]) -> dict[str, list[list[float]]]:
    """Of seeds one by one, `[rates][seeds]`."""
    return {name: np.concatenate([e[name] for e in each], 1).tolist() for name in each[0]}


def digits(seeds: Sequence[int], epochs: int) -> tuple[dict, dict]:
    """scikit-learn's digits: of each seed its order of training, and its held-out part."""
    parts = side_by_side.digits(seeds, epochs)
    trained = {s: (parts[0][:, k], parts[1][:, k]) for k, s in enumerate(seeds)}
    held = {s: (parts[2][:, k], parts[3][:, k]) for k, s in enumerate(seeds)}
    return trained, held


def exponential(workers: int, seed: int = 1) -> tf_dsgd.SimulatedCluster:
    """Workers of one mean speed, a second a mini-batch; messages take no time."""
    return tf_dsgd.SimulatedCluster(workers, compute_seconds=tf_dsgd.Exponential(1.0), seed=seed)


def taught(
    strategy: tf_dsgd.DownpourStrategy,
    workers: int,
    optimizer: Callable[[Any], keras.optimizers.Optimizer],
    rates: Sequence[float],
    seeds: Sequence[int],
    updates: int,
    batch_size: int = teacher.BATCH,
    parts: int = 1,
) -> dict:
    """The dense task of teacher.py on `exponential` workers: `Seeds.judged`."""
    trained, held = teacher.of_seeds(seeds, batch_size * updates)
    study = Seeds(
        strategy,
        lambda seed: exponential(workers, seed),
        optimizer,
        rates,
        mlp([teacher.STUDENT, teacher.CLASSES]),
        trained,
        batch_size,
    )
    return study.judged(updates, held, parts)


def mlp(units: Sequence[int], activation: str = "relu") -> Callable[[int, Sequence[int]], list]:
    """Of a network of dense layers, the last without activation."""

    def layers(rates: int, seeds: Sequence[int]) -> list[Any]:
        *hidden, last = units
        made = [side_by_side.Dense(rates, seeds, count, activation) for count in hidden]
        return [*made, side_by_side.Dense(rates, seeds, last)]

    return layers
