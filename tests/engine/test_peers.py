"""Workers that send to one another: slow ones, lost ones, statistics, checkpoints, bad values."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.algorithms.peers_bench import (
    BATCH,
    assert_copies_are_equal,
    dyadic,
    gradients,
    linear,
    residuals,
    simulated,
)
from tests.faults import fail_at, stop_at
from tf_dsgd import compression
from tf_dsgd.algorithms.peers import MOST_AHEAD

pytestmark = pytest.mark.medium

THRESHOLD = compression.Threshold(1.0)


def peers(cluster, codec=THRESHOLD):
    return tf_dsgd.CompressedAsyncStrategy(cluster, compression=codec)


def fit(model, data, **options):
    return model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0, **options)


# -- a slow one -----------------------------------------------------------------------------


def test_nobody_is_further_ahead_than_the_bound():
    """By hand: of A's seconds and B's thousands, A sends 17 messages while B computes one.

    A begins a mini-batch as long as it has sent at most 16 more than B. B's first message is of
    before all of A's 17; then A may send one more for each of B's.
    """
    strategy = peers(simulated(1.0, 1000.0))
    model = linear(strategy)
    fit(model, dyadic(40))
    ahead = MOST_AHEAD + 1
    workers = strategy.ledger().workers
    assert strategy.staleness().max == workers[1].staleness_max == ahead
    assert [worker.steps for worker in workers] == [28, 12]
    assert strategy.engine.now == 12_000.0


# -- lost ones ------------------------------------------------------------------------------


def faulty(script, workers=3):
    return tf_dsgd.SimulatedCluster(
        workers,
        compute_seconds=[1.0, 1.7, 2.3][:workers],
        network_seconds=0.3,
        seed=0,
        faults=script,
        worker_timeout_seconds=4.0,
    )


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("fetch", marks=pytest.mark.slow),
        "compute",
        pytest.param("push", marks=pytest.mark.slow),
        "lock",
    ],
)
def test_a_lost_worker_takes_its_residual_along_and_nothing_else(phase):
    """It comes back with a peer's model, in mid-run: nothing missed, nothing twice."""
    strategy = peers(faulty([fail_at(1, 5, phase, back_after=6.0)]))
    model = linear(strategy)
    data = dyadic(60)
    fit(model, data)
    assert strategy.engine.struck and strategy.steps == 60
    helpers.assert_ledger_balances(strategy)
    assert_copies_are_equal(strategy)
    assert min(worker.steps for worker in strategy.ledger().workers) > 6
    lost = -gradients(*data).sum(0) - (model.get_weights()[0] + residuals(strategy))
    # What it had held back of its first mini-batches: of those it kept at most all.
    held = np.abs(gradients(*data)).max() * 6
    assert 0 < np.abs(lost).max() <= held
    fit(model, data)  # and in the next epoch nothing more is lost
    after = -2 * gradients(*data).sum(0) - (model.get_weights()[0] + residuals(strategy))
    np.testing.assert_array_equal(after, lost)


def test_with_all_of_it_sent_a_lost_worker_takes_nothing_along():
    script = [fail_at(0, 4, "compute", back_after=3.0), fail_at(2, 6, "push")]
    strategy = peers(faulty(script), compression.TopK(1.0))
    model = linear(strategy)
    data = dyadic(60)
    fit(model, data)
    assert len(strategy.engine.struck) == 2 and strategy.steps == 60
    np.testing.assert_array_equal(model.get_weights()[0], -gradients(*data).sum(0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_each_mini_batch_counts_once_in_every_copy(seed):
    """Random deaths and stops, in random phases; of what is sent whole nothing is held back."""
    random = np.random.default_rng(seed)
    script = []
    for m in (0, 1, 2):
        step = 0
        for _ in range(2):
            step += int(random.integers(2, 8))
            phase = str(random.choice(["fetch", "compute", "push", "lock"]))
            seconds = float(random.uniform(0.5, 9.0))
            stops = random.random() < 0.4
            script.append(
                stop_at(m, step, phase, seconds=seconds)
                if stops
                else fail_at(m, step, phase, back_after=min(seconds, 3.5))
            )
    cluster = tf_dsgd.SimulatedCluster(
        4,
        compute_seconds=tf_dsgd.LogNormal(1.0, 0.5),
        network_seconds=tf_dsgd.Exponential(0.2),
        seed=seed,
        faults=script,
        worker_timeout_seconds=4.0,
    )
    strategy = peers(cluster, compression.TopK(1.0))
    model = linear(strategy)
    data, total = dyadic(60, seed), 0.0
    for _ in range(2):
        fit(model, data)
        total = total - gradients(*data).sum(0)
        np.testing.assert_array_equal(model.get_weights()[0], total)
    assert len(strategy.engine.struck) == len(script) and strategy.steps == 120
    helpers.assert_ledger_balances(strategy)
    assert_copies_are_equal(strategy)


@pytest.mark.parametrize("back", [2.5, None])
def test_all_lost_at_once_is_said_with_what_was_lost(back):
    """Whether any comes back or none, as that would bring nothing."""
    script = [fail_at(0, 3, "compute", back_after=back), fail_at(1, 2, "compute", back_after=back)]
    strategy = peers(faulty(script, workers=2))
    with pytest.raises(RuntimeError, match=r"All workers were lost, and with them 5 updates that"):
        fit(linear(strategy), dyadic(40))


def test_one_worker_lost_between_two_drains_loses_nothing_of_before():
    """Nothing was done since the drain, so that what is read outside is all there is."""
    strategy = peers(faulty([fail_at(0, 10, "fetch", back_after=1.0)], workers=1))
    model = linear(strategy)
    data = dyadic(10)
    fit(model, data, epochs=2)
    assert strategy.engine.struck and strategy.steps == 20


# -- state of layers ------------------------------------------------------------------------


def test_each_mini_batch_counts_in_batch_norm_as_in_one_process():
    """Closed form: of messages in order, s <- m s + (1 - m) b; b are means of the inputs."""
    strategy = peers(simulated(1.0, 1.7, 2.3, network=0.3), compression.TopK(1.0))
    with strategy.scope():
        norm = keras.layers.BatchNormalization(momentum=0.75)
        model = keras.Sequential([keras.Input((6,)), norm, keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = dyadic(30)
    with strategy.recording() as entries:
        fit(model, (x, y))
    means, s, step = x.reshape(30, BATCH, 6).mean(1), np.zeros(6), {}
    for worker, action, *what in entries:
        if action == "step":
            step[worker] = what[0]
        if action == "push":
            (batch,) = step.pop(worker)
            s = 0.75 * s + 0.25 * means[batch]
    np.testing.assert_allclose(norm.moving_mean.numpy(), s, rtol=1e-5, atol=1e-6)
    assert_copies_are_equal(strategy)


class Counts(keras.layers.Layer):
    """Counts examples, in an integer, and averages a float that is no moving statistic."""

    def build(self, shape):
        self.seen = self.add_weight(
            name="seen", dtype="int32", initializer="zeros", trainable=False
        )
        self.total = self.add_weight(name="total", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.seen.assign(self.seen + tf.shape(x)[0])
            self.total.assign(self.total + 1.0)
        return x


@pytest.mark.parametrize("kind", ["threads", pytest.param("simulated", marks=pytest.mark.slow)])
def test_other_state_of_layers_by_its_rule(kind):
    """Of integers the sum; of floats the mean over workers of their changes."""
    cluster = tf_dsgd.LocalCluster(2) if kind == "threads" else simulated(1.0, 1.7)
    strategy = peers(cluster)
    with strategy.scope():
        counts = Counts()
        model = keras.Sequential([keras.Input((6,)), counts, keras.layers.Dense(4)])
        model.compile("adagrad", "mse")
    for epochs in (1, 2):
        fit(model, dyadic(30))
        assert int(counts.seen.numpy()) == epochs * 30 * BATCH
        assert float(counts.total.numpy()) == epochs * 30 / 2
        assert_copies_are_equal(strategy)


def test_tables_are_everybodys_and_rows_that_nobody_names_stay():
    strategy = peers(tf_dsgd.LocalCluster(3), compression.Threshold(0.01))
    with strategy.scope():
        table = keras.layers.Embedding(30, 4, embeddings_initializer="ones")
        layers = [table, keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        model.compile(keras.optimizers.Adagrad(0.05), "mse")
    ids = np.random.default_rng(1).integers(0, 20, (64, 2))
    losses = fit(model, (ids, (ids.sum(1) % 3)[:, None]), epochs=6).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    rows = table.embeddings.numpy()
    np.testing.assert_array_equal(rows[20:], np.ones((10, 4)))
    assert (rows[:20] != 1.0).any(axis=1).sum() > 14  # steps of tau may have undone each other
    assert_copies_are_equal(strategy)


# -- what is read and written outside -------------------------------------------------------


def test_weights_that_are_set_outside_are_everybodys():
    strategy = peers(tf_dsgd.LocalCluster(3))
    model = linear(strategy)
    first, second = dyadic(12), dyadic(12, 1)
    fit(model, first)
    held = residuals(strategy)
    model.set_weights([np.full((6, 4), 8.0)])
    fit(model, second)
    found = model.get_weights()[0] + residuals(strategy)
    np.testing.assert_array_equal(found, 8.0 + held - gradients(*second).sum(0))
    assert_copies_are_equal(strategy)


def test_a_learning_rate_that_is_set_reaches_all_workers():
    strategy = peers(simulated(1.0, 1.7), compression.TopK(1.0))
    model = linear(strategy)
    data = dyadic(12)
    fit(model, data)
    model.optimizer.learning_rate = 0.5
    fit(model, data)
    np.testing.assert_array_equal(model.get_weights()[0], -1.5 * gradients(*data).sum(0))


def test_a_recorded_run_of_threads_repeats_on_the_simulator():
    def made(cluster):
        keras.utils.set_random_seed(5)
        strategy = peers(cluster, compression.Threshold(0.01))
        with strategy.scope():
            layers = [keras.layers.Dense(5, "tanh"), keras.layers.BatchNormalization()]
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(4)])
            model.compile(keras.optimizers.Adam(0.02), "mse")
        return strategy, model

    data = dyadic(40)
    strategy, model = made(tf_dsgd.LocalCluster(3))
    with strategy.recording() as entries:
        fit(model, data, epochs=2)
    again, twin = made(tf_dsgd.SimulatedCluster(3, schedule=entries))
    fit(twin, data, epochs=2)
    for mine, theirs in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert again.residual() == strategy.residual()
    assert again.staleness() == strategy.staleness()


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [
        compression.Threshold(0.05, entropy=True),
        pytest.param(compression.TopK(0.25, momentum=0.5), marks=pytest.mark.slow),
        pytest.param(compression.PowerSGD(1), marks=pytest.mark.slow),
        pytest.param(compression.QSGD(4), marks=pytest.mark.slow),
        pytest.param(compression.OneBit(), marks=pytest.mark.slow),
        pytest.param(compression.EFSign(), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_resumed_is_unbroken(codec):
    """To the bit: residuals, momenta, moving statistics, the virtual clock."""

    def made():
        keras.utils.set_random_seed(3)
        strategy = peers(simulated(1.0, 1.7, network=0.3), codec)
        with strategy.scope():
            layers = [keras.layers.Dense(5, "tanh"), keras.layers.BatchNormalization()]
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(4)])
            # Its momentum and the codec's would act twice, which is warned of.
            momentum = 0.0 if getattr(codec, "momentum", 0.0) else 0.5
            model.compile(keras.optimizers.SGD(0.05, momentum=momentum), "mse")
        return strategy, model

    data = dyadic(8)
    unbroken, model = made()
    fit(model, data)
    state = {key: np.array(value) for key, value in unbroken.state().items()}
    saved = model.get_weights()
    fit(model, data)
    for early in (True, False):
        resumed, again = made()
        if not early:
            fit(again, dyadic(12, seed=9))
        again.set_weights(saved)
        resumed.restore(state)
        fit(again, data)
        for mine, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert resumed.residual() == unbroken.residual()
        assert resumed.staleness() == unbroken.staleness()
        assert resumed.engine.now == unbroken.engine.now


# -- bad values -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", pytest.param("simulated", marks=pytest.mark.slow)])
def test_a_change_that_is_not_finite_is_named_and_not_sent(kind):
    cluster = tf_dsgd.LocalCluster(2) if kind == "threads" else simulated(1.0, 1.7)
    strategy = peers(cluster)
    model = linear(strategy)
    x, y = dyadic(40)
    x[77] = np.nan
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"/kernel', .*is not finite, .*Threshold\(tau=1.0"
    ):
        fit(model, (x, y))
    assert np.isfinite(model.get_weights()[0]).all() and np.isfinite(residuals(strategy)).all()
    data = dyadic(12)
    before = model.get_weights()[0] + residuals(strategy)
    fit(model, data)  # and it goes on
    found = model.get_weights()[0] + residuals(strategy)
    np.testing.assert_array_equal(found, before - gradients(*data).sum(0))
    assert_copies_are_equal(strategy)


@pytest.mark.parametrize("codec", [None, 0.002, "threshold", compression.Threshold])
def test_what_is_no_codec_is_refused(codec):
    with pytest.raises(TypeError, match=r"tf_dsgd\.compression.*Received: "):
        peers(simulated(1.0), codec)


def test_no_codec_at_all_is_refused():
    with pytest.raises(TypeError, match="compression"):
        tf_dsgd.CompressedAsyncStrategy(simulated(1.0))


def test_shards_for_weights_are_refused():
    with pytest.raises(ValueError, match=r"Leave out num_shards.*Received: num_shards=2"):
        peers(simulated(1.0, 1.0, num_shards=2))


def test_ps_tasks_are_refused_before_they_are_connected_to():
    spec = {"chief": ["a.invalid:1"], "worker": ["b.invalid:1"], "ps": ["c.invalid:1"]}
    with pytest.raises(ValueError, match=r"Leave them out: .*--ps 0.*Received: .*c\.invalid"):
        peers(tf.train.ClusterSpec(spec))


def test_workers_of_several_tasks_are_refused_before_they_are_connected_to():
    spec = {"chief": ["a.invalid:1"], "worker": ["b.invalid:1", "c.invalid:1"]}
    with pytest.raises(ValueError, match="tasks_per_worker=2"):
        peers(tf_dsgd.TFCluster(tf.train.ClusterSpec(spec), tasks_per_worker=2))


def test_it_says_what_it_is():
    shown = repr(peers(simulated(1.0, 1.7)))
    assert "Threshold(tau=1.0" in shown and "peers" in shown and "AddToOwn" in shown
    assert "no messages yet" in shown
