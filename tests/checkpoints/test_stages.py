"""Checkpoints of a model that is cut into stages: each peer saves its own, and all of them are one model again."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.checkpoints.checkpoint_manifest import Saved, canonical, joined, parse
from farflung.checkpoints.store import Store
from farflung.collectives.round.effects import Install
from farflung.optim.recipes import outer_of
from farflung.peer.identity import Identity
from farflung.peer.machine.effects import SaveFragment
from farflung.peer.pipeline.parts import Part, Stage, survey_parts
from farflung.peer.pipeline.whole import WholeModel, whole_model
from farflung.peer.state.checkpoint_thread import Capture, CheckpointWriter, RunFacts, fits
from farflung.peer.state.outer_state import OuterState
from farflung.protocol.errors import CheckpointError
from farflung.protocol.manifest import Manifest
from farflung.protocol.run_terms import Attached, Known

SEED, STAGES, CUTS = 3, 3, [0, 2, 3, 5]
MANIFEST = Manifest.model_validate(
    {
        "run": {"seed": SEED},
        "round": {"chunk_kb": 1},
        "merge": {"policy": "mean"},
        "outer": {"step": "adamw"},
        "pipeline": {"batch": 4, "micro": 2, "stages": STAGES, "cuts": CUTS[1:-1]},
        "checkpoint": {"keep": 1},
    }
)
PARTS: list[Part] = [
    partial(nn.Linear, 8, 40),
    partial(nn.BatchNorm1d, 40),
    partial(nn.Linear, 40, 30),
    partial(nn.BatchNorm1d, 30),
    partial(nn.Linear, 30, 3),
]
ME = Identity.generate()
Say = Callable[..., tuple[int, str, str]]


def loss(logits: Tensor, riders: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits, riders["kind"])


ITEM = {"x": torch.zeros(8), "kind": torch.zeros((), dtype=torch.int64)}
KNOWN = Known(MANIFEST, bytes(range(16)))


@functools.cache
def whole_of_parts() -> WholeModel:  # not while tests are collected: to look at the parts imports a compiler
    return whole_model(survey_parts(PARTS, ITEM, ("x",), loss), ITEM, ("kind",), MANIFEST)


def attached(stage: int) -> Attached:
    return Attached(KNOWN, whole_of_parts().schema, (stage,))


def module(stage: int, version: int) -> nn.Module:
    """As the run has it at this version."""
    made = Stage.build(PARTS, CUTS[stage], CUTS[stage + 1], SEED)
    draw = torch.Generator().manual_seed(100 * version + stage)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=draw))
    return made


def state_of(stage: int, values: nn.Module | None = None) -> OuterState:
    layout, mine = whole_of_parts().layouts[stage], attached(stage)
    flat = torch.zeros(layout.total_elements)
    if values is not None:
        layout.write_anchor(values, flat)
    return OuterState(flat, whole_of_parts().schema, MANIFEST.round, outer_of(MANIFEST), held=mine.held)


def save(store: Store, version: int, *stages: int) -> None:
    for stage in stages:
        state, mine = state_of(stage, module(stage, version)), attached(stage)
        effect = SaveFragment(version, stage, state.seal(stage), 7, 0)
        writer = CheckpointWriter(store, RunFacts(mine, 1), effect, ME, lambda seconds: None)
        chunks = mine.held[0].chunks
        capture = Capture(chunks, state.chunk_bytes, lambda job, then: then(job()))
        assert writer.add(effect, capture, tuple(state.hashes_of(chunks))), "with its own stage it is done"


def found(store: Store) -> list[Saved]:
    listing = store.list_saved()
    assert not listing.problems and not listing.unfinished
    return listing.complete


def there(store: Store) -> list[tuple[int, tuple[int, ...]]]:
    """Version, and the stages that are missing."""
    return [(each.manifest.version, each.missing) for each in joined(found(store))]


def test_P1_a_stage_is_read_back_to_the_last_bit_and_only_by_who_lacks_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    save(store, 8, 0, 1, 2)
    for saved in found(store):
        stage = saved.manifest.first_fragment
        due, other = state_of(stage, module(stage, 8)), state_of(stage)
        digest = due.seal(stage)
        assert not store.problems_of(saved) and saved.manifest.digest_of == {stage: digest}
        for number in range(STAGES):
            known = {number: frozenset({(8, digest)})}
            assert fits(saved.manifest, known, whole_of_parts().schema) == (number == stage)
        for chunk, raw in store.chunks(saved, set(attached(stage).held[0].chunks)):
            other.install(Install(chunk, 8, raw))
        assert other.seal(stage) == digest


def test_a_stage_that_is_ahead_costs_the_run_no_whole_checkpoint(tmp_path: Path) -> None:
    store = Store(str(tmp_path))  # of each one version is kept
    save(store, 8, 0, 1, 2)
    save(store, 16, 0, 2)
    save(store, 24, 0)
    assert there(store) == [(24, (1, 2)), (16, (0, 1)), (8, ())]
    save(store, 24, 1)
    assert there(store) == [(24, (2,)), (16, (0, 1)), (8, ())]
    save(store, 24, 2)
    assert there(store) == [(24, ())], "the newest one is whole, and nothing older is needed"


def test_a_place_of_one_stage_does_not_grow_without_end(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for version in (8, 16, 24):
        save(store, version, 1)
    assert there(store) == [(24, (0, 2))]


def test_P8_a_manifest_that_says_another_stage_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    save(store, 8, 0, 1, 2)
    good = {saved.manifest.first_fragment: saved.manifest for saved in found(store)}
    for stage, wrong in ((0, 1), (1, 0), (2, 7)):
        raw = canonical(msgspec.structs.replace(good[stage], stage=wrong).signed(ME.sign))
        with pytest.raises(CheckpointError, match=r"fragment|stage|chunks"):
            parse(raw, "x")
    for changed in ({"stage": msgspec.UNSET}, {"fragments": good[0].fragments * 2}):
        raw = canonical(msgspec.structs.replace(good[0], **changed).signed(ME.sign))
        with pytest.raises(CheckpointError, match="stages"):
            parse(raw, "x")


# ---- the command line ------------------------------------------------------------------------------------------


@pytest.fixture
def say(say: Say) -> Say:
    return lambda *words: say("checkpoint", *words)


def test_ls_and_verify_say_which_stages_are_missing(tmp_path: Path, say: Say) -> None:
    store = Store(str(tmp_path))
    save(store, 8, 0, 1, 2)
    save(store, 16, 2)
    code, out, _ = say("ls", tmp_path)
    newer, older = out.splitlines()
    assert code == 0 and "all 3 stages" in older and "stages 0 and 1 of 3 are missing" in newer
    code, out, err = say("ls", "--verify", tmp_path)
    assert code == 0 and out.count("good") == 2 and "missing" in out and not err
    facts = json.loads(say("ls", tmp_path, "--json")[1])["checkpoints"]
    assert [each["missing"] for each in facts] == [[0, 1], []] and facts[1]["stages"] == 3
    assert len(facts[1]["folders"]) == 3 and len(facts[1]["digests"]) == 3
    damaged = tmp_path / facts[1]["folders"]["1"] / "chunks-00003.safetensors"
    [file] = [damaged] if damaged.exists() else sorted(damaged.parent.glob("*.safetensors"))[:1]
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    code, out, err = say("ls", "--verify", tmp_path)
    assert code == 2 and "damaged  version 8" in out and f"{damaged.parent.name}/{file.name}: damaged" in err


def test_export_joins_the_stages_into_the_model(tmp_path: Path, say: Say) -> None:
    place, out = tmp_path / "there", tmp_path / "model.safetensors"
    store = Store(str(place))
    save(store, 8, 0, 1, 2)
    save(store, 16, 0, 2)
    code, said, err = say("export", place, "--out", out)
    assert code == 0 and "wrote version 8 of" in said and "joined from 3 stages" in said
    assert "not used: version 16: stage 1 of 3 is missing" in err
    due = {name: tensor for stage in range(STAGES) for name, tensor in module(stage, 8).state_dict().items()}
    tensors = safetensors.torch.load_file(out)
    assert set(due) - set(tensors) == {"1.num_batches_tracked", "3.num_batches_tracked"}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, due[name]), name
    whole = Stage.build(PARTS, 0, len(PARTS), SEED)
    assert not whole.load_state_dict(tensors, strict=False).unexpected_keys
    code, _, err = say("export", place, "--out", tmp_path / "no", "--version", "16")
    assert code == 2 and "stage 1 of 3 is missing" in err and "-v00000016-s01" in err and err.count("\n") == 1


def test_stages_of_places_of_their_own_are_copied_together(tmp_path: Path, say: Say) -> None:
    for stage in range(STAGES):
        save(Store(str(tmp_path / f"peer{stage}")), 8, stage)
    code, _, err = say("export", tmp_path / "peer1", "--out", tmp_path / "no")
    assert code == 2 and "stages 0 and 2 of 3 are missing" in err
    (tmp_path / "all").mkdir()
    for stage in range(STAGES):
        for folder in (tmp_path / f"peer{stage}").iterdir():
            folder.rename(tmp_path / "all" / folder.name)
    assert say("export", tmp_path / "all", "--out", tmp_path / "model.safetensors")[0] == 0
