"""recommender.py runs and reports; what it counts and its limit are right."""

import json
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests.packaging.repository import ROOT
from tests.packaging.test_benchmarks import run_benchmark


@pytest.fixture
def benchmarks(monkeypatch):
    """The programs of that directory can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.slow
def test_recommender_prints_tables_and_says_who_is_left_out(tmp_path, benchmarks):
    import traffic

    written = tmp_path / "results.json"
    output = run_benchmark(
        "recommender.py",
        *("--rows", "1000", "--optimizers", "adam", "--periods", "20", "--repetitions", "1"),
        *("--steps", "40", "--seconds", "0.1", "--only", "ours, split, 20|alone|Server"),
        *("--json", str(written)),
    )
    assert "Left out: tf_keras ParameterServerStrategy: its Python was not given" in output
    assert "| kB/mini-batch | peak of chief, MB | peak of ps, MB | peak of workers, MB |" in output
    cluster, local = (group["results"] for group in json.loads(written.read_text())["groups"])
    (ours,), (bare,) = cluster["ours, split, 20"], local["TensorFlow alone, 20"]
    assert (set(cluster), set(local)) == ({"ours, split, 20"}, {"TensorFlow alone, 20"})
    assert ours["steps"] % 40 == 0 and bare["steps"] % 20 == 0
    for outcome, roles in ((ours, {"chief", "ps", "workers"}), (bare, {"chief"})):
        assert set(outcome["peak_bytes"]) == set(outcome["cpu_seconds"]) == roles
        assert all(50e6 < peak < 5e9 for peak in outcome["peak_bytes"].values())
        speed = 1024 * outcome["steps"] / outcome["seconds"]
        assert outcome["examples_per_second"] == pytest.approx(speed)
    assert ("sent_bytes" in ours) == traffic.can_be_counted()
    if "sent_bytes" in ours:
        # At least the ids and labels of each mini-batch go from the chief to a worker.
        assert ours["sent_bytes"] / ours["steps"] > 1024 * (8 + 8 + 4)


SEND = """
import socket, sys
receiving = socket.create_server(("127.0.0.1", 0))
sending = socket.create_connection(receiving.getsockname())
arriving, _ = receiving.accept()
import traffic
before = traffic.counted()
for _ in range(100):
    sending.sendall(bytes(10_000))
    left = 10_000
    while left:
        left -= len(arriving.recv(left))
print(traffic.counted() - before)
"""


def test_bytes_are_those_that_were_sent(benchmarks):
    """And not those of this process, which sends some meanwhile."""
    import traffic

    if not traffic.can_be_counted():
        pytest.skip("this machine makes no network namespace")
    command = traffic.alone([sys.executable, "-c", SEND])
    environment = {"PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        with socket.create_server(("127.0.0.1", 0)) as here:
            sending = socket.create_connection(here.getsockname())
            arriving, _ = here.accept()
            with sending, arriving:
                while process.poll() is None:
                    sending.sendall(bytes(10_000))
                    arriving.recv(10_000)
        output = process.stdout.read()
    assert 1_000_000 <= int(output) < 1_100_000
    assert traffic.counted() is None


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_the_limit_updates_as_keras_does(benchmarks, name):
    """Rows that have gradients, and dense weights."""
    import bare_recommender
    import recommender_task

    first = np.random.default_rng(0).standard_normal((6, 3)).astype("float32")
    gradients = np.random.default_rng(1).standard_normal((3, 6, 3)).astype("float32")
    made = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam"}[name]
    optimizer = getattr(keras.optimizers, made)(recommender_task.RATES[name])
    expected = keras.Variable(first)
    dense, rows = (bare_recommender.Weight(tf.constant(first), name) for _ in range(2))
    touched = tf.constant([4, 1])
    for step, gradient in enumerate(gradients, 1):
        optimizer.apply([tf.constant(gradient)], [expected])
        dense.update(tf.constant(gradient), tf.constant(float(step)))
        rows.update_rows(touched, tf.gather(gradient, touched), tf.constant(float(step)))
    np.testing.assert_allclose(dense.value, expected, rtol=1e-5)
    np.testing.assert_allclose(rows.value.numpy()[[4, 1]], expected.numpy()[[4, 1]], rtol=1e-5)
    np.testing.assert_array_equal(rows.value.numpy()[[0, 2, 3, 5]], first[[0, 2, 3, 5]])


def test_what_a_prefetch_could_gain_is_a_ratio_of_one_repetition(benchmarks):
    import prefetch

    def outcome(speed, seconds):
        cpu = {"chief": seconds / 4, "workers": 3 * seconds / 4}
        return {"examples_per_second": speed, "cpu_seconds": cpu, "steps": 100}

    result = {
        "group": "cluster",
        "rows": 1_000_000,
        "period": 20,
        "read": [outcome(100.0, 1.0), outcome(50.0, 2.0)],
        "unread": [outcome(120.0, 0.5), outcome(50.0, 1.5)],
    }
    line = prefetch.report([result]).splitlines()[-1]
    speeds = "75 | 1.10 (1.00-1.20) | 15.00 (10.00-20.00) | 0.62 (0.50-0.75) |"
    assert line == f"| cluster | 1,000,000 | 20 | {speeds}"


def test_rows_that_cost_nothing_are_constants(benchmarks, monkeypatch):
    import recommender_contenders

    from tf_dsgd.strategies.rows import reading

    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(2), placement={"table/.*": tf_dsgd.Rows()}
    )
    with strategy.scope():
        ids = keras.Input((), dtype="int32")
        model = keras.Model(ids, keras.layers.Embedding(9, 2, "ones", name="table")(ids))
    monkeypatch.setattr(reading, "from_shards", reading.from_shards)  # put back at the end
    recommender_contenders.read_nothing()
    np.testing.assert_array_equal(model(np.arange(9)), np.full((9, 2), 0.05, "float32"))
    np.testing.assert_array_equal(model.get_weights()[0], np.ones((9, 2)))


@pytest.mark.slow
def test_tensorflow_alone_on_two_ps_loses_no_step(benchmarks):
    """In a loop and one behind the other; the program counts them on a ps."""
    output = run_benchmark(
        "bare_tables.py",
        *("--rows", "1000", "--steps_per_call", "1,2", "--repetitions", "1", "--seconds", "0.3"),
    )
    names = [line.split("|")[1].strip() for line in output.splitlines() if line.startswith("|")]
    assert names == ["steps of a call", "---", "1", "2", "2, unrolled"]


@pytest.mark.slow
def test_rows_for_nothing_are_not_read(benchmarks):
    output = run_benchmark(
        "prefetch.py",
        *("--groups", "local", "--periods", "20", "--rows", "1000", "--repetitions", "1"),
        *("--steps", "40", "--seconds", "0.1"),
    )
    assert "| local | 1,000 | 20 |" in output
