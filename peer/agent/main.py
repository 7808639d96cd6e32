"""The agent as a process: the child of a training script (peer/trainer/agent_process.py starts it).

Called as `python -m farflung.peer.agent.main`.  Knows options, signals and exit codes, not what an agent does.
Torch, which takes some seconds to load, comes after the first line that it says.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.peer.agent.supervisor import ParentTrainer
from farflung.peer.identity import InUse, path_of
from farflung.peer.settings import OwnConfig
from farflung.peer.worker import load_libraries
from farflung.protocol.errors import FarflungError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process import exit_codes
from farflung.protocol.process.log_lines import Teller
from farflung.protocol.process.sockets import take_all_descriptors

if TYPE_CHECKING:
    from farflung.peer.agent.agent import Agent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m farflung.peer.agent.main")
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--settings", required=True, type=OwnConfig.from_json)
    parser.add_argument("--journal", type=Path)
    asked = parser.parse_args()
    say = Teller.from_environment("agent")
    try:
        url = JoinUrl.parse(asked.url)
        if asked.settings.relay:
            say("relay: `farflung join` and `farflung assist` offer one; an agent of a script does not")
        held = InUse.take(path_of(asked.settings.identity, url), asked.parent, say)
        doing = f"joining {url.run} at {url.address}"
        say(f"{doing}: loading torch in the agent, which takes some seconds")
        load_libraries()
        from farflung.peer.agent.agent import Agent
        from farflung.peer.agent.options import AgentOptions

        take_all_descriptors()
        agent = Agent(
            AgentOptions(url, asked.folder, asked.settings, asked.journal),
            ParentTrainer(asked.parent),
            say,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: _leave(agent, held))
        end = agent.run()
    except FarflungError as error:
        say.failed(str(error))
        return exit_codes.code_for(error)
    return exit_codes.for_refusal(end.code)


def _leave(agent: Agent, held: InUse) -> None:
    held.leave()
    agent.ask_to_leave()


if __name__ == "__main__":
    sys.exit(main())
