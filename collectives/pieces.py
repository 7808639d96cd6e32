"""What a member holds in a round, and what it can prove of it.  Types only."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.collectives.frames import Payload
from farflung.collectives.verdicts import Verdict
from farflung.collectives.weighing import Dots


@dataclass(frozen=True, slots=True)
class Piece:
    payload: Payload
    hash: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """What this member can prove to hold; the coordinator compares the combined hashes."""

    held: dict[str, tuple[int, bytes]]  # member -> (mask of my chunks, combined hash)
    refused: dict[str, Verdict]  # members that sent something unusable, and what it was
    cut_off: tuple[str, ...]  # members that I can't reach, or that give nothing (usable) however often I ask
    merged: dict[int, bytes]  # chunk -> hash of the result I answer for
    got: tuple[int, bytes]  # (mask, combined hash) of results
    dots: Dots | None  # of all my chunks, before the decision
