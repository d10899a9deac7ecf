"""The claims of systems: batch methods, codecs, A3C, tables, Hogwild!, replicas on machines."""

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
                if (n, t) != (few, 40)  # L-BFGS has then nothing to judge yet
            ),
        ),
    ]


def _strom() -> list[Claim]:
    def c(codec: str, link: int = 100) -> dict:
        return of(codec=codec, link=link)

    none = c("none")

    def as_accurate(name: str) -> Cell:
        return Cell(f"{name} less none", c(name), none, "<=", margin=0.5)

    return [
        Claim(
            "strom",
            "ninety times fewer bytes, and more, cost no accuracy",
            "Strom, 2015",
            "an error at most half a point higher at equal steps",
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
                "an error at most half a point higher at equal steps",
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
            "sending every twentieth time, without a codec, costs no accuracy",
            "",
            "an error at most half a point higher at equal steps",
            (as_accurate("none, both every 20"),),
        ),
        Claim(
            "strom",
            "on a slow link a codec saves more time than sending seldom",
            "",
            "fewer virtual seconds for equal steps than pushes every fourth mini-batch, or than "
            "pushes and fetches every twentieth",
            tuple(
                Cell(
                    f"{name} beside {seldom}, {link} Mbit/s",
                    *(c(name, link), c(f"none, {seldom}", link), "<"),
                    measure="seconds",
                    ratio=True,
                )
                for seldom in ("pushes every 4", "both every 20")
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
            "A3C costs no more episodes with more workers",
            "Mnih et al., 2016",
            "at most a tenth more than one worker's",
            tuple(
                Cell(
                    f"{n} workers beside one",
                    *(c(n), c(1), "<="),
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
            "less missing to the best AUC; beside one worker at most 0.005 more",
            (
                Cell("less synchronous, mean gradient", half, c("synchronous, mean gradient"), "<"),
                Cell("less synchronous, mean weights", half, c("synchronous, mean weights"), "<"),
                Cell("less one worker", half, c("one worker"), "<=", margin=0.005),
            ),
            digits=4,
        ),
        Claim(
            "half_sync",
            "half-synchronous training is more accurate than asynchronous",
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
            "half-synchronous training is nearly as fast as asynchronous",
            "Lian et al., 2022",
            "at most a tenth more virtual seconds for equal examples",
            (
                Cell(
                    "beside asynchronous",
                    *(half, apart, "<="),
                    measure="virtual_seconds",
                    ratio=True,
                    margin=0.1,
                ),
                Cell(
                    "at a period of 8",
                    *(c("half-synchronous, 8"), c("asynchronous, 8"), "<="),
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


def _strom_large() -> list[Claim]:
    # Where one element of 279 is emitted, as in the paper at its threshold of 2.
    return [
        Claim(
            "strom_large",
            "entropy coding makes messages a further three times smaller",
            "Strom, 2015",
            "three times within a half, where as few elements are emitted as in the paper",
            (Cell("tau = 0.0055, less 3", of(tau=0.0055), 3.0, "=", "further", margin=0.5),),
        ),
    ]


def _slow_link() -> list[Claim]:
    codecs = (
        *("Cast, bfloat16", "OneBit", "PowerSGD, rank 4", "TopK, 1 %", "Threshold 0.016"),
        *("Threshold 0.064", "peers, Threshold 0.064"),
    )
    return [
        Claim(
            "slow_link",
            "over a real link of 100 Mbit/s a codec makes more mini-batches a second than none",
            "",
            "more, whatever a codec computes",
            tuple(
                Cell(
                    f"{name} less none",
                    *(of(sent=name, link=100), of(sent="none", link=100), ">"),
                    measure="mini_batches_per_second",
                )
                for name in codecs
            ),
            digits=1,
        ),
        *_errors_over_links(codecs),
    ]


def _errors_over_links(codecs: Sequence[str]) -> list[Claim]:
    return [
        Claim(
            "slow_link",
            f"over a real link of 100 Mbit/s a codec is better than {beside}",
            "",
            "a lower error after 30 seconds, at one rate for all",
            tuple(
                Cell(f"{name} less {other}", of(sent=name, link=100), of(sent=other, link=100), "<")
                for name in codecs
            ),
        )
        for other, beside in (
            ("none", "none"),
            ("none, pushes every 4", "pushing every fourth mini-batch"),
            ("none, both every 20", "pushing and fetching every twentieth"),
        )
    ]


def _machines() -> list[Claim]:
    def c(network: str, size: str, machines: int, otherwise: str = "as assumed") -> dict:
        return of(network=network, size=size, otherwise=otherwise, machines=machines)

    def speech(n: int) -> dict:
        return c("speech", "42 M", n)

    def images(size: str, n: int = 81, otherwise: str = "as assumed") -> dict:
        return c("images", size, n, otherwise)

    largest = "1.7 B"
    return [
        Claim(
            "machines",
            "fully connected layers are fastest on eight machines, to which constants were fitted, "
            "slower on more",
            "Dean et al., 2012",
            "by a model of the time, with constants that are assumed",
            (
                Cell("8 less 4", speech(8), speech(4), ">"),
                Cell("16 less 8", speech(16), speech(8), "<"),
                Cell("32 less 16", speech(32), speech(16), "<"),
            ),
            computed=True,
        ),
        Claim(
            "machines",
            "locally connected layers gain up to 81 machines, the largest most",
            "Dean et al., 2012",
            "by the same model",
            (
                *(
                    Cell(f"{size}, 81 less 36", images(size), images(size, 36), ">")
                    for size in ("80 M", "330 M", largest)
                ),
                Cell("330 M less 80 M, on 81", images("330 M"), images("80 M"), ">"),
                Cell("1.7 B less 330 M, on 81", images(largest), images("330 M"), ">"),
            ),
            computed=True,
        ),
        Claim(
            "machines",
            "the largest is about twelve times as fast on 81 machines",
            "Dean et al., 2012",
            "twelve within three, by the same model",
            tuple(
                Cell(f"{otherwise}, less 12", images(largest, 81, otherwise), 12.0, "=", margin=3.0)
                for otherwise in ("as assumed", "of 1", "an eighth")
            ),
            computed=True,
        ),
    ]


def _batch_norm() -> list[Claim]:
    def lag(way: str, workers: int, expected: str = "=", margin: float = 1.0) -> Cell:
        return Cell(
            f"{way}, M = {workers}", of(way=way, workers=workers), 0.0, expected, margin=margin
        )

    falling = (
        *("Downpour, period 1", "Downpour, period 5", "softsync, c = M"),
        *("averaging every 5", "elastic averaging every 5"),
    )
    constant = "Adagrad on each, constant"
    return [
        Claim(
            "batch_norm",
            "BatchNorm's moving statistics are a serial pass's, at a rate that falls",
            "",
            "with them a validation loss within 1 % of that with a serial pass's",
            (
                lag("plain fit", 1),
                *(lag(way, workers) for workers in (4, 16) for way in falling),
                lag("Adagrad on each", 16),
            ),
        ),
        Claim(
            "batch_norm",
            "at a constant rate statistics lag behind many workers' weights, not once these rest",
            "",
            "a loss more than a tenth higher; after one more epoch at a rate of 0 within 1 %",
            (lag(constant, 16, ">", margin=10.0), lag(f"{constant}, then 0", 16)),
        ),
    ]


SYSTEMS: Sequence[Claim] = [
    *_sandblaster(),
    *_strom(),
    *_strom_large(),
    *_slow_link(),
    *_a3c(),
    *_half_sync(),
    *_hogwild(),
    *_machines(),
    *_batch_norm(),
]
