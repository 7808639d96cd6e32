"""One checkpoint on its way into the store: fragment after fragment, and the manifest when all are there.

Whoever shares the place writes a part of it (checkpoints/parts.py); the manifest is written by whoever finds it whole.

Used in the checkpoint thread (checkpoint_thread.py).  What it writes is checked against the digests that the
coordinator confirmed.  Must not know threads, nor when a checkpoint is due.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import UNSET

from farflung.checkpoints.checkpoint_manifest import FORMAT, CheckpointManifest, SavedFragment, shards_of
from farflung.checkpoints.parts import PartFile
from farflung.checkpoints.store import CheckpointDraft, Store
from farflung.peer.identity import Identity
from farflung.peer.machine.effects import SaveFragment
from farflung.peer.state.capture import Capture
from farflung.protocol.digests import root_of
from farflung.protocol.errors import CheckpointError
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import Fragment, ModelSchema
from farflung.protocol.outer_numbers import ADAMW_PARTS
from farflung.protocol.run_terms import Attached, Terms


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint says of its run."""

    attached: Attached
    incarnation: int  # of the coordinator that this peer followed when the fragment was taken
    terms: Terms | None = None  # where its host has changed any

    @property
    def manifest(self) -> Manifest:
        return self.attached.known.manifest

    @property
    def run_id(self) -> bytes:
        return self.attached.known.run_id

    @property
    def model(self) -> ModelSchema:
        return self.attached.model

    def amended(self, version: int) -> int:
        """The amendment that held in the round that made it; 0: none did."""
        return self.terms.number_at(version - 1) if self.terms is not None else 0

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """Of the whole model."""
        return self.attached.fragments

    @property
    def stage(self) -> int | None:
        """Of a model that is cut into several: the one that this peer holds."""
        return self.attached.stages[0] if self.attached.stages else None


class CheckpointWriter:
    """`pause` waits so many seconds, and raises when nobody wants the checkpoint any more."""

    def __init__(
        self,
        store: Store,
        facts: RunFacts,
        first: SaveFragment,
        identity: Identity,
        pause: Callable[[float], None],
    ) -> None:
        self.key = (first.era, first.version)
        self._store, self._facts, self._identity, self._pause = store, facts, identity, pause
        self._saved: dict[int, SavedFragment] = {}
        self._seen: set[int] = set()  # fragments that need not be written
        run_id = facts.run_id.hex()
        store.sweep(run_id, identity.peer_id)
        # In a shared store another peer may have been faster: its checkpoint of this version is as good as mine.
        self._there = {
            d
            for s in store.list_saved(run_id).complete
            if s.manifest.age == self.key
            for d in s.manifest.digests
        }
        form = facts.attached.form
        self._draft: CheckpointDraft = store.draft(
            run_id, first.era, first.version, identity.peer_id, form, facts.stage
        )

    def add(self, effect: SaveFragment, capture: Capture, hashes: tuple[bytes, ...]) -> bool:
        """Write of a fragment what others leave; True when the checkpoint is whole.  `hashes`: of its chunks."""
        facts, fragment = self._facts, self._facts.fragments[effect.fragment]
        if effect.digest in self._there:
            self._seen.add(effect.fragment)
            capture.drop()
            return len(self._seen) == len(facts.attached.held)
        if root_of(hashes) != effect.digest:
            raise CheckpointError(
                f"the copy of fragment {effect.fragment} is not the state that was confirmed"
            )
        told = tuple(each.hex() for each in hashes)
        self._saved[effect.fragment] = SavedFragment(
            effect.version, effect.digest.hex(), effect.round_no, told, effect.proof.hex()
        )
        parts = []
        for first, count in shards_of(fragment.first, fragment.count, facts.attached.form):
            at = first - fragment.first
            parts.append(PartFile(first, told[at : at + count], capture.take, capture.skip))
        self._draft.parts.add(parts)
        if len(self._saved) < len(facts.attached.held):
            return False
        if self._draft.parts.finish(self._pause):
            self._draft.publish(self._manifest().signed(self._identity.sign))
        self._store.retain(facts.run_id.hex(), facts.manifest.checkpoint.keep)
        return True

    def give_up(self) -> None:
        self._draft.parts.clear()

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
            stage=UNSET if facts.stage is None else facts.stage,
            parts=3 if facts.attached.form.parts == ADAMW_PARTS else UNSET,
            amended=facts.amended(version) or UNSET,
            fragments=tuple(self._saved[number] for number in sorted(self._saved)),
            files=tuple(sorted(self._draft.parts.shards, key=lambda file: file.first)),
            writer=self._identity.peer_id,
            key=self._identity.public.hex(),
        )
