"""One checkpoint on its way into the store: fragment after fragment, and the manifest when all are there.

Used in the checkpoint thread (checkpointing.py).  What it writes is checked against the digests that the
coordinator confirmed.  Must not know threads, nor when a checkpoint is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from farflung.checkpoints.manifest import FORMAT, CheckpointManifest, SavedFragment, shards_of
from farflung.checkpoints.store import Draft, Store
from farflung.collectives.digests import root_of
from farflung.collectives.errors import CheckpointError
from farflung.collectives.fragments import Fragment, fragments_of
from farflung.coordinator.manifest import Manifest
from farflung.coordinator.schema import ModelSchema
from farflung.peer.capture import Capture
from farflung.peer.effects import SaveFragment
from farflung.peer.identity import Identity


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint says of its run."""

    manifest: Manifest
    run_id: bytes
    incarnation: int
    model: ModelSchema

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return fragments_of(self.model.chunk_count, self.manifest.round.fragments)


class CheckpointWriter:
    def __init__(self, store: Store, facts: RunFacts, first: SaveFragment, identity: Identity) -> None:
        self.key = (first.era, first.version)
        self._store, self._facts, self._identity = store, facts, identity
        self._saved: dict[int, SavedFragment] = {}
        self._seen: set[int] = set()  # fragments that need not be written
        run_id = facts.run_id.hex()
        store.sweep(run_id, identity.peer_id)
        # In a shared store another peer may have been faster: its checkpoint of this version is as good as mine.
        self._there = {
            d for s in store.look(run_id).complete if s.manifest.age == self.key for d in s.manifest.digests
        }
        self._draft: Draft = store.draft(run_id, first.era, first.version, identity.peer_id)

    def add(self, effect: SaveFragment, capture: Capture) -> bool:
        """Write a fragment; True when that made the checkpoint whole."""
        facts, fragment = self._facts, self._facts.fragments[effect.fragment]
        if effect.digest in self._there:
            self._seen.add(effect.fragment)
            capture.drop()
            return len(self._seen) == len(facts.fragments)
        elements = facts.model.chunk_elements

        def copies(first: int, count: int) -> Iterator[bytes]:
            return (capture.take(chunk) for chunk in range(first, first + count))

        for first, count in shards_of(fragment.first, fragment.count, elements):
            self._draft.write_shard(first, count, elements, copies(first, count))
        hashes = tuple(self._draft.hashes[chunk] for chunk in fragment.chunks)
        if root_of(bytes.fromhex(each) for each in hashes) != effect.digest:
            raise CheckpointError(
                f"the copy of fragment {effect.fragment} is not the state that was confirmed"
            )
        self._saved[effect.fragment] = SavedFragment(
            effect.version, effect.digest.hex(), effect.round_no, hashes
        )
        if len(self._saved) < len(facts.fragments):
            return False
        self._draft.publish(self._manifest().signed(self._identity.sign))
        self._store.retain(facts.run_id.hex(), facts.manifest.checkpoint.keep)
        return True

    def _manifest(self) -> CheckpointManifest:
        facts, (era, version) = self._facts, self.key
        return CheckpointManifest(
            format=FORMAT,
            run=facts.manifest.run.name,
            run_id=facts.run_id.hex(),
            manifest=facts.manifest.digest.hex(),
            era=era,
            version=version,
            incarnation=facts.incarnation,
            model=facts.model,
            fragments=tuple(self._saved[number] for number in sorted(self._saved)),
            files=tuple(sorted(self._draft.shards, key=lambda file: file.first)),
            writer=self._identity.peer_id,
            key=self._identity.public.hex(),
        )
