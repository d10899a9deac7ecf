"""What of AutoGraph has no public name: which functions it rewrites, in `strategy.run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# AutoGraph rewrites what a `tf.function` calls, this package's own code included. The public
# `do_not_convert` would keep it from the functions that a user hands us, too. TF 2.21.
from tensorflow.python.autograph.core import ag_ctx as _autograph_status
from tensorflow.python.autograph.impl import api as _autograph

# A decorator: AutoGraph takes the function as it is, and rewrites what it is given, as it does with
# TensorFlow's own.
as_written = _autograph.autograph_artifact


def rewritten(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose Python loops and branches may be of tensors, as far as its caller's may.

    Called from Python it may, too: TensorFlow would run it there as it is, and here it is traced.
    """
    status = _autograph_status.control_status_ctx()
    return _autograph.tf_convert(step, status, convert_by_default=tf.executing_eagerly())
