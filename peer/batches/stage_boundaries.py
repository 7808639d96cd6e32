"""The two borders of a stage: what may cross them, compared before a byte of it is believed.  Pure.

Made by the machine when it knows which stage it holds, from what its trainer said of the model; asked by the
crossings for every payload, of others and of the own trainer.  The codecs are handed in: this room knows no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from farflung.collectives.pipeline.crossing import RAW, Border, BytesOf, CrossingKind, border_after, parse
from farflung.collectives.pipeline.effects import FlowDirection
from farflung.protocol.errors import FrameError
from farflung.protocol.frames import FrameKind, Payload
from farflung.protocol.manifest_sections import PipelineSection
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.verdicts import Verdict

# (codec, payload, elements): FrameError unless the payload is so many finite values in that codec.
CheckPayload = Callable[[str, Payload, int], None]


def crossing_bytes_most(model: ModelSchema, rules: PipelineSection, bytes_of: BytesOf) -> int:
    """No crossing of a model in stages is longer, over whichever border.  ValueError for what can't be sent."""
    borders = [border_after(stage, model, rules, bytes_of) for stage in range(len(model.stages) - 1)]
    return max(each.most_bytes(backwards) for each in borders for backwards in (False, True))


class StageBoundaries:
    """Of one stage."""

    def __init__(
        self,
        stage: int,
        model: ModelSchema,
        rules: PipelineSection,
        bytes_of: BytesOf,
        check: CheckPayload,
    ) -> None:
        """`bytes_of`, `check`: of the shell's codecs.  ValueError for a border over which nothing can be sent."""
        last = stage == len(model.stages) - 1
        self._before = border_after(stage - 1, model, rules, bytes_of) if stage else None
        self._after = None if last else border_after(stage, model, rules, bytes_of)
        self._check = check

    def check_given(self, kind: FrameKind, payload: Payload) -> None:
        """FrameError unless a neighbour may send this."""
        if kind is CrossingKind.ACTIVATION:
            self._check_crossing(self._before, False, payload)
        else:
            self._check_crossing(self._after, True, payload)

    def check_made(self, way: FlowDirection, payload: Payload) -> None:
        """FrameError unless this may go on.  Of a source's gradient nothing does."""
        if way is FlowDirection.FORWARD:
            self._check_crossing(self._after, False, payload)
        elif self._before is not None:
            self._check_crossing(self._before, True, payload)
        elif payload:
            raise FrameError(Verdict.MALFORMED, "a source gives no gradient on")

    def _check_crossing(self, border: Border | None, backwards: bool, payload: Payload) -> None:
        if border is None:
            raise FrameError(Verdict.MALFORMED, "there is no such border")
        for piece in parse(border, backwards, payload).pieces:
            if piece.codec != RAW:
                self._check(piece.codec, piece.data, prod(piece.dims))
