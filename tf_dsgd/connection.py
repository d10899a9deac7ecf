"""This process's connection, as the chief, to the tasks of a TensorFlow cluster."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_dsgd import _tf, _tf_remote, channels, listening, probing, resuming, sockets, tasks
from tf_dsgd.aside import Aside

_LOOK_SECONDS = 0.2  # between two attempts to reach a task that is not there yet
_MESSAGE_SECONDS = 5.0  # between two messages that say what is waited for
_GRACE_SECONDS = 3.0  # for the other workers, once one is there
_PROBE_SECONDS = 1.0  # until a task that does not answer counts as absent
_GLANCE_SECONDS = 0.2  # the same, for one that is asked again a second later
_ANSWER_SECONDS = 5.0  # the same, for one that TensorFlow would wait for without end
_CALL_SECONDS = 1.0  # between two looks at who is called
_LEFT_SECONDS = 0.5  # between a worker's leaving and its joining anew; twice that after a failure
_MOST_LEFT_SECONDS = 8.0
_REACH_SECONDS = 3.0  # for gRPC to connect to a worker that is there again (`tf_dsgd.channels`)
_FIRST_JOIN_SECONDS = 30.0  # for a worker to join while a strategy is made
# What TensorFlow says of a task where this process has nothing, or that it does not know itself.
_NO_CONTEXT = ("context_id", "unknown device", "No worker known as")
_HOST = "/job:chief/replica:0/task:0/device:CPU:0"


class Connection:
    """The devices of a cluster, and who of its workers is there.

    Made by `connect`. TensorFlow's own connecting blocks while a task is absent, so only tasks
    that listen are named to it, and workers that come later are added.

    Args:
        cluster: the tasks.
        timeout_seconds: how long to wait for every ps and one worker.
        silent_seconds: how long a task may not answer until calls to it end with an error.
        used: whether TensorFlow had to be used before.
    """

    def __init__(
        self,
        cluster: tasks.Tasks,
        timeout_seconds: float,
        silent_seconds: float,
        used: bool = False,
    ):
        self.tasks = cluster
        self._used = used
        self._silent = silent_seconds
        self.workers = sorted(cluster.workers)
        self.shards_on_workers = not cluster.ps
        self.mute: set[str] = set()
        """Addresses of tasks that accept connections, perhaps, and have not answered for long."""
        self.host_device = _HOST
        if cluster.chief is not None:
            tasks.check_port(cluster)
            doubts = tasks.doubts_about_own_host(cluster)
            if doubts:
                say(doubts)
        here = self._wait(timeout_seconds)
        self.changes = 0
        """How often TensorFlow was told of other tasks: each time it keeps some threads."""
        self._known = set(here)
        """Workers that TensorFlow was told of."""
        self._estranged: set[int] = set()
        """Those that were lost, or failed as they joined, since."""
        self._left: dict[int, tuple[float, float]] = {}
        """When they left to join anew, and how long they stay away."""
        self._left_out: set[str] = set()
        """Addresses of workers that TensorFlow let go of, or may have, since a change was whole."""
        self._join: tuple[int, Aside] | None = None
        """The worker that is being added, or whose end nobody has looked at."""
        channels.configure(silent_seconds)
        self._connect(here)
        self.reasons: list[Callable[[tf.errors.OpError], RuntimeError | None]] = []
        """Each tells what the failure of a call may be due to."""
        _tf_remote.tell_without_waiting()
        _tf_remote.explain_calls(self._reason)
        self._main = _tf_remote.SynchronousExecutor()
        self.use()
        self._executor = _tf_remote.SynchronousExecutor()
        self.asked = "", 0.0
        """Who was asked to answer a call last, and when."""
        self._answer = tf.function(_answer).get_concrete_function()
        for job, index in cluster.of_shards:
            self._check_version(job, index)
        for index in sorted(here.difference(i for job, i in cluster.of_shards if job == "worker")):
            try:
                check = functools.partial(self._check_version, "worker", index)
                self.call(self.workers.index(index), check)
            except tf.errors.OpError:  # it is gone again, or stopped, and may come later
                self._estranged.add(index)

    def use(self) -> None:
        """Has this thread's calls to tasks return when they are done: the one that trains."""
        self._main.use()
        self._trains = threading.get_ident()

    def _reason(self, error: tf.errors.OpError) -> RuntimeError | None:
        """Why a call of the thread that trains failed, if it is known: in `evaluate`, or a loop.

        Others' calls are looked at where they are made.
        """
        if threading.get_ident() != self._trains:
            return None
        found = (reason(error) for reason in reversed(self.reasons))
        return next((reason for reason in found if reason is not None), None)

    # -- devices ----------------------------------------------------------------------------

    def worker_devices(self) -> list[str]:
        """Where each worker computes: its first GPU, else its processor."""
        visible = {d.name for d in tf.config.list_logical_devices()}
        devices = []
        for index in self.workers:
            gpu = _device("worker", index, "GPU")
            devices.append(gpu if gpu in visible else _device("worker", index))
        return devices

    def shard_devices(self) -> list[str]:
        """Where each shard is."""
        return [_device(job, index) for job, index in self.tasks.of_shards]

    # -- who is there -----------------------------------------------------------------------

    def worker_name(self, m: int) -> str:
        """Worker number m in words."""
        return self.tasks.name("worker", self.workers[m])

    def worker_address(self, m: int) -> str:
        """Where worker number m is."""
        return self.tasks.workers[self.workers[m]]

    def worker_listens(self, m: int) -> bool:
        """Whether worker number m can be reached."""
        return self._listens(self.worker_address(m))

    def _listens(self, address: str) -> bool:
        return address not in self.mute and probing.reachable(address, _PROBE_SECONDS)

    def addresses(self) -> list[str]:
        """Of all workers and ps tasks."""
        return [*self.tasks.workers.values(), *self.tasks.ps.values()]

    def name_at(self, address: str) -> str:
        """The worker or ps at an address, in words."""
        jobs = self.tasks.jobs.items()
        return next(
            self.tasks.name(job, index)
            for job, found in jobs
            for index, place in found.items()
            if place == address
        )

    def silent_shards(self) -> list[str]:
        """The tasks with shards, in words, that cannot be reached."""
        return [
            self.tasks.name(job, index)
            for job, index in self.tasks.of_shards
            if not self._listens(self.tasks.jobs[job][index])
        ]

    def unanswering_shards(self, seconds: float) -> list[str]:
        """The tasks with shards, in words, that do not answer within that time."""
        places = {self.tasks.jobs[j][i]: self.tasks.name(j, i) for j, i in self.tasks.of_shards}
        return [places[address] for address in probing.not_answering(places, seconds)]

    def call(self, m: int, action: Callable[[], Any]) -> Any:
        """What `action` gives, which calls worker number m for a thread that others wait for.

        That waits no longer than a worker takes to show that it is there. All that do not are taken
        for lost at once, so that none of them is waited for next.

        Raises:
            tf.errors.OpError: if it does not, or the call failed.
        """
        if self.shards_on_workers:  # nobody goes on without it
            return action()
        address = self.worker_address(m)
        call = None if address in self.mute else Aside(action, f"tf_dsgd calls worker {m}")
        while call is not None and not call.wait(_CALL_SECONDS):
            if address in self.silence(self.tasks.workers.values()):
                call = None
        if call is None:
            raise tf.errors.UnavailableError(None, None, "It does not answer.")
        return call.result()

    def silence(self, addresses: Iterable[str]) -> set[str]:
        """Ends calls to those of the addresses that do not answer for some seconds; gives them."""
        seconds = min(_ANSWER_SECONDS, self._silent)
        silent = probing.not_answering(addresses, seconds)
        for address in sorted(silent):
            if address not in self.mute:
                say(f"{self.name_at(address)} has not answered for {seconds:g} s")
            self.mute.add(address)
            sockets.close_connections(address)
        return silent

    def present(self) -> list[bool]:
        """Which workers are there now; those that came, or came back, join."""
        return [self._is_present(m) for m in range(len(self.workers))]

    def _is_present(self, m: int) -> bool:
        if not self.worker_listens(m):
            return False
        index = self.workers[m]
        try:
            same = functools.partial(self._is_the_same, index)
            if index in self._known - self._estranged and self.call(m, same):
                return True
            return self.worker_listens(m) and self.join(m, _FIRST_JOIN_SECONDS)
        except tf.errors.OpError:  # it is gone again, and may come later
            self.estrange(m, joining=True)
            return False

    def join(self, m: int, seconds: float) -> bool:
        """Adds worker number m, which came or came back, and listens; whether that is done.

        TensorFlow waits for a task that stops in the moment in which it is added. So it is added in
        a thread: who calls first waits `seconds`, and calls again. One worker is added at a time.

        Raises:
            UnequalVersions: if it runs another version of the package.
            tf.errors.OpError: if it is gone again, or another is in that moment, or no connection
                to it is made yet.
        """
        begins = self._join is None
        if self._join is None:
            left, stays = self._left.get(self.workers[m], (0.0, 0.0))
            stays_away = time.monotonic() - left < stays
            if stays_away or not probing.answers(self.worker_address(m), _GLANCE_SECONDS):
                return False
            self._join = m, Aside(lambda: self._add(m), f"tf_dsgd adds worker {m}")
        worker, adding = self._join
        if not adding.wait(seconds if begins else 0.0):
            return False
        self._join = None
        try:
            adding.result()
        except (UnequalVersions, tf.errors.OpError) as error:
            if worker == m:
                raise
            self.estrange(worker, joining=True)
            say(f"{self.worker_name(worker)} has not joined: {error}")
        return worker == m and self.workers[m] in self._known

    def estrange(self, m: int, *, joining: bool = False) -> None:
        """Worker number m was lost, or failed as it joined: it may not know all functions.

        If it is the same process when it joins next, it leaves before, for longer each time that it
        fails (`joining`).
        """
        index = self.workers[m]
        self._estranged.add(index)
        if not joining:
            self._left.pop(index, None)

    def _add(self, m: int) -> None:
        index = self.workers[m]
        others = self._known - {index}
        silent = probing.not_answering([self.tasks.workers[i] for i in others], _ANSWER_SECONDS)
        absent = {i for i in others if self.tasks.workers[i] in silent}
        # Of others that were lost TensorFlow would want to know now, too, who they are.
        absent |= {i for i in (others & self._estranged) - absent if not self._is_reached(i)}
        if index in self._known and not self._is_reached(index):
            raise tf.errors.UnavailableError(None, None, "No connection to it is made yet.")
        if index in self._estranged & self._known and self._is_the_same(index):
            # TensorFlow keeps what it knows of a process, and does not tell it again of functions
            # that it was told of while it did not answer, or that were lost with its connection
            # (TF 2.21).
            _, stays = self._left.get(index, (0.0, _LEFT_SECONDS / 2))
            self._known = self._known - absent - {index}  # also if the rest fails
            try:
                self._change({}, absent | {index})
            finally:
                # What it had there is freed when its last call has ended, by a number that the next
                # context will have, too: that one would not live long if it were there by then.
                self._left[index] = time.monotonic(), min(2 * stays, _MOST_LEFT_SECONDS)
            return
        self._estranged.discard(index)
        self._known = (self._known - absent) | {index}  # also if the rest fails
        self._change({index: self.tasks.workers[index]}, absent)
        self._check_version("worker", index, UnequalVersions)

    def _change(self, joining: dict[int, str], absent: set[int]) -> None:
        """Tells TensorFlow who its workers are; it asks all, and all calls wait for that.

        One that stops in this moment is found out here, and not waited for.
        """
        self.changes += 1
        for address in self._left_out.intersection(joining.values()):
            sockets.close_connections(address)  # now: what it is told next is not to be cut off
            self._left_out.discard(address)
        change = functools.partial(_tf_remote.change_tasks, "worker", joining, absent)
        changing = Aside(change, "tf_dsgd changes the cluster")
        self._left_out.update(self.tasks.workers[i] for i in absent)
        limit = time.monotonic() + channels.ASK_SECONDS + self._silent
        while not changing.wait(_CALL_SECONDS):
            self._left_out |= self.silence(self.tasks.workers.values())
            if time.monotonic() > limit:  # one is there, and answers no calls
                for address in self._left_out.union(joining.values()):
                    sockets.close_connections(address)
        # They may have gone on meanwhile, and a call that was under way never end (TF 2.21).
        for address in self._left_out:
            sockets.close_connections(address)
        changing.result()
        self._left_out.clear()

    def ask(self, addresses: set[str]) -> None:
        """Has tasks there answer a call: connections on which long ones wait live by it.

        For a thread of its own: one that stops in this moment is waited for.
        """
        places = {("worker", i): self.tasks.workers[i] for i in self._known}
        places |= {("ps", i): address for i, address in self.tasks.ps.items()}
        with self._executor.scope():
            for (job, index), address in places.items():
                if address not in addresses:
                    continue
                self.asked = address, time.monotonic()
                try:
                    with tf.device(_device(job, index)):
                        self._answer()
                except tf.errors.OpError:  # whoever needs it will tell
                    self._executor.clear_error()

    def _is_reached(self, index: int) -> bool:
        """Whether calls reach a worker that is there: gRPC pauses between two attempts to connect.

        `_change` would fail, and leave threads behind.
        """
        deadline = time.monotonic() + _REACH_SECONDS
        while time.monotonic() < deadline:
            try:
                tasks.remote_version(_device("worker", index))
            except tf.errors.UnavailableError:
                time.sleep(_LOOK_SECONDS)
            except tf.errors.OpError:
                return True
            else:
                return True
        return False

    def _is_the_same(self, index: int) -> bool:
        """Whether a worker has a context of this process: it was stopped, or out of reach.

        It may have another error for an answer, as that it does not know the function.
        """
        try:
            tasks.remote_version(_device("worker", index))
        except tf.errors.UnavailableError:
            return False
        except tf.errors.OpError as error:
            return not any(text in str(error) for text in _NO_CONTEXT)
        return True

    # -- connecting -------------------------------------------------------------------------

    @property
    def _needed(self) -> str:
        if self.shards_on_workers:
            return "Without ps tasks every worker is needed."
        return "Every ps task and one worker are needed."

    def _wait(self, timeout_seconds: float) -> set[int]:
        """Waits until every ps and a worker listen; gives the workers that do."""
        start = said = time.monotonic()
        complete: float | None = None
        while True:
            # One that is stopped takes connections, and TensorFlow would wait for it.
            silent = probing.not_answering(self.addresses(), _PROBE_SECONDS)
            workers = {i for i in self.workers if self.tasks.workers[i] not in silent}
            shards = [self.tasks.jobs[job][index] for job, index in self.tasks.of_shards]
            self._check_not_ended(shards)
            absent = [self.name_at(address) for address in shards if address in silent]
            now = time.monotonic()
            if not absent and workers:
                complete = complete or now
                if len(workers) == len(self.workers) or now - complete > _GRACE_SECONDS:
                    return workers
            else:
                others = [self.tasks.name("worker", i) for i in self.workers if i not in workers]
                absent = list(dict.fromkeys([*absent, *others]))
                if now - start > timeout_seconds:
                    raise TimeoutError(
                        f"After {timeout_seconds:g} s these tasks cannot be reached: "
                        f"{', '.join(absent)}. {self._needed} Start "
                        "them with python -m tf_dsgd.serve, or correct their addresses."
                    )
                if now - said > _MESSAGE_SECONDS:
                    said = now
                    say(f"waiting for {', '.join(absent)}")
            time.sleep(_LOOK_SECONDS)

    def _check_not_ended(self, shards: list[str]) -> None:
        """Raises an error where nobody will start again what has to be there."""
        ended = resuming.ended()
        gone = ended.intersection(shards)
        if ended.issuperset(self.tasks.workers.values()):
            gone.update(self.tasks.workers.values())
        if gone:
            names = ", ".join(self.name_at(address) for address in sorted(gone))
            raise RuntimeError(
                f"{names} ended before this process was connected to it. {self._needed} "
                f"To start again: {resuming.command()}"
            )

    def _connect(self, workers: set[int]) -> None:
        if _tf.devices_initialised() and not self._used:
            say(
                "TensorFlow was used before the strategy was made. Variables and tensors made "
                "until now cannot be used any more: make the strategy first."
            )
        for name, value in (
            # One call of a worker at a time, done when it returns; a lost task is an error at once.
            ("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "False"),
            ("TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY", "True"),
            ("GRPC_FAIL_FAST", "use_caller"),
        ):
            os.environ.setdefault(name, value)
        present = {"worker": sorted(workers), "ps": sorted(self.tasks.ps)}
        if self.tasks.chief is not None:
            present["chief"] = [0]
        filters = tf.config.experimental.ClusterDeviceFilters()
        # Beside ps tasks workers do not need each other, nor each other's faults.
        seen = "/job:worker" if self.shards_on_workers else "/job:ps"
        for index in self.workers:
            filters.set_device_filters("worker", index, [seen, "/job:chief"])
        for index in self.tasks.ps:
            filters.set_device_filters("ps", index, ["/job:worker", "/job:chief"])
        tf.config.experimental_connect_to_cluster(
            self.tasks.cluster_spec(present),
            job_name="chief",
            protocol="grpc",
            cluster_device_filters=filters,
        )
        self._open(sorted(workers))
        listening.keep_to(_tf_remote.own_address())

    def _open(self, workers: list[int]) -> None:
        """Opens the devices, and with them this process's server.

        TensorFlow waits without end for a task that was stopped since it was asked whether it is
        there, and before it was connected to.
        """
        opening = Aside(tf.config.list_logical_devices, "tf_dsgd connects")
        addresses = [*self.tasks.ps.values(), *(self.tasks.workers[index] for index in workers)]
        while not opening.wait(_LOOK_SECONDS):
            silent = probing.not_answering(addresses, self._silent)
            if silent:
                names = ", ".join(self.name_at(address) for address in sorted(silent))
                raise TimeoutError(
                    f"{names} stopped answering {self._silent:g} s ago, while this process "
                    "connected to it, and TensorFlow waits for it. Start this script again."
                )
        opening.result()

    def _check_version(
        self, job: str, index: int, error: type[RuntimeError] = RuntimeError
    ) -> None:
        import tf_dsgd

        theirs = tasks.remote_version(_device(job, index))
        if theirs is None:
            logging.warning(
                "tf_dsgd: %s was not started by tf_dsgd.serve; its version is not known",
                self.tasks.name(job, index),
            )
        elif theirs != tf_dsgd.__version__:
            raise error(
                f"{self.tasks.name(job, index)} runs tf_dsgd {theirs}, the chief "
                f"{tf_dsgd.__version__}. Install one version on all tasks and restart them."
            )


class UnequalVersions(RuntimeError):
    """A task runs another version of the package than the chief."""


_connection: Connection | None = None


def connect(
    cluster: tasks.Tasks, timeout_seconds: float, silent_seconds: float, used: bool = False
) -> Connection:
    """The connection to a cluster; there is one per process. The arguments are `Connection`'s.

    Raises:
        RuntimeError: if this process is connected to another cluster: TensorFlow would invalidate
            every variable made on the first one.
        TimeoutError: if tasks are missing after `timeout_seconds`, naming them.
    """
    global _connection
    if _connection is None:
        _connection = Connection(cluster, timeout_seconds, silent_seconds, used)
    elif _connection.tasks.jobs != cluster.jobs:
        raise RuntimeError(
            "This process is connected to another cluster, and TensorFlow allows one per process. "
            f"Connected: {_connection.tasks.jobs}. Received: {cluster.jobs}. Start a new process."
        )
    return _connection


def say(message: str, version: str = "") -> None:
    """Writes a line for whoever watches the job."""
    who = f"tf_dsgd {version}" if version else "tf_dsgd"
    # Line and end in one piece: other threads and processes write, too.
    print(f"{who}: {message}\n", end="", file=sys.stderr, flush=True)


def _answer() -> None:
    """What a task does to show that it is there."""
    tf.no_op()


def _device(job: str, index: int, kind: str = "CPU") -> str:
    return f"/job:{job}/replica:0/task:{index}/device:{kind}:0"
