"""Which large frames a connection has taken and the other side has not acknowledged yet.  Pure.

Owned by a connection of line.py.  On a slow line the other side asks for what it misses while that is still on its
way: TCP loses nothing, so a second copy would only make the line slower.  Must not know sockets, rounds or peers.

Counted are a frame's own bytes, and encryption adds some: what the kernel has had acknowledged runs a little ahead.  So
a frame may be held for delivered too early, and be sent twice as without this; never for on its way for ever.
"""

from __future__ import annotations

from collections import deque

LARGE_BYTES = 65536  # a second copy of less does no harm


class OnTheWay:
    def __init__(self) -> None:
        self._taken_bytes = self._taken_before = 0
        self._frames: deque[tuple[int, bytes]] = deque()  # where its last byte stands, and its header
        self._headers: set[bytes] = set()

    def take(self, header: bytes, size: int) -> None:
        self._taken_bytes += size
        if size >= LARGE_BYTES:
            self._frames.append((self._taken_bytes, header))
            self._headers.add(header)

    def may_have(self, header: bytes) -> bool:
        """No: then nobody needs to ask the kernel."""
        return header in self._headers

    def has(self, header: bytes, acknowledged_bytes: int) -> bool:
        self.look(acknowledged_bytes)
        return header in self._headers

    def look(self, acknowledged_bytes: int) -> None:
        while self._frames and self._frames[0][0] <= acknowledged_bytes:
            self._headers.discard(self._frames.popleft()[1])

    def on_tick(self, acknowledged_bytes: int, is_empty: bool) -> None:
        """`is_empty`: the kernel holds nothing that is not acknowledged."""
        self.look(acknowledged_bytes)
        if is_empty and self._taken_bytes == self._taken_before:
            # Everything arrived.  Counted from here again, or what encryption adds would grow for as long as it stands.
            self.forget()
            self._taken_bytes = acknowledged_bytes
        self._taken_before = self._taken_bytes

    def forget(self) -> None:
        """It is another connection from now on, and what was on its way may be lost."""
        self._taken_bytes = self._taken_before = 0
        self._frames.clear()
        self._headers.clear()
