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


def complaint_about(mutant: Mutant) -> str:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times"
    before, changed = text.splitlines(), text.replace(mutant.old, mutant.new).splitlines()
    different = [number for number, (a, b) in enumerate(zip(before, changed, strict=False), 1) if a != b]
    if len(before) != len(changed) or len(different) != 1:
        return "it changes other than one line"
    if mutant.file.endswith(".py"):
        lines = around(module(mutant.file).tree, different[0])
        if dumped(changed[lines]) == dumped(before[lines]):
            return "it changes nothing"
    return "" if mutant.tests and all((ROOT / test).is_file() for test in mutant.tests) else "it lacks a test"


def test_a_mutant_changes_one_line_of_a_rule_that_is_there() -> None:
    found = [(mutant.name, complaint_about(mutant)) for mutant in MUTANTS]
    assert [(name, told) for name, told in found if told] == []
