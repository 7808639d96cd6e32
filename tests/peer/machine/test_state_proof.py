"""What a peer can prove: how it came to what it holds, and that it holds it."""

from __future__ import annotations

from farflung.peer.machine.effects import KeepBefore, ProveHolding
from farflung.peer.machine.held_fragment import NONCES_KEPT, StateProof
from farflung.protocol.digests import hash_bytes
from farflung.protocol.messages import TAG_BYTES
from farflung.protocol.model_schema import Fragment

NONCE, VALUE = hash_bytes(b"nonce"), hash_bytes(b"value")


def grounds() -> StateProof:
    return StateProof(Fragment(2, 6, 3))


# ---- how it came to it -----------------------------------------------------------------------------------------


def test_P18_what_leaves_a_confirmed_version_is_kept_until_the_next_one_does() -> None:
    mine = grounds()
    assert not mine.calculated and mine.before is None
    assert mine.rolls_on(4, b"4", confirmed=True) == [KeepBefore(2, 4)] and mine.calculated
    mine.lose()
    assert not mine.calculated, "the next one is confirmed: there is nothing to show"
    assert mine.before == (4, b"4"), "but the run may have to go back"
    assert mine.rolls_on(5, b"5", confirmed=True) == [KeepBefore(2, 5)] and mine.calculated
    assert mine.before == (5, b"5")


def test_P18_from_an_unconfirmed_version_on_what_is_kept_of_the_confirmed_one_still_leads_here() -> None:
    mine = grounds()
    mine.rolls_on(4, b"4", confirmed=True)
    assert mine.rolls_on(5, b"5", confirmed=False) == [] and mine.calculated
    assert mine.before == (4, b"4")


def test_P18_from_a_version_that_nobody_confirmed_nothing_can_be_shown() -> None:
    mine = grounds()
    assert mine.rolls_on(4, b"4", confirmed=False) == [] and not mine.calculated
    assert mine.before is None, "nothing was kept"


# ---- that it holds it --------------------------------------------------------------------------------------------


def test_P18_holding_is_shown_under_the_nonce_once_it_is_calculated() -> None:
    mine = grounds()
    assert mine.prove(4) == [] and mine.shown(4) == b"", "nobody has asked"
    mine.on_nonce(4, NONCE)
    assert mine.prove(4) == [ProveHolding(2, 4, NONCE)] and mine.prove(4) == []
    assert mine.is_proving(4) and mine.shown(4) == b""
    mine.on_proven(4, NONCE, VALUE)
    assert not mine.is_proving(4) and mine.shown(4) == NONCE[:TAG_BYTES] + VALUE
    assert mine.shown(3) == mine.shown(5) == b"", "of another version it says nothing"


def test_P18_under_a_new_nonce_it_is_shown_anew_and_late_answers_to_the_old_one_are_void() -> None:
    mine, other = grounds(), hash_bytes(b"of the next era")
    mine.on_nonce(4, NONCE)
    mine.prove(4)
    mine.on_nonce(4, other)
    assert mine.prove(4) == [ProveHolding(2, 4, other)]
    mine.on_proven(4, NONCE, VALUE)
    assert mine.shown(4) == b""
    mine.on_proven(4, other, VALUE)
    assert mine.shown(4) == other[:TAG_BYTES] + VALUE


def test_P18_what_was_shown_of_a_state_that_is_gone_is_void_and_so_is_what_comes_late() -> None:
    mine = grounds()
    mine.on_nonce(4, NONCE)
    mine.prove(4)
    mine.forget()
    mine.on_proven(4, NONCE, VALUE)
    assert mine.shown(4) == b"" and not mine.is_proving(4)
    assert mine.prove(4) == [ProveHolding(2, 4, NONCE)], "the state of before is here again"


def test_P8_nonces_that_are_told_take_bounded_memory_and_the_newest_ones_stay() -> None:
    mine = grounds()
    for version in range(5 * NONCES_KEPT):
        mine.on_nonce(version, NONCE)
    mine.on_nonce(-1, NONCE)
    mine.on_nonce(1 << 40, b"")
    assert len(mine._nonces) == NONCES_KEPT and max(mine._nonces) == 5 * NONCES_KEPT - 1
