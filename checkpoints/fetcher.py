"""What a peer that catches up asks of others: of whom, how much at a time, and who is asked instead.  Pure.

Part of a catch-up (state_sync.py), which says what is missing and checks what comes.  It knows who may be asked: the
donors that the coordinator names, what it has learned of them, and fellows that catch up at the same time
(swarm.py).  What one of these has is asked of it and of no donor, the rarest pieces first: so a donor, whose line may
be the narrowest of all, gives each piece about once.  Must not know whether an answer is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b

from farflung.checkpoints.checked_chunks import CheckedChunks
from farflung.checkpoints.swarm import Swarm
from farflung.collectives.round.effects import DataEffect, SendFrame
from farflung.protocol.frames import Frame, FrameKind, Header, Kind
from farflung.protocol.model_schema import Fragment

# ---- sources -----------------------------------------------------------------------------------------------
# What a peer that catches up has learned of its donors: who answers, how soon, and who gave wrong bytes.
# Pure.
#
# Owned by the fetcher of a fragment, which tells it of every question and answer. It decides
# whom to trust, whom to wait for no longer, and whether another donor would be quicker. Must not know frames
# or state.

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


# ---- fetcher -----------------------------------------------------------------------------------------------

ASKED_OF_ONE_DONOR = 4  # pieces in flight per donor: chunks in flight bound the memory of both ends
# Results in flight per donor: as many as pieces at least, and more where they are small.
RESULTS_IN_FLIGHT_BYTES, RESULTS_OF_ONE_DONOR = 4 << 20, 64
UNTRIED_PATIENCE = 10  # times the patience with a donor, for what donors owe a fellow, before one was timed

Key = tuple[FrameKind, int, int]  # what is asked for: (kind of want, version, chunk)


class Fetcher:
    def __init__(
        self, fragment: Fragment, run_tag: bytes, retry_s: float, asker: str, chunks: CheckedChunks
    ) -> None:
        """`chunks`: what is here; it is told of those whose next result nobody has."""
        self.donors: tuple[str, ...] = ()
        self.fellows = Swarm(fragment, run_tag, retry_s, asker)
        self.sources = Sources(retry_s, asker)
        self.asked: dict[Key, RequestInFlight] = {}
        self.now = 0.0  # as it was told last
        self._fragment, self._run_tag, self._retry_s, self._chunks = fragment, run_tag, retry_s, chunks
        self._shunned: dict[Key, set[str]] = {}  # donors that did not have it, until all have been tried
        self._pause_until: dict[Key, float] = {}  # all were tried: not again before
        self._stalled: set[str] = set()  # owe pieces, and gave none for longer than donors take
        self._dropped: list[str] = []  # donors that are not asked any more, not told yet

    def on_sources(self, donors: tuple[str, ...], fellows: tuple[str, ...]) -> None:
        """The coordinator's word."""
        self.sources.welcome(self.fellows.are(name for name in fellows if name not in donors))
        if donors != self.donors:
            self.donors = donors
            self.ask_again()

    def came_back(self) -> None:
        """To the others, who may have closed their lines to this peer: what was asked for may never come."""
        self.asked.clear()
        self.sources.welcome([*self.donors, *self.fellows.names])
        self.ask_again()

    def ask_again(self, kinds: Collection[Kind] = tuple(Kind)) -> None:
        """Of all donors, at once: why they did not give it is over."""
        for key in [key for key in {*self._shunned, *self._pause_until} if key[0] in kinds]:
            self._shunned.pop(key, None)
            self._pause_until.pop(key, None)

    # ---- asking ------------------------------------------------------------------------------------------------

    def wait_no_longer(self, now: float) -> None:
        """For what got lost, and for whoever gives nothing: others are asked."""
        self.now = now
        late, forgetful = (of(self.asked.values(), now) for of in (self.sources.late, self.sources.forgetful))
        names, most = {*self.donors, *self.fellows.names}, self._most
        for key, asked in list(self.asked.items()):
            lost = self.sources.never_heard_of(asked, most) or (asked.heavy and asked.donor in forgetful)
            if lost or asked.donor in late or asked.donor not in names:
                self.refused(key)
        if late:
            self._all_may_be_asked_again(list(self._shunned))

    def ask(self, missing: Iterable[Key], unlisted: int) -> list[DataEffect]:
        """Requests spread over donors and fellows, at most a few in flight at each of them.  `unlisted`: pieces that
        wait for the list of their hashes."""
        now, of, names = self.now, self.sources, tuple(dict.fromkeys((*self.donors, *self.fellows.names)))
        self._stalled = of.stalled(self.donors, self.asked.values(), now)
        trusted = of.trusted(self.donors)
        room = RequestBudget(of, names, self.asked.values(), self._most)
        effects: list[DataEffect] = [*self.fellows.questions(now)] if self._chunks.lacking else []
        due = [key for key in missing if key not in self.asked and self._pause_until.get(key, 0.0) <= now]
        for key in due:
            kind, version, chunk = key
            heavy = kind == Kind.WANT_STATE
            free = [d for d in self._sources_of(key, trusted, room) if d not in self._shunned.get(key, ())]
            if not free:
                continue
            # The quickest first.  While there is enough to ask for, all are kept busy anyway.
            donor = min(free, key=lambda d: (of.is_silent(d), room.load[d], of.took_s(d), of.place(d)))
            self.asked[key] = of.asked(donor, heavy, now, is_result=kind == Kind.WANT_LOGGED)
            room.take(self.asked[key])
            effects.append(SendFrame(donor, Frame(Header(kind, self._run_tag, version=version, chunk=chunk))))
        good = [name for name in names if name not in self.donors or name in trusted]
        idle = [name for name in good if not room.load[name] and not of.is_silent(name)]
        self._take_from_the_slow(idle, unlisted)
        return effects

    @property
    def _most(self) -> Most:
        # Before the first one came they may be large.
        results = RESULTS_IN_FLIGHT_BYTES // (self._chunks.largest_result_bytes or RESULTS_IN_FLIGHT_BYTES)
        return Most(ASKED_OF_ONE_DONOR, min(max(results, ASKED_OF_ONE_DONOR), RESULTS_OF_ONE_DONOR))

    def _sources_of(self, key: Key, trusted: Collection[str], room: RequestBudget) -> list[str]:
        """Of whom this may be asked now: of no donor what a fellow has, nor what one is about to have."""
        kind, version, chunk = key
        heavy = kind == Kind.WANT_STATE
        donors = [donor for donor in trusted if room.has(donor, heavy)]
        if kind == Kind.WANT_MANIFEST:
            listing = [f for f in self.fellows.at(version) if room.has(f, heavy) and self.sources.is_good(f)]
            return listing if version != self._chunks.target else donors + listing
        if not heavy:
            return donors
        having = self._having(chunk)
        if not having:
            index = self._fragment.index(chunk)
            return [] if self.fellows.is_coming(index, self.now, self._patience_s()) else donors
        able = [fellow for fellow in having if room.has(fellow, heavy)]
        return able or [donor for donor in donors if self._is_no_slower(donor, having)]

    def _having(self, chunk: int) -> list[str]:
        """Fellows that have this piece and answer; which of its versions it is can be checked."""
        shunned = self._shunned.get((Kind.WANT_STATE, 0, chunk), ())
        versions = {*self._chunks.vouched.lists, self._chunks.target} & self._chunks.of_use
        having = self.fellows.having(self._fragment.index(chunk), versions)
        out = {*shunned, *self._stalled}  # who puts off and gives nothing takes no donor's place
        return [
            f for f in having if f not in out and self.sources.is_good(f) and not self.sources.is_silent(f)
        ]

    def _is_no_slower(self, donor: str, fellows: list[str]) -> bool:
        """Than the quickest of these, all of which are busy."""
        paces = [pace_s for fellow in fellows if (pace_s := self.sources.piece_s(fellow)) is not None]
        mine_s = self.sources.piece_s(donor)
        if mine_s is None:
            return self.sources.is_worth_a_try(donor, fellows, self.asked.values(), self.now)
        return bool(paces) and mine_s <= GAIN * min(paces)

    def _patience_s(self) -> float:
        """So long a donor may owe a fellow a piece: they wait in the same line as this peer."""
        known = any(self.sources.took_s(donor, heavy=True) for donor in self.donors)
        take_s = self.sources.pieces_take_s(self.donors, self.asked.values(), self.now)
        return self._retry_s * (1 if known else UNTRIED_PATIENCE) + 2 * take_s

    def _take_from_the_slow(self, idle: list[str], unlisted: int) -> None:
        """At the end somebody that answers has nothing left to do: it is asked for what waits at a silent donor, or
        at one that takes much longer.  Before it only for what somebody owes that gives nothing."""
        if not idle:
            return
        # Among fellows many are idle until more has come to them: it is the end when all has been asked for.
        pieces = sum(asked.heavy for asked in self.asked.values()) + unlisted
        is_early = bool(self.fellows.names) and pieces < self._chunks.lacking.bit_count()
        waiting = Counter(asked.donor for asked in self.asked.values() if asked.heavy)
        for key, asked in reversed(list(self.asked.items())):  # what was asked last comes last
            waiting[asked.donor] -= asked.heavy
            if is_early and asked.donor not in self._stalled:
                continue
            before = waiting[asked.donor] if asked.heavy else 0
            having = self._having(key[2]) if asked.heavy else []
            able = [
                d for d in idle if d not in self._shunned.get(key, ()) and (d in self.donors or d in having)
            ]
            quick = [d for d in able if self.sources.is_quicker(d, asked, before, self.now)]
            if quick or self.sources.is_silent(asked.donor):
                self.refused(key)
                idle = [d for d in idle if d not in quick[:1]]

    # ---- what comes of it --------------------------------------------------------------------------------------

    def came(self, key: Key) -> None:
        """A late answer is as good as one in time."""
        self.asked.pop(key, None)

    def on_list(self, sender: str, version: int, is_true: bool) -> None:
        """Of the version that was asked for, or of a newer one: a donor may have no other any more."""
        closed = [
            key
            for key, asked in self.asked.items()
            if key[0] == Kind.WANT_MANIFEST and key[1] <= version and asked.donor == sender
        ]
        if is_true:
            self.came((Kind.WANT_MANIFEST, version, self._fragment.first))
        for key in closed:
            self.refused(key)  # of a newer version alone, so that it does not have the older one

    def on_nothing(self, sender: str, header: Header) -> None:
        """MISSING or LATER: what it names, if that is open and was asked of this donor, it has not, or not yet."""
        named = (header.decision_no, header.version, header.chunk)
        for key, asked in list(self.asked.items()):
            if asked.donor != sender or named != (int(key[0]), key[1], key[2]):
                continue
            if header.kind == Kind.LATER:
                self.sources.put_off(asked, self.now)
            else:
                self.fellows.denied(sender)
                self.refused(key)

    def on_spoiled(self, sender: str, header: Header) -> None:
        """An answer of a donor arrived damaged: somebody else is asked, and this one for less and less."""
        self.strike(sender)
        if (kind := header.kind.question) is not None:
            version = 0 if kind == Kind.WANT_STATE else header.version
            self.refused_by(sender, (kind, version, header.chunk))

    def strike(self, donor: str) -> None:
        if self.sources.strike(donor):
            self._dropped.append(donor)
            self._shunned.clear()  # with one donor less, those that are left are all asked again

    def take_dropped(self) -> list[str]:
        """Donors that gave wrong bytes too often, each told once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def refused_by(self, sender: str, key: Key) -> None:
        """Only the donor that was asked can spoil its own answer."""
        asked = self.asked.get(key)
        if asked is not None and asked.donor == sender:
            self.refused(key)

    def refused(self, key: Key) -> None:
        """This donor did not give it: another is asked; when all were tried, all are asked again after a pause."""
        asked = self.asked.pop(key, None)
        if asked is None:
            return
        self._shunned.setdefault(key, set()).add(asked.donor)
        self._all_may_be_asked_again([key])

    def _all_may_be_asked_again(self, keys: Iterable[Key]) -> None:
        """Of these, what every donor that answers was asked for in vain, after a pause.

        A donor that fell silent was tried."""
        trusted = self.sources.trusted(self.donors)
        answering = {donor for donor in trusted if not self.sources.is_silent(donor)} or set(trusted)
        for key in keys:
            if self._shunned.get(key, set()) >= answering:
                self._shunned.pop(key)
                self._pause_until[key] = self.now + self._retry_s
                if key[0] == Kind.WANT_LOGGED:
                    # The donors themselves came later: none kept this result, but they hold what it led to.
                    self._chunks.stuck.add(key[2])
