"""DeepDist in `local[4,2]`: four tasks at a time, each of which is run again once if it fails."""

import concurrent.futures
import os
import pathlib
import pickle
import random
import re
import signal
import threading
import time
import types

import numpy as np
import pytest

import tf_dsgd.spark
from tests.transport.test_frames import sent
from tf_dsgd.membership.lease import LeaseState
from tf_dsgd.spark import deepdist, gradient_task
from tf_dsgd.transport import frames

POINTS = [np.array([float(i), 2.0 * i]) for i in range(12)]
RATE = 0.1


def gradient(model, rows):
    return {"w": np.mean([model["w"] - row for row in rows], axis=0)}


def descent(model, update):
    model["w"] -= RATE * update["w"]


def rows(spark, partitions, points=POINTS):
    return spark.sparkContext.parallelize(points, partitions)


def test_one_partition_at_a_time_is_the_sequential_loop(spark):
    """To the bit, over three epochs of one partition; none is stale."""
    model, twin = {"w": np.zeros(2)}, {"w": np.zeros(2)}
    with tf_dsgd.spark.DeepDist(model) as d:
        counts = d.train(rows(spark, 1), gradient, descent, epochs=3)
    for _ in range(3):
        descent(twin, gradient(twin, POINTS))
    np.testing.assert_array_equal(model["w"], twin["w"])
    assert (counts.updates, counts.again, counts.staleness) == (3, 0, (0, 0, 0))


def test_every_partition_counts_once_and_empty_ones_send_nothing(spark):
    """A sum does not depend on the order: 12 points in 16 partitions, 4 of them empty."""
    model = {"sum": np.zeros(2), "calls": np.array(0)}

    def add(model, update):
        model["sum"] += update[0]
        model["calls"] += update[1]

    with tf_dsgd.spark.DeepDist(model) as d:
        counts = d.train(rows(spark, 16), lambda model, rows: [sum(rows), np.array(1)], add)
    assert (counts.updates, counts.again, counts.empty) == (12, 0, 4)
    np.testing.assert_array_equal(model["sum"], [66.0, 132.0])  # 0 + ... + 11, and twice that
    assert model["calls"] == 12


@pytest.mark.parametrize("moment", ["killed before its update", "without an answer to it"])
def test_a_task_that_spark_runs_twice_changes_nothing(spark, tmp_path, moment):
    """An executor's process is killed; or an update counts, and its task ends with an error."""
    mark, done = str(tmp_path / "killed"), str(tmp_path / "done")
    model = {"sum": np.zeros(2)}

    def dies_before(index, part):
        yield from part
        if moment.startswith("killed") and index == 2 and not os.path.exists(mark):
            pathlib.Path(mark).touch()
            os.kill(os.getpid(), 9)

    def add(model, update):
        model["sum"] += update

    with tf_dsgd.spark.DeepDist(model) as d:
        data = rows(spark, 4).mapPartitionsWithIndex(dies_before)
        if moment.startswith("without"):
            # In place of the answer the task gets an error, with which it ends.
            answer = d._answer

            def lost_answer(header, arrays):
                given = answer(header, arrays)
                if header["do"] == "update" and header["partition"] == 2 and done not in lost:
                    lost.add(done)
                    raise ConnectionError("the answer is lost")
                return given

            lost = set()
            d._server._answer = lost_answer
        counts = d.train(data, lambda model, rows: sum(rows), add)
    np.testing.assert_array_equal(model["sum"], [66.0, 132.0])
    assert counts.updates == 4
    assert counts.again == (moment.startswith("without"))
    assert os.path.exists(mark) == (moment.startswith("killed"))


def test_a_keras_model_is_the_sequential_loop(spark):
    """A linear model by hand: w -= rate * mean((x w - y) x), y = 3 x."""
    import keras

    x = np.arange(1.0, 5.0, dtype="float32")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.array([[0.5]], "float32")])

    def of_keras(model, rows):
        given = np.array(list(rows), "float32")[:, None]
        error = model(given).numpy() - 3 * given
        return [np.mean(error * given, axis=0, keepdims=True)]

    def step(model, update):
        model.set_weights([model.get_weights()[0] - np.float32(RATE) * update[0]])

    with tf_dsgd.spark.DeepDist(model) as d:
        d.train(rows(spark, 1, [float(v) for v in x]), of_keras, step, epochs=2)
    w = 0.5
    for _ in range(2):
        w -= RATE * np.mean((x * w - 3 * x) * x)
    np.testing.assert_allclose(model.get_weights()[0], [[w]], rtol=1e-6)


def test_hostile_bytes_while_it_trains_are_refused(spark):
    """As many as tests/transport/test_frames.py has, each read to its end, before an update."""
    model, made = {"w": np.zeros(2)}, random.Random(1)
    texts = [made.randbytes(made.randrange(300)) for _ in range(1000)] + [pickle.dumps(os.getcwd)]

    def beset(model, update):
        for text in texts:
            assert sent(d._server, text) == b""
        for secret in (b"", frames.token()):
            with pytest.raises(OSError):
                frames.ask(d._server.address, secret, {"do": "fetch", "job": 1})
        descent(model, update)

    with tf_dsgd.spark.DeepDist(model) as d:
        assert d.train(rows(spark, 1), gradient, beset).updates == 1
        assert d._server.refused == len(texts) + 2
    np.testing.assert_array_equal(model["w"], RATE * np.mean(POINTS, axis=0))


def raises(error):
    def function(model, given):
        raise error

    return function


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("of descent"), SystemExit(3), SystemExit(0), KeyboardInterrupt()]
)
def test_what_descent_raises_is_raised_by_train_whatever_it_is(spark, error):
    with tf_dsgd.spark.DeepDist({"w": np.zeros(2)}) as d:
        with pytest.raises(type(error)) as caught:
            d.train(rows(spark, 2), gradient, raises(error))
        assert caught.value is error
        assert d.train(rows(spark, 2), gradient, descent).updates == 2  # it goes on


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ({"w": "x"}, "arrays of numbers as values.*'w': 'x'"),
        ({}, r"It had \['w'\], and descent, or who else changed it, left \[\]"),
        ({"w": np.zeros(2), "v": np.zeros(2)}, r"left \['w', 'v'\]"),
    ],
)
def test_a_descent_that_leaves_no_model_is_named(spark, left, words):
    def leaves(model, update):
        model.clear()
        model.update(left)

    with tf_dsgd.spark.DeepDist({"w": np.zeros(2)}) as d:
        with pytest.raises(TypeError, match=words):
            d.train(rows(spark, 1), gradient, leaves)
        with pytest.raises(TypeError, match=words):  # and before anything is started
            d.train(rows(spark, 1), gradient, descent)


def test_errors_of_gradient_end_training_and_name_the_partition(spark):
    with tf_dsgd.spark.DeepDist({"w": np.zeros(2)}) as d:
        for function, words in [
            (
                raises(SystemExit(3)),
                r"gradient has ended itself for partition 0, by SystemExit\(3\)",
            ),
            (lambda model, rows: None, "gradient has returned nothing for partition 0"),
        ]:
            with pytest.raises(Exception, match=words):
                d.train(rows(spark, 1), function, descent)
        with pytest.raises(RuntimeError, match="in a with statement already"), d:
            pass
        assert d.train(rows(spark, 2), gradient, descent).updates == 2  # it goes on


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({}, "has returned nothing for partition 7"),
        ({"w": "x"}, r"not of numbers for partition 7: 'w' is 'x'"),
        ([1.0, [[1], [1, 2]]], r"not of numbers for partition 7: number 1 is \[\[1\], \[1, 2\]\]"),
        ({1: 2.0, "w": 1.0}, r"keys are no names for partition 7: \[1, 'w'\]"),
    ],
)
def test_updates_that_are_none_are_named(update, words):
    with pytest.raises(TypeError, match=words):
        gradient_task.take_apart(update, 7)


def test_ctrl_c_ends_the_tasks(spark):
    """Which hold no slot of Spark's after it."""

    def interrupts(header, arrays):
        if header["do"] == "fetch":
            os.kill(os.getpid(), signal.SIGINT)
        return answer(header, arrays)

    def waits(model, rows):
        threading.Event().wait(600)

    with tf_dsgd.spark.DeepDist({"w": np.zeros(2)}) as d:
        answer, d._server._answer = d._answer, interrupts
        with pytest.raises(KeyboardInterrupt):
            d.train(rows(spark, 1), waits, descent)
        d._server._answer = answer
        tracker, until = spark.sparkContext.statusTracker(), time.monotonic() + 60.0
        while tracker.getActiveStageIds() and time.monotonic() < until:
            threading.Event().wait(0.1)
        assert tracker.getActiveStageIds() == []
        assert d.train(rows(spark, 2), gradient, descent).updates == 2  # it goes on


def test_an_update_that_is_too_large_is_named(spark):
    distributed = tf_dsgd.spark.DeepDist({"w": np.zeros(2)}, most_update_bytes=15)
    too_large = pytest.raises(Exception, match=r"partition 0 has 16 bytes.*most_update_bytes")
    with distributed, too_large:
        distributed.train(rows(spark, 1), gradient, descent)


def test_bad_input_is_refused_by_name(spark):
    empty = spark.sparkContext.emptyRDD()
    with tf_dsgd.spark.DeepDist({"w": np.zeros(2)}) as d:
        with pytest.raises(ValueError, match="The RDD has no partitions"):
            d.train(empty, gradient, descent)
        with pytest.raises(TypeError, match=r"rdd must be an RDD or a DataFrame.*\[1\]"):
            d.train([1], gradient, descent)
        with pytest.raises(TypeError, match="gradient must be a function"):
            d.train(rows(spark, 1), 3, descent)
        with pytest.raises(ValueError, match="epochs must be an integer of at least 1"):
            d.train(rows(spark, 1), gradient, descent, epochs=0)
    with pytest.raises(RuntimeError, match="in a with statement"):
        d.train(rows(spark, 1), gradient, descent)


def test_a_keras_model_whose_weights_cannot_travel_is_refused_by_name():
    import keras

    layer = keras.layers.Dense(1, dtype="bfloat16", name="halves")
    with pytest.raises(TypeError, match=r"halves/kernel' is of bfloat16, which .* not travel"):
        tf_dsgd.spark.DeepDist(keras.Sequential([keras.Input((1,)), layer]))


def test_arrays_of_no_elements_are_a_model(spark):
    model = {"w": np.zeros((0, 3))}
    with tf_dsgd.spark.DeepDist(model) as d:
        assert d.train(rows(spark, 2), lambda model, rows: model, descent).updates == 2


def test_train_within_descent_is_refused_by_name(spark):
    """It would wait for itself."""
    with tf_dsgd.spark.DeepDist({"w": np.zeros(2)}) as d:

        def trains(model, update):
            d.train(rows(spark, 1), gradient, descent)

        with pytest.raises(RuntimeError, match="is training already, in descent or in another"):
            d.train(rows(spark, 1), gradient, trains)
        assert d.train(rows(spark, 2), gradient, descent).updates == 2  # it goes on


def test_a_descent_that_waits_for_a_job_without_a_slot_is_named(spark, monkeypatch):
    """It would wait for ever, as tasks keep their slots until descent has ended."""
    said, context = [], spark.sparkContext

    def say(line):
        said.append(line)
        context.cancelAllJobs()  # as whoever reads it may

    monkeypatch.setattr(deepdist, "say", say)
    monkeypatch.setattr(deepdist, "_LOOK_SECONDS", 0.5)

    def counts(model, update):
        rows(spark, 2).count()

    with tf_dsgd.spark.DeepDist({"w": np.zeros(2)}) as d:
        with pytest.raises(Exception, match="cancelled"):
            d.train(rows(spark, 8), gradient, counts)
        (line,) = said
        assert re.match(
            r"descent has waited for Spark for \d+ s\. A job that it starts gets no", line
        )
        assert d.train(rows(spark, 2), gradient, descent).updates == 2  # it goes on


@pytest.mark.parametrize("kind", ["an RDD", "a DataFrame"])
def test_data_of_a_session_that_was_stopped_are_refused_by_name(kind):
    context = types.SimpleNamespace(_jsc=None)
    if kind == "an RDD":
        stopped = types.SimpleNamespace(context=context, mapPartitionsWithIndex=None)
    else:  # whose `rdd` asks Java
        session = types.SimpleNamespace(sparkContext=context)
        stopped = types.SimpleNamespace(sparkSession=session, mapInArrow=None)
        with pytest.raises(RuntimeError, match="session of these data was stopped"):
            tf_dsgd.spark.partitions(stopped, ("x", "y"), 8)
    d = tf_dsgd.spark.DeepDist({"w": np.zeros(2)})
    d._server = types.SimpleNamespace()
    with pytest.raises(RuntimeError, match="session of these data was stopped"):
        d.train(stopped, gradient, descent)


def test_who_comes_while_descent_is_at_work_is_told_to_come_again():
    """Without Spark: the driver's answers to messages, as tasks' connections bring them."""
    begun, go_on = threading.Event(), threading.Event()

    def waits(model, update):
        begun.set()
        assert go_on.wait(timeout=60)

    def ask(partition, do="update"):
        asked = {"do": do, "stage": 3, "partition": partition, "version": 0, "form": "array"}
        header, _ = d._answer({"job": 1, "epoch": 0, "seconds": 0.0, **asked}, [np.ones(2)])
        return header

    d = tf_dsgd.spark.DeepDist({"w": np.zeros(2)})
    d._begin(waits)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(ask, 0)
        assert begun.wait(timeout=60)
        assert ask(1) == ask(1, "fetch") == {"done": False}
        go_on.set()
        assert first.result(timeout=60) == {"done": True, "counted": True}
    assert [ask(1), ask(0)] == [{"done": True, "counted": n} for n in (True, False)]
    assert d._staleness == [0, 1]


def leased():
    """A DeepDist that adds up, and who asks it as a task does; without Spark."""

    def add(model, update):
        model["w"] += update

    d = tf_dsgd.spark.DeepDist({"w": np.zeros(2)})
    d._begin(add)

    def ask(do, partition, *, epoch=0, stage=3, version=0):
        asked = {"do": do, "partition": partition, "epoch": epoch, "stage": stage, "form": "array"}
        asked |= {"job": 1, "seconds": 0.0, "version": version}
        header, _ = d._answer(asked, [np.ones(2)] if do == "update" else [])
        return header

    return d, ask


def test_of_two_tasks_of_a_partition_the_first_to_send_counts():
    d, ask = leased()
    for partition in (0, 1, 0):
        assert ask("fetch", partition)["version"] == 0
    states = {name[0]: lease.state for name, lease in d._leases.items()}
    assert states == {0: LeaseState.SHARED, 1: LeaseState.OPEN}
    assert [ask("update", p)["counted"] for p in (0, 1, 0)] == [True, True, False]
    np.testing.assert_array_equal(d.model["w"], [2.0, 2.0])
    assert {lease.state for lease in d._leases.values()} == {LeaseState.COUNTED}
    d._end_epoch([0, 1])


def test_who_comes_after_an_epochs_end_is_too_late():
    """A task that Spark ran beside the one that was first, and that did not hear of its end."""
    d, ask = leased()
    ask("fetch", 0)
    ask("update", 0)
    d._end_epoch([0])
    assert ask("fetch", 0, version=1)["version"] == 1
    assert not ask("update", 0)["counted"]
    assert ask("update", 0, epoch=1)["counted"]
    assert (d._counts["updates"], d._counts["again"]) == (2, 1)


def test_an_epoch_that_lost_a_partition_is_no_end():
    """One whose task found no rows when it ran again was never sent, and is nobody's loss."""
    d, ask = leased()
    ask("fetch", 0)
    ask("fetch", 1)
    ask("update", 0)
    with pytest.raises(RuntimeError, match=r"partitions \[1\] no update counts"):
        d._end_epoch([0, 1])
    d, ask = leased()
    ask("fetch", 1)
    d._end_epoch([])


@pytest.mark.parametrize("model", [{}, 3, {"w": "text"}, {1: np.zeros(2)}])
def test_models_that_are_none_are_refused(model):
    with pytest.raises(TypeError, match="Received"):
        tf_dsgd.spark.DeepDist(model)
