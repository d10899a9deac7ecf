"""Every public name says what it is, when to use it, and shows an example that runs."""

import doctest
import inspect

import pytest

import tf_dsgd
from tests.packaging.repository import ROOT

MODULES = [
    tf_dsgd,
    tf_dsgd.callbacks,
    tf_dsgd.compression,
    tf_dsgd.optimizers,
    tf_dsgd.gpu,
    tf_dsgd.faults,
]
PUBLIC = [
    (f"{module.__name__}.{name}", getattr(module, name))
    for module in MODULES
    for name in module.__all__
    if not inspect.ismodule(getattr(module, name))
]
SKIPPED = doctest.OPTIONFLAGS_BY_NAME["SKIP"]


def defined_in(module):
    """Classes and functions without an underscore that a module itself defines."""
    return {
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and not name.startswith("_")
        and value.__module__ == module.__name__
    }


def test_public_names_are_all_seen():
    names = ("callbacks", "compression", "optimizers", "gpu", "simulation.faults")
    assert {module.__name__ for module in MODULES} >= {f"tf_dsgd.{name}" for name in names}
    assert len(PUBLIC) == sum(len(module.__all__) for module in MODULES) - 5  # the five modules
    # What other parts of the package use of these modules, and users do not.
    assert defined_in(tf_dsgd.gpu) - set(tf_dsgd.gpu.__all__) == {"configure_by_default"}
    assert defined_in(tf_dsgd.faults) - set(tf_dsgd.faults.__all__) == {"checked"}


@pytest.mark.parametrize(("name", "value"), PUBLIC, ids=[name for name, _ in PUBLIC])
def test_a_public_name_has_an_example(name, value):
    text = inspect.cleandoc(value.__doc__ or "")
    first = text.partition("\n\n")[0]
    assert first.endswith("."), "it begins with a sentence"
    examples = doctest.DocTestParser().get_examples(text, name)
    run = [example for example in examples if not example.options.get(SKIPPED)]
    # `.ci/run` runs them: pytest --doctest-modules tf_dsgd.
    assert any("tf_dsgd." in example.source for example in run)


def test_examples_are_run():
    assert "pytest --doctest-modules tf_dsgd" in (ROOT / ".ci/run").read_text()
