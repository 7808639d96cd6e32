"""The list of mutants does not rot: each rule stands where it says, and its tests are there."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutant_list import MUTANTS, Mutant
from rooms import ROOT, Module

# One process has what all of these parse; three would each parse it.
pytestmark = pytest.mark.xdist_group("house: mutants")


def test_there_are_sixty_and_each_has_a_name_of_its_own() -> None:
    assert len({each.name for each in MUTANTS}) == len(MUTANTS) >= 60
    assert len({(each.file, each.old) for each in MUTANTS}) == len(MUTANTS)


@functools.cache
def module(file: str) -> Module:
    return Module(ROOT / file)


def around(tree: ast.Module, line: int) -> slice:
    """Lines of the smallest function or class with this one in it: to parse whole modules takes ten times as long."""
    found: ast.AST = tree
    lines = slice(None)
    while inner := [
        each
        for each in ast.iter_child_nodes(found)
        if isinstance(each, ast.stmt) and each.lineno <= line <= (each.end_lineno or each.lineno)
    ]:
        [found] = inner
        if isinstance(found, ast.FunctionDef | ast.ClassDef):
            lines = slice(found.lineno - 1, found.end_lineno)
    return lines


def dumped(lines: list[str]) -> str:
    outer = ["if True:"] if lines[0].startswith(" ") else []
    return ast.dump(ast.parse("\n".join([*outer, *lines])))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_a_mutant_changes_one_line_of_a_rule_that_is_there(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times"
    after = text.replace(mutant.old, mutant.new)
    before, changed = text.splitlines(), after.splitlines()
    assert len(before) == len(changed)
    [line] = [number for number, (a, b) in enumerate(zip(before, changed, strict=True), 1) if a != b]
    if mutant.file.endswith(".py"):
        lines = around(module(mutant.file).tree, line)
        assert dumped(changed[lines]) != dumped(before[lines]), "it changes nothing, or is no Python"
    assert mutant.tests and all((ROOT / test).is_file() for test in mutant.tests)
