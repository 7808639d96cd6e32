"""An agent whose peer is alone in its run, played by a test over the real channel and real shared memory."""

from __future__ import annotations

import subprocess

from torch import Tensor

from farflung.peer.local.channel import WAITING, LocalServer
from farflung.peer.local.folder import make_folder, remove_folder
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import (
    Attach,
    Begin,
    Finish,
    FromTrainer,
    Frozen,
    LeasesNow,
    LoadState,
    NeedSamples,
    Provide,
    Provided,
    Score,
)
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Lease
from farflung.protocol.model_schema import fragments_of
from rig.nursery import Child
from rig.waiting import Patience

_open: list[LonelyAgent] = []


def close_all() -> None:
    """Of a test that failed."""
    for agent in list(_open):
        agent.close()


class LonelyAgent:
    """An agent whose peer is alone in its run: each frozen pseudo-gradient is the next version."""

    def __init__(self, run: Manifest, rounds: int, score: Score | None = None) -> None:
        """`score`: what it asks for while steps are taken from version 0."""
        self.folder = make_folder()
        self.server = LocalServer(self.folder)
        self.shared: SharedState | None = None
        self.heard: list[FromTrainer] = []
        self.frozen: list[Tensor] = []  # what stood in the slot, of each freeze
        self._run, self._score = run, score
        self._left = [rounds] * run.fragments
        self._granted = 0
        _open.append(self)

    def serve(self, *until: subprocess.Popen[str] | Child, last: FromTrainer | None = None) -> None:
        """Until the trainer has ended, all processes of it; what it said last may arrive after that."""
        patience = Patience()
        while any(each.poll() is None for each in until) or (last is not None and last not in self.heard):
            assert not patience.is_over, f"the trainer did not end; it said {self.heard}"
            self.server.socket.poll(20)
            while (got := self.server.recv_nowait()) is not None:
                if got[1] is WAITING:
                    self.server.send(Begin(manifest=self._run.canonical(), peer="p", name="lonely"))
                else:
                    self.heard.append(got[1])  # type: ignore[arg-type]
                    self._answer(got[1])

    def close(self) -> None:
        _open.remove(self)
        self.server.close()
        remove_folder(self.folder)

    def _answer(self, message: object) -> None:
        match message:
            case Attach(model=model):
                self.shared = SharedState.create(self.folder, model.chunk_count * model.chunk_elements)
                self.server.send(self.shared.as_message())
                self.server.send(Provide())
            case Provided():
                for fragment in range(self._run.fragments):
                    self.server.send(
                        LoadState(
                            version=0, keep="drop", slot=0, tokens=0, steps=0, spare=0, fragment=fragment
                        )
                    )
            case NeedSamples():
                self._granted += 1
                stop = 16 * self._granted
                leases = tuple(Lease(i, 0, 16 * i, 16 * i + 16, 16 * i) for i in range(self._granted))
                assert stop <= message.samples
                self.server.send(LeasesNow(leases=leases))
                if self._granted == 2 and self._score is not None:
                    self.server.send(self._score)
            case Frozen():
                self._merge(message)

    def _merge(self, word: Frozen) -> None:
        assert self.shared is not None
        slot, elements = self.shared.slots[word.slot], self._run.round.chunk_kb * 1024 // 4
        part = fragments_of(self.shared.elements // elements, self._run.fragments)[word.fragment]
        cells = slice(part.first * elements, (part.first + part.count) * elements)
        self.frozen.append(slot[cells].clone())
        self.shared.anchor[cells].sub_(slot[cells])
        version = len([m for m in self.heard if isinstance(m, Frozen) and m.fragment == word.fragment])
        self.server.send(
            LoadState(
                version=version,
                keep="rest",
                slot=word.slot,
                tokens=word.tokens,
                steps=word.steps,
                spare=1 - word.slot,
                fragment=word.fragment,
            )
        )
        self._left[word.fragment] -= 1
        if not any(self._left):
            self.server.send(Finish(version=version))
