"""The audit: the ten promises, checked on the event journals of a run's processes and on nothing else.

Called by `farflung audit`, by the chaos tests and by benchmarks.  Each check counts what it looked at, so that an empty
journal is not taken for a kept promise.  What journals cannot show is not checked here: docs/reliability.md says so.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from farflung.console.history.audit_batches import check_batches, has_batches
from farflung.console.history.audit_work import check_samples, check_work
from farflung.console.history.finding import Finding
from farflung.console.history.history import History, Process
from farflung.console.history.stage_stories import StageStory, stage_stories
from farflung.protocol.caps import parse_cap
from farflung.protocol.causes import AbortCause, DepartureCause
from farflung.protocol.errors import UserError
from farflung.protocol.process.journal import Event

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
    report.stages = stage_stories((float(each.get("wall") or 0.0), each) for each in history.records)
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
                    finding.expect(
                        not own, f"round {each['round']} did not survive one death: {each.get('reason')}"
                    )
        if process.ended is None or not flying:
            continue  # it was killed: its next life aborts what was in flight
        finding.expect(False, f"round {min(flying)} has no end") if _lasts(flying, process, most_s) else None
    return finding


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
    cap = history.rules["weight_cap"]
    for commits in history.by_round.values():
        for each in commits:
            counted = [weight for weight in each["weights"] if weight > 0.0]
            number = each["round"]
            finite = all(math.isfinite(weight) and weight >= 0 for weight in each["weights"])
            finding.expect(finite and bool(counted), f"round {number} has a weight that is none")
            # Of a synchronous batch each token counts for one: there is no cap.
            most = math.inf if each.get("counted") else cap * statistics.median(counted or [0.0])
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
