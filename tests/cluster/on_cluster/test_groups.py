"""What passes between the tasks of a worker, which have a part of its layers each."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests.cluster import connections

WIDTH, STEPS = 4000, 20


@pytest.fixture(scope="module")
def crossing():
    """(from, to) -> bytes of a mini-batch; and the bytes of each part's weights."""
    laid = tf_dsgd.ModelParallel({"a|b": 0, "c|d": 1})
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster(tasks_per_worker=2), model_parallel=laid)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(WIDTH, "tanh", name="a"),
                keras.layers.Dense(8, "tanh", name="b"),
                keras.layers.Dense(WIDTH, "tanh", name="c"),
                keras.layers.Dense(5, name="d"),
            ]
        )
        model.compile("sgd", "mse")
    x, y = np.zeros((8 * STEPS, 4), "float32"), np.zeros((8 * STEPS, 5), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    before = connections.between_tasks()
    model.fit(x, y, batch_size=8, verbose=0)
    after = connections.between_tasks()
    table = strategy.placement()
    assert str(table).splitlines()[2].startswith("1     worker 1, CPU:0")
    sizes = [4 * part.parameters for part in table.parts]
    return {pair: (count - before[pair]) / STEPS for pair, count in after.items()}, sizes


def test_each_task_fetches_and_pushes_its_own_part(crossing):
    """Small weights, which travel joined, too: of each part a bias has 16 kB, and less."""
    sent, sizes = crossing
    for part, size in enumerate(sizes):
        fetched = sum(sent[f"ps {shard}", f"worker {part}"] for shard in (0, 1))
        pushed = sum(sent[f"worker {part}", f"ps {shard}"] for shard in (0, 1))
        assert size < fetched < size + 6000
        assert size < pushed < size + 6000


def test_activations_are_all_that_passes_between_them(crossing):
    """Eight of them for each of 8 examples, and what it takes to ask for them."""
    sent, sizes = crossing
    for pair in (("worker 0", "worker 1"), ("worker 1", "worker 0")):
        assert 8 * 8 * 4 < sent[pair] < 6000 < min(sizes) / 30
