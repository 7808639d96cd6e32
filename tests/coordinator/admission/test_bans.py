"""The host's orders about bans and invitations; each refusal is a sentence.  Virtual time, no door."""

from __future__ import annotations

import pytest

from farflung.coordinator.admission.admission import NAME, Banned, Register, Unbanned
from farflung.coordinator.ledger.records import Struck
from farflung.protocol.errors import DepartureCause
from farflung.protocol.messages import Ban, Bans, Gone, Invite, Invites, Kick, Reply, Revoke, Unban
from rig.made_run import peer_of
from rig.office import Office

HOUR_S = 3600.0
ANN, BOB = peer_of("ann"), peer_of("bob")
NET = "192.0.2.0/24"


def register_of(office: Office) -> Register:
    part: Register = office.core.ledger.parts[NAME]
    return part


def bans(who: str, network: bool = False, lasts_s: float = HOUR_S) -> Ban:
    return Ban(who=who, reason="it lies", lasts_s=lasts_s, network=network)


def test_who_is_not_here_can_be_banned_and_not_kicked() -> None:
    office = Office()
    office.loses(office.enters("ann"))
    told = f"ann ({ANN}) is not here now; to keep it out: farflung ban"
    assert office.refuses(Kick(who="ann", reason="")) == told
    assert office.obeys(bans("ann")) == f"banned ann ({ANN}) for 60 min"


def test_a_ban_is_written_ends_on_the_runs_clock_and_sends_the_peer_away() -> None:
    office = Office()
    office.core.now = 50.0
    ann, _ = office.enters("ann", network=NET), office.enters("bob", network=NET)
    office.effects()
    office.obeys(bans("ann", lasts_s=1.5 * HOUR_S))
    told = [each for each in office.told(ann) if isinstance(each, Gone)]
    assert [each.reason for each in told] == ["banned from the run: it lies"]
    [record] = [each for each in office.written if isinstance(each, Banned)]
    assert record == Banned(peer=ANN, reason="it lies", at_s=50.0, until_s=50.0 + 1.5 * HOUR_S, network="")
    assert office.lost == [("ann", "banned", "it lies")], "its neighbour stays"


def test_a_ban_with_its_network_sends_away_everybody_from_there_and_nobody_else() -> None:
    office = Office()
    for name, network in (("ann", NET), ("bob", NET), ("cyd", "198.51.100.0/24"), ("dan", "")):
        office.enters(name, network=network)
    told = f"banned ann ({ANN}) and everybody from {NET} for 60 min"
    assert office.obeys(bans("ann", network=True)) == told
    assert [name for name, _, _ in office.lost] == ["ann", "bob"]
    register = register_of(office)
    assert register.ban_of(peer_of("new"), NET, office.core.clock_s) is not None
    assert register.ban_of(peer_of("new"), "", office.core.clock_s) is None


@pytest.mark.parametrize("known", [True, False])
def test_a_network_that_is_not_known_is_not_banned_and_neither_is_the_peer(known: bool) -> None:
    """It comes from this machine; or it was here before the coordinator started."""
    office = Office()
    ann = office.enters("ann", network="")
    if not known:
        del office.core.members.members[ann.peer]
    told = f"the network of ann ({ANN}) is not known; ban it without --network"
    assert office.refuses(bans("ann", network=True)) == told
    assert register_of(office).bans == {}


def test_unbanned_a_peer_may_come_again_and_its_strikes_are_forgotten() -> None:
    office = Office()
    office.enters("ann")
    office.core.strike(ANN, "it sent garbage")
    office.obeys(bans("ann"))
    assert office.obeys(Unban(who="ann")) == f"ann ({ANN}) may come in again, without strikes"
    assert office.records()[-1] == Unbanned(peer=ANN)
    register = register_of(office)
    assert register.bans == {} and register.strikes == {}
    assert office.refuses(Unban(who="ann")).startswith("nobody called 'ann' is banned or has strikes")


def test_who_has_only_strikes_can_be_freed_of_them() -> None:
    office = Office()
    office.enters("ann")
    office.core.strike(ANN, "it sent garbage")
    office.obeys(Unban(who=ANN[:5]))
    assert register_of(office).strikes == {}


def test_the_list_has_bans_that_still_hold_and_strikes_of_those_that_are_not_banned() -> None:
    office = Office()
    assert office.operating.obey(Bans()) == Reply(
        text="nobody is banned, and nobody has strikes", found={"bans": [], "strikes": {}}
    )
    for name in ("ann", "bob", "cyd"):
        office.enters(name, network=NET)
    office.core.write(Struck(peer=BOB, reason="first", at_s=0.0))
    office.core.write(Struck(peer=BOB, reason="second", at_s=0.0))
    office.core.write(Struck(peer=ANN, reason="it lies", at_s=0.0))
    office.obeys(bans("cyd", lasts_s=10.0))
    office.obeys(bans("ann", network=True))
    office.core.now = HOUR_S / 2
    listed = office.operating.obey(Bans())
    assert listed.text.splitlines() == [
        f"ann ({ANN}) with {NET}: 30 min more: it lies",
        f"bob ({BOB}): 2 strikes, the last one: second",
    ]
    assert listed.found == {
        "bans": [{"id": ANN, "name": "ann", "network": NET, "left_s": HOUR_S / 2, "reason": "it lies"}],
        "strikes": {BOB: ["first", "second"], ANN: ["it lies"]},
    }


def test_orders_about_invitations_are_passed_on_and_their_refusals_are_sentences_too() -> None:
    office = Office()
    assert office.obeys(Invites()) == "nobody was invited"
    assert office.obeys(Invite(uses=2, lasts_s=HOUR_S, note="lab")).startswith("invitation ")
    ann = office.enters("ann")
    [invitation] = register_of(office).invitations.values()
    invitation.guests.add(ann.peer)
    assert office.refuses(Revoke(which="school", reason="")).startswith("there is no such invitation")
    office.obeys(Revoke(which="lab", reason="closed", guests=True))
    assert office.lost == [("ann", DepartureCause.KICKED, "its invitation was revoked: closed")]


@pytest.mark.parametrize("who", ["", "zoe", "an", ANN + "x"])
def test_a_name_that_fits_nobody_is_said_and_how_peers_are_named(who: str) -> None:
    office = Office()
    office.enters("ann" if who != "an" else "bob")
    how = "name a peer by its name, its id or the beginning of its id"
    assert office.refuses(bans(who)) == f"nobody called {who!r} was ever here; {how}"
    assert office.refuses(Unban(who=who)) == f"nobody called {who!r} is banned or has strikes; {how}"


def test_a_name_that_may_be_two_peers_is_asked_about_and_neither_is_banned_nor_freed() -> None:
    office = Office()
    office.enters("ann")
    office.enters("abe")
    both = f"'a' may be ann ({ANN}), abe ({peer_of('abe')}); name one of them by its id"
    assert office.refuses(bans("a")) == both
    office.obeys(bans("ann"))
    office.obeys(bans("abe"))
    assert office.refuses(Unban(who="a")) == both
    assert len(register_of(office).bans) == 2
