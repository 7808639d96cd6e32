"""Ranks that hear their agent, the time and each other's tokens only every few steps: nothing is frozen, counted or
read otherwise than by a trainer that hears at once."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from farflung.optim.schedule import ScheduleRules
from farflung.peer.data.leased_data import LeaseBook
from farflung.peer.island.parts import MOST_STEPS, Outlook
from farflung.peer.local.words import Frozen, LeasesNow, ResumeSteps
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.machine import TrainerMachine
from farflung.protocol.messages import Lease
from farflung.simulator.trainer import VirtualTrainer
from farflung.simulator.world import Scenario, World
from rig.trainer_player import Player

TOKENS = [3, None, 0, 7]


def stepping(rules: str) -> Player:
    player = Player()
    list(player(f"rules {rules}"))
    list(player("begin"))
    return player


def frozen(effects: list[do.Effect]) -> list[Frozen]:
    return [word for effect in effects if isinstance(effect, do.SayFrozen) for word in effect.words]


def run(rules: str, late: bool, steps: int = 60) -> list[Frozen]:
    """What is frozen. `late`: the tokens of a step are told only where the machine says that something is due."""
    machine, told = stepping(rules).machine, []
    waiting: list[int | None] = []
    for number in range(steps):
        waiting.append(TOKENS[number % len(TOKENS)])
        is_due = machine.outlook(0.0).is_due
        machine.on_step(0.0, () if late and not is_due else waiting)
        waiting = waiting if late and not is_due else []
        told += frozen(machine.on_heard(0.0))
        for account in machine.accounts:
            if account.blocked:
                assert not waiting, "a freeze, and not all is counted"
                machine.on_message(ResumeSteps(spare=(account.spare + 1) % 3, fragment=account.fragment), 0.0)
    return told


@pytest.mark.parametrize(
    "rules",
    ["blocking 7", "blocking 1", "overlap 7", "streaming 12 fragments=5", "streaming 2 fragments=8"],
)
def test_tokens_told_late_are_in_the_same_freezes(rules: str) -> None:
    at_once = run(rules, late=False)
    assert len(at_once) >= 8 and run(rules, late=True) == at_once


def test_a_step_is_due_for_which_the_count_says_so() -> None:
    machine = stepping("streaming 12 fragments=3").machine
    due = []
    for number in range(1, 25):
        if machine.outlook(0.0).is_due:
            due.append(number)
        machine.on_step(0.0)
        machine.on_heard(0.0)
        for account in machine.accounts:
            machine.on_message(ResumeSteps(spare=0, fragment=account.fragment), 0.0)
    assert due == [4, 8, 12, 16, 20, 24]
    assert machine.outlook(0.0).steps == 1, "a tenth of a period, or each step"
    assert stepping("overlap 100").machine.outlook(0.0) == Outlook(False, 10)


def test_by_the_clock_a_step_is_due_in_time_and_the_moment_is_told() -> None:
    machine = stepping("overlap 9 period_s=10.0").machine
    assert machine.outlook(0.0) == Outlook(False, MOST_STEPS, due_at=10.0)
    for number in range(8):
        assert not machine.outlook(float(number)).is_due
        machine.on_step(float(number + 1))
        machine.on_heard(float(number + 1))
    assert machine.outlook(8.0).due_at == 9.0, "the next step must not end when others wait"
    assert not machine.outlook(9.0).is_due
    assert machine.outlook(9.5).is_due


def test_a_step_takes_its_part_of_the_time_that_several_were_told_with() -> None:
    machine = stepping("overlap 9 period_s=10.0").machine
    for now in (0.0, 0.0, 0.0, 4.0):  # four steps of a second
        machine.on_step(now)
        machine.on_heard(now)
    assert machine.outlook(4.0).due_at == 9.0


def test_a_step_is_due_where_the_next_batches_are_not_all_leased() -> None:
    """Else a lease that is granted and not heard of would make a batch short."""
    machine = stepping("overlap 100").machine
    machine.on_message(LeasesNow(leases=(Lease(1, 0, 0, 12, 0),)), 0.0)
    due = []
    for _ in range(3):  # steps of two batches
        for _ in range(2):
            (read,) = [e for e in machine.on_want(100, 2, 0.0) if isinstance(e, do.ReadSamples)]
            machine.hand_out((read.span, *read.more), 5)
        due.append(machine.outlook(0.0).is_due)
        machine.on_step(0.0)
    assert due == [False, True, True], "with 8, with 4 and with none of 12 to come"
    assert stepping("overlap 100").machine.outlook(0.0).is_due is False, "a script with data of its own"
    assert LeaseBook().unread == 0


@pytest.mark.mode("audits")
def test_P6_P7_trainers_that_hear_their_agent_late_lose_and_repeat_nothing() -> None:
    torch.set_num_threads(1)
    for seed in range(5):
        World(seed, Scenario.of_islands(seed)).run()


class NothingIsDue(TrainerMachine):
    def outlook(self, now: float) -> Outlook:
        return dataclasses.replace(super().outlook(now), is_due=False)


def test_the_simulator_sees_ranks_that_freeze_before_they_have_heard_each_other() -> None:
    class Mutated(VirtualTrainer):
        machine_class = NothingIsDue

    class MutatedWorld(World):
        trainer_class = Mutated

    torch.set_num_threads(1)
    with pytest.raises(AssertionError, match="whose tokens are not known"):
        MutatedWorld(0, Scenario.of_islands(0)).run()


def test_rules_of_a_clock_allow_any_number_of_steps() -> None:
    assert TrainerMachine(ScheduleRules("blocking", 5, period_s=3.0), 4).outlook(0.0).steps == MOST_STEPS
    assert TrainerMachine(ScheduleRules("blocking", 5), 4).outlook(0.0).steps == 1
