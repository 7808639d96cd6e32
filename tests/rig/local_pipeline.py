"""All stages of a model in one process, over a channel that only encodes and decodes: what a pipeline computes.

Backward passes are taken in the order of the microbatches at every stage, so the sums have the same bits as those of
one process that takes one microbatch after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from farflung.compression.codec import Codec, codec_named
from farflung.peer.pipeline.border_codec import TURNED, turned, turned_back
from farflung.peer.pipeline.parts import Loss, Part, Stage, Tensors, checked_parts
from farflung.peer.pipeline.stage_loop import MicroActivations, StageLoop
from farflung.peer.pipeline.whole import checked_cuts
from farflung.protocol.errors import UserError


class BorderCrossing:
    """What a border does to tensors: floating ones go through a codec, integers pass as they are.

    Straight-through: the gradient is taken as if the codec changed nothing.
    """

    def __init__(self, codec: str) -> None:
        self._codec: Codec = codec_named(codec)
        self._turn = codec == TURNED
        self.sent_bytes = 0

    def pass_on(self, tensors: Tensors) -> Tensors:
        return tuple(self._one(tensor) for tensor in tensors)

    def _one(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            self.sent_bytes += tensor.numel() * tensor.itemsize
            return tensor
        payload = self._codec.encode(turned(tensor.detach()) if self._turn else tensor.detach())
        self.sent_bytes += len(payload)
        values_n = self._codec.decode(payload, tensor.numel())
        return (turned_back(values_n) if self._turn else values_n).view(tensor.shape).to(tensor)


class BatchDone(NamedTuple):
    loss: float  # the mean of a token
    tokens: int


class LocalPipeline:
    """`cuts`: where stages 1, 2, ... begin.  `codecs`: of activations, and of their gradients."""

    def __init__(
        self,
        parts: Sequence[Part],
        cuts: Sequence[int],
        loss: Loss,
        run_seed: int,
        codecs: tuple[str, str] = ("fp32", "fp32"),
    ) -> None:
        parts = checked_parts(parts)
        borders = [0, *checked_cuts(cuts, len(cuts) + 1, len(parts)), len(parts)]
        self.loops = [
            StageLoop(
                Stage.build(parts, first, stop, run_seed), run_seed, loss if stop == len(parts) else None
            )
            for first, stop in pairwise(borders)
        ]
        self.there, self.back = (BorderCrossing(codec) for codec in codecs)
        self._in_flight = 2 * len(self.loops)

    def named_tensors(self) -> dict[str, Tensor]:
        """Of the whole model, by the same names however it is cut: parameters and buffers of all stages."""
        named: dict[str, Tensor] = {}
        for loop in self.loops:
            named |= dict(loop.stage.named_parameters()) | dict(loop.stage.named_buffers())
        return named

    def batch(self, micros: Iterable[tuple[MicroActivations, Tensors]]) -> BatchDone:
        """All microbatches, there and back; the sums stay in the stages.  Each comes with the first stage's input."""
        total, tokens = 0.0, 0
        waiting: list[
            tuple[MicroActivations, list[Tensors]]
        ] = []  # before the last stage, with what each stage was given
        for micro, given in micros:
            inputs = [given]
            for loop in self.loops[:-1]:
                inputs.append(self.there.pass_on(loop.forward(micro, inputs[-1])))
            waiting.append((micro, inputs))
            tokens += micro.tokens
            if len(waiting) == self._in_flight:
                total += self._finish(*waiting.pop(0))
        for micro, inputs in waiting:
            total += self._finish(micro, inputs)
        if not tokens:
            raise UserError("a batch without tokens has no mean loss")
        return BatchDone(total / tokens, tokens)

    def _finish(self, micro: MicroActivations, inputs: list[Tensors]) -> float:
        gradients, loss = self.loops[-1].last(micro, inputs[-1])
        for loop, given in reversed(list(zip(self.loops[:-1], inputs[:-1], strict=True))):
            gradients = loop.backward(micro, given, self.back.pass_on(gradients))
        return loss * micro.tokens

    def clear(self) -> None:
        for loop in self.loops:
            loop.sums.clear()

    @torch.no_grad()
    def gradients(self, tokens: int) -> dict[str, Tensor]:
        """The gradient of the mean loss of a token, by name."""
        return {name: sums / tokens for loop in self.loops for name, sums in loop.sums.items()}
