"""DC-ASGD against asynchronous and sequential SGD.

    python benchmarks/reproduce/delay_compensation.py

Zheng et al. (ICML 2017) train a ResNet-20 on CIFAR-10 with M = 4 workers: asynchronous SGD ends at
an error of 9.27 %, sequential SGD at 8.65, DC-ASGD with an adaptive lambda at 8.19. Here a network
32-64-10 (relu) learns what a random network says (teacher.py), mini-batches of 32; the rate falls
to a tenth at half and at three quarters of the updates, as the paper's falls twice. Simulated
workers of one mean speed, whose mini-batches take an exponentially distributed time. Lambda is
chosen with the rate, by the other seeds: five or six of it and seven rates at first; SGD begins
with 35 rates, five to an octave, and so do the "fine" ones, for a lambda that is given.
"""

import driver  # isort: skip (finds the package)

import keras
import seeded
import teacher

import tf_dsgd

BATCH = 32
DECAY = 0.95  # of the mean square
FINE = ", fine"
LAMBDAS = {
    "DC-ASGD-c": (0.1, 1.0, 10.0, 100.0, 1000.0),
    "DC-ASGD-a": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
}


def run(condition, seeds, rates, options) -> dict:
    method = condition["method"].removesuffix(FINE)

    def optimizer(given) -> keras.optimizers.Optimizer:
        rate = teacher.Falling(given.rates, options.updates)
        if method == "SGD":
            return keras.optimizers.SGD(rate)
        decay = DECAY if method == "DC-ASGD-a" else None
        return tf_dsgd.optimizers.DelayCompensatedSGD(rate, condition["lambda"], decay)

    strategy = tf_dsgd.DownpourStrategy(local_rule="none")
    return seeded.taught(
        strategy, condition["workers"], optimizer, rates, seeds, options.updates, BATCH
    )


def conditions() -> list[dict]:
    found = [{"workers": workers, "method": "SGD"} for workers in (1, 4, 16)]
    found += [
        {"workers": workers, "method": method + fine, "lambda": lam}
        for fine in ("", FINE)
        for workers in (4, 16)
        for method, lambdas in LAMBDAS.items()
        for lam in lambdas
    ]
    return found


STUDY = driver.Study(
    name="delay_compensation",
    conditions=conditions(),
    grid=lambda condition: (-5, 1),
    run=run,
    options={"updates": (4000, 60)},
    seeds=8,
    together=4,
    tuned=("lambda",),
    to_octave=lambda condition: 5 if condition["method"].endswith(("SGD", FINE)) else 1,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
