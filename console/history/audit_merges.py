"""Of the audit by replay: committed results made again from what the members sent, chunk by chunk, bit for bit.

Called by audit_replay.py with each version whose results it has checked.  An archive may have the contributions of all
included members, of some, or of none: what could not be merged again is counted, and it is said who is missing.
Believes no file: a contribution is what its author signed, and their sum with the committed weights must be the
committed result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

from farflung.checkpoints.archive import Key, RoundHead
from farflung.checkpoints.sent_files import Contribution, SentFiles
from farflung.console.history.audit_shares import Shares
from farflung.coordinator.court.plain_steps import merged
from farflung.protocol.digests import hash_bytes, split_hashes
from farflung.protocol.errors import FrameError

SHOWN_CHARS = 16  # of a hash


class OtherSum(Exception):
    """The contributions make another result than was committed.  The text names the chunk of the fragment."""

    def __init__(self, chunk: int, told: str) -> None:
        super().__init__(told)
        self.chunk, self.told = chunk, told


@dataclass
class Merged:
    """How much was merged again, of all versions together."""

    done: int = 0  # chunks
    due: int = 0
    lacking: list[str] = field(default_factory=list)  # of which version what, and why

    @property
    def told(self) -> str:
        if not self.done:
            return ""
        why = "" if self.done == self.due else " (what is missing is named above)"
        return f"; {self.done} of {self.due} chunks merged again from what members sent{why}"


class Merges:
    def __init__(
        self,
        files: SentFiles,
        run: str,
        shares: Shares,
        say: Callable[[str], None],
        of_part: Callable[[int], str],
        in_groups: bool = False,
    ) -> None:
        """`of_part`: how people are told of a fragment.  `in_groups`: what is kept is not all that went in, nor how."""
        self.merged = Merged()
        self._shares = shares
        self._files, self._run, self._say, self._of_part = files, run, say, of_part
        self._authors = {} if in_groups else files.authors(run)

    @property
    def any(self) -> bool:
        """Somebody kept contributions of this run."""
        return bool(self._authors)

    def check(self, key: Key, head: RoundHead, elements: int) -> str:
        """How many chunks of this version were merged again, in words; OtherSum where one is another, OtherShare where
        its members signed what makes no batch."""
        if not self.any:
            return ""
        commit = head.commit
        count = len(head.sizes)
        here = self._authors.get(key, [])
        opened = [
            self._files.open(self._run, key, author) if author in here else None for author in commit.included
        ]
        self._refuse_others(opened, head)
        signed = [each.head.said.sent if each is not None else None for each in opened]
        self._shares.hear(key[0], commit, signed)
        weights = [weight for weight in commit.weights if weight > 0.0]
        done, absent = 0, dict.fromkeys(commit.included, 0)
        pieces = [_pieces(each, count) for each in opened]
        for chunk, expected in enumerate(split_hashes(commit.hashes)):
            payloads = [next(each) for each in pieces]
            for author, payload in zip(commit.included, payloads, strict=True):
                absent[author] += not payload
            if all(payloads):
                self._compare(chunk, expected, _sum_of(commit.codec, elements, payloads, weights))
                done += 1
        self.merged.done += done
        self.merged.due += count
        if done < count:
            self._tell(key, absent, count, count - done)
        return f"; {done} of {count} chunks merged again"

    def _refuse_others(self, opened: list[Contribution | None], head: RoundHead) -> None:
        for each in opened:
            if each is not None and each.head.said.sent.round_no != head.commit.round_no:
                sent = each.head.said.sent.round_no
                told = (
                    f"{each.where} is of round {sent}, the version was made by round {head.commit.round_no}"
                )
                raise OtherSum(0, told)
            if each is not None and len(each.head.sizes) != len(head.sizes):
                raise OtherSum(0, f"{each.where} has {len(each.head.sizes)} chunks, not {len(head.sizes)}")

    @staticmethod
    def _compare(chunk: int, expected: bytes, made: bytes | str) -> None:
        if isinstance(made, str):
            raise OtherSum(chunk, f"what members sent cannot be merged: {made}")
        if hash_bytes(made) != expected:
            shown, due = hash_bytes(made).hex()[:SHOWN_CHARS], expected.hex()[:SHOWN_CHARS]
            told = (
                f"what members sent, with the committed weights, makes the result {shown}, committed is {due}"
            )
            raise OtherSum(chunk, told)

    def _tell(self, key: Key, absent: dict[str, int], count: int, lost: int) -> None:
        _, fragment, version = key
        who = ", ".join(
            f"{'all' if gone == count else gone} of {author}" for author, gone in absent.items() if gone
        )
        of = self._of_part(fragment)
        told = f"version {version}{of}: {lost} of {count} chunks not merged again: the archive lacks {who}"
        self.merged.lacking.append(told)
        self._say(f"missing  {told}")


def _sum_of(codec: str, elements: int, payloads: list[bytes], weights: list[float]) -> bytes | str:
    """The sum, or why there is none."""
    try:
        return merged(codec, elements, payloads, weights)
    except FrameError as error:
        return str(error)


def _pieces(contribution: Contribution | None, count: int) -> Iterator[bytes]:
    return contribution.payloads() if contribution is not None else repeat(b"", count)
