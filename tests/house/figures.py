"""What the house measures: how large the product is, how far its core is crossed by modes, how far a delta travels.

    python tests/house/figures.py            # all figures, beside the ceilings that hold
    python tests/house/figures.py --write    # ... and those that have fallen become the ceilings

test_figures.py holds every figure to its ceiling (figures.json): none may rise.  A figure that has to rise is written
there by hand, in the commit that says why.  A delta's way is traced in the simulator: the product's files in which
something runs from the first `Frozen` of a trainer until the first chunk is merged (at peers alone), and until the next
version is loaded (with the coordinator).  Links and processes are not in it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rooms import ROOT, Module, modules

CEILINGS = Path(__file__).resolve().parent / "figures.json"
# What a mode is made of, by folder or module: without it the rest should still train.
MODES: Mapping[str, tuple[str, ...]] = {
    "mesh": (
        "coordinator/mesh",
        "collectives/mesh",
    ),
    "batches": (
        "coordinator/batches",
        "coordinator/batches/batch_book",
        "collectives/pipeline",
        "console/batches",
        "peer/batches",
        "peer/crossings",
        "peer/pipeline",
        "simulator/batches",
    ),
    "audits": (
        "coordinator/audits",
        "coordinator/court/proofs",
        "coordinator/court/proofs",
        "coordinator/ledger/evidence",
        "peer/audits",
    ),
    "evaluation": ("coordinator/evaluation", "peer/evaluation"),
    "pace": ("coordinator/pace", "peer/pace"),
    "reach": ("coordinator/reach", "coordinator/relay"),
    "recovery": ("coordinator/recovery",),
    "restoring": ("coordinator/restoring", "peer/restoring"),
    "admission": ("coordinator/admission",),
    "standby": ("coordinator/standby",),
    "slow lines": (
        "coordinator/slow_lines",
        "peer/slow_lines",
    ),
}
# What they are to be taken out of: the machines, with what these stand on.
CORE_ROOMS = (
    "coordinator/run",
    "coordinator/roster",
    "coordinator/rounds",
    "coordinator/ledger",
    "coordinator/court",
    "collectives/round",
    "peer/machine",
    "checkpoints",
)
NOT_PARTS_OF_A_PEER = ("simulator", "virtual_", "invariants", "scenario", "spoiling", "departures")

TRACE = """
import os, sys
from pathlib import Path
root = sys.argv[1]
from farflung.peer.local import words
from farflung.peer.machine.machine import PeerMachine
from farflung.simulator import trainer
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World
from farflung.peer.state.outer_state import OuterState
seen, recording, merged = set(), False, None
def watch(frame, event, argument):
    if recording and event == "call" and frame.f_code.co_filename.startswith(root):
        seen.add(str(Path(frame.f_code.co_filename).relative_to(root)))
on_local, calculate = PeerMachine.on_local, OuterState.calculate
def heard(self, message, *more, **named):
    global recording
    if recording and isinstance(message, words.Loaded) and message.version > 0 and merged is not None:
        sys.setprofile(None)
        print("\\n".join(["merge", *sorted(merged), "load", *sorted(seen)]), flush=True)
        os._exit(0)
    recording = recording or isinstance(message, words.Frozen)
    return on_local(self, message, *more, **named)
def calculated(self, effect):
    global merged
    done = calculate(self, effect)
    if recording and merged is None and type(effect).__name__ == "Merge":
        merged = set(seen)
    return done
PeerMachine.on_local, OuterState.calculate = heard, calculated
calm = dict(drop=0, duplicate=0, slow=0, kill_per_effect=0, cut_per_s=0, trainer_crash_per_s=0)
sys.setprofile(watch)
World(1, Scenario(peers=2, rounds=2, codec="int8", **calm)).run()
"""


def ways_of_a_delta() -> tuple[list[str], list[str]]:
    """Until it is merged, without the coordinator; until the next version is loaded, with it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "farflung").symlink_to(ROOT)
        environ = os.environ | {"PYTHONPATH": folder}
        command = [sys.executable, "-c", TRACE, f"{folder}/farflung"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=300)
    before, _, after = done.stdout.partition("load\n")
    merge, load = (
        [
            name
            for name in part.split()
            if name.endswith(".py") and not any(n in name for n in NOT_PARTS_OF_A_PEER)
        ]
        for part in (before, after)
    )
    return [name for name in merge if not name.startswith("coordinator/")], load


def mode_of(path: str) -> str:
    """Empty: it is of no mode."""
    return next(
        (
            mode
            for mode, parts in MODES.items()
            for each in parts
            if path == each or path.startswith(f"{each}/")
        ),
        "",
    )


def crossings() -> list[tuple[str, str]]:
    """Modules of the core, of all of a peer and of the doctor, each with a module of a mode that it imports, be it late
    or for types."""
    found = set()
    for module in modules():
        of_core = module.room in (*CORE_ROOMS, "console/doctor") or module.room.partition("/")[0] == "peer"
        if of_core and not mode_of(module.path):
            paths = {each.path for each in module.imports}
            found |= {(module.path, path) for path in paths if mode_of(path)}
    return sorted(found)


def classes(module: Module) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


def _fields(node: ast.ClassDef) -> int:
    """Annotated in its body, or set on `self` in `__init__`."""
    named = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for made in node.body:
        if isinstance(made, ast.FunctionDef) and made.name == "__init__":
            named |= {
                target.attr
                for target in ast.walk(made)
                if isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
    return len(named)


def _methods(node: ast.ClassDef) -> int:
    return sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)


def _words_of_users() -> dict[str, int]:
    from farflung.console.main import app
    from farflung.peer.settings import OwnConfig
    from farflung.protocol.manifest import Manifest

    group: Any = typer.main.get_command(app)
    commands = [each for each in _commands(group) if not each.hidden]
    options = {
        option
        for each in commands
        for parameter in each.params
        for option in parameter.opts
        if option.startswith("--")
    }
    return {
        "keys of run.toml": sum(len(type(section).model_fields) for _, section in Manifest()),
        "own settings": len(OwnConfig.__dataclass_fields__),
        "commands": len(commands),
        "options": len(options - {"--help"}),
    }


def _commands(group: Any) -> Iterator[Any]:
    for each in group.commands.values():
        if hasattr(each, "commands"):
            yield from _commands(each)
        else:
            yield each


def _words_of_machines() -> dict[str, int]:
    """A mode's own frames, effects and records are declared in its folder."""
    from farflung.coordinator.ledger.records import OF_CORE
    from farflung.protocol.frames import Kind
    from farflung.protocol.messages import KINDS

    of_modes = "farflung.protocol.mode_words"

    effects = [m for m in modules() if m.path.endswith("/effects") and not mode_of(m.path)]
    return {
        "frame kinds of the core": len(Kind),
        "control messages of the core": sum(each.__module__ != of_modes for each in KINDS.values()),
        "effects of the core": sum(len(list(classes(module))) for module in effects),
        "journal records of the core": len(OF_CORE),
    }


def measured() -> dict[str, int]:
    """Each figure by its name.  Smaller is better in all of them."""
    files = modules()
    names = Counter(node.name for module in files for node in classes(module))
    core = [m for m in files if m.room in CORE_ROOMS and not mode_of(m.path)]
    merge, load = ways_of_a_delta()
    return {
        "product lines": sum(len(module.lines) for module in files),
        "product files": len(files),
        "lines of the core's rooms without modes": sum(len(module.lines) for module in core),
        "files on a delta's way to the first merge": len(merge),
        "files on a delta's way to the next load": len(load),
        "imports from core to mode": len(crossings()),
        **_words_of_users(),
        **_words_of_machines(),
        "class names used for two or more classes": sum(count > 1 for count in names.values()),
        "most fields of a class in the core": max(
            _fields(node) for module in core for node in classes(module)
        ),
        "most methods of a class in the core": max(
            _methods(node) for module in core for node in classes(module)
        ),
        "files named *ing.py": sum(bool(re.search(r"ing$", module.path)) for module in files),
    }


def _rounded(name: str, value: int) -> int:
    """Lines up to the next 500: a mend of some lines is nothing to write down."""
    return -(-value // 500) * 500 if "lines" in name else value


def ceilings() -> dict[str, int]:
    found: dict[str, int] = json.loads(CEILINGS.read_text(encoding="utf-8"))
    return found


def main(words: list[str]) -> None:
    old = ceilings() if CEILINGS.exists() else {}
    found = measured()
    for name, value in found.items():
        print(f"{name:45} {value:7,}   ceiling {old.get(name, value):7,}")
    if "--write" in words:
        kept = {name: min(_rounded(name, value), old.get(name, value)) for name, value in found.items()}
        CEILINGS.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
