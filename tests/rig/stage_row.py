"""Stages in a row, each the real `StageTransfers` of a peer: lines and trainers that answer at once, and a table of
seats.

    row = StageRow(stages=3); row.seat("ann", 0); ...; row.begin(version=0, count=8); row.run()

What crosses are fp32 tensors of one value, so that the real check of borders has something to look at; the trainers add
up what they are handed, by microbatch.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from dataclasses import dataclass, field

import torch

from farflung.collectives.pipeline.crossing import border_after, pack
from farflung.collectives.pipeline.effects import FlowDirection, KeptPiece, micro_of
from farflung.collectives.pipeline.seats import Table
from farflung.collectives.round.effects import SendFrame
from farflung.compression.codec import check_payload, codec_named, payload_bytes
from farflung.peer.batches.effects import ForgetCrossings, HandOver, KeepCrossing, SendCrossing
from farflung.peer.batches.stage_transfers import MyStage, StageBoundaries, StageTransfers
from farflung.peer.local.words import FreezeSums, MicrobatchWork, WorkDone
from farflung.peer.machine import effects as do
from farflung.protocol.digests import mask_from_bytes, mask_to_bytes
from farflung.protocol.errors import Counters
from farflung.protocol.frames import Frame, with_payload
from farflung.protocol.manifest import PipelineSection
from farflung.protocol.mode_words import BatchTick, SeatRow
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec

TAG = b"pipeline"
SAMPLES = 2


RULES = PipelineSection(batch=64, micro=SAMPLES, codec="fp32")


def model_of(stages: int) -> ModelSchema:
    gives = (BorderTensor("float32", (3,)),)
    specs = [StageSpec(at, 0, 1, 0, gives if at < stages - 1 else ()) for at in range(stages)]
    return ModelSchema((), 4, stages, stages, b"", tuple(specs), (BorderTensor("int64", (), "labels"),))


def crossing(value: float, backwards: bool) -> bytes:
    """What goes over the border for one microbatch; also what no codec encodes."""
    tensor = (
        codec_named("fp32")
        .encode(torch.full((3 * SAMPLES,), 1.5))
        .replace(struct.pack("<f", 1.5), struct.pack("<f", value))
    )
    riders = [] if backwards else [bytes(8 * SAMPLES)]
    border = border_after(0, model_of(2), RULES, payload_bytes)
    return pack(border, backwards, SAMPLES, 4, [tensor, *riders])


@dataclass
class StagePeer:
    peer: str
    stage: int
    crossings: StageTransfers
    up: bool = True
    said: int = 0  # the mask that the coordinator has heard of
    kept: dict[tuple[int, int, KeptPiece], bytes] = field(default_factory=dict)
    hands: list[MicrobatchWork] = field(default_factory=list)
    sums: Counter[int] = field(default_factory=Counter)
    told: list[object] = field(default_factory=list)  # words to the trainer but for hands, and notes
    slow: bool = False  # its trainer answers only when it is asked to: `answer`


class StageRow:
    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.table = Table()
        self.peers: dict[str, StagePeer] = {}
        self.version, self.count, self.now = -1, 0, 0.0
        self.again = self.skipped = 0
        self.frames: deque[tuple[str, str, Frame]] = deque()

    # ---- the coordinator -------------------------------------------------------------------------------------

    def seat(self, peer: str, stage: int) -> StagePeer:
        """A newcomer, or the same peer with new sums."""
        number = max(self.table.seats, default=0) + 1
        self.table = self.table.seated(number, peer, stage)
        if peer not in self.peers:
            mine = MyStage(TAG, peer, stage, self.stages, SAMPLES)
            borders = StageBoundaries(stage, model_of(self.stages), RULES, payload_bytes, check_payload)
            self.peers[peer] = StagePeer(peer, stage, StageTransfers(mine, borders, Counters(), lambda: 0.5))
        if self.version >= 0:
            self.load(self.peers[peer])
        return self.peers[peer]

    def unseat(self, peer: str) -> None:
        number = self.number_of(peer)
        self.table = self.table.unseated(number)

    def number_of(self, peer: str) -> int:
        return next((s.number for s in self.table.seats.values() if s.peer == peer and s.lives), 0)

    def begin(self, version: int, count: int) -> None:
        self.version, self.count = version, count
        if version:
            self.table = self.table.of_next_batch({})
        for peer in self.peers.values():
            self.load(peer)
        self.tick()

    def load(self, peer: StagePeer) -> None:
        peer.crossings.on_load(self.version)
        peer.sums.clear()
        peer.hands.clear()
        peer.crossings.on_loaded()

    def due(self, peer: StagePeer, freeze: bool = False) -> BatchTick:
        sources = [seat.peer for seat in self.table.living(0)]
        mine = self.granted_to(peer.peer, sources)
        rows = [
            SeatRow(s.number, s.peer, s.stage, s.share, s.since, s.gone)
            for s in self.table.seats.values()
            if abs(s.stage - peer.stage) <= 1
        ]
        return BatchTick(
            version=self.version,
            epoch=1,
            start=100,
            stop=100 + SAMPLES * self.count - 1,  # the last microbatch is short
            count=self.count,
            seat=self.number_of(peer.peer),
            granted=tuple((micro, micro + 1) for micro in mine),
            freeze=freeze,
            again=mask_to_bytes(self.again) if peer.stage == 0 else b"",
            table_no=self.table.number,
            table=tuple(rows) if peer.crossings.table_no < self.table.number else None,
            skipped=mask_to_bytes(self.skipped),
        )

    def granted_to(self, peer: str, sources: list[str]) -> list[int]:
        if peer not in sources:
            return []
        return [m for m in range(self.count) if m % len(sources) == sources.index(peer)]

    def tick(self, freeze: bool = False) -> None:
        """Everybody hears where the run is."""
        for peer in list(self.peers.values()):
            if peer.up:
                if peer.crossings.on_tick(self.due(peer, freeze)):
                    peer.crossings.forget()
                    self.load(peer)
                self.carry_out(peer, peer.crossings.words(None, 1, self.now))

    # ---- shells ------------------------------------------------------------------------------------------------

    def carry_out(self, peer: StagePeer, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case SendFrame(to=to, frame=frame):
                    self.frames.append((peer.peer, to, frame))
                case SendCrossing(to=to, header=header, piece=piece):
                    payload = peer.kept[header.version, micro_of(header), piece]
                    self.frames.append((peer.peer, to, with_payload(header, payload)))
                case KeepCrossing(version=version, micro=micro, piece=piece, payload=payload):
                    peer.kept[version, micro, piece] = bytes(payload)
                case ForgetCrossings(version=version):
                    peer.kept = {key: each for key, each in peer.kept.items() if key[0] > version}
                case HandOver(hand=hand):
                    self.look_at(peer, hand)
                    peer.hands.append(hand)
                case do.TellTrainer(message=message):
                    peer.told.append(message)
                case _:
                    peer.told.append(effect)

    def look_at(self, peer: StagePeer, hand: MicrobatchWork) -> None:
        given = peer.kept.get((hand.version, hand.micro, KeptPiece.INPUT), b"")
        assert len(given) == hand.given_bytes and bool(given) == (peer.stage > 0)
        if hand.way == FlowDirection.BACKWARD:
            assert len(peer.kept[hand.version, hand.micro, KeptPiece.RETURNED]) == hand.returned_bytes
        places = [each.place for each in (*peer.hands, hand)]
        assert len(set(places)) == len(places) <= 2

    def answer(self, peer: StagePeer, problem: str = "", payload: bytes | None = None) -> None:
        """The trainer has done the first of its works."""
        hand = peer.hands.pop(0)
        way = FlowDirection(hand.way)
        if way is not FlowDirection.FORWARD and not problem:
            peer.sums[hand.micro] += 1
        goes_on = way is FlowDirection.FORWARD or peer.stage > 0
        made = crossing(hand.micro, way is not FlowDirection.FORWARD) if goes_on and not problem else b""
        made = made if payload is None else payload
        word = WorkDone(
            way=hand.way,
            version=hand.version,
            micro=hand.micro,
            bytes_made=len(made),
            tokens=4,
            loss=1.0,
            problem=problem,
        )
        assert peer.crossings.place_of(word) == hand.place
        self.carry_out(peer, peer.crossings.on_made(word, made, self.now))

    def run(self) -> None:
        """Until nothing more follows at this instant."""
        busy = True
        while busy:
            busy = False
            while self.frames:
                sender, to, frame = self.frames.popleft()
                if self.peers[to].up:
                    self.carry_out(self.peers[to], self.peers[to].crossings.on_frame(sender, frame, self.now))
                busy = True
            for peer in self.peers.values():
                if peer.up and peer.hands and not peer.slow:
                    self.answer(peer)
                    busy = True

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for peer in self.peers.values():
                if peer.up:
                    self.carry_out(peer, peer.crossings.on_timer(self.now))
            self.tick()
            self.run()

    # ---- what came of it -----------------------------------------------------------------------------------------

    def counted(self, stage: int) -> Counter[int]:
        """By microbatch: how often it is in the sums of the living seats of this stage."""
        total: Counter[int] = Counter()
        for seat in self.table.living(stage):
            peer = self.peers[seat.peer]
            total.update(peer.sums)
            mask = mask_from_bytes(peer.crossings.beat(True).counted)
            assert mask == sum(1 << micro for micro in peer.sums), f"{peer.peer} says what it has"
        return total

    def is_whole(self) -> bool:
        every = Counter(m for m in range(self.count) if not self.skipped >> m & 1)
        return all(self.counted(stage) == every for stage in range(self.stages))

    def freezes(self, peer: str) -> list[FreezeSums]:
        return [word for word in self.peers[peer].told if isinstance(word, FreezeSums)]
