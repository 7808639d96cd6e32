"""Members without a trainer at the coordinator: who lets them in, what counts of them, and what never does."""

from __future__ import annotations

from dataclasses import replace

from farflung.coordinator.ledger.records import DataFixed, Granted
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import Done, RoundCommitted, RoundWaits
from farflung.coordinator.rounds.round_rules import rules_for
from farflung.coordinator.run.lease_desk import LeaseDesk
from farflung.coordinator.run.membership import Member
from farflung.protocol import messages as m
from farflung.protocol.digests import combined, hash_bytes, mask_to_bytes
from farflung.protocol.manifest import Manifest, MergeSection, RunSection
from farflung.protocol.round_words import Plan
from farflung.protocol.states import Goal
from rig.guests import Guest
from rig.made_run import MadeRun, holding, peer_of
from rig.undialled_hall import MODEL, Hall

MANIFEST = Manifest(run=RunSection(name="demo", min_peers=2), merge=MergeSection(policy="mean"))


def test_whoever_helps_waits_for_somebody_who_trains_and_is_told_the_runs_model() -> None:
    hall, hal, ann = Hall(), Guest(1), Guest(2)
    refused = hall.hello(hal, helps=True)
    assert isinstance(refused, m.Refuse) and refused.code == "too-early" and refused.retry_after_s > 0
    assert hall.machine.core.ledger.model is None, "nobody takes a model from it"
    assert isinstance(hall.hello(ann), m.Welcome)
    knocked = hall.machine.on_door(
        hal.key, hal.key, m.Knock(protocol=m_version(), run="demo", helps=True), 0.0
    )
    [told] = [each.message for each in knocked]  # type: ignore[union-attr]
    assert isinstance(told, m.Challenge) and told.model == MODEL
    plain = hall.machine.on_door(ann.key, ann.key, m.Knock(protocol=m_version(), run="demo"), 0.0)
    assert plain[0].message.model is None, "those who train bring it"  # type: ignore[union-attr]
    assert isinstance(hall.hello(hal, helps=True), m.Welcome)


def m_version() -> int:
    from farflung.protocol.limits import PROTOCOL_VERSION

    return PROTOCOL_VERSION


def test_whoever_helps_founds_nothing_though_it_is_the_oldest() -> None:
    hall, ann, hal, bob = Hall(), Guest(2), Guest(1), Guest(3)
    for guest, helps in ((ann, False), (hal, True), (bob, False)):
        welcome = hall.hello(guest, helps=helps)
        assert isinstance(welcome, m.Welcome)
        guest.session, guest.seq = welcome.session, 0
    ann.seq += 1
    hall.says(ann, m.Leave(session=ann.session, seq=ann.seq, reason="bye"))
    assert hall.beat(hal).goal == Goal.WAIT
    assert hall.beat(bob).goal == Goal.FOUND


def run_with(*names: str) -> tuple[MadeRun, list[Member]]:
    """The last one helps."""
    run = MadeRun(MANIFEST)
    members = [run.enters(name) for name in names]
    members[-1].helps = True
    return run, members


def test_whoever_helps_counts_for_no_quorum() -> None:
    run, [ann, hal] = run_with("ann", "hal")
    assert [each.peer for each in run.drivers[0].able] == [ann.peer]
    assert hal.peer not in run.core.members.trainers and not hal.trains


def test_nothing_is_leased_to_whoever_helps_and_its_word_of_the_data_is_not_heard() -> None:
    run, [_, hal] = run_with("ann", "hal")
    run.core.write(DataFixed(samples=100, peer=peer_of("ann")))
    lease_desk = LeaseDesk(run.core, run.drivers)
    beat = run.says(hal, fragments=holding(0), want=16, samples=7)
    assert lease_desk.words.hear(hal, beat) is None
    lease_desk.lease(hal, beat)
    written = run.records()
    assert not any(isinstance(each, Granted) for each in written)
    assert all(each.samples == 100 for each in written if isinstance(each, DataFixed))


def flight_with_one_who_helps() -> Round:
    """ann and bob contribute, hal owns both chunks."""
    peers = tuple(sorted(map(peer_of, ("ann", "bob", "hal"))))
    plan = Plan(1, 1, 0, peers, (2, 2), ("fp32",) * 3)
    run = MadeRun(MANIFEST)
    rules = rules_for(run.manifest, run.drivers[0].book, peers)
    return Round(plan, replace(rules, min_peers=2, helpers=frozenset({peer_of("hal")})), 0.0)


def sent(who: str, tokens: int = 10) -> m.Sent:
    hashes = b"".join(hash_bytes(f"{who} {chunk}".encode()) for chunk in range(2))
    return m.Sent(
        session=bytes(16), seq=1, round_no=1, hashes=hashes, tokens=tokens, steps=1, loss=1.0, used=(), seat=0,
        counted=b"", signature=b"",
    )  # fmt: skip


def report(
    decision_no: int = 0, held: tuple[str, ...] = (), merged: bool = False, got: bool = False
) -> m.ProgressReport:
    results = [hash_bytes(f"result {chunk}".encode()) for chunk in range(2)]
    both = mask_to_bytes(0b11)
    proofs = {
        peer_of(who): (both, combined((chunk, hash_bytes(f"{who} {chunk}".encode())) for chunk in range(2)))
        for who in held
    }
    return m.ProgressReport(
        session=bytes(16), seq=1, round_no=1, decision_no=decision_no, held=proofs, refused={}, cut_off=(),
        merged=both if merged else b"", merged_hashes=b"".join(results) if merged else b"",
        got=both if got else b"", got_hash=combined(enumerate(results)) if got else combined(()),
        dots=None, inputs=b"", signature=b"", lengths=b"", got_by={},
    )  # fmt: skip


def test_what_whoever_helps_sends_goes_into_no_sum_and_nobody_waits_for_it() -> None:
    flight = flight_with_one_who_helps()
    alive, hal = set(flight.plan.members), peer_of("hal")
    for who in ("ann", "bob", "hal"):
        assert flight.on_sent(peer_of(who), sent(who)) is None
    flight.on_progress(hal, report(held=("ann", "bob", "hal")))
    step = flight.next_step(0.1, alive, {hal})
    assert isinstance(step, RoundCommitted)
    assert step.decision.included(flight.plan.members) == (peer_of("ann"), peer_of("bob"))
    assert "helps" in step.decision.reasons[hal]


def test_no_commit_counts_what_those_hold_who_help() -> None:
    flight = flight_with_one_who_helps()
    alive, hal = set(flight.plan.members), peer_of("hal")
    for who in ("ann", "bob"):
        flight.on_sent(peer_of(who), sent(who))
    flight.on_progress(hal, report(held=("ann", "bob")))
    assert isinstance(flight.next_step(0.1, alive, {hal}), RoundCommitted)
    flight.on_progress(hal, report(1, merged=True, got=True))
    flight.on_progress(peer_of("ann"), report(1, got=True))
    waits = flight.next_step(0.2, alive, {hal})
    assert isinstance(waits, RoundWaits) and "not yet held by 2 peers" in waits.reason
    flight.on_progress(peer_of("bob"), report(1, got=True))
    assert isinstance(flight.next_step(0.3, alive, {hal}), Done)
