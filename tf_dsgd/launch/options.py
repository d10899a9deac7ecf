"""What `python -m tf_dsgd.launch` is called with. Imports no TensorFlow."""

from __future__ import annotations

import argparse
import difflib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tf_dsgd.transport import listening


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The launcher's options, checked; a wrong one ends the program with what is wrong."""
    parser = _Parser(
        prog="python -m tf_dsgd.launch",
        description=(
            "Starts worker and ps processes on this machine and runs a script as their chief, or, "
            "with --spmd, a script in every worker. Ends with the script's exit code; 130 after "
            "Ctrl-C."
        ),
        allow_abbrev=False,
    )

    def at_least(least: int) -> Any:
        def integer(text: str) -> int:
            digits = text.isascii() and text.isdigit() and len(text) < 5
            if not (digits and least <= int(text)):
                raise argparse.ArgumentTypeError(
                    f"must be an integer from {least} to 9999. Received: {text!r}."
                )
            return int(text)

        return integer

    add = parser.add_argument
    add("--workers", type=at_least(1), required=True, help="number of worker processes")
    add(
        "--ps",
        type=at_least(0),
        help="number of ps processes (default 1); with 0 the workers hold the weights, which "
        "tf_dsgd.PeriodicAveragingStrategy allows, and tf_dsgd.CompressedAsyncStrategy wants",
    )
    add(
        "--spmd",
        action="store_true",
        help="every worker runs the script; no chief and no ps (for callbacks.PeriodicAveraging)",
    )
    add(
        "--threads_per_worker",
        type=at_least(1),
        help="threads within an operation of a worker (default: cores / workers, at least 1)",
    )
    add(
        "--tasks_per_worker",
        type=at_least(1),
        default=1,
        help="worker processes in a row that are one worker, for a strategy with model_parallel "
        "(default 1); --workers is a multiple of it",
    )
    add(
        "--restart_workers",
        type=at_least(0),
        default=0,
        help="how often a worker that ended is started again (default 0)",
    )
    add(
        "--prefix_chief",
        action="store_true",
        help=(
            'print "[chief]", or "[worker 0]" with --spmd, before the script\'s lines, too; Keras '
            "then shows no moving progress bar"
        ),
    )
    add("-m", "--module", action="store_true", help='script is a module, as in "python -m"')
    add("script", help="the training script")
    add("args", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(arguments)
    if os.environ.get("TF_CONFIG", "").strip():
        parser.error(
            "TF_CONFIG is set: this process is a task of a cluster already, and the launcher would "
            'start another one here. Run the script itself: "python train.py"; or unset TF_CONFIG. '
            f"Received: {os.environ['TF_CONFIG']!r}"
        )
    try:
        listening.everywhere()
    except ValueError as error:
        parser.error(str(error))
    if not options.module and not _is_program(options.script):
        parser.error(f"there is no file {options.script!r}; for a module write -m {options.script}")
    if options.module and not _is_module(options.script):
        parser.error(f"there is no module {options.script!r} in the current folder or sys.path")
    if options.spmd and options.ps is not None:
        parser.error("--spmd starts no ps processes: leave --ps out, or --spmd")
    if options.workers % options.tasks_per_worker:
        parser.error(
            f"--tasks_per_worker {options.tasks_per_worker} makes groups of as many worker "
            f"processes: --workers must be a multiple of it. Received: {options.workers}"
        )
    if options.tasks_per_worker > 1 and (options.spmd or options.ps == 0):
        parser.error(
            "--tasks_per_worker is for a strategy whose weights are on ps processes: leave it, or "
            f"{'--spmd' if options.spmd else '--ps 0'}, out"
        )
    if options.spmd and options.restart_workers:
        parser.error("--spmd cannot start a worker again while others run: leave --restart_workers")
    if options.ps is None:
        options.ps = 0 if options.spmd else 1
    return options


class _Parser(argparse.ArgumentParser):
    """Says which option may be meant by one that there is not."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._asked = list(sys.argv[1:] if args is None else args)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        for text in self._asked:
            given = text.partition("=")[0]
            if given in ("--", "-m", "--module") or text.endswith(".py"):
                break  # what follows may be the script's
            near = difflib.get_close_matches(given, self._option_string_actions, n=1)
            if given.startswith("--") and near and near[0] != given:
                message += f"; there is no {given}: did you mean {near[0]}?"
        super().error(message)


def _is_program(path: str) -> bool:
    """Whether Python runs it: a file, or a folder with a `__main__.py`."""
    return Path(path).is_file() or (bool(path) and (Path(path) / "__main__.py").is_file())


def _is_module(name: str) -> bool:
    """Whether its outermost package is there; what is inside only an import would tell."""
    outermost = name.partition(".")[0]
    path = [os.getcwd(), *sys.path]  # as `python -m` has it
    try:
        found = importlib.util.find_spec(outermost)
    except (ImportError, ValueError):
        found = None
    return bool(found or importlib.machinery.PathFinder.find_spec(outermost, path))
