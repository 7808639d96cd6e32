"""Outer steps, codecs and merge rules of packages that are installed here, by the words that run.toml has for them.

A package names what it has as entry points (docs/extend.md).  A run says a word and never code: a host can choose among
what the owner of a machine has installed, and nothing else.  What is loaded passes the suite of its kind before it is
used, because one peer with other bits would break P1 for all; the suites are found by name, as they need numpy.
Called by the manifest, which refuses words that nobody here knows, and by optim/, compression/ and collectives/, each
for what it takes part in.  Must not know how any of these works.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from farflung.protocol.errors import UserError

OWN_NUMBERS_FROM = 128
_SUITES = "farflung.collectives.arithmetic.conformance"
WORD = r"^[a-z][a-z0-9_-]{0,39}$"  # of run.toml, before anything is looked up


@dataclass(frozen=True)
class ExtensionKind:
    what: str
    group: str  # of entry points
    suite: str  # a function that says why one can't take part, or nothing


OUTER_STEP = ExtensionKind("outer step", "farflung.outer_steps", f"{_SUITES}:flaw_of_step")
CODEC = ExtensionKind("codec", "farflung.codecs", f"{_SUITES}:flaw_of_codec")
MERGE_RULE = ExtensionKind("merge rule", "farflung.merge_rules", f"{_SUITES}:flaw_of_rule")


@functools.cache
def _installed(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for each in entry_points(group=group):
        found[each.name] = (*found.get(each.name, ()), each)
    return found


def words(kind: ExtensionKind) -> list[str]:
    return sorted(_installed(kind.group))


def codec_number(word: str) -> int:
    """In the head of its payloads; those below are for codecs of our own."""
    return OWN_NUMBERS_FROM + zlib.crc32(word.encode()) % OWN_NUMBERS_FROM


def codec_word(number: int) -> str:
    """The word of an installed one, or empty."""
    return next((word for word in words(CODEC) if codec_number(word) == number), "")


@functools.cache
def loaded(kind: ExtensionKind, word: str) -> Any:
    """UserError: no package here has it, or what the package has can't take part in a run."""
    entries = _installed(kind.group).get(word, ())
    if not entries:
        others = ", ".join(words(kind))
        raise UserError(f'no installed package has the {kind.what} "{word}" (there is {others or "none"})')
    if len(entries) > 1:
        raise UserError(
            f'the {kind.what} "{word}" is in {" and in ".join(_package(each) for each in entries)}'
        )
    if kind is CODEC:
        alike = [
            other for other in words(CODEC) if other != word and codec_number(other) == codec_number(word)
        ]
        if alike:
            raise UserError(f'the codecs "{word}" and "{alike[0]}" are of one number: uninstall one')
    told = f'the {kind.what} "{word}" of {_package(entries[0])}'
    try:
        made = entries[0].load()
    except Exception as error:  # outermost: it is a stranger's, and whatever it raises is its fault
        raise UserError(f"{told} cannot be loaded: {error}") from error
    if flaw := EntryPoint("", kind.suite, "").load()(made):
        raise UserError(f"{told} cannot take part in a run: {flaw}")
    return made


def _package(entry: EntryPoint) -> str:
    dist = entry.dist
    return f"{dist.name} {dist.version}" if dist is not None else entry.value
