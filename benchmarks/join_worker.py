"""The trainer of a peer in join.py: no model; a donor makes rounds with pauses between them, a joiner only arrives.

    python benchmarks/join_worker.py --url URL --identity FILE --told FILE [--pause 10] [--joiner] [--go FILE]
                                      [--value 0]

Writes one JSON line into `told` for each thing that happens: `attach` when it has said what its model is, and `load`
when a version of the run's state is its own.  A joiner ends after that.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from farflung.console.bench.trainer import POLL_S, TERMINATED, Floats, block, model_of, write_base
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import (
    Attach,
    Finish,
    Frozen,
    Loaded,
    LoadState,
    Provide,
    Provided,
    Shared,
    Stop,
)
from farflung.peer.trainer.agent_process import AgentProcess
from farflung.protocol.errors import Refused
from farflung.protocol.manifest import Manifest


class Worker:
    def __init__(self, agent: AgentProcess, manifest: Manifest, peer: str, asked: argparse.Namespace) -> None:
        self._agent, self._manifest, self._peer, self._asked = agent, manifest, peer, asked
        self._shared: SharedState | None = None
        self._written: set[int] = set()
        self._source: Floats = block()

    def tell(self, what: str, **more: object) -> None:
        with self._asked.told.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")

    def run(self) -> None:
        channel, parent = self._agent.channel, os.getppid()
        self.tell("ready")
        while self._asked.go is not None and not self._asked.go.exists():
            time.sleep(0.01)
        channel.send(Attach(model=model_of(self._manifest), pid=os.getpid()))
        self.tell("attach")
        while True:
            match channel.recv(POLL_S):
                case None:
                    if self._agent.problem() is not None or os.getppid() != parent:
                        raise Refused("agent", self._agent.problem() or "the bench is gone")
                case Shared() as message:
                    self._shared = SharedState.open(message)
                case Provide():
                    assert self._shared is not None
                    self._shared.anchor.fill_(self._asked.value)
                    channel.send(Provided())
                case LoadState() as load:
                    self.tell("load", version=load.version)
                    channel.send(Loaded(version=load.version, fragment=load.fragment))
                    if self._asked.joiner:
                        return
                    self._freeze(load)
                case Stop() as stop:
                    raise Refused(stop.code, stop.reason)
                case Finish():
                    return

    def _freeze(self, load: LoadState) -> None:
        """After the inner steps, of which there are none: they take their time."""
        time.sleep(self._asked.pause)
        assert self._shared is not None
        if load.spare not in self._written:
            write_base(self._shared.slots[load.spare].numpy(), self._peer, self._source)
            self._written.add(load.spare)
        frozen = Frozen(slot=load.spare, tokens=1, steps=1, used=(), loss=None, fragment=load.fragment)
        self._agent.channel.send(frozen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--identity", required=True)
    parser.add_argument("--told", required=True, type=Path)
    parser.add_argument("--pause", type=float, default=10.0)
    parser.add_argument("--value", type=float, default=0.0, help="of all parameters, where it founds the run")
    parser.add_argument("--go", type=Path, help="a joiner attaches when this file is there")
    parser.add_argument("--joiner", action="store_true")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    agent = AgentProcess.start_or_find(asked.url, {"identity": asked.identity})
    try:
        begin = agent.wait_for_begin()
        Worker(agent, Manifest.from_canonical(begin.manifest), begin.peer, asked).run()
    finally:
        agent.close("the bench is over")


if __name__ == "__main__":
    main()
