"""Who makes version 0 of what, and what it proves when the run has another one than its run.toml names."""

from __future__ import annotations

import pytest

from farflung.checkpoints.result_log import ResultLog
from farflung.peer.local.words import Provide
from farflung.peer.machine.checkpoint_policy import is_empty
from farflung.peer.machine.effects import BeginFrom, Effect, Note, TellTrainer
from farflung.peer.machine.held_fragment import Empty
from farflung.peer.machine.member_session import READ_AGAIN_S, Founding, without_start
from farflung.peer.machine.replicas import Replica
from farflung.protocol.manifest import StartSection
from farflung.protocol.messages import FragmentTick, Tick
from farflung.protocol.model_schema import fragments_of
from farflung.protocol.states import Goal

DIGEST, OTHER = b"d" * 32, b"o" * 32
FOR_ALL = StartSection.model_validate({"from": "https://a.example/x.safetensors", "hash": "a" * 64})
HOSTS_OWN = StartSection.model_validate({"from": "/home/host/x.safetensors", "hash": "a" * 64})


def empty_replica() -> Replica:
    return Replica("ann", b"12345678", fragments_of(4, 1)[0], ResultLog(3))


def tick(goal: Goal, digest: bytes = b"", version: int = 0) -> Tick:
    known = ((0, digest),) if digest else ()
    word = FragmentTick(0, version, known, False, (), 0, False, 0)
    return Tick(

        session=bytes(16), seq=1, answers=1, heard_s=0.0, fragments=(word,), goal=goal, reason="",
        roster_no=0, roster=None, leases=None, void=(), era=0, advice="", era_because="",
    )  # fmt: skip


def founding(start: StartSection = FOR_ALL, own: str = "") -> tuple[Founding, Replica]:
    return Founding(start, is_empty, own), empty_replica()


def reads(effects: list[Effect]) -> bool:
    return any(isinstance(each, BeginFrom) for each in effects)


def test_without_a_beginning_the_trainer_writes_its_own_values() -> None:
    it, replica = founding(StartSection())
    assert (
        it.due(tick(Goal.FOUND), [replica], 0.0) == [TellTrainer(Provide())]
        and replica.held.filling
        and not it.reads
    )
    assert it.due(tick(Goal.FOUND), [replica], 1.0) == [], "it is at it"
    assert it.on_provided() and not it.on_provided()


@pytest.mark.parametrize(
    ("start", "own", "at", "as_nobody"),
    [
        (FOR_ALL, "", "https://a.example/x.safetensors", True),
        (FOR_ALL, "/mine", "/mine", False),
        (HOSTS_OWN, "/mine", "/mine", False),
    ],
)
def test_the_founder_reads_what_the_run_begins_with(
    start: StartSection, own: str, at: str, as_nobody: bool
) -> None:
    it, replica = founding(start, own)
    found = it.due(tick(Goal.FOUND), [replica], 0.0)
    assert (
        found[1:] == [BeginFrom(start.model_copy(update={"source": at}), as_nobody)]
        and replica.held.filling
        and it.reads
    )
    assert it.due(tick(Goal.FOUND), [replica], 9.0) == [] and not it.lacks_it
    it.on_trainer_gone([replica])
    assert replica.held.filling, "its pieces still come into the state"
    assert it.on_read("", False, [replica], 9.0) == ("", []) and not it.reads


@pytest.mark.parametrize(
    "place", ["/home/me/x.safetensors", "file:///home/me/x.safetensors", "/home/me/run/1"]
)
def test_no_path_is_opened_on_the_runs_word_whoever_is_told_to_found(place: str) -> None:
    it, replica = founding(StartSection.model_validate({"from": place, "hash": "a" * 64}))
    assert it.lacks_it
    for goal in (Goal.FOUND, Goal.SYNC, Goal.WAIT):
        assert not reads(it.due(tick(goal, DIGEST), [replica], 0.0)) and not replica.held.filling
    said = [each for _ in range(3) for each in it.due(tick(Goal.FOUND), [replica], 99.0)]
    assert said == [], "once is enough"
    told, _ = founding(StartSection.model_validate({"from": place, "hash": "a" * 64}))
    [note] = told.due(tick(Goal.FOUND), [replica], 0.0)
    assert isinstance(note, Note)
    assert (
        "a peer that joins with --start PATH and has what" in note.text
        and "(hash aaaaaaaaaaaaaaaa...)" in note.text
    )


def test_a_place_of_ones_own_is_of_no_use_where_the_run_begins_with_nothing() -> None:
    assert "leave it out" in without_start(StartSection(), "/mine")
    assert without_start(StartSection(), "") == without_start(HOSTS_OWN, "/mine") == ""


def test_others_read_what_they_can_once() -> None:
    it, replica = founding()
    assert not reads(it.due(tick(Goal.WAIT), [replica], 0.0)), "nobody has founded it"
    replica.held.fill()
    assert not reads(it.due(tick(Goal.SYNC, DIGEST), [replica], 0.0)), "what had arrived is being read"
    replica.unfilled(touched=False)
    assert not reads(it.due(tick(Goal.SYNC, DIGEST, version=3), [replica], 0.0)), "it is past that"
    assert reads(it.due(tick(Goal.SYNC, DIGEST), [replica], 0.0))
    it.on_read("it does not answer", False, [replica], 1.0)
    assert not reads(it.due(tick(Goal.SYNC, DIGEST), [replica], 99.0)), "it is sent the state instead"
    mine, replica = founding(HOSTS_OWN, "/mine")
    assert reads(mine.due(tick(Goal.SYNC, DIGEST), [replica], 0.0))


def test_a_founder_leaves_where_nothing_can_come_of_it_and_else_tries_again() -> None:
    it, replica = founding()
    it.due(tick(Goal.FOUND), [replica], 0.0)
    leaves, said = it.on_read("it does not answer", False, [replica], 1.0)
    assert not leaves and said == [Note("can't begin with it now: it does not answer")]
    assert isinstance(replica.held.stand, Empty)
    assert not reads(it.due(tick(Goal.FOUND), [replica], READ_AGAIN_S)), "another one may found the run"
    assert reads(it.due(tick(Goal.FOUND), [replica], 1.0 + READ_AGAIN_S))
    leaves, said = it.on_read("another file", True, [replica], 40.0)
    assert leaves == "this run can't begin so: another file" and said == []


def test_a_joiner_that_can_not_read_it_stays() -> None:
    it, replica = founding()
    it.due(tick(Goal.SYNC, DIGEST), [replica], 0.0)
    leaves, said = it.on_read("pip install aiohttp", True, [replica], 1.0)
    assert not leaves and len(said) == 1


def test_what_was_read_in_an_era_that_is_over_does_not_count() -> None:
    it, replica = founding()
    it.due(tick(Goal.FOUND), [replica], 0.0)
    replica.go_back(0, None)
    replica.held.chunks.digests[0] = DIGEST
    it.on_read("", False, [replica], 1.0)
    assert it.contradiction(replica, 0, OTHER) == ""


def test_whoever_has_read_it_knows_a_founder_that_began_with_something_else() -> None:
    it, replica = founding()
    it.due(tick(Goal.SYNC, DIGEST), [replica], 0.0)
    replica.held.chunks.digests[0] = DIGEST
    assert it.contradiction(replica, 0, OTHER) == "", "its state is nothing that it has read"
    it.on_read("", False, [replica], 1.0)
    assert it.contradiction(replica, 0, DIGEST) == "" and it.contradiction(replica, 1, OTHER) == ""
    assert "who founded it began with something else" in it.contradiction(replica, 0, OTHER)
    del replica.held.chunks.digests[0]
    assert it.contradiction(replica, 0, OTHER) == "", "the run has none yet"
