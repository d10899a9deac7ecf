"""Every public name says what is wrong with what it is called with: the argument and the value."""

import functools
import inspect

import numpy as np
import pytest

from tests.packaging.test_public_names import PUBLIC
from tf_dsgd import compression
from tf_dsgd.algorithm import Algorithm
from tf_dsgd.algorithms.downpour import AccrueGradient, CompiledOptimizer, Periods

RULE = Algorithm(AccrueGradient(rate=None), Periods(), CompiledOptimizer(None))
FAULT = {"worker": 0, "step": 1}
NEEDED = {
    "compression.Cast": {"dtype": "bfloat16"},
    "compression.PowerSGD": {"rank": 2},
    "compression.QSGD": {"levels": 4},
    "compression.Threshold": {"tau": 0.5},
    "compression.TopK": {"fraction": 0.5},
    "CompressedAsyncStrategy": {"compression": compression.Threshold(0.5)},
    "Exponential": {"mean_seconds": 1.0},
    "LocalSGD": {"learning_rate": 0.1},
    "LogNormal": {"mean_seconds": 1.0},
    "ModelParallel": {"parts": "auto"},
    "Pareto": {"mean_seconds": 1.0},
    "SimulatedCluster": {"num_workers": 2},
    "SoftsyncStrategy": {"gradients_per_update": 2},
    "Straggler": {"seconds": 1.0, "factor": 2.0},
    "callbacks.BackupAndRestore": {"backup_dir": "backups"},
    "simulation.faults.Fault": {"job": "worker", "index": 0, "step": 1, "phase": "compute"},
    "simulation.faults.fail_at": FAULT,
    "simulation.faults.fail_ps_at": {"ps": 0, "step": 1},
    "simulation.faults.stop_at": {**FAULT, "seconds": 1.0},
    "simulate": {
        "rule": RULE,
        "optimizer": "sgd",
        "weights": [np.zeros(2)],
        "events": [(0, "fetch")],
    },
}
"""Right values of the arguments that a name needs."""
NAMES = {name.removeprefix("tf_dsgd."): made for name, made in PUBLIC}
RESULTS = {"Simulation", "simulation.faults.Fault"}
"""What functions of ours give: those name the arguments, as users know them."""


def needed(name):
    return NEEDED.get(name, {})


def arguments(made):
    return {
        parameter.name: parameter
        for parameter in inspect.signature(made).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    }


def refusal(call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_that_it_does_not_have_is_named(name):
    made = NAMES[name]
    said = refusal(lambda: made(**needed(name), zzz="a"))
    assert said.startswith(f"{made.__name__} has no argument 'zzz'. It")
    assert said.endswith("Received: zzz='a'.")
    assert all(each in said for each in arguments(made))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_nearly_right_is_put_right(name):
    made = NAMES[name]
    for right in (each for each in arguments(made) if len(each) > 4):
        wrong = right[:-2] + right[-1]
        said = refusal(functools.partial(made, **needed(name), **{wrong: "a"}))
        assert f"{made.__name__} has no argument {wrong!r}: did you mean {right}?" in said


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_that_it_needs_is_named(name):
    made = NAMES[name]
    for missing in needed(name):
        given = {each: value for each, value in needed(name).items() if each != missing}
        said = refusal(functools.partial(made, **given))
        assert f"{made.__name__} needs the argument {missing!r}" in said
    names = {key for key, each in arguments(made).items() if each.default is each.empty}
    assert names == set(needed(name)) or name in RESULTS


@pytest.mark.parametrize("name", NAMES)
def test_too_many_by_their_place_are_told_of(name):
    made = NAMES[name]
    by_place = [
        each.name for each in arguments(made).values() if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    said = refusal(lambda: made(*[None] * len(by_place), "a"))
    assert said.startswith(f"{made.__name__} takes ") and said.endswith("Received: 'a'.")
    if by_place:
        said = refusal(lambda: made(None, **{by_place[0]: "a"}))
        assert f"was given {by_place[0]!r} twice" in said


class Nonsense:
    """A value that no argument takes."""

    def __repr__(self):
        return "Nonsense()"


@pytest.mark.parametrize("name", sorted(NAMES.keys() - RESULTS))
def test_a_value_that_makes_no_sense_is_shown_with_its_arguments_name(name):
    made = NAMES[name]
    for argument in (each for each in arguments(made) if each != "name"):  # that one is Keras's
        given = {**needed(name), argument: Nonsense()}
        said = refusal(functools.partial(made, **given))
        assert argument in said
        assert "Nonsense()" in said
