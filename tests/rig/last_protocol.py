"""What the last version of the protocol knows, written down when it became the last one; and a peer that speaks it.

`python tests/rig/last_protocol.py join URL ...` is `farflung join URL ...` of that version, as far as anybody on the
other side can see: it knocks with it, and ends with an error at the first word that it would not have understood.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgpack
import msgspec

from farflung.peer import first_contact
from farflung.peer.agent import options
from farflung.peer.machine.getting_in import PeerConfig
from farflung.protocol import envelope
from farflung.protocol.limits import LAST_PROTOCOL
from farflung.protocol.messages import KINDS, Message

KNOWN_KINDS = frozenset(
    {"knock", "hello", "ask_status", "probe", "kept"}
    | {"challenge", "welcome", "refuse", "stands_by", "status", "probed", "ask_kept"}
    | {"beat", "sent", "progress", "shown", "audited", "leave", "look"}
    | {"tick", "open", "decided", "committed", "aborted", "show", "audit", "gone", "keep"}
)
HIGHEST_FRAME_KIND = 35
LEAVE_OUT = {"ModelSchema"}  # parts that do not say what is as usual
# Of each message and each part of one.
KNOWN_FIELDS = {
    "Aborted": "session seq round_no reason",
    "AheadPlan": "number senders codecs members owners",
    "Amendment": "number version era changes before proof",
    "AskKept": "nonce below",
    "AskStatus": "run",
    "AuditChunks": "session seq round_no version fragment members weights codecs chunks",
    "Audited": "session seq round_no chunks",
    "BatchBeat": "version seat trainer counted unusable want unit_s table_no holds made complains",
    "BatchTick": "version epoch start stop count seat granted freeze again table_no table skipped doubted",
    "Beat": "session seq roster_no fragments phase step tokens loss tx_bytes rx_bytes up_bytes_per_s "
    "down_bytes_per_s have want samples rough era saved unsure leaving data batch punched amended "
    "kept",
    "BorderTensor": "dtype shape name",
    "Challenge": "nonce run_id manifest model",
    "ChunkVerdict": "chunk wrong missing",
    "Commit": "version round_no members weights hashes codec fragment factor",
    "Committed": "session seq commit nonce amended kept",
    "Complaint": "seat damaged",
    "Contact": "peer name key address",
    "Decided": "session seq decision",
    "Decision": "round_no decision_no weights reasons",
    "DotProducts": "members chunks products",
    "DrawnChunk": "chunk result hashes",
    "FragmentBeat": "fragment version digest round_no epoch decision_no ready need dropped shown ahead",
    "FragmentTick": "fragment version digests verified donors round_no sent_seen progress_seen "
    "compare dropped proof nonce_for nonce refuted fellows ahead_no ahead",
    "Gone": "session seq reason final",
    "Head": "run_id manifest number before after incarnation era versions commits books proof",
    "Hello": "protocol run_id identity key address software manifest model fragments version digest "
    "process token signature fits helps kept",
    "Keep": "session seq kept",
    "Kept": "identity kept commits model manifest amendments signature",
    "KeptCommit": "head books",
    "Knock": "protocol run helps",
    "Lease": "lease epoch start stop upto uptos",
    "Leave": "session seq reason",
    "Look": "",
    "Meet": "peer endpoint at_s",
    "ModelSchema": "tensors chunk_elements chunk_count first_plain_chunk frozen stages riders matrices",
    "OpenRound": "session seq plan amended",
    "Plan": "round_no epoch version members owners codecs fragment kept",
    "Probe": "padding want address key look",
    "Probed": "came_from wall_s padding dialled port",
    "ProgressReport": "session seq round_no decision_no held refused cut_off merged merged_hashes "
    "got got_hash dots inputs signature lengths got_by",
    "Refuse": "code reason retry_after_s",
    "SeatRow": "number peer stage share since gone",
    "Sent": "session seq round_no hashes tokens steps loss used seat counted signature",
    "Show": "session seq question what fragment version chunk start round_no peer",
    "Shown": "session seq question start total part signature",
    "StageSpec": "first_part first_tensor chunk_count plain_chunks gives",
    "StandsBy": "whereabouts",
    "StatusReply": "status",
    "TensorSpec": "name shape dtype kind",
    "Tick": "session seq answers heard_s fragments goal reason roster_no roster leases void era "
    "advice era_because batch serve ways look meets amendments",
    "Used": "lease upto",
    "Way": "peer port ticket",
    "Welcome": "session incarnation member_port fragments roster whereabouts",
}


def unknown_in(raw: bytes) -> list[str]:
    """What of a message that version does not know: kinds, and fields as KIND.PART.FIELD."""
    said = msgpack.unpackb(raw, strict_map_key=False)
    kind, body = said["kind"], said["body"]
    if kind not in KNOWN_KINDS:
        return [kind]
    return list(_unknown(kind, msgspec.convert(body, KINDS[kind]), body))


def _unknown(path: str, part: Any, raw: Any) -> Any:
    """`part`: what `raw` means here."""
    if isinstance(part, msgspec.Struct):
        known = KNOWN_FIELDS.get(type(part).__name__, "").split()
        if isinstance(raw, dict):
            yield from (f"{path}.{name}" for name in raw.keys() - set(known))
        else:
            yield from (f"{path}.{name}" for name in part.__struct_fields__[len(known) : len(raw)])
            raw = dict(zip(part.__struct_fields__, raw, strict=False))
        for name in part.__struct_fields__:
            if name in raw:
                yield from _unknown(f"{path}.{name}", getattr(part, name), raw[name])
    elif isinstance(part, tuple | list):
        for each, its in zip(part, raw, strict=True):
            yield from _unknown(path, each, its)
    elif isinstance(part, dict):
        for key, each in part.items():
            yield from _unknown(path, each, raw[key])


def speak() -> None:
    """From now on this process speaks that version."""
    encode, decode = envelope.encode, envelope.decode

    def said(message: Message, version: int = LAST_PROTOCOL) -> bytes:
        raw = encode(message, version)
        assert not unknown_in(raw), f"said in version {version}: {unknown_in(raw)}"
        return raw

    def heard(raw: bytes, allowed: frozenset[str]) -> Message:
        assert not unknown_in(raw), f"heard by somebody who speaks version {LAST_PROTOCOL}: {unknown_in(raw)}"
        return decode(raw, allowed)

    envelope.encode, envelope.decode = said, heard
    first_contact.PROTOCOL_VERSION = LAST_PROTOCOL  # type: ignore[attr-defined]
    options.PeerConfig = partial(PeerConfig, protocol=LAST_PROTOCOL)  # type: ignore[misc, assignment]


if __name__ == "__main__":
    import sys

    from farflung.console.main import main

    speak()
    sys.exit(main())
