"""A coordinator that moves: how long its peers take to find it, with the real program on loopback.

    python benchmarks/moved.py [--peers 3] [--json]

The coordinator is killed and started again at another port of this machine, with its journal, as somebody does whose
host has died.  The ways to learn of the new place:

    told     both places stood in the list that the coordinator signed before (`--public` twice); peers have the old URL
    asked    the list named the old place alone; one peer has a URL with both, the others ask their fellows (WHERE)
    file     a peer that was in the run, is started again with the old URL, and kept the list of the first case
    book     nobody knew the new place: it stands in a phone book (one node of hivemind's DHT), which all may ask
    newcomer somebody who was never in the run, with the old URL and that phone book

Without a book, a newcomer whose URL names the old place alone finds nobody.  Times are from the moment when the new
coordinator lets peers in; those of a peer that is started then, from its start, so with the start of the program.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from farflung.console.screen.status_client import StatusClient
from farflung.protocol.join_url import Address, JoinUrl

PATIENCE_S = 120.0
GOAL_S = 15.0
FOLLOW = ("told", "asked", "book")  # what peers do that were in the run all the while
RUN_TOML = """
[run]
name = "moved"
rounds = 100000
[model]
layers = 1
width = 16
heads = 2
context = 16
[data]
batch = 2
[round]
sync_every = 200
chunk_kb = 64
[net]
heartbeat_s = 1.0
dead_after_s = 5.0
"""
_FOUND = re.compile(r"in touch with the coordinator at (\S+)")


@dataclass
class Party:
    process: subprocess.Popen[str]
    log: Path
    skipped_chars: int = 0

    def found(self) -> list[str]:
        """Where it got in touch, since it was last told to forget."""
        return _FOUND.findall(self.log.read_text(errors="replace")[self.skipped_chars :])

    def forget(self) -> None:
        self.skipped_chars = len(self.log.read_text(errors="replace"))


@dataclass
class Stage:
    folder: Path
    peers: list[Party] = field(default_factory=list)
    coordinator: Party | None = None
    url: JoinUrl | None = None
    others: list[Party] = field(default_factory=list)
    book: str = ""

    def open_book(self) -> None:
        """A node of a phone book; all peers and the coordinator know its place."""
        listen = f"127.0.0.1:{free_port()}"
        node = self._start("book", ["phonebook", "--listen", listen], subprocess.PIPE)
        assert node.process.stdout is not None
        self.book = node.process.stdout.readline().strip()
        self.others.append(node)
        if not self.book:
            raise SystemExit(f"the phone book did not start:\n{node.log.read_text()}")

    def coordinate(self, port: int, public: list[str]) -> None:
        (self.folder / "run.toml").write_text(RUN_TOML)
        words = ["coordinate", str(self.folder / "run.toml"), "--plain", "--json"]
        words += ["--listen", f"127.0.0.1:{port}"]
        for each in public:
            words += ["--public", each]
        if self.book:
            words += ["--announce", self.book]
        self.coordinator = self._start(f"coordinator-{port}", words, subprocess.PIPE)
        assert self.coordinator.process.stdout is not None
        line = self.coordinator.process.stdout.readline()
        if not line:
            raise SystemExit(f"the coordinator did not start:\n{self.coordinator.log.read_text()}")
        self.url = JoinUrl.parse(json.loads(line)["url"])

    def join(self, name: str, url: JoinUrl) -> Party:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        words = ["join", "--plain", "--identity", str(home / "identity.pem")]
        words += ["--book", self.book, str(url)] if self.book else [str(url)]
        party = self._start(name, words, None)
        self.peers.append(party)
        return party

    def _start(self, name: str, words: list[str], stdout: int | None) -> Party:
        log = self.folder / f"{name}.log"
        with log.open("a") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "farflung", *words],
                stdin=subprocess.DEVNULL,
                stdout=file if stdout is None else stdout,
                stderr=file,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        return Party(process, log)

    def met(self) -> bool:
        """All peers were in one round: so each has heard of each, and may ask it where the coordinator went."""
        assert self.url is not None
        with StatusClient(self.url) as client:
            rounds = client.fetch(10.0)["rounds"]
        return any(len(each["included"]) == len(self.peers) for each in rounds)

    def kill_coordinator(self) -> None:
        assert self.coordinator is not None
        self.coordinator.process.kill()
        self.coordinator.process.wait()

    def close(self) -> None:
        parties = [*self.peers, *self.others]
        parties += [self.coordinator] if self.coordinator is not None else []
        for party in parties:
            party.process.kill()
            party.process.wait()


def until(done: Callable[[], bool], what: str) -> float:
    """Seconds until it was so."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > PATIENCE_S:
            raise SystemExit(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - began


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def moved(folder: Path, count: int, how: str) -> dict[str, float]:
    """What the slowest peer took to find the new place; and one that is started then, where it can find it."""
    stage, old, new = Stage(folder), free_port(), free_port()
    both = [f"127.0.0.1:{old}", f"127.0.0.1:{new}"]
    try:
        if how == "book":
            stage.open_book()
        stage.coordinate(old, both if how == "told" else both[:1])
        assert stage.url is not None
        run, key = stage.url.run, stage.url.key
        old_url = JoinUrl("127.0.0.1", old, run, key)
        knows = JoinUrl("127.0.0.1", old, run, key, None, (Address("127.0.0.1", new),))
        for at in range(count):
            stage.join(f"peer-{at}", knows if at == 0 and how == "asked" else old_url)
        until(lambda: all(each.found() for each in stage.peers), "all peers in the run")
        until(stage.met, "a round of all peers")
        for each in stage.peers:
            each.forget()
        stage.kill_coordinator()
        stage.coordinate(new, both[1:])
        figures = {how: until(lambda: all(each.found() for each in stage.peers), "all at the new place")}
        if how == "told":
            stage.peers[-1].process.kill()
            stage.peers[-1].process.wait()
            stage.peers[-1].forget()
            back = stage.join(f"peer-{count - 1}", old_url)
            back.skipped_chars = stage.peers[count - 1].skipped_chars
            figures["file"] = until(lambda: bool(back.found()), "it is back")
        if how == "book":
            late = stage.join("newcomer", old_url)
            figures["newcomer"] = until(lambda: bool(late.found()), "the newcomer is in")
        return figures
    finally:
        stage.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--how", nargs="+", choices=FOLLOW, default=FOLLOW)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    figures: dict[str, float] = {}
    for how in asked.how:
        with tempfile.TemporaryDirectory() as folder:
            figures |= moved(Path(folder), asked.peers, how)
    if asked.json:
        print(json.dumps(figures))
    else:
        print("| a coordinator that moved | the slowest peer, s | goal, s |\n|---|---|---|")
        rows = {
            "told": "both places were in its list",
            "asked": "one peer knew the new place, the others asked it",
            "file": "a peer started again with the old URL, from its start",
            "book": "nobody knew the new place, a phone book did",
            "newcomer": "somebody new with the old URL and the phone book, from its start",
        }
        for name, figure in figures.items():
            goal = f"{GOAL_S:g}" if name in FOLLOW else ""
            print(f"| {rows[name]} | {figure:.1f} | {goal} |")
    return 0 if all(figures[name] <= GOAL_S for name in FOLLOW if name in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
