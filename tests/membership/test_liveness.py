"""Who answers: probes on a virtual clock, of tasks that stop, are slow, and come back."""

import random
import types

import pytest

from tf_dsgd.engine import probes as module
from tf_dsgd.engine.probes import Probes
from tf_dsgd.membership import deadlines
from tf_dsgd.membership.liveness import Liveness

TASKS = [f"t{k}:1" for k in range(4)]


class Clock:
    """`Probes` of four tasks. Each answers `delay` seconds after it was asked, or when it goes on.

    Args:
        stops: by task, when it is stopped and when it goes on.
        pauses: when the process that asks stands still, and until when.
    """

    def __init__(self, monkeypatch, timeout, stops=None, delay=0.0, pauses=()):
        self.now, self.stops, self.delay, self.pauses = 0.0, stops or {}, delay, list(pauses)
        self.condemned = {}
        self.liveness = Liveness(timeout)
        condemn = self.liveness.condemn

        def noted(addresses):
            news = condemn(addresses)
            for task in news:
                self.condemned.setdefault(task, []).append(self.now)
            return news

        self.liveness.condemn = noted
        connection = types.SimpleNamespace(
            liveness=self.liveness,
            addresses=lambda: TASKS,
            groups=[],
            has_shard=lambda address: False,
            name_at=str,
            with_partners=set,
        )
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(module.probing, "not_answering", self.ask)
        monkeypatch.setattr(module, "close_connections", lambda address: None)
        monkeypatch.setattr(module, "say", lambda line: None)
        self.probes = Probes(connection, timeout, [])
        self.probes._have_answer = lambda answering: None

    def ask(self, addresses, seconds):
        until, answers = self.now + seconds, {}
        for task in addresses:
            stops = self.stops.get(task, ())
            goes_on = next((end for begin, end in stops if begin <= self.now < end), self.now)
            answers[task] = goes_on + self.delay
        silent = {task for task, at in answers.items() if at > until}
        self.now = until if silent else max([self.now, *answers.values()])
        self._stand_still()
        return silent

    def run(self, seconds):
        while self.now < seconds:
            pause = self.probes.probe()
            self.now += pause
            self._stand_still()

    def _stand_still(self):
        while self.pauses and self.pauses[0][0] <= self.now:
            self.now = max(self.now, self.pauses.pop(0)[1])


TIMEOUTS = pytest.mark.parametrize("timeout", [0.5, 1.0, 3.0, 8.0, 20.0, 60.0, 600.0])


@TIMEOUTS
def test_who_is_stopped_counts_as_lost_within_the_timeout(monkeypatch, timeout):
    for seed in range(100):
        begin = 3 * timeout * random.Random(seed).random()
        clock = Clock(monkeypatch, timeout, {TASKS[0]: [(begin, 1e9)]})
        clock.run(begin + 3 * timeout)
        assert list(clock.condemned) == [TASKS[0]]
        (at,) = clock.condemned[TASKS[0]]
        assert at - begin <= timeout + 1e-6
        assert at - begin >= timeout - 2 * deadlines.probe_every(timeout)  # it was heard before


@TIMEOUTS
def test_one_that_is_lost_for_good_does_not_delay_the_verdict_on_another(monkeypatch, timeout):
    for seed in range(100):
        begin = (4 + 3 * random.Random(seed).random()) * timeout
        stops = {TASKS[0]: [(timeout, 1e9)], TASKS[1]: [(begin, 1e9)]}
        clock = Clock(monkeypatch, timeout, stops)
        clock.run(begin + 3 * timeout)
        (at,) = clock.condemned[TASKS[1]]
        assert at - begin <= timeout + deadlines.glance(timeout)


@pytest.mark.parametrize("timeout", [3.0, 8.0, 20.0, 60.0])
def test_who_stops_for_less_is_not_lost_and_who_is_back_answers_again(monkeypatch, timeout):
    for seed in range(100):
        draw = random.Random(seed)
        stops = {}
        for task in TASKS:
            now = 0.0
            for _ in range(5):
                begin = now + draw.uniform(1.0, 3.0) * timeout
                now = begin + draw.choice([0.4, 1.6]) * timeout
                stops.setdefault(task, []).append((begin, now))
        clock = Clock(monkeypatch, timeout, stops)
        clock.run(40 * timeout)
        for task in TASKS:
            long = [(b, e) for b, e in stops[task] if e - b > timeout]
            found = clock.condemned.get(task, [])
            assert len(found) == len(long), (task, stops[task], found)
            for (begin, _), at in zip(long, found, strict=True):
                # Others that are asked for the last time make it later.
                late = deadlines.probe_every(timeout) + deadlines.last_question(timeout)
                assert 0.4 * timeout < at - begin < timeout + late
            assert not clock.liveness.is_silent(task)


@TIMEOUTS
def test_who_is_slow_to_answer_is_there(monkeypatch, timeout):
    """Slower than a probe waits, but not than the last question."""
    delay = 0.9 * deadlines.last_question(timeout)
    assert delay > deadlines.glance(timeout)
    clock = Clock(monkeypatch, timeout, delay=delay)
    clock.run(50 * timeout)
    assert clock.condemned == {}


@pytest.mark.parametrize("timeout", [3.0, 20.0, 60.0])
def test_while_this_process_stands_still_nobody_is_silent(monkeypatch, timeout):
    """A task that was stopped meanwhile, too, has nearly all its time from then on."""
    for seed in range(100):
        begin = random.Random(seed).uniform(2.0, 3.0) * timeout
        end = begin + 6 * timeout
        for more, lost in ((0.25, False), (2.0, True)):
            stops = {TASKS[0]: [(begin - 0.01, end + more * timeout)]}
            clock = Clock(monkeypatch, timeout, stops, pauses=[(begin, end)])
            clock.run(20 * timeout)
            assert bool(clock.condemned) == lost, clock.condemned


def test_one_that_answered_no_calls_is_there_once_it_answers_one():
    """It may have been started anew between two probes, of which none found it gone."""
    liveness, task = Liveness(8.0), {TASKS[0]}
    since = deadlines.CALL_EVERY_SECONDS + 8.0
    for now in range(0, 40, 1):
        if now == 1:
            liveness.calls(TASKS[0], float(now))
        silent = liveness.probed(float(now), float(now), task, set())
        assert bool(silent) == (now - 1 > since)
        liveness.condemn(silent)
    liveness.called(answered=False)  # its connection was closed
    assert liveness.probed(40.0, 40.0, task, set()) == task and liveness.is_silent(TASKS[0])
    liveness.calls(TASKS[0], 41.0)
    liveness.called(answered=True)
    assert liveness.probed(41.0, 41.0, task, set()) == set()
    assert not liveness.is_silent(TASKS[0])


def test_time_in_which_this_process_stood_still_is_not_a_calls():
    liveness, task = Liveness(8.0), {TASKS[0]}
    liveness.probed(0.0, 0.0, task, set())
    liveness.calls(TASKS[0], 0.5)
    assert liveness.probed(1000.0, 1000.0, task, set()) == set()
    for now in range(1001, 1050):
        silent = liveness.probed(float(now), float(now), task, set())
    assert silent == task
