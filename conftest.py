"""Names that examples in docstrings may use without importing them."""

import importlib.util

import pytest

# Without its extra the folder cannot be imported, and so has no examples to run.
collect_ignore = [] if importlib.util.find_spec("pyspark") else ["tf_dsgd/spark"]


@pytest.fixture(autouse=True, scope="session")
def _names_in_docstrings(doctest_namespace):
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_dsgd

    doctest_namespace.update(keras=keras, np=np, tf=tf, tf_dsgd=tf_dsgd)
