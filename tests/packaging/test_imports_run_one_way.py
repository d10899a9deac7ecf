"""Imports run one way: no circles, and each room knows only those below it.

What an import is, and that those within functions and under `TYPE_CHECKING` count, is in
`imports.py`.
"""

import itertools
import textwrap

import pytest

from tests.packaging import imports

ROOMS = [
    {
        *(
            "_requirements",
            "_tf",
            "_tf_autograph",
            "_tf_earlier",
            "_tf_errors",
            "_tf_gradient",
            "_tf_order",
            "_tf_parts",
            "_tf_prepared",
            "_tf_python",
            "_tf_random",
            "_tf_remote",
            "_tf_rows",
        ),
        *("_tf_server", "_version", "floods", "resuming"),
    },
    {"arithmetic", "checks", "console", "installed", "membership", "report"},
    {"gpu", "places"},
    {"accumulators", "algorithm"},
    {"algorithms", "compression", "optimizers", "transport"},
    {"engine", "simulation.delays", "simulation.faults", "simulation.stacks"},
    {"launch", "serve", "spmd"},
    {"cluster"},
    {"strategies"},
    {"callbacks", "simulation.simulate", "simulation.study", "spark"},
    {"__main__", "selfcheck"},
]
"""From the lowest on: a room may import the rooms of lower floors, and nothing else.

A room is a folder or a module of `tf_dsgd`. The root, `tf_dsgd/__init__.py`, is above all.
"""

NEIGHBOURS = {
    ("_tf_remote", "_tf_errors"),
    ("engine", "simulation.delays"),
    ("engine", "simulation.faults"),
    ("serve", "launch"),
    ("launch", "serve"),
}
"""Rooms of one floor, the first of which may import the second."""

KNOWN: set[tuple[str, str]] = set()
"""Imports, (importer, imported), that should go. The list only ever becomes shorter."""

SIMULATOR = ("engine.simulator", "engine.scheduled", "engine.schedule", "engine.faults")
LAUNCHER = {"tf_dsgd.serve", "tf_dsgd.launch"}
TENSORFLOW = {"tensorflow", "keras", "tf_keras"}


@pytest.fixture(scope="module")
def package():
    return imports.graph("tf_dsgd")


@pytest.fixture(scope="module")
def mended(package):
    """The package's imports without the known ones."""
    return {
        module: frozenset(other for other in imported if (module, other) not in KNOWN)
        for module, imported in package.items()
    }


def room_of(module):
    """The room that a module is in; None for the root."""
    inside = module.removeprefix("tf_dsgd").removeprefix(".")
    rooms = set().union(*ROOMS)
    parts = inside.split(".")
    heads = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((head for head in heads if head in rooms), None)


def floor_of(room):
    return next(floor for floor, rooms in enumerate(ROOMS) if room in rooms)


def may_import(room, other):
    return room == other or (room, other) in NEIGHBOURS or floor_of(other) < floor_of(room)


def shown(edges):
    return sorted(f"{importer} imports {imported}" for importer, imported in edges)


def of_rooms(package, *rooms):
    return sorted(module for module in package if room_of(module) in rooms)


def test_every_module_has_a_room(package):
    # That folder has none itself: what it holds is on two floors, and its __init__ imports nothing.
    without = [module for module in package if room_of(module) is None]
    assert sorted(without) == ["tf_dsgd", "tf_dsgd.simulation"]
    assert not package["tf_dsgd.simulation"]


def test_no_module_imports_itself_through_others(mended):
    assert imports.circles(mended) == []


@pytest.mark.parametrize(("folder", "programs"), [("benchmarks", True), ("examples", True)])
def test_no_program_imports_itself_through_others(folder, programs):
    assert imports.circles(imports.graph(folder, programs)) == []


def test_no_test_imports_itself_through_others():
    assert imports.circles(imports.graph("tests")) == []


def test_rooms_import_only_those_below_them(package):
    wrong = {
        (module, other)
        for module, imported in package.items()
        for other in imported
        if room_of(module) and not (room_of(other) and may_import(room_of(module), room_of(other)))
    }
    wrong = {(a, b) for a, b in wrong if b != "tf_dsgd.simulation"}  # an __init__ that is empty
    assert shown(wrong - KNOWN) == []


def test_known_imports_are_still_there(package):
    """What was mended is taken off the list."""
    edges = {(module, other) for module, imported in package.items() for other in imported}
    assert shown(KNOWN - edges) == []


def test_rooms_are_those_that_are_there(package):
    rooms = {room_of(module) for module in package} - {None}
    assert set().union(*ROOMS) <= rooms


def test_the_engine_knows_no_strategy_and_no_callback(mended):
    for module in of_rooms(mended, "engine"):
        found = imports.reached(module, mended)
        wrong = [
            way for other, way in found.items() if room_of(other) in ("strategies", "callbacks")
        ]
        assert wrong == []


def test_the_simulator_knows_no_launcher(mended):
    modules = [module for module in mended if module.removeprefix("tf_dsgd.") in SIMULATOR]
    modules += of_rooms(mended, "simulation.delays", "simulation.faults")
    assert len(modules) >= 4
    for module in modules:
        found = imports.reached(module, mended)
        assert [way for other, way in found.items() if room_of(other) in ("launch", "serve")] == []


def test_membership_needs_no_tensorflow(mended):
    known = imports.modules("tf_dsgd")
    for module in of_rooms(mended, "membership"):
        for other, way in imports.reached(module, mended).items():
            assert not imports.outside(other, known[other]) & TENSORFLOW, " -> ".join(way)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes modules of a folder `made`, {path: source}, which is then looked at."""

    def write(sources):
        for path, source in sources.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(textwrap.dedent(source))
        found = {imports.module_of(path): tmp_path / path for path in sources}
        monkeypatch.setattr(imports, "modules", lambda folder: found)
        return found

    return write


@pytest.mark.parametrize(
    "statement",
    [
        "import made.b",
        "from made import b",
        "from made.b import anything",
        "from . import b",
        "from .b import anything",
        "def f():\n    import made.b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.b import anything",
        "try:\n    import made.b\nexcept ImportError:\n    pass",
    ],
)
def test_a_circle_is_found_however_it_is_written(written, statement):
    written({"made/__init__.py": "", "made/a.py": statement, "made/b.py": "from made import a"})
    assert imports.circles(imports.graph("made")) == [{"made.a", "made.b"}]


def test_a_circle_of_programs_is_found(written):
    written(
        {"made/a.py": "import b", "made/b.py": "def f():\n    import a", "made/c.py": "import b"}
    )
    assert imports.circles(imports.graph("made")) == []
    assert imports.circles(imports.graph("made", programs=True)) == [{"made.a", "made.b"}]


def test_the_root_is_imported_by_those_who_use_its_names(written):
    written(
        {
            "made/__init__.py": "from made import a, b\nversion = 1",
            "made/a.py": "from made import b",
            "made/b.py": "def f():\n    import made\n    return made.version",
        }
    )
    edges = imports.graph("made")
    assert edges == {"made": {"made.a", "made.b"}, "made.a": {"made.b"}, "made.b": {"made"}}
    assert imports.circles(edges) == [{"made", "made.a", "made.b"}]


def test_a_folder_is_imported_by_those_outside_of_it(written):
    written(
        {
            "made/__init__.py": "",
            "made/room/__init__.py": "from made.room import a",
            "made/room/a.py": "from made.room import b",
            "made/room/b.py": "import numpy.linalg, tensorflow as tf",
            "made/other.py": "from made.room.b import anything",
        }
    )
    edges = imports.graph("made")
    assert edges["made.other"] == {"made.room", "made.room.b"}
    assert edges["made.room.a"] == {"made.room.b"}
    assert imports.circles(edges) == []
    assert imports.reached("made.other", edges)["made.room.a"] == (
        "made.other",
        "made.room",
        "made.room.a",
    )
    found = imports.modules("made")
    assert imports.outside("made.room.b", found["made.room.b"]) == {"numpy", "tensorflow"}


def test_floors_hold_what_they_are_for():
    """The order that is promised: each of these rooms knows those after it, and never back."""
    order = [
        "callbacks",
        "strategies",
        "cluster",
        "engine",
        "algorithm",
        "arithmetic",
    ]
    for above, below in itertools.pairwise(order):
        assert may_import(above, below) and not may_import(below, above)
    assert may_import("engine", "transport") and not may_import("transport", "engine")
    assert may_import("engine", "membership") and not may_import("membership", "engine")
    assert may_import("transport", "membership") and not may_import("membership", "transport")
