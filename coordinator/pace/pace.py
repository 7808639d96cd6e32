"""The pace of a run is that of its fastest third: whoever is slower is called when those have taken all their steps.

Where the mode begins.  Pure.  A period is `sync_every` steps, which a machine at a fifth of the speed takes five times
as long for; all others would wait for it.  Instead ticks say to it that its round is waited for, until it is ready: it
ends its period after the step that it is at, and what it learned by then counts for as many tokens as it is.  Members
call others only if they took all their steps.  A third, since fewer might say so to keep everybody from learning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.coordinator.modes.registry import CoordinatorMode, ModeTools
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import LOOK_S_PER_MEMBER, Member
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.messages import Beat, OfTick
from farflung.protocol.mode_words import CallTick, PaceBeat
from farflung.protocol.round_words import CROWD, section

ONE_OF = 3  # members that could be in the round: so many must be ready, before the others are called


@dataclass
class ReadyThird:
    """Of those that could be in the next round of a fragment, when that was looked at last."""

    at: float = -math.inf
    since: float | None = None  # when so many were ready; None: they are not


class PaceMode(CoordinatorMode):
    def __init__(self, core: Core, drivers: Sequence[RoundDriver]) -> None:
        self._core, self._drivers = core, drivers
        self._looks = {driver.fragment: ReadyThird() for driver in drivers}

    def tell(self, peer: str, beat: Beat) -> Sequence[OfTick]:
        core, member = self._core, self._core.members.members.get(peer)
        if member is None or core.manifest.round.period_s or core.held or core.finished:
            return ()
        waiting = [(each, self._waits_since(each)) for each in self._drivers if _is_behind(each, member)]
        called = tuple(
            (driver.fragment, driver.book.version, core.now - since)
            for driver, since in waiting
            if since is not None
        )
        return (CallTick(called),) if called else ()

    def _waits_since(self, driver: RoundDriver) -> float | None:
        look, now, count = self._looks[driver.fragment], self._core.now, len(driver.holders)
        if count <= CROWD or now - look.at >= count * LOOK_S_PER_MEMBER:
            look.at, look.since = now, _third_ready(driver)
        return look.since


def _is_behind(driver: RoundDriver, member: Member) -> bool:
    """The fragment's next round could wait for this member."""
    said = driver.beat_of(member)
    here = said is not None and said.version == driver.book.version and not said.ready
    return here and driver.round is None and member.peer not in driver.lines.slow


def _is_early(driver: RoundDriver, member: Member) -> bool:
    """It was called, or is as early as it was then; if it set the pace, periods would become shorter and shorter."""
    said = section(PaceBeat, member.beat.sections) if member.beat is not None else None
    return said is not None and driver.fragment in said.early


def _third_ready(driver: RoundDriver) -> float | None:
    able = [m for m in driver.able if m.trains and not m.leaving and m.peer not in driver.lines.slow]
    full = [m for m in able if driver.is_ready(m) and not _is_early(driver, m)]
    times = [driver.standing(m).ready_since for m in full]
    ready = sorted(at for at in times if at is not None)
    due = -(-len(able) // ONE_OF)
    return ready[due - 1] if 0 < due <= len(ready) else None


def made(core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> CoordinatorMode | None:
    return None if core.manifest.pipeline.batch else PaceMode(core, drivers)
