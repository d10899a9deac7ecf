"""Keras optimizers for shards: those that know of delays, and one over averages of weights."""

from tf_dsgd.optimizers.adaptive_revision import AdaptiveRevision, DelayTolerantAdagrad
from tf_dsgd.optimizers.block_momentum import BlockMomentum
from tf_dsgd.optimizers.delay_compensated import DelayCompensatedSGD
from tf_dsgd.optimizers.fasgd import FASGD

__all__ = [
    "FASGD",
    "AdaptiveRevision",
    "BlockMomentum",
    "DelayCompensatedSGD",
    "DelayTolerantAdagrad",
]
