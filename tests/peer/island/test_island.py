"""Ranks over a group in memory: all of them hear the same, in the same order, and a word waits until all are ready."""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from farflung.peer.island.island import Island
from farflung.peer.island.parts import Part
from farflung.peer.island.ranks import ALONE, ranks_here
from farflung.peer.local.words import FromTrainer, Load, Loaded, Need, Resume, ToTrainer
from farflung.peer.trainer.agent_process import AgentProcess, IslandAgent
from farflung.protocol.errors import Refused, UserError
from farflung.protocol.process.exit_codes import UNEXPECTED, code_for
from rig.memory_group import PATIENCE_S, Meeting, MemoryGroup


class FakeAgent:
    """Rank 0's."""

    def __init__(self, *words: ToTrainer) -> None:
        self.words = deque(words)
        self.said: list[FromTrainer] = []
        self.gone: str | None = None

    @property
    def channel(self) -> FakeAgent:
        return self

    def problem(self) -> str | None:
        return self.gone

    def send(self, message: FromTrainer) -> None:
        self.said.append(message)

    def recv(self, timeout_s: float) -> ToTrainer | None:
        return self.words.popleft() if self.words else None


def on_all(count: int, work: Callable[[Island], Any], agent: FakeAgent | None = None) -> list[Any]:
    """What the work gives on each rank; an error in its place."""
    meeting, results = Meeting(count), queue.Queue[tuple[int, Any]]()
    clocks = [lambda: 100.0, *[lambda: 7.0] * (count - 1)]

    def rank(number: int) -> None:
        island = Island(MemoryGroup(number, meeting), clocks[number])
        try:
            island.begin(lambda: agent or FakeAgent())
            results.put((number, work(island)))
        except Exception as error:
            results.put((number, error))
            if isinstance(error, threading.BrokenBarrierError):
                meeting.gone()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(count)]
    for each in threads:
        each.start()
    found = dict(results.get(timeout=PATIENCE_S) for _ in threads)
    return [found[number] for number in range(count)]


def load(version: int) -> Load:
    return Load(version=version, keep="drop", slot=0, tokens=0, steps=0, spare=0)


def test_all_ranks_hear_the_same_words_at_the_same_step_whenever_they_come() -> None:
    agent = FakeAgent()
    chance = random.Random(1)

    def work(island: Island) -> list[tuple[int, object, float]]:
        heard: list[tuple[int, object, float]] = []
        for step in range(40):
            if island.rank == 0:
                agent.words.extend(load(10 * step + each) for each in range(chance.randrange(3)))
            island.tokens_of_step(None, 1, 0)
            while (word := island.recv(0.0)) is not None:
                heard.append((step, word, island.clock()))
        return heard

    first, *others = on_all(3, work, agent)
    assert all(each == first for each in others)
    assert len(first) > 20 and [word.version for _, word, _ in first] == sorted(
        w.version for _, w, _ in first
    )
    assert {clock for _, _, clock in first} == {100.0}, "the time is rank 0's everywhere"


def test_a_wait_looks_again_and_ends_for_all_with_the_first_word() -> None:
    agent = FakeAgent()

    def work(island: Island) -> tuple[object, object, object]:
        nothing = island.recv(0.5)
        island.wait_for_all()
        if island.rank == 0:
            agent.words.extend([Resume(spare=1), load(3)])
        island.wait_for_all()
        return nothing, island.recv(0.5), island.recv(0.0)

    assert on_all(2, work, agent) == [(None, Resume(spare=1), load(3))] * 2


def test_what_all_have_written_is_told_once_and_not_before_the_last_has() -> None:
    agent = FakeAgent()
    written: list[int] = []
    told_at: list[int] = []
    send = agent.send
    agent.send = lambda word: (told_at.append(len(written)), send(word))  # type: ignore[assignment, method-assign, func-returns-value]

    def work(island: Island) -> None:
        if island.rank == 2:
            threading.Event().wait(0.05)  # it is the last to write
        written.append(island.rank)
        island.send(Loaded(version=1))
        island.send(Need(samples=5, want=5))

    on_all(3, work, agent)
    assert agent.said == [Loaded(version=1), Need(samples=5, want=5)]
    assert told_at[0] == 3


def test_tokens_are_those_of_all_ranks_and_of_a_shared_batch_once() -> None:
    def work(island: Island) -> list[int | None]:
        island.part = Part(island.rank // 2, 2, counts=island.rank % 2 == 0)
        return [
            island.tokens_of_step(None, 10 + island.rank, 1),
            island.tokens_of_step(0, 5, 2),
            island.tokens_of_step(7 if island.rank == 0 else None, 3, 3),
            island.tokens_of_step(None, 0, 3),
        ]

    assert on_all(4, work) == [[10 + 12, 0, 7 + 3, None]] * 4


def test_the_loss_is_the_mean_over_all_ranks_steps() -> None:
    assert on_all(2, lambda island: island.mean(3.0 * (island.rank + 1), 1 + 2 * island.rank)) == [9 / 4] * 2
    assert on_all(2, lambda island: island.mean(0.0, 0)) == [None] * 2

    def of_one_batch(island: Island) -> float | None:
        island.part = Part(island.rank // 2, 2, counts=island.rank % 2 == 0)
        return island.mean(float(island.rank), 1)

    assert on_all(4, of_one_batch) == [(0.0 + 2.0) / 2] * 4, "of ranks that see the same samples one says it"
    assert on_all(2, lambda island: island.mean(float("nan"), 1)) == [None] * 2


def test_ranks_that_are_not_at_the_same_place_are_told_so_by_name() -> None:
    def work(island: Island) -> object:
        island.tokens_of_step(None, 1, 0)
        return island.recv(0.5) if island.rank == 1 else island.tokens_of_step(None, 1, 0)

    for error in on_all(2, work):
        assert isinstance(error, UserError)
        assert (
            "rank 0 has taken step 2, having read 0 batches, rank 1 waits for the agent or for data after step 1"
            in str(error)
        )


def test_a_step_more_on_one_rank_is_found_at_the_next_look() -> None:
    """As with a GradScaler that skips a step on one rank alone."""

    def work(island: Island) -> object:
        if island.rank == 1:
            island._steps += 1
        return island.tokens_of_step(None, 1, 0)

    assert all("not at the same place" in str(error) for error in on_all(2, work))


def test_a_batch_more_on_one_rank_is_found_at_the_next_look() -> None:
    found = on_all(2, lambda island: island.tokens_of_step(None, 1, 3 + island.rank))
    assert all("rank 0 has taken step 1, having read 3 batches" in str(error) for error in found)


def test_an_agent_that_is_gone_is_gone_for_all_and_its_last_words_are_heard() -> None:
    agent = FakeAgent()

    def work(island: Island) -> list[object]:
        if island.rank == 0:
            agent.gone = "it fell"
            agent.words.append(Resume(spare=2))
        return [island.recv(0.5), island.problem(), island.recv(0.5), island.problem()]

    assert on_all(2, work, agent) == [[Resume(spare=2), "it fell", None, "it fell"]] * 2


def test_a_mistake_that_rank_0_finds_ends_all() -> None:
    def fails(error: Exception) -> list[Any]:
        meeting, found = Meeting(2), queue.Queue[tuple[int, Any]]()

        def start() -> Any:
            raise error

        def rank(number: int) -> None:
            try:
                Island(MemoryGroup(number, meeting)).begin(start)
            except Exception as caught:
                found.put((number, caught))

        for number in range(2):
            threading.Thread(target=rank, args=(number,), daemon=True).start()
        return [each for _, each in sorted([found.get(timeout=PATIENCE_S) for _ in range(2)])]

    mine, theirs = fails(UserError("no such run"))
    assert str(mine) == "no such run" and str(theirs) == "rank 0 could not join: no such run"
    assert isinstance(theirs, UserError)
    mine, theirs = fails(Refused("full", "the run is full"))
    assert isinstance(theirs, Refused) and (theirs.code, theirs.reason) == ("full", "the run is full")


class Gone:
    """A group of which a rank has died."""

    rank, count = 0, 2

    def rows(self, mine: Sequence[int]) -> list[list[int]]:
        raise Refused("rank", "another rank of this peer is gone")

    def gather(self, mine: bytes) -> list[bytes]:
        raise Refused("rank", "another rank of this peer is gone")

    def spread(self, told: bytes, size: int) -> bytes:
        return told


@pytest.mark.parametrize("dies", [False, True])
def test_a_script_whose_rank_died_does_not_leave_the_run(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    """It is to be started again, while one that has found a mistake goes for good."""
    ended: list[str] = []

    class Started(FakeAgent):
        def close(self, reason: str) -> None:
            ended.append(reason)

        def abandon(self) -> None:
            ended.append("abandoned")

    started = Started()
    monkeypatch.setattr(AgentProcess, "start_or_find", lambda url, own: started)
    island = Island(MemoryGroup(0, Meeting(1)))
    agent = IslandAgent(island, None, {})
    if dies:
        island._group = Gone()
        for ask in (lambda: island.recv(0.5), lambda: island.gather(b""), island.wait_for_all):
            island.is_broken = False
            with pytest.raises(Refused, match="is gone"):
                ask()
            assert island.is_broken
    agent.close("could not join")
    assert ended == (["abandoned"] if dies else ["could not join"])
    assert code_for(Refused("rank", "gone")) == UNEXPECTED, "an agent starts it again"


def test_in_a_forked_worker_nothing_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    island = Island(MemoryGroup(0, Meeting(1)))
    island._pid += 1
    with pytest.raises(UserError, match="only in the process that called farflung.join"):
        island.recv(0.5)


def test_a_trainer_of_one_process_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ALONE.gather(b"x") == [b"x"] and ALONE.mean(3.0, 2) == 1.5 and ALONE.tokens_of_step(4, 9, 1) == 4
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks_here() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks_here() == 4
