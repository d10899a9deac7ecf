"""Lines of TensorFlow's that are taken out, as they were seen, and that nothing else is.

Scripts do without TensorFlow; what they write to file descriptor 2 is what it writes.
"""

import os
import re
import signal
import subprocess
import sys

import pytest

from tf_dsgd import floods
from tf_dsgd._tf_errors import FLOOD_GREETINGS, FLOOD_HEADS, FLOOD_RAISED, FLOOD_TAILS

# Seen in TensorFlow 2.21.0, the second put together as its source does.
CALL = '  File "script_ops.py", line 269, in __call__\n    ret = func(*args)\n          ^^^^\n\n'
TRACEBACK = f"Traceback (most recent call last):\n\n{CALL}"
CAUSE = "\n\nThe above exception was the direct cause of the following exception:\n\n\n"
OF_PYTHON = (
    f"BadRow: one\n\nthree: 3\n{TRACEBACK}KeyError: 'x'\n{CAUSE}{TRACEBACK}BadRow: one\n\n"
    "three: 3\n\na note\n\n\n"
)
GROUP = "".join(
    ("  | " if line.strip() else "") + line
    for line in f"{CALL}ExceptionGroup: two\n\n".splitlines(keepends=True)
)
MADE = "Error in user-defined function passed to MapDataset:1 transformation with iterator: R::M: "
FLOODS = [
    "W0000 00:00:1795557141.585539    6566 destroy_tensor_handle_node.h:59] Ignoring an error "
    "encountered when deleting remote tensors handles: INVALID_ARGUMENT: Unable to find it\n"
    "Additional GRPC error information from remote target /job:ps/replica:0/task:0 while calling "
    "/tensorflow.eager.EagerService/Enqueue:\n"
    ':UNKNOWN:Error received from peer  {grpc_status:3, grpc_message:"Unable to find it"}\n',
    "E0000 00:00:1795557141.585539    6566 eager_context.cc:512] Failed to register function "
    "remotely due to UNAVAILABLE: Socket closed\n"
    "This could happen if the remote target has been disconnected from the client.\n",
    "W0000 00:00:1795557196.949510    9992 local_rendezvous.cc:412] Local rendezvous is aborting "
    "with status: INVALID_ARGUMENT: indices[15,3] = 1000 is not in [0, 50)\n"
    "\t [[{{function_node __inference_body_740}}{{node embedding_1/GatherV2}}]]\n",
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n",
    "I0000 00:00:1795557380.173596   14054 cpu_feature_guard.cc:227] This TensorFlow binary is "
    "optimized to use available CPU instructions in performance-critical operations.\n"
    "To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild.\n",
    "I0000 00:00:1795590808.468325   18272 worker.cc:212] RecvTensor cancelled for 7218439923\n"
    "Additional GRPC error information from remote target /job:worker/replica:0/task:1:\n"
    "The error could be from a previous operation. Restart your program to reset.\n",
    f"W0000 00:00:1795620729.844355   21105 op_kernel.cc:1845] UNKNOWN: {OF_PYTHON}",
    "W0000 00:00:1795620729.844517   21013 local_rendezvous.cc:412] Local rendezvous is aborting "
    f"with status: UNKNOWN: {MADE}{OF_PYTHON}\t [[{{{{node PyFunc}}}}]]\n",
    "W0000 00:00:1795620729.844355   21105 op_kernel.cc:1845] UNKNOWN: ExceptionGroup: two\n"
    f"  + Exception Group Traceback (most recent call last):\n\n{GROUP}\n",
    # absl cuts what is longer than 15,000 bytes.
    (
        "W0000 00:00:1795620783.688113   24413 op_kernel.cc:1845] INVALID_ARGUMENT: "
        f"ValueError: \n{TRACEBACK}{CALL * 200}"
    )[:14_991]
    + "\n",
    "E0000 00:00:1795622045.667697   25701 context_distributed_manager.cc:937] recvmsg:Connection "
    "reset by peer\nAdditional GRPC error information from remote target /job:worker/replica:0/"
    "task:0 while calling /tensorflow.eager.EagerService/UpdateContext:\n"
    ':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"recvmsg"}\n',
    "W0000 00:00:1795621879.578515   15086 grpc_channel.cc:308] Task 1 was not defined in sparse "
    "job worker: /job:worker/replica:0/task:1\n",
    "I0000 00:00:1795621879.579498   15086 remote_tensor_handle_data.cc:46] Unable to destroy "
    "remote tensor handle because the target /job:worker/replica:0/task:1 is no longer available\n",
    "I0000 00:00:1795620173.115403    2680 generator_dataset_op.cc:213] Memory patch applied: "
    "M_TRIM_THRESHOLD=128 kb was set.\n",
    "E0000 00:00:1795684551.952646   28387 context.cc:911] Failed to remove function remotely due "
    "to Unable to find a context_id matching the specified one (4324470260394453063). Perhaps the "
    "worker was restarted, or the context was GC'd?\n"
    "This could happen if the remote target has been disconnected from the client.\n",
    "E0000 00:00:1795685201.238889   10607 utils.cc:181] NOT_FOUND: TensorFlow device GPU:0 was "
    "not registered\n",
    "W0000 00:00:1795810877.390178   31371 op_kernel.cc:1858] OP_REQUIRES failed at xla_ops.cc:602 "
    ": INVALID_ARGUMENT: Detected unsupported operations when trying to compile graph "
    "__inference__one_step_13213[] on XLA_CPU_JIT: PrintV2 (No registered 'PrintV2' OpKernel)\n"
    'The op is created at: \nFile "tmp/jit.py", line 18, in <module>\n'
    'File "site-packages/keras/src/trainer.py", line 399, in fit\n'
    "\ttf2xla conversion failed while converting __inference__one_step_13213[].\n"
    "\t [[StatefulPartitionedCall]]\n",
    "E0000 00:00:1795814386.470245   27116 grpc_util.h:104] Truncated error message: "
    "INVALID_ARGUMENT: 2 root error(s) found.\n"
    "  (0) INVALID_ARGUMENT: {{function_node __inference_whole_round_1654}} Detected unsupported\n"
    "The op is created at: \ndummy_file_name:10:dummy_function_name\n"
    "\ttf2xla conversion failed while converting __inference__one_step_670[].\n"
    "  (1) INVALID_ARGUMENT: {{function_node __inference_whole_round_1654}} Detected unsupported\n"
    "0 successful operations.\n0 derived errors ignored.\n",
]
OWN = [
    "an epoch\nAdditional GRPC error information from remote target: a user's\n\t [[1 2]]\n",
    "Traceback (most recent call last):\n  File 'a', line 1\nKeyError: 'RecvTensor cancelled'\n",
    "E0000 00:00:1795557141.585539    6566 bfc_allocator.cc:1] Out of memory\n",
    "F0000 00:00:1795557141.585539    6566 eager.cc:5] Check failed: Started server with target\n",
    "it says W0000 00:00:1.5 6566 a.cc:4] Local rendezvous is aborting with status\n",
    "W0000 00:00:1795590808.468325   18272 op_kernel.cc:1858] OP_REQUIRES failed at cast_op.cc:1\n",
    f"{CAUSE}Traceback (most recent call last):\n  File 'a', line 1\nBadRow: one\n\n\n",
    "Traceback (most recent call last):\n\n  of a script that prints such a line\n",
    "\n\nThe above exception was the direct cause of this\n",
    "  indented\n\n\n",
    "ValueError: x\n",
    "E0000 00:00:1795622045.667697   25701 context.cc:937] recvmsg:Connection reset by peer\n",
    "a line\n:UNKNOWN:Error received from peer\n",
    "Task 1 was not defined in sparse job worker\n",
    "E0000 00:00:1795684551.952646   28387 context.cc:911] Failed to remove a file\n",
    "E0000 00:00:1795685201.238889   10607 utils.cc:181] NOT_FOUND: a device of the user's\n",
    'it reads\nFile "a.py", line 3, of a user\'s\n',
    "  (1) a user's own\n3 successful operations\n",
]
SCRIPT = f"""
import os, sys
from tf_dsgd import floods
floods.sift({FLOOD_HEADS!r}, {FLOOD_TAILS!r}, {FLOOD_RAISED!r}, {FLOOD_GREETINGS!r})
"""


def sifted(text):
    """What of a text passes, and what is taken out."""
    sieve = floods.Sieve(FLOOD_HEADS, FLOOD_TAILS, FLOOD_RAISED)
    passed, taken = [], []
    for piece in text.encode().splitlines(keepends=True):
        (taken if sieve.takes(piece) else passed).append(piece.decode())
    return "".join(passed), "".join(taken)


def test_what_tensorflow_says_is_taken_out_of_what_others_say():
    text = "".join(own + flood for own, flood in zip(OWN, FLOODS, strict=True))
    assert sifted(text) == ("".join(OWN), "".join(FLOODS))
    assert sifted("".join(OWN)) == ("".join(OWN), "")
    assert sifted("".join(FLOODS)) == ("", "".join(FLOODS))


def test_the_rest_of_a_line_passes_as_its_beginning_did():
    sieve = floods.Sieve(FLOOD_HEADS, FLOOD_TAILS, FLOOD_RAISED)
    flood = FLOODS[3].encode()
    assert [sieve.takes(piece) for piece in (b"10 %", flood, flood)] == [False, False, True]


@pytest.mark.parametrize(
    ("written", "seconds", "given"),
    [
        ([b"one\ntw", b"o\nend"], None, [b"one\n", b"two\n", b"end"]),
        ([b"10 %\r2", b"0 %\n"], 60.0, [b"10 %\r", b"20 %\n"]),
        ([b"name? ", b"thanks\n"], 0.0, [b"name? ", b"thanks\n"]),
    ],
    ids=["lines", "progress", "question"],
)
def test_pieces(written, seconds, given):
    read, write = os.pipe()
    found = []
    coming = floods.pieces(read, seconds)
    for data in written:
        os.write(write, data)
        if seconds == 0.0:
            found.append(next(coming))
    os.close(write)
    found.extend(coming)
    os.close(read)
    assert found == given


def run(script, tmp_path, **variables):
    """The exit code, what came out, and the files that it made.

    The package's own root would import TensorFlow.
    """
    stub = tmp_path / "tf_dsgd"
    stub.mkdir()
    (stub / "__init__.py").touch()
    (stub / "floods.py").symlink_to(floods.__file__)
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": ""}
    ended = subprocess.run(
        [sys.executable, str(path)],
        env={**environment, **variables},
        capture_output=True,
        timeout=60.0,
        check=False,
        text=True,
    )
    return ended.returncode, ended.stderr, list(tmp_path.glob("tf_dsgd-tensorflow-*"))


def test_a_crash_keeps_its_last_words(tmp_path):
    """Also those that Python knows nothing of, and a line without an end."""
    words = "".join(own + flood for own, flood in zip(OWN, FLOODS, strict=True))
    code, said, (file,) = run(
        SCRIPT + f"os.write(2, {words.encode()!r} + b'last words'); os.abort()", tmp_path
    )
    assert code == -signal.SIGABRT
    line = rf"tf_dsgd: TensorFlow's lines .* go to {re.escape(str(file))} .*\n"
    assert re.sub(line, "", said) == "".join(OWN) + "last words"
    assert len(re.findall(line, said)) == 1
    assert file.read_text() == "".join(FLOODS)


def test_greetings_alone_leave_no_file_and_name_none(tmp_path):
    greetings = FLOODS[3] + FLOODS[4]
    assert run(SCRIPT + f"os.write(2, {greetings.encode()!r})", tmp_path) == (0, "", [])


def test_greetings_stand_before_what_makes_the_file(tmp_path):
    words = FLOODS[4] + FLOODS[0] + FLOODS[3]
    _, said, (file,) = run(SCRIPT + f"os.write(2, {words.encode()!r})", tmp_path)
    assert file.read_text() == words
    assert said.count("\n") == 1


def test_nobody_waits_for_a_sieve_that_was_killed(tmp_path):
    kill = """
import signal, subprocess, time
pid = int(subprocess.check_output(["ps", "--ppid", str(os.getpid()), "-o", "pid="]).split()[0])
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
try:
    for _ in range(100):
        os.write(2, b"x" * 10_000)
except BrokenPipeError:
    pass
print("here", file=sys.stderr)
"""
    assert run(SCRIPT + kill, tmp_path) == (0, "here\n", [])


def test_python_writes_past_the_sieve(tmp_path):
    """At once, and to what is a terminal where it was one."""
    script = SCRIPT + "print(sys.stderr.fileno() == 2, end='', file=sys.stderr)"
    assert run(script, tmp_path) == (0, "False", [])


def test_last_words_stand_behind_what_was_written_before(tmp_path):
    """Though a sieve passes what comes by file descriptor 2 later than Python writes."""
    script = f"os.write(2, {OWN[0].encode()!r}); floods.say_behind('last\\n')"
    assert run(SCRIPT + script, tmp_path) == (0, OWN[0] + "last\n", [])


def test_one_sieve_for_a_process(tmp_path):
    script = "floods.sift('', '', '', ''); floods.say_behind('here')"
    assert run(SCRIPT + script, tmp_path) == (0, "here", [])


def test_whoever_sets_the_level_sees_what_it_lets_through(tmp_path):
    script = SCRIPT + f"os.write(2, {FLOODS[0].encode()!r})"
    assert run(script, tmp_path, TF_CPP_MIN_LOG_LEVEL="0") == (0, FLOODS[0], [])


def test_a_file_that_cannot_be_written_leaves_the_lines_where_they_were(tmp_path):
    script = SCRIPT + f"os.write(2, {FLOODS[0].encode()!r})"
    kept = str(tmp_path / "no" / "file")
    assert run(script, tmp_path, **{floods.KEPT: kept}) == (0, FLOODS[0], [])
