"""What every link promises (link.py): over ZeroMQ and lean connections on loopback, and within one process.

A transport that is new gets a `Net` of its own and must pass all of it.
"""

from __future__ import annotations

import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Protocol

import pytest
import zmq

from farflung.collectives.link.frame_queue import ANSWERS_WAITING
from farflung.collectives.link.link import Link
from farflung.collectives.link.peer_connections import ConnectionKind
from farflung.collectives.link.zmq_link import LinkSettings, ZmqLink
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, Spoiled, with_payload
from farflung.protocol.process.sockets import CLIENT, Keys, Socket, curve_client, curve_raw, opened
from farflung.protocol.round_words import Contact
from rig.crossing_kinds import KINDS, SomeCrossing
from rig.memory_link import MemoryLink, Wire
from rig.waiting import PATIENCE_S, Patience

RUN = b"run-tag!"
PAYLOAD_MAX = 100_000
LATER_S = 30.0  # whoever can't be reached is named by then
AT_ONCE_S = 30  # far more than any number of calls below takes, if none of them waits for anybody


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Net(Protocol):
    """One kind of link, and what may happen to it."""

    def key(self) -> Keys:
        """(as the others know it, its secret)"""
        ...

    def link(self, keys: Keys, clock: Clock) -> Link: ...

    def knock(self, keys: Keys, contact: Contact, frames: list[tuple[bytes, ...]]) -> None:
        """Somebody with these keys sends parts as it likes."""
        ...

    def stands(self, one: End, other: End) -> bool:
        """Whether what `one` sends to `other` goes the way that is to be tested."""
        ...

    def close(self) -> None: ...


class ZmqNet:
    lean = False

    def __init__(self) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.callers: list[Socket] = []  # one that nobody holds would be closed

    def key(self) -> Keys:
        public, secret = zmq.curve_keypair()
        return curve_raw(public), secret

    def link(self, keys: Keys, clock: Clock) -> Link:
        return ZmqLink((zmq.curve_public(keys[1]), keys[1]), LinkSettings(clock=clock, lean=self.lean))

    def knock(self, keys: Keys, contact: Contact, frames: list[tuple[bytes, ...]]) -> None:
        curve = curve_client((zmq.curve_public(keys[1]), keys[1]), contact.key)
        caller = opened(self.context, zmq.DEALER, CLIENT, curve)
        self.callers.append(caller)
        caller.connect(f"tcp://{contact.address}")
        for parts in frames:
            caller.send_multipart(parts)

    def stands(self, one: End, other: End) -> bool:
        return True

    def close(self) -> None:
        self.context.destroy(linger=0)


class LeanNet(ZmqNet):
    """Frames go over lean connections; they stand beside those of ZeroMQ, over which strangers knock as well."""

    lean = True

    def stands(self, one: End, other: End) -> bool:
        assert isinstance(one.link, ZmqLink)
        line = one.link.lines.get(other.name)
        if line is None or other.name == one.name:
            return True
        return any(
            each.up for each in (line.over(ConnectionKind.LEAN) if line.contact.address else line.accepted)
        )


class MemoryNet:
    def __init__(self) -> None:
        self.wire, self.keys = Wire(), 0

    def key(self) -> Keys:
        self.keys += 1
        return self.keys.to_bytes(32), b""

    def link(self, keys: Keys, clock: Clock) -> Link:
        return MemoryLink(self.wire, keys[0], clock)

    def knock(self, keys: Keys, contact: Contact, frames: list[tuple[bytes, ...]]) -> None:
        for parts in frames:
            assert self.wire.listening[contact.address].deliver(keys[0], *parts)

    def stands(self, one: End, other: End) -> bool:
        return True

    def close(self) -> None:
        pass


@dataclass
class End:
    """One peer: a link, and what it gave away."""

    name: str
    link: Link
    contact: Contact
    keys: Keys
    clock: Clock
    got: list[tuple[str, Frame]] = field(default_factory=list)
    spoiled: list[tuple[str, Spoiled]] = field(default_factory=list)

    def take(self) -> None:
        for sender, came in self.link.receive():
            if isinstance(came, Spoiled):
                self.spoiled.append((sender, came))
            else:
                self.got.append((sender, Frame(came.header, bytes(came.payload))))

    def turn(self) -> None:
        self.take()
        self.link.flush()
        self.link.on_tick()

    def verdicts(self) -> dict[str, int]:
        return {name: count for name, count in self.link.counts.verdicts.as_dict().items() if count}

    @property
    def payloads(self) -> list[bytes]:
        return [bytes(frame.payload) for _, frame in self.got]


@dataclass
class Town:
    net: Net
    ends: list[End] = field(default_factory=list)

    def settle(self, name: str, dialable: bool = True, keys: Keys | None = None) -> End:
        keys, clock = keys or self.net.key(), Clock()
        link = self.net.link(keys, clock)
        link.expect(name, RUN, PAYLOAD_MAX)
        address = f"127.0.0.1:{link.listen('127.0.0.1', 0)}" if dialable else ""
        end = End(name, link, Contact(name, name, keys[0], address), keys, clock)
        self.ends.append(end)
        return end

    def meet(self, *ends: End) -> None:
        for end in ends:
            end.link.set_contacts([each.contact for each in ends])
        self.until(lambda: all(self.net.stands(a, b) for a in ends for b in ends), "they are joined", *ends)

    def until(self, wanted: Callable[[], bool], what: str, *ends: End) -> None:
        """Turns of their owners' loops, as the agent's: nobody looks at a link that says it has nothing to do."""
        patience, ends = Patience(), ends or tuple(self.ends)
        while not wanted():
            assert not patience.is_over, f"not within {PATIENCE_S:g} s: {what}"
            ready(ends, 0.02)
            for end in ends:
                end.turn()

    def quiet(self, *ends: End) -> None:
        """Nothing waits any more, and greetings are over."""
        since = Patience(0.3)
        while not since.is_over:
            self.until(lambda: not any(end.link.waiting_bytes() for end in ends), "all has left", *ends)
            before = [end.link.counts.arrived_bytes for end in ends]
            ready(ends, 0.02)
            for end in ends:
                end.turn()
            if before != [end.link.counts.arrived_bytes for end in ends]:
                since = Patience(0.3)


def ready(ends: tuple[End, ...], wait_s: float) -> int:
    poller = zmq.Poller()
    for end in ends:
        for each, events in end.link.sockets():
            assert events and each.fileno() >= 0
            poller.register(each, events)
    idle_s = min(end.link.idle_s() for end in ends)
    assert idle_s >= 0
    return len(poller.poll(round(1000 * min(wait_s, idle_s))))


def frame(payload: bytes = b"payload", round_no: int = 1, chunk: int = 2, run: bytes = RUN) -> Frame:
    return with_payload(Header(Kind.CONTRIBUTION, run, round_no=round_no, chunk=chunk), payload)


def answer(version: int) -> Frame:
    return Frame(Header(Kind.MISSING, RUN, version=version))


@pytest.fixture(params=[ZmqNet, LeanNet, MemoryNet], ids=["zmq", "lean", "memory"])
def town(request: pytest.FixtureRequest) -> Iterator[Town]:
    made = Town(request.param())
    yield made
    for end in made.ends:
        end.link.close()
    made.net.close()


@pytest.fixture
def nothing_blocks() -> Iterator[None]:
    def too_long(number: int, at: FrameType | None) -> None:
        raise AssertionError(f"a call waits for somebody, and must not: {at}")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(AT_ONCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---- frames --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialable", [True, False])
def test_frames_arrive_whole_and_once_and_with_their_sender(town: Town, dialable: bool) -> None:
    """Both ways, more than is on the way at once, also where only one side can be dialled."""
    ann, bob = town.settle("ann"), town.settle("bob", dialable)
    town.meet(ann, bob)
    to_bob = [frame(bytes([n]) * 50_000, chunk=n) for n in range(60)]
    to_ann = [frame(bytes([n]) * 7, chunk=n) for n in range(60)]
    for there, back in zip(to_bob, to_ann, strict=True):
        assert ann.link.send("bob", there) and bob.link.send("ann", back)
    town.until(lambda: len(bob.got) >= 60 and len(ann.got) >= 60, "all are there")
    town.quiet(ann, bob)
    for end, sender, sent in ((bob, "ann", to_bob), (ann, "bob", to_ann)):
        assert {name for name, _ in end.got} == {sender} and not end.spoiled
        by_chunk = sorted((each for _, each in end.got), key=lambda each: each.header.chunk)
        assert by_chunk == sent


def test_P8_each_frame_that_arrived_ends_in_one_counter(town: Town) -> None:
    bob, mal = town.settle("bob"), Contact("mal", "mal", b"", "")
    keys = town.net.key()
    bob.link.set_contacts([replace_key(mal, keys[0])])
    good, other = frame(), frame(run=b"another!")
    spoiled = Frame(replace(good.header, chunk=3), b"payloae")
    longer = Frame(replace(good.header, chunk=4), b"payload, longer")
    large = frame(bytes(PAYLOAD_MAX + 1), chunk=5)
    parts: list[tuple[bytes, ...]] = [
        (each.header.pack(), bytes(each.payload)) for each in (good, other, spoiled, longer, large)
    ]
    parts += [(b"no header", b"x"), (good.header.pack(),), (good.header.pack(), b"payload", b"more")]
    town.net.knock(keys, bob.contact, parts)
    town.until(lambda: bob.link.counts.arrived_frames == len(parts), "all have arrived", bob)
    assert [(sender, each) for sender, each in bob.got] == [("mal", good)]
    assert bob.verdicts() == {"unauthorised": 1, "bad hash": 1, "malformed": 4, "oversize": 1}
    assert sum(bob.verdicts().values()) + len(bob.got) == bob.link.counts.arrived_frames
    told = Counter((came.verdict, came.header.chunk if came.header else None) for _, came in bob.spoiled)
    assert {sender for sender, _ in bob.spoiled} == {"mal"}
    assert told == {
        (Verdict.UNAUTHORISED, None): 1, (Verdict.BAD_HASH, 3): 1, (Verdict.MALFORMED, 4): 1,
        (Verdict.OVERSIZE, 5): 1, (Verdict.MALFORMED, None): 3,
    }, "whoever asks again must know for what"  # fmt: skip


def test_P8_crossings_are_known_only_where_the_model_is_cut_into_stages(town: Town) -> None:
    ann, bob = town.settle("ann"), town.settle("bob")
    town.meet(ann, bob)
    crossing = with_payload(Header(SomeCrossing.ACTIVATION, RUN, version=3, chunk=4), b"activation")
    ann.link.send("bob", crossing)
    town.until(lambda: bool(bob.spoiled), "it is refused")
    assert not bob.got and bob.verdicts()["malformed"] == 1 and bob.spoiled[0][1].header is None
    for end in (ann, bob):
        end.link.expect(end.name, RUN, PAYLOAD_MAX, KINDS)
    ann.link.send("bob", crossing)
    town.until(lambda: bool(bob.got), "it is heard")
    assert bob.got == [("ann", crossing)] and bob.verdicts()["malformed"] == 1


def replace_key(contact: Contact, key: bytes) -> Contact:
    return Contact(contact.peer, contact.name, key, contact.address)


def test_P8_strangers_are_not_heard(town: Town) -> None:
    ann, bob = town.settle("ann"), town.settle("bob")
    bob.link.set_contacts([ann.contact])
    good = frame()
    parts = (good.header.pack(), bytes(good.payload))
    town.net.knock(town.net.key(), bob.contact, [parts, (b"x",), (parts[0], b"", b"", b"")])
    while not bob.link.counts.arrived_frames:
        assert ready((bob,), PATIENCE_S), "somebody knocks, and nobody is told"
        bob.take()
    came = bob.link.counts.arrived_frames  # or one of its connection, where that is not let in
    assert not bob.got and not bob.spoiled and bob.verdicts() == {"unauthorised": came}
    town.meet(ann, bob)
    ann.link.send("bob", good)
    town.until(lambda: bool(bob.got), "ann is heard")
    assert bob.got == [("ann", good)]


def test_P8_who_left_is_not_heard_and_nothing_is_kept_for_it(town: Town) -> None:
    ann, bob, cyd = town.settle("ann"), town.settle("bob"), town.settle("cyd")
    town.meet(ann, bob, cyd)
    ann.link.send("bob", frame())
    town.until(lambda: bool(bob.got), "bob hears ann")
    town.quiet(ann, bob, cyd)
    bob.link.limit(1.0, None)
    for n in range(20):
        bob.link.send("ann", frame(bytes(1000), chunk=n))
    assert bob.link.waiting_bytes() > 0 and bob.link.peers_waiting() == 1
    bob.link.set_contacts([bob.contact, cyd.contact])
    assert bob.link.peers_waiting() == 0 and not bob.link.send("ann", frame())

    def is_counted() -> bool:
        ann.link.send("bob", frame())  # the first may leave over a connection that bob has just closed
        return bob.verdicts().get("unauthorised", 0) > 0

    town.until(is_counted, "ann is counted")
    assert len(bob.got) == 1


def test_nobody_sends_to_a_stranger_or_to_itself(town: Town) -> None:
    ann, bob = town.settle("ann"), town.settle("bob")
    assert not ann.link.send("bob", frame()), "nobody is known yet"
    town.meet(ann, bob)
    before = ann.link.counts.sent_bytes
    assert not ann.link.send("ann", frame()) and not ann.link.send("cyd", frame())
    assert ann.link.counts.sent_bytes == before and ann.link.peers_waiting() == 0


# ---- changed contacts ----------------------------------------------------------------------------------------


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("same_key", [True, False])
def test_what_waits_follows_a_peer_to_its_new_address_and_not_to_another_key(
    town: Town, same_key: bool
) -> None:
    ann, bob = town.settle("ann"), town.settle("bob")
    key = bob.keys[0] if same_key else town.net.key()[0]
    ann.link.set_contacts([Contact("bob", "bob", key, free_address())])
    assert ann.link.send("bob", frame(b"before"))
    ann.turn()
    assert ann.link.waiting_bytes() > 0 and ann.link.peers_waiting() == 1
    town.meet(ann, bob)
    ann.link.send("bob", frame(b"after", chunk=3))
    wanted = {b"before", b"after"} if same_key else {b"after"}
    town.until(lambda: set(bob.payloads) == wanted, "what is to arrive")
    town.quiet(ann, bob)
    assert len(bob.got) == len(wanted)


def test_P3_who_cannot_be_reached_is_named_after_a_while_and_only_if_something_waits(town: Town) -> None:
    ann, bob, cyd = town.settle("ann"), town.settle("bob"), town.settle("cyd")
    ann.link.set_contacts([Contact("bob", "bob", bob.keys[0], free_address()), cyd.contact])
    cyd.link.set_contacts([ann.contact])
    ann.turn()
    ann.clock.now += LATER_S
    ann.turn()
    assert ann.link.unreached() == set(), "nothing waits"
    ann.link.send("bob", frame())
    ann.link.send("cyd", frame())
    assert ann.link.unreached() == set(), "it has only just begun to wait"
    town.until(lambda: bool(cyd.got), "cyd is there", ann, cyd)
    ann.clock.now += LATER_S
    ann.turn()
    assert ann.link.unreached() == {"bob"}


# ---- what waits ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_blocks")
def test_P8_a_peer_that_reads_nothing_holds_up_nobody_and_fills_no_memory(town: Town) -> None:
    ann, mal, cyd = town.settle("ann"), town.settle("mal"), town.settle("cyd")
    town.meet(ann, mal, cyd)
    ann.link.send("mal", frame(chunk=0))
    town.until(lambda: bool(mal.got), "they are connected")
    for number in range(20 * ANSWERS_WAITING):  # mal takes no more turns
        ann.link.send("mal", with_payload(Header(Kind.STATE, RUN, chunk=number), bytes(20_000)))
    for _ in range(100):
        ann.turn()
        ready((ann,), 0.0)
    assert 0 < ann.link.answers_waiting("mal") <= ANSWERS_WAITING
    assert ann.link.waiting_bytes() > 0 and ann.link.peers_waiting() == 1
    ann.link.send("cyd", frame(b"for cyd"))
    town.until(lambda: bool(cyd.got), "others are served", ann, cyd)
    assert ann.link.answers_waiting("cyd") == 0 and ann.link.waiting_bytes() > 0


@pytest.mark.usefixtures("nothing_blocks")
def test_nothing_waits_for_somebody_who_is_not_there(town: Town) -> None:
    ann = town.settle("ann")
    ann.link.set_contacts([Contact("bob", "bob", town.net.key()[0], free_address())])
    for number in range(500):
        assert ann.link.send("bob", frame(bytes(1000), chunk=number))
        ann.turn()
        ann.link.forget_rounds_before(1)
        ann.link.arriving(), ann.link.unreached(), ann.link.moved(), ann.link.probe()
        assert ann.link.probed_bytes_per_s() is None
    assert ann.link.peers_waiting() == 1 and ann.link.counts.sent_bytes == 0
    ann.link.close()
    ann.link.close()


def test_rounds_that_are_over_are_forgotten_and_answers_are_not(town: Town) -> None:
    ann, bob = town.settle("ann"), town.settle("bob")
    ann.link.set_contacts([Contact("bob", "bob", bob.keys[0], free_address())])
    for round_no in (1, 2, 3):
        ann.link.send("bob", frame(bytes([round_no]), round_no))
    ann.link.send("bob", answer(7))
    assert ann.link.answers_waiting("bob") == 1
    ann.link.forget_rounds_before(3)
    assert ann.link.answers_waiting("bob") == 1
    town.meet(ann, bob)
    town.until(lambda: len(bob.got) >= 2, "what is left arrives")
    town.quiet(ann, bob)
    assert sorted(each.header.round_no for _, each in bob.got) == [0, 3]
    assert ann.link.answers_waiting("bob") == 0 and ann.link.waiting_bytes() == 0


def test_what_waits_already_is_not_sent_twice(town: Town) -> None:
    ann, bob = town.settle("ann"), town.settle("bob")
    ann.link.set_contacts([Contact("bob", "bob", bob.keys[0], free_address())])
    for _ in range(3):
        assert ann.link.send("bob", frame()) and ann.link.send("bob", answer(7))
    assert ann.link.answers_waiting("bob") == 1
    town.meet(ann, bob)
    town.until(lambda: len(bob.got) >= 2, "they arrive")
    town.quiet(ann, bob)
    assert sorted(bob.payloads) == [b"", b"payload"] and ann.link.answers_waiting("bob") == 0


def test_crossings_go_before_bulk_which_keeps_a_quarter_and_words_go_first(town: Town) -> None:
    ann, bob = acquainted(town)
    ann.link.expect("ann", RUN, PAYLOAD_MAX, KINDS)
    bob.link.expect("bob", RUN, PAYLOAD_MAX, KINDS)
    ann.clock.now += 1e6
    ann.link.limit(50_000.0, None)
    bob.got.clear()
    ann.link.send("bob", frame(bytes(5000), chunk=99))  # what leaves next is still to be chosen
    for n in range(9):
        ann.link.send("bob", frame(bytes([n]) * 5000, chunk=n))
        ann.link.send("bob", with_payload(Header(SomeCrossing.GRADIENT, RUN, chunk=n), bytes([n]) * 5000))
    ann.link.send("bob", Frame(Header(SomeCrossing.ROOM, RUN, chunk=5)))
    ann.link.forget_rounds_before(1)
    while len(bob.got) < 20:
        count = len(bob.got) + 1
        town.until(lambda count=count: len(bob.got) >= count, "one is there")  # type: ignore[misc]
        ann.clock.now += 0.103
    letters = {Kind.CONTRIBUTION: "b", SomeCrossing.GRADIENT: "g", SomeCrossing.ROOM: "r"}
    assert (
        "".join(letters[each.header.kind] for _, each in bob.got) == "br" + "gb" + 2 * "gggb" + "gg" + 6 * "b"
    )
    sent = [each.header.chunk for _, each in bob.got if each.header.kind == SomeCrossing.GRADIENT]
    assert sent == list(range(9)), "of one kind, what came first"


# ---- limits and time -----------------------------------------------------------------------------------------


def acquainted(town: Town) -> tuple[End, End]:
    ann, bob = town.settle("ann"), town.settle("bob")
    town.meet(ann, bob)
    ann.link.send("bob", frame())
    bob.link.send("ann", frame())
    town.until(lambda: bool(ann.got) and bool(bob.got), "they know each other")
    town.quiet(ann, bob)
    return ann, bob


def test_P10_a_limited_upload_lets_a_frame_go_when_all_before_it_is_paid(town: Town) -> None:
    ann, bob = acquainted(town)
    ann.clock.now += 1e6
    ann.link.limit(1000.0, None)
    before = ann.link.counts.sent_bytes
    for n in range(3):
        ann.link.send("bob", frame(bytes([n]) * 5000, chunk=n))
    for _ in range(20):
        ann.turn()
    assert ann.link.counts.sent_bytes - before == 5096, "one goes, whatever its size; the others wait"
    assert 4.5 < ann.link.idle_s() <= 5.1 and ann.link.waiting_bytes() > 0
    ann.clock.now += 5.1
    ann.turn()
    assert ann.link.counts.sent_bytes - before == 2 * 5096
    ann.link.limit(None, None)
    town.until(lambda: len(bob.got) == 4, "the third is free")


def test_P10_a_limited_download_reads_no_more_than_is_paid(town: Town) -> None:
    ann, bob = acquainted(town)
    bob.clock.now += 1e6
    bob.link.limit(None, 1000.0)
    for n in range(3):
        ann.link.send("bob", frame(bytes([n]) * 5000, chunk=n))
    town.until(lambda: len(bob.got) == 2, "the first arrives")
    for _ in range(20):
        ann.turn()
        bob.turn()
    assert len(bob.got) == 2 and 0 < bob.link.idle_s() <= 5.1
    bob.clock.now += 5.1
    town.until(lambda: len(bob.got) == 3, "then the second")
    bob.clock.now += 5.1
    town.until(lambda: len(bob.got) == 4, "and the third")


def test_what_arrives_wakes_the_poller_and_is_news_of_its_sender(town: Town) -> None:
    ann, bob = acquainted(town)
    bob.link.arriving()
    assert not ready((bob,), 0.0), "all is quiet"
    ann.link.send("bob", frame(bytes(PAYLOAD_MAX)))
    ann.turn()
    patience = Patience()
    while len(bob.got) < 2:
        assert not patience.is_over and ready((bob,), PATIENCE_S), "a frame came, and nobody was told"
        bob.take()
    assert bob.link.counts.arrived_bytes >= PAYLOAD_MAX + 96
    town.until(lambda: bob.link.moved().received_bytes >= PAYLOAD_MAX, "it counts as received")
    town.until(lambda: bob.link.arriving() == {"ann"}, "ann is named", ann, bob)
    assert bob.link.arriving() == set() == ann.link.arriving()
    town.until(lambda: ann.link.moved().sent_bytes >= PAYLOAD_MAX, "it counts as sent", ann, bob)
