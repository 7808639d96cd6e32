"""Lines to the coordinator that are cut for long; its disk, which is lost; and the host, who says at last that the run
shall go back, or changes its terms while it goes on.

Used by the simulated world.  The peers behind a cut line live on, with all that they hold; seen from the coordinator
they are as good as dead, and a stranger that gets through may be all that it sees.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import (
    CommittedRound,
    DecidedOn,
    DigestFixed,
    Opened,
    Record,
    from_bytes,
    to_bytes,
)
from farflung.coordinator.ledger.run_store import RunRecords
from farflung.coordinator.modes import registry
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol.frames import FrameKind
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Amend, GoBack, Knock, Message
from farflung.protocol.mode_words import KeptReceipts
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import AUTO, LADDER, bits_per_value
from farflung.protocol.signing import curve_key_of
from farflung.simulator.invariants import Broken, Invariants, all_is_held
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario
from farflung.simulator.trainer import RUN_ID

HOST_LOOKS_EVERY_S = 2.0
BETWEEN_S = (1.0, 6.0)  # two amendments
NO_NEWS_S = 15.0  # the host waits so long for a newer version, or for somebody who holds the newest


@dataclass
class CutLines:
    scenario: Scenario
    behind: Collection[str] = ()  # peers that are cut off, while it lasts

    def is_cut(self, source: str, target: str, now: float) -> bool:
        """`source` or `target` is the coordinator."""
        begins = self.scenario.cut_off_at_s
        lasts = bool(self.behind) and begins <= now < begins + self.scenario.cut_off_s
        return lasts and (source in self.behind or target in self.behind)

    def is_behind(self, peer: str, now: float) -> bool:
        return self.is_cut(peer, "", now)


@dataclass
class HeldAtCut:
    """What living peers held of each fragment when the lines were cut: (version, the round that made it)."""

    commits: dict[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def by(peers: Iterable[VirtualPeer], seen: Invariants) -> HeldAtCut:
        newest: dict[int, int] = {}
        for peer in peers:
            if peer.member.part is not None and peer.member.reports.era == len(seen.eras) - 1:
                for number, replica in peer.member.part.replicas.items():
                    newest[number] = max(newest.get(number, 0), replica.held.version)
        commits = {
            key: each.round_no for key, each in seen.commits.items() if key[1] <= newest.get(key[0], 0)
        }
        return HeldAtCut(commits)

    def lost(self, seen: Invariants) -> list[tuple[int, int]]:
        """Versions that are not what they were."""
        now = seen.commits
        return [key for key, made in self.commits.items() if key not in now or now[key].round_no != made]


class OrdersOfHost:
    """Looks at the run now and then, and says rewind when nobody living holds the newest version."""

    def __init__(self, scenario: Scenario) -> None:
        self._from_s = scenario.faults_until_s + scenario.host_after_s if scenario.host_after_s else None
        self._seen: object = None
        self._since = 0.0

    def order(self, machine: RunMachine, peers: Iterable[VirtualPeer], now: float) -> GoBack | None:
        ledger = machine.core.ledger
        seen = (ledger.eras.number, [book.version for book in ledger.books])
        lost = ledger.learned and not machine.core.finished and not all_is_held(ledger, peers)
        if not lost or seen != self._seen:
            self._seen, self._since = seen, now
        if self._from_s is None or now < self._from_s or now - self._since < NO_NEWS_S:
            return None
        self._since = now
        rollback = machine.modes["recovery"].rollback
        held, brought = rollback.settled_held(), rollback.shelves.brought
        there = [max([held[at], *brought(each)]) for at, each in enumerate(machine.drivers)]
        gone = max(there) <= 0 or min(there) < 0  # only founding anew makes a model of what is left of others
        if ledger.model is not None and ledger.model.stages:  # all of them go to one version
            gone = max(rollback.together(held)) <= 0
        return GoBack(to=0, sure=True) if gone else GoBack(sure=True)


class HostChanges:
    """The host signs what it changes.  Everybody who holds the newest version has followed the same amendments to get
    there: P1 would break otherwise, since the outer step is among what is changed.

    Draws from a seed of its own: what else happens in a world is as it was without it."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._draw = random.Random(f"amendments {seed}")
        self._left, self._rounds = scenario.amends, scenario.rounds
        self._signs = bool(scenario.amends or scenario.loses)
        self._rounds_most = scenario.rounds + 3
        self._key = Ed25519PrivateKey.from_private_bytes(self._draw.randbytes(32))
        self.public = self._key.public_key().public_bytes_raw()

    @property
    def pinned(self) -> bytes:
        """As the join URL would have it."""
        return curve_key_of(self.public) if self._signs else b""

    def prepare(self, machine: RunMachine) -> None:
        """A coordinator that starts has the key of the run."""
        if self._signs:
            machine.core.prove = lambda statement: self.public + self._key.sign(statement)

    def rounds(self, machine: RunMachine | None) -> int:
        """That the run has, as far as its host has said."""
        return self._rounds if machine is None else machine.core.terms.newest.run.rounds

    def begin(
        self,
        after: Callable[[float, Callable[[], object]], None],
        machine: Callable[[], RunMachine | None],
        obey: Callable[[RunMachine, Amend], None],
    ) -> None:
        """`after`: so many seconds; `machine`: that lives then."""

        def change() -> None:
            living = machine()
            if living is not None and (order := self._order(living)) is not None:
                obey(living, order)
            self.begin(after, machine, obey)

        if self._left:
            after(self._draw.uniform(*BETWEEN_S), change)

    def _order(self, machine: RunMachine) -> Amend | None:
        """To be obeyed now; None: nothing can be made of what was drawn."""
        self._left -= 1
        core = machine.core
        content = core.terms.newest.model_dump(mode="json")
        for section, key, value in self._drawn(content):
            content[section][key] = value
        try:
            wanted = Manifest.model_validate_json(json.dumps(content))
        except ValueError:
            return None
        later = self._draw.choice((None, None, 1, 2))
        newest = max(book.version for book in core.ledger.books)
        return Amend(manifest=wanted.model_dump_json().encode(), at=None if later is None else newest + later)

    def _drawn(self, content: dict[str, Any]) -> list[tuple[str, str, Any]]:
        draw = self._draw
        rounds = content["run"]["rounds"]
        exact = content["outer"]["step"] in ("adamw", "muon")
        choices: list[tuple[str, str, Any]] = [
            ("round", "sync_every", draw.choice((2, 3, 6, 8))),
            ("round", "codec", draw.choice(("fp32", "int8", "int4", "auto"))),
            ("round", "deadline_s", draw.choice((3.0, 9.0))),
            ("run", "max_peers", draw.choice((70, 80))),
            ("run", "rounds", min(self._rounds_most, rounds + draw.choice((-1, 1, 2)))),
            ("outer", "lr", draw.choice((0.02, 0.005) if exact else (0.3, 0.9))),
        ]
        if not exact and content["outer"]["step"] == "nesterov":
            choices.append(("outer", "momentum", draw.choice((0.0, 0.5, 0.8))))
        # The step in any case: who follows it late is seen by that.
        return [choices[5], *draw.sample(choices, draw.randint(1, 3))]

    def check_all_know(self, machine: RunMachine, here: Iterable[VirtualPeer]) -> None:
        """Of those who stayed to the end of the run."""
        terms = machine.core.terms
        for peer in here:
            joined = peer.member.joined
            if joined is None:
                continue
            mine, versions = joined.amending.terms, [replica.held.version for replica in joined.replicas]
            due = terms.number_at(max(versions) - 1)
            if mine.count < due or mine.amendments != terms.amendments[: mine.count]:
                raise Broken(
                    f"P1 is broken: {peer.peer} holds versions {versions} and follows {mine.count} amendments of "
                    f"{terms.count}, {due} hold there"
                )


class Hall(Protocol):
    """The simulated world, as a disk that is lost in it sees it."""

    now: float
    journal: list[bytes]

    @property
    def scenario(self) -> Scenario: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def invariants(self) -> Invariants: ...
    @property
    def peers(self) -> Mapping[str, VirtualPeer]: ...
    def after(self, delay_s: float, action: Callable[[], object]) -> None: ...
    def note(self, text: str) -> None: ...
    def answer(self, peer: str, message: Message) -> None: ...
    def start_coordinator(self, restored: bool = False) -> None: ...


class AsksPeersOfWorld(Protocol):
    """A coordinator that puts its run together again."""

    def on_door(self, caller: bytes, message: Knock | KeptReceipts, now: float) -> Message | None: ...
    def due(self, now: float) -> RunRecords | None: ...


class LostDisk:
    """Once in a run the coordinator dies, and all that lay beside its key with it, or an older state of that is what is
    left: right after a record of some round, before or after it has told some of the peers.  Then it is started
    with `--restored`, and puts the run together again out of what they keep: a mode, without which no disk is lost."""

    def __init__(self, world: Hall, changes: HostChanges, seed: int) -> None:
        self._world, self._changes, self._draw = world, changes, random.Random(f"lost disk {seed}")
        scenario = world.scenario
        self._mode = registry.found("restoring")
        self._kind = scenario.loses if self._mode is not None else ""
        self._at_version = self._draw.randint(1, max(1, scenario.rounds - 1))
        self._after_record = self._draw.choice(
            (CommittedRound, CommittedRound, Opened, DecidedOn, DigestFixed)
        )
        self._effects_left: int | None = None  # that it still carries out
        self._copied_at = self._draw.uniform(0.1, 0.9)
        self._lost = False
        self._restoring: AsksPeersOfWorld | None = None
        self.versions: tuple[int, ...] | None = None  # with which it came back

    def on_record(self, record: Record) -> None:
        version = self._world.invariants.version_of(0)
        is_it = isinstance(record, self._after_record) and version >= self._at_version
        if self._kind and self.versions is None and is_it and self._effects_left is None:
            self._effects_left = self._draw.randint(0, 8)

    def is_now(self) -> bool:
        """Asked before each effect of the coordinator."""
        if self._effects_left is None or self._lost:
            return False
        self._effects_left -= 1
        self._lost = self._effects_left < 0
        return self._lost

    def start(self) -> None:
        """Of a coordinator that was killed."""
        world, mode = self._world, self._mode
        if mode is None or not self._lost or self.versions is not None:
            world.start_coordinator()
            return
        kept = len(world.journal) * self._copied_at if self._kind == "copy" else 0
        world.journal = world.journal[: int(kept)]
        world.note(f"its disk is lost: {len(world.journal)} records are left")
        copy, nonce = self._records() if world.journal else None, self._draw.randbytes(32)
        self._restoring = mode.asking(world.manifest, self._changes.public, copy, nonce, world.now)
        self._look()

    def on_door(self, source: str, message: object) -> None:
        if self._restoring is None or not isinstance(message, Knock | KeptReceipts):
            return
        answer = self._restoring.on_door(source.encode(), message, self._world.now)
        if answer is not None:
            self._world.answer(source, answer)

    def _look(self) -> None:
        machine, world = self._restoring, self._world
        found = machine.due(world.now) if machine is not None else None
        if found is None:
            world.after(0.4, self._look)
            return
        self._restoring = None
        if found.run_id != RUN_ID or found.manifest.digest != world.manifest.digest:
            raise Broken("P21 is broken: it was put together as another run")
        world.journal += [to_bytes(record) for record in found.records]
        ledger = self._records().ledger
        self.versions = tuple(book.version for book in ledger.books)
        world.note(f"restored at {self.versions}: {ledger.parts['restoring'].restored_because}")
        self._nothing_is_lost(ledger)
        world.invariants.on_restored(self.versions)
        world.start_coordinator(restored=True)

    def _records(self) -> RunRecords:
        return RunRecords(RUN_ID, self._world.manifest, list(map(from_bytes, self._world.journal)))

    def _nothing_is_lost(self, ledger: Ledger) -> None:
        """That a living peer could prove: all of them had the time to show it."""
        order = ledger.parts["restoring"].link.order
        for peer in self._world.peers.values():
            newest = peer.machine.seeking.kept
            if peer.alive and not peer.exit_code and newest is not None and newest.order > order:
                if not self._world.scenario.kill_per_effect:  # else it may just have been started
                    raise Broken(f"P21 is broken: {peer.peer} keeps step {newest.number}, and it was lost")


# ---- departures --------------------------------------------------------------------------------------------
# Who goes in a simulated run, and comes back: peers that are asked to leave, and deaths close to each other.
#
# Called by the world. Deaths between two effects are the world's own, and few, since any party may be hit by
# them at any time; those here are so many that within one batch of a pipeline several seats of several stages
# go, and others sit down meanwhile. A run without them draws nothing here, so that its seed keeps its course.

AWAY_S = (0.5, 8.0)  # how long somebody who was asked to leave stays away
DEATHS_FROM_S = 3.0  # before that hardly anybody is there


class DepartureWorld(Protocol):
    """The simulated world, as those who go see it."""

    random: random.Random
    now: float

    @property
    def peers(self) -> Mapping[str, VirtualPeer]: ...
    @property
    def calm(self) -> bool: ...
    def after(self, delay_s: float, action: Callable[[], object]) -> None: ...
    def note(self, text: str) -> None: ...
    def start_again(self, peer: str) -> None: ...


# ---- deaths --------------------------------------------------------------------------------------------------------


def let_some_die(world: DepartureWorld, per_s: float, kill: Callable[[str], None]) -> None:
    """At random times; of a stage with a single seat nobody, since its sums would be gone and nobody could ask them."""
    if not per_s:
        return

    def strike() -> None:
        if world.calm:
            return
        seated = [peer for peer in world.peers.values() if peer.alive and not peer.exit_code and peer.seat]
        stages = [_stage_of(peer) for peer in seated]
        able = [peer for peer, stage in zip(seated, stages, strict=True) if stages.count(stage) > 1]
        if able:
            kill(world.random.choice(able).peer)
        world.after(world.random.expovariate(per_s), strike)

    world.after(DEATHS_FROM_S + world.random.expovariate(per_s), strike)


def _stage_of(peer: VirtualPeer) -> int:
    return peer.held[0].number if peer.held else -1


# ---- those who take their leave, as on Ctrl-C, and come back as new processes ----------------------------------------


def let_some_leave(world: DepartureWorld, per_s: float) -> None:
    """Once a virtual second."""
    for peer in list(world.peers.values()) if per_s else ():
        if peer.alive and not peer.exit_code and world.random.random() < per_s:
            ask_to_leave(world, peer, twice=world.random.random() < 0.3)
            _await_return(world, peer)


def ask_to_leave(world: DepartureWorld, peer: VirtualPeer, twice: bool = False) -> None:
    """In good order; a peer that is asked twice goes at once."""
    world.note(f"{peer.peer} is asked to leave{' twice' if twice else ''}")
    peer.carry_out(peer.member.take_leave("asked", world.now))
    if twice:
        peer.carry_out(peer.member.leave("asked"))


def _await_return(world: DepartureWorld, peer: VirtualPeer) -> None:
    def look() -> None:
        if not peer.alive or peer.exit_code == "finished" or world.peers.get(peer.peer) is not peer:
            return  # or it is back already: it was asked once more before it had gone
        if peer.exit_code:
            world.start_again(peer.peer)
        else:
            _await_return(world, peer)

    world.after(world.random.uniform(*AWAY_S), look)


# ---- slow line ---------------------------------------------------------------------------------------------
# A peer of the simulated world whose line is far slower than all others': its bulk passes one after the
# other.
#
# Read by the world, which asks how long a frame is on its way besides what the network does to it. The lines'
# rates are what the peers tell the coordinator, as if they had been measured; vectors of a dozen values are
# long enough here.

FAST_TIMES = 100.0  # faster are all other lines
# What takes its time.  State that others ask for does not: the real data plane sends no second copy of what waits.
CONTRIBUTED, RESULTS = {"CONTRIBUTION", "AHEAD"}, {"RESULT", "LOGGED"}


def of_slow_line(seed: int) -> Scenario:
    """The world of the seed, without checkpoints, in which each chunk of the first peer takes it most of a second."""
    drawn = Scenario.of(seed)
    return replace(
        drawn,
        peers=max(4, drawn.peers),
        chunks=max(3, drawn.chunks),
        rounds=8,
        min_peers=min(2, drawn.min_peers),
        codec=("fp32", "int8", "int4", "auto")[seed % 4],
        undialable=0,
        blackout_at_s=0.0,
        every_rounds=0,
        slow_line_s=(0.6, 0.8, 0.5)[seed % 3],
    )


def calm_slow_line(seed: int, **changes: object) -> Scenario:
    """The same where nothing else happens to anybody."""
    calm = dict.fromkeys(
        ("drop", "duplicate", "slow", "kill_per_effect", "cut_per_s", "trainer_crash_per_s", "leave_per_s"),
        0.0,
    )
    return replace(of_slow_line(seed), fragments=1, schedule="blocking", period_s=0.0, **(calm | changes))  # type: ignore[arg-type]


class SlowLine:
    def __init__(self, scenario: Scenario, peer: str, model: ModelSchema) -> None:
        self._takes_s, self.peer = scenario.slow_line_s, peer
        codec = LADDER[0] if scenario.codec == AUTO else scenario.codec
        self._chunk_bytes = model.chunk_elements * bits_per_value(codec) / 8
        self._free_at = {"up": 0.0, "down": 0.0}

    def prepare(self, machine: RunMachine) -> None:
        """Of a coordinator that begins."""
        if self._takes_s:
            for driver in machine.drivers:
                cast(Any, driver.lines).least_bytes = 0.0  # of EarlyUploads, where the mode is there

    def up_bytes_per_s(self, peer: str, otherwise: Callable[[], int]) -> int:
        """What a peer tells of its line."""
        drawn = otherwise()  # what else is drawn must not change
        if not self._takes_s:
            return drawn
        slow = self._chunk_bytes / self._takes_s
        return math.ceil(slow if peer == self.peer else FAST_TIMES * slow)

    def waits_s(self, source: str, target: str, kind: FrameKind, now: float) -> float:
        """How long this frame takes until it is through."""
        kinds = CONTRIBUTED if source == self.peer else RESULTS
        if not self._takes_s or self.peer not in (source, target) or kind.name not in kinds:
            return 0.0
        # What comes in is a quarter of the time on its way: home lines are faster that way.
        way, takes_s = ("up", self._takes_s) if source == self.peer else ("down", self._takes_s / 4)
        self._free_at[way] = max(now, self._free_at[way]) + takes_s
        return self._free_at[way] - now
