"""The trainer of `farflung bench allreduce`: no model, a synthetic vector, and a check of what came out.

Started by console/bench/bench.py, one per peer, in a process of its own; it starts its agent as a script's trainer does
and speaks the same local words, so the rounds that it takes part in are real ones.  It never waits between
rounds: the vector stands in the slot before the round is due; with a pause it stands there so long after the version
came, and counts as one token.  Must not know how figures are shown.

    v(peer, version)   a heavy-tailed block, rotated by the peer's name and repeated to the length asked for; every
                       1024th value depends on the version too, so that bytes of another round would be noticed
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farflung.console.screen.status_client import StatusClient
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import (
    Attach,
    Finish,
    Frozen,
    Loaded,
    LoadState,
    Provide,
    Provided,
    ResumeSteps,
    Shared,
    Stop,
)
from farflung.peer.trainer.agent_process import AgentProcess
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import FarflungError, Refused, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.process.exit_codes import OK, code_for
from farflung.protocol.process.journal import JOURNAL_VARIABLE, read_events

BLOCK = 1_000_003  # no multiple of any chunk: no two chunks are alike
FRESH_EVERY = 1024
SCALE, TAILS = 1e-3, 5
POLL_S = 0.5
LOOK_S = 0.1
TERMINATED = 143

Floats = npt.NDArray[np.float32]


# ---- the vectors


def values_of(manifest: Manifest) -> int:
    """The bench's run.toml describes its model as a table of context x width values."""
    return manifest.model.context * manifest.model.width


def model_of(manifest: Manifest) -> ModelSchema:
    shape = manifest.model
    table = TensorSpec("synthetic", (shape.context, shape.width), "float32", "param")
    elements = manifest.round.chunk_kb * 256
    count = -(-values_of(manifest) // elements)
    return ModelSchema((table,), elements, count, count, hash_bytes(b""))


def block() -> Floats:
    """Student's t with 5 degrees of freedom: tails like those of real pseudo-gradients."""
    return (SCALE * np.random.default_rng(0).standard_t(TAILS, BLOCK)).astype(np.float32)


def write_base(out: Floats, peer: str, source: Floats) -> None:
    start = int.from_bytes(hash_bytes(peer.encode())[:4], "little") % BLOCK
    rotated = np.roll(source, start)
    for at in range(0, len(out), BLOCK):
        piece = out[at : at + BLOCK]
        piece[:] = rotated[: len(piece)]


def write_fresh(out: Floats, peer: str, version: int) -> None:
    seed = int.from_bytes(hash_bytes(f"{peer} {version}".encode())[:8], "little")
    fresh = out[::FRESH_EVERY]
    fresh[:] = SCALE * np.random.default_rng(seed).standard_t(TAILS, len(fresh))


def relative_error(merged: Floats, exact: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(merged - exact) / np.linalg.norm(exact))


def exact_mean(peers: list[str], version: int, values: int) -> npt.NDArray[np.float64]:
    source, total, one = block(), np.zeros(values), np.empty(values, np.float32)
    for peer in peers:
        write_base(one, peer, source)
        write_fresh(one, peer, version)
        total += one
    return total / len(peers)


# ---- the trainer


class BenchTrainer:
    def __init__(
        self, agent: AgentProcess, manifest: Manifest, peer: str, url: JoinUrl, check: bool, pause_s: float
    ) -> None:
        self._agent = agent
        self._pause_s, self._freezes_at = pause_s, math.inf
        self._owed = self.computed = self.counted = (
            0  # tokens: that no commit has used; ever; that one has used
        )
        self._manifest = manifest
        self._peer = peer
        self._url = url
        self._check = check
        self._values = values_of(manifest)
        self._shared: SharedState | None = None
        self._loaded: dict[int, LoadState] = {}  # the newest of each fragment
        self._written: set[int] = set()  # slots that hold the base
        self._source = block()
        self.before_last: Floats | None = None  # the anchor before the last round

    def run(self) -> None:
        """Until the run has made all its rounds."""
        channel, parent = self._agent.channel, os.getppid()
        channel.send(Attach(model=model_of(self._manifest), pid=os.getpid()))
        while True:
            message = channel.recv(min(POLL_S, max(0.0, self._freezes_at - time.monotonic())))
            if time.monotonic() >= self._freezes_at:
                self._freezes_at = math.inf
                self._freeze([self._loaded[number] for number in range(self._manifest.fragments)])
            match message:
                case None:
                    problem = self._agent.problem()
                    if problem is not None or os.getppid() != parent:
                        raise Refused("agent", problem or "the bench that started this peer is gone")
                case Shared():
                    self._shared = SharedState.open(message)
                case Provide():
                    self.anchor().fill(0.0)
                    channel.send(Provided())
                case ResumeSteps() if self._pause_s:
                    self._freezes_at = min(self._freezes_at, time.monotonic() + self._pause_s)
                case LoadState():
                    channel.send(Loaded(version=message.version, fragment=message.fragment))
                    self._on_load(message)
                case Stop():
                    raise Refused(message.code, message.reason)
                case Finish():
                    return

    def _on_load(self, load: LoadState) -> None:
        self._loaded[load.fragment] = load
        if load.fragment == 0:
            used = {"all": 0, "rest": load.tokens}.get(load.keep)
            self.counted += load.tokens if load.keep == "rest" else 0
            self._owed = self._owed - used if used is not None else load.tokens
        together = {each.version for each in self._loaded.values()} == {load.version}
        if together and len(self._loaded) == self._manifest.fragments:
            # A version that comes while it computes changes nothing about when that is done.
            self._freezes_at = min(self._freezes_at, time.monotonic() + self._pause_s)

    def _freeze(self, loads: list[LoadState]) -> None:
        """All fragments at once, when all of them are at the same version."""
        load, rounds = loads[0], self._manifest.run.rounds
        if load.version >= rounds:
            return
        if load.version == 0 or (
            self._manifest.run.min_peers < self._manifest.run.max_peers and not self._pause_s
        ):
            self._wait_for_all(load.version)
        self._owed, self.computed = self._owed + 1, self.computed + 1
        if load.version == rounds - 1 and self._check:
            self.before_last = self.anchor().copy()
        assert self._shared is not None
        for spare in {each.spare for each in loads}:
            slot = self._shared.slots[spare].numpy()[: self._values]
            if spare not in self._written:
                write_base(slot, self._peer, self._source)
                self._written.add(spare)
            write_fresh(slot, self._peer, load.version)
        for each in loads:
            frozen = Frozen(
                slot=each.spare,
                tokens=self._owed,
                steps=self._owed,
                used=(),
                loss=None,
                fragment=each.fragment,
                more=each is not loads[-1],
            )
            self._agent.channel.send(frozen)

    def _wait_for_all(self, version: int) -> None:
        """A round opens with whoever is verified and ready: nobody is, before all are verified."""
        with StatusClient(self._url) as client:
            while self._agent.problem() is None:
                status = client.fetch(30.0)
                alive = [m for m in status["members"] if m["alive"]]
                here = [m for m in alive if m["version"] == version and m["participating"]]
                wanted = len(alive) if version else self._manifest.run.max_peers
                if len(here) >= wanted or status["version"] > version:
                    return
                time.sleep(LOOK_S)

    def anchor(self) -> Floats:
        assert self._shared is not None
        return self._shared.anchor.numpy()[: self._values]

    def figures(self, journal: Path) -> dict[str, Any]:
        """What this peer has to tell: its agent's events, and what stands in the anchor."""
        events = read_events(journal)
        found: dict[str, Any] = {"peer": self._peer, "events": events}
        found |= {"computed": self.computed, "counted": self.counted}
        found["anchor"] = hash_bytes(self.anchor().view(np.uint8).data).hex()
        if self.before_last is not None:
            included, version = _last_round(events)
            exact = exact_mean(included, version, self._values)
            found["rel_error"] = relative_error(self.before_last - self.anchor(), exact)
        return found


def _last_round(events: list[dict[str, Any]]) -> tuple[list[str], int]:
    """(who is in the newest commit, the version that it started from)."""
    number = [e for e in events if e["event"] == "committed"][-1]["round"]
    plan = next(e for e in events if e["event"] == "plan" and e["round"] == number)
    weights = [e for e in events if e["event"] == "decided" and e["round"] == number][-1]["weights"]
    return [m for m, w in zip(plan["members"], weights, strict=True) if w > 0], plan["version"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m farflung.console.bench.trainer")
    parser.add_argument("--url", required=True)
    parser.add_argument("--identity", required=True)
    parser.add_argument("--figures", required=True, type=Path, help="where to write them at the end")
    parser.add_argument("--check", action="store_true", help="compare the last round with the exact mean")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds from a version to the next vector")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        _take_part(asked)
    except FarflungError as error:
        print(f"farflung: {error.reason if isinstance(error, Refused) else error}", file=sys.stderr)
        return code_for(error)
    return OK


def _take_part(asked: argparse.Namespace) -> None:
    journal = os.environ.get(JOURNAL_VARIABLE)
    if journal is None:
        raise UserError(f"{JOURNAL_VARIABLE} must name a file: the figures come from it")
    agent = AgentProcess.start_or_find(asked.url, {"identity": asked.identity})
    try:
        begin = agent.wait_for_begin()
        manifest = Manifest.from_canonical(begin.manifest)
        trainer = BenchTrainer(
            agent, manifest, begin.peer, JoinUrl.parse(asked.url), asked.check, asked.pause
        )
        trainer.run()
    finally:
        agent.close("the bench is over")  # it writes its last event on the way out
    text = json.dumps(trainer.figures(Path(journal)))
    aside = asked.figures.with_suffix(".new")
    aside.write_text(text, encoding="utf-8")
    aside.rename(asked.figures)


if __name__ == "__main__":
    sys.exit(main())
