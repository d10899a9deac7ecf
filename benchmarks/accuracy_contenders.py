"""One contender of time_to_accuracy.py, in a process of its own. Prints one line of JSON.

    python benchmarks/accuracy_contenders.py '{"kind": "downpour", "seeds": [1], "rate": 0.4}'
    python -m tf_dsgd.launch --workers 2 --ps 1 benchmarks/accuracy_contenders.py '{...}'

The model is made once, and a first `fit` of one epoch traces what training needs; its weights are
thrown away, under every contender. For each run that follows, a seed draws the split of the data,
the initial weights and the order of the examples, which `fit` shuffles further. SGD without
momentum keeps nothing between two runs but its rate. A run is one `fit`. At the end of an epoch the
weights are read, which waits for every update, and the clocks stop until the model was validated,
by a copy without a strategy.

With `slow`, one worker process is stopped for three quarters of the time, so that it is four times
slower, whatever it computes.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import accuracy_statistics as statistics
import processor_time

CLASSES = 10
USERS, ITEMS = 200, 150
SLICE_SECONDS = 0.004
"""That a slow worker runs before it is stopped for three times as long."""
SLOWER = 4
ENDED_SECONDS = 10.0
"""Until a process that was told to end is gone."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to train, and how often."""

    task: str = "digits"
    kind: str = "keras"
    """`keras`, `mirrored`, `downpour`, `softsync`, `averaging`, `elastic`."""
    period: int = 1
    """`push_every` and `fetch_every`, or `average_every`."""
    workers: int = 2
    ps: int = 1
    """That the launcher has started."""
    processes: bool = False
    """Whether the launcher has started workers; else they are threads."""
    slow: bool = False
    """Whether one worker is four times slower; needs processes."""
    steps_per_execution: int = 1
    batch_size: int = 32
    """Of one worker; `mirrored` shares `workers` times as many examples among its replicas."""
    shares: bool = False
    """Whether a plain mini-batch has `workers` times as many examples, too."""
    target: float = 0.97
    """Validation accuracy."""
    epochs: int = 60
    """After so many a run counts as one that does not reach the target."""
    rate: float | None = None
    """None: it is searched for, from `rates` on by the seeds `search_seeds`."""
    rates: tuple[float, ...] = ()
    search_seeds: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    """Of the runs at the rate given, or found."""
    started: float | None = None
    """When the process was started: seconds of `time.time()`."""
    until: float | None = None
    """No run begins after this moment of `time.time()`; a search not done by then is left out."""


# -- data and models -------------------------------------------------------------------------------


def digits():
    """scikit-learn's 1,797 images of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images[..., None] / 16.0).astype("float32"), found.target


def prototypes():
    """Like MNIST in size: 784 inputs, of 64 kinds for each class, which lie at random."""
    import numpy as np

    random = np.random.default_rng(0)
    latent = 24
    centers = random.standard_normal((CLASSES * 64, latent))
    kind = random.integers(0, len(centers), size=24_000)
    within = centers[kind] + 0.42 * random.standard_normal((len(kind), latent))
    x = within @ random.standard_normal((latent, 784)) / latent**0.5
    x += 0.5 * random.standard_normal(x.shape)
    return x.astype("float32"), kind % CLASSES


def patches():
    """Like CIFAR-10 in size: 32 x 32 x 3, with two patches of a class at random places in noise."""
    import numpy as np

    random = np.random.default_rng(0)
    shapes = random.standard_normal((CLASSES, 2, 8, 8, 3))
    y = random.integers(0, CLASSES, size=6_000)
    x = random.standard_normal((len(y), 32, 32, 3))
    at = random.integers(0, 25, size=(len(y), 2, 2))
    for example, of_class in enumerate(y):
        for patch, (row, column) in zip(shapes[of_class], at[example], strict=True):
            x[example, row : row + 8, column : column + 8] += patch
    return x.astype("float32"), y


def ratings():
    """Who likes what: pairs of 200 users and 150 items, each with four traits that nobody knows."""
    import numpy as np

    random = np.random.default_rng(0)
    users, items = random.standard_normal((USERS, 4)), random.standard_normal((ITEMS, 4))
    user, item = random.integers(0, USERS, 18_000), random.integers(0, ITEMS, 18_000)
    liked = (users[user] * items[item]).sum(1) > 0
    return np.stack([user, item], 1).astype("int32"), liked.astype("int64")


def mlp(inputs: int, hidden: tuple[int, ...]):
    import keras

    dense = [keras.layers.Dense(width, "relu") for width in hidden]
    return keras.Sequential([keras.Input((inputs,)), *dense, keras.layers.Dense(CLASSES)])


def small_cnn():
    """36 thousand weights."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            layers.Dense(CLASSES),
        ]
    )


def cnn():
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(32, 3, activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(64, "relu"),
            layers.Dense(CLASSES),
        ]
    )


def recommender():
    import keras

    pair = keras.Input((2,), dtype="int32")
    user = keras.layers.Embedding(USERS, 16)(pair[:, 0])
    item = keras.layers.Embedding(ITEMS, 16)(pair[:, 1])
    both = keras.layers.Concatenate()([user, item, user * item])
    return keras.Model(pair, keras.layers.Dense(2)(keras.layers.Dense(32, "relu")(both)))


# A task to (its data, its model, how many examples validate).
TASKS = {
    "digits": (digits, small_cnn, 360),
    "prototypes": (prototypes, lambda: mlp(784, (512, 512)), 4_000),
    "cnn": (patches, cnn, 1_000),
    "recommender": (ratings, recommender, 2_000),
}


def split(data, validation: int, seed: int):
    """x, y to train on; x, y to validate: by the seed, as the order and the weights are."""
    import numpy as np

    x, y = data
    order = np.random.default_rng(seed).permutation(len(x))
    held, rest = order[:validation], order[validation:]
    return x[rest], y[rest], x[held], y[held]


def make_strategy(spec: Spec):
    if spec.kind == "keras":
        return None
    import tensorflow as tf

    if spec.kind == "mirrored":
        (device,) = tf.config.list_physical_devices("CPU")
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(spec.workers)]
        tf.config.set_logical_device_configuration(device, logical)
        return tf.distribute.MirroredStrategy([f"/CPU:{i}" for i in range(spec.workers)])
    import tf_dsgd

    cluster = None if spec.processes else tf_dsgd.LocalCluster(spec.workers)
    if spec.kind == "softsync":
        return tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=spec.workers)
    if spec.kind == "averaging":
        return tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=spec.period)
    if spec.kind == "elastic":
        return tf_dsgd.ElasticAveragingStrategy(cluster, average_every=spec.period)
    return tf_dsgd.DownpourStrategy(cluster, push_every=spec.period, fetch_every=spec.period)


# -- a worker that is slower -----------------------------------------------------------------------


def slow_down(pid: int) -> None:
    """Lets a process run a quarter of the time, until it, or the one that wants it, is gone."""
    parent = os.getppid()
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == parent:
            os.kill(pid, signal.SIGSTOP)
            time.sleep((SLOWER - 1) * SLICE_SECONDS)
            os.kill(pid, signal.SIGCONT)
            time.sleep(SLICE_SECONDS)


@contextlib.contextmanager
def one_slow(workers):
    """The last of these processes is slower meanwhile."""
    slowing = subprocess.Popen([sys.executable, __file__, "--slow", str(workers[-1])])
    try:
        yield
    finally:
        slowing.kill()
        slowing.wait(ENDED_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[-1], signal.SIGCONT)


# -- training --------------------------------------------------------------------------------------


class TimeIsOver(Exception):
    """No other run is begun."""


class Clocks:
    """Seconds, and processor seconds of all processes, while they are not stopped."""

    def __init__(self):
        self.pids = {r: p for r, p in processor_time.of_cluster().items() if r != "chief"}
        self.seconds = self.chief = 0.0
        self.others = processor_time.read(self.pids)  # who have nothing to do while it is stopped
        self.resume()

    def resume(self) -> None:
        self.at = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.at[0]
        self.chief += time.process_time() - self.at[1]

    def cpu_seconds(self) -> float:
        spent = processor_time.spent(self.others, processor_time.read(self.pids))
        return self.chief + sum(spent.values())


class Trained:
    """A model that is trained from the beginning as often as one likes."""

    def __init__(self, spec: Spec):
        import keras
        import tensorflow as tf

        self.spec = spec
        make_data, make_model, self.validation = TASKS[spec.task]
        strategy = make_strategy(spec)
        # Not before each run: that has TensorFlow forget what it made of its functions, and a run
        # would begin with a second in which it makes them again.
        keras.utils.set_random_seed(0)
        self.data = make_data()
        with strategy.scope() if strategy else contextlib.nullcontext():
            self.model = make_model()
            self.model.compile(
                keras.optimizers.SGD(spec.rates[0] if spec.rates else spec.rate),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                steps_per_execution=spec.steps_per_execution,
            )
        self.copy = make_model()
        self.answers = tf.function(lambda x: tf.argmax(self.copy(x, training=False), 1))
        x, y, held, _ = split(self.data, self.validation, 0)
        self.fit(x, y, epochs=1)
        self.model.get_weights()
        self.answers(held)

    def fit(self, x, y, **options):
        shared = self.spec.shares or self.spec.kind == "mirrored"
        shares = self.spec.workers if shared else 1
        self.model.fit(x, y, batch_size=self.spec.batch_size * shares, verbose=0, **options)

    def initial_weights(self, seed: int):
        """Glorot's uniform ones, as Keras draws them, and biases of zero."""
        import numpy as np

        random, found = np.random.default_rng([seed, 1]), []
        for weight in self.copy.get_weights():
            if weight.ndim == 1:
                found.append(np.zeros_like(weight))
                continue
            around = int(np.prod(weight.shape[:-2]))
            limit = (6.0 / (around * sum(weight.shape[-2:]))) ** 0.5
            found.append(random.uniform(-limit, limit, weight.shape).astype("float32"))
        return found

    def run(self, rate: float, seed: int, epochs: int) -> dict:
        """Trains until the target, or for so many epochs."""
        import keras

        if self.spec.until is not None and time.time() >= self.spec.until:
            raise TimeIsOver

        x, y, held_x, held_y = split(self.data, self.validation, seed)
        self.model.set_weights(self.initial_weights(seed))
        self.model.optimizer.learning_rate = rate
        self.model.get_weights()
        accuracies: list[float] = []
        clocks = Clocks()

        def validate(_epoch, _logs):
            weights = self.model.get_weights()
            clocks.stop()
            self.copy.set_weights(weights)
            accuracies.append(float((self.answers(held_x).numpy() == held_y).mean()))
            if accuracies[-1] >= self.spec.target or hopeless(accuracies):
                self.model.stop_training = True
            clocks.resume()

        after = keras.callbacks.LambdaCallback(on_epoch_end=validate)
        self.fit(x, y, epochs=epochs, callbacks=[after])
        self.model.get_weights()
        clocks.stop()
        return {
            "rate": rate,
            "seed": seed,
            "reached": accuracies[-1] >= self.spec.target,
            "epochs": len(accuracies),
            "seconds": clocks.seconds,
            "cpu_seconds": clocks.cpu_seconds(),
            "accuracies": accuracies,
        }


def hopeless(accuracies) -> bool:
    """Whether ten epochs, and still no better than twice chance: it has diverged."""
    return len(accuracies) >= 10 and max(accuracies[-5:]) < 2.0 / CLASSES


def run(spec: Spec) -> dict:
    """All runs that are asked for; those of the search first."""
    began = time.time() if spec.started is None else spec.started
    trained = Trained(spec)
    startup = time.time() - began
    with contextlib.ExitStack() as stack:
        if spec.slow:
            stack.enter_context(one_slow(processor_time.of_cluster()[processor_time.WORKERS]))
        found, measured, rate = [], [], spec.rate
        with contextlib.suppress(TimeIsOver):
            if rate is None:
                rate = statistics.search(
                    spec.rates,
                    lambda rate, epochs: [
                        trained.run(rate, seed, epochs) for seed in spec.search_seeds
                    ],
                    spec.epochs,
                    found,
                )
            for seed in spec.seeds:
                measured.append(trained.run(rate, seed, spec.epochs))
    return {"startup_seconds": startup, "rate": rate, "search": found, "runs": measured}


def main() -> None:
    if sys.argv[1] == "--slow":
        slow_down(int(sys.argv[2]))
        return
    given = json.loads(sys.argv[1])
    spec = Spec(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    print(json.dumps(run(spec)), flush=True)


if __name__ == "__main__":
    main()
