"""How far one pseudo-gradient is from another, and whether what a peer signed as sent was made of the one it recorded.

Called by the stand-in agent and by `farflung verify`.  Must not know how a pseudo-gradient comes about.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.compression.codec import NonFinite, codec_named
from farflung.compression.feedback import BETA_OF
from farflung.peer.record.work_files import SentOf, Work
from farflung.protocol.digests import hash_bytes, split_hashes
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import fragments_of
from farflung.protocol.signed_words import is_signed


@dataclass(frozen=True)
class Distance:
    same_bits: bool
    relative: float  # norm of the difference / norm of what was recorded
    cosine: float
    norms: tuple[float, float]  # recorded, made again


def distance(recorded: Tensor, again: Tensor) -> Distance:
    one, other = recorded.to(torch.float64), again.to(torch.float64)
    norms = float(one.norm()), float(other.norm())
    both = norms[0] * norms[1]
    cosine = float(one @ other) / both if both else float(norms[0] == norms[1])
    apart = float((one - other).norm())
    relative = apart / norms[0] if norms[0] else (0.0 if not apart else float("inf"))
    same = torch.equal(recorded.view(torch.int32), again.view(torch.int32))
    return Distance(same, relative, cosine, norms)


@dataclass(frozen=True)
class Binding:
    """What ties recorded work to what others got."""

    fragment: int
    peer: str
    round_no: int
    residual: float  # norm of what an earlier round's codec had lost / norm of the pseudo-gradient
    problem: str  # why the work is not what was sent, or empty


def binding(work: Work, sent: SentOf, residual: Tensor | None) -> Binding:
    """Encoded as the run's codec does, the recorded pseudo-gradient must have the hashes that its peer signed."""
    head = work.head
    manifest = Manifest.from_canonical(head.manifest)
    part_n = _part_of(
        work.delta(), head.model.chunk_elements, head.model.chunk_count, sent.fragment, manifest
    )
    rest = float(residual.norm()) / max(float(part_n.norm()), 1e-30) if residual is not None else 0.0
    problem = _problem(sent, part_n, residual, head.model.chunk_elements)
    return Binding(sent.fragment, sent.said.peer, sent.said.sent.round_no, rest, problem)


def _part_of(delta: Tensor, elements: int, chunks: int, number: int, manifest: Manifest) -> Tensor:
    fragment = fragments_of(chunks, manifest.fragments)[number]
    return delta[fragment.first * elements : (fragment.first + fragment.count) * elements]


def _problem(sent: SentOf, part_n: Tensor, residual: Tensor | None, elements: int) -> str:
    if not is_signed(sent.said.identity, sent.run_id, sent.said.sent):
        return f"{sent.said.peer} has not signed the list of what was sent"
    if residual is not None:
        if residual.shape != part_n.shape:
            return f"the residual has {residual.numel()} values, the fragment {part_n.numel()}"
        # The same operations in the same order as compression/feedback.py.
        part_n = residual.clone().mul_(BETA_OF.get(sent.codec, 1.0)).add_(part_n)
    codec, expected = codec_named(sent.codec), split_hashes(sent.said.sent.hashes)
    if len(expected) * elements != part_n.numel():
        return f"the signed list has {len(expected)} chunks, the fragment {part_n.numel() // elements}"
    for chunk, due in enumerate(expected):
        try:
            made = codec.encode(part_n[chunk * elements : (chunk + 1) * elements].contiguous())
        except NonFinite as error:
            return f"chunk {chunk} of the recorded pseudo-gradient is not finite: {error.value}"
        if hash_bytes(made) != due:
            return (
                f"chunk {chunk} of the recorded pseudo-gradient is not what {sent.said.peer} signed and sent"
            )
    return ""
