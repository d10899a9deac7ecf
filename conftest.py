"""Names that examples in docstrings may use without importing them."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _names_in_docstrings(doctest_namespace):
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_dsgd

    doctest_namespace.update(keras=keras, np=np, tf=tf, tf_dsgd=tf_dsgd)
