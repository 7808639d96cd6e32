"""What members sent, in the archive of a run: a file for each version, fragment and author, signed by that author.

They lie beside the files of archive.py, whose results they explain: merged with the weights of the commit they are the
committed results, bit for bit.  Written by a peer's thread (peer/state/archiving.py), read by
`farflung audit --replay`.
A file may lack chunks that could not be got; of two files of one contribution the larger one stays.

What is read here is checked against what its author signed, and nothing else.  Must not know tensors or codecs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.checkpoints.archive import ENDING, HEAD_BYTES_MAX, LENGTH_BYTES, Key, folder_of, framed
from farflung.checkpoints.files import Folder
from farflung.protocol.digests import HASH_BYTES, hash_bytes, split_hashes
from farflung.protocol.errors import CheckpointError
from farflung.protocol.frames import Payload
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT
from farflung.protocol.round_words import Count
from farflung.protocol.signed_words import Said, is_signed

FORMAT = 1
_NAME = re.compile(r"e(\d{4,})-f(\d{2,})-v(\d{8,})-([a-z0-9]{1,64})\.sent")


class SentHead(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a file says of itself; the payloads follow, one after the other."""

    format: int = FORMAT
    run_id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    era: Count
    fragment: Count
    version: Count  # that the round made
    said: Said
    sizes: Annotated[tuple[Count, ...], Meta(max_length=CHUNKS_PER_FRAGMENT)]  # 0: that chunk is not there

    @property
    def key(self) -> Key:
        return self.era, self.fragment, self.version

    def problem(self) -> str:
        """Why its parts do not fit together, or empty."""
        if self.format != FORMAT:
            return f"its format is {self.format}, this farflung reads {FORMAT}"
        if len(self.said.sent.hashes) != HASH_BYTES * len(self.sizes):
            return "its lists do not fit together"
        if not is_signed(self.said.identity, self.run_id, self.said.sent):
            return f"{self.said.peer} has not signed this list of what it sent"
        return ""


@dataclass(frozen=True)
class Contribution:
    """One file, its head checked; chunk by chunk its bytes, each checked against the author's signature when read."""

    head: SentHead
    where: str
    at: int
    files: Folder
    folder: str
    name: str

    def payloads(self) -> Iterator[bytes]:
        """Of each chunk, empty where it is not there; CheckpointError at the first that is damaged."""
        pieces = self.files.pieces(self.folder, self.name, (self.at, *self.head.sizes))
        next(pieces)
        expected = split_hashes(self.head.said.sent.hashes)
        for chunk, (piece, due) in enumerate(zip(pieces, expected, strict=True)):
            if piece and hash_bytes(piece) != due:
                raise CheckpointError(
                    f"{self.where}: chunk {chunk} is not what {self.head.said.peer} signed: it is damaged"
                )
            yield piece


class SentFiles:
    def __init__(self, url: str) -> None:
        self._url = url
        self._files = Folder(url)

    def put(self, head: SentHead, payloads: Sequence[Payload]) -> None:
        """Unless as much of it is there already."""
        folder, name = folder_of(head.run_id), _name(*head.key, head.said.peer)
        first = framed(head)
        if self._files.files(folder).get(name, 0) < len(first) + sum(head.sizes):
            self._files.write(folder, name, (first, *map(bytes, payloads)))

    def authors(self, run: str) -> dict[Key, list[str]]:
        """Of which version what is there, of whom."""
        found: dict[Key, list[str]] = {}
        for each in map(_NAME.fullmatch, sorted(self._files.files(run + ENDING))):
            if each is not None:
                found.setdefault((int(each[1]), int(each[2]), int(each[3])), []).append(each[4])
        return found

    def open(self, run: str, key: Key, author: str) -> Contribution:
        """CheckpointError if it is damaged, or another's."""
        folder, name = run + ENDING, _name(*key, author)
        where = f"{self._url.rstrip('/')}/{folder}/{name}"
        raw = self._files.read(folder, name, LENGTH_BYTES + HEAD_BYTES_MAX)
        at = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
        try:
            head = msgspec.msgpack.decode(raw[LENGTH_BYTES:at], type=SentHead)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise CheckpointError(f"{where}: damaged; remove it, or take a copy") from None
        problem = head.problem()
        if not problem and self._files.files(folder).get(name) != at + sum(head.sizes):
            problem = "it is cut off"
        if not problem and (head.key != key or not head.run_id.hex().startswith(run)):
            problem = "it is of another version or run than its name says"
        if not problem and head.said.peer != author:
            problem = f"it was sent by {head.said.peer}, and not by whom its name says"
        if problem:
            raise CheckpointError(f"{where}: {problem}; remove it, or take a copy")
        return Contribution(head, where, at, self._files, folder, name)


def _name(era: int, fragment: int, version: int, author: str) -> str:
    return f"e{era:04d}-f{fragment:02d}-v{version:08d}-{author}.sent"
