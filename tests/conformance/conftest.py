"""One trained model for each strategy and engine, shared by the checks that only look at it."""

import contextlib
import types

import keras
import pytest

from tests import covering, graphs, helpers
from tests.conformance import registry

EXAMPLES, BATCH, EPOCHS = 250, 8, 3  # the last batch of an epoch has two examples
STEPS_PER_EPOCH = 32

PAIRS = [(c, e) for c in registry.CONFIGURATIONS for e in registry.ENGINES]
# A fit takes as long as all checks of it: one for each configuration is fast, on either engine;
# with parts one of all.
FAST = covering.cover(PAIRS, 1, at_most=1 if registry.IN_PARTS else None)
MARKED = [
    pytest.param(pair, marks=[] if n in FAST else pytest.mark.slow, id="-".join(pair))
    for n, pair in enumerate(PAIRS)
]


@pytest.fixture(scope="module", params=MARKED)
def trained(request):
    return train(*request.param)


def train(configuration, engine):
    """A fit of three epochs with validation data, and what was seen at the end of each."""
    keras.utils.set_random_seed(1)
    run = types.SimpleNamespace(configuration=configuration, engine=engine)
    run.strategy = registry.make(configuration, engine)
    run.x, run.y = helpers.regression(EXAMPLES)
    run.validation = helpers.regression(60, seed=5)
    with run.strategy.scope():
        run.model = helpers.recording_model(
            registry.optimizer(configuration),
            metrics=helpers.id_metrics(),
            with_table=configuration in registry.WITH_TABLE,
        )
    run.ids = run.model.get_layer("ids").ids
    ids = helpers.AtEpochEnd(run.ids.take)
    steps = helpers.AtEpochEnd(lambda: run.strategy.steps)
    # Those that other processes run are not seen.
    seen = contextlib.nullcontext(()) if engine == "cluster" else graphs.collected()
    with seen as run.graphs:
        run.history = run.model.fit(
            run.x,
            run.y,
            batch_size=BATCH,
            epochs=EPOCHS,
            verbose=0,
            validation_data=run.validation,
            callbacks=[ids, steps],
        ).history
    run.ids_of_epochs, run.steps_at_epochs = ids.values, steps.values
    return run
