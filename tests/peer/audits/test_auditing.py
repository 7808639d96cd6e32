"""P19 at an auditor and at an author: what is fetched from whom and when, what is reported, and what liars get."""

from __future__ import annotations

import pytest
from msgspec.structs import replace as changed

from farflung.collectives.mesh.mesh_round import MeshKind
from farflung.collectives.round.effects import SendFrame
from farflung.collectives.round.pieces import ChunkPiece
from farflung.peer.audits.auditor import (
    ACCUSED_KEPT_S,
    ASK_AGAIN_S,
    ASK_AT_ONCE,
    GIVEN_MOST,
    PATIENCE_S,
    Auditor,
    KeptContributions,
    MergeAgain,
)
from farflung.peer.machine.effects import Effect, ToCoordinator
from farflung.peer.machine.fragment_rounds import Given
from farflung.peer.machine.replicas import Replica
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import FrameKind, Kind
from farflung.protocol.limits import ROUNDS_KEPT
from farflung.protocol.messages import Show, What
from farflung.protocol.mode_words import AuditChunks, Audited, ChunkVerdict, DrawnChunk
from farflung.protocol.round_words import THE_RESULT
from rig.made_part import TAG, UNUSABLE, MadePart, commit_of, frame_of

ROUND, CHUNK = 5, 1  # of fragment 0; also its number in the model
MERGED = b"the right sum"


def sent_by(peer: str) -> bytes:
    return f"what {peer} sent".encode()


def audit_of(*members: str, chunk: int = CHUNK, round_no: int = ROUND, result: bytes = MERGED) -> AuditChunks:
    hashes = b"".join(hash_bytes(sent_by(peer)) for peer in members)
    return AuditChunks(
        session=bytes(16), seq=1, round_no=round_no, version=3, fragment=0, members=members,
        weights=(1 / len(members),) * len(members), codecs=("fp32",) * len(members),
        chunks=(DrawnChunk(chunk, hash_bytes(result), hashes),),
    )  # fmt: skip


def kept_of(replica: Replica) -> KeptContributions:
    kept = replica.rounds.kept
    assert isinstance(kept, KeptContributions)
    return kept


def given(round_no: int, mine: dict[int, ChunkPiece], sums: dict[int, ChunkPiece] | None = None) -> Given:
    return Given(round_no, {Kind.CONTRIBUTION: mine, MeshKind.SUM: sums or {}})


class AuditorRig:
    """Ann, who sent something in the round herself."""

    def __init__(self) -> None:
        self.made = MadePart()
        tell = lambda round_no, chunks, group: ToCoordinator(  # noqa: E731
            Audited(session=bytes(16), seq=1, round_no=round_no, chunks=chunks, group=group)
        )
        self.auditing = Auditor("ann", TAG, self.made.part, tell)
        mine = {index: ChunkPiece(sent_by("ann"), hash_bytes(sent_by("ann"))) for index in range(2)}
        self.made.replica(0).rounds.kept.on_commit(ROUND, given(ROUND, mine))

    def gives(self, peer: str, payload: bytes | None = None, now: float = 0.0, **where: int) -> list[Effect]:
        what = {"round_no": ROUND, "version": 3} | where
        frame = frame_of(Kind.CONTRIBUTION, CHUNK, payload or sent_by(peer), **what)
        return self.auditing.on_frame(peer, frame, now) or []

    def show(self, peer: str) -> bytes | None:
        show = Show(
            session=bytes(16), seq=1, question=1, what=What.CONTRIBUTION, fragment=0, version=3, chunk=CHUNK, start=0,
            round_no=ROUND, peer=peer,
        )  # fmt: skip
        kept = self.auditing.shown(show, 0.0)
        return bytes(kept) if kept is not None else None


def asked(effects: list[Effect]) -> list[str]:
    found = [each for each in effects if isinstance(each, SendFrame)]
    assert all(each.frame.header.kind == Kind.WANT_CONTRIBUTION for each in found)
    assert all(each.frame.header.round_no == ROUND for each in found)
    return [each.to for each in found]


def verdicts(effects: list[Effect]) -> list[ChunkVerdict]:
    told = [each.message for each in effects if isinstance(each, ToCoordinator)]
    return [verdict for message in told if isinstance(message, Audited) for verdict in message.chunks]


def merge_of(effects: list[Effect]) -> MergeAgain:
    [merge] = [each for each in effects if isinstance(each, MergeAgain)]
    return merge


# ---- a right sum, a wrong one ---------------------------------------------------------------------------------


def test_the_others_contributions_are_fetched_and_merged_in_the_order_of_the_sum() -> None:
    auditor = AuditorRig()
    assert asked(auditor.auditing.on_audit(audit_of("ann", "bob", "cyd"), 0.0)) == ["bob", "cyd"]
    assert not auditor.gives("cyd")
    merge = merge_of(auditor.gives("bob"))
    assert merge.payloads == tuple(map(sent_by, ("ann", "bob", "cyd"))) and merge.weights == (1 / 3,) * 3
    assert verdicts(auditor.auditing.on_merged(merge, MERGED, 0.0)) == [ChunkVerdict(CHUNK, False)]
    assert auditor.show("bob") is None, "nothing is kept of a sum that is right"


def test_a_wrong_sum_is_told_and_its_contributions_are_kept_to_be_shown() -> None:
    auditor = AuditorRig()
    auditor.auditing.on_audit(audit_of("ann", "bob"), 0.0)
    merge = merge_of(auditor.gives("bob"))
    assert verdicts(auditor.auditing.on_merged(merge, b"another sum", 0.0)) == [ChunkVerdict(CHUNK, True)]
    assert auditor.show("bob") == sent_by("bob") and auditor.show("ann") == sent_by("ann")
    assert auditor.show("dan") is None


def test_no_other_chunk_is_audited_while_an_accusation_waits_to_be_seen() -> None:
    auditor = AuditorRig()
    auditor.auditing.on_audit(audit_of("ann", "bob"), 0.0)
    auditor.auditing.on_audit(audit_of("ann", "bob", chunk=0), 0.0)
    auditor.auditing.on_merged(merge_of(auditor.gives("bob")), b"another sum", 0.0)
    assert not asked(auditor.auditing.turn(30.0))
    assert asked(auditor.auditing.turn(61.0)) == ["bob"]


def test_bytes_that_are_no_contribution_make_the_sum_wrong() -> None:
    auditor = AuditorRig()
    audit = audit_of("bob")
    bad = DrawnChunk(CHUNK, hash_bytes(MERGED), hash_bytes(UNUSABLE))
    auditor.auditing.on_audit(AuditChunks(**{**_fields(audit), "chunks": (bad,)}), 0.0)
    assert verdicts(auditor.gives("bob", UNUSABLE)) == [ChunkVerdict(CHUNK, True)]


def _show(peer: str) -> Show:
    return Show(
        session=bytes(16), seq=1, question=1, what=What.CONTRIBUTION, fragment=0, version=3, chunk=CHUNK, start=0,
        round_no=ROUND, peer=peer,
    )  # fmt: skip


def _fields(audit: AuditChunks) -> dict[str, object]:
    return {name: getattr(audit, name) for name in audit.__struct_fields__}


def test_what_was_found_is_said_again_when_it_is_asked_again() -> None:
    auditor = AuditorRig()
    auditor.auditing.on_audit(audit_of("ann", "bob"), 0.0)
    auditor.auditing.on_merged(merge_of(auditor.gives("bob")), MERGED, 0.0)
    again = auditor.auditing.on_audit(audit_of("ann", "bob"), 9.0)
    assert verdicts(again) == [ChunkVerdict(CHUNK, False)] and not asked(again)


def test_an_accusation_that_can_not_be_shown_any_more_is_made_anew() -> None:
    auditor = AuditorRig()
    auditor.auditing.on_audit(audit_of("ann", "bob"), 0.0)
    auditor.auditing.on_merged(merge_of(auditor.gives("bob")), b"another sum", 0.0)
    auditor.auditing.turn(61.0)
    again = auditor.auditing.on_audit(audit_of("ann", "bob"), 62.0)
    assert asked(again) == ["bob"] and not verdicts(again)


# ---- what does not come --------------------------------------------------------------------------------------


def test_who_gives_nothing_is_asked_again_and_then_named() -> None:
    auditor = AuditorRig()
    auditor.auditing.on_audit(audit_of("ann", "bob", "cyd"), 0.0)
    auditor.gives("bob", now=0.5)
    assert asked(auditor.auditing.turn(ASK_AGAIN_S + 0.1)) == ["cyd"]
    assert verdicts(auditor.auditing.turn(0.6 + PATIENCE_S)) == [ChunkVerdict(CHUNK, False, ("cyd",))]


def test_while_its_bytes_come_in_nobody_is_asked_again_or_named() -> None:
    auditor = AuditorRig()
    auditor.auditing.on_audit(audit_of("ann", "bob"), 0.0)
    for second in range(1, 40):
        auditor.auditing.on_lines(set(), {"bob"}, float(second))
        assert not auditor.auditing.turn(second + 0.5)


def test_who_gives_other_bytes_than_it_signed_is_named_at_once() -> None:
    auditor = AuditorRig()
    auditor.auditing.on_audit(audit_of("ann", "bob", "cyd"), 0.0)
    assert verdicts(auditor.gives("bob", b"other bytes")) == [ChunkVerdict(CHUNK, False, ("bob",))]


def test_few_authors_are_asked_at_once_and_only_those_are_named() -> None:
    others = tuple(f"peer{at:02d}" for at in range(20))
    auditor = AuditorRig()
    assert asked(auditor.auditing.on_audit(audit_of(*others), 0.0)) == list(others[:ASK_AT_ONCE])
    assert asked(auditor.gives(others[0])) == [others[ASK_AT_ONCE]]
    [verdict] = verdicts(auditor.auditing.turn(PATIENCE_S + 1))
    assert set(verdict.missing) == set(others[1 : ASK_AT_ONCE + 1])


def test_what_a_former_life_of_mine_sent_is_gone() -> None:
    auditor = AuditorRig()
    told = auditor.auditing.on_audit(audit_of("ann", "bob", round_no=4), 0.0)
    assert verdicts(told) == [ChunkVerdict(CHUNK, False, ("ann",))]


@pytest.mark.parametrize("where", [{"round_no": ROUND + 1}, {"round_no": ROUND - 1}])
def test_frames_of_other_rounds_are_not_the_audits(where: dict[str, int]) -> None:
    auditor = AuditorRig()
    auditor.auditing.on_audit(audit_of("ann", "bob"), 0.0)
    frame = frame_of(Kind.CONTRIBUTION, CHUNK, sent_by("bob"), **where)
    assert not auditor.auditing.takes("bob", frame, 0.0)
    assert not auditor.auditing.takes(
        "dan", frame_of(Kind.CONTRIBUTION, CHUNK, sent_by("bob"), round_no=ROUND), 0.0
    )


# ---- what a coordinator may not ask ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        {"fragment": 9},
        {"weights": (1.0,)},
        {"codecs": ()},
        {"chunks": (DrawnChunk(99, bytes(32), bytes(64)),)},
        {"chunks": (DrawnChunk(0, bytes(32), bytes(32)),)},
    ],
)
def test_an_audit_that_does_not_fit_the_run_is_left_alone(damage: dict[str, object]) -> None:
    auditor = AuditorRig()
    audit = AuditChunks(**{**_fields(audit_of("ann", "bob")), **damage})  # type: ignore[arg-type]
    assert not auditor.auditing.on_audit(audit, 0.0)


def test_rounds_go_first_and_a_chunk_now_and_then_is_audited_in_a_run_whose_rounds_never_end() -> None:
    auditor = AuditorRig()
    auditor.made.founds()
    auditor.made.freezes(0)
    auditor.made.opens(0, round_no=9)
    auditor.auditing.on_audit(audit_of("bob"), 0.0)
    auditor.auditing.on_audit(audit_of("bob", chunk=0), 0.0)
    auditor.auditing.on_merged(merge_of(auditor.gives("bob")), MERGED, 0.1)
    assert not asked(auditor.auditing.turn(1.0))
    assert asked(auditor.auditing.turn(5.1)) == ["bob"]


# ---- the author ------------------------------------------------------------------------------------------------


def pieces(text: bytes = b"mine") -> dict[int, ChunkPiece]:
    return {0: ChunkPiece(text, hash_bytes(text))}


def want(
    kept: KeptContributions, now: float, sender: str = "bob", round_no: int = 1, in_round: bool = False
) -> object:
    verdict, answer = kept.on_want(
        sender, frame_of(Kind.WANT_CONTRIBUTION, 4, round_no=round_no).header, in_round, now
    )
    return [(verdict, bytes(each.frame.payload)) for each in answer if isinstance(each, SendFrame)] or verdict


def test_contributions_are_kept_until_the_commit_after_next() -> None:
    kept = KeptContributions(TAG, 4, ROUNDS_KEPT)
    kept.on_commit(1, given(1, pieces()))
    kept.on_commit(2, Given())
    assert kept.size_bytes == 4 and want(kept, 0.0) == [(Verdict.ACCEPTED, b"mine")]
    kept.on_commit(3, Given())
    assert kept.size_bytes == 0 and want(kept, 9.0) is Verdict.STALE


def test_what_the_coordinator_has_begun_to_look_at_is_kept_until_it_has_all_of_it() -> None:
    """Over a thin line that takes longer than two commits, and whoever has begun and stops gets a strike."""
    for asked_before, shown in ((True, sent_by("ann")), (False, None)):
        auditor = AuditorRig()
        if asked_before:
            assert auditor.show("ann") == sent_by("ann")
        for later in range(1, ROUNDS_KEPT + 1):
            auditor.made.replica(0).rounds.kept.on_commit(ROUND + later, Given())
        auditor.auditing.turn(ACCUSED_KEPT_S - 1)
        assert auditor.show("ann") == shown
    auditor.auditing.turn(3 * ACCUSED_KEPT_S)
    assert auditor.show("ann") is None


def test_a_commit_that_is_told_again_takes_nothing_from_what_is_kept() -> None:
    """The second time the round is over, and has nothing to show."""
    kept = KeptContributions(TAG, 4, ROUNDS_KEPT)
    kept.on_commit(1, given(1, {0: ChunkPiece(b"mine", hash_bytes(b"mine"))}))
    kept.on_commit(1, Given())
    assert kept.piece(1, 4) is not None


def test_where_the_run_audits_nothing_nothing_is_kept() -> None:
    kept = KeptContributions(TAG, 4, 0)
    kept.on_commit(1, given(1, pieces()))
    assert kept.size_bytes == 0


def test_a_question_draws_the_bytes_a_few_times_and_not_in_a_hurry() -> None:
    kept = KeptContributions(TAG, 4, ROUNDS_KEPT)
    kept.on_commit(1, given(1, pieces()))
    assert want(kept, 0.0) == [(Verdict.ACCEPTED, b"mine")]
    assert want(kept, 0.1) is Verdict.DUPLICATE
    answers = [want(kept, float(second)) for second in range(1, 9)]
    assert answers.count(Verdict.DUPLICATE) == 8 - (GIVEN_MOST - 1)
    assert want(kept, 9.0, sender="cyd") == [(Verdict.ACCEPTED, b"mine")], "another one has its own share"


def test_in_a_round_an_auditor_waits_once() -> None:
    kept = KeptContributions(TAG, 4, ROUNDS_KEPT)
    kept.on_commit(1, given(1, pieces()))
    assert want(kept, 0.0, in_round=True) is Verdict.ACCEPTED
    assert want(kept, 1.0, in_round=True) == [(Verdict.ACCEPTED, b"mine")]


def test_a_replica_keeps_what_a_commit_used_and_answers_old_rounds_beside_the_one_in_flight() -> None:
    made = MadePart()
    made.founds()
    made.freezes(0)
    made.opens(0)
    replica = made.replica(0)
    assert replica.rounds.flight is not None
    mine = {index: ChunkPiece(bytes([index]), hash_bytes(bytes([index]))) for index in range(2)}
    replica.rounds.flight.pieces.mine.update(mine)
    made.decides()
    replica.on_commit(commit_of(0), 0.0)
    question = frame_of(Kind.WANT_CONTRIBUTION, 1, round_no=1)
    verdict, answer = replica.on_round_frame("bob", question, 0.0)
    [sent] = [each for each in answer if isinstance(each, SendFrame)]
    assert verdict is Verdict.ACCEPTED and bytes(sent.frame.payload) == b"\x01"
    assert sent.frame.header.round_no == 1, "so that nobody takes it for one of the round in flight"
    verdict, answer = replica.on_round_frame("bob", frame_of(Kind.WANT_CONTRIBUTION, 1, round_no=7), 0.0)
    assert verdict is Verdict.STALE and not answer


def test_what_a_commit_used_is_kept_also_where_a_later_commit_is_heard_of_first() -> None:
    """Or an honest author had nothing to show, and got a strike for it."""
    made = MadePart()
    made.founds()
    made.freezes(0)
    made.opens(0)
    replica = made.replica(0)
    assert replica.rounds.flight is not None
    replica.rounds.flight.pieces.mine[1] = ChunkPiece(b"mine", hash_bytes(b"mine"))
    replica.on_commit(commit_of(0, round_no=2, version=2), 0.0)
    replica.on_commit(commit_of(0), 0.0)
    kept = kept_of(replica).piece(1, 1, flight=replica.rounds.flight)
    assert kept is not None and kept.payload == b"mine"
    assert kept_of(replica).piece(2, 1, flight=replica.rounds.flight) is None


def test_work_that_no_commit_used_is_not_kept() -> None:
    made = MadePart()
    made.founds()
    made.freezes(0)
    made.opens(0)
    replica = made.replica(0)
    assert replica.rounds.flight is not None
    replica.rounds.flight.pieces.mine[0] = ChunkPiece(b"x", hash_bytes(b"x"))
    replica.on_commit(commit_of(0, with_ann=False), 0.0)
    assert kept_of(replica).size_bytes == 0


# ---- rounds in groups --------------------------------------------------------------------------------------------


def of_sums(*makers: str) -> AuditChunks:
    """A result, which is made of what these added up."""
    fields = _fields(audit_of(*makers)) | {"codecs": ("bf16",) * len(makers), "of_sums": True}
    return AuditChunks(**fields)  # type: ignore[arg-type]


def sum_from(auditor: AuditorRig, peer: str, kind: FrameKind = MeshKind.SUM) -> list[Effect]:
    frame = frame_of(kind, CHUNK, sent_by(peer), round_no=ROUND, version=3)
    return auditor.auditing.on_frame(peer, frame, 0.0) or []


def test_a_result_of_groups_is_made_of_sums_and_these_are_asked_for() -> None:
    auditor = AuditorRig()
    effects = auditor.auditing.on_audit(of_sums("bob", "cyd"), 0.0)
    asked_for = [(each.to, each.frame.header.kind) for each in effects if isinstance(each, SendFrame)]
    assert asked_for == [("bob", MeshKind.WANT_SUM), ("cyd", MeshKind.WANT_SUM)]
    assert not sum_from(auditor, "bob") and not sum_from(auditor, "cyd", Kind.CONTRIBUTION)
    merge = merge_of(sum_from(auditor, "cyd"))
    assert merge.payloads == tuple(map(sent_by, ("bob", "cyd"))) and merge.group == THE_RESULT


def test_its_own_sum_an_auditor_has_and_shows_as_a_sum() -> None:
    auditor = AuditorRig()
    mine = {CHUNK: ChunkPiece(sent_by("ann"), hash_bytes(sent_by("ann")))}
    auditor.made.replica(0).rounds.kept.on_commit(ROUND + 1, given(ROUND + 1, {}, mine))
    audit = AuditChunks(**_fields(of_sums("ann", "bob")) | {"round_no": ROUND + 1})  # type: ignore[arg-type]
    asked_for = [each.to for each in auditor.auditing.on_audit(audit, 0.0) if isinstance(each, SendFrame)]
    assert asked_for == ["bob"]
    show = changed(_show("ann"), round_no=ROUND + 1)
    assert auditor.auditing.shown(show, 0.0) is None, "it contributed nothing"
    assert auditor.auditing.shown(changed(show, what=What.SUM), 0.0) == sent_by("ann")


def test_what_a_group_adds_is_merged_as_sums_are_and_the_answer_names_the_group() -> None:
    auditor = AuditorRig()
    audit = AuditChunks(**_fields(audit_of("ann", "bob")) | {"group": 2})  # type: ignore[arg-type]
    assert asked(auditor.auditing.on_audit(audit, 0.0)) == ["bob"]
    merge = merge_of(auditor.gives("bob"))
    assert merge.group == 2
    [told] = auditor.auditing.on_merged(merge, b"another sum", 0.0)
    assert isinstance(told, ToCoordinator) and isinstance(told.message, Audited)
    assert told.message.group == 2 and told.message.chunks == (ChunkVerdict(CHUNK, True),)
    assert auditor.show("bob") == sent_by("bob")
    assert auditor.auditing.shown(changed(_show("bob"), what=What.SUM), 0.0) is None


def test_the_result_and_what_a_group_adds_to_it_are_two_questions() -> None:
    auditor = AuditorRig()
    auditor.auditing.on_audit(audit_of("ann", "bob"), 0.0)
    auditor.auditing.on_merged(merge_of(auditor.gives("bob")), MERGED, 0.0)
    of_group = AuditChunks(**_fields(audit_of("ann", "bob")) | {"group": 0})  # type: ignore[arg-type]
    assert verdicts(auditor.auditing.on_audit(of_group, 0.0)) == []


def test_what_a_member_added_up_is_kept_as_long_as_what_it_contributed_whether_or_not_that_counted() -> None:
    kept = KeptContributions(TAG, 4, ROUNDS_KEPT)
    kept.on_commit(1, given(1, pieces(), pieces(b"summed")), counts=False)
    answers = [
        [each for each in kept.on_want("bob", frame_of(kind, 4, round_no=1).header, False, 0.0)[1]]
        for kind in (MeshKind.WANT_SUM, Kind.WANT_CONTRIBUTION)
    ]
    [[sent], nothing] = answers
    assert isinstance(sent, SendFrame) and sent.frame.header.kind == MeshKind.SUM and not nothing
    assert bytes(sent.frame.payload) == b"summed" and kept.size_bytes == 6
    kept.on_commit(2, given(1, pieces(), pieces(b"summed")))
    kept.on_commit(3, Given())
    assert kept.size_bytes == 0, "what I gave to another round is not this one's"
