"""What a peer keeps for a coordinator that may lose its disk: the newest heads of the run's history, signed.  Pure.

Held by the peer machine.  A head comes with the commit that it proves, or by a word of its own where one was lost; the
last `KEPT_COMMITS` stay, also in a file beside the peer's key.  A coordinator that starts on an old copy of its folder,
or on nothing but its key, asks who knocks for them (coordinator/restoring/).

Who may lie: the coordinator can't, about what it signed before: a head counts under the key of the join URL alone, and
only forward.  Must not know what the books say; they are bytes that the coordinator's signature covers.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import KEPT_COMMITS
from farflung.protocol.messages import Committed, Keep, ToMember
from farflung.protocol.round_words import Commit
from farflung.protocol.signed_words import kept_part
from farflung.protocol.signing import (
    AskKept,
    KeptCommit,
    KeptReceipts,
    SignedHead,
    curve_key_of,
    name_of_commit,
    proves,
)


class _Page(msgspec.Struct, frozen=True, array_like=True):
    heads: tuple[KeptCommit, ...] = ()
    about: KeptReceipts | None = None


_pages: msgspec.msgpack.Decoder[_Page] = msgspec.msgpack.Decoder(_Page)


class KeptCommits:
    def __init__(self, pinned: bytes, identity: bytes, raw: bytes = b"") -> None:
        """`pinned`: the coordinator's key, as the join URL has it; empty: nothing can be checked, and nothing is kept.
        `raw`: what a former life of this peer kept."""
        self._pinned, self._identity = pinned, identity
        self._heads: list[KeptCommit] = []  # the newest last
        self._commits: dict[bytes, Commit] = {}  # those that the heads name
        page = _read(raw)
        for each in page.heads:
            self._take(each)
        self.about = page.about  # what else is told of the run; None: nothing is known of it

    @property
    def newest(self) -> SignedHead | None:
        return self._heads[-1].head if self._heads else None

    def hear(self, word: ToMember) -> bool:
        """Of a coordinator that let me in.  True: there is something to be written down."""
        is_news = isinstance(word, Committed | Keep) and word.kept is not None and self._take(word.kept)
        if isinstance(word, Committed):
            self._commits[name_of_commit(word.commit)] = word.commit
            self._forget()
        return is_news

    def _take(self, kept: KeptCommit) -> bool:
        head, newest = kept.head, self.newest
        # Only the host begins another run with this key: its numbers start anew, and the older one is over.
        is_same_run = newest is not None and head.run_id == newest.run_id
        if newest is not None and is_same_run and head.order <= newest.order:
            return False
        known = bool(self._pinned) and curve_key_of(head.proof[:32]) == self._pinned
        is_damaged = bool(kept.books) and not kept.is_whole
        if not known or is_damaged or not proves(head.proof, head.statement):
            return False
        # Of another line of the same history nothing stays that this one has no part in.
        older = [each for each in self._heads if is_same_run and each.head.number < head.number]
        self._heads = [*older[1 - KEPT_COMMITS :], kept]
        self._forget()
        return True

    def _forget(self) -> None:
        """Commits that no head names."""
        named = {name for each in self._heads for name in each.head.commits}
        self._commits = {name: commit for name, commit in self._commits.items() if name in named}

    def answer(self, asked: AskKept, sign: Callable[[bytes], bytes]) -> KeptReceipts:
        older = [each for each in self._heads if each.head.number < asked.below]
        told = KeptReceipts(identity=self._identity, kept=None)
        if older and self.about is not None:
            commits = tuple(self._commits[name] for name in older[-1].head.commits if name in self._commits)
            told = msgspec.structs.replace(
                self.about, identity=self._identity, kept=older[-1], commits=commits
            )
        return msgspec.structs.replace(told, signature=sign(kept_part(told, asked.nonce)))

    @property
    def raw(self) -> bytes:
        """For a file: all but the commits."""
        packed = msgspec.msgpack.encode(_Page(tuple(self._heads), self.about))
        return hash_bytes(packed) + packed


def _read(raw: bytes) -> _Page:
    """Nothing, of a file that is not whole."""
    if hash_bytes(raw[32:]) != raw[:32]:
        return _Page()
    try:
        return _pages.decode(raw[32:])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Page()
