"""The modes that can be taken out, and what each brings.

A mode is a folder.  The core never imports it: it asks here for the module in which the mode begins, and goes on
without it where the folder is gone.  This list, in its order, is all that the core knows of modes; there is nothing to
register and nothing to discover.  tests/house/test_modes.py takes each folder out of a copy and runs the rest.

What such a module may have: `LedgerPart`, a class that folds records (coordinator/ledger/ledger.py); `RECORDS`, the
types of its records; `made`, which makes its part of the run machine (mode.py); `stands_by` (coordinator/run_lead.py).
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
    "audits": "farflung.coordinator.audits.audits",
    "recovery": "farflung.coordinator.recovery.recovery",
    "standby": "farflung.coordinator.standby.standby",
}
# Name -> the module with its `hand` in the server (`FileHand`): it looks at files of the host's.
HANDS: Final = {"admission": "farflung.coordinator.admission.allowlist"}
# Name -> what of run.toml is the mode's: a section, or a key of one that is false where the mode is off.
WANTED_BY: Final = {"admission": "admission", "audits": "merge.audit"}


def check(manifest: Manifest) -> None:
    """UserError: the host wants something of a mode that was taken out.  A run that is to be by invitation must not be
    open because of that."""
    for mode, name in WANTED_BY.items():
        section, _, key = name.partition(".")
        wanted = getattr(manifest, section)
        default = type(wanted)()
        if key:
            wanted, default = getattr(wanted, key), getattr(default, key)
        if found(mode) is None and wanted and wanted != default:
            raise UserError(
                f"[{section}]{f' {key} = {wanted}' if key else ''} of run.toml is not as by default, and this "
                f"coordinator was installed without {mode}: leave that out, or install it whole"
            )


def lacking() -> str:
    """For people: the modes that were taken out; empty: none."""
    names = [mode for mode in BEGINNINGS if found(mode) is None]
    return (
        f"this coordinator was installed without {', '.join(names)} (docs/architecture.md)" if names else ""
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
