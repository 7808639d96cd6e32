"""A checkpoint of a real outer state: written whole, read back to the same bits, whatever parts the state has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from farflung.checkpoints.checkpoint_manifest import MANIFEST_NAME
from farflung.checkpoints.export import tensors_of
from farflung.checkpoints.store import Store
from farflung.collectives.round.effects import Install, Roll
from farflung.compression.plain_codecs import encode
from farflung.optim.recipes import outer_of
from farflung.peer.identity import Identity
from farflung.peer.machine.effects import SaveFragment
from farflung.peer.state.checkpoint_thread import Capture, CheckpointWriter, RunFacts
from farflung.peer.state.outer_state import OuterState
from farflung.protocol.manifest import Manifest, OuterSection, RoundSection
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.run_terms import Attached, Known
from rig.amended import FIRST, PERIOD_10, terms_of

ELEMENTS, CHUNKS, VERSION = 6, 5, 3
MODEL = ModelSchema((TensorSpec("w", (28,), "float32", "param"),), ELEMENTS, CHUNKS, CHUNKS, bytes(32))
OUTERS = {"nesterov": OuterSection(), "adamw": OuterSection(step="adamw")}


def manifest_of(step: str) -> Manifest:
    return Manifest(outer=OUTERS[step], round=RoundSection(fragments=2, codec="fp32", gather_codec="fp32"))


def at_version(manifest: Manifest) -> OuterState:
    state = OuterState(torch.arange(30.0), MODEL, manifest.round, outer_of(manifest))
    for version in range(1, VERSION + 1):
        for chunk in range(CHUNKS):
            payload = encode(
                "fp32", torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(chunk)).numpy()
            )
            state.roll(Roll(chunk, version, payload))
    return state


def saved(place: Path, manifest: Manifest, state: OuterState) -> Store:
    attached, store, writer = Attached(Known(manifest, bytes(16)), MODEL), Store(str(place)), None
    for fragment in attached.fragments:
        digest = state.seal(fragment.number)
        effect = SaveFragment(VERSION, fragment.number, digest, 0, 0)
        writer = writer or CheckpointWriter(
            store, RunFacts(attached, 1), effect, Identity.generate(), lambda seconds: None
        )
        chunks = fragment.chunks
        capture = Capture(chunks, state.chunk_bytes, lambda job, then: then(job()))
        whole = writer.add(effect, capture, tuple(state.hashes_of(chunks)))
    assert whole
    return store


@pytest.mark.parametrize("step", OUTERS)
def test_P1_what_is_read_back_is_the_state_to_the_last_bit(tmp_path: Path, step: str) -> None:
    manifest = manifest_of(step)
    state, other = at_version(manifest), at_version(manifest)
    store = saved(tmp_path, manifest, state)
    [found] = store.list_saved().complete
    assert not store.problems_of(found) and found.manifest.form == manifest.state_form(ELEMENTS)
    other.restart_moments()
    for chunk, raw in store.chunks(found):
        other.install(Install(chunk, VERSION, raw))
    assert [other.seal(0), other.seal(1)] == list(found.manifest.digests) == list(state.digests.values())
    exported = tensors_of(found.manifest.model, store.chunks(found)).tensors["w"]
    assert exported.numpy().tobytes() == b"".join(state.chunk_bytes(c)[:24] for c in range(CHUNKS))[: 28 * 4]


@pytest.mark.parametrize(
    ("step", "moments"), [("nesterov", {"momentum"}), ("adamw", {"momentum", "second_moment"})]
)
def test_any_tool_can_read_all_parts(tmp_path: Path, step: str, moments: set[str]) -> None:
    manifest = manifest_of(step)
    state = at_version(manifest)
    store = saved(tmp_path, manifest, state)
    [found] = store.list_saved().complete
    tensors = load_file(tmp_path / found.folder / found.manifest.files[0].name)
    names = {"params", *moments}
    assert {name.partition(".")[2] for name in tensors} == names
    parts = [tensors[f"00000.{name}"] for name in ("params", "momentum", "second_moment") if name in names]
    assert b"".join(part.numpy().tobytes() for part in parts) == state.chunk_bytes(0)
    raw = (tmp_path / found.folder / MANIFEST_NAME).read_bytes()
    assert (b'"parts":3' in raw) == (step == "adamw"), "older readers know no such key"


def test_a_checkpoint_says_which_amendment_made_its_version() -> None:
    attached = Attached(Known(FIRST, bytes(16)), MODEL)
    facts = RunFacts(attached, 1, terms_of((2, PERIOD_10)))
    assert [facts.amended(version) for version in (0, 2, 3)] == [0, 0, 1]
    assert RunFacts(attached, 1).amended(3) == 0
