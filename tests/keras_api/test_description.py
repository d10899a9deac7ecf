"""`print(strategy)`, and what a strategy says to a number where it wants a cluster."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tf_dsgd.algorithm import LocalRule
from tf_dsgd.strategies import description

STRATEGIES = {
    "DownpourStrategy": lambda c: tf_dsgd.DownpourStrategy(c, push_every=3, fetch_every=2),
    "SoftsyncStrategy": lambda c: tf_dsgd.SoftsyncStrategy(c, gradients_per_update=2),
    "PeriodicAveragingStrategy": lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=4),
    "ElasticAveragingStrategy": lambda c: tf_dsgd.ElasticAveragingStrategy(c, average_every=4),
    "CompressedAsyncStrategy": lambda c: tf_dsgd.CompressedAsyncStrategy(
        c, compression=tf_dsgd.compression.TopK(1.0)
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_screen(name):
    strategy = STRATEGIES[name](tf_dsgd.LocalCluster(2))
    before = str(strategy)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    model.fit(*helpers.ones(24), batch_size=2, verbose=0)
    lines = repr(strategy).splitlines()
    assert len(lines) < 20 and max(map(len, lines)) <= 120
    shown = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert lines[0] == name
    assert shown["workers"] == "2, of LocalCluster(num_workers=2)"
    assert shown["steps"] == "12 mini-batches applied" and shown["updates"] == str(strategy.updates)
    assert "over" in shown["staleness"]
    assert "0 mini-batches applied" in before and "no messages yet" in before


def test_settings_that_are_not_the_defaults():
    text = str(STRATEGIES["DownpourStrategy"](tf_dsgd.LocalCluster(2)))
    assert "Periods(push_every=3, fetch_every=2)" in text
    cluster = tf_dsgd.LocalCluster(2)
    text = str(tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=2, staleness_scaling=None))
    assert "CollectGradients(gradients_per_update=2, scaling=None)" in text


def test_several_shards():
    cluster = tf_dsgd.SimulatedCluster(2, compute_seconds=1.0, network_seconds=0.1, num_shards=2)
    lines = str(tf_dsgd.DownpourStrategy(cluster)).splitlines()
    assert sum(line.startswith("  shard ") for line in lines) == 2


@pytest.mark.parametrize("name", ["DownpourStrategy", "PeriodicAveragingStrategy"])
def test_tables_and_how_they_are_trained(name):
    strategy = getattr(tf_dsgd, name)(
        tf_dsgd.SimulatedCluster(2), placement={"users/.*": tf_dsgd.Rows()}
    )
    assert "tables" not in str(strategy)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(1200, 2, name="users")])
        model.compile("sgd", "mse")
    told = "users/embeddings 1,200 x 2: split by rows"
    if name != "DownpourStrategy":
        told += ", updated as each message comes, and not averaged"
    assert f"/{told}\n" in str(strategy)


def test_parts_of_workers():
    cluster = tf_dsgd.SimulatedCluster(1)
    strategy = tf_dsgd.DownpourStrategy(cluster, model_parallel=tf_dsgd.ModelParallel({".*": 0}))
    assert "  parts       1 of each worker; strategy.placement() shows what" in str(strategy)


def test_a_shard_that_is_lost_does_not_keep_anybody_from_printing(monkeypatch):
    strategy = STRATEGIES["DownpourStrategy"](tf_dsgd.LocalCluster(2))

    def lost(_):
        raise RuntimeError("Lost ps 0.\nMore lines.")

    monkeypatch.setattr(type(strategy), "steps", property(lost))
    assert "cannot be read: Lost ps 0." in str(strategy).splitlines()[-1]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_number_of_workers_in_place_of_a_cluster(name):
    strategy = getattr(tf_dsgd, name)
    with pytest.raises(TypeError, match=rf"{name}\(tf_dsgd.LocalCluster\(num_workers=4\)\)"):
        strategy(num_workers=4)
    needed = {"SoftsyncStrategy": {"gradients_per_update": 1}}.get(name, {})
    needed |= {"average_every": 2} if "Averaging" in name else {}
    needed |= {"compression": tf_dsgd.compression.TopK(1.0)} if "Compressed" in name else {}
    with pytest.raises(TypeError, match=r"For 4 workers: tf_dsgd.LocalCluster\(4\)"):
        strategy(4, **needed)


def test_an_argument_that_is_nearly_spelt_right():
    with pytest.raises(TypeError, match=r"no argument 'pushevery': did you mean push_every\?"):
        tf_dsgd.DownpourStrategy(pushevery=5)
    with pytest.raises(TypeError, match=r"no argument 'push': did you mean push_every\?"):
        tf_dsgd.DownpourStrategy(push=5)
    with pytest.raises(TypeError, match=r"no argument 'colour'\. Its arguments: cluster, push_eve"):
        tf_dsgd.DownpourStrategy(colour="red")


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (
            lambda: tf_dsgd.CompressedAsyncStrategy(),
            r"needs the argument 'compression', as compression=tf_dsgd\.compression\.Threshold\(",
        ),
        (
            lambda: tf_dsgd.SoftsyncStrategy(tf_dsgd.LocalCluster(2)),
            "needs the argument 'gradients_per_update', as gradients_per_update=2",
        ),
        (
            lambda: tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2), 5),
            r"takes 1 argument\(s\) by their place \(cluster\).* as push_every=5",
        ),
        (lambda: tf_dsgd.LocalCluster(tasks_per_worker=2), "devices_per_worker"),
        (lambda: tf_dsgd.LocalCluster(threads=2), "Its arguments: num_workers, devices_per_worker"),
        (lambda: tf_dsgd.LocalCluster(num_worker=2), "did you mean num_workers"),
        (lambda: tf_dsgd.SimulatedCluster(), "needs the argument 'num_workers', as num_workers=4"),
        (lambda: tf_dsgd.SimulatedCluster(4, 1.0), "as compute_seconds=1.0"),
        (lambda: tf_dsgd.TFCluster(num_workers=4), "tf_dsgd.launch --workers 4 --ps 1"),
        (lambda: tf_dsgd.TFCluster(devices_per_worker=2), "laid over tasks: tasks_per_worker"),
    ],
)
def test_what_is_no_argument_or_is_missing(call, hint):
    with pytest.raises(TypeError, match=hint):
        call()


def test_a_part_of_each_worker_that_is_idle_is_told_of(capsys):
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(2, devices_per_worker=1))
    strategy.cluster.devices_per_worker = 2  # TensorFlow has opened one device in this process
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=2, verbose=0)
    said = capsys.readouterr().err
    assert "devices_per_worker=2 is for model_parallel" in said and 'ModelParallel("auto")' in said


def test_more_workers_than_make_sense(capsys):
    """A hint as the cluster is made, and not again as a strategy is; up to 16 a core, none."""
    cluster = tf_dsgd.LocalCluster(1000)
    assert "1000 workers share" in capsys.readouterr().err
    cluster.configure()
    tf_dsgd.LocalCluster(16).configure()
    assert "share" not in capsys.readouterr().err


def test_a_rule_that_is_no_dataclass():
    class Mine(LocalRule):
        step = message = fetched = None

    assert description._rule(Mine()) == "Mine"
