"""A child of the coordinator's as a thread of this process: for tests that start many; without the cap on memory."""

from __future__ import annotations

import importlib
import socket
import threading


class InThread:
    """A `Spawn`: what the module does in a process of its own, it does here."""

    def __init__(self, module: str, end: socket.socket, memory_bytes: int) -> None:
        self._end, self._serve_end = end.dup(), importlib.import_module(module).serve
        self._thread = threading.Thread(target=self._serve, daemon=True, name=module)
        self._thread.start()

    def _serve(self) -> None:
        self._end.setblocking(False)
        with self._end:
            self._serve_end(self._end)

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(5.0)  # its channel was closed, and it ends by that
        return 0

    def kill(self) -> None:
        pass
