"""Periodic averaging of workers' parameters, and what has been made of it.

    worker k:  w_k <- optimizer_k(w_k, g)        tau times, with slots of its own
               send w_k;  wait for the others;  w_k <- w
    shard:     mean = sum_k n_k w_k / sum_k n_k
               w <- mean,  or  w <- outer(w, w - mean)

tau = `average_every`, n_k = the mini-batches that worker k did since the last average: tau, except
where the data end. So a worker's part goes by its work, as in FedAvg (McMahan et al., AISTATS 2017,
algorithm 1); n_k = tau for all gives the plain mean of local SGD.

    local SGD         no outer optimizer
    BMUF              outer = momentum SGD, of momentum eta and rate zeta: -(w - mean) is the
                      paper's G(t) (Chen, Huo, ICASSP 2016)
    DiLoCo            outer = Nesterov SGD, the optimizer is AdamW (Douillard et al. 2023)

Other state of layers, and by `slots="average"` what the optimizer keeps, are averaged alike; the
outer optimizer is for the trainable weights alone. BatchNorm's moving statistics are averaged so
that each mini-batch counts as it would in one process; see `tf_dsgd.engine.statistics`.

Of what workers have no copies of, they send the sum of the gradients since the last average, and
the shard steps on each message as it comes (half-synchronous: Lian et al., KDD 2022):

    worker k:  accrued <- accrued + g;     send accrued with w_k
    shard:     t <- optimizer(t, accrued)  at each message, before the others have sent
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_dsgd import algorithm, arithmetic, checks
from tf_dsgd.accumulators import Accumulator
from tf_dsgd.arithmetic import Gradient


@dataclasses.dataclass(frozen=True)
class SendWeights(algorithm.LocalRule):
    """The compiled optimizer runs on the worker, which sends its weights and takes the mean.

    `slots` is what becomes of the optimizer's state at an average: `"average"`, `"local"` (each
    worker keeps its own) or `"reset"`.
    """

    sends = "state"
    sends_statistics = True
    slots: str = "average"

    @property
    def sends_slots(self) -> bool:  # type: ignore[override]
        return self.slots == "average"

    @property
    def repeatable(self) -> bool:  # type: ignore[override]
        return self.slots != "local"

    def step(self, worker: algorithm.Worker, gradients: Sequence[Gradient]) -> None:
        """The optimizer has already changed what the worker has copies of."""
        for i, gradient in enumerate(gradients):
            _accrued(worker, i).add(gradient)

    def message(self, worker: algorithm.Worker) -> list[Gradient]:
        return [
            tf.identity(weight.read_value()) if worker.is_copied(i) else _accrued(worker, i).take()
            for i, weight in enumerate(worker.weights)
        ]

    def fetched(self, worker: algorithm.Worker, values: Sequence[Gradient]) -> None:
        for weight, value in zip(worker.weights, values, strict=True):
            arithmetic.write(weight, value)
        if self.slots == "reset":
            worker.reset_optimizer()


def _accrued(worker: algorithm.Worker, index: int) -> Accumulator:
    return Accumulator(worker, "accrued", index)


@dataclasses.dataclass(frozen=True)
class Together(algorithm.ExchangeRule):
    """All workers send every so many mini-batches, and none goes on before all have sent.

    `period`, if any, gives the mini-batches to the next average from those that the worker has
    done since the last drain (post-local SGD: Lin, Stich, Patel, Jaggi, ICLR 2020).
    """

    push_every: int = 1 << 16
    fetch_every: int = 1 << 16
    period: Callable[[int], int] | None = None
    begun: int = 0
    """Mini-batches that each worker had done at the last drain, as far as they are equal."""

    def since(self, steps: int) -> Together:
        return self if self.period is None else dataclasses.replace(self, begun=steps)

    def steps_to_event(self, step: int) -> int:
        if self.period is None:
            return super().steps_to_event(step)
        return self._averages.after(step) - step

    def push_due(self, step: int) -> bool:
        return super().push_due(step) if self.period is None else self._averages.at(step)

    fetch_due = push_due

    @functools.cached_property
    def _averages(self) -> _Averages:
        return _Averages(self.period, self.begun)  # type: ignore[arg-type]

    @property
    def bounds_staleness(self) -> bool:
        return True

    def may_start(self, clock: int, slowest: int) -> bool:
        return clock <= slowest


class _Averages:
    """The steps, from `begun` on, at which a changing period has averages."""

    def __init__(self, period: Callable[[int], int], begun: int):
        self._period = period
        self._begun = begun
        self._steps = [0]

    def after(self, step: int) -> int:
        """The first one after `step`."""
        self._extend(step + 1)
        return self._steps[bisect.bisect_right(self._steps, step)]

    def at(self, step: int) -> bool:
        """Whether there is one at `step`."""
        self._extend(step)
        return self._steps[bisect.bisect_left(self._steps, step)] == step

    def _extend(self, step: int) -> None:
        """Asks for periods until there is an average at `step` or later, and no further."""
        while self._steps[-1] < step:
            now = self._begun + self._steps[-1]
            self._steps.append(self._steps[-1] + checks.period(self._period, now))


@dataclasses.dataclass(frozen=True)
class WeightedMean(algorithm.ServerRule):
    """w <- mean, or outer(w, w - mean), at the first fetch of a worker whose weights are in it.

    The barrier lets that worker fetch only when all others have sent, too. One that joins while
    others have sent already sees the weights that they began with.
    """

    averages_statistics = True

    def receive(self, shard: algorithm.Shard, message: algorithm.Message) -> bool:
        share = tf.cast(message.steps, tf.float32)
        tables = []
        for i, sent in enumerate(message.tensors):
            if shard.is_copied(i):
                total = _sum(shard, i)
                arithmetic.descend(total, -share, arithmetic.cast(sent, total.dtype))
            else:
                tables.append(sent)
        shard.update_tables(tables)
        shard.counter("collected_steps").assign_add(message.steps, read_value=False)
        arithmetic.set_row(_in_it(shard), message.worker, True)
        return False

    def fetched(self, shard: algorithm.Shard, worker: tf.Tensor) -> tf.Tensor | bool:
        complete = tf.gather(_in_it(shard).read_value(), worker)
        return tf.cond(complete, lambda: _averaged(shard), lambda: False)

    def flush(self, shard: algorithm.Shard) -> tf.Tensor | bool:
        some = shard.counter("collected_steps").read_value() > 0
        return tf.cond(some, lambda: _averaged(shard), lambda: False)


def _sum(shard: algorithm.Shard, index: int) -> tf.Variable:
    dtype = arithmetic.type_of_sums(shard.weights[index].dtype)
    return shard.cell("sum", index, dtype=dtype)


def _in_it(shard: algorithm.Shard) -> tf.Variable:
    return shard.counter("in_it", tf.bool, per_worker=True)


def _averaged(shard: algorithm.Shard) -> tf.Tensor:
    return shard.once("average", lambda: _average(shard))


def _average(shard: algorithm.Shard) -> bool:
    steps = shard.counter("collected_steps")
    count = tf.identity(steps.read_value())
    differences = []
    averaged = [i for i in range(len(shard.weights)) if shard.is_copied(i)]
    for i in averaged:
        weight, total = shard.weights[i], _sum(shard, i)
        mean = total.read_value() / tf.cast(count, total.dtype)
        if shard.has_optimizer and shard.is_trained(i):
            difference = tf.cast(weight.read_value(), mean.dtype) - mean
            differences.append(tf.cast(difference, weight.dtype))
        else:
            weight.assign(tf.cast(mean, weight.dtype), read_value=False)
    if shard.has_optimizer:
        shard.optimize(differences)
    shard.average_statistics()
    for total in (_sum(shard, i) for i in averaged):
        total.assign(tf.zeros_like(total), read_value=False)
    _in_it(shard).assign(tf.zeros([shard.num_workers], tf.bool), read_value=False)
    shard.count_updates(iterations_in(shard, count, shard.steps - count))
    steps.assign(0, read_value=False)
    return True


def iterations_in(shard: algorithm.Shard, steps: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """The optimizer's iterations that `steps` mini-batches are, after `before` of them.

    They are those of one worker, as far as all do the same: bias corrections go by them.
    """
    return (before + steps) // shard.num_workers - before // shard.num_workers
