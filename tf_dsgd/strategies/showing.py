"""The step of `fit`, once workers train: it takes the step's tokens, and shows logs.

Keras's own step is a `tf.function` of a token. At each call TensorFlow looks up the types of what
it is given, and then nothing is left to do but to show logs: over a millisecond of processor time
for each mini-batch, all of it in the main thread. So while `fit` goes through an iterator whose
program is known, the model's `train_function` is a `ShowingStep`: it calls a function without
arguments, and that only when a worker has reported something since. Whatever else it is given goes
to Keras's step.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf, _tf_order


class ShowingStep:
    """Takes the place of a model's `train_function`.

    Args:
        step_of_keras: what was in that place.
    """

    def __init__(self, step_of_keras: Any):
        self.step_of_keras = step_of_keras

    def __call__(self, iterator: Any) -> Any:
        program = getattr(iterator, "program", None)
        if program is None or program.run_by is not self.step_of_keras:
            return self.step_of_keras(iterator)
        if tf.config.functions_run_eagerly():  # which is refused there
            return self.step_of_keras(iterator)
        next(iter(iterator))  # one token for as many steps as Keras makes at once
        return program.logs.now()


def step_of_keras(model: keras.Model) -> Any:
    """The function by which Keras would run a model's training step; None if none was made."""
    step = model.train_function
    return step.step_of_keras if isinstance(step, ShowingStep) else step


def show_only(model: keras.Model) -> None:
    """From its next step on, the model's `fit` calls a `ShowingStep`.

    Not where a user has a function of their own in that place, which may do more.
    """
    if _tf.is_step_of_fit(model.train_function):
        model.train_function = ShowingStep(model.train_function)


class Logs:
    """What a training step of `fit` returns.

    Args:
        show: gives the logs, from variables; it is traced here.
        running: the program's metrics, which know when workers have reported.
        reported: variables that change only when workers report.
    """

    def __init__(self, show: Any, running: Any, reported: Any):
        self._running = running
        with tf.init_scope():
            concrete = tf.function(show, autograph=False).get_concrete_function()
        self._read = _tf.BoundFunction(concrete, concrete.captured_inputs)
        self._stays = _tf_order.depends_on_alone(concrete, reported)
        """Whether the logs are the same until a worker reports."""
        self._shown: tuple[int, Any] | None = None

    def now(self) -> Any:
        """The logs, a dictionary of the caller's own."""
        edition = self._running.edition  # before the variables are read
        if self._shown is None or not self._stays or self._shown[0] != edition:
            self._shown = edition, self._read()
        logs = self._shown[1]
        return dict(logs) if isinstance(logs, dict) else logs
