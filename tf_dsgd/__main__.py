"""`python -m tf_dsgd`, or `tf-dsgd`: what is installed here, and the package's programs."""

from __future__ import annotations

import difflib
import os
import runpy
import sys

from tf_dsgd import _version
from tf_dsgd._requirements import SUBCOMMANDS
from tf_dsgd.installed import here

_USAGE = """\
usage: python -m tf_dsgd [--version] [COMMAND ...]

  launch     trains on this machine with several processes (python -m tf_dsgd.launch)
  serve      one worker or ps task of a cluster, with TF_CONFIG set (python -m tf_dsgd.serve)
  report     draws a page of what StalenessMonitor wrote (python -m tf_dsgd.report)
  selfcheck  trains for some seconds on threads and on processes, beside plain Keras"""


def main() -> None:
    """The program."""
    asked = sys.argv[1:]
    if not asked or asked[0] in ("-h", "--help"):
        if not asked:
            _write(here())
        _write(_USAGE)
    elif asked[0] == "--version":
        _write(f"tf_dsgd {_version.__version__}")
    elif asked[0] in SUBCOMMANDS:
        sys.argv[:] = asked
        runpy.run_module(SUBCOMMANDS[asked[0]], run_name="__main__", alter_sys=True)
    else:
        near = difflib.get_close_matches(asked[0], SUBCOMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        print(f"tf_dsgd: there is no command {asked[0]!r}.{hint}\n{_USAGE}", file=sys.stderr)
        sys.exit(2)


def _write(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # whoever reads it has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
