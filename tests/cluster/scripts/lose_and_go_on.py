"""A chief that loses workers while nothing trains: each stage must do with those that are left."""

import numpy as np
import train
import witness

import tf_dsgd

STEPS = 100


def fit_twice(stage, model):
    train.fit(model, STEPS, 2, [])
    print("STAGE", stage, train.counts(model), flush=True)


strategy = tf_dsgd.DownpourStrategy(push_every=2, fetch_every=2)
witness.kill([3])
model = train.model_of(strategy, STEPS)
fit_twice("lost before the model was made", model)
witness.kill([2])
fit_twice("lost between two fits", model)
x = np.arange(8, dtype="float32")[:, None]
witness.kill([1])
print("STAGE predict", np.unique(model.predict(x, verbose=0)), flush=True)
print("STAGE evaluate", model.evaluate(x, x, verbose=0), flush=True)
fit_twice("lost before predict", model)
second = train.model_of(tf_dsgd.DownpourStrategy(push_every=2, fetch_every=2), STEPS)
fit_twice("a second strategy", second)
