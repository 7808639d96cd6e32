"""`farflung join`: the agent in this process, and a trainer that it starts and starts again.

Called by the command line.  The trainer is the built-in one, or a script that the volunteer names: code never
comes from the run (a manifest is data).
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from farflung.peer.agent.agent import Agent, AgentOptions
from farflung.peer.agent.supervisor import ChildTrainer
from farflung.peer.local.memory import make_folder, remove_folder, sweep_stale
from farflung.peer.machine.effects import Exit
from farflung.peer.settings import DATA_VARIABLE, RECORD_VARIABLE, OwnConfig
from farflung.peer.trainer.agent_process import AGENT_VARIABLE
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process import exit_codes
from farflung.protocol.process.log_lines import Teller


@dataclass(frozen=True)
class JoinOptions:
    url: JoinUrl
    own: OwnConfig
    script: Path | None = None
    script_arguments: tuple[str, ...] = ()
    out: Path | None = None


def join(options: JoinOptions) -> int:
    """Take part until the run is over or the user leaves; returns the exit code."""
    if options.out is not None and not options.out.parent.is_dir():
        raise UserError(f"--out {options.out}: the folder {options.out.parent} does not exist")
    command = _command(options)
    say = Teller.from_environment("peer")
    torch.set_num_threads(1)
    sweep_stale()
    folder = make_folder()
    try:
        told = {AGENT_VARIABLE: str(folder)}
        if options.own.record is not None:
            told[RECORD_VARIABLE] = str(options.own.record)
        if options.own.data:
            told[DATA_VARIABLE] = options.own.data
        trainer = ChildTrainer(command, os.environ | told)
        agent_options = AgentOptions(options.url, folder, options.own)
        agent = Agent(agent_options, trainer, say)
        before = [signal.signal(n, lambda *_: agent.ask_to_leave()) for n in (signal.SIGTERM, signal.SIGINT)]
        try:
            end = agent.run()
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
                signal.signal(number, handler)
    finally:
        remove_folder(folder)
    return _conclude(end, trainer, say)


def _command(options: JoinOptions) -> list[str]:
    if options.script is None:
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


def _conclude(end: Exit, trainer: ChildTrainer, say: Teller) -> int:
    if end.code == "finished":
        say("the run is complete; thank you for taking part")
    elif end.code == "left":
        say(f"left the run: {end.reason}")
    else:
        say(f"cannot take part: {end.reason}")
    return trainer.hopeless_code or exit_codes.for_refusal(end.code)
