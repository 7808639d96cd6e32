"""A round's arithmetic on one chunk, in numpy: the owner's sum, and the state after a committed result.

Owns: the order of the operations of both, which are those of collectives/arithmetic/merge.py and optim/outer.py.
Called by: the coordinator where two reports of a chunk differ, the audit of a sum, and the replay of a run.
Must not know: who reported what, digests of fragments, torch.

Each operation is a single one in fp32 and rounded on its own, so numpy and torch end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflung.coordinator.court.plain_codecs import Bytes, NotFinite, codec_in, codec_named
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import FrameError
from farflung.protocol.manifest import Manifest, OuterNumbers
from farflung.protocol.model_schema import ModelSchema
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
    except NotFinite as error:
        raise FrameError(Verdict.MALFORMED, f"the sum of {len(payloads)} contributions: {error}") from None


def chunk_hash(state: Bytes) -> bytes:
    """Of a chunk's parameters and then its momentum: what a fragment's digest is the root of."""
    return hash_bytes(state)


@dataclass(frozen=True)
class ChunkRules:
    """What a committed result makes of one chunk, by the manifest's [outer] and the model's layout."""

    outer: OuterNumbers
    gather_codec: str
    elements: int  # of a chunk
    first_plain_chunk: int  # from here on buffers, which take the mean

    @classmethod
    def of(cls, manifest: Manifest, model: ModelSchema) -> ChunkRules:
        return cls(
            manifest.outer_numbers,
            manifest.round.gather_codec,
            model.chunk_elements,
            model.first_plain_chunk,
        )

    @property
    def state_bytes(self) -> int:
        return 8 * self.elements

    def outer_of(self, chunk: int) -> OuterNumbers:
        return self.outer if chunk < self.first_plain_chunk else _BUFFERS

    def whole(self, state: Bytes) -> bytes:
        """Parameters and momentum; a momentum of zeros may have been left out.  FrameError for another length."""
        length = memoryview(state).nbytes
        if length not in (self.state_bytes, self.state_bytes // 2):
            raise FrameError(
                Verdict.MALFORMED,
                f"a state chunk of {length} bytes, neither {self.state_bytes} nor {self.state_bytes // 2}",
            )
        return bytes(state) + bytes(self.state_bytes - length)

    def after(self, old: Bytes, payload: Bytes, chunk: int) -> bytes:
        """The chunk's state one version on.  `chunk` is its number in the whole model.  FrameError for what is no
        state, and for what is no result of this run.
        """
        delta_n = codec_named(self.gather_codec).decode(payload, self.elements)
        theta_n, momentum_n = np.frombuffer(self.whole(old), "<f4").astype(np.float32).reshape(2, -1)
        numbers = self.outer_of(chunk)
        with np.errstate(all="ignore"):
            theta_n, momentum_n = _stepped(numbers, theta_n, momentum_n, delta_n)
        return theta_n.astype("<f4").tobytes() + momentum_n.astype("<f4").tobytes()


def _stepped(
    numbers: OuterNumbers,
    theta_n: NDArray[np.float32],
    momentum_n: NDArray[np.float32],
    delta_n: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    lr, mu = np.float32(numbers.lr), np.float32(numbers.momentum)
    if not numbers.nesterov:
        return theta_n - (delta_n if lr == 1 else delta_n * lr), momentum_n
    momentum_n = momentum_n * mu + delta_n
    return theta_n - (momentum_n * mu + delta_n) * lr, momentum_n
