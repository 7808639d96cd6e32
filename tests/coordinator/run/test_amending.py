"""The host changes what holds: what is written, whom it reaches and when, and what is refused without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import Amended, RolledBack
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run.operator_orders import AmendmentOrders
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Amend, Reply
from farflung.protocol.run_terms import Terms
from farflung.protocol.signing import Amendment, is_hosts
from rig.made_run import RUN_ID, MadeRun, peer_of

ANN, BOB = peer_of("ann"), peer_of("bob")
TEN = "[round]\nsync_every = 10\n"


def manifest_of(text: str) -> Manifest:
    return Manifest.from_toml(text, "run.toml")


class Office(MadeRun):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.signs: list[bytes] = []
        self.core.prove = self._prove

    def _prove(self, statement: bytes) -> bytes:
        self.signs.append(statement)
        return b"p" * 96

    def amends(self, text: str, at: int | None = None) -> Reply:
        order = Amend(manifest=manifest_of(text).model_dump_json().encode(), at=at)
        return AmendmentOrders(self.core, self.drivers).obey(order)

    def refuses(self, text: str, at: int | None = None) -> str:
        self.effects()
        with pytest.raises(UserError) as caught:
            self.amends(text, at)
        assert self.effects() == [] and "\n" not in str(caught.value)
        return str(caught.value)


def test_an_amendment_is_signed_written_and_holds_from_the_next_round_on() -> None:
    office = Office()
    for _ in range(3):
        office.commits({ANN: (), BOB: ()})
    office.effects()
    reply = office.amends(TEN)
    assert reply.text == "amendment 1, from version 3 on: [round] sync_every = 10"
    [record] = [each for each in office.records() if isinstance(each, Amended)]
    made = record.amendment
    assert (made.number, made.version, made.era, made.before) == (1, 3, 0, Manifest().digest)
    assert office.signs == [made.statement(RUN_ID)] and made.proof == b"p" * 96
    assert office.core.manifest.round.sync_every == 10 and office.core.terms.first == Manifest()
    assert [office.core.amended_for(version) for version in (2, 3)] == [0, 1]
    assert office.replayed().amendments == [made]


def test_a_round_in_flight_ends_as_it_was_begun() -> None:
    office = Office()
    office.commits({ANN: (), BOB: ()})
    ann, bob = office.enters("ann"), office.enters("bob")
    office.drivers[0].round = office.opens(ann, bob)
    assert office.refuses(TEN, at=1) == (
        "--at 1: expected 2 or more, since the rounds before that are made or begun"
    )
    office.amends(TEN)
    assert office.core.terms.amendments[0].version == 2 and office.core.manifest.round.sync_every == 50


def test_it_holds_from_the_named_version_on() -> None:
    office = Office()
    office.amends(TEN, at=2)
    for version, due in ((0, 50), (1, 50), (2, 10)):
        assert office.core.ledger.version == version and office.core.manifest.round.sync_every == due
        office.commits({ANN: (), BOB: ()})


def test_none_brings_forward_what_is_to_hold_only_later() -> None:
    """It follows on the pending one, so it would carry its terms into rounds that were to have the older ones."""
    office = Office()
    office.amends(TEN, at=2)
    both = TEN + "deadline_s = 9.0\n"
    rest = (
        "amendment 1 holds only from version 2 on ([round] sync_every = 10), and would hold as soon; give --at 2 or a "
        "later version, or put back [round] sync_every to take it back"
    )
    assert office.refuses(both) == f"no --at was given, so this would hold from the next round on: {rest}"
    assert office.refuses(both, at=1) == f"--at 1: {rest}"
    assert office.core.terms.count == 1
    assert office.amends(both, at=2).found == {"amendment": 2, "version": 2}
    for version, due in ((0, 50), (1, 50), (2, 10)):
        assert office.core.ledger.version == version and office.core.manifest.round.sync_every == due
        office.commits({ANN: (), BOB: ()})
    assert office.refuses(TEN, at=1).startswith("--at 1: expected 3 or more"), "none is pending any more"
    assert office.amends(TEN).found == {"amendment": 3, "version": 3}


def test_what_is_pending_is_taken_back_by_whoever_puts_it_back() -> None:
    office = Office()
    office.amends(TEN, at=2)
    assert office.amends("[round]\ndeadline_s = 9.0\n").found == {"amendment": 2, "version": 0}
    for version in range(4):
        holds = office.core.manifest.round
        assert (office.core.ledger.version, holds.sync_every, holds.deadline_s) == (version, 50, 9.0)
        office.commits({ANN: (), BOB: ()})


@pytest.mark.mode("admission")
def test_admission_is_changed_at_once_whatever_is_pending() -> None:
    office = Office()
    office.amends(TEN, at=50)
    office.amends(f'{TEN}[admission]\nmode = "token"\n')
    assert office.core.manifest.admission.mode == "token" and office.core.terms.count == 1


def test_what_was_reached_before_the_run_went_back_is_not_waited_for() -> None:
    office = Office()
    for _ in range(3):
        office.commits({ANN: (), BOB: ()})
    office.amends(TEN)
    office.core.write(RolledBack(versions=(1,), reason="lost"))
    assert office.core.ledger.eras.number == 1 and office.core.terms.number_at(1) == 0
    assert office.amends(TEN + "deadline_s = 9.0\n").found == {"amendment": 2, "version": 1}


def test_what_can_not_be_is_refused_and_leaves_no_trace() -> None:
    office = Office()
    assert office.refuses("") == "nothing in it is otherwise than the run has it already"
    assert office.refuses("[model]\nlayers = 4\n").startswith(
        "[model] layers may not change while a run goes on"
    )
    told = office.refuses(TEN, at=100)
    assert told == "no round follows on version 100: the run ends at version 100"
    for _ in range(3):
        office.commits({ANN: (), BOB: ()})
    assert office.refuses("[run]\nrounds = 2\n") == "no round follows on version 3: the run ends at version 2"
    office.amends("[run]\nrounds = 3\n")
    assert office.core.finished
    told = office.refuses("[run]\nrounds = 9\n")
    assert told == "the run is complete: begin a new one, with [start] from its last checkpoint"


@pytest.mark.mode("admission")
def test_admission_is_changed_at_once_and_is_no_amendment() -> None:
    office = Office()
    reply = office.amends('[admission]\nmode = "token"\n')
    assert reply.text == "[admission] is as the file says, from now on" and not office.core.terms.count
    assert office.core.manifest.admission.mode == "token" and office.written == []


@pytest.mark.mode("admission")
def test_a_coordinator_that_is_started_again_goes_on_with_what_was_amended(tmp_path: Path) -> None:
    """With the file that it began with, or with the one that says what holds now; by the journal, folded or not."""
    keys, path = load_or_create(tmp_path), tmp_path / "journal.sqlite"
    with Journal.open_or_create(path, Manifest(), lambda: RUN_ID) as journal:
        machine = RunMachine(journal.manifest, RUN_ID, [], lambda count: bytes(count))
        machine.core.prove = keys.prove
        order = Amend(manifest=manifest_of(TEN).model_dump_json().encode(), at=0)
        reply, effects = machine.obey(order, 0.0)
        assert reply.ok, reply.text
        journal.append([each.record for each in effects if hasattr(each, "record")])
    for folded in (False, True):
        for text in ("", TEN, f'{TEN}[admission]\nmode = "token"\n[net]\nrelay = "off"\n'):
            with Journal.open_or_create(path, manifest_of(text), lambda: RUN_ID) as journal:
                again = RunMachine(journal.manifest, RUN_ID, journal.records(), lambda count: bytes(count))
                assert journal.manifest.digest == Manifest().digest, "the run is the same"
                assert again.core.manifest.round.sync_every == 10 and again.core.terms.count == 1
                assert is_hosts(again.core.terms.amendments[0], RUN_ID, keys.public_raw)
                assert (again.core.manifest.admission.mode == "token") == ("token" in text)
                assert (again.core.manifest.net.relay == "off") == ("off" in text)
        with pytest.raises(
            UserError, match=r"with 1 amendments: \[round\] sync_every is 20 in the file given, 10 in"
        ):
            Journal.open_or_create(path, manifest_of("[round]\nsync_every = 20\n"), lambda: RUN_ID)
        if not folded:
            with Journal.open_or_create(path, Manifest(), lambda: RUN_ID) as journal:
                ledger = Ledger(LedgerRules(256, 3))
                for record in journal.records():
                    ledger.apply(record)
                journal.fold(ledger.folded)


@pytest.mark.mode("admission")
def test_the_file_of_any_of_its_amendments_is_the_runs(tmp_path: Path) -> None:
    """Whoever stood by, or was stopped, while the host amended the run once more has a file from in between."""
    path = tmp_path / "journal.sqlite"
    twenty = TEN.replace("10", "20")
    with Journal.open_or_create(path, Manifest(), lambda: RUN_ID) as journal:
        journal.append([Amended(amendment=each, at_s=0.0) for each in made_of(TEN, twenty)])
    for text in ("", TEN, twenty):
        own = f'{text}[admission]\nmode = "token"\n[net]\nrelay = "off"\n'
        with Journal.open_or_create(path, manifest_of(own), lambda: RUN_ID) as journal:
            again = RunMachine(journal.manifest, RUN_ID, journal.records(), lambda count: bytes(count))
            assert journal.manifest.digest == Manifest().digest, "the run is the same"
            assert again.core.manifest.round.sync_every == 20 and again.core.terms.count == 2
            assert again.core.manifest.admission.mode == "token" and again.core.manifest.net.relay == "off"
    with pytest.raises(
        UserError, match=r"with 2 amendments: \[round\] sync_every is 30 in the file given, 20 in"
    ):
        Journal.open_or_create(path, manifest_of(TEN.replace("10", "30")), lambda: RUN_ID)


def made_of(*texts: str) -> tuple[Amendment, ...]:
    """The amendments of a run that its host amends so, one after the other."""
    office = Office()
    for text in texts:
        office.amends(text)
    return office.core.terms.amendments


def test_terms_are_those_of_the_amendments_in_their_order() -> None:
    office = Office()
    office.amends(TEN)
    office.commits({ANN: (), BOB: ()})
    office.amends(TEN + "[outer]\nlr = 0.5\n")
    again = Terms.of(Manifest(), office.replayed().amendments)
    assert again.count == 2 and again.newest == office.core.manifest
    assert (again.newest.outer.lr, again.newest.round.sync_every) == (0.5, 10)
