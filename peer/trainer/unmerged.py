"""What the trainer has learned in one fragment and no commit has used yet: its values.

Held by the inner loop, one for each fragment.  A commit of one fragment may use a peer's work while another's does
not, so each keeps its own account (P6); its counts are in machine.py.
Must not know when to freeze or to load, or data.

    learned = loaded - now           since the last load; rounding the anchor to bf16 is in neither
    owed    = carry + learned        everything that no commit has used; this is frozen into a slot

`loaded` is what the model was set to last, by a load or by `train_on`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from farflung.optim.ahead import ahead
from farflung.optim.outer import OuterStep
from farflung.peer.local.memory import SharedState
from farflung.peer.trainer.effects import LoadAnchor
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.fragments import Fragment
from farflung.protocol.process import failpoints


class Unmerged:
    def __init__(self, layout: ModelLayout, fragment: Fragment) -> None:
        self._layout = layout
        self._start = fragment.first * layout.chunk_elements
        self._count = fragment.count * layout.chunk_elements
        self.carry: Tensor | None = None  # unmerged work from before the last load, fp32; None is zero

    def part(self, flat: Tensor) -> Tensor:
        """The fragment's values in a flat vector of the whole model."""
        return flat[self._start : self._start + self._count]

    def put_back(self, model: nn.Module, before: Sequence[Tensor]) -> None:
        """Undo a step in this fragment.  `before`: a snapshot of the model."""
        self._layout.put_back(model, before, self._start, self._count)

    def write_owed(self, model: nn.Module, loaded: Sequence[Tensor], out: Tensor) -> None:
        """`loaded`: the model right after the last loads; `out`: the fragment's part of a slot."""
        self._layout.write_delta(model, loaded, self.carry, out, self._start)

    def train_on(
        self, model: nn.Module, loaded: Sequence[Tensor], shared: SharedState, outer: OuterStep, slot: int
    ) -> None:
        """Go ahead by what the momentum will do (optim/ahead.py).  All that is owed, in `slot`, is carried meanwhile.

        Should the agent be applying a newer version just now, some values go ahead from that: no less good.
        """
        owed = self.part(shared.slots[slot])
        learned = self._layout.first_plain_chunk * self._layout.chunk_elements - self._start
        place = (self.part(shared.anchor), self.part(shared.moments[0]), owed)
        values = ahead(outer, *place, max(0, learned))
        self.carry = _none_if_zero(owed.clone())
        self._layout.load(model, values, self._start)
        self._layout.refresh(model, loaded, self._start, self._count)

    def owed(self, model: nn.Module, loaded: Sequence[Tensor]) -> Tensor:
        owed = torch.empty(self._count)
        self.write_owed(model, loaded, owed)
        return owed

    def load(self, load: LoadAnchor, model: nn.Module, loaded: Sequence[Tensor], shared: SharedState) -> None:
        """Take the new anchor into the model, and note what the model then holds in `loaded`.

        `load.mix`: after a commit that used its work, the model keeps so much of where it stood.  That moves the model
        alone.  It is then so far from the anchor, and the next pseudo-gradient says so, like all that is unmerged.
        """
        self.carry = _none_if_zero(self._kept(load, model, loaded, shared))
        anchor = self.part(shared.anchor)
        values = anchor if self.carry is None else anchor - self.carry
        if load.mix:
            own = torch.empty_like(values)
            self._layout.write_values(model, own, self._start)
            values = torch.lerp(values, own, load.mix)
            self.carry = _none_if_zero(anchor - values)
        failpoints.hit("load.mid")
        self._layout.load(model, values, self._start)
        self._layout.refresh(model, loaded, self._start, self._count)

    def _kept(
        self, load: LoadAnchor, model: nn.Module, loaded: Sequence[Tensor], shared: SharedState
    ) -> Tensor | None:
        """The unmerged work after this load."""
        slot = self.part(shared.slots[load.slot])
        match load.keep:
            case "all":
                return self.owed(model, loaded)
            case "rest":
                return self.owed(model, loaded).sub_(slot)
            case "drop":
                return None
            case "restore":
                return slot.clone()


def _none_if_zero(carry: Tensor | None) -> Tensor | None:
    """Exactly nothing left: the anchor is then loaded as it is, bit for bit."""
    return carry if carry is not None and bool(carry.any()) else None
