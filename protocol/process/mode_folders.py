"""Parts of modes, found by name.  Pure.

A mode is a folder, which the core never imports; where the folder is gone, so is its part.
Asked by whoever has a table of such names: both machines (coordinator/modes, peer/machine/modes.py), a trainer, the
doctor, the public names of farflung.  Knows none of them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from farflung.protocol.errors import UserError


@functools.cache
def module_of(name: str) -> ModuleType | None:
    """None: its folder was taken out.  What fails within the folder fails here."""
    folder = name.rpartition(".")[0]
    return importlib.import_module(name) if importlib.util.find_spec(folder) is not None else None


def needed(name: str, what: str) -> ModuleType:
    """`what`: somebody asked for, and it can't be done without this module."""
    module = module_of(name)
    if module is None:
        folder = name.rpartition(".")[0].removeprefix("farflung.").replace(".", "/")
        raise UserError(f"{what}: this farflung was installed without {folder}: install it whole")
    return module


def made_by_first(names: Sequence[str], *facts: object) -> Any:
    """By the first of these modules whose `made` has a use for the facts; None: by none."""
    here = [module for name in names if (module := module_of(name)) is not None]
    return next((made for module in here if (made := module.made(*facts)) is not None), None)
