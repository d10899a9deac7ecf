"""These tests run on four devices, where tests/equivalence/test_model_parallel.py starts them.

Every other test sees one CPU, as users do. Some run on a cluster, too, where a worker is two tasks.
"""

import os

import tensorflow as tf

from tests import helpers

HERE = "TF_DSGD_TEST_DEVICES"

collect_ignore_glob = [] if os.environ.get(HERE) or helpers.ON_CLUSTER else ["test_*.py"]

if os.environ.get(HERE):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * int(os.environ[HERE]),
    )
