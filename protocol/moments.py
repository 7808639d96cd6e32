"""What a peer knows of its run, in two steps: which run it is, and what its own part of the model is.  Pure data.

A peer that knocks knows nothing yet.  With the coordinator's challenge it is `Known`; when a trainer has said what its
model is, it is `Attached`.  Each is made once and never changed, so whatever needs one is built when it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from farflung.protocol.fragments import Fragment
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.outer_numbers import StateForm

TAG_BYTES = 8


def tag_of(run_id: bytes) -> bytes:
    """Stands in every bulk frame: a frame of another run is none of ours."""
    return run_id[:TAG_BYTES]


@dataclass(frozen=True)
class Known:
    manifest: Manifest
    run_id: bytes

    @property
    def tag(self) -> bytes:
        return tag_of(self.run_id)


@dataclass(frozen=True)
class Attached:
    known: Known
    model: ModelSchema
    stages: tuple[int, ...] = ()  # of a model that is cut: the one held, or those that could be

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """UserError if the model has fewer chunks than the run has fragments."""
        return tuple(self.model.fragments(self.known.manifest.fragments))

    @property
    def held(self) -> tuple[Fragment, ...]:
        """Those that this peer holds: all of them, but of a model that is cut into stages."""
        return tuple(self.fragments[stage] for stage in self.stages) if self.stages else self.fragments

    def as_holder_of(self, fragments: tuple[int, ...]) -> Attached | None:
        """What the coordinator says that I hold: all of it, or one of the stages that I offered.  None: neither."""
        if not self.stages:
            return self if fragments == tuple(each.number for each in self.fragments) else None
        chosen = len(fragments) == 1 and fragments[0] in self.stages
        return Attached(self.known, self.model, fragments) if chosen else None

    def of_part(self, fragment: int) -> str:
        """For people: " of stage 2", " of fragment 2", or nothing where there is only one."""
        kind = "stage" if self.model.stages else "fragment"
        return f" of {kind} {fragment}" if len(self.fragments) > 1 else ""

    @property
    def name(self) -> bytes:
        """Of this model in this run: what lies on disk under another name is none of ours."""
        of_stages = b"".join(stage.to_bytes(2, "little") for stage in self.stages)
        return self.known.run_id + self.known.manifest.digest + self.model.hash + of_stages

    @cached_property
    def form(self) -> StateForm:
        """Of one chunk of the outer state."""
        return self.known.manifest.state_form(self.model.chunk_elements)

    def fragment_of(self, chunk: int) -> Fragment:
        return next(fragment for fragment in self.fragments if chunk in fragment.chunks)
