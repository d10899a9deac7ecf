"""`python -m tf_dsgd.serve`: its first line, its end, its errors, and what a chief learns of it."""

import re
import signal
import socket
import threading
import time

import pytest

import tf_dsgd
from tests.cluster import processes
from tests.cluster.observing import measures_no_seconds
from tests.packaging.repository import run_python
from tf_dsgd.launch import server as serve
from tf_dsgd.transport import cluster_spec, probing

# A chief: connects to the worker named by argument and asks for its version.
CHIEF = """
import sys, time
import tensorflow as tf
from tf_dsgd.transport import probing
from tf_dsgd.transport import cluster_spec
deadline = time.monotonic() + 60
while not probing.reachable(sys.argv[1], 1.0) and time.monotonic() < deadline:
    time.sleep(0.05)
spec = tf.train.ClusterSpec({"worker": [sys.argv[1]]})
tf.config.experimental_connect_to_cluster(spec, job_name="chief")
device = "/job:worker/replica:0/task:0/device:CPU:0"
start = time.monotonic()
version = cluster_spec.remote_version(device)
print("VERSION", version, time.monotonic() - start, flush=True)
sys.stdin.read()
"""

OTHER_VERSION = """
from tf_dsgd import _version
from tf_dsgd.launch import server as serve
from tf_dsgd.transport import cluster_spec
_version.__version__ = "9.9.9"
try:
    serve.serve(cluster_spec.from_tf_config())
finally:
    print("NEVER")
"""

# A chief and a server that knows nothing of tf_dsgd, in one process.
PLAIN_SERVER = """
import sys
import tensorflow as tf
from tf_dsgd.transport import cluster_spec
spec = tf.train.ClusterSpec({"worker": [sys.argv[1]]})
server = tf.distribute.Server(spec, job_name="worker", task_index=0)
tf.config.experimental_connect_to_cluster(spec, job_name="chief")
version = cluster_spec.remote_version("/job:worker/replica:0/task:0/device:CPU:0")
print("VERSION", version, flush=True)
sys.stdin.read()
"""

# As on the way to `python -m tf_dsgd.serve`: whether the package itself then stays unimported.
LEFT_OUT = """
import sys
sys.path.append(sys.argv[1])
sys.argv, sys.orig_argv = ["-m"], ["python", "-m", "tf_dsgd.serve"]
from tf_dsgd import _tf_server
assert "tensorflow" not in sys.modules
_tf_server.leave_python_out()
print("tensorflow" in sys.modules)
assert "keras" not in sys.modules
"""


def serving(job, index, cluster, **environment):
    config = processes.tf_config(job, index, **cluster)
    return processes.started("-m", "tf_dsgd.serve", TF_CONFIG=config, **environment)


def wait_until_serving(process, address, seconds=processes.START_SECONDS):
    deadline = time.monotonic() + seconds
    while not probing.reachable(address, 1.0):
        assert process.popen.poll() is None and time.monotonic() < deadline, process.text
        time.sleep(0.02)


def test_a_worker_serves_one_chief_after_another_and_ends_on_sigterm():
    with processes.addresses(3) as (w0, w1, ps):
        cluster = {"worker": {"0": w0, "4": w1}, "ps": [ps]}
        with serving("worker", 4, cluster) as worker:
            role = worker.line_with("tf_dsgd")
            assert role == (
                f"tf_dsgd {tf_dsgd.__version__}: worker 4 of 5 at {w1} (pid {worker.popen.pid})"
            )
            wait_until_serving(worker, w1)
            for _ in range(2):
                with processes.started("-c", CHIEF, w1) as chief:
                    version, seconds = chief.line_with("VERSION").split()[1:]
                    assert version == tf_dsgd.__version__
                    assert float(seconds) < 5.0
                    chief.send(signal.SIGKILL)
                    chief.wait(5.0)
            worker.send(signal.SIGTERM)
            code, seconds = worker.wait(10.0)
            assert code == 0, worker.text
            assert seconds < 2.0
            assert "Traceback" not in worker.text


def test_a_ps_ends_on_sigint_and_when_its_launcher_is_gone():
    with processes.addresses(2) as (w0, ps):
        cluster = {"worker": [w0], "ps": [ps]}
        with serving("ps", 0, cluster, TF_DSGD_THREADS="401", TF_DSGD_PARENT_FD="0") as first:
            role = first.line_with("tf_dsgd")
            assert re.search(rf"ps 0 of 1 at {ps} \(pid \d+\)", role)
            wait_until_serving(first, ps)
            many = processes.psutil.Process(first.popen.pid).num_threads()
            first.popen.stdin.close()  # the pipe that it was told to watch
            assert first.wait(2.0)[0] == 0, first.text
        with serving("ps", 0, cluster, TF_DSGD_THREADS="1") as second:
            second.line_with("ps 0 of 1")
            wait_until_serving(second, ps)  # the same port again, at once
            # gRPC's threads, some tens, come and go; those within an operation are 400 fewer.
            assert many - processes.psutil.Process(second.popen.pid).num_threads() > 300
            second.send(signal.SIGINT)
            code, seconds = second.wait(10.0)
            assert code == 0, second.text
            assert seconds < 2.0
            assert "Traceback" not in second.text


@measures_no_seconds
def test_a_server_leaves_the_python_of_tensorflow_and_keras_out():
    with processes.addresses(2) as (w0, ps):
        config = processes.tf_config("ps", 0, worker=[w0], ps=[ps])
        with processes.started(
            *("-X", "importtime", "-m", "tf_dsgd.serve"), TF_CONFIG=config
        ) as process:
            process.line_with("ps 0 of 1")
            imported = {line.rsplit("|", 1)[-1].strip() for line in process.lines}
    assert "tf_dsgd.serve" not in imported  # it is the program
    assert "tf_dsgd.transport.cluster_spec" in imported
    assert not {name for name in imported if name.startswith(("keras", "tensorflow._api"))}


@measures_no_seconds
@pytest.mark.parametrize("where", ["variable", "folder", "nowhere"])
def test_a_server_loads_plugins_as_tensorflow_does(tmp_path, where):
    variables = {}
    if where == "variable":
        variables["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"] = str(tmp_path)
    elif where == "folder":
        (tmp_path / "tensorflow-plugins").mkdir()
    result = run_python("-c", LEFT_OUT, str(tmp_path), **variables)
    assert result.stdout.split() == [str(where == "nowhere")], result.stderr


@measures_no_seconds
def test_a_script_may_serve_and_tells_its_version():
    with processes.addresses(2) as (w0, ps):
        config = processes.tf_config("worker", 0, worker=[w0], ps=[ps])
        with (
            processes.started("-c", OTHER_VERSION, TF_CONFIG=config) as worker,
            processes.started("-c", CHIEF, w0) as chief,
        ):
            assert chief.line_with("VERSION").split()[1] == "9.9.9"
            worker.send(signal.SIGTERM)
            assert worker.wait(60.0)[0] == 0
            assert "NEVER" not in worker.text


@measures_no_seconds
def test_a_server_of_others_has_no_version():
    with (
        processes.addresses(1) as (address,),
        processes.started("-c", PLAIN_SERVER, address) as process,
    ):
        assert process.line_with("VERSION") == "VERSION None"


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken, processes.addresses(1) as (ps,):
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        start = time.monotonic()
        with serving("worker", 0, {"worker": [address], "ps": [ps]}) as process:
            code, _ = process.wait(60.0)
        assert code == 1
        # The limit is 10 s on an idle machine, of which importing TensorFlow takes most.
        assert time.monotonic() - start < 20.0
        last = process.lines[-1]
        assert f"worker 0 at {address}" in last
        assert "Address already in use" in last
        assert "another port in TF_CONFIG" in last
        assert "Traceback" not in process.text


@pytest.mark.beside_others
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"cluster": {', "TF_CONFIG is not JSON"),
        (processes.tf_config("chief", 0, worker=["w:1"], ps=["p:1"]), "run the training script"),
    ],
)
def test_a_bad_configuration_is_one_line(monkeypatch, capsys, text, words):
    monkeypatch.setenv("TF_CONFIG", text)
    monkeypatch.setattr("sys.argv", ["serve"])
    with pytest.raises(SystemExit) as caught:
        serve.main()
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tf_dsgd.serve: ")
    assert words.lower() in line.lower()


def cluster_of_one(job):
    return cluster_spec.from_tf_config(
        processes.tf_config(job, 0, chief=["c:1"], worker=["w:1"], ps=["p:1"])
    )


@pytest.mark.beside_others
def test_a_chief_does_not_serve():
    with pytest.raises(ValueError, match=r"chief at c:1.*training script"):
        serve.serve(cluster_of_one("chief"))


@pytest.mark.beside_others
def test_serving_needs_the_main_thread():
    raised = []

    def run():
        try:
            serve.serve(cluster_of_one("worker"))
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10.0)
    assert "main thread" in raised[0]


@pytest.mark.beside_others
@pytest.mark.parametrize("text", ["many", "-1", "1.5", "99999999", "\u0663"])
def test_wrong_number_of_threads(monkeypatch, text):
    monkeypatch.setenv(serve.THREADS, text)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="TF_DSGD_THREADS must be a number"):
        serve.serve(cluster_of_one("worker"))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
