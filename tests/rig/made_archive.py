"""An archive as a peer's own hand writes it, from a state that torch moves; without a network or a round.

For tests of its replay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from farflung.checkpoints.archive import Archive, RoundHead
from farflung.checkpoints.checkpoint_manifest import CheckpointManifest, SavedFragment, shards_of
from farflung.checkpoints.store import PartFile, Store
from farflung.collectives.round.effects import Install, Measure, Roll, Seal
from farflung.compression.plain_codecs import encode
from farflung.coordinator.batches.batch_mode import clipped
from farflung.coordinator.rounds.round_policy import Done
from farflung.optim.recipes import outer_of
from farflung.peer.identity import Identity
from farflung.peer.state.archive import Archiving
from farflung.peer.state.outer_state import OuterState
from farflung.protocol.digests import hash_bytes, root_of, split_hashes
from farflung.protocol.manifest import (
    CheckpointSection,
    Manifest,
    MergeSection,
    OuterSection,
    PipelineSection,
    RoundSection,
)
from farflung.protocol.model_schema import Fragment, ModelSchema, StageSpec
from farflung.protocol.round_words import Commit
from farflung.protocol.run_terms import Attached, Known
from farflung.protocol.signing import curve_key_of, statement_of

RUN_ID = bytes(range(16))
ELEMENTS, CHUNKS, FRAGMENTS = 65, 5, 2
MODEL = ModelSchema((), ELEMENTS, CHUNKS, first_plain_chunk=4, frozen=bytes(32))
MANIFEST = Manifest(
    round=RoundSection(gather_codec="int8", fragments=FRAGMENTS), checkpoint=CheckpointSection(every_rounds=3)
)
WITH_ADAMW = MANIFEST.model_copy(update={"outer": OuterSection(step="adamw", lr=0.01)})
# Three stages of two, three and one chunks; the last chunk of the second one holds buffers.
STAGED_MODEL = ModelSchema(
    (), ELEMENTS, 6, first_plain_chunk=6, frozen=bytes(32),
    stages=(StageSpec(0, 0, 2, 0), StageSpec(2, 0, 3, 1), StageSpec(4, 0, 1, 0)),
)  # fmt: skip
STAGED = Manifest(
    outer=OuterSection(step="adamw", lr=0.01),
    round=RoundSection(gather_codec="int8"),
    merge=MergeSection(policy="mean"),
    pipeline=PipelineSection(batch=8, stages=3, clip=15.0),
    checkpoint=CheckpointSection(every_rounds=3),
)
ME, HOST = Identity.generate(), Identity.generate()
RUN_KEY = curve_key_of(HOST.public)


class Kept:
    """A peer that keeps an archive, without a network: results come from a generator of random numbers."""

    def __init__(
        self,
        place: Path,
        host: Identity = HOST,
        manifest: Manifest = MANIFEST,
        model: ModelSchema = MODEL,
        stage: int | None = None,
    ) -> None:
        """`stage`: that it holds, of a model that is cut."""
        self.place, self.host, self.manifest, self.stage = str(place), host, manifest, stage
        self.told: list[str] = []
        self.chance = np.random.default_rng(1 + (stage or 0))
        self.attached = Attached(Known(manifest, RUN_ID), model, () if stage is None else (stage,))
        self.fragments = self.attached.held
        values_n = self.noise(sum(each.count for each in self.fragments) * ELEMENTS)
        rules, outer = manifest.round, outer_of(manifest)
        self.state = OuterState(values_n, model, rules, outer, held=self.fragments)
        self.hand = self.new_hand()
        self.era = 0

    def new_hand(self) -> Archiving:
        return Archiving(Archive(self.place), self.attached, lambda job, then: then(job()), self.say)

    def say(self, text: str, routine: bool = False, **facts: str) -> None:
        self.told.append(text)

    def noise(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self.chance.standard_normal(count).astype(np.float32))

    def roll(self, version: int, skipped: tuple[int, ...] = ()) -> None:
        """All fragments to this version; of `skipped` chunks the state is fetched."""
        for fragment in self.fragments:
            self.apply(fragment, *self.made(fragment, version), skipped)

    def apply(
        self, fragment: Fragment, payloads: list[bytes], commit: Commit, skipped: tuple[int, ...] = ()
    ) -> None:
        version = commit.version
        self.hand.on_commit(commit)
        for chunk, payload in zip(fragment.chunks, payloads, strict=True):
            roll = Roll(chunk, version, payload, commit.factor)
            self.state.roll(roll)
            fetched = Install(chunk, version, self.state.chunk_bytes(chunk))
            self.hand.changed(fetched if chunk in skipped else roll)
        digest = self.state.seal(fragment.number)
        seal = Seal(version=version, fragment=fragment.number)
        self.hand.sealed(seal, self.era, digest, self.state.hashes_of(fragment.chunks))

    def made(self, fragment: Fragment, version: int) -> tuple[list[bytes], Commit]:
        """The results of a round, and its commit."""
        payloads = [encode("int8", self.noise(ELEMENTS).numpy()) for _ in fragment.chunks]
        hashes = b"".join(map(hash_bytes, payloads))
        return payloads, Commit(version, version, (ME.peer_id,), (1.0,), hashes, "int8", fragment.number)

    def save(self, version: int, era: int = 0) -> None:
        """A checkpoint, as the run's coordinator signs it."""
        store, form = Store(self.place), self.manifest.state_form(ELEMENTS)
        draft = store.draft(RUN_ID.hex(), era, version, ME.peer_id, form, self.stage)
        saved = []
        for fragment in self.fragments:
            self.state.seal(fragment.number)
            mine = self.state.hashes_of(fragment.chunks)
            told = tuple(each.hex() for each in mine)
            for first, count in shards_of(fragment.first, fragment.count, form):
                at = first - fragment.first
                part = PartFile(first, told[at : at + count], self.state.chunk_bytes, lambda chunks: None)
                draft.parts.add([part])
            statement = statement_of(RUN_ID, era, fragment.number, version, root_of(mine))
            proof = (self.host.public + self.host.sign(statement)).hex()
            saved.append(SavedFragment(version, root_of(mine).hex(), version, told, proof))
        draft.parts.finish(lambda seconds: None)
        manifest = CheckpointManifest(
            format=1,
            run="small",
            run_id=RUN_ID.hex(),
            manifest=self.manifest.digest.hex(),
            era=era,
            version=version,
            incarnation=1,
            model=self.attached.model,
            stage=msgspec.UNSET if self.stage is None else self.stage,
            parts=3 if form.parts == 3 else msgspec.UNSET,
            fragments=tuple(saved),
            files=tuple(sorted(draft.parts.shards, key=lambda file: file.first)),
            writer=ME.peer_id,
            key=ME.public.hex(),
        )
        draft.publish(manifest.signed(ME.sign))

    def file(self, fragment: int, version: int) -> Path:
        return (
            Path(self.place) / f"{RUN_ID.hex()[:8]}-archive" / f"e0000-f{fragment:02d}-v{version:08d}.round"
        )

    def rewrite(
        self,
        fragment: int,
        version: int,
        change: Callable[[RoundHead, list[bytes]], tuple[RoundHead, list[bytes]]],
    ) -> None:
        """By somebody who takes care that the parts of the file fit together."""
        archive, run, key = Archive(self.place), RUN_ID.hex()[:8], (0, fragment, version)
        head, payloads = change(archive.head(run, key), list(archive.payloads(run, key)))
        self.file(fragment, version).unlink()
        hashes = b"".join(map(hash_bytes, payloads))
        commit = msgspec.structs.replace(head.commit, hashes=hashes)
        digest = root_of(split_hashes(head.chunks))
        archive.put(msgspec.structs.replace(head, commit=commit, digest=digest), payloads)


class KeptStages:
    """A peer in each stage, with one place for all of them; each version is one record of all stages."""

    def __init__(self, place: Path, manifest: Manifest = STAGED, model: ModelSchema = STAGED_MODEL) -> None:
        count = manifest.pipeline.stages
        self.peers = [Kept(place, HOST, manifest, model, stage) for stage in range(count)]
        self.place, self.clip = str(place), manifest.batch_clip
        self.factors: dict[int, float] = {}  # by version

    def roll(self, version: int, factor: float | None = None) -> None:
        """`factor`: what a coordinator that lies commits."""
        made = [(peer, *peer.made(peer.fragments[0], version)) for peer in self.peers]
        ends = [Done(commit, lengths=self._lengths(peer, payloads)) for peer, payloads, commit in made]
        for (peer, payloads, _), done in zip(made, clipped(ends, self.clip), strict=True):
            self.factors[version] = done.commit.factor if factor is None else factor
            commit = msgspec.structs.replace(done.commit, factor=self.factors[version])
            peer.apply(peer.fragments[0], payloads, commit)

    @staticmethod
    def _lengths(peer: Kept, payloads: list[bytes]) -> tuple[float, ...]:
        """As its holders tell them."""
        chunks = zip(peer.fragments[0].chunks, payloads, strict=True)
        measures = [Measure(1, chunk, hash_bytes(payload), payload) for chunk, payload in chunks]
        found = [peer.state.calculate(each) for each in measures]
        return tuple(each for each in found if isinstance(each, float))

    def save(self, version: int) -> None:
        for peer in self.peers:
            peer.save(version, peer.era)

    def go_back(self, chunks: list[bytes], era: int) -> None:
        """Each peer installs what it had saved."""
        rest = iter(chunks)
        for peer in self.peers:
            peer.era = era
            for chunk, raw in zip(peer.fragments[0].chunks, rest, strict=False):
                fetched = Install(chunk, 0, raw)
                peer.state.install(fetched)
                peer.hand.changed(fetched)

    def close(self) -> None:
        for peer in self.peers:
            peer.hand.close(finished=True)
            assert not peer.told
