"""Asks a coordinator to dial this machine where the data plane would listen: can other peers reach it?

Called by `farflung doctor`.  Listens with the data plane's own link, so that a firewall treats it the same way.
"""

from __future__ import annotations

import contextlib
import threading

import zmq
from zmq.utils import z85

from farflung.collectives.link.zmq_link import ZAP_DOMAIN, ZmqLink
from farflung.console.screen.status_client import StatusClient
from farflung.coordinator.door.dialer import DIAL_S
from farflung.peer.line.data_line import address_towards, checked_listen
from farflung.peer.settings import OwnConfig
from farflung.protocol.errors import Unreachable
from farflung.protocol.messages import Probe, Probed
from farflung.protocol.process.zap import ZapHandler
from farflung.protocol.verdicts import Counters

POLL_MS = 50


def dial_back(client: StatusClient, own: OwnConfig, port_hint: int = 0) -> tuple[str, str]:
    """(the address that was tried, the coordinator's word: yes, no, or why it was not tried)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    zap = ZapHandler(context)
    zap.set_policy(ZAP_DOMAIN.decode(), lambda key: True)
    keys = zmq.curve_keypair()
    link = ZmqLink(context, keys, Counters())
    done = threading.Event()
    try:
        host, port = checked_listen(own.listen) if own.listen else ("", port_hint)
        mine = address_towards(client.url)
        bound = link.listen(host or mine, port)
        seen = own.advertise or (mine if host in ("", "0.0.0.0", "*", "[::]") else host)
        address = seen if own.advertise and ":" in own.advertise else f"{seen}:{bound}"
        # Handshakes are answered by the ZAP handler: here, while the question below waits for its answer.
        answers = threading.Thread(target=_let_in, args=(zap, done), name="zap")
        answers.start()
        try:
            question = Probe(padding=b"", want=0, address=address, key=z85.decode(keys[0]))
            return address, client.ask(question, Probed, DIAL_S + 5.0).dialled
        except Unreachable:
            return address, "the coordinator did not say"
        finally:
            done.set()
            answers.join()
    finally:
        zap.close()
        with contextlib.suppress(zmq.ZMQError):
            link.close()
        context.destroy(linger=0)


def _let_in(zap: ZapHandler, done: threading.Event) -> None:
    while not done.is_set():
        if zap.socket.poll(POLL_MS):
            zap.serve_waiting()
