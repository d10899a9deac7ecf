"""Hogwild! (Niu, Recht, Re, Wright, NIPS 2011, algorithm 1).

    worker:  sample e;  read x_e;  G_e <- gradient;  for v in e:  x_v <- x_v - gamma b_v' G_e

x = the weights, e = the rows and the dense weights of a mini-batch, gamma = the compiled
optimizer's rate. Nobody has a copy of x, and nobody locks it.
"""

from __future__ import annotations

import dataclasses

from tf_dsgd import algorithm
from tf_dsgd.algorithms.downpour import AccrueGradient, Periods


@dataclasses.dataclass(frozen=True)
class GradientAtShared(AccrueGradient):
    """The gradient of one mini-batch, at the shared weights; there is no copy to step on."""

    rate: float | None = 0.0
    shares_weights = True


@dataclasses.dataclass(frozen=True)
class AddInPlace(algorithm.ServerRule):
    """One update by the compiled optimizer, beside those of other messages."""

    lock_free = (
        "The optimizer only adds. To a dense weight TensorFlow adds as a whole, under the lock of "
        "that variable; of rows that two messages share, a lost addition is as rare as the sharing."
    )

    def receive(self, shard: algorithm.Shard, message: algorithm.Message) -> bool:
        shard.optimize(message.tensors, 1.0, message)
        return True


@dataclasses.dataclass(frozen=True)
class AddUnderLocksOfRows(AddInPlace):
    """The paper's AIG: all locks of e's rows are taken before the loop over v, and given after it.

    Rows are read before, without locks.
    """

    lock_free = (
        "The optimizer only adds: to a dense weight under the lock of that variable, and to rows "
        "under locks of these."
    )

    def receive(self, shard: algorithm.Shard, message: algorithm.Message) -> bool:
        def update() -> None:
            shard.optimize(message.tensors, 1.0, message)

        shard.holding_rows(message.tensors, update)
        return True


@dataclasses.dataclass(frozen=True)
class InTurn(Periods):
    """The paper's round-robin, as Langford, Smola, Zinkevich (Slow Learners are Fast, NIPS 2009).

    Worker k mod n has mini-batch k, and updates come in the order of k.
    """

    in_turn = True


@dataclasses.dataclass(frozen=True)
class AddInTurn(AddInPlace):
    """One update by the compiled optimizer, while no other message's is made."""

    lock_free = "One worker updates at a time, each in its turn; weights are read meanwhile."
