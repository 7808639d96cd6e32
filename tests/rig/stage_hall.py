"""A coordinator of a model in stages, with signing peers that count microbatches, send sums and merge them by word.

For tests of the run machine on virtual time: nothing here computes anything, and whoever is told to lie does so.
Used by the tests of stages: tests/coordinator/batches/test_stages.py, and those of going back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from farflung.coordinator.batches.batch_book import Seated
from farflung.coordinator.ledger.records import CommittedBatch, Record, from_bytes, to_bytes
from farflung.coordinator.run.effects import AnswerDoor, Effect, Note, Tell, Write
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol import messages as m
from farflung.protocol.digests import bits, combined, hash_bytes, length_to_bytes, mask_of, mask_to_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Order
from farflung.protocol.mode_words import BatchBeat, BatchTick, ShelfBeat, Shelved
from farflung.protocol.model_schema import ModelSchema, StageSpec, TensorSpec
from farflung.protocol.round_words import Decision, Plan, section
from farflung.protocol.signed_words import Results, hello_part, inputs_of, results_part, sent_part
from rig.guests import Guest
from rig.showing import showing

RUN_ID = bytes(range(16))
BATCH, CHUNKS = 8, 2


def manifest_of(stages: int, more: str = "") -> Manifest:
    return Manifest.from_toml(
        f'[run]\nname = "demo"\nmin_peers = {stages}\nmax_peers = 16\n[merge]\npolicy = "mean"\n'
        f'[outer]\nstep = "adamw"\n[pipeline]\nstages = {stages}\nbatch = {BATCH}\n{more}',
        "run.toml",
    )


def model_of(stages: int) -> ModelSchema:
    tensors = tuple(TensorSpec(f"w{stage}", (2, 4), "float32", "param") for stage in range(stages))
    specs = tuple(StageSpec(stage, stage, CHUNKS, 0) for stage in range(stages))
    count = CHUNKS * stages
    return ModelSchema(tensors, 4, count, count, bytes(32), specs)


def digest_at(stage: int, version: int) -> bytes:
    """Of its state, for all who tell the truth."""
    return hash_bytes(str(version).encode(), bytes([stage]))


def hashes_of(peer: str) -> list[bytes]:
    return [hash_bytes(peer.encode(), bytes([chunk])) for chunk in range(CHUNKS)]


@dataclass
class Staged:
    """A guest of one stage, and where it is."""

    guest: Guest
    offers: tuple[int, ...]
    stage: int = -1
    version: int = -1
    digest: bytes = b""
    round_no: int = 0
    decision_no: int = 0
    plan: Plan | None = None
    decision: Decision | None = None
    counted: set[int] = field(default_factory=set)
    frozen: bool = False
    trainer: int = 0
    shelf: tuple[int, ...] = ()  # versions of its stage that it says it can bring
    era: int = 0
    changes: dict[str, object] = field(default_factory=dict)  # of its next batch words
    tick: m.Tick | None = None
    got: bool = False
    batch_version: int = -1

    @property
    def seat(self) -> int:
        return self.batch.seat if self.batch is not None else 0

    @property
    def batch(self) -> BatchTick | None:
        return section(BatchTick, self.tick.sections) if self.tick is not None else None


@dataclass
class StageHall:
    stages: int = 3
    more: str = ""
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now, self.drawn = 0.0, 0
        self.manifest = manifest_of(self.stages, self.more)
        self.model = model_of(self.stages)
        self.peers: dict[str, Staged] = {}
        self.squares: dict[
            int, float
        ] = {}  # by stage, where the gradient is clipped: of each result's length
        self.notes: list[str] = []
        self.told: list[str] = []  # what members are to do, and why
        self.start()

    def start(self) -> None:
        """A coordinator that reads the journal."""
        self.machine = RunMachine(self.manifest, RUN_ID, list(self.records), self._random)
        self._take(self.machine.start(self.now, 4000))

    def _random(self, count: int) -> bytes:
        self.drawn += 1
        return hash_bytes(str(self.drawn).encode())[:count]

    # ---- the door ----------------------------------------------------------------------------------------

    def hello(self, name: str, offers: Sequence[int], version: int = -1, digest: bytes = b"") -> m.ToDoor:
        peer = self.peers.setdefault(name, Staged(Guest(len(self.peers) + 1), tuple(offers)))
        guest = peer.guest
        challenge = self._door(guest, m.Knock(protocol=PROTOCOL_VERSION, run="demo"))
        assert isinstance(challenge, m.Challenge)
        bare = m.Hello(
            protocol=PROTOCOL_VERSION, run_id=RUN_ID, identity=guest.identity, key=guest.key,
            address=f"{name}:1", software="test", manifest=self.manifest.digest, model=self.model,
            fragments=tuple(offers), version=version, digest=digest, process=guest.process, token="", signature=b"",
        )  # fmt: skip
        signature = guest.signer.sign(hello_part(bare, challenge.nonce))
        answer = self._door(guest, replace(bare, signature=signature))
        if isinstance(answer, m.Welcome):
            guest.session, guest.seq = answer.session, 0
            [peer.stage] = answer.fragments
            self._take(self.machine.on_dialled(guest.peer, guest.session, True, self.now))
        return answer

    def _door(self, guest: Guest, message: m.FromDoor) -> m.ToDoor:
        effects = self.machine.on_door(guest.key, guest.key, message, self.now)
        self._take(effects)
        return next(effect.message for effect in effects if isinstance(effect, AnswerDoor))

    def join(self, *names: str, offers: Sequence[int] = ()) -> None:
        for name in names:
            welcome = self.hello(name, offers or range(self.stages))
            assert isinstance(welcome, m.Welcome), welcome

    # ---- words -------------------------------------------------------------------------------------------

    def beats(self, *names: str) -> None:
        for name in names:
            self._say(self.peers[name], self._beat(self.peers[name]))

    def _beat(self, peer: Staged) -> m.Beat:
        said = m.FragmentBeat(
            peer.stage, peer.version, peer.digest, peer.round_no, 1 if peer.round_no else 0, peer.decision_no,
            peer.frozen and not peer.round_no, (),
        )  # fmt: skip
        shelf = tuple(
            Shelved.of(version, peer.stage, [digest_at(peer.stage, version)]) for version in peer.shelf
        )
        batch = BatchBeat(
            peer.version if peer.seat or peer.version >= 0 else -1, peer.seat, peer.trainer,
            mask_to_bytes(mask_of(peer.counted)), b"", peer.version >= 0, 0.5, 0,
        )  # fmt: skip
        return m.Beat(
            session=peer.guest.session, seq=peer.guest.seq + 1, roster_no=0, phase="inner", step=0, tokens=0,
            loss=None, tx_bytes=0, rx_bytes=0, up_bytes_per_s=0, down_bytes_per_s=0, have=(), want=0,
            samples=100 if peer.stage == 0 else 0, rough=False, era=peer.era, saved=-1,
            unsure=False, leaving=False, data=b"",
            fragments=(showing(self.machine.core.ledger, said),),
            sections=(replace(batch, **peer.changes), ShelfBeat(shelf)),
        )  # fmt: skip

    def _say(self, peer: Staged, message: m.FromMember) -> None:
        peer.guest.seq = message.seq
        self._take(self.machine.on_member(peer.guest.key, message, self.now))

    def order(self, order: Order) -> str:
        """What the host is told."""
        try:
            reply, effects = self.machine.obey(order, self.now)
        except UserError as error:
            return str(error)
        self._take(effects)
        return reply.text

    def leaves(self, name: str) -> None:
        """For good: it has said good-bye."""
        peer = self.peers.pop(name)
        self._say(peer, m.Leave(session=peer.guest.session, seq=peer.guest.seq + 1, reason="bye"))

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.machine.on_timer(self.now))

    def _take(self, effects: list[Effect]) -> None:
        of = {peer.guest.peer: peer for peer in self.peers.values()}
        for effect in effects:
            match effect:
                case Write(record=record):
                    self.records.append(from_bytes(to_bytes(record)))
                case Note(text=text):
                    self.notes.append(text)
                case Tell(peer=name, message=message) if name in of:
                    if isinstance(message, m.Tick):
                        self.told.append(message.reason)
                    _hear(of[name], message)

    def written(self, kind: type[Record]) -> list[Record]:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def table(self) -> dict[str, int]:
        """Name -> stage of all seats ever."""
        names = {peer.guest.peer: name for name, peer in self.peers.items()}
        return {names[each.peer]: each.stage for each in self.records if isinstance(each, Seated)}

    @property
    def commits(self) -> list[CommittedBatch]:
        return [record for record in self.records if isinstance(record, CommittedBatch)]

    # ---- a calm run ----------------------------------------------------------------------------------------

    def found(self) -> None:
        """Everybody holds version 0 of its stage, and shows it."""
        for peer in self.peers.values():
            peer.version, peer.digest = 0, hash_bytes(b"0", bytes([peer.stage]))
        self.settle()

    def settle(self, times: int = 3) -> None:
        for _ in range(times):
            self.passes(1.0)
            self.beats(*(name for name in self.peers))

    def count(self, **done: Sequence[int]) -> None:
        """These have these microbatches in their sums."""
        for name, micros in done.items():
            self.peers[name].counted = set(micros)
        self.beats(*done)

    def count_all(self) -> None:
        """Sources what they are granted, later stages in equal parts."""
        for _ in range(BATCH):
            for name, peer in self.peers.items():
                if peer.stage == 0 and peer.batch is not None:
                    peer.counted = {k for a, b in peer.batch.granted for k in range(a, b)}
                self.beats(name)
        for stage in range(1, self.stages):
            mine = [peer for peer in self.peers.values() if peer.stage == stage and peer.seat]
            for at, peer in enumerate(mine):
                peer.counted = set(range(BATCH)[at :: len(mine)])
        self.beats(*self.peers)

    def freeze(self) -> None:
        for peer in self.peers.values():
            peer.frozen = peer.batch is not None and peer.batch.freeze
        self.beats(*self.peers)

    def send(self, *names: str) -> None:
        """Its contribution, which every owner holds."""
        for name in names:
            peer = self.peers[name]
            if peer.plan is None:
                continue
            bare = m.Sent(
                session=peer.guest.session, seq=peer.guest.seq + 1, round_no=peer.plan.round_no,
                hashes=b"".join(hashes_of(peer.guest.peer)),
                tokens=100, steps=1, loss=2.0 if peer.stage == self.stages - 1 else None, used=(), seat=peer.seat,
                counted=mask_to_bytes(mask_of(peer.counted)), signature=b"",
            )  # fmt: skip
            self._say(peer, replace(bare, signature=peer.guest.signer.sign(sent_part(RUN_ID, bare))))
        for name in names:
            self.report(name)

    def report(self, name: str) -> None:
        """It holds what its stage has sent, merges what it owns, and holds all results."""
        peer = self.peers[name]
        plan, decision = peer.plan, peer.decision
        if plan is None:
            return
        mine = plan.members.index(peer.guest.peer)
        share = [chunk for chunk, owner in enumerate(plan.owners) if owner == mine]
        held = {
            other: (mask_to_bytes(mask_of(share)), combined((c, hashes_of(other)[c]) for c in share))
            for other in plan.members
        }
        results = [hash_bytes(b"result", bytes([plan.fragment, chunk])) for chunk in range(CHUNKS)]
        merged, got = (mask_of(share), (1 << CHUNKS) - 1) if decision is not None else (0, 0)
        clips = self.manifest.batch_clip < math.inf
        length = length_to_bytes(self.squares.get(plan.fragment, 1.0)) if clips else b""
        report = m.ProgressReport(
            lengths=length * merged.bit_count(), got_by={},
            session=peer.guest.session, seq=peer.guest.seq + 1, round_no=plan.round_no,
            decision_no=decision.decision_no if decision is not None else 0,
            held=held, refused={}, cut_off=(), merged=mask_to_bytes(merged),
            merged_hashes=b"".join(results[chunk] for chunk in bits(merged)), got=mask_to_bytes(got),
            got_hash=combined((chunk, results[chunk] + length) for chunk in bits(got)), dots=None, inputs=b"",
            signature=b"",
        )  # fmt: skip
        if decision is not None:
            counted = decision.included(plan.members)
            report = replace(report, inputs=inputs_of(hashes_of(p)[c] for c in bits(merged) for p in counted))
            codec = self.manifest.round.gather_codec
            said = Results.of(plan, decision, codec, report)
            report = replace(report, signature=peer.guest.signer.sign(results_part(RUN_ID, said)))
        self._say(peer, report)

    def finish_rounds(self, *names: str) -> None:
        """Those in rounds merge, and hold everything; the last one to say so ends its round."""
        for _ in range(2):
            for name in names or tuple(self.peers):
                self.report(name)

    def one_batch(self) -> None:
        self.count_all()
        self.freeze()
        self.send(*self.peers)
        self.finish_rounds()
        self.next_version()

    def next_version(self) -> None:
        """All who heard of the commit hold the next version."""
        for peer in self.peers.values():
            if peer.batch_version > peer.version:
                peer.version = peer.batch_version
                peer.digest = digest_at(peer.stage, peer.version)
                peer.counted, peer.frozen = set(), False
        self.settle()


def _hear(peer: Staged, message: m.ToMember) -> None:
    match message:
        case m.Tick():
            before = peer.seat
            peer.tick, peer.era = message, message.era
            lost = before and peer.batch is not None and peer.batch.seat not in (0, before)
            if lost:
                peer.counted, peer.frozen = set(), False
        case m.OpenRound(plan=plan):
            peer.plan, peer.round_no, peer.decision, peer.decision_no = plan, plan.round_no, None, 0
        case m.Decided(decision=decision):
            peer.decision, peer.decision_no = decision, decision.decision_no
        case m.Aborted():
            peer.plan, peer.round_no, peer.decision, peer.decision_no = None, 0, None, 0
        case m.Committed(commit=commit):
            peer.plan, peer.round_no, peer.decision, peer.decision_no = None, 0, None, 0
            peer.batch_version = commit.version
