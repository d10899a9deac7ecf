"""Codecs, input pipelines and backup tasks of replicas over several devices: those of one device.

On a cluster a worker is two tasks here; its witness is then a replica without parts on a thread.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.equivalence import twin
from tests.equivalence.on_devices import models
from tests.faults import stop_at
from tf_dsgd import _tf, compression

# The models' optimizer has momentum too, and here nothing is to be learned well.
pytestmark = pytest.mark.filterwarnings("ignore:Momentum acts twice")
slow = pytest.mark.slow
PARTS = tf_dsgd.ModelParallel({"a": 0, "b|sum|c": 1})
OTHER_PARTS = tf_dsgd.ModelParallel({"c": 0, ".*": 1})

CODECS = {
    "threshold": compression.Threshold(0.01, entropy=True),
    "topk": compression.TopK(0.3, momentum=0.5),
    "powersgd": compression.PowerSGD(2),
    "cast": compression.Cast("bfloat16"),
    "onebit": compression.OneBit(),
    "efsign": compression.EFSign(),
    "qsgd": compression.QSGD(4),
}
FAST = ["topk", "powersgd"]
"""What each of these keeps has another form."""


@pytest.fixture(autouse=True, scope="module")
def connected():
    """As a process connects TensorFlow makes its devices anew: before the witness has variables."""
    if helpers.ON_CLUSTER:
        tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster(tasks_per_worker=2))


def made(strategy):
    """The strategy, and a model under it with the same first weights each time."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        return strategy, models.skip()


def fit(model, *callbacks, epochs=2, times=1, batch=8):
    x, y = (np.concatenate([array] * times) for array in models.vectors())
    settings = {"batch_size": batch, "epochs": epochs, "verbose": 0, "shuffle": False}
    return model.fit(x, y, callbacks=list(callbacks), **settings)


def kept(strategy, model):
    """What a codec keeps of each weight: (name, worker) to an array."""
    of_weights = strategy.engine.store.kept
    return [
        {
            (name, m): value
            for name, cell in of_weights.get(_tf.unique_id(weight.value), {}).items()
            for m, value in cell.read().items()
        }
        for weight in model.trainable_variables
    ]


def assert_same(one, other):
    """Fails unless two pairs of (strategy, model) have the same weights, and keep the same."""
    helpers.assert_close(twin.state(one[1].weights), twin.state(other[1].weights), 1e-6)
    for mine, theirs in zip(kept(*one), kept(*other), strict=True):
        assert mine.keys() == theirs.keys()
        helpers.assert_close(list(mine.values()), list(theirs.values()), 1e-6)


def one_worker(value, **options):
    cluster = tf_dsgd.LocalCluster(1, devices_per_worker=1 if value is None else 2)
    if helpers.ON_CLUSTER and value is not None:
        cluster = tf_dsgd.TFCluster(tasks_per_worker=2)
    return made(tf_dsgd.DownpourStrategy(cluster, model_parallel=value, **options))


def two_simulated(value, cluster=(), strategy=tf_dsgd.DownpourStrategy, **options):
    """Workers whose delays make messages stale, alike in every run."""
    on = tf_dsgd.SimulatedCluster(
        2,
        compute_seconds=[1.0, 1.7],
        network_seconds=0.1,
        devices_per_worker=1 if value is None else 2,
        **dict(cluster),
    )
    return made(strategy(on, model_parallel=value, **options))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else slow) for n in CODECS])
def test_codecs(name):
    """What is applied, and what is kept, on the device of its weight."""
    make, given = two_simulated, {"push_every": 2, "fetch_every": 2}
    if helpers.ON_CLUSTER:
        make = one_worker
    elif name == "topk":
        given = {"strategy": tf_dsgd.SoftsyncStrategy, "gradients_per_update": 2}
    runs = [make(value, compression=CODECS[name], **given) for value in (None, PARTS)]
    for _, model in runs:
        fit(model)
    assert_same(*runs)
    strategy, model = runs[1]
    np.testing.assert_allclose(strategy.residual(), runs[0][0].residual(), rtol=1e-5)
    for weight in model.trainable_variables:
        copies = weight.value.copies
        for cell in strategy.engine.store.kept.get(_tf.unique_id(weight.value), {}).values():
            assert [v.device for v in cell.present()] == [v.device for v in copies.present()]
    parts = {weight.value.copies.part for weight in model.trainable_variables}
    assert parts == {0, 1}


@pytest.mark.parametrize("name", ["topk", pytest.param("powersgd", marks=slow)])
def test_what_a_codec_keeps_goes_on_under_another_split(name, tmp_path):
    """From a checkpoint of one split, and back to no split at all."""
    options = {"compression": CODECS[name], "fetch_every": 2, "push_every": 2}
    whole = one_worker(None, **options)
    fit(whole[1], epochs=3)
    for value, ends in ((PARTS, 1), (OTHER_PARTS, 2)):
        _, model = one_worker(value, **options)
        backup = tf_dsgd.callbacks.BackupAndRestore(tmp_path / "backup")
        with pytest.raises(helpers.Broken):
            fit(model, backup, helpers.break_off(ends, 2), epochs=3)
    last = one_worker(None, **options)
    fit(last[1], tf_dsgd.callbacks.BackupAndRestore(tmp_path / "backup"), epochs=3)
    assert_same(whole, last)


@pytest.mark.skipif(helpers.ON_CLUSTER, reason="virtual time")
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (tf_dsgd.PeriodicAveragingStrategy, {"average_every": 4}),
        pytest.param(
            tf_dsgd.DownpourStrategy, {"max_staleness": 0, "wire_dtype": "bfloat16"}, marks=slow
        ),
    ],
    ids=["averaging", "bounded"],
)
def test_a_backup_task_is_run_for_a_straggler(strategy, options):
    """Of whose part of the replica nobody else has anything."""
    stopped = {"faults": [stop_at(0, 4, seconds=50.0)], "late_after_seconds": 2.0}
    runs = [two_simulated(v, stopped, strategy, **options) for v in (None, PARTS)]
    for _, model in runs:
        fit(model, epochs=1, times=2, batch=4)
    assert_same(*runs)
    ledgers = [strategy.ledger() for strategy, _ in runs]
    assert ledgers[0] == ledgers[1]
    ends = [strategy.engine.now for strategy, _ in runs]
    assert ends[0] == ends[1] < 50.0  # nobody waited for the one that is stopped until then


@pytest.mark.parametrize("epochs", [pytest.param(2, marks=[] if helpers.ON_CLUSTER else slow)])
def test_workers_make_their_mini_batches(epochs):
    """On a cluster the pipeline runs on the group's first task; threads leave it to the chief."""
    runs = [one_worker(value, fetch_every=2) for value in (None, PARTS)]
    for strategy, model in runs:
        data = strategy.distribute_datasets_from_function(pipeline)
        model.fit(data, epochs=epochs, shuffle=False, verbose=0)
        got = model.evaluate(data, verbose=0, return_dict=True)
        want = model.evaluate(*models.vectors(), verbose=0, return_dict=True)
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    assert_same(*runs)


def pipeline(context):
    data = tf.data.Dataset.from_tensor_slices(models.vectors())
    return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(8)
