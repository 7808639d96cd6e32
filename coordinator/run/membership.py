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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from farflung.coordinator.ledger.pace import MemberPace
from farflung.coordinator.roster.partial_view import PartialView, RosterDelta, RosterNews
from farflung.coordinator.roster.ways import Ways
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
class Member:
    contact: Contact
    session: bytes
    process: bytes  # random per agent process: tells a reconnection from a restart
    joined_no: int  # order of admission: the oldest member founds, and breaks ties
    heard_at: float
    standings: dict[int, Standing]  # by fragment, of those that it holds
    identity: bytes = b""  # its public key
    fits: tuple[int, ...] = ()  # of a model that is cut: the stages that it could hold
    helps: bool = False  # it has no trainer: it owns chunks and gives state, and contributes nothing
    in_seq: int = -1
    out_seq: int = 0
    beat: Beat | None = None
    alive: bool = True
    state: PeerState = PeerState.JOINING  # for people
    admitted_at: float = 0.0
    came_from: str = ""  # the address that it called from
    network: str = ""  # that one's: see protocol/process/networks.py
    left_out: str = ""  # the last round that went without it or took its chunks away, and why
    told: str = ""  # what the last tick gave as the reason of what it is to do
    without_data: bool = False  # its data is at its end: it has nothing to learn from before the next epoch
    advice: str = ""  # what its owner should know, though it takes part
    gone_because: str = ""  # of one that is not alive
    pace: MemberPace = field(default_factory=MemberPace)
    closed_at: float | None = None  # its connection broke; it has a moment to come back
    claimed: str = ""  # where it says it can be dialled; `contact.address` is that only once it was tried
    dial_at: float = 0.0  # when to try (again)
    roster_at: float = float("-inf")  # when it was last told who is here
    # So much longer than others it may say nothing, by what it was told of its next beat: by the newest word, and by
    # that or the one before, of which it may not have heard yet.
    pause_told_s: float = 0.0
    pause_s: float = 0.0
    # Which beat of its was answered last outside of rounds, and what it was told of its next one then.
    turn: tuple[int, float] = (-1, 0.0)
    awaited_at: float = 0.0  # something began of which it is to be heard at once
    not_reached: bool = False  # at what it claimed, when it was tried last
    doubted_until: float = 0.0  # others could not reach it: it owns nothing for a while

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
        return bool(self.claimed) and not self.contact.address and not self.not_reached

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
        return same and self.in_seq < 0 and self.claimed == hello.address

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


@dataclass
class Membership:
    dead_after_s: float
    members: dict[str, Member] = field(default_factory=dict)
    everybody: RosterDelta = field(default_factory=RosterDelta)
    losses: int = 0  # so far
    ways: Ways = field(default_factory=Ways)  # a mode that knows more of them puts its own here
    acquaintances: PartialView = field(default_factory=PartialView)
    _joined: int = 0
    _by_session: dict[bytes, str] = field(default_factory=dict)
    # Asked for with every frame: kept up as members come, and made anew when one goes.
    _alive: dict[str, Member] = field(default_factory=dict)
    _of_fragment: dict[int, dict[str, Member]] = field(default_factory=dict)
    _in_order: list[str] = field(default_factory=list)
    _roster: tuple[Contact, ...] = ()
    _roster_at: int = -1  # its number
    _beat_turns: BeatTurns = field(default_factory=BeatTurns)
    # What a timer looks at, instead of at everybody: (when somebody may count as dead, its number), the next one first;
    # whose connection broke; of whom no address is proven; and who was doubted.
    _due: list[tuple[float, int]] = field(default_factory=list)
    _due_at: dict[int, float] = field(default_factory=dict)
    _by_number: dict[int, Member] = field(default_factory=dict)
    _closed: set[int] = field(default_factory=set)
    _undialled: dict[str, Member] = field(default_factory=dict)
    _claiming: dict[str, Member] = field(default_factory=dict)  # of these, who says where it can be dialled
    _doubted: dict[str, float] = field(default_factory=dict)
    _lost: list[str] = field(default_factory=list)  # in the order of their going

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
        member = Member(unproven, session, process, self._joined, now, standings, claimed=contact.address)
        member.admitted_at, member.network = now, network
        old = self.members.get(contact.peer)
        if old is not None:
            member.left_out = old.left_out
            self._by_session.pop(old.session, None)
            self._by_number.pop(old.joined_no, None)
            self.acquaintances.begins_anew(contact.peer, now)
        if old is None or not old.alive or old.contact != unproven:
            self.acquaintances.has_changed(contact.peer)
        if contact.peer not in self._alive:
            insort(self._in_order, contact.peer)
        self.members[contact.peer] = self._alive[contact.peer] = member
        for number in () if old is None else old.standings.keys() - standings.keys():
            self._of_fragment.get(number, {}).pop(contact.peer, None)
        for number in standings:
            self._of_fragment.setdefault(number, {})[contact.peer] = member
        self._by_session[session] = contact.peer
        self._by_number[member.joined_no] = self._undialled[contact.peer] = member
        self._claiming.pop(contact.peer, None)
        if member.claimed:
            self._claiming[contact.peer] = member
        self._watch(member)
        self.everybody.put(contact.peer, self.roster_no + 1)
        return member

    def lose(self, member: Member, how: PeerEvent) -> None:
        """Kept in the list, so that people see who was lost; its session is over."""
        member.alive = False
        for standing in member.standings.values():
            standing.verified = False
        member.state = PEER_STATES.after(member.state, how)
        self._by_session.pop(member.session, None)
        self.everybody.drop(member.peer, self.roster_no + 1)
        self.losses += 1
        # Another dictionary: somebody may be looking at the members one by one, and lose some of them.
        self._alive = dict(self._alive)
        if self._alive.pop(member.peer, None) is not None:
            del self._in_order[bisect_left(self._in_order, member.peer)]
        for number in member.standings:
            self._of_fragment[number] = dict(self._of_fragment[number])
            self._of_fragment[number].pop(member.peer, None)
        self._by_number.pop(member.joined_no, None)
        self._due_at.pop(member.joined_no, None)
        self._undialled.pop(member.peer, None)
        self._claiming.pop(member.peer, None)
        self.acquaintances.forget(member.peer)
        self._lost = [peer for peer in self._lost if peer not in self._alive and peer != member.peer]
        self._lost.append(member.peer)
        for oldest in self._lost[:-LOST_KEPT]:
            del self.members[oldest]
        self._lost = self._lost[-LOST_KEPT:]

    def has_left(self, peer: str) -> bool:
        """It said good-bye: its process does not come back."""
        member = self.members.get(peer)
        return member is not None and not member.alive and member.state == PeerState.LEFT

    def to_dial(self, now: float, among: Iterable[Member] | None = None) -> list[Member]:
        """Members whose address is to be tried now: it was not yet, or in vain some time ago."""
        asked = self._claiming.values() if among is None else among
        due = [m for m in asked if m.alive and m.claimed and not m.contact.address and now >= m.dial_at]
        for member in due:
            member.dial_at = now + DIAL_AGAIN_S
        return due

    def on_dialled(self, peer: str, session: bytes, reached: bool) -> bool:
        """True if the member is known to be dialable from now on."""
        member = self.members.get(peer)
        if member is None or member.session != session or not member.alive or member.contact.address:
            return False
        member.not_reached = not reached
        if not reached:
            return False
        member.contact = msgspec.structs.replace(member.contact, address=member.claimed)
        self._undialled.pop(peer, None)
        self._claiming.pop(peer, None)
        self.everybody.put(peer, self.roster_no + 1)
        self.acquaintances.has_changed(peer)
        return True

    def doubt(self, peers: Iterable[str], now: float) -> None:
        for peer in peers:
            if peer in self.members:
                self.members[peer].doubted_until = self._doubted[peer] = now + DOUBT_S

    def hardly_reached(self, now: float) -> Iterable[Member]:
        """Of the living all of whom no address is proven, or who are doubted."""
        self._doubted = {peer: until for peer, until in self._doubted.items() if until > now}
        doubted = {peer: self._alive[peer] for peer in self._doubted if peer in self._alive}
        return (self._undialled | doubted).values()

    def can_own(self, now: float, among: Collection[str] | None = None) -> set[str]:
        """Peers that others can dial, as far as is known.  `among`: those of these living ones whom all of them get
        through to; where none of them can be dialled, over the relay."""
        if among is not None:
            return self.ways.owners({peer: self._alive[peer] for peer in among if peer in self._alive}, now)
        return {
            peer
            for peer, member in self.members.items()
            if member.contact.address and member.doubted_until <= now
        }

    def wider_owners(
        self, now: float, among: Collection[str], owners: Collection[str]
    ) -> list[dict[str, float]]:
        """Who of these could own beside the owners, if bytes of the round passed relays."""
        return self.ways.wider(
            {peer: self._alive[peer] for peer in among if peer in self._alive}, owners, now
        )

    def by_session(self, session: bytes) -> Member | None:
        peer = self._by_session.get(session)
        return self.members[peer] if peer is not None else None

    def silent(self, now: float, grace_s: float) -> list[Member]:
        """Members that count as dead from now on, the oldest first."""
        found: set[int] = set()
        for number in list(self._closed):
            member = self._by_number.get(number)
            if member is None or member.closed_at is None:
                self._closed.discard(number)  # it has gone, or spoke again
            elif now - member.closed_at >= grace_s:
                found.add(number)
        while self._due and self._due[0][0] <= now:
            at, number = heapq.heappop(self._due)
            member = self._by_number.get(number)
            if member is None or self._due_at.get(number) != at:
                continue  # it is gone, or due at another time
            if self._silent_at(member) <= now:
                found.add(number)
            self._watch(member, math.nextafter(now, math.inf))
        return [self._by_number[number] for number in sorted(found)]

    def _silent_at(self, member: Member) -> float:
        return max(member.heard_at, member.awaited_at) + self.dead_after_s + member.pause_s

    def _watch(self, member: Member, not_before: float = 0.0) -> None:
        """It is looked at when it may count as dead, by what is known now."""
        at = self._due_at[member.joined_no] = max(self._silent_at(member), not_before)
        heapq.heappush(self._due, (at, member.joined_no))

    def next_beat_s(self, member: Member, heartbeat_s: float, in_round: bool, now: float) -> float:
        """What a member is told that is in no round: all of them together send so many beats, however many they are.
        0: it beats as in a small run.  It may say nothing for that much longer.  In a round it counts as dead no later
        than in a small run, and one beat may be late."""
        if in_round:
            in_time_s = self.dead_after_s / BEATS_TO_DEATH
            return min(BEAT_LONGEST_S, in_time_s) if in_time_s > heartbeat_s else 0.0
        beat_no = member.beat.seq if member.beat is not None else 0
        if beat_no == member.turn[0]:  # the answer once more, with news: its turn counts from the first one
            member.pause_s = max(member.pause_s, member.turn[1] - heartbeat_s)
            return member.turn[1]
        all_s = min(BEAT_LONGEST_S, len(self._alive) / BEATS_MOST_PER_S)
        next_s = self._beat_turns.next_in_s(all_s, now) if all_s > heartbeat_s else 0.0
        before, pause_s = member.pause_s, max(0.0, next_s - heartbeat_s)
        member.pause_s, member.pause_told_s = max(pause_s, member.pause_told_s), pause_s
        if member.pause_s < before:
            self._watch(member)
        member.turn = beat_no, next_s if pause_s else 0.0
        return member.turn[1]

    def await_words(self, peers: Iterable[str], now: float) -> None:
        """They are in a round from now on, and beat as all do in small runs."""
        for peer in peers:
            member = self._alive.get(peer)
            if member is not None and member.pause_s:
                member.awaited_at, member.pause_s, member.pause_told_s = now, 0.0, 0.0
                self._watch(member)

    def on_closed(self, member: Member, now: float) -> None:
        """Its connection broke: it has a moment to come back."""
        member.closed_at = now
        self._closed.add(member.joined_no)

    @property
    def alive(self) -> Mapping[str, Member]:
        return self._alive

    @property
    def trainers(self) -> Mapping[str, Member]:
        """The living without those that only help."""
        if not any(member.helps for member in self._alive.values()):
            return self._alive
        return {peer: member for peer, member in self._alive.items() if not member.helps}

    def holders(self, fragment: int) -> Collection[Member]:
        """The living that hold it."""
        return self.holding(fragment).values()

    def holding(self, fragment: int) -> Mapping[str, Member]:
        return self._of_fragment.get(fragment, {})

    def helping(self, fragment: int, now: float) -> set[str]:
        """Those without a trainer that could own chunks in a round of this fragment now."""
        return {
            member.peer
            for member in self.holders(fragment)
            if member.helps
            and member.standings[fragment].verified
            and member.dialable
            and member.doubted_until <= now
            and not member.leaving
        }

    @property
    def in_order(self) -> Sequence[str]:
        """Ids of the living, sorted."""
        return self._in_order

    @property
    def roster_no(self) -> int:
        return self.everybody.number

    def roster_for(self, member: Member, has_no: int, now: float) -> RosterNews:
        """Everybody.  In a crowd, where somebody comes or goes all the time, with a pause: else the line carries little
        else."""
        count = len(self._alive)
        pause_s = count / ROSTER_ENTRIES_PER_S if count > CROWD else 0.0
        if has_no == self.roster_no or now - member.roster_at < pause_s:
            return RosterNews(self.roster_no, None)
        member.roster_at = now
        return self.everybody.news(has_no, lambda peer: self._alive[peer].contact)

    def roster(self) -> tuple[Contact, ...]:
        if self._roster_at != self.roster_no:
            self._roster = tuple(self._alive[peer].contact for peer in self._in_order)
            self._roster_at = self.roster_no
        return self._roster
