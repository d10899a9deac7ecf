"""Runs contenders in processes of their own, and writes down what was run and where."""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import processor_time

HERE = Path(__file__).resolve().parent


LIKE_LAUNCHED = {
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "TF_ENABLE_ONEDNN_OPTS": "1",
}
"""What `tf_dsgd.launch` sets for its processes where the user has not: here every contender has it,
ours, peers and limits, launched or not."""


def environment(root: Path = HERE.parent, defaults: bool = True) -> dict[str, str]:
    """Of every contender; the package is imported from this checkout, or the one at `root`.

    Without `defaults`, for what is beside this process itself, it is that of this process.
    """
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    added = LIKE_LAUNCHED if defaults else {}
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **added, **os.environ, "PYTHONPATH": path}


KILLED_SECONDS = 30.0
"""Until a process that was killed is gone."""


def run_process(
    command: Sequence[str], timeout: float, root: Path = HERE.parent, defaults: bool = True
) -> dict:
    """What the last line of a process's output says; nothing that it started outlives it.

    The package is imported from `root`, which `-m` would rather import from where one is.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(root, defaults),
        cwd=None if root == HERE.parent else root,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:  # after Ctrl-C as well
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(KILLED_SECONDS)
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{output[-2000:]}\n{errors[-4000:]}")
    return json.loads(output.strip().splitlines()[-1])


def run_contender(program: str, spec: dict, timeout: float = 1800, defaults: bool = True) -> dict:
    """One run of a program, or of the one that the spec itself names.

    With `launch` in it the launcher starts it, as it starts what these arguments name.
    """
    spec = dict(spec)
    program = spec.pop("program", program)
    launch = spec.pop("launch", ())
    return run_process(command(program, spec, launch), timeout, defaults=defaults)


def command(
    program: str, spec: dict, launch: Sequence[str] = (), python: str = sys.executable
) -> list[str]:
    """Runs a contender, under what of the launcher these arguments name."""
    # The file itself, which needs nothing of the package: peers may be launched, too.
    launcher = ["-m", "tf_dsgd.launch", *launch] if launch else []
    return [python, *launcher, str(HERE / program), json.dumps(spec)]


def interleaved(program: str, specs: dict[str, dict], repetitions: int) -> dict[str, list[dict]]:
    """Each contender once, then each again ...: a slow minute of the machine hits all alike."""
    results: dict[str, list[dict]] = {name: [] for name in specs}
    for repetition in range(repetitions):
        for name, spec in specs.items():
            print(f"  {repetition + 1}/{repetitions} {name}", file=sys.stderr, flush=True)
            results[name].append(run_contender(program, spec))
    return results


def chosen(contenders: dict, only: str, baseline: str | None = None) -> dict:
    """Those whose names a regular expression finds, and the one that all are beside."""
    return {n: c for n, c in contenders.items() if n == baseline or re.search(only, n)}


def speed(name: str, outcomes: Sequence[dict], elsewhere: Collection[str] = ()) -> str:
    """Mini-batches a second; nothing of those whose speed stands in another table."""
    found = [outcome["steps_per_second"] for outcome in outcomes]
    return "" if name in elsewhere else spread(found, 0)


def ratios(
    results: dict[str, list[dict]], name: str, baseline: str, of: str = "steps_per_second"
) -> list[float]:
    """Speed, or what `of` names, beside the baseline's in the same repetition."""
    return [
        ours[of] / theirs[of] for ours, theirs in zip(results[name], results[baseline], strict=True)
    ]


def better(results: Mapping[str, Sequence[dict]], *names: str) -> list[float]:
    """The speed of the fastest of these, by repetition."""
    speeds = [[outcome["steps_per_second"] for outcome in results[name]] for name in names]
    return [max(each) for each in zip(*speeds, strict=True)]


def beside(
    results: Mapping[str, Sequence[dict]], name: str, baseline: Sequence[float]
) -> list[float]:
    """One's speed beside others', by repetition."""
    return [a / b for a, b in zip(better(results, name), baseline, strict=True)]


def median(outcomes: Sequence[dict], of: str = "steps_per_second") -> float:
    return statistics.median(outcome[of] for outcome in outcomes)


def spread(values: list[float], digits: int) -> str:
    """Median, and the range where there is one."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


# -- processor time --------------------------------------------------------------------------------


def cpu_roles(results: Mapping[str, Sequence[dict]]) -> list[str]:
    """Whose processor time was measured of any of these contenders."""
    outcomes = [outcome for runs in results.values() for outcome in runs]
    return processor_time.in_order(r for o in outcomes for r in o.get("cpu_seconds", {}))


def cpu_header(roles: Sequence[str]) -> list[str]:
    if len(roles) == 1:
        return ["CPU, ms/mini-batch"]
    return [f"CPU of {role}, ms/mini-batch" for role in roles]


def cpu_cells(outcomes: Sequence[dict], roles: Iterable[str]) -> list[str]:
    """Milliseconds of all processes of a role, a mini-batch of whichever worker."""
    cells = []
    for role in roles:
        measured = [
            processor_time.per_step(outcome["cpu_seconds"], outcome["steps"])[role]
            for outcome in outcomes
            if role in outcome.get("cpu_seconds", {})
        ]
        cells.append(spread(measured, 2) if measured else "")
    return cells


# -- what was run, and where -----------------------------------------------------------------------


def _version(*names: str) -> str:
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{names[0]} (not installed as a distribution)"


def _commit() -> str | None:
    """Of this checkout; "-dirty" where files differ from it. None where there is no repository."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def provenance(variables: Mapping[str, str] | None = None) -> dict:
    """What ran: command, commit, versions, date, machine.

    And what concerns speed in the environment: contenders', or `variables` of this process.
    """
    variables = environment() if variables is None else variables
    commit = _commit()
    return {
        "environment": {name: variables[name] for name in LIKE_LAUNCHED if name in variables},
        **({} if commit is None else {"commit": commit}),
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
        **_processor(),
    }


def where(origin: Mapping[str, str]) -> str:
    """The machine, as well as it is known."""
    return ", ".join(origin[name] for name in ("machine", "processor") if name in origin)


def _processor() -> dict[str, str]:
    """Its name and widest vectors, which TensorFlow's speed and rounding follow; Linux has them."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        name = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
        flags = re.search(r"^flags\s*: (.+)$", text, re.MULTILINE)
        has = flags[1].split() if flags else []
        vectors = [word for flag, word in _VECTORS.items() if flag in has][:1]
        return {"processor": ", ".join([*([name[1]] if name else []), *vectors])}
    return {}


_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}


def heading(origin: dict) -> str:
    variables = [f"{name}={value}" for name, value in origin["environment"].items()]
    return (
        f"`{origin['command']}`, {origin['date']}, {origin['cores']} cores, {where(origin)}; "
        f"{', '.join(origin['versions'])}. Of the environment of what is measured: "
        f"{', '.join(variables) or 'nothing that says of speed'}."
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
