"""Checks of arguments that several strategies have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dsgd import compression as codecs
from tf_dsgd.algorithm import Codec
from tf_dsgd.algorithms.downpour import inverse_staleness
from tf_dsgd.checks import integer, one_of
from tf_dsgd.compression.lossy import Lossy
from tf_dsgd.strategies.rows.splitting import Patterns

# Staleness at which a scaling is tried before training: all that a few workers have, and some more.
_TRIED = (*range(65), 100, 1000, 10_000)


def staleness_bound(value: Any) -> int | None:
    """`max_staleness`: an integer of at least 0, or None."""
    return None if value is None else integer("max_staleness", value, 0, ", or None")


def codec(compression: Any, wire_dtype: Any = None) -> Codec:
    """The codec that `compression`, or its older spelling `wire_dtype`, stands for."""
    if wire_dtype is not None:
        one_of("wire_dtype", wire_dtype, ("bfloat16", "float16"), "None")
        if compression is not None:
            raise ValueError(
                f"wire_dtype={wire_dtype!r} is compression=tf_dsgd.compression.Cast({wire_dtype!r})"
                f". Give one of the two. Received: wire_dtype={wire_dtype!r}, "
                f"compression={compression!r}."
            )
        return codecs.Cast(wire_dtype)
    if compression is None:
        return Codec()
    if not isinstance(compression, Codec):
        names = ", ".join(sorted(codecs.__all__))
        raise TypeError(
            f"compression must be a codec of tf_dsgd.compression ({names}), as "
            f"tf_dsgd.compression.Threshold(0.002), or None. Received: {compression!r}."
        )
    return compression


def check_codec_of_tables(codec: Codec, split: Patterns) -> None:
    """Whether tables that `placement` names can be split with this codec.

    Raises:
        ValueError: if it keeps something of each weight where a copy of it is.
    """
    if isinstance(codec, Lossy) and codec.keeps and split.patterns:
        raise keeps_beside_tables(codec, split.patterns)


def keeps_beside_tables(codec: Codec, tables: list[str]) -> ValueError:
    """The error of a codec that keeps something, and of tables that are split by rows."""
    return ValueError(
        f"compression={codec!r} keeps something of each weight on each worker, and no worker has "
        f"the tables of placement, {tables}. Use tf_dsgd.compression.Cast, or leave one of the two "
        "out."
    )


def staleness_factor(value: Any) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """The function f that `staleness_scaling` stands for; None where the factor is always 1."""
    if value is None or callable(value):
        return value
    if isinstance(value, str) and value == "inverse":
        return inverse_staleness
    raise ValueError(
        'staleness_scaling must be "inverse", a callable of the staleness, or None. '
        f"Received: {value!r}."
    )


def check_staleness_factor(given: Any, scaling: Callable[[tf.Tensor], tf.Tensor] | None) -> None:
    """Tries `scaling`, for which the user gave `given`; after TensorFlow may open its devices."""
    if scaling is None:
        return
    traced = None
    for staleness in _TRIED:
        try:
            # In a graph, as the shard calls it; whatever the user's function raises is shown.
            traced = traced or tf.function(
                lambda tau: _real(scaling(tau)), autograph=False
            ).get_concrete_function(tf.TensorSpec([], tf.int64))
            factor = float(traced(tf.constant(staleness, tf.int64)))
        except Exception as error:
            raise ValueError(
                "staleness_scaling must be a callable from an int64 scalar tensor, the staleness, "
                f"to a float scalar. Received: {given!r}, which fails at {staleness}: {error}"
            ) from error
        if not 0 <= factor < float("inf"):
            raise ValueError(
                "staleness_scaling must give a finite factor of at least 0 for every staleness "
                f"from 0 on. Received: {given!r}, which gives {factor} at {staleness}. For 1 / tau "
                'use "inverse", which is 1 at 0.'
            )


def _real(factor: Any) -> tf.Tensor:
    factor = tf.convert_to_tensor(factor)
    if factor.dtype.is_complex:
        raise TypeError("a complex number is no factor")
    return tf.cast(factor, tf.float32)
