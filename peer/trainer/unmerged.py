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
from farflung.peer.island.ranks import Ranks
from farflung.peer.local.memory import SharedState
from farflung.peer.trainer.effects import LoadAnchor
from farflung.peer.trainer.layout import ModelLayout, Piece
from farflung.protocol.model_schema import Fragment
from farflung.protocol.process import failpoints


class Unmerged:
    def __init__(self, layout: ModelLayout, fragment: Fragment) -> None:
        self._layout = layout
        self._start = fragment.first * layout.chunk_elements
        self._count = fragment.count * layout.chunk_elements
        self.carry: Tensor | None = None  # unmerged work from before the last load, fp32; None is zero

    @property
    def start(self) -> int:
        return self._start

    def part(self, flat: Tensor) -> Tensor:
        """The fragment's values in a flat vector of the whole model."""
        return flat[self._start : self._start + self._count]

    def put_back(self, model: nn.Module, before: Sequence[Tensor]) -> None:
        """Undo a step in this fragment.  `before`: a snapshot of the model."""
        self._layout.put_back(model, before, self._start, self._count)

    def level(self, model: nn.Module, ranks: Ranks) -> None:
        """What several ranks have copies of is the same with all of them."""
        self._layout.level(model, ranks, self._start, self._count)

    def write_owed(self, model: nn.Module, loaded: Sequence[Tensor], out: Tensor) -> None:
        """`loaded`: the model right after the last loads; `out`: the fragment's part of a slot."""
        self._layout.write_delta(model, loaded, self.carry, out, self._start)

    def train_on(
        self, model: nn.Module, loaded: Sequence[Tensor], shared: SharedState, outer: OuterStep, slot: int
    ) -> None:
        """Go ahead by what the momentum will do (optim/ahead.py).  All that is owed, in `slot`, is carried meanwhile.

        Should the agent be applying a newer version just now, some values go ahead from that: no less good.
        """
        anchor, momentum = self.part(shared.anchor), self.part(shared.moments[0])
        owed = self.part(shared.slots[slot])
        self.carry = _none_if_zero(self._layout.taken(owed, self._start))

        def ahead_of(piece: Piece, _: Tensor) -> Tensor:
            place = [piece.cells(each, self._start).reshape(-1) for each in (anchor, momentum, owed)]
            learned = piece.box.numel if piece.entry.kind == "param" else 0
            return ahead(outer, place[0], place[1], place[2], learned).view(piece.box.shape)

        self._layout.set_each(model, self._start, self._count, ahead_of)
        self._layout.refresh(model, loaded, self._start, self._count)

    def load(self, load: LoadAnchor, model: nn.Module, loaded: Sequence[Tensor], shared: SharedState) -> None:
        """Take the new anchor into the model, and note what the model then holds in `loaded`.

        `load.mix`: after a commit that used its work, the model keeps so much of where it stood.  That moves the model
        alone.  It is then so far from the anchor, and the next pseudo-gradient says so, like all that is unmerged.
        """
        carry = _none_if_zero(self._kept(load, model, loaded, shared))
        mixed = self._layout.nothing_owed(self._start, self._count) if load.mix else None
        anchor = self.part(shared.anchor)

        def value(piece: Piece, own: Tensor) -> Tensor:
            cells = piece.cells(anchor, self._start)
            values = cells if carry is None else cells - piece.carried(carry, self._start)
            if mixed is not None:
                values = torch.lerp(values, own.to("cpu", torch.float32), load.mix)
                piece.carried(mixed, self._start).copy_(cells - values)
            return values

        failpoints.hit("load.mid")
        self._layout.set_each(model, self._start, self._count, value)
        self.carry = carry if mixed is None else _none_if_zero(mixed)
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
                return self.owed(model, loaded).sub_(self._layout.taken(slot, self._start))
            case "drop":
                return None
            case "restore":
                return self._layout.taken(slot, self._start)

    def owed(self, model: nn.Module, loaded: Sequence[Tensor]) -> Tensor:
        """In values that lie here."""
        return self._layout.owed(model, loaded, self.carry, self._start, self._count)


def _none_if_zero(carry: Tensor | None) -> Tensor | None:
    """Exactly nothing left: the anchor is then loaded as it is, bit for bit."""
    return carry if carry is not None and bool(carry.any()) else None
