"""Several processes as one peer: rank 0 speaks with the agent, and all of them hear the same.

Made when a script of several ranks joins a run; stands in for the agent's channel and for the other ranks (ranks.py).
Must not know models, rounds or torch: what carries bytes between ranks is a `Group` (group.py, and tests' own).

Every rank has a trainer's machine of its own.  Equal events make equal effects, so nothing but the events is exchanged:

    a look     rank 0 reads what the agent has said and what time it is, and tells all; each rank says where it stands.
               One every few steps (parts.py), with the tokens of each; one every moment while they wait.
    a meeting  before rank 0 says that something is written or read, every rank has written or read its part.

Ranks that do not stand at the same place (one of them took a step or a batch more) are told so, each by name, and not
left to wait for each other.  A rank that is gone ends the others at their next look.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from farflung.peer.island.parts import MOST_STEPS, WHOLE, BatchPart, LookPace, Outlook
from farflung.peer.island.ranks import Places, mean_of
from farflung.peer.local.channel import ELSEWHERE
from farflung.peer.local.words import FromTrainer, Frozen, Loaded, Provided, ToTrainer, to_bytes, to_trainer
from farflung.protocol.errors import FarflungError, Refused, UserError

if TYPE_CHECKING:
    from torch import Tensor

_SUM = struct.Struct("<dq")
_MICRO = 1_000_000


class Group(Protocol):
    """What carries bytes between the ranks.  All of them call the same, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    def rows(self, mine: Sequence[int]) -> list[list[int]]:
        """Of every rank, equally many."""

    def gather(self, mine: bytes) -> list[bytes]: ...

    def spread(self, told: bytes, size: int) -> bytes:
        """What rank 0 tells, of a size that all know."""

    def send(self, views: Iterable[Tensor], rank: int) -> None:
        """To one that receives into as many places."""

    def receive(self, views: Iterable[Tensor], rank: int) -> None: ...


class RankChannel(Protocol):
    def send(self, message: FromTrainer) -> None: ...

    def recv(self, timeout_s: float) -> ToTrainer | None: ...


class AgentOfRanks(Protocol):
    """As rank 0 has it."""

    @property
    def channel(self) -> RankChannel: ...

    def problem(self) -> str | None: ...


class RankPlace(IntEnum):
    BEGINS = 0
    STEP = 1
    WAIT = 2
    PROVIDED = 3
    LOADED = 4
    FROZEN = 5
    MEETS = 6


_NAMES = {
    RankPlace.BEGINS: "joins",
    RankPlace.STEP: "has taken step {}, having read {} batches",
    RankPlace.WAIT: "waits for the agent or for data after step {}",
}
_MEETINGS: dict[type, RankPlace] = {
    Provided: RankPlace.PROVIDED,
    Loaded: RankPlace.LOADED,
    Frozen: RankPlace.FROZEN,
}


class _Row(NamedTuple):
    place: int
    steps: int
    batches: int
    told_bytes: int  # rank 0's
    clock_us: int  # rank 0's
    steps_to_look: int  # rank 0's: from this look to the next


class _News(msgspec.Struct, frozen=True):
    problem: str  # why the agent is gone; empty: it lives
    words: tuple[bytes, ...]


class _Failure(msgspec.Struct, frozen=True):
    """Of rank 0, before there was an agent."""

    code: str  # of a refusal; empty: a mistake of the user's
    text: str


class Island:
    def __init__(self, group: Group, clock: Callable[[], float] = time.monotonic) -> None:
        self._group, self._own_clock = group, clock
        self.part: BatchPart = WHOLE
        self.near: Collection[int] = range(group.count)
        self.partners: Sequence[tuple[int, int]] = ()
        self._agent: AgentOfRanks | None = None
        self._words: deque[ToTrainer] = deque()
        self._problem: str | None = None
        self._steps = self._batches = 0
        self._steps_to_look, self._pace = 1, LookPace()
        # Of each step since the ranks met last: twice the tokens, and one more if the script said how many.
        self._uncounted: list[int] = []
        self._counted: list[int | None] = []  # of all ranks, not asked for yet
        self.is_broken = False  # a rank is gone: the script is to be started again, and not to leave the run
        self._now = 0.0
        self._pid = os.getpid()

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def count(self) -> int:
        return self._group.count

    def clock(self) -> float:
        """Rank 0's, as it was at the last look: the same everywhere."""
        return self._now

    def problem(self) -> str | None:
        """Why the agent is gone, as far as all have heard."""
        return self._problem

    def begin(self, start: Callable[[], AgentOfRanks]) -> None:
        """Rank 0 starts or finds the agent; if it can't, all ranks end with its error."""
        told, failed = b"", None
        if self.rank == 0:
            try:
                self._agent = start()
            except FarflungError as error:
                failed = error
                told = msgspec.msgpack.encode(_failure(error))
        rows = self._meet(RankPlace.BEGINS, told)
        if rows[0].told_bytes:
            failure = msgspec.msgpack.decode(self._spread(told, rows[0].told_bytes), type=_Failure)
            raise failed or _error(failure)

    # ---- the agent's channel

    def send(self, message: FromTrainer) -> None:
        place = _MEETINGS.get(type(message))
        if place is not None:
            self._meet(place)
        if self._agent is not None:
            self._agent.channel.send(message)

    def recv(self, timeout_s: float) -> ToTrainer | None:
        """Without a timeout only what the last look brought: all ranks must ask for a look."""
        if not self._words and timeout_s:
            self._look(RankPlace.WAIT, timeout_s)
        return self._words.popleft() if self._words else None

    # ---- the other ranks

    def tokens_of_step(
        self, said: int | None, handed_out: int, batches: int, outlook: Outlook
    ) -> Sequence[int | None]:
        self._steps, self._batches = self._steps + 1, batches
        counted = said if said is not None else handed_out
        self._uncounted.append((2 * counted if self.part.counts else 0) + (said is not None))
        self._steps_to_look -= 1
        began = self._own_clock()
        self._pace.on_step(began)
        if outlook.is_due or self._steps_to_look <= 0:
            self._steps_to_look = self._pace.steps(outlook, began)
            self._steps_to_look = self._look(RankPlace.STEP, 0.0)
            self._pace.on_look(began, self._own_clock())
        return self.tokens_heard()

    def tokens_heard(self) -> Sequence[int | None]:
        counted, self._counted = self._counted, []
        return counted

    def wait_for_all(self) -> None:
        self._meet(RankPlace.MEETS)

    def mean(self, total: float, count: int) -> float | None:
        mine = (total, count) if self.part.counts else (0.0, 0)
        return mean_of([_SUM.unpack(each) for each in self.gather(_SUM.pack(*mine))])

    def gather(self, mine: bytes) -> Sequence[bytes]:
        with self._others():
            return self._group.gather(mine)

    def bring(self, places: Places) -> None:
        self._carry([(far, near) for far, near in self.partners], places)

    def fetch(self, places: Places) -> None:
        self._carry([(near, far) for far, near in self.partners], places, of_target=True)

    def _carry(self, ways: Sequence[tuple[int, int]], places: Places, of_target: bool = False) -> None:
        """From one rank to another, one way after the other; each far rank has one, so nobody waits in a circle."""
        with self._others():
            for source, target in ways:
                far = target if of_target else source
                if self.rank == source:
                    self._group.send(places(far), target)
                elif self.rank == target:
                    self._group.receive(places(far), source)

    @contextmanager
    def _others(self) -> Iterator[None]:
        try:
            yield
        except Refused:
            self.is_broken = True
            raise

    def _spread(self, told: bytes, size: int) -> bytes:
        with self._others():
            return self._group.spread(told, size)

    # ---- looks

    def _look(self, place: RankPlace, timeout_s: float) -> int:
        """In how many steps all look again, rank 0 says."""
        told = self._news(timeout_s) if self._agent is not None else b""
        first = self._meet(place, told)[0]
        if first.told_bytes:
            raw = self._spread(told, first.told_bytes)
            news = msgspec.msgpack.decode(raw, type=_News)
            self._problem = news.problem or None
            self._words.extend(map(to_trainer, news.words))
        return first.steps_to_look

    def _news(self, timeout_s: float) -> bytes:
        """All that the agent has said by now; waits for its first word."""
        assert self._agent is not None
        # Asked first: an agent that is gone by now has said all that it had to say.
        problem = self._agent.problem()
        words: list[bytes] = []
        while (word := self._agent.channel.recv(0.0 if words or problem else timeout_s)) is not None:
            words.append(to_bytes(word))
        return msgspec.msgpack.encode(_News(problem or "", tuple(words))) if words or problem else b""

    def _meet(self, place: RankPlace, told: bytes = b"") -> list[_Row]:
        if os.getpid() != self._pid:
            raise UserError(ELSEWHERE)
        if place is not RankPlace.STEP:
            self._pace.on_waited()
        clock_us = round(self._own_clock() * _MICRO)
        mine = _Row(place, self._steps, self._batches, len(told), clock_us, self._steps_to_look)
        # Ranks at different places may have taken unequally many steps, and must bring equally many numbers.
        tokens = self._uncounted + [0] * (MOST_STEPS - len(self._uncounted))
        with self._others():
            found = self._group.rows([*mine, *tokens])
        rows = [_Row(*each[: len(mine)]) for each in found]
        if len({(row.place, row.steps, row.batches) for row in rows}) != 1:
            raise UserError(
                f"the ranks are not at the same place: {', '.join(map(_told, range(len(rows)), rows))}; every rank "
                "must read equally many batches and take equally many steps, whatever is in them"
            )
        self._count([each[len(mine) :] for each in found])
        self._now = rows[0].clock_us / _MICRO
        return rows

    def _count(self, tokens: list[list[int]]) -> None:
        """Of each rank, what it learned from in each step since they met last."""
        for step, _ in enumerate(self._uncounted):
            of_ranks = [each[step] for each in tokens]
            total = sum(each // 2 for each in of_ranks)
            self._counted.append(total if total or any(each % 2 for each in of_ranks) else None)
        self._uncounted = []


def _told(rank: int, row: _Row) -> str:
    name = _NAMES.get(RankPlace(row.place), "is at a round after step {}")
    return f"rank {rank} {name.format(row.steps, row.batches)}"


def _failure(error: FarflungError) -> _Failure:
    return _Failure(error.code, error.reason) if isinstance(error, Refused) else _Failure("", str(error))


def _error(failure: _Failure) -> FarflungError:
    if failure.code:
        return Refused(failure.code, failure.text)
    return UserError(f"rank 0 could not join: {failure.text}")
