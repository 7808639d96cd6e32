"""Lists of hashes that lead to digests of the run, and which pieces of state stand as they were checked by them.  Pure.

Owned by a catch-up (state_sync.py), which finds out whether a list leads to a digest, and a piece to a hash; kept
here is what it found, for the pieces that come, and for fellows to whom it gives them on.  Must not know who brought
what.
"""

from __future__ import annotations

from collections.abc import KeysView, Mapping


class SignedDigests:
    def __init__(self) -> None:
        self._lists: dict[int, list[bytes]] = {}  # by version
        self._roots: dict[int, bytes] = {}  # version -> digest under which pieces of it were taken
        self.came_at: dict[int, int] = {}  # index of a piece -> the version that it was taken at

    @property
    def versions(self) -> KeysView[int]:
        return self._lists.keys()

    def list_of(self, version: int) -> list[bytes] | None:
        return self._lists.get(version)

    def take(self, version: int, hashes: list[bytes], digest: bytes) -> None:
        self._lists[version], self._roots[version] = hashes, digest

    def recall(self, index: int, version: int, digest: bytes) -> None:
        """It was checked in a former life, by a list that is here no more."""
        self._roots[version], self.came_at[index] = digest, version

    def refuted(self, digests: Mapping[int, bytes]) -> list[int]:
        """Versions that are said to be something else by now."""
        return [version for version, root in self._roots.items() if digests.get(version, root) != root]

    def unlearn(self, version: int) -> list[int]:
        """Its list counts no more.  Returns the pieces that came by it."""
        del self._roots[version]
        self._lists.pop(version, None)
        void = [index for index, at in self.came_at.items() if at == version]
        for index in void:
            del self.came_at[index]
        return void

    def holds(self, version: int, digests: Mapping[int, bytes]) -> list[bytes]:
        """The list of this version, if it still leads to the run's digest; else nothing."""
        root = self._roots.get(version)
        return self._lists.get(version, []) if root is not None and digests.get(version) == root else []

    def given_at(self, index: int, held: int, digests: Mapping[int, bytes]) -> int | None:
        """The version at which this piece was taken, if `held` is still that and its list counts.

        What was rolled on since is proven by nothing before all of it is whole."""
        version = self.came_at.get(index)
        return version if version == held and self.holds(held, digests) else None

    def clear(self) -> None:
        self._lists.clear()
        self._roots.clear()
        self.came_at.clear()
