"""One machine of microbatches in a table of six seats, and the frames that tests of collectives/pipeline/ give it."""

from __future__ import annotations

from typing import Any

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.collectives.pipeline.effects import (
    Effect,
    FlowDirection,
    GiveWork,
    SendCrossingFrame,
    SendKept,
    WorkMade,
    header_of,
    micro_of,
    seat_of,
)
from farflung.collectives.pipeline.seats import SeatPlace, Table
from farflung.collectives.pipeline.stage_scheduler import StageScheduler
from farflung.protocol.errors import FrameError, Verdict
from farflung.protocol.frames import Frame, Kind, with_payload

TAG, COUNT = bytes(8), 16
# Seats 1 and 2 in stage 0, 3 and 4 in stage 1, 5 and 6 in stage 2; the peer of seat n is called pn.
TABLE = Table()
for number in range(1, 7):
    TABLE = TABLE.seated(number, f"p{number}", (number - 1) // 2)
T = TABLE.number


def check(kind: Kind, payload: Any) -> None:
    if bytes(payload) == b"bad":
        raise FrameError(Verdict.MALFORMED, "not a crossing")


def flow_of(seat: int = 3, version: int = 0, table: Table = TABLE) -> StageScheduler:
    flow = StageScheduler(SeatPlace(TAG, table.seats[seat], 3), table, check, lambda: 0.5)
    if version >= 0:
        flow.on_version(version, COUNT, 0.0)
    return flow


def frame_of(
    kind: Kind,
    seat: int,
    micro: int = 0,
    mark: int = 0,
    table: int = T,
    version: int = 0,
    payload: bytes = b"x",
) -> Frame:
    header = header_of(kind, TAG, seat, table, version, micro, mark)
    return (
        with_payload(header, payload)
        if kind in (CrossingKind.ACTIVATION, CrossingKind.GRADIENT, CrossingKind.HELD)
        else Frame(header)
    )


def give(flow: StageScheduler, frame: Frame, sender: str = "", now: float = 0.0) -> tuple[str, list[Effect]]:
    """The counter that the frame ended in, and what follows."""
    before = flow.counters.as_dict()
    effects = flow.on_frame(sender or f"p{seat_of(frame.header)}", frame, now)
    after = flow.counters.as_dict()
    ended = [name for name, times in after.items() if times > before[name]]
    assert len(ended) + flow.early_count >= 1
    return ended[0] if ended else "early", effects


def said(effects: list[Effect]) -> list[tuple[str, Kind, int]]:
    sent = [(e.to, e.frame.header) for e in effects if isinstance(e, SendCrossingFrame)]
    sent += [(e.to, e.header) for e in effects if isinstance(e, SendKept)]
    return [(to, header.kind, micro_of(header)) for to, header in sent if header.kind != CrossingKind.ROOM]


def handed(effects: list[Effect]) -> list[tuple[FlowDirection, int]]:
    return [(e.way, e.micro) for e in effects if isinstance(e, GiveWork)]


def passed_on(flow: StageScheduler, micro: int = 0, prev: int = 1) -> int:
    """It came, was computed, and went to a seat of the next stage, which is the answer."""
    give(flow, frame_of(CrossingKind.ACTIVATION, prev, micro))
    for seat in (5, 6):
        give(flow, frame_of(CrossingKind.ROOM, seat, 9))
    effects = flow.on_made(WorkMade(FlowDirection.FORWARD, 0, micro, b"out"), 0.0)
    ((to, kind, _),) = said(effects)
    assert kind == CrossingKind.ACTIVATION
    return int(to[1:])
