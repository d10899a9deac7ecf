"""Keras optimizers that know of delays: what a worker saw, and how stale its gradient is."""

from tf_dsgd.optimizers.adaptive_revision import AdaptiveRevision, DelayTolerantAdagrad
from tf_dsgd.optimizers.delay_compensated import DelayCompensatedSGD
from tf_dsgd.optimizers.fasgd import FASGD

__all__ = ["FASGD", "AdaptiveRevision", "DelayCompensatedSGD", "DelayTolerantAdagrad"]
