"""Asks every address that a join URL names, at the same time: does the coordinator of this run answer there?

Called by `farflung doctor`.  A peer tries them side by side and takes the first that answers, so one that is dead is
seen by nobody until it is the only one left.  Whoever answers has shown the key that the URL pins: it can't be somebody
else, only another machine of the same host, or an older start of the same run.  Judges nothing.
"""

from __future__ import annotations

import time

import zmq

from farflung.console.doctor.advice import CheckpointPlace
from farflung.protocol import envelope
from farflung.protocol.errors import FrameError
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.messages import Challenge, Knock, Message, Refuse, StandsBy
from farflung.protocol.process.sockets import STRANGER, curve_client, opened

SILENT = "nobody answers there"
_ANSWERS = frozenset({"challenge", "refuse", "stands_by"})


def ask_each(url: JoinUrl, patience_s: float) -> tuple[CheckpointPlace, ...]:
    """In the order of the URL; waits for all of them, or so long."""
    context: zmq.Context[zmq.SyncSocket] = zmq.Context()
    told: dict[Address, str] = {}
    try:
        lines = {}
        for place in url.addresses:
            try:
                lines[_dial(context, url, place)] = place
            except zmq.ZMQError as error:
                told[place] = str(error)
        poller, until = zmq.Poller(), time.monotonic() + patience_s
        for line in lines:
            poller.register(line, zmq.POLLIN)
        while lines and (left_s := until - time.monotonic()) > 0:
            for line, _ in poller.poll(round(1000 * left_s)):
                poller.unregister(line)
                told[lines.pop(line)] = _word(line.recv())
    finally:
        context.destroy(linger=0)
    return tuple(CheckpointPlace(str(each), told.get(each, SILENT)) for each in url.addresses)


def by_who_answers(url: JoinUrl, places: tuple[CheckpointPlace, ...]) -> JoinUrl:
    """The same URL, with the addresses first at which somebody answered."""
    good = {each.address for each in places if not each.problem}
    ordered = sorted(url.addresses, key=lambda each: str(each) not in good)
    return JoinUrl.at(tuple(ordered), url.run, url.key, url.token)


def _dial(context: zmq.Context[zmq.SyncSocket], url: JoinUrl, place: Address) -> zmq.SyncSocket:
    line = opened(context, zmq.DEALER, STRANGER, curve_client(zmq.curve_keypair(), url.key))
    line.connect(f"tcp://{place}")
    line.send(envelope.encode(Knock(protocol=PROTOCOL_VERSION, run=url.run)))
    return line


def _word(raw: bytes) -> str:
    """What is wrong there; empty: nothing."""
    try:
        said: Message = envelope.decode(raw, _ANSWERS)
    except FrameError as error:
        return f"what answers there is not understood: {error}"
    if isinstance(said, Refuse):
        return "" if said.code == "protocol" else said.reason  # whether both fit is asked once, of the run
    if isinstance(said, StandsBy):
        return ""  # it names who leads to whoever knocks
    return "" if isinstance(said, Challenge) else "it answered another question"
