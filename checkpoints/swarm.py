"""Fellow joiners: what each has of a state that arrives, piece by piece, at all of them.  Pure.

    WANT_HAVE -> HAVE    a joiner asks each fellow which pieces it has, and hears of it whenever there are more

The coordinator names the fellows and knows no piece.  A fellow gives on what it has checked against the list of hashes,
and who asks it checks that again: a fellow that lies costs a question, never a state.  Beside what it has it tells what
donors owe it, so that a slow donor is asked for each piece once, whoever needs it.

`Swarm` is what a joiner knows of the others, owned by its fetcher (fetcher.py); `HaveAnnouncer` is what it tells them,
owned by what its replica gives to others.  Must not know whom a piece is asked of in the end, nor where the bytes are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

from farflung.collectives.round.effects import SendFrame
from farflung.protocol.digests import bits, full_mask, is_piece, mask_from_bytes, mask_of
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, Payload, bare_answer, with_payload
from farflung.protocol.model_schema import Fragment

NOTHING = -1  # the version of a fellow that has told nothing yet
FALSE_FORGIVEN = 8  # times that a fellow did not have what it had told, without one good piece between
COMING_MOST = 16  # pieces that donors can owe a fellow at a time, as far as that is believed
BROKEN_FORGIVEN = 4  # of those that it never got: it is not believed in that any more
TELL_EVERY_S = 0.1  # to each fellow
TELL_BYTES_S = 16_000  # to all of them: words about pieces must not take the line of pieces
ASKERS_MOST, ASKERS_KEPT_S = 64, 30.0  # who still wants to know asks again before that
NUMBERS = 1 << 32


@dataclass
class _LastNews:
    """What one fellow has told last."""

    number: int = 0  # of its word, as it counts them
    version: int = NOTHING
    has: int = 0  # masks by index within the fragment
    coming: int = 0  # mask of what it says that donors owe it
    # Index -> for how long I have waited for it, and when I looked last, while it was coming.  Only the piece itself
    # ends that: who says it anew, whenever I have looked, is not waited for anew.
    waited_s: dict[int, float] = field(default_factory=dict)
    looked_at: dict[int, float] = field(default_factory=dict)
    asked_at: float | None = None  # a question is out
    denied: int = 0  # how often in a row it did not have what it had told
    broken: set[int] = field(default_factory=set)  # what was coming for too long


class Swarm:
    def __init__(self, fragment: Fragment, run_tag: bytes, retry_s: float, asker: str) -> None:
        self._fragment, self._run_tag, self._retry_s = fragment, run_tag, retry_s
        self._asker = asker
        self._words: dict[str, _LastNews] = {}
        self._places: dict[int, int] = {}
        self._counts = [0] * fragment.count  # fellows that have a piece, whatever its version

    @property
    def names(self) -> Iterable[str]:
        return self._words.keys()

    def are(self, names: Iterable[str]) -> list[str]:
        """The coordinator's word.  Returns who is new."""
        named = list(names)
        for gone in self._words.keys() - set(named):
            self._counted(self._words.pop(gone).has, -1)
        new = [name for name in named if name not in self._words]
        self._words |= {name: _LastNews() for name in new}
        return new

    # ---- asking them ---------------------------------------------------------------------------------------

    def questions(self, now: float) -> list[SendFrame]:
        """One is out at each fellow; it is answered when there is news, and may have got lost."""
        due: list[SendFrame] = []
        for name, word in self._words.items():
            if word.asked_at is None or now - word.asked_at >= self._retry_s:
                word.asked_at = now
                first, known = self._fragment.first, word.number
                header = Header(Kind.WANT_HAVE, self._run_tag, decision_no=known, chunk=first)
                due.append(SendFrame(name, Frame(header)))
        return due

    def on_have(self, sender: str, frame: Frame, now: float) -> Verdict:
        word, header = self._words.get(sender), frame.header
        if word is None:
            return Verdict.STALE
        size = mask_bytes(self._fragment.count)
        if len(frame.payload) != 2 * size or header.chunk != self._fragment.first:
            return Verdict.MALFORMED
        masks = bytes(frame.payload)
        all_of_it = full_mask(self._fragment.count)
        has, coming = (mask_from_bytes(mask) & all_of_it for mask in (masks[:size], masks[size:]))
        self._counted(word.has, -1)
        self._counted(has, 1)
        word.number, word.version, word.has, word.asked_at = header.decision_no, header.version, has, None
        word.coming = mask_of(islice(bits(coming & ~has), COMING_MOST))
        return Verdict.ACCEPTED

    def denied(self, fellow: str) -> None:
        """It does not have what it had told.  It may have moved on: nothing is asked of it until it says more."""
        word = self._words.get(fellow)
        if word is not None and word.has:
            self._counted(word.has, -1)
            word.has, word.denied = 0, word.denied + 1

    def came(self, index: int, of: str) -> None:
        """The piece is here, and true.  If a fellow gave it, that makes up for one that never came."""
        for word in self._words.values():
            word.waited_s.pop(index, None)
            word.looked_at.pop(index, None)
        if (giver := self._words.get(of)) is not None:
            giver.denied = 0
            if giver.broken:
                giver.broken.pop()

    def forgive(self) -> None:
        """I begin again: what was to come before is over."""
        for word in self._words.values():
            word.waited_s.clear()
            word.looked_at.clear()
            word.broken.clear()

    # ---- what follows --------------------------------------------------------------------------------------

    def having(self, index: int, versions: Iterable[int]) -> list[str]:
        """Who says that it has this piece at one of these versions, and may be asked."""
        bit, fit = 1 << index, frozenset(versions)
        return [
            name
            for name, word in self._words.items()
            if word.has & bit and word.version in fit and word.denied <= FALSE_FORGIVEN
        ]

    def at(self, version: int) -> list[str]:
        """Who has pieces of this version, so also the list of its hashes."""
        return [name for name, word in self._words.items() if word.has and word.version == version]

    def versions(self, lacking: int) -> set[int]:
        """Of pieces that are lacking (a mask) and that somebody has."""
        return {word.version for word in self._words.values() if word.has & lacking}

    def is_coming(self, index: int, now: float, patience_s: float) -> bool:
        """A donor owes it to a fellow, which will give it on: to ask for it too would bring it twice over its line.

        Where it does not come for too long it is asked for all the same, and such a fellow is soon not believed."""
        awaited = False
        for word in self._words.values():
            if not word.coming >> index & 1:
                word.looked_at.pop(index, None)
                continue
            waited_s = word.waited_s.get(index, 0.0) + now - word.looked_at.get(index, now)
            word.waited_s[index], word.looked_at[index] = waited_s, now
            if index in word.broken or len(word.broken) >= BROKEN_FORGIVEN:
                continue
            if waited_s >= patience_s:
                word.broken.add(index)
            else:
                awaited = True
        return awaited

    def rarest_first(self, chunks: list[int]) -> list[int]:
        """Those that fewest fellows have.  Of these another one comes first for each who asks, or all would ask a donor
        for the same: those who know of each other share the pieces out among them, and then take others'."""
        if not self._words:
            return chunks
        first = self._fragment.first
        of_us = sorted({*self._words, self._asker})
        mine = of_us.index(self._asker)

        def rank(chunk: int) -> tuple[int, int, int]:
            place = self._place(chunk)
            return self._counts[chunk - first], (place - mine) % len(of_us), place

        return sorted(chunks, key=rank)

    def _place(self, chunk: int) -> int:
        """The same for all."""
        known = self._places.get(chunk)
        if known is None:
            known = int.from_bytes(blake2b(chunk.to_bytes(4, "little"), digest_size=8).digest(), "little")
            self._places[chunk] = known
        return known

    def _counted(self, has: int, by: int) -> None:
        for index in bits(has):
            self._counts[index] += by


@dataclass(frozen=True)
class Holding:
    """What a peer can give on: pieces of one version, each checked.  Masks by index within the fragment."""

    version: int = NOTHING
    has: int = 0
    coming: int = 0  # what donors owe it


class HaveAnnouncer:
    """What the fellows that asked are told of my pieces, as these change."""

    def __init__(self, fragment: Fragment, run_tag: bytes) -> None:
        self._fragment, self._run_tag = fragment, run_tag
        self._number, self._told = 0, Holding()
        # Whose question is open -> the number of the word that it knows, and when it asked.
        self._askers: dict[str, tuple[int, float]] = {}
        self._next_at: dict[str, float] = {}  # who was told lately -> not again before

    def on_want(self, asker: str, known: int, now: float) -> None:
        if asker in self._askers or len(self._askers) < ASKERS_MOST:
            self._askers[asker] = known, now

    def is_due(self, now: float) -> bool:
        """Somebody waits, and may be told: then it is worth looking at what I have."""
        self._next_at = {asker: at for asker, at in self._next_at.items() if at > now}
        for gone in [asker for asker, (_, at) in self._askers.items() if now - at >= ASKERS_KEPT_S]:
            del self._askers[gone]
        return any(asker not in self._next_at for asker in self._askers)

    def words(self, holding: Holding, now: float) -> list[SendFrame]:
        if holding != self._told:
            self._number, self._told = (self._number + 1) % NUMBERS, holding
        if holding.version == NOTHING:
            return []
        due = [
            asker
            for asker, (known, _) in self._askers.items()
            if known != self._number and self._next_at.get(asker, now) <= now
        ]
        size = mask_bytes(self._fragment.count)
        pause_s = max(TELL_EVERY_S, 2 * size * len(self._askers) / TELL_BYTES_S)
        payload = holding.has.to_bytes(size, "little") + holding.coming.to_bytes(size, "little")
        header = Header(
            Kind.HAVE,
            self._run_tag,
            decision_no=self._number,
            version=holding.version,
            chunk=self._fragment.first,
        )
        for asker in due:
            del self._askers[asker]
            self._next_at[asker] = now + pause_s
        return [SendFrame(asker, with_payload(header, payload)) for asker in due]


def given_on(header: Header, expected: bytes, payload: Payload, parts: int) -> Frame:
    """The answer to a fellow's question for a piece with this hash: what was read, unless it is something else by now.

    A fellow would take other bytes for a lie.
    """
    piece = with_payload(header, payload)
    if is_piece(expected, payload, piece.header.hash, parts):
        return piece
    return bare_answer(Kind.MISSING, Header(Kind.WANT_STATE, header.run_tag, chunk=header.chunk))


def mask_bytes(count: int) -> int:
    return (count + 7) // 8
