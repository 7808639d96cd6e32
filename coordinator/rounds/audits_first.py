"""Audits before the commit: which results of a round somebody else than their maker has merged again.  Pure.

Part of a round whose run asks for it (`[merge] audit_first`).  Told of results as owners sign them; says who is to
merge which of them again, and what is lacking.  Who that is, is drawn once the result is signed: its maker could not
know.

A drawn auditor that says nothing for long, or can't get a contribution, blocks nothing: then everybody is asked,
and more than half of those who could know have to find the sum right.  An author that most of them name as giving
them nothing has no part in the round any more.  Whether a sum is wrong is never decided here: that is computed
(coordinator/run/sum_cases.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

TELL_AGAIN_S = 2.0


@dataclass(frozen=True)
class Able:
    """Who could merge something again now, best first: members of the round that are here, in the same process."""

    included: frozenset[str]
    others: frozenset[str]  # in the round, and out by the decision
    dialable: frozenset[str]

    def of(self, maker: str, unheard: set[str], least: int) -> list[str]:
        """Those who can be dialled get what any author has: the others come where there are too few of them."""
        fit: list[str] = []
        for group in (self.included, self.others):
            for part in (group & self.dialable, group - self.dialable):
                if len(fit) < least:
                    fit += sorted(part - {maker} - unheard)
        return fit


@dataclass
class Check:
    """One result that waits."""

    question: int  # of this result under this decision: an answer to another one is none
    result: bytes
    maker: str
    drawn: dict[str, float] = field(default_factory=dict)  # auditor -> when it was told last
    began_at: float = 0.0
    right: set[str] = field(default_factory=set)
    named: dict[str, set[str]] = field(default_factory=dict)  # author -> auditors that get nothing from it
    accusers: set[str] = field(default_factory=set)
    heard: set[str] = field(default_factory=set)  # of whom there was any word
    wide: bool = False  # everybody is asked
    computed: bool = False  # the coordinator has done the sum itself: it is right

    def needed(self, auditors: int, able: int) -> int:
        """So many have to find it right.  Where a member of a league withholds its contribution from honest auditors,
        its friends find everything right: then it takes more than half."""
        return max(able // 2 + 1, auditors) if self.wide else auditors


class AuditsFirst:
    """Of one round."""

    def __init__(self, auditors: int, others: int, patience_s: float, below: Callable[[int], int]) -> None:
        """`auditors`: so many merge each chunk again, or all `others`, where a maker has fewer in the round.  Who is
        lost makes them no fewer: or whoever cheats would have honest ones disappear.  `below(n)` draws a number that
        nobody could foresee."""
        self._auditors, self._patience_s, self._below = min(auditors, others), patience_s, below
        self._checks: dict[int, Check] = {}  # by chunk
        self._number = 0
        self._decision_no = 0
        self._able = Able(frozenset(), frozenset(), frozenset())
        self._unheard: set[str] = set()  # they called a sum wrong that is right: nobody waits for them
        self._withheld: set[str] = set()

    # ---- what is to be told ----------------------------------------------------------------------------------

    def look(
        self, decision_no: int, results: Mapping[int, tuple[str, bytes]], able: Able, now: float
    ) -> list[tuple[str, int]]:
        """`results`: chunk -> who made it, its hash.  Returns (auditor, chunk): who has to hear of what now."""
        self._able = able
        if decision_no != self._decision_no:
            self._decision_no = decision_no
            self._checks.clear()  # the same bytes may be wrong under other weights
        told: list[tuple[str, int]] = []
        for chunk, (maker, result) in sorted(results.items()):
            check = self._checks.get(chunk)
            if check is None or (check.maker, check.result) != (maker, result):
                self._number += 1
                self._checks[chunk] = check = Check(self._number, result, maker, began_at=now)
            if not self._is_passed(check):
                told += ((auditor, chunk) for auditor in self._due(check, now))
        return told

    def _due(self, check: Check, now: float) -> list[str]:
        able = self._able_to(check)
        here = [auditor for auditor in check.drawn if auditor in able]
        if not check.wide:
            lacking = self._auditors - len(check.right.union(here))
            rest = [peer for peer in able if peer not in check.drawn]
            fresh = [rest.pop(self._below(len(rest))) for _ in range(min(lacking, len(rest)))]
            waits = not check.heard.issuperset(here)
            check.wide = bool(check.named) or (waits and now - check.began_at >= self._patience_s)
        if check.wide:
            fresh = [peer for peer in able if peer not in check.drawn]
        again = [
            auditor
            for auditor in here
            if auditor not in check.right | check.accusers and now - check.drawn[auditor] >= TELL_AGAIN_S
        ]
        check.drawn |= dict.fromkeys([*fresh, *again], now)
        return [*fresh, *again]

    def question_of(self, chunk: int) -> int:
        return self._checks[chunk].question

    # ---- what auditors say -----------------------------------------------------------------------------------

    def hears(self, auditor: str, chunk: int, question: int) -> bool:
        """False: it was not asked that, or not any more."""
        check = self._checks.get(chunk)
        if check is None or check.question != question or auditor not in check.drawn:
            return False
        check.heard.add(auditor)
        return True

    def on_right(self, auditor: str, chunk: int) -> None:
        check = self._checks[chunk]
        if auditor not in check.accusers and auditor not in self._unheard:
            self._take_back(check, auditor)
            check.right.add(auditor)

    def on_missing(self, auditor: str, chunk: int, authors: Iterable[str]) -> None:
        check = self._checks[chunk]
        if auditor in check.right or auditor in self._unheard:
            return
        self._take_back(check, auditor)
        for author in set(authors) & self._able.included - {auditor}:
            check.named.setdefault(author, set()).add(auditor)

    @staticmethod
    def _take_back(check: Check, auditor: str) -> None:
        for author, by in list(check.named.items()):
            by.discard(auditor)
            if not by:
                del check.named[author]

    def on_wrong(self, auditor: str, chunk: int) -> None:
        """What comes of it is computed; until then nobody counts it."""
        self._checks[chunk].accusers.add(auditor)

    def on_refuted(self, auditor: str, chunk: int, question: int, computed: bool) -> None:
        """It called a sum wrong, and has not shown that.  `computed`: the sum was done, and it is right."""
        self._unheard.add(auditor)
        check = self._checks.get(chunk)
        if check is not None and check.question == question:
            check.computed = check.computed or computed
        for each in self._checks.values():
            each.right.discard(auditor)
            each.accusers.discard(auditor)
            self._take_back(each, auditor)

    # ---- questions -------------------------------------------------------------------------------------------

    def _able_to(self, check: Check) -> list[str]:
        return self._able.of(check.maker, self._unheard, self._auditors)

    def _is_passed(self, check: Check) -> bool:
        able = len(self._able_to(check))
        return check.computed or len(check.right) >= check.needed(self._auditors, able)

    def lacking(self, results: Mapping[int, bytes]) -> list[int]:
        """Chunks that nobody may build on yet."""
        return [
            chunk
            for chunk, result in sorted(results.items())
            if (check := self._checks.get(chunk)) is None
            or check.result != result
            or not self._is_passed(check)
        ]

    def orphans(self, results: Mapping[int, bytes]) -> list[int]:
        """Of these, what too few of those who are left could merge again."""
        return [
            chunk
            for chunk in self.lacking(results)
            if (check := self._checks.get(chunk)) is not None
            and len(check.right.union(self._able_to(check))) < self._auditors
        ]

    def withholding(self) -> dict[str, int]:
        """Authors whose contribution most of the others who could audit a chunk do not get, and how many say so."""
        found: dict[str, int] = {}
        for check in self._checks.values():
            able = set(self._able_to(check)) if check.wide else set()
            for author, by in check.named.items():
                if 2 * len(by & able) > len(able - {author}):
                    found[author] = max(found.get(author, 0), len(by & able))
        new = {author: count for author, count in found.items() if author not in self._withheld}
        self._withheld |= new.keys()
        return new

    def silent(self, results: Mapping[int, bytes], now: float) -> frozenset[str]:
        """Who was asked long ago, is here, and has not said a word of what is lacking."""
        mute: set[str] = set()
        for chunk in self.lacking(results):
            check = self._checks.get(chunk)
            if check is not None and now - check.began_at >= self._patience_s:
                able = self._able_to(check)
                mute |= {each for each in check.drawn if each in able and each not in check.heard}
        return frozenset(mute)
