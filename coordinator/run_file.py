"""`run.toml` from the disk, with what the command line says in place of its keys.

Called by the console before anything large is loaded, and by the coordinator.  What the keys mean is in manifest.py.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest

_KEY = r"[A-Za-z0-9_-]{1,60}"


def read_manifest(path: Path, changes: Sequence[str]) -> Manifest:
    """Who reads of a mistake sees whether it may stand in the file or on the command line."""
    name = " with ".join([str(path), *(f"--set {each}" for each in changes)])
    try:
        return Manifest.from_toml(path.read_text(encoding="utf-8"), name, [_change(each) for each in changes])
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}; `farflung init` writes one") from error


def _change(words: str) -> tuple[str, str, Any]:
    """SECTION.KEY=VALUE.  The value is TOML; a word that is none is text, since shells take quotes away."""
    where, equals, raw = words.partition("=")
    section, _, key = where.strip().partition(".")
    if not (equals and re.fullmatch(_KEY, section) and re.fullmatch(_KEY, key)):
        raise UserError(f"--set {words}: expected SECTION.KEY=VALUE, such as --set round.sync_every=50")
    if "\n" in raw:
        raise UserError(f"--set {where}: the value must be on one line")
    try:
        return section, key, tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        return section, key, raw.strip()
