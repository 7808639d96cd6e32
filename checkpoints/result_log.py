"""The result log: the encoded results of the last K commits, by version and chunk.

Kept by every peer, read to catch up the others: state = chunk at any version + result log.  One for all fragments of a
peer, so that one limit holds for all.  Pure data: with `on_disk` the shell keeps what is older than the newest commit
(peer/state/keeping_state.py), and this one knows only that it does.
"""

from __future__ import annotations

from collections.abc import Collection

from farflung.protocol.caps import RESULTS_BYTES
from farflung.protocol.frames import Payload


class ResultLog:
    def __init__(
        self, keep_versions: int = 1, limit_bytes: int = RESULTS_BYTES, on_disk: bool = False
    ) -> None:
        self.keep_versions = keep_versions  # of each fragment
        self.on_disk = on_disk
        self._limit_bytes = limit_bytes  # the newest version of each fragment stays, however large it is
        self._found: dict[
            int, set[int]
        ] = {}  # version -> chunks whose results lie on disk from a former life
        self._cut = self._told = False  # something went because of the limit alone, and that was told
        self.bytes = 0
        self._results: dict[tuple[int, int], dict[int, Payload]] = {}  # (fragment, version), the oldest first

    def put(self, fragment: int, version: int, chunk: int, payload: Payload) -> None:
        group = self._results.setdefault((fragment, version), {})
        self.bytes += len(payload) - len(group.get(chunk, b""))
        group[chunk] = payload
        for oldest in outgrown(list(self._results), 1 if self.on_disk else self.keep_versions):
            self._drop(oldest)
        while self.bytes > self._limit_bytes and (spare := outgrown(list(self._results), 1)):
            self._drop(spare[0])
            self._cut = self._cut or not self.on_disk

    def get(self, fragment: int, version: int, chunk: int) -> Payload | None:
        return self._results.get((fragment, version), {}).get(chunk)

    def versions(self, fragment: int = 0) -> list[int]:
        return sorted(version for number, version in self._results if number == fragment)

    def forget(self, fragment: int) -> None:
        """The run went back: these are results of versions that are made again."""
        for key in [key for key in self._results if key[0] == fragment]:
            self._drop(key)

    def on_found(self, found: dict[int, set[int]]) -> None:
        """By version, the chunks whose results lie on disk from a former life."""
        for version, chunks in found.items():
            self._found.setdefault(version, set()).update(chunks)

    def on_disk_lost(self) -> bool:
        """The disk failed, or does not keep up.  True: that is news."""
        news, self.on_disk = self.on_disk, False
        return news

    def take_found(self, version: int, chunks: range) -> list[int]:
        """Chunks whose result of this version can be read from disk; each is named once."""
        there = self._found.get(version, set())
        mine = sorted(there & set(chunks))
        there.difference_update(mine)
        return mine

    def take_warning(self) -> str:
        """What people should know, once."""
        if self._told or not self._cut:
            return ""
        self._told = True
        limit = f"{self._limit_bytes / 1e6:.0f} MB"
        return f"the results of {self.keep_versions} rounds are more than {limit} (setting `results`): fewer are kept"

    def _drop(self, key: tuple[int, int]) -> None:
        self.bytes -= sum(map(len, self._results.pop(key).values()))


def outgrown(keys: Collection[tuple[int, int]], keep: int) -> list[tuple[int, int]]:
    """Of (fragment, version): what is not of the newest `keep` versions of its fragment, in the order given."""
    newest: dict[int, list[int]] = {}
    for fragment, version in keys:
        newest.setdefault(fragment, []).append(version)
    least = {fragment: sorted(versions)[-keep:][0] for fragment, versions in newest.items()}
    return [key for key in keys if key[1] < least[key[0]]]
