"""The gradient of a batch, of as many rows at once as the device has room for.

Called by the trainer.  The batch is the run's: every peer learns from as many samples in a step, whatever its machine.
Pieces of it add up to the same gradient, but for the order of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from farflung.peer.builtin.llama import Llama
from farflung.peer.builtin.sizes import StepShape
from farflung.protocol.errors import UserError
from farflung.protocol.process.log_lines import LineWriter


class MicroBatches:
    def __init__(
        self,
        model: Llama,
        shape: StepShape,
        precise: Callable[[], AbstractContextManager[object]],
        say: LineWriter,
    ) -> None:
        """`precise`: around each forward pass.  `say`: to this peer's owner."""
        self._model, self._precise, self._say = model, precise, say
        self._rows, model.recompute = shape

    def tell(self, batch: int) -> None:
        """Where it is not the whole batch at once."""
        if self._rows < batch or self._model.recompute:
            again = ", and each layer again on the way back" if self._model.recompute else ""
            self._say(f"computes {self._rows} of a batch's {batch} rows at once{again}: more does not fit")

    def backward(self, batch: Tensor) -> Tensor:
        """The mean loss of the batch [B, T + 1], whose gradient is in the parameters."""
        while True:
            try:
                return self._backward(batch)
            except torch.OutOfMemoryError as error:
                problem = str(error).splitlines()[0]
            # Behind the handler: until its end the traceback holds all that the forward pass had kept.
            self._shrink(batch.shape[0], problem)

    def _backward(self, batch: Tensor) -> Tensor:
        mean = torch.zeros((), device=batch.device)
        for rows in torch.split(batch, self._rows):
            share = len(rows) / len(batch)
            with self._precise():
                loss = self._model.loss(rows)
            torch.autograd.backward(loss if share == 1.0 else loss * share)
            mean += loss.detach() * share
        return mean

    def _shrink(self, batch: int, problem: str) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None  # of the pieces before: the batch is computed anew
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._rows > 1:
            self._rows = -(-min(self._rows, batch) // 2)
        elif not self._model.recompute:
            self._model.recompute = True
        else:
            raise UserError(
                f"one row of {self._model.sizes.context} tokens does not fit the memory of this device, although "
                f"layers are computed again on the way back: {problem}"
            )
        self.tell(batch)
