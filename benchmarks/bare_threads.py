"""The least that asynchronous training in one process can cost: threads and loops in the graph.

Each thread has its own copy of the weights. A round copies the shared weights, makes `period`
steps in one TensorFlow function and, under one lock, adds the sum of its gradients to the shared
weights. No Keras, no metrics, no counting: an upper bound to compare with, not to train with.
"""

import itertools
import threading
import time

import numpy as np
import tensorflow as tf

WIDTHS = (512, 512)
RATE = 0.01


def make_weights(inputs: int, classes: int) -> list[tf.Variable]:
    sizes = (inputs, *WIDTHS, classes)
    weights = []
    for rows, columns in itertools.pairwise(sizes):
        weights.append(tf.Variable(tf.random.normal([rows, columns], stddev=0.05)))
        weights.append(tf.Variable(tf.zeros([columns])))
    return weights


def loss_of(weights, x, y):
    hidden = x
    for index in range(0, len(weights), 2):
        hidden = hidden @ weights[index] + weights[index + 1]
        if index + 2 < len(weights):
            hidden = tf.nn.relu(hidden)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, hidden))


def make_round(local: list[tf.Variable], accrued: list[tf.Variable], period: int):
    @tf.function
    def steps(batches):
        for _ in tf.range(period):
            x, y = next(batches)
            with tf.GradientTape() as tape:
                loss = loss_of(local, x, y)
            for weight, total, gradient in zip(
                local, accrued, tape.gradient(loss, local), strict=True
            ):
                total.assign_add(gradient)
                weight.assign_sub(RATE * gradient)

    return steps


def make_exchange(shared, local, accrued):
    @tf.function
    def push():
        for weight, total in zip(shared, accrued, strict=True):
            weight.assign_sub(RATE * total)
            total.assign(tf.zeros_like(total))

    @tf.function
    def fetch():
        for copy, weight in zip(local, shared, strict=True):
            copy.assign(weight)

    return push, fetch


def run(
    x: np.ndarray,
    y: np.ndarray,
    batch_size: int,
    workers: int,
    period: int,
    epochs: int,
    classes: int,
) -> dict:
    shared = make_weights(x.shape[1], classes)
    lock = threading.Lock()
    rounds = max(1, epochs * len(x) // batch_size // workers // period)
    loops = []
    for _ in range(workers):
        local = [tf.Variable(weight) for weight in shared]
        accrued = [tf.Variable(tf.zeros_like(weight)) for weight in shared]
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat()
        batches = iter(data.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE))
        loops.append(
            (make_round(local, accrued, period), *make_exchange(shared, local, accrued), batches)
        )

    def work(steps, push, fetch, batches, count):
        for _ in range(count):
            with lock:
                fetch()
            steps(batches)
            with lock:
                push()

    for loop in loops:
        work(*loop, 1)
    threads = [threading.Thread(target=work, args=(*loop, rounds)) for loop in loops]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared[-1].numpy()
    seconds = time.perf_counter() - start
    done = rounds * workers * period
    return {"steps": done, "seconds": seconds, "steps_per_second": done / seconds}
