"""Tables on shards, updated at each message, and the mean of workers for all else."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import faults
from tests.algorithms import averaging_twin
from tests.equivalence import twin
from tests.equivalence.test_tables import ROWS, SGD, SPLIT, WIDTH, ids, local, model, targets

pytestmark = pytest.mark.medium

RATE, BATCH = 0.05, 4


def averaging(cluster, every=1, **options):
    return tf_dsgd.PeriodicAveragingStrategy(
        cluster, average_every=every, **{"placement": SPLIT, **options}
    )


def fit(strategy, make, examples=48, epochs=1):
    with strategy.scope():
        built = make()
    built.fit(
        ids(examples),
        targets(examples),
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    )
    return built


# -- one worker -------------------------------------------------------------------------------

PLAIN = {
    "sgd": lambda: SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipnorm": lambda: SGD(0.1, clipnorm=0.1),
}
FIRST = next(iter(twin.ENGINES))
CASES = [("sgd", FIRST, "reset"), ("clipnorm", FIRST, "local")]
CASES += [("adagrad", engine, "average") for engine in twin.ENGINES]


@pytest.mark.parametrize(("name", "engine", "policy"), CASES)
def test_one_worker_is_plain_keras_on_dense_gradients(name, engine, policy):
    strategy = averaging(twin.ENGINES[engine](), optimizer_state=policy)
    twin.assert_same_as_plain(lambda: model(PLAIN[name]()), strategy, ids(), targets())


LAZY = {
    "momentum": lambda: SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}


@pytest.mark.parametrize(("name", "shards"), [("momentum", 1), ("adam", 3)])
def test_one_worker_is_downpour_with_the_same_tables(name, shards):
    """To the bit, slots and `iterations` too: for whose lazy rules there are twins in NumPy."""
    found = []
    for make in (averaging, lambda cluster, **o: tf_dsgd.DownpourStrategy(cluster, **o)):
        cluster = tf_dsgd.SimulatedCluster(1, num_shards=shards)
        strategy = make(cluster, sparse="lazy", placement=SPLIT)
        built = fit(strategy, lambda: model(LAZY[name]()), epochs=2)
        found.append([*built.get_weights(), *(v.numpy() for v in built.optimizer.variables)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


# -- several workers --------------------------------------------------------------------------

COMPUTE, NETWORK = [1.0, 1.713, 2.937], [0.25, 0.531, 0.117]  # no two turns at one instant


def linear(optimizer):
    """(sum of an example's rows) W + b, and the mean squared error."""
    inputs = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(ROWS, WIDTH, name="table")(inputs)
    built = keras.Model(inputs, keras.layers.Dense(WIDTH)(keras.ops.sum(rows, axis=1)))
    built.compile(optimizer, "mse")
    random = np.random.default_rng(3)
    built.set_weights([random.uniform(-0.5, 0.5, w.shape) for w in built.weights])
    return built


class Twin(averaging_twin.Averaging):
    """The rows in NumPy beside the dense weights, which are W with b as its last row."""

    def __init__(self, weights, every, optimizer):
        self.rows, kernel, bias = (w.astype("float64") for w in weights)
        super().__init__(np.vstack([kernel, bias]), 3, every, optimizer, RATE, "average")
        self.of_rows = averaging_twin.Local(optimizer, RATE, self.rows.shape)
        self.accrued = [np.zeros_like(self.rows) for _ in range(3)]
        self.messages, self.read_at, self.staleness = 0, {}, []

    def step(self, m, batch):
        self.read_at.setdefault(m, self.messages)
        numbers, y = batch
        w, features = self.local[m], self.rows[numbers].sum(1)
        x = np.hstack([features, np.ones((len(y), 1))])
        error = 2.0 / y.size * (x @ w - y)
        np.add.at(self.accrued[m], numbers, np.repeat((error @ w[:-1].T)[:, None], 3, axis=1))
        self.local[m] = w + self.optimizers[m].change(x.T @ error)
        self.count[m] += 1

    def message(self, m):
        total, self.accrued[m] = self.accrued[m], np.zeros_like(self.rows)
        return (*super().message(m), total)

    def arrive(self, worker, message, staleness):
        """Rows at once; rows of which there is no gradient keep still under these optimizers."""
        *message, total = message
        self.rows = self.rows + self.of_rows.change(total)
        self.staleness.append(self.messages - self.read_at.pop(worker))
        self.messages += 1
        return super().arrive(worker, message, staleness)


@pytest.mark.parametrize(("every", "optimizer"), [(1, "sgd"), (1, "adagrad"), (4, "adagrad")])
def test_three_workers_equal_their_twin(every, optimizer):
    """Rows by each worker's gradient in the order of arrival, all else by the mean of weights.

    A row's gradient is as late as the messages that the others send in the same round.
    """
    examples = 53 * BATCH
    cluster = tf_dsgd.SimulatedCluster(3, compute_seconds=COMPUTE, network_seconds=NETWORK, seed=0)
    strategy = averaging(cluster, every)
    makes = {"sgd": SGD, "adagrad": keras.optimizers.Adagrad}
    hand = Twin(linear("sgd").get_weights(), every, optimizer)
    x, y = ids(examples), targets(examples)
    hand.run(3, COMPUTE, NETWORK, [(x[i : i + 4], y[i : i + 4]) for i in range(0, examples, 4)])
    rows, kernel, bias = fit(
        strategy, lambda: linear(makes[optimizer](RATE)), examples
    ).get_weights()
    np.testing.assert_allclose(rows, hand.rows, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.vstack([kernel, bias]), hand.w, rtol=1e-4, atol=1e-5)
    assert (strategy.updates, strategy.steps) == (hand.version, 53)
    assert strategy.staleness().max == 0  # of what is averaged
    assert (min(hand.staleness), max(hand.staleness)) == (0, 2)


def test_an_outer_optimizer_is_for_what_is_averaged():
    """SGD of rate 1 is the plain mean."""
    found = []
    for outer in (None, SGD(1.0)):
        cluster = tf_dsgd.SimulatedCluster(3, compute_seconds=COMPUTE, num_shards=2)
        strategy = averaging(cluster, 2, optimizer_state="local", outer_optimizer=outer)
        found.append(fit(strategy, lambda: model(keras.optimizers.Adagrad(0.1))).get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


class TwoOptimizers(keras.Model):
    """One for the tables, and another for all else, as in wide-and-deep models."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(data[0], training=True) - data[1]) ** 2)
        (table, *others) = self.trainable_variables
        (of_table, *of_others) = tape.gradient(loss, self.trainable_variables)
        self.for_tables.apply([of_table], [table])
        self.optimizer.apply(grads=of_others, trainable_variables=others)
        return {"loss": loss}


def test_tables_may_have_an_optimizer_of_their_own():
    """Which counts as the other one does; one worker is plain Keras."""

    def make():
        whole = linear("sgd")
        built = TwoOptimizers(whole.input, whole.output)
        built.compile(keras.optimizers.Adam(0.05))
        built.for_tables = SGD(0.1)
        return built

    got = fit(averaging(local()), make)
    want = make()
    want.fit(ids(), targets(), batch_size=BATCH, shuffle=False, verbose=0)
    for a, b in zip(got.get_weights(), want.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert [int(o.iterations) for o in (got.for_tables, got.optimizer)] == [12, 12]


# -- nothing is lost --------------------------------------------------------------------------


def seen_model(examples, optimizer):
    """`faults.seen_model`, and a row for each example, to which a descent adds RATE / BATCH."""
    whole = faults.seen_model(examples, "sgd")
    numbers = keras.ops.cast(whole.input[:, :1], "int32")
    rows = keras.layers.Embedding(examples, 1, "zeros", name="table")(numbers)

    class Adds(keras.layers.Layer):
        def call(self, outputs, rows):
            self.add_loss(-keras.ops.mean(keras.ops.sum(rows, axis=(1, 2))))
            return outputs

    built = keras.Model(whole.input, Adds()(whole.output, rows))
    built.compile(optimizer, "mse")
    return built


EXAMPLES, EPOCHS = 240, 2
WAYS = [
    ("dies", "comes back", "stops", "stops for long"),
    ("stops for long", "stops", "comes back", "dies"),
]


@pytest.mark.parametrize(("every", "policy", "way"), [(1, "average", 0), (3, "local", 1)])
def test_each_example_is_in_its_row_once_an_epoch_whatever_happens(every, policy, way):
    """On three shards, some of which may have a message that others lack when its sender dies."""
    make = {
        "dies": lambda m, phase: faults.fail_at(m, 3 + m, phase),
        "comes back": lambda m, phase: faults.fail_at(m, 3 + m, phase, back_after=4.0),
        "stops": lambda m, phase: faults.stop_at(m, 3 + m, phase, seconds=3.0),
        "stops for long": lambda m, phase: faults.stop_at(m, 3 + m, phase, seconds=12.0),
    }
    script = [make[kind](m, faults.PHASES[m]) for m, kind in enumerate(WAYS[way])]
    cluster = tf_dsgd.SimulatedCluster(
        5,
        compute_seconds=tf_dsgd.LogNormal(1.0, 0.5),
        network_seconds=tf_dsgd.Exponential(0.2),
        seed=11,
        num_shards=3,
        faults=script,
        worker_timeout_seconds=6.0,
    )
    strategy = averaging(cluster, every, optimizer_state=policy)
    with strategy.scope():
        built = seen_model(EXAMPLES, SGD(RATE))
    x, y = faults.data(EXAMPLES)
    built.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    assert {fault for _, fault in strategy.engine.struck} == set(script)
    faults.assert_nothing_lost(strategy, built, EPOCHS, EXAMPLES // BATCH)
    rows = built.get_layer("table").embeddings.numpy()
    np.testing.assert_allclose(rows * BATCH / RATE, np.full_like(rows, EPOCHS), rtol=1e-5)


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (keras.optimizers.Adam, {}, 'Adam changes rows.*sparse="lazy"'),
        (lambda: SGD(use_ema=True), {}, "Received: use_ema=True"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(SGD()),
            {},
            "'table/embeddings'.*LossScaleOptimizer skips.*mixed_bfloat16",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(make, options, said):
    with pytest.raises(ValueError) as error:
        fit(averaging(local(), **options), lambda: model(make()))
    assert re.search(said, str(error.value), re.DOTALL)


def test_nothing_but_tables_has_nothing_to_average():
    def make():
        inputs = keras.Input((3,), dtype="int32")
        rows = keras.layers.Embedding(ROWS, WIDTH, name="table")(inputs)
        built = keras.Model(inputs, keras.ops.sum(rows, axis=1))
        built.compile(SGD(0.1), "mse")
        return built

    with pytest.raises(ValueError, match=r"'table/embeddings'.*nothing to average|DownpourStrat"):
        fit(averaging(local()), make)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sparse": "lazy", "placement": None}, "sparse='lazy', placement=None"),
        ({"placement": {"a(": tf_dsgd.Rows()}}, "no regular expression"),
        ({"model_parallel": tf_dsgd.ModelParallel({".*": 0})}, "model_parallel and placement"),
    ],
)
def test_wrong_arguments_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        averaging(local(), **options)


def test_elastic_averaging_names_who_takes_a_placement():
    with pytest.raises(TypeError, match="ElasticAveragingStrategy has no argument 'placement'"):
        tf_dsgd.ElasticAveragingStrategy(local(), placement=SPLIT)
