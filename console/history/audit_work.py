"""The audit of work and data: no inner step is lost or counted twice (P6), no sample goes in twice (P7).

Part of the audit (audit.py).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from farflung.console.history.finding import Finding
from farflung.console.history.history import History, Process
from farflung.protocol.model_schema import BOOKS_FRAGMENT
from farflung.protocol.process.journal import Event

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
                accounts[each["fragment"]] = _after(each, account)
    return dropped


def _after(load: Event, account: StepAccount | None) -> StepAccount:
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
                _grant(each, books, finding)
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


def _grant(granted: Event, books: AuditedBooks, finding: Finding) -> None:
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
