"""Where version 0 comes from: the trainer's own values, or what `[start] from` of run.toml names.  Pure.

Part of the peer machine.  A founder is told to give the run its initial state.  Everybody else may have the same
values: a model that is built from the run's seed by the same code begins with the run's version 0, and what the run
begins with may be read by all.  Whether it is the run's, its hashes say: what is sealed then is the run's state or is
forgotten (Replica.on_sealed).  So nothing of it is fetched, and nobody is believed.

What [start] names has one content, by the hash that all agreed on.  So whoever has read it and finds that the run has
another version 0 knows that its founder lied, and does not train on that.

The run's host chose [start], and what is read goes to all others.  So a path is opened on the word of this peer's owner
alone (`--start`), whatever the coordinator tells it to do; and what is wrong with what was read, its owner is told, and
nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.peer.local.words import Provide
from farflung.peer.machine.effects import BeginFrom, Effect, Note, TellTrainer
from farflung.peer.machine.held_fragment import Filling
from farflung.peer.machine.replica import Replica
from farflung.protocol.manifest_sections import StartSection
from farflung.protocol.messages import Tick
from farflung.protocol.states import Goal

READ_AGAIN_S = 30.0  # the place did not answer; meanwhile somebody else may found the run


def without_start(start: StartSection, own: str) -> str:
    """Why the owner's place is of no use; empty: it is.  Silence would train something else than was meant."""
    if not own or start.source:
        return ""
    return (
        f"--start {own}: this run does not begin with a checkpoint or a file ([start] of its run.toml is empty); leave "
        "it out"
    )


class Founding:
    def __init__(self, start: StartSection, is_empty: Callable[[Replica], bool], own: str = "") -> None:
        """`own`: where this peer's owner has what the run begins with; empty: nowhere."""
        self._start, self._is_empty, self._own = start, is_empty, own
        self._told = False  # what founding would take
        self._tried: tuple[bytes, ...] = ()  # digests of the version 0 that was tried last
        self._provides = False  # the trainer writes its values
        self.reads = False  # what [start] names is on its way into the state
        self._is_read = False  # what stands in the state as version 0 is what [start] names
        self._founds = False  # told to, when it began to read
        self._again_at = 0.0

    @property
    def lacks_it(self) -> bool:
        """What the run begins with is nothing that may be read here."""
        return bool(self._start.source) and not self._own and not self._start.for_all

    def due(self, tick: Tick, replicas: Sequence[Replica], now: float) -> list[Effect]:
        """Asked at every tick, with a trainer that is there."""
        if any(replica.held.sealing or replica.held.filling for replica in replicas):
            return []
        if all(replica.held.version != NO_VERSION for replica in replicas):
            return []
        founds = tick.goal == Goal.FOUND
        if self._start.source:
            return self._read(tick, replicas, founds, now)
        if not founds and not self._may_begin_so(tick, replicas):
            return []
        self._provides = True
        _fill(replicas)
        return [TellTrainer(Provide())]

    def _read(self, tick: Tick, replicas: Sequence[Replica], founds: bool, now: float) -> list[Effect]:
        if self.lacks_it:
            return self._tell_once() if founds else []
        others = not founds and self._may_begin_so(tick, replicas)
        if now < self._again_at or not (founds or others):
            return []
        self.reads, self._is_read, self._founds = True, False, founds
        _fill(replicas)
        start = self._start.model_copy(update={"source": self._own or self._start.source})
        told = Note(f"reads what the run begins with: {start.source}")
        return [told, BeginFrom(start, as_nobody=not self._own)]

    def _tell_once(self) -> list[Effect]:
        told, self._told = self._told, True
        return [] if told else [Note(f"I can't found this run, and wait for {self._start.founder}")]

    def _may_begin_so(self, tick: Tick, replicas: Iterable[Replica]) -> bool:
        """Once for each version 0 that this run has."""
        told = tuple(dict(word.digests).get(0, b"") for word in tick.fragments)
        begins = tick.goal == Goal.SYNC and all(word.version == 0 for word in tick.fragments)
        # What has arrived already may be more than my own values are good for: they would overwrite it.
        if not begins or not all(told) or told == self._tried or not all(map(self._is_empty, replicas)):
            return False
        self._tried = told
        return True

    # ---- the trainer's values

    def on_trainer_gone(self, replicas: Iterable[Replica]) -> None:
        """It may have written some of them."""
        if self.on_provided():
            _unfilled(replicas)

    def on_provided(self) -> bool:
        """They are there; False: the word of a trainer that is gone."""
        provided, self._provides = self._provides, False
        return provided

    # ---- what [start] names

    def on_read(
        self, problem: str, is_final: bool, replicas: Iterable[Replica], now: float
    ) -> tuple[str, list[Effect]]:
        """Why to leave, if there is a reason; else what to say.  `is_final`: it will be no better next time."""
        # What was read in an era that is over does not count.
        self.reads, self._is_read = (
            False,
            not problem and all(isinstance(each.held.stand, Filling) for each in replicas),
        )
        if not problem:
            return "", []
        _unfilled(replicas)
        if self._founds and is_final:
            return f"this run can't begin so: {problem}", []
        self._again_at = now + READ_AGAIN_S
        return "", [Note(f"can't begin with it now: {problem}")]

    def contradiction(self, replica: Replica, version: int, digest: bytes) -> str:
        """Of what is sealed as this version: why it proves that the run does not begin with what [start] names."""
        known = replica.held.chunks.digests.get(0)
        if not self._is_read or version != 0 or known is None or known == digest:
            return ""
        return (
            f"the run's version 0 (digest {known.hex()[:16]}) is not what [start] names ({digest.hex()[:16]}): "
            "who founded it began with something else; tell its host"
        )


def _fill(replicas: Iterable[Replica]) -> None:
    for replica in replicas:
        replica.held.fill()


def _unfilled(replicas: Iterable[Replica]) -> None:
    """Whatever came of it: the state was cleared first, or a trainer was at it."""
    for replica in replicas:
        replica.unfilled(touched=True)
