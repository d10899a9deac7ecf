"""Every public strategy, in several configurations, and every engine, for the same checks."""

import functools
import os

import keras

import tf_dsgd
from tests import helpers
from tf_dsgd.resuming import TASKS_PER_WORKER


def _downpour(**options):
    return functools.partial(tf_dsgd.DownpourStrategy, **options)


def _softsync(**options):
    return functools.partial(tf_dsgd.SoftsyncStrategy, **options)


def _averaging(outer=None, **options):
    def make(cluster, **more):
        made = None if outer is None else outer()
        return tf_dsgd.PeriodicAveragingStrategy(cluster, outer_optimizer=made, **options, **more)

    return make


# What a new algorithm adds: its class by name, and lines in CONFIGURATIONS.
STRATEGIES = {
    "DownpourStrategy",
    "ElasticAveragingStrategy",
    "PeriodicAveragingStrategy",
    "SoftsyncStrategy",
}

# Those that refuse clusters with ps tasks.
WITHOUT_PS = {"CompressedAsyncStrategy": ["peers"]}

# Which of them these checks are not for, and why; the tests that take their place.
NOT_HERE = {
    "HogwildStrategy": "these checks record schedules, which it refuses of several workers: "
    "tests/keras_api/test_hogwild.py",
    "SandblasterStrategy": "an epoch is several passes over the data, steps are counted in all of "
    "them, and an optimizer plays no part: tests/keras_api/test_batch_methods.py",
}

SPLIT = {"table/.*": tf_dsgd.Rows()}
THRESHOLD = tf_dsgd.compression.Threshold(3.0, entropy=True)

# A name to a function from a cluster to a strategy. The first is the default one.
CONFIGURATIONS = {
    "downpour": _downpour(),
    "downpour_4_4": _downpour(push_every=4, fetch_every=4),
    "downpour_3_5": _downpour(push_every=3, fetch_every=5),
    "downpour_none": _downpour(push_every=2, fetch_every=2, local_rule="none"),
    "downpour_update": _downpour(push_every=2, fetch_every=3, local_rule="optimizer"),
    "downpour_own_rate": _downpour(push_every=2, fetch_every=2, local_rule=tf_dsgd.LocalSGD(0.01)),
    "downpour_scaled": _downpour(staleness_scaling="inverse"),
    "downpour_bfloat16": _downpour(wire_dtype="bfloat16"),
    "downpour_threshold": _downpour(push_every=2, fetch_every=2, compression=THRESHOLD),
    "downpour_warm": _downpour(warm_start_steps=10),
    "downpour_parts": _downpour(model_parallel=tf_dsgd.ModelParallel({".*": 0}, microbatches=2)),
    "downpour_bounded": _downpour(push_every=2, fetch_every=2, max_staleness=1),
    "softsync": _softsync(gradients_per_update=3),
    "softsync_bounded": _softsync(gradients_per_update=2, staleness_scaling=None, max_staleness=0),
    "downpour_adaptive_revision": _downpour(),
    "downpour_adaptive_revision_3_5": _downpour(push_every=3, fetch_every=5, local_rule="none"),
    "downpour_delay_compensated": _downpour(),
    "downpour_delay_compensated_adaptive": _downpour(push_every=2, fetch_every=2),
    "downpour_fasgd": _downpour(),
    "averaging": _averaging(average_every=4),
    "averaging_each_step": _averaging(average_every=1, optimizer_state="local"),
    "averaging_block_momentum": _averaging(
        tf_dsgd.optimizers.BlockMomentum, average_every=3, optimizer_state="reset"
    ),
    "averaging_diloco": _averaging(
        lambda: keras.optimizers.SGD(0.7, momentum=0.5, nesterov=True),
        average_every=2,
        optimizer_state="local",
    ),
    "downpour_rows": _downpour(push_every=2, fetch_every=3, placement=SPLIT),
    "softsync_rows": _softsync(gradients_per_update=3, placement=SPLIT),
    "averaging_rows": _averaging(average_every=4, placement=SPLIT),
    "elastic": functools.partial(tf_dsgd.ElasticAveragingStrategy, average_every=3),
    "elastic_momentum": functools.partial(
        tf_dsgd.ElasticAveragingStrategy, average_every=2, elasticity=0.2
    ),
}

# Each codec, on each strategy that takes it: tests/conformance/test_codecs.py. No more is held back
# than what a linear model still learns with in three epochs.
CODECS = {
    "cast": tf_dsgd.compression.Cast("bfloat16"),
    "ef_sign": tf_dsgd.compression.EFSign(),
    "one_bit": tf_dsgd.compression.OneBit(),
    "power_sgd": tf_dsgd.compression.PowerSGD(1),
    "qsgd": tf_dsgd.compression.QSGD(8, seed=1),
    "threshold": tf_dsgd.compression.Threshold(0.5),
    "top_k": tf_dsgd.compression.TopK(0.5),
    "top_k_momentum": tf_dsgd.compression.TopK(0.5, momentum=0.3),
}
TAKE_CODECS = {
    "downpour": _downpour(push_every=2, fetch_every=2),
    "downpour_update": _downpour(push_every=2, fetch_every=3, local_rule="optimizer"),
    "softsync": _softsync(gradients_per_update=3),
}

if not helpers.ON_CLUSTER or helpers.ps_tasks() == 0:
    STRATEGIES |= set(WITHOUT_PS)
    CONFIGURATIONS["peers"] = functools.partial(
        tf_dsgd.CompressedAsyncStrategy, compression=tf_dsgd.compression.Threshold(0.05)
    )
    TAKE_CODECS["peers"] = tf_dsgd.CompressedAsyncStrategy
else:
    NOT_HERE |= dict.fromkeys(WITHOUT_PS, "it refuses ps tasks: tests/engine/test_peers.py")

# As in CONFIGURATIONS. These count as the configuration does that the name begins with.
WITH_CODECS = {
    f"{strategy}_with_{codec}": functools.partial(make, compression=CODECS[codec])
    for strategy, make in TAKE_CODECS.items()
    for codec in CODECS
}

# What a configuration compiles, where it is not SGD.
OPTIMIZERS = {
    "downpour_adaptive_revision": lambda: tf_dsgd.optimizers.AdaptiveRevision(0.5),
    "downpour_adaptive_revision_3_5": lambda: tf_dsgd.optimizers.AdaptiveRevision(0.5),
    "downpour_delay_compensated": lambda: tf_dsgd.optimizers.DelayCompensatedSGD(0.02),
    "downpour_delay_compensated_adaptive": lambda: tf_dsgd.optimizers.DelayCompensatedSGD(
        0.02, 2.0, mean_square_decay=0.95
    ),
    "downpour_fasgd": lambda: tf_dsgd.optimizers.FASGD(0.1),
    # The mean of c gradients makes a step like that of one.
    "softsync": lambda: keras.optimizers.SGD(0.06),
    "softsync_bounded": lambda: keras.optimizers.SGD(0.04),
    "softsync_rows": lambda: keras.optimizers.SGD(0.06),
    # The mean of workers moves about as far as one of them.
    "averaging": lambda: keras.optimizers.SGD(0.05),
    "averaging_each_step": lambda: keras.optimizers.SGD(0.05, momentum=0.5),
    "elastic": lambda: keras.optimizers.SGD(0.1),
    "elastic_momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.7, nesterov=True),
    "averaging_rows": lambda: keras.optimizers.SGD(0.05),
    "averaging_diloco": lambda: keras.optimizers.AdamW(0.05),
}

# Whose model has a table, split by rows.
WITH_TABLE = {"downpour_rows", "softsync_rows", "averaging_rows"}

# Where several messages make one update: how many. Each of them is one mini-batch.
MESSAGES_PER_UPDATE = {"softsync": 3, "softsync_bounded": 2, "softsync_rows": 3}

# Where each worker runs the optimizer on its own weights, so that iterations are one worker's.
OF_ONE_WORKER = {
    "averaging",
    "averaging_each_step",
    "averaging_block_momentum",
    "averaging_diloco",
    "averaging_rows",
    "elastic",
    "elastic_momentum",
}

# Where workers meet: mini-batches of each between two meetings.
STEPS_PER_MEETING = {
    "averaging": 4,
    "averaging_each_step": 1,
    "averaging_block_momentum": 3,
    "averaging_diloco": 2,
    "averaging_rows": 4,
}

# In a process that has several devices, and on a cluster whose workers are groups of tasks, those
# that take it run with the layer that has weights on the second part of each worker.
IN_PARTS = any(
    os.environ.get(name, "1") != "1" for name in ("TF_DSGD_TEST_DEVICES", TASKS_PER_WORKER)
)
if IN_PARTS:
    PARTS = tf_dsgd.ModelParallel({"ids": 0, "dense.*": 1}, microbatches=2)
    NAMES = (
        "downpour",
        "downpour_update",
        "downpour_threshold",
        "softsync",
        "averaging",
        "elastic",
    )
    CONFIGURATIONS = {
        name: functools.partial(CONFIGURATIONS[name], model_parallel=PARTS) for name in NAMES
    }
    WITH_CODECS = {}

# Under the launcher the same checks run on its worker and ps processes.
DEVICES = 2 if IN_PARTS else 1
ENGINES = helpers.engines(
    local=lambda: tf_dsgd.LocalCluster(2, devices_per_worker=DEVICES),
    simulated=lambda: tf_dsgd.SimulatedCluster(
        3,
        compute_seconds=[1.0, tf_dsgd.Exponential(1.5), 2.25],
        network_seconds=tf_dsgd.Exponential(0.1),
        seed=17,
        devices_per_worker=DEVICES,
    ),
)


def optimizer(configuration):
    """What a configuration's model is compiled with; called in the scope."""
    return OPTIMIZERS.get(without_codec(configuration), lambda: keras.optimizers.SGD(0.02))()


def without_codec(configuration):
    """The name of what a configuration is beside its codec."""
    return configuration.split("_with_")[0]


def make(configuration, engine):
    """A fresh strategy on a fresh cluster."""
    return (CONFIGURATIONS | WITH_CODECS)[configuration](ENGINES[engine]())
