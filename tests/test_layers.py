"""The rules of the rooms, checked on the source text: who may import whom, and how long things may get.

Every check collects all its complaints and says them in words, with file and line. Nothing here imports
farflung, except the one test that starts the coordinator without torch.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from waiting import LONG_S

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("checkpoints", "collectives", "compression", "coordinator", "optim", "peer")

# What each room may import of farflung besides itself: whole rooms, or single modules.
ALLOWED = {
    "compression": {"farflung.protocol.errors", "farflung.protocol.verdicts"},
    "optim": {"farflung.protocol.errors"},
    "collectives": {"farflung.compression"},
    "checkpoints": {
        "farflung.collectives",
        "farflung.compression",
        "farflung.protocol.model_schema",
        "farflung.protocol.signing",
    },
    "coordinator": {
        f"farflung.collectives.{name}"
        for name in (
            "errors",
            "events",
            "failpoints",
            "digests",
            "plan",
            "verdicts",
            "shares",
            "limits",
            "ladder",
            "caps",
            "fragments",
        )
    },
    "peer": {f"farflung.{room}" for room in ROOMS},
}

# Rooms of maths: nothing but these besides the standard library.
THIRD_PARTY = {"compression": {"torch", "numpy", "triton"}, "optim": {"torch", "numpy"}}


def files(room: str, names: str) -> set[str]:
    return {f"{room}/{name}.py" for name in names.split()}


# Decisions without I/O: the same code runs over sockets, in the simulator and in a unit test.
PURE = (
    files(
        "collectives",
        "round shares plan digests fragments frames verdicts wants merge gram weighing pings widening caps "
        "rates ladder",
    )
    | files(
        "coordinator",
        "run rounds rules comparing screening weighting membership leases messages wire manifest status going_back "
        "admission discipline doorkeeper networks operating register",
    )
    | files("checkpoints", "transfer manifest donors")
    | files("optim", "outer")
    | files("peer", "machine saving recalling serving")
)
IMPURE_IMPORTS = {"time", "random", "socket", "zmq", "threading", "asyncio", "logging", "os", "sqlite3"}

# The thin shells around the pure code: the only files that see a socket.
ZMQ_FILES = (
    files("coordinator", "server front_door zap door keys dialer")
    | files("collectives", "zmq_link zmq_socket line tcp_counts")
    | files("peer", "control agent data_line local watching bench_exchange dial_back")
)

FILE_LINES_WANTED, FILE_LINES_LIMIT = 300, 400
FUNCTION_LINES_LIMIT = 60
PARAMETERS_LIMIT = 8


@dataclass(frozen=True)
class Import:
    """One imported thing, as a dotted name, with a farflung module named in full where there is one."""

    name: str
    line: int
    relative: bool
    typing_only: bool  # under `if TYPE_CHECKING:`, never executed

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Module:
    path: Path

    @property
    def label(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def room(self) -> str:
        return self.path.relative_to(ROOT).parts[0]

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse("\n".join(self.lines), filename=self.label)

    @functools.cached_property
    def imports(self) -> list[Import]:
        return list(find_imports(self.tree, typing_only=False))

    @property
    def imported_at_run_time(self) -> list[Import]:
        return [each for each in self.imports if not each.typing_only]


def find_imports(node: ast.AST, typing_only: bool) -> Iterator[Import]:
    """Every import below `node`, also those inside functions."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, False, typing_only)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            name = full_name(node.module or "", alias.name)
            yield Import(name, node.lineno, node.level > 0, typing_only)
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from find_imports(child, typing_only=True)
        for child in node.orelse:
            yield from find_imports(child, typing_only)
    else:
        for child in ast.iter_child_nodes(node):
            yield from find_imports(child, typing_only)


def full_name(module: str, name: str) -> str:
    """`from farflung.peer import agent` names a module, `from farflung.peer.agent.agent import Agent` does not."""
    inside = module.split(".")[1:] + [name]
    if module == "farflung" or ROOT.joinpath(*inside).with_suffix(".py").is_file():
        return f"{module}.{name}"
    return module


def is_within(name: str, homes: set[str]) -> bool:
    return any(name == home or name.startswith(home + ".") for home in homes)


@functools.cache
def modules() -> list[Module]:
    return [Module(path) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def python_outside_the_rooms() -> list[Module]:
    folders = [ROOT / name for name in ("tests", "examples", "benchmarks", "docs")]
    inside = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [Module(path) for path in sorted(ROOT.glob("*.py")) + inside]


def complain(problems: list[str]) -> None:
    if problems:
        pytest.fail("\n" + "\n".join(problems), pytrace=False)


# --- who may import whom ---


def test_each_room_imports_only_the_rooms_it_may() -> None:
    problems = []
    for module in modules():
        allowed = ALLOWED[module.room] | {f"farflung.{module.room}", "farflung.__version__"}
        for each in module.imports:
            if each.top == "farflung" and not is_within(each.name, allowed):
                may = ", ".join(sorted(ALLOWED[module.room]))
                problems.append(
                    f"{module.label}:{each.line} imports {each.name}; {module.room}/ may import only {may}"
                )
    complain(problems)


def test_rooms_of_maths_depend_on_little() -> None:
    problems = []
    for module in modules():
        allowed = THIRD_PARTY.get(module.room)
        if allowed is None:
            continue
        for each in module.imports:
            fine = each.relative or each.top in allowed | {"farflung"} | sys.stdlib_module_names
            if not fine:
                problems.append(
                    f"{module.label}:{each.line} imports {each.name}; {module.room}/ may use only the standard "
                    f"library and {', '.join(sorted(allowed))}"
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
            elif each.top in ROOMS:
                problems.append(f"{module.label}:{each.line} imports {each.name}; write farflung.{each.name}")
    complain(problems)


def test_scripts_import_only_what_is_there() -> None:
    """Nobody else would notice before the script is run: benchmarks and examples are no part of the package."""
    problems = []
    for module in python_outside_the_rooms():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("farflung."):
                found = importlib.util.find_spec(str(node.module))
                if found is None:
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


def test_nothing_the_coordinator_imports_leads_to_torch() -> None:
    by_name = {f"farflung.{m.room}.{m.path.stem}": m for m in modules()}
    by_name["farflung"] = Module(ROOT / "__init__.py")  # runs before everything else
    waiting = [(name, name) for name, m in by_name.items() if name == "farflung" or m.room == "coordinator"]
    seen: set[str] = set()
    problems = []
    while waiting:
        name, chain = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for each in by_name[name].imported_at_run_time:
            if each.top == "torch":
                line = f"{by_name[name].label}:{each.line}"
                problems.append(f"the coordinator must start without torch, but {chain} imports it at {line}")
            elif each.name in by_name:
                waiting.append((each.name, f"{chain} -> {each.name}"))
    complain(problems)


def test_the_coordinator_starts_with_torch_hidden() -> None:
    code = "import sys; sys.modules['torch'] = None; import farflung.coordinator.server"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr


def test_pure_modules_see_no_clock_chance_socket_or_file() -> None:
    """Time, randomness and bytes are arguments; a shell provides them."""
    problems = []
    for module in modules():
        if module.label not in PURE:
            continue
        for each in module.imported_at_run_time:
            if each.top in IMPURE_IMPORTS:
                problems.append(
                    f"{module.label}:{each.line} imports {each.name}; let the caller pass its result in"
                )
        problems += [f"{module.label}:{line} opens a file; take text or bytes" for line in opened(module)]
    complain(problems)


def opened(module: Module) -> Iterator[int]:
    """Lines that call open(), or a method of a path that reads or writes."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            plain = isinstance(node.func, ast.Name)
            if (called == "open" and plain) or called in {
                "read_text",
                "read_bytes",
                "write_text",
                "write_bytes",
            }:
                yield node.lineno


def test_only_the_shells_touch_sockets() -> None:
    complain(
        [
            f"{module.label}:{each.line} imports zmq; only the files in ZMQ_FILES may"
            for module in modules()
            for each in module.imports
            if each.top == "zmq" and module.label not in ZMQ_FILES
        ]
    )


# --- where files may lie ---


def test_the_root_holds_no_stray_python() -> None:
    """The root is the package: any other *.py in it would be shipped."""
    stray = {path.name for path in ROOT.glob("*.py")} - {"__init__.py", "__main__.py"}
    complain([f"{name} lies in the root and would be shipped; move it into a room" for name in sorted(stray)])


def test_rooms_are_flat_and_have_no_init() -> None:
    problems = []
    for module in modules():
        if module.path.name == "__init__.py":
            problems.append(
                f"{module.label}: no __init__.py in a room; compression/ would hide the standard one"
            )
        elif module.path.parent != ROOT / module.room:
            problems.append(f"{module.label}: rooms are flat; a nested folder is missing in the wheel")
    complain(problems)


def test_every_room_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = set(project["tool"]["setuptools"]["packages"])
    assert packaged == {"farflung"} | {f"farflung.{room}" for room in ROOMS}


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    complain(
        [
            f"{module.label} has the name of a standard module; choose another"
            for module in modules()
            if module.path.stem in sys.stdlib_module_names
        ]
    )


# --- how long things may get ---


def test_files_can_be_read_in_one_sitting() -> None:
    lengths = {module.label: len(module.lines) for module in modules()}
    long = [
        f"{label} ({n} lines)" for label, n in lengths.items() if FILE_LINES_WANTED < n <= FILE_LINES_LIMIT
    ]
    if long:
        wish = f"longer than the {FILE_LINES_WANTED} lines wanted: {', '.join(long)}"
        warnings.warn(wish, stacklevel=1)
    complain(
        [
            f"{label} has {n} lines; the limit is {FILE_LINES_LIMIT}: split it"
            for label, n in lengths.items()
            if n > FILE_LINES_LIMIT
        ]
    )


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
        [
            f"{module.label} does not open with a docstring"
            for module in modules()
            if not ast.get_docstring(module.tree)
        ]
    )
