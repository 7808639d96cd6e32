"""What this peer does to be reached past its own router: it shows from which port it is seen, and keeps appointments.

Owned by the agent, which passes on each tick and gets back with whom a connection stands.  The coordinator decides who
meets whom, and when (coordinator/reach/hole_punching.py); the connections themselves are the link's.

It shows itself at two sockets of the coordinator, the door and the members', from the port that all its meetings leave
from and with the key of its session: a router that makes two ports of that one is of no use for meeting.  The second of
these connections stays, so that the router keeps the port open.

An instant comes on the coordinator's clock.  What that says here follows from beats and their answers, as with NTP: of
the quickest answer it is known best when it was heard there.  Must not know rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from farflung.collectives.link.link import Appointment
from farflung.peer.line.control import Took
from farflung.peer.line.data_line import DataLine
from farflung.protocol import messages
from farflung.protocol.messages import Message, Probe, Tick
from farflung.protocol.mode_words import Look, Meet, ReachTick, RelayOffer
from farflung.protocol.process.log_lines import LineWriter
from farflung.protocol.process.sockets import (
    STRANGER,
    Keys,
    Options,
    Socket,
    curve_client,
    end_abruptly,
    opened,
)
from farflung.protocol.round_words import section

ANSWERS_KEPT = 32
LOOK_AGAIN_S, LOOKS_MOST = 5.0, 8  # until I am seen
DOOR_S = 3.0  # so long the connection to the door stands
_SHOWN_AT_DOOR = Probe(padding=b"", want=0, address="", key=b"", look=True)


@dataclass
class CoordinatorClock:
    """What an instant of the coordinator's clock is on this machine's.  Pure."""

    _took: deque[Took] = field(default_factory=lambda: deque(maxlen=ANSWERS_KEPT))

    def on_answer(self, took: Took) -> None:
        self._took.append(took)

    def forget(self) -> None:
        self._took.clear()

    def here(self, there_s: float) -> float | None:
        """None: nothing was answered yet."""
        if not self._took:
            return None
        quickest = min(self._took, key=lambda took: took.both_ways_s)
        return there_s - (quickest.there - quickest.both_ways_s / 2)


@dataclass
class _Reached:
    socket: Socket
    monitor: Socket
    until: float | None = None

    def turn(self) -> None:
        while self.monitor.poll(0):
            end_abruptly(int(parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["value"]))
        while self.socket.poll(0):
            self.socket.recv(zmq.NOBLOCK)  # what the door answers is for whoever has no coordinator yet

    def close(self) -> None:
        self.turn()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class Reaching:
    def __init__(self, context: zmq.Context[Socket], theirs: bytes, keys: Keys, line: DataLine) -> None:
        """`theirs`: the coordinator's key; `keys`: of this session."""
        self._context, self._theirs, self._keys, self._line = context, theirs, keys, line
        self._door_port = 0
        self._clock = CoordinatorClock()
        self._members_port = 0  # 0: this peer is not let in
        self._shown: list[_Reached] = []
        self._looks = 0
        self._look_at = 0.0
        self._kept: dict[str, tuple[float, Appointment]] = {}  # by peer: the instant as it was told, and here

    def enter(self, door_port: int, members_port: int) -> None:
        """Of the coordinator that answered: it may have moved since the last time."""
        self.leave()
        self._door_port, self._members_port = door_port, members_port

    def leave(self) -> None:
        """The session is over, and with it what was seen of it."""
        self._clock.forget()
        self._kept.clear()
        self._members_port = self._looks = 0
        self._look_at = 0.0
        self._hang_up()

    def on_answer(self, took: Took) -> None:
        self._clock.on_answer(took)

    def on_tick(self, tick: Tick, now: float) -> None:
        told = section(ReachTick, tick.sections) or ReachTick()
        if not told.look:
            self._looks = 0  # I was seen; if I am asked again, my address may be another one
        if told.look and self._members_port and now >= self._look_at and self._looks < LOOKS_MOST:
            self._looks, self._look_at = self._looks + 1, now + LOOK_AGAIN_S
            self._show_myself(now)
        if told.meets:
            self._line.link.set_appointments(dict(self._appointments(told.meets)))

    def _appointments(self, meets: Iterable[Meet]) -> Iterable[tuple[str, Appointment]]:
        for meet in meets:
            at = self._clock.here(meet.at_s)
            if at is not None and self._kept.get(meet.peer, (None, None))[0] != meet.at_s:
                self._kept[meet.peer] = meet.at_s, Appointment(meet.endpoint, at)
            if meet.peer in self._kept:
                yield meet.peer, self._kept[meet.peer][1]

    def turn(self, now: float) -> tuple[str, ...]:
        """A few times a second.  With whom a connection stands."""
        for shown in self._shown:
            shown.turn()
            if shown.until is not None and now >= shown.until:
                shown.close()
                shown.until = 0.0
        self._shown = [shown for shown in self._shown if shown.until != 0.0]
        return tuple(sorted(self._line.link.punched()))

    def close(self) -> None:
        self._hang_up()

    def _show_myself(self, now: float) -> None:
        self._hang_up()
        host = self._line.coordinator
        every = "[::]" if ":" in host else "0.0.0.0"
        port = self._line.link.meeting_port(every)
        if not host or not port:
            return  # no way to leave from a port of its own: the relay is left
        for there, word, until in (
            (self._door_port, _SHOWN_AT_DOOR, now + DOOR_S),
            (self._members_port, Look(), None),
        ):
            self._shown.append(self._dial(f"tcp://{every}:{port};{host}:{there}", word, until))

    def _dial(self, endpoint: str, word: Message, until: float | None) -> _Reached:
        family: Options = {zmq.IPV6: int("[" in endpoint)}
        curve = curve_client(self._keys, self._theirs)
        socket = opened(self._context, zmq.DEALER, STRANGER, family, curve)
        shown = _Reached(socket, socket.get_monitor_socket(zmq.EVENT_CONNECTED), until)
        socket.connect(endpoint)
        socket.send(messages.encode(word), zmq.NOBLOCK)
        return shown

    def _hang_up(self) -> None:
        for shown in self._shown:
            shown.close()
        self._shown.clear()


# ---- relay offer -------------------------------------------------------------------------------------------
# The relay that this peer offers to others: what the coordinator orders of it, and what it says of itself.
#
# Owned by the agent, which passes on each tick and puts what comes back into its beats. The relay is a
# process of its own, kept by whoever started this agent: a peer knows nothing of a relay's code. It is for
# pairs that the coordinator names, and for nobody else. Decides nothing; must not know who meets there.


class RelayTerms(NamedTuple):
    """Whose tickets are good."""

    run_id: bytes
    incarnation: int
    public: bytes
    peer: str  # who offers it


class RelayHere(Protocol):
    def follow(self, terms: RelayTerms, pairs: tuple[bytes, ...], clock_ahead_s: float) -> None:
        """These pairs may meet there from now on.  It begins to listen with the first terms that it hears."""
        ...

    def turn(self, now: float) -> RelayOffer:
        """What it is just now; to be asked often, since it is started again here when it died."""
        ...

    def close(self) -> None: ...


class Offering:
    def __init__(self, relay: RelayHere | None, me: str, say: LineWriter) -> None:
        self._relay, self._me, self._say = relay, me, say
        self._number = 0  # of the newest order
        self._told = ""

    def on_tick(self, tick: Tick, run_id: bytes, now: float) -> None:
        told = section(ReachTick, tick.sections)
        order = told.relay if told is not None else None
        if self._relay is None or order is None or order.number == self._number:
            return
        self._number = order.number
        terms = RelayTerms(run_id, order.incarnation, order.public, self._me)
        # Its answer took a moment to come: tickets last an hour.
        self._relay.follow(terms, order.pairs, tick.heard_s - now)
        if order.why_not != self._told:
            self._told = order.why_not
            self._say(
                f"the relay that I offer is not used: {self._told}"
                if self._told
                else "others can use my relay"
            )

    def leave(self) -> None:
        """The session is over: the next coordinator numbers its orders anew.  Who meets there stays."""
        self._number = 0

    def turn(self, now: float) -> RelayOffer | None:
        if self._relay is None:
            return None
        said = self._relay.turn(now)
        return RelayOffer(said.port, said.bytes_per_s, self._number, *_after_number(said))

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()


def _after_number(said: RelayOffer) -> tuple[int, int, int, int, str]:
    return said.pairs, said.waiting, said.moved_bytes, said.refused, said.why_not
