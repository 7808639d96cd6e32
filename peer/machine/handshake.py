"""How a peer gets in, and how it leaves: knock, read the manifest, say a signed hello, retry with patience; and what
its host has changed of the manifest since.  Pure.

Part of the peer machine.  Signing is handed in; no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from farflung import __version__
from farflung.peer.local.words import RunAmendments as TermsWord
from farflung.peer.local.words import Stop
from farflung.peer.machine import effects as do
from farflung.peer.machine.checkpoint_policy import Saving
from farflung.peer.machine.effects import Assist, Effect, Follow, LookElsewhere, Note, TellTrainer
from farflung.peer.machine.replicas import Replicas
from farflung.protocol.caps import RESULTS_BYTES
from farflung.protocol.errors import Counters, LeaveCause, UserError, Verdict
from farflung.protocol.frames import Frame, Payload
from farflung.protocol.join_url import Address, Whereabouts, whereabouts_of
from farflung.protocol.limits import ADDRESSES_MOST, PROTOCOL_VERSION
from farflung.protocol.messages import (
    Challenge,
    Committed,
    Hello,
    Knock,
    OpenRound,
    Refuse,
    Tick,
    ToDoor,
    ToMember,
    Welcome,
)
from farflung.protocol.mode_words import AskKept, KeptReceipts
from farflung.protocol.round_words import Contact, RelayRoute
from farflung.protocol.run_terms import Attached, Known, Terms
from farflung.protocol.signed_words import hello_part
from farflung.protocol.signing import Amendment, SignedHead

UNREACHABLE_AFTER_S = 60.0  # a first answer must come within this; a peer that was in once waits for ever
UNREACHABLE_HINT = (
    "check that the coordinator is running, that a firewall lets its port through, and that the join URL is the one "
    "it printed last; if its host keeps it in a phone book, farflung phonebook --find tells where it is"
)
KEY_BYTES = 32
RETRY_S = 0.5
EARLY_S = 2.0  # between knocks of one who helps, while nobody has brought the run's model
RETRY_MAX_S = 10.0
STANDBY_RETRY_S = 1.0  # a standby leads within seconds after the leader's end
# A bad signature is not among them: a late challenge makes an honest hello look forged, and the next one is good.
FINAL_CODES = frozenset(
    {"protocol", "run", "model", "manifest", "key", "address", "banned", "token", "revoked", "not-listed"}
    | {"no-helpers"}  # of one who comes without a trainer
)
NO_HELP = "this run's model is cut into stages, and nobody helps there without a trainer: use farflung join"


class HandshakeState(StrEnum):
    KNOCKING = "knocking"
    READING = "reading"  # the manifest is here, the model is not yet
    GREETING = "greeting"
    INSIDE = "inside"


class Signer(Protocol):
    """An identity, as far as a machine sees it: peer/identity.py keeps the key and its file."""

    public: bytes
    peer_id: str
    name: str

    def sign(self, message: bytes) -> bytes: ...


@dataclass(frozen=True)
class Me:
    """Who this process is; `sign` signs with the identity's key."""

    peer: str
    name: str
    identity: bytes
    key: bytes
    process: bytes
    software: str
    sign: Callable[[bytes], bytes]
    token: str = field(default="", repr=False)  # of an invitation


@dataclass(frozen=True)
class Offer:
    """What a trainer says of its model: it holds all of it, or could hold one of some stages."""

    attached: Attached
    address: str  # where other peers dial me, if they can
    fits: tuple[int, ...] = ()  # the stages that it could hold, also when one of them is held

    @property
    def problem(self) -> str:
        """Why the run has no use for it; empty: it has."""
        of, stages = self.attached.known.manifest.pipeline.stages, self.attached.stages
        if of == 1:
            return "the run's model is in one piece, and the trainer offers stages" if stages else ""
        if not stages or not set(stages) <= set(range(of)):
            return f"the run has stages 0 to {of - 1}, and the trainer could hold {list(stages)}"
        return ""


@dataclass(frozen=True)
class PeerConfig:
    """All that the machine is told when it is made; nothing of it changes later."""

    me: Me
    run: str
    # Of compression.codec, check_payload and payload_bytes: this room knows no tensor.
    check: Callable[[str, Payload, int], None]
    payload_bytes: Callable[[str, int], int]
    results_on_disk: bool = False  # the shell keeps older results there
    results_limit_bytes: int = RESULTS_BYTES
    saves: bool = False  # the shell has a place for checkpoints: to write them, and to read them back
    recalls: bool = False  # the shell keeps what arrives of the state, and may have some of a former life
    keeps_in: str = ""  # where the shell keeps the newest version of the state; empty: nowhere
    pinned: bytes = b""  # the coordinator's key, as the join URL has it; empty: not known
    places: tuple[Address, ...] = ()  # where the join URL says that it is
    kept: bytes = b""  # the list of its addresses that a former life of this peer kept
    helps: bool = False  # no trainer will come: it owns chunks and gives state, and contributes nothing
    start: str = ""  # where its owner has what the run begins with; empty: nowhere
    kept_commits: bytes = b""  # and the run's newest steps, as its coordinator signed them

    def __post_init__(self) -> None:
        if not self.me.peer or not self.run:
            raise ValueError("a peer has an id and names its run")
        if self.results_limit_bytes < 0 or len(self.pinned) not in (0, KEY_BYTES):
            raise ValueError("a limit is not negative, and a key has 32 bytes")


class Handshake:
    def __init__(self, me: Me, run: str, helps: bool = False, kept: bytes = b"") -> None:
        """`kept`: what a former life of this peer kept of the run; empty: it was never in."""
        self.stand = HandshakeState.KNOCKING
        self.helps, self._told_early = helps, False
        self.other_protocol = ""  # why nobody here speaks with that door
        self.incarnation = 0  # of the coordinator that let me in
        self._answered = bool(kept)  # somebody did, ever
        self.refused = ""  # why it was not let in, the last time it asked
        self._me = me
        self._run = run
        self._nonce = b""
        self._unanswered = 0  # hellos that are out, also while it knocks again because the answer is slow
        self._session = b""
        self._again_at = 0.0
        self._tries = 0
        self._knocking_since: float | None = None

    @property
    def inside(self) -> bool:
        return self.stand == HandshakeState.INSIDE

    def unreachable(self, now: float) -> str:
        """Why to give up: nobody has answered for too long, and nobody ever did.  Else empty."""
        if self._answered or self._knocking_since is None:
            return ""
        if now - self._knocking_since < UNREACHABLE_AFTER_S:
            return ""
        return f"nobody answered within {UNREACHABLE_AFTER_S:g} s; {UNREACHABLE_HINT}"

    def leave(self, now: float, jitter: float) -> None:
        """Out again (the coordinator is silent, or said so): knock anew, not all peers at the same instant."""
        self.stand = HandshakeState.KNOCKING
        self._tries = 0
        self._unanswered = 0
        self._again_at = now + jitter

    def on_timer(self, now: float) -> Knock | None:
        if self.stand == HandshakeState.INSIDE or now < self._again_at:
            return None
        if self.stand == HandshakeState.READING:
            return None
        self.stand = HandshakeState.KNOCKING
        self._again_at = now + self._pause_s
        self._tries += 1
        if self._knocking_since is None:
            self._knocking_since = now
        return Knock(protocol=PROTOCOL_VERSION, run=self._run, helps=self.helps)

    @property
    def _pause_s(self) -> float:
        return min(RETRY_MAX_S, RETRY_S * 2.0 ** min(self._tries, 10))

    def on_challenge(self, challenge: Challenge) -> bool:
        """True when it was expected."""
        if self.stand != HandshakeState.KNOCKING:
            return False
        if challenge.protocol != PROTOCOL_VERSION:
            self.other_protocol = (
                f"the coordinator speaks version {challenge.protocol} of the protocol, and farflung {__version__} "
                f"here {PROTOCOL_VERSION}: ask its host which farflung to install here"
            )
            return False
        self._nonce, self._answered = challenge.nonce, True
        self.stand = HandshakeState.READING
        return True

    def help_with(self, challenge: Challenge, now: float) -> list[Effect]:
        """Without a trainer: the model is the run's, as its door tells it."""
        if challenge.model is not None:
            return [Assist(challenge.model)]
        self.stand, self._again_at = HandshakeState.KNOCKING, now + EARLY_S
        first, self._told_early = not self._told_early, True
        return [Note("waiting for a peer that trains: it brings the run's model")] if first else []

    def greet(
        self, offer: Offer, version: int, digest: bytes, now: float, kept: SignedHead | None = None
    ) -> Hello:
        self.stand, self._unanswered = HandshakeState.GREETING, self._unanswered + 1
        self._again_at = now + self._pause_s  # a door with a crowd before it must not hear everybody twice
        me, attached = self._me, offer.attached
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            run_id=attached.known.run_id,
            identity=me.identity,
            key=me.key,
            address=offer.address,
            software=me.software,
            manifest=attached.known.manifest.digest,
            model=attached.model,
            fragments=tuple(each.number for each in attached.held),
            fits=offer.fits,
            version=version,
            digest=digest,
            process=me.process,
            token=me.token,
            helps=self.helps,
            signature=b"",
            kept=kept if kept is not None and kept.run_id == attached.known.run_id else None,
        )
        return msgspec.structs.replace(hello, signature=me.sign(hello_part(hello, self._nonce)))

    def on_welcome(self, welcome: Welcome) -> bool:
        """True: a session begins; also while another one has just begun, since a later hello of mine replaced it."""
        # A lower number is a coordinator that another one has replaced: nobody may follow both.
        if not self._unanswered or welcome.incarnation < self.incarnation:
            return False
        self._unanswered -= 1
        if self.inside and welcome.session == self._session:
            return False
        self.stand, self._tries, self.refused = HandshakeState.INSIDE, 0, ""
        self.incarnation, self._session = welcome.incarnation, welcome.session
        return True

    def outdated(self, message: ToDoor) -> list[Effect]:
        """What people are told of a welcome that was not taken."""
        if not isinstance(message, Welcome) or message.incarnation >= self.incarnation:
            return []
        told = "this coordinator is older than the one that I followed; if its host means it: coordinate --restored"
        return [Note(told), LookElsewhere()]

    def hurry(self, now: float) -> None:
        """It is known where else to knock."""
        self._again_at = min(self._again_at, now)

    def on_standby(self, now: float) -> None:
        """Somebody is there who knows of the run, and may lead it in a moment: no reason to lose patience."""
        if self.stand == HandshakeState.KNOCKING:
            self._answered = True
            self._again_at = min(self._again_at, now + STANDBY_RETRY_S)

    def on_refuse(self, refuse: Refuse, now: float) -> bool:
        """True when trying again is pointless."""
        if self.stand == HandshakeState.INSIDE:
            return False  # the answer to an older hello: a newer one was welcome
        self.stand, self._unanswered = HandshakeState.KNOCKING, 0
        self._again_at = now + max(refuse.retry_after_s, RETRY_S)
        self.refused = refuse.reason
        return refuse.code in FINAL_CODES


def me_of(identity: Signer, key: bytes, process: bytes, token: str = "") -> Me:
    """`key`: CURVE public key of this session; `process`: 16 random bytes."""
    return Me(
        peer=identity.peer_id,
        name=identity.name,
        identity=identity.public,
        key=key,
        process=process,
        software=f"farflung {__version__}",
        sign=identity.sign,
        token=token,
    )


# ---- taking one's leave -------------------------------------------------------------------------------
#
# To stay costs the others nothing: what a leaving peer contributed is used, and what it owns is merged
# where it is. It says in its beats that it is leaving, so nobody counts on it for another round or waits
# for it. A peer that is asked twice, or whose round takes too long, goes at once: the coordinator then
# moves its chunks to others.


STAY_S = 8.0  # less than a script waits for its agent, and than containers get between SIGTERM and SIGKILL
# Sums of a batch are computed once more if their holder goes before the others have them.
STAY_WITH_SUMS_S = 60.0


class Leaving:
    def __init__(self) -> None:
        self.reason, self.code = "", LeaveCause.LEFT
        self.exited = False
        self._until = 0.0

    @property
    def asked(self) -> bool:
        return bool(self.reason)

    def ask(self, reason: str, code: LeaveCause, now: float, has_sums: bool = False) -> None:
        """`has_sums`: it may have some, of a batch."""
        self.reason, self.code = reason or "it left", code
        self._until = now + (STAY_WITH_SUMS_S if has_sums else STAY_S)

    def may_go(self, part: Replicas | None, inside: bool, now: float, awaited: bool = False) -> bool:
        """Nothing is left to stay for.  `awaited`: it has sums that the others wait for."""
        busy = part is not None and inside and (bool(part.flights) or awaited)
        return self.asked and (not busy or now >= self._until)

    def exit(self, code: str, reason: str) -> list[Effect]:
        self.exited = True
        return [TellTrainer(Stop(code=code, reason=reason)), do.Exit(code, reason)]


# ---- what the host has changed of the manifest since ---------------------------------------------------------
#
# Ticks tell the amendments, beats say how many are known.  A round's words name the amendment that holds in it: who
# does not know that one takes no part in the round, and applies nothing that it made, until a tick has told it.


class AmendmentNews:
    def __init__(self, known: Known, pinned: bytes) -> None:
        """`pinned`: the coordinator's key, as the join URL has it; empty: not known."""
        self.terms = Terms(known.manifest)
        self._run_id, self._pinned = known.run_id, pinned
        self._has_told = False

    @property
    def count(self) -> int:
        """What beats say, so that ticks tell the others."""
        return self.terms.count

    def on_tick(self, tick: Tick, saving: Saving) -> list[Effect]:
        """`saving`: what is saved at the end of the run, which may come at another version now."""
        effects = self.on_told(tick.amendments)
        if effects:
            saving.follow(self.terms.newest)
        return effects

    def on_told(self, amendments: Sequence[Amendment]) -> list[Effect]:
        if not amendments:
            return []
        before = self.count
        try:
            self.terms = self.terms.believed(amendments, self._run_id, self._pinned)
        except UserError as error:
            return [Note(f"the coordinator told of an amendment that is not believed: {error}")]
        new = self.terms.amendments[before:]
        told: list[Effect] = [
            Note(f"from version {each.version} on, the host changed: {each}") for each in new
        ]
        return [*told, Follow(self.terms), *self.words()] if new else []

    def words(self) -> list[Effect]:
        """For a trainer that knows only what the run began with."""
        if not self.count:
            return []
        return [TellTrainer(TermsWord(first=self.terms.first.canonical(), amendments=self.terms.amendments))]

    def why_not(self, message: ToMember) -> list[Effect] | None:
        """What to say of a round's word that is not heard yet; None: all that holds in that round is known here.

        A coordinator that knows fewer amendments than its peers was started on an old copy of its journal.  To follow
        it would be to make versions by other terms than those who were told.
        """
        match message:
            case OpenRound(plan=plan):
                due = self.terms.number_at(plan.version)
            case Committed(commit=commit):
                due = self.terms.number_at(commit.version - 1)
            case _:
                return None
        if message.amended == due:
            return None
        if message.amended > due or self._has_told:
            return []  # the next tick tells it
        self._has_told = True
        return [
            Note(f"the coordinator does not know amendment {due} of this run: is its journal an old copy?")
        ]


# ---- coordinator places ------------------------------------------------------------------------------------
# Where the coordinator may be, and who is in the run by its word: what a peer was told. Pure.
#
# Part of the peer machine. A peer starts with the addresses of its join URL and with the signed list that it
# kept; a newer list comes with each welcome, or from a phone book. A mode looks further where the coordinator
# is lost, and keeps what one needs that has lost its disk (peer/restoring): here stand the answers where
# nothing does.
#
# Who may lie: a list counts only under the run's key, and only if it is newer than mine, so nobody can send a
# peer elsewhere, and the addresses of the URL are tried whatever comes. Must not know sockets or files.

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
        return Verdict.ACCEPTED, [do.Remember(whereabouts=said.raw), do.LookAt(self.places)]

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
