"""What TensorFlow's errors say that only their texts tell: here alone are texts matched.

The class of an error (`tf.errors.NotFoundError`, ...) does not tell a worker that was replaced from
one that was not told of a function. Each text was seen in TensorFlow 2.21.0, and what provokes it
is said beside it; `ClusterCoordinator` tells lost workers by some of the same
(`_is_worker_failure` in cluster_coordinator.py). Errors may quote others, so that a text counts
wherever it stands. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

# On every task TensorFlow keeps a context for each chief: all that the chief holds there. A process
# that took the place of another at its address, before any connection broke, has none: "Unable to
# find a context_id matching the specified one".
_NO_CONTEXT_ID = "context_id"
# The same of a task that is asked for a device by the name that the former process gave it.
_NO_DEVICE = "unknown device"
# A tensor that the former process held.
_NO_TENSOR = "Unable to find the relevant tensor remote_handle"
# A variable or tensor whose device left the cluster, or came back as another, while it was used.
_NOT_REMOTE = "Primary device is not remote"
# A task was asked for what is on another one, which left the cluster meanwhile.
_LEFT_CLUSTER = "No worker known as"

_REPLACED = (_NO_CONTEXT_ID, _NO_DEVICE, _NO_TENSOR, _NOT_REMOTE, _LEFT_CLUSTER)
_NO_CONTEXT = (_NO_CONTEXT_ID, _NO_DEVICE, _LEFT_CLUSTER)

# An eager call of a function by a name that its task was not told.
_NO_SUCH_FUNCTION = "is neither a type of a primitive operation nor a name of a function registered"
# The same where the function is called by another function, which the task knows: "Could not find
# required function definition", or "Was not able to find a function definition".
_NO_DEFINITION = "function definition"

# gRPC's answer to a task that did not answer its keep-alive ping in time (`transport.channels`);
# and, from then on, to one that takes connections, and does not answer.
_SILENT = ("ping timeout", "timed out before receiving SETTINGS frame")

# What pybind11 makes of a KeyboardInterrupt that Python raises while pybind11 makes an exception of
# TensorFlow's error: a RuntimeError (before Python 3.12), "MISMATCH of original and normalized
# active exception types: ORIGINAL UnavailableError REPLACED BY KeyboardInterrupt".
_INTERRUPTED = "REPLACED BY KeyboardInterrupt"

# A run that a server takes for one that it has had: `tf_dsgd.spmd.sessions` says why.
_TWICE = "request was received twice"

# `tf.distribute` says it of a variable of one strategy that meets the scope of another, or of none.
_OTHER_STRATEGY = "Mixing different tf.distribute.Strategy objects"

# `tf.raw_ops.PyFunc` on a server where nobody answers to its token: "Could not find callback with
# key=TOKEN", or, of a server without Python, that PyFunc has no kernel.
_PY_FUNC = "PyFunc"

# A call over several tasks that failed on one is ended on the others: "Cleanup", and its number.
_ENDED = re.compile(r"Cleanup -?\d+")

# The line before the reason, in errors of a graph that ran on several servers.
_FROM_TASK = "From /job:"


# The lines before what an operation of a graph has to say: the code that made each node on the way.
_DETECTED = "Detected at node"
_MADE = re.compile(
    r"\s*(?:\d+ root error\(s\) found|Graph execution error|(?:\(\d+\) [A-Z_]+:\s*)?"
    + _DETECTED
    + r"|<stack traces unavailable>)"
)
# Among the nodes that an error has come by where a pipeline raised it.
_PIPELINE = "IteratorGetNext"
_NODE = re.compile(r"\[\[\{\{node ([^}]+)\}\}\]\]")
# An error of Python code (`tf.numpy_function`, ...) has its traceback, with such empty lines.
_TRACEBACK = re.compile(r"^[ +]*(?:Exception Group )?Traceback \(.+\):\n\n", re.MULTILINE)
_CODE = re.compile(r'^[ |]*File "(.+)", line (\d+)', re.MULTILINE)
_INSTALLED = os.sep + "site-packages" + os.sep
_TOLD_LINES = 3


FAILED = "An operation failed."
"""The note of an error in short: its traceback leads through tf_dsgd and TensorFlow alone."""
WHOLE = "whole"
"""The attribute of it that has all that TensorFlow said."""

# What XLA ends each of its refusals with; before it stand the reason and a stack of calls.
_NOT_COMPILED = "tf2xla conversion failed"
_STACK = re.compile(r"Stack trace for op definition|The op is created at|" + _NOT_COMPILED)
# One reason: "No registered 'AsString' OpKernel for XLA_CPU_JIT devices compatible with node
# {{function_node ...}}{{node dense/AsString}}". What a function is given is the operation `_Arg`.
_NO_KERNEL = re.compile(r"No registered '(\w+)' OpKernel.*?\{\{node ([^}]+)\}\}")
# Before a reason: "(0) INVALID_ARGUMENT:" where a graph on several servers failed, and functions.
_PREFIX = re.compile(
    r"\(\d+\) [A-Z_]+:|\{\{\w*node [^}]*\}\}"
    r"|Error in user-defined function passed to \S+ transformation with iterator: \S+: "
)
_TYPE = re.compile(r"Requested Attributes:.*?\bd?[Tt](?:ype)?=DT_(\w+)")

# Lines that TensorFlow's C++ writes about what tf_dsgd handles or says itself, or that say nothing
# of this run, as "W0000 00:00:1795557141.585539 6566 file.cc:59] text" (`floods`). A severity of F,
# the last words of a process, is never among them.
_FLOODS = (
    # A worker died while another joined, or came back as another process; or a function is freed
    # that it knew.
    "Failed to (?:register|remove) function remotely",
    "Unable to close remote context with ID",
    "Ignoring an error encountered when (?:deleting remote tensors handles|setting remote shape)",
    "Ignoring error status when releasing multi-device function handle",
    # A worker of several processes, one of which died, leaves with the others: variables that are
    # freed by then were there.
    r"Task \d+ was not defined in sparse job",
    "Unable to destroy remote tensor handle",
    # A ps has none of the GPUs of workers, which a function for all of them names.
    r"NOT_FOUND: TensorFlow device GPU:\d+ was not registered",
    # Whenever a worker joins.
    "Device filters can only be specified when initializing the cluster",
    # An error ends a step on every server that has a part in it; the chief says the error.
    "Local rendezvous (?:is aborting with status|recv item cancelled)",
    "RecvTensor cancelled for",
    # XLA cannot compile a step, which the error says in a line, too; a stack of calls comes after.
    r"OP_REQUIRES failed at xla_ops\.cc",
    # An error of several causes is longer than what gRPC sends; the chief says it.
    "Truncated error message:",
)
# The same, at every start.
_GREETINGS = (
    "Scanning workers for devices",
    "MLIR V1 optimization pass is not enabled",
    "Initializing CoordinationService",
    "oneDNN custom operations are on",
    "This TensorFlow binary is optimized to use available CPU instructions",
    "Started server with target: grpc://",
    "Memory patch applied: M_TRIM_THRESHOLD",
)
_SAYS = r"[IWE]\d{4} \d\d:\d\d:[\d.]+ +\d+ \w+\.(?:cc|h):\d+\] "
FLOOD_HEADS = (
    _SAYS + "(?:" + "|".join((*_FLOODS, *_GREETINGS)) + ")"
    # Whatever a task that ended had to say while it was told of another cluster: the chief's call
    # raises it, too.
    "|" + _SAYS.replace(r"\w+\.(?:cc|h)", r"context_distributed_manager\.cc") + "|"
    "WARNING: All log messages before absl::InitializeLog"
)
"""Matches the first line of each."""
FLOOD_TAILS = (
    "Additional GRPC error information from remote target|:[A-Z_]+:Error received from peer|"
    r"\t \[\[|This could happen if the remote target has been disconnected|"
    "To enable the following instructions:|The error could be from a previous operation|"
    'The op is created at:|Stack trace for op definition|File "|dummy_file_name:|'
    r"\ttf2xla conversion failed|  \(\d+\) [A-Z_]+: |\d+ (?:successful operations|derived errors)"
)
"""Matches the lines that may follow one."""
FLOOD_RAISED = _SAYS.replace(r"\w+\.(?:cc|h)", r"op_kernel\.cc") + r"[A-Z_]+: ([A-Za-z_][\w.]*:.*)$"
"""Matches the first line of what it says of an error of Python code (`tf.numpy_function`, ...).

Such as "W0000 00:00:1.5 65 op_kernel.cc:1845] INVALID_ARGUMENT: ValueError: x", before a traceback.
The group is from the name of the error's class on.
"""
FLOOD_GREETINGS = "|".join(
    (*_GREETINGS, "All log messages before absl::", "To enable the following instructions:")
)
"""Is found in those of them that alone are no reason for a file."""


def as_raised(error: BaseException) -> BaseException:
    """What AutoGraph raised again, with the code of a tf.function in its message, as it was."""
    while str(error).startswith("in user code:") and error.__context__ is not None:
        error = error.__context__
    return error


def in_a_line(message: str) -> str:
    """The first line of an error's message; a sentence where that is a number alone."""
    line = message.partition("\n")[0]
    return "a task that takes part in the call failed" if _ENDED.match(line) else line


def in_short(error: BaseException) -> BaseException:
    """The same error without the code that made each node on the way: what failed, and where."""
    if not hasattr(error, "node_def"):
        return error
    text = str(getattr(error, "message", ""))
    told = _not_compiled(text) if _NOT_COMPILED in text else _without_nodes(text)
    brief = error
    if told is not None:
        made: Any = type(error)
        with contextlib.suppress(TypeError):  # OpError itself wants a code, too
            brief = made(error.node_def, getattr(error, "op", None), told)
    brief.add_note(FAILED)
    if brief is not error:
        setattr(brief, WHOLE, str(error))
    return brief


@contextlib.contextmanager
def said_in_short() -> Iterator[None]:
    """Within, an operation that fails raises its error in short."""
    try:
        yield
    except Exception as error:
        brief = in_short(error)
        if brief is error:
            raise
        raise brief from None


def _without_nodes(text: str) -> str | None:
    """An operation's own words, and where in the model that is."""
    raised = _TRACEBACK.search(text)
    nodes = list(_NODE.finditer(text))
    if _DETECTED not in text or not nodes:
        return None
    where = "the input pipeline" if _PIPELINE in text else "a worker's step"
    if raised is not None:  # what it says may name nodes, too
        after = [n for n in nodes if n.start() > raised.end()]
        node = f"{after[0][1] if after else nodes[0][1]}, in {where}"
        return _of_python(text[: raised.start()], text[raised.end() :], node)
    found = nodes[0]
    before = text[: found.start()].rstrip().rpartition("\n\n")[2]
    lines = [line for line in before.split("\n") if not _MADE.match(line)]
    reason = _PREFIX.sub("", "\n".join(lines)).strip()
    return f"{reason} (at {found[1]}, in {where})"


def _of_python(before: str, traced: str, where: str) -> str:
    """What an error of Python code says, in a few lines, and the line of code that raised it."""
    lines = [line for line in before.split("\n") if line.strip() and not _MADE.match(line)]
    told = [line for line in lines if not line.startswith("  ")]  # those are code of the node's
    reason = _PREFIX.sub("", "\n".join(told[:_TOLD_LINES])).strip()
    if len(told) > _TOLD_LINES:
        reason += " ..."
    code = [f"{file}:{line}, " for file, line in _CODE.findall(traced)]
    own = [place for place in code if _INSTALLED not in place]
    return f"{reason} (at {''.join((own or code)[-1:])}{where})"


def _not_compiled(text: str) -> str:
    """What XLA cannot compile, where in the model that is, and what to do."""
    found, kind = _NO_KERNEL.search(text), _TYPE.search(text)
    if found is not None:
        what = "an input" if found[1] == "_Arg" else f"the operation {found[1]}"
        of_type = "" if kind is None else f" of type {kind[1].lower()}"
        reason = f"it has no kernel for {what}{of_type} (at {found[2]})"
    else:
        before = _PREFIX.sub("", _STACK.split(text, maxsplit=1)[0]).rstrip()
        reason = before.rpartition("\n")[2].strip() or "unknown reason"
    return (
        f"XLA cannot compile the model's step: {reason.rstrip('.')}. "
        "Compile the model with jit_compile=False."
    )


def says_replaced(error: BaseException) -> bool:
    """Whether a call found another process in a task's place, or the task left out of the cluster.

    It needs not be so at once: a task that was stopped while others joined says the same.
    """
    return _says_one_of(error, _REPLACED)


def says_no_context(error: BaseException) -> bool:
    """Whether a task has nothing of this process's, or does not know itself.

    Of those that `says_replaced`: without errors of tensors, which say that there is a context.
    """
    return _says_one_of(error, _NO_CONTEXT)


def says_lacks_function(error: BaseException, function: str | None = None) -> bool:
    """Whether a task was not told of a function that was called, before it did anything.

    Args:
        error: of the call.
        function: the name of the function that was called, if others do not count, such as one
            that is called by it.
    """
    if function is not None:
        return f"'{function}' {_NO_SUCH_FUNCTION}" in str(error)
    return _says_one_of(error, (_NO_SUCH_FUNCTION, _NO_DEFINITION))


def says_silent(error: BaseException) -> bool:
    """Whether gRPC closed the connection to a task that did not answer, or makes none to one."""
    return _says_one_of(error, _SILENT)


def says_received_twice(error: BaseException) -> bool:
    """Whether a server refused a run, or a tensor's request, as one that it has had."""
    return _TWICE in str(error)


def says_interrupted(error: BaseException) -> bool:
    """Whether a RuntimeError is a Ctrl-C that came as a call failed."""
    return _INTERRUPTED in str(error)


def says_other_strategy(error: BaseException) -> bool:
    """Whether a RuntimeError says that a variable belongs to another strategy, or to none."""
    return str(error).startswith(_OTHER_STRATEGY)


def says_nobody_answers(error: BaseException, token: str) -> bool:
    """Whether a server has no Python function by a token (`_tf_server.answer_remotely`)."""
    return _says_one_of(error, (token, _PY_FUNC))


def reason_of(error: BaseException) -> str:
    """The line that says what went wrong: the first one, or the one behind a task's name."""
    lines = [line for line in str(error).split("\n") if line.strip()]
    named = [k for k, line in enumerate(lines[:-1]) if line.startswith(_FROM_TASK)]
    return lines[named[0] + 1] if named else lines[0]


def _says_one_of(error: BaseException, texts: tuple[str, ...]) -> bool:
    return any(text in str(error) for text in texts)


def why_not_written(error: OSError) -> str:
    """The reason in a few words; h5py says all that it knows, as text or as `strerror`."""
    number = re.search(r"errno = (\d+)", str(error))
    if number:
        return os.strerror(int(number[1]))
    return error.strerror or " ".join(str(error).split())
