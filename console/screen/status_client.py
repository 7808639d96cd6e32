"""Asks a coordinator how its run is: the client behind `status`, `watch`, `doctor` and the demo.

Called by the CLI.  Needs no identity and no admission: it knocks at the door with a key made for the occasion.
Must not know how a status is shown.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import zmq

from farflung.protocol import messages
from farflung.protocol.errors import FrameError, Refused, Unreachable, Verdict
from farflung.protocol.join_url import Address, JoinUrl, whereabouts_of
from farflung.protocol.messages import AskStatus, Challenge, FromDoor, Probed, Refuse, StatusReply
from farflung.protocol.mode_words import StandsBy
from farflung.protocol.process.sockets import STRANGER, curve_client, opened

_ANSWERS = frozenset({"status", "refuse", "stands_by", "challenge", "probed"})
FOLLOWS = 2  # who stands by names who leads; that one may have ended since
STANDBY = (
    "the coordinator there stands by, and nobody leads the run at this moment; try again in some seconds"
)
STANDBY_RETRY_S = 2.0
Answer = TypeVar("Answer", StatusReply, Challenge, Probed)


class StatusClient:
    """Use as a context manager.  One connection serves many fetches; after a silent one it is made anew."""

    def __init__(self, url: JoinUrl) -> None:
        self.url = url
        self._places = list(url.addresses)  # the one that answered last first
        self._context: zmq.Context[zmq.SyncSocket] | None = None
        self._socket: zmq.SyncSocket | None = None

    def __enter__(self) -> StatusClient:
        self._context = zmq.Context()
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()
        assert self._context is not None
        self._context.term()

    def fetch(self, timeout_s: float) -> dict[str, Any]:
        """The status as docs/sample_status.json shows it; Refused, Unreachable or FrameError otherwise."""
        return _parsed(self.ask(AskStatus(run=self.url.run), StatusReply, timeout_s).status)

    def ask(self, question: FromDoor, kind: type[Answer], timeout_s: float) -> Answer:
        """One answer of this kind; Refused, Unreachable or FrameError otherwise."""
        return self.ask_all([question], kind, timeout_s)[0]

    def ask_all(self, questions: list[FromDoor], kind: type[Answer], timeout_s: float) -> list[Answer]:
        """All questions at once, each answer within the time; of several addresses the first one that answers."""
        silent = 0
        for _ in range(len(self._places) + FOLLOWS):
            is_last = silent == len(self._places) - 1
            try:
                return self._ask_there(questions, kind, timeout_s / (1 if is_last else len(self._places)))
            except Unreachable:
                if is_last:
                    raise
                silent += 1
                self._places.append(self._places.pop(0))
            except _Elsewhere as told:
                self.forget()
                self._places = _follow(self._places, told.places)
        raise Refused("standby", STANDBY, STANDBY_RETRY_S)

    def _ask_there(self, questions: list[FromDoor], kind: type[Answer], timeout_s: float) -> list[Answer]:
        line = self._socket = self._socket or self._dial()
        for question in questions:
            line.send(messages.encode(question))
        return [self._hear(line, kind, timeout_s) for _ in questions]

    def _hear(self, line: zmq.SyncSocket, kind: type[Answer], timeout_s: float) -> Answer:
        if not line.poll(round(timeout_s * 1000)):
            # A late answer must not be taken for the next one, and questions must not pile up meanwhile.
            self.forget()
            raise Unreachable(
                f"no answer from {self._asked} within {timeout_s:g} s; check that the "
                "coordinator is running, that a firewall lets this port through, and that the join URL is the one "
                "it printed last (another key in the URL looks like silence too)"
            )
        answer = messages.decode(line.recv(), _ANSWERS)
        if isinstance(answer, StandsBy):
            said = whereabouts_of(answer.whereabouts, self.url.key, self.url.run)
            raise _Elsewhere(said.places if said is not None else ())
        if isinstance(answer, Refuse):
            raise Refused(answer.code, answer.reason, answer.retry_after_s)
        if not isinstance(answer, kind):
            raise FrameError(Verdict.MALFORMED, "the coordinator answered another question")
        return answer

    def _dial(self) -> zmq.SyncSocket:
        assert self._context is not None, "use StatusClient in a with statement"
        curve = curve_client(zmq.curve_keypair(), self.url.key)
        line = opened(self._context, zmq.DEALER, STRANGER, curve)
        line.connect(f"tcp://{self._places[0]}")
        return line

    @property
    def _asked(self) -> str:
        told = [f"{place.host} port {place.port}" for place in self.url.addresses]
        return " or ".join(told)

    def forget(self) -> None:
        """Hang up: late answers must not be taken for those to the next question."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _Elsewhere(Exception):
    """Who answered stands by, and named these places; none: nobody leads just now."""

    def __init__(self, places: tuple[Address, ...]) -> None:
        self.places = places


def _follow(known: list[Address], told: tuple[Address, ...]) -> list[Address]:
    """Whom to ask next: those that were named, and last the one that named them."""
    asked, *others = known
    return list(dict.fromkeys([*(each for each in told if each != asked), *others, asked]))


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        status = json.loads(raw)
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict):
        raise FrameError(Verdict.MALFORMED, "the coordinator's status is not a JSON object")
    return status
