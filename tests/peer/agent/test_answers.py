"""P6, P8: no question of a joiner is lost in silence at its donor: it is answered, or waits and hears so.

The machine, its replica and the line are stand-ins of a few lines: what counts is when a question is put to the
machine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from farflung.peer.agent.io_workers import Answering
from farflung.peer.agent.turns import LATER_EVERY_S
from farflung.protocol.frames import Frame, Header, Kind
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.run_terms import Attached, Known

MODEL = ModelSchema((TensorSpec("w", (16,), "float32", "param"),), 4, 4, 4, bytes(32))
KNOWN = Known(Manifest.from_toml('[run]\nname = "x"\n', "x"), bytes(16))


@dataclass
class Donor:
    """Holds the run's state and is in no round; `leaving`: answers to anybody that have not left yet."""

    leaving: int = 0
    put: list[int] = field(default_factory=list)  # chunks, as the machine was asked for them
    told: list[Kind] = field(default_factory=list)

    def __post_init__(self) -> None:
        link = SimpleNamespace(
            answers_waiting=lambda peer: self.leaving,
            waiting_bytes=lambda: 0,
            send=lambda peer, frame: self.told.append(frame.header.kind),
        )
        line = SimpleNamespace(link=link, known_up=0.0, rates=(0.0, 0.0))
        replica = SimpleNamespace(held=SimpleNamespace(serves=True, version=0))
        part = SimpleNamespace(
            flights=[],
            replica_of_chunk=lambda chunk: replica,
            counters=SimpleNamespace(count=Counter().update),
        )
        self.machine = cast(Any, SimpleNamespace(part=part, joined=None, on_frame=self._on_frame))
        self.answering = Answering(
            cast(Any, line), Attached(KNOWN, MODEL), cast(Any, None), lambda effects: None
        )

    def _on_frame(self, sender: str, frame: Frame, now: float) -> list[object]:
        self.put.append(frame.header.chunk)
        return []

    def asked(self, chunk: int, now: float) -> None:
        frame = Frame(Header(Kind.WANT_STATE, KNOWN.tag, chunk=chunk))
        assert self.answering.takes("joe", frame, self.machine, now)


def test_P6_a_question_waits_and_its_asker_hears_so_while_earlier_answers_have_not_left() -> None:
    """It was put to the machine when its turn had come, and then nothing was made of it: its asker waited in vain."""
    donor = Donor(leaving=8)
    donor.asked(0, 0.0)
    donor.answering.turn(donor.machine, 0.1)
    donor.answering.turn(donor.machine, 0.1 + LATER_EVERY_S)
    assert donor.put == [] and donor.told == [Kind.LATER] and donor.answering.held == 1
    donor.leaving = 7
    donor.answering.turn(donor.machine, 2.0)
    assert donor.put == [0] and donor.answering.held == 0
