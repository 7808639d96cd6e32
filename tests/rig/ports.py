"""Ports for a program that is to be started on a certain one, and again on the same after its death.

Used by arena.py and by tests/real/.  They lie below those that the kernel gives to whoever asks for any port, or dials:
one of these might be taken by another process while the program is away.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator

FIRST, LAST = 20_000, 32_000
# No place twice: who was given a port may be away when another one asks.
_places = itertools.count(37 * os.getpid())


def free_ports(count: int = 1) -> Iterator[int]:
    """The first of so many in a row that are free on loopback in this moment; processes begin at different places."""
    groups = (LAST - FIRST) // count
    for place in itertools.islice(_places, groups):
        port = FIRST + count * (place % groups)
        with contextlib.ExitStack() as taken, contextlib.suppress(OSError):
            for each in range(port, port + count):
                taken.enter_context(socket.socket()).bind(("127.0.0.1", each))
            taken.close()
            yield port
