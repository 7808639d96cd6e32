"""A trainer that hangs is found by its count of steps, and one that only waits is left alone."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from farflung.peer.agent.supervisor import ChildTrainer
from farflung.peer.machine.trainer_proxy import FIRST_S, LEAST_S, TIMES_LONGEST, Pulse
from rig.waiting import eventually


def drive(pulse: Pulse, seconds: float, step_s: float, start: float = 0.0, running: bool = True) -> bool:
    """Look ten times a second at a trainer whose steps take so long (0: it takes none)."""
    stuck = False
    for tick in range(round(seconds * 10)):
        now = start + tick / 10
        stuck = pulse.check_stuck(now, int(now / step_s) + 1 if step_s else 0, running)
    return stuck


def test_no_step_for_long_is_stuck_and_steps_are_not() -> None:
    pulse = Pulse()
    assert not drive(pulse, 300, 0.5)
    assert not drive(pulse, LEAST_S - 1, 0, start=300)
    assert drive(pulse, 5, 0, start=300 + LEAST_S)


def test_the_first_step_may_take_longer() -> None:
    pulse = Pulse()
    assert not drive(pulse, FIRST_S - 1, 0)
    assert drive(pulse, 5, 0, start=FIRST_S)


def test_slow_steps_earn_patience() -> None:
    pulse = Pulse()
    drive(pulse, 400, 40.0)
    assert not drive(pulse, 9 * 40, 0, start=400)
    assert drive(pulse, 90, 0, start=400 + TIMES_LONGEST * 40)


def test_who_waits_for_a_round_or_for_data_is_not_judged() -> None:
    pulse = Pulse(5.0)
    drive(pulse, 10, 0.5)
    assert not drive(pulse, 100, 0, start=10, running=False)
    assert not drive(pulse, 4, 0, start=110)
    assert drive(pulse, 3, 0, start=114)
    pulse.on_new_trainer()
    assert not drive(pulse, 4, 0, start=118)


def test_a_stopped_trainer_is_killed_and_started_again() -> None:
    trainer = ChildTrainer([sys.executable, "-c", "import time; time.sleep(600)"], {})
    try:
        assert trainer.watch(0.0) is None
        assert trainer._processes is not None
        trainer._processes.ranks[0].send_signal(signal.SIGSTOP)
        trainer.on_stuck(7.0)

        def is_noticed() -> bool:
            assert trainer.watch(0.0) is None
            return trainer.just_died

        eventually(is_noticed, "its end is noticed")
        told = " ".join(trainer.take_lines())
        assert "no step for 7 s" in told and "starts again" in told
        assert trainer.watch(1.0) is None
        assert trainer._processes is not None
    finally:
        if trainer._processes is not None:
            trainer._processes.kill()
            trainer._processes.wait()


LAUNCHER = """
import pathlib, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f"{worker.pid} ")
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_workers_of_a_stuck_launcher_are_killed_with_it(tmp_path: Path) -> None:
    """torchrun's are in sessions of their own, and would live on with the GPU in their hands."""
    file = tmp_path / "pid"
    trainer = ChildTrainer([sys.executable, "-c", LAUNCHER, str(file)], {})
    assert trainer.watch(0.0) is None
    eventually(lambda: file.exists() and file.read_text().endswith(" "), "the worker runs")
    worker = int(file.read_text())
    assert is_alive(worker)
    trainer.on_stuck(7.0)
    eventually(lambda: not is_alive(worker), "the worker is killed")
    assert trainer._processes is not None
    trainer._processes.wait()


def ends_with(code: int, trainer: ChildTrainer, times: int, attaches: bool = False) -> str | None:
    """Why it is given up after so many ends, or None."""
    now, said = 0.0, None
    for _ in range(times):
        now += 100.0
        assert trainer.watch(now) is None
        if attaches:
            trainer.on_attached()
        said = trainer._on_exit(code, now + 1.0)
    return said


def test_a_script_that_never_joined_is_given_up_after_two_failures_and_one_that_did_is_not() -> None:
    def fresh() -> ChildTrainer:
        return ChildTrainer([sys.executable, "-c", ""], {})

    assert ends_with(1, fresh(), 1) is None
    assert "2 times before it joined the run" in (ends_with(1, fresh(), 2) or "")
    trainer = fresh()
    assert ends_with(1, trainer, 1, attaches=True) is None
    assert ends_with(1, trainer, 3) is None, "it has joined once: what it meets now may pass"
    assert "5 times in a row" in (ends_with(1, trainer, 1) or "")
