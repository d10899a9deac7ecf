"""What every test shares: quiet TensorFlow logs, fixed seeds, and no GPU tests without a GPU."""

import gc
import itertools
import os
import signal
import time
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import pytest

from tests import covering, progress
from tests.packaging import where_time_goes

# A shell that runs the tests in the background has them ignore SIGINT, and with them all that they
# start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test that takes longer hangs; pyproject's limit is for marked, slow ones.
SECONDS_PER_TEST = 240
SECONDS_PER_TEST_OF_PROCESSES = 420
# A collection takes half a second, where most tests take three.
TESTS_PER_COLLECTION = 8
# Where it is set, no test begins once `time.time()` is that; `.ci/run` counts those by these words.
# The first file is then another one in each run, so that no test is passed over in all of them. A
# run of pytest that a test starts does not inherit it: a part of that passed over would count.
UNTIL = "TF_DSGD_TESTS_UNTIL"
PASSED_OVER = "passed over: the time for tests was gone"
# `2/3`: of the slow tests that need not run alone the second third. `.ci/run` runs one, another one
# by the commit. Random histories are in each. What a test starts does not inherit it either.
SHARE = "TF_DSGD_TESTS_SHARE"
_tests_run = itertools.count(1)
_without_gpu = []
CPU_SECONDS = pytest.StashKey()
UNTIL_HERE = pytest.StashKey()


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if share := os.environ.get(SHARE):
        share_of(share)  # here, as xdist shows no error of a usage in its workers
    progress.register(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselects what needs a GPU where there is none, and bounds the time of every test.

    Tests that start clusters of processes, which fill a small machine, run alone. What need not,
    and is neither slow nor medium, is the fast tier: where a product is marked `thin`, a covering
    array of it.
    """
    together = bool(os.environ.get("TF_CONFIG"))  # as the chief of a cluster: tests cost more there
    covering.mark_rows(items, pytest.mark.slow, pytest.mark.long, together=together)
    if not os.environ.get("TF_DSGD_LONG"):
        _deselect(config, items, "long")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
    covering.mark_all_but_few(items, pytest.mark.slow)
    for item in items:
        seconds = SECONDS_PER_TEST
        if "tests/cluster/" in item.nodeid:
            if item.get_closest_marker("beside_others") is None:
                item.add_marker(pytest.mark.alone)
            seconds = SECONDS_PER_TEST_OF_PROCESSES
        if item.get_closest_marker("timeout") is None and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(seconds))
        if not any(item.get_closest_marker(name) for name in ("alone", "slow", "medium")):
            item.add_marker(pytest.mark.fast)
    if any(item.get_closest_marker("gpu") for item in items):
        import tensorflow as tf

        if not tf.config.list_physical_devices("GPU"):
            _without_gpu.extend(_deselect(config, items, "gpu"))
    share = os.environ.pop(SHARE, "")
    if share:
        config.hook.pytest_deselected(items=take_share(items, share))
    config.stash[UNTIL_HERE] = until = float(os.environ.pop(UNTIL, "inf"))
    if until < float("inf"):
        begin_elsewhere(items, until)


def begin_elsewhere(items, until):
    """Begins with another file; tests of one may look at one `fit`, which its last tests change."""
    first = first_of(len(items), until)
    while 0 < first < len(items) and items[first].path == items[first - 1].path:
        first += 1
    items[:] = items[first:] + items[:first]


def first_of(tests, until):
    """Where a run begins that has until then; runs of a few seconds later begin far from there."""
    golden = 0.5 * (5**0.5 - 1)
    return int(tests * (int(until) * golden % 1.0))


def share_of(share):
    """Which share, and of how many."""
    number, _, shares = share.partition("/")
    if not (number.isdecimal() and shares.isdecimal() and 1 <= int(number) <= int(shares)):
        raise pytest.UsageError(f"{SHARE}={share}: such as 2/3, the second of three")
    return int(number), int(shares)


def take_share(items, share):
    """Takes the slow tests of other shares out of `items`, and returns them.

    By a test's name, so that each share has rows of each product, and all together have all.
    """
    number, shares = share_of(share)

    def is_others(item):
        divided = item.get_closest_marker("slow") and not item.get_closest_marker("alone")
        divided = divided and "tests/membership/" not in item.nodeid
        return divided and zlib.crc32(item.nodeid.encode()) % shares + 1 != number

    others = [item for item in items if is_others(item)]
    items[:] = [item for item in items if not is_others(item)]
    return others


def _deselect(config, items, mark):
    """Takes what has this mark out of `items`, and returns it."""
    marked = [item for item in items if item.get_closest_marker(mark)]
    items[:] = [item for item in items if not item.get_closest_marker(mark)]
    config.hook.pytest_deselected(items=marked)
    return marked


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[CPU_SECONDS] = cpu_seconds()
    if time.time() > item.config.stash[UNTIL_HERE]:
        pytest.skip(PASSED_OVER)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Notes for `--junitxml` what a test took of the processor: it may wait most of its time."""
    if call.when == "teardown":
        took = cpu_seconds() - item.stash.get(CPU_SECONDS, cpu_seconds())
        item.user_properties.append((where_time_goes.CPU_PROPERTY, round(took, 2)))


def cpu_seconds():
    """Those of this process, and of the processes that it started and waited for."""
    return sum(os.times()[:4])


def pytest_terminal_summary(terminalreporter):
    """Says why GPU tests did not run."""
    for item in _without_gpu:
        terminalreporter.write_line(
            f"DESELECTED {item.nodeid}: TensorFlow lists no GPU on this machine"
        )


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect():
    """Takes what was imported, and what TensorFlow keeps of earlier modules, out of collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_seeds():
    import keras

    keras.utils.set_random_seed(20240)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")
    # Freeing a few TensorFlow graphs is quick; hundreds at once stop the process for seconds.
    if next(_tests_run) % TESTS_PER_COLLECTION == 0:
        gc.collect()
