"""What `pip install` would read from setup.py."""

import re
import runpy
import sys
from importlib import metadata
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.packaging.repository import ROOT, python_sources

FLAVOURS = re.compile(r"^(tensorflow|tf[-_]nightly|intel[-_]tensorflow)([-_.].*)?$", re.IGNORECASE)
# Distributions that begin alike and are no flavour of TensorFlow.
NOT_FLAVOURS = {"tensorflow-io", "tensorflow-datasets"}


def is_tensorflow(name: str) -> bool:
    return bool(FLAVOURS.match(name)) and name.lower() not in NOT_FLAVOURS


@pytest.fixture
def setup_arguments(monkeypatch):
    """What setup.py hands to setuptools.setup, which is replaced: nothing is built."""
    given = {}
    stand_in = ModuleType("setuptools")
    stand_in.setup = given.update
    stand_in.find_packages = lambda **_: []
    monkeypatch.setitem(sys.modules, "setuptools", stand_in)
    runpy.run_path(str(ROOT / "setup.py"))
    return given


def test_no_flavour_of_tensorflow_is_required_unconditionally(setup_arguments):
    required = {Requirement(text).name for text in setup_arguments["install_requires"]}
    assert required == {"keras", "numpy", "absl-py"}


def test_only_the_cpu_and_gpu_extras_name_tensorflow(setup_arguments):
    naming = {
        extra
        for extra, requirements in setup_arguments["extras_require"].items()
        if any(is_tensorflow(Requirement(text).name) for text in requirements)
    }
    assert naming == {"cpu", "gpu"}


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [
        ("linux", "x86_64", "tensorflow-cpu"),
        ("linux", "aarch64", "tensorflow"),
        ("darwin", "arm64", "tensorflow"),
    ],
)
def test_the_cpu_extra_installs_one_flavour(setup_arguments, system, machine, expected):
    environment = {"sys_platform": system, "platform_machine": machine}
    requirements = [Requirement(text) for text in setup_arguments["extras_require"]["cpu"]]
    chosen = [r.name for r in requirements if r.marker is None or r.marker.evaluate(environment)]
    assert chosen == [expected]


def test_python_and_keras_versions(setup_arguments):
    assert SpecifierSet(setup_arguments["python_requires"]) == SpecifierSet(">=3.11")
    (keras,) = [
        Requirement(text)
        for text in setup_arguments["install_requires"]
        if Requirement(text).name == "keras"
    ]
    assert keras.specifier.contains("3.15.1")
    assert not keras.specifier.contains("2.15.0")
    assert not keras.specifier.contains("4.0.0")


def test_one_version_everywhere(setup_arguments):
    version = setup_arguments["version"]
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{version}"' in (ROOT / "MODULE.bazel").read_text()
    import tf_dsgd

    assert tf_dsgd.__version__ == version


def test_every_directory_of_the_package_is_a_package():
    directories = {
        (ROOT / source).parent for source in python_sources() if source.startswith("tf_dsgd/")
    }
    assert all((directory / "__init__.py").is_file() for directory in directories)
    assert (ROOT / "tf_dsgd/py.typed").is_file()


def test_what_is_installed_requires_no_flavour_of_tensorflow():
    try:
        requirements = metadata.requires("tf_dsgd") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed here; setup.py itself is checked above")
    unconditional = [
        requirement.name
        for requirement in map(Requirement, requirements)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    assert not any(is_tensorflow(name) for name in unconditional)


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
