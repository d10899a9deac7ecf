"""GPU memory: which of TensorFlow's calls are made, by stand-ins, and real runs on a GPU."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd import arithmetic

pytestmark = pytest.mark.medium

# Runs a statement in a fresh process, where no device is open yet, on a TensorFlow with two GPUs
# that only note what is asked of them.
FAKE = """
import json
import tensorflow as tf
import tf_dsgd

noted = []
gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{{i}}", "GPU") for i in range({gpus})]
real = tf.config.list_physical_devices

def growth(device, enable):
    noted.append(["growth", int(device.name[-1]), enable])

def limit(device, configurations):
    noted.append(["limit", int(device.name[-1]), [c.memory_limit for c in configurations]])

tf.config.list_physical_devices = lambda kind=None: gpus if kind == "GPU" else real(kind)
tf.config.experimental.list_physical_devices = tf.config.list_physical_devices
tf.config.experimental.set_memory_growth = growth
tf.config.set_logical_device_configuration = limit
tf.config.get_logical_device_configuration = lambda device: None
{statement}
print("NOTED", json.dumps(noted))
"""


def noted(statement, gpus=2):
    process = helpers.python(FAKE.format(statement=statement, gpus=gpus))
    assert process.returncode == 0, process.stderr
    (line,) = [row for row in process.stdout.splitlines() if row.startswith("NOTED")]
    return json.loads(line.removeprefix("NOTED"))


def test_growth_is_the_default():
    assert noted("tf_dsgd.gpu.configure_memory()") == [["growth", 0, True], ["growth", 1, True]]


@pytest.mark.slow
def test_every_strategy_switches_growth_on_once():
    make = "tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2));"
    assert noted(make * 2) == [["growth", 0, True], ["growth", 1, True]]


def test_a_cluster_switches_growth_on():
    """The optimizer, another argument of the strategy, opens the devices: then it is too late."""
    statement = (
        "import keras\n"
        "tf_dsgd.PeriodicAveragingStrategy(\n"
        "    tf_dsgd.LocalCluster(2), average_every=4, outer_optimizer=keras.optimizers.SGD(0.7))"
    )
    assert noted(statement) == [["growth", 0, True], ["growth", 1, True]]


@pytest.mark.slow
def test_a_limit_replaces_what_a_cluster_chose():
    """TensorFlow takes one of the two for a device."""
    statement = "tf_dsgd.LocalCluster(2); tf_dsgd.gpu.configure_memory(limit_mb=2048)"
    assert [note for note in noted(statement) if note[1] == 0] == [
        ["growth", 0, True],
        ["growth", 0, False],
        ["limit", 0, [2048]],
    ]


@pytest.mark.slow
def test_a_users_choice_is_kept():
    """TensorFlow takes growth or a limit for a device, not both, so a limit goes alone."""
    statement = (
        "tf_dsgd.gpu.configure_memory(limit_mb=2048)\n"
        "tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))"
    )
    assert noted(statement) == [["limit", 0, [2048]], ["limit", 1, [2048]]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "statement", "after"),
    [
        ("true", "tf_dsgd.gpu.configure_memory(growth=False)", "false"),
        ("true", "tf_dsgd.gpu.configure_memory(limit_mb=100)", "false"),
        ("false", "tf_dsgd.gpu.configure_memory()", "true"),
        ("false", "tf_dsgd.LocalCluster(2)", "false"),
        ("true", "tf_dsgd.LocalCluster(2)", "true"),
        (None, "tf_dsgd.gpu.configure_memory(growth=False)", None),
    ],
)
def test_what_is_said_counts_beside_the_environment(before, statement, after):
    """TensorFlow takes that before what was configured, and the launcher sets it."""
    name = "TF_FORCE_GPU_ALLOW_GROWTH"
    line = f"import os; os.environ.update({{{name!r}: {before!r}}}); " if before else ""
    noted(f"{line}{statement}; import os; assert os.environ.get({name!r}) == {after!r}")


def test_nothing_is_asked_without_gpus():
    statement = (
        "tf_dsgd.gpu.configure_memory()\n"
        "tf_dsgd.gpu.configure_memory(limit_mb=100)\n"
        "tf_dsgd.gpu.configure_memory(growth=False)"
    )
    assert noted(statement, gpus=0) == []


@pytest.mark.parametrize("arguments", [{}, {"limit_mb": 512}], ids=["growth", "limit"])
def test_too_late_says_what_to_do(monkeypatch, arguments):
    """Devices are open in this process; the remedy is to call it earlier."""
    tf.constant(1.0)
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    real = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda kind=None: [gpu] if kind == "GPU" else real(kind),
    )
    with pytest.raises(RuntimeError, match=r"configure_memory.*(before|right after)"):
        tf_dsgd.gpu.configure_memory(**arguments)


def test_import_initialises_no_device():
    """Importing must leave room for a later `configure_memory`: no context, no warning."""
    process = helpers.python(
        "import warnings; warnings.simplefilter('error')\n"
        "import tf_dsgd\n"
        "from tensorflow.python.eager import context\n"
        "print('INITIALISED', context.context()._initialized)\n",
    )
    assert process.returncode == 0, process.stderr
    assert "INITIALISED False" in process.stdout


def test_variables_are_written_by_what_gpus_can():
    """Of these types TensorFlow writes rows of a variable on the GPU by int32 numbers alone.

    Seen of TensorFlow 2.21: `ResourceScatterUpdate` has no kernel for bools and int64 there, and
    `ResourceApplyGradientDescent` none for bfloat16.
    """
    for dtype in (tf.bool, tf.bfloat16):
        variable = tf.Variable(tf.zeros([3, 2], dtype))

        @tf.function
        def written(variable=variable):
            row = tf.constant(1, tf.int64)
            arithmetic.set_row(variable, row, tf.ones([2], variable.dtype))
            if variable.dtype.is_floating:
                arithmetic.descend(variable, -1.0, tf.ones_like(variable))

        (scatter,) = (
            op
            for op in written.get_concrete_function().graph.get_operations()
            if op.type == "ResourceScatterUpdate"
        )
        assert scatter.get_attr("Tindices") == tf.int32
        kinds = {op.type for op in written.get_concrete_function().graph.get_operations()}
        assert "ResourceApplyGradientDescent" not in kinds
        written()
    np.testing.assert_array_equal(variable.numpy().astype(float), [[1, 1], [2, 2], [1, 1]])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "strategy", ["DownpourStrategy(cluster)", "PeriodicAveragingStrategy(cluster, average_every=4)"]
)
def test_two_workers_share_the_gpus(strategy):
    """On a machine with GPUs: growth is on after a strategy is made, and training runs on them."""
    script = (
        "import numpy as np, keras, tensorflow as tf, tf_dsgd\n"
        "gpus = tf.config.list_physical_devices('GPU')\n"
        "cluster = tf_dsgd.LocalCluster(2)\n"
        f"strategy = tf_dsgd.{strategy}\n"
        "assert all(tf.config.experimental.get_memory_growth(g) for g in gpus)\n"
        "with strategy.scope():\n"
        "    layers = [keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)]\n"
        "    model = keras.Sequential(layers)\n"
        "    model.compile(keras.optimizers.SGD(0.01), 'mse')\n"
        "x = np.ones((256, 8), 'float32')\n"
        "model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)\n"
        "assert strategy.steps == 64\n"
        "used = tf.config.experimental.get_memory_info('GPU:0')['peak']\n"
        "assert used > 0, used\n"
        "print('DONE')\n"
    )
    process = helpers.python(script, timeout=100)
    assert process.returncode == 0, process.stderr
    assert "DONE" in process.stdout


def test_growth_after_a_limit_says_what_to_do(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["a GPU"])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda _: ["of 100 MiB"])
    monkeypatch.setattr("tf_dsgd._tf.devices_initialised", lambda: False)
    with pytest.raises(RuntimeError, match=r"limit of GPU memory.* Leave this call out"):
        tf_dsgd.gpu.configure_memory()


def test_gpus_that_are_hidden_are_no_workers(monkeypatch):
    here = tf_dsgd.LocalCluster()._count()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: ["a GPU"] * (here + 1))
    assert tf_dsgd.LocalCluster(1)._count() == 1
    assert tf_dsgd.LocalCluster()._count() == here + 1
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: [])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert tf_dsgd.LocalCluster()._count() == cores
