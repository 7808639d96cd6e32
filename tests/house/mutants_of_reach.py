"""Mutants of who can talk with whom, and of the relay.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

WAYS = ("tests/coordinator/reach/test_ways.py", "tests/coordinator/run/test_relayed_members.py")
TICKETS = ("tests/coordinator/reach/test_tickets.py", "tests/coordinator/relay/test_relay.py")
BOARD = ("tests/coordinator/relay/test_switchboard.py", "tests/coordinator/relay/test_relay.py")

REACH = (
    Mutant(
        "a ticket is signed by the run",
        "coordinator/reach/tickets.py",
        "return ticket if verify(public, run.statement(ticket), signature) else None",
        "return ticket",
        TICKETS,
    ),
    Mutant(
        "a ticket is of one run",
        "coordinator/reach/tickets.py",
        "+ self.run_id + self",
        '+ b"" + self',
        TICKETS,
    ),
    Mutant(
        "a ticket ends",
        "coordinator/relay/switchboard.py",
        "if now > ticket.until_s:",
        "if False:",
        BOARD,
    ),
    Mutant(
        "only pairs that the coordinator wants may meet",
        "coordinator/relay/switchboard.py",
        "if ticket.pair not in self._wanted:",
        "if False:",
        BOARD,
    ),
    Mutant(
        "an older ticket is of no use after a newer one",
        "coordinator/relay/switchboard.py",
        "if ticket.until_s < pair.newest_until_s[side]:",
        "if False:",
        BOARD,
    ),
    Mutant(
        "whoever has had its turn at the relay is last",
        "coordinator/relay/turns.py",
        "self._waiting.move_to_end(pair)",
        "pass",
        ("tests/coordinator/relay/test_turns.py",),
    ),
    Mutant(
        "the relay's rate is one for all",
        "coordinator/relay/turns.py",
        "        self._left -= size",
        "        self._left -= 0",
        ("tests/coordinator/relay/test_turns.py",),
    ),
    Mutant(
        "the relay dials nobody",
        "coordinator/relay/socks.py",
        "if version != _VERSION or command != _CONNECT or kind != _BY_NAME:",
        "if version != _VERSION:",
        ("tests/coordinator/relay/test_socks.py",),
    ),
    Mutant(
        "over the relay only the contact's own key shakes hands",
        "collectives/link/zmq_link.py",
        "self._zap.set_policy(domain, theirs.__eq__)",
        "self._zap.set_policy(domain, lambda key: True)",
        ("tests/collectives/test_relay_way.py",),
    ),
    Mutant(
        "whoever can be dialled owns, and others do not",
        "coordinator/reach/ways.py",
        "if dialled or self.relay is None:",
        "if self.relay is None:",
        WAYS,
    ),
)
