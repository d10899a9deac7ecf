"""The checks of the core, on worker and ps processes that the launcher starts."""

import os
import subprocess
import sys

import pytest

from tests import helpers

SECONDS = 1800  # a deadline; a quiet machine takes less than half of it
LONG = bool(os.environ.get("TF_DSGD_LONG"))


def of(file, *names):
    """These tests of a file; all of it if there are none, or if all are asked for."""
    path = f"tests/{file}.py"
    return tuple(f"{path}::test_{name}" for name in names) if names and not LONG else (path,)


# A test takes some seconds here, most of them the chief's, and arithmetic is as it is on threads:
# of a function with parameters those run here whose messages, or whose variables, differ.
ON_CLUSTER = (
    "backup",
    "call_sizes",
    "compression",
    "delay_tolerant",
    "hogwild",
    "metrics",
    "pipelines",
    "shards",
    "tables",
    "wire",
)
# Two workers: what every strategy owes to `fit`; closed forms, callbacks, what is special here.
CONFORMANCE = ("tests/conformance",)
AVERAGING = (
    "tests/algorithms/test_averaging.py::test_a_period_of_one_is_synchronous_sgd_on_the_joint_batch",
    "tests/algorithms/test_averaging.py::test_equal_data_is_one_worker",
)
TWO_WORKERS = (
    *AVERAGING,
    "tests/algorithms/test_elastic.py::test_forces_keep_the_sum",
    "tests/callbacks/test_monitor_on_engines.py",
    *of(
        "engine/test_nothing_lost",
        "momentum_one_is_an_exact_counter",
        "the_slot_holds_every_gradient_whatever_the_periods[3-5]",
        "update_based_changes_all_arrive",
        "every_message_is_in_one_collection[half]",
        "adam_counts_its_updates",
        "metrics_count_every_sample_once",
        "batch_norm_statistics_stay_finite_and_right",
    ),
    "tests/equivalence/test_models.py::test_an_embedding_row_that_is_never_read_stays",
    # Each strategy, and each bound.
    *(
        f"tests/engine/test_bounded_staleness.py::test_on_workers_that_run_at_the_same_time{case}"
        for case in ([""] if LONG else ["[downpour-0]", "[downpour_2_3-1]", "[softsync-3]"])
    ),
    *of("engine/test_frozen", "all_workers_have_what_was_written"),
    "tests/keras_api/test_own_variables.py::test_each_worker_has_its_own",
    "tests/keras_api/test_progress.py",
    *of("cluster/on_cluster/test_overlap", *(f"periods[periods{n}]" for n in (0, 2, 4))),
    *(f"tests/cluster/on_cluster/test_{name}.py" for name in ON_CLUSTER),
)
TWO_WORKERS_IN_SECONDS = (
    "tests/engine/test_overlap.py::test_two_workers_overlap",
    "tests/engine/test_overlap.py::test_stopping_stops_every_worker",
)
# The same without ps tasks: each worker holds a part of the weights.
AVERAGED = "test_every_row_counts_what_named_it_while_all_else_is_averaged"
HALF_SYNC = f"tests/cluster/on_cluster/test_tables.py::{AVERAGED}"
NO_PS = ("tests/conformance", *AVERAGING, HALF_SYNC, "-k", "averag")
# And with workers that send to one another, for which a process is connected anew.
PEERS = ("tests/cluster/on_cluster/test_peers.py", "tests/conformance", "-k", "peers")
ONE_PEER = ("tests/cluster/on_cluster/test_peers.py::test_one_worker_is_one_thread",)
# Models whose gradients are rows, or several; which change what no optimizer does; and whose steps
# are their own, or made late.
MODELS = (
    "dropout",
    "batch_norm",
    "embedding",
    "embedding_adam",
    "two_inputs",
    "two_outputs",
    "subclassed",
    "unbuilt",
    "own_train_step",
    "stateless_logs",
    "frozen_layer",
)
JIT_COMPILE = (
    "model[embedding_adagrad]",
    "optimizer[averaging-adam]",
    "what_runs_here_is_not_compiled",
    "what_xla_cannot_compile_is_named",
)
# One worker, periods of 1: plain Keras, with the weights on two shards.
ONE_WORKER = (
    *of(
        "equivalence/test_models",
        *(f"model[{name}-cluster]" for name in MODELS),
        "moving_statistics_moved",
        "class_and_sample_weights_change_the_same_steps",
        "validation_logs_equal_plain_ones",
    ),
    *of(
        "equivalence/test_tables",
        "one_worker_is_plain_keras_on_dense_gradients",
    ),
    *of(
        "equivalence/test_half_sync",
        "one_worker_is_plain_keras_on_dense_gradients[adagrad-cluster-average]",
    ),
    *(f"tests/equivalence/test_jit_compile.py::test_{name}" for name in JIT_COMPILE),
    *of(
        "equivalence/test_periods",
        "sgd_is_plain_sgd_at_any_period[3-cluster]",
        "a_local_rate_of_zero_is_the_rule_none",
        "a_schedule_follows_mini_batches_not_updates[optimizer--17.0]",
        "adam_corrects_its_bias_by_updates[none]",
    ),
    *of(
        "equivalence/test_schedules",
        "the_optimizer_of_another_compile_begins_at_its_first_step[downpour]",
        "two_models_trained_in_turn_have_a_schedule_each",
    ),
    *of(
        "equivalence/test_multi_optimizer",
        "sgd_of_two_rates_is_plain_keras_at_any_period[clipnorm-(1, 3)]",
    ),
    *of(
        "equivalence/test_update_based",
        "one_worker_equals_plain_keras[nesterov-cluster]",
        "one_worker_equals_plain_keras[adamw_clipped-cluster]",
        "one_worker_equals_plain_keras[schedule-cluster]",
        "one_worker_with_longer_periods_still_equals_plain_keras[adam]",
    ),
    *of(
        "algorithms/test_downpour_trace",
        "periods_of_two_and_three[sgd-local]",
        "periods_of_two_and_three[none-local]",
        "a_zero_gradient_changes_nothing",
        "the_local_rate_may_differ_from_the_servers",
        "reading_the_weights_drains",
    ),
    *of("engine/test_frozen", "one_worker_is_plain_keras_whoever_writes_to_frozen_layers[False]"),
    "tests/keras_api/test_steps_of_their_own.py",
)
ONE_WORKER_IN_SECONDS = (
    "tests/engine/test_overlap.py::test_input_overlaps_compute",
    "tests/cluster/on_cluster/test_overlap.py::test_push_overlaps_compute",
)

# One worker of two tasks, each with a part of the layers: plain Keras, too.
TWO_TASKS = (
    *of(
        "equivalence/on_devices/test_split",
        *(f"a_split_is_plain_keras[{name}]" for name in ("several", "embedding")),
        "microbatches_have_the_gradient_of_the_mini_batch[{'global_clipnorm': 0.1}-3]",
    ),
    "tests/equivalence/on_devices/test_combined.py",
    "tests/cluster/on_cluster/test_groups.py",
)

# Two of two tasks each, where one does the other's work.
FOUR_TASKS = ("tests/cluster/on_cluster/test_two_groups.py", "tests/conformance/test_fit.py")

# Of a product of configurations, the covering array that the fast tier runs; or all, and of what
# differs in arithmetic alone, which threads go through, too, everything.
WHICH = ("-m", "not slow")
if LONG:
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
        pytest.param(2, 0, PEERS, id="peers", marks=BESIDE_OTHERS),
        pytest.param(1, 0, ONE_PEER, id="one peer", marks=BESIDE_OTHERS),
        pytest.param(2, 2, TWO_WORKERS, id="two", marks=BESIDE_OTHERS),
        pytest.param(1, 2, ONE_WORKER, id="one", marks=BESIDE_OTHERS),
        pytest.param(2, 2, TWO_WORKERS_IN_SECONDS, id="two, in seconds"),
        pytest.param(1, 2, ONE_WORKER_IN_SECONDS, id="one, in seconds"),
    ],
)
def test_the_core_on_processes(workers, ps, tests):
    assert_pass(tests, "--workers", str(workers), "--ps", str(ps))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 30)
@BESIDE_OTHERS
@pytest.mark.parametrize(("tasks", "tests"), [(2, TWO_TASKS), (4, FOUR_TASKS)], ids=["one", "two"])
def test_workers_of_two_tasks(tasks, tests):
    options = ("--tasks_per_worker", "2", "--ps", "2", "--restart_workers", "1")
    assert_pass(tests, "--workers", str(tasks), *options)


def assert_pass(tests, *options):
    """Runs tests as the chief of a cluster."""
    launch = ["-m", "tf_dsgd.launch", *options]
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
