"""A real coordinator's server in a thread, over real sockets, and those who talk to it by a test's script.

Used by tests/coordinator/test_server.py and test_gateways.py.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from farflung.console.screen.status_client import StatusClient
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import ListenOn
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.run.effects import Effect
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.server import JOURNAL_NAME, Server
from farflung.peer.identity import Identity
from farflung.protocol import messages
from farflung.protocol.digests import hash_bytes
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest, NetSection
from farflung.protocol.messages import (
    MEMBER_OUT,
    Beat,
    Challenge,
    FragmentBeat,
    Hello,
    Knock,
    Message,
    Welcome,
)
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.process.sockets import curve_raw, curve_text
from farflung.protocol.signed_words import hello_part
from rig.in_thread import InThread
from rig.waiting import PATIENCE_S

# Nobody is lost by silence: it takes longer than any wait here.
MANIFEST = Manifest(net=NetSection(heartbeat_s=1.0, dead_after_s=600.0))
MODEL = ModelSchema(
    tensors=(TensorSpec("w", (4,), "float32", "param"),),
    chunk_elements=4,
    chunk_count=1,
    first_plain_chunk=1,
    frozen=hash_bytes(b""),
)


# ---- a server in a thread, and those who talk to it -----------------------------------------------------


class Running:
    """A real server on a free port of this machine."""

    def __init__(self, folder: Path, gateways: int = 0) -> None:
        self._folder, self._gateways = folder, gateways
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S), "the server did not start"

    def _serve(self) -> None:
        with Journal.open_or_create(self._folder / JOURNAL_NAME, MANIFEST, lambda: bytes(16)) as journal:
            keys = load_or_create(self._folder)
            machine = self._machine = RunMachine(MANIFEST, journal.run_id, journal.records(), os.urandom)
            listen = ListenOn("127.0.0.1", 0, gateways=self._gateways)
            server = Server(machine, journal, keys, listen, folder=self._folder, spawn=InThread)
            with server:
                self.server = server
                self.url = JoinUrl("127.0.0.1", server.port, MANIFEST.run.name, keys.public_raw)
                self._ready.set()
                server.run_until(self._stop.is_set)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Inside it the server's loop stands still, as if it waited for a slow disk."""
        on_timer, held, go_on = self._machine.on_timer, threading.Event(), threading.Event()

        def wait(now: float) -> list[Effect]:
            held.set()
            assert go_on.wait(PATIENCE_S)
            return on_timer(now)

        self._machine.on_timer = wait  # type: ignore[method-assign]
        assert held.wait(PATIENCE_S)
        try:
            yield
        finally:
            self._machine.on_timer = on_timer  # type: ignore[method-assign]
            go_on.set()

    def status(self) -> dict[str, Any]:
        with StatusClient(self.url) as client:
            return client.fetch(PATIENCE_S)

    def frames(self) -> dict[str, int]:
        return dict(self.status()["frames"])


class Caller:
    """A CURVE connection to one of the server's sockets."""

    def __init__(
        self,
        context: zmq.Context[zmq.SyncSocket],
        url: JoinUrl,
        port: int,
        key: Any = None,
        once: bool = False,
    ) -> None:
        """`key`: of whom, CURVE public and secret; None: a new one.  `once`: it does not dial again."""
        self.public, self.secret = key or zmq.curve_keypair()
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        if once:
            self.socket.reconnect_ivl = -1
        self.socket.curve_publickey, self.socket.curve_secretkey = self.public, self.secret
        self.socket.curve_serverkey = curve_text(url.key)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def ask(self, message: Message, kinds: frozenset[str]) -> Message:
        self.socket.send(messages.encode(message))
        assert self.socket.poll(PATIENCE_S * 1000), f"no answer to {message}"
        return messages.decode(self.socket.recv(), kinds)


class ScriptedPeer:
    """Gets in by the rules, then says what a test tells it to."""

    def __init__(self, context: zmq.Context[zmq.SyncSocket], url: JoinUrl) -> None:
        self.identity = Identity.generate()
        self.process = os.urandom(16)
        self._context, self._url, self._seq = context, url, 0
        self.door = Caller(context, url, url.port)
        self.members: Caller | None = None

    def enter(self) -> Welcome:
        welcome = self.greet()
        assert isinstance(welcome, Welcome)
        self.welcome = welcome
        self.connect()
        return welcome

    def greet(self) -> Message:
        """A knock and a signed hello: the answer to that."""
        challenge = self.door.ask(
            Knock(protocol=PROTOCOL_VERSION, run=self._url.run), frozenset({"challenge"})
        )
        assert isinstance(challenge, Challenge)
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            run_id=challenge.run_id,
            identity=self.identity.public,
            key=curve_raw(self.door.public),
            address="",
            software="test",
            manifest=hash_bytes(challenge.manifest),
            model=MODEL,
            fragments=(0,),
            version=-1,
            digest=b"",
            process=self.process,
            token="",
            signature=b"",
        )
        signature = self.identity.sign(hello_part(hello, challenge.nonce))
        signed = msgspec.structs.replace(hello, signature=signature)
        return self.door.ask(signed, frozenset({"welcome", "refuse"}))

    def connect(self) -> None:
        key = (self.door.public, self.door.secret)
        self.members = Caller(self._context, self._url, self.welcome.member_port, key)

    def beat(self) -> Message:
        self._seq += 1
        assert self.members is not None
        return self.members.ask(beat(self.welcome.session, self._seq), frozenset(MEMBER_OUT))


def beat(session: bytes, seq: int) -> Beat:
    return Beat(
        session=session,
        seq=seq,
        roster_no=0,
        fragments=(FragmentBeat(0, -1, b"", 0, 0, 0, False, ()),),
        phase="inner",
        step=0,
        tokens=0,
        loss=None,
        tx_bytes=0,
        rx_bytes=0,
        up_bytes_per_s=0,
        down_bytes_per_s=0,
        have=(),
        want=0,
        samples=0,
        rough=False,
        era=0,
        saved=-1,
        unsure=False,
        leaving=False,
        data=b"",
    )


def member(running: Running, peer: ScriptedPeer) -> dict[str, Any]:
    return next(m for m in running.status()["members"] if m["id"] == peer.identity.peer_id)
