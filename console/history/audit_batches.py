"""Of the audit: of a synchronous batch every microbatch counts once (P11), by the coordinator's records alone.

Called by audit.py for runs that have batches.  It follows seats and grants as they were written down, and knows nothing
of how they are decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from farflung.console.history.finding import Finding
from farflung.console.history.history import History
from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.process.journal import Event


@dataclass
class AuditedBatch:
    """Where the records have come to."""

    batch: Event | None = None  # that is counted
    skipped: int = 0  # mask
    seats: dict[int, str] = field(default_factory=dict)  # number -> peer
    stages: dict[int, int] = field(default_factory=dict)  # number -> stage
    # Stages of the batch that are committed by this record.
    committed: list[int] = field(default_factory=list)
    granted: dict[int, int] = field(default_factory=dict)  # number -> mask
    numbers: set[int] = field(default_factory=set)  # ever used
    ends: dict[int, tuple[int, int]] = field(default_factory=lambda: {0: (0, 0)})  # by version

    def begin(self, batch: Event | None) -> None:
        self.batch, self.skipped, self.granted, self.committed = batch, 0, {}, []

    def due(self) -> int:
        return ((1 << self.batch["count"]) - 1) & ~self.skipped if self.batch is not None else 0

    def of_peer(self, peer: str, stage: int) -> int:
        """The mask of what it may count: in the first stage what it was granted, in others what it got there."""
        if stage and any(self.seats.get(n) == peer for n, at in self.stages.items() if at == stage):
            return self.due()
        return sum(mask for number, mask in self.granted.items() if self.seats.get(number) == peer)


def has_batches(history: History) -> bool:
    return any(each["event"] == "batch" for each in history.records)


def check_batches(history: History) -> Finding:
    finding, story = Finding("P11", "every microbatch once", "seats, grants and commits"), AuditedBatch()
    if history.coordinators[0].start["versions"] != [0] * history.rules["fragments"]:
        return finding  # the beginning is gone: who holds which seat is not known
    stages = history.rules.get("stages", 1)
    for each in history.records:
        match each["event"]:
            case "batch":
                _begin(each, story, finding)
            case "seated":
                new = each["number"] not in story.numbers
                finding.expect(new, f"seat {each['number']} was given a second time")
                story.numbers.add(each["number"])
                story.seats[each["number"]] = each["peer"]
                story.stages[each["number"]] = each.get("stage", 0)
            case "unseated":
                story.seats.pop(each["number"], None)
                story.granted.pop(each["number"], None)
            case "granted_micros":
                _grant(each, story, finding)
            case "taken_back":
                story.granted[each["seat"]] = story.granted.get(each["seat"], 0) & ~_mask(each)
            case "skipped":
                _skip(each, story)
            case "committed":
                together = each.get("of_batch", 1) == stages
                finding.expect(together, f"version {each['version']} is not committed in all stages at once")
                _commit(each, story, finding)
            case "data" | "genesis" | "rolled_back":
                story.begin(None)
                story.seats.clear()
    return finding


def _mask(span: Event) -> int:
    return int((1 << span["stop"]) - (1 << span["first"]))


def _begin(batch: Event, story: AuditedBatch, finding: Finding) -> None:
    epoch, end = story.ends.get(batch["version"], (batch["epoch"], batch["start"]))
    follows = (batch["epoch"], batch["start"]) in ((epoch, end), (epoch + 1, 0))
    finding.expect(follows, f"the batch from version {batch['version']} does not begin where the last ended")
    story.begin(batch)


def _grant(granted: Event, story: AuditedBatch, finding: Finding) -> None:
    seat, mask = granted["seat"], _mask(granted)
    taken = sum(story.granted.values())
    name = f"microbatches {granted['first']} to {granted['stop']} for seat {seat}"
    finding.expect(
        seat in story.seats and not mask & taken, f"{name}: another has them, or nobody sits there"
    )
    finding.expect(story.stages.get(seat, 0) == 0, f"{name}, which is not of the first stage")
    story.granted[seat] = story.granted.get(seat, 0) | mask


def _skip(skipped: Event, story: AuditedBatch) -> None:
    story.skipped |= 1 << skipped["micro"]
    if story.batch is not None and not story.due():
        story.ends[story.batch["version"]] = (story.batch["epoch"], story.batch["stop"])
        story.begin(None)
        story.seats.clear()


def _commit(commit: Event, story: AuditedBatch, finding: Finding) -> None:
    """Of one stage; the batch is over with the last one of them."""
    seen, version, stage = 0, commit["version"], commit["fragment"]
    where = f"version {version} of stage {stage}" if commit.get("of_batch") else f"version {version}"
    for peer, raw in commit.get("counted", {}).items():
        mask = mask_from_bytes(bytes.fromhex(raw))
        finding.expect(not mask & seen, f"{where}: {peer} counted what others had counted")
        own = not mask & ~story.of_peer(peer, stage)
        finding.expect(own, f"{where}: {peer} counted what was not granted to it")
        seen |= mask
    finding.expect(seen == story.due(), f"{where} is not made of its whole batch")
    story.committed.append(stage)
    if len(story.committed) < commit.get("of_batch", 1):
        return
    if story.batch is not None:
        story.ends[version] = (story.batch["epoch"], story.batch["stop"])
    story.begin(None)
