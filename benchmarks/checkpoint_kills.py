"""Kills processes that write checkpoints, again and again, at random moments; the newest one must stay readable.

    python benchmarks/checkpoint_kills.py [KILLS] [FOLDER]

Two writers share the folder.  Each is a fork that writes its part of checkpoints in a loop and keeps two; it lives for
up to 80 ms, and the other one goes on without it.  After each kill every file of the newest checkpoint is read and
compared with its hashes.  Goes on until so many kills hit the middle of a checkpoint; ends with 1 at the first
checkpoint that is not good.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from farflung.checkpoints.checkpoint_manifest import (
    FORMAT,
    CheckpointManifest,
    SavedFragment,
    chunk_hash,
    shards_of,
)
from farflung.checkpoints.store import PartFile, Store
from farflung.peer.identity import Identity
from farflung.protocol.digests import root_of
from farflung.protocol.errors import CheckpointError, StoreError
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.outer_numbers import StateForm

RUN_ID = bytes(range(16)).hex()
ELEMENTS, CHUNKS, LONGEST_LIFE_S = 4096, 24, 0.08
MODEL = ModelSchema(
    tensors=(TensorSpec("w", (CHUNKS * ELEMENTS,), "float32", "param"),),
    chunk_elements=ELEMENTS,
    chunk_count=CHUNKS,
    first_plain_chunk=CHUNKS,
    frozen=bytes(32),
)
FORM = StateForm(ELEMENTS, parts=2)


def write(store: Store, version: int, me: Identity) -> None:
    raw = bytes([version % 251]) * FORM.size_bytes
    hashes = (chunk_hash(raw),) * CHUNKS
    draft = store.draft(RUN_ID, 0, version, me.peer_id, FORM)
    draft.parts.add(
        [
            PartFile(first, hashes[first : first + count], lambda chunk: raw, lambda chunks: None)
            for first, count in shards_of(0, CHUNKS, FORM)
        ]
    )
    if not draft.parts.finish(lambda _: time.sleep(0.0002)):
        return
    digest = root_of(bytes.fromhex(each) for each in hashes).hex()
    manifest = CheckpointManifest(
        format=FORMAT,
        run="kills",
        run_id=RUN_ID,
        manifest="00" * 32,
        era=0,
        version=version,
        incarnation=1,
        model=MODEL,
        fragments=(SavedFragment(version, digest, 0, hashes),),
        files=tuple(sorted(draft.parts.shards, key=lambda file: file.first)),
        writer=me.peer_id,
        key=me.public.hex(),
    )
    draft.publish(manifest.signed(me.sign))


def newest(store: Store) -> int:
    complete = store.list_saved(RUN_ID).complete
    return complete[0].manifest.version if complete else 0


def write_for_ever(store: Store, me: Identity) -> None:
    while True:
        # The other one may be done with this version, or remove what is old, in the middle of mine.
        with contextlib.suppress(StoreError, CheckpointError):
            version = newest(store) + 1
            store.sweep(RUN_ID, me.peer_id, (0, version))
            write(store, version, me)
            store.retain(RUN_ID, 2)


def start(store: Store, me: Identity) -> int:
    writer = os.fork()
    if writer == 0:
        try:
            write_for_ever(store, me)
        finally:
            os._exit(1)  # the fork must not go on with its parent's work
    return writer


def stop(writer: int) -> None:
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)


def main(kills: int, folder: str) -> int:
    store, draw = Store(folder), random.Random(kills)
    identities = [Identity.generate() for _ in range(2)]
    write(store, 1, identities[0])
    writers = [start(Store(folder), me) for me in identities]
    killed = in_the_middle = together = 0
    try:
        while in_the_middle < kills:
            time.sleep(draw.uniform(0, LONGEST_LIFE_S))  # the moment of death is what is tried here
            # Mostly one dies and the other goes on; now and then both, and what lies there then is looked at in peace.
            dying = [0, 1] if draw.random() < 0.5 else [draw.randrange(2)]
            for number in dying:
                stop(writers[number])
            killed += 1
            if len(dying) == 2:
                together += 1
                found = store.list_saved(RUN_ID)
                problems = found.problems + (
                    store.problems_of(found.complete[0]) if found.complete else ["none is left"]
                )
                in_the_middle += bool(found.unfinished)
                if problems:
                    print(f"after kill {killed}: {'; '.join(problems)}")
                    return 1
            for number in dying:
                writers[number] = start(Store(folder), identities[number])
    finally:
        for writer in writers:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                stop(writer)
    shared = [s for s in store.list_saved(RUN_ID).complete if len({f.writer for f in s.manifest.files}) > 1]
    print(
        f"{killed} kills, {together} of all writers, {in_the_middle} of those in the middle of a checkpoint, "
        f"{newest(store)} versions, {len(shared)} of the last {len(store.list_saved(RUN_ID).complete)} by both: "
        "0 unreadable"
    )
    return 0


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    if len(sys.argv) > 2:
        sys.exit(main(count, sys.argv[2]))
    with tempfile.TemporaryDirectory() as place:
        sys.exit(main(count, str(Path(place) / "store")))
