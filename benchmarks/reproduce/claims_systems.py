"""The claims of methods that are systems: batch methods, codecs, A3C, half-synchronous tables."""

from collections.abc import Sequence
from typing import Any

from evidence import Cell, Claim


def of(**fields: Any) -> dict[str, Any]:
    """A condition."""
    return fields


def _sandblaster() -> list[Claim]:
    def c(method: str, replicas: int, until: int) -> dict:
        return of(method=method, replicas=replicas, until=until)

    few, many, times = 16, 160, (40, 80, 160)
    batch, adagrad, fixed = "L-BFGS", "Adagrad", "fixed rate"
    return [
        Claim(
            "sandblaster_seconds",
            "Downpour with Adagrad is ahead of Sandblaster with ten times the replicas",
            "Dean et al., 2012",
            "a lower error after the same seconds, 16 replicas beside 160",
            tuple(
                Cell(
                    f"after {t} s, Adagrad on 16 less L-BFGS on 160",
                    *(c(adagrad, few, t), c(batch, many, t), "<"),
                )
                for t in times
            ),
        ),
        Claim(
            "sandblaster_seconds",
            "Sandblaster with ten times the replicas is ahead of Downpour at a fixed rate",
            "Dean et al., 2012",
            "a lower error after the same seconds, 160 replicas beside 16",
            tuple(
                Cell(
                    f"after {t} s, L-BFGS on 160 less fixed rate on 16",
                    *(c(batch, many, t), c(fixed, few, t), "<"),
                )
                for t in times
            ),
        ),
        Claim(
            "sandblaster_seconds",
            "with as many replicas Downpour with Adagrad is ahead of Sandblaster",
            "",
            "a lower error after the same seconds",
            tuple(
                Cell(
                    f"after {t} s, on {n}, Adagrad less L-BFGS",
                    *(c(adagrad, n, t), c(batch, n, t), "<"),
                )
                for n in (few, many)
                for t in times
            ),
        ),
    ]


def _strom() -> list[Claim]:
    def c(codec: str, link: int = 100) -> dict:
        return of(codec=codec, link=link)

    none = c("none")

    def as_accurate(name: str) -> Cell:
        return Cell(f"{name} less none", c(name), none, "=", margin=0.5)

    return [
        Claim(
            "strom",
            "hundreds of times fewer bytes cost no accuracy",
            "Strom, 2015",
            "an error within half a point at equal steps",
            tuple(as_accurate(f"Threshold {tau}") for tau in ("0.016", "0.064")),
        ),
        Claim(
            "strom",
            "a threshold that is too large costs accuracy",
            "Strom, 2015",
            "a higher error at equal steps",
            tuple(
                Cell(f"Threshold {tau} less none", c(f"Threshold {tau}"), none, ">")
                for tau in ("0.25", "1", "4")
            ),
        ),
        *(
            Claim(
                "strom",
                f"{what} costs no accuracy",
                source,
                "an error within half a point at equal steps",
                tuple(as_accurate(name) for name in names),
            )
            for what, source, names in (
                ("one bit an element, with a residual,", "Seide et al., 2014", ("OneBit",)),
                ("a sign, with a residual,", "Karimireddy et al., 2019", ("EFSign",)),
                ("a share of the largest", "Lin et al., 2018", ("TopK, 1 %", "TopK, 0.1 %")),
                ("a low rank", "Vogels et al., 2019", ("PowerSGD, rank 4", "PowerSGD, rank 1")),
                ("quantising", "Alistarh et al., 2017", ("QSGD, 64 levels", "QSGD, 4 levels")),
            )
        ),
        Claim(
            "strom",
            "on a slow link a codec saves more time than sending seldom",
            "",
            "fewer virtual seconds for equal steps than pushes every fourth mini-batch",
            tuple(
                Cell(
                    f"{name}, {link} Mbit/s",
                    *(c(name, link), c("none, pushes every 4", link), "<"),
                    measure="seconds",
                    ratio=True,
                )
                for name, link in (
                    ("Threshold 0.064", 100),
                    ("Threshold 0.064", 10),
                    ("OneBit", 100),
                    ("Cast, bfloat16", 100),
                    ("Cast, bfloat16", 10),
                )
            ),
        ),
    ]


def _a3c() -> list[Claim]:
    def c(workers: int) -> dict:
        return of(workers=workers)

    return [
        Claim(
            "a3c",
            "A3C is faster the more workers there are",
            "Mnih et al., 2016",
            "fewer seconds than half as many workers; the paper: 2.1, 1.8, 1.9 and 1.8 times",
            tuple(
                Cell(f"{n} workers beside {n // 2}", c(n), c(n // 2), "<", ratio=True)
                for n in (2, 4, 8, 16)
            ),
        ),
        Claim(
            "a3c",
            "and that costs no more episodes",
            "Mnih et al., 2016",
            "no more than a tenth more or less than one worker's",
            tuple(
                Cell(
                    f"{n} workers beside one",
                    *(c(n), c(1), "="),
                    measure="episodes",
                    ratio=True,
                    margin=0.1,
                )
                for n in (2, 4, 8, 16)
            ),
        ),
    ]


def _half_sync() -> list[Claim]:
    def c(way: str) -> dict:
        return of(way=way)

    half, apart = c("half-synchronous"), c("asynchronous")
    return [
        Claim(
            "half_sync",
            "half-synchronous training is as accurate as synchronous",
            "Lian et al., 2022",
            "no more missing to the best AUC; beside one worker within 0.005",
            (
                Cell("less synchronous, mean gradient", half, c("synchronous, mean gradient"), "<"),
                Cell("less synchronous, mean weights", half, c("synchronous, mean weights"), "<"),
                Cell("less one worker", half, c("one worker"), "=", margin=0.005),
            ),
            digits=4,
        ),
        Claim(
            "half_sync",
            "and more accurate than asynchronous",
            "Lian et al., 2022",
            "less missing to the best AUC",
            (
                Cell("less asynchronous", half, apart, "<"),
                Cell(
                    "at a period of 8, less asynchronous",
                    *(c("half-synchronous, 8"), c("asynchronous, 8"), "<"),
                ),
            ),
            digits=4,
        ),
        Claim(
            "half_sync",
            "and nearly as fast as asynchronous",
            "Lian et al., 2022",
            "at most a tenth more or fewer virtual seconds for equal examples",
            (
                Cell(
                    "beside asynchronous",
                    *(half, apart, "="),
                    measure="virtual_seconds",
                    ratio=True,
                    margin=0.1,
                ),
                Cell(
                    "at a period of 8",
                    *(c("half-synchronous, 8"), c("asynchronous, 8"), "="),
                    measure="virtual_seconds",
                    ratio=True,
                    margin=0.1,
                ),
            ),
        ),
    ]


def _hogwild() -> list[Claim]:
    problems = {"logistic": (0.00016, 0.0016, 0.016), "completion": (0.0016, 0.016, 0.16)}

    def cells(one: str, other: str, beside: str, measure: str = "ms", only: str = "") -> tuple:
        return tuple(
            Cell(
                f"{problem}, {100 * density:g} %, {one} beside {other}",
                of(problem=problem, density=density, contender=one),
                of(problem=problem, density=density, contender=other),
                beside,
                measure=measure,
                ratio=True,
            )
            for problem, densities in problems.items()
            if only in problem
            for density in densities
        )

    seconds, source = "less time for a mini-batch", "Niu et al., 2011"
    return [
        Claim(
            "hogwild",
            "Hogwild! on two threads is faster than one thread",
            source,
            f"{seconds}; the paper, on ten: 3 times as fast",
            cells("Hogwild!", "one thread", "<"),
        ),
        Claim(
            "hogwild",
            "Hogwild! is faster than locks of rows",
            source,
            seconds,
            cells("Hogwild!", "AIG", "<"),
        ),
        Claim(
            "hogwild",
            "locks of rows are faster than round-robin",
            source,
            seconds,
            cells("AIG", "round-robin", "<"),
        ),
        Claim(
            "hogwild",
            "Hogwild! is faster than round-robin",
            source,
            f"{seconds}; the paper: not where a gradient takes 1 ms",
            cells("Hogwild!", "round-robin", "<"),
        ),
        Claim(
            "hogwild",
            "a library for such a model takes less",
            "",
            "less processor time for a mini-batch than Hogwild!",
            cells("scikit-learn", "Hogwild!", "<", measure="cpu_ms", only="logistic"),
        ),
    ]


SYSTEMS: Sequence[Claim] = [*_sandblaster(), *_strom(), *_a3c(), *_half_sync(), *_hogwild()]
