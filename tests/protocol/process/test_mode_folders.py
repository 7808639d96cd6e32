"""Parts of modes are found by name, and are not there where a folder was taken out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farflung.protocol.errors import UserError
from farflung.protocol.process.mode_folders import made_by_first, module_of, needed


@pytest.fixture
def modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with the folders one, other and broken, each with a module `part`."""
    package = f"modes_of_{tmp_path.name}"
    texts = {
        "one": "def made(wanted):\n    return 'one' if wanted == 1 else None",
        "other": "def made(wanted):\n    return 'other' if wanted <= 2 else None",
        "broken": "import there_is_no_such_module",
    }
    for folder, text in texts.items():
        (tmp_path / package / folder).mkdir(parents=True)
        (tmp_path / package / folder / "part.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        del sys.modules[name]


def test_a_part_is_found_and_one_whose_folder_is_gone_is_not(modes: str) -> None:
    found = module_of(f"{modes}.one.part")
    assert found is not None and found.made(1) == "one"
    assert module_of(f"{modes}.gone.part") is None


def test_what_fails_within_a_folder_is_no_folder_that_is_gone(modes: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        module_of(f"{modes}.broken.part")
    with pytest.raises(ModuleNotFoundError, match="forgotten"):
        module_of(f"{modes}.one.forgotten")


def test_who_needs_one_that_is_gone_is_told_so_in_a_line(modes: str) -> None:
    assert needed(f"{modes}.one.part", "this").made(1) == "one"
    with pytest.raises(UserError) as refused:
        needed("farflung.protocol.gone.part", "farflung.this")
    assert str(refused.value) == (
        "farflung.this: this farflung was installed without protocol/gone: install it whole"
    )


def test_the_first_that_has_a_use_for_it_makes_it(modes: str) -> None:
    names = [f"{modes}.{each}.part" for each in ("gone", "one", "other")]
    assert [made_by_first(names, wanted) for wanted in (1, 2, 3)] == ["one", "other", None]
