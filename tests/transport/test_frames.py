"""Messages between Spark's tasks and the driver, over real sockets, without Spark."""

import concurrent.futures
import contextlib
import json
import os
import pickle
import random
import socket
import struct
import threading

import numpy as np
import pytest

from tf_dsgd.transport import answering, frames
from tf_dsgd.transport.answering import Server

ARRAYS = [
    np.arange(6, dtype="<f4").reshape(2, 3),
    np.array(2.5),
    np.zeros((0, 4), "int64"),
    np.array([True, False]),
    np.arange(3, dtype=">i4"),
    np.asfortranarray(np.arange(4.0).reshape(2, 2)),
]


@pytest.fixture
def server():
    seen = []

    def answer(header, arrays):
        seen.append(header)
        if header["do"] == "fail":
            raise ValueError("so it is")
        return {"sum": sum(float(np.sum(array)) for array in arrays)}, arrays

    with Server("127.0.0.1", answer, most_bytes=1000) as made:
        made.seen = seen
        yield made


def sent(server, data, half_close=True):
    """What the server answers to bytes; nothing where it ends the connection."""
    with socket.create_connection(server.address, timeout=30) as connection:
        try:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            return connection.recv(100)
        except TimeoutError:  # it should not have to wait
            raise
        except OSError:  # it may have ended the connection at the first bytes
            return b""


def test_arrays_come_back_as_they_were(server):
    answer = frames.ask(server.address, server.token, {"do": "echo"}, ARRAYS)
    assert answer.header["sum"] == 15 + 2.5 + 0 + 1 + 3 + 6  # by hand
    for got, want in zip(answer.arrays, ARRAYS, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.shape == want.shape and got.dtype == want.dtype.newbyteorder("<")
        got[...] = 0  # a copy of one's own


def test_what_fails_in_the_driver_is_told(server):
    with pytest.raises(RuntimeError, match="ValueError: so it is"):
        frames.ask(server.address, server.token, {"do": "fail"})


@pytest.mark.parametrize("array", [np.array([None]), np.array(["a"]), np.array(["2020"], "M8[Y]")])
def test_only_numbers_travel(array):
    with pytest.raises(TypeError, match="Arrays must be of numbers"):
        frames.encode(b"secret", {}, [array])


def test_a_thousand_random_messages_change_nothing(server):
    made = random.Random(1)
    real = frames.encode(server.token, {"do": "echo"}, [np.arange(9)])
    expected = 0
    for number in range(1000):
        if number % 2:
            data = made.randbytes(made.randrange(300))
        else:  # a real one with a byte changed
            at = made.randrange(len(real))
            data = real[:at] + bytes([real[at] ^ made.randrange(1, 256)]) + real[at + 1 :]
        assert sent(server, data) == b""
        expected += 1
    assert server.seen == []
    assert frames.ask(server.address, server.token, {"do": "echo"}).header["sum"] == 0
    assert server.refused == expected


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_is_not_read(server, tmp_path):
    mark = tmp_path / "read"
    text = pickle.dumps(Trap(str(mark)))
    assert sent(server, text) == b""
    prefix = struct.pack(">4sIQ", frames.MAGIC, len(text), 0)
    mac = frames._mac(server.token, b"", prefix, text)
    signed = prefix + mac + text + frames._mac(server.token, mac)
    assert sent(server, signed) == b""  # under the right token
    assert not mark.exists() and server.seen == []
    pickle.loads(text)
    assert mark.exists()  # it is one that would have


def test_another_token_is_refused(server):
    with pytest.raises(OSError):
        frames.ask(server.address, frames.token(), {"do": "echo"})
    assert server.seen == []


def test_an_answer_from_one_without_the_token_is_refused(server):
    request = frames.encode(server.token, {"do": "echo"})
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(request)
        with pytest.raises(frames.BadFrameError, match="token"):
            frames.receive(connection, frames.token(), frames.mac_of(request))


def test_an_answer_to_another_request_is_refused(server):
    request = frames.encode(server.token, {"do": "echo"})
    other = frames.encode(server.token, {"do": "echo"})
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(request)
        with pytest.raises(frames.BadFrameError, match="token"):
            frames.receive(connection, server.token, frames.mac_of(other))


def test_a_body_above_the_limit_is_not_read(server):
    """The limit is 1,000 bytes; nothing but the header is sent, and the answer is the end."""
    whole = frames.encode(server.token, {"do": "echo"}, [np.zeros(126)])  # 1,008 bytes
    assert sent(server, whole[: -1008 - 32], half_close=False) == b""
    assert server.seen == []
    assert server.refused == 1


def test_many_who_say_nothing_keep_nobody_out(server):
    """More than there is room for, for half of the time that they could stay."""
    with contextlib.ExitStack() as stack:
        for _ in range(answering._MOST_STRANGERS + 20):
            stack.enter_context(socket.create_connection(server.address, timeout=30))
        asked = {"do": "echo"}
        frames.ask(server.address, server.token, asked, seconds=frames.HEADER_SECONDS / 2)
    assert len(server.seen) == 1


def test_a_task_that_waits_for_its_answer_is_not_let_go_of(monkeypatch):
    """It has shown the token, and so is none of the silent ones, of which one is let in."""
    monkeypatch.setattr(answering, "_MOST_STRANGERS", 1)
    asked, go_on = threading.Event(), threading.Event()

    def answer(header, arrays):
        asked.set()
        assert go_on.wait(timeout=30)
        return {"said": header["do"]}, arrays

    with Server("127.0.0.1", answer) as made, concurrent.futures.ThreadPoolExecutor() as pool:
        task = pool.submit(frames.ask, made.address, made.token, {"do": "echo"})
        assert asked.wait(timeout=30)
        silent = [socket.create_connection(made.address, timeout=30) for _ in range(2)]
        ended = silent[0].recv(1)  # the older one is ended for the other
        go_on.set()
        assert task.result(timeout=30).header["said"] == "echo"
        for each in silent:
            each.close()
    assert ended == b""


def test_an_array_of_no_elements_travels_alone(server):
    (found,) = frames.ask(server.address, server.token, {"do": "echo"}, [np.zeros((0, 3))]).arrays
    assert (found.shape, found.dtype) == ((0, 3), np.dtype("<f8"))


def test_it_is_asked_again_past_connections_that_fail_until_it_is_done(monkeypatch):
    """The first connection is ended, as a flood of strangers may do; the next answer is: later."""
    monkeypatch.setattr(frames, "AGAIN_SECONDS", 0.0)
    made, said = [], []

    def answer(header, arrays):
        said.append(header["seconds"])
        return {"done": len(said) == 2}, arrays

    def create_connection(address, timeout):
        connection = create(address, timeout=timeout)
        made.append(connection)
        if len(made) == 1:
            connection.shutdown(socket.SHUT_RDWR)
        return connection

    create = socket.create_connection
    with Server("127.0.0.1", answer) as server:
        monkeypatch.setattr(socket, "create_connection", create_connection)
        asked = {"do": "echo"}
        last = frames.ask_until_done(server.address, server.token, asked, [np.ones(2)], seconds=7.0)
    assert last.arrays[0].tolist() == [1.0, 1.0]
    assert (len(made), said) == (3, [7.0, 7.0])


def test_a_driver_that_is_gone_is_asked_no_more(monkeypatch):
    """One try, and others for as long as connections may fail."""
    monkeypatch.setattr(frames, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(frames, "SILENT_SECONDS", 0.01)
    with Server("127.0.0.1", None) as server:
        address = server.address
    with pytest.raises(ConnectionRefusedError):
        frames.ask_until_done(address, server.token, {"do": "echo"})


def test_who_says_nothing_is_let_go_of():
    one, other = socket.socketpair()
    with one, other, pytest.raises(TimeoutError):
        frames.receive(one, b"secret", header_seconds=0.05)


@pytest.mark.parametrize(
    "arrays",
    [
        [["<f4", [3]]],  # 12 bytes, where there are 8
        [["<f4", [1]]],
        [["<f4", [-2]]],
        [["|O", [1]]],
        [["<f4,<f4", [1]]],
        [["<f4", [1 << 70, 0]]],
        [["<f4", [2.0]]],
        [["<f4", [True, 2]]],
        ["<f4"],
        7,
        None,
    ],
)
def test_headers_that_state_other_arrays_are_refused(arrays):
    body, secret = bytes(8), b"secret"
    text = json.dumps({"arrays": arrays}).encode()
    prefix = struct.pack(">4sIQ", frames.MAGIC, len(text), len(body))
    mac = frames._mac(secret, b"", prefix, text)
    one, other = socket.socketpair()
    with one, other:
        one.sendall(prefix + mac + text + body + frames._mac(secret, mac, body))
        with pytest.raises(frames.BadFrameError, match="states no arrays"):
            frames.receive(other, secret)
