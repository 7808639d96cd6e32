"""A replica: its states, told as transcripts that a person can read, and the rules that hold in each of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from msgspec.structs import replace

from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.effects import Merge, Seal, SendFrame
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import (
    Effect,
    ProveHolding,
    Serve,
)
from farflung.peer.machine.fragment_rounds import ROLES, Contributing, Idle, Merged, Unsure
from farflung.peer.machine.heartbeat import _fragment_beat
from farflung.peer.machine.held_fragment import STANDS, Current, Empty, Hashing, Rolling, VoidHashing
from farflung.peer.machine.machine import MemberMachine
from farflung.peer.machine.replicas import Replica
from farflung.peer.machine.trainer_proxy import FragmentWork
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, bare_answer, with_payload
from farflung.protocol.messages import FragmentTick
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Commit, Decision, Plan
from farflung.protocol.states import IllegalMove
from farflung.simulator.world import simulate
from rig.machine_transcript import Transcript, told
from rig.made_part import peer_with

PRODUCT = Path(__file__).resolve().parents[3]
TAG = bytes(8)
MEMBERS = ("ann", "bob")
PLAN = Plan(1, 1, 0, MEMBERS, (0, 1), ("fp32", "fp32"), 0)  # ann owns chunk 0, bob chunk 1
DECISION = Decision(1, 1, (0.5, 0.5), {})
RESULTS = [b"new zero", b"new one "]
COMMIT = Commit(1, 1, MEMBERS, (0.5, 0.5), b"".join(map(hash_bytes, RESULTS)), "fp32", 0)
COMMIT_2 = Commit(2, 2, MEMBERS, (0.5, 0.5), COMMIT.hashes, "fp32", 0)
WITHOUT_ANN = Commit(1, 1, MEMBERS, (0.0, 1.0), COMMIT.hashes, "fp32", 0)
NEXT = [b"their 0", b"their 1"]
FROZEN = Frozen(slot=2, tokens=100, steps=4, used=(), loss=None)


def tick(version: int, verified: bool = False, round_no: int = 0, **more: object) -> FragmentTick:
    plain = {"digests": (), "donors": (), "sent_seen": False, "progress_seen": 0}
    return FragmentTick(
        fragment=0, version=version, verified=verified, round_no=round_no, **{**plain, **more}
    )  # type: ignore[arg-type]


def contribution(sender: str, chunk: int) -> Frame:
    header = Header(Kind.CONTRIBUTION, TAG, round_no=1, decision_no=0, version=0, chunk=chunk)
    return with_payload(header, f"{sender}'s {chunk}".encode())


def result(chunk: int) -> Frame:
    header = Header(Kind.RESULT, TAG, round_no=1, decision_no=1, version=0, chunk=chunk)
    return with_payload(header, RESULTS[chunk])


def sent(effects: list[Effect], to: str) -> list[Header]:
    return [each.frame.header for each in effects if isinstance(each, SendFrame) and each.to == to]


class Ann:
    """Her replica of two chunks, and the transcript of what happened to it."""

    def __init__(self) -> None:
        self.replica = Replica("ann", TAG, Fragment(0, 0, 2), ResultLog(keep_versions=3))
        self.tells = Transcript(
            lambda: f"{type(self.replica.held.stand).__name__}/{type(self.replica.rounds.role).__name__}"
        )

    def moves_on(self) -> list[Effect]:
        return self.replica.advance(0.0)

    @property
    def shown(self) -> bytes:
        """As her beat has it."""
        return _fragment_beat(self.replica, FragmentWork(0), begins_more=True).shown

    def founds(self) -> None:
        self.replica.held.fill()
        self.tells("the trainer writes version 0", self.replica.found())
        self.seals(0, b"digest 0")
        self.replica.on_tick(tick(0, verified=True))
        self.tells("the coordinator confirms it")

    def contributes(self) -> None:
        self.tells("round 1 opens, and her work is frozen", self.replica.on_plan(PLAN, FROZEN, 0.0))
        assert self.replica.rounds.flight is not None
        made = self.replica.rounds.flight.on_encoded({0: b"ann's 0", 1: b"ann's 1"})
        self.tells("her work is encoded", made)

    def merges(self, all_of_it: bool = True) -> None:
        _, effects = self.replica.on_round_frame("bob", contribution("bob", 0), 0.0)
        self.tells("bob's chunk comes", effects)
        assert self.replica.rounds.flight is not None
        effects = self.replica.rounds.flight.on_decision(DECISION, 0.0)
        self.tells("both are to be merged", effects)
        [merge] = [effect for effect in effects if isinstance(effect, Merge)]
        assert self.replica.rounds.flight is not None
        self.tells("her chunk is merged", self.replica.rounds.flight.owner.on_calculated(merge, RESULTS[0]))
        if not all_of_it:
            return
        _, effects = self.replica.on_round_frame("bob", result(1), 0.0)
        self.tells("bob's result comes", effects)

    def commits(self, commit: Commit = COMMIT) -> None:
        self.replica.on_commit(commit, 0.0)
        self.tells(f"version {commit.version} is committed", self.moves_on())

    def gets(self, frame: Frame) -> list[Effect]:
        self.replica.held.on_piece("bob", frame)
        return self.moves_on()

    def is_torn(self, version: int = 1) -> list[Effect]:
        """Chunk 1's result was kept by nobody, so its state of that version comes, and nothing else."""
        theirs = [hash_bytes(piece) for piece in NEXT]
        self.replica.on_tick(tick(version, digests=((version, root_of(theirs)),), donors=("bob",)))
        for want in sent(self.replica.advance(0.0), "bob"):
            if want.chunk == 1:
                self.replica.held.on_piece("bob", bare_answer(Kind.MISSING, want))
        self.replica.advance(9.0)  # after a pause
        self.replica.held.on_piece(
            "bob", with_payload(Header(Kind.MANIFEST, TAG, version=version), b"".join(theirs))
        )
        state = with_payload(Header(Kind.STATE, TAG, version=version, chunk=1), NEXT[1])
        assert self.replica.held.on_piece("bob", state) == Verdict.ACCEPTED
        return self.replica.advance(9.0)

    def seals_what_arrived(self) -> list[Effect]:
        effects = self.moves_on()
        assert any(isinstance(effect, Seal) for effect in effects)
        self.replica.on_sealed(0, root_of([LISTED]))
        return effects

    def seals(self, version: int, digest: bytes = b"a digest") -> None:
        settled = self.replica.on_sealed(version, digest)
        work = "" if settled is None or settled.consumed is None else "; her work is in it"
        lost = "; she lost track" if settled is not None and settled.lost_track else ""
        self.tells(f"version {version} is hashed{work}{lost}", self.replica.rounds.take_resolved())


def ann_in_the_round() -> Ann:
    ann = Ann()
    ann.founds()
    ann.contributes()
    ann.tells.lines.clear()
    return ann


def test_a_round_that_commits() -> None:
    ann = Ann()
    ann.founds()
    ann.contributes()
    ann.merges()
    ann.commits()
    ann.seals(1)
    assert ann.tells.text == told("""
        the trainer writes version 0
            Empty/Idle -> Hashing/Idle
            Seal version 0, fragment 0
        version 0 is hashed
            Hashing/Idle -> Current/Idle
        the coordinator confirms it
        round 1 opens, and her work is frozen
            Current/Idle -> Current/Contributing
            Encode round_no 1, slot 2, codec fp32, order [1 0], fragment 0
        her work is encoded
            to bob: CONTRIBUTION chunk 1
        bob's chunk comes
        both are to be merged
            Merge round_no 1, decision_no 1, chunk 0, payloads [ann's 0 bob's 0], weights [0.5 0.5]
        her chunk is merged
            to bob: RESULT chunk 0
        bob's result comes
        version 1 is committed
            Current/Contributing -> Hashing/Merged
            Resolve slot 2, used, fragment 0
            KeepBefore fragment 0, version 0
            Roll chunk 0, version 1, payload new zero, factor 1
            Roll chunk 1, version 1, payload new one , factor 1
            Seal version 1, fragment 0
        version 1 is hashed; her work is in it
            Hashing/Merged -> Current/Idle
    """)


def test_P6_an_aborted_round_keeps_the_work() -> None:
    ann = ann_in_the_round()
    ann.replica.rounds.on_aborted(1)
    ann.tells("round 1 is aborted", ann.moves_on())
    again = Plan(2, 1, 0, MEMBERS, (0, 1), ("fp32", "fp32"), 0)
    ann.tells("round 2 opens from the same version", ann.replica.on_plan(again, FROZEN, 1.0))
    assert ann.tells.text == told("""
        round 1 is aborted
            Current/Contributing -> Current/Idle
            Resolve slot 2, not used, fragment 0
        round 2 opens from the same version
            Current/Idle -> Current/Contributing
            Encode round_no 2, slot 2, codec fp32, order [1 0], fragment 0
    """)


def test_P6_a_commit_without_her_work_leaves_it_to_her() -> None:
    ann = ann_in_the_round()
    ann.merges()
    ann.tells.lines.clear()
    ann.commits(WITHOUT_ANN)
    ann.seals(1)
    assert ann.tells.text == told("""
        version 1 is committed
            Current/Contributing -> Hashing/Idle
            Resolve slot 2, not used, fragment 0
            KeepBefore fragment 0, version 0
            Roll chunk 0, version 1, payload new zero, factor 1
            Roll chunk 1, version 1, payload new one , factor 1
            Seal version 1, fragment 0
        version 1 is hashed
            Hashing/Idle -> Current/Idle
    """)


def test_P7_who_missed_a_commit_does_not_know_whether_it_used_the_work() -> None:
    ann = ann_in_the_round()
    ann.commits(Commit(3, 3, ("bob",), (1.0,), COMMIT.hashes, "fp32", 0))
    ann.replica.on_tick(tick(9, donors=("bob",)))
    ann.tells("the run is far ahead", ann.moves_on())
    ann.replica.held.fill()
    ann.replica.unfilled(True, {0: (9, b""), 1: (9, b"")})
    ann.tells("pieces of version 9 stand in the state", ann.moves_on())
    ann.seals(9)
    assert ann.tells.text == told("""
        version 3 is committed
            Current/Contributing -> Current/Unsure
        the run is far ahead
            Current/Unsure -> Empty/Unsure
        pieces of version 9 stand in the state
            Empty/Unsure -> Hashing/Unsure
            Seal version 9, fragment 0
        version 9 is hashed; she lost track
            Hashing/Unsure -> Current/Idle
            Resolve slot 2, not used, fragment 0
    """)


def test_work_that_is_not_finite_is_withdrawn_and_she_stays_an_owner() -> None:
    ann = Ann()
    ann.founds()
    ann.tells.lines.clear()
    ann.tells("round 1 opens, and her work is frozen", ann.replica.on_plan(PLAN, FROZEN, 0.0))
    ann.replica.rounds.on_unusable()
    ann.tells("it holds a NaN", ann.moves_on())
    ann.commits()
    assert ann.tells.text == told("""
        round 1 opens, and her work is frozen
            Current/Idle -> Current/Contributing
            Encode round_no 1, slot 2, codec fp32, order [1 0], fragment 0
        it holds a NaN
            Current/Contributing -> Current/Owning
        version 1 is committed
            Current/Owning -> Current/Idle
    """)


def test_P2_the_run_goes_back_while_a_version_is_hashed() -> None:
    ann = ann_in_the_round()
    ann.merges()
    ann.commits()
    ann.tells.lines.clear()
    ann.replica.go_back(0, b"digest 0")
    ann.tells("the run is at version 0 again", ann.moves_on())
    ann.replica.on_sealed(1, b"digest 1")
    ann.tells("version 1 is hashed", ann.moves_on())
    assert ann.tells.text == told("""
        the run is at version 0 again
            Hashing/Merged -> VoidHashing/Idle
        version 1 is hashed
            VoidHashing/Idle -> Empty/Idle
    """)


def test_the_run_goes_back_to_exactly_what_she_holds() -> None:
    ann = ann_in_the_round()
    ann.replica.go_back(0, b"digest 0")
    ann.tells("the run is at version 0 again", ann.moves_on())
    assert ann.tells.text == told("""
        the run is at version 0 again
            Current/Contributing -> Current/Idle
            Resolve slot 2, not used, fragment 0
    """)
    assert not ann.replica.held.serves, "it is confirmed anew, in the new era"


def test_P4_a_state_that_is_not_the_runs_is_forgotten_and_fetched() -> None:
    ann = Ann()
    ann.founds()
    ann.tells.lines.clear()
    theirs = [hash_bytes(piece) for piece in (b"their 0", b"their 1")]
    differs = ann.replica.on_tick(tick(0, digests=((0, root_of(theirs)),), donors=("bob",)))
    assert differs
    ann.tells("the run's digest is another one", ann.moves_on())
    hashes = with_payload(Header(Kind.MANIFEST, TAG, version=0, chunk=0), b"".join(theirs))
    ann.tells("the list of hashes comes", ann.gets(hashes))
    for chunk, piece in enumerate((b"their 0", b"their 1")):
        state = with_payload(Header(Kind.STATE, TAG, version=0, chunk=chunk), piece)
        ann.tells(f"bob's chunk {chunk} comes", ann.gets(state))
    ann.seals(0, root_of(theirs))
    assert ann.tells.text == told("""
        the run's digest is another one
            Current/Idle -> Empty/Idle
            to bob: WANT_MANIFEST chunk 0, version 0
            to bob: WANT_STATE chunk 0, version 0
        the list of hashes comes
            to bob: WANT_STATE chunk 1, version 0
        bob's chunk 0 comes
            Install chunk 0, version 0, payload their 0
        bob's chunk 1 comes
            Empty/Idle -> Hashing/Idle
            Install chunk 1, version 0, payload their 1
            Seal version 0, fragment 0
        version 0 is hashed
            Hashing/Idle -> Current/Idle
    """)


def test_P4_a_chunk_that_came_as_the_state_of_a_newer_version_is_served_as_no_older_one() -> None:
    """One result was kept by nobody, so that chunk comes whole: until all are there, nothing is served."""
    ann = Ann()
    ann.founds()
    [served] = ann.replica.source.answer("bob", Header(Kind.WANT_STATE, TAG, version=0, chunk=0), 0.0)
    assert not isinstance(served, SendFrame)
    assert ann.replica.held.serves
    ann.replica.on_commit(COMMIT, 0.0)
    ann.is_torn()
    assert (
        isinstance(ann.replica.held.stand, Rolling)
        and not ann.replica.held.serves
        and ann.replica.held.version == 0
    )
    [missing] = ann.replica.source.answer("bob", Header(Kind.WANT_STATE, TAG, version=0, chunk=0), 0.0)
    assert isinstance(missing, SendFrame) and missing.frame.header.kind == Kind.MISSING


def test_P7_who_was_torn_and_reads_an_older_checkpoint_consumes_no_work_for_it() -> None:
    """A commit had used her work, and nobody can give her what it led to."""
    ann = ann_in_the_round()
    ann.merges(all_of_it=False)
    ann.replica.on_commit(COMMIT, 0.0)
    ann.replica.on_commit(COMMIT_2, 0.0)
    ann.is_torn(version=2)
    assert isinstance(ann.replica.held.stand, Rolling) and isinstance(ann.replica.rounds.role, Merged)
    ann.replica.held.fill()
    ann.replica.filled(0)
    settled = ann.replica.on_sealed(0, b"digest 0")
    assert settled is not None and settled.consumed is None and settled.lost_track
    assert isinstance(ann.replica.rounds.role, Idle) and ann.replica.held.whole


def test_what_the_trainer_dropped_is_disowned_wherever_it_stands() -> None:
    ann = ann_in_the_round()
    ann.replica.rounds.disown()
    assert isinstance(ann.replica.rounds.role, Contributing) and ann.replica.rounds.role.contribution.disowned
    ann.merges()
    ann.replica.on_commit(COMMIT, 0.0)
    assert isinstance(ann.replica.rounds.role, Merged) and ann.replica.rounds.role.contribution.disowned
    unsure = ann_in_the_round()
    unsure.replica.on_commit(Commit(3, 3, ("bob",), (1.0,), COMMIT.hashes, "fp32", 0), 0.0)
    unsure.replica.rounds.disown()
    assert isinstance(unsure.replica.rounds.role, Unsure) and unsure.replica.rounds.role.contribution.disowned


def test_no_round_opens_over_work_that_a_commit_used() -> None:
    ann = ann_in_the_round()
    ann.replica.on_commit(COMMIT, 0.0)
    assert ann.replica.on_plan(Plan(2, 1, 0, MEMBERS, (0, 1), ("fp32", "fp32"), 0), FROZEN, 0.0) == []
    assert isinstance(ann.replica.rounds.role, Merged) and ann.replica.rounds.sent_slot == FROZEN.slot


def test_a_damaged_answer_is_asked_for_again_elsewhere() -> None:
    ann = Ann()
    ann.replica.on_tick(tick(0, digests=((0, b"d" * 32),), donors=("bob", "cyd")))
    sent = [effect for effect in ann.moves_on() if isinstance(effect, SendFrame)]
    first = next(send for send in sent if send.frame.header.kind == Kind.WANT_MANIFEST)
    ann.replica.held.catch.fetcher.on_spoiled(first.to, Header(Kind.MANIFEST, TAG, version=0, chunk=0))
    again = [effect for effect in ann.moves_on() if isinstance(effect, SendFrame)]
    assert [(s.to != first.to, s.frame.header.kind) for s in again] == [(True, Kind.WANT_MANIFEST)]


# ---- what she gives before she is whole ---------------------------------------------------------------------------

PIECES = [b"piece zero", b"piece one "]
LISTED = b"".join(map(hash_bytes, PIECES))


def ann_with_one_piece() -> Ann:
    ann = Ann()
    ann.replica.on_tick(tick(0, digests=((0, root_of([LISTED])),), donors=("bob",), fellows=("cyd",)))
    ann.moves_on()
    for frame in (
        with_payload(Header(Kind.MANIFEST, TAG), LISTED),
        with_payload(Header(Kind.STATE, TAG, chunk=1), PIECES[1]),
    ):
        assert ann.replica.held.on_piece("bob", frame) == Verdict.ACCEPTED
    ann.moves_on()
    return ann


def wanted(kind: Kind, chunk: int = 0) -> Header:
    return Header(kind, TAG, chunk=chunk)


def told_to(sender: str, effects: list[Effect]) -> list[Frame]:
    return [each.frame for each in effects if isinstance(each, SendFrame) and each.to == sender]


def test_P4_a_piece_that_was_checked_is_given_on_before_she_is_whole_and_no_other() -> None:
    ann = ann_with_one_piece()
    assert ann.replica.source.answer("cyd", wanted(Kind.WANT_STATE, 1), 0.0) == [
        Serve("cyd", Kind.STATE, 1, 0, 0, hash_bytes(PIECES[1]))
    ]
    [missing] = told_to("cyd", ann.replica.source.answer("cyd", wanted(Kind.WANT_STATE, 0), 0.0))
    assert missing.header.kind == Kind.MISSING
    [listing] = told_to("cyd", ann.replica.source.answer("cyd", wanted(Kind.WANT_MANIFEST), 0.0))
    assert (listing.header.kind, bytes(listing.payload)) == (Kind.MANIFEST, LISTED)
    ann.replica.on_tick(tick(0, digests=((0, b"n" * 32),), donors=("bob",)))
    for want in (wanted(Kind.WANT_STATE, 1), wanted(Kind.WANT_MANIFEST)):
        [frame] = told_to("cyd", ann.replica.source.answer("cyd", want, 0.0))
        assert frame.header.kind == Kind.MISSING, "the run was founded anew: it is a piece of nothing"


def test_P6_a_list_of_an_older_version_is_asked_of_her_in_vain_but_answered_with_hers() -> None:
    """Where a question takes longer than a round, she has left that version whenever it comes."""
    ann = ann_at_version_1()
    ann.replica.on_tick(tick(1, verified=True, digests=((1, b"a" * 32),)))
    older, newer = wanted(Kind.WANT_MANIFEST), Header(Kind.WANT_MANIFEST, TAG, version=2)
    assert ann.replica.source.answer("cyd", older, 0.0) == [Serve("cyd", Kind.MANIFEST, 0, 1, 0)]
    [missing] = told_to("cyd", ann.replica.source.answer("cyd", newer, 0.0))
    assert missing.header.kind == Kind.MISSING


def test_she_tells_who_asks_what_she_has_and_again_when_that_is_more() -> None:
    ann = ann_with_one_piece()
    ann.replica.source.answer("cyd", wanted(Kind.WANT_HAVE), 0.0)
    [word] = [each for each in told_to("cyd", ann.moves_on()) if each.header.kind == Kind.HAVE]
    assert bytes(word.payload) == b"\2\1", "chunk 1, and chunk 0 is coming"
    known = replace_header(wanted(Kind.WANT_HAVE), word.header.decision_no)
    ann.replica.source.answer("cyd", known, 0.0)
    assert not told_to("cyd", ann.replica.advance(1.0))
    ann.replica.held.on_piece("bob", with_payload(Header(Kind.STATE, TAG, chunk=0), PIECES[0]))
    [word] = told_to("cyd", [*ann.seals_what_arrived(), *ann.replica.advance(2.0)])
    assert bytes(word.payload) == b"\3\0" and not ann.replica.held.serves
    assert ann.replica.source.answer("cyd", wanted(Kind.WANT_STATE, 0), 0.0) == [
        Serve("cyd", Kind.STATE, 0, 0, 0)
    ]


def replace_header(header: Header, decision_no: int) -> Header:
    return Header(header.kind, header.run_tag, decision_no=decision_no, chunk=header.chunk)


# ---- what she calculated, and what is told against it -------------------------------------------------------------


def ann_at_version_1() -> Ann:
    """She calculated it from version 0, which was confirmed."""
    ann = ann_in_the_round()
    ann.merges()
    ann.commits()
    ann.seals(1, b"a" * 32)
    ann.moves_on()
    ann.tells.lines.clear()
    return ann


OTHERS = tick(1, digests=((1, b"x" * 32),), donors=("bob",))


def test_P18_what_she_calculated_she_keeps_whatever_digest_the_run_names() -> None:
    ann = ann_at_version_1()
    assert not ann.replica.on_tick(OTHERS)
    assert (ann.replica.held.version, ann.replica.held.digest) == (1, b"a" * 32)
    assert ann.replica.held.before is not None and ann.replica.held.before[0] == 0, "it can still be shown"


def test_P18_what_is_proven_wrong_she_gives_up_and_takes_the_runs() -> None:
    ann = ann_at_version_1()
    assert not ann.replica.on_tick(replace(OTHERS, refuted=b"z" * 32)), "another one was refuted"
    assert ann.replica.on_tick(replace(OTHERS, refuted=b"a" * 32))
    assert ann.replica.held.version == -1 and ann.replica.held.before is None


def test_P18_what_the_run_has_confirmed_need_not_be_shown_any_more_and_can_be_gone_back_from() -> None:
    ann = ann_at_version_1()
    ann.replica.on_tick(tick(1, verified=True, digests=((1, b"a" * 32),)))
    before = ann.replica.held.before
    assert before is not None and before[0] == 0
    assert ann.replica.go_back(*before), "what it was is what the run is at"
    assert ann.replica.held.filling and ann.replica.held.before is None


@pytest.mark.parametrize(("version", "digest"), [(1, b"a" * 32), (0, b"other"), (0, None)])
def test_she_goes_back_by_what_she_was_to_no_other_state(version: int, digest: bytes | None) -> None:
    ann = ann_at_version_1()
    assert not ann.replica.go_back(version, digest)
    assert (ann.replica.held.version, ann.replica.held.digest) == ((1, b"a" * 32) if version else (-1, b""))


def test_P4_a_true_piece_that_nobody_asked_for_tears_nothing_that_is_whole() -> None:
    ann = ann_at_version_1()
    theirs = [hash_bytes(piece) for piece in NEXT]
    ann.replica.on_tick(tick(2, digests=((2, root_of(theirs)),), donors=("bob",)))
    ann.replica.held.on_piece("bob", with_payload(Header(Kind.MANIFEST, TAG, version=2), b"".join(theirs)))
    for chunk in (0, 1):
        state = with_payload(Header(Kind.STATE, TAG, version=2, chunk=chunk), NEXT[chunk])
        assert ann.replica.held.on_piece("eve", state) == Verdict.STALE
    assert ann.replica.held.whole and ann.replica.held.version == 1


def test_P18_what_was_fetched_proves_nothing() -> None:
    ann = ann_at_version_1()
    ann.replica.held.fill()
    ann.replica.unfilled(True, {0: (1, b""), 1: (1, b"")})
    assert ann.replica.held.before is None
    assert ann.replica.held.version == -1


def test_P18_a_commit_brings_the_nonce_and_what_it_leads_to_is_shown_with_the_digest() -> None:
    nonce, value = hash_bytes(b"nonce"), hash_bytes(b"value")
    ann = ann_in_the_round()
    ann.merges()
    ann.replica.on_commit(COMMIT, 0.0, nonce)
    proofs = [each for each in ann.moves_on() if isinstance(each, ProveHolding)]
    assert proofs == [ProveHolding(0, 1, nonce)], (
        "asked for behind the hashing, so that it is of what was hashed"
    )
    ann.replica.on_sealed(1, b"a" * 32)
    assert ann.replica.held.grounds.is_proving(1) and ann.shown == b""
    ann.replica.held.grounds.on_proven(1, nonce, value)
    assert not ann.replica.held.grounds.is_proving(1) and ann.shown == nonce[:8] + value
    ann.replica.on_tick(replace(OTHERS, refuted=b"a" * 32))
    assert ann.shown == b"", "it is not held any more"


def test_P18_who_is_told_a_nonce_of_what_she_holds_shows_it() -> None:
    nonce = hash_bytes(b"nonce")
    ann = Ann()
    ann.founds()
    ann.replica.on_tick(tick(0, nonce_for=0, nonce=nonce))
    assert ProveHolding(0, 0, nonce) in ann.moves_on()


# ---- the tables -------------------------------------------------------------------------------------------------


def test_an_event_that_the_table_does_not_have_is_a_mistake_of_the_program() -> None:
    replica = Ann().replica
    with pytest.raises(IllegalMove, match="sealed in the state Empty"):
        replica.on_sealed(0, b"digest")  # nothing was to be hashed
    replica.held.fill()
    replica.found()
    with pytest.raises(IllegalMove, match="values are being written in the state Hashing"):
        replica.held.fill()  # the values of before are just being hashed
    assert isinstance(replica.held.stand, Hashing) and isinstance(replica.rounds.role, Idle)


def test_every_state_of_a_replica_can_be_reached_and_left() -> None:
    for table, start in ((STANDS, Empty), (ROLES, Idle)):
        reached, news = {start}, {start}
        while news:
            news = {after for state in news for after in table.table[state].values()} - reached
            reached |= news
        assert reached == set(table.table)
        assert all(any(after != state for after in row.values()) for state, row in table.table.items())


def test_nobody_else_writes_what_a_replica_holds() -> None:
    """`replica.x = ...` stands in no file of the product."""
    found = []
    for path in [*PRODUCT.glob("peer/**/*.py"), *PRODUCT.glob("checkpoints/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                if "replica" in name:
                    found.append(f"{path.relative_to(PRODUCT)}:{node.lineno}")
    assert found == []


class Watched(MemberMachine):
    """After every event each replica's stand says what its catch-up holds."""

    def move_on(self, *arguments):  # type: ignore[no-untyped-def]
        effects = super().move_on(*arguments)
        for replica in self.part.replicas.values() if self.part is not None else ():
            versions, stand = set(replica.held.chunks.versions), replica.held.stand
            match stand:
                case Current():
                    assert versions == {stand.version}
                case Rolling():
                    assert versions != {stand.version} and stand.version >= 0
                case VoidHashing() | Empty():
                    assert (stand.version, stand.digest) == (-1, b"")
        return effects


@pytest.mark.mode("audits")  # some of these worlds have them
@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_the_stand_says_what_is_held_at_every_event_of_a_hostile_run(seed: int) -> None:
    simulate(seed, machine=peer_with(Watched))


def test_a_frame_of_a_round_that_is_over_is_stale() -> None:
    ann = ann_in_the_round()
    ann.replica.rounds.on_aborted(1)
    assert ann.replica.on_round_frame("bob", contribution("bob", 0), 0.0) == (Verdict.STALE, [])
