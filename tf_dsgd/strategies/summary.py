"""The line that `fit` says at its end, where its progress bar is on: how fast, and how stale."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.timing import KINDS
from tf_dsgd.strategies.stream import InputTime

# A share of the workers' time from which on it is worth a hint.
_MUCH = 0.4
# A share of it up to which it may be unknown what it went to.
_LITTLE = 0.2


@dataclasses.dataclass(frozen=True)
class Account:
    """What one `fit` did."""

    batches: int
    interval: Snapshot
    """From when its first round was under way to its end."""
    input_seconds: float | None
    """For how long the main thread waited for data; None where workers read them."""
    virtual: bool
    """Whether seconds are a simulated cluster's, in which nothing waits for data."""
    bounds_staleness: bool
    """Whether workers wait for each other by the strategy's rule."""
    arguments: tuple[str, ...]
    """Names of the strategy's arguments."""
    steps_per_execution: int

    @property
    def shares(self) -> dict[str, float] | None:
        """What workers' time went to: fractions of 1, of each of `KINDS`; None if not known."""
        spent = self.interval.spent.sum(0)
        if spent.sum() <= 0 or self.interval.undivided > _LITTLE * spent.sum():
            return None
        return dict(zip(KINDS, (spent / spent.sum()).tolist(), strict=True))

    def line(self) -> str:
        """All of it, and a hint if there is one."""
        seconds, shares = self.interval.seconds, self.shares
        rate = self.interval.steps / seconds if seconds > 0 else float("nan")
        line = (
            f"{self.batches} mini-batches, {rate:.4g} a {'virtual ' * self.virtual}second; "
            f"mean staleness {self.interval.shards[0].staleness().mean:.2f}"
        )
        if shares is not None:
            parts = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
            line = f"{line}; workers: {parts}"
        hint = self.hint()
        return f"{line}. {hint}" if hint else f"{line}."

    def hint(self) -> str | None:
        """What to do about the largest loss, if one is large and something can be done."""
        shares = self.shares
        if shares is None:
            return None
        periods = [name for name in self.arguments if name.endswith("_every")]
        if shares["fetch"] + shares["push"] >= _MUCH and periods:
            return f"A larger {' and '.join(periods)} takes less time for exchange."
        if shares["wait"] < _MUCH or self.virtual:
            return None
        if self.bounds_staleness:
            remedies = [name for name in ("max_staleness", *periods) if name in self.arguments]
            return f"Workers waited for the slowest: less, with a larger {remedies[0]}."
        if self.input_seconds is None:
            return None
        if self.input_seconds >= _MUCH * self.interval.seconds:
            return "Workers waited for input: cache it, or read and prepare it faster."
        batch_method = "max_evaluations" in self.arguments  # it hands out all of an epoch at once
        if self.steps_per_execution == 1 and not batch_method:
            return "Workers waited for work: compile(steps_per_execution=20) hands it out faster."
        return None


class Summary(keras.callbacks.Callback):
    """Says it at the end of one `fit`, whose progress bar is on.

    Args:
        strategy: whose workers train.
        callbacks: the list that it is in.
        handed_out: mini-batches handed out before.
    """

    def __init__(self, strategy: Any, callbacks: keras.callbacks.CallbackList, handed_out: int):
        super().__init__()
        self.strategy = strategy
        self._callbacks = callbacks
        self._handed_out = handed_out
        self._start: tuple[Snapshot, InputTime | None, float] | None = None

    def begin(self, input_time: InputTime | None) -> None:
        """Its first round is under way, on this data; None where workers read them."""
        if self._start is None:
            snapshot = _snapshot(self.strategy.engine)
            if snapshot is not None:
                self._start = snapshot, input_time, input_time.seconds if input_time else 0.0

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """The `fit` that it was made for has ended with an error."""
        self._forget()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        strategy, engine = self.strategy, self.strategy.engine
        now = None if self._start is None else _snapshot(engine)
        if self._start is not None and now is not None:
            before, input_time, waited = self._start
            account = Account(
                strategy.batches.handed_out - self._handed_out,
                now.since(before),
                None if input_time is None else input_time.seconds - waited,
                engine.virtual_clock,
                engine.scheduler.exchange.bounds_staleness,
                tuple(inspect.signature(type(strategy)).parameters),
                int(self.model.steps_per_execution),
            )
            if keras.config.is_interactive_logging_enabled():
                print(account.line(), flush=True)
            else:
                logging.info(account.line())
        self._forget()

    def _forget(self) -> None:
        """A list that is used again has another one then."""
        self._start = None
        self._callbacks.callbacks = [c for c in self._callbacks.callbacks if c is not self]


def _snapshot(engine: Any) -> Snapshot | None:
    """None where a task that has counts is lost: whoever needs the model next is told."""
    try:
        with engine.explained():
            return engine.snapshot()
    except (RuntimeError, tf.errors.OpError):
        return None


def summary_of(fit: tuple[Any, Any], strategy: Any, handed_out: int) -> Summary | None:
    """Has a `fit` end with that line; None if it shows no progress bar.

    Args:
        fit: its model, and its `CallbackList`; something else if there is none.
        strategy: whose workers train.
        handed_out: mini-batches handed out before it.
    """
    model, callbacks = fit
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return None
    if (callbacks.params or {}).get("verbose") not in (1, "auto"):
        return None
    for each in callbacks.callbacks:
        if isinstance(each, Summary) and each.strategy is strategy:
            return each
    summary = Summary(strategy, callbacks, handed_out)
    summary.set_model(model)
    callbacks.callbacks.append(summary)
    return summary
