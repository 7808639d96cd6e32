"""What the parts of the run machine share: the durable ledger, the volatile membership, and the way to act.

`write` folds a record into the ledger at once and asks for its durability; whatever is appended after it
leaves the process only when the record is on disk.  Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from farflung.coordinator.court.questions import Questions
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.pace import RunPace
from farflung.coordinator.ledger.records import Amended, Record, Struck
from farflung.coordinator.modes.registry import Modes
from farflung.coordinator.run.effects import Effect, Note, Tell, Write
from farflung.coordinator.run.membership import Member, Membership
from farflung.protocol.errors import NoteCause
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import ToMember
from farflung.protocol.run_terms import Terms
from farflung.protocol.signing import KeptCommit

EVENTS_SHOWN = 30


@dataclass
class Offences:
    """Of the event that is not over yet."""

    struck: list[str] = field(default_factory=list)
    convicted: list[tuple[str, str]] = field(default_factory=list)  # each with the reason


class Core:
    def __init__(self, manifest: Manifest, run_id: bytes, ledger: Ledger) -> None:
        self.terms = Terms.of(manifest, ledger.amendments)
        self.run_id = run_id
        self.ledger = ledger
        self.members = Membership(manifest.net.dead_after_s)
        self.events: deque[tuple[float, str]] = deque(maxlen=EVENTS_SHOWN)
        self.modes: Modes = ()  # that are there; the machine makes them
        self.now = 0.0
        self.began_at = 0.0  # `now` when this coordinator started
        self.draining = False  # the operator wants it to end
        self.pace = RunPace()
        self.prove: Callable[[bytes], bytes] = lambda statement: b""  # the shell has the key
        # Before a round opens with these, or goes on: in each circle everybody hears of the others.
        self.acquaint: Callable[[Iterable[Iterable[str]]], None] = lambda circles: None
        self._effects: list[Effect] = []
        self.questions = Questions()  # what members are asked to show
        self.offences = Offences()

    @property
    def manifest(self) -> Manifest:
        """What holds now, for rounds of the least advanced fragment."""
        terms = self.terms  # asked for all the time, and by most runs never amended
        return terms.at(self.ledger.version) if terms.amendments else terms.first

    def amended_for(self, version: int) -> int:
        """Which amendment a member must know before it takes part in a round from this version, or in what it made."""
        return self.terms.number_at(version)

    @property
    def clock_s(self) -> float:
        """The run's own clock: see coordinator/ledger/ledger.py."""
        return max(self.ledger.clock.newest_s, self.clock_at(self.now))

    def clock_at(self, at: float) -> float:
        """What it showed at this moment of this coordinator's."""
        return self.ledger.clock.began_s + at - self.began_at

    @property
    def held(self) -> str:
        """Why no round may be opened; empty if one may."""
        for mode in self.modes:
            if why := mode.holds():
                return why
        if self.draining:
            return "the coordinator is about to end; training goes on alone until it is back"
        paused = self.ledger.paused
        if paused is None:
            return ""
        return (
            f"the host paused the run{f' ({paused.reason})' if paused.reason else ''}; training goes on alone"
        )

    def strike(self, peer: str, reason: str) -> None:
        """What follows from it is a mode's business, when this event is over."""
        self.write(Struck(peer=peer, reason=reason[:200], at_s=self.clock_s))
        self.note(f"{self.name(peer)} gets a strike: {reason}")
        self.offences.struck.append(peer)

    def convict(self, peer: str, reason: str) -> None:
        """It was proven to have lied: it has to go when this event is over."""
        self.offences.convicted.append((peer, reason))

    def follow_up(self) -> None:
        """An event is over, or somebody was convicted in its midst."""
        over, self.offences = self.offences, Offences()
        for mode in self.modes if over.struck or over.convicted else ():
            mode.after(over.struck, over.convicted)

    def keeps_out(self, peer: str) -> bool:
        return any(mode.keeps_out(peer) for mode in self.modes)

    def why_wait(self, fragment: int, is_given: bool) -> str:
        """Of a member that lacks this fragment's newest version; empty: it can have it from somebody here."""
        why = next(filter(None, (mode.why_wait(fragment, is_given) for mode in self.modes)), "")
        if why or is_given:
            return why
        newest = self.ledger.books[fragment].version
        return f"nobody online has version {newest}{self.of(fragment)}: waiting for a peer that has it"

    def lost(self) -> dict[int, str]:
        """Fragments whose newest version nobody has, and what can be done."""
        return {fragment: why for mode in self.modes for fragment, why in mode.lost().items()}

    def saved_by(self, fragment: int) -> set[str]:
        """Peers that have some version of it on disk, by what they say."""
        return {peer for mode in self.modes for peer in mode.saved_by(fragment)}

    def is_keeper(self, peer: str) -> bool:
        return any(mode.is_keeper(peer) for mode in self.modes)

    def kept_by(self, peer: str) -> KeptCommit | None:
        return next((kept for mode in self.modes if (kept := mode.kept_by(peer)) is not None), None)

    def write(self, record: Record) -> None:
        self.ledger.apply(record)
        if isinstance(record, Amended):
            self.terms = self.terms.plus(record.amendment)
        self._effects.append(Write(record))

    def do(self, effect: Effect) -> None:
        self._effects.append(effect)

    def tell(self, member: Member, kind: type[ToMember], **body: Any) -> None:
        member.told.seq += 1
        message = kind(session=member.session, seq=member.told.seq, **body)
        self._effects.append(Tell(member.peer, member.session, message))

    def log(self, text: str, cause: NoteCause = NoteCause.NEWS) -> None:
        """What happens every round: to the log only, or it would push the news off the dashboard."""
        self._effects.append(Note(text, True, cause))

    def note(self, text: str) -> None:
        """Something a person wants to know: to the log and to the dashboard."""
        self.events.append((self.now, text))
        self._effects.append(Note(text))

    def warn(self, text: str) -> None:
        """A note, if there is anything to say."""
        if text:
            self.note(text)

    def name(self, peer: str) -> str:
        """For texts: people know peers by their names."""
        return self.ledger.peers.names.get(peer, peer)

    def of(self, fragment: int) -> str:
        """For texts about one of several fragments, or stages of a model."""
        if self.manifest.pipeline.stages > 1:
            return f" of stage {fragment}"
        return f" of fragment {fragment}" if self.manifest.fragments > 1 else ""

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    @property
    def finished(self) -> bool:
        """Every fragment has had its rounds; some may have had more."""
        return self.ledger.version >= self.manifest.run.rounds
