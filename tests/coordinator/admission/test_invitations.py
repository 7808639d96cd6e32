"""Invitations: how they are made, listed and taken back, and who comes in by one.  Virtual time, no door."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from farflung.coordinator.admission.admission import (
    ID_CHARS,
    NAME,
    TOKEN_BYTES,
    Admission,
    CameByInvitation,
    Invited,
    Register,
    Revoked,
    token_digest,
)
from farflung.coordinator.door.hello_check import HelloPassed
from farflung.coordinator.ledger.records import Admitted
from farflung.coordinator.modes.registry import ModeTools
from farflung.coordinator.run.membership import Member
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import DepartureCause, UserError
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import AdmissionSection, Manifest
from farflung.protocol.messages import Hello, Invite, Refuse, Reply, Revoke
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.signed_words import hello_part
from farflung.protocol.states import PeerEvent
from rig.guests import Guest
from rig.made_run import RUN_ID, MadeRun, peer_of

MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
HOUR_S = 3600.0


class Host(MadeRun):
    """A run whose host invites; `kicked` is who had to go, and why."""

    def __init__(self, mode: str = "token") -> None:
        super().__init__(Manifest(admission=AdmissionSection(mode=mode)))  # type: ignore[arg-type]
        self.kicked: list[tuple[str, str]] = []
        self.drawn = 0
        self.admission = Admission(
            self.core,
            self.drivers,
            ModeTools(self.random, self.kick, lambda: None, lambda: None, lambda peer: True),
        )
        self.inviting = self.admission.invitations
        self.register: Register = self.core.ledger.parts[NAME]

    def random(self, count: int) -> bytes:
        self.drawn += 1
        return hash_bytes(str(self.drawn).encode())[:count]

    def kick(self, peer: str, cause: DepartureCause, told: str, why: str) -> None:
        self.kicked.append((peer, why))
        self.core.members.lose(self.core.members.alive[peer], PeerEvent.SENT_AWAY)

    def invites(self, note: str = "", uses: int = 1, lasts_s: float = HOUR_S) -> str:
        """The token."""
        return str(self.inviting.invite(Invite(uses=uses, lasts_s=lasts_s, note=note)).found["token"])

    def brings(self, name: str, token: str) -> Member:
        """Somebody came in by it."""
        member = self.enters(name)
        self.core.write(Admitted(peer=member.peer, name=name, session=member.session))
        self.core.write(CameByInvitation(peer=member.peer, digest=token_digest(token)))
        return member

    def revokes(self, which: str, reason: str = "a test", guests: bool = False) -> Reply:
        return self.inviting.revoke(Revoke(which=which, reason=reason, guests=guests))

    def usable(self) -> list[str]:
        """The notes of those that were not taken back."""
        return [each.note for each in self.register.invitations.values() if each.revoked is None]

    def says_hello(self, guest: Guest, token: str) -> Refuse | None:
        """What the admission says; who is let in is written down."""
        bare = Hello(
            protocol=PROTOCOL_VERSION, run_id=RUN_ID, identity=guest.identity, key=guest.key, address="",
            software="test", manifest=self.manifest.digest, model=MODEL,
                fragments=(0,), version=-1, digest=b"", process=guest.process,
            token=token, signature=b"",
        )  # fmt: skip
        hello = replace(bare, signature=guest.signer.sign(hello_part(bare, bytes(32))))
        passed = HelloPassed(hello, bytes(32))
        refused = self.admission.refuses(passed, guest.peer)
        if refused is None:
            self.core.write(Admitted(peer=guest.peer, name="", session=bytes(16)))
            self.admission.on_admitted(passed, guest.peer)
        return refused


# ---- made ----------------------------------------------------------------------------------------------------


def test_an_invitation_is_a_secret_token_of_which_the_journal_keeps_the_digest() -> None:
    host = Host()
    host.core.now = 100.0
    reply = host.inviting.invite(Invite(uses=3, lasts_s=HOUR_S, note="the lab"))
    token, digest = reply.found["token"], token_digest(reply.found["token"])
    assert reply.found["id"] == digest.hex()[:ID_CHARS]
    assert reply.text == f"invitation {reply.found['id']} (the lab): 3 uses, valid for 60 min"
    [record] = host.records()
    assert record == Invited(digest=digest, uses=3, at_s=100.0, until_s=100.0 + HOUR_S, note="the lab")
    assert token not in repr(record) and token not in repr(host.core.events)
    assert len(token) * 6 >= TOKEN_BYTES * 8 and not set(token) & set("=&?+/"), "it goes into a URL"


def test_each_invitation_is_another_one() -> None:
    host = Host()
    assert len({host.invites() for _ in range(5)}) == len(host.usable()) == 5


def test_where_nobody_is_asked_for_invitations_the_host_is_told() -> None:
    told = Host(mode="open").inviting.invite(Invite(uses=1, lasts_s=HOUR_S)).text
    assert told.endswith(
        ': 1 use, valid for 60 min; note: [admission] mode is "open", so peers need no invitation'
    )


# ---- listed --------------------------------------------------------------------------------------------------


def test_the_list_says_who_came_by_each_and_how_long_it_is_good() -> None:
    host = Host()
    assert host.inviting.list() == Reply(text="nobody was invited", found={"invitations": []})
    lab, short, gone = host.invites("lab", 3, 2 * HOUR_S), host.invites(lasts_s=60.0), host.invites("gone")
    host.brings("bob", lab)
    host.brings("ann", lab)
    host.core.now += HOUR_S / 2
    host.revokes("gone", "it was posted")
    listed, ids = host.inviting.list(), [token_digest(t).hex()[:ID_CHARS] for t in (lab, short, gone)]
    assert listed.text.splitlines() == [
        f"{ids[0]} (lab): 2 of 3 used (ann, bob); 90 min more",
        f"{ids[1]}: 0 of 1 used; expired",
        f"{ids[2]} (gone): 0 of 1 used; revoked: it was posted",
    ]
    first, second, third = listed.found["invitations"]
    assert first == {
        "id": ids[0], "note": "lab", "uses": 3, "guests": [peer_of("ann"), peer_of("bob")],
        "left_s": 1.5 * HOUR_S, "revoked": None,
    }  # fmt: skip
    assert (second["left_s"], third["revoked"]) == (0.0, "it was posted")


# ---- taken back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named_by", ["id", "beginning of its id", "whole digest", "note", "token", "URL"])
def test_an_invitation_can_be_named_in_any_way_that_its_host_has_at_hand(named_by: str) -> None:
    host = Host()
    token = host.invites("lab")
    host.invites("school")
    digest = token_digest(token).hex()
    which = {
        "id": digest[:ID_CHARS], "beginning of its id": digest[:3], "whole digest": digest, "note": "lab",
        "token": token, "URL": f"farflung://example.org:7000/demo?k={'A' * 43}&t={token}",
    }[named_by]  # fmt: skip
    assert host.revokes(which).text == f"revoked {digest[:ID_CHARS]} (lab): nobody comes in with it any more"
    assert host.usable() == ["school"]


@pytest.mark.parametrize("which", ["", "nothing", f"farflung://example.org:7000/demo?k={'A' * 43}"])
def test_a_name_that_fits_no_invitation_revokes_none(which: str) -> None:
    host = Host()
    host.invites()
    with pytest.raises(UserError, match="there is no such invitation: farflung invite --list shows them"):
        host.revokes(which)
    assert len(host.usable()) == 1


def test_a_name_that_may_be_several_revokes_none_and_names_them() -> None:
    host = Host()
    ids = [token_digest(host.invites("lab")).hex()[:ID_CHARS] for _ in range(3)]
    with pytest.raises(UserError) as error:
        host.revokes("lab")
    assert (
        str(error.value) == f"'lab' may be {', '.join(f'{i} (lab)' for i in ids)}; name one of them by its id"
    )
    host.revokes(ids[0])
    with pytest.raises(UserError, match="may be"):
        host.revokes("lab")
    host.revokes(ids[2])
    host.revokes("lab")
    assert host.usable() == [], "of those with one note, the one that is left"


def test_an_invitation_is_revoked_once_and_its_guests_may_still_be_sent_away_later() -> None:
    host = Host()
    ann = host.brings("ann", host.invites("lab", uses=2))
    host.effects()
    told = host.revokes("lab", "it was posted").text
    assert told.endswith("; the 1 that came in by it stay: --guests sends them away, too")
    with pytest.raises(UserError, match="was revoked already"):
        host.revokes("lab", "again")
    assert host.kicked == [] and len(host.records()) == 1
    assert "sent 1 away" in host.revokes("lab", "after all", guests=True).text
    assert host.kicked == [(ann.peer, "its invitation was revoked: after all")]


def test_revoked_with_its_guests_those_that_are_here_go_and_nobody_else_does() -> None:
    host = Host()
    lab, school = host.invites("lab", uses=9), host.invites("school")
    ann, gone, bob = host.brings("ann", lab), host.brings("gone", lab), host.brings("bob", school)
    host.loses(gone)
    host.effects()
    told = host.revokes("lab", "closed", guests=True).text
    assert told.endswith("sent 1 away, who need another invitation to come again")
    assert host.kicked == [(ann.peer, "its invitation was revoked: closed")]
    assert host.register.guests == {bob.peer}
    [record] = host.records()
    assert isinstance(record, Revoked) and record.guests and record.reason == "closed"


# ---- who comes in by one ---------------------------------------------------------------------------------------


def test_an_invitation_is_good_until_the_very_moment_that_was_said() -> None:
    host = Host()
    token = host.invites(uses=9, lasts_s=60.0)
    host.core.now += 59.9
    assert host.says_hello(Guest(1), token) is None
    host.core.now += 0.1
    refused = host.says_hello(Guest(2), token)
    assert isinstance(refused, Refuse) and "has expired" in refused.reason
    assert host.says_hello(Guest(1, restarts=1), "") is None, "who came in while it was good comes again"


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=25),
)
def test_by_an_invitation_come_as_many_as_it_is_for_and_each_of_them_as_often_as_it_likes(
    uses: list[int], story: list[tuple[int, int]]
) -> None:
    """Whoever knocks with whichever token, in whatever order."""
    host = Host()
    tokens = [host.invites(uses=each) for each in uses]
    came: list[set[int]] = [set() for _ in uses]
    for number, at in story:
        at %= len(uses)
        known = any(number in those for those in came)
        let = host.says_hello(Guest(number), tokens[at])
        assert (let is None) == (known or len(came[at]) < uses[at])
        if let is None and not known:
            came[at].add(number)
    invitations = host.register.invitations.values()
    assert [len(each.guests) for each in invitations] == [len(those) for those in came]
    assert host.replayed().parts[NAME].invitations == host.register.invitations
