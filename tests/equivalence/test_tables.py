"""Tables split by rows, beside the same tables whole, NumPy, and plain Keras."""

import functools
import gc
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests.equivalence import twin
from tf_dsgd.strategies.rows import splitting, tables

pytestmark = pytest.mark.medium

SPLIT = {"table/.*": tf_dsgd.Rows()}
SGD = keras.optimizers.SGD
ROWS, WIDTH = 31, 2


def ids(examples=48, rows=ROWS, seed=1):
    """Three of an example, some of them twice."""
    found = np.random.default_rng(seed).integers(0, rows, (examples, 3))
    found[::3, 1] = found[::3, 0]
    return found.astype("int32")


def targets(examples=48):
    return np.random.default_rng(2).standard_normal((examples, WIDTH)).astype("float32")


def model(optimizer, rows=ROWS, **embedding):
    """Of the sum and the maximum of an example's rows: two lookups in one table."""
    inputs = keras.Input((3,), dtype="int32")
    table = keras.layers.Embedding(rows, WIDTH, name="table", **embedding)
    summed = keras.ops.sum(table(inputs), axis=1) + keras.ops.max(table(inputs), axis=1)
    built = keras.Model(inputs, keras.layers.Dense(WIDTH, name="dense")(summed))
    built.compile(optimizer, "mse")
    random = np.random.default_rng(3)
    built.set_weights([random.uniform(-0.5, 0.5, w.shape) for w in built.weights])
    return built


def local(workers=1):
    return tf_dsgd.LocalCluster(workers)


def simulated(workers=1):
    return tf_dsgd.SimulatedCluster(workers, compute_seconds=tf_dsgd.Exponential(1.0), seed=4)


BOTH = pytest.mark.parametrize(
    "strategy_of",
    [
        tf_dsgd.DownpourStrategy,
        functools.partial(tf_dsgd.PeriodicAveragingStrategy, average_every=2),
    ],
    ids=["downpour", "averaging"],
)
"""Who has the compiled optimizer on shards, and who has it on workers, but for tables."""


# -- training ---------------------------------------------------------------------------------


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.02),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad(0.1)),
}


FIRST = next(iter(twin.ENGINES))
EACH_ENGINE = [("adagrad", engine) for engine in twin.ENGINES]
EACH_OPTIMIZER = [(name, FIRST) for name in OPTIMIZERS if name != "adagrad"]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "engine"), [*EACH_ENGINE, *EACH_OPTIMIZER])
def test_one_worker_is_plain_keras_on_dense_gradients(name, engine):
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine](), placement=SPLIT)
    twin.assert_same_as_plain(lambda: model(OPTIMIZERS[name]()), strategy, ids(), targets())


def weights_after(strategy, make):
    with strategy.scope():
        built = make()
    built.fit(ids(), targets(), batch_size=4, shuffle=False, verbose=0)
    return built.get_weights()


LAZY = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.05, centered=True),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LAZY)
def test_lazy_optimizers_do_what_they_do_on_a_whole_table(name):
    """For which there are twins by hand, in `test_touched_rows.py`."""
    whole, split_ = (
        weights_after(
            tf_dsgd.DownpourStrategy(simulated(3), sparse="lazy", placement=placement),
            lambda: model(LAZY[name]()),
        )
        for placement in (None, SPLIT)
    )
    for a, b in zip(whole, split_, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "policy",
    [
        "mixed_float16",
        pytest.param("mixed_bfloat16", marks=pytest.mark.slow),
        pytest.param("float64", marks=pytest.mark.slow),
    ],
)
def test_other_types(policy):
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_global_policy(policy)
    try:
        whole, split_ = (
            weights_after(
                tf_dsgd.SoftsyncStrategy(simulated(2), gradients_per_update=2, placement=placement),
                lambda: model(keras.optimizers.Adagrad(0.1)),
            )
            for placement in (None, SPLIT)
        )
    finally:
        keras.mixed_precision.set_global_policy(before)
    for a, b in zip(whole, split_, strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_worker_with_rows_on_three_shards_is_plain_keras():
    """AdamW decays what the table is left out of."""

    def make():
        optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1)
        built = model(optimizer)
        optimizer.exclude_from_weight_decay([built.get_layer("table").embeddings])
        return built

    weights = []
    for shards, placement in ((1, None), (3, SPLIT)):
        cluster = tf_dsgd.SimulatedCluster(1, num_shards=shards)
        strategy = tf_dsgd.DownpourStrategy(cluster, sparse="lazy", placement=placement)
        weights.append(weights_after(strategy, make))
        assert strategy.num_shards == shards
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_are_rounded_as_other_weights_are():
    """Messages as bfloat16: of dyadic numbers nothing is lost, so it is the same training."""
    got = []
    for options in ({}, {"compression": tf_dsgd.compression.Cast("bfloat16")}):
        strategy = tf_dsgd.DownpourStrategy(local(), placement=SPLIT, **options)
        with strategy.scope():
            numbers = keras.Input((3,), dtype="int32")
            rows = keras.layers.Embedding(ROWS, WIDTH, "zeros", name="table")(numbers)
            built = keras.Model(numbers, keras.ops.sum(rows, axis=1))
            built.compile(SGD(1.0), lambda _, y: -keras.ops.sum(y, axis=-1))
        built.fit(ids(), targets(), batch_size=4, verbose=0)
        got.append(built.get_weights()[0])
    named = np.bincount(ids().ravel(), minlength=ROWS) / 4
    np.testing.assert_array_equal(got[0], np.repeat(named[:, None], WIDTH, 1))
    np.testing.assert_array_equal(got[1], got[0])


def test_longer_periods_send_the_sum_of_rows_by_hand():
    """Nothing but a table, no local step: each message is the gradients at the rows of its time."""
    strategy = tf_dsgd.DownpourStrategy(local(), push_every=3, fetch_every=3, placement=SPLIT)
    inputs = keras.Input((3,), dtype="int32")
    with strategy.scope():
        table = keras.layers.Embedding(ROWS, WIDTH, name="table")
        built = keras.Model(inputs, keras.ops.sum(table(inputs), axis=1))
        built.compile(keras.optimizers.SGD(0.1), lambda y, p: 0.5 * keras.ops.sum((y - p) ** 2, -1))
    rows = built.get_weights()[0].astype("float64")
    built.fit(ids(), targets(), batch_size=4, shuffle=False, verbose=0)
    x, y = ids().reshape(-1, 3, 4, 3), targets().reshape(-1, 3, 4, WIDTH)
    for round_x, round_y in zip(x, y, strict=True):
        total = np.zeros_like(rows)
        for bx, by in zip(round_x, round_y, strict=True):
            error = rows[bx].sum(1) - by
            np.add.at(total, bx, np.repeat(error[:, None] / 4, 3, axis=1))
        rows -= 0.1 * total
    np.testing.assert_allclose(built.get_weights()[0], rows, rtol=2e-5, atol=2e-6)


@BOTH
def test_no_operation_of_the_whole_table_is_in_a_round(strategy_of):
    """Neither on the worker, nor on the shard: what is read and written of 7,919 rows are some."""
    strategy = strategy_of(local(), sparse="lazy", placement=SPLIT)
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int32")
        rows = keras.layers.Embedding(7919, WIDTH, name="table")(inputs)
        built = keras.Model(inputs, keras.layers.Dense(WIDTH)(keras.ops.sum(rows, axis=1)))
        built.compile(keras.optimizers.Adam(0.1, clipnorm=1.0), "mse")
    built.fit(ids(8, 7919), targets(8), batch_size=4, verbose=0)
    (program,) = strategy.batches.programs
    parts = program.program
    functions = [parts.one_step, parts.collection, parts.wrapping, *parts.receiving, *parts.reading]
    graphs = [g for f in functions for g in (f.graph, *inner(f.graph))]
    operations = [operation for graph in graphs for operation in graph.get_operations()]
    assert any(operation.type == "ResourceGather" for operation in operations)
    assert sum(operation.type.startswith("ResourceScatter") for operation in operations) >= 3
    outputs = [tensor for operation in operations for tensor in operation.outputs]
    assert not [t for t in outputs if t.shape.rank and t.shape[0] == 7919]


def inner(graph):
    """The graphs of its branches and loops."""
    for operation in graph.get_operations():
        for name in ("_true_graph", "_false_graph", "_body_graph"):
            if hasattr(operation, name):
                yield getattr(operation, name)
                yield from inner(getattr(operation, name))


@BOTH
def test_a_model_is_saved_and_loaded_anywhere(strategy_of, tmp_path):
    strategy = strategy_of(local(2), placement=SPLIT)
    with strategy.scope():
        built = model(keras.optimizers.Adagrad(0.1))
    built.fit(ids(), targets(), batch_size=4, verbose=0)
    assert built.count_params() == ROWS * WIDTH + WIDTH * WIDTH + WIDTH
    built.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(built.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    slots = [v.numpy() for v in plain.optimizer.variables]
    for a, b in zip(built.optimizer.variables, slots, strict=True):
        np.testing.assert_array_equal(a.numpy(), b)
    np.testing.assert_allclose(built.predict(ids(), verbose=0), plain.predict(ids(), verbose=0))
    assert built.evaluate(ids(), targets(), verbose=0) == pytest.approx(
        plain.evaluate(ids(), targets(), verbose=0), rel=1e-6
    )
    plain.set_weights([np.ones_like(w) for w in plain.get_weights()])
    plain.save_weights(tmp_path / "ones.weights.h5")
    built.load_weights(tmp_path / "ones.weights.h5")
    assert built.get_layer("table").embeddings.numpy().min() == 1.0


@BOTH
def test_resumed_is_uninterrupted(strategy_of, tmp_path):
    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def trained(*callbacks):
        keras.utils.set_random_seed(5)
        strategy = strategy_of(simulated(2), sparse="lazy", placement=SPLIT)
        with strategy.scope():
            built = model(keras.optimizers.Adam(0.05))
        built.fit(ids(), targets(), batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
        return [*built.get_weights(), *(v.numpy() for v in built.optimizer.variables)]

    def backup():
        return tf_dsgd.callbacks.BackupAndRestore(tmp_path)

    want = trained()
    with pytest.raises(KeyboardInterrupt):
        trained(backup(), Breaks())
    for a, b in zip(trained(backup()), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_with_tables_that_nobody_has_any_more_is_freed():
    """Nothing in the process keeps the gradient of its rows: it left threads with each model."""
    strategy = tf_dsgd.DownpourStrategy(local())
    with strategy.scope():
        trained = model(keras.optimizers.SGD(0.1))
    trained.fit(ids(), targets(), batch_size=8, verbose=0)
    trained.predict(ids(), verbose=0)
    alive = [weakref.ref(trained), weakref.ref(strategy)]
    del trained, strategy
    keras.backend.clear_session()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_a_lookup_outside_a_step_drains_first():
    """In a loop of one's own: the rows are those that reading the table gives a moment later."""
    strategy = tf_dsgd.DownpourStrategy(local(2), placement=SPLIT)
    with strategy.scope():
        built = model(SGD(0.1))
    data = tf.data.Dataset.from_tensor_slices((ids(), targets())).batch(4)
    tokens = strategy.experimental_distribute_dataset(data)

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((built(batch[0], training=True) - batch[1]) ** 2)
        gradients = tape.gradient(loss, built.trainable_variables)
        built.optimizer.apply(gradients, built.trainable_variables)
        return loss

    run = tf.function(lambda token: strategy.run(step, (token,)))
    table = built.get_layer("table").embeddings
    for number, token in enumerate(tokens):
        run(token)
        if number % 4 == 3:
            looked_up = tf.gather(table, np.arange(ROWS)).numpy()
            assert strategy.steps == number + 1
            np.testing.assert_array_equal(looked_up, table.numpy())


def test_a_layer_of_ones_own_under_mixed_precision():
    """Keras casts what it reads of a weight; of a table what was looked up."""

    class Rows(keras.layers.Layer):
        def build(self, _):
            self.table = self.add_weight(shape=(ROWS, WIDTH), name="rows", initializer="zeros")

        def call(self, numbers):
            rows = keras.ops.take(self.table, numbers, axis=0)
            assert rows.dtype == tf.bfloat16
            return keras.ops.sum(rows, axis=1)

    strategy = tf_dsgd.DownpourStrategy(simulated(), placement={".*/rows": tf_dsgd.Rows()})
    with strategy.scope():
        numbers = keras.Input((3,), dtype="int32")
        built = keras.Model(numbers, Rows(dtype="mixed_bfloat16")(numbers))
        built.compile(SGD(1.0), lambda _, y: -keras.ops.sum(y, axis=-1))
    built.fit(ids(), targets(), batch_size=4, verbose=0)
    named = np.bincount(ids().ravel(), minlength=ROWS) / 4
    np.testing.assert_array_equal(built.get_weights()[0], np.repeat(named[:, None], WIDTH, 1))


# -- what is refused --------------------------------------------------------------------------


def refused(make, **options):
    """What a fit says; on one simulated worker."""
    embedding = options.pop("embedding", {})
    compiled = options.pop("compiled", {})
    strategy = tf_dsgd.DownpourStrategy(simulated(), **{"placement": SPLIT, **options})
    with strategy.scope():
        built = model(make(), **embedding)
        if compiled:
            built.compile(make(), "mse", **compiled)
    with pytest.raises((TypeError, ValueError)) as error:
        built.fit(ids()[:8], targets()[:8], batch_size=4, verbose=0)
    return str(error.value)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (keras.optimizers.Adam, {}, 'Adam changes rows.*sparse="lazy"'),
        (keras.optimizers.Lamb, {"sparse": "lazy"}, "Received: Lamb"),
        (keras.optimizers.Lamb, {}, "leave the table out of `placement`. Received: Lamb"),
        (lambda: tf_dsgd.optimizers.AdaptiveRevision(0.1), {}, "AdaptiveRevision would keep"),
        (lambda: SGD(use_ema=True), {}, "use_ema.*all rows.*Received: use_ema=True"),
        (lambda: SGD(weight_decay=0.1), {}, "Received: weight_decay=0.1"),
        (lambda: SGD(gradient_accumulation_steps=2), {}, "gradient_accumulation_steps=2"),
        (lambda: SGD(global_clipnorm=1.0), {}, "global_clipnorm=1.0"),
        (SGD, {"embedding": {"embeddings_constraint": "non_neg"}}, "its constraint takes all"),
        (SGD, {"embedding": {"embeddings_regularizer": "l2"}}, "as by its regularizer"),
        (SGD, {"compiled": {"jit_compile": True}}, "jit_compile=True does not go with tables"),
        (SGD, {"placement": {"tabel/.*": tf_dsgd.Rows()}}, "tabel.*no variable has such a path"),
    ],
)
def test_what_cannot_act_on_rows_is_refused_by_name(make, options, said):
    assert re.search(said, refused(make, **options), re.DOTALL)


def test_a_codec_that_keeps_something_of_what_auto_splits(monkeypatch):
    """With a placement that names tables it is refused when the strategy is made."""
    monkeypatch.setattr(splitting, "_AUTO", ROWS * WIDTH * 4)
    codec = tf_dsgd.compression.Threshold(0.1)
    assert "keeps something of each" in refused(SGD, compression=codec, placement="auto")


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ("all", "a dict from regular expressions"),
        ({"a": 3}, "'a': 3"),
        ({"a": tf_dsgd.Rows}, "with parentheses"),
        ({3: tf_dsgd.Rows()}, "3: Rows"),
        ({"a(": tf_dsgd.Rows()}, "no regular expression"),
    ],
)
def test_a_wrong_placement_is_refused(placement, said):
    with pytest.raises((TypeError, ValueError), match=said):
        tf_dsgd.DownpourStrategy(local(), placement=placement)


def test_workers_that_run_the_optimizer_have_whole_tables():
    with pytest.raises(ValueError, match=r'local_rule="optimizer"'):
        tf_dsgd.DownpourStrategy(local(), local_rule="optimizer", placement=SPLIT)


def test_what_is_said_where_a_step_cannot_train_a_table(tmp_path):
    strategy = tf_dsgd.DownpourStrategy(local(2), placement=SPLIT)
    with strategy.scope():
        built = model(SGD(0.1))
    with pytest.raises(TypeError, match=r"train_on_batch, and steps on batches of your own"):
        built.train_on_batch(ids()[:4], targets()[:4])
    with pytest.raises(ValueError, match=r"'table/embeddings' is split by rows.*\.keras file"):
        built.export(tmp_path, verbose=False)
    with pytest.raises(ValueError, match="Received: 2 workers"), strategy.recording():
        pass


def test_dense_gradients_and_lookups_in_loops_are_refused_by_name():
    class Dense(keras.Model):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(data[0]) - data[1]) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = [tf.convert_to_tensor(g) for g in gradients]
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    class Looks(keras.layers.Embedding):
        def call(self, numbers):
            return tf.map_fn(super().call, numbers, fn_output_signature=tf.float32)

    for kind, layer, said in (
        (Dense, keras.layers.Embedding, "Received: SymbolicTensor"),
        (keras.Model, Looks, "tf.map_fn or an RNN"),
    ):
        strategy = tf_dsgd.DownpourStrategy(simulated(), placement=SPLIT)
        with strategy.scope():
            numbers = keras.Input((3,), dtype="int32")
            rows = layer(ROWS, WIDTH, name="table")(numbers)
            built = kind(numbers, keras.ops.sum(rows, axis=1))
            built.compile(SGD(0.1), "mse")
        with pytest.raises(ValueError, match=said):
            built.fit(ids()[:8], targets()[:8], batch_size=4, verbose=0)


def test_what_has_no_rows_is_refused():
    strategy = tf_dsgd.DownpourStrategy(local(), placement={"dense/bias": tf_dsgd.Rows()})
    with strategy.scope(), pytest.raises(ValueError, match=r"splits 'dense/bias'.*shape \(2,\)"):
        model(SGD())


def test_auto_splits_large_embeddings(monkeypatch):
    monkeypatch.setattr(splitting, "_AUTO", ROWS * WIDTH * 4)
    strategy = tf_dsgd.DownpourStrategy(local(), placement="auto")
    with strategy.scope():
        large, small = model(SGD()), model(SGD(), rows=ROWS - 1)
    assert isinstance(large.get_layer("table").embeddings.value, tables.SplitTable)
    assert not isinstance(small.get_layer("table").embeddings.value, tables.SplitTable)
    assert not isinstance(large.get_layer("dense").kernel.value, tables.SplitTable)


def test_what_no_process_could_be_sent_whole_is_refused_before_it_is_made(monkeypatch):
    """TensorFlow's own error came as a worker fetched, without the weight's name."""
    assert 2**30 < tf_dsgd.TFCluster.most_bytes_of_a_variable < 2**31
    assert local().most_bytes_of_a_variable is None
    monkeypatch.setattr(tf_dsgd.LocalCluster, "most_bytes_of_a_variable", ROWS * WIDTH * 4 - 1)
    made = r'placement={"table/embeddings": tf_dsgd\.Rows\(\)}'
    for make in (tf_dsgd.DownpourStrategy, tf_dsgd.PeriodicAveragingStrategy):
        with make(local()).scope(), pytest.raises(ValueError, match=made):
            model(SGD())
    with tf_dsgd.DownpourStrategy(local(), placement=SPLIT).scope():
        model(SGD())
    with tf_dsgd.DownpourStrategy(local()).scope():
        model(SGD(), rows=ROWS - 1)
