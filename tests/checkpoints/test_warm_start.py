"""What a run begins with: a checkpoint or a file, by the names of its tensors, checked before anything counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from farflung.checkpoints.checkpoint_manifest import MANIFEST_NAME
from farflung.checkpoints.store import Store
from farflung.checkpoints.warm_start import as_fp32, beginning, hash_at
from farflung.console.run_toml import description
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import CheckpointError, StoreError, UserError
from farflung.protocol.manifest import Manifest, StartSection
from farflung.protocol.model_schema import ModelSchema, StageSpec, TensorSpec
from rig.made_checkpoint import MODEL, RUN_ID, save


class Net(nn.Module):
    """With all that a state dict may have: tied weights, buffers to be averaged, and one that counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


def schema_of(model: nn.Module, chunk_elements: int = 8) -> ModelSchema:
    return ModelLayout.of(model, chunk_elements).model_schema(model)


def written(path: Path, tensors: Mapping[str, Tensor]) -> StartSection:
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, path)
    return pinned(path)


def pinned(path: Path | str, momentum: str = "fresh") -> StartSection:
    return StartSection.model_validate({"from": str(path), "hash": hash_at(str(path)), "momentum": momentum})


def placed(
    start: StartSection, model: ModelSchema, held: slice = slice(None), parts: int = 2, is_own: bool = True
) -> np.ndarray:
    """The state that comes of it, as a peer with these fragments lays it out.  `is_own`: its owner names the place."""
    fragments = model.fragments(len(model.stages) or 1)[held]
    count = sum(each.count for each in fragments) * model.chunk_elements
    flat = np.zeros((parts, count), np.float32)
    for cells in beginning(start, model, fragments, as_nobody=not is_own):
        flat[cells.part, cells.at : cells.at + len(cells.values)] = cells.values
    return flat


# ---- a file of tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_file_gives_the_state_that_a_founder_with_that_model_would_write(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = Net()
    values = {name: t.to(dtype) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    start = written(tmp_path / "a.safetensors", values)
    layout = ModelLayout.of(model, 8)
    model.load_state_dict(values)
    expected = torch.empty(layout.total_elements)
    layout.write_anchor(model, expected)
    found = placed(start, schema_of(model))
    assert found[0].tobytes() == expected.numpy().tobytes() and not found[1].any()


def test_a_tied_weight_may_lie_under_its_other_name(tmp_path: Path) -> None:
    model = Net()
    values = model.state_dict()
    both = placed(written(tmp_path / "a.safetensors", values), schema_of(model))
    del values["embed.weight"]
    assert (placed(written(tmp_path / "b.safetensors", values), schema_of(model)) == both).all()


def test_a_file_that_does_not_fit_the_model_says_in_one_line_why(tmp_path: Path) -> None:
    model, path = Net(), tmp_path / "a.safetensors"
    schema = schema_of(model)

    def told(**changes: Tensor | None) -> str:
        values = model.state_dict() | {name.replace("__", "."): each for name, each in changes.items()}
        start = written(path, {name: each for name, each in values.items() if each is not None})
        with pytest.raises(UserError) as caught:
            placed(start, schema)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        return str(caught.value)

    assert "it has no tensor 'norm.bias', which the run's model has" in told(norm__bias=None)
    assert "'norm.bias' is [4] there, [3] in the run's model" in told(norm__bias=torch.zeros(4))
    assert "'more' is no tensor of the run's model" in told(more=torch.zeros(1))
    nan = torch.tensor([0.0, float("nan"), 0.0])
    assert "'norm.bias' has values that are no numbers" in told(norm__bias=nan)
    huge = torch.full((3,), 1e300, dtype=torch.float64)
    assert "'norm.bias' has values that are no numbers" in told(norm__bias=huge), "it leaves fp32"


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", Net()
    start = written(path, model.state_dict())
    whole = path.read_bytes()

    def told(raw: bytes) -> str:
        path.write_bytes(raw)
        with pytest.raises(CheckpointError) as caught:
            placed(start, schema_of(model))
        return str(caught.value)

    assert "it is another file than the host named" in told(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "it ends before all of it has come" in told(whole[:-3])
    assert "longer than its head says" in told(whole + b"x")
    assert "not a safetensors file" in told(bytes([255]) * 8 + whole[8:])
    assert "it ends before all of it has come" in told(b"")
    head = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    head["norm.bias"]["data_offsets"] = [0, 12]
    raw = json.dumps(head).encode()
    assert "lies where it can't" in told(len(raw).to_bytes(8, "little") + raw + whole[8 + len(raw) :])
    path.unlink()
    with pytest.raises(StoreError, match=r"a\.safetensors"):
        placed(start, schema_of(model))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.data())
def test_no_bytes_of_a_head_do_harm(raw: bytes, data: st.DataObject) -> None:
    """Whatever a place gives: an error of ours, and nothing that counts."""
    with_head = data.draw(st.booleans())
    text = json.dumps(data.draw(st.dictionaries(st.text(max_size=3), st.integers() | st.none() | st.text())))
    whole = len(text).to_bytes(8, "little") + text.encode() + raw if with_head else raw
    path = Path("/dev/shm") / f"farflung-test-head-{blake3(whole).hexdigest()[:12]}.safetensors"
    try:
        path.write_bytes(whole)
        with pytest.raises(UserError):
            placed(StartSection.model_validate({"from": str(path), "hash": "0" * 64}), schema_of(Net()))
    finally:
        path.unlink()


def test_bf16_is_the_upper_half_of_fp32() -> None:
    values = torch.tensor([1.0, -3.5, 1e-40, 3e38]).to(torch.bfloat16)
    raw = values.view(torch.int16).numpy().tobytes()
    assert as_fp32(raw, "BF16").tobytes() == values.float().numpy().tobytes()


# ---- stages --------------------------------------------------------------------------------------------------------


def test_each_stage_takes_what_is_its_own(tmp_path: Path) -> None:
    """Wherever the model is cut, and however a tensor lies across chunks."""
    values = {f"{part}.w": torch.arange(10.0) + 100 * part for part in range(3)}
    start = written(tmp_path / "a.safetensors", values)
    specs = tuple(TensorSpec(name, (10,), "float32", "param") for name in values)
    stages = (StageSpec(0, 0, 5, 0), StageSpec(2, 2, 3, 0))  # 20 values, then 10
    model = ModelSchema(specs, 4, 8, 8, bytes(32), stages=stages)
    whole = np.concatenate([each.numpy() for each in values.values()])
    assert (placed(start, model, slice(0, 1))[0] == whole[:20]).all()
    assert (placed(start, model, slice(1, 2))[0] == np.append(whole[20:], [0.0, 0.0])).all()


# ---- a checkpoint --------------------------------------------------------------------------------------------------


def good_states() -> dict[int, list[bytes]]:
    draw = np.random.default_rng(3)
    return {1: [draw.standard_normal(16).astype("<f4").tobytes() for _ in range(MODEL.chunk_count)]}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a checkpoint of 40 values and their momentum, in chunks of 8."""
    monkeypatch.setattr("rig.made_checkpoint.state", lambda version: good_states()[version])
    return f"{tmp_path}/{save(Store(str(tmp_path)), 1).folder}"


def test_a_checkpoint_gives_parameters_and_if_asked_the_momentum_in_chunks_of_any_size(saved: str) -> None:
    state = np.frombuffer(b"".join(good_states()[1]), "<f4").reshape(MODEL.chunk_count, 2, 8)
    other = ModelSchema(MODEL.tensors, 16, 3, 3, bytes(32))
    for model in (MODEL, other):
        fresh, kept = placed(pinned(saved), model), placed(pinned(saved, "keep"), model)
        assert (fresh[0, :40] == state[:, 0].ravel()).all() and not fresh[1].any()
        assert (kept[0] == fresh[0]).all() and (kept[1, :40] == state[:, 1].ravel()).all()
        assert not kept[:, 40:].any(), "padding"


def test_a_checkpoint_that_is_not_the_one_or_does_not_fit_is_refused(saved: str, tmp_path: Path) -> None:
    start = pinned(saved)
    wide = ModelSchema((TensorSpec("w", (8, 5), "float32", "param"),), 8, 5, 5, bytes(32))
    with pytest.raises(UserError, match=r"'w' is \[40\] there, \[8, 5\] in the run's model"):
        placed(start, wide)
    frozen = ModelSchema(MODEL.tensors, 8, 5, 5, bytes([1]) * 32)
    with pytest.raises(UserError, match="other frozen parameters"):
        placed(start, frozen)
    with pytest.raises(CheckpointError, match="another checkpoint than the host named"):
        placed(start.model_copy(update={"hash": "0" * 64}), MODEL)
    shard = next(Path(saved).glob("chunks-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        placed(start, MODEL)
    (Path(saved) / MANIFEST_NAME).unlink()
    with pytest.raises(StoreError):
        placed(start, MODEL)


def test_values_that_are_no_numbers_are_no_beginning(tmp_path: Path) -> None:
    """`state` of the rig draws random bytes, of which some are NaN."""
    saved = f"{tmp_path}/{save(Store(str(tmp_path)), 2, run_id=RUN_ID).folder}"
    with pytest.raises(CheckpointError, match="no numbers"):
        for version in range(2, 40):
            saved = f"{tmp_path}/{save(Store(str(tmp_path)), version).folder}"
            placed(pinned(saved), MODEL)


def test_what_lies_in_a_bucket_is_read_like_what_lies_on_a_disk(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rig.made_checkpoint.state", lambda version: good_states()[version])
    model, local = Net(), written(tmp_path / "a.safetensors", Net().state_dict())
    buckets = request.getfixturevalue("buckets")
    url = buckets.publish({"models/a.safetensors": (tmp_path / "a.safetensors").read_bytes()})
    there = pinned(f"{url}/models/a.safetensors")
    assert there.for_all and there.hash == local.hash
    assert (placed(there, schema_of(model), is_own=False) == placed(local, schema_of(model))).all()
    folder = f"{url}/run/{save(Store(f'{url}/run'), 1).folder}"
    assert placed(pinned(folder, "keep"), MODEL)[1].any()


def test_no_path_is_opened_on_a_runs_word(tmp_path: Path, saved: str) -> None:
    file, model = written(tmp_path / "a.safetensors", Net().state_dict()), schema_of(Net())
    for start, schema in ((file, model), (pinned(saved), MODEL)):
        placed(start, schema)
        with pytest.raises(UserError, match="nothing else is opened on a run's word"):
            placed(start, schema, is_own=False)


def test_what_is_read_for_the_hash_alone_has_an_end(tmp_path: Path) -> None:
    head = {"big": {"dtype": "U8", "shape": [1 << 50], "data_offsets": [0, 1 << 50]}}
    values = {
        name: tensor.numpy() for name, tensor in Net().state_dict().items() if tensor.is_floating_point()
    }
    at, path = 1 << 50, tmp_path / "a.safetensors"
    for name, each in values.items():
        head[name] = {"dtype": "F32", "shape": list(each.shape), "data_offsets": [at, at + each.nbytes]}
        at += each.nbytes
    raw = json.dumps(head).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(UserError, match="bytes of it are integers, at most"):
        placed(StartSection.model_validate({"from": str(path), "hash": "0" * 64}), schema_of(Net()))


# ---- in run.toml ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('from = "/a/b"', "[start] hash: expected the hash of what from names; farflung init --start /a/b - prints it"),
        ('hash = "HASH"', "[start] hash: expected to be left out without from"),
        ('momentum = "keep"', "[start] momentum: expected to be left out without from"),
        ('from = "a/b"\nhash = "HASH"', '[start] from: expected "", or one checkpoint, or a .safetensors file'),
        ('from = "http://a/b"\nhash = "HASH"', '[start] from: expected "", or one checkpoint'),
        ('from = "/a"\nhash = "abc"', "[start] hash: expected 64 hexadecimal digits, found"),
        (
            'from = "/a.safetensors"\nhash = "HASH"\nmomentum = "keep"',
            '[start] momentum: expected "fresh" with a .safetensors file, which holds none, found "keep"',
        ),
        (
            'from = "/a"\nhash = "HASH"\nmomentum = "keep"\n[outer]\nstep = "mean"',
            '[start] momentum: expected "fresh" with [outer] step = "mean", found "keep"',
        ),
    ],
)  # fmt: skip
def test_what_run_toml_may_say(text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        Manifest.from_toml("[start]\n" + text.replace("HASH", "a" * 64), "run.toml")
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_the_beginning_is_part_of_what_all_agree_on() -> None:
    toml = f'[start]\nfrom = "s3://bucket/run/1-e0-v9"\nhash = "{"a" * 64}"\nmomentum = "keep"\n'
    manifest = Manifest.from_toml(toml, "run.toml")
    assert Manifest.from_canonical(manifest.canonical()) == manifest and manifest.start.for_all
    assert b'"start":{"from":"s3://bucket/run/1-e0-v9","hash":"aaaa' in manifest.canonical()
    assert manifest.digest != Manifest.from_toml(toml.replace("a" * 64, "b" * 64), "run.toml").digest


@pytest.mark.parametrize("every_key", [["--all"], []])
def test_init_writes_what_a_new_run_begins_with(
    tmp_path: Path, every_key: list[str], say: Callable[..., tuple[int, str, str]]
) -> None:
    model, run = tmp_path / "model.safetensors", tmp_path / "new.toml"
    save_file({"w": torch.zeros(3)}, model)
    assert say("init", run, "--start", model, *every_key)[0] == 0
    found = Manifest.from_toml(run.read_text(encoding="utf-8"), "run.toml")
    plain = Manifest.from_toml(description(bool(every_key)), "run.toml")
    inner = plain.inner.model_copy(update={"optimizer": "adamw"})
    usual = plain.model_copy(update={"round": Manifest().round, "inner": inner})
    assert found.model_copy(update={"start": StartSection()}) == usual, (
        "the rest is as ever, but for short periods, and the optimizer of what was trained"
    )
    assert (found.start.source, found.start.hash) == (str(model), hash_at(str(model)))
    code, out, _ = say("init", "-", "--start", model, *every_key)
    assert (code, out) == (0, run.read_text(encoding="utf-8")), "and prints it"
    assert (
        say("init", tmp_path / "other", "--run", "ab")[2] == "farflung: init: --run goes only with --start\n"
    )
    assert say("init", tmp_path / "other", "--start", tmp_path / "nowhere")[0] == 2
    odd = shutil.copy(model, tmp_path / 'a "b".safetensors')
    assert "[start] from: expected" in say("init", tmp_path / "other", "--start", odd)[2]
    assert not (tmp_path / "other").exists()
