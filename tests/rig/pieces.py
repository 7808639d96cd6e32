"""Seeds come in pieces: some of them each time, the others where there is time for what is long (`make hard`).

CI plays as many as it has minutes for. `FARFLUNG_LONG=10 make hard` plays ten times as many.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

T = TypeVar("T")
TIMES = int(os.environ.get("FARFLUNG_LONG", "1"))


def pieces(of: int | Sequence[object], each_time: int = 1) -> list[ParameterSet]:
    """By number, which are as many more as is asked for, or by name: the first `each_time` are for `make test`."""
    named = range(of * TIMES) if isinstance(of, int) else of
    return [
        pytest.param(piece, marks=() if place < each_time else pytest.mark.hard)
        for place, piece in enumerate(named)
    ]


def with_time_for(others: Sequence[T], in_ci: Sequence[T]) -> list[T]:
    """What takes minutes each: CI has time for some, `FARFLUNG_LONG=2` for the others too."""
    return [*in_ci, *others] if TIMES > 1 else [*in_ci]


def seeds(piece: int, each: int) -> range:
    return range(piece * each, (piece + 1) * each)
