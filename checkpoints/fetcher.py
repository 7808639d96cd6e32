"""What a peer that catches up asks of others: of whom, how much at a time, and who is asked instead.  Pure.

Part of a catch-up (state_sync.py), which says what is missing and checks what comes.  It knows who may be asked: the
donors that the coordinator names, what it has learned of them (sources.py), and fellows that catch up at the same time
(swarm.py).  What one of these has is asked of it and of no donor, the rarest pieces first: so a donor, whose line may
be the narrowest of all, gives each piece about once.  Must not know whether an answer is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from farflung.checkpoints.checked_chunks import CheckedChunks
from farflung.checkpoints.sources import GAIN, Most, RequestBudget, RequestInFlight, Sources
from farflung.checkpoints.swarm import Swarm
from farflung.collectives.round.effects import DataEffect, SendFrame
from farflung.protocol.frames import WANT_FOR, Frame, FrameKind, Header, Kind
from farflung.protocol.model_schema import Fragment

ASKED_OF_ONE_DONOR = 4  # pieces in flight per donor: chunks in flight bound the memory of both ends
# Results in flight per donor: as many as pieces at least, and more where they are small.
RESULTS_IN_FLIGHT_BYTES, RESULTS_OF_ONE_DONOR = 1 << 20, 64
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
        kind = WANT_FOR[header.kind]
        self.strike(sender)
        self.refused_by(sender, (kind, 0 if kind == Kind.WANT_STATE else header.version, header.chunk))

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
