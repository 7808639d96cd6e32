"""A peer's part in the run put together by hand: its replicas, its view of a trainer, and the exchange between them.

For tests of one part of the peer machine alone, on virtual time.  Two fragments of two chunks each; ann and bob own
one chunk of each.  No beats, no session, no shell: payloads are words, and `UNUSABLE` stands for bytes of no use.
"""

from __future__ import annotations

from collections.abc import Callable

from farflung.checkpoints.result_log import ResultLog
from farflung.optim.schedule import ScheduleRules
from farflung.peer.local.words import Frozen, ToTrainer
from farflung.peer.machine.effects import Effect, Note, TellTrainer
from farflung.peer.machine.handshake import PeerConfig
from farflung.peer.machine.machine import MemberMachine, PeerMachine
from farflung.peer.machine.modes import of_replica
from farflung.peer.machine.replicas import Replica, Replicas
from farflung.peer.machine.trainer_proxy import TrainerProxy, TrainerSync
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import FrameError, Verdict
from farflung.protocol.frames import Frame, Header, Kind, Payload, with_payload
from farflung.protocol.manifest import Manifest, MergeSection, RoundSection
from farflung.protocol.messages import FragmentTick, Tick
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Commit, Decision, Plan, Used
from farflung.protocol.run_terms import Attached, Known
from farflung.protocol.states import Goal

TAG, MEMBERS = bytes(8), ("ann", "bob")
FRAGMENTS, CHUNKS = 2, 4
MODEL = ModelSchema((TensorSpec("w", (4 * CHUNKS,), "float32", "param"),), 4, CHUNKS, CHUNKS, bytes(32))
MANIFEST = Manifest(
    round=RoundSection(fragments=FRAGMENTS, codec="fp32", gather_codec="int8"),
    merge=MergeSection(policy="mean"),
)
UNUSABLE = b"NaN"


def digest_of(fragment: int, version: int) -> bytes:
    return hash_bytes(f"version {version} of {fragment}".encode())


def result_of(chunk: int, version: int = 1) -> bytes:
    return f"result {chunk} of {version}".encode()


def frame_of(kind: Kind, chunk: int, payload: bytes = b"", **more: int) -> Frame:
    header = Header(kind, TAG, chunk=chunk, **more)
    return with_payload(header, payload) if payload else Frame(header)


def plan_of(fragment: int, round_no: int = 1, version: int = 0) -> Plan:
    """Ann owns the fragment's first chunk, bob its second."""
    return Plan(round_no, 1, version, MEMBERS, (0, 1), ("fp32", "bf16"), fragment)


def commit_of(fragment: int, round_no: int = 1, version: int = 1, with_ann: bool = True) -> Commit:
    hashes = b"".join(hash_bytes(result_of(2 * fragment + index, version)) for index in range(2))
    weights = (0.5, 0.5) if with_ann else (0.0, 1.0)
    return Commit(version, round_no, MEMBERS, weights, hashes, "int8", fragment)


def word_of(fragment: int, version: int, **more: object) -> FragmentTick:
    plain = {
        "digests": (), "verified": True, "donors": (), "round_no": 0, "sent_seen": False, "progress_seen": 0
    }  # fmt: skip
    return FragmentTick(fragment=fragment, version=version, **{**plain, **more})  # type: ignore[arg-type]


def peer_with(member: type[MemberMachine]) -> type[PeerMachine]:
    """The whole machine of a peer that does what `member` does, for the simulator."""

    class Altered(PeerMachine):
        def __init__(self, config: PeerConfig, jitter: Callable[[], float]) -> None:
            super().__init__(config, jitter)
            self.member = member(config.me, self.doorway, self.seeking)

    Altered.__name__ = member.__name__
    return Altered


class MadePart:
    def __init__(self, schedule: str = "blocking") -> None:
        self.checked: list[tuple[str, int]] = []  # (codec, elements) of each payload that was looked at
        attached = Attached(Known(MANIFEST, bytes(16)), MODEL)
        self.part = Replicas("ann", attached, ResultLog(keep_versions=3), self._check, modes=of_replica)
        self.training = TrainerProxy(ScheduleRules(schedule, period_steps=1, fragments=FRAGMENTS))
        self.exchange = TrainerSync(self.part, self.training)

    def _check(self, codec: str, payload: Payload, elements: int) -> None:
        self.checked.append((codec, elements))
        if payload == UNUSABLE:
            raise FrameError(Verdict.MALFORMED, "not finite")

    def replica(self, fragment: int) -> Replica:
        return self.part.replicas[fragment]

    def founds(self) -> None:
        """Version 0 of both fragments is here and confirmed, and the trainer has loaded it."""
        self.training.attached = True
        for replica in self.part.replicas.values():
            replica.held.fill()
        self.exchange.on_provided()
        for fragment in self.part.replicas:
            self.exchange.on_sealed(fragment, 0, digest_of(fragment, 0))
            self.replica(fragment).on_tick(word_of(fragment, 0))
            self.training.on_loaded(fragment)

    def freezes(self, fragment: int, slot: int = 1, used: tuple[Used, ...] = ()) -> None:
        self.training.on_frozen(
            Frozen(slot=slot, tokens=100, steps=4, used=used, loss=None, fragment=fragment)
        )

    def opens(self, fragment: int, round_no: int = 1, version: int = 0) -> list[Effect]:
        offered = self.training.offered(fragment)
        return self.part.on_plan(plan_of(fragment, round_no, version), offered, 0.0)

    def decides(self, round_no: int = 1) -> list[Effect]:
        return self.part.on_decision(Decision(round_no, 1, (0.5, 0.5), {}), 0.0)

    def applies(self, commit: Commit) -> None:
        """The commit comes, and all its results are at hand: its version is being hashed."""
        replica = self.replica(commit.fragment)
        replica.on_commit(commit, 0.0)
        for chunk in replica.fragment.chunks:
            payload = result_of(chunk, commit.version)
            replica.held.chunks.offer(commit.version, chunk, payload, hash_bytes(payload))
        replica.advance(0.0)

    def tick(self, *words: FragmentTick, goal: Goal = Goal.TRAIN, void: tuple[int, ...] = ()) -> list[Effect]:
        return self.exchange.on_tick(
            Tick(

                session=bytes(16), seq=1, answers=1, heard_s=0.0, fragments=words, goal=goal, reason="",
                roster_no=0, roster=None, leases=None, void=void, era=0, advice="", era_because="",
            )
        )  # fmt: skip


def told(effects: list[Effect]) -> list[ToTrainer]:
    return [each.message for each in effects if isinstance(each, TellTrainer)]


def notes(effects: list[Effect]) -> list[str]:
    return [each.text for each in effects if isinstance(each, Note)]
