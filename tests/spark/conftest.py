"""One Spark session for all tests here, which run alone: several processes had one each."""

import gc
import os
import sys

import pytest

from tests.packaging.repository import ROOT


@pytest.fixture(autouse=True)
def _sockets_of_pyspark():
    """Collects them where they are not taken for ours."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def spark():
    from pyspark.sql import SparkSession

    given = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
    }
    builder = SparkSession.builder.master("local[4,2]").appName("tf_dsgd")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
