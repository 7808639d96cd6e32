"""What peers keep of the books, signed: enough to go on from, where the journal is lost with its disk.  Pure.

Made as soon as a commit is written, and read where a run is put together again (restoration.py).  The
record `Restored` puts them back into the ledger: the one fold of a mode that changes more than its own part.  Each head
names all that came before it (`HeadLink`), so two heads of one number are a fork that shows.

What the books of a commit say is true of that moment.  What was granted, released or said after it is not in them: a
lease that is younger than the commit is void, its samples are leased again, and whoever worked on them drops that work.
No sample of a commit that was put back is leased again.  Numbers of rounds, leases and seats go on far ahead, so that
none is given twice.  Bans, invitations, strikes and the evidence are not kept by peers: they are the folder's alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from farflung.coordinator.door.hello_check import HelloPassed
from farflung.coordinator.ledger.leases import HeldLease, Leases, Range
from farflung.coordinator.ledger.ledger import (
    NUMBERS_AHEAD,
    FragmentBook,
    HolderMark,
    Ledger,
    LedgerPart,
    Mark,
    VersionFigures,
    packed,
    unpacked,
)
from farflung.coordinator.ledger.records import CommittedBatch, CommittedRound, Genesis, Record, RolledBack
from farflung.coordinator.modes.registry import CoordinatorMode
from farflung.coordinator.roster.partial_view import WHOLE_ROSTER
from farflung.coordinator.run.core import Core
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import FRAGMENTS_MAX, KEPT_BOOKS_BYTES, KEPT_COMMITS
from farflung.protocol.messages import Beat
from farflung.protocol.mode_words import Keep, KeptBeat
from farflung.protocol.model_schema import BOOKS_FRAGMENT, ModelSchema
from farflung.protocol.round_words import Commit, Count, Hash, PeerName, section
from farflung.protocol.signing import KeptCommit, SignedHead, name_of_commit

UNPACKED_BYTES_MOST = 8 << 20  # a hundred times what books may have
PARTS_MOST, PART_BYTES = 16, 1024  # of modes, and what each may have kept
ModeName = Annotated[str, Meta(max_length=32)]
LEASE_BYTES_LEAST = 6  # of each that is held; of two a member it is 8


@dataclass(frozen=True)
class HeadLink:
    """The newest step of the run's history, and a name of all of them."""

    number: int = 0
    before: bytes = bytes(32)
    after: bytes = bytes(32)
    incarnation: int = 0
    commits: tuple[bytes, ...] = ()

    @property
    def order(self) -> tuple[int, int]:
        return self.incarnation, self.number

    def then(self, incarnation: int, commits: Iterable[Commit], what: bytes = b"") -> HeadLink:
        """`what`: names a step without commits."""
        named = tuple(map(name_of_commit, commits))
        after = hash_bytes(self.after, incarnation.to_bytes(8, "big"), what, *named)
        return HeadLink(self.number + 1, self.after, after, incarnation, named)


class FragmentBooks(Struct, frozen=True, array_like=True):
    digests: tuple[tuple[Count, Hash], ...]
    vouched: tuple[PeerName, ...]
    holders: tuple[tuple[PeerName, Annotated[int, Meta(ge=-1)], Count], ...]  # what it may hold, its tokens
    dropped_round: Count


class Books(Struct, frozen=True, array_like=True):
    round_no: Count
    tokens: Count
    loss: float | None
    delivered: bool
    era_reason: str
    leases: bytes  # `kept_leases`
    parts: Annotated[
        dict[ModeName, Annotated[bytes, Meta(max_length=PART_BYTES)]], Meta(max_length=PARTS_MOST)
    ]
    model: bytes  # its hash
    fragments: Annotated[tuple[FragmentBooks, ...], Meta(max_length=FRAGMENTS_MAX)]


_books: msgspec.msgpack.Decoder[Books] = msgspec.msgpack.Decoder(Books)


def name_of_model(model: ModelSchema) -> bytes:
    return hash_bytes(msgspec.msgpack.encode(model))


@lru_cache(maxsize=KEPT_COMMITS)
def books_in(kept: KeptCommit) -> Books | None:
    """None: they are not what was signed, or can't be read.  Whoever puts a run together again asks
    with each knock of each peer, and leases of thousands take some hundredths of a second to read."""
    try:
        books = _books.decode(kept.books) if kept.is_whole else None
        fits = books is not None and len(books.fragments) == len(kept.head.versions)
        leases = leases_in(books.leases) if books is not None and fits else None
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, ValueError, LookupError):
        return None
    return books if leases is not None else None


# ---- leases ---------------------------------------------------------------------------------------------------------
#
# Every keeper gets them with every commit.  A run of a thousand members has thousands, most of which follow each
# other: so they travel as columns of small numbers, compressed.  Where even that is too long, nobody holds a lease in
# the books: who goes on from them leases the samples again, and what was being learned from them when the disk was
# lost is dropped, as it is with leases that are younger than the commit.


class RangeColumns(Struct, frozen=True, array_like=True):
    """Of ranges, in their order: how much later each begins than the one before it has ended, and so on."""

    epochs: tuple[int, ...]
    gaps: tuple[int, ...]
    lengths: tuple[int, ...]
    learned: tuple[int, ...]  # of each range by every fragment


class KeptLeases(Struct, frozen=True, array_like=True):
    rest: bytes  # nearly all else, as in a folded ledger
    settled: bool  # without the leases it would seem that all samples are committed
    returned: RangeColumns
    held: RangeColumns
    ids: tuple[int, ...]  # of those held: how much more each is than the one before
    holders: tuple[int, ...]
    peers: tuple[str, ...]


_decoder: msgspec.msgpack.Decoder[KeptLeases] = msgspec.msgpack.Decoder(KeptLeases)


def kept_leases(leases: Leases, most_bytes: int) -> bytes:
    """With their holders if that is short enough: of tens of thousands it would take long to see that it is not."""
    if LEASE_BYTES_LEAST * len(leases.held) <= most_bytes:
        raw = _compressed(leases)
        if len(raw) <= most_bytes:
            return raw
    return _compressed(leases.held_by_nobody())


def leases_in(raw: bytes) -> Leases:
    """Errors: ValueError, TypeError, LookupError, and those of msgspec."""
    inflating = zlib.decompressobj()
    try:
        whole = inflating.decompress(raw, UNPACKED_BYTES_MOST)
    except zlib.error as error:
        raise ValueError(f"leases that are kept in the books: {error}") from None
    if not inflating.eof or inflating.unused_data:
        raise ValueError("leases that are kept in the books do not end where they should")
    found = _decoder.decode(whole)
    leases = _folded(found.rest)
    leases.settled, leases.returned = found.settled, list(_in_columns(found.returned, leases.fragments))
    held = _in_columns(found.held, leases.fragments)
    for lease_id, holder, each in zip(accumulate(found.ids), found.holders, held, strict=True):
        leases.held[lease_id] = HeldLease(found.peers[holder], each.epoch, each.start, each.stop, each.uptos)
    leases.after_unpacking()
    return leases


def _folded(raw: bytes) -> Leases:
    found: Leases = unpacked(raw, Leases)
    return found


def _compressed(leases: Leases) -> bytes:
    held = sorted(leases.held.items())
    peers = {peer: place for place, peer in enumerate(dict.fromkeys(each.peer for _, each in held))}
    kept = KeptLeases(
        packed(replace(leases, held={}, returned=[])),
        leases.settled,
        _columns(leases.returned, leases.fragments),
        _columns((each.as_range for _, each in held), leases.fragments),
        _differences(lease_id for lease_id, _ in held),
        tuple(peers[each.peer] for _, each in held),
        tuple(peers),
    )
    return zlib.compress(msgspec.msgpack.encode(kept))


def _columns(ranges: Iterable[Range], fragments: int) -> RangeColumns:
    found = list(ranges)
    return RangeColumns(
        _differences(each.epoch for each in found),
        tuple(each.start - before.stop for before, each in pairwise([Range(0, 0, 0, ()), *found])),
        tuple(each.stop - each.start for each in found),
        tuple(each.uptos[number] - each.start for number in range(fragments) for each in found),
    )


def _in_columns(columns: RangeColumns, fragments: int) -> Iterator[Range]:
    count, ended = len(columns.epochs), 0
    if len(columns.learned) != count * fragments:
        raise ValueError(f"{len(columns.learned)} numbers of {fragments} fragments for {count} leases")
    rows = zip(accumulate(columns.epochs), columns.gaps, columns.lengths, strict=True)
    for place, (epoch, gap, length) in enumerate(rows):
        start = ended + gap
        ended = start + length
        yield Range(epoch, start, ended, tuple(start + each for each in columns.learned[place::count]))


def _differences(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(number - before for before, number in pairwise([0, *numbers]))


# ---- the mode's part of the ledger --------------------------------------------------------------------------------


class Restored(Record, frozen=True, kw_only=True, tag="restored"):
    """The coordinator started on a copy, or on its key alone: what peers showed is put back."""

    kept: KeptCommit | None  # the newest; None: nobody showed any
    older: tuple[KeptCommit, ...] = ()  # those before it, the newest first
    commits: tuple[Commit, ...] = ()  # that these name
    peers: tuple[str, ...] = ()  # who showed something
    reason: str = ""
    # By incarnation and number: the newest step that was signed, if nobody showed its books.  What is of it is void.
    given_up: tuple[int, int] = (0, 0)

    def event(self) -> dict[str, Any]:
        """What the journal of events says of it."""
        versions = self.kept.head.versions if self.kept is not None else None
        return {"versions": versions, "peers": self.peers, "reason": self.reason}


@dataclass
class KeptSteps(LedgerPart):
    """How far the run is, for a coordinator that loses its disk, and what became of such a loss."""

    link: HeadLink = field(default_factory=HeadLink)
    restored_because: str = ""  # it was lost, once
    given_up: tuple[int, int] = (0, 0)  # the order of a step that nobody could show then

    @staticmethod
    def of(ledger: Ledger) -> KeptSteps:
        part: KeptSteps = ledger.parts["restoring"]
        return part

    def apply(self, record: Record, ledger: Ledger) -> None:
        match record:
            case Genesis(digests=digests):
                self.link = self.link.then(ledger.incarnation, (), b"".join(digests))
            case CommittedRound(commit=commit):
                self.link = self.link.then(ledger.incarnation, [commit])
            case CommittedBatch(rounds=rounds):
                self.link = self.link.then(ledger.incarnation, [each.commit for each in rounds])
            case RolledBack(versions=versions):
                what = repr((ledger.eras.number, versions)).encode("ascii")
                self.link = self.link.then(ledger.incarnation, (), what)
            case Restored():
                _restore(ledger, self, record)
            case _:
                pass


def _restore(ledger: Ledger, mine: KeptSteps, record: Restored) -> None:
    """The books are those of the newest commit that was shown, or what this journal says, if it knows as much."""
    mine.restored_because = record.reason
    mine.given_up = max(mine.given_up, record.given_up)
    newest = record.kept
    books = books_in(newest) if newest is not None else None
    if newest is not None and books is not None and newest.head.order > mine.link.order:
        head = newest.head
        mine.link = HeadLink(head.number, head.before, head.after, head.incarnation, head.commits)
        _put_back(ledger, head, books)
        _fill_in(ledger, record)
    for part in ledger.parts.values():
        part.on_restored()
    ledger.leases.next_id += NUMBERS_AHEAD
    ledger.round_no += NUMBERS_AHEAD
    for book in ledger.books:
        book.open_round = 0


def _put_back(ledger: Ledger, head: SignedHead, books: Books) -> None:
    ledger.incarnation = max(ledger.incarnation, head.incarnation)
    ledger.eras.number, ledger.eras.because, ledger.eras.delivered = (
        head.era,
        books.era_reason,
        books.delivered,
    )
    ledger.totals.tokens, ledger.totals.loss = books.tokens, books.loss
    ledger.round_no = max(ledger.round_no, books.round_no)
    ledger.leases = leases_in(books.leases)
    for number, (book, said) in enumerate(zip(ledger.books, books.fragments, strict=True)):
        book.version = head.versions[number]
        book.digests, book.shown, book.commits, book.marks = dict(said.digests), {}, {}, {}
        book.figures = VersionFigures(cosines=book.figures.cosines)
        book.vouched = set(said.vouched)
        book.holders = {peer: HolderMark(reached, tokens) for peer, reached, tokens in said.holders}
        book.dropped_round, book.dropped_at = said.dropped_round, -1
        book.marks[book.version] = _mark(books, ledger.leases, number)
        if number == BOOKS_FRAGMENT:
            ledger.peers.tokens.update({p: t - ledger.peers.tokens[p] for p, _, t in said.holders if t})
    _put_back_parts(ledger, head.versions[BOOKS_FRAGMENT], books, newest=True)


def _put_back_parts(ledger: Ledger, version: int, books: Books, newest: bool) -> None:
    for name, part in ledger.parts.items():
        part.put_back(version, books.parts.get(name, b""), newest)


def _mark(books: Books, leases: Leases, fragment: int) -> Mark:
    return Mark(leases.reach(fragment), books.tokens, books.loss)


def _fill_in(ledger: Ledger, record: Restored) -> None:
    """What older commits say of older versions, to which the run may go back, as far as they are shown."""
    lowest = [book.version for book in ledger.books]
    _fill_in_commits(ledger, record)
    for kept in record.older:  # the newest first
        books = books_in(kept)
        leases = leases_in(books.leases) if books is not None else None
        if books is not None and kept.head.versions[BOOKS_FRAGMENT] <= lowest[BOOKS_FRAGMENT]:
            _put_back_parts(ledger, kept.head.versions[BOOKS_FRAGMENT], books, newest=False)
        for number, version in enumerate(kept.head.versions if books is not None else ()):
            book = ledger.books[number]
            assert books is not None and leases is not None
            if version > lowest[number]:
                continue  # the run went back behind it since
            lowest[number] = version
            book.marks.setdefault(version, _mark(books, leases, number))
            for of, digest in books.fragments[number].digests:
                if of <= version:
                    book.digests.setdefault(of, digest)
    for book in ledger.books:
        # To a version of which nobody knows what it had learned from the run must not go back: 0 is no such one.
        book.digests = {v: d for v, d in book.digests.items() if v in book.marks or v == 0}


def _fill_in_commits(ledger: Ledger, record: Restored) -> None:
    """Of each version the one that counts: the run may have gone back, and have made it once more since."""
    shown = {name_of_commit(commit): commit for commit in record.commits}
    lowest = [book.version for book in ledger.books]
    for kept in ((record.kept,) if record.kept is not None else ()) + record.older:  # the newest first
        lowest = [min(pair) for pair in zip(lowest, kept.head.versions, strict=True)]
        for commit in [shown[name] for name in kept.head.commits if name in shown]:
            book, version = ledger.books[commit.fragment], commit.version
            if book.version - ledger.rules.keep_results < version <= lowest[commit.fragment]:
                book.commits[version] = commit


# ---- keepers -----------------------------------------------------------------------------------------------
# Who keeps what of the run, for a coordinator that loses its disk, and what peers keep that this journal
# lacks. Pure.
#
# The mode's part of the run machine (coordinator/modes/registry.py). With each commit members get the newest step
# of the run's history, signed, and some or all of them the books behind it, made as soon as the commit is
# written. Whoever comes in shows the newest head that it keeps: where that is newer than this
# journal, the journal is an old copy, and nothing is committed.

KEEP_AGAIN_S = 5.0
KEEPERS = 16  # of the books of each step of the run, where not everybody is one
HOLDERS_KEPT = 256  # of a fragment, those that brought most
HOLDERS_BYTES = KEPT_BOOKS_BYTES * 3 // 4  # of all fragments; the rest is for leases
DIGESTS_IN_BOOKS = 2  # older ones stand in older books
LENGTH_BYTES = 8  # more than msgpack needs to say how long the leases are


class Keepers(CoordinatorMode):
    def __init__(self, core: Core) -> None:
        self._core = core
        self._kept: tuple[object, KeptCommit | None] = None, None
        self._keepers: tuple[object, frozenset[str]] = None, frozenset()
        # Of the newest step, by peer: in which session it was told once more, and when.
        self._told: dict[str, tuple[bytes, float]] = {}
        self._newer: SignedHead | None = None  # of this run, and not in this journal

    def on_start(self, restored: bool) -> str:
        return f"restored: {KeptSteps.of(self._core.ledger).restored_because}" if restored else ""

    # ---- what members keep -----------------------------------------------------------------------------

    def kept(self) -> KeptCommit | None:
        """What members keep of the run as it is now; signed once for each step."""
        core, link = self._core, KeptSteps.of(self._core.ledger).link
        if link is not self._kept[0]:
            self._kept = link, kept_commit(core.ledger, core.run_id, core.terms.first.digest, core.prove)
            self._told.clear()
        return self._kept[1]

    def is_keeper(self, peer: str) -> bool:
        """Who is to keep what the run is now: everybody.  But what that is grows with the members, so where these are
        many, or rounds are in groups, some do, of those who hear of a commit at once; nobody could know before who."""
        core, link = self._core, KeptSteps.of(self._core.ledger).link
        if not core.manifest.round.group and len(core.members.alive) <= WHOLE_ROSTER:
            return True
        if link is not self._keepers[0]:
            told = {maker for book in core.ledger.books for maker in book.makers}
            drawn = sorted(
                core.members.alive, key=lambda each: (each not in told, hash_bytes(link.after, each.encode()))
            )
            self._keepers = link, frozenset(drawn[:KEEPERS])
        return peer in self._keepers[1]

    def kept_by(self, peer: str) -> KeptCommit | None:
        """The head in any case: whoever goes on with a commit can prove that it is there."""
        kept = self.kept()
        return kept if kept is None or self.is_keeper(peer) else kept.without_books

    def on_answered(self, peer: str, beat: Beat) -> None:
        """What comes with each commit, for whom that did not reach.  Who can't check it never says that it has it."""
        kept = self.kept_by(peer)
        said = section(KeptBeat, beat.sections)
        if kept is None or (said is not None and said.number == kept.head.number):
            return
        core, member = self._core, self._core.members.members[peer]
        session, told_at = self._told.get(peer, (b"", 0.0))
        if session != member.session or core.now - told_at >= KEEP_AGAIN_S:
            self._told[peer] = member.session, core.now
            core.tell(member, Keep, kept=kept)

    # ---- what this journal lacks -----------------------------------------------------------------------

    def on_hello(self, passed: HelloPassed) -> None:
        self.hear_of(passed.hello.kept)

    def hear_of(self, head: SignedHead | None) -> None:
        """What somebody who comes in keeps.  The run's own key tells if this journal is older than the run."""
        core = self._core
        known = max(KeptSteps.of(core.ledger).link.order, KeptSteps.of(core.ledger).given_up)
        if head is None or head.run_id != core.run_id or head.order <= known:
            return
        mine = core.prove(b"")[:32]
        if mine and head.is_by(mine) and (self._newer is None or head.order > self._newer.order):
            self._newer = head
            core.note(self.holds())

    def holds(self) -> str:
        link = KeptSteps.of(self._core.ledger).link
        if self._newer is None or self._newer.order <= link.order:
            return ""
        return (
            f"this journal is an old copy: it ends at step {link.number} of the run, and a peer has version "
            f"{min(self._newer.versions)}, step {self._newer.number}, signed by this run's key; nothing is committed. "
            "Stop this coordinator and start it again with --restored: peers give back what is missing"
        )

    def voids(self, fragment: int, version: int) -> bool:
        """It was made by a commit that was lost with the coordinator's disk: nobody could prove it."""
        ledger = self._core.ledger
        is_newer = bool(KeptSteps.of(ledger).restored_because) and version > ledger.books[fragment].version
        return is_newer and self._newer is None


# ---- what is kept: it knows nothing of who is told


def kept_commit(
    ledger: Ledger, run_id: bytes, manifest: bytes, prove: Callable[[bytes], bytes]
) -> KeptCommit | None:
    """None: there is nothing to keep yet, no key to sign it with, or it is too long.  `manifest`: the digest of what
    the run began with."""
    link = KeptSteps.of(ledger).link
    if not link.number or ledger.model is None:
        return None
    raw = msgspec.msgpack.encode(_books_of(ledger, ledger.model))
    if len(raw) > KEPT_BOOKS_BYTES:
        return None
    head = SignedHead(
        run_id,
        manifest,
        link.number,
        link.before,
        link.after,
        link.incarnation,
        ledger.eras.number,
        tuple(book.version for book in ledger.books),
        link.commits,
        hash_bytes(raw),
    )
    proof = prove(head.statement)
    return KeptCommit(msgspec.structs.replace(head, proof=proof), raw) if proof else None


def _books_of(ledger: Ledger, model: ModelSchema) -> Books:
    """Of many fragments with many peers each, those who brought most: to keep less is better than to keep nothing."""
    holders = HOLDERS_KEPT
    while True:
        books = _books_with(ledger, model, holders)
        size_bytes = len(msgspec.msgpack.encode(books))
        if size_bytes <= HOLDERS_BYTES or not holders:
            break
        holders //= 2
    room_bytes = KEPT_BOOKS_BYTES - size_bytes - LENGTH_BYTES
    return msgspec.structs.replace(books, leases=kept_leases(ledger.leases, room_bytes))


def _books_with(ledger: Ledger, model: ModelSchema, holders: int) -> Books:
    return Books(
        ledger.round_no,
        ledger.totals.tokens,
        ledger.totals.loss,
        ledger.eras.delivered,
        ledger.eras.because,
        b"",
        {name: kept for name, part in ledger.parts.items() if (kept := part.kept())},
        name_of_model(model),
        tuple(_fragment_of(book, holders) for book in ledger.books),
    )


def _fragment_of(book: FragmentBook, holders: int) -> FragmentBooks:
    most = sorted(book.holders.items(), key=lambda held: (-held[1].tokens, held[0]))[:holders]
    return FragmentBooks(
        tuple(sorted(book.digests.items())[-DIGESTS_IN_BOOKS:]),
        tuple(peer for peer, _ in most if peer in book.vouched),
        tuple((peer, holder.reached, holder.tokens) for peer, holder in most),
        book.dropped_round,
    )
