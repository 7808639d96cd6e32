"""The hand of the mode reach in the server: the coordinator's relay, and trials of those that members offer.

Made by the server (coordinator/modes/registry.py).  The relay begins when the run has: tickets are of one start of the
coordinator.
"""

from __future__ import annotations

from pathlib import Path

from farflung.coordinator.modes.mode import ServerHand
from farflung.coordinator.reach.reach import Reach
from farflung.coordinator.relay.relay_process import FILE_NAME, KeptRelay, Month, RelayProcess
from farflung.coordinator.relay.relay_words import RelaySettings
from farflung.coordinator.relay.trials import Trials
from farflung.coordinator.run.effects import Effect, RelayPairs, TryRelay
from farflung.protocol.caps import parse_relay


class RelayHand(ServerHand):
    def __init__(self, mode: Reach, folder: Path) -> None:
        self._mode = mode
        self._folder = folder
        self._trials = Trials()
        self._relay: KeptRelay | None = None

    def begin(self, public: bytes, host: str, port: int) -> None:
        core = self._mode.core
        limits = parse_relay(core.manifest.net.relay)
        if limits is None:
            self._mode.routes.why_no_relay = 'the host wants none ([net] relay = "off")'
            return
        begin = RelaySettings(
            run_id=core.run_id,
            incarnation=core.ledger.incarnation,
            public=public,
            host=host,
            port=port,
            bytes_per_s=limits.bytes_per_s,
        )
        month = Month.load(self._folder / FILE_NAME, limits.month_bytes)
        self.keep(RelayProcess(begin, core.note), month)

    def keep(self, process: RelayProcess, month: Month) -> None:
        self._relay = KeptRelay(process, month, "[net] relay")

    def turn(self, now: float, wall_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for trial, why_not in self._trials.turn(now):
            effects += self._mode.on_relay_tried(trial, why_not, now)
        if self._relay is not None:
            relay, why_not = self._relay.turn(now, wall_s)
            effects += self._mode.on_relay(relay, why_not, self._relay.usage, now)
        return effects

    def act(self, effect: Effect, now: float) -> None:
        match effect:
            case RelayPairs(pairs=pairs):
                if self._relay is not None:
                    self._relay.process.want(pairs)
            case TryRelay(trial=trial):
                self._trials.begin(trial, now)

    def close(self) -> None:
        self._trials.close()
        if self._relay is not None:
            self._relay.close()


hand = RelayHand
