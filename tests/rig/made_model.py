"""A checkpoint of a real model, as a run signs it, and the data folder of the coordinator of that run; no network.

For tests of what leaves a run: exports, model cards, a hub.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import UNSET
from torch import nn

from farflung.checkpoints.checkpoint_manifest import CheckpointManifest, Saved, SavedFragment, shards_of
from farflung.checkpoints.store import PartFile, Store
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.run.effects import KeepEvidence
from farflung.coordinator.run_files import ProvenanceFile
from farflung.peer.identity import Identity
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.messages import Sent
from farflung.protocol.outer_numbers import StateForm
from farflung.protocol.round_words import Commit
from farflung.protocol.signed_words import SignedList
from farflung.protocol.signing import statement_of

RUN_ID = bytes(range(16))
ELEMENTS = 256
ANN, BOB = Identity.generate(), Identity.generate()


@dataclass
class MadeRun:
    """`place`: its checkpoints; `data`: what its coordinator keeps."""

    folder: Path
    name: str = "little-llama"

    def __post_init__(self) -> None:
        self.data = self.folder / "run.data"
        self.data.mkdir(parents=True)
        self.place = str(self.folder / "kept")
        self._keys = load_or_create(self.data)
        assert self._keys.signing is not None, "made just now"
        self._rows = ProvenanceFile(self.data / "provenance.jsonl", RUN_ID, self._keys.signing)
        rules = {"min_peers": 1, "fragments": 1, "rounds": 4}
        self._tell("start", role="coordinator", run=self.name, run_id=RUN_ID.hex(), rules=rules)

    @property
    def url(self) -> str:
        return str(JoinUrl("host", 1, self.name, self._keys.public_raw))

    def commits(self, version: int, digest: bytes) -> None:
        """By ann and bob, in the journal and in the provenance."""
        members = (ANN.peer_id, BOB.peer_id)
        tokens = {ANN.peer_id: 3000, BOB.peer_id: 1000}
        self._tell(
            "committed", pos=version, round=version, version=version, fragment=0, members=members, era=0,
            weights=[0.75, 0.25], result="aa", loss=4.0 / version, tokens=4000, tokens_by=tokens, steps=20,
            seconds=2.0, tx_bytes=1_000_000, wall=1_700_000_000.0 + 3600 * version,
        )  # fmt: skip
        self._tell("digest", pos=version, version=version, fragment=0, digest=digest.hex())
        commit = Commit(version, version, members, (0.75, 0.25), hashes=bytes(32), codec="fp32")
        said = [SignedList(each.public, _sent(version, tokens[each.peer_id])) for each in (ANN, BOB)]
        self._rows.keep(KeepEvidence(commit, tuple(said)))

    def saves(self, model: nn.Module, version: int, terms: bytes = b"", of: bytes = b"") -> Saved:
        """The model as it is now, signed by the run, committed.

        `terms`: of the run, where they are told; `of`: what is signed to be their digest is that of something else.
        """
        layout = ModelLayout.of(model, ELEMENTS)
        flat = torch.zeros(layout.total_elements)
        layout.write_anchor(model, flat)
        chunks = [part.numpy().tobytes() * 2 for part in flat.view(-1, ELEMENTS)]
        hashes = tuple(hash_bytes(chunk).hex() for chunk in chunks)
        digest = root_of(bytes.fromhex(each) for each in hashes)
        form = StateForm(ELEMENTS, parts=2)
        draft = Store(self.place).draft(RUN_ID.hex(), 0, version, ANN.peer_id, form)
        draft.parts.add(
            [
                PartFile(first, hashes[first : first + count], chunks.__getitem__, lambda chunks: None)
                for first, count in shards_of(0, len(chunks), form)
            ]
        )
        draft.parts.finish(lambda seconds: None)
        proof = self._keys.prove(statement_of(RUN_ID, 0, 0, version, digest))
        manifest = CheckpointManifest(
            format=1, run=self.name, run_id=RUN_ID.hex(), era=0,
            manifest=hash_bytes(of or terms).hex() if terms else "ab" * 32,
            terms=terms.decode() if terms else UNSET, version=version, incarnation=1,
            model=layout.model_schema(model),
            fragments=(SavedFragment(version, digest.hex(), version, hashes, proof.hex()),),
            files=tuple(sorted(draft.parts.shards, key=lambda file: file.first)),
            writer=ANN.peer_id, key=ANN.public.hex(),
        ).signed(ANN.sign)  # fmt: skip
        draft.publish(manifest)
        self.commits(version, digest)
        return Saved(draft.folder, manifest)

    def _tell(self, event: str, **fields: object) -> None:
        line = {"at": 0.0, "wall": 0.0, "pid": 1, "event": event, **fields}
        with (self.data / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _sent(round_no: int, tokens: int) -> Sent:
    return Sent(
        session=bytes(16), seq=1, round_no=round_no, hashes=b"", tokens=tokens, steps=10, loss=None, used=(), seat=0,
        counted=b"", signature=b"",
    )  # fmt: skip
