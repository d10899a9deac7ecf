"""What of this machine its workers share: GPUs and cores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


def gpus() -> list[str]:
    """The GPUs that workers share, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        ends = [i for i, name in enumerate(names) if name in ("", "-1")]
        return names[: ends[0]] if ends else names
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(n) for n in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def cores() -> int:
    """How many of them this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_gpu(gpus: Sequence[str], worker: int) -> dict[str, str]:
    """The environment by which a worker has one GPU, in turn; none if there is none."""
    return {"CUDA_VISIBLE_DEVICES": gpus[worker % len(gpus)]} if gpus else {}
