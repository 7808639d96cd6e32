"""Journals of older formats: what has to be done to them, one step for each format.  Pure.

Called by the journal when it opens a file with an older number.  A step makes one record of the next format from each
record: their positions stay, because event journals name them.  Records are plain data here (what msgpack reads), for
the types of an older format are gone.  A step for manifests is needed only where a key changed its name or its meaning:
a key that is new has its default, as it has for a run.toml that does not name it.

To change the format: raise SCHEMA_VERSION, add the step from the number before, and to tests/journals/ a journal of
that number, written by the last farflung that had it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from farflung.coordinator.manifest import Manifest

SCHEMA_VERSION = 2
Plain = dict[str, Any]


def _codecs_of_members(record: Plain) -> Plain:
    """Format 1 began with one codec for all members of a round, and later named each one's."""
    plan = record.get("plan")
    if record["record"] != "opened" or plan is None or "codec" not in plan:
        return record
    rest = {name: value for name, value in plan.items() if name != "codec"}
    return {**record, "plan": {**rest, "codecs": [plan["codec"]] * len(plan["members"])}}


def _as_it_is(manifest: Plain) -> Plain:
    return manifest


@dataclass(frozen=True)
class Step:
    record: Callable[[Plain], Plain]
    manifest: Callable[[Plain], Plain] = _as_it_is


STEPS: dict[int, Step] = {1: Step(_codecs_of_members)}  # from this format to the next


def is_older(schema: int) -> bool:
    """One that there are steps from."""
    return schema in STEPS


def migrated_record(raw: bytes, schema: int) -> bytes:
    record: Plain = msgspec.msgpack.decode(raw)
    for number in range(schema, SCHEMA_VERSION):
        record = STEPS[number].record(record)
    return msgspec.msgpack.encode(record)


def migrated_manifest(raw: bytes, schema: int) -> bytes:
    """UserError if it has keys that no farflung knows any more."""
    manifest: Plain = json.loads(raw)
    for number in range(schema, SCHEMA_VERSION):
        manifest = STEPS[number].manifest(manifest)
    return Manifest.from_older(json.dumps(manifest).encode("utf-8")).canonical()
