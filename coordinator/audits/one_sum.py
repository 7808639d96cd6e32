"""One sum of a commit, as somebody else than its maker computes it again, and the proof if it is wrong.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from farflung.coordinator.court.proofs import WrongSum, WrongSumOfSums
from farflung.coordinator.rounds.committed_sums import CommittedSums
from farflung.protocol.digests import full_mask, hash_at, mask_from_bytes
from farflung.protocol.messages import What
from farflung.protocol.round_words import SUM_CODEC, THE_RESULT, DrawnChunk
from farflung.protocol.signed_words import Results, SumsOfGroups


@dataclass(frozen=True)
class OneSum:
    """What goes in, who has that, who signed for it.

    A flat round has one kind of sum: its results, of contributions.  In a mesh there are two: what each group adds up
    of its members' contributions, and the results, of these sums.  No audit has to know more of a mesh than this tells.
    """

    of: CommittedSums
    chunk: int  # of the fragment
    group: int = THE_RESULT  # what it adds up; or the result

    @property
    def is_known(self) -> bool:
        """Somebody made it, and signed for it."""
        by_group = self.group != THE_RESULT
        return (self.chunk, self.group) in self.of.sums if by_group else self.chunk in self.of.makers

    @property
    def of_groups(self) -> bool:
        """What goes in are sums themselves."""
        return self.group == THE_RESULT and bool(self.of.sums)

    @property
    def what(self) -> What:
        """That goes in."""
        return What.SUM if self.of_groups else What.CONTRIBUTION

    @property
    def maker(self) -> str:
        if self.group != THE_RESULT:
            return self.of.sums[self.chunk, self.group].peer
        return self.of.makers[self.chunk].peer

    @property
    def result(self) -> bytes:
        """Its hash, as its maker signed it."""
        if self.group == THE_RESULT:
            return hash_at(self.of.commit.hashes, self.chunk)
        word = self.of.sums[self.chunk, self.group].word
        return hash_at(word.hashes, (mask_from_bytes(word.chunks) & full_mask(self.chunk)).bit_count())

    @cached_property
    def counted(self) -> list[tuple[str, float]]:
        """(author, weight) of all that goes in, in the order of the sum."""
        groups, weights = self.of.groups, self.of.weights
        if self.of_groups:
            places = ((self.chunk, group) for group in range(len(groups.members)))
            return [(self.of.sums[place].peer, 1.0) for place in places if place in self.of.sums]
        members = self.of.plan.members if self.group == THE_RESULT else groups.members[self.group]
        return [(peer, weights[peer]) for peer in members if weights[peer] > 0.0]

    @property
    def authors(self) -> tuple[str, ...]:
        return tuple(peer for peer, _ in self.counted)

    @property
    def near(self) -> set[str]:
        """Who has a connection to the authors, or some of what goes in: auditors are drawn among these first."""
        return {peer for peer in self.authors if self.of.weights[peer] > 0.0}

    def hash_of(self, author: str) -> bytes:
        """As it signed it."""
        if not self.of_groups:
            return hash_at(self.of.said[author].sent.hashes, self.chunk)
        return OneSum(self.of, self.chunk, self.of.groups.of[author]).result

    def codec_of(self, author: str) -> str:
        return SUM_CODEC if self.of_groups else self.of.plan.codec_of(author)

    @property
    def drawn(self) -> DrawnChunk:
        return DrawnChunk(self.chunk, self.result, b"".join(map(self.hash_of, self.authors)))

    @property
    def told(self) -> str:
        """For people."""
        version = f"of version {self.of.commit.version}"
        if self.group == THE_RESULT:
            return f"chunk {self.chunk} {version}"
        return f"what group {self.group} adds to chunk {self.chunk} {version}"

    def proof(self, run_id: bytes, shown: Mapping[str, bytes]) -> WrongSum | WrongSumOfSums:
        """What convicts its maker, if it is wrong.  `shown`: of each author what went in."""
        of, commit, maker = self.of, self.of.commit, self.maker
        numbers = run_id, commit.fragment, commit.version, self.chunk, of.identities[maker]
        went_in = tuple(shown[author] for author in self.authors)
        if self.of_groups:
            made = of.makers[self.chunk]
            added = SumsOfGroups.of(of.decision, commit.codec, made.report)
            inputs = b"".join(each for chunk in sorted(made.named) for each in made.named[chunk])
            return WrongSumOfSums(*numbers, added, made.report.signature, inputs, went_in)
        said = tuple(of.said[author] for author in self.authors)
        if self.group == THE_RESULT:
            report = of.makers[self.chunk].report
            results = Results.of(of.plan, of.decision, commit.codec, report)
            return WrongSum(*numbers, results, report.signature, said, went_in)
        word = of.sums[self.chunk, self.group].word
        group = of.groups.members[self.group]
        results = Results.of_group(of.decision, group, tuple(of.weights[peer] for peer in group), word)
        return WrongSum(*numbers, results, word.signature, said, went_in)
