"""This process's connection, as the chief, to the tasks of a TensorFlow cluster."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_dsgd import _tf_earlier, _tf_remote
from tf_dsgd._tf_errors import says_no_context
from tf_dsgd._version import __version__
from tf_dsgd.console import say
from tf_dsgd.membership import deadlines
from tf_dsgd.membership.group import Group
from tf_dsgd.membership.liveness import Liveness
from tf_dsgd.membership.peer import Peer, PeerState
from tf_dsgd.transport import channels, cluster_spec, names, opening, probing
from tf_dsgd.transport.aside import Aside
from tf_dsgd.transport.asked import Asked
from tf_dsgd.transport.waiting import wait_for_tasks

_UNANSWERED = (
    *(tf.errors.UnavailableError, tf.errors.DeadlineExceededError),
    *(tf.errors.AbortedError, tf.errors.CancelledError),
)
_HOST = f"/job:{opening.CHIEF}/replica:0/task:0/device:CPU:0"


class Connection(Asked):
    """The devices of a cluster, and who of its workers is there.

    Made by `connect`. TensorFlow's own connecting blocks while a task is absent, so only tasks
    that listen are named to it, and workers that come later are added.

    Args:
        cluster: the tasks.
        timeout_seconds: how long to wait for every ps and one worker.
        silent_seconds: how long a task may not answer until calls to it end with an error.
    """

    def __init__(
        self,
        cluster: cluster_spec.Tasks,
        timeout_seconds: float,
        silent_seconds: float,
    ):
        super().__init__(cluster, Liveness(silent_seconds))
        self.silent_seconds = silent_seconds
        self.shards_on_workers = not (cluster.ps or cluster.between_workers)
        self.host_device = _HOST
        if cluster.chief is not None:
            cluster_spec.check_port(cluster)
            doubts = cluster_spec.doubts_about_own_host(cluster)
            if doubts:
                say(doubts)
        here = wait_for_tasks(cluster, timeout_seconds)
        self.changes = 0
        """How often TensorFlow was told of other tasks: each time it keeps some threads."""
        for group in self.groups:
            if here.issuperset(peer.index for peer in group.peers):
                group.enter()
        self._left_out: set[str] = set()
        """Addresses of workers that TensorFlow let go of, or may have, since a change was whole."""
        self._join: tuple[int, Aside] | None = None
        """The worker that is being added, or whose end nobody has looked at."""
        channels.configure(silent_seconds)
        seconds = timeout_seconds + silent_seconds
        connects = functools.partial(opening.connect, cluster, here, seconds, silent_seconds)
        _tf_earlier.keep_assignable(connects)
        self.reasons: list[Callable[[tf.errors.OpError], RuntimeError | None]] = []
        """Each tells what the failure of a call may be due to."""
        _tf_remote.tell_without_waiting()
        _tf_remote.explain_calls(self._reason)
        self._main = _tf_remote.SynchronousExecutor()
        self.use()
        self._executor = _tf_remote.SynchronousExecutor()
        self._answer = tf.function(_answer).get_concrete_function()
        for job, index in cluster.of_shards:
            self._check_version(job, index)
        for m, group in enumerate(self.groups):
            if not group.is_member or self.shards_on_workers:
                continue
            try:
                self.call(m, functools.partial(self._check_versions, group))
            except tf.errors.OpError:  # it is gone again, or stopped, and may come later
                group.leave_out()

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

    def part_devices(self) -> list[list[str]]:
        """Where each worker computes: of each of its tasks the first GPU, else the processor."""
        visible = {d.name for d in tf.config.list_logical_devices()}

        def device(peer: Peer) -> str:
            gpu = _device("worker", peer.index, "GPU")
            return gpu if gpu in visible else _device("worker", peer.index)

        return [[device(peer) for peer in group.peers] for group in self.groups]

    def shard_devices(self) -> list[str]:
        """Where each shard is: here, if no task holds weights."""
        if self.tasks.between_workers:
            return [self.host_device]
        return [_device(job, index) for job, index in self.tasks.of_shards]

    # -- who is there -----------------------------------------------------------------------

    def call(self, m: int, action: Callable[[], Any]) -> Any:
        """What `action` gives, which calls worker number m for a thread that others wait for.

        That waits no longer than a worker takes to show that it is there. All that do not are taken
        for lost at once, so that none of them is waited for next.

        Raises:
            tf.errors.OpError: if it does not, or the call failed.
        """
        if self.shards_on_workers:  # nobody goes on without it
            return action()
        silent = self.worker_is_silent(m)
        call = None if silent else Aside(action, f"tf_dsgd calls worker {m}")
        while call is not None and not call.wait(deadlines.CALL_SECONDS):
            if not self.silence(self.tasks.workers.values()).isdisjoint(self.groups[m].addresses):
                call = None
        if call is None:
            raise tf.errors.UnavailableError(None, None, "It does not answer.")
        return call.result()

    def was_replaced(self, m: int) -> bool:
        """Whether at an address of worker number m is another process than TensorFlow knows of."""
        if self.shards_on_workers:  # a call to one that is stopped would be waited for
            return False
        for peer in self.groups[m].peers:
            ask = functools.partial(cluster_spec.remote_version, _device("worker", peer.index))
            try:
                self.call(m, ask)
            except tf.errors.OpError as error:
                if says_no_context(error):
                    return True
        return False

    def silence(self, addresses: Iterable[str]) -> set[str]:
        """Ends calls to those of the addresses that do not answer for some seconds; gives them."""
        seconds = min(deadlines.ANSWER_SECONDS, self.silent_seconds)
        silent = probing.not_answering(addresses, seconds)
        for address in sorted(self.liveness.condemn(silent)):
            say(f"{self.name_at(address)} has not answered for {seconds:g} s")
        for address in self.with_partners(silent):
            names.close_connections(address)
        return silent

    def with_partners(self, addresses: Iterable[str]) -> set[str]:
        """These, and those of whoever waits for them: all of a worker, one of whose they are.

        A call goes to the first of a worker's processes, which answers while it waits for another.
        """
        found = set(addresses)
        for group in self.groups:
            if not found.isdisjoint(group.addresses):
                found.update(group.addresses)
        return found

    def present(self) -> list[bool]:
        """Which workers are there now; those that came, or came back, join."""
        workers = range(len(self.groups))
        there = self.reached(workers)
        return [m in there and self._is_present(m) for m in workers]

    def _is_present(self, m: int) -> bool:
        if not self.worker_listens(m):
            return False
        group = self.groups[m]
        try:
            same = functools.partial(self._are_the_same, group.peers)
            if group.is_member and self.call(m, same):
                return True
            return self.worker_listens(m) and self.join(m, deadlines.FIRST_JOIN_SECONDS)
        except tf.errors.OpError:  # it is gone again, and may come later
            group.leave_out(joining=True)
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
            group = self.groups[m]
            if group.stays_away(time.monotonic()):
                return False
            if not all(probing.answers(a, deadlines.GLANCE_SECONDS) for a in group.addresses):
                return False
            self._join = m, Aside(lambda: self._add(group), f"tf_dsgd adds worker {m}")
        worker, adding = self._join
        if not adding.wait(seconds if begins else 0.0):
            return False
        self._join = None
        try:
            adding.result()
        except (UnequalVersions, tf.errors.OpError) as error:
            if worker == m:
                raise
            self.groups[worker].leave_out(joining=True)
            say(f"{self.worker_name(worker)} has not joined: {error}")
        return worker == m and self.groups[m].is_known

    def _add(self, group: Group) -> None:
        others = [other for other in self.peers if other.is_known and other not in group.peers]
        silent = probing.not_answering([o.address for o in others], deadlines.ANSWER_SECONDS)
        # Of others that were lost TensorFlow would want to know now, too, who they are.
        absent = [
            other
            for other in others
            if other.address in silent
            or (other.state is PeerState.LEFT_OUT and not self._is_reached(other))
        ]
        if not all(map(self._is_reached, group.known)):
            raise tf.errors.UnavailableError(None, None, "No connection to it is made yet.")
        same = [peer for peer in group.known if self._is_the_same(peer)]
        for other in absent:
            other.forget()  # also if the rest fails
            self.liveness.asks_no_more(other.address)
        if same and (not group.is_member or len(same) < len(group.peers)):
            # TensorFlow keeps what it knows of a process, and does not tell it again of functions
            # that it was told of while it did not answer, or that were lost with its connection
            # (TF 2.21). And of a process that has a part of a function of several, it keeps where
            # the other parts were.
            leaving = group.known
            group.leave_out(joining=True)
            for peer in leaving:
                peer.leave()
            try:
                self._change([], [*absent, *leaving])
            finally:
                # What it had there is freed when its last call has ended, by a number that the next
                # context will have, too: that one would not live long if it were there by then.
                for peer in leaving:
                    peer.has_left(time.monotonic())
            return
        group.enter()
        self._change(group.peers, absent)
        self._check_versions(group, UnequalVersions)

    def _change(self, joining: Sequence[Peer], absent: Sequence[Peer]) -> None:
        """Tells TensorFlow who its workers are; it asks all, and all calls wait for that.

        One that stops in this moment is found out here, and not waited for.
        """
        self.changes += 1
        coming = {peer.address for peer in joining}
        for address in self._left_out & coming:
            names.close_connections(address)  # now: what it is told next is not to be cut off
        self._left_out -= coming
        change = functools.partial(
            _tf_remote.change_tasks,
            "worker",
            {peer.index: peer.address for peer in joining},
            {peer.index for peer in absent},
        )
        changing = Aside(change, "tf_dsgd changes the cluster")
        self._left_out |= self.with_partners(peer.address for peer in absent)
        limit = time.monotonic() + deadlines.CALL_EVERY_SECONDS + self.silent_seconds
        while not changing.wait(deadlines.CALL_SECONDS):
            self._left_out |= self.silence(self.tasks.workers.values())
            if time.monotonic() > limit:  # one is there, and answers no calls
                for address in self._left_out | coming:
                    names.close_connections(address)
        # They may have gone on meanwhile, and a call that was under way never end (TF 2.21).
        for address in self._left_out:
            names.close_connections(address)
        changing.result()
        self._left_out.clear()

    def ask(self, addresses: set[str]) -> None:
        """Has tasks there answer a call: connections on which long ones wait live by it.

        For a thread of its own: one that stops in this moment is waited for.
        """
        places = {("worker", p.index): p.address for p in self.peers if p.is_known}
        places |= {("ps", i): address for i, address in self.tasks.ps.items()}
        with self._executor.scope():
            for (job, index), address in places.items():
                if address not in addresses:
                    continue
                self.liveness.calls(address, time.monotonic())
                answered = True
                try:
                    with tf.device(_device(job, index)):
                        self._answer()
                except tf.errors.OpError as error:  # whoever needs it will tell
                    # Another process is there, or one that has other errors than of a connection.
                    answered = says_no_context(error) or not isinstance(error, _UNANSWERED)
                    self._executor.clear_error()
                finally:
                    self.liveness.called(answered)

    def _is_reached(self, peer: Peer) -> bool:
        """Whether calls reach a worker that is there: gRPC pauses between two attempts to connect.

        `_change` would fail, and leave threads behind.
        """
        deadline = time.monotonic() + deadlines.REACH_SECONDS
        while time.monotonic() < deadline:
            try:
                cluster_spec.remote_version(_device("worker", peer.index))
            except tf.errors.UnavailableError:
                time.sleep(deadlines.RETRY_SECONDS)
            except tf.errors.OpError:
                return True
            else:
                return True
        return False

    def _is_the_same(self, peer: Peer) -> bool:
        """Whether a worker has a context of this process: it was stopped, or out of reach.

        It may have another error for an answer, as that it does not know the function.
        """
        try:
            cluster_spec.remote_version(_device("worker", peer.index))
        except tf.errors.UnavailableError:
            return False
        except tf.errors.OpError as error:
            return not says_no_context(error)
        return True

    def _are_the_same(self, peers: Iterable[Peer]) -> bool:
        return all(map(self._is_the_same, peers))

    # -- versions ---------------------------------------------------------------------------

    def _check_versions(self, group: Group, error: type[RuntimeError] = RuntimeError) -> None:
        for peer in group.peers:
            self._check_version("worker", peer.index, error)

    def _check_version(
        self, job: str, index: int, error: type[RuntimeError] = RuntimeError
    ) -> None:
        theirs = cluster_spec.remote_version(_device(job, index))
        if theirs is None:
            logging.warning(
                "tf_dsgd: %s was not started by tf_dsgd.serve; its version is not known",
                self.tasks.name(job, index),
            )
        elif theirs != __version__:
            raise error(
                f"{self.tasks.name(job, index)} runs tf_dsgd {theirs}, the chief "
                f"{__version__}. Install one version on all tasks and restart them."
            )


class UnequalVersions(RuntimeError):
    """A task runs another version of the package than the chief."""


_connection: Connection | None = None


def connect(
    cluster: cluster_spec.Tasks, timeout_seconds: float, silent_seconds: float
) -> Connection:
    """The connection to a cluster; there is one per process. The arguments are `Connection`'s.

    Raises:
        RuntimeError: if this process is connected to another cluster: TensorFlow would invalidate
            every variable made on the first one.
        TimeoutError: if tasks are missing after `timeout_seconds`, naming them.
    """
    global _connection
    if _connection is None:
        _connection = Connection(cluster, timeout_seconds, silent_seconds)
    elif _connection.tasks.jobs != cluster.jobs:
        raise RuntimeError(
            "This process is connected to another cluster, and TensorFlow allows one per process. "
            f"Connected: {_connection.tasks.jobs}. Received: {cluster.jobs}. Start a new process."
        )
    elif _connection.tasks.tasks_per_worker != cluster.tasks_per_worker:
        raise RuntimeError(
            "This process is connected to the same tasks in other groups, and who may talk to whom "
            f"is set once. Connected: tasks_per_worker={_connection.tasks.tasks_per_worker}. "
            f"Received: tasks_per_worker={cluster.tasks_per_worker}. Start a new process."
        )
    elif _connection.tasks.between_workers != cluster.between_workers:
        raise RuntimeError(
            "This process is connected to the same tasks for a strategy with weights elsewhere: "
            "workers that send to one another are connected for that alone. Start a new process "
            f"for each. Connected: {_connection.tasks.jobs}."
        )
    elif _connection.silent_seconds != silent_seconds:
        say(
            "This process is connected to these tasks with worker_timeout_seconds="
            f"{_connection.silent_seconds:g}, after which one that does not answer counts as lost. "
            f"That stays, as gRPC takes it once. Received: {silent_seconds:g}."
        )
    return _connection


def _answer() -> None:
    """What a task does to show that it is there."""
    tf.no_op()


def _device(job: str, index: int, kind: str = "CPU") -> str:
    return f"{opening.place(job, index)}/device:{kind}:0"
