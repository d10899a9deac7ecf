"""Workers as threads of this process, on its devices; the shard is the same memory.

A worker's round is two calls: `work`, on copies of its own, and, under the shard's lock, a push
together with the next fetch. Threads exist while there is work: a drain ends them.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.engine.base import Engine, WorkerState, steps_tensor
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.state import Store
from tf_dsgd.engine.timing import moment

# A worker thread without work for this long ends; the next batch starts it again.
_IDLE_SECONDS = 30.0
# How often a waiting main thread looks whether the workers are still alive.
_LOOK_SECONDS = 1.0
# For how long no worker may begin, with work left, until that is taken for a defect.
_STALLED_SECONDS = 10.0
# At exit, how long to wait for the rounds under way.
_CLOSE_SECONDS = 5.0


class ThreadsEngine(Engine):
    """Asynchronous workers on one machine."""

    longest_call = 10
    can_record = True

    def __init__(self, store: Store, exchange: ExchangeRule):
        super().__init__(store, exchange)
        self._lock = threading.Lock()  # the shard's
        mutex = threading.Lock()  # guards all that follows, and the worker states
        self._changed = threading.Condition(mutex)
        self._idle = threading.Condition(mutex)
        """Workers wait here for batches; where there are many it would cost to wake all of them."""
        self._bounded = not exchange.may_start(1 << 62, 0)
        """Whether it depends on other workers who may begin."""
        self._available = 0
        self._busy: set[int] = set()
        self._waiting: set[int] = set()
        """Workers whose threads wait for batches, or until their rule lets them begin."""
        self._stalled: tuple[float, Any] | None = None
        """Since when, in this wait of the main thread, all have waited, and where they stood."""
        self._flushing = False
        self._error: tuple[int | None, BaseException] | None = None
        self._threads: dict[int, threading.Thread] = {}
        self._closing = False
        atexit.register(_close, weakref.ref(self))

    def prepare(self, program: Program) -> None:
        _ = program.work, program.push, program.exchange, program.fetch, program.flush

    def grant(self, program: Program, stream: Any) -> None:
        self._switch(program, stream)
        with self._changed:
            self._available += 1
            portion = self._portion(self._longest_call)
            if self._available % portion == 0:  # enough for one more worker to begin
                self._start_threads()
                if self._bounded or stream.pipelines is not None:
                    self._idle.notify_all()  # not every worker may take it
                else:
                    self._idle.notify()
            room = 2 * self.num_workers * portion
            if self._available <= room and self._error is None:
                return
        self._until(lambda: self._available <= room)
        self._raise_error()

    def settle(self) -> None:
        if self._program is None:
            return
        if threading.current_thread() in self._threads.values():
            raise RuntimeError(
                "A worker's step read a variable of the model from Python, which would wait for "
                "itself. Read it in a callback instead."
            )
        self._flushing = True
        try:
            self._until(lambda: not (self._awaited() or self._unfinished()))
        finally:
            self._flushing = False
        self._raise_error()
        self._come_to_rest()

    def snapshot(self) -> Snapshot:
        with self._lock:  # between two messages
            return super().snapshot()

    def _until(self, condition: Callable[[], bool]) -> None:
        """Waits in the main thread for `condition` or a worker's error; keeps workers going."""
        self._stalled = None
        while True:
            with self._changed:
                self._start_threads()
                self._wake()
                if self._changed.wait_for(
                    lambda: self._error is not None or condition(), _LOOK_SECONDS
                ):
                    return
                self._check_not_stalled()
            self._look()

    def _check_not_stalled(self) -> None:
        """Ends a wait in which all workers wait for one another, which nothing else would end."""
        if not self._unfinished() or not self._threads or self._threads.keys() - self._waiting:
            self._stalled = None
            return
        now = time.monotonic()
        standing = self._available, [(w.clock, w.unsent, self._limit(w)) for w in self.workers]
        if self._stalled is None or self._stalled[1] != standing:
            self._stalled = now, standing
        elif now - self._stalled[0] > _STALLED_SECONDS:
            self._stalled = None
            stalled = self._nobody_begins([self.workers[m] for m in sorted(self._threads)])
            self._error = self._error or (None, stalled)

    def _look(self) -> None:
        """Looks after the workers; called by the main thread while it waits."""

    def _awaited(self) -> bool:
        """Whether there are workers whose threads a drain waits for."""
        return bool(self._threads)

    def _unfinished(self) -> bool:
        return bool(self._available or any(w.unsent for w in self.workers))

    def _raise_error(self) -> None:
        """Raises what a worker raised, once, when all of them have stopped."""
        if self._error is None:
            return
        began = time.monotonic()
        while self._threads:
            with self._changed:
                self._wake()
                self._changed.wait_for(lambda: not self._threads, _LOOK_SECONDS)
            self._hasten(time.monotonic() - began)
        (failed, error), self._error = self._error, None
        self._available = 0
        self._discard(failed)
        raise error

    def _hasten(self, seconds: float) -> None:
        """Called now and then while workers' last calls are waited for, for so long already."""

    def _start_threads(self) -> None:
        if len(self._threads) == self.num_workers or not self._unfinished():
            return
        for worker in self.workers:
            if worker.index in self._threads or not self._joined(worker):
                continue
            thread = threading.Thread(
                target=self._run, args=(worker,), name=f"tf_dsgd worker {worker.index}", daemon=True
            )
            self._threads[worker.index] = thread
            thread.start()

    # -- a worker's thread ------------------------------------------------------------------

    def _run(self, worker: WorkerState) -> None:
        worker.watch.enter("wait")
        try:
            with tf.device(self.store.worker_devices[worker.index]):
                self._rounds(worker)
        except BaseException as error:  # handed to the main thread, which raises it
            self._failed(worker, error)
        finally:
            worker.watch.leave()
            with self._changed:
                self._busy.discard(worker.index)
                self._threads.pop(worker.index, None)
                self._wake()

    def _failed(self, worker: WorkerState, error: BaseException) -> None:
        error.add_note(f"Raised on worker {worker.index}.")
        with self._changed:
            self._error = self._error or (worker.index, error)

    def _rounds(self, worker: WorkerState) -> None:
        while True:
            program = self.program
            self._errands(worker, program)
            steps = self._begin(worker)
            while steps:
                steps = self._round(worker, program, steps)
            with self._changed:
                self._busy.discard(worker.index)
                self._changed.notify_all()
            if not self._wait(worker, program):
                return

    def _round(self, worker: WorkerState, program: Program, steps: int) -> int:
        """Does these batches; gives how many the worker has taken for its next round."""
        if worker.fetch_next:
            self._fetch(worker, program)
        worker.watch.enter("compute")
        self._work(worker, program, steps)
        worker.watch.enter("wait")
        done = worker.step
        worker.fetch_next = self.exchange.fetch_due(done)
        with self._changed:
            sending = self.exchange.push_due(done)
            steps = self._take(worker, sending=sending)
        if sending:
            self._push(worker, program, steps)
        return steps

    def _work(self, worker: WorkerState, program: Program, steps: int) -> None:
        recorder = self.recorder
        queue = self._stream.queue if recorder is None else recorder.queues.of(worker.index)
        program.work[worker.index](steps_tensor(steps), queue)
        if recorder is not None:
            recorder.stepped(worker.index, steps)

    def _begin(self, worker: WorkerState) -> int:
        with self._changed:
            steps = self._take(worker)
            self._busy.add(worker.index)
            return steps

    def _take(self, worker: WorkerState, *, sending: bool = False) -> int:
        """Takes a round's batches if there are enough and the rules let the worker begin.

        With `sending` the round begins when the message that is due was sent.
        """
        if self._closing or self._error is not None:
            return 0
        if not self._may_begin(worker, sending=sending):
            return 0
        steps = self._round_steps(worker, self._available, self._flushing)
        self._available -= steps
        self._taken(worker, steps)
        if self.recorder is not None:
            self.recorder.take(worker.index, steps, self._stream.queue)
        if steps:
            self._stepped_on()
        return steps

    def _wake(self) -> None:
        """Lets everybody look again at what he waits for."""
        self._changed.notify_all()
        self._idle.notify_all()

    def _stepped_on(self) -> None:
        """After a worker took batches or sent: those look again to whom it makes a difference."""
        self._changed.notify_all()
        if self._bounded or self._flushing:
            self._idle.notify_all()

    def _wait(self, worker: WorkerState, program: Program) -> bool:
        """Waits for work; at a drain sends what is left. False when the thread is to end."""
        with self._changed:
            while self._error is None and not self._closing:
                if self._may_begin(worker) and self._round_steps(
                    worker, self._available, self._flushing
                ):
                    return True
                if self._has_errand(worker):
                    return True
                if not self._joined(worker) and not worker.unsent:
                    return False
                if self._has_all(worker):
                    break
                self._waiting.add(worker.index)
                woken = self._idle.wait(_IDLE_SECONDS)
                self._waiting.discard(worker.index)
                if not woken and not worker.unsent:
                    return False
            if self._error is not None or self._closing:
                return False
        if worker.unsent:
            self._push(worker, program, 0)
        return False

    def _has_all(self, worker: WorkerState) -> bool:
        """Whether nothing is left that could be added to what a worker has not sent."""
        return self._flushing and not self._available

    def _has_errand(self, worker: WorkerState) -> bool:
        """Whether the worker has something to do besides its own batches."""
        return False

    def _errands(self, worker: WorkerState, program: Program) -> None:
        """Does such things; called between two messages."""

    def _push(self, worker: WorkerState, program: Program, following: int) -> None:
        """Sends; fetches in the same call if the next round has begun and wants that."""
        m = worker.index
        pushed = None
        with self._lock:
            worker.watch.enter("push")
            if following and worker.fetch_next:
                version, pushed = program.exchange[m]()
                worker.fetch_next = False
                self._note(worker, "push", None)
                self._note(worker, "fetch", version)
            else:
                program.push[m](tf.constant(True))
                self._note(worker, "push", None)
        if pushed is not None:
            worker.watch.enter("fetch", at=moment(float(pushed)))
        worker.watch.enter("wait")
        with self._changed:
            worker.clock += 1
            worker.unsent = following
            self._stepped_on()

    def _fetch(self, worker: WorkerState, program: Program) -> None:
        with self._lock:
            worker.watch.enter("fetch")
            self._note(worker, "fetch", program.fetch[worker.index]())
        worker.watch.enter("wait")
        worker.fetch_next = False

    def _note(self, worker: WorkerState, action: str, version: Any) -> None:
        if self.recorder is not None:
            self.recorder.note(worker.index, action, version)

    def close(self, seconds: float) -> None:
        """Ends the threads after the round each is in, waiting at most that long for all."""
        with self._changed:
            self._closing = True
            self._wake()
            self._changed.wait_for(lambda: not self._threads, seconds)
            self._closing = bool(self._threads)


def _close(engine: weakref.ref[ThreadsEngine]) -> None:
    """At exit: TensorFlow must not be taken down under a running worker."""
    live = engine()
    if live is not None:
        live.close(_CLOSE_SECONDS)
