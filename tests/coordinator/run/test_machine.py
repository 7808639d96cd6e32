"""The coordinator's machine: who is let in, what counts, and what a restart keeps.

Virtual time, no sockets: `Hall` is the machine with a few signing peers before its door.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from farflung.coordinator.ledger.records import (
    AbortedRound,
    CommittedRound,
    Genesis,
    ModelFixed,
    Opened,
    Record,
    Started,
    from_bytes,
)
from farflung.coordinator.run.effects import AnswerDoor, Effect, Tell, Write
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run.status import why_not
from farflung.protocol import messages as m
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import CheckpointSection, Manifest, RunSection
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import DotProducts, Used
from farflung.protocol.signed_words import hello_part, sent_part
from farflung.protocol.signing import statement_of
from farflung.protocol.states import Phase
from farflung.simulator.world import RUN_ID, Scenario, World
from rig.guests import Guest
from rig.showing import let_all_be_shown, showing

MANIFEST = Manifest(run=RunSection(name="demo", min_peers=2, max_peers=4))
MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
WHERE = m.FragmentBeat(
    fragment=0, version=-1, digest=b"", round_no=0, epoch=0, decision_no=0, ready=False, need=()
)
GENESIS, WRONG = hash_bytes(b"version 0"), hash_bytes(b"something else")


@dataclass
class Hall:
    records: list[Record] = field(default_factory=list)
    manifest: Manifest = MANIFEST

    def __post_init__(self) -> None:
        self.drawn = 0
        self.now = 0.0
        self.effects: list[Effect] = []  # of the last word at the door
        self.machine = RunMachine(self.manifest, RUN_ID, self.records, self.random)
        self.machine.start(self.now, 4000)
        let_all_be_shown(self.machine.core.ledger)

    def random(self, count: int) -> bytes:
        self.drawn += 1
        return hash_bytes(str(self.drawn).encode())[:count]

    def door(self, caller: bytes, key: bytes, message: m.FromDoor) -> m.ToDoor:
        self.effects = self.machine.on_door(caller, key, message, self.now)
        [answer] = [effect.message for effect in self.effects if isinstance(effect, AnswerDoor)]
        return answer

    def hello(
        self, guest: Guest, signed_by: Guest | None = None, key: bytes = b"", **changes: object
    ) -> m.ToDoor:
        challenge = self.door(guest.key, guest.key, m.Knock(protocol=PROTOCOL_VERSION, run="demo"))
        assert isinstance(challenge, m.Challenge)
        greeting = {
            "protocol": PROTOCOL_VERSION, "run_id": RUN_ID, "identity": guest.identity, "key": guest.key,
            "address": f"host:{guest.number + 1}", "software": "test", "manifest": self.manifest.digest,
            "model": MODEL, "fragments": (0,),
            "version": -1, "digest": b"", "process": guest.process, "token": "", "signature": b"",
        }  # fmt: skip
        bare = m.Hello(**{**greeting, **changes})  # type: ignore[arg-type]
        self.last = replace(
            bare, signature=(signed_by or guest).signer.sign(hello_part(bare, challenge.nonce))
        )
        return self.door(guest.key, key or guest.key, self.last)

    def join(self, *guests: Guest, **changes: object) -> None:
        for guest in guests:
            welcome = self.hello(guest, **changes)
            assert isinstance(welcome, m.Welcome), welcome
            guest.session, guest.seq = welcome.session, 0
            self.machine.on_dialled(guest.peer, guest.session, True, self.now)

    def says(self, guest: Guest, message: m.FromMember, key: bytes = b"") -> list[Effect]:
        return self.machine.on_member(key or guest.key, message, self.now)

    def beat(self, guest: Guest, **changes: object) -> m.Tick:
        """It shows that it holds what it says."""
        guest.seq += 1
        beat = beat_of(guest, **changes)
        shown = tuple(showing(self.machine.core.ledger, said) for said in beat.fragments)
        effects = self.says(guest, replace(beat, fragments=shown))
        ticks = [e.message for e in effects if isinstance(e, Tell) and e.peer == guest.peer]
        return next(tick for tick in ticks if isinstance(tick, m.Tick))

    def refuses(self, code: str, text: str, answer: m.ToDoor) -> None:
        assert isinstance(answer, m.Refuse), answer
        assert (answer.code, text in answer.reason) == (code, True), answer


def beat_of(guest: Guest, **changes: object) -> m.Beat:
    plain = {
        "session": guest.session, "seq": guest.seq, "roster_no": 0, "fragments": (WHERE,), "phase": "inner", "step": 0,
        "tokens": 0, "loss": None, "tx_bytes": 0, "rx_bytes": 0, "up_bytes_per_s": 0, "down_bytes_per_s": 0,
        "have": (), "want": 0, "samples": 0, "rough": False, "era": 0, "saved": -1,
        "unsure": False, "leaving": False, "data": b"",
    }  # fmt: skip
    here = {name: changes.pop(name) for name in WHERE.__struct_fields__ if name in changes}
    if here:
        changes["fragments"] = (replace(WHERE, **here),)
    return m.Beat(**{**plain, **changes})  # type: ignore[arg-type]


def with_tensor(**changes: object) -> ModelSchema:
    return replace(MODEL, tensors=(replace(MODEL.tensors[0], **changes),))


# ---- the door ----------------------------------------------------------------------------------------------


def test_a_knock_of_another_protocol_or_for_another_run_is_refused() -> None:
    hall, guest = Hall(), Guest(1)
    wrong = hall.door(guest.key, guest.key, m.Knock(protocol=PROTOCOL_VERSION + 2, run="demo"))
    hall.refuses("protocol", f"speaks version {PROTOCOL_VERSION + 2} of the protocol", wrong)
    hall.refuses(
        "run",
        "'demo', not 'other'",
        hall.door(guest.key, guest.key, m.Knock(protocol=PROTOCOL_VERSION, run="other")),
    )


@pytest.mark.parametrize(
    ("code", "text", "changes"),
    [
        ("protocol", "this peer speaks version 99 of the protocol", {"protocol": 99}),
        ("run", "its run id differs", {"run_id": bytes(16)}),
        ("manifest", "manifest differs", {"manifest": bytes(32)}),
        ("model", "name is v here, w in the run", {"model": with_tensor(name="v")}),
        ("model", "shape is [2, 5] here, [2, 4] in the run", {"model": with_tensor(shape=(2, 5))}),
        ("model", "dtype is bfloat16 here, float32 in the run", {"model": with_tensor(dtype="bfloat16")}),
        ("model", "kind is buffer here, param in the run", {"model": with_tensor(kind="buffer")}),
        ("model", "number of tensors is 0 here, 1", {"model": replace(MODEL, tensors=())}),
        ("model", "chunk_elements is 8 here, 4", {"model": replace(MODEL, chunk_elements=8)}),
        ("model", "chunk_count is 1 here, 2", {"model": replace(MODEL, chunk_count=1)}),
        ("model", "first_plain_chunk is 1 here, 2", {"model": replace(MODEL, first_plain_chunk=1)}),
        ("model", "frozen parameters", {"model": replace(MODEL, frozen=WRONG)}),
    ],
)
def test_a_hello_that_does_not_fit_is_told_which_field_differs(
    code: str, text: str, changes: dict[str, object]
) -> None:
    hall = Hall()
    hall.join(Guest(1))
    hall.refuses(code, text, hall.hello(Guest(2), **changes))
    assert len(hall.machine.core.members.alive) == 1


def test_a_hello_signed_by_somebody_else_is_refused() -> None:
    hall = Hall()
    hall.refuses("signature", "not signed by the identity", hall.hello(Guest(1), signed_by=Guest(2)))
    assert hall.machine.counters.as_dict()["unauthorised"] == 1


def test_a_hello_that_was_changed_after_signing_is_refused() -> None:
    hall, guest = Hall(), Guest(1)
    hall.hello(guest, signed_by=Guest(2))
    challenge = hall.door(guest.key, guest.key, m.Knock(protocol=PROTOCOL_VERSION, run="demo"))
    assert isinstance(challenge, m.Challenge)
    signed = replace(hall.last, signature=guest.signer.sign(hello_part(hall.last, challenge.nonce)))
    hall.refuses("signature", "", hall.door(guest.key, guest.key, replace(signed, address="elsewhere:1")))


def test_a_replayed_hello_is_refused() -> None:
    hall, guest = Hall(), Guest(1)
    hall.join(guest)
    hall.refuses("challenge", "knock first", hall.door(guest.key, guest.key, hall.last))
    hall.door(guest.key, guest.key, m.Knock(protocol=PROTOCOL_VERSION, run="demo"))
    hall.refuses("signature", "", hall.door(guest.key, guest.key, hall.last))


def test_a_hello_over_another_connection_than_its_key_is_refused() -> None:
    hall = Hall()
    hall.refuses("key", "not the key of this connection", hall.hello(Guest(1), key=Guest(2).key))


def test_an_identity_that_is_here_already_is_not_let_in_twice() -> None:
    hall = Hall()
    hall.join(Guest(1))
    answer = hall.hello(Guest(1, restarts=1))
    hall.refuses("already-here", "another process", answer)
    assert isinstance(answer, m.Refuse) and answer.retry_after_s > 0


def test_the_same_process_takes_its_place_over_and_a_restarted_one_once_the_old_one_closed() -> None:
    hall, guest = Hall(), Guest(1)
    hall.join(guest)
    first = guest.session
    hall.join(guest)
    assert guest.session == first, "it said hello again because the answer was slow"
    hall.beat(guest)
    hall.join(guest)
    assert guest.session != first and len(hall.machine.core.members.alive) == 1
    hall.machine.on_closed(guest.peer, guest.session, hall.now)
    hall.join(Guest(1, restarts=1))
    assert len(hall.machine.core.members.alive) == 1


def test_a_full_run_refuses_newcomers_but_not_those_who_come_back() -> None:
    hall = Hall()
    guests = [Guest(number) for number in range(4)]
    hall.join(*guests)
    hall.refuses("full", "4 peers", hall.hello(Guest(9)))
    hall.join(guests[0])


# ---- frames of members -------------------------------------------------------------------------------------


def test_a_session_that_is_not_known_is_told_to_say_hello_again() -> None:
    hall, guest = Hall(), Guest(1, session=bytes(16))
    [effect] = hall.says(guest, m.Leave(session=guest.session, seq=1, reason=""))
    assert isinstance(effect, Tell) and isinstance(effect.message, m.Gone)
    assert not effect.message.final and effect.message.session == guest.session


def test_each_frame_ends_in_exactly_one_counter() -> None:
    """P8, for what the machine sees: the right one, and never two."""
    hall, guest, other = Hall(), Guest(1), Guest(2)
    hall.join(guest, other)
    sent = m.Sent(
        seat=0,
        counted=b"",
        session=guest.session,
        seq=9,
        round_no=1,
        hashes=b"",
        tokens=0,
        steps=0,
        loss=None,
        used=(),
        signature=b"",
    )
    story: list[tuple[Verdict, Callable[[], object]]] = [
        (Verdict.ACCEPTED, lambda: hall.says(guest, replace(beat_of(guest), seq=5))),
        (Verdict.DUPLICATE, lambda: hall.says(guest, replace(beat_of(guest), seq=5))),
        (Verdict.STALE, lambda: hall.says(guest, replace(beat_of(guest), seq=4))),
        (Verdict.UNAUTHORISED, lambda: hall.says(guest, replace(beat_of(guest), seq=6), key=other.key)),
        (Verdict.MALFORMED, lambda: hall.says(guest, replace(beat_of(guest, digest=b"short"), seq=7))),
        (Verdict.STALE, lambda: hall.says(guest, sent)),
        (Verdict.STALE, lambda: hall.says(guest, replace(beat_of(guest), session=bytes(16)))),
        (Verdict.ACCEPTED, lambda: hall.door(guest.key, guest.key, m.AskStatus(run="demo"))),
        (Verdict.ACCEPTED, lambda: hall.says(guest, m.Leave(session=guest.session, seq=10, reason="bye"))),
        (Verdict.STALE, lambda: hall.says(guest, m.Leave(session=guest.session, seq=11, reason="bye"))),
    ]
    for verdict, event in story:
        before, total = hall.machine.counters.as_dict(), hall.machine.counters.total
        event()
        after = hall.machine.counters.as_dict()
        assert after[verdict] == before[verdict] + 1 and hall.machine.counters.total == total + 1


# ---- state: P1, P4, P5 -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def journal() -> list[Record]:
    """Of a run without faults: five rounds of four peers."""
    calm = Scenario(drop=0, duplicate=0, slow=0, kill_per_effect=0, cut_per_s=0, trainer_crash_per_s=0)
    world = World(3, calm)
    assert world.run().outcome == "finished"
    return [from_bytes(raw) for raw in world.journal]


def test_a_restart_at_any_record_keeps_every_commit_and_aborts_an_open_round(journal: list[Record]) -> None:
    version = open_round = started = 0
    for count, record in enumerate(journal, start=1):
        match record:
            case CommittedRound(commit=commit):
                version, open_round = commit.version, 0
            case Opened(plan=plan):
                open_round = plan.round_no
            case AbortedRound():
                open_round = 0
            case Started():
                started += 1
        machine = RunMachine(MANIFEST, RUN_ID, journal[:count], lambda size: bytes(size))
        written = [effect.record for effect in machine.start(0.0, 4000) if isinstance(effect, Write)]
        assert machine.core.ledger.version == version
        clock_s = max(
            (each.at_s for each in journal[:count] if isinstance(each, CommittedRound)), default=0.0
        )
        assert written[0] == Started(incarnation=started + 1, clock_s=clock_s), (
            "the clock goes on from the commit"
        )
        aborted = [record.round_no for record in written if isinstance(record, AbortedRound)]
        assert aborted == ([open_round] if open_round else [])
        assert machine.core.ledger.books[0].open_round == 0 and machine.drivers[0].round is None
    assert version == 5


def until_version(journal: list[Record], version: int) -> list[Record]:
    """The records up to the digest of that version."""
    return journal[: 1 + next(i for i, r in enumerate(journal) if getattr(r, "version", None) == version)]


def test_a_version_that_nobody_here_can_be_applying_is_waited_for(journal: list[Record]) -> None:
    """The last one left between a commit and the word of what that made."""
    committed = next(i for i, r in enumerate(journal) if isinstance(r, CommittedRound))
    records = journal[: committed + 1]
    model = next(record.model for record in records if isinstance(record, ModelFixed))
    hall = Hall(records)
    assert json.loads(hall.machine.status(hall.now))["phase"] == "waiting"
    digests = hall.machine.core.ledger.books[0].digests
    hall.join(Guest(1), model=model, version=0, digest=digests[0])
    assert json.loads(hall.machine.status(hall.now))["phase"] == "apply"


@pytest.mark.parametrize("every_rounds", [0, 1, 20])
def test_P4_P20_after_a_restart_a_fresh_or_stale_peer_never_becomes_the_run(
    journal: list[Record], every_rounds: int
) -> None:
    """Whether a checkpoint may exist or none was due yet, for ten times `go_back_after_s`."""
    records = until_version(journal, 2)
    checkpoint = CheckpointSection(every_rounds=every_rounds, go_back_after_s=4.0)
    model = next(record.model for record in records if isinstance(record, ModelFixed))
    hall, fresh, stale = Hall(records, Manifest(run=MANIFEST.run, checkpoint=checkpoint)), Guest(1), Guest(2)
    before = hall.machine.core.ledger.books[0].digests.copy()
    hall.join(fresh, stale, model=model)
    for _ in range(40):
        hall.now += 1.0
        for guest, holds in ((fresh, {}), (stale, {"version": 0, "digest": before[0]})):
            tick = hall.beat(guest, **holds)
            assert tick.goal == "wait" and tick.fragments[0].donors == () and "nobody online" in tick.reason
        hall.machine.on_timer(hall.now)
    assert hall.machine.core.ledger.version == 2 and hall.machine.core.ledger.books[0].digests == before


def test_P3_a_peer_that_still_applies_the_newest_commit_is_waited_for_a_while(journal: list[Record]) -> None:
    records = until_version(journal, 2)
    model = next(record.model for record in records if isinstance(record, ModelFixed))
    hall, quick, slow = Hall(records), [Guest(1), Guest(2)], Guest(3)
    digests = hall.machine.core.ledger.books[0].digests
    for guest in quick:
        hall.join(guest, model=model, version=2, digest=digests[2])
    hall.join(slow, model=model, version=1, digest=digests[1])
    hall.beat(slow, version=1, digest=digests[1])
    for guest in quick:
        hall.beat(guest, version=2, digest=digests[2], ready=True)
    assert hall.machine.drivers[0].round is None, "two of two are ready, but the third will be in a moment"
    hall.beat(slow, version=2, digest=digests[2], ready=True)
    flight = hall.machine.drivers[0].round
    assert flight is not None and slow.peer in flight.plan.members


def test_the_oldest_peer_founds_version_zero_and_nobody_else_does() -> None:
    hall, first, second = Hall(), Guest(1), Guest(2)
    hall.join(first, second)
    assert hall.beat(second, version=0, digest=WRONG).goal == "wait"
    assert hall.beat(first).goal == "found"
    assert hall.beat(first, version=0, digest=GENESIS).fragments[0].verified
    assert hall.machine.core.ledger.books[0].digests == {0: GENESIS}
    tick = hall.beat(second, version=0, digest=WRONG)
    assert (tick.goal, tick.fragments[0].verified, tick.fragments[0].donors) == ("sync", False, (first.peer,))


def test_P4_whoever_holds_version_zero_serves_it_and_the_founder_is_not_alone_in_that() -> None:
    hall, first, second, third = Hall(), Guest(1), Guest(2), Guest(3)
    hall.join(first, second, third)
    hall.beat(first, version=0, digest=GENESIS)
    hall.beat(second, version=0, digest=GENESIS)
    assert set(hall.beat(third).fragments[0].donors) == {first.peer, second.peer}


def test_P4_the_run_signs_the_digests_of_versions_that_are_saved_for_those_who_hold_them() -> None:
    rules = CheckpointSection(every_rounds=2)
    hall, peer, other = Hall(manifest=MANIFEST.model_copy(update={"checkpoint": rules})), Guest(1), Guest(2)
    hall.machine.core.prove = lambda statement: b"signed " + statement
    hall.join(peer, other)
    hall.beat(peer, version=0, digest=GENESIS)
    book = hall.machine.core.ledger.books[0]
    for version, signs in ((1, False), (2, True), (3, False)):
        book.version, book.digests[version] = version, GENESIS
        let_all_be_shown(hall.machine.core.ledger)
        proof = hall.beat(peer, version=version, digest=GENESIS).fragments[0].proof
        assert proof == (b"signed " + statement_of(RUN_ID, 0, 0, version, GENESIS) if signs else b"")
        assert hall.beat(other, version=0, digest=GENESIS).fragments[0].proof == b""


def test_others_hear_of_a_newcomer_before_it_is_welcomed(journal: list[Record]) -> None:
    """Who comes back over connections that still stand asks at once, and must not be a stranger then."""
    hall, first, second = Hall(until_version(journal, 2)), Guest(1), Guest(2)
    model = next(record.model for record in journal if isinstance(record, ModelFixed))
    hall.join(first, model=model)
    hall.beat(first)
    assert isinstance(hall.hello(second, model=model), m.Welcome)
    told = [e.message for e in hall.effects if isinstance(e, Tell | AnswerDoor)]
    tick, welcome = (
        next(t for t in told if isinstance(t, m.Tick)),
        next(t for t in told if isinstance(t, m.Welcome)),
    )
    assert tick.roster is not None and second.peer in {contact.peer for contact in tick.roster}
    assert told.index(tick) < told.index(welcome)


def test_P3_nobody_waits_for_a_peer_whose_trainer_hangs(journal: list[Record]) -> None:
    records = until_version(journal, 2)
    model = next(record.model for record in records if isinstance(record, ModelFixed))
    hall, quick, stuck = Hall(records), [Guest(1), Guest(2)], Guest(3)
    digest = hall.machine.core.ledger.books[0].digests[2]
    hall.join(*quick, stuck, model=model, version=2, digest=digest)
    hall.beat(stuck, version=2, digest=digest)
    for guest in quick:
        hall.beat(guest, version=2, digest=digest, ready=True)
    assert hall.machine.drivers[0].round is None, "the third takes its steps"
    tick = hall.beat(stuck, version=2, digest=digest, phase=Phase.STUCK)
    flight = hall.machine.drivers[0].round
    assert flight is not None and stuck.peer not in flight.plan.members
    assert tick.fragments[0].verified, "it may serve its state all the same"
    member = hall.machine.core.members.members[stuck.peer]
    assert member.told.state == "stuck"
    assert why_not(hall.machine.core, hall.machine.drivers, member) == "its trainer takes no steps any more"


@pytest.mark.parametrize("wakes_by", ["a beat", "its timer"])
def test_P3_a_round_is_not_late_for_the_time_in_which_the_coordinator_stood_still(
    journal: list[Record], wakes_by: str
) -> None:
    """Stopped by its system: what members said meanwhile is only read afterwards."""
    records = until_version(journal, 2)
    model = next(record.model for record in records if isinstance(record, ModelFixed))
    hall, guests = Hall(records), [Guest(1), Guest(2)]
    digest = hall.machine.core.ledger.books[0].digests[2]
    hall.join(*guests, model=model, version=2, digest=digest)

    def pass_time(seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            hall.now += 0.5
            for guest in guests:
                hall.beat(guest, version=2, digest=digest, ready=True)
            hall.machine.on_timer(hall.now)

    pass_time(1.0)
    flight = hall.machine.drivers[0].round
    assert flight is not None
    opened_at, timeout_s = flight.opened_at, hall.manifest.round.round_timeout_s
    hall.now += 3 * timeout_s
    if wakes_by == "a beat":
        hall.beat(guests[0], version=2, digest=digest, ready=True)
    hall.machine.on_timer(hall.now)
    assert hall.machine.drivers[0].round is flight
    pass_time(timeout_s - 10.0)
    assert hall.machine.drivers[0].round is flight, "it has all its time"
    pass_time(12.0)
    assert hall.machine.drivers[0].round is not flight, "and no more"
    assert flight.opened_at == opened_at, "members trained on: by this their next work is measured (P6)"


def test_who_is_not_ready_when_a_round_opens_is_told_why(journal: list[Record]) -> None:
    records = until_version(journal, 2)
    model = next(record.model for record in records if isinstance(record, ModelFixed))
    hall, quick, slow = Hall(records), [Guest(1), Guest(2)], Guest(3)
    digest = hall.machine.core.ledger.books[0].digests[2]
    hall.join(*quick, slow, model=model, version=2, digest=digest)
    for _ in range(int(hall.manifest.round.deadline_s) + 2):
        hall.now += 1.0
        hall.beat(slow, version=2, digest=digest)
        for guest in quick:
            hall.beat(guest, version=2, digest=digest, ready=True)
        hall.machine.on_timer(hall.now)
    flight, member = hall.machine.drivers[0].round, hall.machine.core.members.members[slow.peer]
    assert flight is not None and slow.peer not in flight.plan.members
    assert why_not(hall.machine.core, hall.machine.drivers, member) == "", "the round may still fail"
    hall.machine.drivers[0]._count_participation(tuple(guest.peer for guest in quick))
    told = why_not(hall.machine.core, hall.machine.drivers, member)
    assert told == f"round {flight.plan.round_no}: it was not ready in time"
    assert not member.participating, "what the status says in two ways must not differ"


def test_a_peer_whose_digest_deviates_is_quarantined_and_told_to_sync(journal: list[Record]) -> None:
    records = until_version(journal, 2)
    model = next(record.model for record in records if isinstance(record, ModelFixed))
    hall, guests, deviant = Hall(records), [Guest(1), Guest(2)], Guest(3)
    true = hall.machine.core.ledger.books[0].digests[2]
    hall.join(*guests, deviant, model=model)
    for guest in guests:
        assert hall.beat(guest, version=2, digest=true).fragments[0].verified
    tick = hall.beat(deviant, version=2, digest=WRONG, ready=True)
    assert (tick.goal, tick.fragments[0].verified) == ("sync", False) and set(tick.fragments[0].donors) == {
        g.peer for g in guests
    }
    member = hall.machine.core.members.members[deviant.peer]
    assert (member.told.state, member.participating) == ("quarantined", False)
    for guest in guests:
        hall.beat(guest, version=2, digest=true, ready=True)
    flight = hall.machine.drivers[0].round
    assert flight is not None and deviant.peer not in flight.plan.members
    assert hall.beat(deviant, version=2, digest=true).fragments[0].verified
    assert strikes_of(hall, deviant) == 1


def test_an_initial_state_of_an_earlier_beginning_is_replaced_and_is_no_misdeed(
    journal: list[Record],
) -> None:
    founded = next(i for i, record in enumerate(journal) if isinstance(record, Genesis))
    records = journal[: founded + 1]
    model = next(record.model for record in records if isinstance(record, ModelFixed))
    hall, guest, late = Hall(records), Guest(1), Guest(2)
    hall.join(guest, late, model=model)
    true = hall.machine.core.ledger.books[0].digests[0]
    hall.beat(guest, version=0, digest=true)
    assert hall.beat(late, version=0, digest=WRONG).goal == "sync"
    assert (
        hall.machine.core.members.members[late.peer].told.state == "quarantined"
        and strikes_of(hall, late) == 0
    )


def strikes_of(hall: Hall, guest: Guest) -> int:
    core = hall.machine.core
    return sum(text.startswith(f"{core.name(guest.peer)} gets a strike") for _, text in core.events)


# ---- hostile members ---------------------------------------------------------------------------------------

small = st.integers(0, 5)
masks = st.binary(max_size=2)
hashes = st.lists(st.sampled_from([GENESIS, WRONG, b"", b"odd"]), max_size=4).map(b"".join)
used = st.lists(st.builds(Used, st.integers(0, 3), st.integers(0, 600)), max_size=3).map(tuple)
words_of_members = st.one_of(
    st.fixed_dictionaries({"version": st.integers(-1, 3), "digest": st.sampled_from([b"", GENESIS, WRONG]),
        "ready": st.booleans(), "have": st.lists(small).map(tuple), "want": st.integers(0, 600), "samples": small,
        "rough": st.booleans(),
        "loss": st.none() | st.floats(), "need": st.lists(small, max_size=8).map(tuple)}),
    st.fixed_dictionaries({"round_no": small, "hashes": hashes, "tokens": small, "steps": small, "seat": small,
                           "counted": st.binary(max_size=4),
        "loss": st.none() | st.floats(), "used": used, "signature": st.just(b"")}),
    st.fixed_dictionaries({"round_no": small, "decision_no": small, "merged": masks, "got": masks,
        "held": st.dictionaries(st.sampled_from([Guest(1).peer, Guest(2).peer, "?"]),
            st.tuples(masks, st.sampled_from([GENESIS, WRONG]))),
        "refused": st.dictionaries(st.sampled_from([Guest(1).peer, "?"]), st.sampled_from(list(Verdict)), max_size=2),
        "cut_off": st.lists(st.sampled_from([Guest(2).peer, "?"]), max_size=2).map(tuple),
        "merged_hashes": hashes, "got_hash": st.sampled_from([GENESIS, WRONG]),
        "lengths": st.binary(max_size=17),
        "got_by": st.dictionaries(
            st.sampled_from([Guest(1).peer, "?"]), st.sampled_from([GENESIS, WRONG]), max_size=2
        ),
        "inputs": st.sampled_from([b"", GENESIS]), "signature": st.just(b""),
        "dots": st.none() | st.builds(DotProducts, masks, masks, st.lists(st.floats(), max_size=3).map(tuple))}),
)  # fmt: skip


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from([1, 2]), words_of_members), max_size=25))
def test_whatever_members_say_the_machine_goes_on_and_all_it_says_fits_the_wire(
    story: list[tuple[int, dict[str, object]]],
) -> None:
    hall, guests = Hall([ModelFixed(model=MODEL, peer="?"), Genesis(digest=GENESIS, peer="?")]), {}
    for number in (1, 2):
        guests[number] = Guest(number)
        hall.join(guests[number])
        hall.beat(guests[number], version=0, digest=GENESIS, samples=600, want=300, ready=True)
    for number, body in story:
        guest, hall.now = guests[number], hall.now + 0.1
        guest.seq += 1
        head = {"session": guest.session, "seq": guest.seq}
        kind = m.Sent if "steps" in body else m.ProgressReport
        message = beat_of(guest, **body) if "ready" in body else kind(**head, **body)  # type: ignore[arg-type]
        if isinstance(message, m.Sent):
            message = replace(message, signature=guest.signer.sign(sent_part(RUN_ID, message)))
        effects = hall.says(guest, message) + hall.machine.on_timer(hall.now)
        for effect in effects:
            if isinstance(effect, Tell):
                assert m.decode(m.encode(effect.message), frozenset(m.MEMBER_OUT)) == effect.message
