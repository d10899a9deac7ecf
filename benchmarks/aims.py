"""The aims of speed, what was reached of them, and what a loop written by hand reaches.

`figures.py` writes the table from the runs that are committed (`published/*.json`): of
`own_loops.py`, `cluster_throughput.py`, `fit_throughput.py`, `epoch_cost.py`, `first_fit.py` and
`growth.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Sequence

import cluster_throughput
import epoch_cost
import first_fit
import fit_throughput
import growth
import limits
import own_loops
import runs

Values = Sequence[float]


def published(name: str) -> dict:
    """What a benchmark wrote."""
    return dict(json.loads((runs.HERE / f"published/{name}.json").read_text()))


@dataclasses.dataclass(frozen=True)
class Aim:
    """One of the aims.

    Attributes:
        words: what is measured, of what.
        aim: the ratio, or what `unit` says, that was to be reached.
        measured: what was, a value for each repetition.
        loop: the same of a loop written by hand, where there is one.
        most: whether the aim is not to be exceeded.
        unit: of the aim.
    """

    words: str
    aim: float
    measured: Callable[[], Values]
    loop: Callable[[], Values] | None = None
    most: bool = False
    unit: str = ""

    def reached(self) -> bool:
        """By the median."""
        middle = round(statistics.median(self.measured()), 2)
        return middle <= self.aim if self.most else middle >= self.aim

    def row(self) -> list[str]:
        digits = 0 if self.unit else 2
        by_hand = "" if self.loop is None else runs.spread(list(self.loop()), digits)
        return [
            self.words,
            f"{'at most' if self.most else 'at least'} {self.aim:g}{self.unit}",
            runs.spread(list(self.measured()), digits) + self.unit,
            by_hand,
            "yes" if self.reached() else "**no**",
        ]


def in_group(name: str, index: int, one: str, *others: str) -> Callable[[], Values]:
    """Of a published file's group, one's speed beside the better of the others."""

    def measured() -> Values:
        results = published(name)["groups"][index]["results"]
        return runs.beside(results, one, runs.better(results, *others))

    return measured


def in_loops(group: str, one: str, *others: str) -> Callable[[], Values]:
    return in_group(f"own_loops_{group}", 0, one, *others)


def epoch(kind: str) -> Callable[[], Values]:
    """Milliseconds of all processes beyond plain Keras's epoch and an epoch's own exchange."""

    def measured() -> Values:
        results = published("epoch_cost")["results"]
        found = {each["kind"]: epoch_cost.in_all(each["turns"]) for each in results}
        plain = statistics.median(found["plain"])
        exchange = [0.0] if kind == "threads" else exchange_ms()
        return [each - plain - statistics.median(exchange) for each in found[kind]]

    return measured


def exchange_ms() -> list[float]:
    """Milliseconds of all processes that an exchange takes: periods of 1 beside those of 20.

    On the day, and the machine, of `epoch_cost.json`.
    """
    results = published("own_loops_processes")["groups"][0]["results"]

    def of(name: str) -> list[float]:
        return [1e3 * sum(run["cpu_seconds"].values()) / run["steps"] for run in results[name]]

    pairs = zip(of(cluster_throughput.EVERY_STEP), of(cluster_throughput.EVERY_20), strict=True)
    return [(every - seldom) * 20 / 19 for every, seldom in pairs]


def first(until: str, kind: str) -> Callable[[], Values]:
    """Seconds until then, in plain Keras's."""

    def measured() -> Values:
        results = published("first_fit")["results"]
        pairs = zip(results[kind], results["plain"], strict=True)
        return [one[until]["seconds"] / plain[until]["seconds"] for one, plain in pairs]

    return measured


def grown(group: str, size: str, period: str) -> Callable[[], Values]:
    """The chief's processor time for a mini-batch, in that of the smallest."""

    def measured() -> Values:
        (results,) = [g["results"] for g in published("growth")["groups"] if g["name"] == group]
        pairs = zip(
            growth.chief(results, size, period),
            growth.chief(results, next(iter(results)), period),
            strict=True,
        )
        return [one / least for one, least in pairs]

    return measured


def moved(name: str) -> Callable[[], Values]:
    """The speed of an exchange beside a bare one; of the sizes that are the slowest."""

    def measured() -> Values:
        (results,) = [g["results"] for g in published("growth")["groups"] if g["name"] == "weights"]
        return min(
            (growth.beside_bare(results, size, name) for size in results), key=statistics.median
        )

    return measured


def model(index: int) -> Callable[[], Values]:
    """The slowest of ours without XLA, beside plain `fit` at its best setting."""
    record = published("models")["groups"][index]
    results = record["results"]
    ours = [
        name
        for name in results
        if name.startswith(("Downpour", "averaging")) and "jit_compile" not in name
    ]
    plain = [name for name in results if name.startswith(fit_throughput.PLAIN)]
    measured = [in_group("models", index, name, *plain) for name in ours]
    return min(measured, key=lambda each: statistics.median(each()))


def processes() -> list[Aim]:
    """Each speed as README has it; where it has none, and by hand, as `own_loops.py` has it."""
    peers, own, far = cluster_throughput, own_loops, limits.PROCESSES
    long = "epochs of 2,000"

    def ours(name: str, *beside: str) -> Callable[[], Values]:
        return in_group("cluster_throughput", 0, name, *beside)

    def loops(name: str, beside: str) -> Callable[[], Values]:
        return in_loops("processes", name, beside)

    ways = (
        ("", peers.EVERY_20, "Downpour, periods of 20", own.OWN_ARRAYS_20),
        (
            ", `steps_per_execution=20`, files",
            peers.PIPELINES_20,
            "Downpour, periods of 20, workers read files",
            own.OWN_FILES_20,
        ),
    )
    found = []
    for words, name, in_long, loop in ways:
        words = f"processes, periods of 20{words}"
        of = "of two bare processes"
        found.append(Aim(f"{words}, {of}", 0.75, ours(name, far), loops(loop, far)))
        words = words.replace(" `steps_per_execution=20`,", "")  # README's alone
        long_ones = loops(f"{in_long}, {long}", far)
        found.append(Aim(f"{words}, {long}, {of}", 0.75, long_ones, loops(loop, far)))
    torch = peers.AVERAGING
    for words, name, _, loop in ways:
        words = f"processes, periods of 20{words}, beside PyTorch's averaging"
        found.append(Aim(words, 1.0, ours(name, torch), loops(loop, torch)))
    servers = (peers.PSS_1, peers.PSS_20)
    at_best = "beside `ParameterServerStrategy` at its best"
    words = f"processes, periods of 20, `steps_per_execution=20`, {at_best}"
    found.append(Aim(words, 6.0, ours(peers.EXECUTION_20, *servers)))
    once = "processes, periods of 1"
    for words, name, loop, limit in (
        (once, peers.EVERY_STEP, own.OWN_ARRAYS_1, limits.EXCHANGE_1),
        (
            f"{once}, `steps_per_execution=20`, files",
            peers.PIPELINES_1,
            own.OWN_FILES_1,
            limits.EXCHANGE_1_CALL_20,
        ),
    ):
        words = f"{words}, of the bare exchange"
        found.append(Aim(words, 0.85, ours(name, limit), loops(loop, limit)))
    found.append(Aim(f"{once}, {at_best}", 1.0, ours(peers.EVERY_STEP, *servers)))
    return found


def threads() -> list[Aim]:
    """As of processes."""
    own = own_loops
    plain, plain_20 = fit_throughput.PLAIN, own.PLAIN_20
    aims = (
        ("20, of two bare threads", 0.85, own.OWN_SUMS_20, (limits.THREADS,)),
        ("20, beside plain `fit` at its best", 1.5, own.OWN_SUMS_20, (plain, plain_20)),
        ("1, of the bare loop with locked pushes", 0.85, own.OWN_FIT_1, (limits.PUSHES_1,)),
    )
    found = []
    for words, aim, loop, beside in aims:
        ours = f"Downpour, periods of {words.partition(',')[0]}"
        measured = in_group("fit_throughput", 0, ours, *beside)
        by_hand = in_loops("threads", loop, beside[-1])
        found.append(Aim(f"threads, periods of {words}", aim, measured, by_hand))
    return found


def others() -> list[Aim]:
    found = [
        Aim(f"an epoch's own cost, {kind}", 15.0, epoch(kind), most=True, unit=" ms")
        for kind in ("threads", "arrays", "files")
    ]
    for kind in ("downpour", "softsync", "averaging", "elastic"):
        by_hand = kind == "averaging"
        for until, words, aim in (
            ("first batch", "to the first mini-batch", 1.1),
            ("fit", "the first `fit`", 1.2),
        ):
            loop = first(until, first_fit.LOOP) if by_hand else None
            found.append(
                Aim(f"{words}, {kind}, in plain Keras's", aim, first(until, kind), loop, most=True)
            )
    sizes = (("workers", "16"), ("workers", "64"), ("variables", "40"), ("variables", "300"))
    for (what, size), period in itertools.product(sizes, ("1", "20")):
        words = f"the chief's time with {size} {what}, periods of {period}, in that with the fewest"
        found.append(Aim(words, 1.2, grown(what, size, period), most=True))
    for name in growth.BESIDE:
        words = f"a {name} of 1 to 100 MB, of a bare one, at the slowest size"
        found.append(Aim(words, 0.6, moved(name)))
    for index, name in enumerate(("a CNN", "an LSTM", "a transformer's block")):
        words = f"{name}, the slowest of ours without XLA, beside plain `fit` at its best"
        found.append(Aim(words, 0.95, model(index)))
    return found


def table() -> str:
    """All aims."""
    rows = [aim.row() for aim in (*processes(), *threads(), *others())]
    return runs.table(["what", "aim", "measured", "a loop by hand", "reached"], rows)
