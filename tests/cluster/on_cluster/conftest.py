"""These tests run as the chief of a cluster, started by tests/cluster/test_on_processes.py."""

from tests import helpers

collect_ignore_glob = [] if helpers.ON_CLUSTER else ["test_*.py"]
