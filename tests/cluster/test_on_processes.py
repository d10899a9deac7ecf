"""The checks of the core, on worker and ps processes that the launcher starts."""

import os
import subprocess
import sys

import pytest

from tests import helpers

SECONDS = 1800  # a deadline; a quiet machine takes less than half of it

ON_CLUSTER = ("backup", "call_sizes", "delay_tolerant", "pipelines", "shards", "wire")
# Two workers: what every strategy owes to `fit`; closed forms, callbacks, what is special here.
CONFORMANCE = ("tests/conformance",)
TWO_WORKERS = (
    "tests/algorithms/test_averaging.py::test_a_period_of_one_is_synchronous_sgd_on_the_joint_batch",
    "tests/algorithms/test_averaging.py::test_equal_data_is_one_worker",
    "tests/algorithms/test_elastic.py::test_forces_keep_the_sum",
    "tests/callbacks/test_monitor_on_engines.py",
    "tests/engine/test_nothing_lost.py",
    "tests/engine/test_bounded_staleness.py::test_on_workers_that_run_at_the_same_time",
    "tests/keras_api/test_progress.py",
    "tests/keras_api/test_running_metrics.py::test_this_epochs_mini_batches_from_the_first_on",
    *(f"tests/cluster/on_cluster/test_{name}.py" for name in ON_CLUSTER),
)
TWO_WORKERS_IN_SECONDS = (
    "tests/engine/test_overlap.py::test_two_workers_overlap",
    "tests/engine/test_overlap.py::test_stopping_stops_every_worker",
    "tests/cluster/on_cluster/test_overlap.py",
)
# The same without ps tasks: each worker holds a part of the weights.
NO_PS = (
    "tests/conformance",
    "tests/algorithms/test_averaging.py::test_a_period_of_one_is_synchronous_sgd_on_the_joint_batch",
    "tests/algorithms/test_averaging.py::test_equal_data_is_one_worker",
    "-k",
    "averaging",
)
JIT_COMPILE = (
    "model[embedding_adagrad]",
    "optimizer[averaging-adam]",
    "what_runs_here_is_not_compiled",
    "what_xla_cannot_compile_is_named",
)
# One worker, periods of 1: plain Keras, with the weights on two shards.
ONE_WORKER = (
    "tests/equivalence/test_models.py",
    *(f"tests/equivalence/test_jit_compile.py::test_{name}" for name in JIT_COMPILE),
    "tests/equivalence/test_periods.py",
    "tests/equivalence/test_update_based.py",
    "tests/algorithms/test_downpour_trace.py",
    "tests/keras_api/test_steps_of_their_own.py",
)
ONE_WORKER_IN_SECONDS = (
    "tests/engine/test_overlap.py::test_input_overlaps_compute",
    "tests/cluster/on_cluster/test_overlap.py",
)

# Of a product of configurations, the covering array that the fast tier runs; or all, and of what
# differs in arithmetic alone, which threads go through, too, everything.
WHICH = ("-m", "not slow")
if os.environ.get("TF_DSGD_LONG"):
    WHICH = ()
    TWO_WORKERS += ("tests/keras_api/test_callbacks.py", "tests/keras_api/test_compile_options.py")
    ONE_WORKER += (
        "tests/equivalence/test_optimizers.py",
        "tests/equivalence/test_staleness_scaling.py",
    )

BESIDE_OTHERS = pytest.mark.beside_others


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    ("workers", "ps", "tests"),
    [
        # These measure no seconds; most of the time is the chief's, which traces functions.
        pytest.param(2, 2, CONFORMANCE, id="conformance", marks=BESIDE_OTHERS),
        pytest.param(2, 0, NO_PS, id="no ps", marks=BESIDE_OTHERS),
        pytest.param(2, 2, TWO_WORKERS, id="two", marks=BESIDE_OTHERS),
        pytest.param(1, 2, ONE_WORKER, id="one", marks=BESIDE_OTHERS),
        pytest.param(2, 2, TWO_WORKERS_IN_SECONDS, id="two, in seconds"),
        pytest.param(1, 2, ONE_WORKER_IN_SECONDS, id="one, in seconds"),
    ],
)
def test_the_core_on_processes(workers, ps, tests):
    launch = ["-m", "tf_dsgd.launch", "--workers", str(workers), "--ps", str(ps)]
    pytest_arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *WHICH, *tests]
    run = subprocess.run(
        [sys.executable, *launch, *pytest_arguments],
        cwd=helpers.ROOT,
        # Where the pytest that runs this test writes its results is not for the one in there.
        env=helpers.python_env(CUDA_VISIBLE_DEVICES="", PYTEST_ADDOPTS=""),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
