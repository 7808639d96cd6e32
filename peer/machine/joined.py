"""The peer machine's parts from the moment on when a trainer has said what its model is.  Pure.

Made once by the machine (machine.py), which sends every event to the part that it concerns.  What the disk has to say
(checkpoints, pieces of state, results of a former life) concerns several of them, and is answered here.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.checkpoints.result_log import ResultLog
from farflung.peer.machine import effects as do
from farflung.peer.machine.auditing import Auditing
from farflung.peer.machine.checkpoint_policy import Held, Recalling, Restoring, Saving
from farflung.peer.machine.exchange import Exchange
from farflung.peer.machine.gathering import Gathering, may_gather
from farflung.peer.machine.getting_in import PeerConfig
from farflung.peer.machine.lane import Lane
from farflung.peer.machine.lanes import Participation
from farflung.peer.machine.reports import Reporter
from farflung.peer.machine.trainer_view import Training
from farflung.protocol.manifest import NetSection
from farflung.protocol.moments import Attached


@dataclass(frozen=True)
class Joined:
    """The machine's parts from the moment on when a trainer has said what its model is."""

    attached: Attached
    address: str  # where other peers dial me, if they can
    part: Participation
    auditing: Auditing
    exchange: Exchange
    log: ResultLog
    saving: Saving
    restoring: Restoring
    recalling: Recalling
    gathering: Gathering

    @staticmethod
    def of(
        attached: Attached, address: str, training: Training, config: PeerConfig, reports: Reporter
    ) -> Joined:
        known = attached.known
        log = ResultLog(known.manifest.round.keep_results, config.results_limit_bytes, config.results_on_disk)
        part = Participation(config.me.peer, attached, log, config.check)
        return Joined(
            attached,
            address,
            part,
            Auditing(config.me.peer, known.tag, part, reports.audited),
            Exchange(part, training),
            log,
            Saving(known, config.saves, config.pinned),
            Restoring(config.saves),
            Recalling(config.recalls),
            Gathering(config.me.peer, known, part, config.gathers and may_gather(known.manifest)),
        )

    @property
    def lanes(self) -> list[Lane]:
        return list(self.part.lanes.values())

    @property
    def net(self) -> NetSection:
        return self.attached.known.manifest.net

    # ---- what the disk has to say ------------------------------------------------------------------------------

    def on_restored(self, version: int, problems: list[str], now: float, era: int) -> list[do.Effect]:
        """The state is that of a checkpoint; or NO_VERSION: none was found that is whole and of this run."""
        notes: list[do.Effect] = [do.Note(each) for each in problems]
        read = self.restoring.on_end(version, now, era)
        return notes + (self.exchange.on_restored(version, read) if read else [])

    def on_recalled(self, held: Held, era: int) -> list[do.Effect]:
        """These pieces of the run's state, which had arrived before a crash, stand in it again."""
        return self.recalling.on_end(held, self.lanes, era)

    def on_results_lost(self, why: str) -> list[do.Effect]:
        """The disk can't keep results any more: the memory does."""
        if not self.log.on_disk_lost():
            return []
        return [do.Note(f"results of past rounds are kept in memory, not on disk any more: {why}")]

    def is_filling(self, fragment: int) -> bool:
        """Its state is being read from the disk: nothing else may change it."""
        return fragment in self.restoring.lacking or self.recalling.busy
