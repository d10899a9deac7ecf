"""`import tf_dsgd` leaves Spark out, and `tf_dsgd.spark` says what it needs."""

import doctest
import importlib
import inspect

import keras
import numpy as np
import pytest

import tf_dsgd
from tests.packaging.repository import run_python

WITHOUT_PYSPARK = """
import sys
import tf_dsgd
print([name for name in sys.modules if "spark" in name or "py4j" in name])
sys.modules["pyspark"] = None
try:
    import tf_dsgd.spark
except ImportError as error:
    print(error)
"""


def test_the_package_imports_no_spark_and_one_line_says_what_to_install():
    result = run_python("-c", WITHOUT_PYSPARK)
    assert result.returncode == 0, result.stderr
    imported, error = result.stdout.splitlines()
    assert imported == "[]"
    assert error.endswith('is not installed. Run: pip install "tf_dsgd[spark]"')


@pytest.mark.parametrize("name", ["DeepDist", "Distributor", "partitions"])
def test_a_public_name_has_an_example_that_runs(name):
    pytest.importorskip("pyspark", reason='pyspark is not installed: pip install "tf_dsgd[spark]"')
    spark = importlib.import_module("tf_dsgd.spark")
    assert sorted(spark.__all__) == ["DeepDist", "Distributor", "partitions"]
    names = {"tf_dsgd": tf_dsgd, "np": np, "keras": keras}
    text = inspect.cleandoc(getattr(spark, name).__doc__)
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert any("tf_dsgd." in example.source for example in test.examples)
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("name", ["DeepDist", "Distributor", "partitions"])
def test_what_a_public_name_is_called_with_is_looked_at(name):
    pytest.importorskip("pyspark", reason='pyspark is not installed: pip install "tf_dsgd[spark]"')
    made = getattr(importlib.import_module("tf_dsgd.spark"), name)
    needed = {"DeepDist": "model", "Distributor": "num_workers", "partitions": "df"}[name]
    for given, said in (
        ({needed: 1, "zzz": 2}, f"{name} has no argument 'zzz'. Its arguments: {needed}, .*zzz=2"),
        ({}, f"{name} needs the argument '{needed}'"),
        ({needed: "a", **({"columns": "x", "batch_size": 1} if needed == "df" else {})}, needed),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            made(**given)
