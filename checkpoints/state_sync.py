"""Catching up: bring every chunk of outer state to the run's version, from whoever has the bytes.  Pure.

One machine serves a peer that joins with nothing, one that missed a commit, and one that has just taken part (its
results are at hand, so nothing is fetched).  Owned by the peer machine; returns effects.  Each fragment has a catch-up
of its own.  What is here and checked is in `chunks` (checked_chunks.py), of whom the rest is asked in `fetcher`
(fetcher.py); here is what concerns both: what is missing, and what an answer means.

A donor that moves on to a newer version while it serves is no trouble: its chunks come at the newer version, and the
manifest of that version is fetched too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from farflung.checkpoints.checked_chunks import NO_VERSION, CheckedChunks
from farflung.checkpoints.fetcher import Fetcher, Key
from farflung.checkpoints.swarm import NOTHING, Holding
from farflung.collectives.round.effects import DataEffect
from farflung.protocol.digests import mask_of
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, Payload
from farflung.protocol.model_schema import Fragment

UNVOUCHED_KEPT = 12  # pieces of state that came before the list of their hashes


class StateSync:
    def __init__(
        self, fragment: Fragment, run_tag: bytes, retry_s: float, parts: int, asker: str = ""
    ) -> None:
        """`parts`: of a chunk's state."""
        self.fragment = fragment
        self.chunks = CheckedChunks(fragment, parts)
        self.fetcher = Fetcher(fragment, run_tag, retry_s, asker, self.chunks)
        self._unvouched: dict[int, tuple[str, Frame]] = {}  # chunk -> who sent it, until the manifest is here

    # ---- what the peer machine tells it -----------------------------------------------------------------

    def reset(self) -> None:
        """What is held is not the run's state: start from nothing."""
        self.set_aside()
        self.chunks.reset()
        self.fetcher.ask_again()
        self.fetcher.fellows.forgive()

    def set_aside(self) -> None:
        """What was asked for is waited for no more, and what has come is not used: what is still missing later is asked
        for again."""
        self.chunks.came.clear()
        self.fetcher.asked.clear()
        self._unvouched.clear()

    def founded(self, version: int = 0) -> list[DataEffect]:
        """The trainer wrote the initial state, or a checkpoint was read: everything is at this version."""
        self.reset()  # whatever was fetched from an earlier founder is not this state
        return self.chunks.founded(version)

    def go_back(self, version: int, keep: bool) -> None:
        """The run is at an older version again.  `keep`: all that is held is of that version."""
        self.reset()
        self.chunks.go_back(version, keep)
        self.fetcher.sources.forgive()  # what was true of the old era may have come since, and looked like a lie
        self.fetcher.donors = ()

    def on_run_state(
        self,
        version: int,
        digests: dict[int, bytes],
        donors: tuple[str, ...],
        keep: int,
        fellows: tuple[str, ...] = (),
    ) -> None:
        """The coordinator's word: where the run is, what the versions' digests are, whom to ask, who else asks."""
        if digests.keys() - self.chunks.digests.keys():
            # Who was just leaving a version had no piece of it to give, and has one of the next.
            self.fetcher.ask_again((Kind.WANT_STATE,))
        self.fetcher.on_sources(donors, fellows)
        if self.chunks.on_run_state(version, digests, keep, bool(donors)):
            self._unvouched.clear()
        if self.chunks.done:
            self.fetcher.sources.forgive()

    # ---- asking -----------------------------------------------------------------------------------------

    def ask(self, now: float, coming: Set[tuple[int, int]] = frozenset()) -> list[DataEffect]:
        """Requests for what is missing.  `coming`: (version, chunk) of results that are not missed yet."""
        self.fetcher.wait_no_longer(now)
        # A piece whose list nobody will bring any more would never be asked for again.
        may_wait = {c for c, kept in self._unvouched.items() if self._may_be_listed(kept[1].header.version)}
        self._unvouched = {chunk: self._unvouched[chunk] for chunk in may_wait}
        return self.fetcher.ask(self._missing(coming), len(self._unvouched))

    def _missing(self, coming: Set[tuple[int, int]]) -> list[Key]:
        keys: list[Key] = []
        chunks, fellows = self.chunks, self.fetcher.fellows
        whole = [chunk for index, chunk in enumerate(self.fragment.chunks) if chunks.lacks(index)]
        if whole and chunks.target in chunks.digests:
            told = fellows.versions(chunks.lacking) & chunks.of_use
            keys += [
                (Kind.WANT_MANIFEST, version, self.fragment.first)
                for version in sorted({chunks.target, *told} - chunks.vouched.lists.keys(), reverse=True)
            ]
            lacking = [c for c in whole if c not in self._unvouched and c not in chunks.came]
            keys += [(Kind.WANT_STATE, 0, chunk) for chunk in fellows.rarest_first(lacking)]
        return keys + [(Kind.WANT_LOGGED, v, chunk) for v, chunk in chunks.lacking_results(coming)]

    def arrived(self) -> Holding:
        """What others may have before all is whole: pieces of one version, of that which most are at."""
        at = [self.chunks.given_at(chunk) for chunk in self.fragment.chunks]
        most = Counter(held for held in at if held != NO_VERSION).most_common(1)
        version, donors = most[0][0] if most else NOTHING, self.fetcher.donors
        asked = [key[2] for key, asked in self.fetcher.asked.items() if asked.heavy and asked.donor in donors]
        owed = {self.fragment.index(chunk) for chunk in (*asked, *self._unvouched)}
        has = mask_of(index for index, held in enumerate(at) if held == version != NO_VERSION)
        return Holding(self.chunks.target if version == NOTHING and owed else version, has, mask_of(owed))

    # ---- answers ----------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame) -> Verdict:
        """MANIFEST, STATE, LOGGED, HAVE, MISSING or LATER; the payload already matched the hash in its own header."""
        header = frame.header
        if header.chunk not in self.fragment.chunks:
            return Verdict.MALFORMED
        waited_for = dict(self.fetcher.asked)
        match header.kind:
            case Kind.MANIFEST:
                verdict = self.chunks.take_list(header.version, frame.payload)
                self.fetcher.on_list(sender, header.version, verdict == Verdict.ACCEPTED)
                if verdict == Verdict.ACCEPTED:
                    self._take_unvouched(header.version)
            case Kind.STATE:
                verdict = self._on_state(sender, frame)
            case Kind.LOGGED:
                verdict = self._on_logged(sender, header, frame.payload)
            case Kind.HAVE:
                return self.fetcher.fellows.on_have(sender, frame, self.fetcher.now)
            case _:
                self.fetcher.on_nothing(sender, header)
                verdict = Verdict.ACCEPTED
        if verdict == Verdict.BAD_HASH:
            self.fetcher.strike(sender)
            return verdict
        for key in waited_for.keys() - self.fetcher.asked.keys():
            self.fetcher.sources.answered(
                sender, waited_for[key], self.fetcher.now, header.kind == Kind.STATE
            )
        return verdict

    def _may_be_listed(self, version: int) -> bool:
        """The list of its hashes may come: it is asked for, or will be."""
        wanted = (Kind.WANT_MANIFEST, version, self.fragment.first)
        is_target = version == self.chunks.target
        return version in self.chunks.digests and (is_target or wanted in self.fetcher.asked)

    def _take_unvouched(self, version: int) -> None:
        """What came before the manifest that has just arrived."""
        waiting = {
            chunk: kept for chunk, kept in self._unvouched.items() if kept[1].header.version == version
        }
        for chunk, (sender, frame) in waiting.items():
            del self._unvouched[chunk]
            if self._on_state(sender, frame) == Verdict.BAD_HASH:
                self.fetcher.strike(sender)

    def _on_state(self, sender: str, frame: Frame) -> Verdict:
        header = frame.header
        key: Key = (Kind.WANT_STATE, 0, header.chunk)
        if header.version not in self.chunks.vouched.lists:
            asked, room = self.fetcher.asked.get(key), len(self._unvouched) < UNVOUCHED_KEPT
            if asked is not None and asked.donor == sender and room and self._may_be_listed(header.version):
                self.fetcher.came(key)
                self._unvouched[header.chunk] = (sender, frame)
                return Verdict.ACCEPTED
            # Its version is not vouched for (not yet, or not any more): another donor, or this one later.
            self.fetcher.refused_by(sender, key)
            return Verdict.STALE
        verdict = self.chunks.take_piece(header, frame.payload)
        if verdict == Verdict.BAD_HASH:
            self.fetcher.refused_by(sender, key)
            return verdict
        self.fetcher.came(key)
        if verdict == Verdict.ACCEPTED:
            self.fetcher.fellows.came(self.fragment.index(header.chunk), sender)
        return verdict

    def _on_logged(self, sender: str, header: Header, payload: Payload) -> Verdict:
        key, verdict = (
            (Kind.WANT_LOGGED, header.version, header.chunk),
            self.chunks.take_result(header, payload),
        )
        if verdict == Verdict.BAD_HASH:
            self.fetcher.refused_by(sender, key)
        elif verdict == Verdict.ACCEPTED:
            self.fetcher.came(key)
        return verdict
