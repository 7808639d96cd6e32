"""Where the coordinator may be, and who is in the run by its word: what a peer was told.  Pure.

Part of the peer machine.  A peer starts with the addresses of its join URL and with the signed list that it kept; a
newer list comes with each welcome, or from a phone book.  A mode looks further where the coordinator is lost, and keeps
what one needs that has lost its disk (peer/restoring): here stand the answers where nothing does.

Who may lie: a list counts only under the run's key, and only if it is newer than mine, so nobody can send a peer
elsewhere, and the addresses of the URL are tried whatever comes.  Must not know sockets or files.
"""

from __future__ import annotations

from collections.abc import Callable

from farflung.peer.machine import effects as do
from farflung.peer.machine.handshake import PeerConfig
from farflung.protocol.frames import Frame
from farflung.protocol.join_url import Address, Whereabouts, whereabouts_of
from farflung.protocol.limits import ADDRESSES_MOST
from farflung.protocol.messages import Tick, ToMember, Welcome
from farflung.protocol.round_words import Contact, RelayRoute
from farflung.protocol.signing import AskKept, KeptReceipts, SignedHead
from farflung.protocol.verdicts import Counters, Verdict

PLACES_MOST = 3 * ADDRESSES_MOST


class CoordinatorPlaces:
    def __init__(self, config: PeerConfig, hurry: Callable[[float], None]) -> None:
        """Without the coordinator's key no list can be checked.  The list of a former life is checked like any other.
        `hurry(now)`: it is known where else to knock."""
        self._run, self._pinned = config.run, config.pinned
        self._hurry = hurry
        self._given = config.places
        self._before: tuple[Address, ...] = ()  # of the list before the newest
        self.newest: Whereabouts | None = None
        self._here: dict[str, Contact] = {}  # by the coordinator's word
        self.roster_no = 0  # of that; 0: it has none
        self.hear(config.kept)

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

    # ---- in contact --------------------------------------------------------------------------------------------

    def on_welcome(self, welcome: Welcome, now: float) -> list[do.Effect]:
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
        """Everybody in the run."""
        self._here = {each.peer: each for each in roster}
        return do.Contacts(roster, ways)  # empty: the first tick tells who is here

    # ---- what a mode keeps for a coordinator that loses its disk -------------------------------------------------

    @property
    def kept(self) -> SignedHead | None:
        """The newest head of the run's history that is kept here."""
        return None

    def keep(self, word: ToMember, about: Callable[[], KeptReceipts]) -> list[do.Effect]:
        """`about`: what else to tell of the run."""
        return []

    def give_back(self, asked: AskKept, about: Callable[[], KeptReceipts] | None) -> list[do.Effect]:
        """`about`: None where nothing is known of the run but what was kept."""
        return []

    # ---- out of contact, where a mode asks fellows --------------------------------------------------------------

    def on_lost(self, run_tag: bytes, now: float) -> None:
        """`run_tag`: for frames."""

    def on_timer(self, now: float) -> list[do.Effect]:
        """While nobody answers at the door."""
        return []

    def on_frame(self, sender: str, frame: Frame, counters: Counters, now: float) -> list[do.Effect] | None:
        """None: it is about something else."""
        return None
