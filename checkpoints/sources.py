"""What a peer that catches up has learned of its donors: who answers, how soon, and who gave wrong bytes.  Pure.

Owned by the fetcher of a fragment (fetcher.py), which tells it of every question and answer.  It decides whom to trust,
whom to wait for no longer, and whether another donor would be quicker.  Must not know frames or state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b

SPOILED_FORGIVEN = 2  # answers of a donor that are not what they should be: one more, and others are asked
BACKOFF_MOST = 4  # doublings of the patience with a donor that does not answer in time
LATER_BELIEVED_S = 120.0  # a donor that has a round to do may put a question off for so long
FIRST_ASKED = 2  # questions at a time, until the first answer shows what sort of donor it is
SLOWER = 3.0  # a small question that waits so many times longer than an idle donor takes is given to that one
OVERDUE = 1.5  # a piece that takes so many times longer than its donor's usual ones may take as long again
GAIN = 1.25  # an idle donor must be so much quicker, or the same piece comes twice for nothing


@dataclass
class RequestInFlight:
    donor: str
    at: float
    heavy: bool  # a piece of state: small answers may overtake it
    answers_before: int  # that this donor had given until then, of those that can't overtake this one
    is_result: bool = False  # of a round that is over


@dataclass(frozen=True)
class Most:
    """How many questions one donor has open at a time: what is in flight bounds the memory of both ends."""

    pieces: int
    others: int  # small results go by the dozen: whoever joins a run of many small rounds needs them as fast as those

    def of(self, heavy: bool) -> int:
        return self.pieces if heavy else self.others


class Sources:
    def __init__(self, retry_s: float, asker: str = "") -> None:
        self._retry_s = retry_s
        self._asker = asker
        self._places: dict[str, bytes] = {}
        # When a donor last gave something, or put something off: anything, and pieces of state.
        self._heard_at: dict[tuple[str, bool], float] = {}
        self._answers: dict[tuple[str, bool], int] = {}  # how many it gave: pieces of state, and all
        # How often in a row it did not, the same.
        self._in_vain: dict[tuple[str, bool], int] = {}
        self._spoiled: dict[str, int] = {}  # donor -> answers that were not what they should be
        # From a question to its answer, lately: of all, and of pieces of state.
        self._took_s: dict[tuple[str, bool], float] = {}
        self._piece_at: dict[str, float] = {}  # when its last piece of state was here
        self._piece_s: dict[str, float] = {}  # from one piece to the next, lately

    # ---- what happened -----------------------------------------------------------------------------------

    def asked(self, donor: str, heavy: bool, now: float, is_result: bool = False) -> RequestInFlight:
        return RequestInFlight(donor, now, heavy, self._answers.get((donor, heavy), 0), is_result)

    def answered(self, donor: str, asked: RequestInFlight, now: float, is_piece: bool = False) -> None:
        """With what was asked for, or that it does not have it: only that buys patience, noise does not.

        It may be late, and the question was given to another donor meanwhile.
        """
        for heavy in {False, asked.heavy}:
            self._heard_at[donor, heavy] = now
            self._answers[donor, heavy] = self._answers.get((donor, heavy), 0) + 1
            self._in_vain.pop((donor, heavy), None)
        if is_piece:
            gap_s = now - max(asked.at, self._piece_at.get(donor, 0.0))
            self._piece_s[donor] = gap_s + 0.7 * (self._piece_s.get(donor, gap_s) - gap_s)
            self._piece_at[donor] = now
        if donor == asked.donor:
            took_s = now - asked.at
            for heavy in {False, is_piece}:  # that there is none is said at once
                before_s = self._took_s.get((donor, heavy), took_s)
                self._took_s[donor, heavy] = took_s + 0.7 * (before_s - took_s)

    def put_off(self, asked: RequestInFlight, now: float) -> None:
        """It says that a round goes first.  Believed for a while."""
        if now - asked.at < LATER_BELIEVED_S:
            for heavy in {False, asked.heavy}:
                self._heard_at[asked.donor, heavy] = now

    def strike(self, donor: str) -> bool:
        """It gave wrong bytes.  True if it is not asked any more from now on."""
        self._spoiled[donor] = self._spoiled.get(donor, 0) + 1
        return self._spoiled[donor] == SPOILED_FORGIVEN + 1

    def forgive(self) -> None:
        self._spoiled.clear()

    # ---- what follows ------------------------------------------------------------------------------------

    def trusted(self, donors: tuple[str, ...]) -> tuple[str, ...]:
        """Those that may be asked: not who kept sending wrong bytes, as long as there are others."""
        return tuple(filter(self.is_good, donors)) or donors

    def is_good(self, donor: str) -> bool:
        return self._spoiled.get(donor, 0) <= SPOILED_FORGIVEN

    def window(self, donor: str, most: Most, heavy: bool) -> int:
        """How many questions it may have at a time."""
        # One question shows whether a silent donor is back; more of them would only wait there.  And a piece that a
        # liar was asked for comes all the same: it takes the room of true ones on my line.  Results are small, and
        # whoever is not asked for them loses what has come.
        if self.is_silent(donor) or (heavy and self._spoiled.get(donor, 0)):
            return 1
        return most.of(heavy) if (donor, False) in self._took_s else FIRST_ASKED

    def is_silent(self, donor: str) -> bool:
        return (donor, False) in self._in_vain

    def took_s(self, donor: str, heavy: bool = False) -> float:
        """How long it takes, or its pieces do; a donor that was not asked yet deserves to be tried."""
        return self._took_s.get((donor, heavy), 0.0)

    def piece_s(self, donor: str) -> float | None:
        """From one piece of it to the next, lately; None: it gave none."""
        return self._piece_s.get(donor)

    def may_give(self, donor: str) -> bool:
        """It has given pieces, or nobody has asked it for one."""
        return donor in self._piece_s or (donor, True) not in self._answers

    def is_worth_a_try(
        self, donor: str, others: Collection[str], questions: Collection[RequestInFlight], now: float
    ) -> bool:
        """It has given no piece and owes none, and these let me wait: nobody knows that it is not quicker."""
        since = _asked_since(_pieces(questions))
        waits_s = [now - since[other] for other in others if other in since]
        is_tried = donor in since or not self.may_give(donor)
        return not is_tried and max(waits_s, default=0.0) >= self._retry_s

    def welcome(self, names: Iterable[str]) -> None:
        """They are here anew: that they did not answer before is over."""
        for name in names:
            for heavy in (False, True):
                self._in_vain.pop((name, heavy), None)

    def place(self, donor: str) -> bytes:
        """Of those that are equally good: another one comes first for each who asks, or all who join at once would ask
        the same one."""
        known = self._places.get(donor)
        if known is None:
            known = self._places[donor] = blake2b(f"{self._asker} {donor}".encode(), digest_size=8).digest()
        return known

    def never_heard_of(self, asked: RequestInFlight, most: Most) -> bool:
        """At most so many are in flight: a donor that answered so much else since then never got this question."""
        in_flight = most.pieces + (0 if asked.heavy else most.others)
        return self._answers.get((asked.donor, asked.heavy), 0) - asked.answers_before >= 2 * in_flight

    def late(self, questions: Collection[RequestInFlight], now: float) -> set[str]:
        """Donors that were asked and gave nothing for too long."""
        return self._overdue(questions, False, now)

    def forgetful(self, questions: Collection[RequestInFlight], now: float) -> set[str]:
        """Donors that owe pieces of state and gave none for too long, whatever else they give.

        Who holds a piece back says so: these questions got lost, as those do that are under way when a line is cut.
        Where results come at all times, nobody would ever be late.
        """
        return self._overdue(_pieces(questions), True, now)

    def pieces_take_s(
        self, donors: Collection[str], questions: Collection[RequestInFlight], now: float
    ) -> float:
        """What a piece of these took, or how long one is waited for by now."""
        waits_s = [now - at for owing, at in _asked_since(_pieces(questions)).items() if owing in donors]
        return max([*waits_s, *(self.took_s(donor, heavy=True) for donor in donors)], default=0.0)

    def stalled(
        self, donors: Collection[str], questions: Collection[RequestInFlight], now: float
    ) -> set[str]:
        """Who owes pieces and has given none for longer than the quickest donor takes, whatever it says meanwhile."""
        first = _asked_since(_pieces(questions))
        giving = [donor for donor in donors if donor in self._piece_s and not self.is_silent(donor)]
        takes_s = [max(self.took_s(donor, heavy=True), now - first.get(donor, now)) for donor in giving]
        waits_s = [now - first[donor] for donor in donors if donor in first]
        patience_s = max(self._retry_s, 2 * (min(takes_s) if takes_s else max(waits_s, default=0.0)))
        return {d for d, at in first.items() if now - max(at, self._piece_at.get(d, 0.0)) >= patience_s}

    def _overdue(self, questions: Collection[RequestInFlight], heavy: bool, now: float) -> set[str]:
        """The patience with each donor grows, for slow lines."""
        overdue = set()
        for donor, at in _asked_since(questions).items():
            of = donor, heavy
            # A thin line takes its time: what it was asked for once more would only come twice.
            usual_s = max(self._retry_s, 2 * self.took_s(donor, heavy))
            patience_s = usual_s * 2 ** min(self._in_vain.get(of, 0), BACKOFF_MOST)
            if now - max(at, self._heard_at.get(of, 0.0)) >= patience_s:
                self._in_vain[of] = self._in_vain.get(of, 0) + 1
                overdue.add(donor)
        return overdue

    def is_quicker(self, idle: str, asked: RequestInFlight, before: int, now: float) -> bool:
        """Would an idle donor give it much sooner than the one that it waits at?  `before`: pieces that come first."""
        took_s = self._took_s.get((idle, False))
        if took_s is None:
            return False
        if not asked.heavy or idle not in self._piece_s:
            return now - asked.at > SLOWER * max(took_s, self._retry_s / 10)
        mine_s = max(self._piece_s[idle], self._retry_s / 30)
        usual_s = self._piece_s.get(asked.donor, mine_s)
        since_s = now - max(asked.at, self._piece_at.get(asked.donor, 0.0))
        left_s = (before + 1) * usual_s - since_s if since_s < OVERDUE * usual_s else (before + 1) * since_s
        return left_s > GAIN * mine_s


def _pieces(questions: Iterable[RequestInFlight]) -> list[RequestInFlight]:
    return [asked for asked in questions if asked.heavy]


def _asked_since(questions: Iterable[RequestInFlight]) -> dict[str, float]:
    """Donor -> when it was asked the oldest of these."""
    since: dict[str, float] = {}
    for asked in questions:
        since[asked.donor] = min(asked.at, since.get(asked.donor, asked.at))
    return since


class RequestBudget:
    """How many questions more each may be asked in this moment.

    Pieces of state don't take the room of anything else: a donor that is in a round holds them back, and what has come
    must go on with the run meanwhile, or its results are forgotten before the rest is here.  Nor do results take the
    room of pieces: in a run of many small rounds some are asked for at all times.
    """

    def __init__(
        self, donors: Sources, sources: Collection[str], open_now: Collection[RequestInFlight], most: Most
    ) -> None:
        self._pieces_most = {source: donors.window(source, most, heavy=True) for source in sources}
        self._others_most = {source: donors.window(source, most, heavy=False) for source in sources}
        self._tried = frozenset(filter(donors.is_silent, sources))
        self.load = Counter(asked.donor for asked in open_now)
        self._pieces = Counter(asked.donor for asked in open_now if asked.heavy)
        self._results = Counter(asked.donor for asked in open_now if asked.is_result)

    def has(self, source: str, heavy: bool) -> bool:
        load = self.load[source]
        if source in self._tried:
            return load < 1  # asked one thing at a time, to see whether it is back: no more for that
        if heavy:
            return load - self._results[source] < self._pieces_most[source]
        return load - self._pieces[source] < self._others_most[source]

    def take(self, asked: RequestInFlight) -> None:
        self.load[asked.donor] += 1
        self._pieces[asked.donor] += asked.heavy
        self._results[asked.donor] += asked.is_result
