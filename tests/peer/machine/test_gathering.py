"""P19 at an archiver: what is fetched from whom and when, what is believed, and what is handed on."""

from __future__ import annotations

import msgspec

from farflung.collectives.round.effects import SendFrame
from farflung.collectives.round.kept import Given, KeptContributions
from farflung.collectives.round.pieces import Piece
from farflung.peer.identity import Identity
from farflung.peer.machine.effects import Effect, KeepContribution
from farflung.peer.machine.gathering import (
    ASK_AGAIN_S,
    AUTHORS_AT_ONCE,
    PATIENCE_S,
    Gathering,
    may_gather,
)
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Kind
from farflung.protocol.limits import ROUNDS_KEPT
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import CheckpointSection, MergeSection, RoundSection
from farflung.protocol.messages import Sent
from farflung.protocol.moments import Known
from farflung.protocol.round_words import Commit
from farflung.protocol.signed_words import Said, sent_part
from farflung.protocol.verdicts import Verdict
from rig.made_part import MANIFEST, TAG, MadePart, frame_of

RUN_ID, ROUND = bytes(16), 5
BOB, CYD = Identity.generate(), Identity.generate()


def sent_by(peer: str, chunk: int) -> bytes:
    return f"chunk {chunk} of {peer}".encode()


def said_by(who: Identity, round_no: int = ROUND, count: int = 2) -> bytes:
    hashes = b"".join(hash_bytes(sent_by(who.peer_id, chunk)) for chunk in range(count))
    bare = Sent(
        session=bytes(16), seq=1, round_no=round_no, hashes=hashes, tokens=1, steps=1, loss=None, used=(), seat=0,
        counted=b"", signature=b"",
    )  # fmt: skip
    sent = msgspec.structs.replace(bare, signature=who.sign(sent_part(RUN_ID, bare)))
    return msgspec.msgpack.encode(Said(who.public, sent))


def commit_with(*members: str, version: int = 3, round_no: int = ROUND) -> Commit:
    return Commit(version, round_no, members, (0.5,) * len(members), bytes(64), "int8", 0)


class Archiver:
    """Ann, who was not in the round herself; her fragment 0 has the chunks 0 and 1."""

    def __init__(self, wanted: bool = True) -> None:
        self.made = MadePart()
        self.made.founds()
        self.gathering = Gathering("ann", Known(MANIFEST, RUN_ID), self.made.part, wanted)

    def commits(
        self, *who: Identity, version: int = 3, round_no: int = ROUND, now: float = 0.0
    ) -> list[Effect]:
        members = tuple(each.peer_id for each in who)
        commit = commit_with(*members, version=version, round_no=round_no)
        return self.gathering.on_commit(commit, 0, None, now)

    def lists(self, who: Identity, raw: bytes = b"", sender: str = "") -> list[Effect]:
        frame = frame_of(Kind.SENT, 0, raw or said_by(who), round_no=ROUND)
        assert self.gathering.takes(sender or who.peer_id, frame, 0.0)
        return self.gathering.on_timer(0.0)

    def gives(self, who: Identity, chunk: int, payload: bytes = b"", now: float = 0.0) -> list[Effect]:
        payload = payload or sent_by(who.peer_id, chunk)
        taken = self.gathering.takes(
            who.peer_id, frame_of(Kind.CONTRIBUTION, chunk, payload, round_no=ROUND), now
        )
        return self.gathering.on_timer(now) if taken else []


def asked(effects: list[Effect]) -> list[tuple[str, Kind, int]]:
    frames = [each for each in effects if isinstance(each, SendFrame)]
    assert all(each.frame.header.round_no == ROUND for each in frames)
    return [(each.to, each.frame.header.kind, each.frame.header.chunk) for each in frames]


def kept(effects: list[Effect]) -> list[KeepContribution]:
    return [each for each in effects if isinstance(each, KeepContribution)]


def test_the_signed_list_is_fetched_first_and_then_the_chunks_on_it() -> None:
    ann = Archiver()
    assert asked(ann.commits(BOB)) == [(BOB.peer_id, Kind.WANT_SENT, 0)]
    wanted = [(BOB.peer_id, Kind.WANT_CONTRIBUTION, 0), (BOB.peer_id, Kind.WANT_CONTRIBUTION, 1)]
    assert asked(ann.lists(BOB)) == wanted
    assert not kept(ann.gives(BOB, 1))
    [whole] = kept(ann.gives(BOB, 0))
    assert whole.payloads == (sent_by(BOB.peer_id, 0), sent_by(BOB.peer_id, 1))
    assert whole.said.peer == BOB.peer_id and whole.commit.version == 3


def test_nothing_is_fetched_where_nobody_asked_for_it_or_nothing_is_kept() -> None:
    ann = Archiver(wanted=False)
    assert not ann.commits(BOB) and not ann.gathering.on_timer(9.0)
    saves = CheckpointSection(every_rounds=1)
    assert may_gather(Manifest(checkpoint=saves))
    assert not may_gather(Manifest(checkpoint=saves, merge=MergeSection(audit=0.0)))
    assert not may_gather(Manifest(checkpoint=saves, round=RoundSection(group=4))), "it could not be replayed"
    assert not may_gather(Manifest())


def test_what_its_author_did_not_sign_is_not_kept() -> None:
    other = msgspec.msgpack.decode(said_by(CYD), type=Said)
    stolen = msgspec.msgpack.encode(Said(BOB.public, other.sent))
    for raw in (said_by(CYD), stolen, said_by(BOB, round_no=4), said_by(BOB, count=1), b"noise"):
        ann = Archiver()
        ann.commits(BOB)
        assert not asked(ann.lists(BOB, raw)) and not kept(ann.gathering.on_timer(99.0))
        assert ann.made.part.counters.as_dict()["bad hash"] == 1


def test_who_gives_other_bytes_than_it_signed_is_not_asked_any_more_and_the_rest_is_kept() -> None:
    ann = Archiver()
    ann.commits(BOB)
    ann.lists(BOB)
    ann.gives(BOB, 0)
    [part] = kept(ann.gives(BOB, 1, b"other bytes"))
    assert part.payloads == (sent_by(BOB.peer_id, 0), b"")


def test_who_gives_nothing_is_asked_again_and_then_left() -> None:
    ann = Archiver()
    ann.commits(BOB)
    assert not asked(ann.gathering.on_timer(ASK_AGAIN_S / 2))
    assert asked(ann.gathering.on_timer(ASK_AGAIN_S)) == [(BOB.peer_id, Kind.WANT_SENT, 0)]
    assert not ann.gathering.on_timer(PATIENCE_S) and not ann.gathering.on_timer(9.0)


def test_while_its_bytes_come_in_an_author_is_not_asked_again_or_left() -> None:
    ann = Archiver()
    ann.commits(BOB)
    for second in range(1, 20):
        ann.gathering.on_arriving({BOB.peer_id}, float(second))
        assert not ann.gathering.on_timer(second + 0.5)


def test_what_the_authors_do_not_keep_any_more_is_given_up_with_what_came() -> None:
    ann = Archiver()
    ann.commits(BOB)
    ann.lists(BOB)
    ann.gives(BOB, 0)
    for later in range(1, ROUNDS_KEPT + 1):
        effects = ann.gathering.on_commit(
            commit_with("ann", version=3 + later, round_no=ROUND + later), 0, None, 0.0
        )
        assert len(kept(effects)) == (later == ROUNDS_KEPT)
    assert not ann.gives(BOB, 1)


def test_a_commit_that_is_told_twice_is_gathered_once() -> None:
    ann = Archiver()
    assert asked(ann.commits(BOB)) and not ann.commits(BOB)


def test_few_authors_are_asked_at_once_and_a_peer_begins_with_those_after_it() -> None:
    others = tuple(f"a{at:02d}" for at in range(6)) + ("zoe",)
    ann = Archiver()
    effects = ann.gathering.on_commit(commit_with(*others), 0, None, 0.0)
    assert [each[0] for each in asked(effects)] == ["zoe", *others[: AUTHORS_AT_ONCE - 1]]


def test_in_a_round_an_author_is_asked_for_one_chunk_at_a_time() -> None:
    ann = Archiver()
    ann.made.freezes(0)
    ann.made.opens(0, round_no=9)
    ann.commits(BOB)
    assert asked(ann.lists(BOB)) == [(BOB.peer_id, Kind.WANT_CONTRIBUTION, 0)]
    assert asked(ann.gives(BOB, 0)) == [(BOB.peer_id, Kind.WANT_CONTRIBUTION, 1)]


def test_what_it_owned_is_not_fetched_and_counts_only_if_it_is_on_the_list() -> None:
    ann = Archiver()
    ann.made.freezes(0)
    ann.made.opens(0, round_no=ROUND)
    flight = ann.made.lane(0).round
    assert flight is not None
    mine, other = sent_by(BOB.peer_id, 0), b"never signed"
    flight.held = {
        0: {BOB.peer_id: Piece(mine, hash_bytes(mine))},
        1: {BOB.peer_id: Piece(other, hash_bytes(other))},
    }
    ann.gathering.on_commit(commit_with(BOB.peer_id), 0, flight, 0.0)
    assert asked(ann.lists(BOB)) == [(BOB.peer_id, Kind.WANT_CONTRIBUTION, 1)]
    assert kept(ann.gives(BOB, 1))


def test_a_run_that_goes_back_voids_what_was_being_gathered() -> None:
    ann = Archiver()
    ann.commits(BOB)
    ann.gathering.go_back()
    assert not ann.gathering.on_timer(9.0) and not ann.gathering.finish()
    assert asked(ann.commits(BOB)), "the same version comes again"


def test_a_peer_that_leaves_hands_on_what_it_has() -> None:
    ann = Archiver()
    ann.commits(BOB)
    ann.lists(BOB)
    ann.gives(BOB, 1)
    [part] = kept(ann.gathering.finish())
    assert part.payloads == (b"", sent_by(BOB.peer_id, 1))


# ---- the author ------------------------------------------------------------------------------------------------


def test_an_author_gives_its_signed_list_as_it_gives_its_chunks() -> None:
    author = KeptContributions(TAG, 4, ROUNDS_KEPT)
    question = frame_of(Kind.WANT_SENT, 4, round_no=1).header
    author.on_commit(1, Given(1, {0: Piece(b"mine", hash_bytes(b"mine"))}))
    assert author.on_want("bob", question, False, 0.0) == (Verdict.STALE, [])
    author.on_signed(1, b"signed")
    verdict, [answer] = author.on_want("bob", question, False, 0.0)
    assert isinstance(answer, SendFrame) and verdict is Verdict.ACCEPTED
    assert (answer.frame.header.kind, answer.frame.payload) == (Kind.SENT, b"signed")
    author.on_commit(2, Given())
    author.on_commit(3, Given())
    assert author.signed_list(1) is None


def test_a_commit_that_is_told_again_takes_nothing_from_what_is_kept() -> None:
    """The second time the round is over, and has nothing to show."""
    author = KeptContributions(TAG, 4, ROUNDS_KEPT)
    author.on_commit(1, Given(1, {0: Piece(b"mine", hash_bytes(b"mine"))}))
    author.on_signed(1, b"signed")
    author.on_commit(1, Given())
    author.on_signed(1, b"")
    assert author.piece(1, 4) is not None and author.signed_list(1) is not None
