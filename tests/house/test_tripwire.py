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
from rooms import modules

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
LAST_WORDS = {call.rpartition(".")[2] for call in CALLS} | METHODS


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
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            # To write a call out takes ten times as long as to look at its last word.
            if name in LAST_WORDS and ((called := ast.unparse(node.func)) in CALLS or name in METHODS):
                found.append((node.lineno, called))
    return found


@pytest.mark.xdist_group("house: sources")  # which has them parsed
def test_P8_no_module_imports_or_calls_what_unpickles_or_runs_data() -> None:
    problems = [
        f"{module.label}:{line} uses {what}" for module in modules() for line, what in unsafe(module.tree)
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
