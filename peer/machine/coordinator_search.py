"""Where the coordinator may be: what a peer was told of it, whom it asks when it is lost, and whom it tells.  Pure.

Part of the peer machine.  A peer starts with the addresses of its join URL and with the signed list that it kept; a
newer list comes with each welcome.  A peer that is out of contact asks fellow peers for theirs, a few at a time: one of
them may have heard of a coordinator that moved.  A peer that was let in by a coordinator that started anew still hears,
for a while, the fellows that have not found it yet, and nothing of them but that question.

Who may lie: a fellow may keep silent, or give an old list.  A list counts only under the run's key, and only if it is
newer than mine, so nobody can send a peer elsewhere, and the addresses of the URL are tried whatever comes.  Must not
know sockets or files.
"""

from __future__ import annotations

from collections.abc import Callable

from farflung.checkpoints.kept_commits import KeptCommits
from farflung.collectives.round.effects import SendFrame
from farflung.peer.machine import effects as do
from farflung.peer.machine.handshake import PeerConfig
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.join_url import Address, Whereabouts, whereabouts_of
from farflung.protocol.limits import ADDRESSES_MOST
from farflung.protocol.messages import Tick, ToMember, Welcome
from farflung.protocol.round_words import Contact, RelayRoute
from farflung.protocol.signing import AskKept, KeptReceipts
from farflung.protocol.verdicts import Counters, Verdict

ASK_AFTER_S = 2.0  # out of contact: a coordinator that is started again is back by then
ASK_EVERY_S = 4.0
ASKED_AT_ONCE = 4
ANSWER_EVERY_S = 2.0  # to one asker
FORMER_S = 120.0  # so long who has not found the coordinator yet may ask those who have
PLACES_MOST = 3 * ADDRESSES_MOST
_KINDS = frozenset({Kind.WANT_WHERE, Kind.WHERE})


class CoordinatorSearch:
    def __init__(self, config: PeerConfig, hurry: Callable[[float], None]) -> None:
        """Without the coordinator's key no list can be checked, and nobody is asked.  The list of a former life is
        checked like any other.  `hurry(now)`: it is known where else to knock."""
        self._me, self._run, self._pinned = config.me.peer, config.run, config.pinned
        self._hurry = hurry
        self._given = config.places
        self._sign = config.me.sign
        self.kept = KeptCommits(config.pinned, config.me.identity, config.kept_commits)
        self._before: tuple[Address, ...] = ()  # of the list before the newest
        self.newest: Whereabouts | None = None
        self.hear(config.kept)
        self._here: dict[str, Contact] = {}  # by the coordinator's word
        self.roster_no = 0  # of that; 0: it has none
        self._roster: tuple[Contact, ...] = ()  # with those of the time before
        self._former: dict[str, Contact] = {}
        self._former_until = 0.0
        self._incarnation = 0
        self._ask_at = 0.0
        self._tag = b""  # of the run, for frames
        self._turn = 0
        self._asked: set[str] = set()  # since contact was lost
        self._answered_at: dict[str, float] = {}

    @property
    def places(self) -> tuple[Address, ...]:
        """Where to knock, in this order: by the newest list, by the URL, by the list before."""
        newest = self.newest.places if self.newest is not None else ()
        return tuple(dict.fromkeys((*newest, *self._given, *self._before)))[:PLACES_MOST]

    def hear(self, raw: bytes) -> tuple[Verdict, list[do.Effect]]:
        """A list, from whomever."""
        said = whereabouts_of(raw, self._pinned, self._run) if self._pinned else None
        if said is None:
            return Verdict.UNAUTHORISED, []
        if self.newest is not None and said.order <= self.newest.order:
            return Verdict.DUPLICATE if said == self.newest else Verdict.STALE, []
        if self.newest is not None and self.newest.addresses != said.addresses:
            self._before = self.newest.places
        self.newest = said
        return Verdict.ACCEPTED, [do.Remember(said.raw), do.LookAt(self.places)]

    def on_found(self, raw: bytes, now: float) -> list[do.Effect]:
        """In a phone book, while nobody answers."""
        return self._follow(raw, now)[1]

    def _follow(self, raw: bytes, now: float) -> tuple[Verdict, list[do.Effect]]:
        verdict, effects = self.hear(raw)
        if effects:
            self._hurry(now)
        return verdict, effects

    # ---- what is kept for a coordinator that loses its disk ------------------------------------------------------

    def keep(self, word: ToMember, about: Callable[[], KeptReceipts]) -> list[do.Effect]:
        """`about`: what else to tell of the run."""
        if not self.kept.hear(word):
            return []
        self.kept.about = about()
        return [do.RememberCommits(self.kept.raw)]

    def give_back(self, asked: AskKept, about: Callable[[], KeptReceipts] | None) -> list[do.Effect]:
        """`about`: None where nothing is known of the run but what was kept."""
        self.kept.about = about() if about is not None else self.kept.about
        return [do.ToDoor(self.kept.answer(asked, self._sign))]

    # ---- in contact --------------------------------------------------------------------------------------------

    def on_welcome(self, welcome: Welcome, now: float) -> list[do.Effect]:
        """Another coordinator than before may have let me in, who knows nobody yet."""
        if self._pinned and 0 < self._incarnation < welcome.incarnation:
            self._former = {each.peer: each for each in self._roster}
            self._former_until = now + FORMER_S
        self._incarnation = welcome.incarnation
        _, effects = self.hear(welcome.whereabouts)
        self.roster_no = 0
        return [*effects, self.contacts(welcome.roster, (), now)]

    def on_roster(self, tick: Tick, now: float) -> list[do.Effect]:
        """What is new since a roster that I have not got is told again as soon as my beat shows which one I have."""
        changed = {each.peer: each for each in tick.roster or ()}
        if tick.roster_since:
            if not tick.roster_since <= self.roster_no <= tick.roster_no:
                return []
            gone = frozenset(tick.roster_gone)
            changed = {peer: each for peer, each in self._here.items() if peer not in gone} | changed
        self.roster_no = tick.roster_no
        return [self.contacts(tuple(changed.values()), tick.ways, now)]

    def contacts(self, roster: tuple[Contact, ...], ways: tuple[RelayRoute, ...], now: float) -> do.Contacts:
        """Everybody in the run, and for a while those who were and are not back."""
        here = self._here = {each.peer: each for each in roster}
        over = now >= self._former_until
        self._former = {} if over else {peer: each for peer, each in self._former.items() if peer not in here}
        if not roster:
            return do.Contacts((), ways)  # the first tick tells who is here
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
        header = Header(Kind.WANT_WHERE, self._tag, version=known)
        return [SendFrame(peer, Frame(header)) for peer in chosen]

    # ---- frames ------------------------------------------------------------------------------------------------

    def takes(self, sender: str, frame: Frame) -> bool:
        """It is about where the coordinator is; or comes from somebody of whom nothing else is heard."""
        return frame.header.kind in _KINDS or sender in self._former

    def on_frame(self, sender: str, frame: Frame, counters: Counters, now: float) -> list[do.Effect]:
        verdict, effects = self._heard(sender, frame, now)
        counters.count(verdict)
        return effects

    def _heard(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[do.Effect]]:
        header = frame.header
        if header.kind == Kind.WHERE:
            if sender not in self._asked:
                return Verdict.STALE, []
            self._asked.discard(sender)  # one answer for each question: a signature takes time to check
            return self._follow(bytes(frame.payload), now)
        if header.kind != Kind.WANT_WHERE:
            return Verdict.STALE, []
        often = now - self._answered_at.get(sender, float("-inf")) < ANSWER_EVERY_S
        if often or self.newest is None or self.newest.order <= header.version:
            return Verdict.ACCEPTED, []
        fellows = {each.peer for each in self._roster}
        self._answered_at = {peer: at for peer, at in self._answered_at.items() if peer in fellows} | {
            sender: now
        }
        answer = with_payload(Header(Kind.WHERE, header.run_tag), self.newest.raw)
        return Verdict.ACCEPTED, [SendFrame(sender, answer)]
