"""What README's first script and `examples/quickstart.py` print, several times.

    python benchmarks/quickstart.py --json benchmarks/published/quickstart.json

README shows the run whose ratio to plain `fit` is in the middle, and the others' ratios;
`figures.py` writes them. The first script is README's blocks of Python up to the speed, run as they
stand. Each run is a process of its own, in the environment that a user has.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import runs

README = runs.HERE.parent / "README.md"
TIMEOUT_SECONDS = 600.0
RATIO = re.compile(r"ratio ([\d.]+)$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def first_script() -> str:
    """README's first blocks, to the one that prints a ratio."""
    blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
    last = next(i for i, block in enumerate(blocks) if "ratio" in block)
    return "\n".join(blocks[: last + 1])


def programs() -> dict[str, list[str]]:
    return {
        "first script": ["-c", first_script()],
        "quickstart": [str(README.parent / "examples/quickstart.py")],
    }


def printed(arguments: Sequence[str]) -> dict:
    """What a run printed, and the ratio in it."""
    path = os.pathsep.join(filter(None, [str(README.parent), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{arguments[0]} failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
    return {"output": ended.stdout.strip(), "ratio": float(RATIO.findall(ended.stdout)[-1])}


def middle(found: Sequence[dict]) -> dict:
    """The run with the median ratio; of two in the middle the smaller."""
    return sorted(found, key=lambda run: run["ratio"])[(len(found) - 1) // 2]


def shown(record: dict, name: str, first: int = 0, last: int | None = None) -> str:
    """Lines that the middle run printed, as a block of text."""
    lines = middle(record["results"][name])["output"].splitlines()[first:last]
    return "\n".join(["```text", *lines, "```"])


def ratios(record: dict, name: str) -> str:
    """The median, and the least and the largest."""
    return runs.spread([run["ratio"] for run in record["results"][name]], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="where to write all single runs")
    options = parser.parse_args()
    chosen = programs()
    record: dict = {**runs.provenance(os.environ), "results": {name: [] for name in chosen}}
    print(runs.heading(record), flush=True)
    for repetition in range(options.repetitions):
        for name, arguments in chosen.items():
            print(f"  {repetition + 1}/{options.repetitions} {name}", file=sys.stderr, flush=True)
            record["results"][name].append(printed(arguments))
            runs.write_json(options.json, record)
    for name in chosen:
        print(f"\n{name}, ratio {ratios(record, name)}:\n\n{shown(record, name)}")


if __name__ == "__main__":
    main()
