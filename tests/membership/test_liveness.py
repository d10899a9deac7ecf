"""Who answers: histories of probes on a virtual clock, of tasks that stop and come back."""

import random

import pytest

from tf_dsgd.membership import deadlines
from tf_dsgd.membership.liveness import Liveness

TASKS = [f"t{k}:1" for k in range(4)]


class Clock:
    """Probes as `engine.probes.Probes` makes them, with tasks that are stopped at times.

    A question is answered at once by one that runs, and when it goes on by one that is stopped
    within the time that it has.
    """

    def __init__(self, timeout, stops):
        self.timeout, self.liveness, self.now = timeout, Liveness(timeout), 0.0
        self.stops = stops
        self.condemned = {}

    def stopped(self, task, now):
        return any(begin <= now < end for begin, end in self.stops.get(task, ()))

    def ask(self, tasks, seconds):
        """Those that do not answer within so many seconds."""
        until = self.now + seconds
        ends = [
            next((e for b, e in self.stops.get(t, ()) if b <= self.now < e), self.now)
            for t in tasks
        ]
        silent = {t for t, end in zip(tasks, ends, strict=True) if end > until}
        self.now = until if silent else max([self.now, *ends])
        return silent

    def probe(self):
        every, asked = deadlines.probe_every(self.timeout), self.now
        patience = min(every, self.liveness.suspects_in(asked))
        unheard = self.ask(TASKS, max(deadlines.glance(self.timeout), patience))
        suspects = self.liveness.probed(asked, self.now, set(TASKS) - unheard, unheard)
        silent = self.ask(sorted(suspects), deadlines.last_question(self.timeout))
        for task in self.liveness.condemn(silent):
            self.condemned.setdefault(task, []).append(self.now)
        self.now += min(every, self.liveness.suspects_in(self.now))

    def run(self, seconds):
        while self.now < seconds:
            self.probe()


@pytest.mark.parametrize("timeout", [1.0, 3.0, 5.0, 20.0, 60.0, 600.0])
def test_who_is_stopped_counts_as_lost_within_the_timeout(timeout):
    for seed in range(200):
        begin = 3 * timeout * random.Random(seed).random()
        clock = Clock(timeout, {TASKS[0]: [(begin, 1e9)]})
        clock.run(begin + 3 * timeout)
        assert list(clock.condemned) == [TASKS[0]]
        (at,) = clock.condemned[TASKS[0]]
        assert at - begin <= timeout + 1e-6
        # It was heard last before a pause, and maybe before others were waited for.
        assert at - begin >= timeout - 2 * deadlines.probe_every(timeout)


@pytest.mark.parametrize("timeout", [3.0, 20.0, 60.0])
def test_who_stops_for_less_is_not_lost_and_who_is_back_answers_again(timeout):
    for seed in range(300):
        draw = random.Random(seed)
        stops = {}
        for task in TASKS:
            now = 0.0
            for _ in range(5):
                begin = now + draw.uniform(1.0, 3.0) * timeout
                now = begin + draw.choice([0.5, 1.5]) * timeout
                stops.setdefault(task, []).append((begin, now))
        clock = Clock(timeout, stops)
        clock.run(40 * timeout)
        for task in TASKS:
            long = [(b, e) for b, e in stops[task] if e - b > timeout]
            found = clock.condemned.get(task, [])
            assert len(found) == len(long), (task, stops[task], found)
            for (begin, _), at in zip(long, found, strict=True):
                # Others that are asked for the last time make it a little later.
                late = deadlines.probe_every(timeout) + deadlines.last_question(timeout)
                assert 0.5 * timeout < at - begin < timeout + late
            assert not clock.liveness.is_silent(task)
