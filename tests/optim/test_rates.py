"""`[inner] schedule`: the inner rate by the run's own step, which is the same for whoever joins late."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from farflung.optim.schedule import LearningRates, rates_of
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.agent_process import AgentProcess
from farflung.peer.trainer.api import Run
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.peer.trainer.machine import TrainerMachine
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.manifest import Manifest
from farflung.simulator.trainer import VirtualTrainer
from farflung.simulator.world import Scenario, World
from rig.trainer_player import check


def manifest(**inner: object) -> Manifest:
    return Manifest.model_validate({"run": {"rounds": 10}, "round": {"sync_every": 10}, "inner": inner})


def shares(schedule: str, *steps: int, **inner: object) -> list[float]:
    rates = rates_of(manifest(schedule=schedule, warmup_steps=20, lr=0.5, **inner))
    return [round(rates.share(step), 6) for step in steps]


def test_each_schedule_rises_first_and_ends_where_it_should() -> None:
    assert shares("constant", 0, 9, 18, 19, 20, 99, 500) == [0.05, 0.5, 0.95, 1.0, 1.0, 1.0, 1.0]
    assert shares("linear", 0, 19, 20, 60, 100, 500) == [0.05, 1.0, 1.0, 0.55, 0.1, 0.1]
    assert shares("cosine", 9, 20, 40, 60, 100, 101) == [0.5, 1.0, 0.868198, 0.55, 0.1, 0.1]
    assert shares("wsd", 9, 20, 79, 80, 90, 100) == [0.5, 1.0, 1.0, 1.0, 0.55, 0.1]


def test_a_rate_without_a_warm_up_is_whole_at_the_first_step() -> None:
    assert LearningRates("linear", 10).share(0) == 1.0


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        ({"schedule": "cosine", "warmup_steps": 100}, r"warmup_steps: expected less than the 100 steps"),
        ({"schedule": "wsd", "warmup_steps": 80}, r"without its last fifth, found 80"),
        ({"schedule": "step"}, "schedule"),
    ],
)
def test_a_schedule_that_has_no_room_is_refused(inner: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        manifest(**inner)
    assert manifest(schedule="wsd", warmup_steps=79).total_steps == 100
    assert manifest(warmup_steps=5000).inner.schedule == "constant"  # nothing goes down: any warm-up will do


def test_a_run_of_batches_has_no_inner_rate() -> None:
    with pytest.raises(ValueError, match=r'\[inner\] schedule: expected "constant" with \[pipeline\] batch'):
        Manifest.model_validate(
            {"inner": {"schedule": "linear"}, "pipeline": {"batch": 4}, "merge": {"policy": "mean"}}
        )


def test_stages_that_take_steps_of_their_own_have_one() -> None:
    keys = {"batch": 80, "stages": 2, "mode": "local"}
    merge = {"policy": "mean"}
    made = Manifest.model_validate({"inner": {"schedule": "linear"}, "pipeline": keys, "merge": merge})
    assert rates_of(made).total_steps == made.run.rounds * made.round.sync_every


# ---- the run's own step ------------------------------------------------------------------------------------------


def test_a_late_joiner_begins_at_the_runs_step_and_a_lost_round_moves_nobody_on() -> None:
    check("""
        > rules blocking 2
        > attach
            SayWord Attach pid=7
            WaitBefore stand=attaching
        > hear LoadState version=30 keep=drop
            LoadAnchor fragment=0 version=30 keep=drop slot=0 steps=0
            ForgetLoss
            SayWord Loaded version=30
            GoOn
        > place
            step 60 of the run
        > step 10
            GoOn
        > place
            step 61 of the run
        > step 10
            Freeze fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=20 steps=2 used=[] step=2
            ForgetLoss
            WaitBefore stand='at the barrier'
        > hear ResumeSteps spare=1  # no commit
            GoOn
        > step 10
            GoOn
        > place
            step 62 of the run
        > step 10
            Freeze fragment=0 slot=1
            SayFrozen Frozen slot=1 tokens=40 steps=4 used=[] step=4
            ForgetLoss
            WaitBefore stand='at the barrier'
        > hear LoadState version=31 keep=rest slot=1 tokens=40 steps=4 spare=0
            LoadAnchor fragment=0 version=31 keep=rest slot=1 steps=0 used_steps=4
            SayWord Loaded version=31
            GoOn
        > place
            step 62 of the run
        > step 10
            GoOn
        > place
            step 63 of the run
        > hear LoadState version=20 keep=drop  # the run goes back to a checkpoint
            LoadAnchor fragment=0 version=20 keep=drop slot=0 steps=0
            ForgetLoss
            SayWord Loaded version=20
        > place
            step 40 of the run
    """)


def test_with_overlap_the_run_goes_on_while_the_version_is_on_its_way() -> None:
    check("""
        > rules overlap 2
        > begin
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=0
            GoAhead fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=20 steps=2 used=[] step=2
            ForgetLoss
            GoOn
        > place
            step 2 of the run
        > step 10
            GoOn
        > place
            step 3 of the run
        > hear LoadState version=1 keep=rest slot=0 tokens=20 steps=2 spare=1
            LoadAnchor fragment=0 version=1 keep=rest slot=0 steps=1 used_steps=2
            SayWord Loaded version=1
        > place
            step 3 of the run
    """)


def test_a_period_by_the_clock_counts_as_many_steps_as_any() -> None:
    check("""
        > rules blocking 10 period_s=100
        > begin
        > at 25
        > step 10
            GoOn
        > place
            step 2 of the run
        > at 50
        > step 10
            GoOn
        > place
            step 5 of the run
    """)


class Watched(TrainerMachine):
    """Compares its step with its version at each of its steps."""

    compared = 0
    fresh = 0

    def on_heard(self, now: float) -> list[do.Effect]:
        before = self.run_step
        effects = super().on_heard(now)
        self._compare()
        assert self.run_step >= before or self.run_step == self.accounts[0].version * self.rules.period_steps
        return effects

    def on_message(self, word: object, now: float) -> list[do.Effect]:
        effects = super().on_message(word, now)  # type: ignore[arg-type]
        for each in effects:
            if (
                isinstance(each, do.LoadAnchor)
                and each.fragment == 0
                and each.keep == "drop"
                and not self.waits
            ):
                assert self.run_step == each.version * self.rules.period_steps
                type(self).fresh += 1
        self._compare()
        return effects

    def _compare(self) -> None:
        if not self.waits and not self.finished:
            version, whole = self.accounts[0].version, self.rules.period_steps
            ahead = 1 if self.rules.waits else 2
            assert version * whole <= self.run_step <= (version + ahead) * whole
            type(self).compared += 1


@pytest.mark.mode("audits")
@pytest.mark.parametrize("schedule", ["blocking", "overlap", "streaming"])
def test_in_any_run_whoever_joins_begins_at_the_step_of_the_version(schedule: str) -> None:
    class WatchedTrainer(VirtualTrainer):
        machine_class = Watched

    class WatchedWorld(World):
        trainer_class = WatchedTrainer

    Watched.fresh = Watched.compared = 0
    for seed in range(3):
        fragments = 2 if schedule == "streaming" else 1
        WatchedWorld(
            seed, dataclasses.replace(Scenario.of(seed), schedule=schedule, fragments=fragments, chunks=3)
        ).run()
    assert Watched.fresh > 3 and Watched.compared > 80


def test_a_schedulers_count_is_its_own_and_the_rate_the_runs() -> None:
    """Whoever joins late, or begins his script again, has a scheduler that stands at 0."""
    made = manifest(schedule="linear", lr=0.5)
    place = SimpleNamespace(run_step=50, manifest=made, _manifest=made, total_steps=made.total_steps)
    place.rate_share = partial(InnerLoop.rate_share, cast(InnerLoop, place))
    weight = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([weight], lr=0.5)
    run = Run(cast(AgentProcess, None), cast(InnerLoop, place), RunSteps(inner, lambda: None), "late")
    assert (run.global_step, run.total_steps) == (50, 100)
    schedulers = [LambdaLR(run.optimizer, run.lr_lambda())]
    assert inner.param_groups[0]["lr"] == pytest.approx(0.275)
    place.run_step = 60
    run.optimizer.step()
    schedulers[0].step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.23)
    of_another = LambdaLR(run.optimizer, lambda step: 1.0 / (1 + step))
    of_another.lr_lambdas = [run.lr_lambda(each) for each in of_another.lr_lambdas]
    run.optimizer.step()
    of_another.step()
    assert inner.param_groups[0]["lr"] == 0.5 / 61
