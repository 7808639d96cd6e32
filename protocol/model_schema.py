"""What a model looks like to the run: one line per exchanged tensor, and the first difference between two.

Made by the peer from its model, kept by the coordinator from the first peer, compared at hello.  No torch.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT, CONTROL_ARRAY_LEN
from farflung.protocol.round_words import Count, Hash


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    name: Annotated[str, Meta(max_length=512)]
    shape: Annotated[tuple[int, ...], Meta(max_length=16)]
    dtype: Annotated[str, Meta(max_length=32)]
    kind: Annotated[str, Meta(max_length=16)]  # param, buffer, alias, frozen


class ModelSchema(Struct, frozen=True, forbid_unknown_fields=True):
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=CONTROL_ARRAY_LEN)]
    chunk_elements: Annotated[int, Meta(ge=1)]
    chunk_count: Annotated[int, Meta(ge=1, le=CHUNKS_PER_FRAGMENT)]
    first_plain_chunk: Count  # from here on buffers: averaged, without momentum
    frozen: Hash  # content of what is not trained: equal everywhere, never sent

    @property
    def hash(self) -> bytes:
        return hash_bytes(msgspec.msgpack.encode(self))


def first_difference(mine: ModelSchema, run: ModelSchema) -> str | None:
    """The first field in which a model differs from the run's, in words a user can act on."""
    for index, (here, there) in enumerate(zip(mine.tensors, run.tensors, strict=False)):
        for field in ("name", "kind", "shape", "dtype"):
            ours, theirs = getattr(here, field), getattr(there, field)
            if ours != theirs:
                ours, theirs = (list(v) if isinstance(v, tuple) else v for v in (ours, theirs))
                return f"tensor {index} {there.name!r}: {field} is {ours} here, {theirs} in the run"
    if len(mine.tensors) != len(run.tensors):
        longer = max(mine.tensors, run.tensors, key=len)
        extra = longer[min(len(mine.tensors), len(run.tensors))].name
        return f"number of tensors is {len(mine.tensors)} here, {len(run.tensors)} in the run (first extra: {extra!r})"
    for field in ("chunk_elements", "chunk_count", "first_plain_chunk"):
        if getattr(mine, field) != getattr(run, field):
            return f"{field} is {getattr(mine, field)} here, {getattr(run, field)} in the run"
    if mine.frozen != run.frozen:
        return "frozen parameters: their values differ from the run's; load the same pretrained weights"
    return None
