"""The package of examples/own_rules as pip would have installed it, in a folder that is put before all others."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

import farflung.compression.codec as codecs
from farflung.compression import plain_codecs
from farflung.protocol import extensions

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_rules"
Groups = Mapping[str, Mapping[str, str]]  # of entry points


def write_package(folder: Path, name: str, groups: Groups, module: str = "") -> None:
    """`module`: the text of a module of that name."""
    about = folder / f"{name}-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [
        line
        for group, words in groups.items()
        for line in (f"[{group}]", *(f"{word} = {where}" for word, where in words.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    if module:
        (folder / f"{name}.py").write_text(module)


def write_example(folder: Path) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    write_package(folder, "own_rules", project["entry-points"])
    shutil.copy(EXAMPLE / "own_rules.py", folder)


def forget() -> None:
    """What this process knew of installed packages."""
    caches = extensions._installed, extensions.loaded, plain_codecs._own_codec, codecs.codec_named
    for each in caches:
        each.cache_clear()
