"""Attacks from outside on a small live run: is each of them refused, and do the members notice?

    python benchmarks/adversary.py                      # all of them, about four minutes
    python benchmarks/adversary.py loris bomb --windows 1 --seconds 4

A real coordinator and three real peers with a light trainer (arena.py).  For each attack quiet and attacked windows
take turns, and the pace of the run in both is compared.  The attacker is a process of its own with low priority, so
that on two cores its own work does not pass for harm.  With --write the table goes into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from farflung.console.screen.status_client import StatusClient
from farflung.coordinator.operator_socket import ask
from farflung.peer.identity import Identity
from farflung.protocol import messages
from farflung.protocol.digests import hash_bytes
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import CONTROL_FRAME_BYTES, PROTOCOL_VERSION
from farflung.protocol.messages import DOOR_OUT, Ban, Challenge, Hello, Knock, Leave, Refuse, Welcome
from farflung.protocol.process.sockets import curve_raw, curve_text
from farflung.protocol.signed_words import hello_part
from rig import shams

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
MODEL = shams.model_of(os.environ)
DATA_FOLDER = "FARFLUNG_ATTACKED"  # for whom has to be banned first: where the operator's socket is
GOAL = 0.03
CONNECTIONS, DIALS_AT_ONCE = 5000, 250
ANSWER_MS = 3000


@dataclass
class Score:
    """Of an attacker: what it tried, and how often it was refused or cut off."""

    tries: int = 0
    refused: int = 0
    ending: bool = False  # nothing new is begun

    def tell(self) -> None:
        print(json.dumps({"tries": self.tries, "refused": self.refused}), flush=True)


# ---- the attacks: each yields when it has done a little ------------------------------------------------------


def slow_loris(url: JoinUrl, ports: list[int], score: Score) -> Iterator[None]:
    """Connections that send their greeting a byte at a time, and never finish."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48)
    held: dict[socket.socket, int] = {}
    selector = selectors.DefaultSelector()
    while True:
        while len(held) < 200 and not score.ending:
            one = socket.create_connection((url.host, random.choice(ports)), 5)
            one.setblocking(False)
            held[one] = 0
            selector.register(one, selectors.EVENT_READ)
            score.tries += 1
        for one, at in list(held.items()):
            try:
                one.send(greeting[at : at + 1])
                held[one] = min(at + 1, len(greeting) - 1)
            except OSError:
                pass  # what was closed is seen below
        for key, _ in selector.select(0):
            one = key.fileobj  # type: ignore[assignment]
            try:
                over = not one.recv(4096)
            except OSError:
                over = True
            if over:
                selector.unregister(one)
                one.close()
                del held[one]
                score.refused += 1
        yield from pause(0.5)


def garbage(url: JoinUrl, ports: list[int], score: Score) -> Iterator[None]:
    """Random bytes, and web browsers."""
    while True:
        for port in ports:
            with socket.create_connection((url.host, port), 5) as one:
                one.settimeout(6)
                score.tries += 1
                try:
                    one.sendall(random.choice((os.urandom(2000), b"GET / HTTP/1.1\r\n\r\n" * 50)))
                    while one.recv(4096):
                        pass
                    score.refused += 1
                except TimeoutError:
                    pass
                except OSError:
                    score.refused += 1
        yield from pause(0.05)


def bomb(url: JoinUrl, ports: list[int], score: Score) -> Iterator[None]:
    """Messages of thousands of parts, and frames that are far too long."""
    while True:
        for parts in (
            [bytes(1000)] * 5000,
            [bytes(2 * CONTROL_FRAME_BYTES)],
            [bytes(CONTROL_FRAME_BYTES + 100)],
        ):
            with Caller(url, ports[0]) as caller:
                score.tries += 1
                caller.socket.send_multipart(parts)
                caller.socket.send(messages.encode(Knock(protocol=PROTOCOL_VERSION, run=url.run)))
                score.refused += not caller.was_cut_or_unanswered_before()
        yield from pause(0.5)


def replay(url: JoinUrl, ports: list[int], score: Score) -> Iterator[None]:
    """A good hello, said again: over the same connection, and over another one."""
    identity = Identity.generate()
    while True:
        with Caller(url, ports[0]) as caller, Caller(url, ports[0]) as other:
            said = caller.hello(identity, identity)
            caller.ask(said)
            for again in (caller, other):
                score.tries += 1
                score.refused += isinstance(again.ask(said), Refuse)
        yield from pause(0.2)


def squatting(url: JoinUrl, ports: list[int], score: Score) -> Iterator[None]:
    """Hellos in the name of a member, signed by somebody else."""
    with StatusClient(url) as client:
        assert client.fetch(5.0)["members"]
    victim, thief = Identity.generate(), Identity.generate()
    while True:
        with Caller(url, ports[0]) as caller:
            score.tries += 1
            score.refused += isinstance(caller.ask(caller.hello(victim, thief)), Refuse)
        yield from pause(0.2)


def forged(url: JoinUrl, ports: list[int], score: Score) -> Iterator[None]:
    """Keys that were never let in at the members' ports; at the door a hello with another connection's key."""
    while True:
        for port in ports[1:]:
            with Caller(url, port) as caller:
                score.tries += 1
                caller.socket.send(messages.encode(Leave(session=bytes(16), seq=1, reason="")))
                score.refused += not caller.socket.poll(300)
        with Caller(url, ports[0]) as caller:
            score.tries += 1
            identity = Identity.generate()
            score.refused += isinstance(
                caller.ask(caller.hello(identity, identity, key=os.urandom(32))), Refuse
            )
        yield from pause(0.2)


def banned(url: JoinUrl, ports: list[int], score: Score) -> Iterator[None]:
    """Peers that were in, and were banned: at the door again, and at the members' port with the key that was let in."""
    folder, known = Path(os.environ[DATA_FOLDER]), list[tuple[Identity, Caller, bytes]]()
    for _ in range(3):
        identity, caller = Identity.generate(), Caller(url, ports[0])
        welcome = caller.ask(caller.hello(identity, identity))
        assert isinstance(welcome, Welcome), welcome
        assert ask(folder, Ban(who=identity.peer_id, reason="a benchmark", lasts_s=3600.0)).ok
        known.append((identity, caller, welcome.session))
    while True:
        for identity, let_in, session in known:
            with Caller(url, ports[0]) as caller:
                score.tries += 1
                said = caller.ask(caller.hello(identity, identity))
                score.refused += isinstance(said, Refuse) and said.code == "banned"
            for port in ports[1:]:
                with Caller(url, port, let_in.keys) as caller:
                    score.tries += 1
                    caller.socket.send(messages.encode(Leave(session=session, seq=1, reason="")))
                    score.refused += not caller.socket.poll(300)
        yield from pause(0.2)


def peers(url: JoinUrl, ports: list[int], score: Score) -> Iterator[None]:
    """5,000 connections at the ports of peers that say nothing, each dialled again as soon as it is cut."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    held: set[socket.socket] = set()
    selector = selectors.DefaultSelector()
    while True:
        for _ in range(min(DIALS_AT_ONCE, CONNECTIONS - len(held)) if not score.ending else 0):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex((url.host, random.choice(ports)))
            held.add(one)
            selector.register(one, selectors.EVENT_READ)
            score.tries += 1
        for key, _ in selector.select(0):
            one = key.fileobj  # type: ignore[assignment]
            try:
                over = not one.recv(4096)
            except OSError:
                over = True
            if over:
                selector.unregister(one)
                one.close()
                held.remove(one)
                score.refused += 1
        yield from pause(0.02)


def elsewhere(url: JoinUrl, ports: list[int], score: Score) -> Iterator[None]:
    """The same against a process that takes each connection and closes it, and has no part in the run: what of the
    harm is this machine's own, on which the attacker has no cores of its own."""
    with socket.create_server((url.host, 0), backlog=4096) as listener:
        multiprocessing.get_context("fork").Process(target=_closes_all, args=(listener,), daemon=True).start()
        yield from peers(url, [listener.getsockname()[1]], score)


def _closes_all(listener: socket.socket) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        listener.accept()[0].close()


ATTACKS: dict[str, Callable[[JoinUrl, list[int], Score], Iterator[None]]] = {
    "loris": slow_loris,
    "garbage": garbage,
    "bomb": bomb,
    "replay": replay,
    "squatting": squatting,
    "forged": forged,
    "banned": banned,
    "peers": peers,
    "elsewhere": elsewhere,
}


def pause(seconds: float) -> Iterator[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)
        yield


class Caller:
    """A CURVE connection with a key of its own."""

    def __init__(self, url: JoinUrl, port: int, keys: tuple[bytes, bytes] | None = None) -> None:
        self.url, self.port = url, port
        self.keys = self.public, secret = keys or zmq.curve_keypair()
        self.context: zmq.Context[zmq.SyncSocket] = zmq.Context.instance()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_publickey, self.socket.curve_secretkey = self.public, secret
        self.socket.curve_serverkey = curve_text(url.key)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.connect(f"tcp://{url.host}:{port}")

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, message: Any) -> Any:
        self.socket.send(messages.encode(message))
        if not self.socket.poll(ANSWER_MS):
            return None
        return messages.decode(self.socket.recv(), frozenset(DOOR_OUT))

    def hello(self, who: Identity, signer: Identity, key: bytes = b"") -> Hello:
        challenge = self.ask(Knock(protocol=PROTOCOL_VERSION, run=self.url.run))
        assert isinstance(challenge, Challenge), challenge
        bare = Hello(
            protocol=PROTOCOL_VERSION, run_id=challenge.run_id, identity=who.public, key=key or curve_raw(self.public),
            address="", software="x", manifest=hash_bytes(challenge.manifest), model=MODEL,
                fragments=(0,), version=-1, digest=b"",
            process=os.urandom(16), token="",
            signature=b"",
        )  # fmt: skip
        return msgspec.structs.replace(bare, signature=signer.sign(hello_part(bare, challenge.nonce)))

    def was_cut_or_unanswered_before(self) -> bool:
        """True if something else than the answer to the knock came first."""
        if not self.socket.poll(1000):
            return False  # it was cut off
        return not isinstance(messages.decode(self.socket.recv(), frozenset(DOOR_OUT)), Challenge)


def attack(name: str, url: str, ports: list[int]) -> None:
    """The attacker's process: until it is told to stop."""
    os.nice(19)
    score, asked, until = Score(), list[int](), math.inf
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    for _ in ATTACKS[name](JoinUrl.parse(url), ports, score):
        if asked and not score.ending:
            score.ending, until = True, time.monotonic() + 10.0
        waits = (
            name in ("loris", "peers", "elsewhere")
            and score.refused < score.tries
            and time.monotonic() < until
        )
        if score.ending and not waits:
            break
    score.tell()


# ---- the run -------------------------------------------------------------------------------------------------


def listening_ports(pid: int) -> list[int]:
    """TCP ports that this process listens on."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(found)


def rss_mb(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024  # type: ignore[index]


def median_period(arena: Any, begun: float, ended: float) -> float:
    """Between two commits, in seconds."""
    times = [
        e["at"] for e in arena.coordinator.look() if e["event"] == "committed" and begun <= e["at"] <= ended
    ]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def measure(arena: Any, name: str, options: argparse.Namespace) -> str:
    from rig import light_trainer  # not above: the attacker needs no torch
    from rig.arena import CHUNK_KB

    pid = arena.coordinator.process.pid
    door = JoinUrl.parse(arena.url).port
    peers = [party.process.pid for key, party in arena.parties.items() if key != "coordinator"]
    ports = [port for p in peers for port in listening_ports(p)]
    if name != "peers":
        ports = [door, *[port for port in listening_ports(pid) if port != door], *ports]
    quiet, hurt, total, most = [], [], Score(), rss_mb(pid)
    model = arena.folder / "model.msgpack"
    light_trainer.write_schema(model, CHUNK_KB)
    for _ in range(options.windows):
        begun = time.monotonic()
        time.sleep(options.seconds)
        quiet.append(median_period(arena, begun, time.monotonic()))
        words = [sys.executable, __file__, "--attack", name, arena.url, *map(str, ports)]
        environ = os.environ | {DATA_FOLDER: str(arena.folder / "run.data"), shams.VARIABLE: str(model)}
        attacker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ)
        time.sleep(2.0)  # it imports, and gets going
        begun = time.monotonic()
        while time.monotonic() < begun + options.seconds:
            time.sleep(0.1)
            most = max(most, rss_mb(pid))
        hurt.append(median_period(arena, begun, time.monotonic()))
        attacker.terminate()
        told = json.loads(attacker.communicate(timeout=30)[0])
        total.tries, total.refused = total.tries + told["tries"], total.refused + told["refused"]
    before, after = statistics.median(quiet), statistics.median(hurt)
    change = (after - before) / before
    row = (
        f"| {name} | {total.tries} | {100 * total.refused / max(1, total.tries):.0f} % | {before:.3f} s | "
        f"{after:.3f} s | {100 * change:+.1f} % | {'yes' if change <= GOAL else '**no**'} | {most:.0f} MB |"
    )
    print(row, flush=True)
    return row


HEAD = (
    "| attack | tries | refused | a commit every, quiet | attacked | change | within 3 % | coordinator |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    from pages import write_between

    from rig.arena import Arena
    from rig.nursery import Nursery

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("attacks", nargs="*", help=f"of {', '.join(ATTACKS)} [all]")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each window")
    parser.add_argument("--windows", type=int, default=2, help="quiet ones and attacked ones, of each attack")
    parser.add_argument("--write", action="store_true", help="into docs/reliability.md")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, Nursery(Path(folder)) as nursery:
        arena = Arena(Path(folder) / "run", nursery, sync_every=20)
        try:
            arena.begin("ann", "bob", "cyd")
            print(HEAD, flush=True)
            rows = [measure(arena, name, options) for name in options.attacks or ATTACKS]
        finally:
            arena.close()
        report = arena.audit()
        print("audit:", "good" if report.kept else "\n".join(report.lines()))
    options_told = f"--seconds {options.seconds:g} --windows {options.windows}"
    if options.write:
        write_between(
            PAGE,
            "adversary",
            "\n".join([f"`python benchmarks/adversary.py {options_told}`: three peers.", "", HEAD, *rows]),
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        attack(sys.argv[2], sys.argv[3], [int(port) for port in sys.argv[4:]])
    else:
        main()
