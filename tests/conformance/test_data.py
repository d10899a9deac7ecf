"""Every kind of data that Keras takes, through two strategies on each engine."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.conformance import registry

EXAMPLES, BATCH = 90, 8
STEPS = 12
# Keras says so, with and without a strategy, whenever data of unknown length end.
pytestmark = [
    pytest.mark.medium,
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
]
PAIRS = [(c, e) for c in ("downpour", "downpour_3_5") for e in registry.ENGINES]


class Sequence(keras.utils.PyDataset):
    """Batches by index."""

    def __init__(self, x, y, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], self.y[part]


def batches(x, y):
    for start in range(0, len(x), BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


def endless_batches(x, y):
    while True:
        yield from batches(x, y)


def without_weights(x, y):
    for batch in batches(x, y):
        yield (*batch, None)


def of_unknown_length(x, y):
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda a, b: a[0] >= 0.0)
    assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
    return dataset.batch(BATCH)


DATA = {
    "numpy": lambda x, y: {"x": x, "y": y, "batch_size": BATCH},
    "tensors": lambda x, y: {
        "x": tf.constant(x),
        "y": tf.constant(y),
        "batch_size": BATCH,
    },
    "tf_data": lambda x, y: {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)},
    "tf_data_of_unknown_length": lambda x, y: {"x": of_unknown_length(x, y)},
    "tf_data_with_none": lambda x, y: {
        "x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).map(lambda *b: (*b, None))
    },
    "generator": lambda x, y: {"x": batches(x, y)},
    "generator_with_none": lambda x, y: {"x": without_weights(x, y)},
    "py_dataset": lambda x, y: {"x": Sequence(x, y)},
}


@pytest.fixture(scope="module", params=PAIRS, ids=["-".join(pair) for pair in PAIRS])
def frozen(request):
    """A strategy and a model at rate 0: the loss of an epoch is known beforehand."""
    strategy = registry.make(*request.param)
    with strategy.scope():
        model = helpers.recording_model(keras.optimizers.SGD(0.0), metrics=helpers.id_metrics())
    model.set_weights([np.full((4, 1), 0.5), np.full((1,), -1.0)])
    return strategy, model


def errors(x, y, model):
    """Each example's squared error, by NumPy."""
    kernel, bias = model.get_weights()
    return (x[:, 1:] @ kernel + bias - y[:, :1])[:, 0] ** 2


def fit(frozen, **arguments):
    strategy, model = frozen
    model.get_layer("ids").ids.take()
    steps = strategy.steps
    history = model.fit(verbose=0, shuffle=False, **arguments).history
    helpers.assert_ledger_balances(strategy)
    return history, model.get_layer("ids").ids.take(), strategy.steps - steps


def test_a_py_dataset_with_threads_names_the_alternative(frozen):
    """Keras's queue repeats batches after a symbolic build, under any strategy: refused."""
    with pytest.raises(ValueError, match=r"workers=1.*or a tf\.data\.Dataset"):
        frozen[1].fit(Sequence(*helpers.regression(EXAMPLES), workers=2), verbose=0)


@pytest.mark.few(10)
@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", DATA)
def test_each_example_once(frozen, kind):
    x, y = helpers.regression(EXAMPLES)
    history, ids, steps = fit(frozen, **DATA[kind](x, y))
    np.testing.assert_array_equal(ids, np.arange(EXAMPLES))
    assert steps == STEPS
    assert history["id_sum"] == [np.arange(EXAMPLES).sum()]
    np.testing.assert_allclose(history["loss"], [errors(x, y, frozen[1]).mean()], rtol=1e-5)


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", [kind for kind in DATA if kind.endswith("none")])
def test_none_in_a_batch_of_what_is_not_trained_on(frozen, kind):
    """`evaluate` and `predict` run in the chief, which takes the batch apart as a worker does."""
    x, y = helpers.regression(EXAMPLES)
    got = frozen[1].evaluate(**DATA[kind](x, y), verbose=0, return_dict=True)
    want = errors(x, y, frozen[1]).mean()
    np.testing.assert_allclose(got["loss"], want, rtol=1e-5)
    predicted = frozen[1].predict(**DATA[kind](x, y), verbose=0)
    np.testing.assert_allclose(((predicted - y[:, :1]) ** 2).mean(), want, rtol=1e-5)


@pytest.mark.thin
def test_several_epochs_of_unknown_length(frozen):
    """The length is only known after the first epoch."""
    x, y = helpers.regression(EXAMPLES)
    history, ids, steps = fit(frozen, x=of_unknown_length(x, y), epochs=3)
    np.testing.assert_array_equal(ids, np.repeat(np.arange(EXAMPLES), 3))
    assert steps == 3 * STEPS
    assert history["id_count"] == [EXAMPLES] * 3


@pytest.mark.thin
def test_steps_per_epoch_with_endless_data(frozen):
    """An epoch takes as many batches as it says, in order, and the next goes on from there."""
    x, y = helpers.regression(EXAMPLES)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH)
    history, ids, steps = fit(frozen, x=dataset, steps_per_epoch=5, epochs=2)
    np.testing.assert_array_equal(ids, np.arange(10 * BATCH))
    assert steps == 10
    assert history["id_count"] == [5 * BATCH] * 2


@pytest.mark.thin
def test_an_endless_generator(frozen):
    x, y = helpers.regression(EXAMPLES)
    endless = endless_batches(x[:88], y[:88])
    history, ids, steps = fit(frozen, x=endless, steps_per_epoch=11, epochs=2)
    np.testing.assert_array_equal(np.unique(ids), np.arange(88))
    assert steps == 22
    assert history["id_count"] == [88, 88]


@pytest.mark.thin
def test_one_distributed_dataset_in_fit_and_evaluate(frozen):
    """`fit` trains on it each time it goes through it, `evaluate` does not."""
    strategy, model = frozen
    x, y = helpers.regression(EXAMPLES)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: (
            tf.data.Dataset.from_tensor_slices((x, y))
            .shard(context.num_input_pipelines, context.input_pipeline_id)
            .batch(BATCH)
        )
    )
    history, ids, steps = fit(frozen, x=dataset, epochs=2)
    np.testing.assert_array_equal(ids, np.repeat(np.arange(EXAMPLES), 2))
    assert steps == 2 * dataset.cardinality
    want = errors(x, y, model).mean()
    np.testing.assert_allclose(history["loss"], [want] * 2, rtol=1e-5)
    before = strategy.steps
    got = model.evaluate(dataset, verbose=0, return_dict=True)
    assert strategy.steps == before
    np.testing.assert_allclose(got["loss"], want, rtol=1e-5)
    assert not len(model.get_layer("ids").ids.take())
    assert fit(frozen, x=dataset)[2] == dataset.cardinality


@pytest.mark.thin
def test_sample_weight(frozen):
    """Keras divides a batch's weighted sum by its size: so does the whole epoch's mean."""
    x, y = helpers.regression(EXAMPLES)
    weight = np.linspace(0.0, 2.0, EXAMPLES).astype("float32")
    want = (errors(x, y, frozen[1]) * weight).mean()
    history, ids, _ = fit(frozen, x=x, y=y, sample_weight=weight, batch_size=BATCH)
    np.testing.assert_allclose(history["loss"], [want], rtol=1e-5)
    np.testing.assert_array_equal(ids, np.arange(EXAMPLES))
    dataset = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(BATCH)
    history, ids, _ = fit(frozen, x=dataset)
    np.testing.assert_allclose(history["loss"], [want], rtol=1e-5)
    np.testing.assert_array_equal(ids, np.arange(EXAMPLES))


@pytest.mark.thin(2)
@pytest.mark.parametrize("arguments", ["validation_data", "dataset", "validation_split"])
def test_validation(frozen, arguments):
    x, y = helpers.regression(EXAMPLES)
    if arguments == "validation_split":
        given = {"validation_split": 0.2}
        trained, held_out = slice(0, 72), slice(72, None)
    else:
        trained, held_out = slice(None), slice(50, 80)
        data = (x[held_out], y[held_out])
        if arguments == "dataset":
            data = tf.data.Dataset.from_tensor_slices(data).batch(7)
        given = {"validation_data": data}
    history, ids, _ = fit(frozen, x=x, y=y, batch_size=BATCH, epochs=2, **given)
    error = errors(x, y, frozen[1])
    np.testing.assert_allclose(history["loss"], [error[trained].mean()] * 2, rtol=1e-5)
    np.testing.assert_allclose(history["val_loss"], [error[held_out].mean()] * 2, rtol=1e-5)
    np.testing.assert_array_equal(ids, np.repeat(np.arange(EXAMPLES)[trained], 2))


@pytest.mark.parametrize("engine", registry.ENGINES)
def test_class_weight(engine):
    strategy = registry.make("downpour", engine)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((EXAMPLES, 3)).astype("float32")
    y = rng.integers(0, 2, (EXAMPLES, 1)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    kernel, bias = model.get_weights()
    error = ((x @ kernel + bias - y) ** 2)[:, 0] * np.where(y[:, 0] == 1, 3.0, 0.5)
    history = model.fit(x, y, batch_size=BATCH, class_weight={0: 0.5, 1: 3.0}, verbose=0).history
    np.testing.assert_allclose(history["loss"], [error.mean()], rtol=1e-5)


@pytest.mark.parametrize("engine", registry.ENGINES)
def test_shuffling_reaches_the_workers(engine):
    """With `shuffle=True` other examples share a batch than in the order given, each still once."""
    strategy = registry.make("downpour", engine)
    with strategy.scope():
        model = helpers.recording_model(keras.optimizers.SGD(0.0))
    ids = model.get_layer("ids").ids
    x, y = helpers.regression(EXAMPLES)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    seen = [sorted(batch.tolist()) for batch in ids.take_batches()]
    assert sorted(itertools.chain.from_iterable(seen)) == list(range(EXAMPLES))
    in_order = [list(range(n, min(n + BATCH, EXAMPLES))) for n in range(0, EXAMPLES, BATCH)]
    assert not [batch for batch in seen if batch in in_order]
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert sorted(batch.tolist() for batch in ids.take_batches()) == in_order
