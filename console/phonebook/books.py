"""Opens a phone book by what people call it, and looks a run up in several at once.

Called by the commands and by the process that announces a run.  What is found is checked by book.py; what a book
can't do is said, and the others are asked all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from farflung.console.phonebook.book import PhoneBook, RunQuery, by_name, newest
from farflung.console.phonebook.hivemind_book import HivemindBook
from farflung.protocol.errors import FarflungError
from farflung.protocol.join_url import Whereabouts


def opened(book: str) -> PhoneBook:
    """For somebody who only asks and puts: no node of it."""
    return HivemindBook((book,), client=True)


@dataclass
class FoundRuns:
    runs: list[Whereabouts] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # of books that could not be asked


def look_up(
    wanted: RunQuery,
    books: Sequence[str],
    wall_s: Callable[[], float],
    open_book: Callable[[str], PhoneBook] = opened,
) -> FoundRuns:
    """The newest of each run, whichever book has it."""
    found, raws = FoundRuns(), list[bytes]()
    for book in books:
        try:
            asked = open_book(book)
            try:
                raws += asked.find(wanted.key) if wanted.key else asked.named(wanted.name)
            finally:
                asked.close()
        except FarflungError as error:
            found.problems.append(f"{book}: {error}")
    if wanted.key:
        run = newest(raws, wall_s(), wanted.key, wanted.name)
        found.runs = [run] if run is not None else []
    else:
        found.runs = by_name(raws, wall_s(), wanted.name)
    return found


@dataclass
class Putting:
    """Puts each new record into all books; a book that can't be opened is tried again with the next one."""

    books: Sequence[str]
    open_book: Callable[[str], PhoneBook] = opened
    _open: dict[str, PhoneBook] = field(default_factory=dict)

    def put(self, said: Whereabouts) -> dict[str, int | str]:
        """At how many places each book has it now; or why it has not."""
        told: dict[str, int | str] = {}
        for book in self.books:
            try:
                if book not in self._open:
                    self._open[book] = self.open_book(book)
                told[book] = self._open[book].put(said)
            except FarflungError as error:
                told[book] = str(error)
        return told

    def close(self) -> None:
        for each in self._open.values():
            each.close()
        self._open.clear()
