"""What the house measures: folders, lines, modules without a test of their own, and how far a frozen delta travels.

    python tests/house/figures.py [CHECKOUT]

CHECKOUT may be of an older commit (`git worktree add`), so that before and after come from one script.  A delta's way
is traced in the simulator, as the product's files in which something runs from the first `Frozen` of a trainer until
the first chunk is merged, without the coordinator's and the simulator's own.  Links and processes are not in it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

FOLDERS = ("protocol", "compression", "optim", "collectives", "checkpoints", "coordinator", "peer", "console")
# Where decisions are taken: each of these is a machine or a part of one.
MACHINES = (
    "collectives/round",
    "coordinator/rounds",
    "coordinator/run",
    "peer/machine",
    "peer/trainer/machine",
)

TRACE = """
import importlib, sys
from pathlib import Path
root = Path(sys.argv[1])  # as it was imported, whatever link leads there
def first(*names):
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            pass
    raise SystemExit(f"none of {names}")
world = first("farflung.peer.simulator.world", "farflung.peer.simulator")
words = first("farflung.peer.local.words", "farflung.peer.local_messages")
state = first("farflung.peer.state.outer_state", "farflung.peer.state")
machine = first("farflung.peer.machine.machine", "farflung.peer.machine")
seen, recording = set(), False
def watch(frame, event, argument):
    if recording and event == "call" and frame.f_code.co_filename.startswith(str(root)):
        seen.add(str(Path(frame.f_code.co_filename).relative_to(root)))
on_local, calculate = machine.PeerMachine.on_local, state.OuterState.calculate
def heard(self, message, now):
    global recording
    recording = recording or isinstance(message, words.Frozen)
    return on_local(self, message, now)
def calculated(self, effect):
    global recording
    done = calculate(self, effect)
    if recording and type(effect).__name__ == "Merge":
        sys.setprofile(None)
        print("\\n".join(sorted(seen)))
        sys.stdout.flush()
        import os
        os._exit(0)
    return done
machine.PeerMachine.on_local, state.OuterState.calculate = heard, calculated
calm = dict(drop=0, duplicate=0, slow=0, kill_per_effect=0, cut_per_s=0, trainer_crash_per_s=0)
sys.setprofile(watch)
world.World(1, world.Scenario(peers=2, rounds=1, codec="int8", **calm)).run()
"""
STAGE = ("simulator", "virtual_", "invariants", "scenario", "spoiling", "departures", "coordinator/")


def way_of_a_delta(root: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "farflung").symlink_to(root)
        environ = os.environ | {"PYTHONPATH": folder}
        command = [sys.executable, "-c", TRACE, f"{folder}/farflung"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=300)
    return [name for name in done.stdout.split() if not any(part in name for part in STAGE)]


def main() -> None:
    root = Path(sys.argv[1] if sys.argv[1:] else Path(__file__).resolve().parents[2]).resolve()
    files = [p for folder in FOLDERS for p in sorted((root / folder).rglob("*.py"))]
    rooms = Counter(str(path.parent.relative_to(root)) for path in files)
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    unproven = sum(
        isinstance(node, ast.Assert) and " is not None" in ast.unparse(node.test)
        for tree in trees.values()
        for node in ast.walk(tree)
    )
    imported = {
        name
        for path in (root / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }
    modules = {str(path.relative_to(root).with_suffix("")) for path in files}
    untested = sorted(m for m in modules if f"farflung.{m.replace('/', '.')}" not in imported)
    machines = [m for m in untested if m.rpartition("/")[0] in MACHINES or m in MACHINES]
    largest, count = rooms.most_common(1)[0]
    way = way_of_a_delta(root)
    print(f"largest folder                       {count} files, {largest}/")
    print(f"rooms                                {len(rooms)}")
    print(f"modules, lines of product code       {len(files)}, {lines}")
    print(f"longest file                         {max(len(p.read_text().splitlines()) for p in files)} lines")
    print(
        f"modules that no test imports         {len(untested)}; among machines {len(machines)} {' '.join(machines)}"
    )
    print(f"assert ... is not None               {unproven}")
    print(f"files on a frozen delta's way        {len(way)}")


if __name__ == "__main__":
    main()
