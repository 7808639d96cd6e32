"""Checkpoints: one suite for every kind of store (S3 as moto plays it); what is damaged is named and the one before it
is used."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest
import safetensors.torch
import torch
from torch import nn

from farflung.checkpoints.checkpoint_manifest import (
    CheckpointManifest,
    Saved,
    SavedFragment,
    canonical,
    parse,
    shard_header,
)
from farflung.checkpoints.export import as_state_dict, tensors_of
from farflung.checkpoints.store import TAKE_OVER_S, Parts, Store
from farflung.coordinator.door.keys import load_or_create
from farflung.peer.identity import Identity
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import CheckpointError, StoreError, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.model_schema import fragments_of
from farflung.protocol.outer_numbers import StateForm
from rig.made_checkpoint import CHUNKS, FORM, ME, MODEL, RUN_ID, files_of, save, state
from rig.waiting import LONG_S


@pytest.fixture(params=["disk", "memory", pytest.param("s3", marks=pytest.mark.hard)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "disk":
        yield Store(str(tmp_path / "kept here"))
        return
    if request.param == "s3":
        yield Store(f"{request.getfixturevalue('buckets').new()}/kept here")
        return
    url = f"memory://{tmp_path.name}"
    yield Store(url)
    fs, root = fsspec.core.url_to_fs(url)
    if fs.exists(root):
        fs.rm(root, recursive=True)


def versions(store: Store) -> list[int]:
    return [saved.manifest.version for saved in store.list_saved(RUN_ID).complete]


def change(store: Store, saved: Saved, name: str, at: int = 0, cut: int = 0, gone: bool = False) -> None:
    """Do to a file what disks and people do."""
    fs, root = fsspec.core.url_to_fs(store.url)
    path = f"{root.rstrip('/')}/{saved.folder}/{name}"
    raw = bytearray(fs.cat_file(path))
    raw[at] ^= 1
    if gone:
        fs.rm_file(path)
    else:
        fs.pipe_file(path, bytes(raw[:-cut] if cut else raw))


# ---- what is written is read -----------------------------------------------------------------------------------


def test_what_was_saved_is_read_again_newest_first(store: Store) -> None:
    assert store.list_saved(RUN_ID).complete == [] and store.list_saved().problems == []
    for version in (10, 20):
        save(store, version)
    listing = store.list_saved(RUN_ID)
    assert [s.manifest.version for s in listing.complete] == [20, 10] and not listing.problems
    newest = listing.complete[0]
    assert [raw for _, raw in store.chunks(newest)] == state(20)
    last = len(state(20)) - 1
    assert list(store.chunks(newest, {1, last})) == [(1, state(20)[1]), (last, state(20)[last])]
    assert store.problems_of(newest) == []
    assert newest.manifest.digests == tuple(
        root_of(bytes.fromhex(chunk) for chunk in each.chunks) for each in newest.manifest.fragments
    )


def test_the_form_of_a_manifest_is_fixed(store: Store) -> None:
    """A change here makes all checkpoints that were ever written unreadable: it must be on purpose."""
    saved = save(store, 3).manifest
    files = tuple(msgspec.structs.replace(file, writer="w") for file in saved.files)
    fixed = msgspec.structs.replace(saved, files=files, writer="w", key="0" * 64, signature="0" * 128)
    assert hash_bytes(canonical(fixed)).hex().startswith("8db20cc3")


def test_a_shard_is_a_safetensors_file(store: Store) -> None:
    saved = save(store, 3)
    file = saved.manifest.files[0]
    loaded = safetensors.torch.load(store.files.read(saved.folder, file.name, file.size_bytes))
    assert len(loaded) == 2 * file.count
    assert (
        loaded["00000.params"].numpy().tobytes() + loaded["00000.momentum"].numpy().tobytes() == state(3)[0]
    )


def test_the_newest_are_kept_and_the_newest_one_always(store: Store) -> None:
    for version in (10, 20, 30, 40):
        save(store, version)
    store.retain(RUN_ID, 2)
    assert versions(store) == [40, 30]
    store.retain(RUN_ID, 0)
    assert versions(store) == [40]


def test_what_came_after_a_return_is_newer(store: Store) -> None:
    save(store, 30, era=0)
    save(store, 25, era=1)
    assert versions(store) == [25, 30]
    store.retain(RUN_ID, 1)
    assert versions(store) == [25]


def test_a_damaged_newest_one_does_not_make_the_good_one_go(store: Store) -> None:
    save(store, 10)
    change(store, save(store, 20), "manifest.json", at=100)
    store.retain(RUN_ID, 1)
    assert versions(store) == [10]


# ---- what is not whole does not exist -----------------------------------------------------------------------------


def test_without_a_manifest_there_is_no_checkpoint_and_its_writer_sweeps_it(store: Store) -> None:
    save(store, 10)
    change(store, save(store, 20), "manifest.json", gone=True)
    listing = store.list_saved(RUN_ID)
    assert versions(store) == [10] and len(listing.unfinished) == 1
    store.sweep(RUN_ID, "somebody-else", (0, 30))
    store.sweep(RUN_ID, ME.peer_id, (0, 20))  # others may be writing the rest of it
    assert len(store.list_saved(RUN_ID).unfinished) == 1
    store.sweep(RUN_ID, ME.peer_id, (0, 21))
    assert not store.list_saved(RUN_ID).unfinished and versions(store) == [10]


# ---- several writers ------------------------------------------------------------------------------------------------


def begin(store: Store, me: Identity, take: Callable[[int], bytes] | None = None) -> Parts:
    """A peer that writes its part of version 9."""
    chunks, whole = state(9), fragments_of(CHUNKS, 1)[0]
    hashes = tuple(hash_bytes(chunk).hex() for chunk in chunks)
    parts = store.draft(RUN_ID, 0, 9, me.peer_id, FORM).parts
    files = files_of(whole, hashes, chunks)
    parts.add([dataclasses.replace(file, take=take or file.take) for file in files])
    return parts


def test_who_shares_a_place_writes_a_part_each(store: Store) -> None:
    """While one writes its first file, the other one writes all the rest."""
    other, theirs = Identity.generate(), []

    def slow(chunk: int) -> bytes:
        if not theirs:
            theirs.append(begin(Store(store.url), other))
        return state(9)[chunk]

    mine = begin(store, ME, slow)
    assert theirs[0].finish(lambda seconds: None) and mine.finish(lambda seconds: None)
    assert {file.writer for file in mine.shards} == {ME.peer_id, other.peer_id}
    assert sorted(mine.shards, key=str) == sorted(theirs[0].shards, key=str)
    save(store, 9, fragments=1)
    assert versions(store) == [9] and store.problems_of(store.list_saved(RUN_ID).complete[0]) == []
    assert not mine.finish(lambda seconds: None), "it is there already"


def test_the_part_of_a_writer_that_died_is_written_by_another(store: Store) -> None:
    def die(chunk: int) -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin(store, Identity.generate(), die)
    waited: list[float] = []
    mine = begin(store, ME)
    assert len(mine.shards) == CHUNKS - 1, "somebody is at the last one, as far as one can see"
    assert mine.finish(waited.append) and sum(waited) >= TAKE_OVER_S
    assert {file.writer for file in mine.shards} == {ME.peer_id} and len(mine.shards) == CHUNKS


def test_who_gives_up_takes_its_own_files_away(store: Store) -> None:
    other = Identity.generate()
    mine = begin(store, ME)
    mine.clear()
    assert store.files.folders() == []
    begin(store, other)
    begin(store, ME).clear()
    assert len(store.files.files(mine.folder)) == 3 * CHUNKS


def test_a_note_about_other_chunks_is_not_believed(store: Store) -> None:
    begin(store, ME)
    folder = store.files.folders()[0]
    name = "chunks-00000.json"
    note = json.loads(store.files.read(folder, name, 4096)) | {"chunks": "00" * 32, "writer": "mal"}
    store.files.write(folder, name, [json.dumps(note).encode()])
    assert "mal" not in {file.writer for file in begin(store, Identity.generate()).shards}


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ({"name": "manifest.json", "at": 60}, "manifest.json"),
        ({"name": "manifest.json", "cut": 9}, "manifest.json: damaged"),
        ({"name": "chunks-00002.safetensors", "gone": True}, "chunks-00002.safetensors: missing"),
        ({"name": "chunks-00002.safetensors", "cut": 3}, "chunks-00002.safetensors: 205 bytes, expected 208"),
    ],
)
def test_damage_is_named_and_the_one_before_is_used(store: Store, harm: dict[str, int], said: str) -> None:
    save(store, 10)
    change(store, save(store, 20), **harm)  # type: ignore[arg-type]
    listing = store.list_saved(RUN_ID)
    assert versions(store) == [10]
    assert len(listing.problems) == 1 and said in listing.problems[0]


@pytest.mark.parametrize("at", [3, 40, -1, -70])
def test_a_flipped_bit_in_a_body_or_head_is_found(store: Store, at: int) -> None:
    saved = save(store, 20)
    change(store, saved, "chunks-00000.safetensors", at=at)
    assert store.list_saved(RUN_ID).complete, "sizes are right: only reading tells"
    assert store.problems_of(saved)[0].endswith("chunks-00000.safetensors: damaged")
    with pytest.raises(CheckpointError, match="chunks-00000"):
        list(store.chunks(saved))


def test_checkpoints_of_another_run_are_left_alone(store: Store) -> None:
    other = save(store, 90, run_id="ff" * 16)
    save(store, 10)
    assert versions(store) == [10]
    store.retain(RUN_ID, 1)
    assert [s.folder for s in store.list_saved().complete].count(other.folder) == 1


def test_a_checkpoint_under_the_name_of_another_run_is_foreign(store: Store) -> None:
    other = save(store, 90, run_id=RUN_ID[:8] + "f" * 24)
    listing = store.list_saved(RUN_ID)
    assert (
        listing.complete == []
        and "of another run" in listing.problems[0]
        and other.folder in listing.problems[0]
    )


# ---- what a manifest promises ---------------------------------------------------------------------------------------


def test_P8_a_manifest_leads_nobody_out_of_its_folder(tmp_path: Path) -> None:
    manifest = save(Store(str(tmp_path)), 1).manifest
    for name in ("../secret", "/etc/passwd", ".hidden", "a/b"):
        files = (msgspec.structs.replace(manifest.files[0], name=name), *manifest.files[1:])
        forged = msgspec.structs.replace(manifest, files=files).signed(ME.sign)
        with pytest.raises(CheckpointError):
            parse(canonical(forged), "here")


def test_only_the_writer_can_sign_and_digests_must_fit(tmp_path: Path) -> None:
    manifest = save(Store(str(tmp_path)), 1).manifest
    stranger = Identity.generate()
    with pytest.raises(CheckpointError, match="signature"):
        parse(canonical(manifest.signed(stranger.sign)), "here")
    first = msgspec.structs.replace(manifest.fragments[0], digest="00" * 32)
    forged = msgspec.structs.replace(manifest, fragments=(first, *manifest.fragments[1:])).signed(ME.sign)
    with pytest.raises(CheckpointError, match="digest of fragment 0"):
        parse(canonical(forged), "here")


def test_the_form_of_a_manifest_stays() -> None:
    """A change of this digest makes every checkpoint that was ever written unreadable: raise FORMAT with it."""
    manifest = CheckpointManifest(
        format=1,
        run="small",
        run_id=RUN_ID,
        manifest="ab" * 32,
        era=1,
        version=4,
        incarnation=2,
        model=MODEL,
        fragments=(SavedFragment(4, "cd" * 32, 9, ("ef" * 32,)),),
        files=(),
        writer="somebody",
        key="01" * 32,
    )
    assert root_of([canonical(manifest)]).hex()[:16] == "90e2a333cfe70f6d"
    assert root_of([shard_header(3, 2, StateForm(8, 2))]).hex()[:16] == "07843dfc76dc2a66"


def test_a_place_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nosuch"):
        Store("nosuch://place")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        save(Store(str(tmp_path / "file")), 1)


# ---- killed while writing --------------------------------------------------------------------------------------------


def test_killed_at_any_moment_the_newest_one_can_be_read(tmp_path: Path) -> None:
    """benchmarks/checkpoint_kills.py does it 500 times."""
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint_kills.py"
    done = subprocess.run(
        [sys.executable, str(script), "40", str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == 0 and "0 unreadable" in done.stdout, done.stdout + done.stderr


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves what was synced: not tried here, but the calls are seen, in their order."""
    seen: list[str] = []
    sync, replace = os.fsync, os.replace

    def named(descriptor: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path).partition(".bin.")[0]

    def note_sync(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        seen.append(f"sync {named(descriptor)}" + (f", {size} bytes" if "name" in named(descriptor) else ""))
        sync(descriptor)

    def note_rename(before: Path, after: Path) -> None:
        seen.append(f"rename to {os.path.relpath(after, tmp_path)}")
        replace(before, after)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    Store(str(tmp_path / "there")).files.write("one", "name.bin", [b"12", b"345"])
    assert seen == [
        "sync there/one/name, 5 bytes",
        "rename to there/one/name.bin",
        "sync there/one",
        "sync there",
    ]


# ---- export ----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.half = nn.Linear(6, 3).to(torch.bfloat16)
        self.register_buffer("mean", torch.rand(3))


def test_export_is_the_model(store: Store) -> None:
    model = Tied()
    layout = ModelLayout.of(model, 16)
    flat = torch.zeros(layout.total_elements)
    layout.write_anchor(model, flat)
    chunks = [(i, part.numpy().tobytes() * 2) for i, part in enumerate(flat.view(-1, 16))]
    exported = tensors_of(layout.model_schema(model), reversed(chunks))
    again = Tied()
    again.load_state_dict(as_state_dict(exported, tied_once=False))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    once = as_state_dict(exported, tied_once=True)
    assert len(once) == len(model.state_dict()) - 1 and exported.frozen == ()


# ---- the command line ------------------------------------------------------------------------------------------


@pytest.fixture
def say(say: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    return lambda *words: say("checkpoint", *words)


def test_ls_lists_the_newest_first_and_names_what_is_none(
    tmp_path: Path, say: Callable[..., tuple[int, str, str]]
) -> None:
    store = Store(str(tmp_path / "there"))
    save(store, 10)
    change(store, save(store, 20), "chunks-00000.safetensors", cut=3)
    save(store, 30)
    code, out, err = say("ls", tmp_path / "there")
    assert code == 0 and [line.split()[1] for line in out.splitlines()] == ["30", "10"]
    assert err.count("\n") == 1 and "chunks-00000.safetensors" in err
    found = json.loads(say("ls", tmp_path / "there", "--json")[1])
    assert [each["version"] for each in found["checkpoints"]] == [30, 10] and len(found["problems"]) == 1


def test_verify_reads_everything_and_its_exit_code_tells(
    tmp_path: Path, say: Callable[..., tuple[int, str, str]]
) -> None:
    store = Store(str(tmp_path))
    save(store, 10)
    assert say("ls", "--verify", tmp_path)[0] == 0
    change(store, save(store, 20), "chunks-00000.safetensors", at=150)
    code, out, err = say("ls", "--verify", tmp_path)
    assert code == 2 and out.startswith("damaged  version 20") and "good     version 10" in out
    assert "chunks-00000.safetensors: damaged" in err and "Traceback" not in err
    assert [e["good"] for e in json.loads(say("ls", "--verify", tmp_path, "--json")[1])["checkpoints"]] == [
        False,
        True,
    ]


def test_P4_with_the_join_url_only_what_the_run_has_signed_is_good(
    tmp_path: Path, say: Callable[..., tuple[int, str, str]]
) -> None:
    """Somebody else may sign a manifest of anything, and be a coordinator of his own."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    keys, others = load_or_create(tmp_path / "ours"), load_or_create(tmp_path / "theirs")
    url = str(JoinUrl("host", 1, "small", keys.public_raw))
    place, store = tmp_path / "there", Store(str(tmp_path / "there"))
    signed = save(store, 10, prove=keys.prove)
    assert signed.manifest.run_key == keys.public_raw
    code, out, _ = say("ls", "--verify", place, "--url", url)
    assert code == 0 and "signed by its run" in out
    theirs = save(store, 20, prove=others.prove)
    bare = save(store, 30)
    assert bare.manifest.run_key == b"" and b"proof" not in canonical(bare.manifest)
    assert say("ls", "--verify", place)[0] == 0
    code, out, err = say("ls", "--verify", place, "--url", url)
    assert code == 2 and "version 10" in out and "version 20" not in out
    assert err.count("not signed by the coordinator of this join URL") == 2
    assert theirs.folder in err and bare.folder in err
    model = tmp_path / "model.safetensors"
    assert "wrote version 10" in say("export", place, "--url", url, "--out", model)[1]


def test_P4_a_runs_signature_of_another_state_is_named(tmp_path: Path) -> None:
    keys, store = load_or_create(tmp_path), Store(str(tmp_path / "there"))
    good = save(store, 10, prove=keys.prove).manifest
    first, second = good.fragments
    for proof in (second.proof, "00" * 96):
        swapped = msgspec.structs.replace(first, proof=proof)
        raw = canonical(msgspec.structs.replace(good, fragments=(swapped, second)).signed(ME.sign))
        with pytest.raises(CheckpointError, match="the run's signature of fragment 0 does not fit"):
            parse(raw, "x")


def test_export_takes_the_newest_that_is_whole(
    tmp_path: Path, say: Callable[..., tuple[int, str, str]]
) -> None:
    store, out = Store(str(tmp_path / "there")), tmp_path / "model.safetensors"
    save(store, 10)
    change(store, save(store, 20), "chunks-00000.safetensors", at=150)
    code, said, err = say("export", tmp_path / "there", "--out", out)
    assert code == 0 and "wrote version 10" in said and "not used" in err and "damaged" in err
    expected = b"".join(raw[: len(raw) // 2] for raw in state(10))
    assert safetensors.torch.load_file(out)["w"].numpy().tobytes() == expected
    code, _, err = say("export", tmp_path / "there", "--out", out)
    assert code == 2 and "--force" in err and err.count("\n") == 1
    assert say("export", tmp_path / "there", "--out", out, "--force")[0] == 0
    assert say("export", tmp_path / "there", "--out", tmp_path / "no" / "where")[0] == 2


@pytest.mark.parametrize("words", [["ls"], ["ls", "--verify"], ["export"]])
def test_mistakes_are_one_line(
    tmp_path: Path, say: Callable[..., tuple[int, str, str]], words: list[str]
) -> None:
    for place in (tmp_path / "nowhere", "s3x://there"):
        code, _, err = say(*words, place)
        assert code == 2 and err.count("\n") == 1 and str(place) in err
    store = Store(str(tmp_path / "there"))
    save(store, 10)
    code, _, err = say("ls", tmp_path / "there", "--run", "ffff")
    assert code == 2 and "no checkpoints of run ffff" in err
    save(store, 10, run_id="f" * 32)
    code, _, err = say("export", tmp_path / "there", "--out", tmp_path / "m")
    assert code == 2 and "choose one with --run" in err and err.count("\n") == 1


def test_export_writes_a_folder_of_torchs_own_checkpoints_instead(
    tmp_path: Path, say: Callable[..., tuple[int, str, str]]
) -> None:
    import torch.distributed.checkpoint as dcp  # not while tests are collected: it takes a second

    place, out = tmp_path / "there", tmp_path / "out"
    save(Store(str(place)), 10)
    code, said, err = say("export", place, "--dcp", out)
    assert code == 0 and f"wrote version 10 of small to {out}" in said, err
    expected = b"".join(raw[: len(raw) // 2] for raw in state(10))
    into = {"w": torch.zeros(len(expected) // 4)}
    dcp.load(into, checkpoint_id=out, no_dist=True)
    assert into["w"].numpy().tobytes() == expected
    code, _, err = say("export", place, "--dcp", out)
    assert code == 2 and "--force" in err and err.count("\n") == 1
    assert say("export", place, "--dcp", out, "--force")[0] == 0
    code, _, err = say("export", place, "--dcp", tmp_path / "x", "--hf", "org/name")
    assert code == 2 and "export twice" in err and not (tmp_path / "x").exists()
