"""What is installed here, in words."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from tf_dsgd import _version


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
