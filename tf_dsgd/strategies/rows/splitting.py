"""Which variables are split by rows: `placement` of a strategy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.console import say
from tf_dsgd.strategies.rows.blocks import Blocks
from tf_dsgd.strategies.rows.tables import Rows, SplitTable
from tf_dsgd.strategies.variable import Kind

# An embedding of as many bytes is split by `placement="auto"`.
_AUTO = 100_000_000


class Patterns:
    """Which variables are split: `placement` of a strategy.

    Args:
        placement: regular expressions, each of which is to match a Keras path, whole or from one
            of its names on, and where what matches goes; or "auto", for each
            `keras.layers.Embedding` of at least `auto_bytes`.
        auto_bytes: see there; None for 100 MB.

    Raises:
        TypeError, ValueError: for anything else, naming it.
    """

    def __init__(self, placement: Any, auto_bytes: int | None = None):
        self._auto_bytes = _AUTO if auto_bytes is None else auto_bytes
        self._auto = isinstance(placement, str) and placement == "auto"
        placement = {} if placement is None or self._auto else placement
        if not isinstance(placement, Mapping):
            raise TypeError(
                "placement must be a dict from regular expressions to tf_dsgd.Rows(), such as "
                f'{{"users/.*": tf_dsgd.Rows()}}, or "auto". Received: {placement!r}.'
            )
        self._patterns: dict[str, re.Pattern[str]] = {}
        for pattern, where in placement.items():
            if not isinstance(pattern, str) or not isinstance(where, Rows):
                raise TypeError(
                    "placement must map regular expressions on Keras paths to tf_dsgd.Rows(). "
                    f"Received: {pattern!r}: {where!r}."
                    + (" It is the class: write Rows(), with parentheses." if where is Rows else "")
                )
            try:
                self._patterns[pattern] = re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"placement has {pattern!r}, which is no regular expression: {error}."
                ) from error
        self._unmatched = set(self._patterns)
        self._seen: set[str] = set()
        self.tables: dict[str, tuple[int, ...]] = {}
        """Path and shape of the tables that are split, slots left out."""

    @property
    def patterns(self) -> list[str]:
        """The regular expressions; none with "auto"."""
        return list(self._patterns)

    def __bool__(self) -> bool:
        return self._auto or bool(self._patterns)

    def match(self, variable: keras.Variable, layer: Any) -> bool:
        """Whether a variable that `layer` makes is split."""
        self._seen.add(variable.path)
        if self._auto and _may_be_split(layer):
            size = tf.TensorShape(variable.shape).num_elements()
            return bool(size * tf.as_dtype(variable.dtype).size >= self._auto_bytes)
        names = variable.path.split("/")
        ends = ["/".join(names[k:]) for k in range(len(names))]
        found = [p for p, regex in self._patterns.items() if any(map(regex.fullmatch, ends))]
        self._unmatched.difference_update(found)
        return bool(found)

    def check_recorded(self, workers: int) -> None:
        """Raises a ValueError where a schedule would not say when rows are read."""
        if self and workers > 1:
            raise ValueError(
                "A schedule says when workers fetch, and rows of tables that are split are read in "
                "each mini-batch: played, it would give other weights. Record one worker, or leave "
                f"`placement` out. Received: {workers} workers."
            )

    def check(self) -> None:
        """Raises a ValueError if no pattern matched by now; says so once if some did not."""
        missed, self._unmatched = self._unmatched, set()
        said = (
            f"placement has {sorted(missed)}, and no variable has such a path. A pattern is to "
            "match a path whole, or from one of its names on"
        )
        if missed and missed == set(self._patterns):
            self._unmatched = missed
            raise ValueError(f"{said}; those made so far are {sorted(self._seen)}.")
        if missed:
            say(f"{said}; it may be that of a model that is made later.")


def _may_be_split(layer: Any) -> bool:
    """Whether it is an embedding, and nothing that a subclass makes of one, of independent rows."""
    return (
        type(layer) is keras.layers.Embedding
        and layer.embeddings_constraint is None
        and layer.embeddings_regularizer is None
    )


def wanted(patterns: Patterns, beside: Any, options: Mapping[str, Any]) -> bool:
    """Whether a variable that Keras makes is to be split.

    Args:
        patterns: which ones are.
        beside: the weight whose slot it is, or None.
        options: what it is made with.
    """
    created = _tf.variable_being_created(options.get("initial_value"))
    creator = _tf.creating_object()
    if isinstance(creator, keras.optimizers.Optimizer):
        return isinstance(beside, SplitTable) and created is not None
    if not patterns or created is None or not patterns.match(created[0], creator):
        return False
    variable = created[0]
    rank, dtype = len(variable.shape), tf.as_dtype(variable.dtype)
    if rank < 2 or not dtype.is_floating or not variable.trainable:
        raise ValueError(
            f"placement splits {variable.path!r} by rows, which must be a trainable table of "
            "floats with rows. Received: "
            f"shape {tuple(variable.shape)}, {dtype.name}, trainable={variable.trainable}."
        )
    patterns.tables[variable.path] = tuple(variable.shape)
    return True


def made(strategy: Any, options: Mapping[str, Any]) -> SplitTable:
    """The table in place of a variable that `wanted` tells to split."""
    created = _tf.variable_being_created(options["initial_value"])
    if created is None:
        raise ValueError("Only a variable that Keras makes by an initializer can be split.")
    variable, initializer = created
    of_optimizer = isinstance(_tf.creating_object(), keras.optimizers.Optimizer)
    shape, dtype = tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)
    blocks = Blocks(initializer, shape, dtype, variable.path)
    kind = Kind.SLOT if of_optimizer else Kind.WEIGHT
    return SplitTable(strategy, shape, dtype, variable, kind, blocks)
