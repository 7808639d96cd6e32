"""Fragments: ranges of chunks with rounds, versions and digests of their own, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.effects import Install, Merge, Roll, SendFrame
from farflung.collectives.round.member import MemberRound
from farflung.compression.codec import check_payload, codec_named
from farflung.coordinator.ledger.records import AbortedRound, CommittedRound, Opened, Record
from farflung.coordinator.run.effects import Effect, Tell, Write
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run.status import build_status
from farflung.optim.outer import AdamW, Nesterov, OuterStep
from farflung.peer.local.words import Frozen, LeasesNow, LoadState, ResumeSteps
from farflung.peer.machine.effects import Effect as PeerEffect
from farflung.peer.machine.effects import Encode, Resolve
from farflung.peer.machine.effects import TellTrainer as TellTrainer
from farflung.peer.machine.modes import training_of
from farflung.peer.machine.replicas import Replicas
from farflung.peer.machine.trainer_proxy import TrainerSync
from farflung.peer.state.outer_state import OuterState
from farflung.protocol import limits, messages
from farflung.protocol import messages as m
from farflung.protocol.digests import hash_bytes, is_piece, root_of
from farflung.protocol.errors import FrameError, UserError, Verdict
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.manifest import Manifest, RoundSection
from farflung.protocol.model_schema import ModelSchema, TensorSpec, fragments_of
from farflung.protocol.outer_numbers import AdamWNumbers
from farflung.protocol.round_words import Commit, Contact, Decision, Plan
from farflung.protocol.run_terms import Attached, Known
from farflung.simulator.world import Scenario, World
from rig.residuals import residual_of
from rig.showing import let_all_be_shown, showing

TAG = bytes(8)
CALM = {
    "drop": 0.0,
    "duplicate": 0.0,
    "slow": 0.0,
    "kill_per_effect": 0.0,
    "cut_per_s": 0.0,
    "trainer_crash_per_s": 0.0,
}


def schema(chunks: int, elements: int = 4) -> ModelSchema:
    tensors = (TensorSpec("w", (chunks * elements,), "float32", "param"),)
    return ModelSchema(tensors, elements, chunks, chunks, bytes(32))


def manifest(fragments: int, **round_keys: object) -> Manifest:
    return Manifest.model_validate(
        {
            "run": {"name": "demo", "min_peers": 2, "max_peers": 1024},
            "round": {"fragments": fragments, **round_keys},
        }
    )


# ---- ranges --------------------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(0, 4032))
def test_fragments_are_consecutive_and_differ_by_one_chunk_at_most(fragments: int, more: int) -> None:
    found = fragments_of(fragments + more, fragments)
    assert [chunk for each in found for chunk in each.chunks] == list(range(fragments + more))
    assert [each.number for each in found] == list(range(fragments))
    sizes = [each.count for each in found]
    assert max(sizes) - min(sizes) <= 1 <= min(sizes)


def test_more_fragments_than_chunks_are_the_users_mistake() -> None:
    with pytest.raises(
        UserError, match=r"\[round\] fragments: the model has 3 chunks, too few for 4 fragments; lower"
    ):
        fragments_of(3, 4)


# ---- a round of a fragment, at a member ----------------------------------------------------------------------


def test_frames_and_sums_of_a_round_carry_the_chunk_numbers_of_the_whole_model() -> None:
    plan = Plan(7, 1, 3, ("ann", "bob"), (0, 1), "fp32", fragment=1)
    member = MemberRound("ann", plan, TAG, 1.0, 0.0, first_chunk=5)
    own, [sent] = b"1234" * 4, member.on_encoded({0: b"1234" * 4, 1: b"5678" * 4})
    assert isinstance(sent, SendFrame) and (sent.to, sent.frame.header.chunk) == ("bob", 6)
    for chunk, verdict in (
        (4, Verdict.MALFORMED),
        (7, Verdict.MALFORMED),
        (6, Verdict.STALE),
        (5, Verdict.ACCEPTED),
    ):
        frame = with_payload(Header(Kind.CONTRIBUTION, TAG, round_no=7, chunk=chunk), own)
        assert member.on_frame("bob", frame, 0.0)[0] == verdict
    [merge] = member.on_decision(Decision(7, 1, (0.5, 0.5), {}), 0.0)
    assert isinstance(merge, Merge) and merge.chunk == 5
    [result] = member.owner.on_calculated(merge, own)
    assert isinstance(result, SendFrame)
    assert (result.frame.header.kind, result.frame.header.chunk) == (Kind.RESULT, 5)
    want = Frame(Header(Kind.WANT_RESULT, TAG, round_no=7, decision_no=1, chunk=5))
    assert [
        e.frame.header.chunk for e in member.on_frame("bob", want, 0.0)[1] if isinstance(e, SendFrame)
    ] == [5]
    assert member.progress().got[0] == 0b01, "masks count within the fragment, like the plan"


# ---- the outer state -----------------------------------------------------------------------------------------


ADAMW = AdamW(AdamWNumbers(0.1, 0.1, 0, 9, 0.9, 0.95, 0.1))


def outer_state(codec: str, fragments: int, step: OuterStep | None = None) -> OuterState:
    rules = RoundSection(codec=codec, gather_codec="fp32", fragments=fragments)
    return OuterState(torch.arange(20.0), schema(5), rules, step or Nesterov())


def test_each_fragment_has_its_own_digest_and_manifest() -> None:
    whole, cut = outer_state("fp32", 1), outer_state("fp32", 2)
    whole.seal()
    digests = [cut.seal(0), cut.seal(1)]
    assert cut.manifest_bytes(0) + cut.manifest_bytes(1) == whole.manifest_bytes()
    halves = [root_of(whole.hashes_of(chunks)) for chunks in (range(2), range(2, 5))]
    assert digests == halves == list(cut.digests.values())


def test_P4_a_digest_is_of_what_stands_in_memory_now_also_where_pieces_were_hashed_as_they_came() -> None:
    donor, joiner = outer_state("fp32", 2), outer_state("fp32", 2)
    donor.roll(Roll(1, 1, codec_named("fp32").encode(torch.ones(4))))
    digests = [donor.seal(0), donor.seal(1)]
    for chunk in range(5):
        joiner.install(Install(chunk, 1, donor.chunk_bytes(chunk)))
    assert [joiner.seal(0), joiner.seal(1)] == digests
    joiner.install(Install(0, 1, donor.chunk_bytes(1)))
    joiner.install(Install(0, 1, donor.chunk_bytes(0)))
    joiner.roll(Roll(1, 2, codec_named("fp32").encode(torch.ones(4))))
    assert joiner.seal(0) != digests[0]
    joiner.install(Install(1, 1, donor.chunk_bytes(1)))
    joiner.restart_moments()  # and whatever a trainer wrote
    assert joiner.seal(0) != digests[0] and joiner.seal(1) == digests[1]


@pytest.mark.parametrize("step", [Nesterov(), ADAMW], ids=["nesterov", "adamw"])
def test_P4_moments_of_zeros_are_not_sent_and_the_joiners_state_is_the_same_to_the_last_bit(
    step: OuterStep,
) -> None:
    """All of them at version 0; later a chunk whose momentum is a zero below zero goes as a whole."""
    donor, joiner = outer_state("fp32", 1, step), outer_state("fp32", 1, step)
    donor.seal()
    joiner.install(Install(0, 0, donor.chunk_bytes(1)))
    joiner.roll(Roll(2, 1, codec_named("fp32").encode(torch.ones(4))))  # its moments are not zero
    pieces = [donor.piece_bytes(chunk) for chunk in range(5)]
    assert {len(piece) for piece in pieces} == {16}
    for chunk, piece in enumerate(pieces):
        assert is_piece(donor.hash_of(chunk), piece, hash_bytes(piece), step.parts)
        joiner.install(Install(chunk, 0, piece))
    assert joiner.seal() == donor.digests[0]
    for moment in donor._parts[1:]:
        moment[3] = -0.0
    donor.roll(Roll(4, 1, codec_named("fp32").encode(torch.ones(4))))
    digest, pieces = donor.seal(), [donor.piece_bytes(chunk) for chunk in range(5)]
    whole = 16 * step.parts
    assert [len(piece) for piece in pieces] == [16, 16, 16, whole, whole]
    for chunk, piece in enumerate(pieces):
        assert is_piece(donor.hash_of(chunk), piece, hash_bytes(piece), step.parts)
        joiner.install(Install(chunk, 1, piece))
    assert joiner.seal() == digest
    if step.parts > 2:
        assert not is_piece(donor.hash_of(0), pieces[0], hash_bytes(pieces[0]), 2), "of another step"


def test_a_state_knows_how_many_parts_its_step_needs() -> None:
    with pytest.raises(ValueError, match="a state of 2 parts, for a step that needs 3"):
        OuterState(torch.zeros(20), schema(5), Manifest().round, ADAMW, moments=[torch.zeros(20)])


@pytest.mark.parametrize("size", [0, 4, 15, 20, 31, 32, 49, 64])
def test_a_piece_of_another_size_is_no_state_of_adamw(size: int) -> None:
    with pytest.raises(FrameError, match=f"a state chunk of {size} bytes, neither 48 nor 16"):
        outer_state("fp32", 1, ADAMW).install(Install(0, 0, bytes(size)))


@pytest.mark.parametrize("size", [0, 4, 15, 20, 31, 33, 64])
def test_a_piece_of_another_size_is_no_state(size: int) -> None:
    with pytest.raises(FrameError, match=f"a state chunk of {size} bytes, neither 32 nor 16"):
        outer_state("fp32", 1).install(Install(0, 0, bytes(size)))


def made(state: OuterState, slot: torch.Tensor, codec: str, fragment: int, chunks: int) -> list[object]:
    """What the whole of a fragment is encoded to, the last chunk first; or the problem alone."""
    found: dict[int, object] = {}
    for payloads, problem in state.encode(
        slot, Encode(1, 0, codec, tuple(reversed(range(chunks))), fragment)
    ):
        if problem:
            return [problem]
        found |= payloads
    return [found[chunk] for chunk in range(chunks)]


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_fragments_are_encoded_as_parts_of_the_whole_and_settled_each_on_its_own(codec: str) -> None:
    slot = torch.randn(20, generator=torch.Generator().manual_seed(1))
    whole, cut = outer_state(codec, 1), outer_state(codec, 2)
    payloads = made(whole, slot, codec, 0, 4)
    assert made(cut, slot, codec, 0, 2) + made(cut, slot, codec, 1, 2) == payloads
    # The commit of fragment 0 used it, that of fragment 1 did not: that comes again as if for the first time.
    cut.resolve(slot, used=True, fragment=0)
    cut.resolve(slot, used=False, fragment=1)
    assert made(cut, slot, codec, 1, 2) == made(outer_state(codec, 2), slot, codec, 1, 2)
    slot[9] = torch.nan
    cut.resolve(slot, used=True, fragment=1)
    assert made(cut, slot, codec, 1, 2) == ["element 9 of the pseudo-gradient is nan"]


def test_a_run_whose_codecs_go_by_the_lines_takes_memory_for_what_is_lost_once_a_line_needs_a_coarse_one() -> (
    None
):
    slot, state = torch.randn(20, generator=torch.Generator().manual_seed(1)), outer_state("auto", 1)
    assert made(state, slot, "int8", 0, 4) == made(outer_state("int8", 1), slot, "int8", 0, 4)
    state.resolve(slot, used=True)
    assert residual_of(state) is None
    coarse = outer_state("int4", 1)
    for _ in range(2):  # from then on it has what int4 lost
        assert made(state, slot, "int4", 0, 4) == made(coarse, slot, "int4", 0, 4)
        state.resolve(slot, used=True)
        coarse.resolve(slot, used=True)
    lost = residual_of(state)
    assert lost is not None and lost.any()
    fine = made(state, slot, "int8", 0, 4)
    assert fine != made(outer_state("int8", 1), slot, "int8", 0, 4)


# ---- the trainer's work, as the agent sees it ------------------------------------------------------------------


class Desk:
    """An agent's view of two fragments, with a trainer that has loaded both."""

    def __init__(self) -> None:
        self.training = training_of(manifest(2))
        self.part = Replicas(
            "ann", Attached(Known(manifest(2), bytes(16)), schema(4)), ResultLog(3), check_payload
        )
        self.exchange = TrainerSync(self.part, self.training)
        for replica in self.part.replicas.values():
            replica.held.fill()
            replica.found()
            replica.held.catch.on_run_state(0, {}, (), 3)
        self.exchange.on_attach()
        for number in (0, 1):
            self.exchange.on_sealed(number, 0, b"d" * 32)
            self.training.on_loaded(number)

    def freeze(self, slot: int = 0, steps: int = 4) -> None:
        for number in (0, 1):
            self.training.on_frozen(
                Frozen(
                    slot=slot,
                    tokens=steps,
                    steps=steps,
                    used=(),
                    loss=None,
                    fragment=number,
                    more=number == 0,
                )
            )

    def open(self, number: int, round_no: int) -> None:
        plan = Plan(round_no, 1, self.part.replicas[number].held.version, ("ann",), (0, 0), "fp32", number)
        self.part.on_plan(plan, self.training.works[number].frozen, 0.0)

    def commit(self, number: int, included: bool) -> list[PeerEffect]:
        replica = self.part.replicas[number]
        version = replica.held.version + 1
        assert replica.rounds.flight is not None
        members, weights, hashes = ("ann", "bob"), (float(included), 1.0), 2 * hash_bytes(b"result")
        replica.on_commit(
            Commit(version, replica.rounds.flight.plan.round_no, members, weights, hashes, "fp32", number),
            0.0,
        )
        for chunk in replica.fragment.chunks:
            assert replica.held.chunks.offer(version, chunk, b"result", hash_bytes(b"result"))
        rolled = replica.advance(0.0)
        return [*rolled, *self.exchange.on_sealed(number, version, b"e" * 32)]

    def lose_track(self, number: int, version: int) -> list[PeerEffect]:
        """The replica hears of a commit far ahead, and gets that version as state."""
        replica = self.part.replicas[number]
        replica.on_commit(Commit(version, 9, ("bob",), (1.0,), bytes(64), "fp32", number), 0.0)
        replica.on_tick(m.FragmentTick(number, version, (), False, ("bob",), 0, False, 0))
        replica.held.fill()
        replica.unfilled(True, {chunk: (version, b"") for chunk in replica.fragment.chunks})
        arrived = replica.advance(0.0)
        return [*arrived, *self.exchange.on_sealed(number, version, b"e" * 32)]


def told(effects: list[PeerEffect], kind: type) -> list[object]:
    return [e.message for e in effects if isinstance(e, TellTrainer) and isinstance(e.message, kind)]


def test_P6_the_outcome_of_each_fragment_is_its_own() -> None:
    desk = Desk()
    desk.freeze()
    desk.open(0, 1)
    desk.open(1, 2)
    used = desk.commit(0, included=True)
    left_out = desk.commit(1, included=False)
    loads = told(used + left_out, LoadState)
    assert [(load.fragment, load.keep) for load in loads] == [(0, "rest"), (1, "all")]  # type: ignore[attr-defined]
    assert [e for e in used + left_out if isinstance(e, Resolve)] == [
        Resolve(0, True, 0),
        Resolve(0, False, 1),
    ]
    assert desk.training.works[0].frozen is None and desk.training.works[1].frozen is not None


def test_a_trainer_waits_for_rounds_that_are_on_and_for_no_others() -> None:
    desk = Desk()
    desk.freeze()
    assert desk.exchange.go_on() == [], (
        "nothing has come of this freeze yet: a round may be due at any moment"
    )
    desk.open(0, 1)
    desk.open(1, 2)
    desk.commit(0, included=True)
    assert desk.exchange.go_on() == []
    desk.part.on_aborted(2)
    [resume] = told(desk.exchange.go_on(), ResumeSteps)
    assert resume == ResumeSteps(spare=1, fragment=1), "its work stays in slot 0, ready for the next round"
    assert desk.training.works[1].frozen is not None and desk.exchange.go_on() == []


def test_what_was_dropped_while_a_round_used_it_is_not_taken_away_a_second_time() -> None:
    desk = Desk()
    desk.freeze()
    desk.open(1, 1)
    desk.training.leases.on_told((m.Lease(1, 0, 0, 8, 0),))
    drops = told(desk.exchange.on_void((1,)), LoadState)
    assert [(load.fragment, load.keep) for load in drops] == [(0, "drop"), (1, "drop")]  # type: ignore[attr-defined]
    [load] = told(desk.commit(1, included=True), LoadState)
    assert load.keep == "all"  # type: ignore[attr-defined]


def test_P7_who_lost_track_of_a_commit_asks_anew_how_far_its_samples_are_used() -> None:
    """The version came as state, and its commit was never seen: samples behind it may be acknowledged by now."""
    for number in (0, 1):
        desk = Desk()
        desk.training.leases.on_told((m.Lease(1, 0, 0, 8, 0),))
        desk.freeze()
        desk.open(number, 1)
        effects = desk.lose_track(number, 9)
        [load] = told(effects, LoadState)
        assert (load.fragment, load.keep) == (number, "drop")  # type: ignore[attr-defined]
        assert desk.training.leases.unsure and told(effects, LeasesNow)[0] == LeasesNow(
            leases=(), unsure=True
        )
        again = m.Lease.at(1, 0, 0, 8, (8, 8 - 4 * number))
        assert told(desk.training.leases.on_told((again,)), LeasesNow) == [LeasesNow(leases=(again,))]
        assert not desk.training.leases.unsure


def test_who_dropped_its_work_since_it_said_ready_still_owns_and_receives() -> None:
    desk = Desk()
    desk.open(0, 1)
    replica = desk.part.replicas[0]
    assert replica.rounds.flight is not None and replica.rounds.contribution is None and not replica.idle


def test_who_is_too_far_behind_holds_nothing_and_says_so() -> None:
    desk = Desk()
    replica = desk.part.replicas[1]
    replica.on_tick(m.FragmentTick(1, 3, (), False, (), 0, False, 0))
    assert replica.held.version == 0, "as far as the result logs reach"
    replica.on_tick(m.FragmentTick(1, 9, (), False, (), 0, False, 0))
    assert replica.held.version == 0, (
        "while there is nobody to ask, what is held may yet become the run's newest state"
    )
    replica.on_tick(m.FragmentTick(1, 9, (), False, ("bob",), 0, False, 0))
    assert (replica.held.version, desk.part.replicas[0].held.version, desk.part.version) == (-1, 0, -1)


# ---- the coordinator ---------------------------------------------------------------------------------------------

GENESIS = (hash_bytes(b"first"), hash_bytes(b"second"))


class Hall:
    """A coordinator of a run of two fragments, and members that were let in without ceremony."""

    def __init__(self, fragments: int = 2, chunks: int = 4, members: int = 2) -> None:
        self.machine = RunMachine(manifest(fragments), bytes(16), [], lambda size: bytes(size))
        self.machine.start(0.0, 1)
        self.machine.core.ledger.model = schema(chunks)
        self.seq = 0
        for number in range(members):
            key = hash_bytes(str(number).encode())
            contact = Contact(key.hex()[:16], "indigo-falcon", key, "h" * limits.ADDRESS_CHARS)
            self.machine.core.members.admit(contact, key[:16], key[16:], 0.0, "", range(fragments))
            self.machine.core.members.on_dialled(contact.peer, key[:16], reached=True)

    @property
    def peers(self) -> list[str]:
        return list(self.machine.core.members.members)

    def beat(self, peer: str, *where: m.FragmentBeat, **changes: object) -> list[Effect]:
        member = self.machine.core.members.members[peer]
        self.seq += 1
        plain = {
            "session": member.session, "seq": self.seq, "roster_no": 0, "fragments": numbered(where),
            "phase": "inner", "step": 0,
            "tokens": 0, "loss": None, "tx_bytes": 0, "rx_bytes": 0,
            "up_bytes_per_s": 0, "down_bytes_per_s": 0, "have": (), "want": 0, "samples": 0, "rough": False,
            "era": 0, "saved": -1, "unsure": False, "leaving": False, "data": b"",
        }  # fmt: skip
        beat = m.Beat(**{**plain, **changes})  # type: ignore[arg-type]
        shown = tuple(showing(self.machine.core.ledger, said) for said in beat.fragments)
        beat = msgspec.structs.replace(beat, fragments=shown)
        return self.machine.on_member(member.contact.key, beat, 0.1)

    def plans(self, effects: list[Effect]) -> list[Plan]:
        opened = [e.message for e in effects if isinstance(e, Tell) and isinstance(e.message, m.OpenRound)]
        return [message.plan for message in opened]


def at(version: int, digest: bytes, ready: bool = False) -> m.FragmentBeat:
    return m.FragmentBeat(0, version, digest, 0, 0, 0, ready, ())


def numbered(where: Sequence[m.FragmentBeat]) -> tuple[m.FragmentBeat, ...]:
    return tuple(msgspec.structs.replace(each, fragment=number) for number, each in enumerate(where))


def goal(effects: list[Effect]) -> str:
    [tick] = [e.message for e in effects if isinstance(e, Tell) and isinstance(e.message, m.Tick)]
    return tick.goal


def test_version_zero_of_all_fragments_is_founded_at_once() -> None:
    hall = Hall()
    first, _ = hall.peers
    nothing = m.FragmentBeat(0, -1, b"", 0, 0, 0, False, ())
    assert goal(hall.beat(first, nothing, nothing)) == "found"
    assert goal(hall.beat(first, at(0, GENESIS[0]), nothing)) == "found"
    assert hall.machine.core.ledger.books[0].digests == {}
    assert goal(hall.beat(first, at(0, GENESIS[0]), at(0, GENESIS[1]))) == "train"
    assert [book.digests for book in hall.machine.core.ledger.books] == [{0: digest} for digest in GENESIS]


def test_a_beat_that_does_not_speak_of_every_fragment_is_malformed() -> None:
    hall = Hall()
    hall.beat(hall.peers[0], at(0, GENESIS[0]))
    assert hall.machine.counters.as_dict()["malformed"] == 1


def test_rounds_of_two_fragments_are_in_flight_at_once_under_numbers_of_their_own() -> None:
    hall = Hall()
    for peer in hall.peers:
        hall.beat(peer, at(0, GENESIS[0]), at(0, GENESIS[1]))
    for peer in hall.peers:
        effects = hall.beat(peer, at(0, GENESIS[0], ready=True), at(0, GENESIS[1], ready=True))
    plans = {plan.fragment: plan for plan in hall.plans(effects)}
    assert {f: (plan.round_no, len(plan.owners)) for f, plan in plans.items()} == {0: (1, 2), 1: (2, 2)}
    status = hall.machine.drivers
    assert [driver.round is not None for driver in status] == [True, True]


def test_who_is_behind_in_one_fragment_takes_part_in_the_other() -> None:
    hall = Hall()
    for peer in hall.peers:
        hall.beat(peer, at(0, GENESIS[0]), at(0, GENESIS[1]))
    late = hall.peers[1]
    nothing = m.FragmentBeat(0, -1, b"", 0, 0, 0, False, ())
    hall.beat(hall.peers[0], at(0, GENESIS[0], ready=True), at(0, GENESIS[1], ready=True))
    effects = hall.beat(late, at(0, GENESIS[0], ready=True), nothing)
    assert {plan.fragment for plan in hall.plans(effects)} == {0}
    assert goal(effects) == "sync"
    assert not hall.machine.core.members.members[late].participating


def test_nobody_waits_for_a_member_that_lacks_another_fragment_and_cannot_train() -> None:
    hall = Hall(members=3)
    for peer in hall.peers:
        hall.beat(peer, at(0, GENESIS[0]), at(0, GENESIS[1]))
    nothing = m.FragmentBeat(0, -1, b"", 0, 0, 0, False, ())
    *others, joiner = hall.peers
    for peer in others:
        effects = hall.beat(peer, at(0, GENESIS[0], ready=True), at(0, GENESIS[1]))
    assert hall.plans(effects) == [] and "2 of 3 ready" in hall.machine.drivers[0].reason
    effects = hall.beat(joiner, at(0, GENESIS[0]), nothing)
    assert {plan.members for plan in hall.plans(effects)} == {tuple(sorted(others))}


def test_a_fragment_that_has_had_its_rounds_goes_on_until_all_have() -> None:
    hall = Hall()
    core = hall.machine.core
    for peer in hall.peers:
        hall.beat(peer, at(0, GENESIS[0]), at(0, GENESIS[1]))
    for book, digest in zip(core.ledger.books, GENESIS, strict=True):
        book.version = core.manifest.run.rounds
        book.digests = {book.version: digest}
    let_all_be_shown(core.ledger)
    core.ledger.books[1].version -= 1
    last = core.manifest.run.rounds
    for _ in range(2):
        for peer in hall.peers:
            hall.beat(peer, at(last, GENESIS[0], ready=True), at(last - 1, b""))
    flight = hall.machine.drivers[0].round
    assert flight is not None and flight.plan.version == last and not core.finished
    core.ledger.books[1].version = last
    effects = hall.machine.on_timer(0.2)
    aborted = [e.record for e in effects if isinstance(e, Write) and isinstance(e.record, AbortedRound)]
    assert [(record.fragment, record.reason) for record in aborted] == [(0, "the run is complete")]
    assert hall.machine.drivers[0].round is None


def test_small_fragments_are_owned_by_different_members() -> None:
    hall = Hall(fragments=4, chunks=4, members=4)
    effects: list[Effect] = []
    for ready in (False, True):
        where = tuple(at(0, hash_bytes(bytes([number])), ready) for number in range(4))
        effects += [effect for peer in hall.peers for effect in hall.beat(peer, *where)]
    owners = {plan.fragment: plan.owner_of(0) for plan in hall.plans(effects)}
    assert set(owners.values()) == set(hall.peers) and len(owners) == 4


def test_with_the_most_fragments_and_the_largest_roster_a_tick_still_fits() -> None:
    most = limits.FRAGMENTS_MAX
    hall = Hall(fragments=most, chunks=most, members=limits.ROSTER_MOST)
    digest = hash_bytes(b"state")
    for book in hall.machine.core.ledger.books:
        book.version = 1 << 40
        book.digests = {book.version - back: digest for back in range(16)}
    for member in hall.machine.core.members.members.values():
        for standing in member.standings.values():
            standing.verified = True
    where = m.FragmentBeat(
        limits.FRAGMENTS_MAX - 1,
        1 << 40,
        digest,
        1 << 40,
        1 << 20,
        1 << 20,
        False,
        tuple(range(1 << 40, (1 << 40) + 8)),
    )
    member = next(iter(hall.machine.core.members.members.values()))
    beat = m.Beat(

        session=member.session, seq=1, roster_no=0, fragments=numbered([where] * most), phase="inner", step=1 << 40,
        tokens=limits.TOKENS_MAX, loss=2.5, tx_bytes=1 << 61, rx_bytes=1 << 61,
        up_bytes_per_s=1 << 40, down_bytes_per_s=1 << 40,
        have=tuple(range(1 << 40, (1 << 40) + 256)), want=0, samples=0, rough=False, era=1 << 40, saved=1 << 40,
        unsure=True, leaving=True, data=b"",
    )  # fmt: skip
    assert messages.decode(messages.encode(beat), frozenset({"beat"})) == beat
    hall.machine.core.take_effects()
    hall.machine.tick_builder.on_beat(member, beat)
    [tick] = [e.message for e in hall.machine.core.take_effects() if isinstance(e, Tell)]
    assert isinstance(tick, m.Tick) and tick.roster, "those whom it needs"
    roster = hall.machine.core.members.roster()
    assert len(roster) == limits.ROSTER_MOST
    assert all(each.donors and len(each.digests) >= 3 for each in tick.fragments)
    one = m.Lease.at(1 << 40, 1 << 40, 1 << 40, 1 << 40, (1 << 41,) + (1 << 40,) * (most - 1))
    leases = (one,) * hall.machine.lease_desk._leases_per_peer
    full = m.Tick(
        **{name: getattr(tick, name) for name in tick.__struct_fields__}
        | {"leases": leases, "roster": roster}
    )
    assert messages.decode(messages.encode(full), frozenset({"tick"})) == full


# ---- the whole run -------------------------------------------------------------------------------------------------


class Watched(World):
    """Writes down what leaves whom when."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        super().__init__(seed, scenario)
        self.contributions: list[tuple[int, int]] = []  # (round, chunk) in the order in which they were sent
        self.committed: dict[int, int] = {}  # round -> how many contributions had been sent by then
        self.records: list[Record] = []

    def _send_frame(self, source: str, effect: SendFrame) -> None:
        header = effect.frame.header
        if header.kind == Kind.CONTRIBUTION:
            self.contributions.append((header.round_no, header.chunk))
        super()._send_frame(source, effect)

    def _write(self, record: Record) -> None:
        self.records.append(record)
        if isinstance(record, CommittedRound):
            self.committed[record.commit.round_no] = len(self.contributions)
        super()._write(record)


@pytest.fixture(scope="module")
def world() -> Watched:
    world = Watched(5, Scenario(peers=3, chunks=4, fragments=2, rounds=3, min_peers=3, **CALM))  # type: ignore[arg-type]
    assert world.run().outcome == "finished"
    return world


def test_the_scatter_of_one_fragment_overlaps_the_round_of_another(world: Watched) -> None:
    rounds = {
        record.commit.round_no: record.commit.fragment
        for record in world.records
        if isinstance(record, CommittedRound)
    }
    first, second = sorted(rounds)[:2]
    assert {rounds[first], rounds[second]} == {0, 1}
    early = [number for number, _ in world.contributions[: world.committed[first]]]
    assert second in early, "the second round's frames leave before the first one is committed"


def test_each_fragment_has_all_its_rounds_and_the_samples_are_counted_once(world: Watched) -> None:
    commits = [record for record in world.records if isinstance(record, CommittedRound)]
    for number in (0, 1):
        assert [c.commit.version for c in commits if c.commit.fragment == number] == [1, 2, 3]
    assert all(any(record.used.values()) for record in commits), "each fragment says what it has learned from"
    assert world.coordinator is not None
    ledger = world.coordinator.core.ledger
    assert ledger.totals.tokens == sum(record.tokens for record in commits if record.commit.fragment == 0)
    of_each = [2 * sum(r.steps for r in commits if r.commit.fragment == number) for number in (0, 1)]
    assert ledger.leases.committed_samples == of_each[0] == of_each[1]


def test_the_status_names_fragments_only_where_there_are_several(world: Watched) -> None:
    assert world.coordinator is not None
    status = build_status(
        world.coordinator.core, world.coordinator.drivers, world.coordinator.counters, world.now
    )
    assert [each["version"] for each in status["fragments"]] == [3, 3] and status["version"] == 3
    assert {each["fragment"] for each in status["rounds"]} == {0, 1}
    alone = World(1, Scenario(peers=2, rounds=1, **CALM))  # type: ignore[arg-type]
    alone.run()
    assert alone.coordinator is not None
    plain = build_status(
        alone.coordinator.core, alone.coordinator.drivers, alone.coordinator.counters, alone.now
    )
    assert "fragments" not in plain and "fragment" not in plain["rounds"][0]


def test_a_restart_aborts_the_open_round_of_every_fragment(world: Watched) -> None:
    opened = [place for place, record in enumerate(world.records) if isinstance(record, Opened)]
    machine = RunMachine(world.manifest, bytes(16), world.records[: opened[1] + 1], lambda size: bytes(size))
    written = [e.record for e in machine.start(0.0, 1) if isinstance(e, Write)]
    assert [record.fragment for record in written if isinstance(record, AbortedRound)] == [0, 1]
    assert [book.open_round for book in machine.core.ledger.books] == [0, 0]


# ---- by number ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(0,), (1, 0), (0, 2), (0, 0), (0, 1, 2)])
def test_P8_a_beat_about_other_fragments_than_its_sender_holds_is_malformed(numbers: tuple[int, ...]) -> None:
    hall = Hall()
    where = tuple(m.FragmentBeat(number, 0, GENESIS[0], 0, 0, 0, True, ()) for number in numbers)
    hall.beat(hall.peers[0], fragments=where)
    assert hall.machine.counters.as_dict()["malformed"] == 1
    assert hall.machine.core.members.members[hall.peers[0]].beat is None


def test_a_member_that_holds_one_fragment_has_no_part_in_the_rounds_of_another() -> None:
    """As the members of a pipeline's stages will; today the admission lets in only peers that hold all."""
    hall = Hall(members=2)
    key = hash_bytes(b"a stage of its own")
    contact = Contact(key.hex()[:16], "indigo-falcon", key, "")
    member = hall.machine.core.members.admit(contact, key[:16], key[16:], 0.0, "", (1,))
    both, other = hall.machine.drivers
    assert member not in both.holders and member in other.holders
    assert list(member.standings) == [1] and not member.verified
    for peer in hall.peers[:2]:
        hall.beat(peer, at(0, GENESIS[0]), at(0, GENESIS[1]))
    [tick] = [
        e.message
        for e in hall.beat(contact.peer, fragments=(m.FragmentBeat(1, 0, GENESIS[1], 0, 0, 0, True, ()),))
        if isinstance(e, Tell) and isinstance(e.message, m.Tick)
    ]
    assert [(word.fragment, word.verified) for word in tick.fragments] == [(1, True)] and member.verified


def test_a_hello_that_names_some_of_a_runs_fragments_is_refused_in_words() -> None:
    hall = Hall()
    named = SimpleNamespace(model=schema(4), fragments=(1,), helps=False)
    refusal = hall.machine.sessions.entrance._unfit(named)  # type: ignore[arg-type]
    assert refusal is not None and refusal.code == "model"
    assert refusal.reason == "this run is no pipeline: each peer holds all of its 2 fragments, not 1"
    named.fragments = (0, 1)
    assert hall.machine.sessions.entrance._unfit(named) is None  # type: ignore[arg-type]
