"""A run that was, as a view of its history: what happened when, on one time line, and the status at any moment of it.

Called by the replay and by the plots.  Pure.  The coordinator's
journal tells the story; peers' journals add steps, states and when each was where.  Clocks of different machines are
brought together by the commits, which all of them saw at about the same time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.errors import DepartureCause, NoteCause
from farflung.protocol.states import OF_DEPARTURE, PEER_STATES, PeerState, RunPhase

Event = dict[str, Any]
Status = dict[str, Any]

ROUNDS_SHOWN, EVENTS_SHOWN = 40, 30
RATE_SPAN_S = 60.0  # over which tokens per second are counted


@dataclass(frozen=True)
class Moment:
    at_s: float  # since the run's first event
    peer: str  # whose journal it comes from; "": the coordinator's
    event: Event


@dataclass
class Recording:
    run: str
    moments: list[Moment]
    names: dict[str, str]

    @property
    def seconds(self) -> float:
        return self.moments[-1].at_s

    @classmethod
    def of(cls, coordinators: Iterable[Event], peers: Mapping[str, Sequence[Event]]) -> Recording:
        """From the events of all coordinators of the run, of which there are some, and of each peer."""
        host = sorted(coordinators, key=wall)
        start = wall(host[0])
        moments = [Moment(wall(e) - start, "", e) for e in host]
        run = str(next((e.get("run") for e in host if e.get("run")), ""))
        for peer, events in peers.items():
            shift_s = _ahead_s(host, events)
            moments += [Moment(wall(e) - shift_s - start, peer, e) for e in events]
        moments = sorted((m for m in moments if m.at_s >= 0), key=lambda m: m.at_s)
        names = {
            str(e["peer"]): str(e.get("name") or e["peer"]) for e in host if e.get("event") == "admitted"
        }
        return cls(run, moments, names)

    def name(self, peer: str) -> str:
        return self.names.get(peer, peer)

    def coordinators(self, kind: str) -> list[Moment]:
        return [m for m in self.moments if not m.peer and m.event.get("event") == kind]


def wall(event: Event) -> float:
    return float(event.get("wall") or 0.0)


def _ahead_s(host: Sequence[Event], events: Sequence[Event]) -> float:
    """How far the clock behind these events is ahead of the coordinator's: by the commits that both tell of."""
    there = {e["round"]: wall(e) for e in host if e.get("event") == "committed"}
    both = [
        wall(e) - there[e["round"]] for e in events if e.get("event") == "committed" and e["round"] in there
    ]
    return statistics.median(both) if both else 0.0


@dataclass
class _Member:
    name: str
    alive: bool = True
    state: str = PeerState.JOINING
    version: int = -1
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    missed: int = 0
    why: str = "it has only just arrived"
    digest: str = ""
    heard_at: float = 0.0


@dataclass
class RecordedStatus:
    """The fold: `tell` each moment in order, then ask for the status."""

    recording: Recording
    _members: dict[str, _Member] = field(default_factory=dict)
    _rounds: list[Status] = field(default_factory=list)
    _notes: list[Status] = field(default_factory=list)
    _spent: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens) of each commit
    _open: Status | None = None
    _rules: Event = field(default_factory=dict)
    version: int = 0
    tokens: int = 0
    loss: float | None = None
    _evaluated: list[Status] = field(default_factory=list)
    digest: str = ""
    model_bytes: int | None = None

    def tell(self, moment: Moment) -> None:
        kind = str(moment.event.get("event"))
        prefix = "_peer_" if moment.peer else "_on_"
        handler = getattr(self, prefix + kind, None)
        if handler is not None:
            handler(moment.event, moment.peer, moment.at_s)

    # ---- the coordinator's events ----------------------------------------------------------------------

    def _on_start(self, event: Event, _: str, at: float) -> None:
        self._rules = event.get("rules") or {}
        for member in self._members.values():
            if member.alive:
                member.alive, member.state, member.why = False, PeerState.LOST, "the coordinator restarted"
        self._open = None

    def _on_model(self, event: Event, _: str, at: float) -> None:
        self.model_bytes = 4 * int(event.get("chunks") or 0) * int(event.get("elements") or 0)

    def _on_admitted(self, event: Event, _: str, at: float) -> None:
        peer = str(event["peer"])
        member = self._members.setdefault(peer, _Member(self.recording.name(peer)))
        member.alive, member.state, member.heard_at, member.missed = True, PeerState.JOINING, at, 0
        member.why = "it has only just arrived"

    def _on_vouched(self, event: Event, _: str, at: float) -> None:
        member = self._members.get(str(event["peer"]))
        if member is not None and member.alive:
            member.state, member.why = PeerState.INNER, ""
            member.version = max(member.version, self.version)

    def _on_departed(self, event: Event, _: str, at: float) -> None:
        member = self._members.get(str(event["peer"]))
        if member is not None:
            gone = PEER_STATES.after(PeerState.INNER, OF_DEPARTURE[DepartureCause(event["cause"])])
            member.alive, member.state = False, PeerState.LOST if gone == PeerState.LOST else PeerState.LEFT
            member.why, member.heard_at = str(event.get("reason") or ""), at

    def _on_opened(self, event: Event, _: str, at: float) -> None:
        same = self._open is not None and self._open["number"] == event["round"]
        begun = self._open["begun"] if same and self._open is not None else at
        members = [str(peer) for peer in event["members"]]
        self._open = {"number": event["round"], "epoch": event["epoch"], "begun": begun, "who": members}
        for peer in members:
            if peer in self._members and self._members[peer].alive:
                self._members[peer].state, self._members[peer].why = PeerState.SCATTER, ""

    def _on_decided(self, event: Event, _: str, at: float) -> None:
        for peer in self._open["who"] if self._open is not None else []:
            if peer in self._members and self._members[peer].alive:
                self._members[peer].state = PeerState.GATHER

    def _on_aborted(self, event: Event, _: str, at: float) -> None:
        self._back_to_work()

    def _back_to_work(self) -> None:
        for peer in self._open["who"] if self._open is not None else []:
            if peer in self._members and self._members[peer].alive:
                self._members[peer].state = PeerState.INNER
        self._open = None

    def _on_committed(self, event: Event, _: str, at: float) -> None:
        self._back_to_work()
        weights = list(event.get("weights") or [])
        members = [str(peer) for peer in event["members"]]
        included = [peer for peer, weight in zip(members, weights, strict=False) if weight]
        excluded = {str(peer): str(why) for peer, why in (event.get("excluded") or {}).items()}
        self.version = int(event["version"])
        if int(event.get("fragment") or 0) == 0:
            self.tokens += int(event.get("tokens") or 0)
            self.loss = event.get("loss") if event.get("loss") is not None else self.loss
            self._spent.append((at, int(event.get("tokens") or 0)))
        for peer, member in self._members.items():
            if peer in included:
                member.missed, member.why, member.version = 0, "", self.version
            elif member.alive and member.state != PeerState.JOINING:
                member.missed += 1
                member.why = f"round {event['round']}: {excluded.get(peer, 'it was not ready in time')}"
        name = self.recording.name
        self._rounds.append(
            {
                "version": self.version, "round": event["round"], "included": [name(p) for p in included],
                "excluded": [{"name": name(p), "reason": why} for p, why in excluded.items()],
                "seconds": event.get("seconds"), "bytes": event.get("tx_bytes"), "tokens": event.get("tokens"),
                "loss": event.get("loss"),
            }
        )  # fmt: skip
        del self._rounds[:-ROUNDS_SHOWN]

    def _on_evaluated(self, event: Event, _: str, at: float) -> None:
        self._evaluated.append(
            {key: event.get(key) for key in ("version", "loss", "perplexity", "bits_per_byte")}
        )

    def _on_digest(self, event: Event, _: str, at: float) -> None:
        self.digest = str(event.get("digest") or "")

    def _on_rolled_back(self, event: Event, _: str, at: float) -> None:
        self.version = min(event.get("versions") or [0])
        self._evaluated = [each for each in self._evaluated if each["version"] <= self.version]

    def _on_note(self, event: Event, _: str, at: float) -> None:
        if NoteCause(event["cause"]) in (NoteCause.OPENED, NoteCause.COMMITTED):
            return  # the list of rounds says that
        self._notes.append({"at_s": round(at, 2), "text": event.get("text")})
        del self._notes[:-EVENTS_SHOWN]

    # ---- peers' events ---------------------------------------------------------------------------------

    def _peer_frozen(self, event: Event, peer: str, at: float) -> None:
        if (member := self._members.get(peer)) is not None and member.alive:
            member.step, member.loss, member.state = (
                int(event.get("step") or 0),
                event.get("loss"),
                PeerState.READY,
            )

    def _peer_sealed(self, event: Event, peer: str, at: float) -> None:
        if (member := self._members.get(peer)) is not None and member.alive:
            member.version, member.digest = int(event["version"]), str(event.get("digest") or "")
            member.state = PeerState.INNER

    # ---- the status ------------------------------------------------------------------------------------

    def status(self, at: float) -> Status:
        recent = sum(tokens for when, tokens in self._spent if when >= at - RATE_SPAN_S)
        target = self._rules.get("rounds") or self.version
        flight = self._open
        states = [member.state for member in self._members.values() if member.alive]
        phase = RunPhase.INNER
        if PeerState.SCATTER in states or PeerState.GATHER in states:
            phase = RunPhase.SCATTER if PeerState.SCATTER in states else RunPhase.GATHER
        if target and self.version >= target:
            phase = RunPhase.FINISHED
        return {
            "run": self.recording.run,
            "phase": phase if states or phase == RunPhase.FINISHED else RunPhase.WAITING,
            "reason": "as the journals tell it",
            "version": self.version,
            "target": target,
            "tokens": self.tokens,
            "tokens_per_s": recent / max(1.0, min(at, RATE_SPAN_S)),
            "loss": self.loss,
            **({"held_out": self._evaluated[-1]} if self._evaluated else {}),
            "elapsed_s": at,
            "digest": self.digest,
            "parity": self._parity(),
            "model_bytes": self.model_bytes,
            "members": sorted((self._member(peer, at) for peer in self._members), key=lambda m: not m["alive"]),
            "round": None if flight is None else {
                "number": flight["number"], "epoch": flight["epoch"], "members": len(flight["who"]),
                "seconds": at - flight["begun"], "deadline_s": self._rules.get("round_timeout_s") or 0.0,
            },
            "rounds": list(self._rounds),
            "events": list(self._notes),
        }  # fmt: skip

    def _parity(self) -> bool | None:
        """Do the peers' own journals name one digest of the newest version?"""
        shown = {m.digest for m in self._members.values() if m.digest and m.version == self.version}
        return len(shown) == 1 if shown else None

    def _member(self, peer: str, at: float) -> Status:
        member = self._members[peer]
        return {
            "name": member.name, "id": peer, "state": member.state, "alive": member.alive, "why": member.why,
            "version": member.version, "behind": max(0, self.version - member.version), "digest": member.digest,
            "same": member.digest == self.digest if member.digest and member.version == self.version else None,
            "heard_s": None if member.alive else at - member.heard_at, "step": member.step,
            "loss": member.loss, "missed": member.missed,
        }  # fmt: skip


# ---- stage stories -----------------------------------------------------------------------------------------
# The stages of a model in a run that was: who sat there when, what each counted, who was lost. Pure.
#
# Called by the audit and by the plots, with the coordinator's records in their order. Must not know how
# either looks.


@dataclass
class StageStory:
    """`stairs`: (when, how many seats it had from then on); `micros`: that it counted in commits."""

    number: int
    stairs: list[tuple[float, int]] = field(default_factory=list)
    commits: int = 0
    micros: int = 0
    given_up: int = 0  # seats, while a batch was open

    @property
    def most(self) -> int:
        return max((count for _, count in self.stairs), default=0)

    def line(self) -> str:
        seats = (
            f"{self.most} seat{'s' if self.most != 1 else ''} at most, {self.given_up} given up in a batch"
        )
        return f"stage {self.number}: {seats}; {self.micros} microbatches in {self.commits} commits"


def stage_stories(records: Iterable[tuple[float, Event]]) -> list[StageStory]:
    """`records`: (when, what), commits of all stages at once told as one of each.  Empty: it has one stage."""
    found: dict[int, StageStory] = {}
    seats: dict[int, int] = {}  # number -> stage
    open_batch = False
    for at, event in records:
        match event.get("event"):
            case "batch":
                open_batch = not event.get("held_out")
            case "held_out_ended":
                seats.clear()
            case "seated":
                stage = int(event.get("stage") or 0)
                seats[int(event["number"])] = stage
                _step(found, seats, stage, at)
            case "unseated" if (number := int(event["number"])) in seats:
                stage = seats.pop(number)
                _step(found, seats, stage, at).given_up += open_batch
            case "committed" if "of_batch" in event:
                open_batch = False
                told = found.setdefault(int(event["fragment"]), StageStory(int(event["fragment"])))
                told.commits += 1
                counted = (event.get("counted") or {}).values()
                told.micros += sum(mask_from_bytes(bytes.fromhex(raw)).bit_count() for raw in counted)
    return [found[number] for number in sorted(found)] if len(found) > 1 else []


def _step(found: dict[int, StageStory], seats: dict[int, int], stage: int, at: float) -> StageStory:
    told = found.setdefault(stage, StageStory(stage))
    told.stairs.append((at, list(seats.values()).count(stage)))
    return told
