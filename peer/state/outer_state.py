"""The outer state of a peer: parameters and moments in fp32, and the arithmetic on them, fragment by fragment.

A peer of a stage has memory for the chunks of that stage alone; they keep their numbers in the whole model.

Owned by the agent (and by each virtual peer of the simulator), which calls it for every arithmetic effect: of one chunk
one after the other, of others maybe at the same time (worker.py).  All of it lives in memory that the trainer maps too,
and only reads.
Knows nothing of the network, of rounds, or of who decided what.
"""

from __future__ import annotations

import errno
import io
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.collectives.arithmetic.merge import dot_products, merged_chunk, rule_of, square_length
from farflung.collectives.round.effects import Install, Measure, Merge, Roll, Weigh
from farflung.compression.codec import AUTO, ErrorFeedback, codec_named, feedback_for
from farflung.compression.native import scratch
from farflung.optim.outer import OuterStep, PlainMean, advance
from farflung.peer.machine.effects import Encode
from farflung.peer.state.delta_encoder import DeltaSource, Encoded, Encoding, SentFile
from farflung.protocol.digests import drawn_chunk, hash_at, hash_bytes, keyed_hash, root_of
from farflung.protocol.manifest import RoundSection
from farflung.protocol.messages import Show, What
from farflung.protocol.model_schema import Fragment, ModelSchema
from farflung.protocol.outer_numbers import StateForm
from farflung.protocol.process import own_files
from farflung.protocol.round_words import LADDER, SPARSE, SUM_CODEC

# ---- before images -----------------------------------------------------------------------------------------
# What each chunk of the outer state was before it changed, until it changes again.
#
# Owned by the outer state, in the arithmetic. A peer whose result others contradict can show from what it was
# calculated; and where a run has to go back by one version, each peer that made it has the one before. The
# bytes (8 or 12 for each parameter of the fragment) go to a file without a name: they count as the kernel's
# cache, not as this process' memory. The file keeps its room until the process ends, because new pages in
# every round cost more than the copy itself, and this stands on the round's way. A disk that takes no more
# costs the proof and the way back, and no round. Must not know who asks, nor why.

VERSION_BYTES = 8

log = logging.getLogger("farflung.agent")


def unnamed_file(folder: Path) -> BinaryIO:
    """It is gone with the process, however that ends.  Without a buffer: what can't be written fails at once."""
    own_files.made_folder(folder)  # a peer's first start
    return tempfile.TemporaryFile(dir=folder, buffering=0)


@dataclass
class _Kept:
    version: int
    hashes: bytes  # of all chunks, at that version
    chunks: set[int] = field(default_factory=set)  # that have changed since


class BeforeImages:
    def __init__(self, file: BinaryIO, state_bytes: int, fragments: Sequence[Fragment]) -> None:
        self._file = file
        self._state_bytes = state_bytes  # of one chunk
        self._fragment_of = {chunk: each.number for each in fragments for chunk in each.chunks}
        self._first = min(self._fragment_of)  # where the file begins
        self._kept: dict[int, _Kept] = {}  # by fragment
        self._keeping = threading.Lock()  # the file has one place at a time

    def begin(self, fragment: int, version: int, hashes: bytes) -> None:
        """From now on what changes in the fragment is kept as it was at this version."""
        self._kept[fragment] = _Kept(version, hashes)

    def keep(self, chunk: int, parts: Sequence[memoryview]) -> None:
        """This chunk is about to change.  Several threads may say so, each of another one."""
        with self._keeping:
            kept = self._kept.get(self._fragment_of[chunk])
            if kept is not None and chunk not in kept.chunks:
                self._write(kept, chunk, parts)

    def _write(self, kept: _Kept, chunk: int, parts: Sequence[memoryview]) -> None:
        try:
            self._file.seek((chunk - self._first) * self._state_bytes)
            for part in parts:
                if self._file.write(part) != part.nbytes:
                    raise OSError(errno.ENOSPC, "a part of a chunk was not written")
            kept.chunks.add(chunk)
        except OSError as error:
            del self._kept[self._fragment_of[chunk]]
            log.warning("what version %d was is not kept, so it can't be shown: %s", kept.version, error)

    def hashes_at(self, fragment: int, version: int) -> bytes | None:
        kept = self._kept.get(fragment)
        return kept.hashes if kept is not None and kept.version == version else None

    def has(self, fragment: int, chunk: int) -> bool:
        """The chunk has changed, and what it was is here."""
        kept = self._kept.get(fragment)
        return kept is not None and chunk in kept.chunks

    def shown(self, fragment: int, chunk: int) -> bytes | None:
        """The version in 8 bytes, then the chunk's state at it."""
        kept = self._kept.get(fragment)
        if kept is None or chunk not in kept.chunks:
            return None
        try:
            with self._keeping:
                self._file.seek((chunk - self._first) * self._state_bytes)
                raw = self._file.read(self._state_bytes)
        except OSError as error:
            log.warning("what version %d was can't be read back: %s", kept.version, error)
            return None
        return kept.version.to_bytes(VERSION_BYTES, "little") + raw if len(raw) == self._state_bytes else None


# ---- outer state -------------------------------------------------------------------------------------------

_CPU = torch.device("cpu")


class Files(NamedTuple):
    """Without names.  What has none is kept in memory."""

    before: BinaryIO | None = None  # what chunks were before they changed
    sent: BinaryIO | None = None  # what is encoded


NO_FILES = Files()


class OuterState:
    def __init__(
        self,
        anchor: Tensor,
        model: ModelSchema,
        rules: RoundSection,
        outer: OuterStep,
        mark_torn: Callable[[bool], None] = lambda torn: None,
        moments: Sequence[Tensor] = (),
        files: Files = NO_FILES,
        held: Sequence[Fragment] = (),
    ) -> None:
        """`anchor`, and `moments` if they are not to be this object's own: fp32, the values of the chunks that are
        held.  `held`: fragments that follow on each other; empty: the whole model.

        `mark_torn` is told before the anchor stops being one version, and when it is one again.
        """
        self._model = model
        self._gather, self._rule = codec_named(rules.gather_codec), rule_of("mean")
        self._codecs = {codec_named(name) for name in _codecs_of(rules)}
        self._making: Callable[[int], OuterStep] = lambda version: outer
        fragments = tuple(held) or model.fragments(rules.fragments)
        self._fragments = {each.number: each for each in fragments}
        self._feedbacks = {number: feedback_for(rules.codec) for number in self._fragments}
        self._first = fragments[0].first  # chunk that is here
        count = sum(each.count for each in fragments)
        self._mark_torn = mark_torn
        self._torn: set[int] = set()  # fragments
        self._form = StateForm(model.chunk_elements, outer.parts)
        self._tiles = model.tiles(range(self._first, self._first + count))
        file = io.BytesIO() if files.before is None else files.before
        self.before = BeforeImages(file, self._form.size_bytes, fragments)
        self._sent = SentFile(files.sent)
        own = moments or [torch.zeros_like(anchor) for _ in range(outer.parts - 1)]
        # The parameters, then the moments: in the order of a chunk's bytes.
        self._parts = [part.view(count, model.chunk_elements) for part in (anchor, *own)]
        if len(self._parts) != outer.parts:
            raise ValueError(f"a state of {len(self._parts)} parts, for a step that needs {outer.parts}")
        self._tearing = threading.Lock()
        self._hashes = {chunk: b"" for each in fragments for chunk in each.chunks}
        self._fresh: dict[int, bytes] = {}  # of chunks that have changed: what the hash is now
        self.digests = dict.fromkeys(self._fragments, b"")  # of each fragment, as it was sealed last

    def merge_by(self, policy: str) -> None:
        """Of [merge]; without it, the weighted mean."""
        self._rule = rule_of(policy)

    def follow(self, making: Callable[[int], OuterStep], codec: str) -> None:
        """`making`: the step that makes a version, from now on; `codec`: of contributions, where another one is due."""
        self._making = making
        for number, feedback in self._feedbacks.items():
            if feedback is None:
                self._feedbacks[number] = feedback_for(codec)

    def choose_paths(self) -> None:
        """Each codec is checked when it is used first, which takes a moment: better before a round than in it."""
        delta_n = self._room()
        for codec in self._codecs:
            codec.decode(codec.encode(delta_n.zero_()), self._model.chunk_elements, delta_n)

    def _room(self) -> Tensor:
        """For one decoded chunk, kept by each thread: memory that is new each time costs page faults."""
        return scratch("delta", self._model.chunk_elements, torch.float32, _CPU)

    # ---- one chunk at a time -------------------------------------------------------------------------------

    def install(self, effect: Install) -> None:
        whole = torch.frombuffer(bytearray(self._form.whole(effect.payload)), dtype=torch.float32)
        self._tear(effect.chunk)
        feedback, start = self._feedback_at(effect.chunk)
        if feedback is not None:
            feedback.forget(start)
        for part, values_n in zip(self._parts, whole.view(self._form.parts, -1), strict=True):
            part[effect.chunk - self._first].copy_(values_n)
        # While the line brings the next one: a joiner that has all of it then need not hash it at once.
        self._hashes[effect.chunk] = self._fresh[effect.chunk] = self._made_hash(effect.chunk)

    def clear(self) -> None:
        """Before values are placed one by one: all are zero, and no version of anything."""
        for chunk in self._hashes:
            self._tear(chunk)
        for part in self._parts:
            part.zero_()

    def place(self, part: int, at: int, values: NDArray[np.float32]) -> None:
        """Of the parameters (0) or a moment, from the one with this number among those that are held."""
        self._parts[part].view(-1)[at : at + len(values)].copy_(torch.from_numpy(np.array(values)))

    def roll(self, effect: Roll, is_last: bool = True) -> None:
        """Apply a committed result.  The decoded bytes are what everybody applies, the owner too.

        `is_last`: what follows is the seal.  Hashed while it is in the cache, a chunk costs two thirds; until the seal
        the hash of the version before is what stands (`hashes_of`).
        """
        delta_n = self._gather.decode(effect.payload, self._model.chunk_elements, self._room())
        feedback, start = self._feedback_at(effect.chunk)
        if feedback is not None:
            feedback.refund(start, delta_n)
        self.before.keep(effect.chunk, self._parts_of(effect.chunk))
        self._tear(effect.chunk)
        plain = self._model.is_plain(effect.chunk)  # buffers are no gradient
        step: OuterStep = PlainMean() if plain else self._making(effect.version)
        factor = 1.0 if plain else effect.factor
        tiles = self._tiles.get(effect.chunk, ())
        values = [values_n.numpy() for values_n in self._values_of(effect.chunk)]
        advance(step, values, delta_n.numpy(), effect.version, factor, tiles)
        if is_last:
            self._fresh[effect.chunk] = self._made_hash(effect.chunk)

    def _tear(self, chunk: int) -> None:
        number = self._fragment_of(chunk).number
        with self._tearing:  # nobody changes a value before the anchor is marked
            if not self._torn:
                self._mark_torn(True)
            self._torn.add(number)
        self._fresh.pop(chunk, None)

    def _fragment_of(self, chunk: int) -> Fragment:
        return next(each for each in self._fragments.values() if chunk in each.chunks)

    @property
    def is_torn(self) -> bool:
        """The anchor is not one version of each fragment."""
        return bool(self._torn)

    def seal(self, fragment: int = 0) -> bytes:
        """Hash every chunk of the fragment that has changed: its digest is the root of their hashes."""
        self._torn.discard(fragment)
        if not self._torn:
            self._mark_torn(False)
        chunks = self._fragments[fragment].chunks
        self.hash(chunks)
        for chunk in chunks:
            del self._fresh[chunk]
        self.digests[fragment] = root_of(self.hashes_of(chunks))
        return self.digests[fragment]

    def hash(self, chunks: range) -> None:
        """Those that have changed, of a fragment that is about to be sealed; by several threads, each its own."""
        for chunk in chunks:
            if chunk not in self._fresh:
                self._fresh[chunk] = self._made_hash(chunk)
            self._hashes[chunk] = self._fresh[chunk]

    def hashes_of(self, chunks: range) -> list[bytes]:
        """As they were when their fragment was sealed last; of one that was installed since, what it is now."""
        return [self._hashes[chunk] for chunk in chunks]

    def hash_of(self, chunk: int) -> bytes:
        return self._hashes[chunk]

    def _values_of(self, chunk: int) -> list[Tensor]:
        return [part[chunk - self._first] for part in self._parts]

    def _made_hash(self, chunk: int) -> bytes:
        """Of `chunk_bytes`, without copying them."""
        return hash_bytes(*self._parts_of(chunk))

    def _parts_of(self, chunk: int) -> list[memoryview]:
        return [values_n.numpy().view(np.uint8).data for values_n in self._values_of(chunk)]

    # ---- what others may want to see proven ----------------------------------------------------------------

    def keep_before(self, fragment: int, version: int) -> None:
        """Chunks of the fragment are about to leave this version."""
        self.before.begin(fragment, version, self.manifest_bytes(fragment))

    def undo(self, fragment: int, chunk: int, version: int) -> bool:
        """Make of the chunk what it was at this version, which was kept last; False if that can't be done."""
        hashes = self.before.hashes_at(fragment, version)
        if hashes is None:
            return False
        if self.before.has(fragment, chunk):  # else it has not left that version yet
            kept = self.before.shown(fragment, chunk)
            if kept is None:
                return False
            self.install(Install(chunk, version, kept[VERSION_BYTES:]))
        at = chunk - self._fragments[fragment].chunks.start
        return (self._fresh.get(chunk) or self._made_hash(chunk)) == hash_at(hashes, at)

    def prove_holding(self, fragment: int, nonce: bytes) -> bytes:
        """Calculated from the bytes of the chunk that the nonce names: nothing else of the state gives it away."""
        chunks = self._fragments[fragment].chunks
        return keyed_hash(nonce, *self._parts_of(chunks.start + drawn_chunk(nonce, len(chunks))))

    def shown(self, show: Show) -> bytes | None:
        """What the coordinator asks to see of this fragment, if it is here."""
        chunks, sealed = self._fragments[show.fragment].chunks, show.fragment not in self._torn
        match show.what:
            case What.HASHES:
                # Of the state as it was sealed last, or of the one before; which it is, its root says.
                kept = self.before.hashes_at(show.fragment, show.version)
                return kept if kept is not None else self.manifest_bytes(show.fragment) if sealed else None
            case What.BEFORE if show.chunk in chunks:
                return self.before.shown(show.fragment, show.chunk)
            case What.STATE if show.chunk in chunks and sealed:
                return self.chunk_bytes(show.chunk)
        return None

    def restart_moments(self) -> None:
        """The anchor was written from a model's initial values: version 0."""
        for part in self._parts[1:]:
            part.zero_()
        self._fresh.clear()

    def chunk_bytes(self, chunk: int) -> bytes:
        """Parameters, then moments, little-endian: what is hashed."""
        return b"".join(self._parts_of(chunk))

    def piece_bytes(self, chunk: int) -> bytes:
        """What a joiner receives: the same without moments of zeros, such as all are when a run begins."""
        # Looked at as integers: a zero below zero is not the zero that the joiner would fill in.
        if any(values_n.view(torch.int32).any() for values_n in self._values_of(chunk)[1:]):
            return self.chunk_bytes(chunk)
        return bytes(self._parts_of(chunk)[0])

    def manifest_bytes(self, fragment: int = 0) -> bytes:
        return b"".join(self.hashes_of(self._fragments[fragment].chunks))

    # ---- rounds --------------------------------------------------------------------------------------------

    def part(self, flat: Tensor, fragment: int) -> Tensor:
        """The fragment's values in a flat vector of all that is held."""
        size, chunks = self._model.chunk_elements, self._fragments[fragment].chunks
        return flat[(chunks.start - self._first) * size : (chunks.stop - self._first) * size]

    def encoding(
        self, slot: Tensor, effect: Encode, read: Callable[[Tensor], None] = lambda values_n: None
    ) -> Encoding:
        """Nothing is done yet, and what was asked before may still change the error feedback."""
        number = effect.fragment
        first = self._fragments[number].first * self._model.chunk_elements
        source = DeltaSource(
            self.part(slot, number),
            self._model.chunk_elements,
            first,
            lambda: self._feedbacks[number],
            read,
        )
        return Encoding(source, effect, self._sent)

    def encode(self, slot: Tensor, effect: Encode) -> Iterator[Encoded]:
        """Some chunks at a time.  Nothing comes after a problem."""
        encoding = self.encoding(slot, effect)
        encoding.begin()
        for first in encoding.firsts:
            made = encoding.some(first)
            if made[1]:
                encoding.end()
            yield made
            if made[1]:
                return  # nothing comes after a problem

    def resolve(self, slot: Tensor, used: bool, fragment: int = 0) -> None:
        """The residual of a coarse codec: kept if a commit used what was sent, else as it was before."""
        feedback = self._feedbacks[fragment]
        if feedback is None or not feedback.is_open:
            return
        if used:
            feedback.settle(owed=self._gather.name == SPARSE)
        else:
            feedback.withdraw(self.part(slot, fragment))

    def unsent(self) -> dict[int, Tensor]:
        """Of each fragment what a coarse codec has not sent yet; what is under way counts as taken."""
        found = {number: each.residual for number, each in self._feedbacks.items() if each is not None}
        return {number: residual_n for number, residual_n in found.items() if residual_n is not None}

    def take_up(self, fragment: int, residual_n: Tensor, share: float) -> None:
        """A share of what an earlier life of this peer had not sent."""
        feedback = self._feedbacks[fragment]
        if feedback is not None:
            feedback.take_up(residual_n, share)

    def forget_unsent(self, fragment: int) -> None:
        """The run goes back from the state that it belongs to."""
        if (feedback := self._feedbacks[fragment]) is not None:
            feedback.reset()

    def _feedback_at(self, chunk: int) -> tuple[ErrorFeedback | None, int]:
        """And where the chunk begins in its residual."""
        fragment = self._fragment_of(chunk)
        return self._feedbacks[fragment.number], (chunk - fragment.first) * self._model.chunk_elements

    def calculate(self, effect: Merge | Weigh | Measure) -> bytes | tuple[float, ...] | float:
        """The merged chunk or the dot products of its contributions, of an owner; the length of a result, of all."""
        if isinstance(effect, Weigh):
            return dot_products(self._model.chunk_elements, effect.payloads)
        if isinstance(effect, Measure):
            plain = self._model.is_plain(effect.chunk)
            return 0.0 if plain else square_length(self._model.chunk_elements, effect.payload)
        return self.merge(effect)

    def merge(self, effect: Merge) -> bytes:
        self._sent.rest()  # who merges has sent its own
        codec = codec_named(effect.codec) if effect.codec else self._gather
        rule = None if effect.codec else self._rule  # what a group adds up is a sum in any case
        return merged_chunk(codec, self._model.chunk_elements, effect.payloads, effect.weights, rule=rule)


def payload_bytes_most(rules: RoundSection, elements: int) -> int:
    """The longest payload of a chunk in this run, either way; UserError if this version lacks a codec of it."""
    return max(codec_named(name).payload_bytes(elements) for name in _codecs_of(rules))


def _codecs_of(rules: RoundSection) -> tuple[str, ...]:
    """Those of contributions, and that of results."""
    sums = (SUM_CODEC,) if rules.group else ()
    return (*(LADDER if rules.codec == AUTO else (rules.codec,)), rules.gather_codec, *sums)
