"""What the trainer has learned in one fragment and no commit has used yet: its values.

Held by the inner loop, one for each fragment.  A commit of one fragment may use a peer's work while another's does
not, so each keeps its own account (P6); its counts are in machine.py.
Must not know when to freeze or to load, or data.

    learned = loaded - now           since the last load; rounding the anchor to bf16 is in neither
    owed    = carry + learned        everything that no commit has used; this is frozen into a slot

`loaded` is what the model was set to last, by a load or by `train_on`.  What is carried since `train_on` is what stands
in a slot, and stays there: only this trainer writes slots, so no copy is made until it writes that one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from farflung.peer.island.ranks import Ranks
from farflung.peer.local.memory import SharedState
from farflung.peer.trainer.effects import LoadAnchor
from farflung.peer.trainer.fused import Lookahead, Taken
from farflung.peer.trainer.layout import Change, LayoutPiece, ModelLayout
from farflung.protocol.model_schema import Fragment
from farflung.protocol.process import failpoints

_LOOK_VALUES = 1 << 20


class PendingDelta:
    def __init__(self, layout: ModelLayout, fragment: Fragment) -> None:
        self._layout = layout
        self._start = fragment.first * layout.chunk_elements
        self._count = fragment.count * layout.chunk_elements
        self.carry: Tensor | None = None  # unmerged work from before the last load, fp32; None is zero
        self._ahead: Tensor | None = None  # the part of a slot that is carried in place of `carry`
        self._room: Tensor | None = None  # for the next carry, while a slot is in its place

    @property
    def start(self) -> int:
        return self._start

    @property
    def count(self) -> int:
        return self._count

    @property
    def has_owed(self) -> bool:
        """From before the last load."""
        return self.carry is not None or self._ahead is not None

    def part(self, flat: Tensor) -> Tensor:
        """The fragment's values in a flat vector of the whole model."""
        return flat[self._start : self._start + self._count]

    def copied(self, model: nn.Module) -> list[Tensor]:
        """What the fragment is, for `put_back`."""
        return self._layout.copied(model, self._start, self._count)

    def put_back(self, model: nn.Module, before: Sequence[Tensor]) -> None:
        """Undo a step in this fragment.  `before`: as it was `copied`."""
        self._layout.put_back(model, before, self._start, self._count)

    def level(self, model: nn.Module, ranks: Ranks) -> None:
        """What several ranks have copies of is the same with all of them."""
        self._layout.level(model, ranks, self._start, self._count)

    def write_owed(self, model: nn.Module, loaded: Sequence[Tensor], out: Tensor) -> None:
        """`loaded`: the model right after the last loads; `out`: the fragment's part of a slot."""
        if self._ahead is not None and self._ahead.data_ptr() == out.data_ptr():
            self.carry, self._ahead = self._layout.taken(out, self._start), None
        carry = self.carry if self._ahead is None else self._ahead
        self._layout.write_delta(model, loaded, carry, out, self._start)

    def train_on(
        self, model: nn.Module, loaded: Sequence[Tensor], shared: SharedState, rate: float, slot: int
    ) -> None:
        """Go ahead by what the momentum will do (optim/recipes.py).  All that is owed, in `slot`, is carried
        meanwhile.

        Should the agent be applying a newer version just now, some values go ahead from that: no less good.
        """
        parts = [self.part(each) for each in (shared.anchor, shared.moments[0], shared.slots[slot])]
        # Of several ranks another one may write its share of the slot again before this one has looked at it.
        is_alone = not self._layout.held
        self._room = self.carry if self.carry is not None else self._room
        self.carry = None if is_alone else _none_if_zero(self._layout.taken(parts[2], self._start))
        self._ahead = parts[2] if is_alone else None

        def change(piece: LayoutPiece) -> Change:
            reads = [piece.cells(each, self._start) for each in parts]
            make = Lookahead(rate, piece.entry.kind == "param")
            return Change(reads, make, (piece.values(loaded[piece.index]),))

        self._layout.set_each(model, self._start, self._count, change)

    def load(self, load: LoadAnchor, model: nn.Module, loaded: Sequence[Tensor], shared: SharedState) -> None:
        """Take the new anchor into the model, and note what the model then holds in `loaded`.

        `load.mix`: after a commit that used its work, the model keeps so much of where it stood.  That moves the model
        alone.  It is then so far from the anchor, and the next pseudo-gradient says so, like all that is unmerged.
        """
        anchor, slot = self.part(shared.anchor), self.part(shared.slots[load.slot])
        old = self.carry if self._ahead is None else self._ahead
        in_slot = load.keep == "rest"
        if in_slot and self._ahead is not None and self._ahead.data_ptr() == slot.data_ptr():
            old, in_slot = None, False  # what is carried is what the commit used
        keeps = _keeps_some(load)
        is_kept = keeps or load.mix > 0
        # In place of what was carried before: it is read tile by tile.
        carry = self._room_for_carry() if is_kept else None

        def reads_of(piece: LayoutPiece) -> list[Tensor]:
            reads = [piece.cells(anchor, self._start)]
            if keeps and load.keep == "restore":
                reads.append(piece.cells(slot, self._start))
            elif keeps:
                reads.append(piece.values(loaded[piece.index]))
                if old is not None:
                    reads.append(self._carried(piece, old))
                if in_slot:
                    reads.append(piece.cells(slot, self._start))
            return reads

        kept: Literal["learned", "restored", ""] = ""
        if keeps:
            kept = "restored" if load.keep == "restore" else "learned"
        has_old = kept == "learned" and old is not None
        recipe = Taken(kept, has_old, kept == "learned" and in_slot, load.mix)

        def change(piece: LayoutPiece) -> Change:
            writes = [piece.values(loaded[piece.index])]
            if carry is not None:
                writes.append(piece.carried(carry, self._start))
            return Change(reads_of(piece), recipe, writes)

        failpoints.hit("load.mid")
        self._layout.set_each(model, self._start, self._count, change)
        self.carry, self._ahead, self._room = _none_if_zero(carry), None, None

    def _room_for_carry(self) -> Tensor:
        room = self.carry if self.carry is not None else self._room
        return room if room is not None else self._layout.nothing_owed(self._start, self._count)

    def _carried(self, piece: LayoutPiece, old: Tensor) -> Tensor:
        return piece.cells(old, self._start) if old is self._ahead else piece.carried(old, self._start)

    def owed(self, model: nn.Module, loaded: Sequence[Tensor]) -> Tensor:
        """In values that lie here."""
        carry = self.carry if self._ahead is None else self._ahead
        return self._layout.owed(model, loaded, carry, self._start, self._count)


def _keeps_some(load: LoadAnchor) -> bool:
    """Where no step is owed after the commit of a slot, all that was owed stands in it: nothing is left, to the bit."""
    return load.keep in ("all", "restore") or (load.keep == "rest" and load.steps > 0)


def _none_if_zero(carry: Tensor | None) -> Tensor | None:
    """Exactly nothing left: the anchor is then loaded as it is, bit for bit."""
    if carry is None or not any(bool(part.count_nonzero()) for part in torch.split(carry, _LOOK_VALUES)):
        return None
    return carry
