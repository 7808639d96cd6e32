"""Is the run's coordinator there, under the key of the join URL?  Asked before anything slow is loaded.

Called by `farflung join`, `farflung assist` and `farflung.join` at their start, once: TCP to each address of the URL,
then a knock, as a peer says it.  A definite no is one line and an exit code within a second; silence is none: a
coordinator may be far away, or have no time just now, and the peer itself waits for it (peer/machine/handshake.py).

A peer that was in this run before ends for no answer: its coordinator is started again, or has moved, and what the
peer keeps tells where to look.  Must not know keys of peers, or models.
"""

from __future__ import annotations

import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from farflung.peer.settings import OwnConfig, default_path
from farflung.protocol import messages
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import FrameError, Refused, Unreachable
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.limits import KEPT_BOOKS_BYTES, KEPT_COMMITS, PROTOCOL_VERSION, WHEREABOUTS_BYTES
from farflung.protocol.messages import DOOR_OUT, Knock, Message, Refuse
from farflung.protocol.process import own_files
from farflung.protocol.process.log_lines import LineWriter
from farflung.protocol.process.sockets import STRANGER, Options, curve_client, opened

# ---- remembered places -------------------------------------------------------------------------------------
# The files in which a peer keeps what a run's coordinator signed: where it was last, and the run's newest
# steps.
#
# Owned by the agent. Two files for each run, beside the peer's key: an old join URL still leads to a
# coordinator that has moved since, and a coordinator that lost its disk gets the run's history back. What
# stands in them is believed nothing: whoever reads it checks the signatures. Losing them costs a peer no more
# than that, so a disk that can't be written is told once. Must not know what they say.

COMMITS_BYTES = (KEPT_COMMITS + 8) * KEPT_BOOKS_BYTES  # with what else is told of the run


class RememberedPlaces:
    def __init__(self, folder: Path, url: JoinUrl, say: LineWriter) -> None:
        """`folder`: of this peer's state; made when there is something to keep."""
        name = hash_bytes(b"farflung/places/1\0" + url.key + url.run.encode()).hex()[:32]
        self.path = folder / f"coordinator-{name}.places"
        self._say = say
        self._failed = False

    def load(self) -> bytes:
        """Empty where nothing usable is kept."""
        return self._load(self.path, WHEREABOUTS_BYTES)

    def save(self, whereabouts: bytes) -> None:
        self._save(self.path, whereabouts, sync=True)

    def load_commits(self) -> bytes:
        return self._load(self.path.with_suffix(".commits"), COMMITS_BYTES)

    def save_commits(self, raw: bytes) -> None:
        """At every commit, so nothing waits for the disk: a file that is not whole shows, and counts as none."""
        self._save(self.path.with_suffix(".commits"), raw, sync=False)

    def _load(self, path: Path, most: int) -> bytes:
        try:
            # Non-blocking, because opening a pipe would otherwise wait for a writer for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self._tell(error)
            return b""
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return b""
            raw = file.read(most + 1)
        return raw if len(raw) <= most else b""

    def _save(self, path: Path, raw: bytes, sync: bool) -> None:
        """Written aside, then put in its place: whoever is killed in between keeps the old one."""
        try:
            own_files.replaced(own_files.made_folder(path.parent) / path.name, raw, durable=sync)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"{self.path}: what the coordinator signed can't be kept here: {error.strerror}")


# ---- first contact -----------------------------------------------------------------------------------------

TCP_S = 1.0  # for an address to take a connection, or to refuse it
KNOCK_S = 2.0  # for an answer, once one has
CLOSED_TWICE = 2  # handshakes that the other end broke off: one may be a coordinator that ends just now
_LOOK_MS = 50
_AT_ONCE: Options = {zmq.RECONNECT_IVL: 50}  # a person waits for the second look
_BROKEN_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# Whatever else a door refuses, the peer hears itself, and knows what to do about it.
_FINAL = frozenset({"run"})


class How(StrEnum):
    ANSWERS = "answers"
    REFUSES = "refuses"  # TCP, at once
    BREAKS_OFF = "breaks off"  # takes TCP and ends the handshake: it has another key
    SILENT = "silent"


@dataclass(frozen=True)
class DoorAnswers:
    how: How
    why: str = ""  # as the system says it


def problem_of(found: Mapping[Address, DoorAnswers]) -> str:
    """Why nobody can be reached by this URL; empty: somebody answers, or may still do so.  Pure."""
    if any(each.how in (How.ANSWERS, How.SILENT) for each in found.values()):
        return ""
    return "; ".join(_sentence(place, each) for place, each in found.items())


def _sentence(place: Address, found: DoorAnswers) -> str:
    if found.how == How.REFUSES:
        return (
            f"cannot connect to {place}: {found.why}; check that the coordinator is running and that the join URL is "
            "the one that it printed last"
        )
    return (
        f"{place} does not accept the key of this join URL: use the URL that the coordinator printed last, whole and "
        "in quotes"
    )


def check(url: JoinUrl, own: OwnConfig, say: LineWriter) -> None:
    """Unreachable or Refused where there is no point in going on."""
    try:
        problem = problem_of(look(url))
    except OSError as error:  # of this machine: no descriptors, no sockets
        raise Unreachable(f"cannot connect to {url.address}: {error.strerror or error}") from error
    if not problem:
        return
    if RememberedPlaces((own.identity or default_path()).parent / "state", url, say).load():
        say(f"{problem}. This peer was in the run before and keeps trying")
    elif own.book:
        say(f"{problem}. Looking in the phone book for another address")
    else:
        raise Unreachable(problem)


def look(url: JoinUrl) -> dict[Address, DoorAnswers]:
    """By address; those of the URL side by side."""
    found = _connections(url.addresses)
    open_ = [place for place, each in found.items() if each.how == How.ANSWERS]
    return found | (_knock(url, open_) if open_ else {})


def _connections(places: tuple[Address, ...]) -> dict[Address, DoorAnswers]:
    """Who takes a TCP connection.  In threads, since looking up a name can't be given up."""
    results: queue.SimpleQueue[tuple[Address, DoorAnswers]] = queue.SimpleQueue()
    for place in places:
        threading.Thread(target=lambda at=place: results.put((at, _connect(at))), daemon=True).start()
    found = dict.fromkeys(places, DoorAnswers(How.SILENT))
    until = time.monotonic() + 1.5 * TCP_S
    for _ in places:
        try:
            place, how = results.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        found[place] = how
        if how.how == How.ANSWERS:
            until = min(until, time.monotonic() + 0.25 * TCP_S)  # the others are worth no more than a moment
    return found


def _connect(place: Address) -> DoorAnswers:
    try:
        socket.create_connection((place.host, place.port), TCP_S).close()
    except TimeoutError:
        return DoorAnswers(How.SILENT)
    except OSError as error:
        return DoorAnswers(How.REFUSES, (error.strerror or str(error)).lower())
    return DoorAnswers(How.ANSWERS)


def _knock(url: JoinUrl, places: list[Address]) -> dict[Address, DoorAnswers]:
    """Who of them answers a knock under the URL's key, until the first one does."""
    found = dict.fromkeys(places, DoorAnswers(How.SILENT))
    broken = dict.fromkeys(places, 0)
    context: zmq.Context[zmq.SyncSocket] = zmq.Context()
    try:
        poller, doors = zmq.Poller(), {}
        curve = curve_client(zmq.curve_keypair(), url.key)
        for place in places:
            door = opened(context, zmq.DEALER, STRANGER, _AT_ONCE, curve)
            news = door.get_monitor_socket(_BROKEN_OFF)
            door.connect(f"tcp://{place}")
            door.send(messages.encode(Knock(protocol=PROTOCOL_VERSION, run=url.run)))
            poller.register(door, zmq.POLLIN)
            poller.register(news, zmq.POLLIN)
            doors[place] = door, news
        until = time.monotonic() + KNOCK_S
        while time.monotonic() < until and any(each.how == How.SILENT for each in found.values()):
            ready = dict(poller.poll(_LOOK_MS))
            for place, (door, news) in doors.items():
                if door in ready:
                    _heard(door.recv())
                    return {**found, place: DoorAnswers(How.ANSWERS)}
                if news in ready:
                    recv_monitor_message(news)
                    broken[place] += 1
                    if broken[place] >= CLOSED_TWICE:
                        found[place] = DoorAnswers(How.BREAKS_OFF)
    finally:
        context.destroy(linger=0)
    return found


def _heard(raw: bytes) -> None:
    """Refused, where no knock will ever be answered otherwise.  What can't be read, the peer judges by itself."""
    try:
        answer: Message = messages.decode(raw, frozenset(DOOR_OUT))
    except FrameError:
        return
    if isinstance(answer, Refuse) and answer.code in _FINAL:
        raise Refused(answer.code, answer.reason)
