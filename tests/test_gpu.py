"""GPU memory: which of TensorFlow's calls are made, by stand-ins, and one real run on a GPU."""

import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

GPUS = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]


@pytest.fixture
def calls(monkeypatch):
    """TensorFlow with two GPUs that only note what is asked of them."""
    noted = []
    real = tf.config.list_physical_devices

    def devices(device_type=None):
        return GPUS if device_type == "GPU" else real(device_type)

    def growth(device, enable):
        noted.append(("growth", device.name[-1], enable))

    def logical(device, configurations):
        noted.append(("limit", device.name[-1], [c.memory_limit for c in configurations]))

    monkeypatch.setattr(tf.config, "list_physical_devices", devices)
    monkeypatch.setattr(tf.config.experimental, "list_physical_devices", devices)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", growth)
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", logical)
    return noted


def test_growth_is_the_default(calls):
    tf_dsgd.gpu.configure_memory()
    assert calls == [("growth", "0", True), ("growth", "1", True)]


def test_a_limit_bounds_each_gpu(calls):
    """TensorFlow takes growth or a limit for a device, not both, so a limit goes alone."""
    tf_dsgd.gpu.configure_memory(limit_mb=2048)
    assert calls == [("limit", "0", [2048]), ("limit", "1", [2048])]


def test_growth_may_be_declined(calls):
    tf_dsgd.gpu.configure_memory(growth=False)
    assert [call for call in calls if call[0] == "growth" and call[2]] == []
    assert [call for call in calls if call[0] == "limit"] == []


def test_nothing_is_asked_without_gpus(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("there is no GPU to configure")

    real = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda kind=None: [] if kind == "GPU" else real(kind),
    )
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", refuse)
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", refuse)
    tf_dsgd.gpu.configure_memory()
    tf_dsgd.gpu.configure_memory(limit_mb=100)


@pytest.mark.parametrize(
    ("arguments", "function"),
    [
        ({}, (tf.config.experimental, "set_memory_growth")),
        ({"limit_mb": 512}, (tf.config, "set_logical_device_configuration")),
    ],
    ids=["growth", "limit"],
)
def test_too_late_says_what_to_do(calls, monkeypatch, arguments, function):
    """TensorFlow says only that devices cannot be modified; the remedy is to call this earlier."""

    def late(*unused):
        raise RuntimeError("Physical devices cannot be modified after being initialized")

    monkeypatch.setattr(*function, late)
    with pytest.raises(RuntimeError) as caught:
        tf_dsgd.gpu.configure_memory(**arguments)
    message = str(caught.value)
    assert "configure_memory" in message
    assert "before" in message


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


@pytest.mark.gpu
def test_two_workers_share_the_gpus():
    """On a machine with GPUs: growth is on after a strategy is made, and training runs on them."""
    script = (
        "import numpy as np, keras, tensorflow as tf, tf_dsgd\n"
        "gpus = tf.config.list_physical_devices('GPU')\n"
        "strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))\n"
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
