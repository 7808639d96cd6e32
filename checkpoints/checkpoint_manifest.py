"""The manifest of a checkpoint: what was saved, of which run and version, with a hash of everything.  Pure.

Written last, so a checkpoint without a valid manifest does not exist.  Called by the store, the command line and
whoever chooses a checkpoint.  The signature says who wrote it; that it is a state of the run is said by the digests,
which must be those of the coordinator's journal, or by its signature of them.  Must not know files or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import msgspec
from blake3 import blake3
from msgspec import UNSET, Meta, Struct, UnsetType

from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import CheckpointError, UserError
from farflung.protocol.limits import AMENDMENTS_MOST, CHUNKS_PER_FRAGMENT, FRAGMENTS_MAX
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import Fragment, ModelSchema
from farflung.protocol.outer_numbers import MOMENTUM_PARTS, StateForm
from farflung.protocol.round_words import Count
from farflung.protocol.signing import curve_key_of, peer_id_of, proves, statement_of, verify

MANIFEST_NAME = "manifest.json"
MANIFEST_BYTES_MAX = 64 << 20
FORMAT = 1
TERMS_CHARS = 64 * 1024
# At most so much state in one file: large enough for object stores, small enough to retry.
SHARD_BYTES = 256 << 20
PARTS_LEAST = 8  # files, if there are so many chunks: whoever shares the place writes some of them

Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
# No separators and no leading dot: a manifest must not lead a reader out of its own folder.
FileName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,79}$")]
Text = Annotated[str, Meta(max_length=256)]


class ShardFile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The chunks [first, first + count): of each its parameters, then its moments."""

    name: FileName
    first: Count
    count: Annotated[int, Meta(ge=1)]
    size_bytes: Count
    blake3: Hex32
    writer: Text = ""  # the peer that wrote this file; not told where one peer wrote all


class SavedFragment(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    version: Count
    digest: Hex32  # the root of `chunks`
    round_no: Count  # of the round that made this version: its place in the journal; 0 if not known
    chunks: Annotated[tuple[Hex32, ...], Meta(max_length=CHUNKS_PER_FRAGMENT)]
    proof: Annotated[str, Meta(pattern="^([0-9a-f]{192})?$")] = ""  # the coordinator's, of the digest


class SignedFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """It says who wrote it."""

    writer: Text  # the id of the peer
    key: Hex32
    signature: Annotated[str, Meta(pattern="^([0-9a-f]{128})?$")] = ""

    def unsigned(self) -> bytes:
        """The bytes that the signature is over: canonical, without the signature."""
        return canonical(msgspec.structs.replace(self, signature=""))

    def signed(self, sign: Callable[[bytes], bytes]) -> Self:
        return msgspec.structs.replace(self, signature=sign(self.unsigned()).hex())

    @property
    def is_signed(self) -> bool:
        key = bytes.fromhex(self.key)
        fits = verify(key, self.unsigned(), bytes.fromhex(self.signature))
        return peer_id_of(key) == self.writer and fits


class CheckpointManifest(SignedFile, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int
    run: Text
    run_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    manifest: Hex32  # digest of run.toml
    # What that is the digest of: the run in its own words.
    terms: Annotated[str, Meta(max_length=TERMS_CHARS)] | UnsetType = UNSET
    era: Count  # how often the run had gone back to an older state
    version: Count  # of every fragment
    incarnation: Count  # of the coordinator whose journal it belongs to
    model: ModelSchema
    fragments: Annotated[tuple[SavedFragment, ...], Meta(min_length=1, max_length=FRAGMENTS_MAX)]
    files: Annotated[tuple[ShardFile, ...], Meta(min_length=1, max_length=CHUNKS_PER_FRAGMENT)]
    # The fragment that it holds, of a model that is cut into stages; left out where it holds the whole model.
    stage: Count | UnsetType = UNSET
    # Of a chunk's state.  Left out where they are two, as all were that wrote none.
    parts: Literal[3] | UnsetType = UNSET
    # The amendment that held in the round that made it; left out where its host had changed nothing.
    amended: Annotated[int, Meta(ge=1, le=AMENDMENTS_MOST)] | UnsetType = UNSET

    @property
    def run_terms(self) -> Manifest | None:
        """None where they are not told.  CheckpointError where they are not the run's: its digest is signed."""
        if isinstance(self.terms, UnsetType):
            return None
        if blake3(self.terms.encode()).hexdigest() != self.manifest:
            raise CheckpointError("the terms in its manifest are not those of its run")
        try:
            return Manifest.from_canonical(self.terms.encode())
        except UserError as error:
            raise CheckpointError(str(error)) from None

    @property
    def age(self) -> tuple[int, int]:
        """Sorts checkpoints of a run: what came after a return to an older state is newer than what came before."""
        return self.era, self.version

    @property
    def run_key(self) -> bytes:
        """The key of the run's join URL, if its coordinator has signed all of this state; else empty."""
        keys = {curve_key_of(bytes.fromhex(each.proof)[:32]) for each in self.fragments}
        return keys.pop() if len(keys) == 1 else b""

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(bytes.fromhex(each.digest) for each in self.fragments)

    @property
    def is_stage(self) -> bool:
        return not isinstance(self.stage, UnsetType)

    @property
    def first_fragment(self) -> int:
        """The number of `fragments[0]`."""
        return 0 if isinstance(self.stage, UnsetType) else self.stage

    @property
    def digest_of(self) -> dict[int, bytes]:
        """By the fragment's number in the whole model."""
        return dict(enumerate(self.digests, self.first_fragment))

    @property
    def held(self) -> tuple[Fragment, ...]:
        """Its fragments, as the model says."""
        if not self.is_stage:
            return self.model.fragments(len(self.fragments))
        return self.model.fragments(len(self.model.stages))[self.first_fragment :][: len(self.fragments)]

    @property
    def chunk_hashes(self) -> dict[int, str]:
        """By the chunk's number in the whole model."""
        every = (chunk for each in self.fragments for chunk in each.chunks)
        return dict(enumerate(every, self.held[0].first))

    @property
    def form(self) -> StateForm:
        parts = MOMENTUM_PARTS if isinstance(self.parts, UnsetType) else self.parts
        return StateForm(self.model.chunk_elements, parts)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def canonical(content: Struct) -> bytes:
    """The one byte string of this content: JSON, sorted keys, no spaces."""
    return msgspec.json.encode(content, order="sorted")


def parse(raw: bytes, where: str) -> CheckpointManifest:
    """Checked in itself: form, signature, and that all parts fit together.  CheckpointError names what does not."""
    if len(raw) > MANIFEST_BYTES_MAX:
        raise CheckpointError(f"{where}: {len(raw)} bytes, at most {MANIFEST_BYTES_MAX} are read")
    try:
        manifest = msgspec.json.decode(raw, type=CheckpointManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where}: damaged, or not a checkpoint's manifest: {error}") from None
    if canonical(manifest) != raw:
        raise CheckpointError(f"{where}: not in canonical form; it was changed after it was written")
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{where}: format {manifest.format}, this version reads {FORMAT}; update farflung"
        )
    if not manifest.is_signed:
        raise CheckpointError(f"{where}: the signature of {manifest.writer[:32]} does not fit the content")
    problem = _problem(manifest)
    if problem:
        raise CheckpointError(f"{where}: {problem}")
    return manifest


def _problem(manifest: CheckpointManifest) -> str:
    """Why the parts do not fit together, or empty."""
    model = manifest.model
    if manifest.is_stage and (manifest.first_fragment >= len(model.stages) or len(manifest.fragments) != 1):
        return f"stage {manifest.stage} of a model with {len(model.stages)} stages"
    if not manifest.is_stage and model.stages and len(model.stages) != len(manifest.fragments):
        return f"{len(manifest.fragments)} fragments of a model with {len(model.stages)} stages"
    if len(manifest.fragments) > model.chunk_count:
        return f"{len(manifest.fragments)} fragments of {model.chunk_count} chunks"
    expected = manifest.held
    for fragment, saved in zip(expected, manifest.fragments, strict=True):
        if len(saved.chunks) != fragment.count or saved.version != manifest.version:
            return f"fragment {fragment.number} is not as the model and the version say"
        if root_of(bytes.fromhex(chunk) for chunk in saved.chunks).hex() != saved.digest:
            return f"the digest of fragment {fragment.number} is not that of its chunks"
        digest, proof = bytes.fromhex(saved.digest), bytes.fromhex(saved.proof)
        stated = statement_of(
            bytes.fromhex(manifest.run_id), manifest.era, fragment.number, saved.version, digest
        )
        if proof and not proves(proof, stated):
            return f"the run's signature of fragment {fragment.number} does not fit its digest"
    at, end = expected[0].first, expected[-1].first + expected[-1].count
    for file in manifest.files:
        if file.count > end - at:  # before a head is made for so many
            return f"{file.name} says that it holds {file.count} chunks, which is too many"
        length = len(shard_header(file.first, file.count, manifest.form))
        if file.first != at or file.size_bytes != length + file.count * manifest.form.size_bytes:
            return f"{file.name} does not hold the chunks that it should"
        at += file.count
    first = expected[0].first
    return "" if at == end else f"the files hold {at - first} of {end - first} chunks"


# ---- the form of a shard file: safetensors, so that any tool can read it ------------------------------------------


def shards_of(first: int, count: int, form: StateForm) -> list[tuple[int, int]]:
    """(first chunk, chunks) of each file for a fragment."""
    most = max(1, min(SHARD_BYTES // form.size_bytes, -(-count // PARTS_LEAST)))
    return [(start, min(most, first + count - start)) for start in range(first, first + count, most)]


def shard_name(first: int) -> str:
    return f"chunks-{first:05d}.safetensors"


def shard_header(first: int, count: int, form: StateForm) -> bytes:
    """The head of a safetensors file whose body is the chunks' bytes one after the other."""
    size = form.part_bytes
    table: dict[str, object] = {}
    for index in range(count):
        for place, name in enumerate(form.names):
            start = (form.parts * index + place) * size
            table[f"{first + index:05d}.{name}"] = {
                "dtype": "F32",
                "shape": [form.elements],
                "data_offsets": [start, start + size],
            }
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class ShardHash:
    """The hash of a file as it goes by."""

    def __init__(self) -> None:
        self._hasher = blake3()
        self.bytes = 0

    def update(self, piece: bytes) -> bytes:
        self._hasher.update(piece)
        self.bytes += len(piece)
        return piece

    def hex(self) -> str:
        return self._hasher.hexdigest()


def chunk_hash(raw: bytes) -> str:
    return hash_bytes(raw).hex()


# ---- stages ------------------------------------------------------------------------------------------------
# Checkpoints of a model that is cut into stages: each lies in a folder of its own, and all of them are one.
# Pure.
#
# Called by the store, which keeps what is needed for a whole one, and by the command line. A peer holds one
# stage and saves that one; a checkpoint of a version is whole when each stage is there. The peers of
# different stages need not share a place: their folders can be copied beside each other. Of a model in one
# piece every checkpoint is whole. Must not know files or tensors.

Age = tuple[int, int]  # era, version


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: of the whole model, or of one of its stages."""

    folder: str
    manifest: CheckpointManifest


@dataclass(frozen=True)
class JoinedStages:
    """What is there of one version of one run."""

    parts: tuple[Saved, ...]  # one of each stage that is there, in their order; or the whole model

    @property
    def manifest(self) -> CheckpointManifest:
        """Of its first part: run, version and model are those of all."""
        return self.parts[0].manifest

    @property
    def stages(self) -> int:
        """That the model is cut into; 0: it is in one piece."""
        return len(self.manifest.model.stages) if self.manifest.is_stage else 0

    @property
    def missing(self) -> tuple[int, ...]:
        there = {part.manifest.first_fragment for part in self.parts}
        return tuple(stage for stage in range(self.stages) if stage not in there)

    @property
    def size_bytes(self) -> int:
        return sum(part.manifest.size_bytes for part in self.parts)

    @property
    def run_key(self) -> bytes:
        """Of the coordinator that has signed all of it; else empty."""
        keys = {part.manifest.run_key for part in self.parts}
        return keys.pop() if len(keys) == 1 else b""

    def missing_text(self) -> str:
        if not self.missing:
            return ""
        numbers = [str(stage) for stage in self.missing]
        listed = " and ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
        many = len(numbers) > 1
        return f"stage{'s' if many else ''} {listed} of {self.stages} {'are' if many else 'is'} missing"


def joined(found: Iterable[Saved]) -> list[JoinedStages]:
    """In the order given, by the first part of each.  Only what is of one run, version and model belongs together."""
    groups: dict[object, dict[object, Saved]] = {}
    for saved in found:
        manifest = saved.manifest
        whole = () if manifest.is_stage else (saved.folder,)
        key = (manifest.run_id, manifest.age, manifest.manifest, manifest.model.hash, whole)
        groups.setdefault(key, {}).setdefault(manifest.first_fragment, saved)
    return [
        JoinedStages(tuple(sorted(parts.values(), key=lambda each: each.manifest.first_fragment)))
        for parts in groups.values()
    ]


def outdated(found: Collection[Saved], keep: int, archived: bool) -> list[Saved]:
    """Of one run: what need not be kept.  The newest `keep` versions of each stage stay, and the newest `keep` that are
    whole: a stage that is ahead of the others must not cost the run its last whole checkpoint.

    `archived`: the oldest of each era stays too: from there the versions after it can be computed anew.
    """
    keep = max(1, keep)
    whole = sorted({each.manifest.age for each in joined(found) if not each.missing}, reverse=True)[:keep]
    ages: dict[int, set[Age]] = {}
    for saved in found:
        ages.setdefault(saved.manifest.first_fragment, set()).add(saved.manifest.age)
    kept = {(stage, age) for stage in ages for age in whole}
    for stage, mine in ages.items():
        newest_first = sorted(mine, reverse=True)
        kept.update((stage, age) for age in newest_first[:keep])
        if archived:
            kept.update((stage, age) for age in {age[0]: age for age in newest_first}.values())
    return [saved for saved in found if (saved.manifest.first_fragment, saved.manifest.age) not in kept]
