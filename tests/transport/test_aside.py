"""What is done in a thread of its own."""

import signal
import threading

import pytest

from tf_dsgd.transport.aside import Aside


def test_an_interrupted_wait_does_not_take_for_done_what_is_under_way():
    """Python 3.11 says so of a thread that was being joined."""
    goes_on, waits = threading.Event(), threading.Event()

    def action():
        waits.set()
        assert goes_on.wait(60.0)
        return 3

    aside = Aside(action, "test")
    assert waits.wait(60.0)
    interrupt = threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        aside.wait(60.0)
    interrupt.join(60.0)
    assert not aside.wait(0.0)
    goes_on.set()
    assert aside.wait(60.0) and aside.result() == 3


def test_an_error_is_raised_where_the_result_is_asked_for():
    def action():
        raise ValueError("no")

    aside = Aside(action, "test")
    assert aside.wait(60.0)
    with pytest.raises(ValueError, match="no"):
        aside.result()
