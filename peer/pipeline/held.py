"""A model, or one stage of it, and the memory in which the agent shares its values.

Owns: values in from the anchor, sums or what local steps moved out into a slot, buffers that count as what they moved.
Called by: the loops of batches and of stages.
Must not know: words, microbatches, sockets, who else holds the same values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Shared
from farflung.peer.pipeline.parts import Riders, Tensors
from farflung.peer.pipeline.samples import ReadMicrobatch
from farflung.peer.pipeline.stage_loop import StageLoop
from farflung.peer.trainer.layout import Entry, ModelLayout
from farflung.protocol.errors import UserError
from farflung.protocol.process import failpoints

WHOLE_PATIENCE_S = 60.0  # for the last version to be whole


class HeldStage:
    """`model`: whose tensors are exchanged, under its own names; `loop` computes with the same ones."""

    def __init__(
        self, model: nn.Module, layout: ModelLayout, loop: StageLoop, moves_by_itself: bool = False
    ) -> None:
        """`moves_by_itself`: steps are taken on the model between two loads."""
        self.layout, self.loop = layout, loop
        self._moves_by_itself = moves_by_itself
        self._then: list[Tensor] = []  # all values, as they were loaded last: kept where they may move
        self.model = model
        self._shared: SharedState | None = None
        self._loaded: dict[str, Tensor] = {}  # the buffers, as they were loaded last

    @property
    def shared(self) -> SharedState:
        if self._shared is None:
            raise RuntimeError("before the agent shared its memory")
        return self._shared

    @property
    def is_open(self) -> bool:
        return self._shared is not None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def there(self, read: ReadMicrobatch) -> tuple[Tensors, Riders]:
        """On the model's device."""
        riders = {name: tensor.to(self.device) for name, tensor in read.riders.items()}
        return tuple(tensor.to(self.device) for tensor in read.given), riders

    def open(self, word: Shared) -> None:
        if word.elements != self.layout.total_elements:
            theirs, ours = word.elements, self.layout.total_elements
            raise UserError(f"the agent shares {theirs} values, this model has {ours}")
        self._shared = SharedState.open(word)

    def write_anchor(self) -> None:
        self.layout.write_anchor(self.model, self.shared.anchor)

    def load(self) -> None:
        failpoints.hit("load.mid")
        self.layout.load(self.model, self.shared.anchor)
        self._loaded = self.layout.buffers(self.model)
        # Not the anchor: what rounding it to the model's dtype changed was never learned.
        self._then = self.layout.snapshot(self.model) if self._moves_by_itself else []

    def write_sums(self, slot: int, tokens: int) -> None:
        """Parameters: the gradient of the mean loss of a token.  Buffers: what they moved, as all peers average it."""

        def value_of(entry: Entry, tensor: Tensor) -> Tensor:
            if entry.kind == "param":
                return self.loop.sums.of(tensor) / tokens
            return self._loaded[entry.name].to(torch.float32) - tensor.detach().to(torch.float32)

        self.layout.write_each(self.model, self.shared.slots[slot], value_of)
        failpoints.hit("freeze.mid")

    def write_learned(self, slot: int) -> None:
        """What all values have moved since they were loaded."""
        self.layout.write_delta(self.model, self._then, None, self.shared.slots[slot])
        failpoints.hit("freeze.mid")

    def take_newest(self) -> None:
        """The run is over: all of one version into the model."""
        self.loop.drop()
        self.layout.load(self.model, self.shared.copy_whole(self.shared.anchor.clone, WHOLE_PATIENCE_S))
