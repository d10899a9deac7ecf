"""Waiting for the tasks of a cluster, before TensorFlow is told of any."""

from __future__ import annotations

import time

from tf_dsgd import resuming
from tf_dsgd.console import say
from tf_dsgd.membership import deadlines
from tf_dsgd.transport import cluster_spec, names, probing


def wait_for_tasks(cluster: cluster_spec.Tasks, timeout_seconds: float) -> set[int]:
    """Waits until every task with shards and all of a worker answer; gives the tasks that do.

    Of worker tasks these are the ones of whole groups.

    Raises:
        TimeoutError: if they do not within that time, naming them.
        RuntimeError: if one of them has ended, and nobody will start it again.
    """
    workers = sorted(cluster.workers)
    shards = [cluster.jobs[job][index] for job, index in cluster.of_shards]
    places = [*cluster.workers.values(), *cluster.ps.values()]
    start = said = time.monotonic()
    complete: float | None = None
    while True:
        # One that is stopped takes connections, and TensorFlow would wait for it.
        silent = probing.not_answering(places, deadlines.PROBE_SECONDS)
        answering = {i for i in workers if cluster.workers[i] not in silent}
        here = {i for group in cluster.groups if answering.issuperset(group) for i in group}
        _check_not_ended(cluster, shards)
        absent = [cluster.name_at(address) for address in shards if address in silent]
        now = time.monotonic()
        if not absent and here:
            complete = complete or now
            if len(here) == len(workers) or now - complete > deadlines.GRACE_SECONDS:
                return here
        else:
            others = [cluster.name("worker", i) for i in workers if i not in answering]
            absent = list(dict.fromkeys([*absent, *others]))
            if now - start > timeout_seconds:
                raise TimeoutError(
                    f"After {timeout_seconds:g} s these tasks cannot be reached: "
                    f"{', '.join(absent)}. {_needed(cluster)} Start them with python -m "
                    "tf_dsgd.serve, or correct their addresses."
                    f"{_why(cluster, silent)}"
                )
            if now - said > deadlines.MESSAGE_SECONDS:
                said = now
                say(f"waiting for {', '.join(absent)}{_why(cluster, silent)}")
        time.sleep(deadlines.RETRY_SECONDS)


def _needed(cluster: cluster_spec.Tasks) -> str:
    if cluster.between_workers:
        return "One worker is needed."
    if not cluster.ps:
        return "Without ps tasks every worker is needed."
    if cluster.tasks_per_worker > 1:
        return (
            f"Every ps task and one worker, which is {cluster.tasks_per_worker} tasks, are needed."
        )
    return "Every ps task and one worker are needed."


def _why(cluster: cluster_spec.Tasks, silent: set[str]) -> str:
    return _unknown_hosts(silent) + _others_listen(cluster, silent)


def _unknown_hosts(silent: set[str]) -> str:
    """Says so where a host's name has no address."""
    hosts = sorted({address.rpartition(":")[0].strip("[]") for address in silent})
    unknown = [host for host in hosts if not _has_address(host)]
    if not unknown:
        return ""
    return f" No address is known of the host {', '.join(unknown)}: correct its name in TF_CONFIG."


def _has_address(host: str) -> bool:
    try:
        return bool(names.look_up(host))
    except OSError:
        return False


def _others_listen(cluster: cluster_spec.Tasks, silent: set[str]) -> str:
    """Says so where something takes connections, and is no TensorFlow server, or is stopped."""
    taking = [a for a in sorted(silent) if probing.reachable(a, deadlines.GLANCE_SECONDS)]
    if not taking:
        return ""
    names = ", ".join(cluster.name_at(address) for address in taking)
    return (
        f" What listens at {names} does not answer as a TensorFlow server does: it is another "
        "program, or a stopped one."
    )


def _check_not_ended(cluster: cluster_spec.Tasks, shards: list[str]) -> None:
    """Raises an error where nobody will start again what has to be there."""
    ended = resuming.ended()
    gone = ended.intersection(shards)
    groups = [{cluster.workers[index] for index in group} for group in cluster.groups]
    if not any(ended.isdisjoint(group) for group in groups):
        gone |= ended.intersection(cluster.workers.values())
    if gone:
        names = ", ".join(cluster.name_at(address) for address in sorted(gone))
        raise RuntimeError(
            f"{names} ended before this process was connected to it. {_needed(cluster)} "
            f"To start again: {resuming.command()}"
        )
