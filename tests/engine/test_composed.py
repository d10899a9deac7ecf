"""No engine overrides what another does; engines are composed of parts."""

import importlib
import inspect
import pkgutil

import tf_dsgd.engine
import tf_dsgd.membership

PACKAGES = (tf_dsgd.engine, tf_dsgd.membership)


def classes():
    for package in PACKAGES:
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for _, made in inspect.getmembers(module, inspect.isclass):
                if made.__module__ == found.name:
                    yield made


def is_concrete(member):
    """Whether it is a method or a property that does something."""
    behaves = callable(member) or isinstance(member, property)
    return behaves and not getattr(member, "__isabstractmethod__", False)


def overridden(made):
    """(class, method, base) of each method that takes the place of one of the package."""
    for name, member in vars(made).items():
        if name.startswith("__") or not (callable(member) or isinstance(member, property)):
            continue
        for base in made.__mro__[1:]:
            ours = base.__module__.startswith("tf_dsgd.")
            if ours and name in vars(base) and is_concrete(vars(base)[name]):
                yield made.__name__, name, base.__name__


def test_engines_override_nothing_that_another_does():
    found = list(classes())
    assert {"Engine", "ThreadsEngine", "SimulatorEngine", "Scheduler"} <= {
        c.__name__ for c in found
    }
    assert [each for made in found for each in overridden(made)] == []


def test_an_engine_has_no_base_but_one():
    """No tower: what engines share is in one class, and all else is a part that they hold."""
    engines = [c for c in classes() if any(b.__name__ == "Engine" for b in c.__mro__[1:])]
    assert {c.__name__ for c in engines} == {"ScheduledEngine", "SimulatorEngine", "ThreadsEngine"}
    for made in engines:
        bases = [b for b in made.__mro__[1:] if b.__module__.startswith("tf_dsgd.")]
        assert [b.__name__ for b in bases] == ["Engine"]


def test_the_check_sees_an_override():
    class Stacked(tf_dsgd.engine.threads.ThreadsEngine):
        def _grant(self, program, stream):
            super()._grant(program, stream)

    assert list(overridden(Stacked)) == [("Stacked", "_grant", "ThreadsEngine")]
