"""The position in the data: what is done of a pass over them, kept for a run that is started again.

`fit` opens an iterator, mostly one per epoch, and takes a token from it for every mini-batch. A run
that goes on in the middle of an epoch makes all steps of that epoch; the first of them, which were
done before, get tokens that hand out nothing, and their mini-batches are taken from the data and
dropped.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd.strategies.caller import fit_that_runs
from tf_dsgd.strategies.pipelines import Segment, Source

_PLACE, _PIPELINES, _SOURCES = "position", "position_of_pipelines", "seeds_of_pipelines"
_LEFT_BEHIND = "left_behind_by_pipelines"


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run is in its data."""

    steps: int
    """Mini-batches of the epoch that are done."""
    batches: int
    """Mini-batches of the pass over the data that are done; more where it began in an earlier
    epoch."""
    pipelines: tuple[int, ...] = ()
    """Mini-batches of each pipeline that were begun, where workers make them themselves."""
    left_behind: tuple[Segment, ...] = ()
    """Those among them that are not done, as a worker was lost."""


class Passes:
    """Which mini-batches of the data `fit` has done, and which it need not do again."""

    def __init__(self) -> None:
        self.tokens = 0
        """Mini-batches handed out, or passed over because they were done before."""
        self._sources: list[weakref.ref[Source]] = []
        self._seeds: list[list[int]] = []
        """Restored, of each of the sources."""
        self._current: weakref.ref[Any] | None = None
        self._ahead: Position | None = None
        self._of_fit: Any = None
        """The callbacks of the `fit` for which that was restored; None if there was none."""

    def add(self, source: Source) -> None:
        """Registers pipelines that workers run; a later run of the same script makes the same."""
        self._seed(source, len(self._sources))
        self._sources.append(weakref.ref(source))

    def _seed(self, source: Source | None, place: int) -> None:
        if source is not None and place < len(self._seeds):
            source.seed, source.epochs = self._seeds[place]

    # -- while `fit` goes through the data --------------------------------------------------

    def begin(self, iterator: Any) -> bool:
        """Called when the first token of an iterator was used in `fit`.

        Returns:
            Whether that token's mini-batch is to be trained on; False where it was before.
        """
        self._current = weakref.ref(iterator)
        position, self._ahead = self._ahead, None
        restored_for, self._of_fit = self._of_fit, None
        if restored_for is not None and restored_for() is not fit_that_runs()[1]:
            return True  # that one ended by an error before it took a token
        if position is None or not position.batches:
            return True
        iterator.skip(position)
        if not position.steps:
            return True
        iterator.passing = position.steps - 1
        self.tokens += 1
        return False

    def handed_out(self, iterator: Any) -> None:
        """Called as a mini-batch is handed out."""
        self.tokens += 1
        iterator.done += 1

    # -- checkpoints ------------------------------------------------------------------------

    def take(self, steps: int, last: bool = False) -> dict[str, np.ndarray]:
        """Arrays by name, after so many mini-batches of the epoch; 0 between two epochs.

        The strategy must be at rest. After the `last` epoch no data are asked for any more.
        """
        iterator = None if self._current is None else self._current()
        position = _position_of(iterator, steps, last)
        again = None
        if iterator is not None and position.batches:
            again = iterator.dataset.source  # its seed is used once more
        sources = [reference() for reference in self._sources]
        return {
            _PLACE: np.array([position.steps, position.batches], np.int64),
            _PIPELINES: np.array(position.pipelines, np.int64),
            _LEFT_BEHIND: np.array(
                [dataclasses.astuple(segment) for segment in position.left_behind], np.int64
            ).reshape(-1, 3),
            _SOURCES: np.array(
                [[0, 0] if s is None else [s.seed, s.epochs - (s is again)] for s in sources],
                np.int64,
            ).reshape(-1, 2),
        }

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Looks whether `restore` can set what `take` gave.

        Raises:
            ValueError: if it cannot.
        """
        shapes = {_PLACE: (2,), _PIPELINES: (-1,), _LEFT_BEHIND: (-1, 3), _SOURCES: (-1, 2)}
        for name, shape in shapes.items():
            if name not in arrays:
                raise ValueError(f"The state is not complete: {[name]} are missing.")
            found = arrays[name]
            fits = len(found.shape) == len(shape) and all(
                n in (-1, m) for n, m in zip(shape, found.shape, strict=True)
            )
            if found.dtype != np.int64 or not fits:
                raise ValueError(
                    f"The state does not fit: {name} is {found.shape} {found.dtype}, and {shape} "
                    "int64 is expected."
                )

    def restore(self, arrays: Mapping[str, np.ndarray] | None) -> Position:
        """Sets what `take` gave, for the next iterator of `fit`; with None that one is new."""
        self._of_fit = None
        if arrays is None:
            self._ahead = None
            return Position(0, 0)
        steps, batches = arrays[_PLACE].tolist()
        left_behind = tuple(Segment(*row) for row in arrays[_LEFT_BEHIND].tolist())
        callbacks = fit_that_runs()[1]
        if callbacks is not None:
            self._of_fit = weakref.ref(callbacks)
        self._ahead = Position(steps, batches, tuple(arrays[_PIPELINES].tolist()), left_behind)
        self._seeds = arrays[_SOURCES].tolist()
        for place, reference in enumerate(self._sources):
            self._seed(reference(), place)
        return self._ahead


def _position_of(iterator: Any, steps: int, last: bool) -> Position:
    if iterator is None or not (steps or _goes_on(iterator, last)):
        return Position(0, 0)
    pipelines = iterator.stream.pipelines
    if iterator.done > steps and iterator.dataset.cardinality >= 0:
        # Data that end, in parts of `steps_per_epoch`: Keras would not know in the new process how
        # much of the pass is left. The epoch takes them from their beginning.
        return Position(steps, steps, () if pipelines is None else pipelines.first(steps))
    if pipelines is None:
        return Position(steps, iterator.done)
    position = Position(steps, iterator.done, pipelines.position(), pipelines.left_behind())
    done = sum(position.pipelines) - sum(segment.count for segment in position.left_behind)
    if done != position.batches:
        raise RuntimeError(
            f"Of {position.batches} mini-batches that were handed out, {done} were taken from "
            f"workers' pipelines: {position}. No checkpoint is written. This is a mistake in "
            "tf_dsgd; please report it."
        )
    return position


def _goes_on(iterator: Any, last: bool) -> bool:
    """Whether the next epoch goes on in the same pass, as far as a new process can do so, too."""
    length = iterator.dataset.cardinality
    if length != tf.data.UNKNOWN_CARDINALITY:
        return bool(length == tf.data.INFINITE_CARDINALITY)
    # Only the data can tell, and a generator may never give a batch that nobody needs.
    return not (last or iterator.stream.at_end())
