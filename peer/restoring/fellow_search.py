"""Finding a coordinator that moved, or was put together again, and what is kept for one that lost its disk.  Pure.

Where the mode begins at a peer.  A peer that is out of contact asks fellow peers for the signed list of addresses, a
few at a time: one of them may have heard of a coordinator that moved.  A peer that was let in by a coordinator that
started anew still hears, for a while, the fellows that have not found it yet, and nothing of them but that question.

Who may lie: a fellow may keep silent, or give an old list, which counts as everywhere (handshake.py).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from farflung.collectives.round.effects import SendFrame
from farflung.peer.machine import effects as do
from farflung.peer.machine.handshake import CoordinatorPlaces, PeerConfig
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Counters, Verdict
from farflung.protocol.frames import Frame, FrameKind, Header, Trait, with_payload
from farflung.protocol.limits import KEPT_COMMITS
from farflung.protocol.messages import Committed, ToMember, Welcome
from farflung.protocol.mode_words import AskKept, Keep, KeptReceipts
from farflung.protocol.round_words import Commit, Contact, RelayRoute
from farflung.protocol.signed_words import kept_part
from farflung.protocol.signing import KeptCommit, SignedHead, curve_key_of, name_of_commit, proves

# ---- kept commits ------------------------------------------------------------------------------------------
# What a peer keeps for a coordinator that may lose its disk: the newest heads of the run's history, signed.
# Pure.
#
# Held by the peer machine. A head comes with the commit that it proves, or by a word of its own where one was
# lost; the last `KEPT_COMMITS` stay, also in a file beside the peer's key. A coordinator that starts on an
# old copy of its folder, or on nothing but its key, asks who knocks for them (coordinator/restoring/).
#
# Who may lie: the coordinator can't, about what it signed before: a head counts under the key of the join URL
# alone, and only forward. Must not know what the books say; they are bytes that the coordinator's signature
# covers.


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


# ---- fellow search -----------------------------------------------------------------------------------------

ASK_AFTER_S = 2.0  # out of contact: a coordinator that is started again is back by then
ASK_EVERY_S = 4.0
ASKED_AT_ONCE = 4
ANSWER_EVERY_S = 2.0  # to one asker
FORMER_S = 120.0  # so long who has not found the coordinator yet may ask those who have


class WhereKind(FrameKind):
    # "I lost the coordinator: where is it?  I know the list `version`; answer when yours is newer."
    WANT_WHERE = 32, Trait.BARE
    WHERE = 33, Trait.ANSWER  # the list that the coordinator signed: Whereabouts in join_url.py


KINDS = WhereKind


class FellowSearch(CoordinatorPlaces):
    def __init__(self, config: PeerConfig, hurry: Callable[[float], None]) -> None:
        """Without the coordinator's key nobody is asked."""
        super().__init__(config, hurry)
        self._me, self._sign = config.me.peer, config.me.sign
        self._commits = KeptCommits(config.pinned, config.me.identity, config.kept_commits)
        self._roster: tuple[Contact, ...] = ()  # with those of the time before
        self._former: dict[str, Contact] = {}
        self._former_until = 0.0
        self._incarnation = 0
        self._ask_at = 0.0
        self._tag = b""  # of the run, for frames
        self._turn = 0
        self._asked: set[str] = set()  # since contact was lost
        self._answered_at: dict[str, float] = {}

    # ---- what is kept for a coordinator that loses its disk ------------------------------------------------------

    @property
    def kept(self) -> SignedHead | None:
        return self._commits.newest

    def keep(self, word: ToMember, about: Callable[[], KeptReceipts]) -> list[do.Effect]:
        if not self._commits.hear(word):
            return []
        self._commits.about = about()
        return [do.Remember(commits=self._commits.raw)]

    def give_back(self, asked: AskKept, about: Callable[[], KeptReceipts] | None) -> list[do.Effect]:
        self._commits.about = about() if about is not None else self._commits.about
        return [do.ToDoor(self._commits.answer(asked, self._sign))]

    # ---- in contact --------------------------------------------------------------------------------------------

    def on_welcome(self, welcome: Welcome, now: float) -> list[do.Effect]:
        """Another coordinator than before may have let me in, who knows nobody yet."""
        if self._pinned and 0 < self._incarnation < welcome.incarnation:
            self._former = {each.peer: each for each in self._roster}
            self._former_until = now + FORMER_S
        self._incarnation = welcome.incarnation
        return super().on_welcome(welcome, now)

    def contacts(self, roster: tuple[Contact, ...], ways: tuple[RelayRoute, ...], now: float) -> do.Contacts:
        """Everybody in the run, and for a while those who were and are not back."""
        told, here = super().contacts(roster, ways, now), self._here
        over = now >= self._former_until
        self._former = {} if over else {peer: each for peer, each in self._former.items() if peer not in here}
        if not roster:
            return told
        self._roster = (*roster, *self._former.values())
        return do.Contacts(self._roster, ways)

    # ---- out of contact ----------------------------------------------------------------------------------------

    def on_lost(self, run_tag: bytes, now: float) -> None:
        self._tag = run_tag
        self._ask_at = now + ASK_AFTER_S
        self._asked = set()

    def on_timer(self, now: float) -> list[do.Effect]:
        """While nobody answers at the door: whom to ask now."""
        if not (self._pinned and self._tag) or now < self._ask_at:
            return []
        self._ask_at = now + ASK_EVERY_S
        fellows = sorted(each.peer for each in self._roster if each.peer != self._me)
        count = min(ASKED_AT_ONCE, len(fellows))
        chosen = [fellows[(self._turn + at) % len(fellows)] for at in range(count)]
        self._turn += count
        self._asked.update(chosen)
        known = self.newest.order if self.newest is not None else 0
        header = Header(WhereKind.WANT_WHERE, self._tag, version=known)
        return [SendFrame(peer, Frame(header)) for peer in chosen]

    # ---- frames ------------------------------------------------------------------------------------------------

    def takes(self, sender: str, frame: Frame) -> bool:
        """It is about where the coordinator is; or comes from somebody of whom nothing else is heard."""
        return isinstance(frame.header.kind, WhereKind) or sender in self._former

    def on_frame(self, sender: str, frame: Frame, counters: Counters, now: float) -> list[do.Effect] | None:
        if not self.takes(sender, frame):
            return None
        verdict, effects = self._heard(sender, frame, now)
        counters.count(verdict)
        return effects

    def _heard(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[do.Effect]]:
        header = frame.header
        if header.kind == WhereKind.WHERE:
            if sender not in self._asked:
                return Verdict.STALE, []
            self._asked.discard(sender)  # one answer for each question: a signature takes time to check
            return self._follow(bytes(frame.payload), now)
        if header.kind != WhereKind.WANT_WHERE:
            return Verdict.STALE, []
        often = now - self._answered_at.get(sender, float("-inf")) < ANSWER_EVERY_S
        if often or self.newest is None or self.newest.order <= header.version:
            return Verdict.ACCEPTED, []
        fellows = {each.peer for each in self._roster}
        self._answered_at = {peer: at for peer, at in self._answered_at.items() if peer in fellows} | {
            sender: now
        }
        answer = with_payload(Header(WhereKind.WHERE, header.run_tag), self.newest.raw)
        return Verdict.ACCEPTED, [SendFrame(sender, answer)]
