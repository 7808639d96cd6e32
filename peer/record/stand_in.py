"""A stand-in for the agent: it lets a trainer take one recorded span of steps again, and hands back what came of it.

Called by `farflung verify`.  The trainer is the real one, with the real machine and inner loop: it is told of a run
with this manifest, is given the recorded samples as leases, one for each batch, and stops at its first freeze.  What it
began with it puts back by itself (peer/trainer/recording.py).  Nothing here touches the network.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from farflung.peer.local.channel import Greeting, LocalServer
from farflung.peer.local.folder import make_folder, remove_folder
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Attach, Begin, Bye, FromTrainer, Frozen, LeasesNow, Load, Need, Stop
from farflung.peer.record.work_files import Work
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Lease

AGENT_VARIABLE = "FARFLUNG_AGENT"
POLL_MS = 200
GOODBYE_S = 20.0  # for the script to end by itself


@dataclass(frozen=True)
class Trainer:
    command: tuple[str, ...]
    environment: Mapping[str, str]


def take_again(work: Work, trainer: Trainer, patience_s: float) -> Tensor:
    """The pseudo-gradient of the whole model.  UserError if the script does not come to its end."""
    folder = make_folder()
    try:
        return _StandIn(work, folder, patience_s).run(trainer)
    finally:
        remove_folder(folder)


class _StandIn:
    def __init__(self, work: Work, folder: Path, patience_s: float) -> None:
        self._work, self._folder, self._patience_s = work, folder, patience_s
        self._manifest = Manifest.from_canonical(work.head.manifest)
        self._fragments = work.head.model.fragments(self._manifest.fragments)
        self._shared: SharedState | None = None
        self._frozen: dict[int, Frozen] = {}  # by fragment

    def run(self, trainer: Trainer) -> Tensor:
        server = LocalServer(self._folder)
        environment = dict(trainer.environment) | {AGENT_VARIABLE: str(self._folder)}
        process = subprocess.Popen(trainer.command, env=environment, stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + self._patience_s
            while (made := self._made()) is None:
                if server.socket.poll(POLL_MS):
                    self._hear_all(server)
                elif (code := process.poll()) is not None and self._made() is None:
                    self._hear_all(server)
                    if self._made() is None:
                        told = f"the script ended with exit code {code} before the span was over"
                        raise UserError(f"{told}; its last message says why")
                if time.monotonic() >= end:
                    raise UserError(
                        f"the span was not over after {self._patience_s:g} s; --patience allows more"
                    )
            server.send(Stop(code="left", reason="the recorded span was taken again"))
            return made
        finally:
            self._end(process)
            server.close()
            if self._shared is not None:
                remove_folder(self._shared.place)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _hear_all(self, server: LocalServer) -> None:
        while (heard := server.recv_nowait()) is not None:
            self._hear(heard[1], server)

    def _hear(self, word: FromTrainer | Greeting, server: LocalServer) -> None:
        match word:
            case Greeting():
                head = self._work.head
                server.send(Begin(manifest=head.manifest, peer="", name=head.name))
            case Attach(model=model):
                if model != self._work.head.model:
                    server.send(
                        Stop(
                            code="misfit", reason="the recorded work is of another model than the script has"
                        )
                    )
                    return
                self._shared = SharedState.create(self._folder, model.chunk_count * model.chunk_elements)
                server.send(self._shared.as_message())
                for fragment, version in zip(self._fragments, self._work.head.versions, strict=True):
                    first = Load(
                        version=version,
                        keep="drop",
                        slot=0,
                        tokens=0,
                        steps=0,
                        spare=0,
                        fragment=fragment.number,
                    )
                    server.send(first)
            case Need():
                server.send(LeasesNow(leases=self._leases()))
            case Frozen(fragment=number):
                self._frozen[number] = word
            case Bye(reason=reason) if self._made() is None:
                raise UserError(f"the script ended before the span was over: {reason}")
            case _:
                pass

    def _leases(self) -> tuple[Lease, ...]:
        """One for each recorded span; how many samples are in a batch, the trainer has from the work itself."""
        spans = [span for step in self._work.head.steps for span in step.samples]
        count = len(self._fragments)
        return tuple(
            Lease(number, epoch, start, stop, start, (start,) * count if count > 1 else ())
            for number, (epoch, start, stop) in enumerate(spans, start=1)
        )

    def _made(self) -> Tensor | None:
        if self._shared is None or len(self._frozen) < len(self._fragments):
            return None
        elements = self._work.head.model.chunk_elements
        made = torch.zeros(self._shared.elements)
        for fragment in self._fragments:
            place = slice(fragment.first * elements, (fragment.first + fragment.count) * elements)
            made[place] = self._shared.slots[self._frozen[fragment.number].slot][place]
        return made
