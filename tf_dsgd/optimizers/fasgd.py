"""`FASGD`."""

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
class FASGD(delay.DelayTolerantOptimizer):
    """SGD that divides a step by its staleness and by how much gradients vary.

    Use it with very many workers, where staleness alone makes steps too small: a coordinate whose
    gradient hardly varies tolerates old gradients, one whose gradient varies does not. Per
    coordinate, for a message that is tau updates stale::

        n <- gamma n + (1 - gamma) g^2              (mean square)
        b <- gamma b + (1 - gamma) g                (mean)
        v <- beta v + (1 - beta) sqrt(n - b^2 + epsilon)
        w <- w - alpha / (v tau) g

    alpha = `learning_rate`, gamma = `gamma`, beta = `beta`; tau is at least 1. n and b start at 0,
    v at `initial_deviation`. Without delays tau is 1.

    It remembers nothing of the workers. Memory on the shard, in sizes of its weights: 3 (n, b, v).
    A message with a sparse gradient reads and writes only its rows, so that n, b and v of a row are
    means over the messages that touched it.

    - In plain Keras, with `local_rule="optimizer"`, and in `train_on_batch`, tau is 1.
    - With `push_every` above 1 g is the sum of a message's gradients, and tau counts from the
      fetch before the first of them.
    - With the strategy's `staleness_scaling` the step would be divided by staleness twice: leave
      it at None.
    - A worker that is lost and comes back fetches first; its messages' staleness counts from there.
    - `gradient_accumulation_steps` is refused under a strategy whose shards run the optimizer: it
      would mix gradients of several workers. Use `push_every`.

    Args:
        learning_rate: alpha; at least 0, or a schedule. As the step is divided by v, it is in
            units of the weights, as Adam's is.
        gamma: decay of the means of g and g^2; from 0 and below 1. At 0 nothing varies: n = b^2,
            but for rounding. In float32 n - b^2 is exact to some 1e-7 of g^2 only: where gradients
            of size 1 vary less than that, v is rounding, or sqrt(epsilon).
        beta: decay of the mean of the deviation; from 0 and below 1.
        epsilon: keeps the deviation above 0; above 0.
        initial_deviation: v_0; at least 0. From 0 the first steps are divided by far too small a v,
            which has then seen a share 1 - beta of one deviation; 1 makes them plain SGD steps
            of rate alpha.
        **options: those of `keras.optimizers.Optimizer`: `weight_decay`, `clipnorm`, `use_ema`,
            `name` and others.

    Raises:
        ValueError: for a wrong argument, naming it, what was received, and what is possible.

    Deviations from the paper: as printed, v averages 1 / sqrt(n - b^2 + epsilon), so that a step
    would *grow* with the deviation, against the paper's prose; here v averages the root itself.
    Its start is ours. Workers fetch at every period; the variant that fetches with a
    probability that depends on v is not offered.

    Reference: Odena, Faster Asynchronous SGD, arXiv:1601.04033, 2016.

    Example:

    >>> strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(tf_dsgd.optimizers.FASGD(0.01), loss="mse")
    >>> history = model.fit(np.ones((64, 3)), np.ones((64, 1)), batch_size=8, verbose=0)
    >>> int(model.optimizer.iterations)
    8
    """

    def __init__(
        self,
        learning_rate: Any = 0.005,
        gamma: float = 0.9,
        beta: float = 0.9,
        epsilon: float = 1e-7,
        initial_deviation: float = 1.0,
        *,
        name: str = "fasgd",
        **options: Any,
    ):
        rate = delay.learning_rate("FASGD", learning_rate)
        gamma = delay.number("FASGD", "gamma", gamma, below=1)
        beta = delay.number("FASGD", "beta", beta, below=1)
        epsilon = delay.positive("FASGD", "epsilon", epsilon, remedy=": it bounds the step")
        deviation = delay.number("FASGD", "initial_deviation", initial_deviation)
        super().__init__(rate, name=name, **options)
        self.gamma, self.beta, self.epsilon = gamma, beta, epsilon
        self.initial_deviation = deviation

    def build(self, variables: Any) -> None:
        """Creates n, b and v."""
        if self.built:
            return
        super().build(variables)
        start = keras.initializers.Constant(self.initial_deviation)
        self._n, self._b, self._v = self.add_optimizer_variables(
            variables, ["mean_square", "mean", "deviation"], ["zeros", "zeros", start]
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One message's update of one weight."""
        index = _tf.slot_index(self, variable)
        part = Part(gradient, variable.dtype)
        g = part.gradient
        n, b, v = (part.read(slots[index]) for slots in (self._n, self._b, self._v))
        n = n + (1.0 - self.gamma) * (tf.square(g) - n)
        b = b + (1.0 - self.gamma) * (g - b)
        # Rounding may take the variance below 0.
        deviation = tf.sqrt(tf.maximum(n - tf.square(b), 0.0) + self.epsilon)
        v = v + (1.0 - self.beta) * (deviation - v)
        for slots, value in ((self._n, n), (self._b, b), (self._v, v)):
            part.write(slots[index], value)
        alpha = tf.cast(learning_rate, g.dtype)
        if self.delay is not None:
            alpha = alpha / tf.maximum(tf.cast(self.delay.staleness, g.dtype), 1)
        part.add(variable, -alpha * g / v)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        own = {
            "gamma": self.gamma,
            "beta": self.beta,
            "epsilon": self.epsilon,
            "initial_deviation": self.initial_deviation,
        }
        return {**super().get_config(), **own}
