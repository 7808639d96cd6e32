"""Phone books of five real nodes on loopback: how long a find by key takes, and what becomes of forged and old records.

    python benchmarks/phonebook.py [--finds 40] [--json]

The nodes are of hivemind's DHT, each with our rule. Forged and old records are put by a node without the rule, under
the run's own name.  What is counted is what a finder believes afterwards, and how many puts some node took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.console.phonebook.book import LIFE_S, newest
from farflung.console.phonebook.hivemind_book import HivemindBook, key_name, run_name
from farflung.protocol.join_url import Whereabouts

NODES = 5
GOAL_MS = 50.0
PATIENCE_S = 60.0


@dataclass
class Figures:
    find_median_ms: float = 0.0
    find_max_ms: float = 0.0
    put_ms: float = 0.0
    forged: int = 0
    forged_believed: int = 0
    forged_taken: int = 0
    by_name: int = 0  # runs found by the name

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


def forgeries(run: Run, good: Whereabouts) -> Iterator[Whereabouts]:
    """What somebody without the run's key can put, or with a record of the run's that is old."""
    evil = msgspec.structs.replace(good, addresses=("evil.example:1",), number=good.number + 1)
    yield evil
    yield evil.signed(Run().prove)
    yield msgspec.structs.replace(evil, proof=b"")
    # It was true some minutes ago, so it ends sooner.
    yield run.said(good.number - 1, "old.example:1", LIFE_S - 600)


def put_unruled(said: Whereabouts, key: bytes, unruled: Any) -> int:
    """By somebody who keeps no rule, under the name of the run with this key; how many took it."""
    taken = 0
    for expires_s in (float(said.expires_s), time.time() + 10 * LIFE_S):
        taken += bool(unruled.store(key_name(key), said.raw, expires_s))
        taken += bool(unruled.store(run_name("demo"), said.raw, expires_s, subkey=key))
    return taken


def measured(books: list[HivemindBook], finds: int, unruled: Any) -> Figures:
    figures, run = Figures(), Run()
    good = run.said(5)
    until = time.monotonic() + PATIENCE_S
    while True:  # until the nodes know each other
        began = time.monotonic()
        taken = books[0].put(good)
        figures.put_ms = 1000 * (time.monotonic() - began)
        if taken >= 2:
            break
        if time.monotonic() > until:
            raise SystemExit("no node took the record")
        time.sleep(0.5)

    def found(book: HivemindBook) -> Whereabouts | None:
        return newest(book.find(good.key), time.time(), good.key)

    took = []
    for at in range(finds):
        began = time.monotonic()
        assert found(books[at % len(books)]) == good, "another record than the run's"
        took.append(1000 * (time.monotonic() - began))
    figures.find_median_ms, figures.find_max_ms = statistics.median(took), max(took)
    for said in forgeries(run, good):
        figures.forged += 1
        figures.forged_taken += put_unruled(said, good.key, unruled)
        figures.forged_believed += sum(found(book) != good for book in books)
    figures.by_name = len(books[-1].named("demo"))
    newer = run.said(6, "new.example:1", LIFE_S + 10)
    books[-1].put(newer)
    assert found(books[0]) == newer, "the run's own next record was not found"
    return figures


def measure(finds: int) -> Figures:
    import hivemind

    with contextlib.ExitStack() as stack:
        books: list[HivemindBook] = []
        begin: tuple[str, ...] = ()
        for _ in range(NODES):
            book = HivemindBook(begin)
            begin = begin or book.places
            books.append(stack.enter_context(contextlib.closing(book)))
        unruled = hivemind.DHT(
            initial_peers=list(begin), start=True, use_relay=False, use_auto_relay=False, use_ipfs=False
        )
        stack.callback(unruled.shutdown)
        return measured(books, finds, unruled)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--finds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    row = measure(asked.finds)
    if asked.json:
        print(json.dumps(asdict(row)))
    else:
        print(
            "| 5 nodes, loopback: find by key, ms, median (max) | put, ms | forged or old: believed, taken |"
        )
        print("|---|---|---|")
        found = f"{row.find_median_ms:.1f} ({row.find_max_ms:.1f})"
        refused = f"{row.forged_believed} and {row.forged_taken} of {row.forged}"
        print(f"| {found} | {row.put_ms:.0f} | {refused} |")
    return 0 if row.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
