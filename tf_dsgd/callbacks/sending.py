"""What `StalenessMonitor` says of compressed messages: their bytes, and what codecs hold back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from absl import logging

from tf_dsgd.algorithm import Codec
from tf_dsgd.compression.lossy import Lossy
from tf_dsgd.engine import traffic

# An epoch's end is warned of where this share of elements is above tau after sending, and it,
# or with the same share the residual, has grown by this factor since the epoch began, or since its
# first sample that had messages: single elements are always late, and first gradients are largest.
_MANY, _GROWN = 0.01, 1.1


@dataclasses.dataclass(frozen=True)
class Sent:
    """What messages were made of until a moment; or between two, and what is held back then."""

    rows: np.ndarray
    """`[workers, traffic.COLUMNS]`."""
    incarnations: tuple[int, ...]
    residuals: np.ndarray | None
    """Each worker's 2-norm; None where the codec holds nothing back."""
    overdue: float | None
    """The share of elements that one more message would not bring below the codec's limit."""
    residuals_lost: int

    def since(self, before: Sent) -> Sent:
        """What was counted from `before` on; of a worker that came back, what it has counted."""
        same = np.equal(self.incarnations, before.incarnations)
        return dataclasses.replace(self, rows=self.rows - before.rows * same[:, None])

    @property
    def norm(self) -> float:
        """Of a worker's residual, in the root of the mean square; NaN where there is none."""
        there = np.array([]) if self.residuals is None else self.residuals
        there = there[np.isfinite(there)]
        return math.sqrt(float(np.mean(there**2))) if len(there) else math.nan

    def measures(self) -> dict[str, float]:
        """What goes into logs; NaN where there was no message."""
        total = self.rows.sum(0)
        messages, size, dense = total[traffic.MESSAGES], total[traffic.BYTES], total[traffic.DENSE]
        found = {
            "message_bytes": _ratio(size, messages),
            "dense_ratio": _ratio(dense, size),
            "fraction_emitted": _ratio(total[traffic.EMITTED], total[traffic.ELEMENTS]),
        }
        if self.residuals is not None:
            gradient = math.sqrt(_ratio(total[traffic.SQUARES], messages))
            found["residual_norm"] = self.norm
            found["residual_to_gradient"] = _ratio(self.norm, gradient)
            found["residuals_lost"] = float(self.residuals_lost)
        if self.overdue is not None:
            found["fraction_overdue"] = self.overdue
        return found


def _ratio(a: float, b: float) -> float:
    return float(a / b) if b else math.nan


class SendingMeter:
    """Reads what workers have counted of their messages, and what they hold back.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self._codec = strategy.algorithm.codec
        self.measures_codec = type(self._codec) is not Codec
        """Whether there is anything to measure: not where messages travel as they are."""
        self.at_any_time = self.measures_codec and not strategy.cluster.locked_in_graph
        """Whether reading waits for no other process; else it is done at rest only."""
        self._warned = False

    def read(self) -> Sent | None:
        """All counts now; None without a codec."""
        if not self.measures_codec:
            return None
        engine = self._strategy.engine
        store, held_back = engine.store, self._codec.held_back
        limit = self._codec.overdue_above if isinstance(self._codec, Lossy) else None
        with engine.explained():
            return Sent(
                rows=store.counted(),
                incarnations=tuple(store.incarnations),
                residuals=None if held_back is None else np.array(store.norms(held_back)),
                overdue=None if limit is None else store.above(held_back, limit),
                residuals_lost=store.residuals_lost,
            )

    def warn(self, begin: Sent, end: Sent) -> None:
        """Says once, at an epoch's end, that more and more elements wait."""
        before, now = begin.overdue, end.overdue
        if self._warned or before is None or now is None or now < _MANY:
            return
        # Where all of them are, the share cannot grow.
        grows = now >= _GROWN * before or (now >= before and end.norm >= _GROWN * begin.norm)
        if not grows:
            return
        self._warned = True
        logging.warning(
            "tf_dsgd: of the elements that workers hold back, %.3g %% are above tau=%g after "
            "sending, %.3g %% were before; what is held back has a norm of %.3g, and had %.3g. "
            "They get more at each message than "
            "the tau that a message takes, so the model falls behind its gradients. Use a larger "
            "tau, or, if gradients are this large only in the beginning, a warm start: the weights "
            "of a short run without compression, or DownpourStrategy's warm_start_steps. A "
            "residual well above one gradient alone is this method's normal state.",
            100 * now,
            self._codec.overdue_above,
            100 * before,
            end.norm,
            begin.norm,
        )
