"""In a resumed epoch each example is used once: the mini-batches done before are passed over."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd.strategies.pipelines import Segment, Source

pytestmark = pytest.mark.medium

EXAMPLES, BATCH, STEPS = 44, 4, 11


def make(engine, **options):
    cluster = (
        tf_dsgd.LocalCluster(2)
        if engine == "local"
        else tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 1.7], seed=0)
    )
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=2, fetch_every=2)
    with strategy.scope():
        model = helpers.recording_model(
            keras.optimizers.SGD(0.001), metrics=helpers.id_metrics(), **options
        )
    return strategy, model


def fit(model, folder, data, *callbacks, epochs=3, save_freq=4):
    backup = tf_dsgd.callbacks.BackupAndRestore(folder, save_freq=save_freq)
    settings = {"epochs": epochs, "verbose": 0, "shuffle": False}
    history = model.fit(callbacks=[backup, *callbacks], **settings, **data).history
    return history, model.get_layer("ids").ids.take_batches()


def arrays():
    x, y = helpers.regression(EXAMPLES)
    return {"x": x, "y": y, "batch_size": BATCH}


def dataset():
    return tf.data.Dataset.from_tensor_slices(helpers.regression(EXAMPLES)).batch(BATCH)


def of_unknown_length():
    parts = tf.data.Dataset.from_tensor_slices(helpers.regression(EXAMPLES))
    return {"x": parts.filter(lambda x, y: x[0] >= 0.0).batch(BATCH)}


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return tuple(a[part] for a in helpers.regression(EXAMPLES))


DATA = {
    "arrays": arrays,
    "dataset": lambda: {"x": dataset()},
    "unknown length": of_unknown_length,
    "PyDataset": lambda: {"x": Sequence()},
}


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize(
    ("engine", "kind"), [("local", "arrays"), *(("simulated", kind) for kind in DATA)]
)
def test_each_example_of_the_broken_epoch_once(engine, kind, tmp_path):
    """Broken off at mini-batch 9 of the second epoch, of which 5 were done at the checkpoint."""
    _, model = make(engine)
    with pytest.raises(helpers.Broken):
        fit(model, tmp_path / "backup", DATA[kind](), helpers.break_off(1, 7))
    strategy, model = make(engine)
    history, batches = fit(model, tmp_path / "backup", DATA[kind]())
    ids = np.arange(EXAMPLES)
    seen = np.sort(np.concatenate(batches))
    np.testing.assert_array_equal(seen, np.sort([*ids[5 * BATCH :], *ids]))
    # The logs of the resumed epoch are those of all of it.
    assert history["id_count"] == [EXAMPLES] * 2
    assert history["id_sum"] == [ids.sum()] * 2
    assert history["id_squares"] == [(ids**2).sum()] * 2
    assert strategy.steps == 3 * STEPS
    assert strategy.examples_per_step == BATCH
    helpers.assert_ledger_balances(strategy)
    assert not (tmp_path / "backup").exists()


def endless(shuffled):
    data = tf.data.Dataset.from_tensor_slices(helpers.regression(EXAMPLES))
    data = data.shuffle(EXAMPLES, seed=9) if shuffled else data
    return {"x": data.repeat().batch(BATCH), "steps_per_epoch": 7}


def endless_generator(shuffled):
    def batches():
        x, y = helpers.regression(EXAMPLES)
        random = np.random.default_rng(4)
        while True:
            order = random.permutation(EXAMPLES) if shuffled else np.arange(EXAMPLES)
            for part in order.reshape(-1, BATCH):
                yield x[part], y[part]

    return {"x": batches(), "steps_per_epoch": 7}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("save_freq", "data", "shuffled"),
    [
        (5, endless_generator, True),
        ("epoch", endless, False),
        pytest.param(5, endless, True, marks=pytest.mark.slow),
        pytest.param("epoch", endless_generator, True, marks=pytest.mark.slow),
    ],
)
def test_endless_data_go_on(save_freq, data, shuffled, tmp_path):
    """One pass over several epochs: the resumed run takes the batches that an unbroken one would.

    With 5, of 3 epochs of 7 the third begins at 14, and the checkpoint is after 15.
    """
    _, model = make("simulated")
    _, unbroken = fit(model, tmp_path / "unbroken", data(shuffled), save_freq=save_freq)
    _, model = make("simulated")
    with pytest.raises(helpers.Broken):
        fit(model, tmp_path / "b", data(shuffled), helpers.break_off(2, 4), save_freq=save_freq)
    strategy, model = make("simulated")
    _, resumed = fit(model, tmp_path / "b", data(shuffled), save_freq=save_freq)
    done = 15 if save_freq == 5 else 14
    assert len(resumed) == 21 - done and strategy.steps == 21
    assert len({tuple(ids) for ids in unbroken[-6:]}) > 1
    np.testing.assert_array_equal(resumed, unbroken[done:])


def test_finite_data_longer_than_an_epoch_begin_anew(tmp_path):
    """Keras counts the rest of the pass by steps that only the broken process has seen."""
    data = {"x": dataset(), "steps_per_epoch": 5}
    _, model = make("simulated")
    with pytest.raises(helpers.Broken):
        fit(model, tmp_path / "b", data, helpers.break_off(1, 4), save_freq=3)
    strategy, model = make("simulated")
    _, resumed = fit(model, tmp_path / "b", data, epochs=2, save_freq=3)
    # The checkpoint is after 9 mini-batches, 4 of the second epoch, which then has one more.
    assert strategy.steps == 10
    np.testing.assert_array_equal(resumed, [np.arange(4 * BATCH, 5 * BATCH)])


def test_other_data_are_refused(tmp_path):
    _, model = make("simulated")
    with pytest.raises(helpers.Broken):
        fit(model, tmp_path / "b", {"x": dataset()}, helpers.break_off(0, 9), save_freq=8)
    _, model = make("simulated")
    with pytest.raises(ValueError, match="written after 8 mini-batches of data that have fewer"):
        fit(model, tmp_path / "b", {"x": dataset().take(3)})


def test_a_position_is_of_one_fit(tmp_path):
    """One that was not used, because no epoch was left to do, does not meet a later `fit`."""
    strategy, model = make("simulated")
    with pytest.raises(helpers.Broken):
        fit(model, tmp_path / "b", arrays(), helpers.break_off(1, 7))
    _, model = make("simulated")
    strategy = model.distribute_strategy
    backup = tf_dsgd.callbacks.BackupAndRestore(tmp_path / "b", delete_checkpoint=False)
    model.fit(**arrays(), epochs=1, verbose=0, callbacks=[backup])
    assert strategy.steps == STEPS + 5
    model.get_layer("ids").ids.take()
    model.fit(**arrays(), epochs=1, verbose=0)  # and not from the checkpoint's epoch on
    np.testing.assert_array_equal(model.get_layer("ids").ids.take(), np.arange(EXAMPLES))


def test_a_resumed_fit_that_ends_by_an_error_leaves_no_epoch_behind(tmp_path):
    """Without a strategy, as Keras's; there is no `on_train_end` then."""
    model = helpers.recording_model(keras.optimizers.SGD(0.001))
    for at in (helpers.break_off(1, 2), helpers.break_off(2, 2)):
        with pytest.raises(helpers.Broken):
            fit(model, tmp_path / "b", arrays(), at, save_freq="epoch")
        begun = []
        seen = keras.callbacks.LambdaCallback(on_epoch_begin=lambda e, _, b=begun: b.append(e))
        model.fit(**arrays(), epochs=1, verbose=0, callbacks=[seen])
        assert begun == [0]


def test_a_position_is_not_of_the_fit_after_one_that_did_not_begin(tmp_path):
    """By an error, or a Ctrl-C in the first trace, before a token was taken."""
    _, model = make("simulated")
    with pytest.raises(helpers.Broken):
        fit(model, tmp_path / "b", arrays(), helpers.break_off(1, 7))

    def fail(epoch, logs):
        raise helpers.Broken

    _, model = make("simulated")
    failing = keras.callbacks.LambdaCallback(on_epoch_begin=fail)
    with pytest.raises(helpers.Broken):
        fit(model, tmp_path / "b", arrays(), failing)
    model.fit(**arrays(), epochs=1, verbose=0, shuffle=False)
    np.testing.assert_array_equal(model.get_layer("ids").ids.take(), np.arange(EXAMPLES))


def test_logs_of_validation_are_no_part_of_it(tmp_path):
    """At the end of an epoch metrics hold validation's: the next epoch begins with none."""
    _, model = make("simulated")
    data = arrays() | {"validation_data": helpers.regression(8)}
    with pytest.raises(helpers.Broken):
        fit(model, tmp_path / "b", data, helpers.break_off(1, 8), save_freq="epoch")
    _, model = make("simulated")
    history, _ = fit(model, tmp_path / "b", data, save_freq="epoch")
    assert history["id_count"] == [EXAMPLES] * 2
    assert history["val_id_count"] == [8] * 2


# -- pipelines that workers run -------------------------------------------------------------


def shuffled_numbers(context):
    data = tf.data.Dataset.range(20).shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.shuffle(20).batch(2)


def batches(progress, pipeline, start, count):
    handle = progress.iterator(0, 0, Segment(pipeline, start, count))
    next_of = lambda: tf.raw_ops.IteratorGetNext(  # noqa: E731
        iterator=handle, output_types=[tf.int64], output_shapes=[[None]]
    )
    return [next_of()[0].numpy().tolist() for _ in range(count)]


class Iterator:
    """What `Passes` sees of a `TokenIterator` whose batches workers make."""

    def __init__(self, source, infinite=False):
        self.dataset = self
        self.source, self.stream = source, self
        self.cardinality = -1 if infinite else 10
        self.pipelines = source.start()
        self.done = 0

    def at_end(self):
        return self.pipelines.at_end()


def test_pipelines_go_on_with_their_seed_and_place():
    """Worker 0 had taken 3 batches of its pipeline, worker 1 had taken 1, in the second epoch."""
    first = Source(shuffled_numbers, 2)
    passes = tf_dsgd.strategies.position.Passes()
    passes.add(first)
    first.start()
    iterator = Iterator(first)
    assert passes.begin(iterator)
    for worker, count in [(0, 2), (1, 1), (0, 1)]:
        for _ in range(count):
            assert iterator.pipelines.take()
            passes.handed_out(iterator)
        iterator.pipelines.draw(worker, count, ())
    arrays = passes.take(4)
    assert arrays["position_of_pipelines"].tolist() == [3, 1]
    of_the_next = batches(first.start(), 0, 0, 5)
    want = [batches(iterator.pipelines, p, start, 5 - start) for p, start in [(0, 3), (1, 1)]]

    again, second = tf_dsgd.strategies.position.Passes(), Source(shuffled_numbers, 2)
    second.seed = first.seed + 12345
    position = again.restore(arrays)
    again.add(second)  # made after the checkpoint was read
    assert (position.steps, position.batches) == (4, 4)
    progress = second.start()
    assert progress.go_to(position.pipelines)
    got = [batches(progress, p, start, 5 - start) for p, start in [(0, 3), (1, 1)]]
    assert got == want
    assert batches(second.start(), 0, 0, 5) == of_the_next != batches(second.start(), 0, 0, 5)
    assert [progress.take() for _ in range(7)] == [True] * 6 + [False]
    assert progress.draw(0, 2, ()) == Segment(0, 3, 2)
    assert progress.draw(1, 4, ()) == Segment(1, 1, 4)


def test_what_a_lost_worker_left_behind_is_done_after_all():
    """Others take it at the end of the epoch; a checkpoint before must know of it."""
    source, passes = Source(shuffled_numbers, 2), tf_dsgd.strategies.position.Passes()
    passes.add(source)
    iterator = Iterator(source)
    assert passes.begin(iterator)
    for worker, count in [(0, 3), (1, 2), (1, 1)]:
        for _ in range(count):
            assert iterator.pipelines.take()
            passes.handed_out(iterator)
        iterator.pipelines.draw(worker, count, ())
    iterator.pipelines.give_back([Segment(0, 1, 2)])
    with pytest.raises(RuntimeError, match="Of 6 mini-batches that were handed out, 4 were taken"):
        passes.take(6)
    iterator.pipelines.draw(1, 2, ())  # in their stead, from its own pipeline
    arrays = passes.take(6)
    position = tf_dsgd.strategies.position.Passes().restore(arrays)
    progress = source.start()
    assert progress.go_to(position.pipelines, position.left_behind)
    assert [progress.take() for _ in range(5)] == [True] * 4 + [False]
    assert progress.draw(0, 2, ()) == Segment(0, 3, 2)
    assert progress.draw(0, 1, ()) == Segment(0, 1, 1)
    assert progress.draw(0, 1, ()) == Segment(0, 2, 1)
    assert progress.limit(0, [0, 1]) == progress.limit(1, [0, 1]) == 0


@pytest.mark.parametrize(
    "left_behind",
    [
        [Segment(0, 2, 2)],  # not taken yet
        [Segment(2, 0, 1)],
        [Segment(0, -1, 1)],
        [Segment(0, 1, 0)],
        [Segment(0, 0, 2), Segment(0, 1, 1)],  # twice
    ],
)
def test_impossible_left_behind(left_behind):
    assert not Source(shuffled_numbers, 2).start().go_to((3, 5), left_behind)


def test_a_pass_of_pipelines_that_is_over():
    """Its seed is not used again; and what a pass has no room for is refused."""
    source, passes = Source(shuffled_numbers, 2), tf_dsgd.strategies.position.Passes()
    passes.add(source)
    iterator = Iterator(source)
    passes.begin(iterator)
    for _ in range(10):
        assert iterator.pipelines.take()
        passes.handed_out(iterator)
    arrays = passes.take(0)
    assert arrays["position"].tolist() == [0, 0]
    assert arrays["seeds_of_pipelines"].tolist() == [[source.seed, 1]]
    progress = source.start()
    assert not progress.go_to((6, 0))
    assert not progress.go_to((1, 1, 1))
    assert progress.first(7) == (5, 2)
    assert progress.go_to((5, 2)) and progress.position() == (5, 2)


@pytest.mark.parametrize(
    ("length", "steps", "last", "ended", "position"),
    [
        (-1, 0, False, None, [0, 9]),  # endless
        (-1, 0, True, None, [0, 9]),
        (-2, 0, False, False, [0, 9]),  # of unknown length: looks ahead, between epochs alone
        (-2, 0, False, True, [0, 0]),
        (-2, 0, True, None, [0, 0]),
        (-2, 4, False, None, [4, 9]),
        (30, 0, False, None, [0, 0]),  # finite
        (30, 4, False, None, [4, 4]),
        (30, 9, True, None, [9, 9]),
    ],
)
def test_which_passes_go_on(length, steps, last, ended, position):
    """9 of the pass are done. A generator that is asked for more than is needed might never say."""

    class Data:
        cardinality, done, pipelines, source = length, 9, None, None

        def at_end(self):
            assert ended is not None, "it was asked for a batch"
            return ended

    data = Data()
    data.dataset = data.stream = data
    passes = tf_dsgd.strategies.position.Passes()
    assert passes.begin(data)
    assert passes.take(steps, last)["position"].tolist() == position


def test_data_that_workers_read_are_not_those_that_the_chief_reads():
    """They are in another order: to count them off would give some examples twice."""
    strategy, model = make("simulated")
    strategy.passes.restore(
        {
            "position": np.array([4, 4]),
            "position_of_pipelines": np.array([3, 1]),
            "left_behind_by_pipelines": np.zeros((0, 3), np.int64),
            "seeds_of_pipelines": np.zeros((1, 2), np.int64),
        }
    )
    with pytest.raises(ValueError, match="data that workers read, which here the chief would"):
        model.fit(**arrays(), shuffle=False, verbose=0)
    strategy.passes.restore(None)
    model.fit(**arrays(), shuffle=False, verbose=0)
    assert strategy.steps == STEPS
