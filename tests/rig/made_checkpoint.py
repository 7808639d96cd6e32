"""Whole checkpoints of a tiny model, written as a peer's checkpoint thread writes them, without a run.

For tests of the store (tests/checkpoints/).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from farflung.checkpoints.checkpoint_manifest import CheckpointManifest, Saved, SavedFragment, shards_of
from farflung.checkpoints.store import PartFile, Store
from farflung.peer.identity import Identity
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.model_schema import Fragment, ModelSchema, TensorSpec, fragments_of
from farflung.protocol.outer_numbers import StateForm
from farflung.protocol.signing import statement_of

RUN_ID = bytes(range(16)).hex()
ELEMENTS, CHUNKS = 8, 5
MODEL = ModelSchema(
    tensors=(TensorSpec("w", (CHUNKS * ELEMENTS,), "float32", "param"),),
    chunk_elements=ELEMENTS,
    chunk_count=CHUNKS,
    first_plain_chunk=CHUNKS,
    frozen=bytes(32),
)
FORM = StateForm(ELEMENTS, parts=2)
ME = Identity.generate()


def state(version: int, model: ModelSchema = MODEL) -> list[bytes]:
    draw = random.Random(version)
    return [draw.randbytes(8 * model.chunk_elements) for _ in range(model.chunk_count)]


def unsigned(statement: bytes) -> bytes:
    return b""


def save(
    store: Store,
    version: int,
    era: int = 0,
    fragments: int = 2,
    run_id: str = RUN_ID,
    me: Identity = ME,
    prove: Callable[[bytes], bytes] = unsigned,
) -> Saved:
    chunks, saved = state(version), []
    draft = store.draft(run_id, era, version, me.peer_id, FORM)
    for fragment in fragments_of(CHUNKS, fragments):
        hashes = tuple(hash_bytes(chunks[chunk]).hex() for chunk in fragment.chunks)
        parts = files_of(fragment, hashes, chunks)
        draft.parts.add(parts)
        digest = root_of(bytes.fromhex(each) for each in hashes)
        proof = prove(statement_of(bytes.fromhex(run_id), era, fragment.number, version, digest))
        saved.append(SavedFragment(version, digest.hex(), 7, hashes, proof.hex()))
    draft.parts.finish(lambda seconds: None)
    manifest = CheckpointManifest(
        format=1,
        run="small",
        run_id=run_id,
        manifest="ab" * 32,
        era=era,
        version=version,
        incarnation=1,
        model=MODEL,
        fragments=tuple(saved),
        files=tuple(sorted(draft.parts.shards, key=lambda file: file.first)),
        writer=me.peer_id,
        key=me.public.hex(),
    ).signed(me.sign)
    draft.publish(manifest)
    return Saved(draft.folder, manifest)


def files_of(fragment: Fragment, hashes: tuple[str, ...], chunks: list[bytes]) -> list[PartFile]:
    found = []
    for first, count in shards_of(fragment.first, fragment.count, FORM):
        at = first - fragment.first
        found.append(PartFile(first, hashes[at : at + count], chunks.__getitem__, lambda chunks: None))
    return found
