"""What is sent to workers that make their own batches."""

import tensorflow as tf
from tensorflow.core.framework import dataset_options_pb2

from tf_dsgd.strategies.pipelines import Source


def test_pipelines_of_workers_are_not_tuned():
    """An iterator's tuning thread may keep its worker from answering, once it is freed."""

    def dataset_fn(context):
        options = tf.data.Options()
        options.autotune.enabled = True  # also where the caller wants it
        data = tf.data.Dataset.range(20).map(lambda n: n, num_parallel_calls=tf.data.AUTOTUNE)
        return data.batch(2).with_options(options)

    progress = Source(dataset_fn, 2).start()
    for maker in progress._makers:
        operations = maker.graph.get_operations()
        texts = [
            op.get_attr("serialized_options") for op in operations if op.type == "OptionsDataset"
        ]
        tuned = [dataset_options_pb2.Options.FromString(text).autotune_options for text in texts]
        assert tuned[-1].WhichOneof("optional_enabled") and not tuned[-1].enabled
    iterator = progress.iterator(0, 0, progress.draw(0, 3, ()))
    assert isinstance(iterator, tf.Tensor) and iterator.dtype == tf.resource
