"""Programs read causes, people read sentences: no module looks into a sentence to find out what happened.

A sentence is what a variable, a field or a key with one of these names holds, and whatever is made of it: `reason`,
`why`, ...  Looking into one is comparing it, searching in it, or matching it with a pattern.  That it is there at
all may be asked (`if reason:`, `reason == ""`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = ("protocol", "compression", "optim", "collectives", "checkpoints", "coordinator", "peer", "console")
NAMES = {"reason", "reasons", "why", "because", "gone_because", "left_out"}
SENTENCES = NAMES | {"text"}  # as a field or a key; a variable of that name may be any text
LOOKING = {"startswith", "endswith", "find", "rfind", "index", "count", "split", "partition", "removeprefix"}
LOOKING |= {"rpartition", "rsplit", "splitlines", "removesuffix"}
PATTERNS = {"search", "match", "fullmatch", "findall", "finditer", "sub", "subn"}
# How often each of these may, and why.  (coordinator/ledger/old_sentences.py reads plain texts, and is there for that.)
MAY = {
    "protocol/messages.py": (1, 'a reason to leave is "finished" or a sentence: the wire has no cause'),
    "peer/local/words.py": (1, "the trainer's, too"),
    "peer/machine/machine.py": (1, "the same sentence is not told twice in a row"),
}


def is_sentence(node: ast.expr, known: set[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name in known
        case ast.Attribute(attr=name):
            return name in SENTENCES
        case ast.Subscript(value=value, slice=ast.Constant(value=key)):
            return key in SENTENCES or is_sentence(value, known)
        case ast.Subscript(value=value):
            return is_sentence(value, known)
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=key), *_]) if key in SENTENCES:
            return True
        case ast.Call(func=ast.Attribute(value=value, attr="lower" | "strip" | "get" | "casefold")):
            return is_sentence(value, known)
        case ast.Call(func=ast.Name(id="str"), args=[value]):
            return is_sentence(value, known)
        case ast.BoolOp(values=values):
            return any(is_sentence(value, known) for value in values)
        case ast.IfExp(body=body, orelse=otherwise):
            return is_sentence(body, known) or is_sentence(otherwise, known)
        case ast.NamedExpr(value=value):
            return is_sentence(value, known)
    return False


def is_empty(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in ("", None)


def known_in(function: ast.AST) -> set[str]:
    """Names that hold a sentence: by what they are called, or by what was assigned to them."""
    known = set(NAMES)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.NamedExpr) and is_sentence(node.value, known):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known |= {target.id for target in targets if isinstance(target, ast.Name)}
    return known


def looks(node: ast.AST, known: set[str]) -> bool:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            texts = any(is_sentence(each, known) for each in (left, *others))
            empty = any(is_empty(each) for each in (left, *others))
            return texts and not empty and not all(isinstance(op, ast.Is | ast.IsNot) for op in ops)
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=arguments):
            inside = name in LOOKING and is_sentence(value, known)
            return inside or (name in PATTERNS and any(is_sentence(each, known) for each in arguments))
        case ast.MatchClass(kwd_attrs=names, kwd_patterns=patterns):
            pairs = zip(names, patterns, strict=True)
            return any(name in SENTENCES and isinstance(each, ast.MatchValue) for name, each in pairs)
        case ast.MatchMapping(keys=keys, patterns=patterns):
            pairs = zip(keys, patterns, strict=True)
            return any(
                isinstance(key, ast.Constant) and key.value in SENTENCES and isinstance(each, ast.MatchValue)
                for key, each in pairs
            )
        case ast.Match(subject=subject):
            return is_sentence(subject, known)
    return False


def looks_into_sentences(source: str) -> Iterator[int]:
    """Lines."""
    tree = ast.parse(source)
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside: dict[int, set[str]] = {}
    for function in functions:
        inside |= dict.fromkeys(map(id, ast.walk(function)), known_in(function))
    for node in ast.walk(tree):
        if looks(node, inside.get(id(node), NAMES)):
            yield getattr(node, "lineno", 0)


def test_no_module_looks_into_a_sentence() -> None:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            lines = list(looks_into_sentences(path.read_text(encoding="utf-8")))
            may, why = MAY.get(name, (0, "nothing there may"))
            told = "reads a sentence; give what it asks for a cause (protocol/causes.py)"
            assert len(lines) == may, f"{name}, lines {lines}: {told}: {why}"


@pytest.mark.parametrize(
    "body",
    [
        'return "closed" in event["reason"]',
        'return any(word in each["reason"] for word in WORDS)',
        'return record.reason == "finished"',
        "return record.reason in WORDS",
        'return why.startswith("nothing heard")',
        'said = str(event.get("reason") or "")\n    return "closed" in said',
        'return re.search("I am", event.get("text"))',
        'return PATTERN.match(str(event["text"]))',
        'match record:\n        case Departed(reason="finished"):\n            return True',
        'match event:\n        case {"reason": "finished"}:\n            return True',
        'match record.reason:\n        case "finished":\n            return True',
        'return out["excluded"][0]["reason"].lower().find("late")',
        'return decision.reasons[peer] == "late"',
    ],
)
def test_each_way_of_looking_is_seen(body: str) -> None:
    assert list(looks_into_sentences(f"def f(event, record, each, why, out):\n    {body}\n"))


@pytest.mark.parametrize(
    "body",
    [
        'return f"left: {reason}"',
        'return reason == ""',
        "return why is None",
        'return event["cause"] in LOST',
    ],
)
def test_what_may_be_done_with_a_sentence(body: str) -> None:
    assert not list(looks_into_sentences(f"def f(event, reason, why):\n    {body}\n"))
