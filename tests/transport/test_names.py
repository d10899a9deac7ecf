"""Where names lead: while nobody tells, to several places, and where they have moved."""

import errno
import socket
import threading
import time
import types

import pytest
import tensorflow as tf

from tests.transport.test_cluster_spec import cut_off
from tf_dsgd.transport import addresses, names, probing


def entry(host, port):
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, int(port)))


@pytest.fixture
def service(monkeypatch):
    """What the name service knows, by host; else it is away, or says that there is no such name."""
    known = types.SimpleNamespace(places={}, error=socket.EAI_AGAIN, asked=[], now=1000.0)

    def look_up(host, port):
        known.asked.append(host)
        if host not in known.places:
            raise socket.gaierror(known.error, "no")
        return [entry(*place) for place in known.places[host]]

    monkeypatch.setattr(names, "_known", {})
    monkeypatch.setattr(names, "look_up", look_up)
    monkeypatch.setattr(names.time, "monotonic", lambda: known.now)
    return known


def after(service, seconds, address):
    """The places some time later, once it was looked up aside, if it was."""
    service.now += seconds
    names.places(address)
    for thread in threading.enumerate():
        if thread.name.endswith("(_renew)"):
            thread.join(60.0)
    return names.places(address)


def test_while_no_name_service_answers_a_name_is_what_it_was(service):
    service.places["node"] = [("10.0.0.1", 7)]
    assert names.places("node:7") == [entry("10.0.0.1", 7)]
    del service.places["node"]
    for _ in range(3):
        assert after(service, 60.0, "node:7") == [entry("10.0.0.1", 7)]
    assert names.places("other:7") == []
    service.places["other"] = [("10.0.0.2", 7)]
    assert after(service, 2.0, "other:7") == [entry("10.0.0.2", 7)]


def test_a_name_that_there_is_no_more_is_forgotten(service):
    """Its address may be another task's next."""
    service.places |= {"node": [("10.0.0.1", 7)], "next": [("10.0.0.2", 7)]}
    names.places("node:7"), names.places("next:7")
    service.error = socket.EAI_NONAME
    del service.places["node"]
    assert after(service, 60.0, "node:7") == []


@pytest.mark.parametrize("before", [[], [entry("10.0.0.1", 7)]])
def test_nobody_waits_for_a_name_that_was_looked_up(service, monkeypatch, before):
    """Also where nobody knew it, as of a task that is yet to come: training goes on meanwhile."""
    service.places |= {"node": [place for *_, place in before]} if before else {}
    names.places("node:7")
    asked, goes_on = threading.Event(), threading.Event()

    def slow(host, port):
        asked.set()
        assert goes_on.wait(60.0)
        return [entry("10.0.0.2", 7)]

    monkeypatch.setattr(names, "look_up", slow)
    service.now += 60.0
    for _ in range(3):
        assert names.places("node:7") == before
    assert asked.wait(60.0)
    goes_on.set()
    assert after(service, 0.0, "node:7") == [entry("10.0.0.2", 7)]


def test_a_name_is_not_looked_up_at_each_question(service):
    service.places["node"] = [("10.0.0.1", 7)]
    for _ in range(10):
        names.places("node:7"), names.places("unknown:7")
    assert service.asked == ["node", "unknown"]


def test_an_address_is_no_name(service):
    """It is never looked up again, for which a thread would be made every ten seconds."""
    service.places["10.0.0.1"] = [("10.0.0.1", 7)]
    for _ in range(3):
        assert after(service, 60.0, "10.0.0.1:7") == [entry("10.0.0.1", 7)]
    assert service.asked == ["10.0.0.1"]


def test_connections_to_a_place_that_a_name_had_are_closed(service):
    """But not to one that is another task's now."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), 10.0)
        service.places["node"] = [("127.0.0.1", port)]
        names.places(f"node:{port}")
        service.places |= {"node": [("127.0.0.2", port)], "other": [("127.0.0.1", port)]}
        assert after(service, 60.0, f"node:{port}") == [entry("127.0.0.2", port)]
        names.places(f"other:{port}")
        assert names.close_connections(f"node:{port}") == 0
        service.places["other"] = [("127.0.0.3", port)]
        after(service, 60.0, f"other:{port}")
        assert names.close_connections(f"node:{port}") == 1
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


def test_all_places_have_to_refuse_or_all_that_ever_listened(monkeypatch):
    monkeypatch.setattr(probing, "_reached", set())
    with socket.create_server(("127.0.0.1", 0)) as server, cut_off() as gone:
        places = [entry(*server.getsockname()), entry(*gone.split(":"))]
        monkeypatch.setattr(names, "places", lambda address: places)
        server.close()
        assert probing.refusing(["node:1"], 0.1) == set()  # who knows who was at the other one
    with socket.create_server(places[0][4]), cut_off() as gone:
        places[1] = entry(*gone.split(":"))
        assert probing.not_reachable(["node:1"], 1.0) == set()
        # The system gives a new server the address of one that has ended, but not of one that is.
    with cut_off() as gone:
        places[1] = entry(*gone.split(":"))
        assert probing.refusing(["node:1"], 0.1) == {"node:1"}


def test_where_no_file_is_left_nothing_is_said_of_others(monkeypatch):
    """They are neither lost, nor has anybody ended."""
    kind = socket.socket

    def full(*arguments):
        raise OSError(errno.EMFILE, "Too many open files")

    with cut_off() as gone:
        assert probing.not_answering([gone], 0.05) == {gone}
        monkeypatch.setattr(probing.socket, "socket", full)
        assert probing.not_answering([gone], 0.05) == set() == probing.refusing([gone], 0.05)
        monkeypatch.setattr(probing.socket, "socket", kind)
        monkeypatch.setattr(probing.selectors, "DefaultSelector", full)
        assert probing.not_answering([gone], 0.05) == set() == probing.refusing([gone], 0.05)


def test_more_tasks_are_asked_than_there_are_files_for(monkeypatch):
    monkeypatch.setattr(probing, "_MOST_AT_ONCE", 3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        good = f"127.0.0.1:{server.getsockname()[1]}"
        many = {f"127.0.0.{k}:1" for k in range(1, 20)}
        assert probing.not_reachable([good, *many], 1.0) == many
        assert probing.refusing([good, *many], 1.0) == many


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64, ".".join(["a" * 60] * 5)])
def test_what_cannot_be_a_name_is_refused(host):
    with pytest.raises(ValueError, match=r'"worker"\[0\] is .* is not a host name or IP address'):
        addresses.read_addresses([f"{host}:2222"], '"worker"')
    with pytest.raises(OSError, match=r"no host name|not known|No address|Name or service"):
        names.look_up(host)


@pytest.mark.parametrize("host", ["node1.cluster.", "a" * 63, "n-1_x"])
def test_what_may_be_a_name_is_taken(host):
    assert addresses.read_addresses([f"{host}:2222"], "it") == {0: f"{host}:2222"}
