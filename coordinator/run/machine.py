"""The coordinator's machine: `(event, now) -> effects`, the whole of a run's decisions behind five doors.

    on_door     a frame of a stranger        on_member   a frame of a member
    on_closed   a member's connection broke  on_timer    time passed        start   once, first

Driven by the server's sockets and clock, and by the simulator.  Pure: clock and randomness are arguments.
What a member sends is a snapshot of where it is; what it lacks is repeated with every answer, so that lost,
late and repeated messages all heal by the next beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from farflung.coordinator.door.allowance import Quota
from farflung.coordinator.door.hello_check import (
    UNPROVEN,
    DoorFacts,
    Doorkeeper,
    HelloPassed,
    is_signed,
    refuse,
)
from farflung.coordinator.ledger.records import (
    AbortedRound,
    Admitted,
    CommittedBatch,
    Departed,
    ModelFixed,
    Record,
    Started,
)
from farflung.coordinator.ledger.run_store import RunRecords
from farflung.coordinator.modes import registry
from farflung.coordinator.modes.registry import ModeTools
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import Allow, AnswerDoor, DialBack, Effect, Forbid, Tell
from farflung.coordinator.run.lease_desk import LeaseDesk
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.operator_orders import AmendmentOrders, Operating
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.coordinator.run.status import status_json
from farflung.coordinator.run.ticks import TickBuilder
from farflung.protocol.digests import HASH_BYTES
from farflung.protocol.errors import AbortCause, Counters, DepartureCause, UserError, Verdict
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import (
    AskStatus,
    Beat,
    FromDoor,
    FromMember,
    Gone,
    Hello,
    Knock,
    Leave,
    Order,
    ProgressReport,
    Refuse,
    Reply,
    Sent,
    Show,
    Shown,
    StatusReply,
    Welcome,
)
from farflung.protocol.mode_words import Audited
from farflung.protocol.model_schema import first_difference
from farflung.protocol.process.networks import network_of
from farflung.protocol.round_words import CROWD, Contact
from farflung.protocol.signing import name_of, peer_id_of
from farflung.protocol.states import OF_DEPARTURE, PEER_STATES, Phase

# ---- entrance ----------------------------------------------------------------------------------------------
# The entrance: may somebody who proved who it is come in now? Pure.
#
# Called by the run machine with each hello that the doorkeeper passed on. It does not take the doorkeeper's
# word for the signature: that process talks to strangers. Whether the hello fits the run is the core's
# question; whom the host wants is the modes' (coordinator/admission/). The words of a refusal say what to do;
# its code is for programs.

DRAINING_RETRY_S = 5.0
FULL_RETRY_S = 30.0
EARLY_RETRY_S = 2.0
COMES_PER_MINUTE = 30.0  # one identity: each time is a line in the journal, and news for all members


class Entrance:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._comes: Quota[str] = Quota(COMES_PER_MINUTE / 60.0, COMES_PER_MINUTE)

    def refuses(self, passed: HelloPassed) -> Refuse | None:
        """None: it may come in."""
        core, hello = self._core, passed.hello
        if not is_signed(hello, passed.nonce):
            return refuse("signature", "the hello is not signed by the identity it names")
        peer = peer_id_of(hello.identity)
        if core.draining:
            why = "the coordinator is about to end, and takes nobody in any more; it may be back soon"
            return refuse("draining", why, DRAINING_RETRY_S)
        return (
            self._unfit(hello)
            or self._crowded(hello, peer)
            or next(filter(None, (mode.refuses(passed, peer) for mode in core.modes)), None)
            or self._restless(peer)
        )

    def _unfit(self, hello: Hello) -> Refuse | None:
        core = self._core
        if hello.helps and (too_early := self._nothing_to_help(hello)) is not None:
            return too_early
        if core.ledger.model is not None and not self._may_still_change():
            difference = first_difference(hello.model, core.ledger.model)
            if difference:
                return refuse("model", f"the model differs from the run's: {difference}")
        try:
            hello.model.fragments(core.ledger.rules.fragments)
        except UserError as error:
            return refuse("model", str(error))
        if core.manifest.pipeline.stages > 1:
            return self._no_stage(hello.fragments)
        if hello.fragments != tuple(range(core.ledger.rules.fragments)):
            held, all_of_them = ", ".join(map(str, hello.fragments)), core.ledger.rules.fragments
            return refuse(
                "model",
                f"this run is no pipeline: each peer holds all of its {all_of_them} fragments, not {held}",
            )
        return None

    def _no_stage(self, offered: tuple[int, ...]) -> Refuse | None:
        """It offers stages that there are, each once."""
        stages = self._core.manifest.pipeline.stages
        if len(set(offered)) == len(offered) and max(offered) < stages:
            return None
        told = ", ".join(map(str, offered))
        return refuse("model", f"this run's model has stages 0 to {stages - 1}; offered were stages {told}")

    def _may_still_change(self) -> bool:
        """Nothing was learned and nobody who trains is here: a first peer that came with another model binds nobody."""
        alive = self._core.members.alive.values()
        return not self._core.ledger.learned and all(member.helps for member in alive)

    def _nothing_to_help(self, hello: Hello) -> Refuse | None:
        """Who comes without a trainer brings no model: it takes that of those who train."""
        if self._core.manifest.pipeline.stages > 1:
            why = "this run's model is cut into stages, and each of them is held by peers that compute it"
            return refuse("no-helpers", f"{why}: nobody helps here without a trainer")
        if self._core.ledger.model is None or self._may_still_change():
            why = "no peer that trains is here yet: who helps waits for one, which brings the model"
            return refuse("too-early", why, EARLY_RETRY_S)
        return None

    # ---- how many ----------------------------------------------------------------------------------------

    def _crowded(self, hello: Hello, peer: str) -> Refuse | None:
        core = self._core
        old = core.members.members.get(peer)
        if old is not None and old.alive and old.process != hello.process and old.heard.closed_at is None:
            return refuse(
                "already-here",
                "this identity is already in the run as another process; stop that one, or use another identity file",
                retry_after_s=core.manifest.net.dead_after_s / 2,
            )
        if old is None and len(core.members.alive) >= core.manifest.run.max_peers:
            return refuse("full", f"the run is full: {core.manifest.run.max_peers} peers", FULL_RETRY_S)
        return None

    def _restless(self, peer: str) -> Refuse | None:
        """An identity that is let in, is thrown out or goes, and comes again without end."""
        if self._comes.take(peer, self._core.now):
            return None
        told = f"this identity came in more than {COMES_PER_MINUTE:g} times in a minute; waiting"
        return refuse("rate", told, max(1.0, self._comes.wait_s(peer, self._core.now)))


# ---- sessions ----------------------------------------------------------------------------------------------


class RouteSearch:
    """By which routes members reach each other: their addresses are tried, the modes look for other ways, and everybody
    hears of what that changed."""

    def __init__(self, core: Core, drivers: list[RoundDriver], tick_builder: TickBuilder) -> None:
        self._core = core
        self._drivers = drivers
        self._tick_builder = tick_builder

    def dial_back(self, among: Iterable[Member] | None = None) -> None:
        for member in self._core.members.addresses.to_dial(self._core.now, among):
            self._core.do(DialBack(member.peer, member.session, member.place.claimed, member.contact.key))

    def find(self) -> bool:
        """True if somebody is to be told of other ways."""
        return any([mode.find_ways(self._are_together) for mode in self._core.modes])

    def follow(self) -> None:
        if self.find():
            self.tell_roster()

    def tell_roster(self) -> None:
        """Everybody hears of a member, or of its address, at once; a crowd by its next beats."""
        if len(self._core.members.alive) <= CROWD:
            self._tick_builder.recheck_all()

    def _are_together(self, one: str, other: str) -> bool:
        """In a round that is in flight."""
        plans = (each.round.plan for each in self._drivers if each.round is not None)
        return any(one in plan.members and other in plan.members for plan in plans)


class Sessions:
    """How each stay of a member in the run begins, with its welcome, and how it ends."""

    def __init__(
        self, core: Core, drivers: list[RoundDriver], routes: RouteSearch, random: Callable[[int], bytes]
    ) -> None:
        self._core = core
        self._drivers = drivers
        self._routes = routes
        self._random = random
        self.entrance = Entrance(core)
        self.member_port = 0
        # Of gateways that hold members' connections, where there are any.
        self.member_ports: tuple[int, ...] = ()
        self.whereabouts = b""  # signed, for members; the shell knows its addresses

    def admit(self, caller: bytes, passed: HelloPassed) -> None:
        core = self._core
        refused = self.entrance.refuses(passed)
        if refused is not None:
            core.do(AnswerDoor(caller, refused))
            return
        hello = passed.hello
        for mode in core.modes:
            mode.on_hello(passed)
        old = core.members.members.get(peer_id_of(hello.identity))
        if old is not None and old.has_not_spoken_since(hello):
            member, old.heard.at = old, core.now
        else:
            member = self._begin(passed)
        first = hello.fragments[0]
        known = core.ledger.books[first].digests.get(hello.version)
        if first in member.standings:
            member.standings[first].vouched = bool(hello.digest) and known == hello.digest
        # To each of a crowd that comes at once it would be told who is here twice within moments; by which ways they
        # reach each other is the timer's then.
        few = len(core.members.alive) <= CROWD
        if few:
            self._routes.find()
            self._routes.tell_roster()  # before it is welcomed: what it asks of them at once would come from a stranger
        core.do(Allow(hello.key))
        welcome = Welcome(
            session=member.session,
            incarnation=core.ledger.incarnation,
            member_port=self._port_for(member),
            fragments=tuple(member.standings),
            roster=core.members.roster() if few else (),
            whereabouts=self.whereabouts,
        )
        core.do(AnswerDoor(caller, welcome))

    def _port_for(self, member: Member) -> int:
        """The same for all welcomes of a session, as long as nothing about the gateways changes."""
        ports = self.member_ports
        return ports[int.from_bytes(member.session, "big") % len(ports)] if ports else self.member_port

    def _begin(self, passed: HelloPassed) -> Member:
        core, hello, key = self._core, passed.hello, passed.hello.key
        peer, name = peer_id_of(hello.identity), name_of(hello.identity)
        session = self._random(16)
        if core.ledger.model != hello.model:
            core.write(ModelFixed(model=hello.model, peer=peer))
            for member in [each for each in core.members.alive.values() if each.helps]:
                why = "a peer that trains brought another model before anything was learned; start it again"
                core.tell(member, Gone, reason=why, final=True)
                self.lose(member, DepartureCause.MISFIT, why)
        core.write(Admitted(peer=peer, name=name, session=session, helps=hello.helps))
        for mode in core.modes:
            mode.on_admitted(passed, peer)
        old = core.members.members.get(peer)
        # Of a process that was only out of contact nobody wants to hear.
        again = old is not None and old.alive and old.process == hello.process
        for driver in self._drivers:
            driver.on_session(peer, hello.process)
        if old is not None:
            core.do(Forbid(old.contact.key))
            if old.process != hello.process:
                for driver in self._drivers:
                    driver.on_restart(peer)
        asked = (mode.fragments_of(hello, peer) for mode in core.modes)
        fragments = next((each for each in asked if each is not None), hello.fragments)
        contact, network = Contact(peer, name, key, hello.address), network_of(passed.came_from)
        member = core.members.admit(contact, session, hello.process, core.now, network, fragments)
        member.identity, member.fits, member.helps = hello.identity, hello.fits, hello.helps
        member.place.came_from = passed.came_from
        self._routes.dial_back([member])
        if not again:
            how = "came back" if old is not None else "joined"
            core.note(f"{name} {how}{' to help, without a trainer' if hello.helps else ''}")
        return member

    def send_away(self, peer: str, cause: DepartureCause, told: str, why: str) -> None:
        member = self._core.members.alive[peer]
        self._core.tell(member, Gone, reason=told, final=True)
        self.lose(member, cause, why, True)

    def lose(self, member: Member, cause: DepartureCause, why: str, cut: bool = False) -> None:
        self._core.write(Departed(peer=member.peer, cause=cause, reason=why))
        how = OF_DEPARTURE[cause]
        self._core.note(f"{member.contact.name} {PEER_STATES.after(member.told.state, how)}: {why}")
        self._core.do(Forbid(member.contact.key, cut))
        member.told.gone_because = why
        self._core.members.lose(member, how)


# ---- machine -----------------------------------------------------------------------------------------------

STATUS_CROWD_S, STATUS_S_PER_MEMBER = 1.0, 500e-6
# A broken connection may be a hiccup: this long it may come back before it counts as death.
RECONNECT_GRACE_S = 1.0
STOOD_STILL_S = 2.0
RESTORED_AHEAD = 1000  # incarnations: peers that know both follow the higher one


class RunMachine:
    def __init__(
        self, manifest: Manifest, run_id: bytes, records: list[Record], random: Callable[[int], bytes]
    ) -> None:
        registry.check(manifest)
        ledger = RunRecords(run_id, manifest, records).ledger
        self.core = Core(manifest, run_id, ledger)
        fragments = range(ledger.rules.fragments)
        self.drivers = [RoundDriver(self.core, each) for each in fragments]
        self.lease_desk = LeaseDesk(self.core, self.drivers)
        self._random = random
        self._looked_at = -math.inf  # at the clock
        self.tick_builder = TickBuilder(self.core, self.drivers, self.lease_desk)
        self.core.acquaint = self.tick_builder.acquaint
        self.routes = RouteSearch(self.core, self.drivers, self.tick_builder)
        self.sessions = Sessions(self.core, self.drivers, self.routes, random)
        self.modes: dict[str, Any] = self._made_modes()
        self.core.modes = tuple(self.modes.values())
        for driver in self.drivers:
            policies = (mode.policy(driver.fragment) for mode in self.core.modes)
            driver.goes_by(next((each for each in policies if each is not None), driver.policy))
        self.facts = DoorFacts(manifest.run.name, run_id, manifest.canonical())
        self.doorkeeper = Doorkeeper(self.facts)
        amending = AmendmentOrders(self.core, self.drivers)
        self._operating = Operating(self.core, self.sessions.send_away, amending)
        self.counters = Counters()
        self._shown = 0.0, b""  # the newest status, and when it was made
        self._unsettled: set[int] = set()  # fragments that something was said of

    def _made_modes(self) -> dict[str, Any]:
        """Those that are there, and that this run has use for."""
        tools = ModeTools(
            random=self._random,
            send_away=self.sessions.send_away,
            follow_ways=self.routes.follow,
            settle=lambda: self._settle(self.drivers),
            fits=lambda peer: self.lease_desk.words.fits(self.core.members.members[peer]),
        )
        made = {name: make(self.core, self.drivers, tools) for name, make in registry.having("made").items()}
        return {name: mode for name, mode in made.items() if mode is not None}

    # ---- events --------------------------------------------------------------------------------------

    def start(
        self, now: float, member_port: int, wall_s: float = 0.0, restored: bool = False
    ) -> list[Effect]:
        """`restored`: from a copy of the journal, which may lack the last starts of the original."""
        core = self.core
        core.now = core.began_at = now
        self.sessions.member_port = member_port
        clock_s = core.ledger.clock.at_start(wall_s)
        number = core.ledger.incarnation + (RESTORED_AHEAD if restored else 1)
        secret = b"" if core.ledger.secret else self._random(32)
        core.write(Started(incarnation=number, clock_s=clock_s, wall_s=wall_s, secret=secret))
        core.warn(registry.lacking())
        for mode in core.modes:
            core.warn(mode.on_start(restored))
        for fragment, book in enumerate(core.ledger.books):
            if book.open_round:
                number = book.open_round
                cause, why = AbortCause.RESTARTED, "the coordinator restarted"
                core.write(AbortedRound(round_no=number, cause=cause, reason=why, fragment=fragment))
                core.note(f"round {number} aborted: {why}; local work is kept")
        if core.ledger.learned:
            core.note(f"resumed at version {core.ledger.version} from the journal")
        return core.take_effects()

    def on_door(
        self, caller: bytes, key: bytes, message: FromDoor, now: float, came_from: str = ""
    ) -> list[Effect]:
        """With the doorkeeper in the same process, as the simulator has it.  The server's is at the front door."""
        self.core.now = now
        verdict = Verdict.ACCEPTED
        match message:
            case Knock():
                self.doorkeeper.model = self.core.ledger.model
                self.core.do(AnswerDoor(caller, self.doorkeeper.knock(caller, message, self._random(32))))
            case Hello():
                said = self.doorkeeper.examine(caller, key, message, came_from)
                if isinstance(said, HelloPassed):
                    self.sessions.admit(caller, said)
                else:
                    self.core.do(AnswerDoor(caller, said))
                    verdict = Verdict.UNAUTHORISED if said.code in UNPROVEN else verdict
            case AskStatus(run=run):
                wrong = self.doorkeeper.wrong_run(run)
                self.core.do(AnswerDoor(caller, wrong or StatusReply(status=self.status(now))))
        self.counters.count(verdict)
        return self.core.take_effects()

    def status(self, now: float) -> bytes:
        """In a crowd one for all who ask within a second: anybody may ask, and it takes a while to make."""
        made_at, raw = self._shown
        count = len(self.core.members.alive)
        if not raw or count <= CROWD or now - made_at >= max(STATUS_CROWD_S, count * STATUS_S_PER_MEMBER):
            self._shown = now, status_json(self.core, self.drivers, self.counters, now, self.core.lost())
        return self._shown[1]

    def on_hello(self, caller: bytes, passed: HelloPassed, now: float) -> list[Effect]:
        """Somebody whom the doorkeeper at the front door passed on."""
        self.core.now = now
        self.sessions.admit(caller, passed)
        return self.core.take_effects()

    def on_news(self, text: str, now: float) -> list[Effect]:
        """Something about the coordinator itself that people want to know."""
        self.core.now = now
        self.core.note(text)
        return self.core.take_effects()

    def obey(self, order: Order, now: float) -> tuple[Reply, list[Effect]]:
        """What the operator asks for."""
        self._look_at_clock(now)
        reply = self._operating.obey(order)
        self.tick_builder.recheck_all()
        self._settle(self.drivers)
        return reply, self.core.take_effects()

    def on_garbage(self, peer: str, session: bytes, now: float) -> list[Effect]:
        """A member's connection sent frames that can't be read, and was cut off for it."""
        self.core.now = now
        if (member := self.core.members.by_session.get(session)) is not None and member.peer == peer:
            self.core.strike(peer, "it sent frames that no farflung sends")
            self.core.follow_up()
        return [*self.core.take_effects(), *self.on_closed(peer, session, now)]

    @property
    def drained(self) -> bool:
        """The operator wants it to end, and nothing is in flight."""
        return self.core.draining and all(driver.round is None for driver in self.drivers)

    def on_member(self, key: bytes, message: FromMember, now: float, last: bool = True) -> list[Effect]:
        """`last`: no other frame waits; else what follows from this one waits for the next `settle`."""
        self._look_at_clock(now)
        member = self.core.members.by_session.get(message.session)
        if member is None:
            self.counters.count(Verdict.STALE)
            self.core.do(
                Tell("", message.session, _gone(message.session, "this session is not known any more"))
            )
            return self.core.take_effects()
        if member.contact.key != key:
            self.counters.count(Verdict.UNAUTHORISED)
            return self._on_forgery(key)
        if message.seq <= member.heard.seq:
            self.counters.count(Verdict.DUPLICATE if message.seq == member.heard.seq else Verdict.STALE)
            return []
        member.heard.seq, member.heard.at, member.heard.closed_at = message.seq, now, None
        # What a member reports of a round moves that round only; anything else may move all of them.
        touched = self.drivers
        if isinstance(message, Sent | ProgressReport):
            touched = [c for c in self.drivers if c.is_about(member, message.round_no)]
            for driver in touched[:1]:  # one, or none: a round belongs to one fragment
                if isinstance(message, Sent):
                    driver.on_sent(member, message)
                else:
                    driver.on_progress(member, message)
            self.counters.count(Verdict.ACCEPTED if touched else Verdict.STALE)
        elif isinstance(message, Shown):
            wanted = self.core.questions.on_shown(member.peer, message, now)
            self.counters.count(Verdict.ACCEPTED if wanted else Verdict.STALE)
        else:
            before = _what_counts(member)
            self.counters.count(self._on_member_message(member, message))
            if not isinstance(message, Audited) and _what_counts(member) == before:
                touched = []  # most beats: what time alone changes is the timer's
        self._unsettled.update(driver.fragment for driver in touched)
        return self.settle(now) if last else self.core.take_effects()

    def settle(self, now: float) -> list[Effect]:
        """What follows from the frames since the last time: once for all that came together."""
        self._look_at_clock(now)
        touched = [each for each in self.drivers if each.fragment in self._unsettled and each.is_due()]
        self._unsettled.clear()
        if touched:
            self._settle(touched)
        return self.core.take_effects()

    def on_closed(self, peer: str, session: bytes, now: float) -> list[Effect]:
        member = self.core.members.members.get(peer)
        if member is not None and member.alive and member.session == session:
            self.core.members.liveness.on_closed(member, now)
        return []

    def on_dialled(self, peer: str, session: bytes, reached: bool, now: float) -> list[Effect]:
        """What came of a DialBack."""
        core = self.core
        self._look_at_clock(now)
        if core.members.on_dialled(peer, session, reached):
            core.log(f"{core.name(peer)} can be dialled")
            self.routes.find()
            self.routes.tell_roster()
            self._settle(self.drivers)
        elif not reached and (member := core.members.members.get(peer)) is not None and member.alive:
            claimed, how = member.place.claimed, core.members.ways.undialled_meets
            core.note(f"{core.name(peer)} can't be dialled at {claimed}: it takes part, and {how}")
            self.routes.follow()
        return core.take_effects()

    def on_look(self, key: bytes, door: str, endpoint: str, now: float) -> list[Effect]:
        """From where a connection of that session was seen to come, by one of two sockets."""
        self.core.now = now
        if self.core.members.ways.saw(key, door, endpoint):
            self.routes.follow()
        return self.core.take_effects()

    def _look_at_clock(self, now: float) -> None:
        """Where no timer came for long, this process stood still, and what members said meanwhile is only read now."""
        slept_s, self._looked_at = now - self._looked_at, now
        self.core.now = now
        if STOOD_STILL_S < slept_s < math.inf:
            self.core.members.liveness.woke_at = now
            for driver in self.drivers:
                if (flight := driver.round) is not None:
                    flight.slept(slept_s)

    def on_timer(self, now: float) -> list[Effect]:
        core = self.core
        self._look_at_clock(now)
        self.routes.dial_back()
        self.routes.follow()
        for member in core.members.liveness.silent(now, RECONNECT_GRACE_S):
            if member.heard.closed_at is not None:
                self.sessions.lose(member, DepartureCause.CLOSED, "its connection closed")
            else:
                told = f"nothing heard for {core.members.liveness.dead_after_s:g} s"
                self.sessions.lose(member, DepartureCause.SILENT, told)
        self.lease_desk.reclaim()
        if any([mode.on_timer() for mode in core.modes]):
            self.tick_builder.recheck_all()
        self._settle([driver for driver in self.drivers if driver.is_due()])
        return core.take_effects()

    # ---- members -------------------------------------------------------------------------------------

    def _on_member_message(self, member: Member, message: Beat | Audited | Leave) -> Verdict:
        match message:
            case Audited():
                told = (mode.on_message(member.peer, message) for mode in self.core.modes)
                return next((each for each in told if each is not None), Verdict.STALE)
            case Beat():
                return self._on_beat(member, message)
            case Leave():
                self.sessions.lose(member, DepartureCause.of(message.cause), message.cause.told)
                self.lease_desk.reclaim()
                return Verdict.ACCEPTED

    def _on_beat(self, member: Member, beat: Beat) -> Verdict:
        if [each.fragment for each in beat.fragments] != list(member.standings):
            return Verdict.MALFORMED
        if any(each.digest and len(each.digest) != HASH_BYTES for each in beat.fragments):
            return Verdict.MALFORMED
        if self.core.members.ways.hears(member.contact, beat, self.core.now):
            self.routes.follow()
            self._unsettled.update(each.fragment for each in self.drivers)  # others may own, or begin
        refusal = self.tick_builder.on_beat(member, beat)
        if refusal is not None:
            self.core.tell(member, Gone, reason=refusal, final=True)
            self.sessions.lose(member, DepartureCause.MISFIT, refusal)
        return Verdict.ACCEPTED

    def _on_forgery(self, key: bytes) -> list[Effect]:
        """It spoke in the name of another member.  The key that its connection proved says who that was."""
        forger = next((m for m in self.core.members.alive.values() if m.contact.key == key), None)
        if forger is not None:
            self.core.strike(forger.peer, "it spoke in the name of another member")
            self.core.follow_up()
        return self.core.take_effects()

    # ---- what follows from any event -------------------------------------------------------------------

    def _settle(self, drivers: list[RoundDriver]) -> None:
        """Move the rounds on, settle new versions' digests, and tell everybody at once what that changes."""
        for answer in self.core.questions.take_answers():
            if not any(mode.on_answer(answer) for mode in self.core.modes):
                any(driver.agreement.on_answer(answer) for driver in self.drivers)
        self.core.follow_up()
        for driver in drivers:
            driver.advance()
        if self._commit_stages():
            drivers = self.drivers
        if any([driver.settle_digest() | driver.asks_anew() for driver in drivers]):
            self.tick_builder.recheck_all()
        if any([mode.on_turn() for mode in self.core.modes]):
            self.tick_builder.recheck_all()
        if self.core.members.ways.waits_for_gap:
            self.routes.follow()
        for driver in [each for each in drivers if each.round is None]:
            driver.maybe_open()
            driver.advance()
        self.core.follow_up()
        alive = self.core.members.alive
        for peer, fields in self.core.questions.due(set(alive), self.core.now):
            self.core.tell(alive[peer], Show, **fields)

    def _commit_stages(self) -> bool:
        """One record moves all stages of a model to the next version (P13).  True: it is written."""
        if len(self.drivers) == 1 or not all(each.prepared for each in self.drivers):
            return False
        for driver in self.drivers:
            driver.advance()  # somebody of another stage may have gone since
        found = [
            (each, each.round, each.prepared)
            for each in self.drivers
            if each.round is not None and each.prepared is not None
        ]
        if len(found) < len(self.drivers):
            return False
        dones = self.drivers[0].policy.finished([done for _, _, done in found])
        rounds = tuple(
            each.record(flight, done) for (each, flight, _), done in zip(found, dones, strict=True)
        )
        self.core.write(CommittedBatch(rounds=rounds))
        for (each, flight, done), record in zip(found, rounds, strict=True):
            each.on_committed(flight, record, done.late)
        return True


def _what_counts(member: Member) -> object:
    """All of a member by which a round may open, or a digest be settled."""
    beat = member.beat
    of_modes = beat and [each for each in beat.sections if each.counts]
    said = beat and (beat.fragments, beat.phase == Phase.STUCK, beat.leaving, of_modes)
    return (
        said,
        member.alive,
        [(each.verified, each.vouched, each.quarantined) for each in member.standings.values()],
    )


def _gone(session: bytes, reason: str) -> Gone:
    return Gone(session=session, seq=1, reason=reason, final=False)
