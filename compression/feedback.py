"""Error feedback: what a coarse codec lost of one round's pseudo-gradient is added to the next one's.

Owns: the residual of one fragment.
Called by: whoever encodes a peer's pseudo-gradient (the agent).
Must not know: rounds, peers, which codec it is.  It is a peer's own memory: never hashed, never sent, never
part of the shared state, and a peer that has lost it has lost nothing that others must agree on.

    open      e = beta * e + delta
    encode    send Q(e); e -= Q(e)            chunk by chunk
    settle    the commit used it: e stays
    give_back the commit did not use it: e += Q(e)
    withdraw  it did not, and delta comes back with the next pseudo-gradient: e = e of before

beta = 1 for dense 4-bit codes; 0.9 to 0.95 for 2 bits and top-k (arXiv:2508.15706, arXiv:2505.23725).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from farflung.compression.codec import Bytes, Codec

# Codecs that lose enough to need it.  The others' error is far below the noise of training.
BETA_OF = {"int4": 1.0, "int2": 0.95, "topk": 0.95}
AUTO = "auto"  # a run in which the codec may change from round to round


def feedback_for(codec: str) -> ErrorFeedback | None:
    return ErrorFeedback(BETA_OF.get(codec, 1.0)) if codec == AUTO or codec in BETA_OF else None


class ErrorFeedback:
    def __init__(self, beta: float) -> None:
        self._beta = _checked(beta)  # of the round that is open
        self._residual_n: Tensor | None = None  # taken with the first pseudo-gradient
        self._sent: list[
            tuple[Codec, int, int, Bytes]
        ] = []  # (codec, start, elements, payload) of this round
        self.is_open = False

    @property
    def residual(self) -> Tensor | None:
        """[n], to be read; None before the first pseudo-gradient."""
        return self._residual_n

    def open(self, delta_n: Tensor, beta: float | None = None) -> None:
        """A round begins with this pseudo-gradient (flat, any float type); the one before must be decided.

        `beta` from now on, where the codec changed.
        """
        assert not self.is_open, "the last contribution was neither settled nor given back"
        if self._residual_n is None:
            self._residual_n = torch.zeros(delta_n.shape, dtype=torch.float32, device=delta_n.device)
        if delta_n.shape != self._residual_n.shape:
            raise ValueError(
                f"a pseudo-gradient of {list(delta_n.shape)}, not {list(self._residual_n.shape)}"
            )
        self._beta = self._beta if beta is None else _checked(beta)
        self._residual_n.mul_(self._beta).add_(delta_n)
        self.is_open = True

    def encode(self, codec: Codec, start: int, elements: int, put: Callable[[Bytes], Bytes] = bytes) -> Bytes:
        """The payload of values start .. start + elements; each value once a round.  `put`: where its bytes are kept.

        NonFinite passes through, with its index within the chunk; `reset` then, as the residual is spoilt.
        """
        assert self._residual_n is not None and self.is_open
        part_n = self._residual_n[start : start + elements]
        here = codec.encode_here(part_n)
        codec.decode_add(here, -1.0, part_n)
        payload = put(here)
        self._sent.append((codec, start, elements, payload))
        return payload

    def settle(self) -> None:
        self._sent.clear()
        self.is_open = False

    def give_back(self) -> None:
        """For a caller that has let go of delta: the residual is all that remembers it."""
        for codec, start, elements, payload in self._sent:
            assert self._residual_n is not None
            codec.decode_add(payload, 1.0, self._residual_n[start : start + elements])
        self.settle()

    def withdraw(self, delta_n: Tensor) -> None:
        """For a caller whose next pseudo-gradient holds this delta again: kept here too it would count twice."""
        assert self._residual_n is not None and self.is_open
        self.give_back()
        self._residual_n.sub_(delta_n).div_(self._beta)

    def reset(self) -> None:
        """After a rejoin: the residual was of a state that is gone."""
        self._residual_n = None
        self.settle()


def _checked(beta: float) -> float:
    if not 0.0 < beta <= 1.0:
        raise ValueError(f"beta of the error feedback must lie in (0, 1], not {beta}")
    return beta
