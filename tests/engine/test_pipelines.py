"""What is sent to workers that make their own batches."""

import pytest
import tensorflow as tf
from tensorflow.core.framework import dataset_options_pb2

from tf_dsgd.strategies.pipelines import Segment, Source

EPOCHS = 3


def numbers(count=20):
    return tf.data.Dataset.range(count).map(lambda n: tf.cast(n, tf.float32))


def shuffled_within(n):
    return numbers(5).map(lambda k: k + 5.0 * tf.cast(n, tf.float32)).shuffle(5)


PIPELINES = {
    "shuffled": (lambda: numbers().shuffle(20).batch(4), True),
    "shuffled by a seed": (lambda: numbers().shuffle(20, seed=3).batch(4), True),
    "random": (lambda: tf.data.Dataset.random().take(20).map(lambda n: n % 100).batch(4), True),
    "within others": (lambda: tf.data.Dataset.range(4).flat_map(shuffled_within).batch(4), True),
    "not random": (lambda: numbers().batch(4), True),
    "noise": (lambda: numbers().map(lambda n: n + tf.random.uniform([])).batch(4), False),
    "noise by a seed": (
        lambda: numbers().shuffle(20).map(lambda n: n + tf.random.normal([], seed=5)).batch(4),
        False,
    ),
}


@pytest.mark.filterwarnings("ignore:Seed .* from outer graph")
@pytest.mark.parametrize("name", PIPELINES)
def test_an_epoch_s_batches_are_those_of_a_graph_with_its_seed(name):
    """Traced anew for that epoch, without anything of the package, or once for all of them."""
    make, once = PIPELINES[name]
    calls = []

    def dataset_fn(context):
        calls.append(context.input_pipeline_id)
        return make().apply(tf.data.experimental.assert_cardinality(5))

    def batches(iterator):
        (spec,) = tf.nest.flatten(make().element_spec)
        shapes, types = [spec.shape], [spec.dtype]
        return [
            tf.raw_ops.IteratorGetNext(iterator=iterator, output_types=types, output_shapes=shapes)[
                0
            ].numpy()
            for _ in range(5)
        ]

    def plain(seed):
        @tf.function(autograph=False)
        def iterator():
            tf.random.set_seed(seed)
            return tf.nest.flatten(iter(make()), expand_composites=True)[0]

        return batches(iterator())

    source = Source(dataset_fn, 1)
    calls.clear()
    seen = []
    for epoch in range(1, EPOCHS + 1):
        found = batches(source.start().iterator(0, 0, Segment(0, 0, 5)))
        for mine, other in zip(found, plain(source.seed + epoch), strict=True):
            assert mine.tolist() == other.tolist()
        seen.append([batch.tolist() for batch in found])
    assert calls == [0] * (1 if once else EPOCHS)
    assert (seen[0] != seen[1]) == (name != "not random")


def test_pipelines_of_workers_are_not_tuned():
    """An iterator's tuning thread may keep its worker from answering, once it is freed."""

    def dataset_fn(context):
        options = tf.data.Options()
        options.autotune.enabled = True  # also where the caller wants it
        data = tf.data.Dataset.range(20).map(lambda n: n, num_parallel_calls=tf.data.AUTOTUNE)
        return data.batch(2).with_options(options)

    source = Source(dataset_fn, 2)
    for pipeline in range(2):
        concrete, _ = source._traced(pipeline, 1)
        operations = concrete.graph.get_operations()
        texts = [
            op.get_attr("serialized_options") for op in operations if op.type == "OptionsDataset"
        ]
        tuned = [dataset_options_pb2.Options.FromString(text).autotune_options for text in texts]
        assert tuned[-1].WhichOneof("optional_enabled") and not tuned[-1].enabled
    progress = source.start()
    iterator = progress.iterator(0, 0, progress.draw(0, 3, ()))
    assert isinstance(iterator, tf.Tensor) and iterator.dtype == tf.resource
