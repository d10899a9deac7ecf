"""Digits by logistic regression, to the last digit of the loss: L-BFGS against Adam.

    python examples/batch_methods.py

Trains the same convex model by `SandblasterStrategy`, which needs no learning rate, and by plain
Keras with Adam, and prints the loss on the training data after as many passes over them.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from sklearn.datasets import load_digits

import tf_dsgd


def compiled(**options) -> keras.Model:
    keras.utils.set_random_seed(1)
    decay = keras.regularizers.L2(1e-3)
    dense = keras.layers.Dense(10, "softmax", kernel_regularizer=decay)
    model = keras.Sequential([keras.Input((64,)), dense])
    model.compile(loss="sparse_categorical_crossentropy", **options)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="lbfgs", help="or cg-fr, cg-pr, cg-hs, gd")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")

    strategy = tf_dsgd.SandblasterStrategy(
        tf_dsgd.LocalCluster(options.workers), method=options.method, gradient_tolerance=1e-5
    )
    with strategy.scope():
        model = compiled()
    passes = 0

    def count(epoch, logs):
        nonlocal passes
        last = strategy.last_iteration()
        passes += last.evaluations
        if epoch % 10 == 0 or last.is_last:
            print(f"{options.method}: iteration {last.number:3d}, loss {last.loss:.8f}")

    callback = keras.callbacks.LambdaCallback(on_epoch_end=count)
    epochs = options.iterations
    model.fit(x, y, batch_size=256, epochs=epochs, verbose=0, callbacks=[callback])
    print(f"{options.method}: {passes} passes, loss {strategy.last_iteration().loss:.8f}")

    plain = compiled(optimizer=keras.optimizers.Adam(0.01))
    plain.fit(x, y, batch_size=256, epochs=passes, verbose=0)
    loss = plain.evaluate(x, y, batch_size=256, verbose=0)
    print(f"adam: {passes} passes, loss {loss:.8f}")


if __name__ == "__main__":
    main()
