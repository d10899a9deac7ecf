"""What a process that only serves needs of TensorFlow, without the rest of its Python.

`import tensorflow` and Keras take 5 s of a core, nearly all of it Python that builds graphs; a
server only runs them, which is C++. It is there after 0.9 s, in 370 MB and not 600. So here, as in
`_tf.py`, are private names, seen in TensorFlow 2.21.0:

- `tensorflow.python.training.server_lib.Server` is `tf.distribute.Server`.
- `tensorflow.python.lib.core._pywrap_py_func` is told what `tf.raw_ops.PyFunc` calls, once in a
  process; `tensorflow.python.ops.script_ops` tells it of a registry.
- `tensorflow.python.framework.errors` is `tf.errors`; `tensorflow.core.protobuf` has ConfigProto.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Calls that a server answers at a time, at least.
_CALLS = 16


def leave_python_out() -> None:
    """Keeps what is imported from here on from running `tensorflow/__init__.py`.

    For programs of our own: afterwards `import tensorflow` gives a module without contents. What
    that file does besides importing is done here. Does nothing where TensorFlow is imported
    already, or where it has plugins, such as those for other accelerators, which it would load.
    """
    found = importlib.util.find_spec("tensorflow")
    if found is None or "tensorflow" in sys.modules or _plugins():
        return
    package = types.ModuleType("tensorflow")
    package.__spec__ = found
    package.__path__ = list(found.submodule_search_locations or [])
    sys.modules["tensorflow"] = package
    os.environ.setdefault("ENABLE_RUNTIME_UPTIME_TELEMETRY", "1")
    os.environ["TF2_BEHAVIOR"] = "1"
    from tensorflow.python import pywrap_tensorflow, tf2

    del pywrap_tensorflow  # the C++ libraries, to be loaded before anything else
    tf2.enable()


def _plugins() -> bool:
    """Whether `tensorflow/__init__.py` would load libraries from elsewhere."""
    places = {*sys.path, *site.getsitepackages(), site.getusersitepackages()}
    places |= {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return bool(os.environ.get("TF_PLUGGABLE_DEVICE_LIBRARY_PATH")) or any(
        (Path(place) / "tensorflow-plugins").exists() for place in places
    )


def answer_remotely(token: str, function: Callable[[], Any]) -> None:
    """Lets other processes of a cluster call a Python function of this one by `tf.raw_ops.PyFunc`.

    `tf.py_function` registers a function under a token of its own choosing, in the process that
    traces the call. Here the caller is another process, so that both must know the token before.
    Where TensorFlow's Python was left out, so was its registry, and this takes its place.
    """
    registry = sys.modules.get("tensorflow.python.ops.script_ops")
    if registry is not None:
        registry._py_funcs._funcs[token] = function
        setattr(registry._py_funcs, f"_keep_{token}", function)  # of those it has weak references
        return
    from tensorflow.python.lib.core import _pywrap_py_func

    def answer(asked: str, device: str | None, arguments: Any) -> Any:
        if asked != token:
            raise ValueError(f"Could not find callback with key={asked} in the registry.")
        return function()

    setattr(_pywrap_py_func, f"_keep_{token}", answer)  # C++ keeps a bare pointer
    _pywrap_py_func.initialize_py_trampoline(answer)


def start(
    jobs: Mapping[str, Mapping[int, str]], job: str, index: int, threads: int, gpus: bool
) -> Any:
    """A server that runs.

    Args:
        jobs: job -> index -> "host:port", of the whole cluster.
        job: this task's.
        index: this task's.
        threads: within an operation; 0 for one per core.
        gpus: whether it uses them. Their memory is taken as it is needed.

    Raises:
        RuntimeError: it could not start; TensorFlow says no more than that.
    """
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.framework import errors
    from tensorflow.python.training import server_lib

    # A round holds a thread of those that answer calls as long as it lasts, and needs another one
    # when it sends. By default there are as many as cores (TF 2.21): on two, the round of a second
    # chief, or one that waits for ever for a ps that was lost, would leave none.
    config = config_pb2.ConfigProto(
        intra_op_parallelism_threads=threads,
        inter_op_parallelism_threads=max(_CALLS, os.cpu_count() or 1),
    )
    config.gpu_options.allow_growth = True
    if not gpus:
        config.device_count["GPU"] = 0
    spec = server_lib.ClusterSpec({name: dict(tasks) for name, tasks in jobs.items() if tasks})
    try:
        return server_lib.Server(spec, job, index, "grpc", config)
    except errors.UnknownError as error:  # "Could not start gRPC server", and nothing else
        raise RuntimeError(error.message) from None
