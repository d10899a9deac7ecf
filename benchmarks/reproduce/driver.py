"""One driver for the studies: runs what is missing, extends grids, writes down, goes on later.

A study names its conditions and how one is run; `claims.py` what is asked of them. A run has a seed
from which *everything* follows that chance decides: split or data, their order, first weights, and
delays. Rates are powers of 2. While some seed's choice is at the edge of a grid, that grid is
extended there, up to `EXTENSIONS` times. Beside the best power of 2 come two rates half an octave
from it. Then the conditions that a claim compares with it get as many rates as it has, at both ends
of theirs.

    python benchmarks/reproduce/NAME.py                # all that is missing, into results/NAME.json
    python benchmarks/reproduce/NAME.py --seeds 16     # as well as what is there already
    python benchmarks/reproduce/NAME.py --quick        # a small one, into no file
    python benchmarks/reproduce/NAME.py --rerun 5      # five of the runs again, beside the file's
    python benchmarks/figures.py --plots               # tables and plots of the pages
"""

import setting  # isort: skip (finds the package and `runs`)

import argparse
import dataclasses
import datetime
import inspect
import json
import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import evidence
import numpy as np
import pages
import runs

RESULTS = pages.HERE / "results"
_ = setting
EXTENSIONS = 3
WIDER = 2
"""Powers of 2 that an extension adds at an end."""
ROUNDS = 10
"""Of widening, each of which may ask for the next."""


@dataclasses.dataclass(frozen=True)
class Study:
    """What is run.

    Args:
        name: of the program, and of its file of results.
        conditions: each a dict that JSON can hold.
        grid: from a condition to its first and last exponent of 2; the same where there is no rate.
        to_octave: from a condition to the rates between a power of 2 and the next, itself counted:
            above 1 where the other side of a comparison chooses more than a rate.
        run: from (condition, seeds, rates, options) to each measure's values, `[rates][seeds]`.
        options: sizes, each with its value in full and in `--quick`.
        seeds: how many; they are 1, 2, ...
        together: seeds of one call of `run`, where they can share what chance decides.
        tuned: fields of conditions that are chosen with the rate.
        chosen_by: the measure that chooses, the less the better.
    """

    name: str
    conditions: Sequence[Mapping[str, Any]]
    grid: Callable[[Mapping[str, Any]], tuple[int, int]]
    run: Callable[[Mapping[str, Any], list[int], list[float], argparse.Namespace], dict]
    options: Mapping[str, tuple[int, int]]
    seeds: int = 8
    together: int = 1
    tuned: tuple[str, ...] = ()
    chosen_by: str = "error"
    to_octave: Callable[[Mapping[str, Any]], int] = lambda condition: 1


class Record:
    """A study's file: its options, its program, where runs were made, and the runs."""

    def __init__(
        self,
        study: Study,
        options: Mapping[str, int],
        path: Path | None,
        same_program: bool = False,
    ):
        self.study, self.path = study, path
        program = pages.program(Path(inspect.getfile(study.run)))
        self.content: dict[str, Any] = {
            "study": study.name,
            "program": program,
            "tuned": list(study.tuned),
            "chosen_by": study.chosen_by,
            "options": dict(options),
            "origins": [],
            "runs": [],
        }
        if path is not None and path.exists():
            found = pages.loaded(path)
            if found["study"] != study.name:
                raise SystemExit(f"{path} has runs of {found['study']!r}, not of {study.name!r}.")
            if found["options"] != self.content["options"]:
                raise SystemExit(
                    f"{path} has runs of other options: {found['options']}, not "
                    f"{self.content['options']}. Give another file by --results."
                )
            if found.get("program") != program and not same_program:
                raise SystemExit(
                    f"{path} has runs of an earlier version of this program. Give another file by "
                    "--results; or, if it measures what it did, --same_program."
                )
            self.content = {**found, "program": program}
        self.has = {
            (evidence.key(r["condition"]), r["seed"], r["rate"]) for r in self.content["runs"]
        }

    def results(self) -> evidence.Results:
        return evidence.Results(self.content["runs"], self.study.tuned, self.study.chosen_by)

    def add(
        self, condition: Mapping, seeds: list[int], rates: list[float], values: Mapping
    ) -> None:
        """One call's runs; to the file at once."""
        for i, rate in enumerate(rates):
            for j, seed in enumerate(seeds):
                of_run = {name: digits(v[i][j]) for name, v in values.items()}
                run = {"condition": dict(condition), "seed": seed, "rate": rate, "values": of_run}
                self.content["runs"].append(run)
                self.has.add((evidence.key(condition), seed, rate))
        self.write()

    def began(self) -> None:
        """Where the runs that follow are made."""
        origin = runs.provenance()
        self.content["origins"].append(origin)

    def write(self) -> None:
        if self.path is None:
            return
        head = {k: v for k, v in self.content.items() if k != "runs"}
        groups = evidence.packed(self.content["runs"])
        lines = ",\n".join(json.dumps(group, separators=(",", ":")) for group in groups)
        text = json.dumps(head, indent=1)[:-2] + f',\n "runs": [\n{lines}\n]}}\n'
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)


class Driver:
    """Runs a study."""

    def __init__(self, study: Study, record: Record, options: argparse.Namespace, seeds: list[int]):
        self.study, self.record, self.options, self.seeds = study, record, options, seeds
        self.began = False
        self.extended: dict[str, int] = {}
        """By condition, without what is tuned, how often its grid was."""

    def everything(self, only: str) -> None:
        """Each condition whose JSON the expression finds."""
        pools: dict[str, list[Mapping]] = {}
        for condition in self.study.conditions:
            untuned = {k: v for k, v in condition.items() if k not in self.study.tuned}
            if re.search(only, json.dumps(condition)):
                pools.setdefault(evidence.key(untuned), []).append(condition)
        # Seeds on the outside: a study that is cut off has whole ones.
        for seeds in self._chunks():
            for pool in pools.values():
                for condition in pool:
                    self._run(condition, seeds, self._exponents(condition))
        for _ in range(ROUNDS):
            for untuned, pool in pools.items():
                self._extend(untuned, pool)
                self._refine(pool)
            if not self._level(pools):
                return
        print(f"After {ROUNDS} rounds some sides have still fewer rates than others.", flush=True)

    def _chunks(self) -> list[list[int]]:
        step = self.study.together
        return [self.seeds[k : k + step] for k in range(0, len(self.seeds), step)]

    def _exponents(self, condition: Mapping) -> list[float]:
        """The first grid's, and those that other seeds have run at."""
        low, high = self.study.grid(condition)
        parts = self.study.to_octave(condition)
        first = {round(low + k / parts, 6) for k in range((high + 1 - low) * parts)}
        name = evidence.key(condition)
        known = {round(math.log2(rate), 6) for has, _, rate in self.record.has if has == name}
        return sorted(first | known)

    def _extend(self, untuned: str, pool: list[Mapping]) -> None:
        """Until no choice is at an edge, or it was done often enough."""
        if not self._has_rates(pool[0]):
            return
        while self.extended.setdefault(untuned, 0) < EXTENSIONS:
            low, high = self.record.results().edges(json.loads(untuned))
            if not (low or high):
                return
            self.extended[untuned] += 1
            for condition in pool:
                self._widen(condition, WIDER * low, WIDER * high)

    def _refine(self, pool: list[Mapping]) -> None:
        """Two rates half an octave from the best one, if it is a power of 2 inside its grid."""
        if not self._has_rates(pool[0]):
            return
        for condition in pool:
            best = round(math.log2(self.record.results().best(condition)[-1]), 6)
            exponents = self._exponents(condition)
            inside = exponents[0] < best < exponents[-1]
            if inside and best == round(best) and self.study.to_octave(condition) == 1:
                for seeds in self._chunks():
                    self._run(condition, seeds, sorted({*exponents, best - 0.5, best + 0.5}))

    def _widen(self, condition: Mapping, below: int, above: int) -> None:
        """More powers of 2 at the ends of a grid."""
        exponents = self._exponents(condition)
        more = [math.floor(exponents[0]) - k for k in range(1, below + 1)]
        more += [math.ceil(exponents[-1]) + k for k in range(1, above + 1)]
        for seeds in self._chunks():
            self._run(condition, seeds, sorted([*exponents, *more]))

    def _level(self, pools: Mapping[str, list[Mapping]]) -> bool:
        """As many settings for what is compared as its other side has; whether any were missing."""
        conditions = [condition for pool in pools.values() for condition in pool]
        widened = False
        for cell in (c for claim in pages.claims_about(self.study.name) for c in claim.cells):
            sides = [side for side in cell.sides if isinstance(side, Mapping)]
            found = [[c for c in conditions if side.items() <= c.items()] for side in sides]
            if cell.at is not None:
                # At the rates that this one's seeds have chosen, whatever suits the others.
                results = self.record.results()
                choices = results.choices(cell.at, results.seeds(cell.at))
                rates = {round(math.log2(rate), 6) for *_, rate in choices}
                for condition in (c for side in found for c in side):
                    for seeds in self._chunks():
                        self._run(condition, seeds, sorted({*self._exponents(condition), *rates}))
                continue
            found = [side for side in found if side and self._has_rates(side[0])]
            counts = [sum(len(self._exponents(c)) for c in side) for side in found]
            for side, count in zip(found, counts, strict=True):
                missing = (max(counts) - count) // len(side)
                for condition in side if missing else ():
                    self._widen(condition, missing // 2, missing - missing // 2)
                    widened = True
        return widened

    def _has_rates(self, condition: Mapping) -> bool:
        low, high = self.study.grid(condition)
        return low < high

    def _run(self, condition: Mapping, seeds: list[int], exponents: list[float]) -> None:
        """What is missing of it."""
        name = evidence.key(condition)

        def missing(seed: int) -> list[float]:
            rates = [2.0**k for k in exponents]
            return [rate for rate in rates if (name, seed, rate) not in self.record.has]

        groups: dict[tuple, list[int]] = {}
        for seed in seeds:
            groups.setdefault(tuple(missing(seed)), []).append(seed)
        for rates, group in groups.items():
            if not rates:
                continue
            if not self.began:
                self.record.began()
                self.began = True
            start, cpu = time.perf_counter(), time.process_time()
            values = self.study.run(condition, group, list(rates), self.options)
            self.record.add(condition, group, list(rates), values)
            print(
                f"{datetime.datetime.now():%H:%M:%S} {name} seeds {group}, {len(rates)} rates: "
                f"{time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s of CPU",
                flush=True,
            )


def rerun(record: Record, number: int, only: str, options: argparse.Namespace) -> int:
    """Makes so many of the file's runs again, any of them; says, and gives, how many differ.

    Machines with other instructions (AVX-512 beside AVX2) round otherwise, and after some thousand
    updates a run's last digits say so. So of each condition and rate of which several seeds were
    made again it says, too, whether the interval of their mean has the mean that is published.
    """
    differing = 0
    again: dict[tuple[str, float], list[dict[str, float]]] = {}
    known = [r for r in record.content["runs"] if re.search(only, json.dumps(r["condition"]))]
    for run in random.sample(known, min(number, len(known))):
        condition, seed, rate = run["condition"], run["seed"], run["rate"]
        found = record.study.run(condition, [seed], [rate], options)
        values = {name: digits(each[0][0]) for name, each in found.items()}
        differing += values != run["values"]
        same = "equal" if values == run["values"] else f"{values}, and was {run['values']}"
        print(f"{evidence.key(condition)} seed {seed}, rate {rate:g}: {same}", flush=True)
        again.setdefault((evidence.key(condition), rate), []).append(values)
    for (name, rate), made in again.items():
        there = [r for r in known if (evidence.key(r["condition"]), r["rate"]) == (name, rate)]
        for measure in made[0] if len(made) > 1 else ():
            values = np.array([each[measure] for each in made])
            published = float(np.mean([r["values"][measure] for r in there]))
            print(f"{name}, rate {rate:g}, {measure}: {_beside(values, published)}")
    print(f"{differing} of {min(number, len(known))} runs differ from the file's")
    return differing


def _beside(values: np.ndarray, published: float) -> str:
    """The mean of runs made again, with its interval, and whether the published one is in it."""
    mean, low, high = evidence.interval(values)
    # Runs that are all equal have an interval without a width.
    within = low <= published <= high or math.isclose(mean, published, rel_tol=1e-6)
    said = "within" if within else "outside"
    return f"{mean:.6g} ({low:.6g} to {high:.6g}); published {published:.6g}, {said}"


def digits(value: float) -> float:
    """As many as a file has."""
    return float(f"{value:.6g}")


def main(study: Study, description: str, arguments: Sequence[str] | None = None) -> Record:
    """The command line that all studies share."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=None, help="how many: 1, 2, ...")
    parser.add_argument("--quick", action="store_true", help="a small one, of two seeds")
    parser.add_argument("--only", default="", help="conditions whose JSON this expression finds")
    parser.add_argument("--results", type=Path, help="in place of results/NAME.json")
    parser.add_argument("--rerun", type=int, help="so many of the file's runs again, and no other")
    parser.add_argument(
        "--same_program",
        action="store_true",
        help="the program has changed since the runs in the file, and measures what it did",
    )
    for name, (full, _) in study.options.items():
        parser.add_argument(f"--{name}", type=int, default=None, help=f"by default {full}")
    options = parser.parse_args(arguments)
    for name, (full, quick) in study.options.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    if options.seeds is None:
        options.seeds = 2 if options.quick else study.seeds
    sizes = {name: getattr(options, name) for name in study.options}
    again = options.rerun is not None
    asked = {"seeds": options.seeds, **sizes, **({"rerun": options.rerun} if again else {})}
    for name, value in asked.items():
        if value < 1:
            parser.error(f"--{name} must be at least 1. Received: {value}.")
    if not any(re.search(options.only, json.dumps(c)) for c in study.conditions):
        listed = "\n".join(f"  {json.dumps(c)}" for c in study.conditions)
        parser.error(f"--only finds no condition: {options.only!r}. There are:\n{listed}")
    path = options.results or (None if options.quick else RESULTS / f"{study.name}.json")
    record = Record(study, sizes, path, options.same_program or again)
    if again:
        raise SystemExit(1 if rerun(record, options.rerun, options.only, options) else 0)
    Driver(study, record, options, list(range(1, options.seeds + 1))).everything(options.only)
    print(pages.printed(record.content))
    return record
