"""Workers and ps tasks that die or stop, on the simulator: every strategy, every phase.

Outside witnesses: an integer for each example counts how often it was trained on, in what the
shards applied; for a constant gradient and SGD of rate 1 each weight is minus the mini-batches.
"""

import os

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import covering, faults
from tests.conformance import registry
from tests.faults import fail_at, fail_ps_at, stop_at

pytestmark = pytest.mark.medium

EXAMPLES, BATCH, EPOCHS = 240, 4, 2
STEPS = EXAMPLES // BATCH
TIMEOUT = 6.0

KINDS = {
    "dies": lambda m, step, phase: fail_at(m, step, phase),
    "comes back": lambda m, step, phase: fail_at(m, step, phase, back_after=4.0),
    "stops": lambda m, step, phase: stop_at(m, step, phase, seconds=TIMEOUT / 2),
    "stops for long": lambda m, step, phase: stop_at(m, step, phase, seconds=2 * TIMEOUT),
}


def cluster(script, shards=1, workers=5):
    return tf_dsgd.SimulatedCluster(
        workers,
        compute_seconds=tf_dsgd.LogNormal(1.0, 0.5),
        network_seconds=tf_dsgd.Exponential(0.2),
        seed=11,
        num_shards=shards,
        faults=script,
        worker_timeout_seconds=TIMEOUT,
    )


MIXED = range(len(KINDS))


def script_of(kind):
    """Each of four workers, in a phase of its own; some again in the second epoch."""
    again = [] if kind == "dies" else [KINDS[kind](0, 17, "push"), KINDS[kind](4, 15, "lock")]
    return [KINDS[kind](m, 3 + m, phase) for m, phase in enumerate(faults.PHASES)] + again


def mixed_script(turn):
    """Each kind once, each in a phase of its own; in four turns each kind in each phase."""
    kinds = [*KINDS][turn:] + [*KINDS][:turn]
    each = enumerate(zip(kinds, faults.PHASES, strict=True))
    script = [KINDS[kind](m, 3 + m, phase) for m, (kind, phase) in each]
    return [*script, KINDS["comes back"](4, 15, faults.PHASES[turn])]


# One shard has the whole of a message or nothing of it; of three some may have it and others not.
CASES = [(name, 1 if name == "peers" else 3) for name in registry.CONFIGURATIONS]
CASES += [(name, 1) for name in ("downpour_3_5", "softsync", "averaging", "elastic")]


def of_all_cases(ways):
    """Rows (configuration, shards, way): each value of each once, or where asked for, all.

    Of these each family of strategies, and each value of the others, is in the fast tier.
    """
    rows = [(*case, way) for case in CASES for way in ways]
    if not os.environ.get("TF_DSGD_LONG"):
        rows = [rows[n] for n in covering.cover(rows, 1)]
    families = [(name.partition("_")[0], shards, way) for name, shards, way in rows]
    fast = covering.cover(families, 1)
    return [
        pytest.param(*row, marks=[] if n in fast else pytest.mark.slow)
        for n, row in enumerate(rows)
    ]


def train_under(script, configuration, shards):
    """The ledger of two epochs in which nothing was lost."""
    strategy = registry.CONFIGURATIONS[configuration](cluster(script, shards))
    with strategy.scope():
        model = faults.seen_model(
            EXAMPLES,
            registry.optimizer(configuration),
            with_table=configuration in registry.WITH_TABLE,
        )
    x, y = faults.data(EXAMPLES)
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    faults.assert_metrics_whole(history, y)
    assert {fault for _, fault in strategy.engine.struck} == set(script)
    ledger = faults.assert_nothing_lost(strategy, model, EPOCHS, STEPS)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    return ledger


@pytest.mark.few(4)
@pytest.mark.parametrize(("configuration", "shards", "turn"), of_all_cases(MIXED))
def test_nothing_is_lost_whatever_happens_to_workers(configuration, shards, turn):
    """Every kind of fault, and every phase, in each case."""
    train_under(mixed_script(turn), configuration, shards)


@pytest.mark.slow
@pytest.mark.parametrize(("configuration", "shards", "kind"), of_all_cases(KINDS))
def test_nothing_is_lost_if_the_same_happens_to_all_workers(configuration, shards, kind):
    ledger = train_under(script_of(kind), configuration, shards)
    if kind == "stops":  # not for long enough to count as lost
        assert ledger.refused == 0


def constant(script, shards=3, **options):
    """One epoch of 60 mini-batches whose gradient is 1 for every weight; minus what weights are."""
    strategy = tf_dsgd.DownpourStrategy(cluster(script, shards, workers=3), **options)
    with strategy.scope():
        x = keras.Input((3,))
        dense = [keras.layers.Dense(n, use_bias=False, kernel_initializer="zeros") for n in (1, 2)]
        model = keras.Model(x, keras.layers.Concatenate()([layer(x) for layer in dense]))
        model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))
    ones = np.ones((2 * 60, 3), "float32")
    model.fit(ones, ones, batch_size=2, verbose=0)
    return strategy, [-float(w.numpy().mean()) for w in model.trainable_variables]


REFUSED = {  # by phase: shards 0, 1 and 2, where a worker dies; where it is stopped for long
    "fetch": ([{}, {}, {}], [{}, {}, {}]),
    "compute": ([{}, {}, {}], [{"replaced": 1}] * 3),
    "push": ([{"repeated": 1}, {}, {}], [{"repeated": 1}, {"replaced": 1}, {"replaced": 1}]),
    "lock": ([{}, {}, {}], [{}, {}, {}]),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("phase", faults.PHASES)
def test_why_messages_are_refused(phase, stops):
    """By hand: a push cut off after the first shard is done again, and that shard refuses it."""
    fault = stop_at(1, 5, phase, seconds=9.0) if stops else fail_at(1, 5, phase, back_after=9.0)
    strategy, weights = constant([fault])
    assert weights == [60.0, 60.0]
    for shard, refused in zip(strategy.ledger().shards, REFUSED[phase][stops], strict=True):
        assert {k: n for k, n in shard.reasons.items() if n} == refused
        assert (shard.applied, shard.sent) == (60, 60 + sum(refused.values()))
        assert shard.in_flight == 0


def test_a_run_with_faults_repeats_bit_for_bit():
    def run():
        script = script_of("stops for long")
        strategy = tf_dsgd.DownpourStrategy(cluster(script, 3), push_every=3, fetch_every=2)
        with strategy.scope():
            model = faults.seen_model(EXAMPLES, keras.optimizers.Adam(0.05))
        x, y = faults.data(EXAMPLES)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return model.get_weights(), strategy.engine.now, strategy.staleness()

    first, again = run(), run()
    assert first[1:] == again[1:]
    for one, other in zip(first[0], again[0], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_short_stop_holds_the_others_only_where_the_rule_waits():
    """The virtual clock: 3 workers, 60 mini-batches of a second, one stopped for 5 seconds."""

    def seconds(make):
        at_rest = []
        for script in ([], [stop_at(0, 4, seconds=5.0)]):
            strategy = make(tf_dsgd.SimulatedCluster(3, faults=script))
            with strategy.scope():
                model = faults.seen_model(EXAMPLES, "sgd")
            x, y = faults.data(EXAMPLES)
            model.fit(x, y, batch_size=BATCH, verbose=0)
            at_rest.append(strategy.engine.now)
        return at_rest

    assert seconds(tf_dsgd.DownpourStrategy) == [20.0, 22.0]  # 5 worker-seconds, shared by 3
    assert seconds(lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=4)) == [20.0, 25.0]


def test_all_workers_die_and_one_comes_back():
    script = [fail_at(m, 5) for m in range(2)] + [fail_at(2, 5, back_after=TIMEOUT)]
    strategy, weights = constant(script)
    assert weights == [60.0, 60.0]
    # The last dies after its fifth mini-batch; alone it does more than half of the others'.
    assert strategy.engine.now > TIMEOUT + 40.0


def test_all_workers_die_and_none_comes_back_in_time():
    """As on a cluster of processes, which waits for `worker_timeout_seconds`."""
    script = [fail_at(m, 5) for m in range(2)] + [fail_at(2, 5, back_after=TIMEOUT + 9.0)]
    with pytest.raises(TimeoutError, match="none came back within 6 virtual seconds"):
        constant(script)


def test_all_workers_die_and_none_comes_back():
    with pytest.raises(RuntimeError, match=r"All workers were lost, and none .* back_after"):
        constant([fail_at(m, 5) for m in range(3)])


def resumable(script, path, **fit):
    strategy = tf_dsgd.DownpourStrategy(cluster(script, 3), push_every=3, fetch_every=2)
    with strategy.scope():
        model = faults.seen_model(EXAMPLES, keras.optimizers.Adam(0.05))
    x, y = faults.data(EXAMPLES)
    backup = tf_dsgd.callbacks.BackupAndRestore(path)
    settings = {"batch_size": BATCH, "epochs": 4, "shuffle": False, "verbose": 0}
    error = None
    try:
        model.fit(x, y, callbacks=[backup], **settings)
    except RuntimeError as raised:
        error = raised
    return strategy, model, error


@pytest.mark.slow
def test_a_ps_dies_and_the_run_goes_on_from_the_checkpoint(tmp_path):
    """As if nothing had been: bit for bit."""
    _, whole, _ = resumable((), tmp_path / "whole")
    _, _, error = resumable([fail_ps_at(1, 2 * STEPS + 30)], tmp_path / "backup")
    assert "/job:ps/task:1" in str(error) and str(tmp_path / "backup") in str(error)
    strategy, model, error = resumable((), tmp_path / "backup")
    assert error is None
    faults.assert_nothing_lost(strategy, model, 4, STEPS)
    for one, other in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_worker_dies_in_a_resumed_run(tmp_path):
    """Messages are numbered on from the checkpoint, also those of workers that come back."""
    _, _, error = resumable([fail_ps_at(0, 2 * STEPS + 30)], tmp_path / "backup")
    assert error is not None
    script = [KINDS[kind](m, 3, "push") for m, kind in enumerate(("comes back", "stops for long"))]
    script += [fail_at(2, 4, "compute", back_after=3.0), fail_at(3, 5, "lock", back_after=3.0)]
    strategy, model, error = resumable(script, tmp_path / "backup")
    assert error is None and len(strategy.engine.struck) == 4
    faults.assert_nothing_lost(strategy, model, 4, STEPS)


def test_a_worker_that_is_lost_at_a_checkpoint_joins_in_the_resumed_run(tmp_path):
    script = [fail_at(1, 20), fail_ps_at(0, 2 * STEPS + 30)]
    _, _, error = resumable(script, tmp_path / "backup")
    assert error is not None
    strategy, model, error = resumable((), tmp_path / "backup")
    assert error is None
    ledger = faults.assert_nothing_lost(strategy, model, 4, STEPS)
    assert ledger.refused == 0 and all(worker.steps > 30 for worker in ledger.workers)


def test_an_audit_notices_a_lost_message():
    """A message that a shard refuses, and that nobody sends again, ends training with an error."""
    strategy = tf_dsgd.DownpourStrategy(cluster([fail_at(1, 10**6)], 3))
    with strategy.scope():
        model = faults.seen_model(EXAMPLES, "sgd")
    x, y = faults.data(EXAMPLES)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    clock = strategy.engine.store.clock.of(2)
    numbers = clock.numpy()
    numbers[2] -= 1  # the worker uses a number for the second time
    clock.assign(numbers)
    with pytest.raises(RuntimeError, match=r"ledger does not balance: 120 .* \[119, 119, 119\]"):
        model.fit(x, y, batch_size=BATCH, verbose=0)
