"""Seeds come in pieces: some of them each time, the others where there is time for what is long (`make hard`)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from _pytest.mark.structures import ParameterSet


def pieces(of: int | Sequence[object], each_time: int = 1) -> list[ParameterSet]:
    """By number or by name: the first `each_time` of them are for `make test`."""
    named = range(of) if isinstance(of, int) else of
    return [
        pytest.param(piece, marks=() if place < each_time else pytest.mark.hard)
        for place, piece in enumerate(named)
    ]
