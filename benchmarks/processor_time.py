"""Processor seconds of processes and of their threads, by what they are.

Read from /proc, so on Linux alone, and in ticks of the kernel's clock (10 ms as a rule): what is to
be told apart should run for seconds. Needs nothing but Python, as each contender has another.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PROC = Path("/proc")
CHIEF, PS, WORKERS = "chief", "ps", "workers"
ROLES = (CHIEF, PS, WORKERS)
"""In this order tables show them."""

Pids = Mapping[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Stat:
    """What a line of /proc/.../stat says of a process, or of a thread."""

    name: str
    parent: int
    ticks: int
    """In user's code and in the kernel."""


def parse_stat(line: str) -> Stat:
    """From such a line; a name may have blanks and brackets of its own."""
    name, _, rest = line.partition("(")[2].rpartition(")")
    fields = rest.split()  # from the third on: state, parent, ...; user's time is the 14th
    return Stat(name, int(fields[1]), int(fields[11]) + int(fields[12]))


def seconds_of(pid: int) -> float:
    """All threads of a process, those that ended, too; 0 of one that is gone."""
    try:
        stat = parse_stat((PROC / str(pid) / "stat").read_text())
    except OSError:
        return 0.0
    return stat.ticks / os.sysconf("SC_CLK_TCK")


def read(pids: Pids) -> dict[str, float]:
    """Seconds so far, by role."""
    return {role: sum(seconds_of(pid) for pid in own) for role, own in pids.items()}


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The seconds between two readings."""
    return {role: after[role] - before[role] for role in after}


# -- which processes belong together ---------------------------------------------------------------


def role_of(environment: bytes) -> str | None:
    """By the TF_CONFIG in /proc/.../environ: a task of a cluster, or None."""
    for entry in environment.split(b"\0"):
        if entry.startswith(b"TF_CONFIG="):
            kind = json.loads(entry.partition(b"=")[2])["task"]["type"]
            return WORKERS if kind == "worker" else str(kind)
    return None


def children(parent: int) -> list[int]:
    """Processes that this one has started and that still run."""
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                stat = parse_stat((entry / "stat").read_text())
            except OSError:  # it ended meanwhile
                continue
            if stat.parent == parent:
                found.append(int(entry.name))
    return found


def of_cluster() -> dict[str, list[int]]:
    """The tasks that the launcher of this process has started, this one among them.

    Without a launcher it is this process, as the chief.
    """
    if "TF_CONFIG" not in os.environ or not PROC.is_dir():
        return {CHIEF: [os.getpid()]}
    found: dict[str, list[int]] = {}
    for pid in children(os.getppid()):
        try:
            role = role_of((PROC / str(pid) / "environ").read_bytes())
        except OSError:
            continue
        if role is not None:
            found.setdefault(role, []).append(pid)
    return found


# -- threads ---------------------------------------------------------------------------------------


def threads_of(pid: int) -> dict[int, Stat]:
    """The threads of a process that live now."""
    found = {}
    for entry in (PROC / str(pid) / "task").iterdir():
        try:
            found[int(entry.name)] = parse_stat((entry / "stat").read_text())
        except OSError:
            continue
    return found


PYTHON, COMPUTE, GRPC, INPUT, OTHER = "Python", "TensorFlow's threads", "gRPC", "tf.data", "other"
_KINDS = (
    (re.compile(r"grpc|event_engine|worker_cache|GrpcWork|resolver|timer_manager", re.I), GRPC),
    (re.compile(r"tf_data|tf_ModelPool|data_private|tf_inter.*data", re.I), INPUT),
    (re.compile(r"^tf_|Eigen|TF_", re.I), COMPUTE),
    (re.compile(r"python|pytest|tf_dsgd worker", re.I), PYTHON),
)


def kind_of(name: str) -> str:
    """What a thread is for, by the name that the kernel knows it by (15 characters at most)."""
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), OTHER)


def by_kind(before: Mapping[int, Stat], after: Mapping[int, Stat]) -> dict[str, float]:
    """Seconds between two readings of a process's threads; what ended before the second is lost."""
    found: dict[str, float] = {}
    for thread, stat in after.items():
        ticks = stat.ticks - (before[thread].ticks if thread in before else 0)
        kind = kind_of(stat.name)
        found[kind] = found.get(kind, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return found


def per_step(seconds: Mapping[str, float], steps: float) -> dict[str, float]:
    """Milliseconds of each role a mini-batch."""
    return {role: 1e3 * value / steps for role, value in seconds.items()}


def in_order(roles: Iterable[str]) -> list[str]:
    """Chief, ps, workers, and then what else there is."""
    given = set(roles)
    return [r for r in ROLES if r in given] + sorted(given - set(ROLES))
