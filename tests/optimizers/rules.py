"""Every optimizer, in several settings, and its twin for one weight."""

from tests.optimizers import twins
from tf_dsgd import optimizers

WORKERS = 3

# A name to a function that makes the optimizer, and one from first weights to the twin.
RULES = {
    "adaptive_revision": (
        lambda: optimizers.AdaptiveRevision(0.5),
        lambda w: twins.AdaptiveRevision(w, WORKERS, 0.5),
    ),
    "adaptive_revision_small_start": (
        lambda: optimizers.AdaptiveRevision(0.5, initial_accumulator_value=0.01),
        lambda w: twins.AdaptiveRevision(w, WORKERS, 0.5, initial=0.01),
    ),
    "delay_compensated": (
        lambda: optimizers.DelayCompensatedSGD(0.1, lam=0.25),
        lambda w: twins.DelayCompensatedSGD(w, WORKERS, 0.1, 0.25),
    ),
    "delay_compensated_adaptive": (
        lambda: optimizers.DelayCompensatedSGD(0.1, lam=0.5, mean_square_decay=0.75),
        lambda w: twins.DelayCompensatedSGD(w, WORKERS, 0.1, 0.5, m=0.75),
    ),
    "fasgd": (lambda: optimizers.FASGD(0.1), lambda w: twins.FASGD(w, WORKERS, 0.1)),
    "fasgd_other_settings": (
        lambda: optimizers.FASGD(0.1, 0.5, 0.75, epsilon=1e-3, initial_deviation=0.25),
        lambda w: twins.FASGD(w, WORKERS, 0.1, 0.5, 0.75, 1e-3, 0.25),
    ),
}
