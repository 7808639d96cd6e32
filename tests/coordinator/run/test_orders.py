"""What the host may order: kicks, pause, drain; each refusal is a sentence.  Virtual time, no door."""

from __future__ import annotations

import pytest

from farflung.coordinator.ledger.records import Paused, Resumed
from farflung.protocol.errors import DepartureCause
from farflung.protocol.messages import Bans, Drain, Gone, Kick, Pause, Resume
from rig.made_run import peer_of
from rig.office import Office

ANN, BOB = peer_of("ann"), peer_of("bob")


# ---- sent away -----------------------------------------------------------------------------------------------


def test_who_is_kicked_is_told_first_and_is_not_banned() -> None:
    office = Office()
    ann = office.enters("ann")
    told = f"sent ann ({ANN}) away; it may come again: farflung ban keeps it out"
    assert office.obeys(Kick(who="ann", reason="a test")) == told
    [gone] = office.told(ann)
    assert isinstance(gone, Gone) and gone.final
    assert gone.reason == "the host of the run sent it away: a test"
    assert office.lost == [("ann", DepartureCause.KICKED, "a test")]
    assert not office.core.keeps_out(ANN)


# ---- the run is held -----------------------------------------------------------------------------------------


def test_paused_and_resumed_are_written_so_that_they_outlive_the_coordinator() -> None:
    office = Office()
    office.obeys(Pause(reason="the disk is full"))
    assert office.core.held and office.replayed().paused == Paused(reason="the disk is full")
    assert office.obeys(Resume()) == "rounds open again"
    assert not office.core.held and office.replayed().paused is None
    assert office.written[-1] == Resumed()
    assert [text for _, text in office.core.events] == [
        "paused by the host: the disk is full", "the host lets the run go on",
    ]  # fmt: skip


def test_a_run_that_is_not_paused_is_not_resumed() -> None:
    assert Office().refuses(Resume()) == "the run is not paused"


def test_the_coordinator_is_drained_and_the_next_one_is_not() -> None:
    office = Office()
    office.obeys(Drain())
    assert office.core.draining and office.records() == [], "nothing of it is durable"
    assert "takes nobody in any more" in office.core.events[0][1]


# ---- who is meant --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["ann", ANN, ANN[:1]])
def test_a_peer_is_named_by_its_name_its_id_or_the_beginning_of_it(who: str) -> None:
    office = Office()
    office.enters("ann")
    office.enters("bob")
    office.obeys(Kick(who=who, reason=""))
    assert [name for name, _, _ in office.lost] == ["ann"]


@pytest.mark.parametrize("who", ["", "zoe", "an", ANN + "x"])
def test_a_name_that_fits_nobody_is_said_and_how_peers_are_named(who: str) -> None:
    office = Office()
    office.enters("ann" if who != "an" else "bob")
    how = "name a peer by its name, its id or the beginning of its id"
    assert office.refuses(Kick(who=who, reason="")) == f"nobody called {who!r} was ever here; {how}"


def test_a_name_that_may_be_two_peers_is_asked_about_and_neither_has_to_go() -> None:
    office = Office()
    office.enters("ann")
    office.enters("abe")
    both = f"'a' may be ann ({ANN}), abe ({peer_of('abe')}); name one of them by its id"
    assert office.refuses(Kick(who="a", reason="")) == both and office.lost == []


def test_of_two_peers_with_one_name_the_one_that_is_here_is_meant() -> None:
    office = Office()
    office.loses(office.enters("ann"))
    other = office.enters("bob")
    office.core.ledger.peers.names[BOB] = "ann"
    office.obeys(Kick(who="ann", reason=""))
    assert not other.alive
    assert "may be" in office.refuses(Kick(who="ann", reason="")), "now neither of them is here"


def test_no_more_than_a_few_are_named_where_many_may_be_meant() -> None:
    office = Office()
    for letter in "abcdefgh":
        office.enters(f"x{letter}")
    assert office.refuses(Kick(who="x", reason="")).count("(") == 5


def test_an_order_for_a_mode_that_was_taken_out_is_refused_in_one_line() -> None:
    office = Office()
    office.core.modes = ()
    assert office.refuses(Bans()).startswith("this coordinator was installed without what that order needs")
