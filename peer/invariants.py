"""The promises as checks on a simulated run.  Raised at the very event that breaks one.

Fed by the simulator with what virtual peers and the coordinator do.  It sees more than any party of the run:
the truth behind every contribution, and everything that was ever made durable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farflung.collectives.digests import hash_bytes, split_hashes
from farflung.collectives.effects import Roll
from farflung.collectives.frames import Payload
from farflung.collectives.merge import merged_chunk
from farflung.collectives.plan import Commit
from farflung.compression.codec import Codec
from farflung.coordinator.messages import Sent
from farflung.coordinator.records import CommittedRound, DigestFixed, Genesis, Record
from farflung.coordinator.schema import ModelSchema
from farflung.peer.effects import Encode
from farflung.peer.local_messages import Load

if TYPE_CHECKING:
    from farflung.peer.virtual_peer import VirtualPeer
    from farflung.peer.virtual_trainer import VirtualTrainer

Sample = tuple[int, int]


class Broken(AssertionError):
    """A promise was broken; the text names it."""


@dataclass(frozen=True)
class Contributed:
    """The truth behind one contribution."""

    steps: int
    samples: tuple[Sample, ...]
    payloads: list[bytes]


class Invariants:
    def __init__(self, model: ModelSchema, gather: Codec) -> None:
        self._elements = model.chunk_elements
        self._gather = gather
        self.commits: dict[int, Commit] = {}
        self.digests: dict[int, bytes] = {}
        self.geneses: set[bytes] = set()  # version 0 may be founded again, as long as nothing was learned
        self.sealed: dict[int, bytes] = {}
        self.samples_committed: set[Sample] = set()
        self.contributions: dict[tuple[str, int], Contributed] = {}
        self.steps_committed = 0
        self.checks = 0

    # ---- what becomes durable ------------------------------------------------------------------------------

    def on_record(self, record: Record) -> None:
        match record:
            case CommittedRound(commit=commit):
                self._on_commit(commit)
            case DigestFixed(version=version, digest=digest):
                self._require(
                    "P1", self.digests.setdefault(version, digest) == digest, f"two digests for {version}"
                )
                self._require(
                    "P1", self.sealed.get(version) == digest, f"the digest of {version} is nobody's"
                )
            case Genesis(digest=digest):
                self._require("P4", not self.commits, "a run that has learned something was founded anew")
                self.digests[0] = digest
                self.geneses.add(digest)

    def _on_commit(self, commit: Commit) -> None:
        version = commit.version
        self._require("P2", version not in self.commits, f"version {version} was committed twice")
        self._require("P2", version == max(self.commits, default=0) + 1, f"version {version} skips one")
        rounds = {c.round_no for c in self.commits.values()}
        self._require("P2", commit.round_no not in rounds, f"round {commit.round_no} was committed twice")
        self.commits[version] = commit
        for peer in commit.included:
            sent = self.contributions[peer, commit.round_no]
            self.steps_committed += sent.steps
            again = self.samples_committed & set(sent.samples)
            self._require("P7", not again, f"{sorted(again)[:3]} went into version {version} a second time")
            self.samples_committed |= set(sent.samples)
        self._is_the_weighted_mean(commit)

    def _is_the_weighted_mean(self, commit: Commit) -> None:
        """Whoever merged, and however often owners changed: the result is the sum that was decided."""
        parts = [self.contributions[peer, commit.round_no].payloads for peer in commit.included]
        weights = [weight for weight in commit.weights if weight > 0.0]
        for chunk, expected in enumerate(split_hashes(commit.hashes)):
            payloads = [payload[chunk] for payload in parts]
            result = merged_chunk(self._gather, self._elements, payloads, weights)
            told = f"chunk {chunk} of version {commit.version} is not the decided mean"
            self._require("P9", hash_bytes(result) == expected, told)

    # ---- what peers do ---------------------------------------------------------------------------------------

    def observe(self, what: str, details: object) -> None:
        handler = getattr(self, f"_saw_{what}", None)
        if handler is not None:
            handler(details)

    def _saw_roll(self, details: tuple[VirtualPeer, Roll]) -> None:
        peer, roll = details
        commit = self.commits.get(roll.version)
        self._require(
            "P2", commit is not None, f"{peer.peer} applied version {roll.version} before its commit"
        )
        assert commit is not None
        expected = commit.hashes[32 * roll.chunk : 32 * roll.chunk + 32]
        self._require(
            "P2", hash_bytes(roll.payload) == expected, f"{peer.peer} applied other bytes than the commit's"
        )

    def _saw_sealed(self, details: tuple[VirtualPeer, int, bytes]) -> None:
        peer, version, digest = details
        if version > 0:
            same = self.sealed.setdefault(version, digest) == digest
            self._require("P1", same, f"{peer.peer} is at version {version} with another state than others")

    def _saw_encoded(self, details: tuple[VirtualPeer, Encode, list[Payload]]) -> None:
        peer, encode, payloads = details
        steps = round(float(peer.slots[encode.slot][0]))
        samples = tuple(peer.kept_work(encode.slot))
        self.contributions[peer.peer, encode.round_no] = Contributed(
            steps, samples, [bytes(p) for p in payloads]
        )

    def _saw_to_coordinator(self, details: tuple[VirtualPeer, object]) -> None:
        peer, message = details
        if isinstance(message, Sent) and peer.machine.part is not None:
            part = peer.machine.part
            good = self._is_the_runs(part.version, part.digest)
            self._require("P4", good, f"{peer.peer} contributes from a state that is not the run's")

    def _saw_serve(self, details: tuple[VirtualPeer, object, int]) -> None:
        peer, _, version = details
        good = self._is_the_runs(version, peer.state.digest)
        self._require("P4", good, f"{peer.peer} serves a state that is not version {version}")

    def _is_the_runs(self, version: int, digest: bytes) -> bool:
        return digest in self.geneses if version == 0 else self.digests.get(version) == digest

    def _saw_loaded(self, details: tuple[VirtualPeer, VirtualTrainer, Load]) -> None:
        peer, trainer, load = details
        owed = float(trainer.delta()[0])
        told = (
            f"{peer.peer} owes {trainer.steps} steps after loading {load.keep!r}, its delta says {owed:.3f}"
        )
        self._require("P6", abs(owed - trainer.steps) < 1e-2, told)
        if load.keep == "rest":
            mine = [c for c in self.commits.values() if peer.peer in c.included]
            self._require("P6", bool(mine), f"{peer.peer} gave up work that no commit used")

    # ---- at the end --------------------------------------------------------------------------------------------

    def at_rest(self, peers: Iterable[VirtualPeer]) -> None:
        """Nothing moves any more: every living peer at one version holds one state, bit for bit."""
        states: dict[int, bytes] = {}
        for peer in peers:
            part = peer.machine.part
            if part is not None and part.version >= 0 and set(part.catch.versions) == {part.version}:
                raw = peer.anchor.numpy().tobytes()
                self._require(
                    "P1", states.setdefault(part.version, raw) == raw, f"{peer.peer} differs at the end"
                )

    def _require(self, promise: str, holds: bool, text: str) -> None:
        self.checks += 1
        if not holds:
            raise Broken(f"{promise} is broken: {text}")
