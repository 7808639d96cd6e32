"""The agent's hand for the newest version on this peer's own disk: a thread of its own writes it, beside the training.

Owned by the agent, which hands it the peer machine's effects, each result that is applied and each version that is
sealed.  What it may write is bounded: by the volunteer's `keep`, of all runs together, and by what the disk has left.
A disk that fails, or does not keep up, is told in one line, and training goes on.  What another life of this peer left
is put into the state in the arithmetic, which is asked for by `Recall`.  Must not know when a base is due, nor whether
this is the last copy.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.kept_state import Arrived, BasePath, ChunkArrivals, KeptResults, KeptState
from farflung.collectives.round.effects import Install, Roll, Seal, SendFrame
from farflung.peer.machine import effects as do
from farflung.peer.machine.disk_words import (
    AheadKept,
    DiskListener,
    Held,
    KeepingFailed,
    KeptWord,
    PiecesRecalled,
    Reached,
    ResultsFound,
    ResultsLost,
)
from farflung.peer.state.checkpoint_thread import Capture, GivenUp
from farflung.peer.state.outer_state import OuterState
from farflung.peer.worker import Job, Submit, Worker, nothing
from farflung.protocol.digests import root_of
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Frame, Header, Kind, Payload, bare_answer, with_payload
from farflung.protocol.process import own_files
from farflung.protocol.run_terms import Attached

# ---- arrived pieces ----------------------------------------------------------------------------------------
# The agent's hand for a state that is arriving: keeps each piece on disk, so that a crash does not lose it.
#
# Owned by the agent, which tells it of every piece that is installed, rolled on or sealed. All of it happens
# in the arithmetic, after the piece itself. A disk that fails is told once, and the joiner goes on without
# it. Must not know what a round is, nor whom pieces come from.


class KeptPieces(Protocol):
    """The keeping of a whole state, as this hand sees it."""

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
            for path in own_files.left_behind(self._path):
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


# ---- results on disk ---------------------------------------------------------------------------------------
# The agent's hand for results on disk: a thread of its own that writes them, reads them, and finds those of
# before.
#
# Owned by the agent, which tells it of every result that is applied, and hands it the machine's questions for
# one. A disk that fails, or does not keep up, is told once, and the log goes on in memory. Must not know who
# catches up.

RESULTS_BEHIND_BYTES = 256 << 20  # so much may wait to be written, or one version if that is more
RESULTS_CLOSE_S = 5.0


class Asker(Protocol):
    """The peer machine, as this hand sees it."""

    def on_disk(self, word: ResultsFound | ResultsLost, now: float) -> list[do.Effect]: ...

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[do.Effect]: ...


@dataclass(frozen=True)
class DiskPlace:
    """Where results are kept, and how many."""

    folder: Path
    peer: str
    limit_bytes: int
    payload_bytes: int  # of one result, at most


class KeepingResults:
    """`tell` carries out effects, in the agent's loop.  Built when the model is known, if results are kept on disk."""

    def __init__(
        self,
        place: DiskPlace,
        attached: Attached,
        submit: Submit,
        machine: Asker,
        tell: Callable[[list[do.Effect]], None],
    ) -> None:
        self._attached, self._me, self._machine, self._tell = attached, place.peer, machine, tell
        self._worker = Worker("results", submit)
        self._given_up = False
        self._kept: KeptResults | None = None  # the thread's own
        self._do(lambda: self._open(place))

    # ---- in the agent's loop -----------------------------------------------------------------------------

    def rolled(self, effect: Roll, era: int, logged_bytes: int) -> None:
        """`logged_bytes`: what the log in memory holds."""
        if self._given_up:
            return
        fragment, size = self._attached.fragment_of(effect.chunk).number, len(effect.payload)
        if self._worker.waiting_bytes > max(RESULTS_BEHIND_BYTES, logged_bytes):
            self._give_up("the disk does not keep up")
            return
        self._do(lambda: self._put((era, fragment, effect.version), effect), size)

    def serve(self, effect: do.Serve, era: int) -> None:
        tag = self._attached.known.tag

        def look() -> None:
            kept, place = self._kept, (era, effect.fragment, effect.version, effect.chunk)
            payload = kept.get(*place) if kept is not None else None
            frame = logged_answer(effect, payload, tag)
            self._worker.later(lambda: self._answer(effect.to, frame))

        self._do(look)

    def close(self, finished: bool) -> None:
        """What is kept stays for the next time, unless the run is over."""
        self._do(lambda: self._close(finished))
        self._worker.close(RESULTS_CLOSE_S)  # a disk that hangs is given up

    def _do(self, job: Job, size_bytes: int = 0) -> None:
        self._worker.submit(lambda: self._tried(job), size_bytes=size_bytes)

    def _answer(self, to: str, frame: Frame) -> None:
        mine = to == self._me
        self._tell(self._machine.on_frame(to, frame, time.monotonic()) if mine else [SendFrame(to, frame)])

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self._tell(self._machine.on_disk(ResultsLost(why), time.monotonic()))

    # ---- in the thread -----------------------------------------------------------------------------------

    def _tried(self, job: Job) -> None:
        try:
            job()
        except (StoreError, OSError) as error:
            self._worker.later(partial(self._give_up, str(error)))

    def _open(self, place: DiskPlace) -> None:
        known = self._attached.known
        path = place.folder / f"{name_on_disk(self._attached, place.peer)}.results"
        for other in own_files.left_behind(path):
            _clear(other)
        keep = known.manifest.round.keep_results
        self._kept = KeptResults(path, self._attached.name, keep, place.limit_bytes, place.payload_bytes)
        found = ResultsFound(self._kept.found())
        self._worker.later(lambda: self._tell(self._machine.on_disk(found, time.monotonic())))

    def _put(self, key: tuple[int, int, int], effect: Roll) -> None:
        if self._kept is not None:
            self._kept.put(*key, effect.chunk, effect.payload)

    def _close(self, finished: bool) -> None:
        if self._kept is not None and finished:
            self._kept.remove()
        elif self._kept is not None:
            self._kept.close()


def logged_answer(effect: do.Serve, payload: Payload | None, run_tag: bytes) -> Frame:
    """To whom asks for a result of the past.  None: it is not kept any more."""
    asked = Header(Kind.WANT_LOGGED, run_tag, version=effect.version, chunk=effect.chunk)
    if payload is None:
        return bare_answer(Kind.MISSING, asked)
    return with_payload(replace(asked, kind=Kind.LOGGED), payload)


def _clear(folder: Path) -> None:
    """Left behind by a peer that never came back."""
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
    folder.rmdir()


# ---- keeping state -----------------------------------------------------------------------------------------

BEHIND_BYTES = 1 << 30  # so much may wait to be written
SPARED_BYTES = 1 << 30  # of the disk: nothing is kept that would leave less
CLOSE_S = 10.0  # what was made before the peer leaves is worth so much patience
ENDING = ".kept"


@dataclass(frozen=True)
class ResultPlace:
    folder: Path  # of all that this peer keeps
    peer: str
    limit_bytes: int  # of the states of all runs


class KeepingState:
    """`tell` carries out effects of the machine, in the agent's loop; `submit` runs a job in the arithmetic."""

    def __init__(
        self,
        place: ResultPlace,
        attached: Attached,
        submit: Submit,
        machine: DiskListener,
        tell: Callable[[list[do.Effect]], None],
    ) -> None:
        self.folder = place.folder / f"{name_on_disk(attached, place.peer)}{ENDING}"
        self._place, self._attached, self._submit, self._machine, self._tell = (
            place,
            attached,
            submit,
            machine,
            tell,
        )
        self._worker = Worker("keeping", submit)
        self._captures: list[Capture] = []  # as in checkpoint_thread.py
        self._factors: dict[tuple[int, int], float] = {}  # (fragment, version), of what is applied
        # (fragment, version) whose results came back from the disk.
        self._offered: set[tuple[int, int]] = set()
        self._kept: KeptState | None = None  # the thread's own; and the arithmetic's, in `recall` alone
        self._looked = threading.Event()  # at what is there
        self._worker.submit(self._look)

    # ---- in the arithmetic, of several chunks at once ----------------------------------------------------------

    def change(self, chunk: int, job: Callable[[], object]) -> None:
        """Do what changes this chunk of the state, once it was copied where a base needs it."""
        for capture in self._captures:
            capture.copy(chunk)
        if self._captures:
            self._captures = [capture for capture in self._captures if not capture.over]
        job()

    # ---- in the agent's loop -----------------------------------------------------------------------------------

    def rolled(self, effect: Roll, era: int) -> None:
        if self._worker.waiting_bytes > BEHIND_BYTES:
            return  # the version is not made, and a new base is begun when the disk has come so far
        number, payload = self._attached.fragment_of(effect.chunk).number, effect.payload
        self._factors[number, effect.version] = effect.factor
        put = partial(self._put, era, number, effect.version, {effect.chunk: payload})
        self._worker.submit(lambda: self._tried(put), size_bytes=len(payload))

    def sealed(self, seal: Seal, digest: bytes, era: int) -> None:
        """A version is whole, of whatever it was made."""
        factor = self._factors.pop((seal.fragment, seal.version), 1.0)
        made = partial(self._made, era, seal.fragment, seal.version, digest, factor)
        self._worker.submit(lambda: self._tried(made))

    def carry_out(self, effect: do.KeepBase | do.KeepAhead, state: OuterState) -> None:
        if isinstance(effect, do.KeepAhead):
            self._worker.submit(lambda: self._tried(lambda: self._ahead(effect)))
            return
        chunks = self._attached.fragments[effect.fragment].chunks
        capture = Capture(chunks, state.chunk_bytes, self._submit)
        hashes = state.hashes_of(chunks)  # as they were sealed last, and nothing newer has been sealed yet
        self._submit(lambda: self._captures.append(capture), nothing)
        self._worker.submit(lambda: self._tried(lambda: self._base(effect, capture, hashes)))

    def serves(self, effect: do.Serve) -> bool:
        """It asks this peer itself for what `recall` found."""
        return effect.to == self._place.peer and (effect.fragment, effect.version) in self._offered

    def serve(self, effect: do.Serve, era: int, answer: Callable[[Frame], None]) -> None:
        """`answer` is given the frame."""
        tag = self._attached.known.tag

        def look() -> None:
            found = None
            if self._kept is not None:
                found = self._kept.result(era, effect.fragment, effect.version, effect.chunk)
            frame = logged_answer(effect, found[0] if found is not None else None, tag)
            self._worker.later(lambda: answer(frame))

        self._worker.submit(look)

    def close(self) -> None:
        """Before the arithmetic ends.  What is kept stays for the next time; a disk that hangs is given up."""
        self._worker.close(CLOSE_S)
        for capture in self._captures:
            capture.drop()

    # ---- what a former life left -------------------------------------------------------------------------------

    def recall(self, effect: do.Recall, state: OuterState) -> Held:
        """In the arithmetic.  The newest version of each fragment that may be the run's stands in the state then."""
        held: Held = {}
        self._looked.wait()
        if (kept := self._kept) is None:
            return held
        for fragment in self._attached.held:
            way = next(
                (each for each in ways_of(kept, fragment.number, effect) if put_back(kept, each, state)), None
            )
            reached = NO_VERSION if way is None else way.version
            if way is not None:
                held |= dict.fromkeys(fragment.chunks, (reached, way.digest))
            self._worker.submit(
                partial(self._tried, partial(self._recalled, effect.era, fragment.number, way))
            )
        return held

    def _recalled(self, era: int, fragment: int, way: BasePath | None) -> None:
        """What can't be used any more goes when a new base is there, and not before."""
        if way is None or way.era != era or (kept := self._kept) is None:
            return
        ahead = kept.after(era, fragment, way.version + 1)
        kept.drop_after(era, fragment, way.version + (1 if ahead else 0))
        if ahead:
            self._offered.add((fragment, way.version + 1))
        self._tell_later(Reached(era, fragment, way.base, way.version, way.version, frozenset(ahead)))

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            self._tried(self._open)
        finally:
            self._looked.set()

    def _tried(self, job: Job) -> None:
        try:
            job()
        except GivenUp:
            return
        except (StoreError, OSError) as error:
            self._tell_later(KeepingFailed(str(error)))

    def _tell_later(self, word: KeptWord) -> None:
        self._worker.later(lambda: self._tell(self._machine.on_disk(word, time.monotonic())))

    def _open(self) -> None:
        attached = self._attached
        self._kept = KeptState(self.folder, attached.name, attached.held, attached.form.size_bytes)

    def _put(self, era: int, fragment: int, version: int, payloads: dict[int, Payload]) -> None:
        if self._kept is not None:
            self._kept.put(era, fragment, version, payloads)

    def _made(self, era: int, fragment: int, version: int, digest: bytes, factor: float) -> None:
        if self._kept is not None:
            self._kept.made(era, fragment, version, digest, factor)
            self._tell_later(Reached(era, fragment, *self._kept.reach(era, fragment), version))

    def _ahead(self, effect: do.KeepAhead) -> None:
        if self._kept is not None:
            self._kept.put(effect.era, effect.fragment, effect.version, effect.payloads)
            self._kept.sync(effect.era, effect.fragment, effect.version)
        self._tell_later(AheadKept(effect.fragment, effect.version, effect.round_no, effect.decision_no))

    def _base(self, effect: do.KeepBase, capture: Capture, hashes: list[bytes]) -> None:
        draft = None
        try:
            if self._kept is None:
                self._open()  # it failed before
            assert self._kept is not None
            kept = self._kept
            self._make_room(kept, len(hashes) * self._attached.form.size_bytes)
            draft = kept.begin(effect.era, effect.fragment, effect.version, effect.digest, hashes)
            for chunk in self._attached.fragments[effect.fragment].chunks:
                draft.add(capture.take(chunk))
            kept.publish(draft, effect.era, effect.fragment, effect.version)
        except (StoreError, OSError, GivenUp):
            if draft is not None:
                draft.give_up()
            raise
        finally:
            capture.drop()
        base, version = kept.reach(effect.era, effect.fragment)
        self._tell_later(Reached(effect.era, effect.fragment, base, version, version, base_of=effect.version))

    def _make_room(self, kept: KeptState, more_bytes: int) -> None:
        """For a new base beside the old one.  Of other runs, the one that was touched last stays longest."""
        limit = self._place.limit_bytes
        if kept.size_bytes + more_bytes > limit:
            need = (kept.size_bytes + more_bytes) / 1e9
            raise StoreError(f"{self.folder}: it takes {need:.1f} GB, more than keep = {limit / 1e9:.1f} GB")
        others = sorted(_others(self.folder), key=lambda path: path.stat().st_mtime)
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in others}
        for path in others:
            if kept.size_bytes + more_bytes + sum(sizes.values()) > limit and _removed(path):
                del sizes[path]
        if shutil.disk_usage(self.folder).free < more_bytes + SPARED_BYTES:
            raise StoreError(f"{self.folder}: less than {(more_bytes + SPARED_BYTES) / 1e9:.1f} GB are free")


class Readable(Protocol):
    """KeptState, as it is read; the simulator has one of its own."""

    def ways(self, fragment: int) -> list[BasePath]: ...

    def base_chunks(self, way: BasePath) -> Iterator[tuple[int, bytes]]: ...

    def result(self, era: int, fragment: int, version: int, chunk: int) -> tuple[bytes, float] | None: ...


def ways_of(kept: Readable, fragment: int, effect: do.Recall) -> Iterator[BasePath]:
    """To what may be the run's state, the newest first.  A digest that the coordinator names decides (P4)."""
    limit, digests = effect.known.get(fragment, (NO_VERSION, ()))
    known = dict(digests)
    for way in kept.ways(fragment):
        # What is older than all that it names is of no use to anybody any more.
        newer = way.era == effect.era and way.version > max(known, default=NO_VERSION)
        fits = known[way.version] == way.digest if way.version in known else newer
        if way.version <= limit and fits:
            yield way


def put_back(kept: Readable, way: BasePath, state: OuterState) -> bool:
    """The fragment's state is at this version; False: something on the way is not as it was written."""
    chunks = []
    try:
        for chunk, body in kept.base_chunks(way):
            chunks.append(chunk)
            state.install(Install(chunk, way.base, body))
            for version in range(way.base + 1, way.version + 1):
                found = kept.result(way.era, way.fragment, version, chunk)
                if found is None:
                    return False
                state.roll(Roll(chunk, version, *found), is_last=version == way.version)
    except StoreError:
        return False
    here = range(chunks[0], chunks[-1] + 1)
    state.hash(here)
    return root_of(state.hashes_of(here)) == way.digest


def _others(own: Path) -> list[Path]:
    return [path for path in own.parent.glob(f"*{ENDING}") if path != own and path.is_dir()]


def _removed(folder: Path) -> bool:
    """Unless another process of this peer is at it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(held)
    return True
