"""`python -m tf_dsgd.launch`."""

import contextlib
import os
import sys

from tf_dsgd.launch.launcher import main

if __name__ == "__main__":
    code = main()
    # Not sys.exit: a late signal would show a traceback, and nothing is left to be done.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
