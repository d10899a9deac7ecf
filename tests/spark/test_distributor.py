"""The chief, a ps and workers of a cluster, in one barrier stage of `local[4,2]`."""

import concurrent.futures
import contextlib
import functools
import io
import json
import os
import pathlib
import pickle
import signal
import sys
import threading
import types

import numpy as np
import psutil
import pytest

import tf_dsgd.spark
from tests import helpers
from tests.cluster import processes
from tf_dsgd.spark import barrier_task, chief, distributor, rows_task
from tf_dsgd.spark.session import check_java, session, slots


def on_a_cluster(cluster=None, data=None, epochs=2):
    """Trains a linear model: (weights, loss of each epoch, steps, steps of each worker)."""
    import keras

    keras.utils.set_random_seed(1)
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=1, fetch_every=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    if data is None:
        x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        arguments = {"x": x, "y": x.sum(axis=1), "batch_size": 8}
    else:
        arguments = {"x": strategy.distribute_datasets_from_function(data)}
    history = model.fit(**arguments, epochs=epochs, shuffle=False, verbose=0).history
    ledger = helpers.assert_ledger_balances(strategy)
    steps = [worker.steps for worker in ledger.workers]
    return model.get_weights(), history["loss"], strategy.steps, steps


def fails_with(error, *arguments):
    raise error(*arguments)


def exact_weights(strategy, x):
    """Of a loss that is linear in them: its gradients, the means of x, do not depend on them.

    Of x in eighths all their sums are exact, in whatever order workers send them.
    """
    import keras

    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((3,)), layer])
        model.compile(keras.optimizers.SGD(0.25), loss=lambda _, given: given)
    model.fit(x, x[:, 0], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()[0][:, 0]


def test_one_worker_is_one_of_a_local_cluster(spark, capsys):
    def train(text):
        print(text, flush=True)
        return on_a_cluster()

    got = tf_dsgd.spark.Distributor(1).run(train, "said by the chief")
    want = on_a_cluster(tf_dsgd.LocalCluster(1))
    for one, other in zip(got[0], want[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    assert got[2:] == want[2:] == (16, [16])
    assert "said by the chief\n" in capsys.readouterr().out


def test_two_workers_read_each_row_of_theirs_once_and_learn_what_local_ones_do(spark):
    """Three partitions of 0, 30 and 10 rows for two workers: batches of 8, the last ones smaller.

    Of the rows' sum of squares, and their number, the loss at rate 0 tells: it is a mean over rows.
    The second data set has five partitions of two rows, which Spark counts from 3 on.
    """
    rows = [(float(i), [float(i % 7), 1.0], i % 3) for i in range(40)]

    def place(index, part):
        del part
        return iter([[], rows[:30], rows[30:]][index])

    rdd = spark.sparkContext.parallelize(range(3), 3).mapPartitionsWithIndex(place)
    df = spark.createDataFrame(rdd, "`a.b` double, `v``w` array<float>, y int")
    data = tf_dsgd.spark.partitions(df, (["a.b", "v`w"], "y"), 8)
    other = tf_dsgd.spark.partitions(spark.range(10, numPartitions=5), ("id",), 3)

    def train(data, others):
        import keras
        import tensorflow as tf

        strategy = tf_dsgd.DownpourStrategy()
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")]
            )
            model.compile(keras.optimizers.SGD(0.0), "mse")
        dataset = strategy.distribute_datasets_from_function(data)
        losses = model.fit(dataset, epochs=2, shuffle=False, verbose=0).history["loss"]
        steps = [worker.steps for worker in strategy.ledger().workers]
        # The chief is on the workers' machine, and has their files.
        contexts = [tf.distribute.InputContext(2, worker) for worker in range(2)]
        other = others["in a dict"][0]
        ids = [[batch.numpy().tolist() for batch in other(context)] for context in contexts]
        weights = exact_weights(strategy, x)
        return losses, steps, [place.rows for place in data.places], ids, weights

    x = (np.arange(192) % 17).reshape(64, 3).astype("float32") / 8
    losses, steps, counts, ids, weights = tf_dsgd.spark.Distributor(2).run(
        train, data, {"in a dict": [other]}
    )
    want = np.mean([(a + sum(v) - y) ** 2 for a, v, y in rows])
    np.testing.assert_allclose(losses, [want, want], rtol=1e-5)
    assert counts == [10, 30]  # partitions 0 and 2 are worker 0's, partition 1 worker 1's
    assert steps == [2 * 2, 2 * 4]
    assert ids == [[[0, 1, 4], [5, 8, 9]], [[2, 3, 6], [7]]]
    local = exact_weights(tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2)), x)
    np.testing.assert_array_equal(weights, local)
    np.testing.assert_array_equal(weights, -0.25 * 2 * x.sum(axis=0) / 8)


def test_partitions_are_read_in_their_order_whatever_order_they_come_in(tmp_path):
    pieces = [("k", 2, b"d"), ("k", 10, b"f"), ("other", 0, b"x"), ("k", 2, b"e"), ("k", 0, b"abc")]
    none, k, other = barrier_task.write(
        ((1, piece) for piece in pieces), ["none", "k", "other"], str(tmp_path)
    )
    assert none == ([], 0)
    assert [pathlib.Path(path).read_bytes() for path in k[0]] == [b"abc", b"de", b"f"]
    assert (k[1], other[1]) == (6, 1)


def test_nulls_are_refused_by_the_columns_name():
    pyarrow = pytest.importorskip("pyarrow")
    batch = pyarrow.RecordBatch.from_arrays([pyarrow.array([1.0, None])], ["c0"])
    with pytest.raises(ValueError, match=r"Column 'a\.b' has nulls"):
        rows_task.array_of(batch, ["a.b"], ["a.b"], "<f8", ())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a script outlives its task")
def test_a_script_ends_with_the_task_that_started_it(spark, tmp_path):
    """Spark kills its Python with a signal that nothing can catch. It runs this task twice."""

    def starts_a_script(_):
        noted = pathlib.Path(f"{folder}/pid")
        if noted.exists():
            yield (
                psutil.wait_procs(
                    [
                        psutil.Process(pid)
                        for pid in [int(noted.read_text())]
                        if psutil.pid_exists(pid)
                    ],
                    timeout=20,
                )[1]
                == []
            )
            return
        script = "import os, threading; print(os.getpid(), flush=True); threading.Event().wait(60)"
        with barrier_task.Child("chief", ["-c", script], {}) as child:
            noted.write_bytes(next(child.lines()))
            os.kill(os.getpid(), 9)

    folder = str(tmp_path)
    assert spark.sparkContext.parallelize([0], 1).mapPartitions(starts_a_script).collect() == [True]


def test_files_of_a_task_whose_process_ended_stay_until_the_next_attempt(monkeypatch, tmp_path):
    """The chief reads its rows until it is ended, too; those of another training are let be."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    mine, other = types.SimpleNamespace(token=b"mine"), types.SimpleNamespace(token=b"other")

    def leave(cluster, attempt, error):
        with contextlib.suppress(RuntimeError), barrier_task.Folder(cluster, attempt) as folder:
            pathlib.Path(folder, "rows").touch()
            if error is not None:
                raise error
        return pathlib.Path(folder)

    ended = barrier_task.Ended("worker 1 has ended")
    first, elsewhere = leave(mine, "3.0", ended), leave(other, "4.0", ended)
    assert (first / "rows").exists() and first.parent == tmp_path
    assert not leave(mine, "3.0", None).exists()
    assert not leave(mine, "3.0", RuntimeError("of the chief")).exists()
    assert first.exists()  # of this attempt, as long as that lasts
    with barrier_task.Folder(mine, "3.4") as folder:
        assert not first.exists() and elsewhere.exists()
    assert not os.path.exists(folder)


def test_a_script_that_writes_elsewhere_is_waited_for():
    elsewhere = "os.dup2(os.open(os.devnull, os.O_WRONLY), 1); os.dup2(1, 2)"
    script = f"import os; print('here', flush=True); {elsewhere}; import numpy, psutil"
    with barrier_task.Child("chief", ["-c", script], {}) as child:
        assert b"".join(child.lines()) == b"here\n"
        assert child.process.returncode == 0


def test_a_process_that_stays_after_its_outcome_is_ended(monkeypatch, tmp_path):
    """As one whose `train` has left a thread that nobody ends."""
    monkeypatch.setattr(barrier_task, "LEAVE_SECONDS", 0.0)
    outcome = tmp_path / "outcome"
    script = (
        "import threading; threading.Thread(target=threading.Event().wait).start()\n"
        f"print('here', flush=True); open({str(outcome)!r}, 'w').close()"
    )
    with barrier_task.Child("chief", ["-c", script], {}) as child:
        assert b"".join(child.lines(str(outcome))) == b"here\n"
        assert child.process.returncode == -9


def test_the_log_is_shown_once_and_no_character_in_halves(capsys):
    """Pieces end anywhere, and one comes again when its answer was lost."""
    log, text = distributor._Log(), "ä━é\n".encode()
    pieces = [text[start : start + 2] for start in range(0, len(text), 2)]
    for number, piece in enumerate(pieces):
        for _ in range(2):
            header = {"attempt": "first", "number": number, "seconds": 0.0}
            assert log.add(header, piece)
    assert log.add({"attempt": "second", "number": 0, "seconds": 0.0}, b"again\n")
    assert capsys.readouterr().out == "ä━é\nagain\n"


def test_what_the_driver_cannot_show_ends_no_training(monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    closed = io.StringIO()
    closed.close()
    for output in (ascii_only, closed, None):
        monkeypatch.setattr(sys, "stdout", output)
        distributor._write("one ━ two\n")
    assert ascii_only.buffer.getvalue() == b"one ? two\n"


def test_a_driver_whose_output_nobody_takes_has_the_chief_wait(monkeypatch):
    """And not fail: as a script would that writes there itself."""
    writing, go_on = threading.Event(), threading.Event()

    def write(text):
        writing.set()
        assert go_on.wait(timeout=60)

    monkeypatch.setattr(distributor, "_write", write)
    log, header = distributor._Log(), {"attempt": "first", "number": 0, "seconds": 0.0}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(log.add, header, b"text")
        assert writing.wait(timeout=60)
        assert not log.add(header, b"text")
        go_on.set()
        assert first.result(timeout=60)
    assert log.add(header, b"text")  # which is shown already


def test_tasks_of_one_attempt_meet_and_no_others(monkeypatch):
    """Task 0 of the first attempt was lost before it came; the others of it ask until their end."""

    def ask(attempt, task, seconds=0.0):
        said = np.frombuffer(json.dumps(f"{attempt} {task}").encode(), np.uint8)
        header = {"do": "meet", "attempt": attempt, "task": task, "seconds": seconds}
        answer, arrays = training.answer(header, [said])
        return json.loads(arrays[0].tobytes()) if answer["done"] else None

    training = distributor._Training(3)
    assert [ask("first", 1), ask("first", 2), ask("second", 0), ask("first", 1)] == 4 * [None]
    threads = concurrent.futures.ThreadPoolExecutor(2)
    with threads:
        waiting = [threads.submit(ask, "second", task, 60.0) for task in (0, 1)]
        want = ["second 0", "second 1", "second 2"]
        assert ask("second", 2, 60.0) == want
        assert [each.result(timeout=60) for each in waiting] == [want, want]
    assert ask("second", 1) == want  # whose answer was lost

    monkeypatch.setattr(distributor, "_APART_SECONDS", -1.0)
    training = distributor._Training(2)
    training.close()  # so that nobody waits
    assert ask("10", 0, 60.0) is None
    with pytest.raises(RuntimeError, match="cannot tell that they are of one attempt"):
        ask("9", 1, 60.0)


def test_what_train_raises_ends_all_and_is_raised_here(spark):
    def train():
        raise KeyError("of train")

    with pytest.raises(KeyError, match="of train") as caught:
        tf_dsgd.spark.Distributor(1, 0).run(train)
    assert "In the chief of the training" in "".join(caught.value.__notes__)


class OfTwo(Exception):
    """Cannot be read from its pickle, for Exception keeps one argument."""

    def __init__(self, one, other):
        super().__init__(one + other)


@pytest.mark.parametrize(
    ("train", "kind", "words"),
    [
        (threading.Lock, TypeError, r"train has returned what cannot be pickled .*_thread\.lock"),
        (functools.partial(fails_with, OfTwo, "a", "b"), RuntimeError, "OfTwo: ab"),
        (functools.partial(fails_with, KeyError, "k"), KeyError, "k"),
        (functools.partial(fails_with, SystemExit, 3), RuntimeError, r"by SystemExit\(3\)"),
        (functools.partial(fails_with, KeyboardInterrupt), RuntimeError, "by KeyboardInterrupt"),
        (functools.partial(fails_with, GeneratorExit), RuntimeError, "by GeneratorExit"),
    ],
)
def test_what_train_gives_travels_or_is_named(train, kind, words):
    """As the chief's process calls it, and the driver reads its outcome."""
    payload = pickle.dumps((train, (), []))
    with pytest.raises(kind, match=words):
        distributor._result(chief.outcome_of(payload, []))


def test_a_train_of_a_module_that_executors_lack_is_named():
    """At once, and not as a lost task, after as many attempts as a stage has."""
    with pytest.raises(RuntimeError, match=r"ModuleNotFoundError: .*only_here.*addPyFile"):
        distributor._result(chief.outcome_of(b"conly_here\nf\n.", []))  # a pickle of only_here.f


def test_a_train_that_ends_its_process_is_no_lost_task(spark):
    with pytest.raises(RuntimeError, match=r"train has ended itself, by SystemExit\(3\)"):
        tf_dsgd.spark.Distributor(1, 0).run(lambda: sys.exit(3))


def test_local_mode_starts_the_same_cluster_without_a_job(capfd):
    got = tf_dsgd.spark.Distributor(2, local_mode=True).run(on_a_cluster)
    assert got[2] == sum(got[3]) == 16


SAVES = """
import sys, time
try:
    time.sleep(0.5)
    print("READY", flush=True)
    time.sleep(600.0)
except KeyboardInterrupt:
    time.sleep(1.0)
    print("SAVED", flush=True)
"""
DRIVER = """
import sys
import tf_dsgd.spark
tf_dsgd.spark.Distributor(1, local_mode=True).run(sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_local_mode_a_script_has_its_time_to_save(tmp_path, number):
    """And nothing is left over, also of a driver that ends at once."""
    script, driver = tmp_path / "train.py", tmp_path / "driver.py"
    script.write_text(SAVES)
    driver.write_text(DRIVER)
    with processes.started(str(driver), str(script)) as process:
        process.line_with("READY")
        family = process.descendants()
        assert len(family) == 4  # the launcher, the script, a worker and a ps
        process.send(number)
        process.line_with("SAVED", 20.0)
        code, _ = process.wait(30.0)
        assert code == -number or code == 128 + number, process.text
        assert processes.gone(family) == []


def test_bad_input_is_refused_by_name(spark):
    Distributor, partitions = tf_dsgd.spark.Distributor, tf_dsgd.spark.partitions
    with pytest.raises(ValueError, match=r"num_workers must be an integer of at least 1.*: 0"):
        Distributor(0)
    with pytest.raises(ValueError, match=r"takes 6 slots of Spark.*local\[4,2\] has 4"):
        Distributor(4).run(print)
    with pytest.raises(TypeError, match="train must be a function or a script's path"):
        Distributor(1).run(3)
    with pytest.raises(ValueError, match=r"no script here at '/nowhere\.py'"):
        Distributor(1).run("/nowhere.py")
    df = spark.createDataFrame([("b", [1.0]), ("c", [1.0, 2.0])], "a string, v array<float>")
    with pytest.raises(ValueError, match=r"has no column 'z'. It has: \['a', 'v'\]"):
        partitions(df, ("z", "a"), 8)
    with pytest.raises(ValueError, match="Column 'a' is of string, which is no number"):
        partitions(df, ("a",), 8)
    with pytest.raises(ValueError, match=r"Column 'v' must hold arrays of one length.*1 to 2"):
        partitions(df, ("v",), 8)
    for batch_size in (0, True, None, 1.0, "8"):
        with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
            partitions(df, ("v",), batch_size)
    with pytest.raises(ValueError, match=r"The DataFrame has no column 'a\.b'"):
        partitions(df, ("a.b",), 8)
    numbers = spark.range(3).toDF("a")
    with pytest.raises(ValueError, match=r"Column 'a' is more than once in \['a', 'a'\]"):
        partitions(numbers, (["a", "a"],), 8)
    for twice in (["a", "b", "a"], ["a", "b", "A"]):  # to Spark these are one, too
        df = numbers.selectExpr("a", "a", "a").toDF(*twice)
        with pytest.raises(ValueError, match=r"several columns that Spark takes for 'a'"):
            partitions(df, (["a", "b"],), 8)
        partitions(df, ("b",), 8)
    for columns in ((), "a", ["a"], ("a", "a", "a", "a"), ([],), (3,), ({"x": "a"},)):
        with pytest.raises(ValueError, match=r"columns? must be|Each of columns must be"):
            partitions(numbers, columns, 8)


def test_partitions_say_what_they_are_and_where_they_can_be_used(spark):
    import tensorflow as tf

    df = spark.range(3).selectExpr("id as a", "id as b", "id as y")
    data = tf_dsgd.spark.partitions(df, (["a", "b"], "y"), 8, shuffle_rows=2)
    assert repr(data) == "partitions(df, (['a', 'b'], 'y'), batch_size=8, shuffle_rows=2)"
    outside = "has no rows here.*is an argument of train"
    for context in (None, tf.distribute.InputContext(2, 0)):
        with pytest.raises(RuntimeError, match=outside):
            data(context)
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))
    with pytest.raises(RuntimeError, match=outside):
        strategy.distribute_datasets_from_function(data)
    for argument in (data, [data], {"a": (1, [data])}):
        with pytest.raises(ValueError, match="needs a function and local_mode=False"):
            tf_dsgd.spark.Distributor(1, local_mode=True).run(print, argument)


def test_a_script_that_fails_for_good_ends_all_with_its_last_words(spark, tmp_path):
    """After as many attempts as a stage has, three here; of a task that may fail once in each."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nopen({str(tmp_path / 'starts')!r}, 'a').write('one ')\n"
        "print('these words')\nsys.exit(3)\n"
    )
    with pytest.raises(Exception, match=r"chief of the training has ended with code 3") as caught:
        tf_dsgd.spark.Distributor(1, 0).run(script)
    assert "Its last words:\nthese words" in str(caught.value)
    assert (tmp_path / "starts").read_text() == "one one one "


@pytest.mark.skipif(os.name != "posix", reason="the fake is a shell script")
def test_java_is_there_and_new_enough(monkeypatch, tmp_path):
    java = tmp_path / "bin/java"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"Java 17 or later, and JAVA_HOME, .* has no java"):
        check_java()
    java.parent.mkdir()
    for version, fails in (("1.8.0_402", True), ("11.0.2", True), ("17.0.1", False), ("21", False)):
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        java.chmod(0o755)
        with contextlib.ExitStack() as stack:
            if fails:
                words = f'Java 17 or later, and JAVA_HOME, .* has openjdk version "{version}"'
                stack.enter_context(pytest.raises(RuntimeError, match=words))
            check_java()


def test_a_session_of_spark_connect_is_refused(monkeypatch):
    """Such a session has no Java context in this process."""
    active = types.SimpleNamespace(getActiveSession=lambda: object())
    monkeypatch.setattr("tf_dsgd.spark.session.SparkSession", active)
    with pytest.raises(RuntimeError, match=r"whose driver is this process.*Spark Connect"):
        session()


@pytest.mark.parametrize(
    ("master", "settings", "want"),
    [
        ("local", {}, 1),
        ("local[4]", {"spark.default.parallelism": "64"}, 4),
        ("local[4, 2]", {}, 4),
        ("local[5]", {"spark.task.cpus": "2"}, 2),
        ("local[*]", {}, 7),
        ("local[*,2]", {"spark.default.parallelism": "64"}, None),
        ("local-cluster[3,3,1024]", {"spark.task.cpus": "2"}, 3),  # the third core is in no slot
        ("spark://host:7077", {}, None),
    ],
)
def test_slots_are_those_that_the_master_has(master, settings, want):
    """`defaultParallelism` is 7, as of Spark on seven cores."""
    context = types.SimpleNamespace(master=master, getConf=lambda: settings, defaultParallelism=7)
    assert slots(context) == want
