"""`farflung data prepare`, with a real tokenizer where the package is there (make adapters)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farflung.peer.data.token_shards import TokenShards
from farflung.protocol.manifest import Manifest

Say = Callable[..., tuple[int, str, str]]
WORDS = ["a tale of two cities", "the cat sat on the mat", "peers come and go", "a round is over"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizers: Any = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(WORDS * 20, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{WORDS[n % 4]}, {n}"}) + "\n" for n in range(200)))
    return path


def test_prepared_shards_decode_to_the_text_and_the_lines_are_those_of_a_run(
    tmp_path: Path, tokenizer: Path, text: Path, say: Say
) -> None:
    out = tmp_path / "out"
    code, told, _ = say("data", "prepare", "--tokenizer", tokenizer, "--held-out", "10%", text, out)
    assert code == 0
    manifest = Manifest.from_toml(told, "run.toml")
    assert manifest.data.dtype == "uint16" and 256 < manifest.model.vocab <= 300
    tokenizers: Any = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    found = []
    for name in ("train-00000.bin", "held_out/held_out.bin"):
        rows = TokenShards(out / name, 1)
        ids = [int(rows[at][0]) for at in range(len(rows))]
        found += made.decode(ids, skip_special_tokens=False).split("<|endoftext|>")[:-1]
    assert sorted(found) == sorted(f"{WORDS[n % 4]}, {n}" for n in range(200))
    assert say("data", "prepare", "--tokenizer", tokenizer, "--held-out", "10%", text, out) == (0, told, "")


def test_prepare_takes_whole_documents_whatever_the_tokenizer_was_saved_with(
    tmp_path: Path, tokenizer: Path, text: Path, say: Say
) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    made.enable_truncation(3)
    made.enable_padding(length=64)
    made.save(str(tmp_path / "cutting.json"))
    text.write_text(text.read_text() + json.dumps({"text": "it says <|endoftext|> here"}) + "\n")
    found = []
    for name, file in (("a", tokenizer), ("b", tmp_path / "cutting.json")):
        assert say("data", "prepare", "--tokenizer", file, "--held-out", "10%", text, tmp_path / name)[0] == 0
        found.append(
            [(tmp_path / name / each).read_bytes() for each in ("train-00000.bin", "held_out/held_out.bin")]
        )
    assert found[0] == found[1]
    end = made.token_to_id("<|endoftext|>").to_bytes(2, "little")
    ids = [raw[at : at + 2] for raw in found[0] for at in range(0, len(raw), 2)]
    assert ids.count(end) == 201, "one after each document, and none for its name in a text"


def test_prepare_tells_mistakes_in_a_line_within_a_second_and_writes_nothing(
    tmp_path: Path, tokenizer: Path, text: Path, say: Say
) -> None:
    endless = tmp_path / "endless.json"
    endless.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|stop|>"))
    odd = tmp_path / "a.pdf"
    odd.write_bytes(b"")
    for words, told in (
        (["--tokenizer", tokenizer, tmp_path / "out"], "expected texts and then a folder"),
        (["--tokenizer", tokenizer, odd, tmp_path / "out"], "a.pdf: expected .txt, .jsonl, .parquet"),
        (["--tokenizer", tokenizer, tmp_path / "no.txt", tmp_path / "out"], "no.txt: there is no such file"),
        (["--tokenizer", text, text, tmp_path / "out"], "texts.jsonl: no tokenizer.json"),
        (["--tokenizer", tmp_path / "gone.json", text, tmp_path / "out"], "gone.json: No such file"),
        (["--tokenizer", endless, text, tmp_path / "out"], "no token <|endoftext|> or"),
        (
            ["--tokenizer", tokenizer, "--held-out", "2", text, tmp_path / "out"],
            "--held-out: expected a share",
        ),
    ):
        code, _, err = say("data", "prepare", *words)
        assert code == 2 and told in err and err.count("\n") == 1, err
        assert not (tmp_path / "out").exists()


def test_without_the_package_prepare_says_what_to_install(
    tmp_path: Path, text: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    code, _, err = say("data", "prepare", "--tokenizer", file, text, tmp_path / "out")
    assert code == 2 and "pip install 'farflung[tokens]'" in err
