"""Who is here: sessions, liveness, what each peer last said of itself.  Pure and volatile.

Used by the run machine only.  Alive means heard within `dead_after_s`; verified means that the digest the peer
reported is the run's digest of the run's version; participating means that it has not been left out of a
commit since it became able to take part.  The three are kept apart on purpose: a live peer that takes part in
nothing is the failure that other systems do not show.  Each fragment has a standing of its own; a member as a
whole is verified, or takes part, where it does so in all of them.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from farflung.coordinator.ledger.pace import MemberPace
from farflung.coordinator.roster.partial_view import PartialView, RosterDelta, RosterNews
from farflung.coordinator.roster.ways import MemberPlace, Ways, dialable
from farflung.protocol.limits import BEAT_LONGEST_S
from farflung.protocol.messages import Beat, Hello
from farflung.protocol.round_words import CROWD, Contact
from farflung.protocol.states import PEER_STATES, PeerEvent, PeerState, Phase


@dataclass
class Standing:
    """A member in one fragment."""

    verified: bool = False  # its digest is the run's digest of the run's version
    vouched: bool = False  # it was verified at some version in this session: its next digest means something
    quarantined: bool = False
    missed: int = 0  # commits in a row that it could have been in and was not
    ready_since: float | None = None
    progress_seen: int = 0
    commit_told: int = -1  # the newest version whose commit it was told unasked


@dataclass
class LastHeard:
    """When a member spoke last, and how long it may say nothing now."""

    at: float
    seq: int = -1
    closed_at: float | None = None  # its connection broke; it has a moment to come back
    awaited_at: float = 0.0  # something began of which it is to be heard at once
    # So much longer than others it may say nothing, by what it was told of its next beat: by the newest word, and by
    # that or the one before, of which it may not have heard yet.
    pause_told_s: float = 0.0
    pause_s: float = 0.0
    # Which beat of its was answered last outside of rounds, and what it was told of its next one then.
    turn: tuple[int, float] = (-1, 0.0)
    due_at: float = 0.0  # when it is looked at next, whether it counts as dead


@dataclass
class LastTold:
    """What a member was told last, and what people are told of it."""

    seq: int = 0
    roster_at: float = -math.inf  # when it heard who is here
    reason: str = ""  # of what it is to do, by the last tick
    advice: str = ""  # what its owner should know, though it takes part
    state: PeerState = PeerState.JOINING  # for people
    left_out: str = ""  # the last round that went without it or took its chunks away, and why
    gone_because: str = ""  # of one that is not alive


@dataclass
class Member:
    contact: Contact  # its address is empty until the one that it claims was tried
    session: bytes
    process: bytes  # random per agent process: tells a reconnection from a restart
    joined_no: int  # order of admission: the oldest member founds, and breaks ties
    standings: dict[int, Standing]  # by fragment, of those that it holds
    place: MemberPlace
    heard: LastHeard
    told: LastTold = field(default_factory=LastTold)
    identity: bytes = b""  # its public key
    fits: tuple[int, ...] = ()  # of a model that is cut: the stages that it could hold
    helps: bool = False  # it has no trainer: it owns chunks and gives state, and contributes nothing
    beat: Beat | None = None
    alive: bool = True
    without_data: bool = False  # its data is at its end: it has nothing to learn from before the next epoch
    pace: MemberPace = field(default_factory=MemberPace)

    @property
    def can_found(self) -> bool:
        """It may have the run's initial state, as far as it has said."""
        return not self.helps and (self.beat is None or not self.beat.lacks_start)

    @property
    def peer(self) -> str:
        return self.contact.peer

    @property
    def stage(self) -> int:
        """The one that it holds, where the model is cut into stages; 0 where it is not."""
        return next(iter(self.standings))

    @property
    def dialable(self) -> bool:
        return bool(self.contact.address)

    @property
    def is_being_dialled(self) -> bool:
        """For the first time: in a few seconds it is known whether others can dial it where it says."""
        return bool(self.place.claimed) and not self.contact.address and not self.place.not_reached

    @property
    def verified(self) -> bool:
        return all(standing.verified for standing in self.standings.values())

    @property
    def has_shown(self) -> bool:
        """It has held the run's state at some version, in every fragment of its own, since it came in."""
        return all(standing.vouched for standing in self.standings.values())

    @property
    def quarantined(self) -> bool:
        return any(standing.quarantined for standing in self.standings.values())

    @property
    def leaving(self) -> bool:
        """It stays for the rounds that it is in: nobody waits for it to begin another one."""
        return self.beat is not None and self.beat.leaving

    @property
    def missed(self) -> int:
        return max(standing.missed for standing in self.standings.values())

    @property
    def participating(self) -> bool:
        return self.alive and self.verified and self.missed == 0

    def has_not_spoken_since(self, hello: Hello) -> bool:
        """Its hello comes once more, because the answer was slow or is lost: its session has not begun."""
        same = self.alive and self.process == hello.process and self.contact.key == hello.key
        return same and self.heard.seq < 0 and self.place.claimed == hello.address

    @property
    def trains(self) -> bool:
        """Nobody waits for who can't train yet, holding nothing of another fragment, nor for a trainer that hangs."""
        beat = self.beat
        if beat is None or self.helps:
            return False
        return beat.phase != Phase.STUCK and min(f.version for f in beat.fragments) >= 0


DIAL_AGAIN_S = 60.0
DOUBT_S = 60.0
ROSTER_ENTRIES_PER_S = 256  # to each member of a crowd that hears of everybody: about 20 KB/s
BEATS_MOST_PER_S = 1000.0  # of all members that are in no round: a quarter of a core
BEATS_TO_DEATH = 2.5  # of a member of a large round
# Of the time in which all of them have their turn.  All may beat in one moment, besides: then there is room for turns
# of all of them between these, behind those that were given before.
TURN_SOONEST, TURN_LATEST = 0.5, 2.0
LOST_KEPT = 32  # members that left are shown for a while; strangers must not make the list grow
LOOK_S_PER_MEMBER = 50e-6  # a look at one takes about 1 us: all looks together a few hundredths of a core


class Looks:
    """When all members are looked at, one by one, for what hardly ever changes: in a crowd with a pause that grows with
    it, else a crowd would cost the square of its members."""

    def __init__(self) -> None:
        self._at = -math.inf

    def is_due(self, members: int, now: float) -> bool:
        if members > CROWD and now - self._at < members * LOOK_S_PER_MEMBER:
            return False
        self._at = now
        return True


class BeatTurns:
    """When members of a large run beat next: one after the other, however many came, or beat, in one moment.  Else they
    would do so together for ever, and each would wait until the others had been answered."""

    def __init__(self) -> None:
        self._last_at = -math.inf

    def next_in_s(self, all_s: float, now: float) -> float:
        """`all_s`: in which all have their turn."""
        due_s = max(self._last_at + 1.0 / BEATS_MOST_PER_S - now, TURN_SOONEST * all_s)
        next_s = min(due_s, BEAT_LONGEST_S, TURN_LATEST * all_s)  # a tick that tells of a bit more is none
        self._last_at = now + next_s
        return next_s


class Liveness:
    """Who counts as dead, and so: how long each member may say nothing.  A timer looks at those that are due, instead
    of at everybody."""

    def __init__(self, dead_after_s: float) -> None:
        self.dead_after_s, self.woke_at = dead_after_s, 0.0  # the coordinator stood still before that
        self._living: dict[int, Member] = {}  # by number
        # When somebody may count as dead, and its number: the next one first.
        self._due: list[tuple[float, int]] = []
        self._closed: set[int] = set()  # whose connection broke
        self._beat_turns = BeatTurns()

    def put(self, member: Member) -> None:
        self._living[member.joined_no] = member
        self._watch(member)

    def drop(self, member: Member) -> None:
        self._living.pop(member.joined_no, None)

    def silent(self, now: float, grace_s: float) -> list[Member]:
        """Members that count as dead from now on, the oldest first."""
        found: set[int] = set()
        for number in list(self._closed):
            member = self._living.get(number)
            if member is None or member.heard.closed_at is None:
                self._closed.discard(number)  # it has gone, or spoke again
            elif now - max(member.heard.closed_at, self.woke_at) >= grace_s:
                found.add(number)
        while self._due and self._due[0][0] <= now:
            at, number = heapq.heappop(self._due)
            member = self._living.get(number)
            if member is None or member.heard.due_at != at:
                continue  # it is gone, or due at another time
            if self._silent_at(member) <= now:
                found.add(number)
            self._watch(member, math.nextafter(now, math.inf))
        return [self._living[number] for number in sorted(found)]

    def _silent_at(self, member: Member) -> float:
        heard = member.heard
        return max(heard.at, heard.awaited_at, self.woke_at) + self.dead_after_s + heard.pause_s

    def _watch(self, member: Member, not_before: float = 0.0) -> None:
        """It is looked at when it may count as dead, by what is known now."""
        member.heard.due_at = max(self._silent_at(member), not_before)
        heapq.heappush(self._due, (member.heard.due_at, member.joined_no))

    def next_beat_s(self, member: Member, heartbeat_s: float, in_round: bool, now: float) -> float:
        """What a member is told that is in no round: all of them together send so many beats, however many they are.
        0: it beats as in a small run.  It may say nothing for that much longer.  In a round it counts as dead no later
        than in a small run, and one beat may be late."""
        if in_round:
            in_time_s = self.dead_after_s / BEATS_TO_DEATH
            return min(BEAT_LONGEST_S, in_time_s) if in_time_s > heartbeat_s else 0.0
        heard, beat_no = member.heard, member.beat.seq if member.beat is not None else 0
        if beat_no == heard.turn[0]:  # the answer once more, with news: its turn counts from the first one
            heard.pause_s = max(heard.pause_s, heard.turn[1] - heartbeat_s)
            return heard.turn[1]
        all_s = min(BEAT_LONGEST_S, len(self._living) / BEATS_MOST_PER_S)
        next_s = self._beat_turns.next_in_s(all_s, now) if all_s > heartbeat_s else 0.0
        before, pause_s = heard.pause_s, max(0.0, next_s - heartbeat_s)
        heard.pause_s, heard.pause_told_s = max(pause_s, heard.pause_told_s), pause_s
        if heard.pause_s < before:
            self._watch(member)
        heard.turn = beat_no, next_s if pause_s else 0.0
        return heard.turn[1]

    def await_words(self, members: Iterable[Member], now: float) -> None:
        """They are in a round from now on, and beat as all do in small runs."""
        for member in members:
            heard = member.heard
            if heard.pause_s:
                heard.awaited_at, heard.pause_s, heard.pause_told_s = now, 0.0, 0.0
                self._watch(member)

    def on_closed(self, member: Member, now: float) -> None:
        """Its connection broke: it has a moment to come back."""
        member.heard.closed_at = now
        self._closed.add(member.joined_no)


class AddressBook:
    """Whom others may not be able to dial: of whom no address is proven, and who is doubted."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._unproven: dict[str, Member] = {}
        self._claiming: dict[str, Member] = {}  # of these, who says where it can be dialled
        self._doubted: dict[str, float] = {}

    def put(self, member: Member) -> None:
        """A session of it begins."""
        self._unproven[member.peer] = member
        self._claiming.pop(member.peer, None)
        if member.place.claimed:
            self._claiming[member.peer] = member

    def drop(self, peer: str) -> None:
        """It was reached, or has gone."""
        self._unproven.pop(peer, None)
        self._claiming.pop(peer, None)

    def to_dial(self, now: float, among: Iterable[Member] | None = None) -> list[Member]:
        """Members whose address is to be tried now: it was not yet, or in vain some time ago."""
        asked = self._claiming.values() if among is None else among
        able = [member for member in asked if member.alive and not member.contact.address]
        due = [member for member in able if member.place.claimed and now >= member.place.dial_at]
        for member in due:
            member.place.dial_at = now + DIAL_AGAIN_S
        return due

    def doubt(self, peers: Iterable[str], now: float) -> None:
        for peer in peers:
            if peer in self._members:
                self._members[peer].place.doubted_until = self._doubted[peer] = now + DOUBT_S

    def hardly_reached(self, now: float) -> Iterable[Member]:
        """The living among them."""
        self._doubted = {peer: until for peer, until in self._doubted.items() if until > now}
        doubted = {peer: m for peer in self._doubted if (m := self._members.get(peer)) and m.alive}
        return (self._unproven | doubted).values()


class Membership:
    def __init__(self, dead_after_s: float) -> None:
        self.members: dict[str, Member] = {}
        self.liveness = Liveness(dead_after_s)
        self.addresses = AddressBook(self.members)
        self.everybody = RosterDelta()
        self.losses = 0  # so far
        self.ways = Ways()  # a mode that knows more of them puts its own here
        self.acquaintances = PartialView()
        # Asked for with every frame: kept up as members come, and the living made anew when one goes.
        self.by_session: dict[bytes, Member] = {}
        self.alive: dict[str, Member] = {}
        self.in_order: list[str] = []  # ids of the living, sorted
        self._of_fragment: dict[int, dict[str, Member]] = {}
        self._joined = 0
        self._roster: tuple[Contact, ...] = ()
        self._roster_at = -1  # its number
        self._lost: list[str] = []  # in the order of their going

    def admit(
        self,
        contact: Contact,
        session: bytes,
        process: bytes,
        now: float,
        network: str = "",
        fragments: Iterable[int] = (0,),
    ) -> Member:
        """A new session of a peer; an older one of the same peer ends here.

        The address in `contact` is what the peer says: others hear of it once it was tried.
        `fragments`: those that it holds.
        """
        self._joined += 1
        unproven = msgspec.structs.replace(contact, address="")
        standings = {number: Standing() for number in fragments}
        place = MemberPlace(contact.address, now, network)
        member = Member(unproven, session, process, self._joined, standings, place, LastHeard(now))
        old = self.members.get(contact.peer)
        if old is not None:
            member.told.left_out = old.told.left_out
            self.by_session.pop(old.session, None)
            self.liveness.drop(old)
            self.acquaintances.begins_anew(contact.peer, now)
        if old is None or not old.alive or old.contact != unproven:
            self.acquaintances.has_changed(contact.peer)
        if contact.peer not in self.alive:
            insort(self.in_order, contact.peer)
        self.members[contact.peer] = self.alive[contact.peer] = member
        for number in () if old is None else old.standings.keys() - standings.keys():
            self._of_fragment.get(number, {}).pop(contact.peer, None)
        for number in standings:
            self._of_fragment.setdefault(number, {})[contact.peer] = member
        self.by_session[session] = member
        self.addresses.put(member)
        self.liveness.put(member)
        self.everybody.put(contact.peer, self.everybody.number + 1)
        return member

    def lose(self, member: Member, how: PeerEvent) -> None:
        """Kept in the list, so that people see who was lost; its session is over."""
        member.alive = False
        for standing in member.standings.values():
            standing.verified = False
        member.told.state = PEER_STATES.after(member.told.state, how)
        self.by_session.pop(member.session, None)
        self.everybody.drop(member.peer, self.everybody.number + 1)
        self.losses += 1
        # Another dictionary: somebody may be looking at the members one by one, and lose some of them.
        self.alive = dict(self.alive)
        if self.alive.pop(member.peer, None) is not None:
            del self.in_order[bisect_left(self.in_order, member.peer)]
        for number in member.standings:
            self._of_fragment[number] = dict(self._of_fragment[number])
            self._of_fragment[number].pop(member.peer, None)
        self.liveness.drop(member)
        self.addresses.drop(member.peer)
        self.acquaintances.forget(member.peer)
        self._lost = [peer for peer in self._lost if peer not in self.alive and peer != member.peer]
        self._lost.append(member.peer)
        for oldest in self._lost[:-LOST_KEPT]:
            del self.members[oldest]
        self._lost = self._lost[-LOST_KEPT:]

    def has_left(self, peer: str) -> bool:
        """It said good-bye: its process does not come back."""
        member = self.members.get(peer)
        return member is not None and not member.alive and member.told.state == PeerState.LEFT

    def on_dialled(self, peer: str, session: bytes, reached: bool) -> bool:
        """True if the member is known to be dialable from now on."""
        member = self.members.get(peer)
        if member is None or member.session != session or not member.alive or member.contact.address:
            return False
        member.place.not_reached = not reached
        if not reached:
            return False
        member.contact = msgspec.structs.replace(member.contact, address=member.place.claimed)
        self.addresses.drop(peer)
        self.everybody.put(peer, self.everybody.number + 1)
        self.acquaintances.has_changed(peer)
        return True

    def can_own(self, now: float, among: Collection[str] | None = None) -> set[str]:
        """Peers that others can dial, as far as is known.  `among`: those of these living ones whom all of them get
        through to; where none of them can be dialled, over the relay."""
        if among is not None:
            return self.ways.owners({peer: self.alive[peer] for peer in among if peer in self.alive}, now)
        return dialable(self.members, now)

    def wider_owners(
        self, now: float, among: Collection[str], owners: Collection[str]
    ) -> list[dict[str, float]]:
        """Who of these could own beside the owners, if bytes of the round passed relays."""
        return self.ways.wider({peer: self.alive[peer] for peer in among if peer in self.alive}, owners, now)

    @property
    def trainers(self) -> Mapping[str, Member]:
        """The living without those that only help."""
        if not any(member.helps for member in self.alive.values()):
            return self.alive
        return {peer: member for peer, member in self.alive.items() if not member.helps}

    def holding(self, fragment: int) -> Mapping[str, Member]:
        """The living that hold it."""
        return self._of_fragment.get(fragment, {})

    def helping(self, fragment: int, now: float) -> set[str]:
        """Those without a trainer that could own chunks in a round of this fragment now."""
        return {
            member.peer
            for member in self.holding(fragment).values()
            if member.helps
            and member.standings[fragment].verified
            and member.dialable
            and member.place.doubted_until <= now
            and not member.leaving
        }

    def roster_for(self, member: Member, has_no: int, now: float) -> RosterNews:
        """Everybody.  In a crowd, where somebody comes or goes all the time, with a pause: else the line carries little
        else."""
        count = len(self.alive)
        pause_s = count / ROSTER_ENTRIES_PER_S if count > CROWD else 0.0
        if has_no == self.everybody.number or now - member.told.roster_at < pause_s:
            return RosterNews(self.everybody.number, None)
        member.told.roster_at = now
        return self.everybody.news(has_no, lambda peer: self.alive[peer].contact)

    def roster(self) -> tuple[Contact, ...]:
        if self._roster_at != self.everybody.number:
            self._roster = tuple(self.alive[peer].contact for peer in self.in_order)
            self._roster_at = self.everybody.number
        return self._roster
