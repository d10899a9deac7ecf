"""Where names lead: while nobody tells, to several places, and where they have moved."""

import socket
import time

import pytest
import tensorflow as tf

from tests.transport.test_cluster_spec import cut_off
from tf_dsgd.transport import addresses, names, probing


def entry(host, port):
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, int(port)))


@pytest.fixture
def known(monkeypatch):
    """What the name service knows: by host and port, or an error; and time, which stands still."""
    known, now = {}, [1000.0]

    def look_up(host, port=None, **_):
        places = known.get(host)
        if places is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [entry(*place) for place in places]

    monkeypatch.setattr(names, "_known", {})
    monkeypatch.setattr(names, "_ever", {})
    monkeypatch.setattr(names.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(names.time, "monotonic", lambda: now[0])
    known["now"] = now
    return known


def test_while_no_name_service_answers_a_name_is_what_it_was(known):
    known["node"] = [("10.0.0.1", 7)]
    assert names.places("node:7") == [entry("10.0.0.1", 7)]
    del known["node"]
    for _ in range(3):
        known["now"][0] += 60.0
        assert names.places("node:7") == [entry("10.0.0.1", 7)]
    assert names.places("other:7") == []
    known["other"] = [("10.0.0.2", 7)]
    assert names.places("other:7") == [entry("10.0.0.2", 7)]  # at once


def test_a_name_that_has_moved_is_found_and_what_it_was_is_remembered(known):
    known["node"] = [("10.0.0.1", 7)]
    names.places("node:7")
    known["node"] = [("10.0.0.2", 7)]
    assert names.places("node:7") == [entry("10.0.0.1", 7)]  # not looked up so often
    known["now"][0] += 60.0
    assert names.places("node:7") == [entry("10.0.0.2", 7)]
    assert names.ever("node:7") == {("10.0.0.1", 7), ("10.0.0.2", 7)}


def test_connections_to_a_place_that_a_name_had_are_closed(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), 10.0)
        monkeypatch.setattr(names, "_ever", {f"node.invalid:{port}": {("127.0.0.1", port)}})
        assert names.close_connections(f"node.invalid:{port}") == 1
        assert client.recv(1) == b""
        client.close()


def test_a_place_that_swallows_everything_does_not_hide_another(monkeypatch):
    """As where a name has an IPv6 address, and a firewall drops what goes there."""
    server = tf.distribute.Server.create_local_server()
    port = server.target.rsplit(":", 1)[1]
    with cut_off() as gone:
        places = [entry(*gone.split(":")), entry("127.0.0.1", port)]
        monkeypatch.setattr(names, "places", lambda address: places)
        start = time.monotonic()
        assert probing.not_answering(["node:1"], 20.0) == set()
        assert probing.not_reachable(["node:1"], 20.0) == set()
        assert time.monotonic() - start < 10.0  # at once, and not after the other's time
        assert probing.refusing(["node:1"], 0.1) == set()
        places.pop()
        assert probing.not_reachable(["node:1"], 0.1) == {"node:1"}
        assert probing.refusing(["node:1"], 0.1) == set()


def test_all_places_have_to_refuse(monkeypatch):
    with socket.socket() as closed, cut_off() as gone:
        closed.bind(("127.0.0.1", 0))
        places = [entry(*closed.getsockname()), entry(*gone.split(":"))]
        monkeypatch.setattr(names, "places", lambda address: places)
        assert probing.refusing(["node:1"], 0.1) == set()
        places.pop()
        assert probing.refusing(["node:1"], 0.1) == {"node:1"}


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64, ".".join(["a" * 60] * 5)])
def test_what_cannot_be_a_name_is_refused(host):
    with pytest.raises(ValueError, match=r'"worker"\[0\] is .* is not a host name or IP address'):
        addresses.read_addresses([f"{host}:2222"], '"worker"')
    with pytest.raises(OSError, match=r"no host name|not known|No address|Name or service"):
        names.look_up(host)


@pytest.mark.parametrize("host", ["node1.cluster.", "a" * 63, "n-1_x"])
def test_what_may_be_a_name_is_taken(host):
    assert addresses.read_addresses([f"{host}:2222"], "it") == {0: f"{host}:2222"}
