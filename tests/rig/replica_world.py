"""A replica, what stands in its memory, and everything that can happen to it: small enough to be tried in every order.

One fragment of two chunks.  The run makes versions 0 and 1; it may go back to 0 once, and make another version 1.
`Cell` is the real replica with its catch-up, and a shell that does what it is asked in order and answers late.  Used by
tests/peer/machine/test_replica_exhaustively.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.collectives.round.effects import Install, Roll, Seal, SendFrame
from farflung.peer.machine.effects import Effect
from farflung.peer.machine.held_fragment import Current, Empty, Rolling
from farflung.peer.machine.replicas import Replica
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.frames import Frame, Header, Kind, bare_answer, with_payload
from farflung.protocol.messages import FragmentTick
from farflung.protocol.round_words import Commit
from rig.made_part import TAG, MadePart

CHUNKS, NEWEST, LAST_ERA = 2, 1, 1
LONG_S = 100.0  # whatever was asked for is late by then
Content = tuple[
    int, int
]  # (era in which this version was made, version) of a chunk in memory; NOTHING: of none
NOTHING: Content = (-1, NO_VERSION)


def made_in(era: int, version: int) -> Content:
    """Version 0 is the same in all eras."""
    return (era if version else 0, version)


def bytes_of(content: Content, chunk: int) -> bytes:
    return f"chunk {chunk} of {content}".encode()


def hashes_of(content: Content) -> list[bytes]:
    return [hash_bytes(bytes_of(content, chunk)) for chunk in range(CHUNKS)]


def result_of(era: int, chunk: int) -> bytes:
    return f"result {chunk} in {era}".encode()


DIGESTS = {content: root_of(hashes_of(content)) for content in ((0, 0), (0, 1), (1, 1))}
CONTENT = {bytes_of(content, chunk): content for content in DIGESTS for chunk in range(CHUNKS)}
RESULTS = {result_of(era, chunk): era for era in range(LAST_ERA + 1) for chunk in range(CHUNKS)}


def commit_in(era: int) -> Commit:
    hashes = b"".join(hash_bytes(result_of(era, chunk)) for chunk in range(CHUNKS))
    return Commit(1, 1 + era, ("bob",), (1.0,), hashes, "int8", 0)


def listed(content: Content) -> Frame:
    header = Header(Kind.MANIFEST, TAG, version=content[1], chunk=0)
    return with_payload(header, b"".join(hashes_of(content)))


def piece(content: Content, chunk: int) -> Frame:
    header = Header(Kind.STATE, TAG, version=content[1], chunk=chunk)
    return with_payload(header, bytes_of(content, chunk))


def logged(era: int, chunk: int) -> Frame:
    return with_payload(Header(Kind.LOGGED, TAG, version=1, chunk=chunk), result_of(era, chunk))


FRAMES: dict[str, Frame] = {
    **{f"list of {content}": listed(content) for content in DIGESTS},
    **{f"{chunk} of {content}": piece(content, chunk) for content in DIGESTS for chunk in range(CHUNKS)},
    **{f"result {c} of era {e}": logged(e, c) for e in range(LAST_ERA + 1) for c in range(CHUNKS)},
    **{
        f"no {kind.name} {chunk}": bare_answer(Kind.MISSING, Header(kind, TAG, version=version, chunk=chunk))
        for kind, version in ((Kind.WANT_STATE, 0), (Kind.WANT_MANIFEST, 1), (Kind.WANT_LOGGED, 1))
        for chunk in range(CHUNKS)
    },
}


class Broken(AssertionError):
    pass


class _Writer(pickle.Pickler):
    """All but what is shared and what can't change, of which it writes the place in `shared`."""

    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared = [*shared]
        self._place_of = {id(each): place for place, each in enumerate(shared)}

    def persistent_id(self, each: object) -> int | None:
        place = self._place_of.get(id(each))
        rules = getattr(type(each), "__dataclass_params__", None)
        if place is None and rules is not None and rules.frozen:
            place = self._place_of[id(each)] = len(self.shared)
            self.shared.append(each)
        return place


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, place: int) -> object:
        return self._shared[place]


class Cell:
    def __init__(self) -> None:
        self.part = MadePart().part
        self.memory = [NOTHING] * CHUNKS
        self.era, self.version, self.now = 0, 0, 0.0
        self.hashing: list[bytes] = []  # digests that were made and not told yet
        self.fills: list[Content] | None = None  # what is to be written, chunk by chunk; None: nobody fills
        self.written = 0
        self.end: Callable[[Cell], list[Effect]] | None = None
        self.asks: list[SendFrame] = []  # nobody has answered them
        self.frames = 0

    @property
    def replica(self) -> Replica:
        return self.part.replicas[0]

    @property
    def newest(self) -> Content:
        return made_in(self.era, self.version)

    @staticmethod
    def of_a_founder() -> Cell:
        """It holds version 0, and version 1 has just been committed."""
        cell = Cell()
        cell.begins((0, 0), lambda each: each.replica.found())
        for happens in (
            Cell.writes,
            Cell.writes,
            Cell.fills_to_the_end,
            Cell.hashed,
            Cell.ticks,
            Cell.commits,
        ):
            happens(cell)
        return cell

    def copies(self) -> Callable[[], Cell]:
        """What never changes, and what no event here reads, is shared: there are very many of these, each of which is
        written once and read for each event."""
        replica = self.replica
        shared = (
            replica.fragment,
            replica.held.log,
            replica.rounds.kept,
            replica.rounds.ahead,
            replica.source._telling,
            replica.held.catch.fragment,
        )
        changing = replica, self.part.counters, self.memory, self.hashing, self.asks
        written = io.BytesIO()
        writer = _Writer(written, shared)
        writer.dump(changing)

        def made() -> Cell:
            other = copy.copy(self)
            other.part = copy.copy(self.part)
            mine, other.part.counters, other.memory, other.hashing, other.asks = _Reader(
                io.BytesIO(written.getbuffer()), writer.shared
            ).load()
            other.part.replicas = {0: mine}
            other.part._replica_of_chunk = dict.fromkeys(range(CHUNKS), mine)
            return other

        return made

    # ---- what it may do --------------------------------------------------------------------------------------

    def does(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendFrame):
                self.asks.append(effect)
            if isinstance(effect, Install | Roll) and (self.fills is not None or self.hashing):
                raise Broken(f"{type(effect).__name__} while the state is {'hashed' * bool(self.hashing)}")
            match effect:
                case Install(chunk=chunk, payload=payload):
                    self.memory[chunk] = CONTENT[bytes(payload)]
                case Roll(chunk=chunk, payload=payload):
                    era = RESULTS[bytes(payload)]
                    if self.memory[chunk] != made_in(era, 0):
                        raise Broken(f"a result of era {era} on {self.memory[chunk]}")
                    self.memory[chunk] = made_in(era, 1)
                case Seal(version=version):
                    if len(set(self.memory)) > 1 or self.memory[0][1] != version:
                        raise Broken(f"sealed as version {version}: {self.memory}")
                    self.hashing.append(DIGESTS[self.memory[0]])
        if (
            self.replica.held.serves
            and self.replica.held.digest != DIGESTS[made_in(self.era, self.replica.held.version)]
        ):
            raise Broken("it serves what is not the run's")

    def moves_on(self) -> None:
        self.does(self.replica.advance(self.now))

    # ---- what may happen to it -------------------------------------------------------------------------------

    def events(self) -> Iterator[tuple[str, Callable[[Cell], None]]]:
        yield "time passes", Cell.waits
        yield "a tick", Cell.ticks
        yield "a tick that names no donor", lambda cell: cell.ticks(())
        if self.version < NEWEST:
            yield "a commit", Cell.commits
        if self.era < LAST_ERA:
            yield "the run goes back", Cell.goes_back
        for name, frame in FRAMES.items():
            yield name, lambda cell, frame=frame: cell.hears(frame)  # type: ignore[misc]
        if self.hashing:
            yield "hashed", Cell.hashed
        yield from self._fillings()

    def _fillings(self) -> Iterator[tuple[str, Callable[[Cell], None]]]:
        stand = self.replica.held.stand
        if self.fills is not None:
            if self.written < CHUNKS:
                yield "the next chunk is written", Cell.writes
                yield "the disk fails", Cell.fails
            else:
                yield "all is written", Cell.fills_to_the_end
            return
        if isinstance(stand, Empty | Rolling):
            for version in range(self.version + 1):
                checkpoint = made_in(self.era, version)
                yield f"reads version {version}", lambda c, what=checkpoint: c.begins(what, _restored(what))  # type: ignore[misc]
        if isinstance(stand, Empty | Rolling | Current) and self.version == 0:
            yield "founds", lambda cell: cell.begins((0, 0), lambda c: c.replica.found())
        if isinstance(stand, Empty) and set(self.replica.held.chunks.versions) == {NO_VERSION}:
            for chunk in range(CHUNKS):
                yield (
                    f"recalls {chunk}",
                    lambda c, chunk=chunk: c.begins(c.newest, _recalled(c.newest, chunk)),
                )  # type: ignore[misc]

    def waits(self) -> None:
        self.now += LONG_S
        self.moves_on()

    def ticks(self, donors: tuple[str, ...] = ("bob",)) -> None:
        known = tuple((v, DIGESTS[made_in(self.era, v)]) for v in range(self.version + 1))
        verified = self.replica.held.whole and (self.replica.held.version, self.replica.held.digest) in known
        self.replica.on_tick(FragmentTick(0, self.version, known, verified, donors, 0, False, 0))
        self.moves_on()

    def commits(self) -> None:
        self.version = 1
        self.replica.on_commit(commit_in(self.era), self.now)
        self.moves_on()

    def goes_back(self) -> None:
        self.era, self.version = self.era + 1, 0
        if self.replica.go_back(0, DIGESTS[0, 0]):  # what each chunk was before the last round is written
            self.fills, self.written, self.end = [(0, 0)] * CHUNKS, 0, _restored((0, 0))
        self.ticks()

    def hears(self, frame: Frame) -> None:
        self.frames += 1
        self.does(self.part.on_frame("bob", frame, self.now))
        if self.part.counters.total != self.frames:
            raise Broken("a frame ends in one counter")
        self.moves_on()

    def hashed(self) -> None:
        version = self.memory[0][1]
        self.replica.on_sealed(version, self.hashing.pop())
        self.moves_on()

    def begins(self, what: Content, end: Callable[[Cell], list[Effect]]) -> None:
        self.fills, self.written, self.end = [what] * CHUNKS, 0, end
        self.replica.held.fill()
        self.moves_on()

    def writes(self) -> None:
        assert self.fills is not None
        self.memory[self.written] = self.fills[self.written]
        self.written += 1
        self.moves_on()

    def fails(self) -> None:
        touched, self.fills = self.written > 0, None
        self.replica.unfilled(touched)
        self.moves_on()

    def fills_to_the_end(self) -> None:
        assert self.end is not None
        end, self.fills, self.end = self.end, None, None
        self.does(end(self))
        self.moves_on()

    def goes_on_honestly(self) -> None:
        """What was begun ends, and bob, who has all of the run's newest version, answers what he is asked."""
        if self.hashing:
            self.hashed()
        elif self.fills is not None:
            (self.fills_to_the_end if self.written == CHUNKS else self.writes)()
        else:
            asks, self.asks = self.asks, []
            for ask in asks:
                self.hears(self._answer(ask.frame.header))
            if self.version:
                self.replica.on_commit(commit_in(self.era), self.now)
            self.ticks()
            if not self.asks and not self.hashing:
                self.waits()

    def _answer(self, want: Header) -> Frame:
        match want.kind:
            case Kind.WANT_STATE:
                return piece(self.newest, want.chunk)
            case Kind.WANT_MANIFEST:
                return listed(self.newest)
            case Kind.WANT_LOGGED if self.version:
                return logged(self.era, want.chunk)
        return bare_answer(Kind.MISSING, want)

    # ---- where it is -----------------------------------------------------------------------------------------

    @property
    def key(self) -> object:
        """Two cells with the same go on in the same way, but for who is asked what, and how long they wait."""
        catch, stand = self.replica.held.catch, self.replica.held.stand
        waiting = sorted((chunk, kept[1].header.version) for chunk, kept in catch._unvouched.items())
        parts = (
            (
                type(stand),
                stand.version,
                stand.digest,
                self.replica.held.serves,
                getattr(stand, "before", None),
            ),
            (self.era, self.version, *self.memory, *self.hashing, self.replica.rounds._lost_track),
            (self.fills and (*self.fills, self.written, self.end is not None and self.end.__name__)),
            (
                *catch.chunks.versions,
                catch.chunks.target,
                catch.chunks.sealed,
                catch.fetcher.donors,
                *sorted(catch.chunks.digests.items()),
            ),
            (
                *sorted(catch.chunks.commits),
                *sorted(catch.chunks.vouched.lists),
                *sorted(catch.chunks._results),
                *sorted(catch.chunks.stuck),
            ),
            (*waiting, *sorted((chunk, came.version) for chunk, came in catch.chunks.came.items())),
        )
        return repr(parts)


def _restored(what: Content) -> Callable[[Cell], list[Effect]]:
    def restored(cell: Cell) -> list[Effect]:
        return cell.replica.filled(what[1])

    return restored


def _recalled(what: Content, chunk: int) -> Callable[[Cell], list[Effect]]:
    def recalled(cell: Cell) -> list[Effect]:
        """That chunk alone had been kept: the other one is whatever it was."""
        cell.memory[1 - chunk] = NOTHING
        cell.replica.unfilled(True, {chunk: (what[1], DIGESTS[what])})
        return []

    return recalled
