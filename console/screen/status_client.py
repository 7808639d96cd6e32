"""Asks a coordinator how its run is: the client behind `status`, `watch`, `doctor` and the demo.

Called by the CLI.  Needs no identity and no admission: it knocks at the door with a key made for the occasion.
Must not know how a status is shown.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import zmq

from farflung.protocol import envelope
from farflung.protocol.errors import FrameError, Refused, Unreachable
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.messages import AskStatus, Challenge, FromDoor, Probed, Refuse, StatusReply
from farflung.protocol.process.sockets import STRANGER, curve_client, opened
from farflung.protocol.verdicts import Verdict

_ANSWERS = frozenset({"status", "refuse", "challenge", "probed"})
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
        for _ in self._places[1:]:
            try:
                return self._ask_there(questions, kind, timeout_s / len(self._places))
            except Unreachable:
                self._places.append(self._places.pop(0))
        return self._ask_there(questions, kind, timeout_s)

    def _ask_there(self, questions: list[FromDoor], kind: type[Answer], timeout_s: float) -> list[Answer]:
        line = self._socket = self._socket or self._dial()
        for question in questions:
            line.send(envelope.encode(question))
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
        answer = envelope.decode(line.recv(), _ANSWERS)
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


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        status = json.loads(raw)
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict):
        raise FrameError(Verdict.MALFORMED, "the coordinator's status is not a JSON object")
    return status
