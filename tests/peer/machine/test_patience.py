"""How long a peer knocks at a door where nobody answers: for ever, once it was in the run."""

from __future__ import annotations

from farflung.peer.identity import Identity
from farflung.peer.machine.handshake import UNREACHABLE_AFTER_S, Handshake, me_of

ME = me_of(Identity.generate(), b"k" * 32, bytes(16))


def test_a_newcomer_gives_up_and_says_what_to_look_at() -> None:
    doorway = Handshake(ME, "demo")
    assert doorway.on_timer(0.0) is not None
    assert doorway.unreachable(UNREACHABLE_AFTER_S - 1) == ""
    assert doorway.unreachable(UNREACHABLE_AFTER_S).startswith("nobody answered within 60 s; check that")


def test_a_peer_that_was_in_the_run_before_never_does() -> None:
    doorway = Handshake(ME, "demo", kept=b"where it was")
    assert doorway.on_timer(0.0) is not None
    assert doorway.unreachable(1e9) == "" and doorway.on_timer(1e9) is not None
