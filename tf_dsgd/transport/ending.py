"""A process of a cluster ends soon."""

from __future__ import annotations

import gc


def spare_what_is_imported() -> None:
    """Has garbage collection leave out what TensorFlow and Keras consist of, for the process.

    As a process ends, Python goes through all of that several times: 1 to 3 s in which one that was
    interrupted, or lost another task, looks as if it hung. It never finds anything there.
    """
    gc.collect()
    gc.freeze()
