"""What tests on Spark share: their marks, and one Spark session for all tests of a master.

They run alone: several processes had a session each.
"""

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.packaging.repository import ROOT

INSTALL = 'pip install "tf_dsgd[spark]"'
# Py4J and pyspark leave it to garbage collection to close theirs.
UNCLOSED = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
# Java that lives for a minute: to compile well, or collect in threads, costs more than it spares.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SETTINGS = {
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    "spark.executor.extraJavaOptions": SHORT_LIVED,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.stage.maxConsecutiveAttempts": "3",  # a test needs three
    "spark.sql.shuffle.partitions": "2",
}


NEED_NO_SPARK = ["test_import.py"]


def pytest_pycollect_makemodule(module_path, parent):
    if module_path.name in NEED_NO_SPARK:
        return None
    return OnSpark.from_parent(parent, path=module_path)


class OnSpark(pytest.Module):
    """A module of tests that is passed over without pyspark."""

    def collect(self):
        pytest.importorskip("pyspark", reason=f"pyspark is not installed: {INSTALL}")
        from pyspark import cloudpickle

        # By name tasks would import it, and TensorFlow with it.
        cloudpickle.register_pickle_by_value(self.obj)
        for mark in (pytest.mark.slow, pytest.mark.alone, UNCLOSED):
            self.add_marker(mark)
        return super().collect()


@pytest.fixture(autouse=True)
def _sockets_of_pyspark():
    """Collects them where they are not taken for ours."""
    yield
    gc.collect()


class Sessions:
    """One session at a time, kept until another master is asked for."""

    def __init__(self):
        self._session = None

    def of(self, master):
        from pyspark.sql import SparkSession

        if self._session is not None and self._session.sparkContext.master == master:
            return self._session
        self.stop()
        builder = SparkSession.builder.master(master).appName("tf_dsgd")
        for name, value in SETTINGS.items():
            builder = builder.config(name, value)
        self._session = builder.getOrCreate()
        self._session.sparkContext.setLogLevel("OFF")
        return self._session

    def stop(self):
        if self._session is None:
            return
        import pyspark

        application = self._session.sparkContext.applicationId
        self._session.stop()
        self._session = None
        # Where executors of `local-cluster` have written; there is no setting for it.
        work = Path(pyspark.__file__).parent / "work" / application
        if work.exists():
            shutil.rmtree(work)


@pytest.fixture(scope="session")
def sessions():
    from tf_dsgd.spark.session import check_java

    check_java()
    given = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    made = Sessions()
    yield made
    made.stop()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture
def spark(sessions):
    """Four tasks at a time in the driver's process, each of which may fail once."""
    return sessions.of("local[4,2]")


@pytest.fixture
def executors(sessions):
    """Two processes of two tasks each, which Spark starts again if they end."""
    return sessions.of("local-cluster[2,2,1024]")
