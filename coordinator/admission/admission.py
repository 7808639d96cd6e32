"""The admission: whom the host wants in its run, who has to wait, and who is kept out.  Pure.

Where the mode begins.  The core has found that a hello fits the run and that there is room; this says who may come in:
nobody who is banned, whoever has an invitation or stands on the host's list where the host wants one, and newcomers of
an open run as many at once as it says.  Without this folder everybody comes in whose hello fits, at once, and nobody is
banned: strikes are only written to the log.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from farflung.coordinator.door.allowance import Quota
from farflung.coordinator.door.hello_check import HelloPassed, refuse
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.ledger import LedgerPart as PartOfLedger
from farflung.coordinator.ledger.records import Record, Struck
from farflung.coordinator.modes.registry import CoordinatorMode, ModeTools, SendAway
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Looks
from farflung.coordinator.run.operator_orders import SENT_AWAY, is_meant, named, one_peer, which
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol import messages
from farflung.protocol.caps import duration
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import DepartureCause, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import AdmissionSection
from farflung.protocol.messages import Ban, Invite, Order, Refuse, Reply, Revoke
from farflung.protocol.process.networks import network_of
from farflung.protocol.signing import name_of

# ---- register ----------------------------------------------------------------------------------------------
# The register: who was invited, who is banned, who was struck. A fold over records. Pure.
#
# The admission's part of the ledger, with its records in the run's journal, so that all of it outlives the
# coordinator.

STRIKE_LASTS_S = 86400.0
STRIKES_KEPT = 64  # of one peer
PEERS_KEPT = 4096  # that were struck, or are banned: strangers make ids for nothing


# ---- records ------------------------------------------------------------------------------------------


class Invited(Record, frozen=True, kw_only=True, tag="invited"):
    """So many peers may come in with the token that has this digest.  The token itself is not kept."""

    digest: bytes
    uses: int
    until_s: float  # on the run's clock
    at_s: float
    note: str = ""  # for whom


class CameByInvitation(Record, frozen=True, kw_only=True, tag="came_by_invitation"):
    """One use of it; with the record that this peer was admitted."""

    peer: str
    digest: bytes


class Revoked(Record, frozen=True, kw_only=True, tag="revoked"):
    """Nobody comes in with this invitation any more."""

    digest: bytes
    reason: str
    at_s: float
    guests: bool = False  # those who came in by it may not come again without another one


class Banned(Record, frozen=True, kw_only=True, tag="banned"):
    peer: str
    reason: str
    at_s: float
    until_s: float
    network: str = ""  # nobody else from there is let in either


class Unbanned(Record, frozen=True, kw_only=True, tag="unbanned"):
    """Its strikes are forgotten as well."""

    peer: str


OF_ADMISSION: tuple[type[Record], ...] = (Invited, CameByInvitation, Revoked, Banned, Unbanned)


# ---- what they make -------------------------------------------------------------------------------------


@dataclass
class Invitation:
    uses: int
    until_s: float  # on the run's clock
    note: str
    guests: set[str] = field(default_factory=set)
    revoked: str | None = None  # why


@dataclass
class Register(PartOfLedger):
    invitations: dict[bytes, Invitation] = field(default_factory=dict)
    guests: set[str] = field(default_factory=set)  # peers that came in by an invitation: they may come again
    bans: OrderedDict[str, Banned] = field(default_factory=OrderedDict)
    strikes: OrderedDict[str, deque[Struck]] = field(default_factory=OrderedDict)

    def apply(self, record: Record, ledger: Ledger) -> None:
        match record:
            case Invited():
                self.invitations[record.digest] = Invitation(record.uses, record.until_s, record.note)
            case Revoked(digest=digest) if digest in self.invitations:
                self.invitations[digest].revoked = record.reason
                if record.guests:
                    self.guests -= self.invitations[digest].guests
            case CameByInvitation(peer=peer, digest=digest) if digest in self.invitations:
                self.invitations[digest].guests.add(peer)
                self.guests.add(peer)
            case Banned(peer=peer):
                self.bans[peer] = record
                _keep(self.bans)
            case Unbanned(peer=peer):
                self.bans.pop(peer, None)
                self.strikes.pop(peer, None)
            case Struck(peer=peer):
                self.strikes.setdefault(peer, deque(maxlen=STRIKES_KEPT)).append(record)
                self.strikes.move_to_end(peer)
                _keep(self.strikes)
            case _:
                pass

    def strikes_of(self, peer: str, clock_s: float) -> list[Struck]:
        """Those that still count."""
        return [each for each in self.strikes.get(peer, ()) if clock_s - each.at_s < STRIKE_LASTS_S]

    def ban_of(self, peer: str, network: str, clock_s: float) -> Banned | None:
        """The ban that keeps this peer out: its own, or that of its network."""
        for each in (self.bans.get(peer), *self.bans.values()):
            if each is None or clock_s >= each.until_s:
                continue
            if each.peer == peer or (network and each.network == network):
                return each
        return None


def _keep(table: OrderedDict[str, Banned] | OrderedDict[str, deque[Struck]]) -> None:
    while len(table) > PEERS_KEPT:
        table.popitem(last=False)


# ---- newcomers ---------------------------------------------------------------------------------------------
# Newcomers of an open run: who fetches the model now, and who is next. Pure.
#
# Used by the admission, for those whom the run has never seen. So many fetch at once, at most half of them of
# one network; who has to wait keeps its turn as long as it asks again as it is told to. The first that was
# refused is the first that comes in, but nobody waits for somebody whose own network is what holds it back.
#
# Who may lie: identities cost nothing, and whoever has many is bounded by its network (networks.py): in those
# that fetch, in those that have not shown that they hold the run's state, and in the turns that are kept.
# Bytes that were fetched are the newcomer's own word: who makes them up keeps its place no longer than
# ARRIVING_S.

NEWCOMERS_PER_MINUTE = 30.0  # from one network: the others wait
ARRIVING_S = 120.0  # a newcomer that has no state after so long does not keep others out any more
FETCHES_WITHIN_S = 10.0  # nor does one that has fetched nothing for so long
BUSY_RETRY_S = 5.0
TURN_KEPT_S = 3 * BUSY_RETRY_S  # of who was told to ask again
WAITING_MOST, WAITING_OF_NETWORK = 1024, 64


@dataclass
class NewcomerTurn:
    network: str
    until: float


@dataclass(frozen=True)
class WaitOutside:
    code: str
    told: str
    retry_s: float


class ArrivalPace(Protocol):
    @property
    def fetched_at(self) -> float: ...


class WaitingPlace(Protocol):
    @property
    def network(self) -> str: ...
    @property
    def since(self) -> float: ...


class WaitingMember(Protocol):
    """Of coordinator/run/membership.py."""

    @property
    def place(self) -> WaitingPlace: ...
    @property
    def has_shown(self) -> bool: ...
    @property
    def pace(self) -> ArrivalPace: ...


class NewcomerQueue:
    """`look` at who is here, then `ask`."""

    def __init__(self, per_minute: float = NEWCOMERS_PER_MINUTE) -> None:
        """`per_minute`: of one network."""
        self._now, self._learned, self._per_minute = 0.0, False, per_minute
        # By peer, in the order in which they came.
        self._turns: OrderedDict[str, NewcomerTurn] = OrderedDict()
        self._rate: Quota[str] = Quota(per_minute / 60.0, per_minute)
        self._fetching: Counter[str] = Counter()  # by network, at the last look and let in since then
        self._unproven: Counter[str] = Counter()  # that have not shown the run's state yet

    def ask(
        self, peer: str, network: str, rules: AdmissionSection, learned: bool, now: float
    ) -> WaitOutside | None:
        """None: it may come in now.  `learned`: there is something to fetch."""
        self._now, self._learned = now, learned
        before, of_network = self._before(peer, rules)
        wait = self._held_up(network, len(before), of_network[network], rules)
        if wait is None:
            self._turns.pop(peer, None)
            if network:
                self._rate.take(network, now)
            self._fetching[network] += 1
            self._unproven[network] += 1
        else:
            self._keep_turn(peer, network, now + max(TURN_KEPT_S, wait.retry_s + BUSY_RETRY_S))
        return wait

    def _held_up(
        self, network: str, before: int, of_network: int, rules: AdmissionSection
    ) -> WaitOutside | None:
        arriving = self._fetching.total()
        if self._learned and arriving + before >= rules.joins_at_once:
            next_one = f"{before} others are before you" if before else "yours is next"
            return WaitOutside(
                "busy", f"{arriving} newcomers are fetching the model already; {next_one}", BUSY_RETRY_S
            )
        if self._room_of(network, rules) <= of_network:
            mine = self._fetching[network]
            told = f"{mine} newcomers of your network ({network}) are fetching the model already"
            return WaitOutside("busy", f"{told}; {of_network} others of it are before you", BUSY_RETRY_S)
        wait_s = self._rate.wait_s(network, self._now, 1.0 + of_network) if network else 0.0
        if wait_s > 0:
            told = f"more than {self._per_minute:g} newcomers a minute from your network ({network})"
            return WaitOutside("rate", f"{told}; waiting", min(60.0, max(1.0, wait_s)))
        return None

    def _room_of(self, network: str, rules: AdmissionSection) -> float:
        """So many more of this network may come in, as far as those of it that are on their way go."""
        if not (network and self._learned):
            return math.inf
        fetching = max(1, rules.joins_at_once // 2) - self._fetching[network]
        return min(fetching, rules.joins_at_once - self._unproven[network])

    # ---- turns ---------------------------------------------------------------------------------------------

    def _before(self, peer: str, rules: AdmissionSection) -> tuple[list[str], Counter[str]]:
        """Who comes in before this one, as soon as somebody may; and how many of each network those are."""
        now, found, of_network = self._now, list[str](), Counter[str]()
        for other, turn in list(self._turns.items()):
            if other == peer:
                break
            if now > turn.until:
                del self._turns[other]
            elif self._may_be_next(turn.network, of_network[turn.network], rules):
                found.append(other)
                of_network[turn.network] += 1
        return found, of_network

    def _may_be_next(self, network: str, of_network: int, rules: AdmissionSection) -> bool:
        if self._room_of(network, rules) <= of_network:
            return False
        return not network or self._rate.wait_s(network, self._now, 1.0 + of_network) <= 0

    def _keep_turn(self, peer: str, network: str, until: float) -> None:
        known = self._turns.get(peer)
        if known is not None and self._now <= known.until:
            known.network, known.until = network, until
            return
        self._turns.pop(peer, None)  # it came too late
        mine = sum(turn.network == network for turn in self._turns.values()) if network else 0
        if mine < WAITING_OF_NETWORK and len(self._turns) < WAITING_MOST:
            self._turns[peer] = NewcomerTurn(network, until)

    # ---- those that are in ---------------------------------------------------------------------------------

    def look(self, here: Iterable[WaitingMember], now: float) -> None:
        """At everybody, or not at each hello where those are many: whoever came since then is not through yet."""
        unproven = [member for member in here if not member.has_shown]
        self._unproven = Counter(member.place.network for member in unproven)
        self._fetching = Counter(member.place.network for member in unproven if _fetches(member, now))


def _fetches(member: WaitingMember, now: float) -> bool:
    last = max(member.place.since, member.pace.fetched_at)
    return now - member.place.since < ARRIVING_S and now - last < FETCHES_WITHIN_S


# ---- bans --------------------------------------------------------------------------------------------------
# Strikes and bans: who has to go, who stays out, and the host's orders about both. Pure.
#
# Part of the admission. A strike rests on what the coordinator saw itself, over a connection that proved its
# key, or on the word of most members of a round: one liar can't have somebody else banned. What anybody says
# before it has proved who it is counts against nobody.

BAN_STRIKES = 5  # within STRIKE_LASTS_S
BAN_S = 86_400.0  # for strikes, or what convicts a peer


class BanDesk:
    def __init__(self, core: Core, register: Register, send_away: SendAway) -> None:
        self._core = core
        self._register = register
        self._send_away = send_away

    def follow_up_strike(self, peer: str) -> None:
        """Was that once too often?"""
        core = self._core
        strikes = self._register.strikes_of(peer, core.clock_s)
        banned = self._register.ban_of(peer, "", core.clock_s)
        if len(strikes) >= BAN_STRIKES and banned is None:
            why = f"{len(strikes)} strikes, the last one: {strikes[-1].reason}"
            self.ban(peer, why, BAN_S)

    def refuse(self, peer: str, network: str) -> Refuse | None:
        ban = self._register.ban_of(peer, network, self._core.clock_s)
        if ban is None:
            return None
        whom = "this peer" if ban.peer == peer else f"the network {network}"
        left = duration(ban.until_s - self._core.clock_s)
        return refuse("banned", f"{whom} is banned from the run for {left} more: {ban.reason}"[:1000])

    def ban(self, peer: str, why: str, lasts_s: float, network: str = "") -> None:
        core = self._core
        at_s = core.clock_s
        core.write(Banned(peer=peer, reason=why, at_s=at_s, until_s=at_s + lasts_s, network=network))
        core.note(f"{core.name(peer)} is banned{f' with its network {network}' if network else ''}: {why}")
        for member in list(core.members.alive.values()):
            if self._register.ban_of(member.peer, member.place.network, at_s) is not None:
                told = f"banned from the run: {why}"[:1000]
                self._send_away(member.peer, DepartureCause.BANNED, told, why)

    # ---- the host's orders -------------------------------------------------------------------------------

    def obey(self, order: Ban) -> Reply:
        peer = one_peer(self._core, order.who)
        member = self._core.members.members.get(peer)
        network = member.place.network if member is not None and order.network else ""
        if order.network and not network:
            raise UserError(
                f"the network of {named(self._core, peer)} is not known; ban it without --network"
            )
        self.ban(peer, order.reason, order.lasts_s, network)
        also = f" and everybody from {network}" if network else ""
        return Reply(text=f"banned {named(self._core, peer)}{also} for {duration(order.lasts_s)}")

    def lift(self, who: str) -> Reply:
        register = self._register
        known = [peer for peer in {**register.bans, **register.strikes} if is_meant(self._core, peer, who)]
        if len(known) != 1:
            raise UserError(
                which(who, [named(self._core, peer) for peer in known], "is banned or has strikes")
            )
        self._core.write(Unbanned(peer=known[0]))
        self._core.note(f"{self._core.name(known[0])} is not banned any more")
        return Reply(text=f"{named(self._core, known[0])} may come in again, without strikes")

    def list(self) -> Reply:
        register, clock_s = self._register, self._core.clock_s
        bans = [each for each in register.bans.values() if each.until_s > clock_s]
        struck = {peer: register.strikes_of(peer, clock_s) for peer in register.strikes}
        lines = [
            f"{named(self._core, each.peer)}{f' with {each.network}' if each.network else ''}: "
            f"{duration(each.until_s - clock_s)} more: {each.reason}"
            for each in bans
        ]
        lines += [
            f"{named(self._core, peer)}: {len(those)} strikes, the last one: {those[-1].reason}"
            for peer, those in struck.items()
            if those and peer not in {each.peer for each in bans}
        ]
        found = {
            "bans": [
                {
                    "id": each.peer,
                    "name": self._core.name(each.peer),
                    "network": each.network,
                    "left_s": round(each.until_s - clock_s, 1),
                    "reason": each.reason,
                }
                for each in bans
            ],
            "strikes": {peer: [each.reason for each in those] for peer, those in struck.items() if those},
        }
        return Reply(text="\n".join(lines) or "nobody is banned, and nobody has strikes", found=found)


# ---- invitations -------------------------------------------------------------------------------------------
# Invitations: made, listed, revoked, and used. Pure.
#
# Part of the admission. The journal keeps the digest of a token, never the token: an invitation is known here
# by the first letters of its digest, which are no secret.

TOKEN_BYTES = 16  # of an invitation
ID_CHARS = 8


def token_digest(token: str) -> bytes:
    """What the journal keeps of a token: a reader of the journal can't come in with it."""
    return hash_bytes(b"farflung/token/1\0", token.encode())


class Invitations:
    def __init__(self, core: Core, register: Register, tools: ModeTools) -> None:
        self._core = core
        self._register = register
        self._tools = tools

    # ---- used ------------------------------------------------------------------------------------------

    def refuse(self, token: str) -> Refuse | None:
        """Whoever was not invited is."""
        found = self._register.invitations.get(token_digest(token)) if token else None
        if found is not None and found.revoked is not None:
            why = f"this invitation was revoked by the host of the run: {found.revoked}"
            return refuse("revoked", f"{why}; ask it for another one")
        if problem := self._problem(token, found):
            return refuse("token", f"{problem}; ask the host of the run for a join URL with a new invitation")
        return None

    def _problem(self, token: str, found: Invitation | None) -> str:
        if not token:
            return "this run lets in only invited peers, and this join URL has no invitation (&t=...)"
        if found is None:
            return "nobody was invited with this invitation (t= in the join URL)"
        if len(found.guests) >= found.uses:
            return f"this invitation is used up: it was for {found.uses}"
        # Judged by the coordinator's own clock alone: no peer is asked for the time, nor told it.
        return "this invitation has expired" if self._core.clock_s >= found.until_s else ""

    # ---- made, listed, revoked ---------------------------------------------------------------------------

    def invite(self, order: Invite) -> Reply:
        core = self._core
        token = base64.urlsafe_b64encode(self._tools.random(TOKEN_BYTES)).decode("ascii").rstrip("=")
        digest = token_digest(token)
        until_s = core.clock_s + order.lasts_s
        core.write(
            Invited(digest=digest, uses=order.uses, at_s=core.clock_s, until_s=until_s, note=order.note)
        )
        name = _named(digest, order.note)
        core.note(f"invitation {name} for {order.uses} was made")
        mode = core.manifest.admission.mode
        uses = "1 use" if order.uses == 1 else f"{order.uses} uses"
        told = f"invitation {name}: {uses}, valid for {duration(order.lasts_s)}"
        if mode != "token":
            told += f'; note: [admission] mode is "{mode}", so peers need no invitation'
        return Reply(text=told, found={"token": token, "id": _id_of(digest)})

    def list(self) -> Reply:
        known = self._register.invitations
        lines = [f"{_named(digest, each.note)}: {self._told(each)}" for digest, each in known.items()]
        found = [self._found(digest, each) for digest, each in known.items()]
        return Reply(text="\n".join(lines) or "nobody was invited", found={"invitations": found})

    def revoke(self, order: Revoke) -> Reply:
        core = self._core
        digest = self._one(order.which)
        invitation = self._register.invitations[digest]
        if invitation.revoked is not None and not order.guests:
            raise UserError(f"invitation {_named(digest, invitation.note)} was revoked already")
        core.write(Revoked(digest=digest, reason=order.reason, at_s=core.clock_s, guests=order.guests))
        name = _named(digest, invitation.note)
        core.note(f"invitation {name} was revoked: {order.reason}")
        told = f"revoked {name}: nobody comes in with it any more"
        if not order.guests:
            stay = f"; the {len(invitation.guests)} that came in by it stay: --guests sends them away, too"
            return Reply(text=told + (stay if invitation.guests else ""))
        here = [core.members.alive[peer] for peer in sorted(invitation.guests) if peer in core.members.alive]
        why = f"its invitation was revoked: {order.reason}"
        for member in here:
            self._tools.send_away(member.peer, DepartureCause.KICKED, f"{SENT_AWAY}: {why}", why)
        return Reply(text=f"{told}; sent {len(here)} away, who need another invitation to come again")

    def _one(self, which: str) -> bytes:
        known = self._register.invitations
        token = (JoinUrl.parse(which).token or "") if which.startswith("farflung:") else which
        if token_digest(token) in known:
            return token_digest(token)
        found = [
            d for d, each in known.items() if which and (d.hex().startswith(which) or each.note == which)
        ]
        usable = [digest for digest in found if known[digest].revoked is None]
        found = usable if len(usable) == 1 else found  # of two with one note, the one that is left
        if not found:
            raise UserError("there is no such invitation: farflung invite --list shows them")
        if len(found) > 1:
            names = ", ".join(_named(digest, known[digest].note) for digest in found[:5])
            raise UserError(f"{which!r} may be {names}; name one of them by its id")
        return found[0]

    def _told(self, each: Invitation) -> str:
        used = f"{len(each.guests)} of {each.uses} used"
        if each.revoked is not None:
            return f"{used}; revoked: {each.revoked}"
        left_s = each.until_s - self._core.clock_s
        ends = f"{duration(left_s)} more" if left_s > 0 else "expired"
        names = ", ".join(sorted(self._core.name(peer) for peer in each.guests))
        return f"{used}{f' ({names})' if names else ''}; {ends}"

    def _found(self, digest: bytes, each: Invitation) -> dict[str, Any]:
        return {
            "id": _id_of(digest),
            "note": each.note,
            "uses": each.uses,
            "guests": sorted(each.guests),
            "left_s": round(max(0.0, each.until_s - self._core.clock_s), 1),
            "revoked": each.revoked,
        }


def _id_of(digest: bytes) -> str:
    return digest.hex()[:ID_CHARS]


def _named(digest: bytes, note: str) -> str:
    return f"{_id_of(digest)}{f' ({note})' if note else ''}"


# ---- admission ---------------------------------------------------------------------------------------------

NAME = "admission"
LedgerPart = Register
RECORDS = OF_ADMISSION


class Admission(CoordinatorMode):
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> None:
        self._core = core
        self.allowed: frozenset[str] = frozenset()  # ids of the allowlist
        self._newcomers, self._looks = NewcomerQueue(), Looks()
        self.register: Register = core.ledger.parts[NAME]
        self.bans = BanDesk(core, self.register, tools.send_away)
        self.invitations = Invitations(core, self.register, tools)

    @property
    def rules(self) -> AdmissionSection:
        return self._core.manifest.admission

    # ---- who comes in ----------------------------------------------------------------------------------

    def refuses(self, passed: HelloPassed, peer: str) -> Refuse | None:
        network = network_of(passed.came_from)
        return self.bans.refuse(peer, network) or self._uninvited(passed, peer) or self._rushed(peer, network)

    def _uninvited(self, passed: HelloPassed, peer: str) -> Refuse | None:
        if self.rules.mode == "allowlist" and peer not in self.allowed:
            me = f"this peer is {name_of(passed.hello.identity)}, {peer}"
            why = "this run lets in only peers whose id is on its host's list; tell the host your id"
            return refuse("not-listed", f"{why}: {me}")
        if not self._needs_invitation(peer):
            return None
        return self.invitations.refuse(passed.hello.token)

    def _needs_invitation(self, peer: str) -> bool:
        return self.rules.mode == "token" and peer not in self.register.guests

    def _rushed(self, peer: str, network: str) -> Refuse | None:
        """Newcomers only: after a restart of the coordinator all its peers come back at once, and may."""
        if self.rules.mode != "open" or peer in self._core.ledger.peers.names:
            return None
        core, alive = self._core, self._core.members.alive
        if self._looks.is_due(len(alive), core.now):
            self._newcomers.look(alive.values(), core.now)
        wait = self._newcomers.ask(peer, network, self.rules, core.ledger.learned, core.now)
        return refuse(wait.code, wait.told, wait.retry_s) if wait is not None else None

    def on_admitted(self, passed: HelloPassed, peer: str) -> None:
        if self._needs_invitation(peer):
            self._core.write(CameByInvitation(peer=peer, digest=token_digest(passed.hello.token)))

    # ---- who has to go ---------------------------------------------------------------------------------

    def after(self, struck: Sequence[str], convicted: Sequence[tuple[str, str]]) -> None:
        for peer, reason in convicted:
            self.bans.ban(peer, reason, BAN_S)
        for peer in struck:
            self.bans.follow_up_strike(peer)

    def keeps_out(self, peer: str) -> bool:
        return self.register.ban_of(peer, "", self._core.clock_s) is not None

    # ---- for people ------------------------------------------------------------------------------------

    def obey(self, order: Order) -> Reply | None:
        match order:
            case messages.Invite():
                return self.invitations.invite(order)
            case messages.Invites():
                return self.invitations.list()
            case messages.Revoke():
                return self.invitations.revoke(order)
            case messages.Ban():
                return self.bans.obey(order)
            case messages.Unban(who=who):
                return self.bans.lift(who)
            case messages.Bans():
                return self.bans.list()
        return None

    def status_of(self, peer: str) -> Mapping[str, Any]:
        return {"strikes": len(self.register.strikes_of(peer, self._core.clock_s))}


made = Admission
