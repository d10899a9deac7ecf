"""Messages of several gradients, and several messages to a fetch, event by event."""

import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tf_dsgd
from tests.optimizers.rules import RULES, WORKERS

SHAPE, TABLE = (3, 2), (12, 2)
START = {False: np.linspace(-1, 1, 6).reshape(SHAPE), True: np.linspace(-1, 1, 24).reshape(TABLE)}


@st.composite
def schedules(draw, push_every, fetch_every):
    """Fetches, steps and pushes that keep the periods; every worker fetches first."""
    since_fetch, unsent = [None] * WORKERS, [0] * WORKERS
    events = []
    for _ in range(draw(st.integers(3, 30))):
        m = draw(st.integers(0, WORKERS - 1))
        choices = ["fetch"]
        if since_fetch[m] is not None and since_fetch[m] < fetch_every:
            choices += ["push"] * 3 if unsent[m] + 1 == push_every else ["step"] * 3
        action = draw(st.sampled_from(choices))
        if action == "fetch":
            since_fetch[m] = 0
        else:
            since_fetch[m] += 1
            unsent[m] = unsent[m] + 1 if action == "step" else 0
        events.append((m, action, draw(st.integers(0, 10**6))))
    return events


def gradient(seed, sparse):
    """Quarters; of a table the rows touched and their values."""
    random = np.random.default_rng(seed)
    if not sparse:
        return random.integers(-8, 9, SHAPE) / 4
    rows = random.choice(TABLE[0], random.integers(1, 4), replace=False)
    return rows, random.integers(-8, 9, (len(rows), TABLE[1])) / 4


@functools.cache
def strategy(push_every, fetch_every):
    return tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(1), push_every=push_every, fetch_every=fetch_every, local_rule="none"
    )


def play(twin, events, sparse):
    """The twin's weights after each event, and its staleness."""
    total = [np.zeros_like(twin.w) for _ in range(WORKERS)]
    touched = [set() for _ in range(WORKERS)]
    begun = [None] * WORKERS
    for m, action, seed in events:
        tau = None
        if action == "fetch":
            twin.fetch(m)
        else:
            begun[m] = twin.fetched_at[m] if begun[m] is None else begun[m]
            rows, values = gradient(seed, True) if sparse else (slice(None), gradient(seed, False))
            total[m][rows] += values
            touched[m] |= set(rows) if sparse else set()
        if action == "push":
            rows = np.array(sorted(touched[m])) if sparse else slice(None)
            tau = twin.version - begun[m]
            twin.push(m, total[m], rows, version=begun[m])
            total[m], touched[m], begun[m] = np.zeros_like(twin.w), set(), None
        yield twin.w, tau


@pytest.mark.few(4)
@pytest.mark.thin(2)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("periods", [(2, 2), (1, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("rule", ["adaptive_revision", "delay_compensated_adaptive", "fasgd"])
def test_every_event(rule, periods, sparse):
    optimizer, twin = RULES[rule]

    @settings(
        max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(schedules(*periods))
    def check(events):
        result = tf_dsgd.simulate(
            strategy(*periods),
            optimizer(),
            [START[sparse]],
            [
                (m, action) if action == "fetch" else (m, action, [gradient(seed, sparse)])
                for m, action, seed in events
            ],
            num_workers=WORKERS,
        )
        for k, (w, tau) in enumerate(play(twin(START[sparse]), events, sparse)):
            np.testing.assert_allclose(
                result.weights[k][0], w, rtol=2e-5, atol=2e-5, err_msg=str(events[: k + 1])
            )
            assert result.staleness[k] == tau

    check()
