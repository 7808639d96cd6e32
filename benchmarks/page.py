"""What the page of a run costs: its first view, and its updates with 1,000 members and 200 viewers.

    python benchmarks/page.py [--members 1000] [--viewers 200] [--seconds 40]

The page's own server runs in a process of its own, as in `farflung coordinate --web`, and makes an edition of a status
as often as there.  The statuses are those of a real run machine whose members' figures all change between two of them.
The viewers are sockets of this process, half of them with gzip.  The first view is timed in headless Chromium where it
is installed; its bytes are counted with style sheet, script and icon.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import selectors
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from farflung.console.web.page_process import Press, assets, pause_s
from farflung.console.web.server import PageServer
from farflung.coordinator.run.status import status_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from rig.browser import Browser, BrowserMissing
from rig.crowd import crowd
from rig.public_run import public_status

URL = "farflung://train.example.org:29800/demo?k=" + 43 * "A"
STATUSES = 12
FIRST_VIEW = ("/", "/page.css", "/page.js", "/icon.svg")


def statuses(members: int) -> tuple[list[bytes], float]:
    """Of one run, some seconds after each other; and the milliseconds that a coordinator takes to make one."""
    machine, chance, made, spent_s = crowd(members), random.Random(1), [], 0.0
    machine.core.ledger.peers.names = {
        peer: each.contact.name for peer, each in machine.core.members.alive.items()
    }
    for number in range(STATUSES):
        for peer, member in machine.core.members.alive.items():
            assert member.beat is not None
            member.beat = msgspec.structs.replace(member.beat, step=100 * number, loss=chance.uniform(2, 3))
            member.pace.tokens_per_s = chance.uniform(1e3, 9e3)
            machine.core.ledger.peers.tokens[peer] += round(chance.expovariate(1e-6))
        machine.core.now = 5.0 * number
        begun = time.process_time()
        raw = status_json(machine.core, machine.drivers, machine.counters, machine.core.now)
        spent_s += time.process_time() - begun
        curve = public_status(tick=number)["curve"]
        made.append(json.dumps(json.loads(raw) | {"curve": curve, "version": number, "target": 100}).encode())
    return made, 1000 * spent_s / STATUSES


def serve(listener: socket.socket, told: list[bytes], ours: Connection) -> None:
    """The process of the page.  Answers each word with (CPU seconds, bytes sent, editions)."""
    found, version = assets()
    server, press = PageServer(listener, found), Press(URL, version)
    stop, editions = threading.Event(), 0

    def publish() -> None:
        nonlocal editions
        while True:
            status = json.loads(told[editions % len(told)])
            server.publish(press.edition(status))
            editions += 1
            if stop.wait(pause_s(status["alive"], server.idle_s(time.monotonic()))):
                return

    threads = [threading.Thread(target=each) for each in (publish, server.serve)]
    for each in threads:
        each.start()
    while ours.recv() != "end":
        ours.send((time.process_time(), server.sent_bytes, editions, server.viewers))
    stop.set()
    server.stop()
    for each in threads:
        each.join()


class Viewers:
    """They read what comes, and count it."""

    def __init__(self, address: Any, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self.came = 0
        for number in range(count):
            line = socket.create_connection(address)
            wish = "Accept-Encoding: gzip\r\n" if number % 2 else ""
            line.sendall(f"GET /live HTTP/1.1\r\n{wish}\r\n".encode())
            line.setblocking(False)
            self._selector.register(line, selectors.EVENT_READ)

    def look(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                assert isinstance(key.fileobj, socket.socket)
                came = len(key.fileobj.recv(1 << 20))
                if not came:
                    raise SystemExit("a viewer was cut off")
                self.came += came


def size_of(address: Any, path: str, gzip: bool) -> int:
    with socket.create_connection(address) as line:
        wish = "Accept-Encoding: gzip\r\n" if gzip else ""
        line.sendall(f"GET {path} HTTP/1.1\r\n{wish}\r\n".encode())
        size = 0
        while came := line.recv(1 << 16):
            size += len(came)
    return size


def first_view_s(address: Any) -> float | None:
    """The slowest of three loads by a browser that has nothing of it yet."""
    slowest = 0.0
    for _ in range(3):
        try:
            made = Browser()
        except BrowserMissing:
            return None
        with made as browser:
            slowest = max(slowest, browser.open(f"http://{address[0]}:{address[1]}/"))
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    told, status_ms = statuses(options.members)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(listener, told, theirs))
    process.start()
    address = listener.getsockname()
    time.sleep(1.0)

    def figures() -> tuple[float, int, int, int]:
        ours.send("figures")
        found: tuple[float, int, int, int] = ours.recv()
        return found

    for gzip in (False, True):
        total = sum(size_of(address, path, gzip) for path in FIRST_VIEW)
        print(f"first view, {'gzip' if gzip else 'plain'}: {total / 1000:.1f} kB, goal 100 kB")
    took_s = first_view_s(address)
    print("first view: no Chromium here" if took_s is None else f"first view: {took_s:.2f} s, goal 1 s")
    viewers = Viewers(address, options.viewers)
    viewers.look(6.0)
    cpu_s, sent, editions, looking = figures()
    begun = time.monotonic()
    viewers.look(options.seconds)
    wall_s = time.monotonic() - begun
    cpu_end_s, sent_end, editions_end, _ = figures()
    share, updates = (cpu_end_s - cpu_s) / wall_s, editions_end - editions
    each = (sent_end - sent) / max(1, updates) / max(1, looking)
    print(f"{looking} viewers, {options.members} members, {updates} updates in {wall_s:.0f} s:")
    print(f"  {share:.1%} of a core for all, {share / max(1, looking):.4%} for each, goal 1 %")
    print(f"  {each / 1000:.1f} kB an update for each, half of them with gzip")
    pause = pause_s(options.members, 0.0)
    share = status_ms / 1000 / pause
    print(
        f"the coordinator: {status_ms:.1f} ms for a status every {pause:g} s, {share:.2%} of a core, whoever looks"
    )
    ours.send("end")
    process.join()


if __name__ == "__main__":
    main()
