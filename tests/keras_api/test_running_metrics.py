"""What `fit` shows while an epoch runs: metrics over the mini-batches of all workers so far."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

pytestmark = pytest.mark.medium

ENGINES = helpers.engines(
    local=lambda: tf_dsgd.LocalCluster(3),
    simulated=lambda: tf_dsgd.SimulatedCluster(
        3, compute_seconds=[1.0, 1.5, 0.7], network_seconds=0.1, seed=0
    ),
)
STRATEGIES = {
    "downpour": lambda cluster: tf_dsgd.DownpourStrategy(cluster),
    "periods": lambda cluster: tf_dsgd.DownpourStrategy(cluster, push_every=4, fetch_every=8),
    "softsync": lambda cluster: tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=2),
    "averaging": lambda cluster: tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=3),
}
STEPS = 24


class Examples(keras.metrics.Metric):
    """Counts examples."""

    def __init__(self):
        super().__init__(name="examples")
        self.number = self.add_weight(name="number", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.number.assign_add(tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self):
        return self.number + 0.0


def compiled(strategy, make=None, **arguments):
    with strategy.scope():
        model = make() if make else keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.build((None, 1))
        model.compile(keras.optimizers.SGD(0.0), "mse", **arguments)
    return model


EPOCH = [0]


def begin(epochs, epoch):
    EPOCH[0] = epoch
    epochs.append([])


def shown(model, data, **arguments):
    """The logs of each step of each epoch."""
    epochs = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begin(epochs, epoch),
        on_train_batch_end=lambda batch, logs: epochs[-1].append(
            {name: float(value) for name, value in logs.items()}
        ),
    )
    model.fit(data, verbose=0, shuffle=False, callbacks=[note], **arguments)
    return epochs


def of_epochs(model):
    """Of zero inputs; targets of epoch e are e + 1, so that its loss is (e + 1) squared."""
    model.set_weights([np.ones((1, 1)), np.zeros(1)])

    def batches():
        target = EPOCH[0] + 1.0
        for _ in range(STEPS):
            yield np.zeros((4, 1), "float32"), np.full((4, 1), target, "float32")

    spec = tf.TensorSpec((None, 1), tf.float32)
    data = tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))
    return data.apply(tf.data.experimental.assert_cardinality(STEPS))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rule", "steps_per_execution"), [*((rule, 1) for rule in STRATEGIES), ("periods", 5)]
)
def test_this_epochs_mini_batches_from_the_first_on(rule, steps_per_execution):
    """Also at a moment when some are on their way: total and count are of one moment."""
    strategy = STRATEGIES[rule](helpers.workers(3))
    model = compiled(strategy, metrics=["mae"], steps_per_execution=steps_per_execution)
    data = of_epochs(model)
    for first in (0, 2):
        epochs = shown(model, data, epochs=first + 2, initial_epoch=first)
        for e, steps in enumerate(epochs):
            target = first + e + 1.0
            assert len(steps) == -(-STEPS // steps_per_execution)
            np.testing.assert_allclose([logs["loss"] for logs in steps], target**2, rtol=1e-6)
            np.testing.assert_allclose([logs["mae"] for logs in steps], target, rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", STRATEGIES)
def test_simulated_workers_show_each_round_from_when_it_begins(rule, capsys):
    """Before the first round has its mini-batches there is nothing, and nothing is shown."""
    strategy = STRATEGIES[rule](ENGINES["simulated"]())
    rounds = {"downpour": 1, "periods": 4, "softsync": 1, "averaging": 3}[rule]
    model = compiled(strategy)
    for e, steps in enumerate(shown(model, of_epochs(model), epochs=3)):
        assert steps[: rounds - 1] == [{}] * (rounds - 1)
        losses = [logs["loss"] for logs in steps[rounds - 1 :]]
        np.testing.assert_allclose(losses, (e + 1.0) ** 2, rtol=1e-6)
    model.fit(of_epochs(model), shuffle=False)
    bar = capsys.readouterr().out
    assert "loss: " in bar and "loss: 0.0" not in bar


def test_it_is_the_mean_over_all_workers():
    """Simulated at a period of 1, where after b tokens the first b mini-batches are begun."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(3, seed=0))
    model = compiled(strategy)
    model.set_weights([np.zeros((1, 1)), np.zeros(1)])
    y = np.random.default_rng(0).standard_normal((STEPS, 4, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((np.zeros_like(y), y))
    (steps,) = shown(model, data)
    means = np.cumsum((y**2).mean((1, 2))) / np.arange(1, STEPS + 1)
    np.testing.assert_allclose([logs["loss"] for logs in steps], means, rtol=1e-5)


@pytest.mark.parametrize("rule", ["downpour", "periods"])
@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_that_are_no_metrics_are_of_this_epoch(engine, rule):
    """None is the zero from before the first round, and none the last epoch's."""
    model = compiled(STRATEGIES[rule](ENGINES[engine]()), lambda: helpers.OwnLogs("own"))
    data = of_epochs(model)
    for first in (0, 2):
        for e, steps in enumerate(shown(model, data, epochs=first + 2, initial_epoch=first)):
            values = [logs["own"] for logs in steps if logs or engine != "simulated"]
            np.testing.assert_allclose(values, (first + e + 1.0) ** 2, rtol=1e-6)
            assert len(steps) == STEPS and len(values) > STEPS - 4


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_that_are_no_metrics_are_a_workers_latest(engine):
    strategy = tf_dsgd.DownpourStrategy(ENGINES[engine]())
    model = compiled(strategy, lambda: helpers.OwnLogs("loss"))
    y = np.arange(1.0, STEPS + 1).astype("float32").reshape(-1, 1)
    data = tf.data.Dataset.from_tensor_slices((np.zeros((STEPS, 1), "float32"), y)).batch(1)
    model.set_weights([np.zeros((1, 1)), np.zeros(1)])
    (steps,) = shown(model, data)
    possible = {0.0, *(float(k**2) for k in range(1, STEPS + 1))}
    assert {logs["loss"] for logs in steps} <= possible
    assert steps[-1]["loss"] > 1.0


@pytest.mark.parametrize("how", ["validation", "evaluate", "loop", "loop over what fit has"])
def test_what_is_evaluated_while_fit_runs_is_not_trained_on(how):
    """Also where it is the very dataset that `fit` has."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    model = compiled(strategy)
    x, y = helpers.regression(32, ids=False)
    plain = tf.data.Dataset.from_tensor_slices((x[:, :1], y)).batch(4)
    data = strategy.experimental_distribute_dataset(plain)
    seen = []

    def look(epoch, logs):
        if how == "evaluate":
            seen.extend([model.evaluate(data, verbose=0)] * 8)
        elif how != "validation":
            again = data if "fit" in how else strategy.experimental_distribute_dataset(plain)
            for token in again:
                mean = strategy.run(lambda batch: tf.reduce_mean(model(batch[0])), (token,))
                seen.append(float(mean))

    note = keras.callbacks.LambdaCallback(on_epoch_end=look)
    validation = {"validation_data": data} if how == "validation" else {}
    history = model.fit(
        data, epochs=3, verbose=0, callbacks=[note], shuffle=False, **validation
    ).history
    assert len(seen) == (0 if how == "validation" else 3 * 8)
    assert strategy.steps == strategy.batches.handed_out == 3 * 8
    if validation:
        np.testing.assert_allclose(history["val_loss"], history["loss"], rtol=1e-5)


def test_each_mini_batch_is_in_the_sum_once():
    """Never more than were handed out, never fewer than before, in the end all."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(3), push_every=3, fetch_every=3)

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Examples()])
    x, y = helpers.regression(4 * STEPS, ids=False)
    data = tf.data.Dataset.from_tensor_slices((x[:, :1], y)).batch(4)
    for steps in shown(model, data, epochs=3):
        examples = np.array([logs["examples"] for logs in steps])
        assert (np.diff(examples) >= 0).all() and (examples % 4 == 0).all()
        assert (examples >= 4).all() and (examples <= 4 * np.arange(1, STEPS + 1)).all()
    (program,) = strategy.batches.programs
    running = program.program.running.shown()
    assert len(running) == 3  # the loss's two, and this one
    for metric in model.metrics:
        for variable in metric.variables:
            assert float(running[id(variable.value)]) == pytest.approx(float(variable), rel=1e-5)


def test_data_without_a_mini_batch_show_no_step():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    model = compiled(strategy)
    x = tf.zeros((0, 1))
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(4)
    with pytest.warns(UserWarning, match="ran out of data"):
        assert shown(model, data) == [[]]
    assert strategy.steps == 0


def test_batches_of_other_static_sizes():
    """For which TensorFlow makes the step's type more general: it is still `fit`'s."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    model = compiled(strategy)
    model.set_weights([np.zeros((1, 1)), np.zeros(1)])
    for target, size in enumerate((8, 16, 4, 8), start=1):
        x, y = np.zeros((64, 1), "float32"), np.full((64, 1), float(target), "float32")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(size, drop_remainder=True)
        for steps in shown(model, data, epochs=2):
            np.testing.assert_allclose([logs["loss"] for logs in steps], target**2, rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("eager", [True, False])
def test_fit_after_a_loop_over_its_step(eager):
    """And compiled again: another program than the one that ran before."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    model = compiled(strategy)
    model.set_weights([np.zeros((1, 1)), np.zeros(1)])
    x = np.zeros((32, 1), "float32")
    for target, size in ((1.0, 8), (2.0, 4)):
        y = np.full((32, 1), target, "float32")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(size, drop_remainder=True)
        if eager and target > 1.0:
            for token in strategy.experimental_distribute_dataset(data):
                strategy.run(model.train_step, (token,))
        elif target > 1.0:
            with strategy.scope():
                model.compile(keras.optimizers.SGD(0.0), "mse")
        for steps in shown(model, data, epochs=2):
            np.testing.assert_allclose([logs["loss"] for logs in steps], target**2, rtol=1e-6)


def test_a_metric_that_shows_the_rate():
    """A result that is not made of the metric's state alone."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))

    class Rate(Examples):
        def result(self):
            return tf.convert_to_tensor(model.optimizer.learning_rate)

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.25), "mse", metrics=[Rate()])
    x, y = helpers.regression(32, ids=False)
    data = tf.data.Dataset.from_tensor_slices((x[:, :1], y)).batch(4)
    for steps in shown(model, data, epochs=2):
        assert {logs["examples"] for logs in steps} == {0.25}


class Seen(keras.metrics.Metric):
    """Examples, by a result that is the variable itself."""

    def __init__(self):
        super().__init__(name="seen")
        self.number = self.add_variable((), "zeros", name="number")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.number.assign_add(tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self):
        return {"number": self.number, "nothing": None}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_result_that_is_a_variable(engine):
    strategy = tf_dsgd.DownpourStrategy(ENGINES[engine]())
    with strategy.scope():
        metrics = [Seen(), Examples()]
    model = compiled(strategy, metrics=metrics)
    y = np.ones((4 * STEPS, 1), "float32")
    numbers = {"number": [], "examples": []}
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: [
            numbers[name].append(float(logs[name])) for name in numbers if logs
        ]
    )
    history = model.fit(np.zeros_like(y), y, batch_size=4, verbose=0, callbacks=[note]).history
    assert numbers["number"] == numbers["examples"] and 0.0 < max(numbers["number"]) <= len(y)
    assert history["number"] == [len(y)]


@pytest.mark.parametrize("given", [{"aggregation": "mean"}, {"dtype": "bool"}])
def test_a_metric_that_has_no_sum_is_refused(given):
    how = dict(given)

    class Other(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="of_other")
            self.add_variable((), "zeros", name="largest", **how)

    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2))
    with strategy.scope(), pytest.raises(ValueError, match=r"largest.*Keep a sum, a count or both"):
        Other()
    how["aggregation"] = "only_first_replica"  # as the message says
    with strategy.scope():
        Other()
