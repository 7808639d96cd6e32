"""The agent's hands for optimizers' states: its own, for joiners (donor.py), and a donor's for it (heir.py).

Owned by the agent.  Must not know what either of them does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from farflung.collectives.frames import Frame, Spoiled
from farflung.coordinator.schema import ModelSchema
from farflung.peer import effects as do
from farflung.peer.capture import Submit
from farflung.peer.donor import Donor
from farflung.peer.heir import Heir
from farflung.peer.identity import Identity
from farflung.peer.local import SharedState
from farflung.peer.local_messages import FromTrainer, InnerKept, InnerTaken, TakeInner, WantInner
from farflung.peer.machine import PeerMachine


class HandingOver:
    def __init__(self, identity: Identity, submit: Submit, tell: Callable[[list[do.Effect]], None]) -> None:
        self.donor, self._heir = Donor(identity, submit, tell), Heir(submit, tell)

    def begin(self, machine: PeerMachine, limit_s: float, shared: SharedState, model: ModelSchema) -> None:
        """Once the model is known.  `limit_s`: how long the trainer may wait for a donor's; 0: it begins fresh."""
        piece_bytes = 8 * model.chunk_elements
        self.donor.begin(machine.doorway.run_id, shared.place, shared.elements, piece_bytes)
        self._heir.begin(machine, limit_s, shared.place, piece_bytes)

    def invitation(self) -> list[do.Effect]:
        """For a trainer that has just said what its model is."""
        return [do.Tell(TakeInner())] if self._heir.on_new_trainer() else []

    @property
    def trainer_waits(self) -> bool:
        return self._heir.waiting

    def on_local(self, message: FromTrainer, now: float) -> bool:
        """True: a word of the trainer about its optimizer."""
        match message:
            case InnerKept():
                self.donor.on_kept(message, time.monotonic)
            case WantInner():
                self._heir.on_wanted(message.most_bytes, now)
            case InnerTaken():
                self._heir.on_taken(message, now)
            case _:
                return False
        return True

    def takes(self, sender: str, came: Frame | Spoiled, now: float) -> bool:
        """True: a donor's answer; questions come by answering.py."""
        return self._heir.takes(sender, came, now)

    def on_tick(self, now: float) -> None:
        self._heir.on_tick(now)
        self.donor.on_tick(now)

    def close(self) -> None:
        self._heir.close()
        self.donor.close()
