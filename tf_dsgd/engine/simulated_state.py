"""What a simulated run's checkpoint has of the simulator itself.

How far the delays' random numbers are, and of stragglers what is under way, and will be refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.virtual_clock import Turn
from tf_dsgd.membership.lease import Lease, LeaseState
from tf_dsgd.membership.task import Task


def late_work(tasks: Sequence[Task], turns: Iterable[Turn]) -> np.ndarray:
    """What a checkpoint has of it, `[workers, 6]`, at rest: nobody runs another's lease.

    Args:
        tasks: the workers.
        turns: of stragglers whose backup task was first; what they send is refused.
    """
    refused_at = {turn.task.index: turn.time for turn in sorted(turns)}
    ranks = {m: float(rank) for rank, m in enumerate(refused_at)}
    rows = []
    for task in tasks:
        begun = None if task.owes is None else task.owes.begun
        m, owes = task.index, float(task.owes is not None)
        numbers = begun, task.took, owes, task.waits_since, refused_at.get(m), ranks.get(m)
        rows.append([math.nan if n is None else float(n) for n in numbers])
    return np.array(rows)


def restore_late_work(scheduler: Scheduler, state: np.ndarray) -> list[tuple[Task, float]]:
    """Sets what `late_work` gave; gives who sends what is refused, and when."""
    found = []
    for task, row in zip(scheduler.tasks, state.tolist(), strict=True):
        begun, took, _, waits, refused_at, rank = row
        task.took = took
        task.waits_since = None if math.isnan(waits) else waits
        if math.isnan(rank):
            continue
        lease = Lease(task.index, task.incarnation, task.number)
        for state_of_it in (LeaseState.SHARED, LeaseState.SUPERSEDED):
            lease.become(state_of_it)
        task.owes = lease
        scheduler.begins(task, begun)
        lease.begun = begun
        found.append((rank, task, refused_at))
    found.sort(key=lambda each: each[0])
    return [(task, refused_at) for _, task, refused_at in found]


_WORD = (1 << 64) - 1


def random_state(generators: Sequence[np.random.Generator]) -> np.ndarray:
    """How far they are, `[generators, 6]`; numbers of 128 bits are halved."""
    words = []
    for generator in generators:
        drawn = generator.bit_generator.state
        numbers = drawn["state"]["state"], drawn["state"]["inc"]
        halves = [part for n in numbers for part in (n >> 64, n & _WORD)]
        words.append([*halves, drawn["has_uint32"], drawn["uinteger"]])
    return np.array(words, np.uint64)


def restore_random_state(generators: Sequence[np.random.Generator], state: np.ndarray) -> None:
    """Sets what `random_state` gave."""
    for generator, words in zip(generators, state.tolist(), strict=True):
        a, b, c, d, has, uinteger = words
        generator.bit_generator.state = {
            **generator.bit_generator.state,
            "state": {"state": a << 64 | b, "inc": c << 64 | d},
            "has_uint32": has,
            "uinteger": uinteger,
        }
