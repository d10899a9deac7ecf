"""`python -m tf_dsgd.launch`."""

import contextlib
import os
import sys
import threading

from tf_dsgd.launch.launcher import SAY_SECONDS, main


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


if __name__ == "__main__":
    code = main()
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(SAY_SECONDS)  # longer only if nobody reads what is written
    # Not sys.exit: a late signal would show a traceback, and nothing is left to be done.
    os._exit(code)
