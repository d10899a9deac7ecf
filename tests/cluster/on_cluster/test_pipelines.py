"""Workers make their own batches: each example once an epoch, in another order each time."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

EXAMPLES, BATCH = 90, 8
# Keras says so whenever data of unknown length end.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")


def dataset_fn(context):
    x, y = helpers.regression(EXAMPLES)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.shuffle(EXAMPLES).batch(BATCH)


def model_of(strategy):
    with strategy.scope():
        return helpers.recording_model(keras.optimizers.SGD(0.01), metrics=helpers.id_metrics())


@pytest.mark.parametrize("periods", [(1, 1), (4, 4), (3, 5)])
def test_each_example_once_an_epoch(periods):
    strategy = tf_dsgd.DownpourStrategy(push_every=periods[0], fetch_every=periods[1])
    model = model_of(strategy)
    ids = helpers.AtEpochEnd(model.get_layer("ids").ids.take_batches)
    data = strategy.distribute_datasets_from_function(dataset_fn)
    assert data.cardinality == 12  # 45 examples a pipeline
    history = model.fit(data, epochs=3, shuffle=False, verbose=0, callbacks=[ids]).history
    for epoch in ids.values:
        np.testing.assert_array_equal(np.sort(np.concatenate(epoch)), np.arange(EXAMPLES))
    orders = {tuple(sorted(tuple(batch) for batch in epoch)) for epoch in ids.values}
    assert len(orders) == 3  # shuffled anew
    assert history["id_sum"] == [EXAMPLES * (EXAMPLES - 1) / 2] * 3
    assert strategy.steps == 36
    ledger = helpers.assert_ledger_balances(strategy)
    assert [worker.steps for worker in ledger.workers] == [18, 18]  # each its own pipeline


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_dsgd.DownpourStrategy(push_every=6, fetch_every=3, max_staleness=0),
        lambda: tf_dsgd.PeriodicAveragingStrategy(average_every=4),
    ],
    ids=["bounded", "averaging"],
)
def test_a_worker_sends_the_rest_of_a_shorter_pipeline(make):
    """The other, which may not go on without it, has most of its own before it then."""
    strategy = make()
    model = model_of(strategy)

    def unequal(context):
        x, y = helpers.regression(EXAMPLES)
        mine = slice(0, 2 * BATCH) if context.input_pipeline_id == 0 else slice(2 * BATCH, None)
        return tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(BATCH)

    ids = helpers.AtEpochEnd(model.get_layer("ids").ids.take_batches)
    data = strategy.distribute_datasets_from_function(unequal)
    model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[ids])
    for epoch in ids.values:
        np.testing.assert_array_equal(np.sort(np.concatenate(epoch)), np.arange(EXAMPLES))
    ledger = helpers.assert_ledger_balances(strategy, updates=strategy.updates)
    assert [worker.steps for worker in ledger.workers] == [4, 20]


def test_steps_per_epoch_of_endless_pipelines():
    strategy = tf_dsgd.DownpourStrategy(push_every=2, fetch_every=2)
    model = model_of(strategy)
    data = strategy.distribute_datasets_from_function(lambda c: dataset_fn(c).repeat())
    model.fit(data, steps_per_epoch=10, epochs=2, shuffle=False, verbose=0)
    assert strategy.steps == 20


def test_of_unknown_length_they_run_in_the_chief():
    strategy = tf_dsgd.DownpourStrategy()
    model = model_of(strategy)
    ids = model.get_layer("ids").ids
    data = strategy.distribute_datasets_from_function(
        lambda c: dataset_fn(c).unbatch().filter(lambda x, y: True).batch(BATCH)
    )
    model.fit(data, epochs=1, shuffle=False, verbose=0)
    np.testing.assert_array_equal(ids.take(), np.arange(EXAMPLES))


def test_evaluating_them_reads_all_in_the_chief():
    strategy = tf_dsgd.DownpourStrategy()
    model = model_of(strategy)
    data = strategy.distribute_datasets_from_function(dataset_fn)
    model.fit(data, shuffle=False, verbose=0)
    got = model.evaluate(data, verbose=0, return_dict=True)
    want = model.evaluate(*helpers.regression(EXAMPLES), verbose=0, return_dict=True)
    assert got["id_sum"] == want["id_sum"] and got["id_count"] == EXAMPLES
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)


def test_arrays_in_the_graph_are_refused():
    strategy = tf_dsgd.DownpourStrategy()
    model = model_of(strategy)
    large = np.zeros((1 << 20, 5), "float32"), np.zeros((1 << 20, 2), "float32")
    data = strategy.distribute_datasets_from_function(
        lambda c: tf.data.Dataset.from_tensor_slices(large).take(64).batch(8)
    )
    with pytest.raises(ValueError, match=r"29 MB of arrays.*Read them from files"):
        model.fit(data, shuffle=False, verbose=0)


@pytest.mark.timeout(60)
def test_a_worker_whose_pipeline_is_empty_holds_nobody_up():
    """Pipelines of 4 and 60 batches: bounded staleness looks at workers that have work left."""
    strategy = tf_dsgd.DownpourStrategy(max_staleness=1)

    def dataset_fn(context):
        rows = tf.data.Dataset.from_tensors(tuple(helpers.ones(2)))
        return rows.repeat(4 if context.input_pipeline_id == 0 else 60)

    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    model.fit(dataset, epochs=2, verbose=0, shuffle=False)
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -128.0, "float32"))
    assert [worker.steps for worker in strategy.ledger().workers] == [8, 120]
