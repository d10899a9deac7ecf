"""`python -m tf_dsgd`, or `tf-dsgd`: what is installed here, and the package's programs."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import platform
import runpy
import sys

from tf_dsgd import _version
from tf_dsgd._requirements import SUBCOMMANDS

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
            print(here())
        print(_USAGE)
    elif asked[0] == "--version":
        print(f"tf_dsgd {_version.__version__}")
    elif asked[0] in SUBCOMMANDS:
        sys.argv[:] = asked
        runpy.run_module(SUBCOMMANDS[asked[0]], run_name="__main__", alter_sys=True)
    else:
        near = difflib.get_close_matches(asked[0], SUBCOMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        print(f"tf_dsgd: there is no command {asked[0]!r}.{hint}\n{_USAGE}", file=sys.stderr)
        sys.exit(2)


def here() -> str:
    """Versions and devices, a line each."""
    import keras
    import tensorflow as tf

    gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flavours = ", ".join(_flavours()) or "of an unknown distribution"
    one_dnn = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "not set")
    return "\n".join(
        [
            f"tf_dsgd     {_version.__version__}",
            f"TensorFlow  {tf.__version__} ({flavours})",
            f"Keras       {keras.__version__}",
            f"Python      {platform.python_version()} on {platform.system()} {platform.machine()}",
            f"devices     {cores} cores; {', '.join(gpus) or 'no GPU'}",
            f"oneDNN      TF_ENABLE_ONEDNN_OPTS={one_dnn} (where AVX2 is all, set 1)",
            "",
        ]
    )


def _flavours() -> list[str]:
    """Distributions that TensorFlow is installed from; more than one overwrite each other."""
    known = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")
    found = {(d.metadata["Name"] or "").lower() for d in importlib.metadata.distributions()}
    return [name for name in known if name in found or name.replace("-", "_") in found]


if __name__ == "__main__":
    main()
