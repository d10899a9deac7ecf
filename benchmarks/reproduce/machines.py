"""How much faster a replica is that lies over several machines: what a model of their time says.

    python benchmarks/reproduce/machines.py

Dean et al. (2012), figure 3: fully connected layers of 42 million parameters are 2.2 times as fast
on 8 machines and slower on more; locally connected ones of 1.7 billion more than 12 times on 81.

A machine makes so many multiply-adds a second, one phase of one piece of the mini-batch after
another, as what they need is there. It takes in one message after another, each in so many
seconds and its bytes / bandwidth, while it computes. The share `spread` of a phase's time is
exponentially distributed, with the same mean. Nothing is said of the weights' update, of memory, of
pooling and normalisation. `on_paper` adds that up phase by phase, as if all waited for the slowest
at each; `simulated` is the flow itself, on the clock of the simulator.

The clock, and the numbers drawn at random, are those of `tf_dsgd.SimulatedCluster`. Its links are
not: they carry what a worker and the shards send each other, whose bytes they count in tensors.
"""

import driver  # isort: skip (finds the package)

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

import tf_dsgd
from tf_dsgd.engine.virtual_clock import VirtualClock

FLOAT = 4  # bytes
LAYERS = (440, 2560, 2560, 2560, 2560, 8192)
"""Values in and after each layer of the network for speech."""
IMAGE, FILTER = 100, 10
"""Of the network for images: pixels of a side, of the image and of what a node sees."""
FILTERS = {"80 M": 8, "330 M": 16, "1.7 B": 36}
"""The paper's sizes, and how many nodes at each place come to about these."""


@dataclasses.dataclass(frozen=True)
class Machines:
    """What a machine of 2012 is assumed to be, unless it is said otherwise."""

    rate: float = 50e9
    """Multiply-adds in a second: of 20 cores with 2.5 billion each."""
    bandwidth: float = 125e6
    """Bytes in a second: of Ethernet with 1 Gbit."""
    message: float = 100e-6
    """Seconds of a message besides its bytes."""
    spread: float = 0.0
    """The share of a phase's time that chance decides; from 0 to 1."""
    batch: int = 32
    """Examples of a mini-batch."""
    pieces: int = 1
    """In which it flows through the parts."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """What machines compute before they next need something from one another, for one example."""

    work: tuple[float, ...]
    """Multiply-adds of each machine; 0 of one that has no part in it."""
    sent: dict[tuple[int, int], float]
    """(from, to) -> bytes of what the next phase needs."""


# -- networks ---------------------------------------------------------------------------------


def dense(layers: Sequence[int], machines: int) -> list[Phase]:
    """Fully connected layers; each machine has so many of the nodes of every layer.

    Forward each needs what all others' nodes give. Backward each adds up, of every node below, the
    gradient by its own nodes, and sends the sum to the machine that has the node. The outputs are
    normalised, for which a number of each machine goes to all.
    """
    weights = [a * b for a, b in itertools.pairwise(layers)]
    pairs = [(i, j) for i in range(machines) for j in range(machines) if i != j]

    def phase(multiply_adds: float, values: float) -> Phase:
        sent = {pair: FLOAT * values / machines for pair in pairs if values}
        return Phase((multiply_adds / machines,) * machines, sent)

    forward = [phase(w, values) for w, values in zip(weights, layers[1:-1], strict=False)]
    outputs = phase(weights[-1], machines)  # a number of each machine
    backward = [
        phase(2 * w, values) for w, values in zip(weights[:0:-1], layers[-2:0:-1], strict=True)
    ]
    return [*forward, outputs, *backward, phase(weights[0], 0)]


def local(filters: int, side: int) -> list[Phase]:
    """Three layers whose nodes see 10 x 10 places of the layer below, with weights of their own.

    `side` x `side` machines have a tile of the image each, and of every layer the nodes above it.
    Each layer has 9 places a side fewer than the one below.
    """
    places = [IMAGE - (FILTER - 1) * depth for depth in range(4)]
    channels = [1, filters, filters, filters]
    sums = [
        FILTER**2 * below * filters * np.outer(*[np.diff(_bounds(side, size))] * 2).ravel()
        for below, size in zip(channels, places[1:], strict=False)
    ]
    seen = [_overlaps(side, below, above) for below, above in itertools.pairwise(places)]
    sent = [{pair: FLOAT * filters * n for pair, n in each.items()} for each in seen]
    back = [{(j, i): size for (i, j), size in each.items()} for each in sent]
    # The pixels come from outside, to each its own.
    return [
        Phase(tuple(sums[0]), sent[1]),
        Phase(tuple(sums[1]), sent[2]),
        Phase(tuple(sums[2]), {}),
        Phase(tuple(2 * sums[2]), back[2]),
        Phase(tuple(2 * sums[1]), back[1]),
        Phase(tuple(sums[0]), {}),
    ]


def _bounds(side: int, size: int) -> list[int]:
    return [i * size // side for i in range(side + 1)]


def _overlaps(side: int, below: int, above: int) -> dict[tuple[int, int], int]:
    """(from, to) -> places below that nodes above see, and another machine has."""
    has, gives = _bounds(side, below), _bounds(side, above)
    row = np.array(
        [
            [
                max(0, min(has[i + 1], gives[j + 1] + FILTER - 1) - max(has[i], gives[j]))
                for j in range(side)
            ]
            for i in range(side)
        ]
    )
    every = np.kron(row, row)  # of rows and of columns
    return {(i, j): int(every[i, j]) for i, j in zip(*np.nonzero(every), strict=True) if i != j}


def chain(parts: int, work: float, sent: float = 0.0) -> list[Phase]:
    """Equal parts one behind the other, as `ModelParallel` has them; backward is twice forward."""

    def phase(part: int, times: int, after: int | None) -> Phase:
        here = tuple(times * work / parts if p == part else 0.0 for p in range(parts))
        return Phase(here, {} if after is None else {(part, after): sent})

    forward = [phase(p, 1, p + 1 if p + 1 < parts else None) for p in range(parts)]
    return [*forward, *(phase(p, 2, p - 1 if p else None) for p in reversed(range(parts)))]


# -- seconds of a mini-batch --------------------------------------------------------------------


def on_paper(network: Sequence[Phase], of: Machines) -> float:
    """Of one piece: at each phase all wait for the slowest, and then for who gets most.

    Exact for equal machines that all send to all; with a `spread` the mean, if messages take no
    time: the largest of n exponential numbers is 1 + 1/2 + ... + 1/n in the mean.
    """
    total = 0.0
    for phase in network:
        longest = 1 + of.spread * math.fsum(1 / n for n in range(2, len(phase.work) + 1))
        total += longest * of.batch * max(phase.work) / of.rate
        got: dict[int, float] = collections.defaultdict(float)
        for (_, to), size in phase.sent.items():
            got[to] += of.message + of.batch * size / of.bandwidth
        total += max(got.values(), default=0.0)
    return total


def simulated(network: Sequence[Phase], of: Machines, seed: int = 0) -> float:
    """The flow of one mini-batch, in pieces."""
    return _Flow(network, of, seed).seconds()


class _Flow:
    def __init__(self, network: Sequence[Phase], of: Machines, seed: int):
        self._network, self._of = network, of
        self._random = np.random.default_rng(seed)
        self._chance = tf_dsgd.Exponential(of.spread)
        self._clock = VirtualClock()
        machines = len(network[0].work)
        self._ready: list[list[tuple[int, int]]] = [[] for _ in range(machines)]
        self._computes, self._takes_in = [False] * machines, [0.0] * machines
        self._sent: list[dict[int, list[tuple[int, float]]]] = []
        """Of each phase, by sender: (to, bytes for one example)."""
        for phase in network:
            self._sent.append(collections.defaultdict(list))
            for (sender, to), size in phase.sent.items():
                self._sent[-1][sender].append((to, size))
        self._needs: dict[tuple[int, int, int], int] = {}
        """(phase, piece, machine) -> what it waits for."""
        for p, n in itertools.product(range(len(network)), range(machines)):
            if network[p].work[n]:
                before = network[p - 1] if p else None
                messages = 0 if before is None else sum(to == n for _, to in before.sent)
                own = before is not None and bool(before.work[n])
                for piece in range(of.pieces):
                    self._needs[p, piece, n] = messages + own

    def seconds(self) -> float:
        for p, piece, n in self._needs:
            if p == 0:
                self._ready[n].append((p, piece))
        for n in range(len(self._ready)):
            self._begin(n)
        while self._clock.events:
            self._clock.take_event()
        if self._needs:
            raise RuntimeError(f"{len(self._needs)} pieces of work were never done.")
        return self._clock.now

    def _begin(self, n: int) -> None:
        """A machine takes up what has been ready for longest."""
        if self._computes[n] or not self._ready[n]:
            return
        self._computes[n] = True
        p, piece = self._ready[n].pop(0)
        of = self._of
        seconds = of.batch / of.pieces * self._network[p].work[n] / of.rate
        if of.spread:
            seconds *= 1 - of.spread + self._chance.draw(self._random, self._clock.now)
        self._clock.after(seconds, functools.partial(self._end, p, piece, n))

    def _end(self, p: int, piece: int, n: int) -> None:
        of, now = self._of, self._clock.now
        del self._needs[p, piece, n]
        for to, size in self._sent[p][n]:
            seconds = of.message + of.batch / of.pieces * size / of.bandwidth
            self._takes_in[to] = max(self._takes_in[to], now) + seconds
            there = functools.partial(self._is_there, p + 1, piece, to)
            self._clock.after(self._takes_in[to] - now, there)
        self._computes[n] = False
        self._is_there(p + 1, piece, n)
        self._begin(n)

    def _is_there(self, p: int, piece: int, n: int) -> None:
        if (p, piece, n) in self._needs:
            self._needs[p, piece, n] -= 1
            if not self._needs[p, piece, n]:
                self._ready[n].append((p, piece))
                self._begin(n)


# -- what is asked of it ----------------------------------------------------------------------


def solved(peak: float, speed_up: float) -> tuple[float, float]:
    """(seconds of all bytes, of one round of messages), in one machine's seconds, by a peak.

    Of n machines, fully connected, equal and without `spread`, the seconds are
    1 / n + (n - 1) / n b + (n - 1) m. That is least at n = sqrt((1 - b) / m).
    """
    n = peak
    of_bytes = (n**2 / speed_up - 2 * n + 1) / (n - 1) ** 2
    return of_bytes, (1 - of_bytes) / n**2


AS_ASSUMED = Machines()
OTHERWISE = {
    "as assumed": {},
    "half the multiply-adds a second": {"rate": AS_ASSUMED.rate / 2},
    "twice": {"rate": AS_ASSUMED.rate * 2},
    "half the bandwidth": {"bandwidth": AS_ASSUMED.bandwidth / 2},
    "an eighth": {"bandwidth": AS_ASSUMED.bandwidth / 8},
    "twice the bandwidth": {"bandwidth": AS_ASSUMED.bandwidth * 2},
    "messages of 0.05 ms": {"message": 50e-6},
    "of 0.2 ms": {"message": 200e-6},
    "of 1 ms": {"message": 1e-3},
    "mini-batches of 8": {"batch": 8},
    "of 128": {"batch": 128},
    "a spread of 0.3": {"spread": 0.3},
    "of 1": {"spread": 1.0},
    "of 1, and half the bandwidth": {"spread": 1.0, "bandwidth": AS_ASSUMED.bandwidth / 2},
    "two pieces": {"pieces": 2},
    "four pieces": {"pieces": 4},
}
SPEECH, SIDES = (2, 4, 8, 16, 32), (2, 4, 6, 9, 12)
LARGEST = "1.7 B"


def network(name: str, size: str, machines: int) -> list[Phase]:
    if name == "speech":
        return dense(LAYERS, machines)
    return local(FILTERS[size], math.isqrt(machines))


def run(condition, seeds, rates, options) -> dict:
    """How much faster than one machine, on paper and simulated."""
    of = dataclasses.replace(AS_ASSUMED, **OTHERWISE[condition["otherwise"]])
    name, size, machines = (condition[k] for k in ("network", "size", "machines"))
    one = on_paper(network(name, size, 1), of)
    over = network(name, size, machines)
    times = [one / simulated(over, of, seed) for seed in (seeds if of.spread else seeds[:1])]
    if not of.spread:  # nothing hangs on chance
        times *= len(seeds)
    return {"simulated": [times], "on_paper": [[one / on_paper(over, of)] * len(seeds)]}


def conditions() -> list[dict]:
    """As assumed all networks; otherwise the one for speech, and the largest on 81 machines."""

    def of(name: str, size: str, machines: int, otherwise: str = "as assumed") -> dict:
        return {"network": name, "size": size, "otherwise": otherwise, "machines": machines}

    found = [of("speech", "42 M", n) for n in SPEECH]
    found += [of("images", size, side**2) for size in FILTERS for side in SIDES]
    for otherwise, changed in OTHERWISE.items():
        if changed:
            found += [of("speech", "42 M", n, otherwise) for n in SPEECH]
            found.append(of("images", LARGEST, 81, otherwise))
    return found


STUDY = driver.Study(
    name="machines",
    conditions=conditions(),
    grid=lambda condition: (0, 0),
    run=run,
    options={},
    seeds=10,
    together=10,
    chosen_by="simulated",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
