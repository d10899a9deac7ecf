"""What is, and need not be, in the state that a strategy adds to a checkpoint."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

pytestmark = pytest.mark.medium


def simulated(workers=2):
    return tf_dsgd.SimulatedCluster(workers, compute_seconds=[1.0, 1.7, 2.9][:workers], seed=0)


def make(strategy, optimizer=keras.optimizers.SGD, **layer):
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(1, **layer)]
        model = keras.Sequential(layers)
        model.compile(optimizer(0.01), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model, **settings):
    x, y = helpers.regression(80, ids=False)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, **settings)


def cells(strategy):
    """What rules keep on shards, and on workers, by name."""
    program = strategy.engine.program
    shards = {f"{place} {v.name}": v for place, v in enumerate(program.shard_cells)}
    return {name: np.asarray(v.read_value()) for name, v in shards.items()}


RULES = {
    "softsync": lambda c: tf_dsgd.SoftsyncStrategy(c, gradients_per_update=3),
    "averaging": lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=3),
    "elastic": lambda c: tf_dsgd.ElasticAveragingStrategy(c, average_every=3),
}


@pytest.mark.parametrize("rule", RULES)
def test_at_rest_shards_have_collected_nothing(rule):
    """So what rules collect on shards needs no place in a checkpoint: it is as at the beginning.

    20 mini-batches: the last collection of 3 has 2, and two workers do not meet after 3 each.
    """
    strategy = RULES[rule](simulated())
    model = make(strategy)
    seen = []

    def look(batch, logs):
        if batch == 0:
            return  # nothing was handed out yet
        strategy.engine.snapshot()  # takes in what came last; waits for nobody
        seen.append(any(value.any() for value in cells(strategy).values()))

    fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=look)])
    assert any(seen)  # else this would show nothing
    strategy.settle()
    assert all(not value.any() for value in cells(strategy).values())


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(b[name], value, err_msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("outer", [False, True], ids=["slots", "slots and outer"])
def test_a_state_goes_through_a_strategy_that_has_not_trained(outer, tmp_path):
    """Variables of workers, and of the outer optimizer, are made only as training begins."""

    def start():
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9) if outer else None
        return tf_dsgd.PeriodicAveragingStrategy(
            simulated(), average_every=2, optimizer_state="local", outer_optimizer=optimizer
        )

    strategy = start()
    fit(make(strategy, keras.optimizers.Adam))
    state = strategy.state()
    assert any(name.endswith("_of_workers") for name in state)
    again = start()
    model = make(again, keras.optimizers.Adam)
    again.restore(state)
    assert_same(again.state(), state)
    fit(model, epochs=1)
    assert again.steps == 40
    # The momentum that came is used: from zero it would be another after one more epoch.
    fresh = start()
    model = make(fresh, keras.optimizers.Adam)
    fit(model)
    if outer:
        (momentum,) = [
            v for v in again.outer_optimizer.variables if v.path.endswith("kernel_momentum")
        ]
        (other,) = [
            v for v in fresh.outer_optimizer.variables if v.path.endswith("kernel_momentum")
        ]
        assert not np.array_equal(momentum.numpy(), other.numpy())


def test_types_that_numpy_does_not_know(tmp_path):
    """bfloat16 comes back from a file as bytes: slots of workers in that type are restored."""

    def momentum(rate):
        return keras.optimizers.SGD(rate, momentum=0.9)

    strategy = tf_dsgd.DownpourStrategy(simulated(), local_rule="optimizer")
    model = make(strategy, momentum, dtype="bfloat16")
    fit(model)
    state = strategy.state()
    of_workers = [n for n, v in state.items() if n.endswith("_of_workers") and v.ndim == 3]
    assert of_workers and all(
        state[name].dtype == tf.bfloat16.as_numpy_dtype for name in of_workers
    )
    np.savez(tmp_path / "state.npz", **state)
    with np.load(tmp_path / "state.npz") as read:
        read = dict(read)
    assert all(read[name].dtype.kind == "V" for name in of_workers)
    again = tf_dsgd.DownpourStrategy(simulated(), local_rule="optimizer")
    model = make(again, momentum, dtype="bfloat16")
    again.restore(read)
    assert_same(again.state(), state)


class TwoOptimizers(keras.Model):
    """Its first layer's optimizer is none that Keras knows of, and is built in the first step."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(3)
        self.second = keras.layers.Dense(1)
        self.hidden = [lambda: None]
        self.build((None, 4))

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 3))
        self.built = True

    def call(self, inputs):
        return self.second(self.first(inputs))

    def train_step(self, data):
        x, y = data
        other = self.hidden[0]()
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        mine = self.first.trainable_variables
        other.apply(tape.gradient(loss, mine), mine)
        theirs = self.second.trainable_variables
        self.optimizer.apply(tape.gradient(loss, theirs), theirs)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


@pytest.mark.filterwarnings("ignore:The step applies gradients 2 times:UserWarning")
def test_what_keras_does_not_save_is_kept(tmp_path):
    """An optimizer hidden from Keras, and a variable of the caller's: by the strategy alone."""

    def start():
        keras.utils.set_random_seed(1)
        strategy = tf_dsgd.DownpourStrategy(simulated())
        with strategy.scope():
            model = TwoOptimizers()
            adam = keras.optimizers.Adam(0.01)
            model.hidden[0] = lambda: adam
            model.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse")
            mine = tf.Variable([1.0, 2.0], trainable=False)
        return model, adam, mine

    def run(model, epochs, folder):
        backup = tf_dsgd.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        fit(model, epochs=epochs, callbacks=[backup])

    unbroken, slots, _ = start()
    run(unbroken, 2, tmp_path / "unbroken")
    model, _, mine = start()
    mine.assign([3.0, 4.0])
    run(model, 1, tmp_path / "broken")
    model, adam, mine = start()
    run(model, 2, tmp_path / "broken")
    helpers.assert_close(model.get_weights(), unbroken.get_weights(), 0)
    helpers.assert_close(
        [v.numpy() for v in adam.variables], [v.numpy() for v in slots.variables], 0
    )
    assert any(v.numpy().any() for v in adam.variables[2:])
    assert mine.numpy().tolist() == [3.0, 4.0]


def test_slots_are_known_by_their_optimizer():
    """Two optimizers of one model, of which another is the first to make its slots this time."""

    def start(order):
        strategy = tf_dsgd.DownpourStrategy(simulated())
        with strategy.scope():
            weights = [keras.Variable(np.zeros(2)) for _ in range(2)]
            optimizers = [keras.optimizers.SGD(0.1, momentum=0.5) for _ in range(2)]
            for place in order:
                optimizers[place].build([weights[place]])
        return strategy, [optimizer.variables[-1] for optimizer in optimizers]

    strategy, slots = start([0, 1])
    for value, slot in enumerate(slots):
        slot.assign([value, 10.0])
    state = strategy.state(held=())
    again, slots = start([1, 0])
    again.restore(state)
    assert [slot.numpy().tolist() for slot in slots] == [[0.0, 10.0], [1.0, 10.0]]
