"""Sham members in one process: the real knock, hello, beats and reports of rounds over real CURVE connections, and
no model.

    python tests/rig/shams.py URL COUNT OWNERS      started by coordinator.py, which writes words to its stdin

Two sockets carry all of them: each `connect` takes the key that is set at the moment.  Like real peers they hang up at
the door when they are in.  Bytes of contributions and results are not there, only their hashes, which all shams compute
alike.  OWNERS of them can be dialled.
"""

from __future__ import annotations

import functools
import heapq
import json
import os
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from farflung.peer.identity import Identity
from farflung.peer.machine.handshake import Handshake, Offer, me_of
from farflung.peer.machine.heartbeat import RARE
from farflung.protocol import messages as wire
from farflung.protocol.digests import combined, full_mask, hash_bytes, keyed_hash, mask_of, mask_to_bytes
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import (
    TAG_BYTES,
    Beat,
    Challenge,
    FragmentBeat,
    FragmentTick,
    Lease,
    Message,
    OfBeat,
    ProgressReport,
    Refuse,
    Sent,
    Welcome,
)
from farflung.protocol.mode_words import KeptBeat
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.process.sockets import curve_raw, curve_text
from farflung.protocol.round_words import Decision, DotProducts, Plan
from farflung.protocol.run_terms import Attached, Known
from farflung.protocol.signed_words import Results, inputs_of, results_part, sent_part

CHUNKS = 96
SAMPLES = 1 << 40
VARIABLE = "FARFLUNG_SHAM_MODEL"  # a file with another run's schema: shams that only join, and stay without a version
APPLY_S = (0.1, 1.0)  # from a commit to its version
READY_AFTER_S = 1.0  # after a version is there: the inner steps
LOOK_EVERY_S = 0.02  # at those who are not inside yet
NOTHING = b""
NO_ROSTER = NOTHING_PACKED = b"\xc0"  # nil


class Envelope(msgspec.Struct):
    kind: str
    body: msgspec.Raw


class TickHead(msgspec.Struct):
    """A tick whose roster stays packed: what reads it is not what is measured."""

    answers: int
    heard_s: float
    fragments: list[FragmentTick]
    goal: str
    roster_no: int
    roster: msgspec.Raw = msgspec.Raw(NO_ROSTER)
    leases: list[Lease] | None = None
    sections: list[msgspec.Raw] = []
    beat_s: float = 0.0


class Opened(msgspec.Struct):
    plan: Plan


class Decided(msgspec.Struct):
    decision: Decision


class Version(msgspec.Struct):
    version: int


class KeptHead(msgspec.Struct, array_like=True):
    run_id: msgspec.Raw
    manifest: msgspec.Raw
    number: int


class KeptOne(msgspec.Struct, array_like=True):
    head: KeptHead


class Keep(msgspec.Struct):
    kept: KeptOne | None = None


class Committed(msgspec.Struct):
    commit: Version
    nonce: bytes
    kept: KeptOne | None = None


_envelope = msgspec.msgpack.Decoder(Envelope)
_readers = {
    "challenge": msgspec.msgpack.Decoder(Challenge),
    "welcome": msgspec.msgpack.Decoder(Welcome),
    "refuse": msgspec.msgpack.Decoder(Refuse),
    "tick": msgspec.msgpack.Decoder(TickHead),
    "open": msgspec.msgpack.Decoder(Opened),
    "decided": msgspec.msgpack.Decoder(Decided),
    "committed": msgspec.msgpack.Decoder(Committed),
    "keep": msgspec.msgpack.Decoder(Keep),
    "aborted": msgspec.msgpack.Decoder(msgspec.Raw),
    "audit": msgspec.msgpack.Decoder(msgspec.Raw),  # it has kept nothing that could be merged again
    "show": msgspec.msgpack.Decoder(msgspec.Raw),
    "gone": msgspec.msgpack.Decoder(msgspec.Raw),
}


def model_of(environ: Mapping[str, str]) -> ModelSchema:
    if VARIABLE in environ:
        return msgspec.msgpack.decode(Path(environ[VARIABLE]).read_bytes(), type=ModelSchema)
    weight = TensorSpec("w", (CHUNKS, 4), "float32", "param")
    return ModelSchema((weight,), 4, CHUNKS, CHUNKS, hash_bytes(b""))


def reader_of(raw: bytes) -> tuple[str, Any]:
    """(its kind, what a sham reads of it)"""
    envelope = _envelope.decode(raw)
    return envelope.kind, _readers[envelope.kind].decode(envelope.body)


def digest_of(version: int) -> bytes:
    return hash_bytes(b"version %d" % version)


@functools.lru_cache(8192)
def sent_hashes(peer: str, round_no: int) -> tuple[bytes, ...]:
    return tuple(hash_bytes(f"{peer} {round_no} {chunk}".encode()) for chunk in range(CHUNKS))


@functools.lru_cache(64)
def result_hashes(round_no: int, decision_no: int) -> tuple[bytes, ...]:
    return tuple(hash_bytes(f"result {round_no} {decision_no} {chunk}".encode()) for chunk in range(CHUNKS))


@functools.lru_cache(4096)
def products(members: int) -> tuple[float, ...]:
    return tuple(1.0 if i == j else 0.5 for i in range(members) for j in range(i, members))


@dataclass
class Figures:
    """Seconds, collected since the last word from outside."""

    welcome_s: list[float] = field(default_factory=list)
    first_tick_s: list[float] = field(default_factory=list)
    beat_s: list[float] = field(default_factory=list)
    there_s: list[float] = field(default_factory=list)  # until the coordinator took it up
    counts: dict[str, int] = field(default_factory=dict)
    late_s: float = 0.0  # by how much this process itself was ever late with a beat
    received: int = 0


class Sham:
    def __init__(self, crowd: Crowd, number: int, listens: bool) -> None:
        self.name = b"%d" % number
        self.crowd = crowd
        self.public, self.secret = zmq.curve_keypair()
        self.identity = identity = Identity.generate()
        self.peer = identity.peer_id
        self.door = Handshake(me_of(identity, curve_raw(self.public), os.urandom(16)), crowd.url.run)
        self.session, self.seq, self.connected, self.at_door = NOTHING, 0, False, False
        self.address = ""  # where others dial it, if it listens
        self.run_id = b""
        self.gather_codec = ""
        self.version, self.round_no, self.epoch, self.decision_no = -1, 0, 0, 0
        self.roster_no = 0
        self.ready_at = self.next_beat = self.began = 0.0
        self.plan: Plan | None = None
        self.decision: Decision | None = None
        self.last_progress = 0
        self.leases: tuple[int, ...] = ()
        self.applying, self.applied_at = -1, 0.0
        self.said: dict[int, float] = {}
        self.nonces: dict[int, bytes] = {}  # by version
        self.kept = 0  # the newest of the run's commits that it keeps
        self.fragment = 0
        self.beat_s = 0.0  # that it was told
        self.is_awaited = True  # as in BeatTimes of peer/machine/heartbeat.py
        self.inside_port = 0
        self.route = (
            self.name
        )  # of its connection inside: another one each time, since the old one may not be gone yet
        if listens:
            self._listen()

    def _listen(self) -> None:
        """Somewhere to be dialled: a finished handshake is all that is wanted."""
        self.listener = self.crowd.context.socket(zmq.ROUTER)
        self.listener.curve_server = True
        self.listener.curve_secretkey = self.secret
        self.address = f"127.0.0.1:{self.listener.bind_to_random_port('tcp://127.0.0.1')}"

    # ---- getting in ------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        self.began = now
        self.retry(now)

    def retry(self, now: float) -> None:
        knock = self.door.on_timer(now)
        if knock is not None:
            if not self.at_door:
                self.crowd.connect(self.crowd.at_door, self, self.crowd.url.port)
                self.at_door = True
            self.crowd.say(self.crowd.at_door, self, knock)

    def on_door(self, message: Message, now: float) -> None:
        if isinstance(message, Challenge) and self.door.on_challenge(message):
            known = known_of(message.manifest, message.run_id)
            self.run_id, self.gather_codec = message.run_id, known.manifest.round.gather_codec
            hello = self.door.greet(self.offer(known), -1, b"", now)
            self.crowd.say(self.crowd.at_door, self, hello)
        elif isinstance(message, Refuse):
            self.crowd.count(f"refused: {message.code}")
            self.door.on_refuse(message, now)
        elif isinstance(message, Welcome) and self.door.on_welcome(message):
            self.crowd.figures.welcome_s.append(now - self.began)
            self.session, self.seq = message.session, 0
            self.fragment = message.fragments[0]
            self.crowd.hang_up(self)
            if not self.connected:
                self.connected = True
                self.crowd.members.append(self)
            if self.inside_port != message.member_port:  # of a gateway, or of another one than before
                if self.inside_port:
                    self.crowd.inside.disconnect(self.crowd.endpoint(self, self.inside_port))
                    self.route = b"%s/%d" % (self.name, time.monotonic_ns())
                self.inside_port = message.member_port
                self.crowd.connect(self.crowd.inside, self, message.member_port)
            self.beat(now)

    # ---- inside ----------------------------------------------------------------------------------------------

    def is_due_at(self, at: float) -> None:
        """Something is to be done: a beat, or earlier, a version is there."""
        self.next_beat = at
        heapq.heappush(self.crowd.due, (at, int(self.name)))

    def on_due(self, now: float) -> None:
        if self.applying > self.version and now >= self.applied_at:
            self.at_version(self.applying, now)
        elif now >= self.next_beat and self.door.inside:
            self.crowd.figures.late_s = max(self.crowd.figures.late_s, now - self.next_beat)
            self.beat(now)

    def tell_news(self, now: float) -> None:
        if not self.news_waits:
            self.beat(now)

    @property
    def news_waits(self) -> bool:
        return self.beat_s >= RARE * self.crowd.heartbeat_s and not self.is_awaited

    def beat(self, now: float) -> None:
        self.seq += 1
        self.is_due_at(
            now + (self.crowd.heartbeat_s if self.round_no else max(self.crowd.heartbeat_s, self.beat_s))
        )
        digest = digest_of(self.version) if self.version >= 0 else NOTHING
        ready = self.crowd.rounds and self.version >= 0 and not self.round_no and now >= self.ready_at
        where = FragmentBeat(
            self.fragment,
            self.version,
            digest,
            self.round_no,
            self.epoch,
            self.decision_no,
            bool(ready),
            (),
            0,
            self.shown,
        )
        self.said[self.seq] = now
        self.tell(
            Beat(
                session=self.session,
                seq=self.seq,
                roster_no=self.roster_no,
                fragments=(where,),
                phase="inner",
                step=self.seq,
                tokens=self.seq,
                loss=2.5,
                tx_bytes=0,
                rx_bytes=0,
                up_bytes_per_s=0,
                down_bytes_per_s=0,
                have=self.leases,
                want=64 if len(self.leases) < 2 and not self.crowd.only_joins else 0,
                samples=self.samples,
                rough=False,
                era=0,
                saved=-1,
                unsure=False,
                leaving=False,
                data=b"",
                sections=self.sections(),
            )
        )

    # ---- what shams of a model in stages say instead (staged_shams.py)

    def offer(self, known: Known) -> Offer:
        return Offer(Attached(known, self.crowd.model), self.address)

    def sections(self) -> tuple[OfBeat, ...]:
        """Of modes."""
        return (KeptBeat(self.kept),)

    @property
    def samples(self) -> int:
        return 0 if self.crowd.only_joins else SAMPLES  # 0: it has not looked at its data yet

    @property
    def shown(self) -> bytes:
        """That it holds its version: it has no bytes, so its digest stands for them, as in showing.py."""
        nonce = self.nonces.get(self.version, NOTHING)
        return nonce[:TAG_BYTES] + keyed_hash(nonce, digest_of(self.version)) if nonce else NOTHING

    def tell(self, message: Message) -> None:
        self.crowd.say(self.crowd.inside, self, message)

    def on_member(self, kind: str, message: Any, now: float) -> None:
        if kind == "tick":
            self._on_tick(message, now)
        elif kind == "open":
            self.is_awaited = True
            self._on_plan(message.plan)
        elif kind == "decided" and message.decision.foreseen:
            pass  # it begins when it is decided
        elif kind == "decided":
            self.decision, self.decision_no = message.decision, message.decision.decision_no
            self._report()
        elif kind == "keep":
            self._on_kept(message.kept)
        elif kind == "committed":
            self._on_kept(message.kept)
            self._out_of_round()
            self.nonces[message.commit.version] = message.nonce
            self.applying, self.applied_at = message.commit.version, now + random.uniform(*APPLY_S)
            heapq.heappush(self.crowd.due, (self.applied_at, int(self.name)))
        elif kind in ("audit", "show"):
            pass  # it has nothing to show
        else:
            self.crowd.count(kind)
            self._out_of_round()
            if kind == "gone":
                self.door.leave(now, 0.0)
                self.crowd.outside[self.name] = self

    def _on_kept(self, kept: KeptOne | None) -> None:
        if kept is not None:
            self.kept = kept.head.number

    def _on_tick(self, tick: TickHead, now: float) -> None:
        said_at = self.said.pop(tick.answers, None)
        if said_at is not None:
            self.crowd.figures.beat_s.append(now - said_at)
            self.crowd.figures.there_s.append(tick.heard_s - said_at)
            if tick.answers == 1:
                self.crowd.figures.first_tick_s.append(now - self.began)
        if bytes(tick.roster) != NO_ROSTER:
            self.roster_no = tick.roster_no
            self.crowd.count("rosters")
        if tick.leases is not None:
            self.leases = tuple(lease.lease for lease in tick.leases)
        self.beat_s = tick.beat_s
        of = tick.fragments[0]
        self.is_awaited &= bool(of.round_no) or not of.verified
        if self.beat_s > self.crowd.heartbeat_s and not self.round_no:
            self.is_due_at(now + self.beat_s)  # its turn
        if self.crowd.only_joins:
            return
        if of.nonce and self.nonces.get(of.nonce_for) != of.nonce:
            self.nonces[of.nonce_for] = of.nonce
            if of.nonce_for == self.version:
                self.tell_news(now)
        if tick.goal == "found" and self.version < 0:
            self.at_version(0, now)
        elif tick.goal == "sync" and of.digests and of.version > self.version:
            self.at_version(of.version, now)
        if (
            self.plan is not None
            and of.round_no == self.plan.round_no
            and of.progress_seen < self.last_progress
        ):
            self._report()

    def at_version(self, version: int, now: float) -> None:
        if version <= self.version:
            return
        self.version, self.ready_at = version, now + READY_AFTER_S
        self._out_of_round()
        self.tell_news(now)
        if self.crowd.rounds and not self.news_waits:  # like a real trainer, it says at once that it is ready
            self.is_due_at(min(self.next_beat, self.ready_at + 0.001))

    def _out_of_round(self) -> None:
        self.plan = self.decision = None
        self.round_no = self.epoch = self.decision_no = 0

    def _on_plan(self, plan: Plan) -> None:
        is_new = self.plan is None or plan.round_no != self.plan.round_no
        self.plan, self.round_no, self.epoch = plan, plan.round_no, plan.epoch
        if is_new:
            self.decision, self.decision_no = None, 0
            self.is_due_at(min(self.next_beat, time.monotonic() + self.crowd.heartbeat_s))
            self.seq += 1
            hashes = b"".join(sent_hashes(self.peer, plan.round_no))
            bare = Sent(
                seat=0,
                counted=b"",
                session=self.session,
                seq=self.seq,
                round_no=plan.round_no,
                hashes=hashes,
                tokens=64,
                steps=1,
                loss=2.5,
                used=(),
                signature=b"",
            )
            signature = self.identity.sign(sent_part(self.run_id, bare))
            self.tell(msgspec.structs.replace(bare, signature=signature))
        self._report()

    def _report(self) -> None:
        plan = self.plan
        if plan is None:
            return
        mine = plan.chunks_of(self.peer)
        mask = mask_to_bytes(mask_of(mine))
        held = {}
        if mine:
            for member in plan.members:
                hashes = sent_hashes(member, plan.round_no)
                held[member] = (mask, combined((chunk, hashes[chunk]) for chunk in mine))
        results = result_hashes(plan.round_no, self.decision_no) if self.decision is not None else ()
        count = len(plan.members)
        dots = None
        if mine and self.decision is None:
            dots = DotProducts(mask_to_bytes(full_mask(count)), mask, products(count))
        self.seq += 1
        self.last_progress = self.seq
        report = ProgressReport(
            lengths=b"",
            got_by={},
            session=self.session,
            seq=self.seq,
            round_no=plan.round_no,
            decision_no=self.decision_no,
            held=held,
            refused={},
            cut_off=(),
            merged=mask if results else b"",
            merged_hashes=b"".join(results[chunk] for chunk in mine) if results else b"",
            got=mask_to_bytes(full_mask(CHUNKS)) if results else b"",
            got_hash=combined(enumerate(results)),
            dots=dots,
            inputs=b"",
            signature=b"",
        )
        if self.decision is not None and mine:
            counted = self.decision.included(plan.members)
            lists = [sent_hashes(member, plan.round_no) for member in counted]
            inputs = inputs_of(hashes[chunk] for chunk in mine for hashes in lists)
            report = msgspec.structs.replace(report, inputs=inputs)
            said = Results.of(plan, self.decision, self.gather_codec, report)
            signature = self.identity.sign(results_part(self.run_id, said))
            report = msgspec.structs.replace(report, signature=signature)
        self.tell(report)


@functools.cache
def known_of(manifest: bytes, run_id: bytes) -> Known:
    """Read once for all shams of a process: they come by the hundred."""
    return Known(Manifest.from_canonical(manifest), run_id)


class Crowd:
    def __init__(self, url: JoinUrl, count: int, owners: int, kind: type[Sham] = Sham) -> None:
        self.url, self.heartbeat_s, self.rounds = url, 1.0, False
        self.model, self.only_joins = model_of(os.environ), VARIABLE in os.environ
        self.context = zmq.Context()
        self.at_door, self.inside = self._socket(), self._socket()
        self.figures = Figures()
        self._looked_at = 0.0
        self.members: list[Sham] = []
        self.due: list[tuple[float, int]] = []  # when something is to be done, and by whom
        self.outside: dict[bytes, Sham] = {}
        self.all = {b"%d" % n: kind(self, n, n < owners) for n in range(count)}

    def _socket(self) -> Any:
        socket = self.context.socket(zmq.ROUTER)
        socket.linger = 0
        return socket

    def connect(self, socket: Any, sham: Sham, port: int) -> None:
        socket.curve_publickey, socket.curve_secretkey = sham.public, sham.secret
        socket.curve_serverkey = curve_text(self.url.key)
        socket.setsockopt(zmq.CONNECT_ROUTING_ID, sham.route if socket is self.inside else sham.name)
        socket.connect(self.endpoint(sham, port))

    def hang_up(self, sham: Sham) -> None:
        self.at_door.disconnect(self.endpoint(sham, self.url.port))
        sham.at_door = False

    def endpoint(self, sham: Sham, port: int) -> str:
        """Each from an address of its own: what is to be hung up must have a name of its own."""
        high, low = divmod(int(sham.name), 250)
        return f"tcp://127.{os.getpid() % 200 + 10}.{high}.{low + 1}:0;{self.url.host}:{port}"

    def say(self, socket: Any, sham: Sham, message: Message) -> None:
        try:
            route = sham.route if socket is self.inside else sham.name
            socket.send_multipart([route, wire.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            self.count("not sent")

    def count(self, what: str) -> None:
        self.figures.counts[what] = self.figures.counts.get(what, 0) + 1

    def run(self) -> None:
        poller = zmq.Poller()
        for each in (self.at_door, self.inside, sys.stdin.fileno()):
            poller.register(each, zmq.POLLIN)
        said = ""
        while True:
            ready = dict(poller.poll(5))
            if sys.stdin.fileno() in ready:
                # Past Python's buffer, which would hide a second word from poll.
                raw = os.read(sys.stdin.fileno(), 4096)
                if not raw:
                    return
                *lines, said = (said + raw.decode()).split("\n")
                for line in lines:
                    self._obey(line.split())
            self._read(self.at_door)
            self._read(self.inside)
            self._beats(time.monotonic())

    def _obey(self, words: list[str]) -> None:
        now = time.monotonic()
        match words:
            case ["begin"]:
                for sham in self.all.values():
                    sham.begin(now)
                self.outside = dict(self.all)
            case ["rounds", on]:
                self.rounds = on == "on"
                for sham in self.members if self.rounds else ():  # they have been ready for long
                    sham.is_due_at(now + random.uniform(0.0, sham.crowd.heartbeat_s))
            case ["mark"]:
                self.figures = Figures()
            case ["tell"]:
                told = {**vars(self.figures), "inside": len(self.members), **self.more()}
                told["newest"] = max((sham.version for sham in self.members), default=-1)
                print(json.dumps(told), flush=True)

    def more(self) -> dict[str, Any]:
        """What other kinds of shams have to tell."""
        return {}

    def _read(self, socket: Any) -> None:
        for _ in range(512):
            try:
                name, raw = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            now = time.monotonic()
            self.figures.received += len(raw)
            kind, message = reader_of(raw)
            if socket is self.at_door:
                self.all[name].on_door(message, now)
            else:
                self.all[name.partition(b"/")[0]].on_member(kind, message, now)

    def _beats(self, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            _, number = heapq.heappop(self.due)
            self.all[b"%d" % number].on_due(now)
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self.outside = {name: sham for name, sham in self.outside.items() if not sham.door.inside}
            for sham in self.outside.values():
                sham.retry(now)


def main() -> None:
    url, count, owners = JoinUrl.parse(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    crowd = Crowd(url, count, owners)
    print(json.dumps({"ready": True}), flush=True)
    crowd.run()
    crowd.context.destroy(linger=0)


if __name__ == "__main__":
    main()
