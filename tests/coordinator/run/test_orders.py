"""What the host may order: kicks, bans, pause, drain; each refusal is a sentence.  Virtual time, no door."""

from __future__ import annotations

import pytest

from farflung.coordinator.ledger.records import Banned, Paused, Resumed, Struck, Unbanned
from farflung.coordinator.run.discipline import Discipline
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.operator_orders import AmendmentOrders, GoingBackByOrder, Operating
from farflung.coordinator.run.rollback import Rollback
from farflung.protocol.causes import DepartureCause
from farflung.protocol.messages import Gone
from farflung.protocol.orders import (
    Ban,
    Bans,
    Drain,
    Invite,
    Invites,
    Kick,
    Order,
    Pause,
    Reply,
    Resume,
    Revoke,
    Unban,
)
from farflung.protocol.states import OF_DEPARTURE
from rig.made_run import MadeRun, peer_of

HOUR_S = 3600.0
ANN, BOB = peer_of("ann"), peer_of("bob")
NET = "192.0.2.0/24"


class Office(MadeRun):
    """A run and its host; `lost` is who had to go, how, and why."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lost: list[tuple[str, str, str]] = []
        discipline = Discipline(self.core, self.lose)
        by_order = GoingBackByOrder(self.core, self.drivers, Rollback(self.core, self.drivers))
        amending = AmendmentOrders(self.core, self.drivers)
        self.operating = Operating(self.core, discipline, by_order, amending, lambda count: bytes(count))

    def lose(self, member: Member, cause: DepartureCause, why: str) -> None:
        self.lost.append((member.contact.name, cause, why))
        self.core.members.lose(member, OF_DEPARTURE[cause])

    def obeys(self, order: Order) -> str:
        reply = self.operating.obey(order)
        assert reply.ok, reply.text
        return reply.text

    def refuses(self, order: Order) -> str:
        """A sentence for the host; nothing is changed by it."""
        self.effects()
        reply = self.operating.obey(order)
        assert not reply.ok and reply.found == {}, reply
        assert self.effects() == [], "nothing was written, and nobody was told"
        return reply.text


def bans(who: str, network: bool = False, lasts_s: float = HOUR_S) -> Ban:
    return Ban(who=who, reason="it lies", lasts_s=lasts_s, network=network)


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
    assert office.core.ledger.register.bans == {}


def test_who_is_not_here_can_be_banned_and_not_kicked() -> None:
    office = Office()
    office.loses(office.enters("ann"))
    told = f"ann ({ANN}) is not here now; to keep it out: farflung ban"
    assert office.refuses(Kick(who="ann", reason="")) == told
    assert office.obeys(bans("ann")) == f"banned ann ({ANN}) for 60 min"


# ---- kept out ------------------------------------------------------------------------------------------------


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
    register = office.core.ledger.register
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
    assert office.core.ledger.register.bans == {}


def test_unbanned_a_peer_may_come_again_and_its_strikes_are_forgotten() -> None:
    office = Office()
    office.enters("ann")
    office.core.strike(ANN, "it sent garbage")
    office.obeys(bans("ann"))
    assert office.obeys(Unban(who="ann")) == f"ann ({ANN}) may come in again, without strikes"
    assert office.records()[-1] == Unbanned(peer=ANN)
    register = office.core.ledger.register
    assert register.bans == {} and register.strikes == {}
    assert office.refuses(Unban(who="ann")).startswith("nobody called 'ann' is banned or has strikes")


def test_who_has_only_strikes_can_be_freed_of_them() -> None:
    office = Office()
    office.enters("ann")
    office.core.strike(ANN, "it sent garbage")
    office.obeys(Unban(who=ANN[:5]))
    assert office.core.ledger.register.strikes == {}


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


# ---- the run is held -----------------------------------------------------------------------------------------


def test_paused_and_resumed_are_written_so_that_they_outlive_the_coordinator() -> None:
    office = Office()
    office.obeys(Pause(reason="the disk is full"))
    assert office.core.held and office.replayed().register.paused == Paused(reason="the disk is full")
    assert office.obeys(Resume()) == "rounds open again"
    assert not office.core.held and office.replayed().register.paused is None
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
    for order in (Kick(who=who, reason=""), bans(who)):
        assert office.refuses(order) == f"nobody called {who!r} was ever here; {how}"
    assert office.refuses(Unban(who=who)) == f"nobody called {who!r} is banned or has strikes; {how}"


def test_a_name_that_may_be_two_peers_is_asked_about_and_neither_has_to_go() -> None:
    office = Office()
    office.enters("ann")
    office.enters("abe")
    both = f"'a' may be ann ({ANN}), abe ({peer_of('abe')}); name one of them by its id"
    for order in (Kick(who="a", reason=""), bans("a")):
        assert office.refuses(order) == both
    office.obeys(bans("ann"))
    office.obeys(bans("abe"))
    assert office.refuses(Unban(who="a")) == both
    assert len(office.core.ledger.register.bans) == 2


def test_of_two_peers_with_one_name_the_one_that_is_here_is_meant() -> None:
    office = Office()
    office.loses(office.enters("ann"))
    other = office.enters("bob")
    office.core.ledger.names[BOB] = "ann"
    office.obeys(Kick(who="ann", reason=""))
    assert not other.alive
    assert "may be" in office.refuses(Kick(who="ann", reason="")), "now neither of them is here"


def test_no_more_than_a_few_are_named_where_many_may_be_meant() -> None:
    office = Office()
    for letter in "abcdefgh":
        office.enters(f"x{letter}")
    assert office.refuses(Kick(who="x", reason="")).count("(") == 5


# ---- invitations ---------------------------------------------------------------------------------------------


def test_orders_about_invitations_are_passed_on_and_their_refusals_are_sentences_too() -> None:
    office = Office()
    assert office.obeys(Invites()) == "nobody was invited"
    assert office.obeys(Invite(uses=2, lasts_s=HOUR_S, note="lab")).startswith("invitation ")
    ann = office.enters("ann")
    [invitation] = office.core.ledger.register.invitations.values()
    invitation.guests.add(ann.peer)
    assert office.refuses(Revoke(which="school", reason="")).startswith("there is no such invitation")
    office.obeys(Revoke(which="lab", reason="closed", guests=True))
    assert office.lost == [("ann", DepartureCause.KICKED, "its invitation was revoked: closed")]
