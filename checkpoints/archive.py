"""The archive of a run: what its rounds were made of, so that anybody can compute every version anew, much later.

Written by a peer's thread (peer/state/archive.py) beside the checkpoints, at the same place; read by
`farflung audit --replay`.  One folder for a run, in it the manifest and a file for each version of each fragment: the
commit, the digest and the chunk hashes of the state that it led to, and the encoded results.  All peers' files of a
version are the same but for a few words, so several peers may share the place.  Nothing is removed.

What is read here is believed by nobody: whoever replays computes, and compares with what the run signed.
Must not know tensors, codecs, or when something is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.checkpoints.files import Folder
from farflung.protocol.digests import HASH_BYTES, hash_bytes, root_of, split_hashes
from farflung.protocol.errors import CheckpointError, UserError
from farflung.protocol.frames import Payload
from farflung.protocol.limits import AMENDMENT_BYTES, AMENDMENTS_MOST, CHUNKS_PER_FRAGMENT
from farflung.protocol.manifest import MAX_MANIFEST_BYTES, Manifest
from farflung.protocol.round_words import Commit, Count, Hash, HashList
from farflung.protocol.run_terms import Terms
from farflung.protocol.signing import Amendment, Amendments

FORMAT = 1
ENDING = "-archive"  # of the folder; what comes before it is the beginning of the run's id
_RUN_FILE, _AMENDMENTS_FILE = "run.json", "amendments.json"
_LENGTH_BYTES = 8  # of a head, before it
HEAD_BYTES_MAX = 1 << 20
_AMENDMENTS_BYTES = 4 * AMENDMENTS_MOST * AMENDMENT_BYTES
_NAME = re.compile(r"e(\d{4,})-f(\d{2,})-v(\d{8,})\.round")

Key = tuple[int, int, int]  # era, fragment, version


class RoundHead(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a file says of itself; the payloads follow, one after the other."""

    format: int = FORMAT
    run_id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    era: Count
    commit: Commit
    digest: Hash  # the root of `chunks`
    chunks: HashList  # of the state that the commit led to
    sizes: Annotated[tuple[Count, ...], Meta(max_length=CHUNKS_PER_FRAGMENT)]  # of the payloads

    @property
    def key(self) -> Key:
        return self.era, self.commit.fragment, self.commit.version

    def problem(self) -> str:
        """Why its parts do not fit together, or empty."""
        if self.format != FORMAT:
            return f"its format is {self.format}, this farflung reads {FORMAT}"
        whole = len(self.chunks) == len(self.commit.hashes) == HASH_BYTES * len(self.sizes)
        if not whole or root_of(split_hashes(self.chunks)) != self.digest:
            return "its lists do not fit together"
        return ""


class Archive:
    def __init__(self, url: str) -> None:
        self.url = url
        self._files = Folder(url)

    # ---- writing -------------------------------------------------------------------------------------------

    def begin(self, run_id: bytes, manifest: Manifest) -> None:
        """StoreError if nothing can be written there."""
        if _RUN_FILE not in self._files.files(_folder_of(run_id)):
            self._files.write(_folder_of(run_id), _RUN_FILE, [manifest.canonical()])

    def amend(self, run_id: bytes, amendments: Sequence[Amendment]) -> None:
        """What the host has changed so far, in place of what stood there."""
        self._files.write(_folder_of(run_id), _AMENDMENTS_FILE, [msgspec.json.encode(amendments)])

    def put(self, head: RoundHead, payloads: Sequence[Payload]) -> None:
        """All of one version of a fragment, unless it is there already."""
        folder, name = _folder_of(head.run_id), _name_of(*head.key)
        if name not in self._files.files(folder):
            raw = msgspec.msgpack.encode(head)
            length = len(raw).to_bytes(_LENGTH_BYTES, "little")
            self._files.write(folder, name, (length + raw, *map(bytes, payloads)))

    # ---- reading -------------------------------------------------------------------------------------------

    def runs(self) -> list[str]:
        """The beginnings of the ids of the runs that are there."""
        return [name.removesuffix(ENDING) for name in self._files.folders() if name.endswith(ENDING)]

    def manifest(self, run: str) -> Manifest:
        raw = self._files.read(run + ENDING, _RUN_FILE, MAX_MANIFEST_BYTES + 1)
        try:
            return Manifest.from_canonical(raw)
        except UserError as error:
            raise CheckpointError(f"{self._where(run, _RUN_FILE)}: {error}") from None

    def terms(self, run: str) -> Terms:
        """What held at each version.  Whether the host has signed it, `is_hosts` says."""
        if _AMENDMENTS_FILE not in self._files.files(run + ENDING):
            return Terms(self.manifest(run))
        raw = self._files.read(run + ENDING, _AMENDMENTS_FILE, _AMENDMENTS_BYTES + 1)
        try:
            return Terms.of(self.manifest(run), msgspec.json.decode(raw, type=Amendments))
        except (UserError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self._where(run, _AMENDMENTS_FILE)}: {error}") from None

    def keys(self, run: str) -> list[Key]:
        """What is there, in order."""
        found = map(_NAME.fullmatch, self._files.files(run + ENDING))
        return sorted((int(each[1]), int(each[2]), int(each[3])) for each in found if each is not None)

    def head(self, run: str, key: Key) -> RoundHead:
        """CheckpointError if it is damaged, or another's."""
        return self._open(run, key)[0]

    def payloads(self, run: str, key: Key) -> Iterator[bytes]:
        """Chunk by chunk, each checked against its hash in the commit; CheckpointError at the first that differs."""
        head, at = self._open(run, key)
        pieces = self._files.pieces(run + ENDING, _name_of(*key), (at, *head.sizes))
        next(pieces)
        for place, (piece, expected) in enumerate(zip(pieces, split_hashes(head.commit.hashes), strict=True)):
            if hash_bytes(piece) != expected:
                raise CheckpointError(
                    f"{self._where(run, _name_of(*key))}: the result of chunk {place} is damaged"
                )
            yield piece

    def _open(self, run: str, key: Key) -> tuple[RoundHead, int]:
        """The head, and where the payloads begin."""
        name, folder = _name_of(*key), run + ENDING
        raw = self._files.read(folder, name, _LENGTH_BYTES + HEAD_BYTES_MAX)
        at = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
        try:
            head = msgspec.msgpack.decode(raw[_LENGTH_BYTES:at], type=RoundHead)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise CheckpointError(f"{self._where(run, name)}: damaged; remove it, or take a copy") from None
        whole = self._files.files(folder).get(name) == at + sum(head.sizes)
        problem = head.problem() or ("" if whole else "it is cut off")
        if not problem and (head.key != key or not head.run_id.hex().startswith(run)):
            problem = "it is of another version or run than its name says"
        if problem:
            raise CheckpointError(f"{self._where(run, name)}: {problem}; remove it, or take a copy")
        return head, at

    def _where(self, run: str, name: str) -> str:
        return f"{self.url.rstrip('/')}/{run}{ENDING}/{name}"


def _folder_of(run_id: bytes) -> str:
    return run_id.hex()[:8] + ENDING


def _name_of(era: int, fragment: int, version: int) -> str:
    return f"e{era:04d}-f{fragment:02d}-v{version:08d}.round"
