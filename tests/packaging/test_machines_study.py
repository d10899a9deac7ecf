"""`benchmarks/reproduce/machines.py`: the model of machines' time, by hand, and its page."""

import numpy as np
import pytest

from tests.packaging.repository import ROOT


@pytest.fixture
def machines(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "reproduce"))
    import machines

    return machines


def test_a_network_by_hand(machines):
    """2 x 4 x 2 weights on two machines, which have half of each layer.

    Forward each machine makes 4 multiply-adds, sends 2 values of the hidden layer, makes 4 more and
    sends 1 number of its outputs; backward twice 4, of which it sends 2 sums, and 4. So 20 of the
    40 that there are, the network's 16 weights three times but for the lowest gradient's 8.
    """
    found = machines.dense((2, 4, 2), 2)
    assert [phase.work for phase in found] == [(4, 4), (4, 4), (8, 8), (4, 4)]
    assert [phase.sent.get((0, 1), 0) for phase in found] == [8, 4, 8, 0]
    # 3 examples, 2 multiply-adds and 6 bytes a second, a message of 1 s: 30 s, 3 s and 10 s.
    of = machines.Machines(rate=2, bandwidth=6, message=1, batch=3)
    assert machines.on_paper(found, of) == pytest.approx(30 + 3 + 10)
    assert machines.simulated(found, of) == pytest.approx(43)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_where_all_send_to_all_the_flow_is_what_paper_says(machines, n):
    network = machines.dense(machines.LAYERS, n)
    of = machines.Machines()
    assert machines.simulated(network, of) == pytest.approx(machines.on_paper(network, of))


def test_the_slowest_of_many_is_what_paper_says(machines):
    """The mean over 400 mini-batches, within 4 standard errors, where messages take no time."""
    network = machines.dense((40, 40, 40, 40), 8)
    of = machines.Machines(rate=1e3, bandwidth=1e18, message=0, batch=1, spread=0.7)
    found = [machines.simulated(network, of, seed) for seed in range(400)]
    error = np.std(found) / 20
    assert abs(np.mean(found) - machines.on_paper(network, of)) < 4 * error
    assert machines.on_paper(network, of) > 2 * 3 * 8 * 40 * 40 / 8 / 1e3 / 8  # and not none


@pytest.mark.parametrize(("parts", "pieces"), [(2, 1), (2, 4), (3, 6), (4, 8)])
def test_a_chain_in_pieces_is_the_known_formula(machines, parts, pieces):
    """P m / (m + P - 1) times as fast as one machine; of two parts 2 m / (m + 1)."""
    of = machines.Machines(message=0, pieces=pieces)
    alone = machines.simulated(machines.chain(1, 1e9), of)
    found = machines.simulated(machines.chain(parts, 1e9), of)
    assert alone / found == pytest.approx(parts * pieces / (pieces + parts - 1))


def test_a_machine_takes_in_one_message_after_another(machines):
    """Three machines of 1, 2 and 3 s, whose messages to one of them take 2 s each: 2, 4 and then 1.

    Of the two that machine 0 gets the first is there at 2 + 2, and the second 2 s later.
    """
    first = machines.Phase((1.0, 2.0, 3.0), {(1, 0): 4.0, (2, 0): 4.0})
    network = [first, machines.Phase((1.0, 0.0, 0.0), {})]
    of = machines.Machines(rate=1, bandwidth=4, message=1, batch=1)
    assert machines.simulated(network, of) == pytest.approx(2 + 2 + 2 + 1)
    assert machines.on_paper(network, of) == pytest.approx(3 + 2 + 2 + 1)


def test_tiles_see_each_other(machines):
    """Of 2 x 2 machines with 91 places a side: 45 and 46, whose nodes see 9 places further."""
    network = machines.local(8, 2)
    forward = sum(sum(phase.work) for phase in network[:3])
    assert forward == 100 * (8 * 91**2 + 64 * 82**2 + 64 * 73**2)
    # The first has nodes 0 to 40 of 82 a side, which see places 0 to 49, and has 0 to 44.
    assert network[0].sent[1, 0] == 4 * 8 * 45 * (50 - 45)
    assert network[0].sent[3, 0] == 4 * 8 * 5 * 5
    assert network[3].sent[0, 1] == network[1].sent[1, 0]  # gradients go where values came from
    assert machines.local(8, 1)[0].sent == {}


@pytest.mark.parametrize(("peak", "speed_up"), [(8, 2.2), (16, 3.0)])
def test_what_a_peak_says_of_bytes_and_messages(machines, peak, speed_up):
    """Put back into the formula: as fast there as was said, and less on either side."""
    of_bytes, of_messages = machines.solved(peak, speed_up)

    def found(n):
        return 1 / (1 / n + (n - 1) / n * of_bytes + (n - 1) * of_messages)

    assert found(peak) == pytest.approx(speed_up)
    assert found(peak) > found(peak - 0.1) and found(peak) > found(peak + 0.1)


def test_a_study_has_what_the_model_says(machines):
    """On paper and by the flow; the same for all seeds where nothing hangs on chance."""
    condition = {"network": "speech", "size": "42 M", "otherwise": "twice", "machines": 4}
    assert condition in machines.STUDY.conditions
    found = machines.run(condition, [1, 2], [1.0], None)
    of = machines.Machines(rate=2 * machines.AS_ASSUMED.rate)
    alone, over = (machines.dense(machines.LAYERS, n) for n in (1, 4))
    expected = machines.on_paper(alone, of) / machines.on_paper(over, of)
    assert found["on_paper"] == [pytest.approx([expected] * 2)]
    assert found["simulated"] == [pytest.approx([expected] * 2)]
    by_chance = machines.run(condition | {"otherwise": "of 1"}, [1, 2], [1.0], None)
    assert by_chance["simulated"][0][0] != by_chance["simulated"][0][1]
