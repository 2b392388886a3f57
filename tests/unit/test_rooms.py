"""Who may import whom: a room imports only rooms below it, and no two files import each other."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "slurm_gpuhealth"
FLOORS = """
    commands
    hooks doctor
    controller
    metrics
    ladder
    ship
    node
    simulate
    correlate
    policy
    evidence measure
    store
    slurm
    diagnose logs
    config xid
    findings outcomes child
    deadline frozen say
"""
"""From the top down. Rooms of one line don't import each other; a new room has its line here."""
FLOOR = {room: number for number, line in enumerate(reversed(FLOORS.split("\n"))) for room in line.split()}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).replace(".__init__", ""): path
    for path in PACKAGE.glob("**/*.py")
    if path != PACKAGE / "__init__.py"
}
MANY = 15


def imports(path):
    """Every module of ours that a file imports, also inside functions and for the type checker alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE.name):
            for name in (f"{node.module}.{one.name}" for one in node.names):
                if name in MODULES or node.module != PACKAGE.name:  # the package itself has only its version
                    yield name if name in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in MODULES)


GRAPH = {name: set(imports(path)) for name, path in MODULES.items()}


def test_no_two_files_import_each_other():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_nothing_imports_upwards():
    pairs = [(one, other) for one, others in GRAPH.items() for other in others]
    rooms = [(one, other, one.split(".")[1], other.split(".")[1]) for one, other in pairs]
    assert not [(one, other) for one, other, room, below in rooms if room != below and FLOOR[room] <= FLOOR[below]]


def test_every_file_stands_in_a_room_that_the_table_names():
    beside = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert beside == {"findings", "outcomes", "child", "deadline", "frozen", "say"}
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} | beside == set(FLOOR)


def test_a_room_of_many_files_says_how_they_lie():
    for room in {path.parent for path in PACKAGE.glob("*/*.py")}:
        said = (room / "__init__.py").read_text()
        files = [path.stem for path in room.glob("*.py") if path.stem != "__init__"]
        assert len(files) <= MANY or [one for one in files if one not in said] == [], room.name
