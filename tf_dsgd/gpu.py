"""Keeps TensorFlow from taking all of a GPU's memory."""

from __future__ import annotations

import os

import tensorflow as tf
from absl import logging

from tf_dsgd import _tf
from tf_dsgd.checks import called, integer, truth

__all__ = ["configure_memory"]

_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_configured = False
_by_default = False
"""Whether growth is on because nobody has said what is wanted."""


@called()
def configure_memory(growth: bool = True, limit_mb: int | None = None) -> None:
    """Lets TensorFlow take GPU memory as it needs it, or up to a limit.

    By default TensorFlow takes nearly all memory of every GPU when it opens it, so that a second
    process on that GPU fails. Every cluster and every strategy of `tf_dsgd` calls this with its
    defaults when it is made, unless you have called it before. Without a GPU it does nothing.

    Args:
        growth: take memory as needed (True) or all at once (False).
        limit_mb: the most this process may take of each GPU, in MiB, at least 1; None for no limit.
            With a limit that much is set aside at once, and `growth` does not apply.

    Raises:
        RuntimeError: if devices are open already, or no limit is given where one was before; it
            says what to do.
        ValueError: if `limit_mb` is not a positive integer, or `growth` not a bool.

    Example:

    >>> tf_dsgd.gpu.configure_memory(growth=True)
    """
    global _configured, _by_default
    growth = truth("growth", growth)
    if limit_mb is not None:
        limit_mb = integer("limit_mb", limit_mb, 1, ", in MiB, or None for no limit")
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and _tf.devices_initialised():
        raise RuntimeError(
            "GPU memory cannot be configured any more: TensorFlow has opened its devices, which it "
            "does at the first operation. Call tf_dsgd.gpu.configure_memory() right after the "
            "imports, or set TF_FORCE_GPU_ALLOW_GROWTH=true in the environment."
        )
    if limit_mb is None and any(tf.config.get_logical_device_configuration(g) for g in gpus):
        raise RuntimeError(
            "A limit of GPU memory, or logical devices, were set before, and growth does not apply "
            "to these. Leave this call out, or the one before; or give this one limit_mb, too."
        )
    for device in gpus:
        if limit_mb is not None:
            if _by_default:
                tf.config.experimental.set_memory_growth(device, False)
            tf.config.set_logical_device_configuration(
                device, [tf.config.LogicalDeviceConfiguration(memory_limit=limit_mb)]
            )
        else:
            tf.config.experimental.set_memory_growth(device, growth)
    if _GROWTH in os.environ:  # as the launcher sets it: TensorFlow takes that before the rest
        os.environ[_GROWTH] = str(growth and limit_mb is None).lower()
    _configured, _by_default = True, False


def configure_by_default() -> None:
    """What every cluster and strategy does when it is made: growth, unless the user has decided.

    Clusters do, too: an optimizer that is another argument of the strategy opens the devices.
    """
    global _configured, _by_default
    gpus = tf.config.list_physical_devices("GPU")
    if _configured or _by_default or not gpus:
        return
    if _tf.devices_initialised():
        if not all(tf.config.experimental.get_memory_growth(g) for g in gpus):
            logging.warning(
                "tf_dsgd: TensorFlow opened its GPUs before the cluster or strategy was made, so "
                "memory growth could not be switched on, and this process takes all their memory. "
                "Make the cluster first, or call tf_dsgd.gpu.configure_memory() right after the "
                "imports."
            )
        return
    if not any(tf.config.get_logical_device_configuration(g) for g in gpus):
        said = os.environ.get(_GROWTH)
        configure_memory()
        if said is not None:
            os.environ[_GROWTH] = said
        _configured, _by_default = False, True
