"""Writes docs/api.md from the source: signatures and docstrings of farflung's public names.

    python docs/make_api.py

It reads the files and imports nothing of them, so the page is the same on every machine.  A test keeps it up to date.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = HERE / "api.md"
LINE = 110

HEAD = """# The API

Made from the docstrings by `python docs/make_api.py`; change those, not this page. How the pieces are used together:
[train your own model](train.md). What is not on this page may change without notice.
"""


def public_names() -> list[tuple[str, Path]]:
    """Each public name with the file that defines it, in the order of `farflung.__all__`."""
    root = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in root.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    homes: dict[str, str] = constants["_HOME_OF"]
    files = {name: ROOT.joinpath(*home.split(".")[1:]).with_suffix(".py") for name, home in homes.items()}
    return [(name, files[name]) for name in constants["__all__"] if name in files]


class Source:
    """One file: its definitions, and its lines, from which comments are taken."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.lines = text.splitlines()
        self.defined = {
            node.name: node
            for node in ast.parse(text).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }

    def comment(self, node: ast.stmt) -> str:
        """What stands behind the statement, for readers of the code."""
        return linked(self.lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2].strip())


def linked(text: str) -> str:
    """Paths of other pages become links."""
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


def docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    """The docstring as Markdown: its lines are joined to paragraphs, and what is indented is code."""
    text = linked(inspect.cleandoc(ast.get_docstring(node) or ""))
    return "\n\n".join(
        code(textwrap.dedent(each)).rstrip() if each.startswith("    ") else " ".join(each.split())
        for each in text.split("\n\n")
    )


def signature(name: str, function: ast.FunctionDef, *, makes: bool = False) -> str:
    """As one would write the call, without `self`; over several lines where one would be too long."""
    given = parts(function.args)
    result = f" -> {ast.unparse(function.returns)}" if function.returns and not makes else ""
    line = f"{name}({', '.join(given)}){result}"
    if len(line) <= LINE:
        return line
    rows = "".join(f"    {each},\n" for each in given)
    return f"{name}(\n{rows}){result}"


def parts(arguments: ast.arguments) -> list[str]:
    """The arguments one by one, but for `self`."""
    text, depth, found = ast.unparse(arguments), 0, [""]
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    spaced = [re.sub(r"^(\w+: [^=]*)=", r"\1 = ", each.strip()) for each in found]
    return [each for each in spaced if each != "self"]


def code(text: str) -> str:
    return f"```\n{text}\n```\n"


def function_page(name: str, function: ast.FunctionDef) -> str:
    return f"## {name}\n\n{code(signature(f'farflung.{name}', function))}\n{docstring(function)}\n"


def class_page(name: str, node: ast.ClassDef, source: Source) -> str:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    made = next((each for each in methods if each.name == "__init__"), None)
    shown = [each for each in methods if not each.name.startswith("_")]
    pieces = [f"## {name}\n"]
    if made is not None and not takes_private_things(node):
        pieces.append(code(signature(f"farflung.{name}", made, makes=True)))
    pieces.append(f"{docstring(node)}\n")
    rows = attributes(made, source) if made is not None else []
    rows += [
        (each.name, kind(each), " ".join(docstring(each).split())) for each in shown if is_property(each)
    ]
    if rows:
        pieces.append("| attribute | type | what it is |\n|---|---|---|")
        pieces += [f"| `{what}` | `{of}` | {text} |" for what, of, text in rows]
        pieces.append("")
    for each in shown:
        if not is_property(each):
            pieces.append(
                f"### {name}.{each.name}\n\n{code(signature(each.name, each))}\n{docstring(each)}\n"
            )
    return "\n".join(pieces)


def takes_private_things(node: ast.ClassDef) -> bool:
    """Whether nobody makes it by hand: then its docstring says who does."""
    return "Made by" in (ast.get_docstring(node) or "")


def is_property(function: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in function.decorator_list)


def kind(function: ast.FunctionDef) -> str:
    return ast.unparse(function.returns) if function.returns else ""


def attributes(made: ast.FunctionDef, source: Source) -> list[tuple[str, str, str]]:
    """(name, type, comment) of each public attribute that is one of the arguments."""
    types = {each.arg: ast.unparse(each.annotation) for each in made.args.args if each.annotation}
    found = []
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            if node.target.attr.startswith("_"):
                continue
            of = ast.unparse(node.annotation).replace("Optimizer", "torch.optim.Optimizer")
            found.append((node.target.attr, of, source.comment(node)))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            name = node.targets[0].attr
            if not name.startswith("_") and isinstance(node.value, ast.Name):
                found.append((name, types[node.value.id], source.comment(node)))
    return found


def page() -> str:
    pieces = [HEAD]
    for name, path in public_names():
        source = Source(path)
        node = source.defined[name]
        made = class_page(name, node, source) if isinstance(node, ast.ClassDef) else function_page(name, node)
        pieces.append(made)
    version = "## \\_\\_version\\_\\_\n\nThe version of farflung, a `str`.\n"
    return "\n".join([*pieces, version])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
