"""The modes that can be taken out, and where each begins.

A mode is a folder.  The core never imports it: it asks here for the module in which the mode begins, and goes on
without it where the folder is gone.  This list, in its order, is all that the core knows of modes; there is nothing to
register and nothing to discover.  tests/house/test_modes.py takes each folder out of a copy and runs the rest.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Final

# Name -> the module in which it begins.
BEGINNINGS: Final = {
    "standby": "farflung.coordinator.standby.standby",
}


@functools.cache
def found(mode: str) -> ModuleType | None:
    """None: its folder was taken out.  What fails within the folder fails here."""
    module = BEGINNINGS[mode]
    folder = module.rpartition(".")[0]
    return importlib.import_module(module) if importlib.util.find_spec(folder) is not None else None
