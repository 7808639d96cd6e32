"""What owners of a mesh signed to have added up of their groups, and which of it a root says to have used.  Pure.

Part of the mesh's sums (mesh_sums.py).  A root signs for its results by the hashes of the sums that it got,
and each of these has to be one that an owner of that group signed for this decision: so of whatever is committed it is
known who made it, out of what.  Reports overtake each other: a root's results wait until there is a word of each sum.

An owner may send the root another sum than it signed, and a root may say so of an owner that did not: who of the two
lies, nobody else can see.  They are at odds, and what follows is the round's business.  Must not know signatures: what
comes here was checked (coordinator/run/signed_results.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from farflung.coordinator.rounds.round_policy import MadeSum, Place
from farflung.protocol.digests import bits, mask_from_bytes, split_hashes
from farflung.protocol.messages import ProgressReport
from farflung.protocol.round_words import SUM_TAG_BYTES, GroupSums
from farflung.protocol.signed_words import inputs_of


@dataclass(frozen=True)
class Named:
    """What a root's results are made of."""

    # By chunk, of each group that counts.  Empty: somebody's word of them is missing, or is another one.
    hashes: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    at_odds: frozenset[str] = frozenset()  # owners that signed others


@dataclass
class SignedSums:
    _said: dict[Place, dict[str, bytes]] = field(default_factory=dict)  # by owner, the hash that it named
    _made: dict[tuple[Place, bytes], MadeSum] = field(default_factory=dict)
    _waiting: dict[Place, str] = field(default_factory=dict)  # the root whose results wait for a word of it

    def begin(self) -> None:
        """A new decision makes all sums void."""
        self._said.clear()
        self._made.clear()
        self._waiting.clear()

    def on_word(self, owner: str, group: int, word: GroupSums) -> set[str]:
        """Returns roots whose results waited for it."""
        mask, hashes = mask_from_bytes(word.chunks), split_hashes(word.hashes)
        if len(hashes) != mask.bit_count():
            return set()  # a word that contradicts itself says nothing
        roots: set[str] = set()
        for chunk, digest in zip(bits(mask), hashes, strict=True):
            place = chunk, group
            said = self._said.setdefault(place, {})
            if owner in said:
                continue  # nobody honest says two things of one sum
            said[owner] = digest
            self._made.setdefault((place, digest), MadeSum(owner, word))
            if (root := self._waiting.pop(place, None)) is not None:
                roots.add(root)
        return roots

    def has(self, chunk: int, group: int) -> bool:
        return (chunk, group) in self._said

    def made(self, chunk: int, group: int, digest: bytes) -> MadeSum:
        return self._made[(chunk, group), digest]

    def named_by(
        self, root: str, report: ProgressReport, counted: Sequence[int], owner: Callable[[int, int], str]
    ) -> Named:
        """What its results are made of, by the words that are here.  `owner`: of a group, of a chunk."""
        chunks, tags = list(bits(mask_from_bytes(report.merged))), report.sum_tags or b""
        if len(tags) != SUM_TAG_BYTES * len(chunks) * len(counted):
            return Named()
        found: dict[int, tuple[bytes, ...]] = {}
        at_odds: set[str] = set()
        for at, chunk in enumerate(chunks):
            of_chunk: list[bytes] = []
            for turn, group in enumerate(counted, at * len(counted)):
                tag = tags[turn * SUM_TAG_BYTES : (turn + 1) * SUM_TAG_BYTES]
                said, makes = self._said.get((chunk, group), {}), owner(group, chunk)
                digest = next((each for each in said.values() if each.startswith(tag)), b"")
                of_chunk += [digest] if digest else []
                if not digest and makes in said:
                    at_odds.add(makes)
                elif not digest:
                    self._waiting[chunk, group] = root
            found[chunk] = tuple(of_chunk)
        whole = all(len(of_chunk) == len(counted) for of_chunk in found.values())
        if whole and inputs_of(each for of_chunk in found.values() for each in of_chunk) == report.inputs:
            return Named(found)
        return Named(at_odds=frozenset(at_odds))
