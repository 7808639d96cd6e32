"""A member with a valid key that sends anything it likes, over real sockets: the others finish the round (P8, P9).

Three honest members run the production code: the data plane, the way of each frame, the round, the reports, and
the coordinator's view of the round.  The fourth, `mal`, is a bare CURVE socket.  It contributes like the others,
except for the fault under test.  Each fault names the counter in which it ends, and whether it costs mal the round.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
import zmq
from zmq.utils import z85

from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.arithmetic.merge import merged_chunk
from farflung.collectives.link.frame_queue import ANSWERS_WAITING
from farflung.collectives.link.port import LINES_OF_CONTACT
from farflung.collectives.link.zmq_link import ZmqLink
from farflung.collectives.round.effects import Merge, SendFrame
from farflung.compression.codec import check_payload, codec_named
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import Done, Failed, OwnersMoved, RoundCommitted
from farflung.coordinator.rounds.round_rules import RoundRules
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import Effect, Encode, Serve, ToCoordinator
from farflung.peer.machine.heartbeat import HeartbeatBuilder
from farflung.peer.machine.replicas import EARLY_BYTES, EARLY_KEPT, Replicas
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, parse, with_payload
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import ProgressReport, Sent
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Contact, Decision, Plan
from farflung.protocol.run_terms import Attached, Known
from rig.waiting import LONG_S, Patience

RUN = b"run-tag!"
HONEST = ("ann", "bob", "cid")
MAL = "mal"
MEMBERS = (*HONEST, MAL)
CHUNKS, ELEMENTS, ROUND = 6, 5000, 7
CODEC = codec_named("fp32")
PAYLOAD_MAX = 8 * ELEMENTS
MODEL = ModelSchema(
    (TensorSpec("w", (CHUNKS * ELEMENTS,), "float32", "param"),), ELEMENTS, CHUNKS, CHUNKS, bytes(32)
)
MANIFEST = Manifest.from_toml(
    '[run]\nname = "hostile"\nmin_peers = 2\n[round]\ncodec = "fp32"\ngather_codec = "fp32"\n', "hostile"
)
Parts = list[bytes]


def contribution(member: str) -> list[bytes]:
    generator = torch.Generator().manual_seed(sum(member.encode()))
    return [CODEC.encode(torch.randn(ELEMENTS, generator=generator)) for _ in range(CHUNKS)]


TRUE = {member: contribution(member) for member in MEMBERS}


class Honest:
    """One honest member: link, participation and reporter as an agent holds them, and the arithmetic at once."""

    def __init__(self, name: str, tell: Callable[[str, ProgressReport], None]) -> None:
        self.name, self._tell = name, tell
        keys = zmq.curve_keypair()
        self.link = ZmqLink(keys)
        self.link.expect(name, RUN, PAYLOAD_MAX)
        address = f"127.0.0.1:{self.link.listen('127.0.0.1', 0)}"
        self.contact = Contact(name, name, z85.decode(keys[0]), address)
        self.part = Replicas(name, Attached(Known(MANIFEST, RUN), MODEL), ResultLog(), check_payload)
        self.replica = self.part.replicas[0]
        self.replica.held.fill()
        self.replica.found()
        self.replica.on_sealed(0, b"d" * 32)
        self.reports = HeartbeatBuilder(lambda said: bytes(64))

    def open(self, plan: Plan) -> None:
        new = self.replica.rounds.flight is None
        effects = self.part.on_plan(
            plan, Frozen(slot=0, tokens=100, steps=4, used=(), loss=None), time.monotonic()
        )
        if new:
            self.reports.begin_round(0)
        self.do(effects)

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendFrame(to=to, frame=frame):
                    self.link.send(to, frame)
                case Encode():
                    assert self.replica.rounds.flight is not None
                    self.do([*self.replica.rounds.flight.on_encoded(dict(enumerate(TRUE[self.name])))])
                case Merge():
                    assert self.replica.rounds.flight is not None
                    payload = merged_chunk(CODEC, ELEMENTS, effect.payloads, effect.weights)
                    self.do([*self.replica.rounds.flight.owner.on_calculated(effect, payload)])
                case Serve(kind=Kind.STATE | Kind.MANIFEST):
                    raise AssertionError("nobody here holds a verified state")

    def turn(self) -> None:
        self.link.flush()
        for sender, came in self.link.receive():
            now = time.monotonic()
            if isinstance(came, Frame):
                self.do(self.part.on_frame(sender, came, now))
            else:
                self.do(self.part.on_spoiled(sender, came))
            self.is_bounded()
        self.link.on_tick()
        self.part.on_lines(self.link.unreached(), self.link.arriving(), time.monotonic())
        self.do(self.part.on_timer(time.monotonic()))
        if self.replica.rounds.flight is not None:
            for said in self.reports.maybe_progress(self.replica.rounds.flight, time.monotonic()):
                assert isinstance(said, ToCoordinator) and isinstance(said.message, ProgressReport)
                self._tell(self.name, said.message)

    def is_bounded(self) -> None:
        """Whatever came: what is kept of it stays within what the round needs, and within fixed bounds."""
        early = self.part._early
        assert len(early) <= EARLY_KEPT and sum(len(frame.payload) for _, frame in early) <= EARLY_BYTES
        for line in self.link.lines.values():
            # What a round sends is bounded by the round: its contributions, its results, and questions for both.
            assert (
                line.waiting.answers <= ANSWERS_WAITING and len(line.waiting) <= ANSWERS_WAITING + 8 * CHUNKS
            )
            assert len(line.routes) <= LINES_OF_CONTACT
        flight = self.replica.rounds.flight
        if flight is not None:
            assert set(flight.pieces.held) <= set(range(CHUNKS)) and len(flight.pieces.results) <= CHUNKS
            assert all(set(shelf) <= set(MEMBERS) for shelf in flight.pieces.held.values())

    def verdicts(self) -> Counter[str]:
        return Counter(self.link.counts.verdicts.as_dict()) + Counter(self.part.counters.as_dict())

    def close(self) -> None:
        self.link.close()


class Mal:
    """A member's key and no scruples: one connection to each honest member, over which any parts can be sent."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.keys = zmq.curve_keypair()
        self.contact = Contact(MAL, MAL, z85.decode(self.keys[0]), "")
        self.lines: dict[str, zmq.Socket[bytes]] = {}
        self.heard: list[tuple[str, Header]] = []

    def dial(self, contact: Contact) -> None:
        socket = self.context.socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = self.keys
        socket.curve_serverkey = z85.encode(contact.key)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(f"tcp://{contact.address}")
        self.lines[contact.peer] = socket

    def send(self, to: str, *parts: bytes) -> None:
        self.lines[to].send_multipart(parts, copy=True)

    def hear(self) -> Iterator[tuple[str, Header]]:
        for name, socket in self.lines.items():
            while socket.poll(0):
                header, payload = socket.recv_multipart()
                yield name, parse(header, len(payload), RUN, PAYLOAD_MAX)

    def close(self) -> None:
        for socket in self.lines.values():
            socket.close()
        self.context.term()


@dataclass
class Fault:
    name: str
    verdict: Verdict  # the counter in which it ends
    excluded: str  # what the reason says; empty: it is not at fault, or can't be told from an unlucky member
    first: Callable[[Swarm, str], list[Parts]] = lambda swarm, to: []  # sent before all else
    # What it sends as the contribution of a chunk, also when it is asked for it again.
    contributes: Callable[[Header, bytes], list[Parts]] = lambda header, payload: [[header.pack(), payload]]
    owns: bool = False  # it owns the last chunk
    merges: Callable[[Header, bytes], list[Parts]] | None = None  # what it sends as that chunk's result
    reads: bool = True


@dataclass
class Swarm:
    fault: Fault
    mal: Mal = field(default_factory=Mal)
    decision: Decision | None = None
    moves: list[OwnersMoved] = field(default_factory=list)
    done: Done | None = None

    def __post_init__(self) -> None:
        self.honest = {name: Honest(name, self._told) for name in HONEST}
        owners = (0, 0, 1, 1, 2, 3 if self.fault.owns else 2)
        self.plan = Plan(ROUND, 1, 0, MEMBERS, owners, ("fp32",) * 4)
        # Nobody is out for being late: this machine may stand still.
        rules = RoundRules(2, scatter_grace_s=LONG_S, round_timeout_s=2 * LONG_S, gather_codec="fp32")
        self.flight = Round(self.plan, rules, time.monotonic())
        contacts = [each.contact for each in self.honest.values()]
        for each in self.honest.values():
            each.link.set_contacts([*contacts, self.mal.contact])
            self.mal.dial(each.contact)

    def _told(self, name: str, report: ProgressReport) -> None:
        self.flight.on_progress(name, report)

    # ---- mal -------------------------------------------------------------------------------------------------

    def header(self, kind: Kind, chunk: int, **changes: int) -> Header:
        number = self.decision.decision_no if self.decision is not None else 0
        return dataclasses.replace(Header(kind, RUN, ROUND, number, 0, chunk), **changes)

    def mal_contributes(self, chunk: int, to: str) -> None:
        frame = with_payload(self.header(Kind.CONTRIBUTION, chunk), TRUE[MAL][chunk])
        for parts in self.fault.contributes(frame.header, bytes(frame.payload)):
            self.mal.send(to, *parts)

    def mal_merges(self) -> None:
        """It owns the last chunk, and says that it has merged it as it should."""
        assert self.decision is not None and self.fault.merges is not None
        included = [m for m, w in zip(MEMBERS, self.decision.weights, strict=True) if w > 0]
        payload = merged_chunk(
            CODEC,
            ELEMENTS,
            [TRUE[m][CHUNKS - 1] for m in included],
            [w for w in self.decision.weights if w > 0],
        )
        frame = with_payload(self.header(Kind.RESULT, CHUNKS - 1), payload)
        for name in HONEST:
            for parts in self.fault.merges(frame.header, payload):
                self.mal.send(name, *parts)

    def mal_answers(self) -> None:
        for name, header in self.mal.hear() if self.fault.reads else ():
            if header.kind == Kind.WANT_CONTRIBUTION:
                self.mal_contributes(header.chunk, name)
            elif header.kind == Kind.WANT_RESULT and self.decision is not None and self.fault.merges:
                self.mal_merges()

    # ---- the round ---------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """A standstill while connections are still being made would look like members that can't be reached."""
        patience, lines = (
            Patience(),
            [line for each in self.honest.values() for line in each.link.lines.values()],
        )
        while not all(line.is_up for line in lines if line.contact.peer in HONEST):
            assert not patience.is_over, "the honest do not reach each other"
            for each in self.honest.values():
                each.turn()

    def run(self) -> None:
        self.meet()
        for each in self.honest.values():
            each.open(self.plan)
        for name in HONEST:
            for parts in self.fault.first(self, name):
                self.mal.send(name, *parts)
        for member in MEMBERS:
            self.flight.on_sent(member, sent_of(member))
        for chunk in range(CHUNKS):
            owner = self.plan.owner_of(chunk)
            if owner != MAL:
                self.mal_contributes(chunk, owner)
        if self.fault.owns:  # it holds all that it should, and says so
            held = {m: proof_of({CHUNKS - 1: hash_bytes(TRUE[m][CHUNKS - 1])}) for m in MEMBERS}
            self.flight.on_progress(MAL, report_of(held))
        patience = Patience()
        while self.done is None or not self.counted()[self.fault.verdict]:  # what it sent may be read later
            assert not patience.is_over, self.flight.next_step(time.monotonic(), set(MEMBERS), set(HONEST))
            for each in self.honest.values():
                each.turn()
            self.mal_answers()
            if self.done is None:
                self.step()

    def counted(self) -> Counter[str]:
        return sum((each.verdicts() for each in self.honest.values()), Counter())

    def step(self) -> None:
        dialable = set(MEMBERS) if self.fault.owns else set(HONEST)
        match self.flight.next_step(time.monotonic(), set(MEMBERS), dialable):
            case RoundCommitted(decision, _):
                self.decision = decision
                for each in self.honest.values():
                    each.do(each.part.on_decision(decision, time.monotonic()))
                if self.fault.owns:
                    self.mal_merges()
            case OwnersMoved() as moved:
                self.moves.append(moved)
                for each in self.honest.values():
                    each.open(moved.plan)
            case Done() as done:
                self.done = done
            case Failed(reason):
                raise AssertionError(reason)

    def close(self) -> None:
        for each in self.honest.values():
            each.close()
        self.mal.close()


def proof_of(hashes: dict[int, bytes]) -> tuple[bytes, bytes]:
    from farflung.protocol.digests import combined, mask_of, mask_to_bytes

    return mask_to_bytes(mask_of(hashes)), combined(hashes.items())


def report_of(held: dict[str, tuple[bytes, bytes]]) -> ProgressReport:
    return ProgressReport(
lengths=b"", got_by={},
        session=b"", seq=1, round_no=ROUND, decision_no=0, held=held, refused={}, cut_off=(), merged=b"",
        merged_hashes=b"", got=b"", got_hash=bytes(32), dots=None, inputs=b"", signature=b"",
    )  # fmt: skip


def sent_of(member: str) -> Sent:
    hashes = b"".join(map(hash_bytes, TRUE[member]))
    return Sent(
        seat=0,
        counted=b"",
        session=b"",
        seq=1,
        round_no=ROUND,
        hashes=hashes,
        tokens=100,
        steps=4,
        loss=None,
        used=(),
        signature=b"",
    )


# ---- the faults ------------------------------------------------------------------------------------------------


def flipped(raw: bytes, at: int = -1) -> bytes:
    broken = bytearray(raw)
    broken[at] ^= 1
    return bytes(broken)


def framed(header: Header, payload: bytes) -> list[Parts]:
    frame = with_payload(header, payload)
    return [[frame.header.pack(), bytes(frame.payload)]]


def bare(swarm: Swarm, kind: Kind, chunk: int, **changes: int) -> Parts:
    return [swarm.header(kind, chunk, **changes).pack(), b""]


def garbage(swarm: Swarm, to: str) -> list[Parts]:
    draw = random.Random(to)
    return [
        [draw.randbytes(draw.randrange(200)) for _ in range(draw.choice((1, 2, 2, 3)))] for _ in range(50)
    ]


def replayed(swarm: Swarm, to: str) -> list[Parts]:
    old = [swarm.header(kind, 0, round_no=ROUND - 3) for kind in (Kind.CONTRIBUTION, Kind.RESULT)]
    return [parts for header in old * 20 for parts in framed(header, TRUE[MAL][0])]


def not_the_owners(swarm: Swarm, to: str) -> list[Parts]:
    """Contributions to members that do not own the chunk: kept for a moment, since ownership may just have moved."""
    strange = [chunk for chunk in range(CHUNKS) if swarm.plan.owner_of(chunk) != to]
    early = [swarm.header(Kind.CONTRIBUTION, chunk) for chunk in strange for _ in range(EARLY_KEPT)]
    return [parts for header in early for parts in framed(header, TRUE[MAL][0])]


def from_no_owner(swarm: Swarm, to: str) -> list[Parts]:
    false = [swarm.header(Kind.RESULT, chunk, decision_no=1) for chunk in range(CHUNKS) for _ in range(20)]
    return [parts for header in false for parts in framed(header, TRUE[MAL][0])]


def asks(swarm: Swarm, to: str) -> list[Parts]:
    own = [bare(swarm, Kind.WANT_CONTRIBUTION, chunk) for chunk in range(CHUNKS) for _ in range(50)]
    kinds = (Kind.WANT_LOGGED, Kind.WANT_STATE, Kind.WANT_MANIFEST)
    # Each names a version that nobody has, so that no two answers are the same.
    return own + [bare(swarm, kind, 0, round_no=0, version=n) for n in range(1000) for kind in kinds]


def pings(swarm: Swarm, to: str) -> list[Parts]:
    pinged = [swarm.header(Kind.PING, number, round_no=0) for number in range(150)]
    return [parts for header in pinged for parts in framed(header, bytes(PAYLOAD_MAX))]


NAN = b"".join([TRUE[MAL][0][:16], b"\xff" * (4 * ELEMENTS)])
OTHER_CODEC = codec_named("int8").encode(torch.ones(ELEMENTS))
CUT, HASH, LONG, RUNS = (
    "cut short or no frames",
    "do not match their hash",
    "longer than any",
    "of another run",
)

FAULTS = [
    Fault("payload truncated", Verdict.MALFORMED, CUT, contributes=lambda h, p: [[h.pack(), p[:-1]]]),
    Fault(
        "header length lies",
        Verdict.MALFORMED,
        CUT,
        contributes=lambda h, p: [[dataclasses.replace(h, length=h.length + 1).pack(), p]],
    ),
    Fault("one flipped byte", Verdict.BAD_HASH, HASH, contributes=lambda h, p: [[h.pack(), flipped(p)]]),
    Fault(
        "oversized frame", Verdict.OVERSIZE, LONG, contributes=lambda h, p: framed(h, bytes(PAYLOAD_MAX + 1))
    ),
    Fault("every frame 30 times", Verdict.DUPLICATE, "", contributes=lambda h, p: [[h.pack(), p]] * 30),
    Fault("replay of an earlier round", Verdict.STALE, "", first=replayed),
    Fault(
        "stale round first",
        Verdict.STALE,
        "",
        contributes=lambda h, p: framed(dataclasses.replace(h, round_no=ROUND - 1), p) + [[h.pack(), p]],
    ),
    Fault(
        "wrong run tag",
        Verdict.UNAUTHORISED,
        RUNS,
        contributes=lambda h, p: framed(dataclasses.replace(h, run_tag=b"another!"), p),
        first=lambda swarm, to: framed(swarm.header(Kind.CONTRIBUTION, 0, run_tag=b"another!"), b"x"),  # type: ignore[arg-type]
    ),
    Fault("three parts", Verdict.MALFORMED, CUT, first=lambda *_: [[b"", bytes(96), b"x"]] * 2),
    Fault("one part", Verdict.MALFORMED, CUT, first=lambda *_: [[bytes(96)]] * 2),
    Fault(
        "unknown kind",
        Verdict.MALFORMED,
        CUT,
        first=lambda swarm, _: (
            [[flipped(swarm.header(Kind.STATE, 0).pack(), 4)[:4] + b"\x63" + bytes(91), b""]] * 2
        ),
    ),
    Fault("random garbage", Verdict.MALFORMED, CUT, first=garbage),
    Fault(
        "wrong codec under its hash", Verdict.MALFORMED, CUT, contributes=lambda h, p: framed(h, OTHER_CODEC)
    ),
    Fault("not finite under its hash", Verdict.MALFORMED, CUT, contributes=lambda h, p: framed(h, NAN)),
    Fault("results of a non-owner", Verdict.STALE, "", first=from_no_owner),
    Fault("contributions to non-owners", Verdict.STALE, "", first=not_the_owners),
    Fault("a flood of questions", Verdict.DUPLICATE, "", first=asks),
    Fault("a flood of questions, answers unread", Verdict.DUPLICATE, "", first=asks, reads=False),
    Fault("a flood of large pings", Verdict.ACCEPTED, "", first=pings, reads=False),
]


@pytest.fixture
def swarm(request: pytest.FixtureRequest) -> Iterator[Swarm]:
    made = Swarm(request.param)
    yield made
    made.close()


def of(faults: list[Fault]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("swarm", faults, indirect=True, ids=lambda fault: fault.name)


def finished_alike(swarm: Swarm) -> None:
    """The honest hold identical results, and they are the decided mean of the true contributions."""
    assert swarm.done is not None and swarm.decision is not None
    weights = swarm.done.commit.weights
    parts = [TRUE[m] for m in swarm.done.commit.included]
    expected = [
        merged_chunk(CODEC, ELEMENTS, [part[chunk] for part in parts], [w for w in weights if w > 0])
        for chunk in range(CHUNKS)
    ]
    assert swarm.done.commit.hashes == b"".join(map(hash_bytes, expected))
    assert set(HONEST) <= set(swarm.done.commit.included)
    for each in swarm.honest.values():
        assert each.replica.rounds.flight is not None
        for chunk, piece in each.replica.rounds.flight.pieces.results.items():
            assert bytes(piece.payload) == expected[chunk]


@of(FAULTS)
def test_P8_P9_the_honest_finish_and_the_culprit_is_out_with_its_reason(swarm: Swarm) -> None:
    fault = swarm.fault
    swarm.run()
    finished_alike(swarm)
    reasons = swarm.decision.reasons if swarm.decision is not None else {}
    assert set(reasons) == ({MAL} if fault.excluded else set()), reasons
    assert fault.excluded in reasons.get(MAL, "")


def test_P8_frames_in_any_order_are_as_good_as_in_order() -> None:
    swarm = Swarm(Fault("reordered", Verdict.ACCEPTED, ""))
    try:
        order = random.Random(1).sample(range(CHUNKS), CHUNKS)
        swarm.fault.first = lambda swarm, to: [
            parts
            for chunk in order
            if swarm.plan.owner_of(chunk) == to
            for parts in framed(swarm.header(Kind.CONTRIBUTION, chunk), TRUE[MAL][chunk])
        ]
        swarm.run()
        finished_alike(swarm)
        assert swarm.decision is not None and swarm.decision.reasons == {}
    finally:
        swarm.close()


OWNERS = [
    Fault("result flipped", Verdict.BAD_HASH, HASH, owns=True, merges=lambda h, p: [[h.pack(), flipped(p)]]),
    Fault("result truncated", Verdict.MALFORMED, CUT, owns=True, merges=lambda h, p: [[h.pack(), p[:-9]]]),
    Fault(
        "result in another codec",
        Verdict.MALFORMED,
        CUT,
        owns=True,
        merges=lambda h, p: framed(h, OTHER_CODEC),
    ),
    Fault("result not finite", Verdict.MALFORMED, CUT, owns=True, merges=lambda h, p: framed(h, NAN)),
]


@of(OWNERS)
def test_P8_an_owner_whose_results_are_of_no_use_loses_its_chunks_and_the_round_goes_on(swarm: Swarm) -> None:
    swarm.run()
    finished_alike(swarm)
    assert [moved.unfit for moved in swarm.moves] == [{MAL}] and swarm.fault.excluded in swarm.moves[0].reason
