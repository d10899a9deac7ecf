"""The tasks of a TensorFlow cluster: who they are and where, checked before anything is started.

TensorFlow itself does not check TF_CONFIG (task 7 of one worker passes) and then waits for ever.
Nothing here opens a device or starts a server.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf_errors
from tf_dsgd.transport import names
from tf_dsgd.transport.addresses import INDEX, kind_of, place_of, read_addresses

JOBS = ("chief", "worker", "ps")
# Under this name a process of `tf_dsgd.serve` answers with its version.
VERSION_TOKEN = "tf_dsgd_version"

_EXAMPLE = (
    '{"cluster": {"chief": ["h0:2222"], "worker": ["h1:2222", "h2:2222"], "ps": ["h3:2222"]}, '
    '"task": {"type": "worker", "index": 1}}'
)


@dataclasses.dataclass(frozen=True)
class Tasks:
    """The tasks of a cluster and which of them this process is.

    Made by `from_tf_config`, `from_cluster_spec` or `from_resolver`, which check everything.

    Args:
        jobs: job ("chief", "worker", "ps") -> index -> "host:port".
        task_type: the job of this process; None if it is not known.
        task_index: its index within the job.
        tasks_per_worker: how many worker tasks are one worker, see `grouped`.
        between_workers: whether workers send to one another and no task holds weights, see
            `of_peers`.
    """

    jobs: dict[str, dict[int, str]]
    task_type: str | None
    task_index: int
    tasks_per_worker: int = 1
    between_workers: bool = False

    @property
    def workers(self) -> dict[int, str]:
        """Index -> address of the worker tasks."""
        return self.jobs["worker"]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The worker tasks' indices, by workers: each is a group of tasks in a row."""
        indices = sorted(self.workers)
        number = self.tasks_per_worker
        return [tuple(indices[i : i + number]) for i in range(0, len(indices), number)]

    @property
    def ps(self) -> dict[int, str]:
        """Index -> address of the ps tasks."""
        return self.jobs.get("ps", {})

    @property
    def of_shards(self) -> list[tuple[str, int]]:
        """(job, index) of the tasks that hold the weights: ps tasks; without any, the workers.

        None where workers send to one another: each has all weights, and the chief counts.
        """
        if self.between_workers:
            return []
        job = "ps" if self.ps else "worker"
        return [(job, index) for index in sorted(self.jobs[job])]

    @property
    def chief(self) -> str | None:
        """The chief's address, if the configuration names it."""
        return self.jobs.get("chief", {}).get(0)

    @property
    def own_address(self) -> str:
        """Where this process's task listens, "host:port"."""
        return self.jobs[str(self.task_type)][self.task_index]

    @property
    def me(self) -> str:
        """This task in words, such as "worker 1 at 10.0.0.3:2222"."""
        if self.task_type is None:
            return "a task without a name"
        return self.name(self.task_type, self.task_index)

    def name(self, job: str, index: int) -> str:
        """A task in words, such as "worker 1 at 10.0.0.3:2222"."""
        address = self.jobs.get(job, {}).get(index)
        label = job if job == "chief" else f"{job} {index}"
        return f"{label} at {address}" if address else label

    def name_at(self, address: str) -> str:
        """The task at an address, in words."""
        return next(
            self.name(job, index)
            for job, found in self.jobs.items()
            for index, place in found.items()
            if place == address
        )

    def cluster_spec(
        self, present: Mapping[str, Iterable[int]] | None = None
    ) -> tf.train.ClusterSpec:
        """The cluster for TensorFlow.

        Args:
            present: the tasks to name, job -> indices; by default all. Connecting blocks while a
                task that is named is absent.
        """
        if present is None:
            return tf.train.ClusterSpec(self.jobs)
        named = {
            job: {index: self.jobs[job][index] for index in indices}
            for job, indices in present.items()
        }
        return tf.train.ClusterSpec({job: tasks for job, tasks in named.items() if tasks})


def from_tf_config(text: str | None = None, *, ps: bool = True) -> Tasks:
    """The cluster that TF_CONFIG states.

    Addresses of a job may be a list, or a dict from index to address where some tasks are
    left out. "master" counts as "chief".

    Args:
        text: the JSON text; by default the environment variable TF_CONFIG.
        ps: whether the cluster has a chief, and may have ps tasks, or is one of equal processes.

    Raises:
        ValueError: for whatever is wrong in it: what, where, and what to write instead.
    """
    if text is None:
        text = os.environ.get("TF_CONFIG", "")
    if not text.strip():
        raise ValueError(f"TF_CONFIG is not set or empty. Set it as in {_EXAMPLE}.")
    try:
        config = json.loads(
            text, object_pairs_hook=_without_repeated_keys, parse_int=_readable_integer
        )
    except json.JSONDecodeError as error:
        raise ValueError(
            f"TF_CONFIG is not JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            f"({_around(text, error.pos)}). Write it as in {_EXAMPLE}."
        ) from None
    except RecursionError:
        raise ValueError(f"TF_CONFIG is nested too deeply. Write it as in {_EXAMPLE}.") from None
    if not isinstance(config, dict):
        raise ValueError(
            f"TF_CONFIG must be a JSON object, not {kind_of(config)}. Write it as in {_EXAMPLE}."
        )
    layer = config.get("rpc_layer", "grpc")
    if layer != "grpc":
        raise ValueError(
            f'TF_CONFIG["rpc_layer"] is {json.dumps(layer)}; only "grpc" is supported. Leave it '
            "out."
        )
    if "cluster" not in config:
        raise ValueError(f'TF_CONFIG has no "cluster". Write it as in {_EXAMPLE}.')
    jobs = _jobs(config["cluster"], 'TF_CONFIG["cluster"]', ps)
    if "task" not in config:
        raise ValueError(f'TF_CONFIG has no "task". Write it as in {_EXAMPLE}.')
    task = config["task"]
    if not isinstance(task, dict):
        raise ValueError(
            f'TF_CONFIG["task"] must be an object with "type" and "index", not {kind_of(task)}. '
            f"Write it as in {_EXAMPLE}."
        )
    if not task.get("type"):
        raise ValueError(
            'TF_CONFIG["task"] has no "type". Add "type": "chief", "worker" or "ps", the role of '
            "this process."
        )
    return _tasks(jobs, task["type"], task.get("index"), 'TF_CONFIG["task"]')


def from_cluster_spec(spec: tf.train.ClusterSpec) -> Tasks:
    """The cluster that a ClusterSpec states, seen by its chief, which need not be in it.

    Raises:
        ValueError: for whatever is wrong in it: what, where, and what to write instead.
    """
    return _tasks(_jobs(_as_dict(spec), "the ClusterSpec"), "chief", 0, "the ClusterSpec")


def from_resolver(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> Tasks:
    """The cluster that a resolver states. Without a task type the process is the chief.

    Raises:
        ValueError: for whatever is wrong in it: what, where, and what to write instead.
    """
    name = type(resolver).__name__
    if isinstance(resolver, tf.distribute.cluster_resolver.TFConfigClusterResolver):
        from_tf_config()  # it reads the same variable, and fails there without saying why
    try:
        spec, job, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    except Exception as error:
        raise ValueError(
            f"{name} cannot tell the cluster: {type(error).__name__}: {error}. Set TF_CONFIG "
            "instead, or pass a tf.train.ClusterSpec."
        ) from error
    jobs = _jobs(_as_dict(spec), f"the cluster of {name}")
    return _tasks(jobs, job or "chief", index, name)


def grouped(which: Tasks, tasks_per_worker: int) -> Tasks:
    """The cluster in which so many worker tasks in a row are one worker, each with a part of it.

    Raises:
        ValueError: if the tasks are no such groups, or there are no ps tasks.
    """
    made = dataclasses.replace(which, tasks_per_worker=tasks_per_worker)
    if tasks_per_worker == 1:
        return made
    number = len(which.workers)
    if number % tasks_per_worker:
        raise ValueError(
            f"tasks_per_worker={tasks_per_worker} makes groups of as many worker tasks, and the "
            f"cluster has {number}. Start a multiple of {tasks_per_worker}. Received: "
            f"{which.jobs}."
        )
    for m, group in enumerate(made.groups):
        first = group[0]
        if first % tasks_per_worker or group[-1] - first != tasks_per_worker - 1:
            raise ValueError(
                f"tasks_per_worker={tasks_per_worker} makes a group of worker tasks in a row, the "
                f"first of which has a multiple of {tasks_per_worker} for its index, and the tasks "
                f"of worker {m} would be {', '.join(map(str, group))}. Name all tasks of each "
                f"group, or none. Received: {which.jobs}."
            )
    if not which.ps:
        raise ValueError(
            f"tasks_per_worker={tasks_per_worker} needs ps tasks: without them each worker task "
            "holds a part of the weights, and not that of its layers. Leave "
            "tasks_per_worker out; or add ps tasks, if the strategy keeps its weights there. "
            f"Received: {which.jobs}."
        )
    return made


def of_peers(which: Tasks) -> Tasks:
    """The cluster in which workers send to one another, and no task holds weights.

    Raises:
        ValueError: if there are ps tasks. (Without them no worker has several tasks.)
    """
    if which.ps:
        raise ValueError(
            "Workers of this strategy send to one another, and nothing would be on the ps tasks of "
            "this cluster. Leave them out: python -m tf_dsgd.launch --workers 4 --ps 0 train.py. "
            f"Received: {which.jobs}."
        )
    return dataclasses.replace(which, between_workers=True)


def check_ps(which: Tasks) -> None:
    """For strategies that keep their weights on ps tasks.

    Raises:
        ValueError: if there are none.
    """
    if not which.ps:
        raise ValueError(
            "The cluster has no ps tasks beside chief and worker tasks, but this strategy keeps "
            'its weights there. Add "ps": ["host:port"] to the cluster, and run "python -m '
            'tf_dsgd.serve" there; or start all by "python -m tf_dsgd.launch --ps 1". '
            "(tf_dsgd.PeriodicAveragingStrategy and tf_dsgd.CompressedAsyncStrategy do without.) "
            f"Received: {which.jobs}."
        )


def check_port(which: Tasks) -> None:
    """Listens for a moment on the port of this process's task, as TensorFlow's server will.

    Raises:
        OSError: if the port cannot be used, naming the task and the address.
    """
    port = int(which.own_address.rsplit(":", 1)[1])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            raise OSError(
                f"Port {port} cannot be used for {which.me}: {error.strerror}. End the process "
                f'that has it ("ss -ltnp sport = :{port}" names it), or give the task another port '
                "in TF_CONFIG, the same on all tasks."
            ) from None


def doubts_about_own_host(which: Tasks) -> str | None:
    """Why others may not find this process at its task's address; None if all seems well.

    Only a doubt: behind a service of Kubernetes, say, a task does not have its own address.
    """
    host = which.own_address.rsplit(":", 1)[0]
    try:
        family, *_, place = names.look_up(host, 0)[0]
    except OSError as error:
        reason = f"its host {host!r} cannot be resolved here ({error.strerror})"
    else:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(place)
                return None
            except OSError:
                reason = f"{host!r} is no address of this machine"
    return (
        f"{which.me}: {reason}. Unless the others reach this process by it all the same, correct "
        "it in TF_CONFIG, on all tasks"
    )


def remote_version(device: str) -> str | None:
    """The version of tf_dsgd in another process of the cluster this process is connected to.

    Args:
        device: a CPU there, such as "/job:worker/replica:0/task:0/device:CPU:0".

    Returns:
        The version; None if the process runs a TensorFlow server that tf_dsgd did not start.

    Raises:
        tf.errors.OpError: if the process is not reachable.
    """
    try:
        with tf.device(device):
            version = _ask_version()()
        return version.numpy().decode()
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as error:
        if _tf_errors.says_nobody_answers(error, VERSION_TOKEN):
            return None
        raise


@functools.cache
def _ask_version() -> Any:
    """One function for all tasks: to make and to free one takes an answer of all of them."""

    def ask() -> tf.Tensor:
        return tf.raw_ops.PyFunc(input=[], token=VERSION_TOKEN, Tout=[tf.string])[0]

    return tf.function(ask, autograph=False).get_concrete_function()


def _jobs(cluster: Any, where: str, ps: bool = True) -> dict[str, dict[int, str]]:
    """The cluster's part of a configuration, checked."""
    if not isinstance(cluster, dict):
        raise ValueError(
            f"{where} must be an object of jobs, not {kind_of(cluster)}. Write it as in {_EXAMPLE}."
        )
    jobs: dict[str, dict[int, str]] = {}
    for key, addresses in cluster.items():
        job = "chief" if key == "master" else key
        if job == "evaluator":
            raise ValueError(
                f'{where} has a job "evaluator", which is not supported. Leave it out: evaluate '
                "with validation_data or model.evaluate in the chief."
            )
        if job not in JOBS:
            raise ValueError(
                f"{where} has an unknown job {json.dumps(str(key))}. The jobs are "
                '"chief", "worker" and "ps".'
            )
        if job in jobs:
            raise ValueError(f'{where} has both "chief" and "master". Keep one of them.')
        jobs[job] = read_addresses(addresses, f'{where}["{key}"]')
    _check_jobs(jobs, where, ps)
    return {job: jobs[job] for job in JOBS if job in jobs}


def _check_jobs(jobs: dict[str, dict[int, str]], where: str, ps: bool) -> None:
    """Checks what concerns several tasks."""
    if len(jobs.get("chief", {})) > 1:
        raise ValueError(
            f'{where}["chief"] has {len(jobs["chief"])} addresses. A cluster has one chief: keep '
            "the address of the process that runs the training script."
        )
    if "chief" in jobs and 0 not in jobs["chief"]:
        raise ValueError(
            f'{where}["chief"] gives the chief index {next(iter(jobs["chief"]))}. Its index is 0.'
        )
    if "worker" not in jobs:
        raise ValueError(
            f'{where} has no "worker" tasks. Add "worker": ["host:port", ...], one address per '
            "worker process."
        )
    if not ps and "ps" in jobs:
        raise ValueError(
            f"{where} has ps tasks, but here every process trains a model of its own, and none "
            'serves. Start the script by "python -m tf_dsgd.launch --spmd", or with a TF_CONFIG of '
            "worker tasks alone; or use a strategy, such as tf_dsgd.DownpourStrategy()."
        )
    if not ps:
        for job, tasks in jobs.items():
            if list(tasks) != list(range(len(tasks))):
                raise ValueError(
                    f'{where}["{job}"] has the indices {_indices(tasks)}. Name all tasks, from 0 '
                    "on: each takes part in every average."
                )
    if ps and "ps" not in jobs and "chief" not in jobs:
        raise ValueError(
            f"{where} has only worker tasks, but a strategy needs a chief, which runs the training "
            'script, and most keep their weights on ps tasks. Add "chief": ["host:port"], and '
            'for those "ps": ["host:port"], and run "python -m tf_dsgd.serve" on all but the chief.'
        )
    seen: dict[tuple[str, str], str] = {}
    for job, tasks in jobs.items():
        for index, address in tasks.items():
            task = f"{job} {index}"
            other = seen.setdefault(place_of(address), task)
            if other != task:
                raise ValueError(
                    f'{where} gives {other} and {task} the same address "{address}". Every task '
                    "needs a host and port of its own."
                )


def _tasks(jobs: dict[str, dict[int, str]], job: Any, index: Any, where: str) -> Tasks:
    """Checks which of the tasks this process is."""
    job = "chief" if job == "master" else job
    if job == "evaluator":
        raise ValueError(
            f'{where} has the type "evaluator", which is not supported. Evaluate with '
            "validation_data or model.evaluate in the chief."
        )
    if job not in JOBS:
        raise ValueError(
            f"{where} has the unknown type {json.dumps(job, default=str)}. The types are "
            '"chief", "worker" and "ps".'
        )
    if index is None and job == "chief":
        index = 0
    if index is None:
        raise ValueError(f'{where} has no "index". Add "index": 0 for the first {job} task.')
    if isinstance(index, bool) or not INDEX.fullmatch(str(index)):
        raise ValueError(
            f"{where} has the index {json.dumps(index, default=str)}, which is not an integer of "
            f"at least 0. The {job} tasks have the indices {_indices(jobs.get(job, {0: ''}))}."
        )
    index = int(index)
    known = jobs.get(job, {0: ""} if job == "chief" else {})
    if index not in known:
        raise ValueError(
            f"{where} has the index {index}, but the cluster has {len(known)} {job} "
            f"task{'s' * (len(known) != 1)}, with the indices {_indices(known)}. Correct the "
            f'index, or add the address of task {index} to "{job}".'
        )
    return Tasks(jobs, job, index)


def _as_dict(spec: tf.train.ClusterSpec) -> dict[str, dict[int, str]]:
    """A ClusterSpec's tasks; its own `as_dict` leaves empty jobs out."""
    return {
        job: {index: spec.task_address(job, index) for index in spec.task_indices(job)}
        for job in spec.jobs
    }


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON's objects; json.loads would keep the last of two equal keys and say nothing."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"TF_CONFIG has the key {json.dumps(key)} twice. Keep one of them.")
        found[key] = value
    return found


def _readable_integer(digits: str) -> int:
    """JSON's integers; of thousands of digits Python would not say where they are."""
    if len(digits) > 20:
        raise ValueError(f"TF_CONFIG has a number of {len(digits)} digits: {digits[:20]}...")
    return int(digits)


def _indices(tasks: Mapping[int, str]) -> str:
    indices = sorted(tasks)
    if len(indices) > 2 and indices == list(range(len(indices))):
        return f"0 to {indices[-1]}"
    return ", ".join(map(str, indices))


def _around(text: str, position: int) -> str:
    part = text[max(0, position - 12) : position + 12].replace("\n", " ")
    return f"near {part!r}" if part else "at its end"
