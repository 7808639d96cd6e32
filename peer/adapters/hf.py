"""A `Trainer` of transformers in a run: its data, its optimizer and its end become the run's.

Owns: what a Trainer calls when it trains, told to the run.  A subclass of Trainer will do as well.
Called by users' scripts, as `farflung.hf_join`.
Must not know the agent, rounds or leases.  transformers is imported when this is used: nothing else needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from farflung.peer.trainer.api import Run, connect
from farflung.protocol.errors import UserError


def hf_join(trainer: Any, url: str | None = None, *, workers: int | None = None, **given: str | None) -> Run:
    """Join the run with a `Trainer` of transformers that is made already, right before `trainer.train()`.

        with farflung.hf_join(trainer, url):
            trainer.train()

    The Trainer reads leased samples of its train_dataset, takes the run's steps, follows its schedule by the run's
    step, and stops when the run ends: its own `max_steps` and epochs do not count.  Afterwards `trainer.save_model()`
    writes the run's weights.  `workers`: as for `run.batches`; left out, the Trainer's `dataloader_num_workers`.
    `given`: as for `join`.
    """
    transformers = _transformers()
    if not isinstance(trainer, transformers.Trainer):
        raise UserError(f"hf_join takes a Trainer of transformers, not {type(trainer).__name__}")
    if trainer.train_dataset is None:
        raise UserError("hf_join: this Trainer has no train_dataset")
    args = trainer.args
    if args.load_best_model_at_end:
        raise UserError(
            "hf_join: with load_best_model_at_end this peer would end with a model of its own: leave it out"
        )
    run = connect(url, given).join(trainer.model, trainer.create_optimizer())
    schedule = trainer.create_scheduler(run.total_steps, run.optimizer)
    trainer._created_lr_scheduler = False  # else it makes another one, over steps of its own
    if hasattr(schedule, "lr_lambdas"):
        schedule.lr_lambdas = [run.lr_lambda(each) for each in schedule.lr_lambdas]
        for group, rate in zip(run.optimizer.param_groups, schedule.base_lrs, strict=True):
            group["lr"] = rate * schedule.lr_lambdas[0](0)
    # For the progress bar; `_Told` has the last word.
    args.max_steps = max(1, run.total_steps - run.global_step)
    data = _Leased(run, trainer, args.dataloader_num_workers if workers is None else workers)
    # Not prepared by accelerate: its loaders ask for a batch more than they give out.
    loader = importlib.import_module("torch.utils.data").DataLoader(data, batch_size=None)
    trainer.get_train_dataloader = lambda: loader
    trainer.add_callback(_told(transformers, run))
    learn = trainer.training_step

    def training_step(*inputs: Any, **named: Any) -> Tensor:
        loss: Tensor = learn(*inputs, **named)
        # What it gives is this batch's part of the step's loss.
        run.record(loss * args.gradient_accumulation_steps)
        return loss

    trainer.training_step = training_step
    return run


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise UserError(
            "hf_join needs transformers and accelerate: pip install transformers accelerate"
        ) from None


def _told(transformers: Any, run: Run) -> Any:
    class Told(transformers.TrainerCallback):  # type: ignore[misc]
        """The Trainer goes on as long as the run, whatever it counts itself."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.max_steps = max(state.max_steps, state.global_step + 2)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= run.finished

    return Told()


class _Leased(IterableDataset[Any]):
    def __init__(self, run: Run, trainer: Any, workers: int) -> None:
        self._run, self._trainer, self._workers = run, trainer, workers

    def __iter__(self) -> Iterator[Any]:
        trainer = self._trainer
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="Training")
        size = trainer.args.per_device_train_batch_size
        yield from self._run.batches(trainer.train_dataset, size, collate, workers=self._workers)
