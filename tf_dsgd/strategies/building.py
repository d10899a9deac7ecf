"""Models without a `call`, such as a GAN that only has a `train_step`.

Plain `fit` takes them. Under a strategy Keras builds a model before it trains, by calling it. Where
all that such a model is made of is built, there is nothing to be called for.
"""

from __future__ import annotations

import keras

from tf_dsgd.strategies.caller import model_that_calls


def build_without_call() -> None:
    """Marks the model whose `fit` or `evaluate` asks for its data as built, if it has no `call`."""
    model = model_that_calls("fit", "evaluate")
    if model is None or type(model).call is not keras.Model.call:
        return
    if model.layers and all(layer.built for layer in model.layers):
        model.built = True
