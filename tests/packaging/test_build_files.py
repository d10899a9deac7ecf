"""The BUILD files, read without Bazel: their syntax is Python's, their rules are stand-ins here."""

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.packaging.repository import ROOT, SKIPPED_DIRECTORIES, python_sources

BUILD_FILES = sorted(
    path
    for path in ROOT.rglob("BUILD")
    if path.is_file()
    and not any(
        part in SKIPPED_DIRECTORIES or part.startswith(".") for part in path.relative_to(ROOT).parts
    )
)
PACKAGES = {path.parent for path in BUILD_FILES}

# The name to import, where it is not the distribution's.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "sklearn": "scikit-learn",
    "tensorflow": "tensorflow-cpu",
    "pytest_timeout": "pytest-timeout",
}
# Imported only where a user asked for it, with a message that names the extra.
OPTIONAL = {"tensorboard", "matplotlib", "pyspark", "pyarrow"}


def owner(path: Path) -> Path:
    """The Bazel package of a file: the nearest directory above it that has a BUILD file."""
    return next(parent for parent in path.parents if parent in PACKAGES)


def evaluate(build_file: Path) -> list[SimpleNamespace]:
    """The rules that a BUILD file states."""
    package = build_file.parent
    rules: list[SimpleNamespace] = []

    def rule(kind):
        return lambda **attributes: rules.append(SimpleNamespace(kind=kind, **attributes))

    def glob(include, exclude=(), allow_empty=False):
        def match(patterns):
            return {
                path.relative_to(package).as_posix()
                for pattern in patterns
                # Bazel's closing ** takes files in, pathlib's takes directories only.
                for path in package.glob(re.sub(r"\*\*$", "**/*", pattern))
                if path.is_file()
                and owner(path) == package
                and "__pycache__" not in path.parts
                and "_build" not in path.parts
            }

        found = sorted(match(include) - match(exclude))
        assert found or allow_empty, f"{build_file}: glob({include}) finds nothing"
        return found

    kinds = ("py_library", "py_binary", "py_test", "filegroup", "exports_files")
    names = {kind: rule(kind) for kind in kinds}
    names["exports_files"] = lambda srcs, **_: rules.append(
        SimpleNamespace(kind="exports_files", name="exports", srcs=srcs)
    )
    names |= {
        "load": lambda *_: None,
        "package": lambda **_: None,
        "glob": glob,
        "requirement": lambda name: f"@pypi//{name}",
    }
    exec(compile(build_file.read_text(), str(build_file), "exec"), names)
    return rules


def sources(build_file: Path) -> set[str]:
    base = build_file.parent
    return {
        (base / source).relative_to(ROOT).as_posix()
        for rule in evaluate(build_file)
        for source in rule.srcs
        if not source.startswith((":", "//"))
    }


def test_build_files_name_every_python_source_and_no_other():
    named = set().union(*(sources(path) for path in BUILD_FILES))
    named_python = {path for path in named if path.endswith(".py")}
    assert named_python == python_sources()


@pytest.mark.parametrize("build_file", BUILD_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_targets_have_different_names_and_existing_sources(build_file):
    rules = evaluate(build_file)
    names = [rule.name for rule in rules]
    assert len(names) == len(set(names))
    for source in sources(build_file):
        assert (ROOT / source).is_file(), source


def third_party_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names) - {"tf_dsgd", "tests"}


def test_the_package_depends_on_what_it_imports():
    (library,) = [rule for rule in evaluate(ROOT / "tf_dsgd/BUILD") if rule.kind == "py_library"]
    imported = set().union(
        *(third_party_imports(ROOT / "tf_dsgd" / source) for source in library.srcs)
    )
    needed = {f"@pypi//{DISTRIBUTIONS.get(name, name)}" for name in imported - OPTIONAL}
    assert needed <= set(library.deps)


def test_the_lock_file_pins_what_the_build_files_require():
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements_bazel.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    required = {
        dependency.removeprefix("@pypi//")
        for path in BUILD_FILES
        for rule in evaluate(path)
        for dependency in getattr(rule, "deps", [])
        if dependency.startswith("@pypi//")
    }
    assert required <= pinned
