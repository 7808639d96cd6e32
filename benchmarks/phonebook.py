"""Phone books of five real nodes on loopback: how long a find by key takes, and what becomes of forged and old records.

    python benchmarks/phonebook.py [--kind bittorrent hivemind] [--finds 40] [--json]

bittorrent: five nodes of libtorrent, and our own client (BEP 44). hivemind: five nodes of its DHT, each with our
rule. Forged and old records are put by somebody who keeps no rule: into the BitTorrent DHT by a client that signs
with another key, or with none, or says an older number; into hivemind's by a node without the rule, under the run's
own name.  What is counted is what a finder believes afterwards, and how many puts some node took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.console.phonebook.bencode import to_sign
from farflung.console.phonebook.bittorrent import BitTorrentBook, BitTorrentNode
from farflung.console.phonebook.book import LIFE_S, Entry, PhoneBook, newest
from farflung.console.phonebook.hivemind_book import HivemindBook, key_name, run_name
from farflung.protocol.errors import FarflungError
from farflung.protocol.join_url import Address, Whereabouts

NODES = 5
GOAL_MS = 50.0
PATIENCE_S = 60.0
# Of libtorrent: all nodes and all askers have one address here, which would count as a flood.
ON_LOOPBACK = {"dht_block_ratelimit": 1_000_000, "dht_upload_rate_limit": 10_000_000}


@dataclass
class Figures:
    kind: str
    find_median_ms: float = 0.0
    find_max_ms: float = 0.0
    put_ms: float = 0.0
    forged: int = 0
    forged_believed: int = 0
    forged_taken: int = 0
    by_name: int = -1  # runs found by the name; -1: this kind finds keys only

    @property
    def is_good(self) -> bool:
        return self.find_median_ms <= GOAL_MS and self.forged_believed == 0 and self.forged_taken == 0


class Run:
    """The key of a run, and the records that it signs."""

    def __init__(self) -> None:
        self.secret = Ed25519PrivateKey.generate()
        self.public = self.secret.public_key().public_bytes_raw()

    def prove(self, statement: bytes) -> bytes:
        return self.public + self.secret.sign(statement)

    def said(self, number: int, address: str = "a.example:29800", life_s: int = LIFE_S) -> Whereabouts:
        expires_s = round(time.time()) + life_s
        return Whereabouts("demo", 1, number, (address,), expires_s, b"").signed(self.prove)

    def entry(self, said: Whereabouts) -> Entry:
        return Entry(said, self.public, self.secret.sign(to_sign(said.order, said.raw)))


def forgeries(run: Run, good: Whereabouts) -> Iterator[Entry]:
    """What somebody without the run's key can put, or with a record of the run's that is old."""
    thief = Run()
    evil = msgspec.structs.replace(good, addresses=("evil.example:1",), number=good.number + 1)
    yield Entry(evil, run.public, os.urandom(64))
    yield Entry(evil, run.public, thief.secret.sign(to_sign(evil.order, evil.raw)))
    yield Entry(evil, run.public, run.secret.sign(to_sign(good.order, good.raw)))
    yield Entry(evil.signed(thief.prove), run.public, thief.secret.sign(to_sign(evil.order, evil.raw)))
    # It was true some minutes ago, so it ends sooner.
    old = run.said(good.number - 1, "old.example:1", LIFE_S - 600)
    yield run.entry(old)


def put_unruled(book: PhoneBook, entry: Entry, unruled: Any) -> int:
    """By somebody who keeps no rule; how many took it."""
    if unruled is None:
        return book.put(entry)
    said, late = entry.whereabouts, time.time() + 10 * LIFE_S
    taken = 0
    for expires_s in (float(said.expires_s), late):
        taken += bool(unruled.store(key_name(RUN_KEY[0]), said.raw, expires_s))
        taken += bool(unruled.store(run_name("demo"), said.raw, expires_s, subkey=RUN_KEY[0]))
    return taken


RUN_KEY: list[bytes] = []  # of the run that is attacked


def measured(kind: str, books: list[PhoneBook], finds: int, unruled: Any = None) -> Figures:
    figures, run = Figures(kind), Run()
    good = run.said(5)
    RUN_KEY[:] = [good.key]
    until = time.monotonic() + PATIENCE_S
    while True:  # until the nodes know each other
        began = time.monotonic()
        taken = books[0].put(run.entry(good))
        figures.put_ms = 1000 * (time.monotonic() - began)
        if taken >= (NODES if kind == "bittorrent" else 2):
            break
        if time.monotonic() > until:
            raise SystemExit(f"{kind}: only {taken} nodes took the record")
        time.sleep(0.5)

    def found(book: PhoneBook) -> Whereabouts | None:
        return newest(book.find(good.key), time.time(), good.key)

    took = []
    for at in range(finds):
        began = time.monotonic()
        assert found(books[at % len(books)]) == good, "another record than the run's"
        took.append(1000 * (time.monotonic() - began))
    figures.find_median_ms, figures.find_max_ms = statistics.median(took), max(took)
    for at, entry in enumerate(forgeries(run, good)):
        figures.forged += 1
        figures.forged_taken += put_unruled(books[at % len(books)], entry, unruled)
        figures.forged_believed += sum(found(book) != good for book in books)
    with contextlib.suppress(FarflungError):
        figures.by_name = len(books[-1].named("demo"))
    newer = run.said(6, "new.example:1", LIFE_S + 10)
    books[-1].put(run.entry(newer))
    assert found(books[0]) == newer, "the run's own next record was not found"
    return figures


def bittorrent(finds: int) -> Figures:
    with contextlib.ExitStack() as stack:
        nodes: list[BitTorrentNode] = []
        for _ in range(NODES):
            known = tuple(Address("127.0.0.1", each.port) for each in nodes)
            node = BitTorrentNode(Address("127.0.0.1", 0), known, ON_LOOPBACK)
            nodes.append(stack.enter_context(contextlib.closing(node)))
        books: list[PhoneBook] = []
        for node in nodes:
            book = BitTorrentBook((Address("127.0.0.1", node.port),))
            books.append(stack.enter_context(contextlib.closing(book)))
        return measured("bittorrent", books, finds)


def hivemind(finds: int) -> Figures:
    import hivemind as theirs

    with contextlib.ExitStack() as stack:
        books: list[PhoneBook] = []
        begin: tuple[str, ...] = ()
        for _ in range(NODES):
            book = HivemindBook(begin)
            begin = begin or book.places
            books.append(stack.enter_context(contextlib.closing(book)))
        unruled = theirs.DHT(
            initial_peers=list(begin), start=True, use_relay=False, use_auto_relay=False, use_ipfs=False
        )
        stack.callback(unruled.shutdown)
        return measured("hivemind", books, finds, unruled)


KINDS: dict[str, Callable[[int], Figures]] = {"bittorrent": bittorrent, "hivemind": hivemind}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kind", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--finds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [KINDS[kind](asked.finds) for kind in asked.kind]
    if asked.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(
            "| 5 nodes, loopback | find by key, ms, median (max) | put, ms | forged or old: believed, taken |"
        )
        print("|---|---|---|---|")
        for row in rows:
            found = f"{row.find_median_ms:.1f} ({row.find_max_ms:.1f})"
            refused = f"{row.forged_believed} and {row.forged_taken} of {row.forged}"
            print(f"| {row.kind} | {found} | {row.put_ms:.0f} | {refused} |")
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
