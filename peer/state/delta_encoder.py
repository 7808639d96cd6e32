"""What one peer contributes to one round, on its way from a slot into payloads.

Made by the outer state; done in the threads of the agent's arithmetic, or in one.  `begin` comes before everything and
`end` after it; between them `some` may be called by several threads at once, in any order: no two of its calls touch
the same values.  Must not know who the payloads are for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from farflung.compression.codec import NonFinite, codec_named
from farflung.compression.feedback import BETA_OF, ErrorFeedback
from farflung.peer.machine.effects import Encode
from farflung.peer.state.sent_file import SentFile
from farflung.protocol.frames import Payload

CHUNKS_AT_ONCE = 4  # encoded before they are sent: more would keep the line waiting, fewer cost more turns

# Index within the fragment -> payload, and why the whole of it can't be contributed, or "".
Encoded = tuple[dict[int, Payload], str]


@dataclass(frozen=True)
class DeltaSource:
    """Of a fragment."""

    delta_n: Tensor
    elements: int  # of a chunk
    first: int  # the number of its first value in the model, for people
    feedback: Callable[[], ErrorFeedback | None]
    read: Callable[[Tensor], None]  # is told which part of `delta_n` is not needed any more, as it goes


class Encoding:
    def __init__(self, source: DeltaSource, effect: Encode, sent: SentFile) -> None:
        self._source, self._effect, self._sent = source, effect, sent
        self._codec = codec_named(effect.codec)
        self._feedback: ErrorFeedback | None = None
        self._is_spoilt = False
        self._is_told = False  # why nothing can be contributed
        self.firsts = range(0, len(effect.order), CHUNKS_AT_ONCE)  # what `some` is to be called with

    def begin(self) -> None:
        source, effect = self._source, self._effect
        feedback = source.feedback()
        if effect.codec not in BETA_OF and feedback is not None and feedback.residual is None:
            feedback = None  # nothing coarse was ever sent: the memory for what it loses is not taken
        if feedback is not None:
            feedback.open(source.delta_n, BETA_OF.get(effect.codec, 1.0))
            source.read(source.delta_n)
        self._feedback = feedback
        self._sent.begin(len(effect.order) * self._codec.payload_bytes(source.elements))

    def some(self, first: int) -> Encoded:
        """The chunks at these places of the order."""
        size, payloads = self._source.elements, dict[int, Payload]()
        for index in self._effect.order[first : first + CHUNKS_AT_ONCE]:
            part_n = self._source.delta_n[index * size : (index + 1) * size]
            try:
                if self._feedback is not None:
                    payloads[index] = self._feedback.encode(self._codec, index * size, size, self._sent.put)
                else:
                    payloads[index] = self._sent.put(self._codec.encode_here(part_n))
                    self._source.read(part_n)
            except NonFinite as error:
                self._is_spoilt = True
                element = self._source.first + index * size + error.index
                return {}, f"element {element} of the pseudo-gradient is {error.value}"
        return payloads, ""

    def is_wanted(self, made: Encoded) -> bool:
        """Of what `some` made, in the order of `firsts`: nothing comes after a problem."""
        wanted = not self._is_told
        self._is_told = self._is_told or bool(made[1])
        return wanted

    def end(self) -> None:
        """What a coarse codec lost is spoilt by what is not finite."""
        if self._is_spoilt and self._feedback is not None:
            self._feedback.reset()
