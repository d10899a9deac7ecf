"""What every strategy owes to `fit`: it learns, sees each example once, and counts exactly."""

import keras
import numpy as np
import pytest

from tests import graphs, helpers
from tests.conformance import registry
from tests.conformance.conftest import BATCH, EPOCHS, EXAMPLES, STEPS_PER_EPOCH


def plain_twin(run):
    """The same model without a strategy, with the same weights."""
    model = helpers.recording_model(
        keras.optimizers.SGD(0.02),
        metrics=helpers.id_metrics(),
        with_table=run.configuration in registry.WITH_TABLE,
    )
    model.set_weights(run.model.get_weights())
    return model


def expected_iterations(run):
    """Updates the optimizer made: on the shard one per message, on the workers one per step.

    Where workers' optimizers are averaged, those of one worker.
    """
    strategy = run.strategy
    if run.configuration in registry.OF_ONE_WORKER:
        return strategy.steps // strategy.num_workers
    by_steps = registry.without_codec(run.configuration) == "downpour_update"
    return strategy.steps if by_steps else strategy.updates


def updates_in(run, messages, epochs, steps):
    """Updates of the weights by so many messages, of so many epochs of so many mini-batches.

    Several messages make one, and at the end of an epoch what is left makes one.
    """
    if run.configuration in registry.STEPS_PER_MEETING:
        in_one = registry.STEPS_PER_MEETING[run.configuration] * run.strategy.num_workers
        return epochs * -(-steps // in_one)
    count = registry.MESSAGES_PER_UPDATE.get(registry.without_codec(run.configuration))
    return messages if count is None else epochs * -(-steps // count)


def test_the_loss_falls(trained):
    loss = trained.history["loss"]
    assert len(loss) == EPOCHS
    at_zero = float(np.mean(trained.y[:, 0] ** 2))  # the kernel starts at zero
    # On threads and processes the machine decides how stale gradients are: 0.38 was seen. With a
    # codec some of the last gradients are not sent yet.
    exact = trained.engine == "simulated" and trained.configuration in registry.CONFIGURATIONS
    share = 0.25 if exact else 0.6
    assert loss[-1] < share * at_zero
    assert trained.history["val_loss"][-1] < share * at_zero


def test_every_example_once_an_epoch(trained):
    assert len(trained.ids_of_epochs) == EPOCHS
    for ids in trained.ids_of_epochs:
        np.testing.assert_array_equal(ids, np.arange(EXAMPLES))


def test_metrics_are_exact(trained):
    ids = np.arange(EXAMPLES)
    assert trained.history["id_count"] == [EXAMPLES] * EPOCHS
    assert trained.history["id_sum"] == [ids.sum()] * EPOCHS
    assert trained.history["id_squares"] == [(ids**2).sum()] * EPOCHS
    assert trained.history["val_id_count"] == [60] * EPOCHS
    assert trained.history["val_id_sum"] == [np.arange(60).sum()] * EPOCHS


def test_steps_are_counted(trained):
    assert trained.steps_at_epochs == [STEPS_PER_EPOCH * n for n in range(1, EPOCHS + 1)]


def test_the_ledger_balances(trained):
    applied = trained.strategy.ledger().applied
    updates = updates_in(trained, applied, EPOCHS, STEPS_PER_EPOCH)
    ledger = helpers.assert_ledger_balances(trained.strategy, updates)
    assert len(ledger.workers) == (3 if trained.engine == "simulated" else 2)
    assert 0 < trained.strategy.updates <= trained.strategy.steps
    iterations = int(trained.model.optimizer.iterations)
    assert iterations == expected_iterations(trained)
    types = [type(trained.strategy.steps), type(trained.strategy.updates), type(ledger.sent)]
    assert types == [int, int, int]


@pytest.mark.skipif(helpers.ON_CLUSTER, reason="graphs of other processes: cluster/test_order.py")
def test_what_uses_a_variable_is_ordered(trained):
    """In each graph as TensorFlow runs it, whose optimizer may drop an order that is needed."""
    assert trained.graphs
    assert not [pair for graph in trained.graphs for pair in graphs.Graph(graph).without_order()]


def test_staleness_is_consistent(trained):
    staleness = trained.strategy.staleness()
    assert 0 <= staleness.p50 <= staleness.p99 <= staleness.max
    assert 0 <= staleness.mean <= staleness.max < trained.strategy.updates


@pytest.mark.few(9)
@pytest.mark.thin
def test_evaluate_and_predict_equal_one_device(trained):
    plain = plain_twin(trained)
    x, y = trained.validation
    got = trained.model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    want = plain.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(trained.history["val_loss"][-1], want["loss"], rtol=1e-6)
    got = trained.model.predict(x, batch_size=16, verbose=0)
    np.testing.assert_allclose(got, plain.predict(x, batch_size=16, verbose=0), atol=1e-6)
    np.testing.assert_allclose(trained.model(x[:5]), plain(x[:5]), atol=1e-6)


@pytest.mark.few(9)
@pytest.mark.thin
def test_evaluating_does_not_train(trained):
    before = trained.model.get_weights()
    steps, updates = trained.strategy.steps, trained.strategy.updates
    trained.model.evaluate(*trained.validation, verbose=0)
    trained.model.predict(trained.validation[0], verbose=0)
    helpers.assert_close(trained.model.get_weights(), before, 0)
    assert (trained.strategy.steps, trained.strategy.updates) == (steps, updates)


@pytest.mark.few(9)
@pytest.mark.thin
def test_a_saved_model_loads_without_the_strategy(trained, tmp_path):
    path = tmp_path / "model.keras"
    trained.model.save(path)
    names = ("RecordIds", "WithTable", "IdSum")
    custom = {name: getattr(helpers, name) for name in names}
    loaded = keras.saving.load_model(path, custom_objects=custom)
    x, y = trained.validation
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), trained.model.predict(x, verbose=0), atol=1e-6
    )
    assert loaded.optimizer.get_config() == trained.model.optimizer.get_config()
    assert int(loaded.optimizer.iterations) == expected_iterations(trained)
    loaded.fit(x, y, batch_size=20, verbose=0)  # goes on in plain Keras
    assert int(loaded.optimizer.iterations) == expected_iterations(trained) + 3


@pytest.mark.few(9)
@pytest.mark.thin
def test_load_weights_reaches_the_workers(trained, tmp_path):
    """The loss of an epoch of one batch is that of the weights that were loaded before it."""
    path = tmp_path / "kept.weights.h5"
    trained.model.save_weights(path)
    kept, steps = trained.model.get_weights(), trained.strategy.steps
    plain = plain_twin(trained)
    x, y = trained.x[:BATCH], trained.y[:BATCH]
    for weights in (kept, [np.full_like(w, 3.0) for w in kept]):
        plain.set_weights(weights)
        if weights is kept:
            trained.model.set_weights([np.full_like(w, 2.0) for w in kept])
            trained.model.load_weights(path)
        else:
            trained.model.set_weights(weights)
        helpers.assert_close(trained.model.get_weights(), weights, 0)
        want = plain.evaluate(x, y, batch_size=BATCH, verbose=0)[0]
        history = trained.model.fit(x, y, batch_size=BATCH, verbose=0).history
        # Of rounded weights the loss is another, but near that of the right ones.
        rtol = 0.2 if trained.configuration == "downpour_bfloat16" else 1e-5
        np.testing.assert_allclose(history["loss"], [want], rtol=rtol)
    trained.model.load_weights(path)
    helpers.assert_close(trained.model.get_weights(), kept, 0)
    assert trained.strategy.steps == steps + 2  # loading a file is not a step


@pytest.mark.few(9)
@pytest.mark.thin
def test_zz_a_second_fit_goes_on(trained):
    """It counts on, learns on, and again sees every example once."""

    def counts():
        ledger = trained.strategy.ledger()
        assert ledger.in_flight == 0
        return np.array(
            [
                trained.strategy.steps,
                sum(worker.steps for worker in ledger.workers),
                trained.strategy.updates,
                ledger.applied,
                int(trained.model.optimizer.iterations),
            ]
        )

    trained.model.set_weights([np.zeros_like(w) for w in trained.model.get_weights()])
    start = trained.model.evaluate(trained.x, trained.y, verbose=0)[0]
    trained.ids.take()
    before = counts()
    trained.model.fit(trained.x, trained.y, batch_size=10, epochs=2, verbose=0)
    steps, by_worker, updates, applied, iterations = counts() - before
    assert steps == by_worker == 50
    assert 0 < applied <= 50
    assert updates == updates_in(trained, applied, 2, 25)
    if trained.configuration in registry.OF_ONE_WORKER:
        # A file with optimizer state was loaded before, which holds no parts of an iteration.
        assert abs(iterations - steps / trained.strategy.num_workers) <= 1
    else:
        assert iterations == (steps if trained.configuration == "downpour_update" else updates)
    np.testing.assert_array_equal(trained.ids.take(), np.repeat(np.arange(EXAMPLES), 2))
    assert trained.model.evaluate(trained.x, trained.y, verbose=0)[0] < 0.5 * start
