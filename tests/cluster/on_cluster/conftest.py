"""These tests run as the chief of a cluster, started by tests/cluster/test_on_processes.py."""

import time

import pytest

from tests import helpers
from tf_dsgd.transport import connection

collect_ignore_glob = [] if helpers.ON_CLUSTER else ["test_*.py"]


@pytest.fixture(autouse=True)
def everyone_is_there():
    """A test that loses a worker leaves one that joins a moment later: too late for the next test.

    What a strategy has on a worker that has not joined is on another one meanwhile.
    """
    connected = connection._connection
    deadline = time.monotonic() + 120.0
    while connected is not None and not all(connected.present()):
        assert time.monotonic() < deadline, connected.peers
        time.sleep(0.1)
