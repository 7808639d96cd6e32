"""What coarse codecs have lost of a peer's contributions: its own memory, which nothing in the product shows."""

from __future__ import annotations

from torch import Tensor

from farflung.peer.state.outer_state import OuterState


def residual_of(state: OuterState) -> Tensor | None:
    """Of the first fragment, to be read."""
    feedback = state._feedbacks[0]
    return None if feedback is None else feedback.residual
