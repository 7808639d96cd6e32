"""`farflung publish` against a hub on loopback: the whole model and its card in one commit, or nothing; no token told.

Needs huggingface_hub, and transformers for the model.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farflung.console.publish_command import Hub, hub_of
from farflung.protocol.errors import UserError
from rig.made_model import ANN, BOB, RUN_ID, MadeRun
from rig.model_hub import TOKEN, ModelHub, model_hub
from rig.pretrained_models import IDS, learn, lora, made
from rig.waiting import LONG_S

huggingface_hub: Any = pytest.importorskip("huggingface_hub")
Say = Callable[..., tuple[int, str, str]]
MARK = {"run": "little-llama", "run_id": RUN_ID.hex(), "version": 4, "digests": ["aa"]}
CARD = '---\nfarflung: {{"run_id": "{}"}}\n---\n# A model\n'


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    with model_hub() as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        constants = importlib.import_module("huggingface_hub.constants")
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub


def folder_of(path: Path, run_id: str, **files: str) -> Path:
    path.mkdir()
    (path / "README.md").write_text(CARD.format(run_id))
    for name, text in files.items():
        (path / name.replace("__", ".").replace("_of_", "-of-")).write_text(text)
    return path


def sent(there: ModelHub, repo: str = "me/model") -> dict[str, bytes]:
    return {name: raw for name, raw in there.repos[repo].files.items() if name != ".gitattributes"}


def test_a_run_is_published_with_its_card_and_loads_from_what_the_hub_holds(tmp_path: Path) -> None:
    """By the command line in a process of its own, with nothing but the environment that people set."""
    transformers: Any = pytest.importorskip("transformers")
    base, model, run = tmp_path / "base", made(transformers, "llama"), MadeRun(tmp_path)
    model.config.save_pretrained(base)
    for version in (1, 2):
        run.commits(version, bytes(32))
    run.saves(model, 3)
    words = [
        "publish", run.place, "--journal", run.data, "--hf", base, "--hub", "me/model", "--url", run.url,
        "--license", "apache-2.0", "--energy-kwh", "1.5", "--max-shard-size", "9KB",
    ]  # fmt: skip
    with model_hub() as hub:
        more = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-m", "farflung", *map(str, words)],
            env={**os.environ, **more, "HF_HOME": str(tmp_path / "hf")},
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"published: {hub.url}/me/model/commit/" in done.stdout
        assert len(hub.repos["me/model"].commits) == 2, "the repository, and one commit"
        files = sent(hub)
    assert TOKEN not in done.stdout + done.stderr + "".join(raw.decode("latin1") for raw in files.values())
    assert not list(tmp_path.rglob("*.part"))
    target = tmp_path / "downloaded"
    target.mkdir()
    for name, raw in files.items():
        (target / name).write_bytes(raw)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert "model.safetensors.index.json" in files and "provenance.jsonl" in files
    card = files["README.md"].decode()
    for line in (
        'license: "apache-2.0"',
        "2 peers, far apart, trained this model together",
        "| tokens | 12,000 |",
        "| commits | 3 |",
        "| energy | 1.5 kWh, by the word of who published it |",
        "| loss | 1.3333, mean of the last round's peers |",
        "| signed | by the run's coordinator |",
        f"| {ANN.peer_id} | 9,000 | 75.0 % | 3 |",
        f"| {BOB.peer_id} | 3,000 | 25.0 % | 3 |",
    ):
        assert line in card, line
    assert f"`{RUN_ID.hex()}`" in card and "to 2023-11-15 01:13 (UTC" in card


@pytest.fixture
def published(tmp_path: Path, there: ModelHub, say: Say) -> Iterator[SimpleNamespace]:
    """A run of an adapter, which needs no transformers to leave, and its words."""
    transformers: Any = pytest.importorskip("transformers")
    peft: Any = pytest.importorskip("peft")
    model, run = lora(transformers, peft, {}), MadeRun(tmp_path / "run", "tuned")
    model.base_model.model.name_or_path = "org/base"
    model.save_pretrained(tmp_path / "base")
    run.commits(1, bytes(32))
    saved = run.saves(model, 2)
    words = ["publish", run.place, "--journal", run.data, "--hf", tmp_path / "base", "--hub", "me/model"]
    yield SimpleNamespace(model=model, run=run, saved=saved, words=words, say=say, hub=there)


def test_what_is_not_whole_or_not_of_the_run_is_refused_before_anything_is_sent(
    published: SimpleNamespace, tmp_path: Path
) -> None:
    run, say, words = published.run, published.say, published.words
    learn(published.model)
    newest = run.saves(published.model, 3)
    shard = tmp_path / "run" / "kept" / newest.folder / newest.manifest.files[0].name
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    code, _, err = say(*words)
    assert code == 2 and "not everything there is whole" in err and "--version" in err, err
    shard.write_bytes(bytes([*whole[:-1], whole[-1] ^ 1]))
    code, _, err = say(*words)
    assert code == 2 and "damaged" in err, err
    shard.write_bytes(whole)
    rows = run.data / "provenance.jsonl"
    lines = rows.read_bytes()
    rows.write_bytes(lines.replace(b"3000", b"9000", 1))
    code, _, err = say(*words)
    assert code == 2 and "the provenance does not hold: line 1: the signature does not fit it" in err
    rows.write_bytes(lines[: lines[:-1].rfind(b"\n") + 1])
    code, _, err = say(*words)
    assert code == 2 and "it ends at version 2, before version 3" in err
    rows.write_bytes(lines)
    journal = run.data / "events.jsonl"
    events = journal.read_text()
    journal.write_text(events.replace(newest.manifest.digests[0].hex(), "ab" * 32))
    code, _, err = say(*words)
    assert code == 2 and "this is no state of the run" in err
    journal.write_text(events.replace(RUN_ID.hex(), "ef" * 16))
    code, _, err = say(*words)
    assert code == 2 and "the journal is of run efefefef" in err and err.count("\n") == 1
    journal.write_text(events)
    assert published.hub.repos == {}
    assert say(*words)[0] == 0 and published.hub.repos["me/model"].files


def test_an_adapter_is_published_as_one_and_names_its_base(
    published: SimpleNamespace, tmp_path: Path
) -> None:
    peft: Any = pytest.importorskip("peft")
    transformers: Any = pytest.importorskip("transformers")
    code, out, err = published.say(*published.words, "--out", tmp_path / "kept", "--private")
    assert code == 0 and f"to {tmp_path / 'kept'}" in out, err
    assert published.hub.repos["me/model"].private
    files = {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    assert files == sent(published.hub)
    card = files["README.md"].decode()
    assert 'library_name: "peft"' in card and 'base_model: "org/base"' in card
    loaded = peft.PeftModel.from_pretrained(made(transformers, "llama"), tmp_path / "kept").eval()
    assert torch.equal(loaded(IDS).logits, published.model(IDS).logits)


@pytest.mark.parametrize(
    "step", ["GET /api/whoami", "GET /api/models", "/preupload/", "/objects/batch", "PUT /blobs", "/commit/"]
)
def test_whatever_the_hub_refuses_no_half_of_a_model_appears_and_no_token_is_told(
    there: ModelHub, tmp_path: Path, step: str
) -> None:
    folder = folder_of(tmp_path / "model", RUN_ID.hex(), config__json="{}", model__safetensors="abc")
    hub_of().publish("me/model", folder, MARK, private=False, force=False)
    before = dict(there.repos["me/model"].files)
    (folder / "model.safetensors").write_text("of the next version")
    (folder / "config.json").write_text("[]")
    there.refuses = (step, 403, f"forbidden for {TOKEN}")
    with pytest.raises(UserError) as told:
        hub_of().publish("me/model", folder, MARK, private=False, force=False)
    assert "could not" in str(told.value) and "\n" not in str(told.value)
    assert "forbidden for ***" in str(told.value) and TOKEN not in str(told.value)
    assert there.repos["me/model"].files == before
    there.refuses = None
    hub_of().publish("me/model", folder, MARK, private=False, force=False)
    assert there.repos["me/model"].files["model.safetensors"] == b"of the next version"


def test_weights_of_an_older_version_go_in_the_same_commit_and_those_of_others_stay(
    there: ModelHub, tmp_path: Path
) -> None:
    old = folder_of(
        tmp_path / "old", RUN_ID.hex(), config__json="{}", **{"model-00001_of_00002__safetensors": "1"}
    )
    hub_of().publish("me/model", old, MARK, private=False, force=False)
    new = folder_of(tmp_path / "new", RUN_ID.hex(), config__json="{}", model__safetensors="12")
    hub_of().publish("me/model", new, MARK, private=False, force=False)
    assert sent(there).keys() == {"README.md", "config.json", "model.safetensors"}
    other = MARK | {"run_id": "ff" * 16}
    with pytest.raises(
        UserError, match=r"me/model holds weights that are not of this run \(model.safetensors\)"
    ):
        hub_of().publish("me/model", new, other, private=False, force=False)
    hub_of().publish("me/model", new, other, private=False, force=True)


def test_a_file_that_the_hub_leaves_out_is_noticed(there: ModelHub, tmp_path: Path) -> None:
    there.loses = "config.json"
    folder = folder_of(tmp_path / "model", RUN_ID.hex(), config__json="{}", model__safetensors="abc")
    with pytest.raises(UserError, match=r"does not show config\.json"):
        hub_of().publish("me/model", folder, MARK, private=False, force=False)


def test_somebody_else_s_commit_in_between_is_not_overwritten(
    there: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "model", RUN_ID.hex(), model__safetensors="abc")
    refuse = Hub._refuse_foreign

    def meanwhile(self: Hub, *given: Any) -> None:
        refuse(self, *given)
        there.repos["me/model"].commit({"theirs": b""})

    monkeypatch.setattr(Hub, "_refuse_foreign", meanwhile)
    with pytest.raises(UserError, match="The parent commit is not the newest one"):
        hub_of().publish("me/model", folder, MARK, private=False, force=False)
    assert sent(there) == {"theirs": b""}


def test_who_is_not_logged_in_is_told_how_before_anything_is_read(
    there: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    words = ["publish", tmp_path, "--journal", tmp_path, "--hf", tmp_path, "--hub", "me/model"]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    code, _, err = say(*words)
    assert code == 2 and "could not log in" in err and "hf_wrong" not in err, err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    code, _, err = say(*words)
    assert code == 2 and "nobody is logged in; set HF_TOKEN, or run: hf auth login" in err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, _, err = say(*words)
    assert code == 2 and "pip install huggingface_hub" in err and err.count("\n") == 1
