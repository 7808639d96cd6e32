"""A round is waited for: the trainer is to end its period after the step that it is at.

Where the mode begins.  Pure.  Ticks say so until the coordinator has heard that this peer is ready.  Of another version
than is held here it is no news; the trainer passes over what it has done already.  Beats say which fragments are ready
early because of that: who was called, or ends its periods before it would be, calls nobody else.
"""

from __future__ import annotations

from farflung.peer.local.words import RoundCalled
from farflung.peer.machine.effects import Effect, TellTrainer
from farflung.peer.machine.modes import PeerMode, SessionTools
from farflung.peer.machine.replicas import Replicas
from farflung.peer.machine.trainer_proxy import TrainerProxy
from farflung.protocol.messages import OfBeat, Tick
from farflung.protocol.mode_words import CallTick, PaceBeat
from farflung.protocol.round_words import section


class PeerPace(PeerMode):
    def __init__(self, part: Replicas, training: TrainerProxy) -> None:
        self._part, self._proxy = part, training

    @property
    def sections(self) -> tuple[OfBeat, ...]:
        works = self._proxy.works
        early = [at for at, work in works.items() if work.frozen is not None and work.frozen.early]
        return (PaceBeat(tuple(early)),) if early else ()

    def on_tick(self, tick: Tick, now: float) -> list[Effect]:
        said = section(CallTick, tick.sections)
        if said is None or not self._proxy.attached or self._proxy.loading:
            return []
        held = {number: replica.held.version for number, replica in self._part.replicas.items()}
        return [
            TellTrainer(RoundCalled(fragment=fragment, version=version, waited_s=waited_s))
            for fragment, version, waited_s in said.rounds
            if held.get(fragment) == version and self._proxy.works[fragment].running
        ]


def made(tools: SessionTools) -> PeerMode | None:
    return (
        None if tools.offer.attached.known.manifest.pipeline.batch else PeerPace(tools.part, tools.training)
    )
