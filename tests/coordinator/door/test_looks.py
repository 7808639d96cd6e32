"""From where a member is seen: by the door and by the members' socket, and by nothing that it says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from farflung.collectives.link.zmq_link import ZmqLink
from farflung.compression.codec import check_payload, payload_bytes
from farflung.coordinator.door.front_door import FrontDoor
from farflung.coordinator.door.front_door_process import (
    FROM_DOOR,
    LOOKS_PER_S,
    TO_DOOR,
    DoorSettings,
    FromDoor,
    Saw,
)
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import Arrival, ListenOn
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.roster.ways import DOORS
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.server import JOURNAL_NAME, Server
from farflung.peer.line.control import BeatClock, Took
from farflung.peer.line.reachability import LOOKS_MOST, CoordinatorClock, Reaching
from farflung.peer.machine.effects import Effect, ToCoordinator
from farflung.peer.machine.handshake import Me, PeerConfig
from farflung.peer.machine.machine import PeerMachine
from farflung.protocol import messages
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Beat, Challenge, FragmentTick, Probe, Tick, Welcome
from farflung.protocol.mode_words import Meet, ReachTick
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.process.child import Channel, pair
from farflung.protocol.process.sockets import curve_raw
from rig.in_thread import InThread
from rig.waiting import eventually

LOOK = messages.encode(Probe(padding=b"", want=0, address="", key=b"", look=True))
TICK = Tick(
    session=bytes(16), seq=1, answers=1, heard_s=1.0, goal="wait", reason="", roster_no=1, roster=None, leases=None,
    void=(), era=0, advice="", era_because="", sections=(ReachTick(look=True),),
    fragments=(FragmentTick(0, 0, (), False, (), 0, False, 0),),
)  # fmt: skip


def meeting_at(at_s: float) -> Tick:
    return replace(TICK, sections=(ReachTick(meets=(Meet("bob", "9.9.9.9:4000", at_s),)),))


@pytest.fixture
def door() -> Iterator[tuple[FrontDoor, Channel[FromDoor]]]:
    ours, theirs = pair()
    _, secret = zmq.curve_keypair()
    manifest = Manifest().canonical()
    begin = DoorSettings(
        name="demo", run_id=bytes(16), manifest=manifest, secret=secret, host="127.0.0.1", port=0
    )
    opened = FrontDoor(begin, Channel(ours, TO_DOOR))
    yield opened, Channel(theirs, FROM_DOOR)
    opened.close()
    ours.close()
    theirs.close()


def saws(channel: Channel[FromDoor]) -> list[Saw]:
    found: list[Saw] = []
    while words := list(channel.receive()):
        found += [word for word in words if isinstance(word, Saw)]
    return found


def test_only_so_many_looks_are_passed_on(
    door: tuple[FrontDoor, Channel[FromDoor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, channel = door
    monkeypatch.setattr(front._listener, "comes_from", lambda arrival: "9.9.9.9:40000")
    for number in range(round(LOOKS_PER_S) + 50):
        key = number.to_bytes(32, "big")
        front._on_frame(Arrival(b"r", key, 99, LOOK, "127.0.0.1"), 0.0)
    assert len(saws(channel)) == LOOKS_PER_S
    front._on_frame(Arrival(b"r", bytes(32), 99, LOOK, "127.0.0.1"), 1.0)
    assert saws(channel) == [Saw(key=bytes(32), endpoint="9.9.9.9:40000")]


def test_a_connection_that_has_gone_is_nobodys(door: tuple[FrontDoor, Channel[FromDoor]]) -> None:
    front, channel = door
    front._on_frame(Arrival(b"r", bytes(32), 99, LOOK, "9.9.9.9"), 0.0)
    assert not saws(channel)


@dataclass
class Hall:
    server: Server
    url: JoinUrl

    @property
    def meetings(self) -> Any:
        return self.server._machine.core.members.ways.meetings


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    keys, manifest = load_or_create(tmp_path), Manifest()
    stop, ready = threading.Event(), threading.Event()
    found: list[Hall] = []

    def serve() -> None:
        with Journal.open_or_create(tmp_path / JOURNAL_NAME, manifest, lambda: bytes(16)) as journal:
            machine = RunMachine(manifest, journal.run_id, [], bytes)
            with Server(machine, journal, keys, ListenOn("127.0.0.1", 0), spawn=InThread) as server:
                url = JoinUrl("127.0.0.1", server.port, manifest.run.name, keys.public_raw)
                found.append(Hall(server, url))
                ready.set()
                server.run_until(stop.is_set)

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(20)
    yield found[0]
    stop.set()
    thread.join()


@pytest.mark.mode("reach")
def test_what_is_seen_is_the_connection_and_nothing_that_is_said(hall: Hall) -> None:
    """Both sockets see the port that all meetings leave from; a stranger to whom nobody is to look is not kept."""
    keys = zmq.curve_keypair()
    link, context = ZmqLink(keys), zmq.Context()
    line = SimpleNamespace(coordinator="127.0.0.1", link=link)
    reaching = Reaching(context, hall.url.key, keys, line)  # type: ignore[arg-type]
    key = curve_raw(keys[0])
    try:
        reaching.on_tick(TICK, 0.0)
        assert not reaching._shown, "it is not let in yet"
        hall.server._allowed.add(key)
        eventually(
            lambda: hall.server._machine.core.members.ways._alone is not None, "nobody is alone so far"
        )
        hall.meetings._pairs, hall.meetings.wanted = (
            hall.server._machine.core.members.ways._pairs,
            frozenset((key,)),
        )
        reaching.enter(hall.url.port, hall.server._members.port)
        reaching.on_tick(TICK, 0.0)
        reaching.on_tick(TICK, 0.1)
        assert len(reaching._shown) == 2, "told again, it does not begin again"
        port = link.meeting_port("0.0.0.0")
        eventually(lambda: len(hall.meetings._seen.get(key, {})) == 2, "both have seen it")
        assert hall.meetings._seen[key] == dict.fromkeys(DOORS, f"127.0.0.1:{port}")
        assert not reaching.turn(1.0)
        reaching.turn(60.0)
        assert len(reaching._shown) == 1, "the connection to the members' socket stays"
        hall.meetings._seen.clear()
        reaching.on_tick(TICK, 60.0)  # from the same port to the same sockets, at once
        eventually(lambda: len(hall.meetings._seen.get(key, {})) == 2, "it is seen again")
    finally:
        reaching.close()
        link.close()
        context.destroy(linger=0)


def test_who_is_not_seen_stops_showing_itself_and_who_was_seen_does_so_whenever_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[float] = []
    monkeypatch.setattr(Reaching, "_show_myself", lambda self, now: shown.append(now))
    line = SimpleNamespace(coordinator="127.0.0.1", link=SimpleNamespace())
    reaching = Reaching(zmq.Context.instance(), bytes(32), zmq.curve_keypair(), line)  # type: ignore[arg-type]
    reaching.enter(1, 2)
    for second in range(200):
        reaching.on_tick(TICK, float(second))
    assert len(shown) == LOOKS_MOST, "the coordinator can't see it"
    for again in range(3):
        reaching.on_tick(replace(TICK, sections=()), 300.0 + 100 * again)
        reaching.on_tick(TICK, 310.0 + 100 * again)
    assert shown[LOOKS_MOST:] == [310.0, 410.0, 510.0]


def test_an_instant_is_kept_as_it_was_first_understood() -> None:
    told: list[dict[str, Any]] = []
    link = SimpleNamespace(set_appointments=told.append, punched=frozenset)
    line = SimpleNamespace(coordinator="127.0.0.1", link=link)
    reaching = Reaching(zmq.Context.instance(), bytes(32), zmq.curve_keypair(), line)  # type: ignore[arg-type]
    tick = meeting_at(50.0)
    reaching.on_tick(tick, 0.0)
    assert told == [{}], "nothing is known of that clock"
    reaching.on_answer(Took(0.2, 40.1))  # said at 0, heard there at 40.1: its clock is 40 ahead
    reaching.on_tick(tick, 0.0)
    first = told[-1]["bob"]
    assert first.endpoint == "9.9.9.9:4000" and first.at == pytest.approx(10.0)
    reaching.on_answer(Took(0.02, 40.02))
    reaching.on_tick(tick, 0.0)
    assert told[-1]["bob"] == first, "or every tick would name other instants"
    reaching.on_tick(meeting_at(60.0), 0.0)
    assert told[-1]["bob"].at == pytest.approx(60.0 - 40.01)


def test_the_quickest_answer_tells_the_coordinators_clock_best() -> None:
    clock = CoordinatorClock()
    assert clock.here(5.0) is None
    for both_ways_s, there_s in ((2.0, 101.9), (0.1, 100.05), (0.5, 100.4)):
        clock.on_answer(Took(both_ways_s, there_s))
    assert clock.here(105.0) == pytest.approx(5.0)
    clock.forget()
    assert clock.here(105.0) is None


# ---- the first beat of a session waits for its connection ----------------------------------------------------------

WAY_S, HANDSHAKE_TAKES_S, AHEAD_S = 0.005, 0.06, 40.0


def let_in() -> tuple[PeerMachine, list[Effect]]:
    me = Me("hal", "hal", b"i" * 32, b"k" * 32, b"p" * 16, "test", lambda message: b"s" * 64)
    machine = PeerMachine(PeerConfig(me, "demo", check_payload, payload_bytes, helps=True), lambda: 0.5)
    machine.on_timer(0.0)
    model = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
    run = Manifest().canonical()
    asks = Challenge(nonce=bytes(32), run_id=bytes(16), manifest=run, protocol=PROTOCOL_VERSION, model=model)
    machine.on_door(asks, 0.0)
    machine.on_attach(model, "host:1", 0.0)
    welcome = Welcome(
        session=bytes(16), incarnation=1, member_port=4000, fragments=(0,), roster=(), whereabouts=b""
    )
    return machine, machine.on_door(welcome, 0.0)


def beats_in(effects: list[Effect]) -> list[Beat]:
    said = [each.message for each in effects if isinstance(each, ToCoordinator)]
    return [each for each in said if isinstance(each, Beat)]


def test_whoever_is_to_show_itself_knows_the_coordinators_clock_before_an_instant_is_named() -> None:
    """By one more beat, over the connection that stands by then."""
    beats, clock = BeatClock(), CoordinatorClock()
    machine, effects = let_in()
    now, takes_s = 0.0, HANDSHAKE_TAKES_S + WAY_S
    for seq in (1, 2):
        [beat] = beats_in(effects)
        beats.on_said(beat, now)
        there_s = now + takes_s + AHEAD_S
        now, takes_s = now + takes_s + WAY_S, WAY_S
        tick = replace(TICK, seq=seq, answers=beat.seq, heard_s=there_s)
        took = beats.on_heard(tick, now)
        assert took is not None
        clock.on_answer(took)
        effects = machine.on_control(tick, now)
    assert not beats_in(effects), "asked again, it says nothing more"
    assert clock.here(AHEAD_S + 1.0) == pytest.approx(1.0)
    machine.on_control(replace(TICK, seq=3, sections=()), now)
    assert beats_in(machine.on_control(replace(TICK, seq=4), now)), (
        "its address is doubted: another instant comes"
    )
