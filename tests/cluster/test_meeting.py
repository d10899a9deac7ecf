"""Equal processes' meetings and exchanges while TensorFlow refuses runs: groups in threads here."""

import concurrent.futures
import contextlib
import os
import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster import processes
from tf_dsgd.spmd import collectives, exchange, sessions
from tf_dsgd.transport import cluster_spec

REFUSED = "The same RunGraph (Worker) request was received twice. request_id: 7"
_IN_A_ROW = 5  # refusals of one session's runs: ten of one run are an error


class Refusing:
    """A session some of whose runs fail.

    A run on this process's server is refused before it begins. One over several may have been
    refused by one of them after the others did their part, or all of them. What was done on
    another's server may be done again, as if its answer was lost.
    """

    def __init__(self, session, random, own, counts):
        self._session, self._random, self._own, self._counts = session, random, own, counts
        self._in_a_row = 0

    def run(self, *arguments):
        drawn = self._random.random() if self._in_a_row < _IN_A_ROW else 0.5
        if drawn < 0.15:
            self._refuse("before")
        result = self._session.run(*arguments)
        if drawn > 0.85 and not self._own:
            self._refuse("after")
        self._in_a_row = 0
        return result

    def _refuse(self, when):
        self._counts[when] += 1
        self._in_a_row += 1
        raise tf.errors.AbortedError(None, None, REFUSED)


@contextlib.contextmanager
def groups(number, monkeypatch, seed=0):
    """Groups of one cluster, which talk over the network, and how often runs were refused."""
    random, counts = np.random.default_rng(seed), {"before": 0, "after": 0}
    opens = sessions.Sessions.open

    def refusing(self, graph, at):
        own = at == (self._cluster.task_type, self._cluster.task_index)
        return Refusing(opens(self, graph, at), random, own, counts)

    monkeypatch.setattr(sessions.Sessions, "open", refusing)
    with processes.addresses(number) as addresses:
        configs = [processes.tf_config("worker", k, worker=addresses) for k in range(number)]
        yield (
            [collectives.Group(cluster_spec.from_tf_config(c, ps=False), 20.0) for c in configs],
            counts,
        )


def in_each(made, function):
    """What `function(group)` gives for each group, all at once."""
    with concurrent.futures.ThreadPoolExecutor(len(made)) as pool:
        return [f.result(60.0) for f in [pool.submit(function, group) for group in made]]


@pytest.mark.parametrize("number", [2, 3])
def test_refused_runs_change_nothing(monkeypatch, number):
    lanes = [exchange.Spec((5000,), "float32", "mean"), exchange.Spec((3,), "int64", "sum")]
    rounds = 40

    def work(group):
        joined = exchange.exchange(group, lanes)
        random = np.random.default_rng(group.rank)
        found = []
        for k in range(rounds):
            numbers = random.integers(0, 100, 5003)
            got = joined([numbers[:5000].astype("float32"), numbers[5000:]])
            found.append((numbers, [np.array(x) for x in got], group.meet(k, group.rank)))
            if k % 10 == 0:
                found[-1] += (group.broadcast([numbers, np.float32(-0.0)]), group.texts(f"{k}ä"))
        return found

    with groups(number, monkeypatch) as (made, counts):
        workers = in_each(made, work)
    assert min(counts.values()) > 20
    for k, together in enumerate(zip(*workers, strict=True)):
        given = np.stack([each[0] for each in together])
        for _, (mean, total), met, *more in together:
            np.testing.assert_allclose(mean, given[:, :5000].mean(0), rtol=1e-6)
            assert mean.tobytes() == together[0][1][0].tobytes()
            np.testing.assert_array_equal(total, given[:, 5000:].sum(0))
            assert met.tolist() == [[k, rank] for rank in range(number)]
            if more:
                copied, texts = more
                np.testing.assert_array_equal(copied[0], given[0])
                assert np.signbit(copied[1])
                assert texts == [f"{k}ä"] * number


def test_a_run_that_is_always_refused_is_an_error(monkeypatch):
    with groups(2, monkeypatch) as (made, _):
        monkeypatch.setattr(Refusing, "run", lambda self, *_: self._refuse("before"))
        with pytest.raises(ConnectionError, match="was received twice"):
            in_each(made, lambda group: group.meet())


@pytest.mark.parametrize(
    "numbers", [((1, 2), (1,)), ((), (0,))], ids=["fewer numbers", "none and one"]
)
def test_meetings_at_different_places_are_an_error(monkeypatch, numbers):
    with groups(2, monkeypatch) as (made, _):
        with pytest.raises(RuntimeError, match=r"worker \d at .* is at another place"):
            in_each(made, lambda group: group.meet(*numbers[group.rank]))
        with pytest.raises(RuntimeError, match="is at another place"):  # from then on
            made[0].meet()


def test_different_exchanges_at_a_time_are_an_error(monkeypatch):
    specs = [[exchange.Spec((size,), "float32", "mean")] for size in (3, 4)]

    def mean(group):
        return exchange.exchange(group, specs[group.rank])([np.ones(3 + group.rank)])

    refused = pytest.raises(RuntimeError, match=r"worker \d at .* is at another place")
    with groups(2, monkeypatch) as (made, _), refused:
        in_each(made, mean)


@pytest.mark.parametrize("meetings", [1, 5])
def test_a_process_that_was_started_again_is_told_from_the_former(monkeypatch, meetings):
    with groups(2, monkeypatch) as (made, _):
        in_each(made, lambda group: [group.meet() for _ in range(meetings)])
        again = collectives.Group(made[1].cluster, 20.0)
        again._session = made[1].sessions()  # at its address
        with pytest.raises(RuntimeError, match="started again while the other went on"):
            in_each([made[0], again], lambda group: group.meet())


def test_an_interrupt_in_the_middle_is_the_end_of_doing_things_together(monkeypatch):
    """What the others have of it would be taken for what comes next."""
    with groups(2, monkeypatch) as (made, _):
        in_each(made, lambda group: group.meet())

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(sessions.Answer, "get", interrupted)
            with pytest.raises(KeyboardInterrupt):
                made[0].meet()
        with pytest.raises(RuntimeError, match=r"left what all do together, by KeyboardInterrupt"):
            made[0].meet()


def test_a_wait_is_as_long_as_it_says(monkeypatch):
    with groups(2, monkeypatch) as (made, _):
        in_each(made, lambda group: group.meet())
        made[0].timeout_seconds = 1.5
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"waited 1\.5 s, and worker 1 at .* did not come"):
            made[0].meet()
        assert 1.4 < time.monotonic() - start < 10.0  # asking who answers takes some


def test_meetings_leave_no_thread(monkeypatch):
    with groups(2, monkeypatch) as (made, _):
        joined = [exchange.exchange(g, [exchange.Spec((10,), "float32", "mean")]) for g in made]

        def meet(times):
            in_each(made, lambda g: [joined[g.rank]([np.ones(10)]) for _ in range(times)])
            return len(os.listdir("/proc/self/task"))

        before = meet(50)
        assert meet(200) < before + 20


def test_one_that_begins_late_is_waited_for_and_then_has_its_time(monkeypatch):
    """The other waits for its server for all the time there is, by a clock that jumps."""
    jumped, late = threading.Event(), [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], sleep=time.sleep)
    monkeypatch.setattr(collectives, "time", clock)
    with groups(2, monkeypatch) as (made, _):
        awaits = made[0]._await_servers

        def long():
            awaits()
            late[0] += made[0].timeout_seconds
            jumped.set()

        monkeypatch.setattr(made[0], "_await_servers", long)

        def work(group):
            group.sessions() if group.rank else None
            assert not group.rank or jumped.wait(20.0)
            return [group.meet(k).tolist() for k in (7, 8)]

        assert in_each(made, work) == [[[[7], [7]], [[8], [8]]]] * 2
