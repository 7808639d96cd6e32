"""What a mode of the run may say at a peer, and which modes there are.  Pure.

As at the coordinator (coordinator/modes): a mode is a folder, which the core never imports.  It asks here for the
module in which the mode begins, and goes on without it where the folder is not there.

Such a module has `made(tools) -> PeerMode | None`: its part in a session, which lives as long as it is known what this
peer holds; None where the run has no use for it.  Of a word, a frame or finished arithmetic None says that it is not
this mode's, and the next one is asked, and then the core.  What else it answers is carried out as it is.  `KINDS` are
the kinds of frames that are the mode's, where it has any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Final, NamedTuple

from farflung.collectives.round.effects import Calculated
from farflung.collectives.round.member import IN_GROUPS
from farflung.optim.schedule import rules_of
from farflung.peer.local.words import FromTrainer, WorkDone
from farflung.peer.machine.effects import Effect
from farflung.peer.machine.fragment_rounds import ReplicaModes
from farflung.peer.machine.handshake import CoordinatorPlaces, Offer, PeerConfig
from farflung.peer.machine.heartbeat import HeartbeatBuilder
from farflung.peer.machine.replicas import Replicas
from farflung.peer.machine.trainer_proxy import TrainerProxy, TrainerSync
from farflung.protocol.frames import Frame, Kinds, Payload, Spoiled, known_kinds
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import OfBeat, Show, Tick, ToMember
from farflung.protocol.model_schema import Fragment
from farflung.protocol.process.mode_folders import module_of
from farflung.protocol.run_terms import Attached


@dataclass(frozen=True)
class SessionTools:
    """What a mode's part is made of."""

    offer: Offer  # of what is held
    training: TrainerProxy  # so far
    part: Replicas
    config: PeerConfig
    reports: HeartbeatBuilder
    chance: Callable[[], float]  # 0..1, for ties


class TrainerSaid(NamedTuple):
    """What follows from a word of the trainer."""

    effects: list[Effect]
    beat: bool = False  # the coordinator is to hear of it at once


class PeerMode:
    """Each mode gives some of these answers; these are those of one that has nothing to say."""

    # Where what a trainer makes are not steps of its own: the view of it, and what a new version means for its work.
    training: TrainerProxy | None = None
    exchange: TrainerSync | None = None

    # ---- words, frames, arithmetic: None is somebody else's ---------------------------------------------

    def on_word(self, word: ToMember, now: float) -> list[Effect] | None:
        """Of the coordinator, in contact."""
        return None

    def on_tick(self, tick: Tick, now: float) -> list[Effect]:
        """Where the run is, for all: what it says to this mode is in one of its sections."""
        return []

    @property
    def sections(self) -> tuple[OfBeat, ...]:
        """What a beat says for this mode."""
        return ()

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[Effect] | None:
        """Of a known peer; its payload matches its hash.  It ends in exactly one counter (P8)."""
        return None

    def on_spoiled(self, sender: str, spoiled: Spoiled, now: float) -> list[Effect] | None:
        """A frame that is not what it should be."""
        return None

    def on_trainer(self, word: FromTrainer, payload: Payload, now: float) -> TrainerSaid | None:
        """`payload`: what lay in the belt for it."""
        return None

    def place_of(self, word: WorkDone) -> int | None:
        """In which place of the belt lies what the trainer made; None: it was made for sums that are gone."""
        return None

    def on_calculated(self, effect: Calculated, made: object, now: float) -> list[Effect] | None:
        return None

    def shown(self, show: Show, now: float) -> Payload | None:
        """The bytes of another peer, or mine of a past round, that the coordinator asks for; None: not here."""
        return None

    # ---- time, and the lines ----------------------------------------------------------------------------

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        """For whom something waits that can't leave; of whom bytes came in."""

    def on_timer(self, now: float, inside: bool) -> list[Effect]:
        """`inside`: in contact with the coordinator."""
        return []

    def has_news(self, now: float) -> bool:
        """The coordinator is to hear from me before the next beat is due."""
        return False

    @property
    def takes_line(self) -> bool:
        """What it sends now goes before all answers to others."""
        return False

    @property
    def early_count(self) -> int:
        """Frames that wait for their explanation, and end in a counter when it comes."""
        return 0


# ---- which there are ----------------------------------------------------------------------------------

# Name -> the module in which it begins.  They are asked in this order.
BEGINNINGS: Final = {
    "batches": "farflung.peer.batches.batches",
    "audits": "farflung.peer.audits.auditor",
    "evaluation": "farflung.peer.evaluation.evaluation",
    "pace": "farflung.peer.pace.pace",
}

SEARCH: Final = "farflung.peer.restoring.fellow_search"
EARLY: Final = "farflung.peer.slow_lines.early_upload"
KEPT: Final = "farflung.peer.audits.auditor"
# Name -> the module with its hand at the agent (peer/agent/io_workers.py).
HANDS: Final = {"batches": "farflung.peer.crossings.crossing_hand"}


def found(mode: str) -> ModuleType | None:
    """None: its folder was taken out."""
    return module_of(BEGINNINGS[mode])


def hand_of(mode: str) -> ModuleType | None:
    return module_of(HANDS[mode])


def _uses(manifest: Manifest, mode: str) -> bool:
    """The others are asked in every run."""
    return mode != "batches" or manifest.pipeline.batch > 0


def missing(manifest: Manifest) -> str:
    """Why this peer can't be in the run; empty: it can."""
    if _uses(manifest, "batches") and found("batches") is None:
        return "the run learns in batches, and this peer was installed without them: install farflung whole"
    if manifest.round.group and module_of(IN_GROUPS) is None:
        return (
            "the run has rounds in groups, and this peer was installed without mesh: install farflung whole"
        )
    return ""


def parts(tools: SessionTools) -> dict[str, PeerMode]:
    """Of each mode that is there and that the run has a use for."""
    used = [name for name in BEGINNINGS if _uses(tools.offer.attached.known.manifest, name)]
    made: dict[str, PeerMode | None] = {
        name: module.made(tools) for name in used if (module := found(name)) is not None
    }
    return {name: part for name, part in made.items() if part is not None}


def of_replica(attached: Attached, me: str, fragment: Fragment) -> ReplicaModes:
    """The parts that modes have in it."""
    made = {
        name: getattr(module, name)(attached, me, fragment)
        for name, path in (("ahead", EARLY), ("kept", KEPT))
        if (module := module_of(path)) is not None
    }
    return ReplicaModes(**made)


def places_of(config: PeerConfig, hurry: Callable[[float], None]) -> CoordinatorPlaces:
    """Where the coordinator may be, and what is done where it is lost."""
    module = module_of(SEARCH)
    made: CoordinatorPlaces = (module.FellowSearch if module is not None else CoordinatorPlaces)(
        config, hurry
    )
    return made


def kinds_of(stages: bool) -> Kinds:
    """Of frames that a run knows: crossings of microbatches only where its model is in stages."""
    beginnings = (*BEGINNINGS.values(), SEARCH, EARLY, IN_GROUPS)
    declared = (getattr(module_of(name), "KINDS", ()) for name in beginnings)
    return known_kinds(kind for kinds in declared for kind in kinds if stages or not kind.crossing)


def training_of(manifest: Manifest) -> TrainerProxy:
    """Until it is known what this peer holds."""
    batches = found("batches") if _uses(manifest, "batches") else None
    made: TrainerProxy = batches.training_of(manifest) if batches else TrainerProxy(rules_of(manifest))
    return made
