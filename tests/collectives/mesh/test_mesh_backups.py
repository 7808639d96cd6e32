"""What an owner of a mesh adds to its own chunks is at another owner, too: so its death costs nobody its work."""

from __future__ import annotations

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from farflung.collectives.mesh.mesh_round import MeshRound, keeps, moved, spare_of
from farflung.collectives.round.effects import SendFrame
from farflung.collectives.round.member import MemberRound
from farflung.collectives.round.pieces import encoding_order
from farflung.protocol.digests import combined, hash_bytes, mask_of
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.round_words import MeshColumn, Plan

TAG = bytes(8)
NAMES = ("ann", "bob", "cyd", "dan", "eve")
OWNERS = (0, 0, 0, 0, 1, 1, 2, 2, 3, 3)  # Eve owns nothing
CHUNKS = range(len(OWNERS))


def plan(owners: tuple[int, ...] = OWNERS, epoch: int = 1, me: str = "ann") -> Plan:
    """As I hear of it: Zoe owns all chunks of the only other group."""
    mine = owners.count(NAMES.index(me))
    column = MeshColumn(0, 2, (me, "zoe"), (0, 1) * mine, (0,) * mine)
    return Plan(1, epoch, 0, NAMES, owners, ("fp32",) * len(NAMES), column=column)


def sent_by(member: MeshRound) -> list[tuple[int, str]]:
    payloads = {chunk: b"%d" % chunk for chunk in encoding_order(member.plan, member.me)}
    effects = [effect for effect in member.on_encoded(payloads) if isinstance(effect, SendFrame)]
    return [(effect.frame.header.chunk, effect.to) for effect in effects]


def contribution(chunk: int) -> Frame:
    return with_payload(Header(Kind.CONTRIBUTION, TAG, 1, 0, 0, chunk), b"a piece")


def test_what_is_my_own_goes_to_another_owner_after_all_else() -> None:
    sent = sent_by(MeshRound("ann", plan(), TAG, 1.0, 0.0))
    assert [to for chunk, to in sent[:6]] and {chunk for chunk, _ in sent[:6]} == set(range(4, 10))
    assert sent[6:] == [(chunk, spare_of(plan(), chunk)) for chunk in range(4)]
    assert {to for _, to in sent[6:]} <= {"bob", "cyd", "dan"}, "who owns chunks has a line for it"


def test_in_a_flat_round_nobody_sends_more_than_it_must() -> None:
    flat = replace(plan(), column=UNSET)
    assert {chunk for chunk, _ in sent_by(MemberRound("ann", flat, TAG, 1.0, 0.0))} == set(range(4, 10))


def test_who_owns_alone_has_nobody_who_could_keep_it() -> None:
    alone = plan((0,) * len(OWNERS))
    assert all(spare_of(alone, chunk) is None for chunk in CHUNKS)


def test_a_spare_piece_is_shown_and_waits_until_it_is_needed() -> None:
    bob = MeshRound("bob", plan(me="bob"), TAG, 1.0, 0.0)
    before = bob.counts
    assert not bob.is_early("ann", contribution(0))
    assert bob.on_frame("ann", contribution(0), 0.0) == (Verdict.ACCEPTED, [])
    assert bob.on_frame("ann", contribution(0), 0.0)[0] is Verdict.DUPLICATE
    assert bob.counts == before, "it is no part of what is due to an owner"
    assert bob.progress().held == {"ann": (mask_of([0]), combined([(0, hash_bytes(b"a piece"))]))}
    bob.on_plan(plan((1, *OWNERS[1:]), epoch=2, me="bob"), 1.0)
    assert bob.counts[0] == 1 and "ann" in bob.pieces.held[0], "as an heir it has it"


@pytest.mark.parametrize(("sender", "chunk"), [("ann", 4 + 2), ("cyd", 0), ("eve", 9)])
def test_P8_what_is_not_its_senders_own_is_no_spare(sender: str, chunk: int) -> None:
    assert not keeps(plan(), sender, chunk)
    bob = MeshRound("bob", plan(me="bob"), TAG, 1.0, 0.0)
    assert bob.is_early(sender, contribution(chunk)), "it may have overtaken a plan"
    assert bob.on_frame(sender, contribution(chunk), 0.0) == (Verdict.STALE, [])


def test_when_a_keeper_is_gone_what_it_kept_goes_to_another_one_and_all_else_stays() -> None:
    before = plan()
    kept = {chunk: spare_of(before, chunk) for chunk in range(4)}
    gone = kept[0]
    assert gone is not None
    at = NAMES.index(gone)
    heir = next(other for other in (1, 2, 3) if other != at)
    after = plan(tuple(heir if owner == at else owner for owner in OWNERS), epoch=2)
    again = moved(before, after, list(range(4)))
    assert 0 in again and all(kept[chunk] == gone or spare_of(after, chunk) == NAMES[heir] for chunk in again)
    ann = MeshRound("ann", before, TAG, 1.0, 0.0)
    sent_by(ann)
    told = [effect for effect in ann.on_plan(after, 1.0) if isinstance(effect, SendFrame)]
    own = [(each.frame.header.chunk, each.to) for each in told if each.frame.header.chunk < 4]
    assert own == [(chunk, spare_of(after, chunk)) for chunk in again]
