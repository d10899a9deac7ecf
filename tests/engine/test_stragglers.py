"""Late work, where others wait for it: another worker does it, too, and what comes first counts.

Outside witnesses: an integer for each example counts how often it was used; virtual time by hand;
where all mini-batches are the same, every average is what one plain Keras model comes to.
"""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import faults
from tests.conformance import registry
from tests.faults import fail_at, stop_at

pytestmark = pytest.mark.medium

EXAMPLES, BATCH = 480, 4


def simulated(script=(), late=2.0, **options):
    return tf_dsgd.SimulatedCluster(3, faults=script, late_after_seconds=late, **options)


def averaging(cluster, **options):
    return tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=4, **options)


def trained(strategy, optimizer=keras.optimizers.SGD, epochs=1, with_table=False):
    with strategy.scope():
        model = faults.seen_model(EXAMPLES, optimizer(), with_table=with_table)
    x, y = faults.data(EXAMPLES)
    history = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)
    faults.assert_metrics_whole(history, y)
    return model


def test_nobody_waits_for_one_that_is_stopped_for_longer_than_its_work_takes():
    """By hand: 3 workers, 120 mini-batches of a second, an average after 4 of each.

    Worker 0 is stopped from 4 to 54. Its message of the round from 4 to 8 is waited for from 8 on;
    one worker's last message took 4, so that it begins at 12 to do what is late, and has sent it at
    16. From there on two workers do 8 mini-batches in 4 seconds: 24 are done at 16, 104 at 56. At
    58 worker 0 sends what nobody needs, and joins the round in which the two others do 8 until 60,
    with 4 until 62. One worker does the last 4 until 66.
    """
    strategy = averaging(simulated([stop_at(0, 4, seconds=50.0)]))
    model = trained(strategy)
    ledger = faults.assert_nothing_lost(strategy, model, 1, 120)
    assert ledger.reasons == {"repeated": 1, "replaced": 0, "failed": 0}
    assert strategy.engine.now == 66.0
    assert strategy.updates == 14  # at 4, 16, 20 ... 56, 62, 66


def test_a_straggler_whose_backup_task_was_first_does_not_end_the_round_either():
    """By hand: worker 2 has done worker 0's part of the round at 16, and worker 1's at 24.

    At 18 worker 0 is there, and waits for worker 1, as its message is in the round. From 24 on two
    do 8 in 4 seconds, 88 are done at 56. Worker 1 is there at 58, and sends at 62; 12 follow until
    66, and the last 8 until 70.
    """
    strategy = averaging(simulated([stop_at(0, 4, seconds=10.0), stop_at(1, 4, seconds=50.0)]))
    model = trained(strategy)
    ledger = faults.assert_nothing_lost(strategy, model, 1, 120)
    assert ledger.reasons["repeated"] == 2
    assert strategy.engine.now == 70.0
    assert strategy.updates == 13  # at 4, 24, 28 ... 56, 62, 66, 70


def test_it_waits_where_it_was_told_to():
    strategy = averaging(simulated([stop_at(0, 4, seconds=50.0)], late=None))
    trained(strategy)
    assert strategy.engine.now == 40.0 + 50.0
    assert strategy.ledger().refused == 0


def test_it_waits_for_as_long_as_its_own_message_took():
    """A worker that takes 7 seconds for what takes another 4 is slow, and not late."""
    cluster = simulated(compute_seconds=[1.75, 1.0, 1.0])
    strategy = averaging(cluster)
    trained(strategy)
    assert strategy.ledger().refused == 0
    assert strategy.engine.now == 10 * 7.0


def test_the_late_one_may_still_come_first():
    """Stopped for 6: waited for from 8, done again from 12 to 16, and there at 14."""
    strategy = averaging(simulated([stop_at(0, 4, seconds=6.0)]))
    model = trained(strategy)
    ledger = faults.assert_nothing_lost(strategy, model, 1, 120)
    assert [worker.repeated for worker in ledger.workers] == [1, 0, 0]
    assert ledger.workers[0].steps == 40
    assert strategy.updates == 10


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["average", "reset"])
def test_every_average_is_what_one_model_comes_to(policy):
    """All mini-batches are alike. One that began elsewhere, or averaged too early, would show."""
    x = np.tile(np.random.default_rng(3).standard_normal((BATCH, 5)).astype("float32"), (120, 1))
    y = x[:, :1] @ np.ones((1, 6), "float32")
    optimizer = {"learning_rate": 0.05, "momentum": 0.9}
    script = [stop_at(0, 4, seconds=50.0), stop_at(1, 30, seconds=55.0)]
    strategy = averaging(simulated(script), optimizer_state=policy)
    with strategy.scope():
        model = plain_model(keras.optimizers.SGD(**optimizer))
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert strategy.ledger().reasons["repeated"] == 2

    alone = plain_model(keras.optimizers.SGD(**optimizer))
    averages = strategy.updates
    for _ in range(averages):
        alone.fit(x, y, batch_size=BATCH, steps_per_epoch=4, shuffle=False, verbose=0)
        if policy == "reset":
            for variable in alone.optimizer.variables[2:]:
                variable.assign(np.zeros(variable.shape))
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def plain_model(optimizer):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6)])
    model.compile(optimizer, "mse")
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["average", "reset"])
def test_what_is_done_again_is_what_the_late_one_would_have_sent(policy):
    """Two rounds, of which the second ends without worker 0: its part begins at the average."""
    got = []
    for script in ([], [stop_at(0, 4, seconds=50.0)]):
        strategy = averaging(simulated(script), optimizer_state=policy)
        with strategy.scope():
            model = faults.seen_model(EXAMPLES, keras.optimizers.SGD(0.05, momentum=0.9))
        x, y = faults.data(EXAMPLES)
        size = 24 * BATCH
        model.fit(x[:size], y[:size], batch_size=BATCH, shuffle=False, verbose=0)
        got.append((model.get_weights(), strategy.ledger().refused, strategy.engine.now))
    (undisturbed, _, _), (late, refused, now) = got
    assert (refused, now) == (0, 16.0)  # the drain did not wait for what will be refused
    for one, other in zip(late, undisturbed, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


WAITING = [
    name for name in registry.CONFIGURATIONS if name.startswith("averaging") or "bounded" in name
]


@pytest.mark.few(1)
@pytest.mark.parametrize("shards", [3])
@pytest.mark.parametrize(
    "configuration",
    [
        WAITING[0],
        *(pytest.param(name, marks=pytest.mark.slow) for name in WAITING[1:-1]),
        WAITING[-1],
    ],
)
def test_nothing_is_lost(configuration, shards):
    """Stops that end before and behind the other's message, loss while another stands in."""
    cluster = tf_dsgd.SimulatedCluster(
        5,
        compute_seconds=tf_dsgd.LogNormal(1.0, 0.5),
        network_seconds=tf_dsgd.Exponential(0.2),
        seed=11,
        num_shards=shards,
        worker_timeout_seconds=30.0,
        late_after_seconds=1.0,
        faults=[
            stop_at(0, 4, "compute", seconds=25.0),
            stop_at(1, 4, "push", seconds=12.0),
            stop_at(2, 9, "lock", seconds=9.0),
            stop_at(3, 14, "fetch", seconds=9.0),
            stop_at(4, 12, "compute", seconds=100.0),
            stop_at(3, 18, "push", seconds=40.0),
            fail_at(2, 25, "push", back_after=5.0),
            fail_at(1, 25, "compute", back_after=5.0),
            fail_at(0, 8, "compute", back_after=5.0),  # in the round after its backup task's
        ],
    )
    strategy = registry.CONFIGURATIONS[configuration](cluster)
    model = trained(
        strategy,
        lambda: registry.optimizer(configuration),
        epochs=2,
        with_table=configuration in registry.WITH_TABLE,
    )
    ledger = faults.assert_nothing_lost(strategy, model, 2, 120)
    if strategy.engine.program.has_backup_tasks:
        assert ledger.reasons["repeated"] > 0
    else:
        local = strategy.algorithm.local
        assert local.slots == "local"  # nobody else has them


def test_one_that_comes_back_in_a_round_that_it_has_sent_in_does_not_end_it():
    """By hand: worker 1 has sent at 4, dies there and is back at 5; worker 2 sends at 12.

    An average of the round without worker 2 would be one more.
    """
    cluster = simulated(
        [fail_at(1, 3, "lock", back_after=1.0)], late=None, compute_seconds=[1.0, 1.0, 3.0]
    )
    strategy = averaging(cluster)
    model = trained(strategy)
    faults.assert_nothing_lost(strategy, model, 1, 120)
    assert strategy.updates == 10
    assert [worker.steps for worker in strategy.ledger().workers] == [40, 40, 40]


def test_an_error_while_one_stands_in_leaves_nothing_behind():
    """The message that it would have sent is never sent; the next `fit` begins clean."""

    class Fails(keras.layers.Layer):
        def call(self, x, training=False):
            return helpers_check(x) if training else x

    def helpers_check(x):
        import tensorflow as tf

        with tf.control_dependencies([tf.debugging.assert_less(x[:, 1:2], 50.0)]):
            return tf.identity(x)

    strategy = averaging(simulated([stop_at(0, 4, seconds=50.0)], compute_seconds=[1.0, 1.0, 1.1]))
    with strategy.scope():
        x_in = keras.Input((5,))
        kept = faults.Seen(EXAMPLES, name="seen")(Fails()(x_in))
        model = keras.Model(x_in, keras.layers.Dense(6)(kept))
        model.compile("sgd", "mse")
    x, y = faults.data(EXAMPLES)
    bad = x.copy()
    bad[BATCH * 30, 1] = 99.0
    with pytest.raises(Exception, match="assert"):
        model.fit(bad, y, batch_size=BATCH, shuffle=False, verbose=0)
    before = model.get_layer("seen").times.numpy()
    assert before.max() == 1 and before[BATCH * 30] == 0
    model.fit(x, y, batch_size=BATCH, verbose=0)
    after = model.get_layer("seen").times.numpy()
    np.testing.assert_array_equal(after - before, np.ones_like(after))


def test_not_with_a_schedule():
    with pytest.raises(ValueError, match="late_after_seconds cannot be put into a schedule"):
        tf_dsgd.SimulatedCluster(1, schedule=[(0, "push")], late_after_seconds=1.0)
