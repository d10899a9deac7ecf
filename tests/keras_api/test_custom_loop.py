"""A training loop of one's own over `experimental_distribute_dataset` and `run`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

pytestmark = pytest.mark.medium

CLUSTERS = {
    "local_1": lambda: tf_dsgd.LocalCluster(1),
    "local_2": lambda: tf_dsgd.LocalCluster(2),
    "simulated_3": lambda: tf_dsgd.SimulatedCluster(
        3, compute_seconds=1.0, network_seconds=0.1, seed=0
    ),
}


def make_model():
    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    )
    return model, keras.optimizers.SGD(0.05, momentum=0.5)


def make_replica_step(model, optimizer):
    def replica_step(data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x, training=True) - y))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return replica_step


@pytest.fixture(params=CLUSTERS)
def strategy(request):
    return tf_dsgd.DownpourStrategy(CLUSTERS[request.param]())


def test_loop(strategy):
    x, y = helpers.regression(96, ids=False)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    with strategy.scope():
        model, optimizer = make_model()
        optimizer.build(model.trainable_variables)
    replica_step = make_replica_step(model, optimizer)
    distributed = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def step(data):
        return strategy.run(replica_step, args=(data,))

    start = float(np.mean((model(x) - y) ** 2))
    for _ in range(3):
        for data in distributed:
            step(data)
    weights = model.get_weights()  # reading waits for all the work under way
    assert strategy.steps == strategy.updates == int(optimizer.iterations) == 36
    helpers.assert_ledger_balances(strategy)
    assert float(np.mean((model(x) - y) ** 2)) < 0.5 * start
    if len(strategy.ledger().workers) == 1:
        helpers.assert_close(weights, plain_loop(x, y))


def plain_loop(x, y):
    """The same loop by TensorFlow alone."""
    model, optimizer = make_model()
    replica_step = make_replica_step(model, optimizer)
    for _ in range(3):
        for begin in range(0, len(x), 8):
            replica_step((x[begin : begin + 8], y[begin : begin + 8]))
    return model.get_weights()


def test_a_function_without_data_runs(strategy):
    """`run` without a batch of a distributed dataset still runs the function, in the scope."""
    with strategy.scope():
        variable = tf.Variable(3.0)

    @tf.function
    def double():
        return strategy.run(lambda: 2.0 * variable)

    assert [float(v) for v in strategy.experimental_local_results(double())] == [6.0]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_was_done_is_read_after_a_loop_at_once(cluster, caplog):
    """Though nobody has pushed by then; a function of the loop's is traced without a warning."""
    strategy = tf_dsgd.DownpourStrategy(CLUSTERS[cluster](), push_every=50, fetch_every=50)
    x, y = helpers.regression(96, ids=False)
    with strategy.scope():
        model, optimizer = make_model()
        optimizer.build(model.trainable_variables)
    replica_step = make_replica_step(model, optimizer)
    distributed = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    )

    def step(data):
        strategy.run(replica_step, args=(data,))

    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    try:
        for epoch, run in enumerate((step, tf.function(step)), 1):
            for data in distributed:
                run(data)
            assert strategy.steps == 12 * epoch
            assert 1 <= strategy.updates == strategy.ledger().applied == strategy.staleness().count
    finally:
        logger.removeHandler(caplog.handler)
    assert "AutoGraph" not in caplog.text


def test_a_loop_that_is_left_by_break(strategy):
    """Its last step was run, and is trained on."""
    x, y = helpers.regression(96, ids=False)
    with strategy.scope():
        model, optimizer = make_model()
        optimizer.build(model.trainable_variables)
    replica_step = make_replica_step(model, optimizer)

    @tf.function
    def step(data):
        return strategy.run(replica_step, args=(data,))

    def loop(count):
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        for number, data in enumerate(strategy.experimental_distribute_dataset(dataset)):
            step(data)
            if number == count - 1:
                break

    loop(7)
    model.get_weights()
    assert strategy.steps == 7
    loop(3)
    strategy.settle()
    assert strategy.steps == 10


def counting_step(strategy):
    """A step of a worker that moves a weight by -1, and the weight."""
    with strategy.scope():
        weight = tf.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def step(ticket):
        del ticket
        optimizer.apply([tf.ones([1])], [weight])

    return step, weight


def test_a_loop_over_nothing_does_nothing(strategy):
    """Before a step was traced and after; by `for`, and by an iterator of one's own."""
    step, weight = counting_step(strategy)

    @tf.function
    def distributed_step(ticket):
        strategy.run(step, args=(ticket,))

    def loop(count):
        for ticket in strategy.experimental_distribute_dataset(tf.data.Dataset.range(count)):
            distributed_step(ticket)

    loop(0)
    loop(3)
    loop(0)
    nothing = tf.data.Dataset.range(4).filter(lambda n: n > 4)  # of unknown cardinality
    assert next(iter(strategy.experimental_distribute_dataset(nothing)), None) is None
    assert list(iter(strategy.experimental_distribute_dataset(nothing))) == []
    strategy.settle()
    assert strategy.steps == 3
    np.testing.assert_array_equal(weight.numpy(), [-3.0])


def test_a_second_function_of_the_same_step_is_taken_without_a_warning(strategy, caplog):
    """AutoGraph rewrites nothing of this package."""
    step, weight = counting_step(strategy)

    @tf.function
    def first(ticket):
        strategy.run(step, args=(ticket,))

    @tf.function
    def second(ticket):
        strategy.run(step, args=(ticket,))

    with caplog.at_level("WARNING", "tensorflow"):
        for function in (first, second, first):
            tickets = tf.data.Dataset.range(2)
            for ticket in strategy.experimental_distribute_dataset(tickets):
                function(ticket)
    np.testing.assert_array_equal(weight.numpy(), [-6.0])
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("called_from", ["a tf.function", "Python"])
def test_loops_and_branches_of_tensors_in_a_step(called_from):
    """As TensorFlow's own strategies have them; from Python theirs is run, and ours traced."""

    def loop(strategy):
        with strategy.scope():
            weight = tf.Variable(1.0)
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([weight])

        def replica_step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(x) * weight
                for _ in tf.range(3):
                    loss += weight
                if x[0] > 2.0:
                    loss = -2.0 * loss
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
            return loss

        def step(x):
            return strategy.run(replica_step, args=(x,))

        dataset = tf.data.Dataset.range(1, 7, output_type=tf.float32).batch(2)
        step = tf.function(step) if called_from != "Python" else step
        for x in strategy.experimental_distribute_dataset(dataset):
            step(x)
        return float(weight.numpy())

    found = loop(tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1)))
    assert found == pytest.approx(1.0 - 0.1 * (6.0 - 2 * 10.0 - 2 * 14.0))
    assert found == loop(tf.distribute.OneDeviceStrategy("CPU:0"))
