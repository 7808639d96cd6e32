"""Kinds of crossings as a mode may declare them, for tests of what carries frames: no mode need be there for it."""

from __future__ import annotations

from farflung.protocol.frames import FrameKind, Trait, known_kinds


class SomeCrossing(FrameKind):
    ACTIVATION = 201, Trait.CROSSING
    GRADIENT = 202, Trait.CROSSING
    ROOM = 203, Trait.CROSSING | Trait.BARE
    WANT_GRADIENT = 204, Trait.CROSSING | Trait.BARE


KINDS = known_kinds(SomeCrossing)
