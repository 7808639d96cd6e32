"""What a script gets wrong without an error is said, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peer.trainer.test_inner_loop import SYNC_EVERY, NoAgent, Numbers, Trainer, load

from farflung.peer.local.words import Frozen, LeasesNow, ResumeSteps
from farflung.peer.trainer.api import Run
from farflung.peer.trainer.inner_loop import NO_LOSS, UNSTEPPED_MOST
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.messages import Lease


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path).attach(load(0))


def joined(trainer: Trainer) -> tuple[Run, torch.optim.Optimizer]:
    mine = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    steps = RunSteps(mine, trainer.loop.after_step, trainer.loop.before_step)
    trainer.channel.will_say(LeasesNow(leases=(Lease.at(1, 0, 0, 10_000, (0,)),)))
    return Run(NoAgent(), trainer.loop, steps, "me"), mine  # type: ignore[arg-type]


def test_a_step_of_the_users_own_optimizer_is_one_of_the_run(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    run, mine = joined(trainer)
    assert run.optimizer is mine
    trainer.channel.will_answer(ResumeSteps(spare=0))
    for batch, _ in zip(run.batches(Numbers(10_000)), range(2 * SYNC_EVERY - 1), strict=False):
        trainer.model(torch.ones(len(batch), 4)).sum().backward()
        mine.step()
        mine.zero_grad()
        trainer.channel.will_answer(ResumeSteps(spare=0))
    [frozen] = [word for word in trainer.channel.said if isinstance(word, Frozen)]
    assert run.step_count == 2 * SYNC_EVERY - 1 and frozen.steps == SYNC_EVERY
    assert frozen.loss is None and caplog.text.count(NO_LOSS) == 1


def test_a_loss_that_is_recorded_is_that_of_the_step(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    run, mine = joined(trainer)
    trainer.channel.will_answer(ResumeSteps(spare=0))
    for _ in range(SYNC_EVERY):
        run.record(2.5)
        mine.step()
    [frozen] = [word for word in trainer.channel.said if isinstance(word, Frozen)]
    assert frozen.loss == 2.5 and NO_LOSS not in caplog.text


def test_both_ways_to_step_count_once_each(trainer: Trainer) -> None:
    run, mine = joined(trainer)
    run.step(1.0)
    mine.step()
    assert run.step_count == 2


def test_batches_without_a_step_are_told(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    """Of an optimizer that is not the one that was handed in, say."""
    run, _ = joined(trainer)
    other = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    for batch, _ in zip(run.batches(Numbers(10_000)), range(UNSTEPPED_MOST + 9), strict=False):
        trainer.model(torch.ones(len(batch), 4)).sum().backward()
        other.step()
    assert caplog.text.count("has taken no step: nothing is learned here") == 1


def test_a_run_that_is_closed_counts_no_step(trainer: Trainer) -> None:
    run, mine = joined(trainer)
    run.close()
    mine.step()
    assert run.step_count == 0
