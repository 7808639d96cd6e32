"""Moved code is the same code: compares the files that git calls renamed between two commits, as syntax trees.

    python tests/house/same_code.py BEFORE AFTER

Left out: imports, docstrings, and how a module is called that was imported under its own name.  A text that names an
old path or module counts as equal to one that names the new one.  Prints each file that differs; exits with 1 if one
does.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def renamed(before: str, after: str) -> dict[str, str]:
    """old path -> new path, of all Python files that were in both."""
    found = {}
    for line in git("diff", "-M40%", "-l5000", "--name-status", before, after, "--", "*.py").splitlines():
        kind, *paths = line.split("\t")
        if kind.startswith("R"):
            found[paths[0]] = paths[1]
        elif kind == "M":
            found[paths[0]] = paths[0]
    return found


def dotted(path: str) -> str:
    return "farflung." + path.removesuffix(".py").replace("/", ".")


class Plain(ast.NodeTransformer):
    """A tree without what a move may change."""

    def __init__(self, tree: ast.AST, moved: dict[str, str]) -> None:
        modules = {dotted(old): dotted(new) for old, new in moved.items()}
        self._names = {**modules, **moved}
        old_names = sorted(self._names, key=len, reverse=True)
        self._old = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, old_names))})(?!\w)") if moved else None
        self._aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("farflung"):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    self._aliases[alias.asname or alias.name] = modules.get(whole, whole)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, BODIES):
            body = [each for each in node.body if not _is_import(each)]
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                body = body[1:]
            node.body = body
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        whole = self._aliases.get(node.id, "")
        is_module = (ROOT / whole.removeprefix("farflung.").replace(".", "/")).with_suffix(".py").is_file()
        return ast.Name(whole, node.ctx) if is_module else node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and self._old is not None:
            return ast.Constant(self._old.sub(lambda found: self._names[found[0]], node.value))
        return node


def _is_import(node: ast.AST) -> bool:
    for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return for_types or isinstance(node, ast.Import | ast.ImportFrom)


def plain(text: str, moved: dict[str, str]) -> str:
    tree = ast.parse(text)
    return ast.dump(Plain(tree, moved).visit(tree))


def main() -> int:
    before, after = sys.argv[1:]
    moved = renamed(before, after)
    different = []
    for old, new in sorted(moved.items()):
        was, is_now = git("show", f"{before}:{old}"), git("show", f"{after}:{new}")
        if plain(was, {o: n for o, n in moved.items() if o != n}) != plain(is_now, {}):
            different.append(f"{old} -> {new}")
    print(f"{len(moved) - len(different)} files hold the same code, {len(different)} do not")
    print("\n".join(different))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
