"""Kills a process that writes checkpoints, again and again, at random moments; the newest one must stay readable.

    python benchmarks/checkpoint_kills.py [KILLS] [FOLDER]

Each writer is a fork that writes checkpoints in a loop and keeps two; it lives for up to 40 ms.  After each kill
every file of the newest checkpoint is read and compared with its hashes.  Ends with 1 at the first that is not good.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from farflung.checkpoints.manifest import FORMAT, CheckpointManifest, SavedFragment, shards_of
from farflung.checkpoints.store import Store
from farflung.collectives.digests import root_of
from farflung.coordinator.schema import ModelSchema, TensorSpec
from farflung.peer.identity import Identity

RUN_ID = bytes(range(16)).hex()
ELEMENTS, CHUNKS, LONGEST_LIFE_S = 4096, 24, 0.04
MODEL = ModelSchema(
    tensors=(TensorSpec("w", (CHUNKS * ELEMENTS,), "float32", "param"),),
    chunk_elements=ELEMENTS,
    chunk_count=CHUNKS,
    first_plain_chunk=CHUNKS,
    frozen=bytes(32),
)


def write(store: Store, version: int, me: Identity) -> None:
    draft = store.draft(RUN_ID, 0, version, me.peer_id)
    for first, count in shards_of(0, CHUNKS, ELEMENTS):
        chunks = (bytes([version % 251]) * 8 * ELEMENTS for _ in range(count))
        draft.write_shard(first, count, ELEMENTS, chunks)
    hashes = tuple(draft.hashes[chunk] for chunk in range(CHUNKS))
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
        files=tuple(draft.shards),
        writer=me.peer_id,
        key=me.public.hex(),
    )
    draft.publish(manifest.signed(me.sign))


def write_for_ever(store: Store, me: Identity) -> None:
    store.sweep(RUN_ID, me.peer_id)
    complete = store.look(RUN_ID).complete
    version = complete[0].manifest.version if complete else 0
    while True:
        version += 1
        write(store, version, me)
        store.retain(RUN_ID, 2)


def main(kills: int, folder: str) -> int:
    store, me, draw = Store(folder), Identity.generate(), random.Random(kills)
    write(store, 1, me)
    unfinished = 0
    for number in range(kills):
        writer = os.fork()
        if writer == 0:
            try:
                write_for_ever(store, me)
            finally:
                os._exit(1)  # the fork must not go on with its parent's work
        time.sleep(draw.uniform(0, LONGEST_LIFE_S))  # the moment of death is what is tried here
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        found = store.look(RUN_ID)
        problems = found.problems + (
            store.problems_of(found.complete[0]) if found.complete else ["none is left"]
        )
        unfinished += len(found.unfinished)
        if problems:
            print(f"after kill {number + 1}: {'; '.join(problems)}")
            return 1
    newest = store.look(RUN_ID).complete[0].manifest.version
    print(
        f"{kills} kills, {unfinished} of them in the middle of a checkpoint, {newest} versions: 0 unreadable"
    )
    return 0


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    if len(sys.argv) > 2:
        sys.exit(main(count, sys.argv[2]))
    with tempfile.TemporaryDirectory() as place:
        sys.exit(main(count, str(Path(place) / "store")))
