"""The agent's hand for a state that is arriving: keeps each piece on disk, so that a crash does not lose it.

Owned by the agent, which tells it of every piece that is installed, rolled on or sealed.  All of it happens in the
arithmetic, after the piece itself.  A disk that fails is told once, and the joiner goes on without it.
Must not know what a round is, nor whom pieces come from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Protocol

from farflung.checkpoints.arrivals import Arrived, ChunkArrivals
from farflung.collectives.round.effects import Install, Roll, Seal
from farflung.peer.machine import effects as do
from farflung.peer.machine.disk_words import DiskListener, Held, PiecesRecalled
from farflung.peer.state.outer_state import OuterState
from farflung.peer.worker import Job, Submit, nothing
from farflung.protocol.errors import StoreError
from farflung.protocol.run_terms import Attached

STALE_S = 7 * 86400.0  # what was left behind by a peer that never came back


class KeptPieces(Protocol):
    """keeping_state.py, as this hand sees it."""

    def recall(self, effect: do.Recall, state: OuterState) -> Held: ...


class Arriving:
    """`tell` carries out effects, in the agent's loop.  Built when the model is known."""

    def __init__(
        self,
        folder: Path,
        peer: str,
        attached: Attached,
        submit: Submit,
        tell: Callable[[list[do.Effect]], None],
        kept: KeptPieces | None = None,
    ) -> None:
        """`kept`: where whole versions lie, beside what has arrived of one."""
        self._attached, self._submit, self._tell, self._kept = attached, submit, tell, kept
        self._path = folder / f"{name_on_disk(attached, peer)}.pieces"
        self._keeping = threading.Lock()  # pieces are installed side by side, and kept one after the other
        # Of the arithmetic only:
        self._file: ChunkArrivals | None = None
        self._there: set[int] = set()  # chunks that lie there
        self._failed = False

    # ---- in the agent's loop -------------------------------------------------------------------------------

    def after(self, effect: Install | Roll, arrived: Arrived, state: OuterState, job: Job) -> Job:
        """The job, and then the piece is kept: as it was fetched, or as it is after it was rolled on."""

        def both() -> None:
            job()
            with self._keeping:
                self._keep(effect, arrived, state)

        return both

    def after_seal(self, effect: Seal, job: Job) -> Job:
        """The fragment is whole then: nothing of it needs to be kept."""
        chunks = self._attached.fragments[effect.fragment].chunks

        def both() -> object:
            digest = job()
            # After the digest is told: to remove a large file takes longer than anything else at the end of a join.
            self._submit(lambda: self._forget(chunks), nothing)
            return digest

        return both

    def recall(
        self, effect: do.Recall, state: OuterState, machine: DiskListener, now: Callable[[], float]
    ) -> None:
        held: Held = {}
        self._submit(
            lambda: held.update(self._read(effect, state)),
            lambda _: self._tell(machine.on_disk(PiecesRecalled(held), now())),
        )

    def close(self) -> None:
        """After the arithmetic ended.  What has arrived stays for the next time."""
        if self._file is not None:
            self._file.close()

    # ---- in the arithmetic, one after the other ------------------------------------------------------------

    def _keep(self, effect: Install | Roll, arrived: Arrived, state: OuterState) -> None:
        if self._failed or (isinstance(effect, Roll) and effect.chunk not in self._there):
            return
        # What was installed has just been hashed, and the sooner it lies there, the less is fetched twice.
        known = state.hash_of(effect.chunk) if isinstance(effect, Install) else b""
        try:
            self._opened().put(effect.chunk, arrived, state.chunk_bytes(effect.chunk), known)
            self._there.add(effect.chunk)
        except StoreError as error:
            self._give_up(error)

    def _forget(self, chunks: range) -> None:
        gone = self._there & set(chunks)
        self._there -= gone
        if self._file is None:
            return
        for chunk in gone:
            self._file.forget(chunk)
        if not self._there:
            self._file.remove()
            self._file = None

    def _read(self, effect: do.Recall, state: OuterState) -> Held:
        """Put what lies there into the state: a whole version where there is one, else what had arrived."""
        held: Held = self._kept.recall(effect, state) if self._kept is not None else {}
        return held | self._read_pieces(effect.era, state, held.keys())

    def _read_pieces(self, era: int, state: OuterState, whole: Set[int]) -> Held:
        held: Held = {}
        try:
            for path in left_behind(self._path):
                path.unlink(missing_ok=True)
            if not self._path.exists():
                return {}
            file = self._opened()
        except (StoreError, OSError) as error:
            self._give_up(error)
            return {}
        for chunk, arrived in file.known().items():
            body = file.get(chunk) if arrived.era == era and chunk not in whole else None
            if body is not None:
                state.install(Install(chunk, arrived.version, body))
                held[chunk] = (arrived.version, arrived.digest)
        self._there = set(held)
        return held

    def _opened(self) -> ChunkArrivals:
        if self._file is None:
            attached = self._attached
            count = attached.model.chunk_count
            self._file = ChunkArrivals(self._path, attached.name, count, attached.form.size_bytes)
        return self._file

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        told = do.Note(f"what arrives is not kept on disk: {error}; after a crash all of it is fetched again")
        self._submit(lambda: None, lambda _: self._tell([told]))


def name_on_disk(attached: Attached, peer: str) -> str:
    """Of what this peer keeps of the run: each stage that it ever held lies under a name of its own."""
    of_stages = "".join(f"-stage{stage}" for stage in attached.stages)
    return f"{attached.known.run_id.hex()}-{peer}{of_stages}"


def left_behind(own: Path) -> list[Path]:
    """What lies beside it, is of its kind, and was not touched for long."""
    others = [path for path in own.parent.glob("*" + own.suffix) if path != own]
    return [path for path in others if time.time() - path.stat().st_mtime > STALE_S]
