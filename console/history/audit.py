"""The audit: the ten promises, checked on the event journals of a run's processes and on nothing else.

Called by `farflung audit`, by the chaos tests and by benchmarks.  Each check counts what it looked at, so that an empty
journal is not taken for a kept promise.  What journals cannot show is not checked here: docs/reliability.md says so.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from farflung.console.history.history import Finding, History, Process
from farflung.console.history.recorded_run import StageStory, stage_stories, wall
from farflung.protocol.caps import parse_cap
from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.errors import AbortCause, DepartureCause, UserError
from farflung.protocol.model_schema import BOOKS_FRAGMENT
from farflung.protocol.process.journal import Event
from farflung.protocol.round_words import WEIGHT_CAP

# ---- audit batches -----------------------------------------------------------------------------------------
# Of the audit: of a synchronous batch every microbatch counts once (P11), by the coordinator's records alone.
#
# It follows seats and grants as they were written down, and
# knows nothing of how they are decided.


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

    @property
    def is_held_out(self) -> bool:
        return self.batch is not None and bool(self.batch.get("held_out"))

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
            case "held_out_ended":
                told = f"a held-out batch from version {each['version']} ends, and there was none"
                finding.expect(story.is_held_out, told)
                story.begin(None)
                story.seats.clear()
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
                _grant_microbatches(each, story, finding)
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
    follows = batch.get("held_out") or (batch["epoch"], batch["start"]) in ((epoch, end), (epoch + 1, 0))
    finding.expect(follows, f"the batch from version {batch['version']} does not begin where the last ended")
    story.begin(batch)


def _grant_microbatches(granted: Event, story: AuditedBatch, finding: Finding) -> None:
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
    if story.batch is not None and not story.due() and not story.is_held_out:
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
    finding.expect(not story.is_held_out, f"{where} is made of a held-out batch")
    story.committed.append(stage)
    if len(story.committed) < commit.get("of_batch", 1):
        return
    if story.batch is not None:
        story.ends[version] = (story.batch["epoch"], story.batch["stop"])
    story.begin(None)


# ---- audit work --------------------------------------------------------------------------------------------
# The audit of work and data: no inner step is lost or counted twice (P6), no sample goes in twice (P7).
#
# Part of the audit.

# ---- P6 ----------------------------------------------------------------------------------------------------


@dataclass
class StepAccount:
    """One fragment at one trainer: the unmerged steps at a moment, and the trainer's own count then."""

    steps: int
    step: int | None  # None: the trainer was fresh, or dropped its work, since


def check_work(history: History) -> Finding:
    finding = Finding("P6", "local work is kept", "freezes and loads")
    dropped = 0
    for peer, process in history.lives:
        dropped += _follow(peer, process, history, finding)
    finding.more = f"{dropped} steps given up on purpose"
    return finding


def _follow(peer: str, process: Process, history: History, finding: Finding) -> int:
    """One agent's life.  Returns the steps that it told its trainer to give up."""
    accounts: dict[int, StepAccount] = {}
    sent: dict[int, list[Event]] = {}  # what it contributed and has loaded no answer to, by fragment
    dropped = era = 0
    for each in process.events:
        match each["event"]:
            case "trainer" if each["what"] in ("gone", "attached"):
                accounts = {}
            case "sent":
                sent.setdefault(each["fragment"], []).append(each)
            case "sealed":
                era = each["era"]
            case "frozen" if not each.get("crossed"):
                fragment, before = each["fragment"], accounts.get(each["fragment"])
                if before is not None:
                    new = each["step"] - before.step if before.step is not None else 0
                    told = f"{peer}: {each['steps']} unmerged steps at step {each['step']}, not {before.steps + new}"
                    finding.expect(each["steps"] >= before.steps + new, told)
                accounts[fragment] = StepAccount(each["steps"], each["step"])
            case "load":
                account = accounts.get(each["fragment"])
                mine = sent.get(each["fragment"], [])
                settled = [s for s in mine if s["version"] < each["version"] and s["era"] == era]
                used = _used(peer, settled, history)
                sent[each["fragment"]] = [s for s in mine if s["version"] >= each["version"]]
                if each["keep"] == "rest":
                    taken = used is not None and used["steps"] == each["steps"]
                    finding.expect(
                        taken, f"{peer} gave up work at version {each['version']} that no commit used"
                    )
                elif each["keep"] == "all":
                    again = f"{peer} keeps work that version {each['version']} has used"
                    finding.expect(used is None, again)
                dropped += account.steps if account is not None and each["keep"] == "drop" else 0
                accounts[each["fragment"]] = _after_load(each, account)
    return dropped


def _after_load(load: Event, account: StepAccount | None) -> StepAccount:
    if load["keep"] in ("drop", "restore") or account is None:
        return StepAccount(load["steps"] if load["keep"] == "restore" else 0, None)
    taken = load["steps"] if load["keep"] == "rest" else 0
    return StepAccount(max(0, account.steps - taken), account.step)


def _used(peer: str, settled: list[Event], history: History) -> Event | None:
    """Of my contributions that a load answers, the one that a commit has in.

    A load may answer more than the newest round: a peer that lags behind applies two versions and loads once.
    """
    for mine in reversed(settled):
        for commit in history.by_round.get(mine["round"], []):
            weights = dict(zip(commit["members"], commit["weights"], strict=True))
            if weights.get(peer, 0.0) > 0.0:
                return mine
    return None


# ---- P7 ----------------------------------------------------------------------------------------------------


@dataclass
class Ranges:
    """Samples of one epoch, as ranges that neither overlap nor touch."""

    found: list[tuple[int, int]] = field(default_factory=list)

    def meets(self, start: int, stop: int) -> bool:
        at = bisect_left(self.found, (start, start))
        near = self.found[max(0, at - 1) : at + 1]
        return start < stop and any(a < stop and start < b for a, b in near)

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        joined = [r for r in self.found if r[0] <= stop and start <= r[1]]
        others = [r for r in self.found if not (r[0] <= stop and start <= r[1])]
        whole = (min([start, *(a for a, _ in joined)]), max([stop, *(b for _, b in joined)]))
        self.found = sorted([*others, whole])


@dataclass
class LeasedRange:
    peer: str
    epoch: int
    stop: int
    uptos: list[int]  # of each fragment: how far it has learned from these samples

    def upto(self, keepers: set[int]) -> int:
        return min(self.uptos[fragment] for fragment in keepers)


# Fragment, version, (epoch, start, stop) of its samples.
Learned = tuple[int, int, list[tuple[int, int, int]]]


@dataclass
class AuditedBooks:
    """What was leased and what was acknowledged, folded from the coordinator's events.

    `keepers` are the fragments whose commits acknowledge samples; in each of them a sample counts once.
    """

    fragments: int
    keepers: set[int]
    held: dict[int, LeasedRange] = field(default_factory=dict)
    done: dict[tuple[int, int], Ranges] = field(default_factory=dict)  # by (fragment, epoch)
    commits: list[Learned] = field(default_factory=list)

    def of(self, fragment: int, epoch: int) -> Ranges:
        return self.done.setdefault((fragment, epoch), Ranges())

    def go_back(self, versions: list[int]) -> None:
        """Leases from before count no more, and only what the versions that are left had used is done."""
        self.commits = [each for each in self.commits if each[1] <= versions[each[0]]]
        self.held, self.done = {}, {}
        for fragment, _, ranges in self.commits:
            for epoch, start, stop in ranges:
                self.of(fragment, epoch).add(start, stop)


def check_samples(history: History) -> Finding:
    finding = Finding("P7", "every sample once", "leases and acknowledgements")
    fragments = history.rules["fragments"]
    if history.coordinators[0].start["versions"] != [0] * fragments:
        return finding  # the beginning is gone: what each peer holds is not known
    commits = [each for found in history.by_round.values() for each in found]
    keepers = {each["fragment"] for each in commits if any(each["used"].values())} or {BOOKS_FRAGMENT}
    books, versions = AuditedBooks(fragments, keepers), [0] * fragments
    for each in history.records:
        match each["event"]:
            case "data":
                books = AuditedBooks(fragments, keepers)
            case "granted":
                _grant_lease(each, books, finding)
            case "released":
                for lease in each["leases"]:
                    books.held.pop(lease, None)
            case "cut_short":
                _cut_short(each, books)
            case "committed":
                versions[each["fragment"]] = each["version"]
                _acknowledge(each, books, finding)
            case "rolled_back":
                # Where no keeper lost a version, the books stay as they are.
                if any(each["versions"][keeper] < versions[keeper] for keeper in keepers):
                    books.go_back(each["versions"])
                versions = list(each["versions"])
    return finding


def _grant_lease(granted: Event, books: AuditedBooks, finding: Finding) -> None:
    epoch, start, stop = granted["epoch"], granted["start"], granted["stop"]
    uptos = list(granted.get("uptos") or [granted["upto"]] * books.fragments)
    name = f"lease {granted['lease']} of samples {start} to {stop} in epoch {epoch}"
    again = [f for f in books.keepers if books.of(f, epoch).meets(uptos[f], stop)]
    finding.expect(not again, f"{name}: fragment {again[:1]} has learned from some already")
    twice = [
        number
        for number, held in books.held.items()
        if held.epoch == epoch and held.upto(books.keepers) < stop and start < held.stop
    ]
    finding.expect(not twice, f"{name}: some are held by lease {twice[:1]}")
    books.held[granted["lease"]] = LeasedRange(granted["peer"], epoch, stop, uptos)


def _cut_short(told: Event, books: AuditedBooks) -> None:
    """What its holder can't read of these leases is for others."""
    for lease in told["leases"]:
        held = books.held.get(lease)
        if held is not None:
            held.stop = min(held.stop, max(told["samples"], held.upto(books.keepers)))
            if held.upto(books.keepers) >= held.stop:
                del books.held[lease]


def _acknowledge(commit: Event, books: AuditedBooks, finding: Finding) -> None:
    fragment, version, ranges = commit["fragment"], commit["version"], []
    for peer, used in commit["used"].items():
        for lease, upto in used:
            held = books.held.get(lease)
            mine = held is not None and held.peer == peer
            finding.expect(mine, f"version {version} used lease {lease}, which {peer} did not hold")
            if held is None:
                continue
            before, done = held.uptos[fragment], books.of(fragment, held.epoch)
            fresh = not done.meets(before, upto) and before <= upto <= held.stop
            finding.expect(fresh, f"version {version} of {fragment} used samples of lease {lease} again")
            done.add(before, upto)
            ranges.append((held.epoch, before, upto))
            held.uptos[fragment] = upto
            if held.upto(books.keepers) >= held.stop:
                del books.held[lease]
    books.commits.append((fragment, version, ranges))


# ---- audit -------------------------------------------------------------------------------------------------

SLACK_S = 5.0  # for a busy machine


@dataclass
class AuditReport:
    findings: list[Finding] = field(default_factory=list)
    facts: str = ""
    stages: list[StageStory] = field(default_factory=list)  # of a model in several

    @property
    def kept(self) -> bool:
        return all(not finding.broken for finding in self.findings)

    def lines(self) -> list[str]:
        stages = [story.line() for story in self.stages]
        return [self.facts, *stages, *(line for finding in self.findings for line in finding.lines())]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def audit(history: History) -> AuditReport:
    checks = (*CHECKS, check_batches) if has_batches(history) else CHECKS
    report = AuditReport([check(history) for check in checks])
    report.stages = stage_stories((wall(each), each) for each in history.records)
    lives = len(history.lives)
    killed = sum(process.ended is None for _, process in history.lives)
    commits = sum(map(len, history.by_round.values()))
    peers = _counted(len(dict(history.lives)), "peer")
    starts = f"{_counted(len(history.coordinators), 'start')} of the coordinator, {lives} of {peers}"
    back = _counted(len(history.eras) - 1, "time")
    ends = f"{killed} of these without an end; {_counted(commits, 'commit')}, {back} back"
    report.facts = f"{_counted(len(history.files), 'journal')}: {starts}, {ends}"
    return report


# ---- P1 to P5 ----------------------------------------------------------------------------------------------


def check_parity(history: History) -> Finding:
    finding = Finding("P1", "one digest per version", "digests compared")
    seen: dict[tuple[int, int, int], tuple[str, str]] = {}
    for peer, process in history.lives:
        for each in process.of("sealed"):
            if each["version"] == 0:
                continue  # version 0 may be founded more than once, until something was learned
            era, place = each["era"], (each["fragment"], each["version"])
            first = seen.setdefault((era, *place), (peer, each["digest"]))
            finding.expect(
                first[1] == each["digest"],
                f"{peer} and {first[0]} differ at version {place[1]} of {place[0]}",
            )
            known = history.era(era).digests.get(place)
            same = known is None or known == each["digest"]
            finding.expect(
                same, f"{peer} is at version {place[1]} of {place[0]} with a digest that is not the run's"
            )
    return finding


def check_commits(history: History) -> Finding:
    finding = Finding("P2", "all or nothing, once", "commits and uses of them")
    newest: dict[int, int] = {}
    ends: dict[int, str] = {}
    for each in history.records:
        match each["event"]:
            case "committed":
                fragment, version, last = each["fragment"], each["version"], newest.get(each["fragment"], 0)
                told = f"version {version} of fragment {fragment} was committed after version {last}"
                finding.expect(version == last + 1, told)
                newest[fragment] = version
                finding.expect(each["round"] not in ends, f"round {each['round']} was over and is committed")
                ends[each["round"]] = "committed"
            case "aborted":
                over = ends.get(each["round"]) == "committed"
                finding.expect(not over, f"round {each['round']} was committed and is aborted")
                ends[each["round"]] = "aborted"
            case "rolled_back":
                newest = dict(enumerate(each["versions"]))
    for peer, process in history.lives:
        for each in process.of("committed"):
            known = [
                (c["version"], c["fragment"], c["result"]) for c in history.by_round.get(each["round"], [])
            ]
            mine = (each["version"], each["fragment"], each["result"])
            finding.expect(
                not known or mine in known, f"{peer} heard of another commit of round {each['round']}"
            )
        for each in process.of("sealed"):
            place = (each["fragment"], each["version"])
            made = each["version"] == 0 or place in history.era(each["era"]).commits
            finding.expect(made, f"{peer} applied version {place[1]} of {place[0]}, which nobody committed")
    return finding


def check_going_on(history: History) -> Finding:
    finding = Finding("P3", "the dead do not stop the living", "rounds")
    rules = history.rules
    most_s = rules["round_timeout_s"] + SLACK_S
    helping: set[str] = set()
    apart: dict[str, list[float]] = {}  # when each peer lost the coordinator
    for peer, life in history.lives:
        apart.setdefault(peer, []).extend(wall(event) for event in life.of("apart"))
    for process in history.coordinators:
        flying: dict[int, tuple[Event, set[str]]] = {}  # the plan, and who of it departed since
        for each in process.events:
            match each["event"]:
                case "opened":
                    flying.setdefault(each["round"], (each, set()))
                case "admitted":
                    (helping.add if each.get("helps") else helping.discard)(each["peer"])
                case "departed":
                    for plan, gone in flying.values():
                        gone |= {each["peer"]} & set(plan["members"])
                case "committed" | "aborted" if each["round"] in flying:
                    plan, gone = flying.pop(each["round"])
                    took_s = each["at"] - plan["at"]
                    waits = rules.get("stages", 1) > 1  # at its end, for the rounds of other stages
                    finding.expect(waits or took_s <= most_s, f"round {each['round']} took {took_s:.1f} s")
                    left = set(plan["members"]) - helping - gone  # who has something to contribute
                    lost = each["event"] == "aborted" and len(gone) == 1 and len(left) >= rules["min_peers"]
                    own = lost and AbortCause(each["cause"]).of_the_round
                    own = own and not _all_heard_nothing(left, plan, each, apart)
                    finding.expect(
                        not own, f"round {each['round']} did not survive one death: {each.get('reason')}"
                    )
        if process.ended is None or not flying:
            continue  # it was killed: its next life aborts what was in flight
        finding.expect(False, f"round {min(flying)} has no end") if _lasts(flying, process, most_s) else None
    return finding


def _all_heard_nothing(left: set[str], plan: Event, end: Event, apart: dict[str, list[float]]) -> bool:
    """Whoever was left lost the coordinator, too, by its own journal: such as one that did not run for a while."""
    known = left & apart.keys()
    return bool(known) and all(any(wall(plan) <= at <= wall(end) for at in apart[peer]) for peer in known)


def _lasts(flying: dict[int, tuple[Event, set[str]]], process: Process, most_s: float) -> bool:
    last = process.events[-1]["at"]
    return any(last - plan["at"] > most_s for plan, _ in flying.values())


def check_states(history: History) -> Finding:
    finding = Finding("P4", "no false state", "contributions and states served")
    for peer, process in history.lives:
        for each in process.of("sent", "serves"):
            place = (each["fragment"], each["version"])
            known = history.era(each["era"]).digests.get(place)
            good = each["digest"] in history.geneses if place[1] == 0 else known in (None, each["digest"])
            what = "contributed from" if each["event"] == "sent" else "served"
            finding.expect(
                good, f"{peer} {what} a state that is not version {place[1]} of fragment {place[0]}"
            )
    newest: dict[int, int] = {}
    for each in history.records:
        if each["event"] == "committed":
            newest[each["fragment"]] = each["version"]
        elif each["event"] == "rolled_back":
            for fragment, version in enumerate(each["versions"]):
                finding.expect(version <= newest.get(fragment, 0), "the run went back to what it never was")
                newest[fragment] = version
    return finding


def check_durability(history: History) -> Finding:
    finding = Finding("P5", "a durable broker", "records, restarts and commits that peers heard of")
    place, incarnation, versions = 0, 0, [0] * history.rules["fragments"]
    for number, process in enumerate(history.coordinators):
        start = process.start
        late = [each for each in process.of("committed", "rolled_back") if each.get("late")]
        for each in late:
            versions = _after(each, versions)
        told = f"it started at version {start['versions']}, and had committed {versions}"
        finding.expect(number == 0 or start["versions"] == versions, told)
        for each in process.of("started"):
            finding.expect(each["incarnation"] > incarnation, f"incarnation {each['incarnation']} came twice")
            incarnation = each["incarnation"]
        for each in process.events:
            if "pos" in each:
                place = each["pos"] - 1 if place == 0 else place  # the journal's beginning may be gone
                same = "of_batch" in each and each["pos"] == place  # one record, of several stages
                told = f"record {each['pos']} follows on record {place}"
                finding.expect(same or each["pos"] == place + 1, told)
                place = each["pos"]
            if each["event"] in ("committed", "rolled_back") and not each.get("late"):
                versions = _after(each, versions)
    if history.coordinators[0].start["versions"] == [0] * len(versions):  # else older commits may be gone
        for peer, process in history.lives:
            for each in process.of("committed"):
                kept = each["round"] in history.by_round
                finding.expect(kept, f"{peer} heard of the commit of round {each['round']}, which is lost")
    return finding


def _after(record: Event, versions: list[int]) -> list[int]:
    if record["event"] == "rolled_back":
        return list(record["versions"])
    return [record["version"] if at == record["fragment"] else v for at, v in enumerate(versions)]


# ---- P8 to P10 ---------------------------------------------------------------------------------------------


def check_frames(history: History) -> Finding:
    finding = Finding("P8", "each frame in one counter", "counts")
    total = refused = 0
    for process in [*history.coordinators, *(process for _, process in history.lives)]:
        last: Event | None = None
        for last in process.of("frames"):
            counted = sum(last["counters"].values()) + last.get("waiting", 0)
            finding.expect(
                last["arrived"] == counted, f"{last['arrived']} frames arrived, {counted} were counted"
            )
        if last is not None:
            total += last["arrived"]
            refused += sum(
                last["counters"][kind] for kind in ("bad hash", "oversize", "malformed", "unauthorised")
            )
    finding.more = f"{total} frames, {refused} of them refused"
    return finding


def check_weights(history: History) -> Finding:
    finding = Finding("P9", "bounded influence", "weights")
    for commits in history.by_round.values():
        for each in commits:
            counted = [weight for weight in each["weights"] if weight > 0.0]
            number = each["round"]
            finite = all(math.isfinite(weight) and weight >= 0 for weight in each["weights"])
            finding.expect(finite and bool(counted), f"round {number} has a weight that is none")
            # Of a synchronous batch each token counts for one: there is no cap.
            most = math.inf if each.get("counted") else WEIGHT_CAP * statistics.median(counted or [0.0])
            finding.expect(
                max(counted, default=0.0) <= most * 1.001, f"round {number}: a weight above its cap"
            )
            for peer, weight in zip(each["members"], each["weights"], strict=True):
                told = weight > 0.0 or bool(each["excluded"].get(peer))
                finding.expect(told, f"round {number} left {peer} out and does not say why")
    return finding


def check_manners(history: History) -> Finding:
    finding = Finding("P10", "a polite guest", "ends and rates of upload")
    departed = [each for each in history.records if each["event"] == "departed"]
    good_byes = {each["peer"] for each in departed if DepartureCause(each["cause"]).good_bye}
    for peer, process in history.lives:
        end = process.ended
        if end is not None and end["code"] == "left" and _heard(history, peer, end):
            finding.expect(peer in good_byes, f"{peer} left without a word: {end['reason']}")
        caps = [cap for text in process.start.get("upload_limits", ()) if (cap := _cap(text)) is not None]
        counts = list(process.of("frames"))
        for first, last in itertools.pairwise(counts):
            if caps and last["at"] - first["at"] >= SLACK_S:
                rate = (last["tx"] - first["tx"]) / (last["at"] - first["at"])
                finding.expect(rate <= 1.1 * min(caps), f"{peer} sent {rate:.0f} bytes/s, over its cap")
    return finding


def _heard(history: History, peer: str, end: Event) -> bool:
    """A coordinator was there when the peer ended, before and afterwards, and had not given it up already."""
    mine = [
        each for each in history.records if each["event"] in ("admitted", "departed") and each["peer"] == peer
    ]
    last = next((each for each in reversed(mine) if each["at"] < end["at"]), None)
    if last is None or (last["event"] == "departed" and not DepartureCause(last["cause"]).good_bye):
        return False
    spans = ((life.start["at"], life.events[-1]["at"]) for life in history.coordinators)
    return any(first + SLACK_S < end["at"] < until - 1.0 for first, until in spans)


def _cap(text: str) -> float | None:
    """A cap that holds all day; those by the hour are not judged: journals have no hour to trust."""
    try:
        cap = parse_cap(text)
    except UserError:
        return None
    rates = {cap.at(hour * 3600.0) for hour in range(24)}
    return rates.pop() if len(rates) == 1 else None


CHECKS: tuple[Callable[[History], Finding], ...] = (
    check_parity,
    check_commits,
    check_going_on,
    check_states,
    check_durability,
    check_work,
    check_samples,
    check_frames,
    check_weights,
    check_manners,
)
