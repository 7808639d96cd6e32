"""The process that puts a run's records into phone books, beside its coordinator.  It speaks with strangers: it has no
key.

Started by announcer.py as `python -m farflung.console.phonebook.feeder BOOK...`.  Each line that it reads is a
record, signed by the coordinator; each line that it writes says what became of it.  It ends when nobody writes to it
any more.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, TextIO

import msgspec
from msgspec import Meta, Struct

from farflung.console.phonebook.book import place_of
from farflung.console.phonebook.books import Putting
from farflung.protocol.join_url import Whereabouts, whereabouts_of

LINE_BYTES = 4096


class Became(Struct, frozen=True, forbid_unknown_fields=True):
    """Of one record in one book."""

    book: Annotated[str, Meta(max_length=400)]
    places: Annotated[int, Meta(ge=0, le=1000)]
    problem: Annotated[str, Meta(max_length=600)] = ""


def record_in(line: str) -> Whereabouts | None:
    """None: it is none.  Whose it is, is the coordinator's business, and checked where records are read."""
    try:
        raw = msgspec.json.decode(line, type=bytes)
    except (msgspec.MsgspecError, ValueError):  # a line that is no text, too
        return None
    return whereabouts_of(raw, b"")


def feed(lines: Iterable[str], putting: Putting, say: Callable[[str], None]) -> None:
    for line in lines:
        said = record_in(line)
        if said is None:
            continue
        for book, became in putting.put(said).items():
            places, problem = (became, "") if isinstance(became, int) else (0, became[:600])
            say(msgspec.json.encode(Became(book, places, problem)).decode())


def main(words: list[str], read: TextIO, write: TextIO) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator, which then hangs up

    def say(line: str) -> None:
        print(line, file=write, flush=True)

    with contextlib.closing(Putting([place_of(each) for each in words])) as putting:
        feed(read, putting, say)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin, sys.stdout))
