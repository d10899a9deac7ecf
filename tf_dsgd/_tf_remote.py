"""What this process tells other tasks, and has them do, past what TensorFlow's public API offers.

As in `_tf`, each private name says why it is needed and in which versions it was seen to work.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

# The eager context makes a function of an operation at its first use, and tells all tasks of it,
# unless told not to here. TF 2.21.
from tensorflow.python import pywrap_tfe as _pywrap_tfe

# The eager context knows the cluster, and calls functions. TF 2.21.
from tensorflow.python.eager import context as _context

# Threads that wait for tasks each run their calls on an executor of their own. TF 2.21.
from tensorflow.python.eager import executor as _executor

from tf_dsgd import _tf_errors


def own_address() -> str:
    """Where this process's server in the cluster listens: what no task has, TensorFlow picks."""
    server_def = _context.get_server_def()
    tasks = next(j for j in server_def.cluster.job if j.name == server_def.job_name).tasks
    return str(tasks[server_def.task_index])


def change_tasks(job: str, joining: Mapping[int, str], absent: Iterable[int] = ()) -> None:
    """Adds tasks to the cluster this process is connected to, or meets their new incarnations.

    Tasks of the same job that are `absent` leave it: TensorFlow would ask them, in this call, and
    wait for one that is stopped.

    Args:
        job: of all of them.
        joining: the address of each that is added.
        absent: those that leave.

    `tf.config.experimental_connect_to_cluster` would start anew and invalidate all that exists;
    `update_server_def` keeps what the other tasks hold. `ClusterCoordinator` uses it. TF 2.21.

    Raises:
        tf.errors.OpError: if a task ended meanwhile, for which TensorFlow would wait. The cluster
            may be as it was told, or not; to be told again.
    """
    server_def = _context.get_server_def()
    tasks = next(j for j in server_def.cluster.job if j.name == job).tasks
    for other in absent:
        tasks.pop(other, None)
    for index, address in joining.items():
        tasks[index] = address
    with _changing, _environment(_FAIL_FAST, "true"):
        _context.context().update_server_def(server_def)


# Whether calls to a task that cannot be reached fail, or wait for it; read at each call. TF 2.21.
_FAIL_FAST = "GRPC_FAIL_FAST"


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Within, TensorFlow finds this in its environment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# Held while tasks join: one may not be told yet of a function that ends by then.
_changing = threading.Lock()


class _Unawaited(_executor.Executor):
    """TensorFlow's handle of an executor, which waits as it is freed."""

    __slots__ = ()

    def wait(self) -> None:
        """Waits for nothing."""


class SynchronousExecutor:
    """Runs a thread's operations one after another, each done when its call returns.

    Every worker's thread has one, so that threads do not wait for each other's remote calls.
    `ClusterCoordinator` does the same with `tensorflow.python.eager.executor`. TF 2.21.

    Args:
        streaming: whether what tasks are told travels in a stream, of which nobody awaits the
            answers. TensorFlow asks for `_STREAMING`, too.
    """

    def __init__(self, *, streaming: bool = False) -> None:
        self._executor = _executor.new_executor(
            enable_async=False, enable_streaming_enqueue=streaming
        )
        self._executor.__class__ = _Unawaited

    def use(self) -> None:
        """From here on this thread's operations run on it."""
        _context.context().executor = self._executor

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Within, this thread's operations run on it.

        `executor_scope` would end with a wait for all that other threads have under way on the
        default executor: once a task is lost, 20 s for its variables to be freed.
        """
        context = _context.context()
        default = context.executor
        default.__class__ = _Unawaited
        context.executor = self._executor
        try:
            yield
        finally:
            context.executor = default

    def clear_error(self) -> None:
        """After a remote call failed; else the executor raises the error again when it is freed."""
        self._executor.clear_error()


# Whether tasks may be told of things in a stream; TensorFlow reads it each time. TF 2.21.
_STREAMING = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"
# How long a call is made again until its function counts as lost on the way, and how often.
_LACKING_SECONDS = 5.0
_AGAIN_SECONDS, _MOST_AGAIN_SECONDS = 0.002, 0.1


# Three methods of the eager context are replaced in the object, for the whole process: no public
# call comes between TensorFlow's functions and the tasks. Each names the test that fails without
# it; that there are no others is asserted in `tests/test_tf_remote.py`. `add_function_def` stays as
# it is: neither this package nor Keras gets to it, which is asserted there, too.


def tell_without_waiting() -> None:
    """From here on tasks are told of functions in a stream, without waiting for their answers.

    Else TensorFlow asks one task after the other, and waits for one that is stopped, with Python's
    lock held: no thread of Python would run. The stream keeps the order in which functions were
    made. Calls travel beside it, and one may arrive before its function does: it is made again.
    What fails in a stream ends it, and what follows it is lost: no task is told of the end of a
    function that it may not know (`change_tasks`), nor of anything else in it.
    """
    context = _context.context()
    _pywrap_tfe.TFE_ContextSetRunEagerOpAsFunction(context._handle, False)
    stream = SynchronousExecutor(streaming=True)
    lock = threading.RLock()  # entered again where a function is freed within

    def in_stream(tell: Callable[..., None]) -> Callable[..., None]:
        def told(*args: Any) -> None:
            with lock, stream.scope(), _nothing_freed(), _environment(_STREAMING, "True"):
                tell(*args)

        return told

    remove_function = in_stream(context.remove_function)
    call_function = context.call_function

    def removed(name: Any) -> None:
        if not _changing.locked():  # else it is kept
            remove_function(name)

    def called(name: bytes, *args: Any) -> Any:
        deadline, pause = 0.0, _AGAIN_SECONDS
        while True:
            try:
                return call_function(name, *args)
            except tf.errors.NotFoundError as error:
                now = time.monotonic()
                deadline = deadline or now + _LACKING_SECONDS  # the call itself may have waited
                if not _tf_errors.says_lacks_function(error, name.decode()) or now > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _MOST_AGAIN_SECONDS)

    # A function is made. `test_telling.py::test_a_method_that_is_not_replaced`, [add_c_function]:
    # while a worker is stopped no thread of Python runs until that worker's ping times out.
    context.add_c_function = in_stream(context.add_c_function)
    # A function is freed. `test_telling.py::test_a_method_that_is_not_replaced`, [remove_function]:
    # the same. Without the look at `_changing`,
    # `test_telling.py::test_functions_end_while_a_task_joins`: the task that joins is not told of
    # some of the functions that are made meanwhile.
    context.remove_function = removed
    # A function is called. `test_lost_tasks.py::test_a_ps_that_goes_on_again_in_time`, and every
    # script that connects: the first call overtakes its function, and ends in a NotFoundError.
    context.call_function = called


def explain_calls(reason: Callable[[tf.errors.OpError], Exception | None]) -> None:
    """From here on a call that fails as a task is gone raises its `reason`, if there is one.

    Keras calls functions where nobody else could see the error on its way to the user.
    """
    context = _context.context()
    call_function = context.call_function

    def called(*args: Any) -> Any:
        try:
            with interruptible():
                return call_function(*args)
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            known = reason(error)
            if known is None:
                raise
            raise known from error

    # A function is called.
    # `test_lost_ps.py::test_a_ps_that_is_lost_is_named_whatever_was_under_way`, [evaluate]: the
    # user sees TensorFlow's error, which says neither who was lost nor how to go on.
    context.call_function = called


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within, a Ctrl-C that came as a call failed is a KeyboardInterrupt.

    Where Python raises one while TensorFlow makes an exception of its error, pybind11 makes a
    RuntimeError of the two (TF 2.21).
    """
    try:
        yield
    except RuntimeError as error:
        if _tf_errors.says_interrupted(error):
            raise KeyboardInterrupt from error
        raise


@contextlib.contextmanager
def _nothing_freed() -> Iterator[None]:
    """Within, Python does not look for what is not used any more."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
