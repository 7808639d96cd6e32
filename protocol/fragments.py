"""Fragments: the model's chunks cut into consecutive ranges, each synchronised on its own, by its own versions.

Called by everybody that opens rounds, takes part in them or holds state.  Pure.  Chunks keep the numbers that they
have in the whole model everywhere outside; `index` is a chunk's place within its fragment, in plans and masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.protocol.errors import UserError

# The same tokens go into every fragment: the commits of this one count them, and tell the loss.
BOOKS_FRAGMENT = 0


@dataclass(frozen=True, slots=True)
class Fragment:
    number: int
    first: int  # its first chunk
    count: int

    @property
    def chunks(self) -> range:
        return range(self.first, self.first + self.count)

    def index(self, chunk: int) -> int:
        return chunk - self.first


def fragments_of(chunk_count: int, fragments: int) -> tuple[Fragment, ...]:
    """All chunks are of one size, so ranges that differ by at most one chunk are balanced by bytes."""
    if fragments > chunk_count:
        chunks = "1 chunk" if chunk_count == 1 else f"{chunk_count} chunks"
        raise UserError(
            f"[round] fragments: the model has {chunks}, too few for {fragments} fragments; "
            "lower fragments or chunk_kb in run.toml"
        )
    ends = [number * chunk_count // fragments for number in range(fragments + 1)]
    return tuple(
        Fragment(number, ends[number], ends[number + 1] - ends[number]) for number in range(fragments)
    )
