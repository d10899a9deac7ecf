"""Replicas over several devices: what needs such devices is run in a process that has four."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.equivalence import twin
from tf_dsgd.engine import devices
from tf_dsgd.strategies.parts import cutting


@pytest.mark.slow
@pytest.mark.timeout(1060)  # one test here, and all tests of a folder there
@pytest.mark.parametrize("tier", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_four_devices(tier):
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", tier]
    run = subprocess.run(
        [
            sys.executable,
            *arguments,
            "tests/equivalence/on_devices",
            "tests/conformance/test_fit.py",
        ],
        cwd=helpers.ROOT,
        env=helpers.python_env(
            CUDA_VISIBLE_DEVICES="", PYTEST_ADDOPTS="", TF_DSGD_TEST_DEVICES="4"
        ),
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


ONE = tf_dsgd.LocalCluster(1)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "parts must be a dict"),
        ("encoder", "parts must be a dict"),
        ([("a", 0)], "parts must be a dict"),
        ({1: 0}, "which are strings"),
        ({"(": 0}, "no regular expression"),
        ({"a": -1}, "integers of at least 0"),
        ({"a": True}, "integers of at least 0"),
        ({"a": 0.0}, "integers of at least 0"),
        ({"a": None}, "integers of at least 0"),
    ],
)
def test_wrong_parts_are_named(parts, words):
    with pytest.raises((TypeError, ValueError), match=words):
        tf_dsgd.ModelParallel(parts)


@pytest.mark.parametrize("microbatches", [0, -1, True, 1.5, "2", None])
def test_wrong_microbatches_are_named(microbatches):
    with pytest.raises(ValueError, match=r"microbatches must be .*Received: "):
        tf_dsgd.ModelParallel({"a": 0}, microbatches=microbatches)


def test_parts_are_a_value():
    one = tf_dsgd.ModelParallel({"a": np.int64(1)}, microbatches=2)
    assert one == tf_dsgd.ModelParallel({"a": 1}, microbatches=2)
    assert one.parts == {"a": 1} and type(one.parts["a"]) is int
    assert one != tf_dsgd.ModelParallel({"a": 1})


SPLIT = tf_dsgd.ModelParallel({"a": 0, "c": 1})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tf_dsgd.DownpourStrategy(ONE, model_parallel={"a": 0}), "tf_dsgd.ModelParallel"),
        (lambda: tf_dsgd.DownpourStrategy(ONE, model_parallel=SPLIT), "names part 1, and a worker"),
        (
            lambda: tf_dsgd.DownpourStrategy(
                tf_dsgd.TFCluster(tf.train.ClusterSpec({"worker": ["h:1"], "ps": ["h:2"]})),
                model_parallel=SPLIT,
            ),
            r"names part 1, and a worker of TFCluster\(.* Give the cluster tasks_per_worker=2",
        ),
        (
            lambda: tf_dsgd.DownpourStrategy(
                ONE,
                model_parallel=tf_dsgd.ModelParallel({"a": 0}),
                placement={"table/.*": tf_dsgd.Rows()},
            ),
            "model_parallel and placement do not go together",
        ),
        (lambda: tf_dsgd.HogwildStrategy(ONE, model_parallel=SPLIT), "HogwildStrategy has no"),
        (lambda: tf_dsgd.SandblasterStrategy(ONE, model_parallel=SPLIT), "Sandblaster.* has no"),
        (
            lambda: tf_dsgd.DownpourStrategy(
                tf_dsgd.TFCluster(
                    tf.train.ClusterSpec({"worker": ["h:1", "h:2"], "ps": ["h:3"]}),
                    tasks_per_worker=2,
                ),
                model_parallel=tf_dsgd.ModelParallel({"a": 2}),
            ),
            r"names part 2, and a worker of TFCluster\(.* Give the cluster tasks_per_worker=3",
        ),
        (lambda: tf_dsgd.LocalCluster(1, devices_per_worker=0), "devices_per_worker must be"),
        (lambda: tf_dsgd.SimulatedCluster(1, devices_per_worker=65), "devices_per_worker must be"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_devices_that_come_too_late_are_named():
    tf.constant(0)  # opens them
    if len(tf.config.list_logical_devices("CPU")) > 1:
        pytest.skip("this process has several")
    for cluster in (tf_dsgd.LocalCluster, tf_dsgd.SimulatedCluster):
        with pytest.raises(RuntimeError, match=r"devices_per_worker=2 needs .*has opened 1"):
            tf_dsgd.DownpourStrategy(cluster(1, devices_per_worker=2))


def test_more_devices_than_there_are_of_a_kind_are_named():
    words = "devices_per_worker=3 needs as many devices of one kind. Received: 2, GPU:0, GPU:1"
    with pytest.raises(ValueError, match=words):
        devices.of_parts(["GPU:0", "GPU:1"], 1, 3)
    assert devices.of_parts(["GPU:0", "GPU:1", "GPU:2"], 2, 2) == [
        ["GPU:0", "GPU:1"],
        ["GPU:2", "GPU:0"],
    ]


def two_layers(loss="mse", jit_compile=False, **options):
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, "tanh", name="a", **options),
            keras.layers.Dense(1, name="c"),
        ]
    )
    model.compile("sgd", loss, jit_compile=jit_compile)
    return model


class Bare(keras.Model):
    """Neither sequential nor functional."""

    def __init__(self):
        super().__init__()
        self.a = keras.layers.Dense(1, name="a")

    def call(self, inputs):
        return self.a(inputs)


def bare():
    model = Bare()
    model.compile("sgd", "mse")
    return model


def two_outputs():
    keras.utils.set_random_seed(4)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, "tanh", name="a")(inputs)
    outputs = [keras.layers.Dense(n, name=name)(hidden) for n, name in ((1, "u"), (2, "v"))]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["mse", "mae"], metrics=[["mae"], ["mse"]])
    return model


def test_logs_of_each_output_where_pieces_are_of_unequal_size():
    """Of 10 examples 3, 3 and 4, and of the last 8 others; Keras counts a loss by mini-batches."""
    laid = tf_dsgd.ModelParallel({".*": 0}, microbatches=3)
    x = np.random.default_rng(0).standard_normal((48, 5)).astype("float32")
    data = {"x": x, "y": [x[:, :1], x[:, 1:3]], "batch_size": 10, "epochs": 2, "verbose": 0}
    expected = two_outputs().fit(**data, shuffle=False).history
    with tf_dsgd.DownpourStrategy(ONE, model_parallel=laid).scope():
        model = two_outputs()
    found = model.fit(**data, shuffle=False).history
    assert found.keys() == expected.keys() and {"u_loss", "v_loss"} < found.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-6, err_msg=name)


def a_mean_of_ones_own(y, predicted):
    return keras.ops.mean(keras.ops.square(y - predicted))


def test_a_loss_of_one_number_is_taken_for_a_mean_and_said_so(capsys):
    laid = tf_dsgd.ModelParallel({".*": 0}, microbatches=3)
    strategy = tf_dsgd.DownpourStrategy(ONE, model_parallel=laid)
    twin.assert_same_as_plain(lambda: two_layers(a_mean_of_ones_own), strategy, *twin.data())
    assert capsys.readouterr().err.count("'a_mean_of_ones_own' gives one number for a batch") == 1


NO_MEAN = keras.losses.MeanSquaredError(reduction="sum")


@pytest.mark.parametrize(
    ("make", "value", "words"),
    [
        (two_layers, {"a": 0, "nobody": 0}, r"\['nobody'\].* no layer .*'a', 'c'"),
        (two_layers, {"sequential.*/kernel": 0}, "no layer of the model"),
        (lambda: two_layers(jit_compile=True), {"a": 0}, "jit_compile=True does not go with"),
        (lambda: two_layers(NO_MEAN), {"a": 0}, "reduction='sum'"),
        (lambda: two_layers(keras.losses.Dice()), {"a": 0}, "Dice is a quotient of sums"),
        (lambda: two_layers("dice"), {"a": 0}, "Dice is a quotient of sums"),
        (lambda: two_layers("Dice"), {"a": 0}, "Dice is a quotient of sums"),
        (lambda: two_layers(keras.losses.tversky), {"a": 0}, "Tversky is a quotient of sums"),
        (lambda: two_layers(["tversky"]), {"a": 0}, "Tversky is a quotient of sums"),
        (lambda: two_layers("circle"), {"a": 0}, "Circle compares all pairs"),
        (lambda: two_layers(keras.losses.Circle()), {"a": 0}, "Circle compares all pairs"),
        (lambda: two_layers(activity_regularizer="l2"), {"a": 0}, "activity_regularizer of 'a'"),
        (bare, "auto", "sequential or functional"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(make, value, words):
    laid = tf_dsgd.ModelParallel(value, microbatches=2)
    strategy = tf_dsgd.DownpourStrategy(ONE, model_parallel=laid)
    with strategy.scope():
        model = make()
    with pytest.raises(ValueError, match=words):
        model.fit(*twin.data(), batch_size=8, verbose=0)


def test_a_mini_batch_of_fewer_examples_than_pieces_is_named():
    laid = tf_dsgd.ModelParallel({"a": 0}, microbatches=4)
    strategy = tf_dsgd.DownpourStrategy(ONE, model_parallel=laid)
    with strategy.scope():
        model = two_layers()
    x, y = twin.data()
    with pytest.raises(tf.errors.InvalidArgumentError, match="microbatches=4 cuts a mini-batch"):
        model.fit(x[:11], y[:11], batch_size=8, verbose=0)  # the last has three


def test_a_step_that_is_a_function_is_refused():
    strategy = tf_dsgd.DownpourStrategy(ONE, model_parallel=tf_dsgd.ModelParallel({"a": 0}))
    with strategy.scope():
        model = two_layers()

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch))
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    data = tf.data.Dataset.from_tensors(tf.zeros([2, 5]))
    batch = next(iter(strategy.experimental_distribute_dataset(data)))
    with pytest.raises(ValueError, match="this step is a function"):
        strategy.run(step, (batch,))


@pytest.mark.parametrize(
    ("costs", "parts", "ends"),
    [
        ([1, 1, 1, 3], 2, [3, 4]),
        ([9, 1, 1, 1], 2, [1, 4]),
        ([2, 2, 2, 2], 4, [1, 2, 3, 4]),
        ([1, 5, 1, 5, 1], 3, [2, 4, 5]),
    ],
)
def test_auto_makes_the_largest_part_as_small_as_can_be(costs, parts, ends):
    """By hand; and no other cut has a smaller largest part."""
    assert cutting.balanced(costs, parts) == ends
