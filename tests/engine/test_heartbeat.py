"""Tasks that do not answer are noticed, and the connections to them closed."""

import queue
import socket

import tensorflow as tf

from tf_dsgd.engine.heartbeat import Heartbeat
from tf_dsgd.sockets import close_connections


def address_of(listening):
    host, port = listening.getsockname()[:2]
    return f"{host}:{port}"


def test_who_does_not_answer_is_told():
    server = tf.distribute.Server.create_local_server()
    good = server.target.removeprefix("grpc://")
    told = queue.Queue()
    go_on = [True]

    def tell(silent, answering):
        assert answering == {good}
        told.put(silent)
        return go_on[0]

    with socket.create_server(("127.0.0.1", 0)) as mute:
        heartbeat = Heartbeat([good, address_of(mute)], tell, 2.0)
        heartbeat.start()
        heard = [told.get(timeout=30.0)]
        while not heard[-1]:
            heard.append(told.get(timeout=30.0))
        assert heard[0] == set()  # not before its time
        assert heard[-1] == {address_of(mute)}
    go_on[0] = False
    heartbeat.join(30.0)
    assert not heartbeat.is_alive()


def test_it_ends_when_told_so():
    heartbeat = Heartbeat([], lambda *_: True, 1000.0)
    heartbeat.start()
    heartbeat.end()
    heartbeat.join(30.0)
    assert not heartbeat.is_alive()


def test_connections_to_one_address_are_closed_and_no_others():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        pairs = []
        for listening in (one, one, other):
            port = listening.getsockname()[1]
            client = socket.create_connection(("127.0.0.1", port), 10.0)
            pairs.append((client, listening.accept()[0]))
        assert close_connections(address_of(one)) == 2
        for client, accepted in pairs[:2]:
            assert client.recv(1) == b"" and accepted.recv(1) == b""
        client, accepted = pairs[2]
        accepted.sendall(b"x")
        assert client.recv(1) == b"x"
        for pair in pairs:
            for each in pair:
                each.close()
    assert close_connections("no.such.host.invalid:1") == 0


def test_connections_that_grpc_writes_as_ipv6():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        client.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        client.connect(("::ffff:127.0.0.1", listening.getsockname()[1]))
        assert close_connections(address_of(listening)) == 1
        client.close()
