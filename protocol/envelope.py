"""The control envelope: one msgpack map per message, bounded and typed.

`encode` and `decode` are used by the coordinator, the peers and the simulator.  Parsing is msgpack's own,
with explicit limits; types are checked by msgspec against the schemas in messages.py.  Nothing is executed,
no extension types are known, and every failure is a FrameError that names its counter (P8).
"""

from __future__ import annotations

from typing import Any, cast

import msgpack
import msgspec

from farflung.protocol import limits
from farflung.protocol.errors import FrameError
from farflung.protocol.messages import KINDS, Message, kind_of
from farflung.protocol.verdicts import Verdict

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    raw = _encoder.encode({"kind": kind_of(message), "body": message})
    if len(raw) > limits.CONTROL_FRAME_BYTES:
        raise ValueError(
            f"{kind_of(message)} message of {len(raw)} bytes is over {limits.CONTROL_FRAME_BYTES}"
        )
    return raw


def decode(raw: bytes, allowed: frozenset[str]) -> Message:
    """One message of an allowed kind, or a FrameError."""
    if len(raw) > limits.CONTROL_FRAME_BYTES:
        raise FrameError(
            Verdict.OVERSIZE, f"control frame of {len(raw)} bytes, at most {limits.CONTROL_FRAME_BYTES}"
        )
    envelope = _unpack(raw)
    if not isinstance(envelope, dict) or envelope.keys() != {"kind", "body"}:
        raise FrameError(Verdict.MALFORMED, "control frame is not a map of kind and body")
    kind = envelope["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise FrameError(Verdict.MALFORMED, f"unknown kind {str(kind)[:40]!r}")
    if kind not in allowed:
        raise FrameError(Verdict.UNAUTHORISED, f"{kind} is not accepted here")
    try:
        return cast(Message, msgspec.convert(envelope["body"], KINDS[kind], strict=True))
    except msgspec.ValidationError as error:
        raise FrameError(Verdict.MALFORMED, f"{kind}: {error}") from None


def _unpack(raw: bytes) -> Any:
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            max_str_len=limits.CONTROL_STR_BYTES,
            max_bin_len=limits.CONTROL_BIN_BYTES,
            max_array_len=limits.CONTROL_ARRAY_LEN,
            max_map_len=limits.CONTROL_MAP_LEN,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise FrameError(
            Verdict.MALFORMED, f"not msgpack within the limits: {type(error).__name__}"
        ) from None
