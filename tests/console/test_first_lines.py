"""The first ten seconds: commands load what is slow to load late, and say before it what they do.

How long it takes: benchmarks/first_lines.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest

from farflung.console.demo import Demo, DemoProcess
from farflung.console.screen.health import plain_line
from farflung.peer.agent.supervisor import SLOW_START_S, ChildTrainer
from farflung.peer.settings import OwnConfig
from rig.a_door import CHALLENGE, door
from rig.waiting import LONG_S, eventually, is_running

URL = "farflung://127.0.0.1:1/demo?k=" + "A" * 43
SLOW = ("torch", "numpy", "fsspec", "asyncio", "cryptography")  # typer itself loads pydantic
LOADED = """
import sys
from farflung.console.main import main
sys.argv = ["farflung", *sys.argv[1:]]
code = main()
print("loaded:", *(name for name in {slow!r} if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""
# In the place of a module that is slow to load: who asks for it is interrupted, as by Ctrl-C.
INTERRUPTED = """
import os, sys, time
class Interrupts:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != {module!r}:
            return None
        until = time.monotonic() + {patience_s}
        while {marker!r} and not os.path.exists({marker!r}) and time.monotonic() < until:
            time.sleep(0.01)
        print("-- it is loaded --", file=sys.stderr, flush=True)
        raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts)
from farflung.{entry} import main
sys.argv = ["farflung", *sys.argv[1:]]
sys.exit(main())
"""


def python(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LONG_S, env=os.environ | environment
    )


def interrupted(module: str, *words: str, entry: str = "console.main", marker: str = "") -> Any:
    code = INTERRUPTED.format(module=module, entry=entry, marker=marker, patience_s=LONG_S / 2)
    return python(code, *words)


@pytest.mark.parametrize(
    "words", [["--help"], ["join", "--help"], ["init", "FOLDER/run.toml"], ["status", URL]], ids=" ".join
)
def test_light_commands_load_nothing_that_is_slow(words: list[str], tmp_path: Path) -> None:
    told = [word.replace("FOLDER", str(tmp_path)) for word in words]
    done = python(LOADED.format(slow=SLOW), *told, FARFLUNG_HOME=str(tmp_path))
    assert done.stderr.splitlines()[-1].split() == ["loaded:"], done.stderr


# ---- said before anything slow is loaded


def test_join_says_what_it_does_and_starts_its_trainer_before_it_loads_torch(tmp_path: Path) -> None:
    """Ctrl-C at that moment is obeyed, and the trainer goes too."""
    marker, script = tmp_path / "pid", tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        f"open({str(tmp_path / 'new')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(marker)!r})\n"
        "time.sleep(600)\n"
    )
    with door(CHALLENGE) as url:
        words = [
            "join",
            "--plain",
            "--identity",
            str(tmp_path / "key.pem"),
            "--script",
            str(script),
            str(url),
        ]
        done = interrupted("torch", *words, marker=str(marker))
    first, loaded, last = done.stderr.splitlines()
    assert first.startswith(
        f"farflung: joining demo at {url.address}: loading torch, which takes some seconds"
    )
    assert loaded == "-- it is loaded --" and last == "farflung: left before it had joined"
    assert done.returncode == 0 and marker.exists(), "the trainer did not start before"
    eventually(lambda: not is_running(int(marker.read_text())), "the trainer is gone")


def test_the_agent_of_a_script_says_what_it_does_before_it_loads_torch(tmp_path: Path) -> None:
    words = ["--url", URL, "--folder", str(tmp_path), "--parent", str(os.getpid())]
    words += ["--settings", OwnConfig(identity=tmp_path / "key.pem").as_json()]
    done = interrupted("torch", *words, entry="peer.agent.main")
    first, loaded, *_ = done.stderr.splitlines()
    assert first.startswith("farflung: joining demo at 127.0.0.1:1: loading torch in the agent")
    assert loaded == "-- it is loaded --"


def test_coordinate_says_what_it_does_before_it_loads_a_coordinator(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.touch()
    done = interrupted("farflung.coordinator.hosting", "coordinate", str(toml))
    assert done.stderr.splitlines() == [
        f"farflung: the coordinator of {toml} starts; the join URL comes when peers can use it",
        "-- it is loaded --",
    ]
    toml.write_text("[run]\nnmae = 'x'\n")
    wrong = interrupted("farflung.coordinator.hosting", "coordinate", str(toml))
    assert wrong.stderr.count("\n") == 1 and "nmae" in wrong.stderr, (
        "nothing starts with a mistake in the file"
    )
    toml.write_text("[round]\nfragments = 64\n")
    odd = interrupted("farflung.coordinator.hosting", "coordinate", str(toml)).stderr.splitlines()
    assert len(odd) == 3 and odd[1].startswith(f"farflung: {toml}: [round] fragments: 64, and the"), odd
    missing = interrupted("nothing", "coordinate", str(tmp_path / "missing.toml"))
    assert missing.stderr.count("\n") == 1 and "cannot read" in missing.stderr, "a mistake is one line"


# ---- said while it takes long


def test_a_trainer_that_starts_slowly_is_told_of_again_and_again_but_not_often() -> None:
    trainer = ChildTrainer([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))
    try:
        told = []
        for second in range(61):
            trainer.watch(1000.0 + second)
            told += [(second, line) for line in trainer.take_lines()]
        assert [second for second, _ in told] == [SLOW_START_S, 2 * SLOW_START_S, 20, 40]
        assert told[0][1].startswith("the trainer has been starting for 5 s")
        trainer.on_attached()
        trainer.watch(2000.0)
        assert trainer.take_lines() == []
    finally:
        trainer.kill()
    trainer.kill()  # there is nothing more to kill


def test_while_nobody_is_in_the_run_the_demo_says_what_its_peers_do(tmp_path: Path) -> None:
    demo = Demo(tmp_path, began_at=100.0)
    for number, said in ((1, "farflung: joining demo\nfarflung: this peer is amber-fox"), (2, "")):
        log = tmp_path / f"{number}.log"
        log.write_text(said)
        process = types.SimpleNamespace(poll=lambda: None)
        demo.peers.append(DemoProcess(f"peer {number}", cast(Any, process), log))
    status: dict[str, Any] = {"members": [], "phase": "waiting"}
    line = plain_line(status | demo.starting(status, 112.0))
    assert "2 peers have been starting on this machine for 12 s" in line
    assert "peer 1: this peer is amber-fox; peer 2: python starts" in line and "nobody is here" not in line
    assert demo.starting({"members": [{"alive": True}]}, 112.0) == {}
    demo.peers.clear()
    assert "nobody is here" in plain_line(status | demo.starting(status, 112.0))
