"""The outer state of a peer: parameters and momentum in fp32, and the arithmetic on them.

Owned by the agent (and by each virtual peer of the simulator), which calls it for every arithmetic effect, one
after the other.  The parameters live in the anchor that the trainer maps too; the momentum is the agent's own.
Knows nothing of the network, of rounds, or of who decided what.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farflung.collectives.digests import hash_bytes, root_of
from farflung.collectives.effects import Install, Merge, Roll
from farflung.collectives.errors import FrameError
from farflung.collectives.frames import Payload
from farflung.collectives.ladder import LADDER
from farflung.collectives.merge import merged_chunk
from farflung.collectives.verdicts import Verdict
from farflung.compression.codec import Codec, NonFinite, codec_named
from farflung.compression.feedback import AUTO, BETA_OF, feedback_for
from farflung.coordinator.manifest import RoundSection
from farflung.coordinator.schema import ModelSchema
from farflung.optim.outer import Nesterov, OuterStep, PlainMean


class OuterState:
    def __init__(self, anchor: Tensor, model: ModelSchema, rules: RoundSection, outer: Nesterov) -> None:
        """`anchor`: fp32, model.chunk_count * model.chunk_elements values."""
        self._model = model
        self._gather = codec_named(rules.gather_codec)
        self._outer = outer
        self._feedback = feedback_for(rules.codec)
        self._anchor = anchor.view(model.chunk_count, model.chunk_elements)
        self._momentum = torch.zeros_like(self._anchor)
        self.hashes: list[bytes] = [b""] * model.chunk_count
        self.digest = b""

    # ---- one chunk at a time -------------------------------------------------------------------------------

    def install(self, effect: Install) -> None:
        count = self._model.chunk_elements
        if len(effect.payload) != 8 * count:
            raise FrameError(
                Verdict.MALFORMED, f"a state chunk of {len(effect.payload)} bytes, not {8 * count}"
            )
        both = torch.frombuffer(bytearray(effect.payload), dtype=torch.float32)
        self._anchor[effect.chunk].copy_(both[:count])
        self._momentum[effect.chunk].copy_(both[count:])

    def roll(self, effect: Roll) -> None:
        """Apply a committed result.  The decoded bytes are what everybody applies, the owner too."""
        delta_n = self._gather.decode(effect.payload, self._model.chunk_elements)
        step: OuterStep = self._outer if effect.chunk < self._model.first_plain_chunk else PlainMean()
        step.step(self._anchor[effect.chunk], self._momentum[effect.chunk], delta_n)

    def seal(self) -> bytes:
        """Hash every chunk: the digest of the whole state."""
        self.hashes = [hash_bytes(self.chunk_bytes(chunk)) for chunk in range(self._model.chunk_count)]
        self.digest = root_of(self.hashes)
        return self.digest

    def restart_momentum(self) -> None:
        """The anchor was written from a model's initial values: version 0."""
        self._momentum.zero_()

    def chunk_bytes(self, chunk: int) -> bytes:
        """Parameters, then momentum, little-endian: what is hashed and what a joiner receives."""
        return self._anchor[chunk].numpy().tobytes() + self._momentum[chunk].numpy().tobytes()

    def manifest_bytes(self) -> bytes:
        return b"".join(self.hashes)

    # ---- rounds --------------------------------------------------------------------------------------------

    def encode(self, slot: Tensor, codec_name: str) -> tuple[list[Payload], str]:
        """(one payload per chunk, why it can't be contributed or "")."""
        codec = codec_named(codec_name)
        size = self._model.chunk_elements
        payloads: list[Payload] = []
        if self._feedback is not None:
            self._feedback.open(slot, BETA_OF.get(codec_name, 1.0))
        for start in range(0, slot.numel(), size):
            try:
                payloads.append(self._encode_chunk(codec, slot, start, size))
            except NonFinite as error:
                if self._feedback is not None:
                    self._feedback.reset()
                return [], f"element {start + error.index} of the pseudo-gradient is {error.value}"
        return payloads, ""

    def _encode_chunk(self, codec: Codec, slot: Tensor, start: int, size: int) -> bytes:
        if self._feedback is not None:
            return self._feedback.encode(codec, start, size)
        return codec.encode(slot[start : start + size])

    def resolve(self, slot: Tensor, used: bool) -> None:
        """The residual of a coarse codec: kept if a commit used what was sent, else as it was before."""
        if self._feedback is None or not self._feedback.is_open:
            return
        if used:
            self._feedback.settle()
        else:
            self._feedback.withdraw(slot)

    def merge(self, effect: Merge) -> bytes:
        return merged_chunk(self._gather, self._model.chunk_elements, effect.payloads, effect.weights)


def payload_bytes_most(rules: RoundSection, elements: int) -> int:
    """The longest payload of a chunk in this run, either way; UserError if this version lacks a codec of it."""
    names = LADDER if rules.codec == AUTO else (rules.codec,)
    return max(codec_named(name).payload_bytes(elements) for name in (*names, rules.gather_codec))
