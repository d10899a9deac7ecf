"""`AdaptiveRevision`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.checks import called
from tf_dsgd.optimizers import delay
from tf_dsgd.optimizers.delay import Part


@keras.saving.register_keras_serializable("tf_dsgd")
@called(hands_on=True)
class AdaptiveRevision(delay.DelayTolerantOptimizer):
    r"""Adagrad for delayed gradients, also known as delay-tolerant Adagrad.

    Use it in place of Adagrad when gradients arrive late: many workers, slow networks, long
    periods. When a gradient g arrives that was computed before others were applied, it adapts the
    rate to both, and revises the steps that were made at a rate now seen to be too large. Per
    coordinate, with gbar the sum of all gradients applied so far and gbar_old what it was when the
    worker fetched::

        g_bck  = gbar - gbar_old                    (applied in the meantime)
        eta_old = alpha / sqrt(z')
        z  <- z + g^2 + 2 g g_bck
        z' <- max(z, z')
        eta = alpha / sqrt(z')
        x  <- x - eta g + (eta_old - eta) g_bck
        gbar <- gbar + g

    alpha = `learning_rate`; z and z' start at `initial_accumulator_value`. Without delays g_bck is
    0, and this is `keras.optimizers.Adagrad` with the same initial accumulator and `epsilon=0`. If
    nobody fetches again, the weights are where one step with the sum S of all gradients would have
    brought them: x = x_0 - alpha S / sqrt(z').

    Under a strategy whose shards run the optimizer (`tf_dsgd.DownpourStrategy`) a shard remembers
    gbar for each worker at its fetches. Memory on the shard, in sizes of its weights: 3 (gbar, z,
    z'), and one for each worker. None travels. A fetch of a whole weight copies its gbar; of an
    embedding table fetched by rows it copies the rows fetched. A message with a sparse gradient
    reads and writes only its rows. What workers saw is not saved with a model: each fetches before
    it computes.

    - Elsewhere - in plain Keras, with `local_rule="optimizer"`, in `train_on_batch` - there is no
      delay to correct: Adagrad.
    - With `push_every` above 1 g is the sum of a message's gradients, and gbar_old what gbar was at
      the worker's last fetch. With several messages to a fetch (`fetch_every` above `push_every`)
      the worker's own earlier ones are then part of g_bck, which is exact for `local_rule="none"`.
      Where a message holds gradients from before and after a fetch (`fetch_every` no multiple of
      `push_every`), those from before are corrected for less than they missed.
    - A worker that is lost and comes back fetches first, and nothing of its old fetch is used.
    - `gradient_accumulation_steps` is refused under a strategy whose shards run the optimizer: it
      would mix gradients of several workers. Use `push_every`.
    - A learning-rate schedule changes alpha for what comes; a revision uses the current alpha for
      eta_old and eta, so that it does not undo the schedule for steps already made.

    Args:
        learning_rate: alpha; at least 0, or a schedule.
        initial_accumulator_value: z_0, the first value of z and z', above 0: 1 as in the paper,
            while `keras.optimizers.Adagrad` starts at 0.1. There is no epsilon; this is what keeps
            the first steps finite. Gradients much smaller than its root hardly adapt the rate.
        **options: those of `keras.optimizers.Optimizer`: `weight_decay`, `clipnorm`, `use_ema`,
            `name` and others. Weight decay and EMA act on the weights alone, not on gbar.

    Raises:
        ValueError: for a wrong argument, naming it, what was received, and what is possible.

    Deviations from the paper: it keeps a worker's gbar_old with the gradient, which sends it back;
    here the shard keeps it, as no message then grows. With momentum, averaging and other options
    of Keras the paper's bounds are not proved.

    Reference: McMahan and Streeter, Delay-Tolerant Algorithms for Asynchronous Distributed Online
    Learning, NIPS 2014, algorithm AdaptiveRevision.

    Example:

    >>> strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(tf_dsgd.optimizers.AdaptiveRevision(0.1), loss="mse")
    >>> history = model.fit(np.ones((64, 3)), np.ones((64, 1)), batch_size=8, verbose=0)
    >>> int(model.optimizer.iterations)
    8
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        initial_accumulator_value: float = 1.0,
        *,
        name: str = "adaptive_revision",
        **options: Any,
    ):
        rate = delay.learning_rate("AdaptiveRevision", learning_rate)
        start = delay.positive(
            "AdaptiveRevision",
            "initial_accumulator_value",
            initial_accumulator_value,
            remedy=": the first rate is learning_rate divided by its root",
        )
        super().__init__(rate, name=name, **options)
        self.initial_accumulator_value = start

    def build(self, variables: Any) -> None:
        """Creates gbar, z and z'."""
        if self.built:
            return
        super().build(variables)
        start = keras.initializers.Constant(self.initial_accumulator_value)
        self._sums, self._z, self._largest_z = self.add_optimizer_variables(
            variables, ["gradient_sum", "z", "largest_z"], ["zeros", start, start]
        )

    def remembered(self, variable: Any) -> Any:
        """The sum of gradients."""
        return self._sums[_tf.slot_index(self, variable)]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One message's update of one weight."""
        index = _tf.slot_index(self, variable)
        gbar, z, largest_z = self._sums[index], self._z[index], self._largest_z[index]
        part = Part(gradient, variable.dtype)
        g = part.gradient
        alpha = tf.cast(learning_rate, g.dtype)
        old_z, old_largest = part.read(z), part.read(largest_z)
        if self.delay is None:  # g_bck = 0
            new_z = old_z + tf.square(g)
            new_largest = tf.maximum(new_z, old_largest)
            change = -alpha * g * tf.math.rsqrt(new_largest)
        else:
            backlog = part.read(gbar) - part.seen(gbar, self.delay)
            both = g + backlog
            new_z = old_z + g * (both + backlog)
            new_largest = tf.maximum(new_z, old_largest)
            # -eta g + (eta_old - eta) g_bck
            change = alpha * (
                backlog * tf.math.rsqrt(old_largest) - both * tf.math.rsqrt(new_largest)
            )
        part.write(z, new_z)
        part.write(largest_z, new_largest)
        part.add(variable, change)
        part.add(gbar, g)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        own = {"initial_accumulator_value": self.initial_accumulator_value}
        return {**super().get_config(), **own}


DelayTolerantAdagrad = AdaptiveRevision
