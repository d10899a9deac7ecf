"""What a chief says of tasks that are not there, or are something else."""

import contextlib
import http.server
import socket
import threading

import pytest
import tensorflow as tf

from tf_dsgd.transport import cluster_spec
from tf_dsgd.transport.waiting import wait_for_tasks


@contextlib.contextmanager
def web_server():
    """Another program, at "127.0.0.1:port"."""
    handler = http.server.BaseHTTPRequestHandler
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(30.0)


def test_another_program_at_a_tasks_port_is_no_server_and_named():
    """The chief took any first byte for an answer, and TensorFlow waited without end."""
    worker = tf.distribute.Server.create_local_server().target.removeprefix("grpc://")
    with web_server() as other:
        spec = tf.train.ClusterSpec({"worker": [worker], "ps": [other]})
        with pytest.raises(TimeoutError, match="these tasks cannot be reached: ps 0 at") as raised:
            wait_for_tasks(cluster_spec.from_cluster_spec(spec), 0.01)
    assert f"What listens at ps 0 at {other} does not answer as a TensorFlow" in str(raised.value)


def test_a_worker_of_several_tasks_is_there_if_all_of_them_are():
    servers = [tf.distribute.Server.create_local_server() for _ in range(4)]
    *workers, ps = (server.target.removeprefix("grpc://") for server in servers)
    with socket.create_server(("127.0.0.1", 0)) as held:
        nobody = f"127.0.0.1:{held.getsockname()[1]}"

    def found(*addresses, seconds):
        spec = tf.train.ClusterSpec({"worker": list(addresses), "ps": [ps]})
        return wait_for_tasks(
            cluster_spec.grouped(cluster_spec.from_cluster_spec(spec), 2), seconds
        )

    assert found(workers[0], nobody, *workers[1:], seconds=20.0) == {2, 3}
    with pytest.raises(TimeoutError, match=r"worker 1 at .* one worker, which is 2 tasks, are"):
        found(workers[0], nobody, seconds=0.01)


def test_tasks_that_are_there():
    worker, ps = (
        tf.distribute.Server.create_local_server().target.removeprefix("grpc://") for _ in range(2)
    )
    spec = tf.train.ClusterSpec({"worker": {3: worker}, "ps": [ps]})
    assert wait_for_tasks(cluster_spec.from_cluster_spec(spec), 20.0) == {3}
