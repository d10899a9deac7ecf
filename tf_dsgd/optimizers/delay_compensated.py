"""`DelayCompensatedSGD`."""

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
class DelayCompensatedSGD(delay.DelayTolerantOptimizer):
    """SGD that estimates what a delayed gradient would be at the current weights (DC-ASGD).

    Use it in place of SGD when gradients arrive late. A gradient g computed at w_seen is moved to
    w by the first term of its Taylor expansion, with lam g g for the diagonal of the Hessian. Per
    coordinate, with w_seen the weights that this message's worker fetched::

        w <- w - eta (g + lam g g (w - w_seen))

    eta = `learning_rate`, lam = `lam`: a constant (DC-ASGD-c), or, with a `mean_square_decay` m,
    adapted to the size of gradients (DC-ASGD-a)::

        M <- m M + (1 - m) g g
        lam_t = lam / sqrt(M + epsilon)

    `lam=0` is SGD, and so is every setting without delays. (With `weight_decay`, which Keras makes
    before the step, a gradient is moved to the decayed weights.)

    Under a strategy whose shards run the optimizer (`tf_dsgd.DownpourStrategy`) a shard remembers
    for each worker the weights that it fetched; one common memory would be wrong for all but the
    last that came. Memory on the shard, in sizes of its weights: one for each worker, and 1 for M
    if lam adapts. None travels. A fetch of a whole weight copies it once more; of an embedding
    table fetched by rows it copies the rows fetched. A message with a sparse gradient reads and
    writes only its rows. What workers saw is not saved with a model: each fetches before it
    computes.

    - Elsewhere - in plain Keras, with `local_rule="optimizer"`, in `train_on_batch` - there is no
      delay to compensate: SGD.
    - With `push_every` above 1 g is the sum of a message's gradients and w_seen what the worker
      last fetched. g g is then the square of a sum, n times too large for gradients that agree:
      choose lam smaller than for single mini-batches.
    - A worker that is lost and comes back fetches first, and nothing of its old fetch is used.
    - `gradient_accumulation_steps` is refused under a strategy whose shards run the optimizer: it
      would mix gradients of several workers. Use `push_every`.

    Args:
        learning_rate: eta; at least 0, or a schedule.
        lam: lambda, or lambda_0 if it adapts; at least 0. Too large a value makes the correction
            outweigh the gradient.
        mean_square_decay: m, from 0 and below 1; None for a constant lambda. With a sparse gradient
            M decays only in the rows that a message touches.
        epsilon: keeps lambda finite where gradients vanish; above 0.
        **options: those of `keras.optimizers.Optimizer`: `weight_decay`, `clipnorm`, `use_ema`,
            `name` and others.

    Raises:
        ValueError: for a wrong argument, naming it, what was received, and what is possible.

    Deviations from the paper: none in the rule. Its workers fetch after every push
    (`push_every=1`, `fetch_every=1`).

    Reference: Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML
    2017, algorithms 1 (worker) and 2 (server).

    Example:

    >>> strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(tf_dsgd.optimizers.DelayCompensatedSGD(0.01, lam=0.1), loss="mse")
    >>> history = model.fit(np.ones((64, 3)), np.ones((64, 1)), batch_size=8, verbose=0)
    >>> int(model.optimizer.iterations)
    8
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        lam: float = 0.04,
        mean_square_decay: float | None = None,
        epsilon: float = 1e-7,
        *,
        name: str = "delay_compensated_sgd",
        **options: Any,
    ):
        label = "DelayCompensatedSGD"
        rate = delay.learning_rate(label, learning_rate)
        lam = delay.number(label, "lam", lam)
        if mean_square_decay is not None:
            mean_square_decay = delay.number(label, "mean_square_decay", mean_square_decay, below=1)
        epsilon = delay.positive(label, "epsilon", epsilon, remedy=": it bounds lambda")
        super().__init__(rate, name=name, **options)
        self.lam, self.mean_square_decay, self.epsilon = lam, mean_square_decay, epsilon

    def build(self, variables: Any) -> None:
        """Creates M, if lambda adapts."""
        if self.built:
            return
        super().build(variables)
        self._mean_squares = []
        if self.mean_square_decay is not None:
            self._mean_squares = self.add_optimizer_variables(variables, "mean_square")

    def remembered(self, variable: Any) -> Any:
        """The weight itself."""
        return variable

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One message's update of one weight."""
        part = Part(gradient, variable.dtype)
        g = part.gradient
        square = tf.square(g)
        lam: Any = self.lam
        if self.mean_square_decay is not None:
            mean_square = self._mean_squares[_tf.slot_index(self, variable)]
            old = part.read(mean_square)
            new = old + (1.0 - self.mean_square_decay) * (square - old)
            part.write(mean_square, new)
            lam = self.lam * tf.math.rsqrt(new + self.epsilon)
        if self.delay is not None:
            drift = part.read(variable) - part.seen(variable, self.delay)
            g = g + lam * square * drift
        part.add(variable, -tf.cast(learning_rate, g.dtype) * g)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        own = {
            "lam": self.lam,
            "mean_square_decay": self.mean_square_decay,
            "epsilon": self.epsilon,
        }
        return {**super().get_config(), **own}
