"""The Spark session, and what is asked of it before a job is started."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

from pyspark.sql import SparkSession


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
        RuntimeError: if there is no Java.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    if found is None:
        where = f"JAVA_HOME, which is {home!r}," if home else "PATH"
        raise RuntimeError(
            f"Spark needs Java 17 or later, and {where} has no java. Install it, or set JAVA_HOME "
            "to where it is."
        )


def driver(context: Any) -> dict[str, str | None]:
    """Where executors find the driver, and where it listens, as `Server` takes them."""
    settings = context.getConf()
    host = settings.get("spark.driver.host")
    return {"host": host, "bind": settings.get("spark.driver.bindAddress") or host}


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
