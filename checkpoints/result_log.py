"""The result log: the encoded results of the last K commits, by version and chunk.

Kept by every peer, read to catch up the others: state = chunk at any version + result log.  Pure data.
"""

from __future__ import annotations

from farflung.collectives.frames import Payload


class ResultLog:
    def __init__(self, keep_versions: int) -> None:
        self._keep = keep_versions
        self._results: dict[int, dict[int, Payload]] = {}

    def put(self, version: int, chunk: int, payload: Payload) -> None:
        self._results.setdefault(version, {})[chunk] = payload
        while len(self._results) > self._keep:
            del self._results[min(self._results)]

    def get(self, version: int, chunk: int) -> Payload | None:
        return self._results.get(version, {}).get(chunk)

    def versions(self) -> list[int]:
        return sorted(self._results)
