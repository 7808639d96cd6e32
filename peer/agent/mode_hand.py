"""What a mode may need of the agent: each answer here is that of one that needs nothing.

Made with the other hands (io_workers.py), where the mode is there and the run has a use for it; it carries out what the
mode's part of the machine asks for (`ModeEffect`).
"""

from __future__ import annotations

from farflung.peer.local.words import WorkDone
from farflung.peer.machine.effects import ModeEffect
from farflung.protocol.frames import Payload


class ModeHand:
    @property
    def memory_bytes(self) -> int:
        """What it keeps there."""
        return 0

    @property
    def disk_bytes(self) -> int:
        return 0

    def begin(self, slot_bytes: int) -> str:
        """A trainer came, which says how long a slot of a belt is to be.  Where the belt lies; empty: there is none."""
        return ""

    def take(self, word: WorkDone, place: int | None) -> Payload:
        """What the trainer has put into that place."""
        return b""

    def carry_out(self, effect: ModeEffect) -> None:
        raise RuntimeError(f"no mode here has a hand for {type(effect).__name__}")

    def close(self) -> None:
        """Once everything that was asked of the arithmetic is done."""
