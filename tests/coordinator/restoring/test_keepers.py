"""What members are told to keep of the run, who of many keeps the books, and what a coordinator hears of it again."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.restoring.kept_books import KEEP_AGAIN_S, KEEPERS, Keepers, KeptSteps, Restored
from farflung.coordinator.roster.partial_view import WHOLE_ROSTER
from farflung.coordinator.run.effects import Tell
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run.membership import Member
from farflung.protocol.messages import Tick
from farflung.protocol.mode_words import Keep, KeptBeat
from farflung.protocol.round_words import Commit
from rig.crowd import crowd

LARGE = 3000


def signing(machine: RunMachine) -> Keepers:
    """Its coordinator has a key."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    machine.core.prove = lambda statement: key.public_key().public_bytes_raw() + key.sign(statement)
    return keepers_of(machine)


def keepers_of(machine: RunMachine) -> Keepers:
    found = machine.modes["restoring"]
    assert isinstance(found, Keepers)
    return found


def told(machine: RunMachine, member: Member, now: float, kept: int = 0) -> list[object]:
    """After a beat in which it says that it keeps this step."""
    assert member.beat is not None
    beat = msgspec.structs.replace(
        member.beat, session=member.session, seq=member.heard.seq + 1, sections=(KeptBeat(kept),)
    )
    effects = machine.on_member(member.contact.key, beat, now)
    return [each.message for each in effects if isinstance(each, Tell) and each.peer == member.peer]


# ---- who keeps what -------------------------------------------------------------------------------------------------


def test_P21_in_a_mesh_all_keep_the_signed_head_of_a_step_and_some_its_books() -> None:
    """So whoever goes on with a commit can prove that it was made, and what comes with it does not grow for all."""
    machine = crowd(KEEPERS + 9, group=4)
    made = signing(machine).kept()
    assert made is not None
    kept = [machine.core.kept_by(peer) for peer in machine.core.members.alive]
    assert all(each is not None and each.head == made.head for each in kept)
    assert sum(each == made for each in kept) == KEEPERS
    assert sum(each == made.without_books for each in kept) == 9
    for other in (crowd(KEEPERS, group=4), crowd(KEEPERS + 9)):
        whole = signing(other).kept()
        assert {other.core.kept_by(peer) for peer in other.core.members.alive} == {whole}


def test_P21_in_a_large_run_those_keep_the_books_who_hear_of_a_commit_at_once() -> None:
    """In a flat round as in a mesh; others hear of it with their next beats, and the disk may be lost before."""
    core = crowd(LARGE).core
    few, members = crowd(WHOLE_ROSTER).core, tuple(core.members.in_order[7:100])
    core.ledger.books[0].commits[0] = Commit(0, 1, members, (1.0,) * len(members), bytes(32), "int8")
    keepers = {peer for peer in core.members.alive if core.is_keeper(peer)}
    assert len(keepers) == KEEPERS and keepers < set(members)
    KeptSteps.of(core.ledger).link = KeptSteps.of(core.ledger).link.then(1, (), b"a step")
    assert keepers != {peer for peer in core.members.alive if core.is_keeper(peer)}
    assert all(map(few.is_keeper, few.members.alive)), "of so few everybody"


def test_whoever_keeps_the_run_is_drawn_anew_with_each_step_of_it() -> None:
    core = crowd(200, group=16).core
    before = {peer for peer in core.members.alive if core.is_keeper(peer)}
    KeptSteps.of(core.ledger).link = KeptSteps.of(core.ledger).link.then(1, (), b"a step")
    after = {peer for peer in core.members.alive if core.is_keeper(peer)}
    assert len(before) == len(after) == KEEPERS and len(before & after) < KEEPERS // 2
    few = crowd(KEEPERS, group=4).core
    assert all(map(few.is_keeper, few.members.alive)), "of so few everybody"


@pytest.mark.parametrize("count", [64, 512])
def test_in_groups_a_commit_is_told_whole_to_those_who_keep_it(count: int) -> None:
    machine = crowd(count, group=16)
    driver, members = machine.drivers[0], list(machine.core.members.alive.values())
    peers = tuple(sorted(machine.core.members.alive))
    commit = Commit(1, 1, peers, (1.0 / count,) * count, bytes(64), "int8")
    whole = {each.peer for each in members if driver.agreement.commit_for(each, commit) == commit}
    assert whole == {peer for peer in peers if machine.core.is_keeper(peer)} and len(whole) == KEEPERS


# ---- who is told once more ------------------------------------------------------------------------------------------


def test_whom_the_newest_step_did_not_reach_is_told_after_a_beat_and_not_with_each() -> None:
    machine = crowd(3)
    made = signing(machine).kept()
    assert made is not None
    ann, bob, _ = machine.core.members.alive.values()
    tick, keep = told(machine, ann, 1.0)
    assert isinstance(tick, Tick) and isinstance(keep, Keep) and keep.kept == made
    assert not any(isinstance(each, Keep) for each in told(machine, bob, 1.0, kept=made.head.number))
    assert not any(isinstance(each, Keep) for each in told(machine, ann, 1.0 + KEEP_AGAIN_S - 0.1))
    assert any(isinstance(each, Keep) for each in told(machine, ann, 1.0 + KEEP_AGAIN_S))
    KeptSteps.of(machine.core.ledger).link = KeptSteps.of(machine.core.ledger).link.then(1, (), b"a step")
    assert any(isinstance(each, Keep) for each in told(machine, ann, 1.1 + KEEP_AGAIN_S)), "of the next one"
    again = machine.core.members.admit(ann.contact, bytes(16), ann.process, 1.2 + KEEP_AGAIN_S)
    again.beat = ann.beat
    assert any(isinstance(each, Keep) for each in told(machine, again, 1.2 + KEEP_AGAIN_S)), (
        "it may have none"
    )


def test_without_a_key_nobody_is_told_to_keep_anything() -> None:
    machine = crowd(2)
    ann = machine.core.members.alive[machine.core.members.in_order[0]]
    assert not any(isinstance(each, Keep) for each in told(machine, ann, 1.0))
    assert machine.core.kept_by(ann.peer) is None


# ---- what a coordinator hears of it again ---------------------------------------------------------------------------


def test_P21_no_round_is_opened_where_a_member_keeps_a_newer_step_of_this_run() -> None:
    machine, newer = crowd(3, ready=True), crowd(3)
    KeptSteps.of(newer.core.ledger).link = KeptSteps.of(newer.core.ledger).link.then(1, (), b"a step")
    made = signing(newer).kept()
    assert made is not None
    machine.core.prove = newer.core.prove
    keepers = keepers_of(machine)
    keepers.hear_of(msgspec.structs.replace(made.head, run_id=b"another run, 01!"))
    assert not machine.core.held, "it is of another run"
    keepers.hear_of(msgspec.structs.replace(made.head, number=9))
    assert not machine.core.held, "it is not what was signed"
    keepers.hear_of(made.head)
    assert "this journal is an old copy" in machine.core.held
    machine.on_timer(0.1)
    assert machine.drivers[0].round is None


def test_P21_what_was_lost_with_the_disk_is_void_unless_somebody_can_prove_it() -> None:
    machine = crowd(1)
    keepers, agreement = signing(machine), machine.drivers[0].agreement
    [ann] = machine.core.members.alive.values()
    assert ann.beat is not None
    said = msgspec.structs.replace(ann.beat.fragments[0], version=1, digest=b"1" * 32)
    assert agreement.refuted(ann, said) == b"", "it is to be asked of its peers first"
    machine.core.write(Restored(kept=None, reason="nobody showed it"))
    assert agreement.refuted(ann, said) == said.digest
    assert agreement.refuted(ann, ann.beat.fragments[0]) == b""
    ledger = machine.core.ledger
    link, KeptSteps.of(ledger).link = (
        KeptSteps.of(ledger).link,
        KeptSteps.of(ledger).link.then(1, (), b"a step"),
    )
    newest = keepers.kept()
    assert newest is not None
    KeptSteps.of(ledger).link = link
    keepers.hear_of(newest.head)
    assert agreement.refuted(ann, said) == b""
