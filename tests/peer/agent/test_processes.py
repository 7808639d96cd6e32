"""The ranks of a trainer live and die together, and nothing of them is left when they start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farflung.peer.agent import supervisor
from farflung.peer.agent.supervisor import GRACE_S, UNSURE_S, ChildTrainer, Processes
from farflung.protocol.process.exit_codes import USAGE
from rig.waiting import eventually, is_running

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

# What each rank does is a line of shell: $1 is where it writes, $RANK who it is.
READY = 'echo > "$1/$RANK"'
HANG = f"{READY}; sleep 600"
STUBBORN = f"trap '' TERM; {READY}; while :; do sleep 0.05; done"


@pytest.fixture
def made() -> Iterator[list[Processes]]:
    found: list[Processes] = []
    yield found
    for each in found:
        each.kill()
        each.wait()


def ranks(made: list[Processes], folder: Path, count: int, **lines: str) -> Processes:
    """`lines`: rank0="exit 3"."""
    text = "\n".join(f'if [ "$RANK" = {name[4:]} ]; then {line}; fi' for name, line in lines.items())
    environment = {"PATH": os.environ["PATH"], "FARFLUNG_AGENT": str(folder)}
    made.append(Processes(["/bin/sh", "-c", text, "sh", str(folder)], environment, count, "FARFLUNG_AGENT"))
    eventually(lambda: all((folder / name[4:]).exists() for name in lines), "all ranks run")
    return made[-1]


def code_of(trainer: Processes, now: float = 0.0) -> int:
    found: list[int] = []

    def is_over() -> bool:
        code = trainer.look(now)
        found.extend([] if code is None else [code])
        return code is not None

    eventually(is_over, "all ranks are gone")
    return found[0]


def test_ranks_are_told_who_they_are_as_by_torchrun(tmp_path: Path, made: list[Processes]) -> None:
    script = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['RANK'], 'w'))"
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "3"}
    made.append(Processes([sys.executable, "-c", script, f"{tmp_path}/"], environment, 2, ""))
    assert code_of(made[0]) == 0
    first, second = (json.loads((tmp_path / name).read_text()) for name in "01")
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "1", "1")
    assert first["WORLD_SIZE"] == second["LOCAL_WORLD_SIZE"] == "2" and first["OMP_NUM_THREADS"] == "3"
    assert first["MASTER_ADDR"] == "127.0.0.1" and first["MASTER_PORT"] == second["MASTER_PORT"]


def test_a_script_of_one_process_is_told_nothing_of_ranks(tmp_path: Path, made: list[Processes]) -> None:
    made.append(Processes(["/bin/sh", "-c", 'test -z "$RANK$WORLD_SIZE$OMP_NUM_THREADS"'], {}, 1, "MARK"))
    assert code_of(made[0]) == 0


def test_when_one_rank_fails_the_others_are_ended_and_its_code_is_told(
    tmp_path: Path, made: list[Processes]
) -> None:
    trainer = ranks(made, tmp_path, 3, rank0=HANG, rank1=HANG, rank2=f"{READY}; kill -9 $$")
    assert code_of(trainer) == -signal.SIGKILL
    assert all(each.poll() is not None for each in trainer.ranks)


def test_a_rank_that_does_not_end_is_killed_after_a_while(tmp_path: Path, made: list[Processes]) -> None:
    trainer = ranks(made, tmp_path, 2, rank0=STUBBORN, rank1=f"{READY}; exit 3")
    eventually(lambda: trainer.ranks[1].poll() == 3, "rank 1 ends")
    assert trainer.look(0.0) is None and trainer.look(GRACE_S - 0.1) is None
    assert trainer.ranks[0].poll() is None
    assert code_of(trainer, GRACE_S) == 3
    assert trainer.ranks[0].poll() == -signal.SIGKILL


def test_what_is_no_use_to_start_again_is_told_even_if_it_was_not_the_first(
    tmp_path: Path, made: list[Processes]
) -> None:
    trainer = ranks(
        made,
        tmp_path,
        2,
        rank0=f"{READY}; exit 1",
        rank1=f"trap 'exit {USAGE}' TERM; {READY}; sleep 600 & wait",
    )
    assert code_of(trainer) == USAGE


def test_workers_that_a_dead_launcher_left_are_gone_before_the_next_start(
    tmp_path: Path, made: list[Processes]
) -> None:
    """Killed itself, it can't end them; they are nobody's children then."""
    launcher = f'setsid sleep 600 & echo $! > "{tmp_path}/worker"; kill -9 $$'
    environment = {"PATH": os.environ["PATH"], "FARFLUNG_AGENT": str(tmp_path)}
    made.append(Processes(["/bin/sh", "-c", launcher], environment, 1, "FARFLUNG_AGENT"))
    eventually(lambda: (tmp_path / "worker").exists(), "the worker runs")
    worker = int((tmp_path / "worker").read_text())
    assert code_of(made[-1]) == -signal.SIGKILL
    assert not is_running(worker)


def test_processes_of_others_are_left_alone(tmp_path: Path, made: list[Processes]) -> None:
    with subprocess.Popen(["sleep", "600"], env={"FARFLUNG_AGENT": f"{tmp_path}-2"}) as other:
        trainer = ranks(made, tmp_path, 2, rank0=f"{READY}; exit 1", rank1=HANG)
        assert code_of(trainer) == 1
        assert other.poll() is None
        other.kill()
    assert supervisor._with(b"") == ([], False)


def test_who_has_no_environment_yet_is_asked_again_and_not_for_ever(
    tmp_path: Path, made: list[Processes]
) -> None:
    """Seen: a worker that was just becoming another program was passed over, and lived on beside the next trainer."""
    environment = {"PATH": os.environ["PATH"], "FARFLUNG_AGENT": str(tmp_path)}
    trainer = Processes(["/bin/sh", "-c", "exit 1"], environment, 1, "FARFLUNG_AGENT")
    made.append(trainer)
    nobodys = subprocess.Popen(["sleep", "600"], env={})
    try:
        eventually(lambda: trainer.ranks[0].poll() == 1, "it has failed")
        assert trainer.look(5.0) is None, "it may be one of its own"
        assert trainer.look(5.0 + UNSURE_S - 0.1) is None
        assert trainer.look(5.0 + UNSURE_S) == 1 and nobodys.poll() is None
    finally:
        nobodys.kill()
        nobodys.wait()


def test_ranks_are_started_again_together(tmp_path: Path) -> None:
    line = f'echo $RANK >> "{tmp_path}/starts"; exit 1'
    trainer = ChildTrainer(["/bin/sh", "-c", line], {"PATH": os.environ["PATH"]}, ranks=2)
    now = [0.0]

    def has_died() -> bool:
        now[0] += 0.001
        assert trainer.watch(now[0]) is None
        return trainer.just_died

    eventually(has_died, "both have ended")
    assert "starts again" in " ".join(trainer.take_lines())
    now[0] += 60.0
    assert trainer.watch(now[0]) is None and not trainer.just_died
    trainer.stop()
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "0", "1", "1"]
