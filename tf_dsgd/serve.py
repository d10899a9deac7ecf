"""One worker or ps task of a cluster: `python -m tf_dsgd.serve`; see `tf_dsgd.launch.server`."""

import os

from tf_dsgd import _tf_server

if __name__ == "__main__":
    # TensorFlow's greetings of many processes hide what matters.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL") or "1"
    _tf_server.leave_python_out()  # before the module below imports it

from tf_dsgd.launch.server import main, serve

__all__ = ["serve"]

if __name__ == "__main__":
    main()
