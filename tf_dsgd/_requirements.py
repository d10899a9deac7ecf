"""Says in one line what is missing, before anything else is imported."""

import importlib.util


class MissingRequirementError(ImportError):
    """TensorFlow or Keras is missing, or Keras runs on another backend."""


def _fail(message: str) -> None:
    error = MissingRequirementError(f"tf_dsgd: {message}")
    raise error from None


if importlib.util.find_spec("tensorflow") is None:
    _fail('TensorFlow is not installed. Run: pip install "tf_dsgd[cpu]" (or "tf_dsgd[gpu]").')
if importlib.util.find_spec("keras") is None:
    _fail("Keras 3 is not installed. Run: pip install keras")

import keras  # noqa: E402

if keras.backend.backend() != "tensorflow":
    _fail(
        f"Keras runs on the {keras.backend.backend()!r} backend, which tf_dsgd cannot train. Set "
        "KERAS_BACKEND=tensorflow in the environment before keras is imported."
    )

_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])
if _VERSION < (3, 15):
    _fail(f"Keras {keras.__version__} is too old. Run: pip install 'keras>=3.15,<4'")
