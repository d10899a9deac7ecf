"""The model of recommender_task.py with TensorFlow alone: rows are read, and these are updated.

Each row is read once and its gradients are summed, as in ours; an optimizer acts on the rows of the
mini-batch alone (of Adam this is the lazy one). No Keras, no threads of its own, no exchange.
"""

from collections.abc import Callable, Sequence
from typing import Any

import recommender_task as task
import tensorflow as tf

SLOTS = {"sgd": 0, "adagrad": 1, "adam": 2}


class Weight:
    """A variable and the optimizer's slots beside it."""

    def __init__(self, value: tf.Tensor, optimizer: str):
        self.optimizer = optimizer
        self.rate = task.RATES[optimizer]
        first = task.ACCUMULATOR if optimizer == "adagrad" else 0.0
        self.value = tf.Variable(value)
        self.slots = [tf.Variable(tf.fill(value.shape, first)) for _ in range(SLOTS[optimizer])]

    def change(self, g: tf.Tensor, slots: Sequence[tf.Tensor], step: tf.Tensor) -> Any:
        """What is subtracted, and the new slots, for a gradient and the old ones."""
        if self.optimizer == "sgd":
            return self.rate * g, []
        if self.optimizer == "adagrad":
            summed = slots[0] + g * g
            return self.rate * g / tf.sqrt(summed + task.EPSILON), [summed]
        b1, b2 = task.BETAS
        m, v = (b * s + (1 - b) * p for b, s, p in zip(task.BETAS, slots, (g, g * g), strict=True))
        rate = self.rate * tf.sqrt(1 - b2**step) / (1 - b1**step)
        return rate * m / (tf.sqrt(v) + task.EPSILON), [m, v]

    def update(self, g: tf.Tensor, step: tf.Tensor) -> None:
        change, slots = self.change(g, [slot.read_value() for slot in self.slots], step)
        self.value.assign_sub(change, read_value=False)
        for slot, new in zip(self.slots, slots, strict=True):
            slot.assign(new, read_value=False)

    def update_rows(self, rows: tf.Tensor, g: tf.Tensor, step: tf.Tensor) -> None:
        """Rows are read, and written: faster than kernels that add, of Adagrad's fused one too."""
        change, slots = self.change(g, [tf.gather(slot, rows) for slot in self.slots], step)
        value = tf.gather(self.value, rows) - change
        for variable, new in zip((self.value, *self.slots), (value, *slots), strict=True):
            variable.scatter_update(tf.IndexedSlices(new, rows))


def make(spec: task.Spec) -> Callable[[Any], tf.Tensor]:
    """A function of `period` steps on what an iterator gives; returns the last loss."""
    shape = [spec.rows, task.WIDTH]
    tables = [Weight(tf.random.uniform(shape, -0.05, 0.05), spec.optimizer) for _ in range(2)]
    shapes = ([3 * task.WIDTH, 64], [64], [64, 1], [1])
    dense = [Weight(tf.random.normal(s, stddev=0.05), spec.optimizer) for s in shapes]
    count = tf.Variable(0.0)

    def train(batch: Any) -> tf.Tensor:
        x, y = batch
        step = count.assign_add(1.0)
        named = [tf.unique(x[name]) for name in ("user", "item")]
        read = [tf.gather(t.value, ids) for t, (ids, _) in zip(tables, named, strict=True)]
        weights = [weight.value.read_value() for weight in dense]
        with tf.GradientTape() as tape:
            tape.watch([*read, *weights])
            user, item = (tf.gather(r, place) for r, (_, place) in zip(read, named, strict=True))
            hidden = tf.concat([user, item, user * item], 1) @ weights[0] + weights[1]
            logits = tf.nn.relu(hidden) @ weights[2] + weights[3]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(y[:, None], logits)
            loss = tf.reduce_mean(losses)
        found = tape.gradient(loss, [*read, *weights])
        for table, (ids, _), g in zip(tables, named, found[:2], strict=True):
            summed = tf.math.unsorted_segment_sum(g.values, g.indices, tf.size(ids))
            table.update_rows(ids, summed, step)
        for weight, g in zip(dense, found[2:], strict=True):
            weight.update(g, step)
        return loss

    @tf.function(autograph=False)
    def call(iterator: Any) -> tf.Tensor:
        for _ in range(spec.period):
            loss = train(next(iterator))
        return loss

    return call
