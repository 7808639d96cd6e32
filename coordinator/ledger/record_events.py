"""The coordinator's event journal: its durable records as JSON lines, for people, for the audit, for replays.

Called by the server right after records became durable, and once at its start with all of them: what became durable
just before a kill is written then.  Must not know what the run makes of a record.  The format: docs/events.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from farflung import __version__
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import (
    Amended,
    CommittedBatch,
    CommittedRound,
    DataFixed,
    DecidedOn,
    Folded,
    Genesis,
    Granted,
    ModelFixed,
    Opened,
    Record,
    Started,
    tag_of,
)
from farflung.protocol.errors import NoteCause
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.journal import FRAMES_EVERY_S, EventLog, read_events
from farflung.protocol.round_words import result_name


@dataclass(frozen=True)
class CoordinatorStart:
    """What a coordinator knows of itself when it starts."""

    manifest: Manifest
    run_id: bytes
    ledger: Ledger
    records: Sequence[Record]


class RecordEvents:
    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._log = EventLog(path, detailed=False)
        self._pos = 0  # of the newest record that is durable
        self._frames_at = 0.0
        self._frames: dict[str, Any] = {}

    def write_start(self, known: CoordinatorStart) -> None:
        """Before the first record of this process."""
        found = read_events(self._path) if self._path is not None else []
        written = [each["pos"] for each in found if isinstance(each.get("pos"), int)]
        rules = known.manifest
        self._log.write_start(
            role="coordinator",
            run=rules.run.name,
            run_id=known.run_id.hex(),
            incarnation=known.ledger.incarnation + 1,
            software=f"farflung {__version__}",
            versions=[book.version for book in known.ledger.books],
            era=known.ledger.eras.number,
            rules={
                "min_peers": rules.run.min_peers,
                "rounds": rules.run.rounds,
                "fragments": rules.fragments,
                "stages": rules.pipeline.stages,
                "deadline_s": rules.round.deadline_s,
                "round_timeout_s": rules.round.round_timeout_s,
                "heartbeat_s": rules.net.heartbeat_s,
                "dead_after_s": rules.net.dead_after_s,
            },
        )
        records = known.records
        folded = records[0].position if records and isinstance(records[0], Folded) else 0
        here = records[1:] if folded else records  # what was folded was written long ago
        self._pos = max(folded, min(max(written, default=0), folded + len(here)))
        for record in here[self._pos - folded :]:
            self._write(record, late=True)

    def on_records(self, records: Sequence[Record]) -> None:
        """They are durable now."""
        for record in records:
            self._write(record)

    def on_note(self, text: str, cause: NoteCause) -> None:
        self._log.write("note", cause=cause, text=text)

    def on_failpoint(self, point: str, action: str) -> None:
        self._log.write("failpoint", point=point, action=action)

    def on_timer(self, now: float, counts: dict[str, Any]) -> None:
        if now >= self._frames_at and counts != self._frames:
            self._frames_at, self._frames = now + FRAMES_EVERY_S, counts
            self._log.write("frames", **counts)

    def close(self, reason: str, counts: dict[str, Any]) -> None:
        self._log.write("frames", **counts)
        self._log.write("end", reason=reason)
        self._log.close()

    def _write(self, record: Record, **more: object) -> None:
        self._pos += 1
        kind, body = event_of(record)
        self._log.write(kind, pos=self._pos, **body, **more)


def event_of(record: Record) -> tuple[str, dict[str, Any]]:
    """(the event's name, its fields): what is long is named by a hash or counted."""
    match record:
        case Opened(plan=plan):
            groups = {"groups": plan.groups} if plan.groups else {}
            return "opened", {
                "round": plan.round_no,
                "epoch": plan.epoch,
                "version": plan.version,
                "fragment": plan.fragment,
                "members": plan.members,
                "owned": [plan.owners.count(index) for index in range(len(plan.members))],
                "codecs": plan.codecs,
                **groups,
            }
        case DecidedOn(decision=made):
            fields = {"round": made.round_no, "decision": made.decision_no}
            told = {"reasons": made.reasons, "causes": record.causes}
            return "decided", {**fields, "weights": made.weights, **told}
        case CommittedRound():
            return "committed", _committed(record)
        case CommittedBatch(rounds=rounds):
            return "committed_batch", {"rounds": [_committed(each) for each in rounds]}
        case Genesis(peer=peer, founders=founders):
            several = {"founders": founders} if founders else {}
            return "genesis", {"peer": peer, "digests": [each.hex() for each in record.digests], **several}
        case ModelFixed(model=model, peer=peer):
            return "model", {"peer": peer, "chunks": model.chunk_count, "elements": model.chunk_elements}
        case DataFixed(samples=samples, peer=peer, data=data):
            return "data", {"peer": peer, "samples": samples, "data": data.hex()}
        case Started():
            # Whoever reads the events must not foresee what follows from it.
            return _plain(msgspec.structs.replace(record, secret=b""))
        case Amended(amendment=made):
            return "amended", {
                "number": made.number,
                "version": made.version,
                "era": made.era,
                "changes": made.changed,
            }
        case Granted(peer=peer, lease=lease):
            fields = {name: getattr(lease, name) for name in lease.__struct_fields__}
            return "granted", {"peer": peer, **fields}
        case _:
            event = getattr(record, "event", None)  # a mode's record may say less than all that it has
            return (tag_of(record), event()) if event is not None else _plain(record)


def _committed(record: CommittedRound) -> dict[str, Any]:
    commit = record.commit
    return {
        "round": commit.round_no,
        "version": commit.version,
        "fragment": commit.fragment,
        "members": commit.members,
        "weights": commit.weights,
        "result": result_name(commit),
        "used": {peer: [[use.lease, use.upto] for use in used] for peer, used in record.used.items()},
        "excluded": {peer: why.text for peer, why in record.excluded.items()},
        "causes": {peer: why.cause for peer, why in record.excluded.items()},
        "tokens": record.tokens,
        "tokens_by": record.tokens_by,
        "steps": record.steps,
        "loss": record.loss,
        **({"norm": norm} if (norm := record.merged.norm) is not None and isfinite(norm) else {}),
        "seconds": round(record.seconds, 4),
        "tx_bytes": record.tx_bytes,
        **({"factor": commit.factor} if commit.factor != 1.0 else {}),
        **({"counted": {p: mask.hex() for p, mask in record.counted.items()}} if record.counted else {}),
    }


def _plain(record: Record) -> tuple[str, dict[str, Any]]:
    """Its fields as they are; a round's number is `round` everywhere."""
    config = type(record).__struct_config__
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    if "round_no" in fields:
        fields["round"] = fields.pop("round_no")
    return str(config.tag), json.loads(json.dumps(fields, default=lambda raw: raw.hex()))
