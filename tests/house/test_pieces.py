"""Test processes take a file, or what is named as a group, as one piece: what such tests share is made once."""

from __future__ import annotations

import pytest


def test_a_piece_has_a_name_that_those_read_who_hand_it_out(request: pytest.FixtureRequest) -> None:
    """They know a test by its id alone."""
    in_pieces = getattr(request.config.option, "loadgroup", False)  # set in a process of pytest-xdist
    assert request.node.nodeid.endswith("@house/test_pieces.py") == in_pieces
