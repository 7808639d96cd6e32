"""The list of mutants does not rot: each rule stands where it says, and its tests are there."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutant_list import MUTANTS, Mutant
from rooms import ROOT

# One process has what all of these parse; three would each parse it.
pytestmark = pytest.mark.xdist_group("house: mutants")


def test_there_are_sixty_and_each_has_a_name_of_its_own() -> None:
    assert len({each.name for each in MUTANTS}) == len(MUTANTS) >= 60
    assert len({(each.file, each.old) for each in MUTANTS}) == len(MUTANTS)


@functools.cache
def parsed(file: str) -> str:
    return ast.dump(ast.parse((ROOT / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_a_mutant_changes_one_line_of_a_rule_that_is_there(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times"
    after = text.replace(mutant.old, mutant.new)
    if mutant.file.endswith(".py"):
        assert ast.dump(ast.parse(after)) != parsed(mutant.file), "it changes nothing, or is no Python"
    before, changed = text.splitlines(), after.splitlines()
    assert len(before) == len(changed)
    assert sum(a != b for a, b in zip(before, changed, strict=True)) == 1
    assert mutant.tests and all((ROOT / test).is_file() for test in mutant.tests)
