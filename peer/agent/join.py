"""`farflung join`: the agent in this process, and a trainer that it starts and starts again.

Called by the command line.  The trainer is the built-in one, or a script that the volunteer names: code never
comes from the run (a manifest is data).

Both processes need torch, which takes a second to load, and much longer on a busy machine.  So this module does not
load it: mistakes are told first (of words and files, whether another process is this peer, whether the coordinator is
there), then what happens; the trainer loads its torch while the agent loads this process's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.peer.agent.supervisor import ChildTrainer, NoTrainer, Supervisor
from farflung.peer.first_contact import check
from farflung.peer.identity import Identity, InUse, path_of
from farflung.peer.line.reachability import RelayHere
from farflung.peer.local.folder import make_folder, remove_folder, sweep_stale
from farflung.peer.settings import (
    DATA_VARIABLE,
    RESULTS_VARIABLE,
    OwnConfig,
    refuse_contradictions,
)
from farflung.peer.trainer.agent_process import AGENT_VARIABLE
from farflung.peer.worker import load_libraries
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process import exit_codes
from farflung.protocol.process.log_lines import LineWriter, Teller

if TYPE_CHECKING:
    from farflung.peer.agent.agent import Agent
    from farflung.peer.machine.effects import Exit


@dataclass(frozen=True)
class JoinOptions:
    url: JoinUrl
    own: OwnConfig
    script: Path | None = None
    script_arguments: tuple[str, ...] = ()
    out: Path | None = None
    nproc: int = 1  # processes of the script, which train together
    helps: bool = False  # without a trainer: `farflung assist`
    # The relay that the volunteer's settings ask for: whoever calls knows how to start one.
    relay: Callable[[LineWriter], RelayHere | None] = lambda say: None


def join(options: JoinOptions) -> int:
    """Take part until the run is over or the user leaves; returns the exit code."""
    if options.out is not None and not options.out.parent.is_dir():
        raise UserError(f"--out {options.out}: the folder {options.out.parent} does not exist")
    refuse_contradictions(options.own)
    command = _command(options) if not options.helps else []
    say = Teller.from_environment("peer")
    held = InUse.take(path_of(options.own.identity, options.url), os.getpid(), say)
    try:
        Identity.load_or_create(options.own.identity)
        check(options.url, options.own, say)
        return _take_part(options, command, say, held)
    finally:
        held.free()


def _take_part(options: JoinOptions, command: list[str], say: Teller, held: InUse) -> int:
    does = "helping" if options.helps else "joining"
    doing = f"{does} {options.url.run} at {options.url.address}"
    say(f"{doing}: loading torch, which takes some seconds", wait="loading", why="loading torch")
    relay = options.relay(say)  # what is wrong with that is told before anything begins
    sweep_stale()
    folder = make_folder()
    trainer = NoTrainer() if options.helps else _trainer(options, command, folder)
    try:
        with _on_stop_signals(lambda: _give_up(held)):
            trainer.watch(time.monotonic())  # it starts now, and waits for its agent where that takes longer
            agent = _agent(options, folder, trainer, say, relay)

            def leave() -> None:
                held.leave()
                agent.ask_to_leave()

            with _on_stop_signals(leave):
                end = agent.run()
    except KeyboardInterrupt:
        say("left before it had joined")
        return exit_codes.OK
    finally:
        trainer.kill()
        remove_folder(folder)
    return _conclude(end, trainer, say)


def _trainer(options: JoinOptions, command: list[str], folder: Path) -> ChildTrainer:
    return ChildTrainer(command, os.environ | _told(options, folder), options.nproc, AGENT_VARIABLE)


def _told(options: JoinOptions, folder: Path) -> dict[str, str]:
    """What the trainer finds in its environment."""
    told = {AGENT_VARIABLE: str(folder)}
    if options.own.data:
        told[DATA_VARIABLE] = options.own.data
    if options.own.results:
        told[RESULTS_VARIABLE] = options.own.results
    return told


def _agent(
    options: JoinOptions, folder: Path, trainer: Supervisor, say: Teller, relay: RelayHere | None
) -> Agent:
    load_libraries()
    from farflung.peer.agent.agent import Agent
    from farflung.peer.agent.options import AgentOptions

    asked = AgentOptions(options.url, folder, options.own, relay=relay, helps=options.helps)
    return Agent(asked, trainer, say)


def _give_up(held: InUse) -> None:
    """There is no agent yet that could leave in good order."""
    held.leave()
    raise KeyboardInterrupt


@contextlib.contextmanager
def _on_stop_signals(act: Callable[[], None]) -> Iterator[None]:
    before = [(number, signal.signal(number, lambda *_: act())) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _command(options: JoinOptions) -> list[str]:
    if options.script is None:
        if options.nproc > 1:
            raise UserError(
                f"--nproc {options.nproc}: the built-in trainer is one process; name a script of your own with "
                "--script (docs/islands.md), or start one peer for each GPU, each with an --identity of its own"
            )
        if options.script_arguments:
            said = " ".join(options.script_arguments)
            raise UserError(
                f"unexpected after the URL: {said}; options come before it, arguments need --script"
            )
        out = ["--out", str(options.out)] if options.out is not None else []
        return [sys.executable, "-m", "farflung.peer.builtin.trainer", *out]
    if not options.script.is_file():
        raise UserError(f"--script {options.script}: there is no such file")
    return [sys.executable, str(options.script), *options.script_arguments]


def _conclude(end: Exit, trainer: ChildTrainer | NoTrainer, say: Teller) -> int:
    if end.code == "finished":
        say("the run is complete; thank you for taking part")
    elif end.code == "left":
        say(f"left the run: {end.reason}")
    else:
        say(f"cannot take part: {end.reason}")
    return trainer.hopeless_code or exit_codes.for_refusal(end.code)
