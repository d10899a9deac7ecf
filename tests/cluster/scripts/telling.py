"""What TensorFlow's tasks are told of functions, with nothing of an engine.

Usage: telling.py stopped [METHOD]    (a method of the eager context that is not replaced)
       telling.py joins

`stopped`: task 1 of the workers is stopped; prints RESULT: for how many seconds no thread of Python
ran while a function was made, and while one was freed. Of these the first that has to wait for the
task has its connection closed: METHOD says which of the two comes first.
`joins`: functions are made and freed while a worker joins; prints RESULT: how many of them that
worker was not told of, and of how many; with the look at `_tf_remote._changing`, and without.
"""

import json
import os
import sys
import threading
import time

import psutil
import tensorflow as tf

from tests import faults
from tf_dsgd import _tf_remote
from tf_dsgd.transport import channels, cluster_spec

SILENT_SECONDS = 8.0
LOOK_SECONDS = 0.02
FUNCTIONS = 800
KEPT = []


class Clock(threading.Thread):
    """Notes the longest time for which it did not run."""

    def __init__(self):
        super().__init__(daemon=True)
        self.longest = 0.0
        self.ended = threading.Event()

    def run(self):
        last = time.monotonic()
        while not self.ended.wait(LOOK_SECONDS):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now


class Never:
    """A lock that nobody holds."""

    def locked(self):
        return False

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def connect(indices):
    addresses = cluster_spec.from_tf_config().workers
    spec = tf.train.ClusterSpec({"worker": {index: addresses[index] for index in indices}})
    tf.config.experimental_connect_to_cluster(spec, job_name="chief")
    tf.config.list_logical_devices()
    _tf_remote.tell_without_waiting()
    # As every thread that trains has one: its calls return when they are done.
    KEPT.append(_tf_remote.SynchronousExecutor())  # it ends with its last reference
    KEPT[0].use()
    return _tf_remote._context.context(), addresses


def make(number):
    def add(x):
        return x + number

    return tf.function(add, autograph=False).get_concrete_function(tf.TensorSpec([]))


def without_python(does):
    clock = Clock()
    clock.start()
    does()
    time.sleep(5 * LOOK_SECONDS)
    clock.ended.set()
    clock.join(timeout=10.0)
    return clock.longest


def stopped(*undone):
    channels.configure(SILENT_SECONDS)
    context, _ = connect([0, 1])
    for name in undone:
        del context.__dict__[name]
    one = make(1.0)
    with tf.device("/job:worker/task:1"):
        assert one(tf.constant(1.0)) == 2.0
    victim = psutil.Process(faults.task("worker", 1).pid)
    victim.suspend()
    kinds = {
        "made": lambda: make(2.0),
        # What `AtomicFunction.__del__` does; the garbage collector comes when it comes.
        "freed": lambda: context.remove_function(one.name),
    }
    order = ["freed", "made"] if undone == ("remove_function",) else ["made", "freed"]
    found = {kind: without_python(kinds[kind]) for kind in order}
    victim.resume()
    KEPT.append(one)
    return found


def joins():
    context, addresses = connect([0])
    return [
        lacking(context, {1: addresses[1]}, _tf_remote._changing),
        lacking(context, {2: addresses[2]}, Never()),
    ]


def lacking(context, joining, lock):
    _tf_remote._changing = lock
    old, new = [make(k) for k in range(FUNCTIONS)], []
    ended = threading.Event()

    def churn():
        while len(new) < FUNCTIONS and not ended.is_set():
            context.remove_function(old[len(new)].name)
            new.append(make(1000.0 + len(new)))

    thread = threading.Thread(target=churn)
    thread.start()
    time.sleep(LOOK_SECONDS)
    before = len(new)
    _tf_remote.change_tasks("worker", joining)
    ended.set()
    thread.join()
    time.sleep(1.0)  # for what is in the stream
    _tf_remote._LACKING_SECONDS = 0.0
    lost = 0
    (index,) = joining
    with tf.device(f"/job:worker/task:{index}"):
        one = tf.constant(1.0)
        for number, function in enumerate(new[before:], before):
            try:
                assert function(one) == 1001.0 + number
            except tf.errors.NotFoundError:
                lost += 1
    KEPT.extend(old)  # else they would be freed once more
    return lost, len(new) - before


what, *arguments = sys.argv[1:]
print("RESULT", json.dumps({"stopped": stopped, "joins": joins}[what](*arguments)), flush=True)
os._exit(0)  # without freeing anything
