"""BatchNorm's moving statistics with 1 to 16 workers, against a serial pass at the same weights.

    python benchmarks/reproduce/batch_norm.py --json batch_norm.json
    python benchmarks/reproduce/batch_norm.py --moving --json batch_norm_moving.json

A convolutional network with BatchNorm (momentum 0.9) learns scikit-learn's digits for 8 epochs.
Its validation loss is given twice: with the moving statistics that training left, and, at the same
final weights, with those of a serial pass over the same mini-batches in a plain Keras model. Where
the two differ, statistics lag or are wrong, whatever the weights are. Plain `fit` is the first row.
The rate falls to zero along a cosine: statistics belong to the weights of the last dozens of
mini-batches, and while these still move, as they do under a large rate and the more the staler
gradients are, they are not the final ones', whoever takes them. `--moving` shows that, where it was
largest: Adagrad on each worker, at a constant rate, at one that falls, and after one more epoch in
which weights stand still.
"""

import setting  # isort: skip (finds the package and `runs`)

import contextlib

import keras
import numpy as np
import runs
from sklearn.datasets import load_digits

import tf_dsgd

BATCH, VALIDATION = 32, 360


def strategies(workers: int) -> dict[str, tf_dsgd.DownpourStrategy]:
    def cluster() -> tf_dsgd.SimulatedCluster:
        return tf_dsgd.SimulatedCluster(
            workers, compute_seconds=tf_dsgd.Exponential(1.0), network_seconds=0.05, seed=workers
        )

    return {
        "Downpour, period 1": tf_dsgd.DownpourStrategy(cluster()),
        "Downpour, period 5": tf_dsgd.DownpourStrategy(cluster(), push_every=5, fetch_every=5),
        "softsync, c = M": tf_dsgd.SoftsyncStrategy(cluster(), gradients_per_update=workers),
        "averaging every 5": tf_dsgd.PeriodicAveragingStrategy(cluster(), average_every=5),
        "elastic averaging every 5": tf_dsgd.ElasticAveragingStrategy(cluster(), average_every=5),
    }


def build(
    rate: float, epochs: int, optimizer: type = keras.optimizers.SGD, falls: bool = True
) -> keras.Model:
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    steps = epochs * -(-(len(load_digits().target) - VALIDATION) // BATCH)
    falling = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(optimizer(falling if falls else rate), loss)
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return digits.images[order, :, :, None].astype("float32") / 16.0, digits.target[order]


def with_serial_statistics(model: keras.Model, x: np.ndarray, epochs: int) -> keras.Model:
    """A plain model of the same weights, whose statistics are those of one pass after another."""
    serial = build(0.0, epochs)
    first = {v.path.split("/", 1)[1]: v.numpy() for v in serial.non_trainable_variables}
    serial.set_weights(model.get_weights())
    for variable in serial.non_trainable_variables:
        if "moving" in variable.path:
            variable.assign(first[variable.path.split("/", 1)[1]])
    for _ in range(epochs):
        for begin in range(0, len(x), BATCH):
            serial(x[begin : begin + BATCH], training=True)
    return serial


def measure(name: str, workers: int, strategy, options) -> dict:
    x, y = data()
    train, held = (x[VALIDATION:], y[VALIDATION:]), (x[:VALIDATION], y[:VALIDATION])
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build(options.rate, options.epochs)
    history = model.fit(*train, batch_size=BATCH, epochs=options.epochs, shuffle=False, verbose=0)
    own = model.evaluate(*held, batch_size=VALIDATION, verbose=0)
    serial = with_serial_statistics(model, train[0], options.epochs).evaluate(
        *held, batch_size=VALIDATION, verbose=0
    )
    print(name, workers, round(own, 4), round(serial, 4), flush=True)
    return {
        "method": name,
        "workers": workers,
        "training loss": history.history["loss"][-1],
        "own": own,
        "serial": serial,
    }


class Moved(keras.callbacks.Callback):
    """How far an epoch moves the trainable weights, beside their norm."""

    share = 0.0

    def _weights(self) -> np.ndarray:
        return np.concatenate([v.numpy().ravel() for v in self.model.trainable_variables])

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._before = self._weights()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        moved = np.linalg.norm(self._weights() - self._before)
        self.share = float(moved / np.linalg.norm(self._before))


def measure_moving(options) -> list[dict]:
    """Rows of `--moving`: the difference while weights move, and when they stand still."""
    x, y = data()
    train, held = (x[VALIDATION:], y[VALIDATION:]), (x[:VALIDATION], y[:VALIDATION])
    rows = []

    def row(name: str, workers: int, model: keras.Model, epochs: int, loss: float, share: float):
        own, serial = (
            m.evaluate(*held, batch_size=VALIDATION, verbose=0)
            for m in (model, with_serial_statistics(model, train[0], epochs))
        )
        print(name, workers, round(own, 4), round(serial, 4), flush=True)
        rows.append(
            {
                "method": name,
                "workers": workers,
                "moved": share,
                "training loss": loss,
                "own": own,
                "serial": serial,
            }
        )

    for workers, falls in ((1, False), (16, False), (16, True)):
        cluster = tf_dsgd.SimulatedCluster(
            workers, compute_seconds=tf_dsgd.Exponential(1.0), network_seconds=0.05, seed=workers
        )
        with tf_dsgd.DownpourStrategy(cluster, local_rule="optimizer").scope():
            model = build(options.rate, options.epochs, keras.optimizers.Adagrad, falls)
        moved = Moved()
        given = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [moved]}
        loss = model.fit(*train, epochs=options.epochs, **given).history["loss"][-1]
        name = "a rate that falls to 0" if falls else "a constant rate"
        row(name, workers, model, options.epochs, loss, moved.share)
        if workers > 1 and not falls:
            model.optimizer.learning_rate = 0.0
            loss = model.fit(*train, epochs=1, **given).history["loss"][-1]
            row("then an epoch at 0", workers, model, options.epochs + 1, loss, moved.share)
    return rows


LOSSES = ["training loss", "val_loss", "with serial statistics", "difference"]


def losses(result: dict) -> list[str]:
    """The cells of `LOSSES`."""
    difference = 100.0 * (result["own"] / result["serial"] - 1.0)
    of = ("training loss", "own", "serial")
    return [*(f"{result[name]:.3f}" for name in of), f"{difference:+.1f} %"]


def report_moving(results: list[dict]) -> str:
    rows = [
        [r["method"], str(r["workers"]), f"{100.0 * r['moved']:.1f} % of their norm", *losses(r)]
        for r in results
    ]
    return runs.table(["", "M", "weights moved in the last epoch", *LOSSES], rows)


def report(results: list[dict]) -> str:
    rows = [[r["method"], str(r["workers"]), *losses(r)] for r in results]
    return runs.table(["", "M", *LOSSES], rows)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--workers", default="1,2,4,8,16")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--moving", action="store_true", help="this table alone")
    options = parser.parse_args()
    if options.moving:
        results = measure_moving(options)
        setting.finish(options, results, report_moving, lambda results, path: None)
        return
    results = [measure("plain fit", 1, None, options)]
    for workers in setting.numbers(options.workers):
        for name, strategy in strategies(workers).items():
            results.append(measure(name, workers, strategy, options))
    setting.finish(options, results, report, lambda results, path: None)


if __name__ == "__main__":
    main()
