"""Handing out mini-batches: from the token that `fit` takes to the engine's workers.

Whether a token is for training only the step that the caller runs with it can tell. `fit` is known
by Python's stack: where the model has run its step before, on batches of that type, or traces it
now, the batch is handed out at once, and the step finds what a worker has reported of it. Of any
other step the batch is handed out once it was run, before the next token of that iterator is given.

Any thread may read a weight, and bring workers to rest for that: engines let one thread at a time
hand out, or wait for rest. Nobody keeps others from that while batches are read, which may need
another thread that reads a weight.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd._tf_python import called_by_a_graph, python_code
from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.program import Program
from tf_dsgd.strategies.caller import fit_that_runs, looks, model_that_fits
from tf_dsgd.strategies.dataset import TokenIterator, TokenSpec
from tf_dsgd.strategies.iterations import Iterations
from tf_dsgd.strategies.nothing_yet import leave_logs_out
from tf_dsgd.strategies.position import Passes
from tf_dsgd.strategies.showing import Logs, show_only, step_of_keras
from tf_dsgd.strategies.step import TracedStep, is_train_step
from tf_dsgd.strategies.stream import NUMBERS
from tf_dsgd.strategies.summary import summary_of
from tf_dsgd.strategies.tracing import Trace, tracing


class HandingOut:
    """Which tokens are out, and how many batches were handed to workers."""

    def __init__(self, engine: Engine, passes: Passes):
        self._engine = engine
        self._passes = passes
        self._programs: tuple[weakref.ref[FitProgram], ...] = ()
        self.handed_out = 0
        self.examples = 0
        # Also of a loop that was left by `break`, whose last step was run.
        self._used: dict[TokenIterator, threading.Thread] = {}
        """Of which a token is used, and not yet known to be for training; and by which thread."""
        self._given: tuple[Callable[[], TokenIterator | None], Any] = (lambda: None), None
        """Of which a token was given last, where it was not known what for; and to which thread."""
        self._thread: threading.Thread | None = None
        """Who has handed out last."""
        self.tracing = threading.RLock()
        """Held while a step is traced, which takes what optimizers are called with."""
        self._error: tuple[threading.Thread, BaseException] | None = None
        """What another thread's reading has raised, and the thread whose training that ends."""
        self._taken_at_reset = 0
        self._of_now: weakref.ref[TokenIterator] | None = None
        """The iterator that `fit` began last."""
        self.iterations: Iterations | None = None
        """Where an epoch is an iteration of several passes over its data."""

    @property
    def programs(self) -> list[FitProgram]:
        """Those that the caller's functions still have, in the order in which they were traced."""
        return [program for each in self._programs if (program := each()) is not None]

    def add(self, program: FitProgram) -> None:
        """While `tracing` is held; other threads may look meanwhile."""
        alive = (each for each in self._programs if each() is not None)
        self._programs = (*alive, weakref.ref(program))

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint has of it."""
        counted = {"examples": np.array([self.handed_out, self.examples])}
        if self.iterations is None:
            return counted
        iterator = None if self._of_now is None else self._of_now()
        model, _ = fit_that_runs()
        # A callback that ends training within an epoch leaves an iteration that is whole.
        stops = model is not None and model.stop_training
        in_epoch = iterator is not None and iterator.ahead > 0 and not stops
        return counted | self.iterations.state(in_epoch)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises a ValueError if `restore` cannot set this."""
        found = np.asarray(state.get("examples", ()))
        if found.shape != (2,) or found.dtype.kind != "i":
            raise ValueError("The state is not complete: the numbers of examples are missing.")
        if self.iterations is not None:
            self.iterations.check(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets what `state` gave."""
        self.handed_out, self.examples = (int(n) for n in state["examples"])
        if self.iterations is not None:
            self.iterations.restore(state)

    def next_token(self, iterator: TokenIterator, at_once: bool) -> bool:
        """Makes a batch ready, and hands it out as soon as it is known to be for training.

        Returns False at the end of the data. The first batch is made ready when it is used, unless
        `at_once`.
        """
        iterator.forget_unused()
        self._resolve(iterator)
        self._raise_what_others_met()
        if iterator.passing:
            iterator.passing -= 1
            self._passes.tokens += 1
            return True
        if iterator.ahead:
            iterator.ahead -= 1
            self._let_end(iterator)
            return True
        try:
            if not iterator.stream.take(at_once):
                if iterator.program is None:  # a loop of the user's own, which reads no metrics
                    self._drain()
                return False
        except tf.errors.OpError:
            self._drain()  # the batches before the one that failed
            raise
        if not iterator.opened:
            # Whoever opens a new dataset, to train or to evaluate, expects a model at rest.
            iterator.opened = True
            iterator.only_looks = looks(iterator)
            self._drain()
            program = self._of_fit(iterator)
            if program is not None:
                before = self.handed_out
                begun = self._begin(iterator, program)
                self._summarize(iterator, before)
                self._hand_out_the_rest(iterator, program)
                return begun
        if iterator.program is not None:
            if not iterator.stream.make_ready():
                return False
            self._hand_out(iterator, iterator.program)
            self._hand_out_the_rest(iterator, iterator.program)
            return True
        if not iterator.only_looks:
            self._given = weakref.ref(iterator), threading.current_thread()
        return True

    def _hand_out_the_rest(self, iterator: TokenIterator, program: FitProgram) -> None:
        """Of a batch method's epoch: `fit` has nothing to show before the iteration has ended.

        So workers have all mini-batches at once, and the tokens that are left hand out nothing.
        """
        if self.iterations is None:
            return
        while iterator.stream.take() and iterator.stream.make_ready():
            self._hand_out(iterator, program)
            iterator.ahead += 1
        self._let_end(iterator)

    def _let_end(self, iterator: TokenIterator) -> None:
        """With an epoch's last token a batch method that has nothing more to do ends `fit`."""
        if self.iterations is not None and not iterator.ahead and iterator.program is not None:
            self.iterations.let_end(iterator.program.model)

    def _of_fit(self, iterator: TokenIterator) -> FitProgram | None:
        """The program that `fit`, if that asks, will run on this iterator; None if that is open."""
        model = model_that_fits(iterator)
        if model is None:
            return None
        spec = iterator.dataset.element_spec
        found = [p for p in self.programs if p.is_run_by(model) and p.takes(spec)]
        equal = [p for p in found if p.is_for(spec)]
        return found[0] if len(found) == 1 else equal[0] if len(equal) == 1 else None

    def _begin(
        self,
        iterator: TokenIterator,
        program: FitProgram,
        trains: threading.Thread | None = None,
    ) -> bool:
        """The first token of `fit`'s iterator is used; False if there are no data."""
        if not iterator.stream.make_ready():
            return False
        # Nobody but `fit` has this iterator: from now on a token is a step.
        iterator.train(program)
        if program.run_by is not None:
            show_only(program.model)
        self._of_now = weakref.ref(iterator)
        if self.iterations is not None:
            self.iterations.begin(iterator, program.program)
        if self._passes.begin(iterator):
            self._hand_out(iterator, program, trains)
        return True

    def traced(self, program: FitProgram) -> None:
        """While Keras traces its step, which it then runs: hands out the batch of its token."""
        if not program.of_keras:
            return
        current = None if self._of_now is None else self._of_now()
        if current is not None and current.program.is_of_model_of(program):
            current.program = program  # in the middle of a pass, as after another `compile`
        given, thread = self._given
        iterator = given()
        if iterator is None or thread is not threading.current_thread() or iterator.tokens_out != 1:
            return
        if not program.takes(iterator.dataset.element_spec) or iterator.stream.at_end():
            return  # at the end: there are no data, as the token will say
        self._used.pop(iterator, None)
        before = self.handed_out
        if self._begin(iterator, program):
            self.await_logs(iterator)
            self._summarize(iterator, before)

    def _summarize(self, iterator: TokenIterator, handed_out: int) -> None:
        """An epoch's first round is under way, and `fit` may want to say at its end how it went."""
        leave_logs_out(fit_that_runs()[1], self._has_logs)
        summary = summary_of(fit_that_runs(), iterator.dataset.strategy, handed_out)
        if summary is not None:
            on_workers = iterator.stream.pipelines is not None
            summary.begin(None if on_workers else iterator.dataset.input_time)

    def await_logs(self, iterator: TokenIterator) -> None:
        """Before `fit` runs its step: waits until it finds what a worker has reported."""
        if iterator.program is not None and not iterator.passing:
            with self._told():
                self._engine.await_begun(iterator.program.program)

    def _has_logs(self) -> bool:
        """Whether a worker has taken a mini-batch since metrics were reset."""
        return self._engine.handed_out > self._taken_at_reset

    def settle(self) -> None:
        """Hands out what is known to be for training, and waits until the model is at rest.

        Raises:
            RuntimeError: if Python code of a worker's step calls this, which waits for that code.
            BaseException: what ends training. That of another thread ends by it, too.
        """
        self._refuse_python_of_a_step()
        self._raise_what_others_met()
        self._resolve()
        self._drain()

    def _drain(self) -> None:
        with self._told():
            self._engine.drain()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Within, workers' errors are raised: the thread that trains is told, if it is another."""
        trains = self._thread
        try:
            yield
        except Exception as error:
            if trains is None or trains is threading.current_thread():
                self._error = None
            elif trains.is_alive():
                self._error = trains, error
            raise

    def _refuse_python_of_a_step(self) -> None:
        if self._engine.is_at_rest or not any(p.python_code for p in self.programs):
            return
        called = called_by_a_graph()
        if any(called & p.python_code for p in self.programs):
            raise RuntimeError(
                "Python code of a step (tf.numpy_function, tf.py_function) read or wrote a "
                "variable of the model, which would wait for that step. Pass what it needs as an "
                "argument, as in tf.numpy_function(f, [layer.kernel], ...); or read it in a "
                "callback."
            )

    def _raise_what_others_met(self) -> None:
        if self._error is None or self._error[0] is not threading.current_thread():
            return
        (_, error), self._error = self._error, None
        raise error

    def free_number(self) -> int:
        """For another program.

        Raises:
            ValueError: if there are as many as are told apart.
        """
        taken = {program.number for program in self.programs}
        found = next((n for n in range(NUMBERS) if n not in taken), None)
        if found is None:
            raise ValueError(
                f"This strategy has traced {NUMBERS} training steps whose models or functions are "
                "still there, and tells no more apart. Let go of those that you need no more; and "
                "give strategy.run the same function each time, with what changes in the dataset's "
                "elements or in a tf.Variable."
            )
        return found

    def uses(self, iterator: TokenIterator) -> None:
        """A function, or a step, is given a token of this."""
        here = threading.current_thread()
        if iterator in self._used:
            self._resolve_one(iterator, here)  # another token, or this one, which is used again
        self._used.setdefault(iterator, here)

    def _resolve(self, asking: TokenIterator | None = None) -> None:
        """Hands out batches whose tokens were used in a training step."""
        here = threading.current_thread()
        for iterator, thread in list(self._used.items()):
            if not iterator.mutex.acquire(blocking=False):
                continue  # who takes its next token sees to this one first
            try:
                ended = iterator is asking or not thread.is_alive()
                ended = ended or (thread is here and not called_by_a_graph())
                if self._resolve_one(iterator, thread) or not ended:
                    continue
                self._used.pop(iterator, None)  # its token was for something else
                iterator.drop_unused()
            finally:
                iterator.mutex.release()

    def _resolve_one(self, iterator: TokenIterator, trains: threading.Thread) -> bool:
        """Whether a step is known to run on each token of this; batches are handed out then.

        In another thread than the token's, not where that would read the data that come next.
        """
        if trains is not threading.current_thread() and self.iterations is not None:
            return False
        ran = iterator.ran()
        # Of several in one function those that were traced first run first.
        found = [p for p in self.programs for _ in range(ran[p.number])]
        if len(found) > iterator.pending:
            self._used.pop(iterator, None)
            raise RuntimeError(
                f"{len(found)} training steps were given {iterator.pending} of a distributed "
                "dataset's batches. A batch is one step's: put them into one step, with one "
                "strategy.run."
            )
        iterator.pending -= len(found)
        for program in found:
            if program.of_keras and iterator.program is None:
                self._begin(iterator, program, trains)
            elif iterator.stream.make_ready():
                self._hand_out(iterator, program, trains)
        if found and not iterator.pending:
            self._used.pop(iterator, None)
        return bool(found) and not iterator.pending

    def _hand_out(
        self,
        iterator: TokenIterator,
        program: FitProgram,
        trains: threading.Thread | None = None,
    ) -> None:
        here = threading.current_thread()
        self._thread = trains or here
        if iterator.program is None:
            iterator.stream.is_of_tokens = True
        iterator.stream.hand_out()
        with self._told(), self._engine.turn:
            running = program.program.running
            if running.were_written:
                with self._engine.explained():
                    running.reset()
                self._taken_at_reset = self._engine.handed_out
            self.handed_out += 1
            self._passes.handed_out(iterator)
            self.examples += iterator.stream.examples
            self._engine.grant(program.program, iterator.stream)
        ends = self.iterations is not None or program.shows_own_logs
        if self._thread is not here or not (ends and iterator.stream.at_end()):
            return
        if self.iterations is not None:
            self.iterations.end(iterator, program.program, program.model)
        if program.shows_own_logs:
            # Logs that are no metrics become the epoch's: show the last step its own.
            self._drain()


class FitProgram:
    """A program, and the step that Keras runs in its place."""

    def __init__(
        self,
        program: Program,
        step: TracedStep,
        fn: Callable[..., Any],
        element_spec: Any,
        number: int,
    ):
        self.program = program
        self.number = number
        """Under which it takes down that it ran; one that is gone may have had it."""
        self._spec = TokenSpec(element_spec)
        self._step = step
        self._runs = _tf.make_variable(np.int64(0), device="CPU:0", name="runs")
        self.of_keras = is_train_step(fn)
        self.model = getattr(fn, "__self__", None) if self.of_keras else None
        self.run_by = None
        """Keras's function that runs it."""
        if self.model is not None and not tf.executing_eagerly():
            self.run_by = step_of_keras(self.model)
        self.shows_own_logs = self.of_keras and step.shows_own_logs
        self.logs = None
        """What a `ShowingStep` shows; traced now, where an interrupt waits for its end."""
        if self.run_by is not None:
            reported = [*program.running.sums, *program.logs]
            self.logs = Logs(self._logs, program.running, reported)

    def step_of_chief(self, ran: tf.Tensor) -> Any:
        """Takes down that a step was run, also in `ran`, which is of its batch.

        Shows all workers' metrics, or the latest outputs of one.
        """
        self._runs.assign_add(1, read_value=False)
        one = tf.constant(1, tf.int64)
        tf.raw_ops.ResourceScatterAdd(resource=ran, indices=self.number, updates=one)
        return self._logs()

    def _logs(self) -> Any:
        if self.model is not None and self._step.metrics:
            shown = Trace("chief")
            shown.values = self.program.running.shown()
            with tracing(shown):
                results = self.model.get_metrics_result()
                # Read here, where a variable is what all workers have made of it.
                return keras.tree.map_structure(tf.convert_to_tensor, results, none_is_leaf=False)
        return self._step.pack([log.read_value() for log in self.program.logs])

    @property
    def steps_per_execution(self) -> int:
        """As the model says now: Keras may tune it."""
        return 1 if self.model is None else int(self.model.steps_per_execution)

    def is_for(self, element_spec: Any) -> bool:
        """Whether batches of this type are just those that it was traced for."""
        return TokenSpec(element_spec) == self._spec

    def takes(self, element_spec: Any) -> bool:
        """Whether batches of this type are among those that it was traced for."""
        return self.is_for(element_spec) or TokenSpec(element_spec).is_subtype_of(self._spec)

    def is_run_by(self, model: keras.Model) -> bool:
        """Whether the model's `fit` runs this program, as it has done before."""
        run_by = self.run_by is not None and self.run_by is step_of_keras(model)
        return self.model is model and run_by and self.runs() > 0

    def is_of_model_of(self, other: FitProgram) -> bool:
        """Whether both are of one model."""
        return self.model is not None and self.model is other.model

    def begins_anew_with(self, variable: Any) -> bool:
        """Whether the logs of a step do, when that is assigned: it is of a metric, as of a reset.

        Keras resets all metrics of the model, also where its logs are other numbers.
        """
        if self._step.outputs and self.model is not None:
            metrics = (v.value for metric in self.model.metrics for v in metric.variables)
            return any(v is variable for v in metrics)
        return self.program.running.is_of(variable)

    def runs(self) -> int:
        """How often the caller has run the step."""
        return int(self._runs)

    @functools.cached_property
    def python_code(self) -> frozenset[str]:
        """What workers call of this process's Python code."""
        return python_code(self._step.function.graph)
