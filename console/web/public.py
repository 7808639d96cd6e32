"""What of a status the public of a run may see, field by field, and nothing else of it.  Pure.

Called before anything is drawn.  A status has sentences of the coordinator's in it, which may name networks, addresses
or reasons of the host; and names, which strangers chose.  So no sentence passes: what is said here is said in words of
our own, from states and numbers; and names pass cleaned and cut.  How it looks is page.py's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farflung.console.screen.health import health, takes_part
from farflung.console.screen.text import Record, clean, known, number, records
from farflung.protocol.states import ARRIVING, PeerState, RunPhase

PEOPLE_SHOWN = 60
LEADERS_SHOWN = 25
STAGES_SHOWN = 64
NAME_CHARS = 40
TEXT_CHARS = 2000
_ID_CHARS = 4  # of an id, where two have the same name
_ADMISSIONS = ("open", "token", "allowlist")

# Of a peer that is here, by its state; who takes part in no round is told by _OUT.
_DOES = {
    PeerState.INNER: "training",
    PeerState.READY: "ready",
    PeerState.SCATTER: "sending",
    PeerState.GATHER: "receiving",
    PeerState.APPLY: "applying",
    PeerState.JOINING: "arriving",
    PeerState.SYNCING: "fetching the model",
    PeerState.WAITING: "waiting",
    PeerState.QUARANTINED: "fetching it again",
    PeerState.STUCK: "standing still",
    PeerState.LEAVING: "leaving",
}
_OUT = "not in rounds yet"
_PHASES = {
    RunPhase.WAITING: "Waiting for enough peers.",
    RunPhase.INNER: "Everybody trains on their own until the next round.",
    RunPhase.SCATTER: "A round is going on: what was learned is being sent.",
    RunPhase.GATHER: "A round is going on: the merged result is being fetched.",
    RunPhase.APPLY: "A round is committed, and everybody applies it.",
    RunPhase.FINISHED: "The run is complete.",
}
_NARROW = {
    "compute": "its peers compute no faster",
    "line up": "its peers' lines carry no more up",
    "line down": "its peers' lines carry no more down",
    "too few seats": "it has too few peers",
}


@dataclass(frozen=True)
class HealthWord:
    tone: str  # "good", "busy", "warn" or "bad": a class of the style sheet
    word: str
    text: str


@dataclass(frozen=True)
class Person:
    """A peer that is here."""

    name: str
    does: str
    takes_part: bool
    here_s: float | None
    tokens_per_s: float
    stage: int | None


@dataclass(frozen=True)
class Leader:
    """Whose tokens are in the model."""

    name: str
    tokens: float
    share: float
    here: bool


@dataclass(frozen=True)
class PublicStage:
    """Of a model in several."""

    number: int
    peers: float
    counted: float
    of: float
    micros_per_s: float | None
    version: float
    narrow: str


@dataclass(frozen=True)
class PublicHeldOut:
    """The loss on text that nobody learns from."""

    version: float
    loss: float | None  # None: those who computed it contradict each other
    perplexity: float | None
    bits_per_byte: float | None
    peers: int
    curve: tuple[tuple[float, float], ...]  # (version, loss)


@dataclass(frozen=True)
class PublicText:
    """By the model, from the beginning of a text that nobody learns from."""

    version: float
    began: str
    went_on: str
    peers: int  # that say so


@dataclass(frozen=True)
class PublicStatus:
    run: str
    software: str
    verdict: HealthWord
    phase: str
    version: float
    target: float
    loss: float | None
    tokens: float
    tokens_per_s: float
    alive: int
    taking_part: int
    eta_s: float | None
    elapsed_s: float
    admission: str  # "" while it is not known
    needs_script: bool  # peers bring the run's own training script
    curve: tuple[tuple[float, float], ...]  # (version, loss)
    held_out: PublicHeldOut | None
    written: PublicText | None
    people: tuple[Person, ...]
    leaders: tuple[Leader, ...]
    stages: tuple[PublicStage, ...]
    finished: bool
    answers: bool  # the coordinator has been heard of lately

    @property
    def share(self) -> float:
        return min(1.0, self.version / self.target) if self.target > 0 else 0.0


def shown(status: Record) -> PublicStatus:
    members = [member for member in records(status, "members") if member.get("alive") is True]
    part = sum(takes_part(member) for member in members)
    mode = clean(status.get("admission"), 20)
    counted = (
        known(status, "alive"),
        known(status, "taking_part"),
    )  # where not all are listed, these are of all
    alive = round(counted[0]) if counted[0] is not None else len(members)
    taking_part = round(counted[1]) if counted[1] is not None else part
    phase = clean(status.get("phase"), 20)
    return PublicStatus(
        run=clean(status.get("run"), 64) or "a run",
        software=clean(status.get("software"), 20),
        verdict=_verdict(status, alive, taking_part),
        phase=_phase(status, phase),
        version=number(status, "version"),
        target=number(status, "target"),
        loss=known(status, "loss"),
        tokens=number(status, "tokens"),
        tokens_per_s=number(status, "tokens_per_s"),
        alive=alive,
        taking_part=taking_part,
        eta_s=known(status, "eta_s"),
        elapsed_s=number(status, "elapsed_s"),
        admission=mode if mode in _ADMISSIONS else "",
        needs_script=status.get("needs_script") is True,
        curve=_points(status) or _points_of_rounds(status),
        held_out=_held_out(status),
        written=_written(status),
        people=_people(members),
        leaders=_leaders(status),
        stages=_stages(status),
        finished=phase == RunPhase.FINISHED,
        answers="unanswered_s" not in status and status.get("unasked") is not True,
    )


def _verdict(status: Record, alive: int, taking_part: int) -> HealthWord:
    """The word that the dashboard has, with a sentence that names nobody."""
    of = f"{taking_part} of {alive}"
    match health(status).word:
        case "DONE":
            return HealthWord(
                "good", "Complete", "Every round is done. Thank you to everybody who took part."
            )
        case "CONNECTING":
            return HealthWord("busy", "Starting", "The coordinator has not answered yet.")
        case "NO ANSWER":
            return HealthWord(
                "warn",
                "No answer",
                "The coordinator is away; training goes on without it, and it may come back.",
            )
        case "BROKEN":
            return HealthWord(
                "bad", "Broken", "Peers at one version hold different models. The host must look."
            )
        case "WAITING" if not alive and (version := round(number(status, "version"))):
            told = f"Nobody is here. The run is at version {version:,} and goes on when a peer that has it is back."
            return HealthWord("busy", "Waiting", told)
        case "WAITING" if not alive:
            return HealthWord("busy", "Waiting", "Nobody is here. The first peer to join starts the run.")
        case "WAITING":
            return HealthWord("busy", "Waiting", "More peers are needed before the next round can open.")
        case "GOING WELL":
            return HealthWord(
                "good", "Going well", f"{of} here take part." if alive > 1 else "One peer takes part."
            )
    return HealthWord("warn", "Going on", f"{of} here take part; the others are held up or were lost lately.")


def _phase(status: Record, phase: str) -> str:
    batch = status.get("batch")
    if phase == RunPhase.INNER and isinstance(batch, Mapping):
        counted, due = number(batch, "counted"), number(batch, "microbatches")
        told = f"{counted:,.0f} of {due:,.0f} microbatches of this batch are counted."
        if batch.get("held_out"):
            told = f"The held-out loss is computed: {counted:,.0f} of {due:,.0f} microbatches."
        return told if due else "A batch begins soon."
    return _PHASES[RunPhase(phase)] if phase in list(RunPhase) else ""


def _points(told: Record) -> tuple[tuple[float, float], ...]:
    rows = told.get("curve")
    listed = rows if isinstance(rows, list) else []
    return _rising(
        [{"version": row[0], "loss": row[1]} for row in listed if isinstance(row, list) and len(row) == 2]
    )


def _points_of_rounds(status: Record) -> tuple[tuple[float, float], ...]:
    """Of the last ones, where the coordinator tells no more."""
    return _rising(records(status, "rounds"))


def _rising(entries: Sequence[Record]) -> tuple[tuple[float, float], ...]:
    found: list[tuple[float, float]] = []
    for entry in entries:
        version, loss = known(entry, "version"), known(entry, "loss")
        if version is not None and loss is not None and (not found or version > found[-1][0]):
            found.append((version, loss))
    return tuple(found)


def _held_out(status: Record) -> PublicHeldOut | None:
    told = status.get("held_out")
    if not isinstance(told, Mapping) or (version := known(told, "version")) is None:
        return None
    peers = told.get("peers")
    return PublicHeldOut(
        version,
        known(told, "loss"),
        known(told, "perplexity"),
        known(told, "bits_per_byte"),
        len(peers) if isinstance(peers, list) else 0,
        _points(told),
    )


def _written(status: Record) -> PublicText | None:
    told = status.get("written")
    if not isinstance(told, Mapping) or (version := known(told, "version")) is None:
        return None
    peers = round(number(told, "peers"))
    return PublicText(version, _text(told.get("began")), _text(told.get("went_on")), peers)


def _text(said: object) -> str:
    lines = said[:TEXT_CHARS].expandtabs(4).split("\n") if isinstance(said, str) else []
    return "\n".join(clean(line, TEXT_CHARS) for line in lines)


def _names(entries: list[Record]) -> list[str]:
    """Two that call themselves the same are told apart by the begin of their ids."""
    names = [clean(each.get("name"), NAME_CHARS).strip() or "without a name" for each in entries]
    often = Counter(names)
    return [
        f"{name} · {clean(each.get('id'), _ID_CHARS)}" if often[name] > 1 else name
        for name, each in zip(names, entries, strict=True)
    ]


def _people(members: list[Record]) -> tuple[Person, ...]:
    listed = members[:PEOPLE_SHOWN]
    return tuple(
        Person(
            name=name,
            does=_does(member),
            takes_part=takes_part(member),
            here_s=known(member, "here_s"),
            tokens_per_s=number(member, "tokens_per_s"),
            stage=round(number(member, "stage")) if "stage" in member else None,
        )
        for name, member in zip(_names(listed), listed, strict=True)
    )


def _does(member: Record) -> str:
    state = clean(member.get("state"), 20)
    word = _DOES.get(PeerState(state), _OUT) if state in list(PeerState) else _OUT
    trains = state not in (
        *ARRIVING,
        PeerState.WAITING,
        PeerState.QUARANTINED,
        PeerState.STUCK,
        PeerState.LEAVING,
    )
    return _OUT if trains and not takes_part(member) else word


def _leaders(status: Record) -> tuple[Leader, ...]:
    listed = records(status, "contributors")[:LEADERS_SHOWN]
    whole = max(number(status, "tokens"), sum(number(each, "tokens") for each in listed), 1.0)
    return tuple(
        Leader(name, number(each, "tokens"), number(each, "tokens") / whole, each.get("alive") is True)
        for name, each in zip(_names(listed), listed, strict=True)
        if number(each, "tokens") > 0
    )


def _stages(status: Record) -> tuple[PublicStage, ...]:
    batch = status.get("batch")
    due = number(batch, "microbatches") if isinstance(batch, Mapping) else 0.0
    return tuple(
        PublicStage(
            number=at,
            peers=number(stage, "members"),
            counted=number(stage, "counted"),
            of=due,
            micros_per_s=known(stage, "micros_per_s"),
            version=number(stage, "version"),
            narrow=_NARROW.get(clean(stage.get("narrow"), 40), ""),
        )
        for at, stage in enumerate(records(status, "stages")[:STAGES_SHOWN])
    )
