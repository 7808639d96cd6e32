"""The face of the data plane: what carries bulk frames between the peers of a run, whatever the transport is.

Made by peer/line/data_line.py, used by the agent's loop and its hands; zmq_link.py is the transport of today.  Whoever
uses a link names `Link` and no transport.  test_link_conformance.py holds every transport to what is said here.

One thread: a link belongs to the thread that polls it, and is called by no other.  Nothing blocks: what can't leave or
was not there yet is for a later turn.  A turn of its owner's loop is: poll `sockets()` for at most `idle_s()`, then
`receive()`, then `flush()`; now and then `on_tick()`.

Who may lie: only a contact is heard, and the name that comes with a frame is proven by the contact's key.  Everything
else about it may be a lie: it may send what is no frame, frames too large, twice or never, may read nothing, and may
ask without end.  What that costs here is bounded, and each frame that arrived ends in exactly one counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from farflung.protocol.errors import Counters
from farflung.protocol.frames import CORE_KINDS, Frame, Kinds, Spoiled
from farflung.protocol.round_words import Contact


class Pollable(Protocol):
    """What zmq.Poller takes, besides a bare descriptor: a ZeroMQ socket, a plain socket, or anything else with one.

    For zmq.Poller only: the descriptor of a ZeroMQ socket says something else than the socket.
    """

    def fileno(self) -> int: ...


@dataclass
class FrameCounts:
    """What became of frames so far.  The link writes it, others read it.

    `arrived_frames` is what `verdicts` count, and the frames that `receive` gave away: these end in a counter of
    whoever took them.
    """

    sent_bytes: int = 0  # handed to a connection, with headers; they may still wait in buffers
    arrived_bytes: int = 0
    arrived_frames: int = 0
    verdicts: Counters = field(default_factory=Counters)


class MovedBytes(NamedTuple):
    """Bytes since the beginning, connections that are gone included."""

    sent_bytes: int  # and acknowledged, where the transport can tell
    received_bytes: int  # also of frames that are not whole yet, where it can tell


class Relayed(NamedTuple):
    """How a contact is reached that I can't dial and that can't dial me: both ask a relay for each other."""

    relay: str  # HOST:PORT, by SOCKS5
    ticket: str  # the name to ask for


class Appointment(NamedTuple):
    """How such a contact is reached without a relay: both connect at one instant, and again each second."""

    endpoint: str  # HOST:PORT, where it is seen from outside
    at: float  # on the link's clock


class Link(Protocol):
    # ---- life ------------------------------------------------------------------------------------------------

    def listen(self, host: str, port: int) -> int:
        """Be reachable there for peers that dial; the port (0: any free one).  UserError where that can't be had."""
        ...

    def expect(self, me: str, run_tag: bytes, payload_max: int, kinds: Kinds = CORE_KINDS) -> None:
        """What frames of this run look like; those of other kinds are refused as unknown.

        Once, before anything else: limits are fixed when sockets open.
        """
        ...

    def set_contacts(self, roster: Iterable[Contact]) -> None:
        """Who may speak from now on, and how each is reached; this peer itself may be among them.

        Whoever is not named any more is not heard any more, and what waits for it is dropped; the same where the key
        is another one.  With another address, what waits stays.  Connections are made at once: no round waits for
        handshakes.
        """
        ...

    def set_ways(self, ways: Mapping[str, Relayed]) -> None:
        """By peer, and instead of their address, if they have one; those that are not named have no such way any more.

        The relay is believed nothing: what comes over it counts for the contact only under the contact's key.  A
        connection that stands is kept when its ticket is renewed.
        """
        ...

    def meeting_port(self, host: str) -> int:
        """The port from which this peer meets all others; one is chosen at the first call.  `host`: every address of a
        family, 0.0.0.0 or [::].  0 where there is none."""
        ...

    def set_appointments(self, appointments: Mapping[str, Appointment]) -> None:
        """By peer, with those of whom neither can dial the other.  What stands, stays: an appointment told again,
        or no more, is no news.

        A connection carries frames as soon as it stands, unless a way over a relay is told as well: then that one does,
        until it is told no more.
        """
        ...

    def punched(self) -> frozenset[str]:
        """Contacts with whom such a connection stands."""
        ...

    def unmet(self) -> set[str]:
        """Contacts that are to be met at a relay, and with whom no connection stands for a while."""
        ...

    def limit(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        """What may pass from now on.  A frame goes as a whole; what comes after it waits until it is paid for."""
        ...

    def close(self) -> None:
        """At once, and with all that waits.  A second time does nothing."""
        ...

    # ---- polling and time --------------------------------------------------------------------------------------

    def sockets(self) -> Iterable[tuple[Pollable | int, int]]:
        """What to poll at this turn, and for what: zmq.POLLIN, zmq.POLLOUT or both.  Another turn, other sockets."""
        ...

    def idle_s(self) -> float:
        """How long nothing is to be done unless a socket says so."""
        ...

    def on_tick(self) -> None:
        """A few times a second: what became of connections.  Without it, nobody is ever reached or missed."""
        ...

    # ---- frames ------------------------------------------------------------------------------------------------

    def send(self, peer: str, frame: Frame) -> bool:
        """Put a frame in line for a contact.  False if the peer is none: then nobody waits for it any more.

        It arrives whole and once, or it is lost with its connection; whoever misses it asks again.  Frames overtake
        each other.  The payload is not copied: nobody may change it before it has left.  A frame that waits already
        is not put in line again.  Of answers to one peer's questions a bounded number waits; more are dropped, and an
        honest peer asks again; the same holds for crossings of microbatches.  What a round sends is bounded by the
        round.

        Words and crossings go before bulk (frame_queue.py), which keeps a quarter of the bytes while crossings wait.
        """
        ...

    def flush(self) -> None:
        """Let go of what may leave now, a frame of each contact in turn."""
        ...

    def forget_rounds_before(self, round_no: int) -> None:
        """What still waits of rounds that are over would only delay the round that is on."""
        ...

    def receive(self) -> Iterator[tuple[str, Frame | Spoiled]]:
        """What arrived from contacts, each with its sender: frames that match their hash, and those that do not.

        A bounded number at a time, so that one busy sender does not hold up its owner's loop.  A payload may be a view
        into the transport's memory, which is kept for as long as somebody holds it.
        """
        ...

    @property
    def counts(self) -> FrameCounts: ...

    # ---- how it goes -------------------------------------------------------------------------------------------

    def unreached(self) -> set[str]:
        """Contacts for which something waits for a while that nothing brings away, or of which nothing is heard."""
        ...

    def arriving(self) -> set[str]:
        """Contacts of which more than a few bytes came in since they were named last, also while no frame is whole.

        Where the transport does not know, nobody is ever named.
        """
        ...

    def answers_waiting(self, peer: str) -> int:
        """Answers to this peer's questions that have not left yet."""
        ...

    def peers_waiting(self) -> int:
        """For how many contacts bytes wait to leave."""
        ...

    def waiting_bytes(self) -> int:
        """Bytes that could not leave yet, as far as the transport can tell; 0 only if nothing waits."""
        ...

    def moved(self) -> MovedBytes: ...

    def probe(self) -> None:
        """Once in the life of a link, while nothing else is on the line: see what it carries."""
        ...

    def probed_bytes_per_s(self) -> float | None:
        """What the probe found; None: nothing yet, or the line is too fast for it."""
        ...
