"""The claims of averaging: its period, the optimizer's state, BMUF, DiLoCo, elastic averaging."""

import functools
from collections.abc import Sequence

from claims_systems import of
from evidence import Cell, Claim


def _averaging_period() -> list[Claim]:
    def cell(a: int, b: int, expected: str, margin: float = 0.0) -> Cell:
        return Cell(f"{a} less {b}", of(period=a), of(period=b), expected, margin=margin)

    clock = functools.partial(Cell, ratio=True, by_rank=True)

    def seconds(period: int) -> dict:
        return of(workers="two", period=period)

    def beside(plain: str, **measured: str) -> tuple[Cell, ...]:
        plain_fit = of(workers=plain, period=0)
        return tuple(
            clock(f"every {p}, {plain}", seconds(p), plain_fit, "<", **measured)
            for p in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        )

    one, twenty = "plain", "plain, 20 a call"

    return [
        Claim(
            "averaging_seconds",
            "two workers that average take less time than plain `fit`",
            "",
            "fewer seconds of an epoch on two cores",
            beside(one),
        ),
        Claim(
            "averaging_seconds",
            "two workers that average take less time than plain `fit` of 20 steps a call",
            "",
            "fewer seconds of an epoch on two cores",
            beside(twenty),
        ),
        Claim(
            "averaging_seconds",
            "two workers that average take less CPU time than plain `fit`",
            "",
            "fewer CPU seconds of an epoch",
            beside(one, measure="cpu_seconds"),
        ),
        Claim(
            "averaging_seconds",
            "two workers that average take less CPU time than plain `fit` of 20 steps a call",
            "",
            "fewer CPU seconds of an epoch",
            beside(twenty, measure="cpu_seconds"),
        ),
        Claim(
            "averaging_seconds",
            "an average takes CPU time, so that longer periods save some",
            "",
            "fewer CPU seconds of an epoch with twice the period",
            tuple(
                clock(f"{2 * p}, not {p}", seconds(2 * p), seconds(p), "<", "cpu_seconds")
                for p in (1, 2, 4, 8, 16, 32, 64, 128)
            ),
        ),
        Claim(
            "averaging_period",
            "averaging every 10 to 20 mini-batches is acceptable",
            "Su and Chen, 2015",
            "an error at most half a point above averaging every one",
            (cell(8, 1, "<=", 0.5), cell(16, 1, "<=", 0.5)),
        ),
        Claim(
            "averaging_period",
            "accuracy falls with longer periods",
            "Su and Chen, 2015",
            "a higher error at each four times longer one",
            (cell(4, 1, ">"), cell(16, 4, ">"), cell(64, 16, ">"), cell(256, 64, ">")),
        ),
    ]


def _policies() -> list[Claim]:
    def cell(optimizer: str, period: int, state: str) -> Cell:
        pair = (of(optimizer=optimizer, period=period, state=s) for s in (state, "average"))
        return Cell(f"{optimizer}, period {period}", *pair, ">")

    pairs = [(o, p) for o in ("momentum", "Adam") for p in (4, 16, 64)]
    return [
        Claim(
            "averaging_policies",
            f'`optimizer_state="{state}"` is worse than `"average"`',
            "",
            "a higher error",
            tuple(cell(o, p, state) for o, p in pairs),
        )
        for state in ("local", "reset")
    ]


def _bmuf() -> list[Claim]:
    def c(workers: int, method: str, period: int = 8) -> dict:
        return of(workers=workers, period=period, method=method)

    alone, plain, block = of(workers=1, period=0, method="one worker"), "plain averaging", "BMUF"
    counts = (2, 4, 8, 16)
    return [
        Claim(
            "bmuf",
            "plain averaging loses accuracy as workers become more",
            "Chen and Huo, 2016",
            "a higher error than one worker's",
            tuple(Cell(f"M = {m}", c(m, plain), alone, ">") for m in counts),
        ),
        Claim(
            "bmuf",
            "BMUF keeps the accuracy of one worker",
            "Chen and Huo, 2016",
            "an error at most half a point above it",
            (
                *(Cell(f"M = {m}", c(m, block), alone, "<=", margin=0.5) for m in counts),
                Cell("M = 16, period 2", c(16, block, 2), alone, "<=", margin=0.5),
            ),
        ),
        Claim(
            "bmuf",
            "BMUF is better than plain averaging",
            "Chen and Huo, 2016",
            "a lower error with as many workers",
            tuple(
                Cell(f"M = {m}, {name}", c(m, method), c(m, plain), "<")
                for m in counts
                for method, name in ((block, "classical"), ("BMUF, Nesterov", "Nesterov"))
            ),
        ),
        Claim(
            "bmuf_seconds",
            "BMUF's speed-up is almost linear",
            "Chen and Huo, 2016",
            "at most a tenth more worker-seconds a mini-batch than one worker",
            tuple(
                Cell(
                    f"M = {m}, period {p}, {time}",
                    of(workers=m, period=p, time=time),
                    of(workers=1, period=0, time=time),
                    "<=",
                    measure="worker_seconds",
                    ratio=True,
                    margin=0.1,
                )
                for time in ("log-normal", "exponential")
                for p in (8, 32)
                for m in counts
            ),
        ),
    ]


def _diloco() -> list[Claim]:
    def c(period: int, method: str) -> dict:
        return of(period=period, method=method)

    periods = (4, 16, 64, 256)
    return [
        Claim(
            "diloco",
            "DiLoCo is better than plain averaging",
            "Douillard et al., 2023",
            "a lower loss",
            tuple(
                Cell(f"period {p}", c(p, "DiLoCo"), c(p, "plain averaging"), "<") for p in periods
            ),
            digits=4,
        ),
        Claim(
            "diloco",
            "DiLoCo does as well as synchronous training",
            "Douillard et al., 2023",
            "a loss at most 0.02 higher",
            tuple(
                Cell(f"period {p}", c(p, "DiLoCo"), c(0, "synchronous"), "<=", margin=0.02)
                for p in periods
            ),
            digits=4,
        ),
    ]


def _elastic() -> list[Claim]:
    def c(workers: int, period: int, method: str) -> dict:
        return of(workers=workers, period=period, method=method)

    settings = [(m, p) for m in (4, 16) for p in (1, 4, 16, 64)]
    return [
        Claim(
            "elastic",
            "EASGD is better than Downpour at long periods",
            "Zhang et al., 2015",
            "a lower error at periods of 16 and 64",
            tuple(
                Cell(f"M = {m}, period {p}", c(m, p, "EASGD"), c(m, p, "Downpour"), "<")
                for m, p in settings
                if p >= 16
            ),
        ),
        Claim(
            "elastic",
            "EASGD is better than Downpour at long periods, and at any time before",
            "Zhang et al., 2015",
            "a lower error after a quarter, a half and three quarters of the seconds",
            tuple(
                Cell(
                    f"M = {m}, period {p}, after {part} of 4",
                    *(c(m, p, "EASGD"), c(m, p, "Downpour"), "<"),
                    measure=f"error_{part}",
                    chosen_by=f"error_{part}",
                )
                for m, p in settings
                if p >= 16
                for part in (1, 2, 3)
            ),
        ),
        Claim(
            "elastic",
            "EAMSGD is better than EASGD",
            "Zhang et al., 2015",
            "a lower error",
            tuple(
                Cell(f"M = {m}, period {p}", c(m, p, "EAMSGD"), c(m, p, "EASGD"), "<")
                for m, p in settings
            ),
        ),
    ]


AVERAGING: Sequence[Claim] = [
    *_averaging_period(),
    *_policies(),
    *_bmuf(),
    *_diloco(),
    *_elastic(),
]
