"""The driver of one fragment's rounds, told as transcripts that a person can read; and the rules of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
from msgspec import structs

from farflung.coordinator.ledger.ledger import FragmentBook, Ledger, LedgerRules
from farflung.coordinator.ledger.records import (
    AbortedRound,
    Admitted,
    CommittedRound,
    DecidedOn,
    Genesis,
    ModelFixed,
    Opened,
    Vouched,
    from_bytes,
    to_bytes,
)
from farflung.coordinator.modes.registry import CoordinatorMode
from farflung.coordinator.rounds.round import FORGIVEN
from farflung.coordinator.rounds.round_rules import chosen, rules_for
from farflung.coordinator.rounds.weights import NORMS_LEAST
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import Effect, KeepEvidence, Note, Tell, Write
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.round_driver import (
    FORGOTTEN_S,
    RETRY_S,
    WITHHELD_MOST,
    RoundDriver,
    SignedResults,
)
from farflung.coordinator.run.status import opens_in_s
from farflung.protocol.digests import bits, combined, hash_bytes, mask_of, mask_to_bytes
from farflung.protocol.errors import AbortCause, Excluded, ExclusionCause
from farflung.protocol.limits import AMOUNT_MAX, MAX_PEERS
from farflung.protocol.manifest import Manifest, MergeSection, RoundSection, RunSection
from farflung.protocol.messages import Beat, Committed, Decided, FragmentBeat, ProgressReport, Sent
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Contact, Used
from farflung.protocol.signed_words import Results, inputs_of, results_part, sent_part
from farflung.protocol.states import PeerEvent
from rig.guests import Guest
from rig.machine_transcript import Transcript, line_of, told
from rig.showing import showing

RUN_ID = bytes(range(16))
MANIFEST = Manifest(
    run=RunSection(name="demo", min_peers=2, max_peers=4, rounds=9),
    round=RoundSection(codec="fp32", deadline_s=30.0),
    merge=MergeSection(policy="mean"),
)
MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
BOTH = mask_to_bytes(0b11)
NAMES = ("ann", "bob", "cyd")


@dataclass
class Stage:
    """A driver with members that were all verified at version 0; ids are replaced by names."""

    count: int = 2
    manifest: Manifest = MANIFEST
    guests: dict[str, Guest] = field(init=False)

    def __post_init__(self) -> None:
        self.core = Core(self.manifest, RUN_ID, Ledger(LedgerRules(lease_samples=8, keep_results=3)))
        self.driver = RoundDriver(self.core, 0)
        self.guests = {name: Guest(number) for number, name in enumerate(NAMES[: self.count])}
        first = next(iter(self.guests.values()))
        self.core.write(ModelFixed(model=MODEL, peer=first.peer))
        self.core.write(Genesis(digest=hash_bytes(b"0"), peer=first.peer))
        for name, guest in self.guests.items():
            contact = Contact(guest.peer, name, guest.key, f"{name}:1")
            member = self.core.members.admit(contact, guest.process, guest.process, 0.0)
            member.identity = guest.identity
            self.core.members.on_dialled(guest.peer, guest.process, True)
            self.core.write(Admitted(peer=guest.peer, name=name, session=guest.process))
            self.core.write(Vouched(peer=guest.peer))
            member.standings[0].verified = member.standings[0].vouched = True
            self.beats(name)
        self.core.take_effects()
        self.tells = Transcript(self.state)

    def state(self) -> str:
        flight = self.driver.round
        return f"version {self.driver.book.version}, " + (
            f"round {flight.plan.round_no}, epoch {flight.plan.epoch}" if flight is not None else "no round"
        )

    def member(self, name: str) -> Member:
        return self.core.members.members[self.guests[name].peer]

    def beats(self, name: str, ready: bool = False, version: int = 0, digest: bytes = b"") -> None:
        bare = FragmentBeat(0, version, digest or hash_bytes(b"0"), 0, 0, 0, ready, ())
        said = showing(self.core.ledger, bare)
        member = self.member(name)
        member.beat = Beat(

            session=member.session, seq=1, roster_no=0, fragments=(said,), phase="inner", step=0, tokens=0,
            loss=None, tx_bytes=0, rx_bytes=0, up_bytes_per_s=0, down_bytes_per_s=0, have=(), want=0, samples=0,
            rough=False, era=0, saved=-1, unsure=False, leaving=False, data=b"",
        )  # fmt: skip
        member.standings[0].ready_since = self.core.now if ready else None

    def opens_again(self) -> set[str]:
        """Some time later, with all who are counted on: all hold the run's state.  Returns who is in the round."""
        self.core.now += 60.0
        for name in self.guests:
            self.member(name).standings[0].verified = True
        self.opens()
        assert self.driver.round is not None
        return set(self.driver.round.plan.members)

    def says(self, name: str, version: int) -> None:
        """In the midst of a round."""
        self.beats(name, version=version)
        member = self.member(name)
        assert member.beat is not None
        self.driver.recognise(member, member.beat.fragments[0])

    def tell(self, event: str, after_s: float = 0.0) -> None:
        """Whatever is due now."""
        self.core.now += after_s
        self.driver.advance()
        self.driver.settle_digest()
        self.driver.maybe_open()
        self.tells(event)
        self.tells.lines += [f"    {self.line_of(effect)}" for effect in self.core.take_effects()]
        self.tells.lines.append(f"    says: {self.driver.reason}")

    def line_of(self, effect: Effect) -> str:
        match effect:
            case Write(record=Opened(plan=plan)):
                names = [self.core.name(peer) for peer in plan.members]
                owners = [names[owner] for owner in plan.owners]
                return f"writes: round {plan.round_no} with {' '.join(names)}, owners {' '.join(owners)}"
            case Write(record=DecidedOn(decision=decision)):
                return f"writes: weights {[round(weight, 2) for weight in decision.weights]}"
            case Write(record=CommittedRound() as record):
                return f"writes: version {record.commit.version}, {record.tokens} tokens, loss {record.loss}"
            case Write(record=AbortedRound(round_no=number)):
                return f"writes: round {number} is aborted"
            case KeepEvidence(said=said):
                return (
                    f"keeps: the signed hash lists of {' '.join(self.core.name(each.peer) for each in said)}"
                )
            case Write(record=record):
                return f"writes: {line_of(record)}"
            case Tell(peer=peer, message=message):
                return f"to {self.core.name(peer)}: {type(message).__name__}"
            case Note(text=text):
                return f"notes: {text}"
        return line_of(effect)

    def opens(self) -> None:
        for name in self.guests:
            self.beats(name, ready=True)
        self.tell(f"{', '.join(self.guests)} are ready")
        self.tells.lines.clear()

    def sends(self, name: str, **changes: object) -> None:
        guest = self.guests[name]
        plain = {
            "session": guest.process, "seq": 1, "round_no": 1, "hashes": hashes_of(name), "tokens": 100, "steps": 4,
            "loss": 2.0, "used": (), "seat": 0, "counted": b"", "signature": b"",
        }  # fmt: skip
        sent = Sent(**{**plain, **changes})  # type: ignore[arg-type]
        if not sent.signature:
            signature = guest.signer.sign(sent_part(RUN_ID, sent))
            sent = structs.replace(sent, signature=signature)
        self.driver.on_sent(self.member(name), sent)

    def reports(self, name: str, merged: int = 0, got: int = 0, decision_no: int = 0) -> None:
        """It holds both members' chunks of its share; `merged` of its own are merged, `got` of all are here."""
        flight = self.driver.round
        assert flight is not None
        mine = flight.plan.members.index(self.guests[name].peer)
        share = [chunk for chunk, owner in enumerate(flight.plan.owners) if owner == mine]
        mask = sum(1 << chunk for chunk in share)
        held = {
            guest.peer: (
                mask_to_bytes(mask),
                combined((c, hashes_of(each)[32 * c : 32 * c + 32]) for c in share),
            )
            for each, guest in self.guests.items()
            if guest.peer in flight.plan.members and guest.peer in flight.scatter.sent
        }
        results = [hash_bytes(b"result", bytes([chunk])) for chunk in range(2)]
        report = ProgressReport(
lengths=b"", got_by={},
                session=self.member(name).session, seq=2, round_no=flight.plan.round_no, decision_no=decision_no,
                held=held, refused={}, cut_off=(), merged=mask_to_bytes(merged),
                merged_hashes=b"".join(results[chunk] for chunk in range(2) if merged >> chunk & 1),
                got=mask_to_bytes(got),
                got_hash=combined((chunk, results[chunk]) for chunk in range(2) if got >> chunk & 1),
                dots=None, inputs=b"", signature=b"",
        )  # fmt: skip
        by = flight.merged_by
        if merged and by is not None:
            names = {guest.peer: each for each, guest in self.guests.items()}
            counted = by.included(flight.plan.members)
            went_in = (hashes_of(names[peer])[32 * c : 32 * c + 32] for c in bits(merged) for peer in counted)
            report = structs.replace(report, inputs=inputs_of(went_in))
            said = Results.of(flight.plan, by, flight.rules.gather_codec, report)
            signature = self.guests[name].signer.sign(results_part(RUN_ID, said))
            report = structs.replace(report, signature=signature)
        self.driver.on_progress(self.member(name), report)


def hashes_of(name: str) -> bytes:
    return b"".join(hash_bytes(name.encode(), bytes([chunk])) for chunk in range(2))


def test_a_round_from_readiness_to_the_next_versions_digest() -> None:
    stage = Stage()
    stage.tell("nobody is ready")
    stage.beats("ann", ready=True)
    stage.tell("ann is ready")
    stage.beats("bob", ready=True)
    stage.tell("bob is ready too")
    for name in stage.guests:
        stage.sends(name)
    stage.tell("both have named what they send")
    for name in stage.guests:
        stage.reports(name)
    stage.tell("owners hold all that was sent")
    assert stage.driver.round is not None
    shares = {stage.guests[name].peer: name for name in stage.guests}
    for place, owner in enumerate(stage.driver.round.plan.owners):
        stage.reports(shares[stage.driver.round.plan.members[owner]], merged=1 << place, decision_no=1)
    stage.tell("owners have merged their chunks")
    for place, owner in enumerate(stage.driver.round.plan.owners):
        stage.reports(
            shares[stage.driver.round.plan.members[owner]], merged=1 << place, got=0b11, decision_no=1
        )
    stage.tell("everybody has all results")
    for name in stage.guests:
        stage.beats(name, version=1, digest=hash_bytes(b"1"))
    stage.tell("both show the same digest of version 1")
    assert stage.tells.text == told("""
        nobody is ready
            says: inner steps: 0 of at least 2 peers are ready
        ann is ready
            says: inner steps: 1 of at least 2 peers are ready
        bob is ready too
            version 0, no round -> version 0, round 1, epoch 1
            writes: round 1 with bob ann, owners bob ann
            notes: round 1 opened from version 0 with 2 peers
            to bob: OpenRound
            to ann: OpenRound
            says: inner steps: 1 of at least 2 peers are ready
        both have named what they send
            says: scatter: waiting for bob, ann
        owners hold all that was sent
            writes: weights [0.5, 0.5]
            to bob: Decided
            to ann: Decided
            says: gather: 2 of 2 chunks not merged yet
        owners have merged their chunks
            says: gather: 2 of 2 results not yet held by 2 peers
        everybody has all results
            version 0, round 1, epoch 1 -> version 1, no round
            writes: version 1, 200 tokens, loss 2.0
            keeps: the signed hash lists of ann bob
            notes: version 1 committed by round 1 with 2 peers
            to ann: Committed
            to bob: Committed
            says: 0 of at least 2 peers hold version 1
        both show the same digest of version 1
            writes: DigestFixed version 1, digest d63bd9a8, fragment 0, shown a8813889
            says: 0 of at least 2 peers hold version 1
    """)


def test_P3_a_round_whose_owner_is_lost_goes_on_without_it() -> None:
    stage = Stage(3)
    stage.opens()
    for name in stage.guests:
        stage.sends(name)
    stage.core.members.lose(stage.member("bob"), PeerEvent.FELL_SILENT)
    stage.tell("bob falls silent")
    assert stage.tells.text == told("""
        bob falls silent
            version 0, round 1, epoch 1 -> version 0, round 1, epoch 2
            notes: round 1, epoch 2: owner bob is lost; its chunks moved
            writes: round 1 with bob ann cyd, owners cyd ann
            to ann: OpenRound
            to cyd: OpenRound
            says: scatter: waiting for ann, cyd
    """)


def not_dialled_yet(stage: Stage, name: str) -> None:
    """It said where it can be dialled, and the coordinator is about to try."""
    member = stage.member(name)
    member.contact = structs.replace(member.contact, address="")


@pytest.mark.parametrize("reached", [True, False])
def test_P3_a_round_whose_only_owner_is_lost_waits_for_whoever_is_being_dialled(reached: bool) -> None:
    alone = RunSection(name="demo", min_peers=1, max_peers=4, rounds=9)
    stage = Stage(manifest=Manifest(run=alone, round=MANIFEST.round, merge=MANIFEST.merge))
    not_dialled_yet(stage, "bob")
    stage.opens()
    assert stage.driver.round is not None
    owners = {stage.driver.round.plan.members[owner] for owner in stage.driver.round.plan.owners}
    assert owners == {stage.guests["ann"].peer}
    stage.sends("bob")
    stage.core.members.lose(stage.member("ann"), PeerEvent.FELL_SILENT)
    stage.tell("ann is lost")
    stage.core.members.on_dialled(stage.guests["bob"].peer, stage.guests["bob"].process, reached)
    stage.tell("bob can be dialled" if reached else "bob can't be dialled")
    over = """
        bob can be dialled
            version 0, round 1, epoch 1 -> version 0, round 1, epoch 2
            notes: round 1, epoch 2: owner ann is lost; its chunks moved
            writes: round 1 with bob ann, owners bob bob
            to bob: OpenRound
            says: scatter: waiting for bob
    """
    failed = """
        bob can't be dialled
            version 0, round 1, epoch 1 -> version 0, no round
            writes: round 1 is aborted
            notes: round 1 aborted: no living member can be dialled, so nobody can own a chunk; local work is kept
            to bob: Aborted
            says: the last round failed; trying again in 1.0 s
    """
    waits = """
        ann is lost
            says: waiting to see whether bob can be dialled: nobody else can own a chunk
    """
    assert stage.tells.text == told(waits.rstrip() + (over if reached else failed))


def test_the_heir_of_all_chunks_is_whoever_has_a_line_for_them() -> None:
    stage = Stage(3)
    for name, up in (("ann", 10_000_000), ("bob", 100_000), ("cyd", 1_000_000)):
        stage.beats(name, ready=True)
        said, down = stage.member(name).beat, 100_000_000
        stage.member(name).beat = structs.replace(said, up_bytes_per_s=up, down_bytes_per_s=down)
    stage.tell("all are ready")
    stage.core.members.lose(stage.member("bob"), PeerEvent.FELL_SILENT)
    stage.tell("bob falls silent")
    owners = [line.rpartition("owners ")[2] for line in stage.tells.lines if "owners" in line]
    assert owners == ["bob ann", "ann ann"], "whose thin line it was is lost; cyd's is thin, too"


def test_P6_a_round_that_is_too_few_is_aborted_and_tried_again_after_a_pause() -> None:
    stage = Stage()
    stage.opens()
    stage.core.members.lose(stage.member("bob"), PeerEvent.FELL_SILENT)
    stage.tell("bob falls silent")
    stage.tell("time passes", after_s=MANIFEST.round.round_timeout_s)
    assert stage.tells.text == told("""
        bob falls silent
            version 0, round 1, epoch 1 -> version 0, round 1, epoch 2
            notes: round 1, epoch 2: owner bob is lost; its chunks moved
            writes: round 1 with bob ann, owners ann ann
            to ann: OpenRound
            says: scatter: waiting for ann
        time passes
            version 0, round 1, epoch 2 -> version 0, no round
            writes: round 1 is aborted
            notes: round 1 aborted: not finished after 60 s: late: ann; lost: bob; local work is kept
            to ann: Aborted
            says: 1 of at least 2 peers hold version 0
    """)


def test_a_hash_list_that_is_not_signed_by_its_sender_counts_for_nothing() -> None:
    stage = Stage()
    stage.opens()
    stage.sends("ann", signature=bytes(64))
    assert stage.driver.round is not None
    assert stage.driver.round.scatter.barred == {
        stage.guests["ann"].peer: Excluded(ExclusionCause.UNSIGNED, "its hash list is not signed by it")
    }
    assert not stage.driver.may_use_work_of(stage.guests["ann"].peer)
    assert stage.driver.may_use_work_of(stage.guests["bob"].peer)


def test_P7_a_contribution_that_used_what_is_not_its_own_is_out() -> None:
    stage = Stage()
    stage.opens()
    stage.sends("ann", used=(Used(7, 4),))
    assert stage.driver.round is not None
    told = Excluded(ExclusionCause.LEASES, "it used lease 7, which is not its own any more")
    assert stage.driver.round.scatter.barred == {stage.guests["ann"].peer: told}


def test_P7_a_member_that_restarts_during_a_round_is_out_of_it() -> None:
    stage = Stage()
    stage.opens()
    stage.driver.on_restart(stage.guests["bob"].peer)
    assert stage.driver.round is not None
    assert stage.driver.round.scatter.barred == {
        stage.guests["bob"].peer: Excluded(ExclusionCause.RESTARTED, "it restarted during the round")
    }


def test_P3_nobody_waits_for_who_has_to_take_the_runs_state_again_in_a_round() -> None:
    stage = Stage(3)
    stage.opens()
    flight, cyd = stage.driver.round, stage.member("cyd")
    assert flight is not None
    stage.says("cyd", version=0)
    stage.tell("it holds what the round goes from")
    assert "cyd" in stage.driver.reason and flight.plan.epoch == 1
    stage.says("cyd", version=-1)
    stage.tell("whoever is not in the round")
    assert "cyd" not in stage.driver.reason and stage.driver.round is flight
    assert cyd.peer not in {flight.plan.members[at] for at in flight.plan.owners}
    assert cyd.told.left_out == "round 1: it had to take the run's state again"
    stage.says("cyd", version=0)
    stage.tell("until the next round")
    assert "cyd" not in stage.driver.reason
    stage.driver.abort(AbortCause.TIMED_OUT, "for the test")
    stage.core.now += 60.0
    cyd.standings[0].verified = True
    stage.opens()
    stage.tell("the next one is open")
    assert "cyd" in stage.driver.reason


def test_P6_who_took_the_runs_state_again_hears_what_became_of_what_it_had_sent() -> None:
    """It is counted where owners hold it; told that it is in no round it would bring the same work once more."""
    stage = Stage(3)
    stage.opens()
    stage.sends("cyd")
    stage.says("cyd", version=-1)
    assert stage.driver.participants.counts_on(stage.member("cyd"))
    stage.core.take_effects()
    stage.driver.abort(AbortCause.TIMED_OUT, "for the test")
    told = [effect.peer for effect in stage.core.take_effects() if isinstance(effect, Tell)]
    assert stage.guests["cyd"].peer in told


def test_P9_who_takes_the_runs_state_again_round_after_round_stays_out_like_who_restarts() -> None:
    stage, opened = Stage(3), 0
    cyd = stage.member("cyd")
    for _ in range(8):
        opened += cyd.peer in stage.opens_again()
        for _ in range(3):  # in one round it is one
            stage.says("cyd", version=-1)
        stage.driver.abort(AbortCause.TIMED_OUT, "for the test")
    assert opened == FORGIVEN + 1


def test_P9_a_loss_of_state_and_the_restart_that_mends_it_are_one() -> None:
    stage, opened = Stage(3), 0
    cyd = stage.member("cyd")
    for number in range(2):
        opened += cyd.peer in stage.opens_again()
        stage.says("cyd", version=-1)
        cyd.process = process = bytes([number + 1] * 16)
        stage.driver.on_session(cyd.peer, process)
        stage.driver.abort(AbortCause.TIMED_OUT, "for the test")
    assert opened == 2 and not stage.driver._steadiness.rounds_out(cyd.peer)


def test_a_helper_need_not_hold_what_a_round_goes_from() -> None:
    stage = Stage(3)
    stage.opens()
    flight, cyd = stage.driver.round, stage.member("cyd")
    assert flight is not None
    flight.rules = replace(flight.rules, helpers=frozenset({cyd.peer}))
    stage.says("cyd", version=-1)
    assert cyd.peer in stage.driver.participants.living and not cyd.told.left_out


def of_one_and_one_behind(versions: int) -> Stage:
    """Ann alone has made so many versions while bob still has an old one, and is ready again."""
    manifest = MANIFEST.model_copy(update={"run": MANIFEST.run.model_copy(update={"min_peers": 1})})
    stage = Stage(manifest=manifest)
    goes_on(stage, versions)
    return stage


def goes_on(stage: Stage, version: int) -> None:
    """Without bob."""
    stage.driver.round = None
    stage.driver.book.version = version
    stage.driver.book.digests[version] = hash_bytes(b"0")
    stage.beats("ann", ready=True, version=version)
    stage.says("bob", version=0)


def waits(stage: Stage, after_s: float = 0.0) -> bool:
    stage.core.now += after_s
    stage.driver.maybe_open()
    return stage.driver.round is None


@pytest.mark.parametrize(("versions", "due"), [(1, True), (2, True), (3, True), (4, False)])
def test_whoever_is_alone_waits_for_one_that_a_few_results_bring_here(versions: int, due: bool) -> None:
    stage = of_one_and_one_behind(versions)
    assert waits(stage) == due
    whom = "inner steps: 1 of 2 ready" if versions == 1 else "waiting for bob, a few versions behind"
    assert not due or stage.driver.reason == f"{whom}, at most 30.0 s more"


@pytest.mark.parametrize("flaw", ["without_data", "leaving"])
def test_nobody_waits_for_one_that_could_take_no_part(flaw: str) -> None:
    stage = of_one_and_one_behind(2)
    bob = stage.member("bob")
    if flaw == "leaving":
        assert bob.beat is not None
        bob.beat = structs.replace(bob.beat, leaving=True)
    else:
        bob.without_data = True
    assert not waits(stage)


def test_a_member_is_waited_for_no_longer_than_a_deadline_until_it_is_here() -> None:
    stage = of_one_and_one_behind(2)
    assert waits(stage) and waits(stage, 20.0)
    stage.member("ann").standings[0].ready_since = stage.core.now
    assert waits(stage, 5.0)
    assert not waits(stage, 5.0), "although ann became ready only now"
    goes_on(stage, 3)
    assert not waits(stage)
    goes_on(stage, 2)
    of_ann = stage.driver.beat_of(stage.member("ann"))
    assert of_ann is not None
    stage.driver.book.shown[2] = stage.driver.agreement.has_shown(of_ann)
    stage.says("bob", version=2)
    assert stage.member("bob").standings[0].verified
    goes_on(stage, 4)
    stage.says("bob", version=2)
    assert not stage.member("bob").standings[0].verified and waits(stage), "its line is not too slow"


def test_who_comes_when_others_have_waited_for_long_gets_its_time_too() -> None:
    stage = of_one_and_one_behind(5)
    stage.core.now += 28.0
    stage.says("bob", version=3)
    assert waits(stage)
    assert not waits(stage, 2.0), "that is the deadline of the round"
    stage.driver.round = None
    stage.beats("ann", ready=True, version=5)
    assert waits(stage, 1.0)


def test_whom_a_run_has_waited_for_gains_no_time_by_coming_back_and_nobody_is_kept_for_ever() -> None:
    stage = of_one_and_one_behind(2)
    assert not waits(stage, 31.0)
    bob = stage.guests["bob"].peer
    stage.core.members.lose(stage.member("bob"), PeerEvent.SAID_GOODBYE)
    for after_s, kept in ((60.0, {bob}), (FORGOTTEN_S, set())):
        stage.driver.round = None
        stage.beats("ann", ready=True, version=2)
        assert not waits(stage, after_s) and stage.driver._near_since.keys() == kept


def test_two_that_are_ready_do_not_wait_for_one_that_is_versions_behind() -> None:
    stage = Stage(3)
    stage.driver.book.version = 2
    stage.driver.book.digests[2] = hash_bytes(b"0")
    for name in ("ann", "bob"):
        stage.beats(name, ready=True, version=2)
    stage.says("cyd", version=0)
    assert not waits(stage)


def test_a_round_does_not_wait_longer_than_its_deadline_for_who_is_not_ready() -> None:
    stage = Stage(3)
    for name in ("ann", "bob"):
        stage.beats(name, ready=True)
    stage.tell("ann and bob are ready")
    assert stage.driver.round is None and opens_in_s(stage.driver) == MANIFEST.round.deadline_s
    stage.tell("the deadline is over", after_s=MANIFEST.round.deadline_s)
    assert stage.driver.round is not None and len(stage.driver.round.plan.members) == 2
    assert stage.member("cyd").told.left_out == "round 1: it was not ready in time"


def test_no_round_waits_for_who_has_no_data() -> None:
    """Each commit of the others took the whole deadline, as long as a stream had nothing for one of them."""
    stage = Stage(3)
    stage.member("cyd").without_data = True
    for name in ("ann", "bob"):
        stage.beats(name, ready=True)
    stage.tell("ann and bob are ready")
    assert stage.driver.round is not None and len(stage.driver.round.plan.members) == 2


def restarts(stage: Stage, name: str, times: int = FORGIVEN + 1) -> None:
    """It comes back as another process, each time in the middle of a round."""
    for number in range(times):
        stage.opens()
        stage.member(name).process = process = bytes([number + 1] * 16)
        stage.driver.on_session(stage.guests[name].peer, process)
        stage.driver.abort(AbortCause.TOO_FEW, "it restarted")
        stage.core.now += RETRY_S * 2 ** (number + 1)


def test_who_restarts_again_and_again_is_neither_waited_for_nor_taken_in_where_others_are_enough() -> None:
    stage = Stage(count=3)
    restarts(stage, "cyd")
    for name in ("ann", "bob"):
        stage.beats(name, ready=True)
    stage.beats("cyd")
    stage.driver.maybe_open()
    assert stage.driver.round is not None, "nobody waits for it"
    assert stage.guests["cyd"].peer not in stage.driver.round.plan.members
    stage.driver.abort(AbortCause.TOO_FEW, "once more")
    stage.core.now += 60.0
    stage.beats("cyd", ready=True)
    stage.driver.maybe_open()
    assert stage.guests["cyd"].peer not in stage.driver.round.plan.members, "ready as it is"
    assert stage.member("cyd").told.left_out.endswith(
        "it restarted again and again while others needed what it had sent; it takes part again after 2 more rounds"
    )


def test_where_too_few_others_are_there_it_takes_part_all_the_same() -> None:
    stage = Stage(count=2)
    restarts(stage, "bob")
    for name in ("ann", "bob"):
        stage.beats(name, ready=True)
    stage.driver.maybe_open()
    assert stage.driver.round is not None and len(stage.driver.round.plan.members) == 2


@pytest.mark.parametrize("times", [WITHHELD_MOST - 1, WITHHELD_MOST])
def test_P9_an_owner_that_lacks_a_members_work_round_after_round_owns_nothing_for_a_while(times: int) -> None:
    stage = Stage(3)
    for number in range(1, times + 1):
        stage.opens()
        flight = stage.driver.round
        assert flight is not None
        ann, bob, cyd = (stage.guests[name].peer for name in NAMES)
        owners = tuple(flight.plan.members.index(peer) for peer in (bob, cyd))
        flight.go_by(structs.replace(flight.plan, owners=owners))
        for name in NAMES:
            stage.sends(name, round_no=number)
        for name, whose in (("bob", (bob, cyd)), ("cyd", (ann, bob, cyd))):
            stage.reports(name)
            flight.scatter.held[stage.guests[name].peer] = dict.fromkeys(whose, 0b11)
        stage.core.now += MANIFEST.round.scatter_grace_s
        stage.driver.advance()
        assert flight.decision is not None and ann not in flight.decision.included(flight.plan.members)
        stage.driver.abort(AbortCause.TOO_FEW, "the next one")
        stage.core.now += 10.0
    assert (bob in stage.core.members.can_own(stage.core.now)) == (times < WITHHELD_MOST)
    assert {ann, cyd} <= stage.core.members.can_own(stage.core.now)


def test_P8_no_number_of_steps_or_bytes_that_members_tell_is_too_large_for_the_journal() -> None:
    stage = Stage()
    stage.opens()
    for name in stage.guests:
        member = stage.member(name)
        assert member.beat is not None
        member.beat = structs.replace(member.beat, tx_bytes=(1 << 62) - 1)
        stage.sends(name, steps=(1 << 62) - 1)
    for name in stage.guests:
        stage.reports(name)
    stage.driver.advance()
    flight = stage.driver.round
    assert flight is not None and flight.decision is not None
    shares = {stage.guests[name].peer: name for name in stage.guests}
    for got in (0, 0b11):
        for place, owner in enumerate(flight.plan.owners):
            stage.reports(shares[flight.plan.members[owner]], merged=1 << place, got=got, decision_no=1)
    stage.core.take_effects()
    stage.driver.advance()
    [made] = [e.record for e in stage.core.take_effects() if isinstance(e, Write)]
    assert isinstance(made, CommittedRound)
    assert (made.steps, made.tx_bytes) == (2 * AMOUNT_MAX, 2 * AMOUNT_MAX)
    assert MAX_PEERS * AMOUNT_MAX < 1 << 63, "or the coordinator could not write it down"
    assert from_bytes(to_bytes(made)) == made


def test_a_member_that_has_not_heard_of_the_guards_word_is_not_ready() -> None:
    """It might bring the very work again that the guard threw away."""
    stage = Stage()
    stage.opens()
    stage.driver.abort(AbortCause.GUARD, "far too long", dropped=True)
    stage.core.now += RETRY_S
    for heard, opens in ((0, False), (1, True)):
        for name in stage.guests:
            stage.beats(name, ready=True)
            member = stage.member(name)
            assert member.beat is not None
            said = structs.replace(member.beat.fragments[0], dropped=heard)
            member.beat = structs.replace(member.beat, fragments=(said,))
        stage.driver.maybe_open()
        assert (stage.driver.round is not None) == opens


def test_P4_a_commit_is_told_to_members_that_have_shown_the_runs_state() -> None:
    """Others would roll its results onto a state that is not the run's."""
    stage = Stage(3)
    standing = stage.member("cyd").standings[0]
    standing.verified = standing.vouched = False
    stage.opens()
    assert stage.driver.round is not None
    members = stage.driver.round.plan.members
    both = [name for name, guest in stage.guests.items() if guest.peer in members]
    assert both == ["ann", "bob"]
    for name in both:
        stage.sends(name)
    for name in both:
        stage.reports(name)
    stage.driver.advance()
    for got in (0, 0b11):
        for name in both:
            place = stage.driver.round.plan.owners.index(members.index(stage.guests[name].peer))
            stage.reports(name, merged=1 << place, got=got, decision_no=1)
    stage.core.take_effects()
    stage.driver.advance()
    assert stage.driver.book.version == 1
    effects = stage.core.take_effects()
    heard = {e.peer for e in effects if isinstance(e, Tell) and isinstance(e.message, Committed)}
    assert heard == {stage.guests[name].peer for name in both}


def test_a_pause_of_the_host_holds_all_rounds() -> None:
    stage = Stage()
    stage.core.draining = True
    for name in stage.guests:
        stage.beats(name, ready=True)
    stage.driver.maybe_open()
    assert stage.driver.round is None and "the coordinator is about to end" in stage.driver.reason


# ---- the digest of a version ------------------------------------------------------------------------------------


def at_version_1(stage: Stage, **digests: bytes) -> bool:
    stage.driver.book.version = 1
    for name, digest in digests.items():
        stage.beats(name, version=1, digest=digest)
    return stage.driver.settle_digest()


def test_P18_while_others_may_still_speak_one_voice_settles_nothing_but_not_for_ever() -> None:
    stage = Stage()
    assert not at_version_1(stage, ann=b"a" * 32), "bob is just applying it"
    stage.core.now += 2 * MANIFEST.net.dead_after_s - 0.1
    assert not at_version_1(stage, ann=b"a" * 32)
    stage.core.now += 0.1
    assert at_version_1(stage, ann=b"a" * 32)
    assert stage.driver.book.digests[1] == b"a" * 32


def test_P18_more_than_half_of_those_that_may_speak_settle_what_nobody_contradicts() -> None:
    stage = Stage(3)
    assert not at_version_1(stage, ann=b"a" * 32)
    assert at_version_1(stage, ann=b"a" * 32, bob=b"a" * 32)
    assert stage.driver.book.digests[1] == b"a" * 32


class Undecided(CoordinatorMode):
    """It judges, and never comes to an end."""

    told = "somebody looks into it"
    unproven = groundless = wrong = MappingProxyType[Any, Any]({})

    def judge(self, fragment: int, undefended: bool) -> Any:
        return self

    def step(self, claims: object, now: float) -> bool:
        return False


def test_P18_while_a_mode_judges_most_voices_settle_nothing_that_one_member_contradicts() -> None:
    stage = Stage(3)
    stage.core.modes = (Undecided(),)
    at_version_1(stage, ann=b"x" * 32, bob=b"b" * 32, cyd=b"b" * 32)
    stage.core.now += 100 * MANIFEST.net.dead_after_s
    at_version_1(stage)
    assert 1 not in stage.driver.book.digests
    told = Undecided.told
    assert stage.driver.agreement.reason == told
    for name in stage.guests:
        stage.beats(name, ready=True, version=1, digest=b"b" * 32)
    stage.driver.maybe_open()
    assert stage.driver.round is None and stage.driver.reason == told, "no round before that is known"


def test_P4_who_never_showed_the_runs_state_has_no_voice() -> None:
    stage = Stage()
    stage.driver.book.vouched.clear()
    assert not at_version_1(stage, ann=b"a" * 32, bob=b"a" * 32)


# ---- its parts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ready", "can_own", "most", "taken"),
    [
        (["a", "b", "c"], {"a"}, 3, ["a", "b", "c"]),
        (["a", "b", "c"], {"c"}, 2, ["a", "c"]),  # the last one that can own nothing gives up its place
        (["a", "b", "c"], set(), 2, ["a", "b"]),
    ],
)
def test_where_not_all_fit_some_can_own(
    ready: list[str], can_own: set[str], most: int, taken: list[str]
) -> None:
    assert chosen(ready, can_own, most) == taken


def test_P9_a_young_fragment_is_judged_by_the_past_of_the_others() -> None:
    """Most of its members may claim what they like before it has one of its own."""
    young, old = FragmentBook(), FragmentBook()
    old.figures.rates |= dict.fromkeys(range(1, 1 + NORMS_LEAST), 5.0)

    def usual(*books: FragmentBook) -> float:
        return rules_for(MANIFEST, young, ["ann"], books).merge.usual_rate

    assert usual(young) == 0.0 and usual(young, old) == 5.0
    young.figures.rates |= dict.fromkeys(range(1, 1 + NORMS_LEAST), 7.0)
    assert usual(young, old) == 7.0


def test_P9_trust_grows_by_a_ramp() -> None:
    book = FragmentBook()
    trust = []
    for commits in range(5):
        book.trust["ann"] = commits
        trust.append(rules_for(MANIFEST, book, ["ann"]).merge.trust["ann"])
    assert trust == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_first_hash_list_of_a_round_counts() -> None:
    stage = Stage()
    witness, ann = SignedResults(stage.core), stage.guests["ann"]
    blank = Sent(
        seat=0, counted=b"",
        session=ann.process, seq=1, round_no=1, hashes=hashes_of("ann"), tokens=1, steps=1, loss=None, used=(),
        signature=b"",
    )  # fmt: skip
    assert witness.problem(stage.member("ann"), blank) == "its hash list is not signed by it"
    signed = structs.replace(blank, signature=ann.signer.sign(sent_part(RUN_ID, blank)))
    assert witness.problem(stage.member("ann"), signed) == ""
    assert witness.problem(stage.member("ann"), blank) == "", "a repeated one is not checked again"


def test_after_each_abort_the_next_round_waits_longer() -> None:
    stage, pauses = Stage(), []
    for name in stage.guests:
        stage.beats(name, ready=True)
    for _ in range(7):
        stage.driver.maybe_open()
        stage.driver.abort(AbortCause.TIMED_OUT, "a test")
        over_at = stage.core.now
        while stage.driver._why_not_open(stage.driver.able, stage.driver.able):
            stage.core.now += RETRY_S
        pauses.append(stage.core.now - over_at)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


# ---- what a round will most likely come to -------------------------------------------------------------------


def foreseeing(stage: Stage) -> list[Decided]:
    """What members are told when all have said what they send; the round before went as it would be foreseen."""
    stage.driver._foresight.on_end(False, True)
    stage.opens()
    for name in stage.guests:
        stage.sends(name)
    stage.core.take_effects()
    stage.driver.advance()
    effects = stage.core.take_effects()
    assert not any(isinstance(effect, Write) for effect in effects), "it is nothing that lasts"
    return [each.message for each in effects if isinstance(each, Tell) and isinstance(each.message, Decided)]


def test_all_members_hear_what_their_round_will_come_to_and_nothing_is_written() -> None:
    stage = Stage()
    told = foreseeing(stage)
    assert [each.decision.foreseen for each in told] == [True, True]
    assert [each.decision.weights for each in told] == [(0.5, 0.5)] * 2
    stage.driver.advance()
    assert not stage.core.take_effects(), "and once"


def test_results_made_by_it_are_committed_with_the_decision_and_not_before() -> None:
    stage = Stage()
    foreseeing(stage)
    flight = stage.driver.round
    assert flight is not None
    for name, guest in stage.guests.items():
        stage.reports(name, merged=mask_of(flight.plan.chunks_of(guest.peer)), got=0b11, decision_no=1)
    assert flight.gather.merged.keys() == {0, 1}
    stage.driver.advance()
    kinds = [type(each.record) for each in stage.core.take_effects() if isinstance(each, Write)]
    assert kinds == [DecidedOn, CommittedRound] and stage.driver.book.version == 1
    assert stage.driver._foresight.is_on


def test_the_first_round_of_a_coordinator_tells_nothing_ahead() -> None:
    stage = Stage()
    stage.opens()
    assert stage.driver.round is not None and not stage.driver.round.foresees


def test_a_round_that_came_to_something_else_is_a_mistake_and_the_next_ones_tell_nothing() -> None:
    stage = Stage()
    foreseeing(stage)
    stage.driver.on_restart(stage.guests["bob"].peer)
    for name in stage.guests:
        stage.reports(name)
    stage.driver.advance()
    assert stage.driver.round is None, "one contribution is too few"
    assert not stage.driver._foresight.is_on
    stage.driver._foresight.on_end(False, True)
    assert not stage.driver._foresight.is_on
