"""Kinds of frames, the core's and the modes': each number is given out once; what carriers must know of each."""

from __future__ import annotations

from farflung.peer.machine.modes import kinds_of
from farflung.protocol.frames import CORE_KINDS, Trait

EVERY_KIND = kinds_of(stages=True)


def test_kinds_of_modes_and_their_numbers_are_exactly_these() -> None:
    crossings = dict(enumerate(["ACTIVATION", "GRADIENT", "HELD", "ROOM", "IDLE", "GIVEN_BACK"], start=11))
    crossings |= dict(enumerate(["WANT_ACTIVATION", "WANT_GRADIENT", "WANT_HELD", "WANT_BACK"], start=23))
    others = {29: "AHEAD", 30: "AHEAD_HELD", 31: "AHEAD_COUNTS", 32: "WANT_WHERE", 33: "WHERE"}
    others |= {36: "SUM", 37: "WANT_SUM"}
    of_modes = {number: kind for number, kind in EVERY_KIND.items() if number not in CORE_KINDS}
    assert {number: kind.name for number, kind in of_modes.items()} == crossings | others
    assert {number: kind.name for number, kind in EVERY_KIND.items() if kind.crossing} == crossings


def test_crossings_are_unknown_where_the_model_is_in_one_piece() -> None:
    whole = kinds_of(stages=False)
    assert whole.keys() == {number for number, kind in EVERY_KIND.items() if not kind.crossing}


def test_which_kinds_are_bounded_as_answers_and_which_are_headers_alone() -> None:
    of = {trait: {kind.name for kind in EVERY_KIND.values() if trait in kind.traits} for trait in Trait}
    served = {"STATE", "LOGGED", "MANIFEST", "HAVE", "WHERE", "LEAN_GRANTED"}
    assert of[Trait.ANSWER] == served | {"MISSING", "LATER", "PONG"}
    questions = {kind.name for kind in EVERY_KIND.values() if kind.name.startswith("WANT_")}
    words = {"MISSING", "LATER", "PONG", "ROOM", "IDLE", "GIVEN_BACK", "AHEAD_HELD", "AHEAD_COUNTS"}
    assert of[Trait.BARE] == questions | words
