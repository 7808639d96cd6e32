"""The modes that can be taken out, and what each brings.

A mode is a folder.  The core never imports it: it asks here for the module in which the mode begins, and goes on
without it where the folder is gone.  This list, in its order, is all that the core knows of modes; there is nothing to
register and nothing to discover.  tests/house/test_modes.py takes each folder out of a copy and runs the rest.

What such a module may have: `LedgerPart`, a class that folds records (coordinator/ledger/ledger.py); `RECORDS`, the
types of its records; `made`, which makes its part of the run machine (mode.py); `stands_by` and `ask_peers`
(coordinator/run_lead.py), and `asking`, which is the latter without a socket (simulator/cut_lines.py).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any, Final

from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest

# Name -> the module in which it begins.
BEGINNINGS: Final = {
    "admission": "farflung.coordinator.admission.admission",
    "restoring": "farflung.coordinator.restoring.restoring_door",
    "standby": "farflung.coordinator.standby.standby",
}
# Name -> the module with its `hand` in the server (`FileHand`): it looks at files of the host's.
HANDS: Final = {"admission": "farflung.coordinator.admission.allowlist"}
# Name -> the section of run.toml that is the mode's.
SECTIONS: Final = {"admission": "admission"}


def check(manifest: Manifest) -> None:
    """UserError: the host wants something of a mode that was taken out.  A run that is to be by invitation must not be
    open because of that."""
    for mode, section in SECTIONS.items():
        wanted = getattr(manifest, section)
        if found(mode) is None and wanted != type(wanted)():
            raise UserError(
                f"[{section}] of run.toml is not as by default, and this coordinator was installed without {mode}: "
                "leave that section out, or install it whole"
            )


def found(mode: str) -> ModuleType | None:
    """None: its folder was taken out.  What fails within the folder fails here."""
    return _module(BEGINNINGS[mode])


@functools.cache
def _module(name: str) -> ModuleType | None:
    folder = name.rpartition(".")[0]
    return importlib.import_module(name) if importlib.util.find_spec(folder) is not None else None


def hands() -> dict[str, Any]:
    """Of each mode that is there and has one."""
    return {name: module.hand for name, path in HANDS.items() if (module := _module(path)) is not None}


def having(what: str) -> dict[str, Any]:
    """Of each mode that is there and has it."""
    here = {name: module for name in BEGINNINGS if (module := found(name)) is not None}
    return {name: getattr(module, what) for name, module in here.items() if hasattr(module, what)}


def records() -> tuple[type[Any], ...]:
    """The types of the records of all modes that are there."""
    return tuple(kind for kinds in having("RECORDS").values() for kind in kinds)
