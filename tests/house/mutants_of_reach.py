"""Mutants of who can talk with whom, and of the relay.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

WAYS = ("tests/coordinator/reach/test_ways.py", "tests/coordinator/run/test_relayed_members.py")
MEETING = (
    "tests/coordinator/reach/test_meeting.py",
    "tests/coordinator/run/test_meeting_members.py",
)
TICKETS = ("tests/coordinator/reach/test_tickets.py", "tests/coordinator/relay/test_relay.py")
LEAN = ("tests/collectives/test_records.py", "tests/collectives/test_lean.py")
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
        "whoever can be dialled owns, and others do not",
        "coordinator/reach/ways.py",
        "if dialled or (self.relay is None and not self.meetings.is_on):",
        "if self.relay is None and not self.meetings.is_on:",
        WAYS,
    ),
    Mutant(
        "owners have as few as possible at the relay",
        "coordinator/reach/ways.py",
        "return {peer for peer, count in relayed.items() if count == min(relayed.values())}",
        "return set(relayed)",
        WAYS,
    ),
    Mutant(
        "a connection past routers counts where both say so",
        "coordinator/reach/meeting.py",
        "stands = other.peer in self._said.get(one.key, ()) and one.peer",
        "stands = other.peer in self._said.get(one.key, ()) or one.peer",
        MEETING,
    ),
    Mutant(
        "a pair changes over between rounds",
        "coordinator/reach/meeting.py",
        "self.waits_for_gap = stands and not before and self.is_relayed and is_busy",
        "self.waits_for_gap = False",
        MEETING,
    ),
    Mutant(
        "a pair has one way",
        "coordinator/reach/meeting.py",
        "self.is_punched, self.is_relayed, self._stood_since = True, False, now",
        "self.is_punched, self._stood_since = True, now",
        MEETING,
    ),
    Mutant(
        "a broken connection leaves the relay",
        "coordinator/reach/meeting.py",
        "self.is_punched, self.is_relayed = False, True",
        "self.is_punched = False",
        MEETING,
    ),
    Mutant(
        "so many tries of a pair",
        "coordinator/reach/meeting.py",
        "return self.series < SERIES_MOST and now",
        "return now",
        MEETING,
    ),
    Mutant(
        "two ports are a hard router's",
        "coordinator/reach/meeting.py",
        "if len(set(seen.values())) > 1:",
        "if False:",
        MEETING,
    ),
    Mutant(
        "nobody is sent to a low port",
        "coordinator/reach/meeting.py",
        "if _port_of(seen[DOORS[0]]) >= LEAST_PORT else Nat.LOW",
        "if True else Nat.LOW",
        MEETING,
    ),
    Mutant(
        "nobody is sent into a network of his own",
        "coordinator/reach/meeting.py",
        "and mine.is_global == theirs.is_global and",
        "and",
        MEETING,
    ),
    Mutant(
        "nothing is kept of strangers' looks",
        "coordinator/reach/meeting.py",
        "if key not in self.wanted or self",
        "if self",
        MEETING,
    ),
    Mutant(
        "new sessions buy no new tries",
        "coordinator/reach/meeting.py",
        "return self._quota.take(one.peer, now) and self._quota.take(other.peer, now)",
        "return True",
        MEETING,
    ),
    Mutant(
        "over the relay and at an instant only the contact's own key shakes hands",
        "collectives/link/undialled.py",
        "self.zap.set_policy(domain, theirs.__eq__)",
        "self.zap.set_policy(domain, lambda key: True)",
        ("tests/collectives/test_relay_way.py",),
    ),
    Mutant(
        "whoever is late waits for the next instant",
        "collectives/link/undialled.py",
        "line.tries = min(MEET_TRIES, max(line.tries, missed))",
        "line.tries = min(MEET_TRIES, max(line.tries, 0 * missed))",
        ("tests/collectives/test_undialled.py",),
    ),
    Mutant(
        "what the relay still carries may arrive",
        "collectives/link/undialled.py",
        "elif way is None and line.is_punched:",
        "elif False:",
        ("tests/collectives/test_undialled.py",),
    ),
    Mutant(
        "P8 each direction of a lean connection has a key of its own",
        "collectives/link/records.py",
        "there, back = Direction(keys[:_KEY_BYTES]), Direction(keys[_KEY_BYTES:])",
        "there, back = Direction(keys[:_KEY_BYTES]), Direction(keys[:_KEY_BYTES])",
        LEAN,
    ),
    Mutant(
        "P8 no nonce is used twice",
        "collectives/link/records.py",
        "        self._count += 1",
        "        self._count += 0",
        LEAN,
    ),
    Mutant(
        "P8 after something that does not open, nothing does",
        "collectives/link/records.py",
        "            self._cipher = None",
        "            self._count -= 1",
        LEAN,
    ),
    Mutant(
        "P8 a secret is of these two peers",
        "collectives/link/records.py",
        'whom = b"farflung lean 1" + dialler + listener',
        'whom = b"farflung lean 1" + dialler',
        LEAN,
    ),
    Mutant(
        "P8 both give a half of the secret",
        "collectives/link/records.py",
        "kdf.derive(asked + grant.half)",
        "kdf.derive(asked)",
        LEAN,
    ),
    Mutant(
        "P8 the length of a frame is sealed with it",
        "collectives/link/records.py",
        "head = length + out.seal(header, length)",
        "head = length + out.seal(header)",
        LEAN,
    ),
    Mutant(
        "P8 who asks without end has a few tickets",
        "collectives/link/lean_side.py",
        "            del self._tickets[oldest]",
        "            pass",
        LEAN,
    ),
    Mutant(
        "P3 a cut lean line is noticed although a silent connection stands beside",
        "collectives/link/line.py",
        "silent = [each.silent_since for each in self._usable]",
        "silent = [each.silent_since for each in self.opened]",
        LEAN,
    ),
)
