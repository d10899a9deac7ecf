"""Which methods of TensorFlow's eager context are replaced for the whole process, and no others."""

import re

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tests.packaging.repository import ROOT
from tf_dsgd import _tf_remote


class Context:
    """Has what may be replaced of the eager context, and nothing else."""

    _handle = None

    def add_c_function(self, function): ...

    def add_function_def(self, definition): ...

    def remove_function(self, name): ...

    def call_function(self, name, tensors, num_outputs): ...


def test_three_methods_are_replaced(monkeypatch):
    there, context = _tf_remote._context.context(), Context()
    before = set(vars(there))
    monkeypatch.setattr(_tf_remote._context, "context", lambda: context)
    monkeypatch.setattr(
        _tf_remote._pywrap_tfe, "TFE_ContextSetRunEagerOpAsFunction", lambda handle, value: None
    )
    _tf_remote.tell_without_waiting()
    assert set(vars(context)) == {"add_c_function", "remove_function", "call_function"}
    former = context.call_function
    _tf_remote.explain_calls(lambda error: None)
    assert set(vars(context)) == {"add_c_function", "remove_function", "call_function"}
    assert context.call_function is not former
    assert set(vars(there)) == before


def test_each_names_a_test_that_is_there():
    source = (ROOT / "tf_dsgd/_tf_remote.py").read_text()
    replaced = re.findall(r"^    context\.(\w+) = ", source, re.MULTILINE)
    assert replaced == ["add_c_function", "remove_function", "call_function", "call_function"]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)", source)
    assert len(named) == 5
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests/cluster" / file).read_text(), (file, test)


def test_nothing_of_ours_adds_a_function_as_a_definition(monkeypatch):
    """TensorFlow would wait for a task that is stopped then; see `tell_without_waiting`."""
    added = []
    monkeypatch.setattr(_tf_remote._context.context(), "add_function_def", added.append)
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2), push_every=2, fetch_every=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    x = np.ones((16, 3), "float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, validation_data=(x, x[:, :1]))
    model.predict(x, verbose=0)

    def pipeline(context):
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4).map(lambda x, y: (x, y))
        return data.shard(context.num_input_pipelines, context.input_pipeline_id)

    model.fit(strategy.distribute_datasets_from_function(pipeline), shuffle=False, verbose=0)
    assert added == []
