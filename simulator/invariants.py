"""The promises as checks on a simulated run.  Raised at the very event that breaks one.

Fed by the simulator with what virtual peers and the coordinator do.  It sees more than any party of the run:
the truth behind every contribution, and everything that was ever made durable.  Each fragment is checked on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.checkpoint_manifest import chunk_hash
from farflung.collectives.arithmetic.merge import merged_chunk
from farflung.collectives.round.effects import Roll, Seal
from farflung.compression.codec import Codec, codec_named
from farflung.coordinator.court.proofs import FalseClaim, Proof, proof_from_bytes, proof_to_bytes
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import (
    CommittedRound,
    DigestFixed,
    DigestWithdrawn,
    Genesis,
    Record,
    RolledBack,
    tag_of,
)
from farflung.coordinator.run.effects import KeepEvidence, KeepProof
from farflung.peer.machine.effects import Encode, SaveFragment, Serve
from farflung.peer.machine.replicas import Replicas
from farflung.peer.trainer.effects import LoadAnchor
from farflung.protocol.digests import bits, hash_at, hash_bytes, mask_from_bytes, root_of, split_hashes
from farflung.protocol.frames import Payload
from farflung.protocol.messages import Sent
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import SUM_CODEC, Commit
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.trainer import Sample, VirtualTrainer

Key = tuple[int, int]  # (fragment, version)


_OF_THE_HONEST = {"to_coordinator", "serve", "gave", "saved", "moved"}
_RUN = Ed25519PrivateKey.from_private_bytes(bytes(32))  # signs what the run's own shell would sign
ROUNDS_OF_A_LIE = 2  # so long, at most, it is told


class Broken(AssertionError):
    """A promise was broken; the text names it."""


@dataclass(frozen=True)
class Contributed:
    """The truth behind one contribution."""

    steps: int
    samples: tuple[Sample, ...]
    payloads: dict[int, bytes]  # by chunk of its fragment, as far as they were made


@dataclass
class SimulatedEra:
    """What the run is, until it goes back.  Peers that have not heard of it yet live in the era before."""

    commits: dict[Key, Commit] = field(default_factory=dict)
    digests: dict[Key, bytes] = field(default_factory=dict)
    sealed: dict[Key, bytes] = field(default_factory=dict)

    def back_to(self, versions: tuple[int, ...]) -> SimulatedEra:
        """A version that was lost is made again, as something else."""
        known = (self.commits, self.digests, self.sealed)
        commits, digests, sealed = ({k: v for k, v in d.items() if k[1] <= versions[k[0]]} for d in known)
        return SimulatedEra(commits, digests, sealed)  # type: ignore[arg-type]


class Invariants:
    def __init__(
        self,
        model: ModelSchema,
        gather: Codec,
        fragments: int,
        living: Callable[[], Iterable[VirtualPeer]] = list,
    ) -> None:
        self._living = living
        self.believed: Callable[[], Iterable[VirtualPeer]] = list  # dead, and not known to be so
        self.host_says = False  # what happens now, the host has ordered
        # Of each fragment: how many tokens commits took from each peer, as far as the weights tell.
        self.brought: list[Counter[str]] = [Counter() for _ in range(fragments)]
        self.elements = model.chunk_elements
        self.gather = gather
        self._fragments = model.fragments(fragments)
        self.eras = [SimulatedEra()]
        self.used: dict[int, set[Sample]] = {}  # samples, by round
        self._hashes: dict[tuple[int, bytes], list[bytes]] = {}  # (fragment, digest) -> of its chunks
        self.given_on = 0  # pieces, by peers that were not whole
        self.geneses: set[bytes] = set()  # version 0 may be founded again, as long as nothing was learned
        self.samples_committed: list[set[Sample]] = [set() for _ in self._fragments]
        self.contributions: dict[tuple[str, int], Contributed] = {}
        self.cheated: set[bytes] = set()  # hashes of results that are no sums
        self.wrong_sums: dict[bytes, bytes] = {}  # the same of groups, by the hash of the right one
        self.found: list[Any] = []  # records of who was found out
        self._fresh: set[Sample] = set()  # committed since the books were looked at last
        self.steps_committed = 0
        self.groups_of: dict[int, tuple[int, ...]] = {}  # of each member of a round
        self.sums_of_groups: list[int] = []  # of each chunk that a mesh committed: how many were added up
        self.checks = 0
        self.liars: set[str] = set()  # whom the scenario has lie to the coordinator
        self.lied: dict[tuple[str, int], int] = {}  # (liar, fragment) -> the version that it lied about first
        self.lies_to_itself = False  # an echo of the truth, which nobody but the liar is worse off by
        # (process, fragment) -> (era, version) of a true state that it has held
        self._held: dict[tuple[bytes, int], tuple[int, int]] = {}

    def version_of(self, fragment: int) -> int:
        return max((version for number, version in self.commits if number == fragment), default=0)

    @property
    def version(self) -> int:
        """Of the least advanced fragment."""
        return min(self.version_of(each.number) for each in self._fragments)

    @property
    def commits(self) -> dict[Key, Commit]:
        return self.eras[-1].commits

    # ---- what becomes durable ------------------------------------------------------------------------------

    def on_record(self, record: Record) -> None:
        match record:
            case CommittedRound(commit=commit):
                self._on_commit(record, commit)
            case DigestFixed(version=version, digest=digest, fragment=fragment):
                key = (fragment, version)
                now = self.eras[-1]
                same = now.digests.setdefault(key, digest) == digest
                self._require("P1", same, f"two digests for {key}")
                true = now.sealed.get(key) == digest
                self._require("P1", true or bool(self.liars), f"the digest of {key} is nobody's")
            case DigestWithdrawn(version=version, fragment=fragment):
                for key in [k for k in self.eras[-1].digests if k[0] == fragment and k[1] >= version]:
                    del self.eras[-1].digests[key]
            case Genesis(digests=digests):
                self._require("P4", not self.commits, "a run that has learned something was founded anew")
                self._require("P4", len(digests) == len(self._fragments), "some fragment was not founded")
                self.eras[-1].digests |= {(fragment, 0): digest for fragment, digest in enumerate(digests)}
                self.geneses |= set(digests)
            case RolledBack(versions=versions):
                self._on_rolled_back(versions)
            case _ if tag_of(record) == "banned":  # of a mode, which may have been taken out
                self._on_banned(record)
            case _ if tag_of(record) == "found_cheating":
                self._on_found(record)

    def _on_banned(self, record: Any) -> None:
        peer = record.peer
        honest = bool(self.liars) and peer not in self.liars
        self._require("P18", not honest, f"{peer} is honest and was banned: {record.reason}")
        for (liar, fragment), version in self.lied.items():
            rounds = self.version_of(fragment) - version if liar == peer else 0
            told = f"{peer} lied about version {version} of {fragment} for {rounds} rounds"
            self._require("P18", rounds <= ROUNDS_OF_A_LIE or self.lies_to_itself, told)

    def on_evidence(self, kept: KeepEvidence) -> None:
        """Each member in the commit signed for its bytes, and these are the bytes that it made."""
        by_peer = {said.peer: said for said in kept.said}
        for peer in kept.commit.included:
            said = by_peer.get(peer)
            told = f"{peer} is in round {kept.commit.round_no} and did not sign for it"
            self._require("P9", said is not None, told)  # the driver has looked at the signature
            truth = self.contributions.get((peer, kept.commit.round_no))
            hashes = split_hashes(said.sent.hashes) if said is not None else []
            for chunk, payload in truth.payloads.items() if truth is not None else ():
                self._require("P9", hash_bytes(payload) == hashes[chunk], f"{peer} signed for other bytes")

    def _on_rolled_back(self, versions: tuple[int, ...]) -> None:
        now = self.eras[-1]
        for key in enumerate(versions):
            self._require("P4", key in now.digests, f"the run goes back to {key}, which it never was")
            self._require("P4", key[1] <= self.version_of(key[0]), f"the run goes forward to {key}")
        if not self.host_says:
            self._require("P20", any(versions) or self._holds_version_0(), "a run was founded anew by itself")
            self._nobody_is_passed_over(versions)
        self._begin_era(now.back_to(versions))

    def on_restored(self, versions: tuple[int, ...]) -> None:
        """What the coordinator lost with its disk, and nobody who lives could prove, never was: as an aborted round."""
        self.eras[-1], self._fresh = self.eras[-1].back_to(versions), set()
        self._recount()

    def _begin_era(self, era: SimulatedEra) -> None:
        self.eras.append(era)
        self._recount()

    def _recount(self) -> None:
        self.samples_committed = [set() for _ in self._fragments]
        for commit in self.commits.values():
            self.samples_committed[commit.fragment] |= self.used[commit.round_no]

    def _holds_version_0(self) -> bool:
        """Or did so a moment ago: whoever was killed then may count as here yet."""
        peers = [*self._living(), *self.believed()]
        parts = [peer.member.part for peer in peers if peer.member.part is not None]
        return all(any(_held_by(part, each.number) == 0 for part in parts) for each in self._fragments)

    def _nobody_is_passed_over(self, versions: tuple[int, ...]) -> None:
        for fragment, version in enumerate(versions):
            lost = self._of_weight_with_more(fragment, version)
            told = f"the run goes back to {version} of {fragment}, while {sorted(lost)} live and hold more"
            self._require("P20", not lost, told)

    def _of_weight_with_more(self, fragment: int, version: int) -> set[str]:
        """The living that hold more, out of the coordinator's sight, if they are those who brought most."""
        now, brought = self.eras[-1], self.brought[fragment]
        lost: set[str] = set()
        for peer in self._living():
            part = peer.member.part
            replica = part.replicas.get(fragment) if part is not None else None
            if replica is not None and peer.member.reports.era == len(self.eras) - 1:
                if (
                    replica.held.version > version
                    and now.sealed.get((fragment, replica.held.version)) == replica.held.digest
                ):
                    lost.add(peer.peer)
        return lost if 2 * sum(brought[peer] for peer in lost) > brought.total() else set()

    def _on_commit(self, record: CommittedRound, commit: Commit) -> None:
        fragment, version = commit.fragment, commit.version
        last = self.version_of(fragment)
        self._require("P2", version > last, f"version {version} of {fragment} was committed twice")
        self._require("P2", version == last + 1, f"version {version} of {fragment} skips one")
        self._require("P2", commit.round_no not in self.used, f"round {commit.round_no} was committed twice")
        self.commits[fragment, version] = commit
        self.groups_of[commit.round_no] = record.groups
        for peer, weight in zip(commit.members, commit.weights, strict=True):
            self.brought[fragment][peer] += round(record.tokens * 1000 * weight / sum(commit.weights))
        self.used[commit.round_no] = set()
        for peer in commit.included:
            sent = self.contributions[peer, commit.round_no]
            self.steps_committed += sent.steps
            used = set(sent.samples)
            self._require("P7", len(used) == len(sent.samples), f"{peer} read a sample twice in one round")
            again = self.samples_committed[fragment] & used
            told = f"{sorted(again)[:3]} went into version {version} of {fragment} a second time"
            self._require("P7", not again, told)
            self.samples_committed[fragment] |= used
            self._fresh |= used
            self.used[commit.round_no] |= used
        self._is_the_weighted_mean(commit)

    def _is_the_weighted_mean(self, commit: Commit) -> None:
        """Whichever owner merged, and however often owners changed: the result is the sum that was decided."""
        for index, (expected, result) in enumerate(
            zip(split_hashes(commit.hashes), self.results_of(commit), strict=True)
        ):
            told = f"chunk {index} of version {commit.version} of {commit.fragment} is not the decided mean"
            if hash_bytes(result) != expected:
                # What a cheating owner made is committed, where nobody knows yet: that it is found out is P19.
                false = expected in self.cheated or expected in self._of_wrong_sums(commit, index)
                self._require("P9", false, told)

    def results_of(self, commit: Commit) -> list[bytes]:
        """As they should be, chunk by chunk."""
        parts = [self.contributions[peer, commit.round_no].payloads for peer in commit.included]
        weights = [weight for weight in commit.weights if weight > 0.0]
        chunks = range(len(split_hashes(commit.hashes)))
        payloads = ([payload[index] for payload in parts] for index in chunks)
        if self.groups_of.get(commit.round_no):
            return [self._sum_of_sums(commit, each, weights) for each in payloads]
        return [merged_chunk(self.gather, self.elements, each, weights) for each in payloads]

    def _sum_of_sums(self, commit: Commit, payloads: list[bytes], weights: list[float]) -> bytes:
        """Of a mesh: members in their order, rounded as sums travel, then groups in theirs."""
        sums = self._sums_of(commit, payloads, weights)
        self.sums_of_groups.append(len(sums))
        return merged_chunk(self.gather, self.elements, sums, [1.0] * len(sums))

    def _sums_of(self, commit: Commit, payloads: list[bytes], weights: list[float]) -> list[bytes]:
        groups = dict(zip(commit.members, self.groups_of[commit.round_no], strict=True))
        by_group: dict[int, list[tuple[bytes, float]]] = {}
        for peer, payload, weight in zip(commit.included, payloads, weights, strict=True):
            by_group.setdefault(groups[peer], []).append((payload, weight))
        travelled = codec_named(SUM_CODEC)
        return [
            merged_chunk(travelled, self.elements, *zip(*by_group[g], strict=True)) for g in sorted(by_group)
        ]

    def _of_wrong_sums(self, commit: Commit, index: int) -> set[bytes]:
        """Hashes of what an honest root makes of a chunk, where somebody added up one of the groups wrongly."""
        if not self.groups_of.get(commit.round_no):
            return set()
        payloads = [self.contributions[peer, commit.round_no].payloads[index] for peer in commit.included]
        sums = self._sums_of(commit, payloads, [weight for weight in commit.weights if weight > 0.0])
        false = (
            [*sums[:at], wrong, *sums[at + 1 :]]
            for at, right in enumerate(sums)
            if (wrong := self.wrong_sums.get(hash_bytes(right)))
        )
        weights = [1.0] * len(sums)
        return {hash_bytes(merged_chunk(self.gather, self.elements, each, weights)) for each in false}

    # ---- wrong sums (P19) ------------------------------------------------------------------------------------

    def _on_found(self, record: Any) -> None:
        self.found.append(record)
        self._require("P19", record.peer in self.liars, f"{record.peer} is honest, and found to have cheated")

    def on_strikes(self, struck: Iterable[str]) -> None:
        """Whom the judge of sums struck."""
        honest = sorted(set(struck) - self.liars)
        self._require("P19", not honest, f"{honest} are honest and struck for a sum")

    def on_proof(self, effect: KeepProof) -> None:
        proof = cast(Proof, effect.proof)
        if isinstance(proof, FalseClaim):
            self._on_false_claim(proof, effect.peers)
            return
        again = proof_from_bytes(proof_to_bytes(proof))
        self._require("P19", again == proof, f"{proof.name} is another one when it is read again")
        self._require("P19", not proof.problem(), f"{proof.name} proves nothing: {proof.problem()}")
        self._require(
            "P19", proof.guilty in self.liars, f"{proof.guilty} is honest, and {proof.name} convicts it"
        )
        place = list(bits(mask_from_bytes(proof.results.chunks))).index(proof.chunk)
        made = hash_at(proof.results.hashes, place)
        self._require("P19", made in self.cheated, f"{proof.name} speaks of a chunk that is right")
        last = self.found[-1] if self.found else None
        told = f"nothing was written of what {proof.name} proves"
        self._require("P19", last is not None and last.evidence == proof.name, told)

    def _on_false_claim(self, proof: FalseClaim, peers: tuple[str, ...]) -> None:
        """Only what nobody honest has calculated is ever refuted, and nobody honest is out for it."""
        signed = replace(
            proof, key=_RUN.public_key().public_bytes_raw(), signature=_RUN.sign(proof.signed_part())
        )
        problem = signed.problem()
        self._require("P18", not problem, f"{proof.name} proves nothing: {problem}")
        truth = self.eras[proof.era].sealed.get((proof.fragment, proof.version))
        false = truth != root_of(split_hashes(proof.claimed))
        told = f"the true digest of version {proof.version} of {proof.fragment} was refuted"
        self._require("P18", false, told)
        honest = sorted({*peers, proof.guilty} - self.liars)
        self._require("P18", not honest, f"{honest} are out for a digest that they never named")

    # ---- what peers do ---------------------------------------------------------------------------------------

    def observe(self, what: str, details: object) -> None:
        handler = getattr(self, f"_saw_{what}", None)
        # What a liar does with its own state breaks no promise: nobody is bound to believe it.
        liar = (
            bool(self.liars)
            and isinstance(details, tuple)
            and isinstance(details[0], VirtualPeer)
            and details[0].peer in self.liars
        )
        if handler is not None and not (liar and what in _OF_THE_HONEST):
            handler(details)

    def _saw_roll(self, details: tuple[VirtualPeer, Roll, int]) -> None:
        peer, roll, era = details
        fragment = next(each for each in self._fragments if roll.chunk in each.chunks)
        commit = self.eras[era].commits.get((fragment.number, roll.version))
        self._require(
            "P2", commit is not None, f"{peer.peer} applied version {roll.version} before its commit"
        )
        assert commit is not None
        expected = hash_at(commit.hashes, fragment.index(roll.chunk))
        self._require(
            "P2", hash_bytes(roll.payload) == expected, f"{peer.peer} applied other bytes than the commit's"
        )
        told = f"{peer.peer} multiplied by {roll.factor}, where the commit says {commit.factor}"
        self._require("P2", roll.factor == commit.factor, told)

    def _saw_sealed(self, details: tuple[VirtualPeer, Seal, bytes, int]) -> None:
        peer, seal, digest, era = details
        self._hashes[seal.fragment, digest] = peer.state.hashes_of(self._fragments[seal.fragment].chunks)
        if seal.version > 0:
            key = (seal.fragment, seal.version)
            same = self.eras[era].sealed.setdefault(key, digest) == digest
            self._require("P1", same, f"{peer.peer} is at {key} with another state than others")

    def _saw_moved(self, details: tuple[VirtualPeer]) -> None:
        """P18: what an honest peer calculated it keeps, whoever says otherwise; unless the run goes back, or goes on
        without it for so long that nobody keeps the results any more."""
        [peer] = details
        part, era = peer.member.part, peer.member.reports.era
        for number, replica in part.replicas.items() if part is not None else ():
            held_in, held = self._held.get((peer.me.process, number), (era, -1))
            now = replica.held
            if (held_in, held) == (era, now.version):
                continue  # it holds what it held: nearly always
            lost = now.version < held and era == held_in and now.chunks.target - held <= now.log.keep_versions
            # Torn, by results that nobody has whole any more, it reads what lies on its disk.  Among liars it may not:
            # they could tear it.
            torn = not self.liars and len(set(now.chunks.versions)) > 1
            self._require(
                "P18", torn or not lost, f"{peer.peer} gave up its state of version {held} of {number}"
            )
            true = now.version > 0 and self.eras[era].sealed.get((number, now.version)) == now.digest
            if true or now.version < held:
                self._held[peer.me.process, number] = era, now.version

    def _saw_encoded(self, details: tuple[VirtualPeer, Encode, dict[int, Payload]]) -> None:
        peer, encode, payloads = details
        first = self._fragments[encode.fragment].first * self.elements
        work, mixed = peer.kept_work(encode.slot, encode.fragment)
        steps = round(float(peer.slots[encode.slot][first]) - mixed)
        samples = tuple(sample for step in work for sample in step)
        # What is encoded ahead of its round has a number of its process alone.
        whose = peer.peer if encode.round_no > 0 else _process_of(peer)
        made = self.contributions.setdefault((whose, encode.round_no), Contributed(steps, samples, {}))
        made.payloads.update((index, bytes(payload)) for index, payload in payloads.items())

    def _saw_to_coordinator(self, details: tuple[VirtualPeer, object]) -> None:
        peer, message = details
        if isinstance(message, Sent) and peer.member.part is not None:
            replica = peer.member.part.replica_of_round(message.round_no)
            era = peer.member.reports.era
            good = replica is not None and self._is_the_runs(
                replica.fragment.number, replica.held.version, replica.held.digest, era
            )
            self._require("P4", good, f"{peer.peer} contributes from a state that is not the run's")
            mine = replica.rounds.contribution if replica is not None else None
            if replica is not None and mine is not None and mine.frozen is replica.rounds.ahead.frozen:
                sent_ahead = self.contributions[_process_of(peer), replica.rounds.ahead.encode_no]
                self.contributions[peer.peer, message.round_no] = sent_ahead

    def _saw_serve(self, details: tuple[VirtualPeer, int, int, int]) -> None:
        peer, fragment, version, era = details
        good = self._is_the_runs(fragment, version, peer.state.digests[fragment], era)
        self._require("P4", good, f"{peer.peer} serves a state that is not version {version} of {fragment}")

    def _saw_gave(self, details: tuple[VirtualPeer, Serve, bytes, int]) -> None:
        """What a peer that is not whole gives on is a piece of the run's state all the same."""
        peer, piece, chunk_hash, era = details
        fragment = next(each for each in self._fragments if piece.chunk in each.chunks)
        key, now = (fragment.number, piece.version), self.eras[era]
        digests = {now.digests.get(key, b""), now.sealed.get(key, b"")} if piece.version else self.geneses
        lists = [self._hashes.get((fragment.number, digest), []) for digest in digests]
        good = any(hashes[fragment.index(piece.chunk)] == chunk_hash for hashes in lists if hashes)
        self._require("P4", good, f"{peer.peer} gives on a piece {piece.chunk} that is not of {key}")
        self.given_on += 1

    def _is_the_runs(self, fragment: int, version: int, digest: bytes, era: int) -> bool:
        if version == 0:
            return digest in self.geneses
        return self.eras[era].digests.get((fragment, version)) == digest

    def _saw_saved(self, details: tuple[VirtualPeer, SaveFragment, list[bytes]]) -> None:
        peer, save, chunks = details
        digest = root_of(bytes.fromhex(chunk_hash(raw)) for raw in chunks)
        good = digest == save.digest and self._is_the_runs(save.fragment, save.version, digest, save.era)
        self._require("P4", good, f"{peer.peer} saves a state that is not version {save.version}")

    def _saw_loaded(self, details: tuple[VirtualPeer, VirtualTrainer, LoadAnchor]) -> None:
        peer, trainer, load = details
        part = trainer.parts[load.fragment]
        owed = float(trainer.delta(part)[0]) - part.mixed
        told = (
            f"{peer.peer} owes {load.steps} steps of {load.fragment} after loading {load.keep!r}, "
            f"its delta says {owed:.3f}"
        )
        self._require("P6", abs(owed - load.steps) < 1e-2, told)
        if load.keep == "rest":
            ever = [c for era in self.eras for c in era.commits.values()]
            mine = [c for c in ever if c.fragment == load.fragment and peer.peer in c.included]
            self._require("P6", bool(mine), f"{peer.peer} gave up work that no commit used")

    def _saw_over(self, details: tuple[VirtualPeer, VirtualTrainer]) -> None:
        """A trainer whose run is over has the run's model, without a step of its own."""
        peer, trainer = details
        if trainer.machine.version >= 0:
            self._require(
                "P1", trainer.holds_the_anchor, f"{peer.peer} ends with another model than the run's"
            )

    def on_books(self, ledger: Ledger) -> None:
        """P7 to the sample: what the books say of a fragment is what it has learned from, no more and no less."""
        leases = ledger.leases
        fresh, self._fresh = self._fresh, set()
        strange = sorted(sample for sample in fresh if sample >= (leases.epoch, leases.reach(0).cursor))
        self._require("P7", not strange, f"{strange[:3]} were committed and never leased")
        for fragment, learned in enumerate(self.samples_committed):
            missing = leases.reach(fragment).missing
            lacks = {(epoch, place) for epoch, start, stop in missing for place in range(start, stop)}
            both = f"the books lack what fragment {fragment} learned: {sorted(lacks & learned)[:3]}"
            self._require("P7", lacks.isdisjoint(learned), both)
            # With no sample in both, equal counts mean that together they are all that was ever leased.
            counts = (
                f"{len(lacks)} lacking and {len(learned)} learned are not {leases.granted_samples} leased"
            )
            self._require("P7", len(lacks) + len(learned) == leases.granted_samples, f"{fragment}: {counts}")

    # ---- at the end --------------------------------------------------------------------------------------------

    def at_rest(self, peers: Iterable[VirtualPeer], is_founded: bool) -> None:
        """Nothing moves any more: every living peer at one version holds one state, bit for bit.

        But for a version 0 that is still to be founded anew: what is held of the one before will be replaced.
        """
        states: dict[tuple[int, int, int], bytes] = {}
        for peer in peers:
            for replica in peer.member.part.replicas.values() if peer.member.part is not None else ():
                counts = replica.held.version > 0 or (is_founded and replica.held.version == 0)
                if counts and set(replica.held.chunks.versions) == {replica.held.version}:
                    raw = peer.state.part(peer.anchor, replica.fragment.number).numpy().tobytes()
                    key = (peer.member.reports.era, replica.fragment.number, replica.held.version)
                    same = states.setdefault(key, raw) == raw
                    self._require("P1", same, f"{peer.peer} differs at the end")

    def _require(self, promise: str, holds: bool, text: str) -> None:
        self.checks += 1
        if not holds:
            raise Broken(f"{promise} is broken: {text}")


def _held_by(part: Replicas, fragment: int) -> int:
    """The version that it has of a fragment, which may be none of its own."""
    replica = part.replicas.get(fragment)
    return replica.held.version if replica is not None else NO_VERSION


def all_is_held(ledger: Ledger, peers: Iterable[VirtualPeer]) -> bool:
    """Of every fragment some living peer holds the run's version: nothing excuses a run that does not go on.

    But for a stage that nobody serves, even before anything was learned: nobody is moved to it.
    """
    parts = [peer.member.part for peer in peers if peer.member.part is not None]
    served = {fragment for part in parts for fragment in part.replicas}
    return (not ledger.learned and len(served) in (0, len(ledger.books))) or all(
        any(_held_by(part, fragment) >= book.version for part in parts)
        for fragment, book in enumerate(ledger.books)
    )


def _process_of(peer: VirtualPeer) -> str:
    return f"{peer.peer} {peer.me.process.hex()}"
