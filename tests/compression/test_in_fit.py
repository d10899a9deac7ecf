"""Codecs in `fit`: two workers beside the twin, the ledger, lost workers, checkpoints, tables."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.algorithms.peers_bench import BATCH, dyadic, gradients, linear
from tests.compression import twins
from tests.faults import fail_at
from tf_dsgd import compression

pytestmark = pytest.mark.medium

CODECS = {
    "entropy": (compression.Threshold(0.5, entropy=True), twins.threshold(0.5)),
    "momentum": (compression.TopK(0.25, momentum=0.5), twins.top_k(0.25, 0.5)),
    "power_sgd": (compression.PowerSGD(1), twins.power_sgd(1)),
}
ALL = {name: codec for name, (codec, _) in CODECS.items()} | {"qsgd": compression.QSGD(4)}
EACH = ALL | {
    "threshold": compression.Threshold(0.5),
    "clipped": compression.Threshold(0.5, clip=0.75),
    "top_k": compression.TopK(0.25),
    "one_bit": compression.OneBit(),
    "ef_sign": compression.EFSign(),
    "cast": compression.Cast("bfloat16"),
}
STRATEGIES = {
    "downpour": lambda c, **options: tf_dsgd.DownpourStrategy(c, local_rule="none", **options),
    "update": lambda c, **options: tf_dsgd.DownpourStrategy(
        c, push_every=2, local_rule="optimizer", **options
    ),
    "softsync": lambda c, **options: tf_dsgd.SoftsyncStrategy(
        c, gradients_per_update=2, staleness_scaling=None, **options
    ),
}


def simulated(**options):
    return tf_dsgd.SimulatedCluster(
        2, compute_seconds=[1.0, 1.7], network_seconds=0.3, seed=0, **options
    )


def fit(model, data, **options):
    model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0, **options)


@pytest.mark.parametrize("name", CODECS)
def test_two_workers_beside_the_twin(name):
    """Message after message, with a residual each; over the end of an epoch they keep it."""
    codec, twin = CODECS[name]
    data = dyadic(20)
    strategy = tf_dsgd.DownpourStrategy(simulated(), push_every=3, compression=codec)
    model = linear(strategy)
    with strategy.recording() as entries:
        fit(model, data, epochs=2)
    g = gradients(*data)
    accrued = [np.zeros((6, 4), "float32") for _ in range(2)]
    states = [twins.zeros(accrued[0], "residual", "momentum") for _ in range(2)]
    w = np.zeros((6, 4), "float32")
    messages = 0
    for worker, action, *what in entries:
        for batch in what[0] if action in ("step", "push") else ():
            accrued[worker] = accrued[worker] + g[batch % len(g)]
        if action == "push":
            messages += 1
            w = w - twin(states[worker], accrued[worker])
            accrued[worker] = np.zeros((6, 4), "float32")
    assert messages == strategy.ledger().applied and messages >= 14
    np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-5, atol=1e-5)
    kept = [np.linalg.norm(state["residual"]) for state in states]
    np.testing.assert_allclose(strategy.residual(), kept, rtol=1e-4)
    assert min(kept) > 0


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("downpour", "threads"),
        ("update", "threads"),
        ("softsync", "simulated"),
    ],
)
def test_what_was_applied_and_what_is_kept_are_all_gradients(rule, kind):
    """To the bit, on threads as on the simulator: tau and all sums are dyadic."""
    data = dyadic(48)
    cluster = tf_dsgd.LocalCluster(2) if kind == "threads" else simulated()
    strategy = STRATEGIES[rule](cluster, compression=compression.Threshold(1.0))
    model = linear(strategy)
    fit(model, data)
    cells = [cell for kept in strategy.engine.store.kept.values() for cell in kept.values()]
    residual = sum(copy.numpy() for cell in cells for copy in cell.copies)
    weights, total = model.get_weights()[0], gradients(*data).sum(0)
    if rule == "softsync":  # a step is half the sum of two messages
        weights = 2 * weights
    if rule == "update":  # what is sent is a change, minus a gradient
        residual = -residual
    np.testing.assert_array_equal(residual - weights, total)
    assert np.abs(weights).max() > 1 and np.abs(residual).max() > 0
    assert strategy.steps == 48
    helpers.assert_ledger_balances(strategy, 24 if rule == "softsync" else None)


@pytest.mark.few(8)
@pytest.mark.parametrize("rule", ["update", "softsync"])
@pytest.mark.parametrize("name", [name for name in EACH if name not in ("threshold", "clipped")])
def test_each_codec_on_each_strategy_that_takes_it(rule, name):
    """What was applied and what is kept are all gradients, as far as the codec says so."""
    codec, data = EACH[name], dyadic(8)
    strategy = STRATEGIES[rule](simulated(), compression=codec)
    model = linear(strategy)
    fit(model, data)
    assert strategy.steps == 8
    helpers.assert_ledger_balances(strategy, 4 if rule == "softsync" else None)
    applied = model.get_weights()[0] * (-2 if rule == "softsync" else -1)
    cells = [kept["residual"] for kept in strategy.engine.store.kept.values() if "residual" in kept]
    kept = sum(copy.numpy() for cell in cells for copy in cell.copies)
    kept = kept * (-1 if rule == "update" else 1)  # of changes
    g = gradients(*data)
    # Within rounding; a level of each message's norm; or, with momentum 1/2, twice all of it.
    room = {"cast": 2**-8 * np.abs(g).sum(0), "qsgd": 8 * np.linalg.norm(g) / 4}
    if name == "momentum":
        assert 0 < np.abs(applied).max() <= 2 * np.abs(g).sum(0).max()
    else:
        wanted = np.abs(applied + kept - g.sum(0))
        assert np.all(wanted <= np.maximum(room.get(name, 0.0), 2e-5))
    assert np.abs(applied).max() > 0
    assert (strategy.residual() != (0.0, 0.0)) == (codec.held_back is not None)


def test_all_of_it_is_no_compression():
    """Weights of a small network, to the bit: the largest share, and the changes of Adam."""
    found = []
    for each in (None, compression.TopK(1.0)):
        keras.utils.set_random_seed(2)
        strategy = STRATEGIES["update"](simulated(), compression=each)
        with strategy.scope():
            layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile(keras.optimizers.Adam(0.05), "mse")
        x, y = helpers.regression(40, ids=False)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", ["ef_sign", "one_bit"])
def test_of_one_element_it_is_no_compression(name):
    """A scale is then the element: Downpour's weights, to the bit."""
    found = []
    for codec in (None, EACH[name]):
        strategy = tf_dsgd.DownpourStrategy(simulated(), push_every=2, compression=codec)
        with strategy.scope():
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((1,)), layer])
            model.compile(keras.optimizers.SGD(0.05), "mse")
        x, y = dyadic(16)
        fit(model, (x[:, :1], y[:, :1]))
        found.append(model.get_weights()[0])
    np.testing.assert_array_equal(*found)
    assert found[0] != 1


def test_another_spelling_of_wire_dtype():
    """The numbers are test_downpour_numpy.py's."""
    spelt = {"wire_dtype": "bfloat16"}, {"compression": compression.Cast("bfloat16")}
    codecs = [tf_dsgd.DownpourStrategy(simulated(), **each).algorithm.codec for each in spelt]
    assert codecs[0] == codecs[1]
    with pytest.raises(ValueError, match=r"Give one of the two.*'float16'.*OneBit\(\)"):
        tf_dsgd.DownpourStrategy(
            simulated(), wire_dtype="float16", compression=compression.OneBit()
        )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("rule", "name"),
    [*(("pushes", name) for name in EACH), ("update", "entropy"), ("softsync", "top_k")],
)
def test_resumed_is_unbroken(rule, name):
    """To the bit."""
    pushes = functools.partial(tf_dsgd.DownpourStrategy, push_every=2)
    make, codec = {"pushes": pushes, **STRATEGIES}[rule], EACH[name]

    def made():
        keras.utils.set_random_seed(3)
        strategy = make(simulated(), compression=codec)
        return strategy, linear(strategy)

    data = dyadic(8)
    unbroken, model = made()
    fit(model, data)
    state = {key: np.array(value) for key, value in unbroken.state().items()}
    saved = model.get_weights()
    kept = [key for key in state if key.removesuffix("_of_workers").endswith(codec.keeps or "-")]
    assert len(kept) == len(codec.keeps) and all(state[key].any() for key in kept)
    fit(model, data)
    # Before the cells are made; and once after, when something else is in them.
    for early in (True, False) if name == "momentum" else (True,):
        resumed, again = made()
        if not early:
            fit(again, dyadic(4, seed=9))
        again.set_weights(saved)
        resumed.restore(state)
        assert {key: value.tolist() for key, value in resumed.state().items() if key in kept} == {
            key: state[key].tolist() for key in kept
        }
        fit(again, data)
        np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
        assert resumed.residual() == unbroken.residual()
        end = unbroken.state()
        for key, value in resumed.state().items():
            if key in kept:
                np.testing.assert_array_equal(value, end[key])


def test_what_is_held_back_is_not_left_out_unsaid():
    strategy = tf_dsgd.DownpourStrategy(simulated(), compression=compression.Threshold(0.5))
    fit(linear(strategy), dyadic(8))
    other = tf_dsgd.DownpourStrategy(simulated())
    linear(other)
    with pytest.raises(ValueError, match=r"holds back on workers: \['residual'\].*`compression`"):
        other.restore(strategy.state())


@pytest.mark.few(7)
@pytest.mark.parametrize("made", [False, True], ids=["before its cells", "after"])
@pytest.mark.parametrize(
    ("first", "then", "goes_on"),
    [
        (compression.OneBit(), compression.PowerSGD(1), True),
        (compression.PowerSGD(1), compression.Threshold(0.5), True),
        (compression.PowerSGD(1), compression.PowerSGD(2), True),
        (compression.Threshold(0.5, clip=1.0), compression.Threshold(0.5), True),
        (compression.QSGD(4), compression.Threshold(0.5), True),
        (compression.TopK(0.25, momentum=0.5), compression.TopK(0.25), False),
        (compression.TopK(0.25), compression.QSGD(4), False),
    ],
)
def test_another_codec_goes_on_with_what_was_held_back(first, then, goes_on, made):
    """If it holds back as much."""
    strategy = tf_dsgd.DownpourStrategy(simulated(), compression=first)
    fit(linear(strategy), dyadic(8))
    other = tf_dsgd.DownpourStrategy(simulated(), compression=then)
    model = linear(other)
    if made:
        fit(model, dyadic(4, seed=9))
    state = {name: np.array(value) for name, value in strategy.state().items()}
    if not goes_on:
        with pytest.raises(ValueError, match="holds back on workers"):
            other.restore(state)
        return
    other.restore(state)
    residual = "weight_0_residual_of_workers"
    if residual in state:
        np.testing.assert_array_equal(other.state()[residual], state[residual])
    fit(model, dyadic(8))
    assert other.steps == 16 and np.isfinite(other.residual()).all()


def test_a_lost_worker_takes_its_residual_along():
    """Its mini-batches go to others, who begin no message anew; it comes back without."""
    script = [fail_at(1, 5, "compute", back_after=6.0)]
    strategy = tf_dsgd.DownpourStrategy(
        simulated(faults=script, worker_timeout_seconds=4.0), compression=compression.Threshold(1.0)
    )
    model = linear(strategy)
    data = dyadic(40)
    fit(model, data)
    assert strategy.engine.struck and strategy.steps == 40
    helpers.assert_ledger_balances(strategy)
    (cell,) = [c for kept in strategy.engine.store.kept.values() for c in kept.values()]
    kept = sum(copy.numpy() for copy in cell.copies)
    lost = gradients(*data).sum(0) - (kept - model.get_weights()[0])
    # It had sent five messages of one mini-batch each: it kept at most what they brought.
    assert 0 < np.abs(lost).max() <= np.abs(gradients(*data)).max() * 5


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["entropy", "power_sgd"])
def test_tables_travel_by_rows(name):
    """A row whose elements wait is fetched as the shard has it, though the worker has moved it."""
    strategy = tf_dsgd.DownpourStrategy(
        simulated(), push_every=2, fetch_every=2, compression=ALL[name]
    )
    with strategy.scope():
        table = keras.layers.Embedding(30, 4, embeddings_initializer="ones")
        layers = [table, keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        model.compile(keras.optimizers.Adagrad(0.05), "mse")
    ids = np.random.default_rng(1).integers(0, 20, (64, 2))
    losses = model.fit(ids, (ids.sum(1) % 3)[:, None], batch_size=4, epochs=6, verbose=0).history
    assert losses["loss"][-1] < 0.8 * losses["loss"][0]
    program = strategy.engine.program
    assert program.step.sparse[0] and 0 in program._by_rows
    place = program.step.weights[0]
    np.testing.assert_array_equal(place.primary.numpy()[20:], np.ones((10, 4)))
    for worker in range(2):
        program.fetch[worker]()
        copy = place.on_workers().of(worker)
        np.testing.assert_array_equal(copy.numpy(), place.primary.numpy())
    helpers.assert_ledger_balances(strategy)


def test_a_gradient_that_is_not_finite_ends_training():
    strategy = tf_dsgd.DownpourStrategy(simulated(), compression=compression.EFSign())
    model = linear(strategy)
    x, y = dyadic(8)
    x[17] = np.nan
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"/kernel', .*is not finite, .*EFSign\(\)"
    ):
        fit(model, (x, y))
    assert np.isfinite(model.get_weights()[0]).all()


def test_what_does_not_go_with_an_optimizer_is_named():
    def model(optimizer, codec, **options):
        strategy = tf_dsgd.DownpourStrategy(simulated(), compression=codec, **options)
        with strategy.scope():
            made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
            made.compile(optimizer(), "mse")
        fit(made, dyadic(4))

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))

    with pytest.raises(ValueError, match=r"EFSign\(\) does not go with LossScaleOptimizer.*Cast"):
        model(scaled, compression.EFSign())
    model(scaled, compression.EFSign(), local_rule="optimizer")
    with pytest.raises(ValueError, match=r"AdaptiveRevision corrects .*EFSign\(\).*QSGD"):
        model(tf_dsgd.optimizers.AdaptiveRevision, compression.EFSign())


@pytest.mark.parametrize("start", ["update", "peers"])
def test_what_sets_weights_does_not_go_with_changes_held_back(start):
    """It would ask for what is held back at each step anew: residuals grew without an end."""

    def model(codec, optimizer, constraint=None):
        strategy = (
            tf_dsgd.CompressedAsyncStrategy(simulated(), compression=codec)
            if start == "peers"
            else STRATEGIES[start](simulated(), compression=codec)
        )
        with strategy.scope():
            dense = keras.layers.Dense(4, kernel_constraint=constraint)
            made = keras.Sequential([keras.Input((6,)), dense])
            made.compile(optimizer, "mse")
        fit(made, dyadic(4))
        return strategy.steps

    top_k = compression.TopK(0.25)
    ema = {"use_ema": True, "ema_overwrite_frequency": 2}
    with pytest.raises(ValueError, match=r"TopK.* holds back .* Ftrl sets them.*QSGD or Cast"):
        model(top_k, "ftrl")
    with pytest.raises(ValueError, match=r"ema_overwrite_frequency=2 sets them"):
        model(top_k, {"class_name": "SGD", "config": {"learning_rate": 0.1, **ema}})
    with pytest.raises(ValueError, match=r"NonNeg\(\) of .*kernel sets them"):
        model(top_k, "sgd", "non_neg")
    assert model(compression.QSGD(4, seed=1), "ftrl", "non_neg") == 4
    assert model(top_k, "sgd") == 4
    assert model(top_k, "muon") == 4  # which assigns w - step, and so adds


class Clipping(keras.Sequential):
    """Clips its weights after each step, as a WGAN's critic."""

    def train_step(self, data):
        logs = super().train_step(data)
        for weight in self.trainable_variables:
            weight.assign(keras.ops.clip(weight, -0.1, 0.1))
        return logs


def test_a_step_that_sets_weights_does_not_go_with_changes_held_back():
    def clipped(codec):
        strategy = STRATEGIES["update"](tf_dsgd.LocalCluster(1), compression=codec)
        with strategy.scope():
            model = Clipping([keras.Input((6,)), keras.layers.Dense(4)])
            model.compile("sgd", "mse")
        fit(model, dyadic(4))
        return np.abs(model.get_weights()[0]).max()

    with pytest.raises(ValueError, match=r"the step, which assigns to '.*kernel:0', sets them"):
        clipped(compression.TopK(0.25))
    assert clipped(None) <= 0.1000001


@pytest.mark.parametrize("name", ["PeriodicAveragingStrategy", "ElasticAveragingStrategy"])
def test_who_sends_weights_says_so(name):
    with pytest.raises(TypeError, match=rf"{name} has no argument 'compression'.*Downpour"):
        getattr(tf_dsgd, name)(simulated(), average_every=4, compression=compression.OneBit())


def test_no_codec_holds_nothing_back():
    strategy = tf_dsgd.DownpourStrategy(simulated())
    assert strategy.residual() == (0.0, 0.0)
    codec = compression.Threshold(0.5)
    shown = repr(tf_dsgd.SoftsyncStrategy(simulated(), gradients_per_update=2, compression=codec))
    assert "Threshold(tau=0.5" in shown and "messages" in shown


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9), "momentum=0.9"),
        (functools.partial(keras.optimizers.Adam, 0.1), "beta_1=0.9"),
        (functools.partial(keras.optimizers.SGD, 0.1), None),
    ],
    ids=["SGD with momentum", "Adam", "SGD"],
)
def test_momentum_that_acts_twice_is_said(make, name, momentum):
    codec = compression.TopK(0.25, momentum=momentum)
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1), compression=codec)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(make(), "mse")
    if name and momentum:
        with pytest.warns(UserWarning, match="Momentum acts twice") as said:
            model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
        assert [name in str(each.message) for each in said] == [True]
    else:  # a warning is an error here
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
