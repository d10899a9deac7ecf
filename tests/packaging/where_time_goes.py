"""Where the tests' time goes, by file, from what `pytest --junitxml=PATH` wrote.

    python tests/packaging/where_time_goes.py PATH [PATH ...] [--files 20] [--tests 10]

prints a Markdown table: seconds of each file's tests, their share of all, and the seconds of
processor time that they took, those of processes that they started and waited for among them. A
file that waits more than it computes may run beside others. Several files of results are one table.
"""

import argparse
import collections
import dataclasses
import xml.etree.ElementTree as ElementTree
from pathlib import Path

CPU_PROPERTY = "cpu_seconds"
"""Where tests/conftest.py notes what a test took of the processor."""


@dataclasses.dataclass
class Spent:
    """What some tests took."""

    tests: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, seconds: float, cpu_seconds: float) -> None:
        self.tests += 1
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds


def read(paths: list[Path]) -> tuple[dict[str, Spent], list[tuple[float, str]]]:
    """What each file took, by its name, and the seconds of each test."""
    files: dict[str, Spent] = collections.defaultdict(Spent)
    tests = []
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            file = case.get("classname", "").replace(".", "/") + ".py"
            seconds = float(case.get("time", 0.0))
            cpu = [
                float(noted.get("value"))
                for noted in case.iter("property")
                if noted.get("name") == CPU_PROPERTY
            ]
            files[file].add(seconds, sum(cpu))
            tests.append((seconds, f"{file}::{case.get('name')}"))
    return dict(files), sorted(tests, reverse=True)


def table(files: dict[str, Spent], number: int) -> str:
    """The files that took longest, what the others took, and the sum."""
    order = sorted(files.items(), key=lambda item: -item[1].seconds)
    all_of_them = sum(spent.seconds for spent in files.values())
    lines = [
        "| file | tests | seconds | share | of the processor |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]

    def line(name: str, several: list[Spent]) -> str:
        seconds = sum(spent.seconds for spent in several)
        tests = sum(spent.tests for spent in several)
        cpu = sum(spent.cpu_seconds for spent in several)
        share = 100.0 * seconds / all_of_them if all_of_them else 0.0
        return f"| {name} | {tests} | {seconds:.0f} | {share:.1f} % | {cpu:.0f} |"

    lines += [line(name, [spent]) for name, spent in order[:number]]
    if rest := [spent for _, spent in order[number:]]:
        lines.append(line(f"{len(rest)} others", rest))
    lines.append(line("all", list(files.values())))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--files", type=int, default=20, help="lines of the table")
    parser.add_argument("--tests", type=int, default=10, help="single tests below it")
    args = parser.parse_args()
    files, tests = read(args.paths)
    print(table(files, args.files))
    if args.tests:
        print()
    for seconds, name in tests[: args.tests]:
        print(f"{seconds:7.1f} s  {name}")


if __name__ == "__main__":
    main()
