"""The line that `fit` says at its end, as its progress bar is on: how fast, how stale, and why."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import keras
from absl import logging

from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.timing import KINDS
from tf_dsgd.strategies.dataset import InputTime

# A share of the workers' time from which on it is worth a hint.
_MUCH = 0.4


@dataclasses.dataclass(frozen=True)
class Account:
    """What one `fit` did, from its first mini-batch on."""

    interval: Snapshot
    input_seconds: float
    """For how long the main thread waited for data."""
    virtual: bool
    """Whether seconds are a simulated cluster's, in which nothing waits for data."""
    bounds_staleness: bool
    """Whether workers wait for each other by the strategy's rule."""
    arguments: tuple[str, ...]
    """Names of the strategy's arguments."""
    steps_per_execution: int

    @property
    def shares(self) -> dict[str, float]:
        """What workers' time went to: fractions of 1, of each of `KINDS`; zeros if of none."""
        spent = self.interval.spent.sum(0)
        return dict(zip(KINDS, (spent / (spent.sum() or 1.0)).tolist(), strict=True))

    def line(self) -> str:
        """All of it, and a hint if there is one."""
        steps, seconds = self.interval.steps, self.interval.seconds
        rate = steps / seconds if seconds > 0 else float("nan")
        parts = ", ".join(f"{kind} {share:.0%}" for kind, share in self.shares.items())
        line = (
            f"{steps} mini-batches, {rate:.4g} a {'virtual ' * self.virtual}second; "
            f"mean staleness {self.interval.shards[0].staleness().mean:.2f}; workers: {parts}."
        )
        hint = self.hint()
        return f"{line} {hint}" if hint else line

    def hint(self) -> str | None:
        """What to do about the largest loss, if one is large and something can be done."""
        shares = self.shares
        periods = [name for name in self.arguments if name.endswith("_every")]
        if shares["fetch"] + shares["push"] >= _MUCH and periods:
            return f"A larger {' and '.join(periods)} takes less time for exchange."
        if shares["wait"] < _MUCH or self.virtual:
            return None
        if self.input_seconds >= _MUCH * self.interval.seconds:
            return "Workers waited for input: cache it, or read and prepare it faster."
        if self.bounds_staleness:
            remedies = [name for name in ("max_staleness", *periods) if name in self.arguments]
            return f"Workers waited for the slowest: less, with a larger {remedies[0]}."
        if self.steps_per_execution == 1:
            return "Workers waited for work: compile(steps_per_execution=20) hands it out faster."
        return None


class Summary(keras.callbacks.Callback):
    """Says it at the end of a `fit` whose progress bar is on.

    Args:
        strategy: whose workers train.
    """

    def __init__(self, strategy: Any):
        super().__init__()
        self.engine: Engine = strategy.engine
        self._arguments = tuple(inspect.signature(type(strategy)).parameters)
        self._start: tuple[Snapshot, InputTime, float] | None = None

    def begin(self, input_time: InputTime) -> None:
        """A mini-batch is handed out, of this data; from the first one of a `fit` on all counts."""
        if self._start is None:
            self._start = self.engine.snapshot(), input_time, input_time.seconds

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._start = None  # an error may have ended the `fit` before

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._start is None:
            return
        engine, (before, input_time, waited) = self.engine, self._start
        account = Account(
            engine.snapshot().since(before),
            input_time.seconds - waited,
            engine.virtual_clock,
            engine.scheduler.exchange.bounds_staleness,
            self._arguments,
            int(self.model.steps_per_execution),
        )
        self._start = None
        if keras.config.is_interactive_logging_enabled():
            print(account.line(), flush=True)
        else:
            logging.info(account.line())


def summarize(callbacks: Any, strategy: Any, input_time: InputTime) -> None:
    """Has a `fit` say it, from now on, unless it does or shows no progress bar.

    Args:
        callbacks: the `CallbackList` of that `fit`; something else if there is none.
        strategy: whose workers train.
        input_time: of the data that `fit` trains on.
    """
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return
    if (callbacks.params or {}).get("verbose") not in (1, "auto"):
        return
    for each in callbacks.callbacks:
        if isinstance(each, Summary) and each.engine is strategy.engine:
            summary = each
            break
    else:
        summary = Summary(strategy)
        summary.set_model(callbacks.model)
        callbacks.callbacks.append(summary)
    summary.begin(input_time)
