"""The Spark session, and what is asked of it before a job is started."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import traceback
import uuid
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

_JAVA = 17
_JAVA_SECONDS = 60.0  # to say its version, which takes a tenth of one


def session() -> SparkSession:
    """The active session, or a new one.

    Raises:
        RuntimeError: without Java; or if the session is one of Spark Connect, whose driver is
            another process.
    """
    found = SparkSession.getActiveSession()
    if found is None:
        check_java()
        found = SparkSession.builder.getOrCreate()
    if not hasattr(found, "_jsc"):
        raise RuntimeError(
            "tf_dsgd.spark needs a session whose driver is this process, and this is one of Spark "
            f"Connect ({type(found).__module__}). Run the script by spark-submit, or with "
            'SparkSession.builder.master("local[4]").'
        )
    return found


def check_java() -> None:
    """Spark's driver is a Java process.

    Raises:
        RuntimeError: if there is no Java, or one that is too old.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    where = f"JAVA_HOME, which is {home!r}," if home else "PATH"
    remedy = "Install it, or set JAVA_HOME to where it is."
    if found is None:
        raise RuntimeError(f"Spark needs Java 17 or later, and {where} has no java. {remedy}")
    said = subprocess.run(
        [found, "-version"], capture_output=True, text=True, timeout=_JAVA_SECONDS, check=False
    )
    version = re.search(r'version "(\d+)', said.stderr)  # 1 up to Java 8
    if version and int(version[1]) < _JAVA:
        (line, *_) = said.stderr.splitlines()
        raise RuntimeError(f"Spark needs Java 17 or later, and {where} has {line}. {remedy}")


def driver(context: Any) -> dict[str, str | None]:
    """Where executors find the driver, and where it listens, as `Server` takes them."""
    settings = context.getConf()
    host = settings.get("spark.driver.host")
    return {"host": host, "bind": settings.get("spark.driver.bindAddress") or host}


@contextlib.contextmanager
def jobs(context: Any) -> Iterator[None]:
    """Jobs that are started within are cancelled where this is left by an error, a Ctrl-C too.

    pyspark's own handler cannot do it (4.3): it calls Java by a connection that waits for an
    answer, which fails, and tasks would hold their slots until they find no driver.
    """
    tag = f"tf_dsgd-{uuid.uuid4().hex}"
    context.addJobTag(tag)
    try:
        yield
    except BaseException:
        context.cancelJobsWithTag(tag)
        raise
    finally:
        context.removeJobTag(tag)


def check_runs(data: Any) -> None:
    """Whether the session of an RDD or a DataFrame is there still.

    Raises:
        RuntimeError: if it was stopped.
    """
    of_frame = hasattr(data, "sparkSession")
    context = data.sparkSession.sparkContext if of_frame else data.context
    if getattr(context, "_jsc", None) is None:  # as pyspark itself asks (4.3)
        raise RuntimeError(
            "The Spark session of these data was stopped. Make them once more, in the session that "
            "is there now."
        )


def waits_for_spark(thread: int) -> bool:
    """Whether a thread of this process, known by its `ident`, is in a call to Spark's Java."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 (which Python documents)
    calls = traceback.walk_stack(frame) if frame is not None else ()
    return any(str(call.f_globals.get("__name__")).startswith("py4j.") for call, _ in calls)


def slots(context: Any) -> int | None:
    """How many tasks run at a time, where the master's name says it; None elsewhere.

    Not `defaultParallelism`, which `spark.default.parallelism` changes and a slot's cores do not.
    """
    settings = context.getConf()
    cores_of_a_task = int(settings.get("spark.task.cpus", "1"))
    local = re.fullmatch(r"local(?:\[(\d+)(?:,\d+)?\])?", context.master.replace(" ", ""))
    if local:
        return int(local[1] or 1) // cores_of_a_task
    executors = re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", context.master.replace(" ", ""))
    if executors:
        return int(executors[1]) * (int(executors[2]) // cores_of_a_task)
    if context.master.startswith("local[*") and not settings.get("spark.default.parallelism"):
        return int(context.defaultParallelism) // cores_of_a_task
    return None
