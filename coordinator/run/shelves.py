"""Which versions peers say they can bring, by what each of them says in its beats.  Pure.

Part of the run machine.  A word counts while its digest is one that the run knows: so it stays true over eras, and a
checkpoint of a version that was undone counts for nothing.  Who may lie: everybody.  A claim makes nobody a holder; it
is a reason to go back to that version, or to wait for it, and going_back.py bounds how long.  What peers said that are
away now is remembered for people: before the host begins from scratch, they are worth waiting for.
"""

from __future__ import annotations

from collections.abc import Iterable

from farflung.coordinator.run.conductor import Conductor
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Member
from farflung.protocol.messages import Beat
from farflung.protocol.round_words import ShelvedList

REMEMBERED_MOST = 1024  # peers that are away


class Shelves:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._said: dict[str, ShelvedList] = {}  # by peer

    def hear(self, member: Member, beat: Beat) -> None:
        if beat.shelf == self._said.get(member.peer, ()):
            return
        self._said.pop(
            member.peer, None
        )  # the last one that said something new is the last one to be forgotten
        self._said[member.peer] = beat.shelf
        away = [peer for peer in self._said if peer not in self._core.members.alive]
        for peer in away[: max(0, len(away) - REMEMBERED_MOST)]:
            del self._said[peer]

    def brought(self, conductor: Conductor) -> set[int]:
        """Versions that members which hold this fragment, or are to hold it, can bring."""
        return self._versions(conductor, (member.peer for member in conductor.holders))

    def here(self, conductor: Conductor) -> set[int]:
        """... or any member, whatever it holds: its place may have checkpoints of several stages."""
        return self._versions(conductor, self._core.members.alive)

    def peers_with(self, conductor: Conductor) -> set[str]:
        """Who can bring some version of this fragment that the run knows, wherever that peer is now."""
        return {peer for peer in self._said if self._versions(conductor, [peer])}

    def _versions(self, conductor: Conductor, peers: Iterable[str]) -> set[int]:
        known, number = conductor.book.digests, conductor.fragment
        return {
            each.version
            for peer in peers
            for each in self._said.get(peer, ())
            if each.is_of(number, known.get(each.version, b""))
        }
