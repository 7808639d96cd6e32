"""The command line of `farflung doctor`: facts, findings, a line for each, and an exit code.

Called by the command line.
"""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.text import Text

from farflung.coordinator.url import JoinUrl
from farflung.peer import exit_codes
from farflung.peer.doctor import FAIL, OK, WARN, Finding, examine
from farflung.peer.doctor_facts import of_the_run, of_this_machine
from farflung.peer.own_config import OwnConfig

_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def run_doctor(url: JoinUrl | None, own: OwnConfig, as_json: bool) -> int:
    """0 if this machine can take part, with or without warnings; BLOCKED if something keeps it out."""
    if url is not None and not as_json:
        print(
            "looking at this machine and its way to the run; a slow line takes some seconds", file=sys.stderr
        )
    facts = of_this_machine()
    if url is not None:
        of_the_run(facts, url, own)
    findings = examine(facts)
    failed = [finding.name for finding in findings if finding.verdict == FAIL]
    if as_json:
        told = [finding._asdict() for finding in findings]
        print(json.dumps({"ok": not failed, "findings": told}))
    else:
        _show(findings, failed, url is not None)
    return exit_codes.BLOCKED if failed else exit_codes.OK


def _show(findings: list[Finding], failed: list[str], with_run: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text.assemble(
            (f"{finding.verdict:<5}", _STYLES[finding.verdict]), f"{finding.name:<{width + 2}}{finding.text}"
        )
        console.print(line)
        if finding.todo:
            console.print(Text(" " * (width + 7) + "-> " + finding.todo))
    if failed:
        console.print(f"this machine cannot take part yet: {', '.join(failed)}")
    elif with_run:
        console.print("this machine can take part")
    else:
        console.print("this machine is fit; with a join URL the way to the run is looked at, too")
