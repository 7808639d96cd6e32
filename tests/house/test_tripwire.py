"""Nothing that comes over the network is ever executed or unpickled (P8): a wire across every way there.

The source of all rooms neither imports nor calls what unpickles or runs data, and a run of the real machines fires no
`pickle.find_class`, which Python reports from wherever it happens, also inside C.  The processes that the chaos tests
start carry the same hook (tests/rig/nursery.py).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rig.waiting import LONG_S

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rooms import FOLDERS, ROOT

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "xmlrpc",
    "yaml",
}
CALLS = {"eval", "exec", "compile", "torch.load", "torch.jit.load", "np.load", "numpy.load", "torch.save"}
METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "load_state_dict_from_url"}
# Where data is not what comes over the network: Python's own name for a checked function of the same file.
SOURCES = sorted(path for room in FOLDERS for path in (ROOT / room).rglob("*.py"))


def unsafe(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names if a.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append((node.lineno, str(node.module)))
        elif isinstance(node, ast.ImportFrom) and node.module == "multiprocessing":
            found += [(node.lineno, a.name) for a in node.names if a.name in ("Queue", "Pipe", "Manager")]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS or called.rpartition(".")[2] in METHODS:
                found.append((node.lineno, called))
    return found


def test_P8_no_module_imports_or_calls_what_unpickles_or_runs_data() -> None:
    problems = [
        f"{path.relative_to(ROOT)}:{line} uses {what}"
        for path in SOURCES
        for line, what in unsafe(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("code", ["import pickle", "torch.load('x')", "socket.recv_pyobj()", "eval(text)"])
def test_the_wire_is_alive(code: str) -> None:
    assert unsafe(ast.parse(code))


HOOK = """
import sys
fired = []
sys.addaudithook(lambda event, _: fired.append(event) if event == "pickle.find_class" else None)
"""
RUN = """
from farflung.simulator.world import Scenario, World
import farflung.coordinator.hosting, farflung.peer.agent.agent
World(3, Scenario.of(3)).run()
assert not fired, fired
"""
PROOF = "import pickle, collections; pickle.loads(pickle.dumps(collections.OrderedDict)); assert fired\n"


@pytest.mark.slow
def test_P8_a_whole_run_unpickles_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOK + RUN + PROOF], capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == 0, done.stderr
