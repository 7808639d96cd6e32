"""Which versions lie on disks, by what peers say.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.messages import Beat
from farflung.protocol.round_words import ShelvedList

REMEMBERED_MOST = 1024  # peers that are away


class Shelves:
    """Which versions peers say they can bring, by what each of them says in its beats.

    A word counts while its digest is one that the run knows: so it stays true over eras, and a checkpoint of a version
    that was undone counts for nothing.  Who may lie: everybody.  A claim makes nobody a holder; it is a reason to go
    back to that version, or to wait for it for a while.  What peers said that are away now is remembered for
    people: before the host begins from scratch, they are worth waiting for.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._said: dict[str, ShelvedList] = {}  # by peer

    def hear(self, peer: str, beat: Beat) -> None:
        if beat.shelf == self._said.get(peer, ()):
            return
        self._said.pop(peer, None)  # the last one that said something new is the last one to be forgotten
        self._said[peer] = beat.shelf
        away = [each for each in self._said if each not in self._core.members.alive]
        for each in away[: max(0, len(away) - REMEMBERED_MOST)]:
            del self._said[each]

    def brought(self, driver: RoundDriver) -> set[int]:
        """Versions that members which hold this fragment, or are to hold it, can bring."""
        return self._versions(driver, (member.peer for member in driver.holders))

    def here(self, driver: RoundDriver) -> set[int]:
        """... or any member, whatever it holds: its place may have checkpoints of several stages."""
        return self._versions(driver, self._core.members.alive)

    def peers_with(self, driver: RoundDriver) -> set[str]:
        """Who can bring some version of this fragment that the run knows, wherever that peer is now."""
        return {peer for peer in self._said if self._versions(driver, [peer])}

    def _versions(self, driver: RoundDriver, peers: Iterable[str]) -> set[int]:
        # Version 0 is founded by the host's word alone.
        known, number = driver.book.digests, driver.fragment
        return {
            each.version
            for peer in peers
            for each in self._said.get(peer, ())
            if each.version > 0 and each.is_of(number, known.get(each.version, b""))
        }
