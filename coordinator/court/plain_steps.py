"""A round's arithmetic on one chunk, in numpy: the owner's sum, a result's length, and the state after it.

Owns: the order of the sum, which is that of collectives/arithmetic/merge.py; the steps are those of optim/.
Called by: the coordinator where two reports of a chunk differ, the audit of a sum, and the replay of a run.
Must not know: who reported what, digests of fragments, torch.

Each operation is a single one in fp32 and rounded on its own, so compiled or not it ends with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from farflung.compression.payload import Bytes, NonFinite
from farflung.compression.plain_codecs import codec_in, codec_named
from farflung.optim.muon import sum_by_halves
from farflung.optim.outer import advance, outer_step_for
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import FrameError
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.outer_numbers import OuterNumbers, StateForm, StepNumbers, Tile
from farflung.protocol.run_terms import Terms
from farflung.protocol.verdicts import Verdict

_LARGEST = np.finfo(np.float32).max
_BUFFERS = OuterNumbers(nesterov=False, lr=1.0, momentum=0.0)


def merged(codec_name: str, elements: int, payloads: Sequence[Bytes], weights: Sequence[float]) -> bytes:
    """encode(sum_i w_i * decode(x_i)), in this order; `codec_name` is that of results.

    Each payload names its own codec.  FrameError where one is no payload of so many values, or where the sum has no
    encoding because a weight is no finite number.
    """
    total_n = np.zeros(elements if payloads else 0, np.float32)
    with np.errstate(all="ignore"):
        for payload, weight in zip(payloads, weights, strict=True):
            codec = codec_in(payload)
            codec.check_head(payload, elements)
            total_n += codec.decode(payload, elements) * np.float32(weight)
        total_n = total_n.clip(-_LARGEST, _LARGEST)  # each value is finite, but their sum need not be
    try:
        return codec_named(codec_name).encode(total_n)
    except NonFinite as error:
        raise FrameError(Verdict.MALFORMED, f"the sum of {len(payloads)} contributions: {error}") from None


def square_length(codec_name: str, elements: int, payload: Bytes) -> float:
    """The sum of the squares of a result's values, in fp64: halves are added to each other until one is left."""
    squares_n = codec_named(codec_name).decode(payload, elements).astype(np.float64)
    squares_n *= squares_n
    return sum_by_halves(squares_n)


def chunk_hash(state: Bytes) -> bytes:
    """Of a chunk's parameters and then its moments: what a fragment's digest is the root of."""
    return hash_bytes(state)


@dataclass(frozen=True)
class ChunkRules:
    """What a committed result makes of one chunk, by the manifest's [outer] and the model's layout."""

    outer: StepNumbers
    gather_codec: str
    form: StateForm  # of a chunk
    is_plain: Callable[[int], bool]  # the chunk holds buffers, which take the mean
    tiles_of: Callable[[int], tuple[Tile, ...]] = lambda chunk: ()  # what a step takes as matrices
    # By the version that is made, where the run's host has changed its terms.
    making: Callable[[int], StepNumbers] | None = None

    @classmethod
    def of(
        cls, manifest: Manifest, model: ModelSchema, terms: Terms | None = None, era: int | None = None
    ) -> ChunkRules:
        """`manifest`: that the run began with.  `era`: of the versions that are made; left out, the present one."""

        def making(version: int) -> StepNumbers:
            return (terms.at(version - 1, era) if terms is not None else manifest).outer_numbers

        return cls(
            manifest.outer_numbers,
            manifest.round.gather_codec,
            manifest.state_form(model.chunk_elements),
            model.is_plain,
            functools.cache(lambda chunk: model.tiles(range(chunk, chunk + 1)).get(chunk, ())),
            functools.cache(making) if terms is not None and terms.count else None,
        )

    def outer_of(self, chunk: int, version: int | None = None) -> StepNumbers:
        """`version`: that is made; left out where it is the same for all."""
        if self.is_plain(chunk):
            return _BUFFERS
        return self.outer if self.making is None or version is None else self.making(version)

    def after(self, old: Bytes, payload: Bytes, chunk: int, version: int, factor: float = 1.0) -> bytes:
        """The chunk's state at this version, from that at the one before.  `chunk` is its number in the whole model,
        `factor` that of the commit.  FrameError for what is no state, and for what is no result of this run.
        """
        delta_n = codec_named(self.gather_codec).decode(payload, self.form.elements)
        parts = np.frombuffer(self.form.whole(old), "<f4").astype(np.float32).reshape(self.form.parts, -1)
        step = outer_step_for(self.outer_of(chunk, version))
        factor = 1.0 if self.is_plain(chunk) else factor
        advance(step, tuple(parts), delta_n, version, factor, self.tiles_of(chunk))
        return parts.tobytes()
