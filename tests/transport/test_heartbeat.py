"""Tasks that do not answer are noticed, and the connections to them closed."""

import http.server
import socket
import threading

import tensorflow as tf

from tf_dsgd.transport import probing
from tf_dsgd.transport.heartbeat import Heartbeat
from tf_dsgd.transport.names import close_connections


def address_of(listening):
    host, port = listening.getsockname()[:2]
    return f"{host}:{port}"


def test_it_asks_until_nobody_wants_to_know():
    asked = []

    def probe():
        asked.append(threading.current_thread())
        return 0.001 if len(asked) < 3 else None

    heartbeat = Heartbeat(probe, 0.001)
    heartbeat.start()
    heartbeat.join(30.0)
    assert not heartbeat.is_alive()
    assert asked == [heartbeat] * 3


def test_it_goes_on_where_nothing_could_be_asked():
    """As where no file is left to ask with: then it would be nobody's to find who is stopped."""
    asked = []

    def probe():
        asked.append(1)
        if len(asked) < 3:
            raise OSError("Too many open files")

    heartbeat = Heartbeat(probe, 0.001)
    heartbeat.start()
    heartbeat.join(30.0)
    assert not heartbeat.is_alive() and len(asked) == 3


def test_it_ends_when_told_so():
    heartbeat = Heartbeat(lambda: 1000.0, 1000.0)
    heartbeat.start()
    heartbeat.end()
    heartbeat.join(30.0)
    assert not heartbeat.is_alive()


def test_who_answers_a_probe():
    """A server of TensorFlow does; a socket that nobody reads, and another program, do not."""
    server = tf.distribute.Server.create_local_server()
    good = server.target.removeprefix("grpc://")
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web,
    ):
        threading.Thread(target=web.serve_forever, daemon=True).start()
        places = [good, address_of(mute), address_of(web.socket), "127.0.0.1:1"]
        assert probing.not_answering(places, 2.0) == set(places[1:])
        web.shutdown()


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
