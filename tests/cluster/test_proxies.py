"""`http_proxy` says how the web is reached, and no task of a cluster."""

import pytest

from tests.cluster import processes
from tests.cluster.observing import MODULE

pytestmark = [pytest.mark.slow, pytest.mark.beside_others]

PROXY = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
TRAIN = """
import keras, numpy as np
import tf_dsgd

strategy = tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster())
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=8, verbose=0)
print("TRAINED", strategy.updates)
"""
AVERAGE = """
import keras, numpy as np
import tf_dsgd

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
averaging = tf_dsgd.callbacks.PeriodicAveraging(average_every=2)
model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=8, verbose=0, callbacks=[averaging])
print("TRAINED")
"""


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        (TRAIN, ("--workers", "2"), ["TRAINED 8"]),
        (AVERAGE, ("--workers", "2", "--spmd"), ["TRAINED"]),
    ],
    ids=["chief", "equal processes"],
)
def test_tasks_are_reached_without_the_proxy(tmp_path, script, options, said):
    path = tmp_path / "train.py"
    path.write_text(script)
    with processes.started(*MODULE, *options, str(path), **PROXY) as process:
        assert process.wait(processes.START_SECONDS)[0] == 0, process.text
    assert all(line in process.text for line in said)
