"""What the pure machines of a peer ask their shell to do on the data plane, and with arithmetic.

Returned by the round and the state transfer; carried out by the agent or by the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.protocol.frames import Frame, Payload


@dataclass(frozen=True, slots=True)
class SendFrame:
    to: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class Merge:
    """Sum the payloads in the order given, with the weights given, and encode the sum once."""

    round_no: int
    decision_no: int  # 0: no owner's sum
    chunk: int
    payloads: tuple[Payload, ...]
    weights: tuple[float, ...]
    codec: str = ""  # of the sum; empty: that of results


@dataclass(frozen=True, slots=True)
class Weigh:
    """The dot products of all pairs of payloads of one chunk."""

    round_no: int
    chunk: int
    members: int  # mask: whose payloads these are, in order
    payloads: tuple[Payload, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """The sum of the squares of a result's values."""

    round_no: int
    chunk: int
    hash: bytes
    payload: Payload


@dataclass(frozen=True, slots=True)
class Install:
    """Replace one chunk of outer state by verified bytes of `version`."""

    chunk: int
    version: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Roll:
    """Apply the committed result `payload`, times `factor`, to one chunk: it then is at `version`."""

    chunk: int
    version: int
    payload: Payload
    factor: float = 1.0  # of its commit


@dataclass(frozen=True, slots=True)
class Seal:
    """All chunks of the fragment are at `version`: hash them and report the digest."""

    version: int
    fragment: int = 0


Calculated = Merge | Weigh | Measure  # what comes of these comes back
DataEffect = SendFrame | Calculated | Install | Roll | Seal
