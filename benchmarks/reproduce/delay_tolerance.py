"""Adagrad, AdaptiveRevision and staleness scaling under delays of 1 to 4096 updates.

    python benchmarks/reproduce/delay_tolerance.py

McMahan and Streeter (NIPS 2014) train logistic regression online, every gradient applied a fixed
number of updates after its weights were read: at delays of 1,000 and more AdaptiveRevision is
significantly better than standard adaptive methods. Here the same on made-up data like that of
clicks on advertisements: binary features of which the j-th is present with probability
min(1/2, 2/j), besides one that is always there; true weights -1 for that one and standard normal
for the others; labels drawn by them. Every example is seen once (`round_robin` makes the delay).

The loss is that of each example before its label is used, at the delayed weights, averaged over
all; less that of the true weights on the same examples (the regret for each example). Seeds have
data of their own; delays are the same for all, as chance has no part in them.
"""

import driver  # isort: skip (finds the package)

import keras
import numpy as np
import side_by_side

import tf_dsgd

DELAYS = (1, 4, 16, 64, 256, 1024, 4096)


def adagrad(rate: object) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(rate, initial_accumulator_value=1.0)


# The optimizer, what scales its step, and the grid: powers of 2, from and to.
METHODS = {
    "Adagrad": (adagrad, None, (-10, 3)),
    "AdaptiveRevision": (tf_dsgd.optimizers.AdaptiveRevision, None, (-10, 3)),
    "Adagrad, alpha_0 / tau": (adagrad, "inverse", (-6, 9)),
    "SGD, alpha_0 / tau": (keras.optimizers.SGD, "inverse", (-6, 9)),
}


def clicks(examples: int, features: int, seed: int) -> tuple[np.ndarray, ...]:
    """Features, labels, and the losses of the true weights."""
    random = np.random.default_rng(seed)
    often = np.minimum(0.5, 2.0 / np.arange(1, features))
    x = np.ones((examples, features), np.float32)
    x[:, 1:] = random.random((examples, features - 1)) < often
    weights = np.array([-1.0, *random.standard_normal(features - 1)])
    margin = x @ weights
    y = (random.random(examples) < 1 / (1 + np.exp(-margin))).astype(np.float32)
    return x, y, losses(margin, y)


def losses(margin: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, margin) - y * margin


def run(condition, seeds, rates, options) -> dict:
    """All seeds at once."""
    delay = condition["delay"]
    optimizer, scaling, _ = METHODS[condition["method"]]
    examples = options.examples + options.held_out
    data = [clicks(examples, options.features, seed) for seed in seeds]
    x, y, best = (np.stack(part, 1) for part in zip(*data, strict=True))
    updates = options.examples
    study = side_by_side.Runs(
        tf_dsgd.DownpourStrategy(local_rule="none", staleness_scaling=scaling),
        delay + 1,
        optimizer,
        rates,
        seeds,
        lambda rates, seeds: [side_by_side.Dense(rates, seeds, 1, glorot=False, bias=False)],
        x[:updates],
        y[:updates],
        batch_size=1,
        jit_compile=updates > 10_000,
    )
    regret = study.train(side_by_side.round_robin(delay, updates)) - best[:updates].mean(0)
    margin = np.swapaxes(study.logits(x[updates:])[..., 0], 1, 2)
    held_out = (losses(margin, y[updates:]) - best[updates:]).mean(1)
    # What diverged counts as a loss above that of knowing nothing.
    values = {"regret": regret, "held_out": held_out}
    return {n: np.nan_to_num(v, nan=1e3, posinf=1e3).tolist() for n, v in values.items()}


STUDY = driver.Study(
    name="delay_tolerance",
    conditions=[{"delay": delay, "method": name} for delay in DELAYS for name in METHODS],
    grid=lambda condition: METHODS[condition["method"]][2],
    run=run,
    options={"examples": (80_000, 300), "held_out": (10_000, 100), "features": (256, 16)},
    seeds=8,
    together=8,
    chosen_by="regret",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
