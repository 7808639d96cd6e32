"""The agent's hand for checkpoints: a thread of its own that writes and reads them, and never holds up training.

Owned by the agent, which hands it the peer machine's effects, and every change of a chunk of the state: a chunk that
a checkpoint still needs is copied first.
Must not know when a checkpoint is due, nor which state is the run's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.checkpoint_manifest import (
    FORMAT,
    CheckpointManifest,
    Saved,
    SavedFragment,
    shards_of,
)
from farflung.checkpoints.store import CheckpointDraft, PartFile, Store
from farflung.checkpoints.warm_start import Cells, beginning
from farflung.collectives.round.effects import Install
from farflung.peer.identity import Identity
from farflung.peer.machine import effects as do
from farflung.peer.machine.disk_words import CheckpointWritten, DiskListener, ShelfListed, StateRead
from farflung.peer.machine.effects import SaveFragment
from farflung.peer.state.outer_state import OuterState
from farflung.peer.worker import Submit, Worker, nothing
from farflung.protocol.digests import root_of
from farflung.protocol.errors import CheckpointError, FarflungError, StoreError
from farflung.protocol.manifest import Manifest
from farflung.protocol.mode_words import Shelved
from farflung.protocol.model_schema import Fragment, ModelSchema
from farflung.protocol.outer_numbers import ADAMW_PARTS
from farflung.protocol.run_terms import Attached, Terms

# ---- capture -----------------------------------------------------------------------------------------------
# The chunks of a fragment as they are at one version, copied beside the training.
#
# The state changes only in the arithmetic. There a chunk is copied just before it changes, or alone, between
# other jobs, when the writer of a checkpoint gets to it. So nobody waits for the store, and a slow one costs
# memory: at most one more copy of the state. Must not know what becomes of
# the copies.


class GivenUp(FarflungError):
    """The checkpoint is not wanted any more."""


class Capture:
    """`read` gives a chunk's bytes; `submit` runs a job in the arithmetic, while nothing else is done there."""

    def __init__(self, chunks: range, read: Callable[[int], bytes], submit: Submit) -> None:
        self.wanted = set(chunks)  # touched in the arithmetic only
        self._read, self._submit = read, submit
        self._ready: dict[int, bytes] = {}
        self._news = threading.Condition()
        self._dropped = False

    def copy(self, chunk: int) -> None:
        """In the arithmetic; of several chunks at once."""
        if chunk not in self.wanted:
            return
        self.wanted.discard(chunk)
        raw = self._read(chunk)
        with self._news:
            self._ready[chunk] = raw
            self._news.notify_all()

    def take(self, chunk: int) -> bytes:
        """In the writing thread."""
        with self._news:
            copied = chunk in self._ready
        if not copied:
            self._submit(lambda: self.copy(chunk), nothing)
        with self._news:
            self._news.wait_for(lambda: self._dropped or chunk in self._ready)
            if self._dropped:
                raise GivenUp("given up")
            return self._ready.pop(chunk)

    def skip(self, chunks: range) -> None:
        """In the writing thread: nobody needs a copy of these any more."""
        self._submit(lambda: self.wanted.difference_update(chunks), nothing)
        with self._news:
            for chunk in chunks:
                self._ready.pop(chunk, None)

    def drop(self) -> None:
        """From any thread: what was copied is freed, and who waits for a chunk gives up."""
        with self._news:
            self._dropped = True
            self._ready.clear()
            self._news.notify_all()

    @property
    def dropped(self) -> bool:
        return self._dropped

    @property
    def over(self) -> bool:
        return self._dropped or not self.wanted


# ---- checkpoint writer -------------------------------------------------------------------------------------
# One checkpoint on its way into the store: fragment after fragment, and the manifest when all are there.
#
# Whoever shares the place writes a part of it (checkpoints/store.py); the manifest is written by whoever
# finds it whole.
#
# Used in the checkpoint thread. What it writes is checked against the digests that the
# coordinator confirmed. Must not know threads, nor when a checkpoint is due.


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint says of its run."""

    attached: Attached
    incarnation: int  # of the coordinator that this peer followed when the fragment was taken
    terms: Terms | None = None  # where its host has changed any

    @property
    def manifest(self) -> Manifest:
        return self.attached.known.manifest

    @property
    def run_id(self) -> bytes:
        return self.attached.known.run_id

    @property
    def model(self) -> ModelSchema:
        return self.attached.model

    def amended(self, version: int) -> int:
        """The amendment that held in the round that made it; 0: none did."""
        return self.terms.number_at(version - 1) if self.terms is not None else 0

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """Of the whole model."""
        return self.attached.fragments

    @property
    def stage(self) -> int | None:
        """Of a model that is cut into several: the one that this peer holds."""
        return self.attached.stages[0] if self.attached.stages else None


class CheckpointWriter:
    """`pause` waits so many seconds, and raises when nobody wants the checkpoint any more."""

    def __init__(
        self,
        store: Store,
        facts: RunFacts,
        first: SaveFragment,
        identity: Identity,
        pause: Callable[[float], None],
    ) -> None:
        self.key = (first.era, first.version)
        self._store, self._facts, self._identity, self._pause = store, facts, identity, pause
        self._saved: dict[int, SavedFragment] = {}
        self._seen: set[int] = set()  # fragments that need not be written
        run_id = facts.run_id.hex()
        store.sweep(run_id, identity.peer_id, self.key)
        # In a shared store another peer may have been faster: its checkpoint of this version is as good as mine.
        self._there = {
            d
            for s in store.list_saved(run_id).complete
            if s.manifest.age == self.key
            for d in s.manifest.digests
        }
        form = facts.attached.form
        self._draft: CheckpointDraft = store.draft(
            run_id, first.era, first.version, identity.peer_id, form, facts.stage
        )

    def add(self, effect: SaveFragment, capture: Capture, hashes: tuple[bytes, ...]) -> bool:
        """Write of a fragment what others leave; True when the checkpoint is whole.  `hashes`: of its chunks."""
        facts, fragment = self._facts, self._facts.fragments[effect.fragment]
        if effect.digest in self._there:
            self._seen.add(effect.fragment)
            capture.drop()
            return len(self._seen) == len(facts.attached.held)
        if root_of(hashes) != effect.digest:
            raise CheckpointError(
                f"the copy of fragment {effect.fragment} is not the state that was confirmed"
            )
        told = tuple(each.hex() for each in hashes)
        self._saved[effect.fragment] = SavedFragment(
            effect.version, effect.digest.hex(), effect.round_no, told, effect.proof.hex()
        )
        parts = []
        for first, count in shards_of(fragment.first, fragment.count, facts.attached.form):
            at = first - fragment.first
            parts.append(PartFile(first, told[at : at + count], capture.take, capture.skip))
        self._draft.parts.add(parts)
        if len(self._saved) < len(facts.attached.held):
            return False
        if self._draft.parts.finish(self._pause):
            self._draft.publish(self._manifest().signed(self._identity.sign))
        self._store.retain(facts.run_id.hex(), facts.manifest.checkpoint.keep)
        return True

    def give_up(self) -> None:
        self._draft.parts.clear()

    def _manifest(self) -> CheckpointManifest:
        facts, (era, version) = self._facts, self.key
        return CheckpointManifest(
            format=FORMAT,
            run=facts.manifest.run.name,
            run_id=facts.run_id.hex(),
            manifest=facts.manifest.digest.hex(),
            terms=facts.manifest.canonical().decode("ascii"),
            era=era,
            version=version,
            incarnation=facts.incarnation,
            model=facts.model,
            stage=UNSET if facts.stage is None else facts.stage,
            parts=3 if facts.attached.form.parts == ADAMW_PARTS else UNSET,
            amended=facts.amended(version) or UNSET,
            fragments=tuple(self._saved[number] for number in sorted(self._saved)),
            files=tuple(sorted(self._draft.parts.shards, key=lambda file: file.first)),
            writer=self._identity.peer_id,
            key=self._identity.public.hex(),
        )


# ---- checkpoint thread -------------------------------------------------------------------------------------

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


# ---- start reader ------------------------------------------------------------------------------------------
# The agent's hand for a run that begins with a checkpoint or a file: a thread of its own reads it into the
# state.
#
# Owned by the agent, which is told by the peer machine when to begin. Values are checked as they come
# (warm_start.py), and nothing of them counts before the machine hears that all are there. Must not know who
# founds the run.

PIECES_AHEAD = 8  # pieces that were read and are not in the state yet, each of at most 8 MiB or a chunk


class Beginner(Protocol):
    """The peer machine, as this hand sees it."""

    def on_begun(self, problem: str, is_final: bool, now: float) -> list[do.Effect]: ...


class StartJobs:
    """`submit` runs a job in the arithmetic; `tell` carries out effects of the machine, in the agent's loop."""

    def __init__(
        self, attached: Attached, machine: Beginner, submit: Submit, tell: Callable[[list[do.Effect]], None]
    ) -> None:
        self._attached, self._machine, self._submit, self._tell = attached, machine, submit, tell
        self._worker = Worker("beginning", submit)

    def begin(self, effect: do.BeginFrom, state: OuterState, now: Callable[[], float]) -> None:
        self._worker.submit(lambda: self._read(effect, state, now))

    def close(self) -> None:
        """Before the arithmetic ends.  A place that does not answer is given up: the thread is a daemon."""
        self._worker.close(0.0)

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _read(self, effect: do.BeginFrom, state: OuterState, now: Callable[[], float]) -> None:
        problem, is_final = "", False
        try:
            self._submit(state.clear, nothing)
            room = threading.Semaphore(PIECES_AHEAD)
            begun = beginning(effect.start, self._attached.model, self._attached.held, effect.as_nobody)
            for cells in begun:
                while not room.acquire(timeout=0.2):
                    if self._worker.given_up.is_set():
                        return
                if self._worker.given_up.is_set():
                    return
                self._put(cells, state, room)
        except StoreError as error:
            problem = str(error)
        except FarflungError as error:
            problem, is_final = str(error), True
        self._worker.later(lambda: self._tell(self._machine.on_begun(problem, is_final, now())))

    def _put(self, cells: Cells, state: OuterState, room: threading.Semaphore) -> None:
        def job() -> None:
            state.place(cells.part, cells.at, cells.values)
            room.release()

        self._submit(job, nothing)
