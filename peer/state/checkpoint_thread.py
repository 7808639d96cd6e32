"""The agent's hand for checkpoints: a thread of its own that writes and reads them, and never holds up training.

Owned by the agent, which hands it the peer machine's effects, and every change of a chunk of the state: a chunk that
a checkpoint still needs is copied first (capture.py).
Must not know when a checkpoint is due, nor which state is the run's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Set

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.checkpoint_manifest import CheckpointManifest
from farflung.checkpoints.stages import Saved
from farflung.checkpoints.store import Store
from farflung.collectives.round.effects import Install
from farflung.peer.identity import Identity
from farflung.peer.machine import effects as do
from farflung.peer.machine.disk_words import (
    CheckpointWritten,
    DiskListener,
    ShelfListed,
    StateRead,
)
from farflung.peer.state.capture import Capture, GivenUp
from farflung.peer.state.checkpoint_writer import CheckpointWriter, RunFacts
from farflung.peer.state.outer_state import OuterState
from farflung.peer.worker import Submit, Worker, nothing
from farflung.protocol.errors import CheckpointError, FarflungError, StoreError
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import Shelved

CHECKPOINTS = "checkpoints"  # the name of the place, to the machine
READ_AHEAD = 8  # chunks read from a store and not yet in the state
LEAVE_S = 5.0  # a checkpoint that is being written when the peer leaves is given up after so long
FINISH_S = 120.0  # the one at the end of the run is worth more patience

log = logging.getLogger("farflung.agent")


class Checkpointing:
    """`tell` carries out effects of the machine, in the agent's loop."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        machine: DiskListener,
        submit: Submit,
        tell: Callable[[list[do.Effect]], None],
    ) -> None:
        self._store, self._machine = store, machine
        self._identity, self._submit, self._tell = identity, submit, tell
        self._captures: list[
            Capture
        ] = []  # those that still need chunks: arithmetic only, and new ones while nothing else is done
        self._current: list[Capture] = []  # of the checkpoint that is being written: the agent's loop only
        self._worker = Worker("checkpoints", submit)
        self._writing: CheckpointWriter | None = None  # the thread's own, and so is the next
        self._failed = (0, NO_VERSION)

    # ---- in the arithmetic, of several chunks at once ----------------------------------------------------------

    def change(self, chunk: int, job: Callable[[], object]) -> None:
        """Do what changes this chunk of the state, once it was copied where a checkpoint needs it."""
        for capture in self._captures:
            capture.copy(chunk)
        if self._captures:
            self._captures = [capture for capture in self._captures if not capture.over]
        job()

    # ---- in the agent's loop -----------------------------------------------------------------------------------

    def carry_out(
        self,
        effect: do.SaveFragment | do.DropSave | do.Restore | do.ListShelf,
        facts: RunFacts,
        state: OuterState,
        now: Callable[[], float],
    ) -> None:
        match effect:
            case do.SaveFragment():
                self._save(effect, facts, state)
            case do.DropSave():
                self._drop()
            case do.Restore():
                self._worker.submit(lambda: self._restore(effect, facts, state, now))
            case do.ListShelf():
                self._worker.submit(lambda: self._list(facts))

    def _save(self, effect: do.SaveFragment, facts: RunFacts, state: OuterState) -> None:
        chunks = facts.fragments[effect.fragment].chunks
        capture = Capture(chunks, state.chunk_bytes, self._submit)
        # They are those of the version that was sealed last, and nothing newer has been sealed yet.
        hashes = tuple(state.hashes_of(chunks))
        self._submit(lambda: self._captures.append(capture), nothing)
        self._current.append(capture)
        self._worker.submit(lambda: self._write(effect, facts, capture, hashes))

    def _drop(self) -> None:
        for capture in self._current:
            capture.drop()
        self._current = []

    def close(self, finished: bool) -> None:
        """Before the arithmetic ends.  A store that does not answer is given up: the thread is a daemon."""
        self._worker.close(FINISH_S if finished else LEAVE_S)
        self._drop()
        self._worker.close(LEAVE_S)

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _write(
        self,
        effect: do.SaveFragment,
        facts: RunFacts,
        capture: Capture,
        hashes: tuple[bytes, ...],
    ) -> None:
        version, problem, whole = effect.version, "", False
        if self._failed == (effect.era, version):
            return
        try:
            if self._writing is None or self._writing.key != (effect.era, version):
                self._writing = CheckpointWriter(
                    self._store, facts, effect, self._identity, lambda seconds: self._pause(capture, seconds)
                )
            whole = self._writing.add(effect, capture, hashes)
        except GivenUp:
            return
        except (FarflungError, OSError) as error:
            problem = f"no checkpoint of version {version}: {error}; training goes on"
            self._failed = (effect.era, version)
            capture.drop()
            self._clear()
        if whole or problem:
            self._writing = None
            self._worker.later(lambda: self._tell(self._written(version, problem)))

    def _pause(self, capture: Capture, seconds: float) -> None:
        if self._worker.given_up.wait(seconds) or capture.dropped:
            raise GivenUp("given up")

    def _clear(self) -> None:
        """What a failed checkpoint left behind would fill the disk; a store that fails here too keeps it."""
        if self._writing is not None:
            with contextlib.suppress(FarflungError):
                self._writing.give_up()

    def _written(self, version: int, problem: str) -> list[do.Effect]:
        effects = self._machine.on_disk(CheckpointWritten(version, problem), time.monotonic())
        if effects:
            self._drop()
        return effects

    def _list(self, facts: RunFacts) -> None:
        """What lies there whole, as far as manifests and the sizes of files say: whoever reads it checks more."""
        try:
            complete = self._store.list_saved(facts.run_id.hex()).complete
        except StoreError as error:
            log.warning("what checkpoints are at %s is not known: %s", self._store.url, error)
            return
        found = [
            Shelved.of(saved.manifest.version, saved.manifest.first_fragment, saved.manifest.digests)
            for saved in complete
            if saved.manifest.model == facts.model
        ]
        self._worker.later(
            lambda: self._tell(self._machine.on_disk(ShelfListed(CHECKPOINTS, found), time.monotonic()))
        )

    def _restore(
        self,
        effect: do.Restore,
        facts: RunFacts,
        state: OuterState,
        now: Callable[[], float],
    ) -> None:
        version, problems = NO_VERSION, []
        try:
            listing = self._store.list_saved(facts.run_id.hex())
            problems = [f"not used: {problem}" for problem in listing.problems]
            fitting = [
                saved for saved in listing.complete if fits(saved.manifest, effect.lacking, facts.model)
            ]
        except StoreError as error:
            fitting, problems = [], [str(error)]
        wanted = {chunk for number in effect.lacking for chunk in facts.fragments[number].chunks}
        written: set[int] = set()
        for saved in fitting:
            try:
                self._install(saved, wanted, state, written)
                version = saved.manifest.version
                break
            except GivenUp:
                return
            except (CheckpointError, StoreError) as error:
                problems.append(f"not used: {error}")
        if version == NO_VERSION and not problems:
            problems = [f"no checkpoint of a version that the run knows at {self._store.url}"]
        self._worker.later(
            lambda: self._tell(self._machine.on_disk(StateRead(version, problems, bool(written)), now()))
        )

    def _install(self, saved: Saved, wanted: Set[int], state: OuterState, written: set[int]) -> None:
        """Each chunk was checked against the manifest, and that against the run's digests.  Where it fails half-way,
        `written` says so: the machine holds nothing of these fragments then, and they are read or fetched again."""
        room = threading.Semaphore(READ_AHEAD)
        for chunk, raw in self._store.chunks(saved, wanted):
            while not room.acquire(timeout=0.2):
                if self._worker.given_up.is_set():
                    raise GivenUp("given up")
            written.add(chunk)
            install = Install(chunk, saved.manifest.version, raw)

            def job(install: Install = install) -> None:
                self.change(install.chunk, lambda: state.install(install))
                room.release()

            self._submit(job, nothing)


def fits(manifest: CheckpointManifest, lacking: Mapping[int, do.Digests], model: ModelSchema) -> bool:
    """It is a version of this run, and has every fragment that is lacking, as the coordinator's journal has it (P4)."""
    return manifest.model == model and all(
        number in manifest.digest_of and (manifest.version, manifest.digest_of[number]) in known
        for number, known in lacking.items()
    )
