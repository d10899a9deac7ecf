"""What each codec owes to `fit` on each strategy that takes it: the checks of what is trained."""

import pytest

from tests.conformance import conftest, registry, test_fit

ENGINES = list(registry.ENGINES)
# Each codec, and each strategy, meets each engine.
PAIRS = [
    (configuration, ENGINES[(n + n // len(registry.CODECS)) % len(ENGINES)])
    for n, configuration in enumerate(registry.WITH_CODECS)
]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def trained(request):
    return conftest.train(*request.param)


pytestmark = pytest.mark.slow

test_the_loss_falls = test_fit.test_the_loss_falls
test_every_example_once_an_epoch = test_fit.test_every_example_once_an_epoch
test_metrics_are_exact = test_fit.test_metrics_are_exact
test_steps_are_counted = test_fit.test_steps_are_counted
test_the_ledger_balances = test_fit.test_the_ledger_balances
test_staleness_is_consistent = test_fit.test_staleness_is_consistent
