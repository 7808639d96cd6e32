"""The modes that can be taken out, and what each brings.

A mode is a folder.  The core never imports it: it asks here for the module in which the mode begins, and goes on
without it where the folder is gone.  This list, in its order, is all that the core knows of modes; there is nothing to
register and nothing to discover.  tests/house/test_modes.py takes each folder out of a copy and runs the rest.

What such a module may have: `LedgerPart`, a class that folds records (coordinator/ledger/ledger.py); `RECORDS`,
the types of its records; `made`, which makes its part of the run machine (mode.py), or None where the run has no use
for it; `stands_by` and `ask_peers` (coordinator/run_lead.py), and `asking`, which is the latter without a socket
(simulator/cut_lines.py). Elsewhere it may have a `hand` in the server.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.mode_folders import module_of

# Name -> the module in which it begins.
BEGINNINGS: Final = {
    "admission": "farflung.coordinator.admission.admission",
    "audits": "farflung.coordinator.audits.audits",
    "batches": "farflung.coordinator.batches.batch_mode",
    "mesh": "farflung.coordinator.mesh.mesh",
    "reach": "farflung.coordinator.reach.reach",
    "recovery": "farflung.coordinator.recovery.recovery",
    "restoring": "farflung.coordinator.restoring.restoring_door",
    "slow lines": "farflung.coordinator.slow_lines.slow_lines",
    "standby": "farflung.coordinator.standby.standby",
}
# Name -> the module with its `hand` in the server (`ServerHand`).
HANDS: Final = {
    "admission": "farflung.coordinator.admission.allowlist",
    "reach": "farflung.coordinator.relay.relay_hand",
}
# Name -> the section of run.toml that is the mode's.
SECTIONS: Final = {"admission": "admission"}
# Name -> (section, key) of run.toml by which the host asks for something of the mode's, and what asks for nothing.
KEYS: Final = {
    "audits": ("merge", "audit", 0.0),
    "batches": ("pipeline", "batch", 0),
    "mesh": ("round", "group", 0),
    "reach": ("net", "relay", "off"),
}


def check(manifest: Manifest) -> None:
    """UserError: the host wants something of a mode that was taken out.  A run that is to be by invitation must not be
    open because of that.  What it asks for by default alone is no reason."""
    for mode, section in SECTIONS.items():
        wanted = getattr(manifest, section)
        if found(mode) is None and wanted != type(wanted)():
            raise UserError(
                f"[{section}] of run.toml is not as by default, and this coordinator was installed without {mode}: "
                "leave that section out, or install it whole"
            )
    for mode, (section, key, nothing) in KEYS.items():
        part = getattr(manifest, section)
        asked = getattr(part, key)
        if found(mode) is None and asked not in (nothing, getattr(type(part)(), key)):
            raise UserError(
                f"[{section}] {key} = {asked!r} of run.toml: this coordinator was installed without {mode}: "
                f"leave that out, say {nothing!r}, or install it whole"
            )


def lacking() -> str:
    """For people: the modes that were taken out; empty: none."""
    names = [mode for mode in BEGINNINGS if found(mode) is None]
    return (
        f"this coordinator was installed without {', '.join(names)} (docs/architecture.md)" if names else ""
    )


def found(mode: str) -> ModuleType | None:
    """None: its folder was taken out."""
    return module_of(BEGINNINGS[mode])


def hands() -> dict[str, Any]:
    """Of each mode that is there and has one."""
    return {name: module.hand for name, path in HANDS.items() if (module := module_of(path)) is not None}


def having(what: str) -> dict[str, Any]:
    """Of each mode that is there and has it."""
    here = {name: module for name in BEGINNINGS if (module := found(name)) is not None}
    return {name: getattr(module, what) for name, module in here.items() if hasattr(module, what)}


def records() -> tuple[type[Any], ...]:
    """The types of the records of all modes that are there."""
    return tuple(kind for kinds in having("RECORDS").values() for kind in kinds)
