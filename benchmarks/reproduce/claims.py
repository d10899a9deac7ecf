"""Every claim that the studies of this directory test, as comparisons of their conditions."""

from collections.abc import Sequence
from typing import Any

from claims_averaging import AVERAGING
from claims_systems import SYSTEMS, of
from evidence import Cell, Claim


def _softsync() -> list[Claim]:
    def c(n: int, scaling: str) -> dict:
        return of(n=n, scaling=scaling)

    tau, fixed = "alpha_0 / tau", "fixed"
    synchronous = c(1, fixed)
    seldom = 1e-4
    return [
        *(
            Claim(
                "softsync_staleness",
                f"staleness above 2n is seldom, {workers}",
                "Zhang et al., 2016" if workers == "equal workers" else "",
                "with a probability below 0.0001, for n of 15 and 30",
                tuple(
                    Cell(
                        f"n = {n}, messages of {message:g} s, share less 0.0001",
                        *({"n": n, "mini-batch": speed, "message": message}, seldom, "<"),
                    )
                    for n in (15, 30)
                    for message in (0.01, 0.05, 0.2, 1.0)
                ),
                digits=4,
            )
            for workers, speed in (("equal workers", "one second"), ("any workers", "exponential"))
        ),
        Claim(
            "softsync_learning",
            "alpha_0 / tau keeps the rate of synchronous training",
            "Zhang et al., 2016",
            "at the rate of 1-softsync 15- and 30-softsync learn with alpha_0 / tau, not without",
            tuple(
                Cell(
                    f"{n}-softsync, alpha_0 / tau less fixed",
                    c(n, tau),
                    c(n, fixed),
                    "<",
                    at=synchronous,
                )
                for n in (15, 30)
            ),
            digits=1,
        ),
        Claim(
            "softsync_learning",
            "with a rate of its own a fixed rate is as good",
            "",
            "an error at most a point higher",
            tuple(
                Cell(
                    f"{n}-softsync, fixed less alpha_0 / tau",
                    c(n, fixed),
                    c(n, tau),
                    "<=",
                    margin=1.0,
                )
                for n in (15, 30)
            ),
            digits=1,
        ),
        Claim(
            "softsync_learning",
            "softsync and scaling, two by two",
            "",
            "n = 1 or 30, with and without the scaling, each at its own rate: neither, nor the two "
            "together, is worth more than a point",
            (
                Cell("scaling at n = 1", c(1, tau), c(1, fixed), "=", margin=1.0),
                Cell("scaling at n = 30", c(30, tau), c(30, fixed), "=", margin=1.0),
                Cell("n = 1 in place of 30, fixed", c(1, fixed), c(30, fixed), "=", margin=1.0),
                Cell("n = 1 in place of 30, scaled", c(1, tau), c(30, tau), "=", margin=1.0),
                Cell(
                    "scaling's gain at n = 30 less that at n = 1",
                    *(c(30, tau), c(30, fixed), "="),
                    beside=(c(1, tau), c(1, fixed)),
                    margin=1.0,
                ),
            ),
            digits=1,
        ),
    ]


def _adagrad() -> list[Claim]:
    def c(task: str, workers: int, optimizer: str) -> dict:
        return of(task=task, workers=workers, optimizer=optimizer)

    tasks = ("dense", "convolution", "recurrent")

    def pair(task: str, workers: int) -> tuple[dict, dict]:
        return c(task, workers, "Adagrad"), c(task, workers, "SGD")

    return [
        Claim(
            "downpour_adagrad",
            "Downpour is better with Adagrad than at a fixed rate",
            "Dean et al., 2012",
            "a lower error with 16 workers",
            tuple(Cell(f"{task}, 16 workers", *pair(task, 16), "<") for task in tasks),
        ),
        Claim(
            "downpour_adagrad",
            "Adagrad's gain is because of asynchrony",
            "",
            "Adagrad gains more with 16 workers than with one",
            tuple(
                Cell(
                    f"{task}, gain with 16 less gain with 1",
                    *pair(task, 16),
                    "<",
                    beside=pair(task, 1),
                )
                for task in tasks
            ),
        ),
    ]


def _bound() -> list[Claim]:
    def c(straggler: str, bound: Any) -> dict:
        return of(straggler=straggler, bound=bound)

    names = {"no": "equal workers", "yes": "one four times slower"}
    return [
        Claim(
            "staleness_bound",
            "a bound on staleness is better than bulk synchrony, and than none",
            "Ho et al., 2013",
            "a lower error after the same seconds",
            tuple(
                Cell(f"{name}, bound 4 less {other}", c(s, 4), c(s, bound), "<")
                for s, name in names.items()
                for bound, other in ((0, "bound 0"), ("none", "no bound"))
            ),
        ),
        Claim(
            "staleness_bound",
            "the last worker to end holds up all others",
            "Zhang et al., 2016",
            "without a bound more mini-batches are done in the same time",
            tuple(
                Cell(f"{name}, without a bound", c(s, 0), c(s, "none"), "<", "batches", ratio=True)
                for s, name in names.items()
            ),
        ),
        Claim(
            "staleness_bound",
            "a worker four times slower is better kept than left out",
            "",
            "a lower error after the same seconds, of eight than of the seven others",
            tuple(
                Cell(f"{name}, kept less left out", c("yes", bound), c("left out", bound), "<")
                for bound, name in ((0, "bound 0"), ("none", "no bound"))
            ),
        ),
    ]


def _momentum() -> list[Claim]:
    def c(workers: int, momentum: float) -> dict:
        return of(workers=workers, momentum=momentum)

    def implicit(workers: int, times: str = "exponential") -> dict:
        return {"mini-batch": times, "workers": workers}

    counts = (1, 2, 4, 8, 16)
    return [
        Claim(
            "implicit_momentum",
            "asynchrony is a momentum of 1 - 1/M",
            "Mitliagkas et al., 2016",
            "within 0.05, where mini-batches take an exponentially distributed time",
            tuple(
                Cell(f"M = {m}, less {1 - 1 / m:g}", implicit(m), 1 - 1 / m, "=", margin=0.05)
                for m in counts
            ),
            digits=3,
        ),
        Claim(
            "implicit_momentum",
            "asynchrony's rate is M times less",
            "Mitliagkas et al., 2016",
            "within a tenth of alpha / M, of 0.1 / M here",
            tuple(
                Cell(
                    f"M = {m}, less {0.1 / m:g}",
                    *(implicit(m), 0.1 / m, "="),
                    measure="rate_measured",
                    margin=0.01 / m,
                )
                for m in counts
            ),
            digits=4,
        ),
        Claim(
            "implicit_momentum",
            "asynchrony's momentum is less where all mini-batches take equally long",
            "",
            "less than 1 - 1/M",
            tuple(
                Cell(f"M = {m}, less {1 - 1 / m:g}", implicit(m, "one second"), 1 - 1 / m, "<")
                for m in counts[1:]
            ),
            digits=3,
        ),
        Claim(
            "explicit_momentum",
            "the best explicit momentum falls as workers become more",
            "Mitliagkas et al., 2016",
            "momentum does more harm, or less good, with 16 workers than with one",
            tuple(
                Cell(
                    f"momentum {mu:g}, cost with 16 less cost with 1",
                    *(c(16, mu), c(16, 0.0), ">"),
                    beside=(c(1, mu), c(1, 0.0)),
                )
                for mu in (0.3, 0.6, 0.9)
            ),
        ),
    ]


def _warm_start() -> list[Claim]:
    return [
        Claim(
            "warm_start",
            "a warm start helps many workers",
            "Dean et al., 2012",
            "a lower error with 64 workers, after as many mini-batches",
            tuple(
                Cell(
                    f"{optimizer}, with less without",
                    of(optimizer=optimizer, warm_start=300),
                    of(optimizer=optimizer, warm_start=0),
                    "<",
                )
                for optimizer in ("SGD", "Adagrad")
            ),
        )
    ]


def _fasgd() -> list[Claim]:
    batches = {4: 32, 32: 4, 250: 32, 1000: 32}

    def c(workers: int, method: str) -> dict:
        return of(workers=workers, batch=batches[workers], method=method)

    scaled, fewer = "SGD, alpha_0 / tau", "FASGD, fetch_every=10"
    return [
        Claim(
            "fasgd",
            "FASGD has a lower cost than alpha_0 / tau",
            "Odena, 2016",
            "always",
            tuple(Cell(f"M = {m}", c(m, "FASGD"), c(m, scaled), "<") for m in batches),
            digits=3,
        ),
        Claim(
            "fasgd",
            "FASGD's gap grows with M",
            "Odena, 2016",
            "with mini-batches of 32, from 4 to 250 and to 1,000 workers",
            tuple(
                Cell(
                    f"gap at {more} less that at {less}",
                    *(c(more, "FASGD"), c(more, scaled), "<"),
                    beside=(c(less, "FASGD"), c(less, scaled)),
                )
                for less, more in ((4, 250), (250, 1000))
            ),
            digits=3,
        ),
        Claim(
            "fasgd",
            "FASGD with ten times fewer fetches does no worse",
            "Odena, 2016",
            "a cost at most 0.05 higher",
            # Those of 250 and more have fetched once by the end, or not at all.
            tuple(Cell(f"M = {m}", c(m, fewer), c(m, "FASGD"), "<=", margin=0.05) for m in (4, 32)),
            digits=3,
        ),
    ]


def _delay_tolerance() -> list[Claim]:
    def c(delay: int, method: str) -> dict:
        return of(delay=delay, method=method)

    def cell(delay: int, measure: str, expected: str) -> Cell:
        name = {"regret": "online", "held_out": "held out"}[measure]
        pair = c(delay, "AdaptiveRevision"), c(delay, "Adagrad")
        return Cell(f"delay {delay}, {name}", *pair, expected, measure, chosen_by=measure)

    return [
        Claim(
            "delay_tolerance",
            "AdaptiveRevision is better than Adagrad at long delays",
            "McMahan and Streeter, 2014",
            "a lower loss at delays of 1,000 and more",
            tuple(cell(d, m, "<") for d in (1024, 4096) for m in ("regret", "held_out")),
            digits=4,
        ),
        Claim(
            "delay_tolerance",
            "AdaptiveRevision is worse than Adagrad at short delays",
            "",
            "a higher loss at delays of 16 and 64",
            tuple(cell(d, "regret", ">") for d in (16, 64)),
            digits=4,
        ),
    ]


def _delay_compensation() -> list[Claim]:
    def c(workers: int, method: str, **more: float) -> dict:
        return of(workers=workers, method=method, **more)

    alone = c(1, "SGD")
    lambdas = {
        "DC-ASGD-c": (0.1, 1.0, 10.0, 100.0, 1000.0),
        "DC-ASGD-a": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    }
    names = {"DC-ASGD-c": "constant", "DC-ASGD-a": "adaptive"}
    return [
        Claim(
            "delay_compensation",
            "asynchrony costs accuracy",
            "Zheng et al., 2017",
            "a higher error than sequential SGD",
            tuple(Cell(f"M = {m}", c(m, "SGD"), alone, ">") for m in (4, 16)),
        ),
        Claim(
            "delay_compensation",
            "DC-ASGD is better than asynchronous SGD",
            "Zheng et al., 2017",
            "a lower error",
            tuple(
                Cell(f"M = {m}, {name}", c(m, method), c(m, "SGD"), "<")
                for m in (4, 16)
                for method, name in names.items()
            ),
        ),
        *(
            Claim(
                "delay_compensation",
                f"DC-ASGD is better at a lambda that is given, M = {m}",
                "",
                "a lower error at one lambda at least, with as many rates to choose from",
                tuple(
                    Cell(
                        f"{names[method]}, lambda = {given:g}",
                        *(c(m, f"{method}, fine", **{"lambda": given}), c(m, "SGD"), "<"),
                    )
                    for method in lambdas
                    for given in lambdas[method]
                ),
                some=True,
            )
            for m in (4, 16)
        ),
        Claim(
            "delay_compensation",
            "adaptive DC-ASGD is better than sequential SGD",
            "Zheng et al., 2017",
            "a lower error with 4 workers",
            (Cell("M = 4, adaptive", c(4, "DC-ASGD-a"), alone, "<"),),
        ),
    ]


CLAIMS: Sequence[Claim] = [
    *_adagrad(),
    *_warm_start(),
    *_softsync(),
    *_bound(),
    *_delay_tolerance(),
    *_fasgd(),
    *_delay_compensation(),
    *_momentum(),
    *AVERAGING,
    *SYSTEMS,
]
