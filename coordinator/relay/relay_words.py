"""What the coordinator and its relay say to each other.

Typed and bounded as the words of the front door are, and carried by the same kind of channel.  The relay is told no
secret: with what it knows, tickets can be read and not written.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from farflung.coordinator.relay.switchboard import PAIRS_MOST
from farflung.coordinator.roster.ways import PAIR_BYTES
from farflung.protocol.process.child import CannotListen, ChildSettings, ChildWord, Listening
from farflung.protocol.round_words import Count, Hash

Pair = Annotated[bytes, Meta(min_length=PAIR_BYTES, max_length=PAIR_BYTES)]


# ---- to the relay --------------------------------------------------------------------------------------------


class RelaySettings(ChildSettings, frozen=True, kw_only=True, tag="begin"):
    run_id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    incarnation: Count
    public: Hash  # the ed25519 key that signs tickets
    host: str
    bytes_per_s: float
    relay: Annotated[str, Meta(max_length=64)] = ""  # for whose tickets: see relays.py


class Wanted(ChildWord, frozen=True, kw_only=True, tag="wanted"):
    """All pairs that may meet from now on: others are hung up on."""

    pairs: Annotated[tuple[Pair, ...], Meta(max_length=PAIRS_MOST)]
    clock_ahead_s: float = 0.0  # the clock by which tickets end, before this machine's


# ---- from the relay ------------------------------------------------------------------------------------------


class PairsCounted(ChildWord, frozen=True, kw_only=True, tag="counted"):
    """Said twice a second, so that its silence means that it hangs.  Bytes and refusals: since the last time."""

    pairs: Count  # joined now
    waiting: Count  # sides that wait for the other one
    guests: Count  # connections without a ticket
    moved_bytes: Count
    refused: Count  # connections that showed no good ticket


ToRelay = RelaySettings | Wanted
FromRelay = Listening | CannotListen | PairsCounted

TO_RELAY: msgspec.msgpack.Decoder[ToRelay] = msgspec.msgpack.Decoder(ToRelay)
FROM_RELAY: msgspec.msgpack.Decoder[FromRelay] = msgspec.msgpack.Decoder(FromRelay)
