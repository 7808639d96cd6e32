"""`farflung generate`: text by a checkpoint, or by the memory of a peer on this machine, and mistakes in a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from blake3 import blake3
from fsspec.implementations.local import LocalFileSystem

from farflung.console import generate_command
from farflung.peer.builtin.llama import Llama, continued
from farflung.peer.builtin.named_model import HfModel, NamedModel
from farflung.peer.local.folder import abouts, make_folder, remove_folder, write_about
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import PeerHere, to_bytes
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import as_nobody
from rig.hf_run import hf_run
from rig.made_model import MadeRun

TOML = "[model]\nlayers = 2\nwidth = 32\nheads = 4\ncontext = 32\n"
Say = Callable[..., tuple[int, str, str]]  # (exit code, stdout, stderr)
URL = JoinUrl("127.0.0.1", 29800, "my-run", bytes(range(32)))


def model_of(manifest: Manifest, seed: int = 7) -> Llama:
    """It says something else than one letter."""
    model = Llama(manifest.model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


def saved(folder: Path, toml: str = TOML, version: int = 4) -> tuple[MadeRun, Manifest, Llama]:
    manifest, run = Manifest.from_toml(toml, "run.toml"), MadeRun(folder)
    model = model_of(manifest)
    run.saves(model, version, manifest.canonical())
    return run, manifest, model


def due(model: NamedModel, text: str, most: int, temperature: float = 0.8, seed: int = 0) -> str:
    made = continued(model, list(text.encode()), most, temperature, seed)
    raw = bytes([*text.encode(), *made]).decode(errors="replace")
    return "".join(c for c in raw if c in "\n\t" or c.isprintable()) + "\n"


def test_it_goes_on_from_the_newest_checkpoint(tmp_path: Path, say: Say) -> None:
    run, _, model = saved(tmp_path)
    code, out, err = say("generate", run.place, "def f(", "--tokens", "9")
    assert (code, out) == (0, due(model, "def f(", 9)), err
    assert "version 4 of little-llama, 9 tokens at most, seed 0" in err
    assert say("generate", run.place, "def f(", "--tokens", "9", "--seed", "3")[1] == due(
        model, "def f(", 9, seed=3
    )
    greedy = say("generate", run.place, "def f(", "--temperature", "0")[1]
    assert greedy == due(model, "def f(", 32 - 6, 0.0), "no more than the context has room for"


def test_a_model_in_stages_is_put_together(tmp_path: Path, say: Say) -> None:
    manifest, run = Manifest.from_toml(f"{TOML}tied = false", "run.toml"), MadeRun(tmp_path)
    whole = Llama(manifest.model, 7)
    parts = torch.nn.ModuleList([Llama(manifest.model, 7, number, number + 1) for number in range(4)])
    run.saves(parts, 4, manifest.canonical())
    assert say("generate", run.place, "ab", "--tokens", "5")[1] == due(whole, "ab", 5)


def test_hf_text_of_a_run_of_a_model_of_transformers(tmp_path: Path, say: Say) -> None:
    pytest.importorskip("transformers")
    manifest, run = Manifest.from_toml(hf_run("qwen2"), "run.toml"), MadeRun(tmp_path)
    model = HfModel(manifest.model, 7)
    run.saves(model.module, 4, manifest.canonical())
    assert say("generate", run.place, "ab", "--tokens", "5")[1] == due(model.eval(), "ab", 5)


def test_what_a_stranger_s_model_writes_moves_no_cursor(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, *_ = saved(tmp_path)
    evil = "\x1b]0;owned\x07\x9b2J\u202e\nb\tc"
    monkeypatch.setattr(generate_command, "_continued", lambda *_: iter(evil.encode()))
    assert say("generate", run.place, "a")[1] == "a]0;owned2J\nb\tc\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("",), "TEXT: expected something to go on from"),
        (("x" * 32,), "TEXT: 32 tokens, and the model's context is 32: give it a shorter text"),
        (("x", "--version", "9"), "no whole checkpoint of version 9; there are [4]"),
        (("x", "--tokenizer", "nowhere.json"), "nowhere.json"),
    ],
)
def test_mistakes_are_told_in_a_line(words: tuple[str, ...], told: str, tmp_path: Path, say: Say) -> None:
    run, *_ = saved(tmp_path)
    code, out, err = say("generate", run.place, *words)
    assert code != 0 and not out and told in err and "Traceback" not in err


TOKENS = '[data]\nsource = "https://a.example/x.bin"\ntokenizer = "{}"\n'


def test_a_run_of_a_script_and_one_of_tokens_say_what_is_missing(tmp_path: Path, say: Say) -> None:
    script = MadeRun(tmp_path / "script")
    script.saves(torch.nn.Linear(3, 2), 4)
    assert "trained the model of a script" in say("generate", script.place, "x")[2]
    tokens = f'{TOML}vocab = 300\n[data]\nsource = "https://a.example/x.bin"\ntokenizer = "{"ab" * 32}"\n'
    run, *_ = saved(tmp_path / "tokens", tokens)
    code, _, err = say("generate", run.place, "x")
    assert code != 0 and f"name their tokenizer.json with --tokenizer, whose hash is {'ab' * 32}" in err


def test_text_by_a_tokenizer_of_transformers_and_only_by_the_runs_own(tmp_path: Path, say: Say) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"the": 0, "cat": 1, "sat": 2, "<|endoftext|>": 3, "dog": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="dog"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file, other = tmp_path / "tokenizer.json", tmp_path / "other.json"
    made.save(str(file))
    other.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": None}, indent=1))
    hashed = blake3(file.read_bytes()).hexdigest()
    toml = f'{TOML}vocab = 5\n[data]\nsource = "https://a.example/x.bin"\ntokenizer = "{hashed}"\n'
    run, *_ = saved(tmp_path / "run", toml)
    code, out, err = say("generate", run.place, "the cat", "--tokenizer", file, "--tokens", "12")
    assert code == 0 and out.startswith("the cat") and set(out.split()) <= {"the", "cat", "sat", "dog"}, err
    assert "and that of the run's tokenizer is" in say("generate", run.place, "the", "--tokenizer", other)[2]


def test_the_tokenizer_that_a_run_names_is_fetched_as_transformers_have_it(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "dog": 2}, unk_token="dog"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    monkeypatch.setattr(as_nobody, "opened", lambda url: (LocalFileSystem(), str(file)))
    place = f"https://a.example/tokenizer.json#{blake3(file.read_bytes()).hexdigest()}"
    run, *_ = saved(tmp_path / "run", f"{TOML}vocab = 3\n{TOKENS.format(place)}")
    code, out, err = say("generate", run.place, "the cat", "--tokens", "12")
    assert code == 0 and out.startswith("the cat") and set(out.split()) <= {"the", "cat", "dog"}, err


def test_another_file_at_the_place_of_the_tokenizer_is_refused(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    monkeypatch.setattr(as_nobody, "opened", lambda url: (LocalFileSystem(), str(file)))
    place = f"https://a.example/tokenizer.json#{'ab' * 32}"
    run, *_ = saved(tmp_path / "run", f"{TOML}vocab = 300\n{TOKENS.format(place)}")
    told = "https://a.example/tokenizer.json: its hash is "
    assert told in say("generate", run.place, "x")[2]
    monkeypatch.setattr(generate_command, "TOKENIZER_BYTES_MOST", 1)
    assert "2 bytes are too many for a tokenizer" in say("generate", run.place, "x")[2]
    file.unlink()
    code, _, err = say("generate", run.place, "x")
    assert code != 0 and "https://a.example/tokenizer.json: no such file" in err and "Traceback" not in err


# ---- words for the page ---------------------------------------------------------------------------------------


def page_words(manifest: Manifest, kept: BinaryIO, ids: list[int], given: int) -> list[str]:
    return generate_command.for_page(
        {"manifest": manifest.canonical().decode(), "ids": ids, "given": given}, kept
    )


def test_the_page_has_words_of_bytes_whatever_the_ids() -> None:
    manifest, kept = Manifest.from_toml(TOML, "run.toml"), BytesIO()
    ids = [*"déf".encode(), 300, 1 << 31, *b" g"]
    assert page_words(manifest, kept, ids, 4) == ["déf", " g"]
    assert page_words(manifest, kept, ids, 2) == ["", "déf g"], "a letter that was cut is in one piece"
    assert page_words(manifest, kept, [65] * 144, 144) == ["A" * 144, ""] and not kept.getvalue()


def test_the_page_has_words_by_the_runs_own_tokenizer_which_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "dog": 2}, unk_token="dog"))
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    monkeypatch.setattr(as_nobody, "opened", lambda url: (LocalFileSystem(), str(file)))
    place = f"https://a.example/tokenizer.json#{blake3(file.read_bytes()).hexdigest()}"
    manifest = Manifest.from_toml(f"{TOML}vocab = 3\n{TOKENS.format(place)}", "run.toml")
    right, kept = file.read_bytes(), BytesIO()
    file.write_text("{}")
    with pytest.raises(UserError, match="its hash is"):
        page_words(manifest, kept, [0, 1, 2], 1)
    assert not kept.getvalue(), "another file is not kept"
    file.write_bytes(right)
    assert page_words(manifest, kept, [0, 1, 2], 1) == ["the", " cat dog"]
    file.unlink()
    assert page_words(manifest, kept, [2, 1, 0], 2) == ["dog cat", " the"]


# ---- a peer on this machine ----------------------------------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Path]:
    folder = make_folder(1 << 20)
    yield folder
    remove_folder(folder)


def test_of_a_join_url_the_memory_of_this_machines_peer_is_read(home: Path, say: Say) -> None:
    manifest = Manifest.from_toml(TOML, "run.toml")
    model = model_of(manifest)
    layout = ModelLayout.of(model, manifest.round.chunk_kb * 256)
    shared = SharedState.create(home, layout.total_elements)
    about = PeerHere(
        run=URL.run,
        key=URL.key,
        manifest=manifest.canonical(),
        model=layout.model_schema(model),
        shared=shared.as_message(),
    )
    assert "no peer of run 'my-run' is on this machine" in say("generate", str(URL), "x")[2]
    write_about(home, to_bytes(about))
    assert (home / "about").stat().st_mode & 0o777 == 0o600
    assert to_bytes(about) in list(abouts())
    assert "holds no version yet: try later" in say("generate", str(URL), "x")[2]
    layout.write_anchor(model, shared.anchor)
    shared.write_version(6)
    code, out, err = say("generate", str(URL), "def f(", "--tokens", "9")
    assert (code, out) == (
        0,
        due(model, "def f(", 9),
    ) and "version 6 of my-run, from the peer on this machine" in err
    other = JoinUrl(URL.host, URL.port, URL.run, bytes(32))
    assert "no peer of run" in say("generate", str(other), "x")[2], "of the same name, and another run"
    assert "are of checkpoints" in say("generate", str(URL), "x", "--version", "3")[2]
