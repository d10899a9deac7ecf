"""What errors of TensorFlow are taken for, by messages that were seen.

Where a message could not be provoked at will it is put together as TensorFlow 2.21's source does.
Processes that say them are in `tests/cluster`.
"""

import re

import pytest
import tensorflow as tf

import tf_dsgd
from tests.packaging.repository import ROOT
from tf_dsgd import _tf_errors

FROM = (
    "\nAdditional GRPC error information from remote target "
    "/job:worker/replica:0/task:0/device:CPU:0 while calling "
    "/tensorflow.eager.EagerService/Enqueue:\n:UNKNOWN:Error received from peer  "
)


def seen(kind, text, grpc=None):
    """An error as a call to a task raises it, with what gRPC adds."""
    added = "" if grpc is None else FROM + f'{{grpc_status:{grpc}, grpc_message:"{text}"}}'
    return kind(None, None, text + added)


CONTEXT = seen(
    tf.errors.AbortedError,
    "Unable to find a context_id matching the specified one (14413250344890370536). Perhaps the "
    "worker was restarted, or the context was GC'd?",
    10,
)
DEVICE = seen(
    tf.errors.InvalidArgumentError, "/job:worker/replica:0/task:1/device:CPU:0 unknown device.", 3
)
TENSOR = seen(
    tf.errors.InvalidArgumentError,
    "Unable to find the relevant tensor remote_handle: Op ID: 4, Output num: 0. One possible cause "
    "is that the tensor was accessed after deallocation in a distributed worker setup.",
    3,
)
NOT_REMOTE = seen(tf.errors.InvalidArgumentError, "Primary device is not remote")
LEFT = seen(tf.errors.InternalError, "No worker known as /job:worker/replica:0/task:2", 13)
LACKS = seen(
    tf.errors.NotFoundError,
    "'__inference_round_7' is neither a type of a primitive operation nor a name of a function "
    "registered in binary running on h1. Make sure the operation or function is registered in the "
    "binary running in this process.",
    5,
)
INNER = seen(
    tf.errors.NotFoundError, "Could not find required function definition __inference_inner_3", 5
)
INSTANTIATED = seen(
    tf.errors.NotFoundError,
    "Was not able to find a function definition (name='__inference_inner_3')",
    5,
)
PING = seen(tf.errors.UnavailableError, "ping timeout", 14)
SETTINGS = seen(
    tf.errors.UnavailableError,
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.3:2222: connection "
    "attempt timed out before receiving SETTINGS frame",
    14,
)
REFUSED = seen(
    tf.errors.UnavailableError,
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.3:2222: Connection "
    "refused",
    14,
)
LOST_MATRIX = tf.errors.InvalidArgumentError(None, None, "Matrix size-incompatible: In[0]: [2,3]")
INTERRUPTED = RuntimeError(
    "pybind11::error_already_set: MISMATCH of original and normalized active exception types: "
    "ORIGINAL UnavailableError REPLACED BY KeyboardInterrupt: <EMPTY MESSAGE>"
)
NO_CALLBACK = seen(
    tf.errors.InvalidArgumentError,
    "ValueError: Could not find callback with key=tf_dsgd_version in the registry.",
    3,
)
NO_KERNEL = seen(
    tf.errors.NotFoundError, "No registered 'PyFunc' OpKernel for 'CPU' devices compatible", 5
)

ALL = {name: value for name, value in globals().items() if isinstance(value, Exception)}


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (_tf_errors.says_replaced, {"CONTEXT", "DEVICE", "TENSOR", "NOT_REMOTE", "LEFT"}),
        (_tf_errors.says_no_context, {"CONTEXT", "DEVICE", "LEFT"}),
        (_tf_errors.says_lacks_function, {"LACKS", "INNER", "INSTANTIATED"}),
        (_tf_errors.says_silent, {"PING", "SETTINGS"}),
        (_tf_errors.says_interrupted, {"INTERRUPTED"}),
        (_tf_errors.says_other_strategy, set()),
        (
            lambda error: _tf_errors.says_nobody_answers(error, "tf_dsgd_version"),
            {"NO_CALLBACK", "NO_KERNEL"},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_is_told_from_all_others(says, expected):
    assert {name for name, error in ALL.items() if says(error)} == expected


@pytest.mark.parametrize("name", ["REFUSED", "LOST_MATRIX"])
def test_errors_of_which_the_class_tells_enough_are_none_of_these(name):
    for says in ("replaced", "no_context", "lacks_function", "silent", "interrupted"):
        assert not getattr(_tf_errors, f"says_{says}")(ALL[name])


def test_a_function_that_was_not_told_is_known_by_its_name():
    assert _tf_errors.says_lacks_function(LACKS, "__inference_round_7")
    assert not _tf_errors.says_lacks_function(LACKS, "__inference_round_70")
    assert not _tf_errors.says_lacks_function(LACKS, "round_7")
    assert not _tf_errors.says_lacks_function(INNER, "__inference_inner_3")  # it has begun to run


def test_a_message_that_quotes_another_one_says_the_same():
    quoted = tf.errors.InvalidArgumentError(None, None, f"Graph execution error:\n\n{TENSOR}")
    assert _tf_errors.says_replaced(quoted) and not _tf_errors.says_lacks_function(quoted)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Connection reset by peer", "Connection reset by peer"),
        ("\nFrom /job:worker/replica:0/task:1:\nSocket closed\nmore", "Socket closed"),
        ("2 root error(s) found.\n\nFrom /job:chief/task:0:\nping timeout", "ping timeout"),
        ("Lost.\nFrom /job:worker/replica:0/task:1:", "Lost."),
    ],
)
def test_the_line_with_the_reason(text, reason):
    assert _tf_errors.reason_of(tf.errors.UnavailableError(None, None, text)) == reason


def test_a_variable_of_another_strategy():
    """TensorFlow itself says it here."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    with other.scope():
        variable = tf.Variable(1.0)
        with pytest.raises(RuntimeError) as raised:
            strategy.extended.colocate_vars_with(variable)
    assert _tf_errors.says_other_strategy(raised.value)
    assert not _tf_errors.says_other_strategy(RuntimeError(f"Behind it: {raised.value}"))


def test_texts_are_matched_nowhere_else():
    """What waits for its owner's rewriting is listed, and the list only becomes shorter."""
    waiting: set[str] = set()
    matching = re.compile(
        r"in str\(\w*error\)|str\(\w*error\)\.|in \w*error\.message|\.startswith\(.*error"
    )
    found = {
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tf_dsgd").rglob("*.py"))
        if matching.search(path.read_text())
    }
    assert found - {"tf_dsgd/_tf_errors.py"} == waiting


def test_what_xla_cannot_compile_as_several_servers_say_it():
    text = (
        "2 root error(s) found.\n  (0) INVALID_ARGUMENT: {{function_node __inference_round_7}} "
        "XLA compilation requires a fixed tensor list size.\nThe op is created at: \nfile:10:name\n"
        "\ttf2xla conversion failed while converting __inference__one_step_6[]."
    )
    brief = _tf_errors.in_short(tf.errors.InvalidArgumentError(None, None, text))
    assert isinstance(brief, tf.errors.InvalidArgumentError)
    assert brief.message == (
        "XLA cannot compile the model's step: XLA compilation requires a fixed tensor list size. "
        "Compile the model with jit_compile=False."
    )


_MAP = (
    "Error in user-defined function passed to MapDataset:1 transformation with iterator: R::Map: "
)
_TRACE = 'Traceback (most recent call last):\n\n  File "/own.py", line 7, in f\n'
_DETECTED = "Detected at node a/Assert defined at (most recent call last):\n"


@pytest.mark.parametrize(
    ("text", "brief"),
    [
        (
            f"Graph execution error:\n\n{_DETECTED}<stack traces unavailable>\n{_DETECTED}"
            "<stack traces unavailable>\nassertion failed: [too large]\n\t [[{{node a/Assert}}]]\n"
            "\t [[while/body/_1/while/IteratorGetNextAsOptional]] [Op:__inference_pull_226]",
            "assertion failed: [too large] (at a/Assert, in the input pipeline)",
        ),
        (
            f'2 root error(s) found.\n  (0) INVALID_ARGUMENT: {_DETECTED}  File "a.py", line 1\n\n'
            "  indices[1] = 9 is not in [0, 5)\n\t [[{{node a/Assert}}]]\n  (1) CANCELLED",
            "indices[1] = 9 is not in [0, 5) (at a/Assert, in a worker's step)",
        ),
        (
            f"2 root error(s) found.\n  (0) INVALID_ARGUMENT:  {_DETECTED}"
            "<stack traces unavailable>\n  indices[1] = 9 is not in [0, 5)\n\t "
            "[[{{node a/Assert}}]]",
            "indices[1] = 9 is not in [0, 5) (at a/Assert, in a worker's step)",
        ),
        (
            f"Graph execution error:\n\n{_DETECTED}<stack traces unavailable>\n{_MAP}BadRow: one\n"
            f"\ntwo\n{_TRACE}    x\n\nKeyError: 'x'\n\n\nThe above exception was the direct\n\n\n"
            f'{_TRACE}  File "/own.py", line 8, in read\n\nBadRow: one\n\ntwo\n\na note\n\n\n'
            "\t [[{{node PyFunc}}]]\n\t [[IteratorGetNext]] [Op:__inference_pull_226]",
            "BadRow: one\ntwo (at /own.py:8, PyFunc, in the input pipeline)",
        ),
        (
            f'Graph execution error:\n\n{_DETECTED}  File "a.py", line 1, in fit\n    a: b\n\n'
            "Error: 1 [[{{node n}}]]\n2\n3\n4\n"
            f'{_TRACE}  File "/x/site-packages/y.py", line 5, in y\n\nError: 1\n\n\n'
            "\t [[{{node a/PyFunc}}]] [Op:__inference_round_2]",
            "Error: 1 [[]]\n2\n3 ... (at /own.py:7, a/PyFunc, in a worker's step)",
        ),
    ],
    ids=["pipeline", "servers", "without stacks", "Python", "Python in a step"],
)
def test_an_operation_that_failed_in_one_line(text, brief):
    error = _tf_errors.in_short(tf.errors.InvalidArgumentError(None, None, text))
    assert error.message == brief
    assert error.__notes__ == [_tf_errors.FAILED]
    assert getattr(error, _tf_errors.WHOLE) == text


H5PY = (
    "Can't write data (file write failed: time = Wed Nov 25 12:00:00 2026\n, filename = 'a', file "
    "descriptor = 9, errno = 28, error message = 'No space left on device', buf = 0x5576, ...)"
)


@pytest.mark.parametrize("arguments", [(H5PY,), (28, H5PY), (28, "No space left on device")])
def test_a_full_disk_is_said_in_a_few_words(arguments):
    """h5py says it in what it was seen to say: all that it knows."""
    assert _tf_errors.why_not_written(OSError(*arguments)) == "No space left on device"


def test_a_line_is_a_message_s_first_and_never_a_number_alone():
    assert _tf_errors.in_a_line(REFUSED.message).endswith("Connection refused")
    ended = tf.errors.AbortedError(None, None, "Cleanup -6131270161420583321\nmore")
    assert _tf_errors.in_a_line(ended.message) == "a task that takes part in the call failed"
