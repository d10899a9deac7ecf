"""Handing out mini-batches: from the token that `fit` takes to the engine's workers.

That a token is for training is known only when the step that Keras was given was run. Then its
batch is handed out, before the next token is given; once the iterator is known to be `fit`'s, at
once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.program import Program
from tf_dsgd.strategies.dataset import TokenIterator
from tf_dsgd.strategies.position import Passes
from tf_dsgd.strategies.step import TracedStep, is_train_step


class HandingOut:
    """Which tokens are out, and how many batches were handed to workers."""

    def __init__(self, engine: Engine, passes: Passes):
        self._engine = engine
        self._passes = passes
        self.programs: weakref.WeakSet[FitProgram] = weakref.WeakSet()
        """Those that the caller's functions still have."""
        self.handed_out = 0
        self.examples = 0
        # Also of a loop that was left by `break`, whose last step was run.
        self._unresolved: set[TokenIterator] = set()

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint has of it."""
        return {"examples": np.array([self.handed_out, self.examples])}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises a ValueError if `restore` cannot set this."""
        found = np.asarray(state.get("examples", ()))
        if found.shape != (2,) or found.dtype.kind != "i":
            raise ValueError("The state is not complete: the numbers of examples are missing.")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets what `state` gave."""
        self.handed_out, self.examples = (int(n) for n in state["examples"])

    def next_token(self, iterator: TokenIterator) -> bool:
        """Makes a batch ready, and hands it out as soon as it is known to be for training.

        Returns False at the end of the data.
        """
        self.resolve()
        if iterator.passing:
            iterator.passing -= 1
            self._passes.tokens += 1
            return True
        try:
            if not iterator.stream.take():
                return False
        except tf.errors.OpError:
            self._engine.settle()  # the batches before the one that failed
            raise
        program = iterator.program
        if program is not None:
            if not iterator.stream.make_ready():
                return False
            self._hand_out(iterator, program)
            return True
        if not iterator.opened:
            # Whoever opens a new dataset, to train or to evaluate, expects a settled model.
            iterator.opened = True
            self._engine.settle()
        for program in self.programs:
            program.mark()
        iterator.pending = True
        self._unresolved.add(iterator)
        return True

    def resolve(self) -> None:
        """Hands out batches whose tokens were used in a training step."""
        for iterator in list(self._unresolved):
            self._unresolved.discard(iterator)
            if not iterator.pending:
                continue
            iterator.pending = False
            used = [p for p in self.programs if p.was_run()]
            if used and iterator.stream.make_ready():
                if used[0].of_keras:
                    # Nobody but `fit` has this iterator: from now on a token is a step.
                    iterator.train(used[0])
                    if not self._passes.begin(iterator):
                        continue
                self._hand_out(iterator, used[0])

    def _hand_out(self, iterator: TokenIterator, program: FitProgram) -> None:
        self.handed_out += 1
        self._passes.handed_out(iterator)
        self.examples += iterator.stream.examples
        self._engine.grant(program.program, iterator.stream)
        if program.shows_own_logs and iterator.stream.at_end():
            # Logs that are no metrics become the epoch's: show the last step its own.
            self._engine.settle()


class FitProgram:
    """A program, and the step that Keras runs in its place."""

    def __init__(self, program: Program, step: TracedStep, fn: Callable[..., Any]):
        self.program = program
        self._step = step
        self._seen = 0
        self._runs = _tf.make_variable(np.int64(0), device="CPU:0", name="runs")
        self.of_keras = is_train_step(fn)
        self._model = getattr(fn, "__self__", None) if self.of_keras else None
        self.shows_own_logs = self.of_keras and step.shows_own_logs

    def step_of_chief(self) -> Any:
        """Counts that a step was run, and shows the latest outputs of a worker."""
        self._runs.assign_add(1, read_value=False)
        return self._step.pack([log.read_value() for log in self.program.logs])

    @property
    def steps_per_execution(self) -> int:
        """As the model says now: Keras may tune it."""
        return 1 if self._model is None else int(self._model.steps_per_execution)

    def mark(self) -> None:
        """`was_run` is about what comes after this."""
        self._seen = int(self._runs)

    def was_run(self) -> bool:
        """Whether the step was run since `mark`."""
        return int(self._runs) > self._seen
