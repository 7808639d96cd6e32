"""The commands that look and change nothing: `farflung doctor` (facts, findings, a line for each, an exit code) and
what takes more than a line of `farflung status` (a live run or a replay, on the screen, as one frame, or as a picture).

Called by the command line.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from farflung.console.doctor.advice import FAIL, OK, WARN, Advice, examine
from farflung.console.doctor.facts import of_the_run, of_this_machine
from farflung.console.history.history import read_folder
from farflung.console.history.recorded_run import Recording
from farflung.console.history.replay import Replay
from farflung.console.screen import live
from farflung.console.screen.live import has_terminal
from farflung.console.screen.status_client import StatusClient
from farflung.peer.settings import OwnConfig
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process import exit_codes

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


def _show(findings: list[Advice], failed: list[str], with_run: bool) -> None:
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
        console.print("this machine is ready; add the join URL to test the connection as well")


# ---- farflung status ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookOptions:
    """`url` or `replay`, and of the rest what goes with it."""

    url: JoinUrl | None
    replay: Path | None
    at_s: float | None
    watch: bool
    svg: Path | None
    as_json: bool


def look(options: LookOptions) -> None:
    if options.replay is not None:
        recording = Recording.of(*read_folder(options.replay).told)
        replay = Replay(recording)
        replay.at_s = options.at_s or 0.0
        if options.watch and has_terminal(sys.stdout):
            live.interact(replay)
            return
        status = replay.status_at(recording.seconds if options.at_s is None else options.at_s)
    else:
        assert options.url is not None
        if options.watch:
            live.watch(options.url)
            return
        with StatusClient(options.url) as client:
            status = client.fetch(live.FETCH_S)
    if options.svg is not None:
        live.save_svg(status, options.svg)
        print(f"wrote {options.svg}", file=sys.stderr)
    elif options.as_json:
        print(json.dumps(status))
    else:
        live.print_frame(status)
