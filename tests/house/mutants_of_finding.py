"""Mutants of how a coordinator is found: signed lists, doors, fellows that are asked, phone books.  Read by
mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

LISTS = ("tests/protocol/test_join_url.py",)
SEEKING = ("tests/peer/restoring/test_fellow_search.py",)
DOORS = ("tests/peer/line/test_doors.py", "tests/peer/line/test_control_link.py")
BOOKS = ("tests/console/phonebook/test_book.py",)

FINDING = (
    Mutant(
        "a list counts under the run's signature",
        "protocol/join_url.py",
        "return said if proves(said.proof, said.statement) else None",
        "return said",
        LISTS,
    ),
    Mutant(
        "and under the key that the URL pins",
        "protocol/join_url.py",
        "(pinned and url.key != pinned)",
        "False",
        LISTS,
    ),
    Mutant(
        "an older list changes nothing",
        "peer/machine/handshake.py",
        "if self.newest is not None and said.order <= self.newest.order:",
        "if False:",
        SEEKING,
    ),
    Mutant(
        "an answer that nobody asked for is none",
        "peer/restoring/fellow_search.py",
        "if sender not in self._asked:",
        "if False:",
        SEEKING,
    ),
    Mutant(
        "the URL's addresses are tried whatever comes",
        "peer/machine/handshake.py",
        "(*newest, *self._given, *self._before)",
        "(*newest, *self._before)",
        SEEKING,
    ),
    Mutant(
        "of those whom a new coordinator does not know only one question is heard",
        "peer/restoring/fellow_search.py",
        "return isinstance(frame.header.kind, WhereKind) or sender in self._former",
        "return isinstance(frame.header.kind, WhereKind)",
        SEEKING,
    ),
    Mutant(
        "a replaced coordinator's address comes last",
        "peer/line/doors.py",
        "self._shunned[self.at] = now + for_s",
        "pass",
        DOORS,
    ),
    Mutant(
        "what is said next is said where the answer came from",
        "peer/line/control.py",
        "self._plan.answered(place)",
        "pass",
        DOORS,
    ),
    Mutant(
        "a record of a phone book expires",
        "console/phonebook/book.py",
        "if said is None or not wall_s < said.expires_s <= wall_s + LIFE_MOST_S:",
        "if said is None:",
        BOOKS,
    ),
    Mutant(
        "of several records the newest counts",
        "console/phonebook/book.py",
        "key=lambda each: each.order, default=None)",
        "key=lambda each: -each.order, default=None)",
        BOOKS,
    ),
    Mutant(
        "nobody keeps a record longer than its run has signed for",
        "console/phonebook/hivemind_book.py",
        "expires_s > said.expires_s + CLOCK_S",
        "False",
        BOOKS,
    ),
)
