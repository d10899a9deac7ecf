"""A server listens at its own address alone; on Linux all of 127.0.0.0/8 is this machine."""

import contextlib
import socket
import sys
import threading
import time

import pytest
import tensorflow as tf

from tests.cluster import processes
from tests.cluster.test_serve import serving, wait_until_serving
from tf_dsgd.transport import listening, probing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's sockets have filters")


def takes(host, port, seconds=0.5):
    return probing.reachable(f"{host}:{port}", seconds)


@pytest.fixture
def server():
    """A socket that listens on all interfaces, of IPv4 and IPv6, as TensorFlow's do."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as made:
        yield made.getsockname()[1]


@pytest.mark.beside_others
@pytest.mark.parametrize(
    ("host", "open_at", "closed_at"),
    [
        ("127.0.0.2", ["127.0.0.2"], ["127.0.0.1", "127.0.0.3", "::1"]),
        ("[::1]", ["::1"], ["127.0.0.1", "127.0.0.2"]),
        ("localhost", ["127.0.0.1"], ["127.0.0.2"]),
    ],
)
def test_only_the_own_address_takes_connections(server, host, open_at, closed_at):
    everywhere = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "::1"]
    if not takes("::1", server):
        pytest.skip("this machine has no IPv6")
    assert all(takes(place, server) for place in everywhere)
    assert listening.keep_to(f"{host}:{server}")
    assert [place for place in open_at + closed_at if takes(place, server)] == open_at


@pytest.mark.beside_others
def test_a_listener_at_another_port_is_left_alone(server):
    with socket.create_server(("", 0)) as other:
        assert listening.keep_to(f"127.0.0.1:{server}")
        assert takes("127.0.0.2", other.getsockname()[1])


def test_connections_made_before_are_ended_elsewhere():
    """Also one that is not accepted yet: the kernel has made it, without the filter."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", 0)))
        port = listener.getsockname()[1]
        here, elsewhere, early = (
            stack.enter_context(socket.create_connection((host, port), 5.0))
            for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3")
        )
        accepted = [stack.enter_context(listener.accept()[0]) for _ in range(2)]
        keeping = threading.Thread(target=listening.keep_to, args=(f"127.0.0.1:{port}",))
        keeping.start()
        assert elsewhere.recv(1) == b""
        assert keeping.is_alive()  # there is one left
        stack.enter_context(listener.accept()[0])
        assert early.recv(1) == b""
        keeping.join(5.0)
        assert not keeping.is_alive()
        accepted[0].sendall(b"x")
        assert here.recv(1) == b"x"


@pytest.mark.beside_others
@pytest.mark.parametrize("host", ["192.0.2.99", "nowhere.invalid"])
def test_where_the_address_is_not_this_machines_all_stay_open(server, host):
    """As behind a service of Kubernetes, whose address no pod has."""
    assert not listening.keep_to(f"{host}:{server}")
    assert takes("127.0.0.1", server) and takes("127.0.0.2", server)


@pytest.mark.beside_others
def test_a_name_that_means_loopback_here_may_mean_more_elsewhere(server, monkeypatch):
    entry = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entry)
    assert not listening.keep_to(f"machine-7:{server}")


@pytest.mark.beside_others
def test_a_user_may_want_all_interfaces(server, monkeypatch):
    monkeypatch.setenv(listening.EVERYWHERE, "everywhere")
    assert not listening.keep_to(f"127.0.0.1:{server}")
    assert takes("127.0.0.2", server)


@pytest.mark.slow
@pytest.mark.beside_others
def test_a_task_listens_at_its_own_address():
    with (
        processes.addresses(2) as (w0, ps),
        serving("worker", 0, {"worker": [w0], "ps": [ps]}) as w,
    ):
        wait_until_serving(w, w0)
        port = w0.rsplit(":", 1)[1]
        deadline = time.monotonic() + 10.0  # the filter comes a moment after TensorFlow listens
        while takes("127.0.0.2", port):
            assert time.monotonic() < deadline
        assert takes("127.0.0.1", port)


CHIEF = """
import sys, tf_dsgd
from tf_dsgd import _tf_remote
strategy = tf_dsgd.DownpourStrategy()
print("CHIEF", _tf_remote.own_address(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.beside_others
@pytest.mark.parametrize("chief", [None, "127.0.0.1"])
def test_a_chief_listens_at_its_own_address(chief):
    with processes.addresses(3) as (w0, ps, mine):
        cluster = {"worker": [w0], "ps": [ps]} | ({"chief": [mine]} if chief else {})
        config = processes.tf_config("chief", 0, **cluster)
        with (
            serving("worker", 0, cluster),
            serving("ps", 0, cluster),
            processes.started("-c", CHIEF, TF_CONFIG=config) as process,
        ):
            address = process.line_with("CHIEF").split()[1]
            assert (address == mine) == bool(chief)
            port = address.rsplit(":", 1)[1]
            assert takes("127.0.0.1", port) and not takes("127.0.0.2", port)


EQUAL = """
import sys, tensorflow as tf
from tf_dsgd.spmd import collectives
print("MET", collectives.group(60.0).meet(1).tolist(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.beside_others
def test_an_equal_process_listens_at_its_own_address():
    with processes.addresses(2) as found:
        configs = [processes.tf_config("worker", m, worker=found) for m in range(2)]
        with (
            processes.started("-c", EQUAL, TF_CONFIG=configs[0]) as first,
            processes.started("-c", EQUAL, TF_CONFIG=configs[1]) as second,
        ):
            for process, address in zip((first, second), found, strict=True):
                process.line_with("MET")
                port = address.rsplit(":", 1)[1]
                assert takes("127.0.0.1", port) and not takes("127.0.0.2", port)


def test_what_tensorflow_itself_does():
    """The reason for all this; when it fails, TensorFlow has learnt it."""
    with processes.addresses(1) as (address,):
        spec = tf.train.ClusterSpec({"worker": [address]})
        server = tf.distribute.Server(spec, job_name="worker", task_index=0)
        port = address.rsplit(":", 1)[1]
        assert takes("127.0.0.2", port)
        assert listening.keep_to(address)
        assert takes("127.0.0.1", port) and not takes("127.0.0.2", port)
        del server
