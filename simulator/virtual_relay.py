"""The ways between peers of a simulated world of whom neither can dial the other: relays, and past their routers.

Used by the world.  Frames of pairs that the relay was told pass it, while it lives.  It also dies, for a moment or for
long, and comes back; or it lies.  All that it can do to ciphertext is to hold it back, for good, and to change, repeat
or leave out bytes: then both ends hang up at once, what was on its way is lost, and they meet again a moment later, as
in life (tests/collectives/test_relay_way.py).  The routers are shown every tick that a peer hears, and do what its line
does in life: show from where it is seen, and connect at instants.  What they made may break, and does where one of the
two roams: its address changes.  A hard router, which has another port for each connection, lets nobody through.  Both
have a chance of their own, so that worlds without them are what they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from farflung.coordinator.modes import registry
from farflung.coordinator.roster.ways import DOORS, RelayNow, Trial, Usage, pair_of
from farflung.coordinator.run.effects import Effect, HandEffect
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol.messages import Tick
from farflung.protocol.mode_words import MEET_EVERY_S, MEET_TRIES, ReachTick, RelayOffer
from farflung.protocol.round_words import RelayRoute, section
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario

PORT = 7
BYTES_PER_S = 1e6
BACK_WITHIN_S = 3.0  # a shorter death the machine does not hear of, as in life
LIVES_S, DEAD_S = (0.5, 4.0), (0.2, 6.0)
SPOILS, MEETS_AGAIN_S = 0.05, (0.1, 1.5)  # share of frames of which it changes something


@dataclass
class VirtualRelay:
    scenario: Scenario
    seed: int
    withheld: frozenset[str] = frozenset()  # the first two that come, of whom it passes nothing to each other
    pairs: frozenset[bytes] = frozenset()
    passed: int = 0  # frames
    refused: int = 0
    deaths: int = 0
    spoiled: int = 0
    held: int = 0  # back
    _apart_until_s: dict[bytes, float] = field(default_factory=dict)  # by pair
    _dead_from_s: float = field(init=False)
    _dead_until_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(f"relay {self.seed}")
        self._dead_from_s = self._random.uniform(*LIVES_S)
        self._dead_until_s = self._dead_from_s + self._random.uniform(*DEAD_S)

    def is_dead(self, now: float) -> bool:
        if self.scenario.relay != "dies" or now >= self.scenario.faults_until_s:
            return False
        if now >= self._dead_until_s:
            self.deaths += 1
            self._dead_from_s = now + self._random.uniform(*LIVES_S)
            self._dead_until_s = self._dead_from_s + self._random.uniform(*DEAD_S)
        return now >= self._dead_from_s

    def on_tick(self, machine: RunMachine, now: float) -> list[Effect]:
        if not self.scenario.relay:
            return []
        _can_sign(machine)
        gone = self.is_dead(now) and now - self._dead_from_s >= BACK_WITHIN_S
        relay = None if gone else RelayNow(PORT, BYTES_PER_S)
        heard: list[Effect] = machine.modes["reach"].on_relay(
            relay, "it is dead" if gone else "", Usage(), now
        )
        return heard

    def carries(self, one: VirtualPeer | None, other: VirtualPeer | None, now: float) -> bool:
        """A frame from one to the other."""
        if not self.scenario.relay or one is None or other is None:
            return False
        pair = pair_of(one.me.key, other.me.key)
        if pair not in self.pairs or self.is_dead(now):
            self.refused += 1
            return False
        if self._lies(pair, frozenset((one.me.peer, other.me.peer)), now):
            return False
        self.passed += 1
        return True

    def _lies(self, pair: bytes, peers: frozenset[str], now: float) -> bool:
        """This frame does not come through, and what follows for a while."""
        if self.scenario.relay == "withholds":
            self.withheld = self.withheld or peers
            holds = peers == self.withheld
            self.held += holds
            return holds
        if self.scenario.relay != "lies" or now >= self.scenario.faults_until_s:
            return False
        if now < self._apart_until_s.get(pair, 0.0):
            return True
        if self._random.random() >= SPOILS:
            return False
        self.spoiled += 1
        self._apart_until_s[pair] = now + self._random.uniform(*MEETS_AGAIN_S)
        return True


def _can_sign(machine: RunMachine) -> None:
    """Tickets need a key of some kind, which nobody checks here; a run that amends its terms has a true one."""
    if not machine.core.prove(b""):
        machine.core.prove = lambda statement: bytes(96)


# ---- relays that peers offer -----------------------------------------------------------------------------------------


TRIED_S = 0.5
OFFERED_PORT = 7000
PASSES = 0.2  # of frames, at a relay that drops them: trials always

After = Callable[[float, Callable[[], None]], None]
CarryOut = Callable[[RunMachine, list[Effect]], None]


@dataclass
class _ShownPeer:
    """What one peer was told in this session."""

    session: bytes
    number: int = 0
    pairs: frozenset[bytes] = frozenset()  # that its own relay is for
    ways: dict[str, RelayRoute] = field(default_factory=dict)


@dataclass
class VirtualOffers:
    """Each of those who can be dialled offers a relay.  Its first one may drop what passes it, or die and come back."""

    scenario: Scenario
    seed: int
    peers: Mapping[str, VirtualPeer]
    after: After
    carry_out: CarryOut
    passed: int = 0
    dropped: int = 0
    tried: int = 0
    _known: dict[str, _ShownPeer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(f"offers {self.seed}")

    def of(self, peer: VirtualPeer) -> _ShownPeer:
        name, session = peer.me.peer, peer.member.reports.session
        if name not in self._known or self._known[name].session != session:
            self._known[name] = _ShownPeer(session)
        return self._known[name]

    def hears(self, peer: VirtualPeer, tick: object) -> None:
        if not self.scenario.offered or not isinstance(tick, Tick):
            return
        known = self.of(peer)
        if tick.roster is not None:
            known.ways = {way.peer: way for way in tick.ways if way.host}
        order = _told(tick).relay
        if order is not None:
            known.number, known.pairs = order.number, frozenset(order.pairs)

    def tell(self, peer: VirtualPeer, now: float) -> None:
        """The shell tells it, as at every tick of an agent."""
        if not self.scenario.offered:
            return
        vitals, known = peer.member.reports.vitals, self.of(peer)
        if peer.address:
            port = 0 if self._is_dead(peer, now) else OFFERED_PORT
            vitals.reach = replace(vitals.reach, relay=RelayOffer(port, 1_000_000, known.number))
        unmet = tuple(
            name
            for name, way in sorted(known.ways.items())
            if not self._stands(peer, self.peers.get(name), way)
        )
        vitals.reach = replace(vitals.reach, unmet=unmet)

    def try_relay(self, machine: RunMachine, trial: Trial, now: float) -> None:
        self.tried += 1
        host = self.peers.get(trial.peer)
        stands = host is not None and host.alive and host.me.key == trial.key and not self._is_dead(host, now)
        why_not = "" if stands else "nobody answers there"
        self.after(
            TRIED_S,
            lambda: self.carry_out(
                machine, machine.modes["reach"].on_relay_tried(trial, why_not, now + TRIED_S)
            ),
        )

    def carries(self, one: VirtualPeer | None, other: VirtualPeer | None, now: float) -> bool:
        if one is None or other is None or other.me.peer not in self.of(one).ways:
            return False
        way = self.of(one).ways[other.me.peer]
        if not self._stands(one, other, way) or self._is_dead(self._host_of(way), now):
            return False
        if self._drops(self._host_of(way), now) and self._random.random() > PASSES:
            self.dropped += 1
            return False
        self.passed += 1
        return True

    def _stands(self, one: VirtualPeer, other: VirtualPeer | None, way: RelayRoute) -> bool:
        """Both were sent to one relay, and it lets this pair in."""
        host = self._host_of(way)
        if other is None or host is None or not host.alive:
            return False
        theirs = self.of(other).ways.get(one.me.peer)
        is_theirs = theirs is not None and theirs.host == way.host
        return is_theirs and pair_of(one.me.key, other.me.key) in self.of(host).pairs

    def _host_of(self, way: RelayRoute) -> VirtualPeer | None:
        return next((p for p in self.peers.values() if p.address.rpartition(":")[0] == way.host), None)

    def _is_first(self, peer: VirtualPeer | None) -> bool:
        return peer is next((each for each in self.peers.values() if each.address), None)

    def _is_dead(self, peer: VirtualPeer | None, now: float) -> bool:
        dies = self.scenario.offered == "dies" and now < self.scenario.faults_until_s
        return dies and self._is_first(peer) and int(now) % 4 >= 2

    def _drops(self, peer: VirtualPeer | None, now: float) -> bool:
        """For good: no faults that end, but somebody's will."""
        return self.scenario.offered == "drops" and self._is_first(peer)


# ---- routers ---------------------------------------------------------------------------------------------------------


SUCCEEDS = 0.6  # of tries, past routers that let them through
STANDS_S = 6.0  # on average, while there are faults
CONNECTS_S = 0.05
OUTSIDE_PORT = 40000

# (of which session, over which socket, from where)
Look = Callable[[bytes, str, str], None]


@dataclass
class VirtualRouters:
    scenario: Scenario
    seed: int
    peers: Mapping[str, VirtualPeer]
    after: After
    look: Look
    first: str  # of the peers
    connected: int = 0
    passed: int = 0  # frames
    newest_at: float = 0.0  # when the newest of them was made
    missed: int = 0  # tries at an address that one of the two has no more
    # By processes: until when, and from where to where.
    _standing: dict[frozenset[bytes], tuple[float, frozenset[str]]] = field(default_factory=dict)
    _homes: dict[str, int] = field(default_factory=dict)
    _shown: dict[bytes, str] = field(default_factory=dict)  # by process: where the coordinator saw it last
    _tried: set[tuple[frozenset[bytes], float]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(f"routers {self.seed}")

    def is_hard(self, peer: VirtualPeer) -> bool:
        """One of them, in a world where there are both sorts."""
        return self.scenario.routers == "mixed" and peer.me.peer == self.first

    def hears(self, peer: VirtualPeer, tick: object, now: float) -> None:
        if not self.scenario.routers or not isinstance(tick, Tick):
            return
        told = _told(tick)
        if told.look:
            host = self._host(peer, now)
            for number, door in enumerate(DOORS):
                port = OUTSIDE_PORT + (number if self.is_hard(peer) else 0)
                self.after(CONNECTS_S, partial(self._show, peer, door, f"{host}:{port}"))
        for meet in told.meets:
            other = self.peers.get(meet.peer)
            if other is not None:
                self._meet(peer, other, meet.at_s, now)

    def _host(self, peer: VirtualPeer, now: float) -> str:
        """Where its router is seen: the same for ever, or another one after a while where peers roam."""
        home = self._homes.setdefault(peer.me.peer, len(self._homes) + 1)
        return f"9.0.{self._moves(peer, now)}.{home}"

    def _moves(self, peer: VirtualPeer, now: float) -> int:
        """How often it has another address by now."""
        if not self.scenario.roams_every_s:
            return 0
        home = self._homes.setdefault(peer.me.peer, len(self._homes) + 1)
        at_s = min(now, self.scenario.faults_until_s) + home  # not all of them at once
        return int(at_s / self.scenario.roams_every_s)

    def _show(self, peer: VirtualPeer, door: str, endpoint: str) -> None:
        if peer.alive:
            self._shown[peer.me.process] = endpoint.rpartition(":")[0]
            self.look(peer.me.key, door, endpoint)

    def _meet(self, one: VirtualPeer, other: VirtualPeer, at_s: float, now: float) -> None:
        """Both have the same instant from the coordinator: what comes of it is drawn once."""
        pair = _sessions(one, other)
        if (pair, at_s) in self._tried:
            return
        self._tried.add((pair, at_s))
        if any(self._shown.get(each.me.process) != self._host(each, now) for each in (one, other)):
            self.missed += 1  # whoever it was shown to knows an address that is not its own any more
            return
        if self.is_hard(one) or self.is_hard(other):
            raise AssertionError("somebody is to meet others past a hard router")
        for number in range(MEET_TRIES):
            if self._random.random() < SUCCEEDS:
                in_s = max(0.0, at_s - now) + number * MEET_EVERY_S + CONNECTS_S
                self.after(in_s, partial(self._connect, one, other, now + in_s))
                return

    def _connect(self, one: VirtualPeer, other: VirtualPeer, now: float) -> None:
        if one.alive and other.alive:
            self.connected, self.newest_at = self.connected + 1, now
            calm = now >= self.scenario.faults_until_s
            stands_s = float("inf") if calm else self._random.expovariate(1 / STANDS_S)
            self._standing[_sessions(one, other)] = now + stands_s, self._hosts(one, other, now)

    def stands(self, one: VirtualPeer, other: VirtualPeer, now: float) -> bool:
        until, hosts = self._standing.get(_sessions(one, other), (0.0, frozenset()))
        return one.alive and other.alive and now < until and hosts == self._hosts(one, other, now)

    def _hosts(self, one: VirtualPeer, other: VirtualPeer, now: float) -> frozenset[str]:
        return frozenset((self._host(one, now), self._host(other, now)))

    def tell(self, peer: VirtualPeer, now: float) -> None:
        """Its line tells it, as at every tick of an agent."""
        if not self._standing:
            return
        found = (
            name for name, other in self.peers.items() if other is not peer and self.stands(peer, other, now)
        )
        vitals = peer.member.reports.vitals
        vitals.reach = replace(vitals.reach, punched=tuple(sorted(found)))

    def carries(self, one: VirtualPeer | None, other: VirtualPeer | None, now: float) -> bool:
        """A frame from one to the other."""
        fits = bool(self._standing) and one is not None and other is not None and self.stands(one, other, now)
        self.passed += fits
        return fits


def _told(tick: Tick) -> ReachTick:
    return section(ReachTick, tick.sections) or ReachTick()


def _sessions(one: VirtualPeer, other: VirtualPeer) -> frozenset[bytes]:
    return frozenset((one.me.process, other.me.process))


# ---- all of them -----------------------------------------------------------------------------------------------------


class Between:
    """Whatever leads from one peer to another that neither can dial."""

    def __init__(self, relay: VirtualRelay, offers: VirtualOffers, routers: VirtualRouters) -> None:
        self.relay, self.offers, self.routers = relay, offers, routers

    def asked(self, machine: RunMachine, effect: HandEffect, now: float) -> None:
        asks: Any = registry.found("reach")
        assert isinstance(effect, asks.RelayPairs | asks.TryRelay)
        if isinstance(effect, asks.RelayPairs):
            self.relay.pairs = frozenset(effect.pairs)
        else:
            self.offers.try_relay(machine, effect.trial, now)

    def hears(self, peer: VirtualPeer, tick: object, now: float) -> None:
        self.routers.hears(peer, tick, now)
        self.offers.hears(peer, tick)

    def tell(self, peer: VirtualPeer, now: float) -> None:
        self.routers.tell(peer, now)
        self.offers.tell(peer, now)

    def on_tick(self, machine: RunMachine, now: float) -> list[Effect]:
        if self.relay.scenario.offered:
            _can_sign(machine)
        return self.relay.on_tick(machine, now)

    def carries(self, one: VirtualPeer | None, other: VirtualPeer | None, now: float) -> bool:
        return any(way.carries(one, other, now) for way in (self.routers, self.relay, self.offers))
