"""The rules of the rooms (rooms.py), held by a machine: who may import whom, what is pure, how long things may get.

Every check collects all its complaints and says them in words, with file and line.  Purity is not only read: each pure
module is imported in a process in which a clock, chance, sockets, files and tensors are not to be had for our code.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rig.waiting import LONG_S

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rooms import (
    FOLDERS,
    IMPURE,
    PURE_MODULES,
    ROOMS,
    ROOT,
    THIRD_PARTY,
    ZMQ_MODULES,
    Import,
    Module,
    Room,
    modules,
    python_outside_the_rooms,
)

# One process has what all of these parse; three would each parse it.
pytestmark = pytest.mark.xdist_group("house: sources")

ROOM_FILES_LIMIT = 20
FUNCTION_LINES_LIMIT = 60
PARAMETERS_LIMIT = 8


def complain(problems: list[str]) -> None:
    if problems:
        pytest.fail("\n" + "\n".join(problems), pytrace=False)


# ---- the table --------------------------------------------------------------------------------------------------


def test_the_tables_name_only_what_is_there() -> None:
    rooms = {module.room for module in modules()}
    paths = {module.path for module in modules()} | {"__init__", "__main__"}
    problems = [f"ROOMS: there is no room {room}/" for room in ROOMS if room not in rooms]
    problems += [f"{room}/ holds modules and is not in ROOMS" for room in sorted(rooms - set(ROOMS))]
    for room, rule in ROOMS.items():
        problems += [f"ROOMS[{room}]: there is no {m}" for m in rule.may if m not in rooms and m not in paths]
    for table, names in (
        ("PURE_MODULES", PURE_MODULES),
        ("ZMQ_MODULES", ZMQ_MODULES),
    ):
        problems += [f"{table}: there is no {name}" for name in names if name not in paths]
        problems += [f"{table} names {name} twice" for name, n in Counter(names).items() if n > 1]
    problems += [
        f"PURE_MODULES: {p} lies in a room that is pure" for p in PURE_MODULES if ROOMS[_room_of(p)].pure
    ]
    problems += [f"THIRD_PARTY: there is no room {room}/" for room in THIRD_PARTY if room not in ROOMS]
    complain(problems)


def _room_of(path: str) -> str:
    return path.rpartition("/")[0]


def upward_imports(found: list[Module], rooms: Mapping[str, Room]) -> list[str]:
    problems = []
    for module in found:
        may = {*rooms[module.room].may, module.room}
        for each in module.imports:
            if not each.path or each.path == "__version__" or each.name == "farflung":
                continue
            if each.path not in may and _room_of(each.path) not in may:
                problems.append(
                    f"{module.label}:{each.line} imports {each.name}; {module.room}/ may import only "
                    f"{', '.join(sorted(may))}"
                )
    return problems


def test_each_room_imports_only_what_it_may() -> None:
    complain(upward_imports(modules(), ROOMS))


def test_no_room_may_import_in_a_circle() -> None:
    """Also by way of others, and also where the import is for type checkers only."""
    below: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        below[module.room] |= {_room_of(each.path) for each in module.imports if each.path} & set(ROOMS)
    complain([f"{' -> '.join(circle)}: rooms import each other" for circle in circles(below)])


def test_no_module_imports_itself_by_way_of_others() -> None:
    below = {module.path: {each.path for each in module.imports if each.path} for module in modules()}
    complain([f"{' -> '.join(circle)}: modules import each other" for circle in circles(below)])


def circles(below: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """One way around for each circle that a walk from any name runs into."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> Iterator[list[str]]:
        if name in way:
            yield [*way[way.index(name) :], name]
        elif name not in done:
            for each in sorted(below.get(name, set()) - {name}):
                yield from walk(each, [*way, name])
            done.add(name)

    for name in sorted(below):
        yield from walk(name, [])


def test_some_rooms_depend_on_little() -> None:
    problems = []
    for module in modules():
        allowed = THIRD_PARTY.get(module.room)
        for each in module.imports if allowed is not None else []:
            if each.top not in {*allowed, "farflung", *sys.stdlib_module_names}:  # type: ignore[misc]
                problems.append(
                    f"{module.label}:{each.line} imports {each.name}; {module.room}/ may use only the standard "
                    f"library and {', '.join(sorted(allowed))}"  # type: ignore[arg-type]
                )
    complain(problems)


def test_imports_are_written_in_full() -> None:
    """A second name for the same file would give every class in it a second, unequal self."""
    problems = []
    for module in modules() + python_outside_the_rooms():
        for each in module.imports:
            if each.relative:
                problems.append(
                    f"{module.label}:{each.line} is a relative import; write farflung.ROOM.MODULE"
                )
            elif each.top in FOLDERS and module.room.partition("/")[0] in (*FOLDERS, ""):
                problems.append(f"{module.label}:{each.line} imports {each.name}; write farflung.{each.name}")
    complain(problems)


def test_scripts_import_only_what_is_there() -> None:
    """Nobody else would notice before the script is run: benchmarks and examples are no part of the package."""
    problems = []
    for module in python_outside_the_rooms():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("farflung."):
                if importlib.util.find_spec(str(node.module)) is None:
                    problems.append(f"{module.label}:{node.lineno}: there is no {node.module}")
                    continue
                names = [each.name for each in node.names]
                missing = [name for name in names if not _has(str(node.module), name)]
                problems += [f"{module.label}:{node.lineno}: {node.module} has no {name}" for name in missing]
    complain(problems)


def _has(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name) or bool(
        importlib.util.find_spec(f"{module}.{name}")
    )


# ---- purity -----------------------------------------------------------------------------------------------------

# Our own imports of what is hidden are written down and let through, so that one process finds all of them.  Each
# module is run once; what it leads to are those that it imports, those that these import, and the packages around them.
IMPORT_WITHOUT_THE_WORLD = """
import builtins, importlib, json, sys
hidden, names, real = set(json.loads(sys.argv[1])), json.loads(sys.argv[2]), builtins.__import__
direct, below = {}, {}
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if importer.partition(".")[0] == "farflung":
        if name.partition(".")[0] in hidden:
            direct.setdefault(importer, set()).add(name)
        below.setdefault(importer, set()).update([name, *(f"{name}.{each}" for each in fromlist or ())])
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
for name in names:
    importlib.import_module(name)
def reached(name):
    found, ahead = set(), [name]
    while ahead:
        at = ahead.pop()
        if at not in found and at.partition(".")[0] == "farflung":
            found.add(at)
            ahead += [at.rpartition(".")[0], *below.get(at, ())]
    return found
print(json.dumps({name: sorted((by, what) for by in reached(name) for what in direct.get(by, ())) for name in names}))
"""


def impure_reach(names: list[str], folder: Path | None = None) -> dict[str, list[tuple[str, str]]]:
    """module -> (which of ours, what it imported): by the module itself or by anything that it leads to."""
    words = [json.dumps(sorted(IMPURE)), json.dumps(names)]
    command = [sys.executable, "-c", IMPORT_WITHOUT_THE_WORLD, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {name: [tuple(each) for each in found] for name, found in json.loads(done.stdout).items()}


def pure_modules() -> list[Module]:
    return [module for module in modules() if ROOMS[module.room].pure or module.path in PURE_MODULES]


def test_pure_modules_see_no_clock_chance_socket_file_or_tensor() -> None:
    """Time, randomness and bytes are arguments; a shell provides them.  Nothing that they import sees more."""
    problems = [
        f"{name} is pure and {f'leads to {by}, which' if by != name else ''} imports {what}"
        for name, found in impure_reach([module.dotted for module in pure_modules()]).items()
        for by, what in found
    ]
    problems += [
        f"{module.label}:{line} opens a file; take text or bytes"
        for module in pure_modules()
        for line in opened(module)
    ]
    complain(problems)


def test_what_only_type_checkers_import_is_no_hidden_way_out() -> None:
    pure = {module.path for module in pure_modules()}
    complain(
        [
            f"{module.label}:{each.line} imports {each.name} for type checkers; a pure module names pure ones alone"
            for module in pure_modules()
            for each in module.imports
            if each.typing_only and each.path and each.path not in pure
        ]
    )


def opened(module: Module) -> Iterator[int]:
    """Lines that call open(), or a method of a path that reads or writes."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            plain = isinstance(node.func, ast.Name)
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if (called == "open" and plain) or called in {
                "read_text",
                "read_bytes",
                "write_text",
                "write_bytes",
            }:
                yield node.lineno


def test_a_docstring_that_says_pure_is_held_to_it() -> None:
    pure = {module.path for module in pure_modules()}
    complain(
        [
            f"{module.label} calls itself pure in its first paragraph; add it to PURE_MODULES, or say what is"
            for module in modules()
            if "  Pure.\n" in (ast.get_docstring(module.tree, clean=True) or "").partition("\n\n")[0] + "\n"
            and module.path not in pure
        ]
    )


def test_the_coordinator_starts_with_torch_hidden() -> None:
    code = "import sys; sys.modules['torch'] = None; import farflung.coordinator.hosting"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr


def test_only_the_shells_touch_sockets() -> None:
    complain(
        [
            f"{module.label}:{each.line} imports zmq; only the modules in ZMQ_MODULES may"
            for module in modules()
            for each in module.imports
            if each.top == "zmq" and module.path not in ZMQ_MODULES
        ]
    )


# ---- the rules catch what they are there for ---------------------------------------------------------------------


def test_a_torch_import_two_rooms_deep_is_caught(tmp_path: Path) -> None:
    """A pure module imports a room below, which imports one below that: the third one imports torch."""
    tree = {
        "__init__.py": "",
        "peer/machine/decides.py": "from farflung.checkpoints.plans import plan",
        "checkpoints/plans.py": "from farflung.protocol.sums import total as plan",
        "protocol/sums.py": "def total():\n    pass\nimport torch",
        "torch.py": "",
    }
    for name, text in tree.items():
        path = tmp_path / ("" if name == "torch.py" else "farflung") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = impure_reach(["farflung.peer.machine.decides"], tmp_path)
    assert found == {"farflung.peer.machine.decides": [("farflung.protocol.sums", "torch")]}


def test_an_unknown_name_in_the_table_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROOMS, "collectives/round", Room(("protocol/wants",), pure=True))
    with pytest.raises(pytest.fail.Exception, match="there is no protocol/wants"):
        test_the_tables_name_only_what_is_there()


def test_an_upward_import_is_caught(tmp_path: Path) -> None:
    file = ROOT / "protocol" / "upward.py"  # never written: only its name says where it would lie
    module = Module(file)
    module.__dict__["imports"] = [Import("farflung.peer.settings", 3, relative=False, typing_only=False)]
    (problem,) = upward_imports([module], ROOMS)
    assert problem.startswith(
        "protocol/upward.py:3 imports farflung.peer.settings; protocol/ may import only"
    )


def test_a_circle_is_caught() -> None:
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == [["a", "b", "c", "a"]]


# ---- where files may lie ------------------------------------------------------------------------------------------


def test_the_root_holds_no_stray_python() -> None:
    """The root is the package: any other *.py in it would be shipped."""
    stray = {path.name for path in ROOT.glob("*.py")} - {"__init__.py", "__main__.py"}
    complain([f"{name} lies in the root and would be shipped; move it into a room" for name in sorted(stray)])


def test_rooms_have_no_init() -> None:
    complain(
        [
            f"{module.label}: no __init__.py in a room; compression/ would hide the standard one"
            for module in modules()
            if module.file.name == "__init__.py"
        ]
    )


def test_every_room_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = set(project["tool"]["setuptools"]["packages"])
    assert packaged == {"farflung"} | {f"farflung.{room.replace('/', '.')}" for room in ROOMS}


def test_a_room_can_be_taken_in_at_a_glance() -> None:
    counts = Counter(module.room for module in modules())
    complain(
        [
            f"{room}/ holds {n} modules; the limit is {ROOM_FILES_LIMIT}"
            for room, n in counts.items()
            if n > ROOM_FILES_LIMIT
        ]
    )


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    complain(
        [
            f"{module.label} has the name of a standard module; choose another"
            for module in modules()
            if module.file.stem in sys.stdlib_module_names
        ]
    )


# ---- how long things may get ---------------------------------------------------------------------------------------


def test_functions_fit_on_a_screen() -> None:
    problems = []
    for module in modules():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            where = f"{module.label}:{node.lineno} {node.name}"
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_LIMIT:
                problems.append(f"{where} has {length} lines; the limit is {FUNCTION_LINES_LIMIT}")
            count = parameters(node)
            is_command = any(ast.unparse(each).startswith("app.command") for each in node.decorator_list)
            if count > PARAMETERS_LIMIT and not is_command:  # a command's parameters are its options
                problems.append(
                    f"{where} has {count} parameters; from {PARAMETERS_LIMIT + 1} on use a dataclass"
                )
    complain(problems)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return len([each for each in named if each.arg not in ("self", "cls")])


def test_broad_excepts_stand_only_at_the_outermost_loop() -> None:
    problems = []
    for module in modules():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            if node.type is None:
                problems.append(f"{module.label}:{node.lineno} is a bare except; name what you expect")
                continue
            caught = {each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)}
            broad = caught & {"Exception", "BaseException"}
            if broad and "outermost" not in module.lines[node.lineno - 1].partition("#")[2]:
                problems.append(
                    f"{module.label}:{node.lineno} catches {broad.pop()}; name what you expect, or say on the same "
                    "line in a comment which outermost loop this is"
                )
    complain(problems)


def test_every_module_says_what_it_is_for() -> None:
    complain(
        [f"{m.label} does not open with a docstring" for m in modules() if not ast.get_docstring(m.tree)]
    )


def test_no_constant_is_torn_by_a_comment() -> None:
    """The formatter puts brackets around a value whose comment does not fit: then the comment belongs above it."""
    problems = []
    for module in modules():
        for node in module.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                value = node.value
                torn = value.lineno > node.lineno and value.lineno == value.end_lineno
                if torn and "#" in "".join(module.lines[node.lineno - 1 : node.end_lineno]):
                    problems.append(f"{module.label}:{node.lineno} is torn by its comment; put that above it")
    complain(problems)
