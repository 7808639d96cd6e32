"""What an operator does, as an operator does it: a real coordinator process, the real command line, its socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from typer.testing import CliRunner

from farflung.console.main import app
from farflung.console.screen.status_client import StatusClient
from farflung.coordinator.operator_socket import SOCKET_NAME, OperatorSocket, ask
from farflung.peer.identity import Identity
from farflung.protocol import messages
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Unreachable, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.messages import (
    DOOR_OUT,
    MEMBER_OUT,
    Bans,
    Beat,
    Challenge,
    FragmentBeat,
    Gone,
    Hello,
    Knock,
    Message,
    Refuse,
    Reply,
    Welcome,
)
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.process.sockets import curve_raw, curve_text
from farflung.protocol.signed_words import hello_part
from rig.waiting import PATIENCE_S, eventually

MODEL = ModelSchema((TensorSpec("w", (4,), "float32", "param"),), 4, 1, 1, hash_bytes(b""))


@dataclass
class Host:
    """A coordinator process, and the operator's command line beside it."""

    process: subprocess.Popen[str]
    toml: Path
    url: JoinUrl

    @property
    def data(self) -> Path:
        return self.toml.with_suffix(".data")

    def types(self, *words: str) -> str:
        """Of a command that takes run.toml first."""
        done = CliRunner().invoke(app, [words[0], str(self.toml), *words[1:]])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout

    def status(self) -> dict[str, Any]:
        with StatusClient(self.url) as client:
            return client.fetch(PATIENCE_S)


@contextlib.contextmanager
def hosting(folder: Path, admission: str = "", *flags: str) -> Iterator[Host]:
    toml = folder / "run.toml"
    toml.write_text(
        f'run.name = "demo"\nnet.dead_after_s = 600.0\n[admission]\n{admission}\n', encoding="utf-8"
    )
    words = ["coordinate", "--json", "--plain", "--listen", "127.0.0.1:0", *flags, str(toml)]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "farflung", *words], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        yield Host(process, toml, JoinUrl.parse(json.loads(line)["url"]))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Peer:
    """A member in a few lines."""

    def __init__(self, context: zmq.Context[Any], identity: Identity | None = None) -> None:
        self.identity = identity or Identity.generate()
        self._context = context
        self._keys = zmq.curve_keypair()
        self._seq = 0

    def dial(self, url: JoinUrl, port: int) -> Any:
        line = self._context.socket(zmq.DEALER)
        line.linger = 0
        line.curve_publickey, line.curve_secretkey = self._keys
        line.curve_serverkey = curve_text(url.key)
        line.connect(f"tcp://127.0.0.1:{port}")
        return line

    def knocks(self, url: JoinUrl) -> Message:
        self.door = self.dial(url, url.port)
        challenge = asked(self.door, Knock(protocol=PROTOCOL_VERSION, run=url.run))
        assert isinstance(challenge, Challenge)
        hello = Hello(
            protocol=PROTOCOL_VERSION, run_id=challenge.run_id, identity=self.identity.public,
            key=curve_raw(self._keys[0]), address="", software="test", manifest=hash_bytes(challenge.manifest),
            model=MODEL, fragments=(0,), version=-1, digest=b"",
            process=os.urandom(16), token=url.token or "", signature=b"",
        )  # fmt: skip
        signature = self.identity.sign(hello_part(hello, challenge.nonce))
        return asked(self.door, msgspec.structs.replace(hello, signature=signature))

    def enters(self, url: JoinUrl) -> None:
        welcome = self.knocks(url)
        assert isinstance(welcome, Welcome), welcome
        self.session = welcome.session
        self.members = self.dial(url, welcome.member_port)

    def beats(self) -> Message:
        self._seq += 1
        beat = Beat(

            session=self.session, seq=self._seq, roster_no=0, fragments=(FragmentBeat(0, -1, b"", 0, 0, 0, False, ()),),
            phase="inner", step=0, tokens=0, loss=None, tx_bytes=0, rx_bytes=0, up_bytes_per_s=0, down_bytes_per_s=0,
            have=(), want=0, samples=0, rough=False, era=0, saved=-1, unsure=False, leaving=False, data=b"",
        )  # fmt: skip
        return asked(self.members, beat)

    def hears(self, kind: type[Any]) -> Any:
        """What the coordinator says next of this kind."""
        while self.members.poll(PATIENCE_S * 1000):
            said = messages.decode(self.members.recv(), frozenset(MEMBER_OUT))
            if isinstance(said, kind):
                return said
        pytest.fail(f"no {kind.__name__} was heard")


def asked(line: Any, message: Message) -> Message:
    line.send(messages.encode(message))
    assert line.poll(PATIENCE_S * 1000), f"no answer to {message}"
    return messages.decode(line.recv(), frozenset(DOOR_OUT) | frozenset(MEMBER_OUT))


@pytest.mark.slow
@pytest.mark.mode("admission")
def test_an_evening_of_an_operator(tmp_path: Path, context: zmq.Context[Any]) -> None:
    """Invite, kick, ban, restart after kill -9, lift the ban, pause, resume, drain."""
    with hosting(tmp_path, 'mode = "token"') as host:
        assert stat.S_IMODE((host.data / SOCKET_NAME).stat().st_mode) == 0o600
        told = host.types("invite", "--uses", "2", "--expires", "1h", "--note", "the lab")
        invited = JoinUrl.parse(told.strip())
        assert (invited.host, invited.port, invited.key) == (host.url.host, host.url.port, host.url.key)
        spare = host.types("invite", "--note", "spare").strip()
        assert json.loads(host.types("invite", "--list", "--json"))["invitations"][1]["note"] == "spare"
        assert "(spare)" in host.types("invite", "--revoke", spare, "--reason", "not needed")
        revoked = Peer(context).knocks(JoinUrl.parse(spare))
        assert isinstance(revoked, Refuse) and (revoked.code, "not needed" in revoked.reason) == (
            "revoked",
            True,
        )
        uninvited = Peer(context).knocks(host.url)
        assert isinstance(uninvited, Refuse) and uninvited.code == "token"
        ann, bob = Peer(context), Peer(context)
        for peer in (ann, bob):
            peer.enters(invited)
            peer.beats()
        host.types("kick", "--reason", "a test", ann.identity.peer_id[:8])
        gone = ann.hears(Gone)
        assert gone.final and gone.reason.endswith("a test")
        host.types("ban", "--reason", "it lies", bob.identity.peer_id)
        assert json.loads(host.types("ban", "--list", "--json"))["bans"][0]["reason"] == "it lies"
        host.process.send_signal(signal.SIGKILL)
    with hosting(tmp_path, 'mode = "token"') as host:
        banned = Peer(context, bob.identity).knocks(host.url)
        assert isinstance(banned, Refuse) and (banned.code, "it lies" in banned.reason) == ("banned", True)
        Peer(context, ann.identity).enters(host.url)  # it was invited once, and was only sent away
        late = Peer(context).knocks(
            JoinUrl.parse(str(invited).replace(str(invited.port), str(host.url.port), 1))
        )
        assert isinstance(late, Refuse) and "used up: it was for 2" in late.reason
        host.types("ban", "--lift", bob.identity.peer_id)
        Peer(context, bob.identity).enters(host.url)
        host.types("pause", "--reason", "moving house")
        with pytest.raises(UserError, match="nobody called 'zzz'"):
            host.types("kick", "zzz")
        eventually(lambda: "moving house" in host.status()["reason"], "the status says why no round opens")
        host.types("resume")
        for words in (("rewind", "--yes"), ("rewind", "--yes", "1")):
            with pytest.raises(UserError, match="has not learned anything yet"):
                host.types(*words)
        host.types("drain")
        assert host.process.wait(PATIENCE_S) == 0
    with pytest.raises(Unreachable, match="no coordinator answers in"):
        ask(tmp_path / "run.data", Bans())


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("invite x --list --uses 3", "invite: --uses has no place beside --list"),
        ("invite x --revoke lab --note lab", "invite: --note has no place beside --revoke"),
        ("invite x --guests", "invite: --guests goes only with --revoke"),
        ("ban x --list amber-fox", "ban: amber-fox has no place beside --list"),
        ("ban x amber-fox --lift red-fox", "ban: amber-fox has no place beside --lift"),
        ("ban x amber-fox --json", "ban: --json goes only with --list"),
        ("ban x", "ban: name the peer, or --list, or --lift and a peer"),
    ],
)
def test_what_is_asked_of_one_command_at_once_goes_together(typed: str, told: str) -> None:
    """Or nothing is asked of the coordinator at all: a slip makes no invitation and bans nobody."""
    assert str(CliRunner().invoke(app, typed.split()).exception) == told


def test_a_folder_with_a_long_name_has_a_socket_too(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    served = OperatorSocket(folder, lambda order: Reply(text=f"heard {type(order).__name__}"))
    stop = threading.Event()

    def serve() -> None:
        while not stop.wait(0.005):
            served.serve_waiting(time.monotonic())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ask(folder, Bans()).text == "heard Bans"
    finally:
        stop.set()
        thread.join()
        served.close()
    assert not (folder / SOCKET_NAME).exists()


def test_an_order_that_came_before_a_standstill_is_obeyed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's clock went on meanwhile; who says nothing is cut off."""
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    served = OperatorSocket(tmp_path, lambda order: Reply(text=f"heard {type(order).__name__}"))
    with contextlib.closing(served), contextlib.ExitStack() as lines:
        speaker, silent = (lines.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        for line in (speaker, silent):
            line.connect(SOCKET_NAME)
        served.serve_waiting(0.0)
        speaker.sendall(msgspec.json.encode(Bans()) + b"\n")
        served.serve_waiting(1000.0)
        assert b"heard Bans" in speaker.recv(1000)
        assert silent.recv(1000) == b""
