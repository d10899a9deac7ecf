"""`BlockMomentum`."""

from __future__ import annotations

from typing import Any

import keras

from tf_dsgd.checks import called, truth
from tf_dsgd.optimizers import delay


@keras.saving.register_keras_serializable("tf_dsgd")
@called(hands_on=True, elsewhere={"learning_rate": "zeta is block_learning_rate."})
class BlockMomentum(keras.optimizers.SGD):
    """Momentum over averages of many workers' weights: blockwise model-update filtering, BMUF.

    Use it as `outer_optimizer` of `PeriodicAveragingStrategy` with more than a few workers, where
    the plain mean makes too small a step: a mean of M workers moves about as far as one worker
    does. W_g are the weights that workers begin with, W those of the model::

        G(t) = mean_k w_k - W_g(t-1)
        D(t) = eta D(t-1) + zeta G(t)
        W(t) = W(t-1) + D(t)
        W_g(t) = W(t) + eta D(t)  if `nesterov`,  else W(t)

    eta = `momentum`, zeta = `block_learning_rate`. It is momentum SGD on -G(t): with Nesterov
    momentum the model holds W_g, W(t) being W_g(t) - eta D(t).

    Args:
        momentum: eta; from 0 and below 1; None for 1 - 1/M with M workers, the paper's choice, with
            which every block of mini-batches has its whole effect in the end. Without a strategy
            M is 1.
        block_learning_rate: zeta; above 0, or a schedule, which follows mini-batches.
        nesterov: whether workers begin ahead of the model.
        **options: those of `keras.optimizers.Optimizer`: `weight_decay`, `clipnorm`, `name` and
            others.

    Raises:
        ValueError: for a wrong argument, naming it, what was received, and what is possible.

    Deviations from the paper: with `nesterov` the model is W_g, as it is in Keras's SGD, and not
    W, from which it differs by eta D.

    Reference: Chen, Huo, Scalable training of deep learning machines by incremental block training
    with intra-block parallel optimization and blockwise model-update filtering, ICASSP 2016.

    Example:

    >>> strategy = tf_dsgd.PeriodicAveragingStrategy(
    ...     tf_dsgd.LocalCluster(4), outer_optimizer=tf_dsgd.optimizers.BlockMomentum()
    ... )
    >>> strategy.outer_optimizer.momentum
    0.75
    """

    def __init__(
        self,
        momentum: float | None = None,
        block_learning_rate: Any = 1.0,
        nesterov: bool = True,
        *,
        name: str = "block_momentum",
        **options: Any,
    ):
        label, rate = "BlockMomentum", block_learning_rate
        if momentum is not None:
            momentum = delay.number(label, "momentum", momentum, below=1)
        if not delay.is_schedule(rate):
            rate = delay.positive(
                label, "block_learning_rate", rate, remedy=", or a schedule: it is zeta"
            )
        nesterov = truth(f"{label}'s nesterov", nesterov)
        super().__init__(rate, momentum=momentum or 0.0, nesterov=nesterov, name=name, **options)
        self._given_momentum = momentum

    def for_workers(self, num_workers: int) -> None:
        """Takes 1 - 1/M for the momentum, unless one was given."""
        if self._given_momentum is None:
            self.momentum = 1.0 - 1.0 / num_workers

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> BlockMomentum:
        """One with the arguments that `get_config` gave; Keras knows of a `learning_rate` alone."""
        rate = config.get("block_learning_rate")
        if isinstance(rate, dict):
            rate = keras.optimizers.schedules.deserialize(rate, custom_objects)
            config = {**config, "block_learning_rate": rate}
        return super().from_config(config, custom_objects)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        config = super().get_config()
        rate = config.pop("learning_rate")
        return {**config, "momentum": self._given_momentum, "block_learning_rate": rate}
