"""Tables split over two ps, with TensorFlow alone: what a mini-batch of two workers takes.

    python benchmarks/bare_tables.py
    python benchmarks/bare_tables.py --steps_per_call 1,5 --rows 1e7 --optimizer sgd

The model, the data and the optimizers of recommender_task.py, by `bare_recommender.py`'s rules.
This process is the chief: a thread for each worker calls a function there, which reads the rows of
its mini-batch and the dense variables from both ps, computes, and sends back what each ps applies
under a lock. As few tensors cross as can: one question to each ps, one answer, one message. With
several steps in a call they are a loop over all of that, or the function has so many copies of it
(unrolled). No Keras, nothing of this package: no header, no count of staleness, no message refused
that came twice, nobody lost.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import bare
import bare_cluster
import bare_recommender
import recommender_task as task
import runs
import tensorflow as tf

PS = 2


class Shard:
    """A ps: half the rows of both tables; the dense variables are on the first."""

    def __init__(self, index: int, spec: task.Spec, rows: int):
        self.index, self.device = index, bare_cluster.device_of("ps", index)
        with tf.device(self.device):
            uniform = [tf.random.uniform([rows, task.WIDTH], -0.05, 0.05) for _ in range(2)]
            self.tables = [bare_recommender.Weight(part, spec.optimizer) for part in uniform]
            shapes = ([3 * task.WIDTH, 64], [64], [64, 1], [1]) if index == 0 else ()
            random = [tf.random.normal(shape, stddev=0.05) for shape in shapes]
            self.dense = [bare_recommender.Weight(value, spec.optimizer) for value in random]
            self.count, self.lock = tf.Variable(0.0), tf.CriticalSection()

    def read(self, asked: tf.Tensor) -> tf.Tensor:
        """Rows of both tables, then the dense variables, in one vector."""
        with tf.device(self.device):
            number = asked[0]
            users, items = asked[1 : 1 + number], asked[1 + number :]
            found = [
                tf.gather(table.value, ids)
                for table, ids in zip(self.tables, (users, items), strict=True)
            ]
            found += [weight.value.read_value() for weight in self.dense]
            return tf.concat([tf.reshape(value, [-1]) for value in found], 0)

    def apply(self, sent: tf.Tensor) -> tf.Tensor:
        """Takes numbers and ids (as floats' bytes), gradients of rows and of dense variables."""
        with tf.device(self.device):
            sent = tf.identity(sent)

            def body() -> tf.Tensor:
                step = self.count.assign_add(1.0)
                numbers = tf.bitcast(sent[:2], tf.int32)
                users, items = numbers[0], numbers[1]
                both = users + items
                ids = tf.bitcast(sent[2 : 2 + both], tf.int32)
                at = 2 + both
                for table, of_table in zip(self.tables, (ids[:users], ids[users:]), strict=True):
                    size = tf.size(of_table) * task.WIDTH
                    g = tf.reshape(sent[at : at + size], [-1, task.WIDTH])
                    table.update_rows(of_table, g, step)
                    at += size
                for weight in self.dense:
                    size = weight.value.shape.num_elements()
                    weight.update(tf.reshape(sent[at : at + size], weight.value.shape), step)
                    at += size
                return step

            with tf.control_dependencies([sent]):
                return self.lock.execute(body)


def shares(ids: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Of different ids: the rows on each ps, and their places."""
    owner = tf.cast(ids % PS, tf.int32)
    places = tf.dynamic_partition(tf.range(tf.size(ids)), owner, PS)
    return tf.dynamic_partition(tf.cast(ids // PS, tf.int32), owner, PS), places


def train(shards: list[Shard], x: list[tf.Tensor], y: tf.Tensor) -> None:
    """One step."""
    named = [tf.unique(ids) for ids in x]
    rows, places = zip(*(shares(ids) for ids, _ in named), strict=True)
    answers = []
    for s, shard in enumerate(shards):
        asked = tf.concat([tf.size(rows[0][s])[None], rows[0][s], rows[1][s]], 0)
        answers.append(tf.identity(shard.read(asked)))
    tables = []
    of_first = [tf.size(rows[0][s]) * task.WIDTH for s in range(PS)]
    of_second = [tf.size(rows[1][s]) * task.WIDTH for s in range(PS)]
    for t, at, of in ((0, [0] * PS, of_first), (1, of_first, of_second)):
        parts = [tf.reshape(answers[s][at[s] : at[s] + of[s]], [-1, task.WIDTH]) for s in range(PS)]
        tables.append(tf.dynamic_stitch(places[t], parts))
    at, weights = of_first[0] + of_second[0], []
    for weight in shards[0].dense:
        size = weight.value.shape.num_elements()
        weights.append(tf.reshape(answers[0][at : at + size], weight.value.shape))
        at += size
    with tf.GradientTape() as tape:
        tape.watch([*tables, *weights])
        user, item = (tf.gather(r, place) for r, (_, place) in zip(tables, named, strict=True))
        hidden = tf.concat([user, item, user * item], 1) @ weights[0] + weights[1]
        logits = tf.nn.relu(hidden) @ weights[2] + weights[3]
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y[:, None], logits))
    found = tape.gradient(loss, [*tables, *weights])
    summed = [
        tf.math.unsorted_segment_sum(g.values, g.indices, tf.size(ids))
        for g, (ids, _) in zip(found[:2], named, strict=True)
    ]
    for s, shard in enumerate(shards):
        numbers = tf.stack([tf.size(rows[0][s]), tf.size(rows[1][s])])
        ids = tf.bitcast(tf.concat([numbers, rows[0][s], rows[1][s]], 0), tf.float32)
        gradients = [
            tf.reshape(tf.gather(g, p[s]), [-1]) for g, p in zip(summed, places, strict=True)
        ]
        gradients += [tf.reshape(g, [-1]) for g in found[2:] if s == 0]
        shard.apply(tf.concat([ids, *gradients], 0))


def worker(
    spec: task.Spec, steps: bare.Spec, unrolled: bool, shards: list[Shard], m: int
) -> bare.Function:
    """A function that makes the steps of one call on a worker."""
    device = bare_cluster.device_of("worker", m)
    x, y = task.make_data(spec)
    with tf.device(device):
        data = [tf.constant(ids.reshape(-1, task.BATCH)) for ids in x.values()]
        targets = tf.constant(y.reshape(-1, task.BATCH))
        position = tf.Variable(m * spec.steps // 2)

    def step(k: tf.Tensor) -> None:
        with tf.device(device):
            k = tf.math.floormod(k, spec.steps)
            train(shards, [ids[k] for ids in data], targets[k])

    @tf.function(autograph=False)
    def call() -> None:
        with tf.device(device):
            first = position.read_value()
            if unrolled:
                for k in range(steps.steps_per_call):
                    step(first + k)
            else:
                bare.loop(steps.steps_per_call, step, first)
            position.assign_add(steps.steps_per_call, read_value=False)

    def on_worker() -> Any:
        with tf.device(device):
            return call()

    return on_worker


def run(rows: int, optimizer: str, seconds: float, steps_per_call: int, unrolled: bool) -> dict:
    """One contender, in a process of its own."""
    spec = task.Spec(rows=rows, optimizer=optimizer)
    steps = bare.Spec(steps_per_call=steps_per_call, seconds=seconds, workers=spec.workers)
    with bare_cluster.servers(steps, PS) as pids:
        shards = [Shard(s, spec, -(-rows // PS)) for s in range(PS)]
        calls = [worker(spec, steps, unrolled, shards, m) for m in range(spec.workers)]
        result = bare.measure(steps, calls, pids)
        expected = result["steps"] + bare.FIRST_CALLS * steps_per_call * spec.workers
        counted = [int(shard.count) for shard in shards]
        if counted != [expected] * PS:
            raise SystemExit(f"Steps were lost: {counted} of {expected} are on the ps.")
    return result


def contenders(options: argparse.Namespace) -> dict[str, dict]:
    """By name."""
    common = {"optimizer": options.optimizer, "seconds": options.seconds}
    common |= {"rows": int(options.rows)}
    found = {}
    for steps in options.steps_per_call:
        for unrolled in (False, True) if steps > 1 else (False,):
            name = f"{steps}, unrolled" if unrolled else str(steps)
            found[name] = {**common, "steps_per_call": steps, "unrolled": unrolled}
    return found


def numbers(text: str) -> list[int]:
    """From 1 on, with commas between them."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"take numbers from 1 on, as 1,2,5. Received: {text}")
    return [int(part) for part in text.split(",")]


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        print(json.dumps(run(**json.loads(sys.argv[1]))), flush=True)
        os._exit(0)  # TensorFlow's threads would wait for servers that were ended
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--optimizer", default="adagrad", choices=task.RATES)
    parser.add_argument("--steps_per_call", type=numbers, default="1,2,5", help="with commas")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="that each is timed")
    options = parser.parse_args()
    results = runs.interleaved(Path(__file__).name, contenders(options), options.repetitions)
    roles = runs.cpu_roles(results)
    header = ["steps of a call", "thousand examples/s", *runs.cpu_header(roles), "in all"]
    lines = []
    for name, outcomes in results.items():
        speeds = [task.BATCH * each["steps_per_second"] / 1e3 for each in outcomes]
        whole = [1e3 * sum(each["cpu_seconds"].values()) / each["steps"] for each in outcomes]
        cells = [runs.spread(speeds, 1), *runs.cpu_cells(outcomes, roles), runs.spread(whole, 1)]
        lines.append([name, *cells])
    print(runs.heading(runs.provenance()))
    print(runs.table(header, lines))


if __name__ == "__main__":
    main()
