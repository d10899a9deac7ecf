"""Runs contenders in processes of their own, and writes down what was run and where."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_contender(program: str, spec: dict, timeout: float = 1800) -> dict:
    """One run; the package is imported from this checkout."""
    variables = dict(os.environ)
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE.parent), variables.get("PYTHONPATH")])
    )
    done = subprocess.run(
        [sys.executable, str(HERE / program), json.dumps(spec)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=variables,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{program} {json.dumps(spec)} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def interleaved(program: str, specs: dict[str, dict], repetitions: int) -> dict[str, list[dict]]:
    """Each contender once, then each again ...: a slow minute of the machine hits all alike."""
    results: dict[str, list[dict]] = {name: [] for name in specs}
    for repetition in range(repetitions):
        for name, spec in specs.items():
            print(f"  {repetition + 1}/{repetitions} {name}", file=sys.stderr, flush=True)
            results[name].append(run_contender(program, spec))
    return results


def ratios(
    results: dict[str, list[dict]], name: str, baseline: str, of: str = "steps_per_second"
) -> list[float]:
    """Speed, or what `of` names, beside the baseline's in the same repetition."""
    return [
        ours[of] / theirs[of] for ours, theirs in zip(results[name], results[baseline], strict=True)
    ]


def spread(values: list[float], digits: int) -> str:
    """Median, and the range where there is one."""
    median = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return median
    return f"{median} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _version(*names: str) -> str:
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{names[0]} (not installed as a distribution)"


def provenance() -> dict:
    """What ran: command, versions, date, machine."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "versions": [
            f"Python {platform.python_version()}",
            _version("tensorflow-cpu", "tensorflow"),
            _version("keras"),
            _version("numpy"),
        ],
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def heading(origin: dict) -> str:
    return (
        f"`{origin['command']}`, {origin['date']}, {origin['cores']} cores, {origin['machine']}; "
        f"{', '.join(origin['versions'])}."
    )


def write_json(path: str | None, content: dict) -> None:
    if path is None:
        return
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def run_groups(parser: argparse.ArgumentParser, groups: dict[str, Callable]) -> None:
    """Runs the groups that `--groups` names, and keeps their runs where `--json` says."""
    options = parser.parse_args()
    names = options.groups.split(",")
    unknown = sorted(set(names) - set(groups))
    if unknown:
        parser.error(f"--groups: no such group: {unknown}; there are {sorted(groups)}")

    # As Ctrl-C does: SIGTERM, from `timeout` for instance, ends what was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    record = {**provenance(), "groups": []}
    print(heading(record), flush=True)
    for name in names:
        groups[name](options, record)
        write_json(options.json, record)
