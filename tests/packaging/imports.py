"""Which module imports which, read from the source without running it.

An import counts wherever it stands: at the top, within a function, under `TYPE_CHECKING`. Importing
`a.b.c` runs `a/__init__.py` and `a/b/__init__.py`, too; of these, packages count that the importer
is not in itself. Importing a submodule of the root, `from tf_dsgd import checks`, is no import of
the root: only names that the root itself defines are.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.packaging.repository import ROOT, python_sources

Graph = Mapping[str, frozenset[str]]


def module_of(source: str) -> str:
    """`tf_dsgd/gpu.py` is `tf_dsgd.gpu`, and `tf_dsgd/engine/__init__.py` is `tf_dsgd.engine`."""
    return source.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@functools.cache
def modules(folder: str) -> dict[str, Path]:
    """Every module under a folder of the checkout, by its name."""
    return {
        module_of(source): ROOT / source
        for source in python_sources()
        if source.startswith(f"{folder}/")
    }


def named(tree: ast.AST, package: str) -> Iterable[tuple[str, ...]]:
    """What the import statements of a module of `package` name.

    Of `import a.b` ("a.b",), and of `from a import b` ("a.b", "a"): b is a module, or a name in a.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def package_of(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def graph(folder: str, programs: bool = False) -> Graph:
    """Of each module under a folder, the modules under it that it imports.

    `programs`: they are started as files, and import those beside them by their names alone.
    """
    known = modules(folder)
    found = {}
    for module, path in known.items():
        package = package_of(module, path)
        imported: set[str] = set()
        for names in named(parsed(path), package):
            beside = tuple(f"{package}.{name}" for name in names) if programs else ()
            target = next((name for name in names + beside if name in known), None)
            if target is not None:
                above = packages_above(target) - packages_above(module)
                imported |= {target} | (above & known.keys())
        found[module] = frozenset(imported - {module})
    return found


def packages_above(module: str) -> set[str]:
    """Those that a module is in: of `a.b.c`, `a` and `a.b`."""
    parts = module.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def outside(module: str, path: Path) -> set[str]:
    """The first names of all that a module imports: `tensorflow` of `tensorflow.io.gfile`."""
    return {names[-1].split(".")[0] for names in named(parsed(path), package_of(module, path))}


def reached(start: str, edges: Graph) -> dict[str, tuple[str, ...]]:
    """Every module that a module imports, directly or through others, and one way to each."""
    ways = {start: (start,)}
    todo = [start]
    while todo:
        module = todo.pop()
        for imported in edges[module] - ways.keys():
            ways[imported] = (*ways[module], imported)
            todo.append(imported)
    return ways


def circles(edges: Graph) -> list[frozenset[str]]:
    """The groups of modules that import one another, each as large as it is."""
    reach = {module: reached(module, edges).keys() for module in edges}
    found = {
        frozenset(other for other in reach[module] if module in reach[other]) for module in edges
    }
    return sorted((group for group in found if len(group) > 1), key=sorted)
