"""What a batch method cannot train: a step that gives another loss at the same weights.

A function gives the same at the same point. What a step draws at random, or changes in training,
is refused by name, and so is what the compiled model asks for and a batch method does not do.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd.strategies.capture import Application
from tf_dsgd.strategies.variable import Kind, ReplicaVariable

_RANDOM = (
    *("Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial"),
    *("RngReadAndSkip", "RngSkip", "StatefulRandom", "StatefulStandardNormal"),
    *("StatefulTruncatedNormal", "StatefulUniform", "SampleDistortedBoundingBox", "Timestamp"),
)
_SAMPLER = "CandidateSampler"
"""Ends the names of what sampled softmax and noise-contrastive losses draw with."""


def check_compiled(model: keras.Model | None, applications: Sequence[Application]) -> None:
    """Refuses a step that is not `fit`'s, and what a batch method cannot do as it was compiled."""
    if model is None or len(applications) != 1:
        raise ValueError(
            "A batch method trains a Keras model in model.fit, whose step applies gradients once. "
            f"Received: {'a function' if model is None else f'{len(applications)} applications'}."
        )
    optimizer = applications[0].optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "A batch method scales no loss, and under mixed_float16 Keras wraps the optimizer in a "
            "LossScaleOptimizer. Use the policy mixed_bfloat16 or float32."
        )
    for variable in applications[0].weights:
        if variable.dtype.size < 4:
            raise ValueError(
                "A batch method adds up gradients over all data, which 16 bits cannot hold. Use "
                "the policy mixed_bfloat16, whose weights are of 32, float32 or float64. Received: "
                f"{variable.name} of type {variable.dtype.name}."
            )
    changed = _changed_options(optimizer)
    if changed is not None:
        raise ValueError(
            "A batch method takes the place of the optimizer. Compile without one (Keras's "
            "default is ignored), or choose another strategy for it; leave out callbacks that set "
            f"its rate, such as LearningRateScheduler. Received: {changed}."
        )
    for variable in applications[0].variables:
        if getattr(variable, "constraint", None) is not None:
            raise ValueError(
                "A batch method minimises without constraints. Use a regularizer, or leave the "
                f"constraint out. Received: {variable.path} with {variable.constraint!r}."
            )


def _changed_options(optimizer: keras.optimizers.Optimizer) -> str | None:
    """What distinguishes it from what Keras compiles by default; None if nothing does."""
    kind = type(optimizer)
    if kind is not keras.optimizers.RMSprop:
        return kind.__name__
    with tf.init_scope():  # its rate is a variable, and a step is being traced
        config = optimizer.get_config()
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name not in config or name == "name":
            continue
        value, default = config[name], parameter.default
        if isinstance(value, float) and isinstance(default, float):
            same = math.isclose(value, default, rel_tol=1e-6)
        else:
            same = value == default
        if not same:
            return f"RMSprop({name}={value!r})"
    return None


def check_repeatable(
    model: keras.Model | None, written: Iterable[ReplicaVariable], graph: Any
) -> None:
    """Refuses a step that gives another loss at the same weights when it is run again."""
    made = graph.as_graph_def()
    nodes = [*made.node, *(node for f in made.library.function for node in f.node_def)]
    random = [n.name for n in nodes if n.op.startswith(_RANDOM) or n.op.endswith(_SAMPLER)]
    if random:
        raise ValueError(
            "A batch method compares the loss at several points, and this model draws random "
            f"numbers: in {random[0]!r}. Leave that out, or do it once to the data."
        )
    for variable in written:
        if variable.kind is Kind.SEED or "seed_generator" in variable.name:
            raise ValueError(
                "A batch method compares the loss at several points, and in training "
                f"{_owner(model, variable)} draws random numbers. Leave it out, or set its rate to "
                "0; do augmentation once, to the data."
            )
        if variable.kind in (Kind.STATISTIC, Kind.OWN):
            raise ValueError(
                "A batch method compares the loss at several points, and in training "
                f"{_owner(model, variable)} changes its own state, {variable.name!r}, with each "
                "mini-batch. Set layer.trainable = False before compile, as for a pretrained "
                "BatchNormalization, or use a layer without, such as LayerNormalization."
            )


def _owner(model: keras.Model | None, variable: ReplicaVariable) -> str:
    """The innermost layer that has a variable, in words."""
    found: Any = model
    while True:
        inner = [
            layer
            for layer in getattr(found, "layers", ())
            if any(v.value is variable for v in layer.variables)
        ]
        if not inner:
            break
        found = inner[0]
    if found is None or found is model:
        layer = variable.name.rpartition("/")[0]  # made as it was called
        return f"the layer {layer!r}" if layer else "the model"
    return f"the layer {found.name!r} ({type(found).__name__})"
