"""A folder that `from_pretrained` loads: put in place so that a reader finds a whole model there, or none.

Owns: how such a folder is replaced; which files of one are weights, which say what they are, which a tokenizer's.
Called by `run.save_pretrained`, `farflung checkpoint export --hf` and `farflung publish`.
Must not know what the files hold.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from farflung.protocol.errors import UserError

# By the file without which nothing is loaded: where its weights are told, and the weights.  What an earlier save left
# of these would be read instead of the new ones, or beside them; what belongs to the other kind stays.
KINDS = {
    "config.json": ("model.safetensors.index.json", "model.safetensors", "model-*-of-*.safetensors"),
    "adapter_config.json": ("adapter_model.safetensors",),
}
# Of a tokenizer and of a processor: small, and as they are.
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


def fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """An empty folder to write into.  When the block ends well, its files are in `folder`, and no other weights are.

    Other files that lie there stay.  A process that dies before leaves at most a hidden folder beside it; one that dies
    while files are moved leaves a folder that loads not at all, and not a mixture of two models.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        if not folder.exists():
            aside.replace(folder)
        else:
            _moved_into(folder, aside)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _moved_into(folder: Path, aside: Path) -> None:
    """What says what the folder holds goes before anything changes, and comes back when all of it is there."""
    if not folder.is_dir():
        raise UserError(f"cannot write {folder}: there is a file of this name")
    for config in KINDS:
        if (aside / config).is_file():
            old = [
                path for path in sorted(folder.iterdir()) if path.is_file() and fits(path.name, KINDS[config])
            ]
            for path in (folder / config, *old):
                path.unlink(missing_ok=True)
    for path in sorted(aside.iterdir(), key=lambda path: (path.name in KINDS, path.name)):
        if path.is_dir() and (folder / path.name).is_dir():
            _moved_into(folder / path.name, path)
        else:
            path.replace(folder / path.name)


def copy_files(source: Path, target: Path, patterns: Iterable[str]) -> None:
    """Those directly in `source`; symbolic links, as of a hub's cache, are followed."""
    wanted = tuple(patterns)
    for path in sorted(source.iterdir()):
        if path.is_file() and fits(path.name, wanted):
            shutil.copyfile(path, target / path.name)
