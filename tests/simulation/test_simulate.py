"""`tf_dsgd.simulate` on random sequences of events, against twins written in NumPy."""

import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tf_dsgd
from tests.contract import sketches
from tf_dsgd.compression import OneBit
from tf_dsgd.simulation.study import Study

WORKERS, SHAPE = 3, (2, 3)
many = settings(
    max_examples=40,
    deadline=None,  # the first example traces
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
gradients = st.integers(0, 10**6)  # a seed of one


def gradient(seed, shape=SHAPE):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype("float32")


START = gradient(99) / 2


@functools.cache
def downpour(**configuration):
    """Made once: a strategy takes much longer than a simulation."""
    return tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1), **configuration)


@st.composite
def events(draw, push_every=1, fetch_every=1, flushes=False, longest=30):
    """A sequence that keeps the periods; every worker fetches first."""
    since_fetch, unsent = [None] * WORKERS, [0] * WORKERS
    sequence = []
    for _ in range(draw(st.integers(1, longest))):
        m = draw(st.integers(0, WORKERS - 1))
        can_step = since_fetch[m] is not None and since_fetch[m] < fetch_every
        choices = ["fetch"] + ["flush"] * flushes
        if can_step and unsent[m] < push_every:
            choices += ["push"] * 3 + ["step"] * (push_every > 1 and unsent[m] + 1 < push_every)
        if unsent[m]:
            choices.append("send")
        action = draw(st.sampled_from(choices))
        if action == "fetch":
            since_fetch[m] = 0
        elif action in ("step", "push"):
            since_fetch[m] += 1
            unsent[m] = unsent[m] + 1 if action == "step" else 0
        elif action == "send":
            unsent[m] = 0
        sequence.append((m, action, draw(gradients)))
    return sequence


def as_events(sequence):
    for m, action, seed in sequence:
        if action in ("fetch", "flush"):
            yield m, action
        elif action == "send":
            yield m, "push", ()
        else:
            yield m, action, [gradient(seed)]


class Shard:
    """The counters of a shard, and what all workers have fetched and not sent."""

    def __init__(self, **state):
        self.w = START.astype("float64")
        self.version = 0
        self.local = [np.zeros(SHAPE)] * WORKERS
        self.accrued = [np.zeros(SHAPE)] * WORKERS
        self.count = [0] * WORKERS
        self.fetched = [0] * WORKERS
        self.base = [0] * WORKERS
        self.__dict__.update(state)

    def receive(self, m, g, tau):
        raise NotImplementedError

    def flush(self):
        return False

    def before_fetch(self, m):
        return False

    def snapshot(self, m): ...

    def step(self, m, g):
        if not self.count[m]:
            self.base[m] = self.fetched[m]
        self.accrued[m] = self.accrued[m] + g
        self.count[m] += 1

    def play(self, sequence):
        for m, action, seed in sequence:
            tau = None
            if action == "fetch":
                self.version += self.before_fetch(m)
                self.local[m], self.fetched[m] = self.w.copy(), self.version
                self.snapshot(m)
            elif action == "flush":
                self.version += self.flush()
            elif action in ("step", "push"):
                self.step(m, gradient(seed))
            if action in ("push", "send"):
                tau = self.version - self.base[m]
                self.version += self.receive(m, self.accrued[m], tau)
                self.accrued[m], self.count[m] = np.zeros(SHAPE), 0
            yield self.w, self.local[m], self.version, tau


def check(result, twin, sequence, copies=True):
    """Every event's weights, copy, version and staleness are the twin's."""
    rows = list(twin.play(sequence))
    assert len(result.weights) == len(sequence)
    assert result.versions == [version for *_, version, _ in rows]
    assert result.staleness == [tau for *_, tau in rows]
    for k, (w, local, _, _) in enumerate(rows):
        np.testing.assert_allclose(result.weights[k][0], w, rtol=2e-5, atol=2e-5, err_msg=str(k))
        if copies:
            np.testing.assert_allclose(result.copies[k][0], local, rtol=2e-5, atol=2e-5)
    sent = [tau for *_, tau in rows if tau is not None]
    assert (result.ledger.applied, result.ledger.refused) == (len(sent), 0)
    total = sum(w.staleness_mean * w.applied for w in result.ledger.workers if w.applied)
    assert total == pytest.approx(sum(sent))


class Momentum(Shard):
    """v <- 0.9 v - rate f(tau) g; w <- w + v, and plain SGD steps of each copy."""

    velocity = np.zeros(SHAPE)
    rate, scaled, local_rate = 0.1, False, 0.0

    def step(self, m, g):
        super().step(m, g)
        self.local[m] = self.local[m] - self.local_rate * g

    def receive(self, m, g, tau):
        factor = 1.0 / max(tau, 1) if self.scaled else 1.0
        self.velocity = 0.9 * self.velocity - self.rate * factor * g
        self.w = self.w + self.velocity
        return True


@many
@given(events())
def test_downpour_with_momentum(sequence):
    rule = downpour(staleness_scaling="inverse")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    result = tf_dsgd.simulate(rule, optimizer, [START], as_events(sequence), num_workers=WORKERS)
    check(result, Momentum(scaled=True), sequence)
    assert not optimizer.built  # a copy was used


@many
@given(events(push_every=3, fetch_every=2))
def test_downpour_accrues_and_steps_its_copy(sequence):
    rule = downpour(push_every=3, fetch_every=2, local_rule=tf_dsgd.LocalSGD(0.25))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    result = tf_dsgd.simulate(rule, optimizer, [START], as_events(sequence), num_workers=WORKERS)
    check(result, Momentum(local_rate=0.25), sequence)


@pytest.mark.slow
@many
@given(events(flushes=True))
def test_softsync(sequence):
    class Softsync(Shard):
        collected = ()

        def receive(self, m, g, tau):
            self.collected = [*self.collected, g / max(tau, 1)]
            return len(self.collected) == 3 and self.flush()

        def flush(self):
            if not len(self.collected):
                return False
            self.w = self.w - 0.5 * sum(self.collected) / len(self.collected)
            self.collected = ()
            return True

    optimizer = keras.optimizers.SGD(0.5)
    result = tf_dsgd.simulate(
        sketches.softsync(3), optimizer, [START], as_events(sequence), num_workers=WORKERS
    )
    check(result, Softsync(), sequence)


@pytest.mark.slow
@many
@given(events())
def test_adaptive_revision(sequence):
    class Revision(Shard):
        """McMahan, Streeter 2014."""

        gbar = np.zeros(SHAPE)
        z = top = np.ones(SHAPE)

        def snapshot(self, m):
            self.old = {**getattr(self, "old", {}), m: self.gbar}

        def receive(self, m, g, tau):
            backlog = self.gbar - self.old[m]
            eta_old = 0.3 / np.sqrt(self.top)
            self.z = self.z + g**2 + 2 * g * backlog
            self.top = np.maximum(self.z, self.top)
            eta = 0.3 / np.sqrt(self.top)
            self.w = self.w - eta * g + (eta_old - eta) * backlog
            self.gbar = self.gbar + g
            return True

    rule = sketches.adaptive_revision(0.3)
    result = tf_dsgd.simulate(rule, "sgd", [START], as_events(sequence), num_workers=WORKERS)
    check(result, Revision(), sequence)


@pytest.mark.slow
@many
@given(events(push_every=2, fetch_every=2))
def test_averaging(sequence):
    """The compiled optimizer runs on each worker; who has sent ends the round by its next fetch."""

    class Averaging(Shard):
        def __init__(self):
            super().__init__()
            self.slot = np.zeros(SHAPE)
            self.velocity = [np.zeros(SHAPE)] * WORKERS
            self.arrived = []

        def before_fetch(self, m):
            return any(k == m for k, *_ in self.arrived) and self.flush()

        def snapshot(self, m):
            self.velocity[m] = self.slot

        def step(self, m, g):
            super().step(m, g)
            self.velocity[m] = 0.9 * self.velocity[m] - 0.1 * g
            self.local[m] = self.local[m] + self.velocity[m]

        def receive(self, m, g, tau):
            self.arrived.append((m, self.count[m], self.local[m], self.velocity[m]))
            return False

        def flush(self):
            if not self.arrived:
                return False
            _, counts, weights, slots = zip(*self.arrived, strict=True)
            self.w = np.average(weights, axis=0, weights=counts)
            self.slot = np.average(slots, axis=0, weights=counts)
            self.arrived = []
            return True

    result = tf_dsgd.simulate(
        tf_dsgd.PeriodicAveragingStrategy(tf_dsgd.LocalCluster(WORKERS), average_every=2),
        keras.optimizers.SGD(0.1, momentum=0.9),
        [START],
        as_events(sequence),
        num_workers=WORKERS,
    )
    check(result, Averaging(), sequence)


def test_sparse_gradients_move_their_rows_alone():
    """Rows named twice add up; a row that nobody names keeps still."""
    table = np.arange(8, dtype="float32").reshape(4, 2)
    rows = ([1, 3, 1], np.array([[1, 2], [3, 4], [5, 6]], "float32"))
    slices = tf.IndexedSlices(tf.constant([[2.0, 2.0]]), tf.constant([0]))
    result = tf_dsgd.simulate(
        downpour(),
        keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0),
        [table, np.zeros(2)],
        [
            (1, "fetch"),
            (0, "fetch"),
            (1, "push", [rows, [1.0, 0.0]]),
            (0, "push", [slices, [0.0, 2.0]]),
            (0, "fetch"),
        ],
    )
    want = table.copy()
    want[1] -= 1.0  # Adagrad's first step is the rate in the gradient's direction
    want[3] -= 1.0
    np.testing.assert_allclose(result.weights[2][0], want, rtol=1e-6)
    want[0] -= 1.0
    np.testing.assert_allclose(result.weights[3][0], want, rtol=1e-6)
    np.testing.assert_allclose(result.weights[3][1], [-1.0, -1.0], rtol=1e-6)
    np.testing.assert_allclose(result.copies[4][0], want, rtol=1e-6)
    assert result.staleness == [None, None, 0, 1, None]


def test_calls_do_not_see_each_other_and_share_a_trace():
    """Adam, whose slots and counter must begin anew; a trace takes a quarter of a second."""
    sequence = [(0, "fetch", 1), (1, "fetch", 1), (0, "push", 2), (1, "push", 3), (1, "fetch", 0)]

    def run():
        return tf_dsgd.simulate(
            downpour(),
            keras.optimizers.Adam(0.1),
            [START],
            as_events(sequence),
        )

    first = run()
    start = time.process_time()
    for _ in range(100):
        again = run()
        for a, b in zip(first.weights, again.weights, strict=True):
            np.testing.assert_array_equal(a[0], b[0])
    assert time.process_time() - start < 10
    assert again.staleness == [None, None, 0, 1, None]


def test_a_schedule_begins_anew_with_each_call():
    """A rate of 1 at mini-batches 0 to 2, then 0: of three messages of two, two move the weight."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.0])
    ones = [np.ones(SHAPE, "float32")]
    events = [(0, "fetch"), *[(0, "step", ones), (0, "push", ones), (0, "fetch")] * 3]
    for _ in range(2):
        played = tf_dsgd.simulate(
            downpour(push_every=2, fetch_every=2), keras.optimizers.SGD(rate), [START], events
        )
        np.testing.assert_array_equal(played.weights[-1][0], START - 4.0)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([(0, "pull")], r"events\[0\] must be \(worker, action\)"),
        ([(0, "fetch"), (-1, "fetch")], r"events\[1\] has -1"),
        ([(0, "fetch"), (5, "fetch")], r"events\[1\] is of worker 5, and there are 2"),
        ([(0, "fetch"), (0, "push")], r"events\[1\]: give the gradients"),
        ([(0, "fetch", [START])], r"events\[0\]: leave out"),
        ([(0, "push", [START])], r"events\[0\]: worker 0 has not fetched"),
        ([(0, "fetch"), (0, "push", ())], r"events\[1\]: worker 0 has nothing to send"),
        ([(0, "fetch"), (0, "push", [START, START])], r"events\[1\] must have one gradient"),
        ([(0, "fetch"), (0, "push", [START.T])], r"events\[1\], gradient 0 must have"),
        ([(0, "fetch"), (0, "push", ["a"])], r"events\[1\], gradient 0 must be .* of numbers"),
        ([(0, "fetch"), (0, "push", [([9], START[:1])])], "rows must be a list of integers"),
        (
            [(0, "fetch"), (0, "push", [([1], START[:1])]), (0, "push", [START])],
            r"events\[2\]: the gradients of weight 0",
        ),
        (
            [(0, "fetch"), (0, "step", [START]), (0, "push", [START])],
            r"events\[2\]: 2 mini-batches would go into one message",
        ),
        (
            [(0, "fetch"), (0, "push", [START]), (0, "push", [START])],
            r"events\[2\]: worker 0 would use what it fetched for 2",
        ),
    ],
)
def test_a_wrong_event_is_named(events, message):
    rule = sketches.adaptive_revision(0.1)
    with pytest.raises(ValueError, match=message):
        tf_dsgd.simulate(rule, "sgd", [START], events, num_workers=2)


def test_other_wrong_arguments():
    with pytest.raises(TypeError, match="rule must be"):
        tf_dsgd.simulate("downpour", "sgd", [START], [])
    with pytest.raises(ValueError, match="weights must hold"):
        tf_dsgd.simulate(sketches.softsync(2), "sgd", [], [])
    with pytest.raises(ValueError, match="num_workers"):
        tf_dsgd.simulate(sketches.softsync(2), "sgd", [START], [], num_workers=0)


@pytest.mark.parametrize(
    ("strategy", "word"),
    [
        (tf_dsgd.HogwildStrategy, "Hogwild!"),
        (functools.partial(tf_dsgd.CompressedAsyncStrategy, compression=OneBit()), "one another"),
        (tf_dsgd.SandblasterStrategy, "Sandblaster"),
    ],
)
def test_what_cannot_be_played_is_refused(strategy, word):
    events = [(0, "fetch"), (0, "push", [[1.0]])]
    with pytest.raises(ValueError, match=f"{word}.*SimulatedCluster"):
        tf_dsgd.simulate(strategy(), "sgd", [np.zeros(1)], events)
    with pytest.raises(ValueError, match=f"{word}.*SimulatedCluster"):
        Study(strategy().algorithm, 1, None, np.zeros((4, 1)), np.zeros((4, 1)), 2)
