"""A LightningModule in a run: a callback that is also the loader, so that data, steps and the end are the run's.

Called by users' scripts, as `farflung.lightning_run`.
Must not know the agent, rounds or leases.  lightning is imported when this is used: nothing else needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from farflung.peer.trainer.api import Collate, Run, connect
from farflung.protocol.errors import UserError

# Lightning asks for one batch more before it gives one out, to know which is the last.
AHEAD = 1


def lightning_run(
    dataset: Any,
    url: str | None = None,
    *,
    batch_size: int | None = None,
    collate: Collate | None = None,
    workers: int = 0,
    **given: str | None,
) -> Any:
    """A callback of Lightning that joins the run when training begins, and the loader of its leased samples.

        data = farflung.lightning_run(dataset, url)
        lightning.Trainer(callbacks=[data], max_epochs=-1).fit(module, data)

    `configure_optimizers` gives one optimizer, with or without a scheduler; one that wraps a function (LambdaLR) goes
    by the run's step.  Training stops when the run ends, and the module has the run's weights then; `data.run` is the
    `Run`.  `batch_size`, `collate`, `workers`: as for `run.batches`.  `given`: as for `join`.
    """
    try:
        lightning: Any = importlib.import_module("lightning")
    except ImportError:
        raise UserError("lightning_run needs lightning: pip install lightning") from None

    class InRun(lightning.Callback):  # type: ignore[misc]
        run: Run

        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            configure = module.configure_optimizers

            def configure_optimizers() -> Any:
                # Only now the module is on its device.
                configured = configure()
                self.run = _joined(module, configured, url, given)
                return configured

            module.configure_optimizers = configure_optimizers

        def __iter__(self) -> Iterator[Any]:
            yield from self.run.batches(dataset, batch_size, collate, ahead=AHEAD, workers=workers)

        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            self.run.record(loss * trainer.accumulate_grad_batches)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop |= self.run.finished

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            if hasattr(self, "run"):
                self.run.__exit__(type(exception), exception, None)

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            if hasattr(self, "run"):
                self.run.close()

    return InRun()


def _joined(module: Any, configured: Any, url: str | None, given: dict[str, str | None]) -> Run:
    """With the optimizer that configure_optimizers gives, and its scheduler by the run's step."""
    found = configured if isinstance(configured, dict) else {"optimizer": configured}
    if isinstance(configured, tuple | list) and len(configured) == 2 and isinstance(configured[0], list):
        found = dict(zip(("optimizer", "lr_scheduler"), (each[0] for each in configured), strict=True))
    run = connect(url, given).join(module, found["optimizer"])
    scheduler = found.get("lr_scheduler")
    schedule: Any = scheduler["scheduler"] if isinstance(scheduler, dict) else scheduler
    if hasattr(schedule, "lr_lambdas"):
        schedule.lr_lambdas = [run.lr_lambda(each) for each in schedule.lr_lambdas]
    return run
