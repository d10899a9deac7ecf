"""What benchmarks make of processor time: hand-computed, without a training."""

import dataclasses
import json
import os
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.packaging.repository import ROOT
from tests.packaging.test_studies import gradients_of
from tf_dsgd.launch import launcher


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    """The programs can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def line(name="python", parent=7, user=0, system=0):
    """As the kernel writes one: user's and the kernel's ticks are the 14th and 15th."""
    between = " ".join(str(n) for n in range(5, 14))
    return f"12 ({name}) S {parent} {between} {user} {system} 0 0 20 0 4 0 99"


def test_a_line_of_stat_is_read():
    import processor_time

    assert processor_time.parse_stat(line(user=130, system=12)) == processor_time.Stat(
        "python", 7, 142
    )
    odd = processor_time.parse_stat(line("a) (b c", 3, 1, 2))
    assert (odd.name, odd.parent, odd.ticks) == ("a) (b c", 3, 3)


def test_this_process_is_read_as_python_measures_it():
    import processor_time

    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert processor_time.seconds_of(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)
    assert threading.get_native_id() in processor_time.threads_of(os.getpid())
    assert processor_time.seconds_of(2**22 + 1) == 0.0  # there is none of that number
    assert os.getpid() in processor_time.children(os.getppid())


def test_tasks_are_known_by_their_configuration(monkeypatch):
    import processor_time

    def environment(kind):
        config = {"cluster": {"worker": ["a:1"]}, "task": {"type": kind, "index": 0}}
        return b"A=1\0TF_CONFIG=" + json.dumps(config).encode() + b"\0B=2\0"

    roles = [processor_time.role_of(environment(kind)) for kind in ("chief", "ps", "worker")]
    assert roles == ["chief", "ps", "workers"]
    assert processor_time.role_of(b"A=1\0") is None
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert processor_time.of_cluster() == {"chief": [os.getpid()]}


def test_threads_are_told_apart_by_their_names():
    import processor_time

    names = [
        "python",
        "tf_Compute",
        "grpcpp_sync_ser",
        "tf_data_private",
        "event_engine",
        "kworker",
    ]
    kinds = ["Python", "TensorFlow's threads", "gRPC", "tf.data", "gRPC", "other"]
    assert [processor_time.kind_of(name) for name in names] == kinds
    tick = os.sysconf("SC_CLK_TCK")

    def stats(**ticks):
        return {i: processor_time.Stat(n, 1, t) for i, (n, t) in enumerate(ticks.items())}

    before = stats(python=50, tf_Compute=20)
    after = stats(python=80, tf_Compute=120, tf_other=7)  # the last has begun since
    found = processor_time.by_kind(before, after)
    assert found == pytest.approx({"Python": 30 / tick, "TensorFlow's threads": 107 / tick})


def outcome(milliseconds, steps=200, speed=100.0, python=0.0):
    """A training that took so much of the chief and the workers together, half each."""
    half = milliseconds * steps / 2e3
    cpu = {"chief": half, "workers": half}
    return {
        "steps": steps,
        "cpu_seconds": cpu,
        "python_seconds": python * steps / 1e3,
        "steps_per_second": speed,
        "kinds": {"Python": half / 4, "gRPC": half * 3 / 4},
    }


TURN = {
    "full": outcome(10.0),
    "accrual": outcome(9.5),
    "metrics": outcome(9.0),
    "exchange": outcome(8.0),
    "input": outcome(9.75),
    "stripped": outcome(5.5, python=1.0),
}


def test_an_account_is_divided_as_by_hand():
    import accounts

    assert accounts.account(TURN, step=3.0) == pytest.approx(
        {
            "step": 3.0,
            "accrual": 0.5,
            "metrics": 1.0,
            "exchange": 2.0,
            "input": 0.25,
            "Python": 1.0,
            "TensorFlow": 1.5,  # 5.5 without the rest, less 3 and 1
            "sum": 9.25,
            "in all": 10.0,
        }
    )
    assert accounts.places(TURN) == pytest.approx(
        {"chief": 5.0, "workers": 5.0, "chief: Python": 1.25, "chief: gRPC": 3.75}
    )


def test_an_account_has_a_column_for_each_kind_and_says_what_is_left():
    import accounts

    pair = {"step": outcome(3.0), "turns": {accounts.THIS: [TURN, TURN]}}
    table = accounts.account_table({"threads": [pair], "files": [pair]}).splitlines()
    assert table[0] == "| CPU, ms/mini-batch | threads | files |"
    assert "| exchange | 2.00 | 2.00 |" in table
    assert "| not accounted for | 0.75 | 0.75 |" in table
    assert "mini-batches/s" not in "".join(table)  # which other tables have
    assert "| workers | 5.00 |" in accounts.place_table({"threads": [pair]})


def test_checkouts_are_compared_pair_by_pair():
    import accounts

    slower = {**TURN, "full": outcome(12.5, speed=80.0)}
    pairs = [
        {"step": outcome(3.0), "turns": {accounts.THIS: [TURN], accounts.OTHER: [other]}}
        for other in (TURN, slower)
    ]
    table = accounts.ratio_table(pairs)
    # 10 to 10 and 10 to 12.5; 100 to 100 and 100 to 80.
    assert "| in all | 10.00 (10.00-10.00) | 11.25 (10.00-12.50) | 0.90 (0.80-1.00) |" in table
    assert "| mini-batches/s | 100 (100-100) | 90 (80-100) | 1.12 (1.00-1.25) |" in table
    assert accounts.ratio(1.0, 0.01) is None and accounts.ratio(-1.0, 2.0) is None


def test_cells_of_processor_time_are_of_whoever_was_measured():
    import runs

    results = {
        "ours": [outcome(4.0)],
        "theirs": [{"steps": 10, "cpu_seconds": {"ps": 0.02}}],
        "x": [{}],
    }
    assert runs.cpu_roles(results) == ["chief", "ps", "workers"]
    assert runs.cpu_cells(results["ours"], ["chief", "ps"]) == ["2.00", ""]
    assert runs.cpu_cells(results["theirs"], ["ps"]) == ["2.00"]
    assert runs.cpu_header(["chief"]) == ["CPU, ms/mini-batch"]


def test_contenders_have_the_limit_of_as_many_exchanges():
    import limits

    specs = {
        "plain": {"kind": "keras"},
        "20": {"kind": "downpour", "period": 20, "limit_seconds": 2.0},
        "1": {"kind": "downpour", "period": 1, "model": "deep", "variables": 30},
        "one": {"kind": "averaging", "period": 5, "workers": 1},
    }
    contenders, whose = limits.beside_threads(specs)
    alone = "bare steps, threads, 1 worker"
    assert whose == {"plain": limits.ONE, "20": limits.THREADS, "1": limits.PUSHES_1, "one": alone}
    assert set(contenders) == {*specs, *whose.values()}
    assert contenders["20"] == {"kind": "downpour", "period": 20}
    assert contenders[limits.THREADS]["seconds"] == 2.0
    pushes = contenders[limits.PUSHES_1]
    assert (pushes["model"], pushes["variables"], pushes["period"]) == ("deep", 30, 1)
    assert contenders[alone]["workers"] == 1
    assert limits.of_processes(20) == limits.PROCESSES
    assert limits.of_processes(1, steps_per_call=20) == limits.EXCHANGE_1_CALL_20


def test_a_table_says_how_much_of_the_limit_is_reached():
    import limits

    results = {"ours": [outcome(4.0, speed=60.0)], "bare": [outcome(3.0, speed=80.0)]}
    assert limits.cells(results, "ours", {"ours": "bare"}) == ["0.75", "bare"]
    assert limits.cells(results, "bare", {"ours": "bare"}) == ["1.00", "is one"]
    assert limits.cells(results, "ours", {}) == ["", ""]
    assert limits.fastest(results) == "bare"
    assert "| ours | 60 | 0.75 | 2.00 | 2.00 |" in limits.table(results)


def test_all_contenders_have_what_the_launcher_sets():
    import runs

    assert runs.LIKE_LAUNCHED == launcher._DEFAULTS


def pushing(spec):
    """Variables, and a thread's function that pushes to them."""
    import bare

    shared = bare.make_variables(spec)
    return shared, bare.pushes(spec, shared, tf.CriticalSection())


def exchanging(spec):
    """The same of a worker and a ps, which are this process."""
    import bare_cluster

    shared = bare_cluster.Shared(spec)
    return shared.variables, bare_cluster.worker(spec, shared, 0)


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (pushing, {}),
        (exchanging, {"flat": False}),
        (exchanging, {"flat": True}),
        (exchanging, {"flat": True, "locked": False}),
    ],
)
def test_a_bare_worker_descends_as_numpy_does(monkeypatch, period, make, options):
    import bare
    import bare_cluster

    spec = bare.Spec(model="deep", variables=4, batch_size=5, period=period, steps_per_call=3)
    spec = dataclasses.replace(spec, **options)
    random = np.random.default_rng(0)
    x = random.standard_normal((5 * bare.BATCHES, 784)).astype("float32")
    y = random.integers(0, 10, 5 * bare.BATCHES)
    monkeypatch.setattr(bare, "make_data", lambda _: (tf.constant(x), tf.constant(y)))
    monkeypatch.setattr(bare_cluster, "device_of", lambda *_: "/device:CPU:0")
    shared, call = make(spec)

    def weights():
        flat = len(shared) == 1
        return bare_cluster.divided(spec, shared[0].read_value()) if flat else shared

    expected = [weight.numpy().astype("float64") for weight in weights()]
    call()
    call()
    for k in range(6):
        rows = slice(5 * k, 5 * k + 5)
        for weight, gradient in zip(
            expected, gradients_of(x[rows], y[rows], expected), strict=True
        ):
            weight -= bare.RATE * gradient
    for found, weight in zip(weights(), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), weight, rtol=1e-4, atol=1e-6)
