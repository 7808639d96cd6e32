"""Ranks over a group in memory: all of them hear the same, in the same order, and a word waits until all are ready."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from farflung.peer.island.island import Island
from farflung.peer.island.parts import LATEST_S, MOST_STEPS, SEEN, SHARE, BatchPart, LookPace, Outlook
from farflung.peer.island.ranks import ALONE, ranks_here
from farflung.peer.local.words import FromTrainer, Loaded, LoadState, NeedSamples, ResumeSteps, ToTrainer
from farflung.peer.trainer.agent_process import AgentProcess, IslandAgent
from farflung.protocol.errors import Refused, UserError
from farflung.protocol.process.exit_codes import UNEXPECTED, code_for
from rig.memory_group import PATIENCE_S, Meeting, MemoryGroup

LOOK = Outlook(is_due=True)
MAY_PASS = Outlook(is_due=False)
STEP_S = 1 / 32


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


def load(version: int) -> LoadState:
    return LoadState(version=version, keep="drop", slot=0, tokens=0, steps=0, spare=0)


def test_all_ranks_hear_the_same_words_at_the_same_step_whenever_they_come() -> None:
    agent = FakeAgent()
    chance = random.Random(1)

    def work(island: Island) -> list[tuple[int, object, float]]:
        heard: list[tuple[int, object, float]] = []
        for step in range(40):
            if island.rank == 0:
                agent.words.extend(load(10 * step + each) for each in range(chance.randrange(3)))
            island.tokens_of_step(None, 1, 0, LOOK)
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
            agent.words.extend([ResumeSteps(spare=1), load(3)])
        island.wait_for_all()
        return nothing, island.recv(0.5), island.recv(0.0)

    assert on_all(2, work, agent) == [(None, ResumeSteps(spare=1), load(3))] * 2


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
        island.send(NeedSamples(samples=5, want=5))

    on_all(3, work, agent)
    assert agent.said == [Loaded(version=1), NeedSamples(samples=5, want=5)]
    assert told_at[0] == 3


def test_tokens_are_those_of_all_ranks_and_of_a_shared_batch_once() -> None:
    def work(island: Island) -> list[Sequence[int | None]]:
        island.part = BatchPart(island.rank // 2, 2, counts=island.rank % 2 == 0)
        return [
            island.tokens_of_step(None, 10 + island.rank, 1, LOOK),
            island.tokens_of_step(0, 5, 2, LOOK),
            island.tokens_of_step(7 if island.rank == 0 else None, 3, 3, LOOK),
            island.tokens_of_step(None, 0, 3, LOOK),
        ]

    assert on_all(4, work) == [[[10 + 12], [0], [7 + 3], [None]]] * 4


class Ticks:
    """A clock of one's own, on which a step takes so long and a look a tenth of it."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now = step_s, 0.0

    def step(self) -> None:
        self.now += self.step_s

    def __call__(self) -> float:
        return self.now


class Slow(MemoryGroup):
    def __init__(self, rank: int, meeting: Meeting, ticks: Ticks) -> None:
        super().__init__(rank, meeting)
        self.ticks, self.rows_asked = ticks, 0

    def rows(self, mine: Sequence[int]) -> list[list[int]]:
        self.rows_asked += 1
        self.ticks.now += 0.1 * self.ticks.step_s
        return super().rows(mine)


def looked_at(outlook: Callable[[int], Outlook], steps: int = 200) -> tuple[list[list[int]], list[object]]:
    """On two ranks, the second with longer steps: at which steps they looked, and what was counted."""
    meeting, results = Meeting(2), queue.Queue[tuple[int, Any]]()

    def rank(number: int) -> None:
        ticks = Ticks(STEP_S * (1 + 9 * number))
        group = Slow(number, meeting, ticks)
        island, looks, counted = Island(group, ticks), [], []
        island.begin(FakeAgent)
        for step in range(steps):
            ticks.step()
            before = group.rows_asked
            counted += island.tokens_of_step(step if step % 3 else None, number, step, outlook(step))
            looks += [step] if group.rows_asked > before else []
        results.put((number, (looks, counted)))

    for number in range(2):
        threading.Thread(target=rank, args=(number,), daemon=True).start()
    found = dict(results.get(timeout=PATIENCE_S) for _ in range(2))
    return [found[number][0] for number in range(2)], [found[number][1] for number in range(2)]


def test_all_ranks_look_at_the_same_steps_and_those_are_few_where_steps_are_short() -> None:
    (first, second), (counted, theirs) = looked_at(lambda step: MAY_PASS)
    assert first == second and counted == theirs
    assert first[: SEEN + 1] == list(range(SEEN + 1)), "the first are all looked at"
    gaps = {b - a for a, b in itertools.pairwise(first[SEEN + 1 :])}
    assert gaps == {LATEST_S / STEP_S}, "a look costs a tenth of a step, and no word waits longer"
    # Each step is counted for itself, by the script or by what was handed out: 1 on the second rank.
    assert counted == [2 * step if step % 3 else 1 for step in range(len(counted))] and len(counted) > 170


def test_ranks_look_at_a_step_where_something_is_due_and_never_later_than_allowed() -> None:
    (first, second), _ = looked_at(lambda step: Outlook(step % 10 == 7, steps=4))
    assert first == second and {7, 17, 27, 37, 187, 197} <= set(first)
    assert max(b - a for a, b in itertools.pairwise(first)) == 4


def test_a_wait_brings_the_tokens_of_the_steps_before_it() -> None:
    def work(island: Island) -> list[object]:
        island._steps_to_look = 9
        told = [island.tokens_of_step(None, 5, 1, MAY_PASS), island.tokens_of_step(None, 0, 1, MAY_PASS)]
        return [*told, island.recv(0.5), island.tokens_heard(), island.tokens_heard()]

    assert on_all(2, work) == [[[], [], None, [10, None], []]] * 2


def paced(step_s: float, look_s: float) -> LookPace:
    pace, now = LookPace(), 0.0
    for _ in range(SEEN + 2):
        now += step_s
        pace.on_step(now)
        pace.on_look(now, now + look_s)
        now += look_s
    pace.on_step(now)
    return pace


@pytest.mark.parametrize("step_s", [2**-10, 2**-6, 2**-3, 0.3, 2.0])
@pytest.mark.parametrize("look_s", [0.0, 2**-13, 2**-11, 2**-8, 2**-3])
def test_looks_take_little_of_the_time_or_come_as_late_as_they_may(step_s: float, look_s: float) -> None:
    steps = paced(step_s, look_s).steps(MAY_PASS, 100.0)
    assert 1 <= steps <= MOST_STEPS
    assert steps == 1 or steps * step_s <= LATEST_S
    cheap = look_s <= SHARE * steps * step_s * 1.0001
    assert cheap or steps == MOST_STEPS or (steps + 1) * step_s > LATEST_S
    assert steps == 1 or look_s * 1.0001 > SHARE * (steps - 1) * step_s, "no later than it must be"


def test_towards_a_moment_of_the_clock_looks_come_closer() -> None:
    pace, now, due_at, seen = paced(STEP_S, 1.0), 0.0, 2.0, []
    while now < due_at:
        seen.append(pace.steps(Outlook(False, due_at=due_at), now))
        now += STEP_S * seen[-1]
    assert seen[0] == LATEST_S / STEP_S and seen[-1] == 1 and seen == sorted(seen, reverse=True)


def test_a_wait_is_no_part_of_a_step() -> None:
    pace = paced(STEP_S, 0.001)
    usual = pace.steps(MAY_PASS, 0.0)
    for now in range(100, 100 * SEEN, 100):
        pace.on_waited()
        pace.on_step(float(now))
    assert pace.steps(MAY_PASS, 0.0) == usual > 1
    assert LookPace().steps(MAY_PASS, 0.0) == 1, "before anything is known"


def test_the_loss_is_the_mean_over_all_ranks_steps() -> None:
    assert on_all(2, lambda island: island.mean(3.0 * (island.rank + 1), 1 + 2 * island.rank)) == [9 / 4] * 2
    assert on_all(2, lambda island: island.mean(0.0, 0)) == [None] * 2

    def of_one_batch(island: Island) -> float | None:
        island.part = BatchPart(island.rank // 2, 2, counts=island.rank % 2 == 0)
        return island.mean(float(island.rank), 1)

    assert on_all(4, of_one_batch) == [(0.0 + 2.0) / 2] * 4, "of ranks that see the same samples one says it"
    assert on_all(2, lambda island: island.mean(float("nan"), 1)) == [None] * 2


def test_ranks_that_are_not_at_the_same_place_are_told_so_by_name() -> None:
    def work(island: Island) -> object:
        island.tokens_of_step(None, 1, 0, LOOK)
        return island.recv(0.5) if island.rank == 1 else island.tokens_of_step(None, 1, 0, LOOK)

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
        return island.tokens_of_step(None, 1, 0, LOOK)

    assert all("not at the same place" in str(error) for error in on_all(2, work))


def test_a_batch_more_on_one_rank_is_found_at_the_next_look() -> None:
    found = on_all(2, lambda island: island.tokens_of_step(None, 1, 3 + island.rank, LOOK))
    assert all("rank 0 has taken step 1, having read 3 batches" in str(error) for error in found)


def test_an_agent_that_is_gone_is_gone_for_all_and_its_last_words_are_heard() -> None:
    agent = FakeAgent()

    def work(island: Island) -> list[object]:
        if island.rank == 0:
            agent.gone = "it fell"
            agent.words.append(ResumeSteps(spare=2))
        return [island.recv(0.5), island.problem(), island.recv(0.5), island.problem()]

    assert on_all(2, work, agent) == [[ResumeSteps(spare=2), "it fell", None, "it fell"]] * 2


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
    assert (
        ALONE.gather(b"x") == [b"x"]
        and ALONE.mean(3.0, 2) == 1.5
        and ALONE.tokens_of_step(4, 9, 1, LOOK) == (4,)
    )
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks_here() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks_here() == 4
