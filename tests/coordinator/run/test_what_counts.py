"""What the machine takes from a member, and whom it tells of commits: not from or to one whose state is not the run's.

The whole machine, on virtual time: each rule here needs two of its parts, and held nowhere else but in whole runs.
"""

from __future__ import annotations

from msgspec.structs import replace

from farflung.coordinator.door.hello_check import HelloPassed
from farflung.coordinator.ledger.records import (
    CommittedRound,
    DataFixed,
    DigestFixed,
    Genesis,
    ModelFixed,
    Record,
    Released,
    RolledBack,
)
from farflung.coordinator.rounds.round_policy import Done
from farflung.coordinator.run.effects import AnswerDoor, Effect, Tell, Write
from farflung.coordinator.run.lease_desk import RELEASE_AFTER_DEAD
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol import messages as m
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Excluded, ExclusionCause
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest, RunSection
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Commit, Decision, Used
from farflung.protocol.signed_words import hello_part, sent_part
from rig.guests import Guest
from rig.made_run import BARE_BEAT, NOWHERE, RUN_ID, MadeRun, digest_of, holding
from rig.showing import let_all_be_shown, showing

MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
MANIFEST = Manifest(run=RunSection(min_peers=2))
BEGUN: list[Record] = [
    ModelFixed(model=MODEL, peer="?"),
    Genesis(digest=digest_of(0), peer="?"),
    DataFixed(samples=1000, peer="?"),
]
COMMIT_1 = Commit(1, 1, ("?",), (1.0,), bytes(64), "fp32")
ONE_VERSION: list[Record] = [
    *BEGUN,
    CommittedRound(
        commit=COMMIT_1, used={}, excluded={}, tokens=1, steps=1, loss=None, seconds=1.0, tx_bytes=0
    ),
    DigestFixed(version=1, digest=digest_of(1)),
]


class Hall:
    """The machine, and guests that are in: the door's part of the hello is done."""

    def __init__(self, records: list[Record]) -> None:
        self.now, self.drawn = 0.0, 0
        self.machine = RunMachine(MANIFEST, RUN_ID, records, self.random)
        self.machine.start(self.now, 4000)
        let_all_be_shown(self.machine.core.ledger)

    def random(self, count: int) -> bytes:
        self.drawn += 1
        return hash_bytes(str(self.drawn).encode())[:count]

    def joins(self, *guests: Guest) -> None:
        for guest in guests:
            bare = m.Hello(
                protocol=PROTOCOL_VERSION, run_id=RUN_ID, identity=guest.identity, key=guest.key,
                address=f"host:{guest.number + 1}", software="test", manifest=MANIFEST.digest, model=MODEL,
                fragments=(0,), version=-1,
                digest=b"", process=guest.process, token="", signature=b"",
            )  # fmt: skip
            hello = replace(bare, signature=guest.signer.sign(hello_part(bare, bytes(32))))
            effects = self.machine.on_hello(guest.key, HelloPassed(hello, bytes(32)), self.now)
            [welcome] = [each.message for each in effects if isinstance(each, AnswerDoor)]
            assert isinstance(welcome, m.Welcome), welcome
            guest.session, guest.seq = welcome.session, 0
            self.machine.on_dialled(guest.peer, guest.session, True, self.now)

    def says(self, guest: Guest, message: m.FromMember) -> list[Effect]:
        guest.seq += 1
        said = replace(message, session=guest.session, seq=guest.seq)
        if isinstance(said, m.Sent):
            said = replace(said, signature=guest.signer.sign(sent_part(RUN_ID, said)))
        return self.machine.on_member(guest.key, said, self.now)

    def told(self, guest: Guest, **beat: object) -> list[m.Message]:
        plain = replace(BARE_BEAT, **beat)
        shown = tuple(showing(self.machine.core.ledger, each) for each in plain.fragments)
        effects = self.says(guest, replace(plain, fragments=shown))
        return [each.message for each in effects if isinstance(each, Tell) and each.peer == guest.peer]

    def tick(self, guest: Guest, **beat: object) -> m.Tick:
        return next(each for each in self.told(guest, **beat) if isinstance(each, m.Tick))


def commits(told: list[m.Message]) -> list[int]:
    return [each.commit.version for each in told if isinstance(each, m.Committed)]


# ---- samples (P7) --------------------------------------------------------------------------------------------


def test_P7_samples_of_a_peer_that_falls_silent_for_good_are_lent_to_the_others() -> None:
    hall, ann, bob = Hall(BEGUN), Guest(1), Guest(2)
    hall.joins(ann, bob)
    [lost] = hall.tick(ann, fragments=holding(0), want=8).leases or ()
    released: list[Record] = []
    silent_s = MANIFEST.net.dead_after_s * (1 + RELEASE_AFTER_DEAD)
    while not released and hall.now < 2 * silent_s:
        hall.now += 1.0
        hall.tick(bob, fragments=holding(0))
        effects = hall.machine.on_timer(hall.now)
        released += [e.record for e in effects if isinstance(e, Write) and isinstance(e.record, Released)]
    assert hall.now == silent_s, "not before: it may come back"
    [found] = hall.tick(bob, fragments=holding(0), want=8).leases or ()
    assert (found.epoch, found.start, found.stop) == (lost.epoch, lost.start, lost.stop)


def test_P7_what_a_restarted_peer_sent_before_is_not_taken_and_it_gets_its_samples_again() -> None:
    """Its new process takes the same steps once more: the round must not acknowledge them as well."""
    hall, ann, bob = Hall(BEGUN), Guest(1), Guest(2)
    hall.joins(ann, bob)
    for guest in (ann, bob):
        hall.tick(guest, fragments=holding(0), want=8)
    ready = replace(holding(0)[0], ready=True)
    for guest in (ann, bob):
        hall.tick(guest, fragments=(ready,))
    driver = hall.machine.drivers[0]
    flight = driver.round
    assert flight is not None and set(flight.plan.members) == {ann.peer, bob.peer}
    held = hall.machine.core.ledger.leases.of(ann.peer)
    used = tuple(Used(number, each.stop) for number, each in held.items())
    sent = m.Sent(
        seat=0, counted=b"",
        session=bytes(16), seq=0, round_no=flight.plan.round_no, hashes=bytes(64), tokens=8, steps=1, loss=None,
        used=used, signature=b"",
    )  # fmt: skip
    hall.says(ann, sent)
    assert ann.peer in flight.scatter.sent and driver.may_use_work_of(ann.peer)
    hall.machine.on_closed(ann.peer, ann.session, hall.now)
    again = Guest(1, restarts=1)
    hall.joins(again)
    assert flight.scatter.barred == {
        ann.peer: Excluded(ExclusionCause.RESTARTED, "it restarted during the round")
    }
    assert not driver.may_use_work_of(ann.peer)
    leases = hall.tick(again, fragments=holding(0)).leases or ()
    assert [each.lease for each in leases] == list(held) and all(each.upto == each.start for each in leases)


# ---- eras ----------------------------------------------------------------------------------------------------


def test_P4_a_beat_of_an_older_era_changes_nothing_whatever_version_it_names() -> None:
    records = [*ONE_VERSION, RolledBack(versions=(0,), reason="lost")]
    hall, ann = Hall(records), Guest(1)
    hall.joins(ann)
    late = hall.tick(ann, fragments=holding(0), era=0, want=8)
    assert late.era == 1 and not late.fragments[0].verified and not late.leases
    member = hall.machine.core.members.alive[ann.peer]
    assert not member.standings[0].vouched and hall.machine.core.ledger.books[0].vouched == set()
    now = hall.tick(ann, fragments=holding(0), era=1, want=8)
    assert now.fragments[0].verified and now.leases


# ---- commits -------------------------------------------------------------------------------------------------


def test_P4_who_holds_a_state_that_is_not_the_runs_is_told_no_commit_to_put_on_top_of_it() -> None:
    hall, ann, bob = Hall(ONE_VERSION), Guest(1), Guest(2)
    hall.joins(ann, bob)
    need = {"need": (1,)}
    odd = replace(NOWHERE, version=0, digest=digest_of(99), **need)
    assert commits(hall.told(bob, fragments=(odd,))) == []
    shown = replace(holding(0)[0], **need)
    assert commits(hall.told(ann, fragments=(shown,))) == [1]
    assert commits(hall.told(bob, fragments=(replace(NOWHERE, **need),))) == [1], (
        "it holds nothing to spoil: it fetches the state first"
    )
    assert commits(hall.told(bob, fragments=(shown,))) == [1], "now it has shown the run's state"


def test_P4_a_new_commit_is_told_to_members_that_have_shown_the_runs_state_and_to_nobody_else() -> None:
    run = MadeRun()
    ann, bob = run.enters("ann"), run.enters("bob", verified=False)
    for member in (ann, bob):
        run.says(member)
    flight = run.opens(ann)
    flight.decision = Decision(flight.plan.round_no, 1, (1.0,), {})
    flight.scatter.sent[ann.peer] = m.Sent(
        seat=0, counted=b"",
        session=ann.session, seq=1, round_no=flight.plan.round_no, hashes=bytes(64), tokens=8, steps=1, loss=None,
        used=(), signature=b"",
    )  # fmt: skip
    commit = Commit(1, flight.plan.round_no, (ann.peer,), (1.0,), bytes(64), "fp32")
    record = run.drivers[0].record(flight, Done(commit))
    run.core.write(record)
    run.drivers[0].on_committed(flight, record, late=frozenset())
    told = [(each.peer, each.message) for each in run.effects() if isinstance(each, Tell)]
    assert [peer for peer, message in told if isinstance(message, m.Committed)] == [ann.peer]
