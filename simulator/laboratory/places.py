"""Where the replicas of a simulated run are: how fast each one steps, what its line carries, when it is there.

Read by the laboratory; the file is the user's own.

    [[peers]]
    count = 2                     # so many like this
    step_s = 1.0                  # seconds that a step takes
    up = "5 Mbit/s"               # left out: no limit
    down = "20 Mbit/s"
    delay_ms = 20                 # one way, on this side of the internet
    joins_s = 0                   # seconds after the run began
    away_s = [[600, 900]]         # stopped at the first, started again at the second
"""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.protocol.caps import parse_cap
from farflung.protocol.errors import UserError

PEERS_MOST = 256
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class ReplicaPlace(Struct, frozen=True, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1, le=PEERS_MOST)] = 1
    step_s: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    up: str = "none"
    down: str = "none"
    delay_ms: Annotated[float, Meta(ge=0, le=1e5)] = 10.0
    joins_s: _Seconds = 0.0
    away_s: tuple[tuple[_Seconds, _Seconds], ...] = ()


class _File(Struct, forbid_unknown_fields=True):
    peers: Annotated[list[ReplicaPlace], Meta(min_length=1)]


class VirtualLine:
    """One direction: what is sent waits until what was sent before has passed."""

    def __init__(self, rate: str) -> None:
        self.bytes_per_s = parse_cap(rate).bytes_per_s  # None: no limit
        self._free_s = 0.0

    def pass_s(self, size: int, now: float) -> float:
        """How long until so many bytes have passed."""
        if self.bytes_per_s is None:
            return 0.0
        self._free_s = max(self._free_s, now) + size / self.bytes_per_s
        return self._free_s - now


def places_in(path: Path) -> list[ReplicaPlace]:
    """One for each peer; UserError says what is wrong with the file."""
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
        places = msgspec.convert(read, _File).peers
        for each in places:
            if not (parse_cap(each.up).hours or parse_cap(each.down).hours) and _is_in_order(each):
                continue
            raise UserError("expected lines without hours, and absences that follow joins_s and each other")
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError, UserError) as error:
        raise UserError(f"{path}: {error}") from None
    found = [each for each in places for _ in range(each.count)]
    if len(found) > PEERS_MOST:
        raise UserError(f"{path}: expected at most {PEERS_MOST} peers, found {len(found)}")
    return found


def _is_in_order(place: ReplicaPlace) -> bool:
    times = [place.joins_s, *itertools.chain.from_iterable(place.away_s)]
    return all(one < next_one for one, next_one in itertools.pairwise(times))
