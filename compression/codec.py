"""Codecs as a peer uses them: one chunk of a flat vector to bytes and back, by the fastest way to the same bits.

Owns: the choice of the way, and tensors of any float type and device.  The arithmetic is plain_codecs.py; native.py on
a CPU and triton_path.py on a GPU may know a faster way, and what is refused is worded by the plain one.
Called by the agent's arithmetic: encode a pseudo-gradient, decode and add as owner, decode a result.
No I/O, no protocol, no residual state (that is `ErrorFeedback`).  A codec is exact about bytes: the same input gives
the same bytes on every machine, because bytes are hashed and compared between peers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from farflung.compression import plain_codecs
from farflung.compression.native import FastPath, compiled_for, flat, scratch
from farflung.compression.plain_codecs import Bytes, NonFinite, PlainCodec
from farflung.compression.triton_path import device_path_for
from farflung.protocol.extensions import CODEC, loaded

__all__ = ["Bytes", "Codec", "NonFinite", "codec_named", "codec_names", "codec_of"]

_CPU = torch.device("cpu")


def fast_path(codec: Codec, device: torch.device) -> FastPath | None:
    return compiled_for(codec) if device.type == "cpu" else device_path_for(codec, device)


class Codec:
    def __init__(
        self, plain: PlainCodec, choose: Callable[[Codec, torch.device], FastPath | None] = fast_path
    ) -> None:
        self._plain, self._choose = plain, choose
        self.format, self.name = plain.format, plain.name
        # Of a block; as the fast paths want to know them.
        self.code_bytes = plain.blocks.code_bytes if plain.blocks else 0
        self.levels = plain.blocks.levels if plain.blocks else ()
        # Length of the payload of a chunk: known beforehand, so a wrong length is refused unread.
        self.payload_bytes = plain.payload_bytes

    def using(self, fast: FastPath | None) -> Codec:
        """The same codec on this path only; None is the plain path."""
        return Codec(self._plain, lambda codec, device: fast)

    def encode(self, chunk_n: Tensor) -> bytes:
        """fp32, bf16 or fp16 of any shape, on CPU or GPU -> payload.  Raises NonFinite with the first bad place."""
        return bytes(self.encode_here(chunk_n))

    def encode_here(self, chunk_n: Tensor) -> Bytes:
        """The same, to be put elsewhere at once: it may lie where this thread's next one will.

        Memory that is new for each payload costs four times what encoding it does.
        """
        flat_n = flat(chunk_n)
        fast = self._fast_path_for(flat_n)
        # None where a value is not finite: the plain way finds out which.
        payload = fast.encode(flat_n, self.format.header(flat_n.numel())) if fast else None
        return payload or self._plain.encode(flat_n.to(_CPU, torch.float32).numpy())

    def check(self, payload: Bytes, elements: int) -> None:
        """FrameError unless this is the payload of `elements` finite values; the header before anything else."""
        self._plain.check_head(payload, elements)
        fast = self._choose(self, _CPU)
        if not (fast and fast.check(payload, elements)):
            self._plain.check(payload, elements)

    def decode(self, payload: Bytes, elements: int, out_n: Tensor | None = None) -> Tensor:
        """payload -> fp32 [n] on the CPU, after `check`; into `out_n` where the caller keeps memory for it."""
        self.check(payload, elements)
        out_n = torch.empty(elements, dtype=torch.float32) if out_n is None else out_n
        fast = self._fast_path_for(out_n)
        if fast:
            fast.decode(payload, out_n)
        else:
            out_n.copy_(self._times(payload, 1.0, elements))
        return out_n

    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None:
        """total_n += weight * decode(payload), after `check`, where fp32 `total_n` [n] lies.

        The bits are those of `total_n.add_(decode(payload, n).mul_(weight))`: two roundings, never fused.
        """
        self.check(payload, total_n.numel())
        fast = self._fast_path_for(total_n)
        if fast:
            fast.decode_add(payload, weight, total_n)
        else:
            total_n.add_(self._times(payload, weight, total_n.numel()).to(total_n.device))

    def _times(self, payload: Bytes, weight: float, elements: int) -> Tensor:
        """Weight times the values of a checked payload, in scratch; times 1 is exact."""
        values_n = scratch("values", elements, torch.float32, _CPU)
        with np.errstate(all="ignore"):
            np.multiply(self._plain.restored(payload, elements), np.float32(weight), out=values_n.numpy())
        return values_n

    def _fast_path_for(self, values_n: Tensor) -> FastPath | None:
        fast = self._choose(self, values_n.device)
        return fast if fast and fast.can_use(values_n) else None


@functools.cache
def codec_named(name: str) -> Codec:
    """UserError for one that nobody here knows."""
    return Codec(plain_codecs.codec_named(name))


def check_payload(name: str, payload: Bytes, elements: int) -> None:
    """FrameError unless these are so many finite values in that codec; UserError for one that nobody knows."""
    codec_named(name).check(payload, elements)


def payload_bytes(name: str, elements: int) -> int:
    """So long is the payload of so many values in that codec."""
    return plain_codecs.codec_named(name).payload_bytes(elements)


def codec_of(payload: Bytes) -> Codec:
    """The codec that a checked payload names in its header."""
    return codec_named(plain_codecs.codec_in(payload).name)


def codec_names() -> list[str]:
    """Our own ones."""
    return sorted(plain_codecs.CODECS)


# ---- feedback ----------------------------------------------------------------------------------------------
# Error feedback: what a coarse codec lost of one round's pseudo-gradient is added to the next one's.
#
# Owns: the residual of one fragment. Called by: whoever encodes a peer's pseudo-gradient (the agent). Must
# not know: rounds, peers, which codec it is. It is a peer's own memory: never hashed, never sent, never part
# of the shared state, and a peer that has lost it has lost nothing that others must agree on.
#
#     open      e = beta * e + delta
#     encode    send Q(e); e -= Q(e)            chunk by chunk
#     settle    the commit used it: e stays
#     refund    and what the merged result left out, since it is sparse, comes back: e += Q(e) there
#     give_back the commit did not use it: e += Q(e)
#     withdraw  it did not, and delta comes back with the next pseudo-gradient: e = e of before
#
# beta = 1 for dense 4-bit codes; 0.9 to 0.95 for 2 bits and top-k (arXiv:2508.15706, arXiv:2505.23725).

# Codecs that lose enough to need it.  The others' error is far below the noise of training.
BETA_OF = {"int4": 1.0, "int2": 0.95, "topk": 0.95}
AUTO = "auto"  # a run in which the codec may change from round to round


def beta_of(codec: str) -> float | None:
    """None: nothing that it loses is kept."""
    if codec in plain_codecs.CODECS:
        return BETA_OF.get(codec)
    beta: float | None = loaded(CODEC, codec).memory
    return beta


def feedback_for(codec: str) -> ErrorFeedback | None:
    beta = 1.0 if codec == AUTO else beta_of(codec)
    return ErrorFeedback(beta) if beta is not None else None


# What a peer has not sent while it was away says ever less of where to go: for each version without it, and after so
# many nothing.
_SHARE_OF_MISSED, _MISSED_MOST = 0.95, 60


def share_after(missed: int) -> float:
    """Of what was left to send, after so many versions without this peer."""
    return float(_SHARE_OF_MISSED**missed) if missed <= _MISSED_MOST else 0.0


class ErrorFeedback:
    def __init__(self, beta: float) -> None:
        self._beta = _checked(beta)  # of the round that is open
        self._residual_n: Tensor | None = None  # taken with the first pseudo-gradient
        self._sent: list[
            tuple[Codec, int, int, Bytes]
        ] = []  # (codec, start, elements, payload) of this round
        self._owed: dict[int, tuple[Codec, int, Bytes]] = {}  # by start: used, and its result not seen yet
        self.is_open = False

    @property
    def residual(self) -> Tensor | None:
        """[n], to be read; None before the first pseudo-gradient."""
        return self._residual_n

    def take_up(self, residual_n: Tensor, share: float) -> None:
        """What an earlier life of this peer left, any float type, unless there is something of this one."""
        if self._residual_n is None and share > 0.0:
            self._residual_n = residual_n.float().mul_(share)

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
        self._owed.clear()  # of results that are never seen: all of it counts as taken
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

    def settle(self, owed: bool = False) -> None:
        """`owed`: the results are sparse, and what they leave out is to be refunded."""
        self._owed = {start: (codec, count, sent) for codec, start, count, sent in self._sent} if owed else {}
        self._sent.clear()
        self.is_open = False

    def refund(self, start: int, result_n: Tensor) -> None:
        """This is applied where values from `start` on were sent: what it has at 0 was not taken, and is owed still."""
        if (owed := self._owed.pop(start, None)) is None:
            return
        assert self._residual_n is not None
        codec, count, payload = owed
        sent_n = codec.decode(payload, count, scratch("refund", count, torch.float32, _CPU))
        self._residual_n[start : start + count].add_(sent_n.mul_(result_n == 0))

    def forget(self, start: int) -> None:
        """The values from `start` on came from another peer, and no result will be seen."""
        self._owed.pop(start, None)

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
        """The residual was of a state that is gone."""
        self._residual_n = None
        self.settle()


def _checked(beta: float) -> float:
    if not 0.0 < beta <= 1.0:
        raise ValueError(f"beta of the error feedback must lie in (0, 1], not {beta}")
    return beta
