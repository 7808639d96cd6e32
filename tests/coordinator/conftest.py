"""What tests of the coordinator need that speak with it over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.SyncSocket]]:
    """Its sockets end with the test."""
    made: zmq.Context[zmq.SyncSocket] = zmq.Context()
    yield made
    made.destroy(linger=0)
