"""Asks a coordinator to dial this machine where the data plane would listen: can other peers reach it?

Called by `farflung doctor`.  Listens with the data plane's own link, so that a firewall treats it the same way.
"""

from __future__ import annotations

import threading

import zmq

from farflung.collectives.link.link import Link
from farflung.collectives.link.zmq_link import LinkSettings, ZmqLink
from farflung.console.screen.status_client import StatusClient
from farflung.coordinator.door.dialer import DIAL_S
from farflung.peer.line.data_line import address_towards, checked_listen
from farflung.peer.settings import OwnConfig
from farflung.protocol.errors import Unreachable
from farflung.protocol.messages import Probe, Probed
from farflung.protocol.process.sockets import curve_raw

POLL_MS = 50


def dial_back(client: StatusClient, own: OwnConfig, port_hint: int = 0) -> tuple[str, str]:
    """(the address that was tried, the coordinator's word: yes, no, or why it was not tried)."""
    keys = zmq.curve_keypair()
    link = ZmqLink(keys, LinkSettings(visitor=client.url.key))
    done = threading.Event()
    try:
        host, port = checked_listen(own.listen) if own.listen else ("", port_hint)
        mine = address_towards(client.url)
        bound = link.listen(host or mine, port)
        seen = own.advertise or (mine if host in ("", "0.0.0.0", "*", "[::]") else host)
        address = seen if own.advertise and ":" in own.advertise else f"{seen}:{bound}"
        # The link answers handshakes in its turns: from here on the thread's alone, while the question below waits.
        answers = threading.Thread(target=_let_in, args=(link, done), name="link")
        answers.start()
        try:
            question = Probe(padding=b"", want=0, address=address, key=curve_raw(keys[0]))
            return address, client.ask(question, Probed, DIAL_S + 5.0).dialled
        except Unreachable:
            return address, "the coordinator did not say"
        finally:
            done.set()
            answers.join()
    finally:
        link.close()


def _let_in(link: Link, done: threading.Event) -> None:
    """The turns of the link's owner, as an agent takes them."""
    while not done.is_set():
        poller = zmq.Poller()
        for socket, events in link.sockets():
            poller.register(socket, events)
        poller.poll(POLL_MS)
        for _ in link.receive():
            pass  # nobody is a contact: whatever comes is counted and dropped
        link.on_tick()
