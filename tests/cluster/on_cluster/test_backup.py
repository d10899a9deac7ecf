"""Checkpoints of a cluster: pipelines that workers run go on, and each shard has its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

EXAMPLES, BATCH = 96, 4


def make(periods):
    push_every, fetch_every = periods
    strategy = tf_dsgd.DownpourStrategy(push_every=push_every, fetch_every=fetch_every)
    with strategy.scope():
        model = helpers.recording_model(keras.optimizers.Adam(0.001), metrics=helpers.id_metrics())
    return strategy, model


def shuffled(context):
    data = tf.data.Dataset.from_tensor_slices(helpers.regression(EXAMPLES))
    data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.shuffle(EXAMPLES).batch(BATCH)


def fit(strategy, model, folder, *callbacks):
    backup = tf_dsgd.callbacks.BackupAndRestore(folder, save_freq=10)
    data = strategy.distribute_datasets_from_function(shuffled)
    history = model.fit(
        data, epochs=3, shuffle=False, verbose=0, callbacks=[backup, *callbacks]
    ).history
    return history, model.get_layer("ids").ids.take()


@pytest.mark.parametrize("periods", [(1, 1), (2, 4)])
def test_shuffled_pipelines_go_on_in_mid_epoch(periods, tmp_path):
    """24 mini-batches an epoch: the checkpoint after 30 is in the second, where 6 are done."""
    strategy, model = make(periods)
    with pytest.raises(helpers.Broken):
        fit(strategy, model, tmp_path / "b", helpers.break_off(1, 13))
    done = int(np.load(tmp_path / "b" / "checkpoint-00000003" / "strategy.npz")["position"][0])
    assert done == 6
    again, model = make(periods)
    history, ids = fit(again, model, tmp_path / "b")
    numbers, times = np.unique(ids, return_counts=True)
    np.testing.assert_array_equal(numbers, np.arange(EXAMPLES))
    assert np.sort(times).tolist() == [1] * (BATCH * done) + [2] * (EXAMPLES - BATCH * done)
    assert history["id_count"] == [EXAMPLES] * 2
    assert history["id_sum"] == [np.arange(EXAMPLES).sum()] * 2
    assert again.steps == 72
    ledger = again.ledger()
    assert ledger.refused == ledger.in_flight == 0
    for shard in ledger.shards:
        assert sum(worker.steps for worker in shard.workers) == 72


def test_each_shard_has_its_own_scalars():
    """As its own count of updates: what Keras reads, and saves, is the first one's."""
    strategy, model = make((1, 1))
    x, y = helpers.regression(16)
    model.fit(x, y, batch_size=4, verbose=0)
    count = model.optimizer.iterations.value
    count.on_shard(1).assign(17)
    held = {id(v.value) for v in [*model.weights, *model.optimizer.variables]}
    state = strategy.state(held=held)
    again, model = make((1, 1))
    with again.scope():
        model.optimizer.build(model.trainable_variables)
    again.restore(state)
    count = model.optimizer.iterations.value
    assert [int(count.on_shard(s)) for s in range(again.num_shards)] == [4, 17]
