"""A folder that `from_pretrained` loads: whole, or not loaded; and nothing of an earlier save in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.protocol.errors import UserError
from farflung.protocol.process.own_files import TOKENIZER, copy_files, made_aside

SHARDED = ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write(folder: Path, *files: str, text: str = "new") -> None:
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), made_aside(tmp_path / "out") as aside:
        write(aside, "config.json")
        assert names(tmp_path) == {aside.name}, "nobody sees it yet"
        _ = 1 / 0
    assert names(tmp_path) == set()
    with made_aside(tmp_path / "out") as aside:
        write(aside, "config.json", "model.safetensors")
    assert names(tmp_path) == {"out"} and names(tmp_path / "out") == {"config.json", "model.safetensors"}


def test_of_an_earlier_model_nothing_stays_and_of_other_files_everything(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write(out, *SHARDED, INDEX, "adapter_config.json", "adapter_model.safetensors", "notes.md", text="old")
    with made_aside(out) as aside:
        write(aside, "config.json", "model.safetensors")
    assert names(out) == {
        "config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors", "notes.md",
    }  # fmt: skip
    with made_aside(out) as aside:
        write(aside, "adapter_config.json", "adapter_model.safetensors", "more/adapter_config.json")
    assert (out / "config.json").exists() and (out / "more" / "adapter_config.json").read_text() == "new"
    assert (out / "adapter_config.json").read_text() == "new" and (out / "notes.md").read_text() == "old"


@pytest.mark.parametrize("fails_at", range(4))
def test_whoever_dies_while_files_are_moved_leaves_a_folder_that_loads_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    out, moved = tmp_path / "out", 0
    out.mkdir()
    write(out, *SHARDED, INDEX, text="old")
    replace = Path.replace

    def dies(self: Path, target: Path) -> Path:
        nonlocal moved
        moved += 1
        if moved > fails_at:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dies)
    with pytest.raises(UserError, match="cannot write .*: No space left"), made_aside(out) as aside:
        write(aside, *SHARDED, INDEX)
    assert not (out / "config.json").exists()
    assert all(path.read_text() == "new" for path in out.iterdir()), "and no mixture of two"


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with (
        pytest.raises(UserError, match="there is a file of this name"),
        made_aside(tmp_path / "out") as aside,
    ):
        write(aside, "config.json")


def test_a_tokenizer_is_copied_and_code_is_not(tmp_path: Path) -> None:
    for folder in ("base", "out"):
        (tmp_path / folder).mkdir()
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"}
    write(tmp_path / "base", *tokenizer, "modeling_mine.py", "config.json", "model.safetensors")
    copy_files(tmp_path / "base", tmp_path / "out", TOKENIZER)
    assert names(tmp_path / "out") == tokenizer
