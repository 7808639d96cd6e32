"""Tells each member where the run is and what to do: the answer to every beat.  Pure.

One of the parts of the run machine.  It judges the state that a member reports (P4), chooses the founder of
version 0, and repeats whatever the beat shows to be missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

from farflung.coordinator.court.alike import Alike
from farflung.coordinator.ledger.records import Genesis
from farflung.coordinator.roster import partial_view
from farflung.coordinator.roster.partial_view import RosterNews
from farflung.coordinator.roster.ways import RouteNews
from farflung.coordinator.rounds.round_rules import up_rates
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.lease_desk import LeaseDesk
from farflung.coordinator.run.membership import LOOK_S_PER_MEMBER, Member, Standing
from farflung.coordinator.run.round_driver import RoundDriver, in_this_era
from farflung.protocol.errors import AbortCause
from farflung.protocol.limits import AMENDMENTS_TOLD
from farflung.protocol.messages import Beat, Committed, FragmentBeat, FragmentTick, Tick
from farflung.protocol.round_words import CROWD
from farflung.protocol.signing import statement_of
from farflung.protocol.states import Goal, state_after

DIGESTS_TOLD, DIGESTS_LEAST = 8, 3
SAVED_TOLD = 4
DONORS_TOLD, DONORS_LEAST = 16, 4
FELLOWS_LEAST = 4
# Where not all are told, others are told after so long: ids can be chosen to come first.
DONORS_TURN_S = 120.0
DONORS_CROWD_S = 0.1  # in a crowd, where somebody changes all the time, their list may be so old
FRAGMENTS_IN_FULL = 16  # with more of them a tick names fewer donors and digests, or it would be too long
FINISH_GRACE_S = 60.0  # how long those who are done wait for those who are not
# So long others may wait for version 0 without anybody getting it from those who have it, and so much longer as its
# state takes over a line of half a megabit per second; then others found the run.
FOUNDER_PATIENCE_S = 600.0
FOUNDER_LEAST_BYTES_S = 64_000
# Where most have it, and as many as a round needs, they are at their first round: so long that may take.  Who waits
# for the state then has a line that gives it nothing, or says so.
FIRST_ROUND_S = 6 * 3600.0
CROWD_LOOKS_EVERY_S = 1.0
TURNS_LONGER_MOST = 6  # times that turns are twice as long as before, when all had theirs
# And for what modes look at in the last versions: an auditor after another one and a case, the loss of the last one.
LAST_LOOK_S = 15.0
_FROM_LEAST_ADVANCED = (Goal.WAIT, Goal.SYNC, Goal.TRAIN)

Judgement = tuple[Goal, str]  # (goal, reason)


class FoundersTurns:
    """Nothing is learned yet, and some have version 0, or one is to make it.  They may never give it to the others who
    wait: then the next one that came founds the run, and when all had their turn, they begin anew, with longer ones."""

    def __init__(self, core: Core, drivers: list[RoundDriver]) -> None:
        self._core = core
        self._drivers = drivers
        self._over: set[str] = set()
        self._times_all_over = 0
        self._looked_at = -math.inf
        # Fragment -> who had it, since when nobody else got it.
        self._waits: dict[int, tuple[set[str], float]] = {}
        self.changes = 0  # of whose turn is over

    def founder_of(self, driver: RoundDriver) -> Member | None:
        left = (each for each in driver.holders if each.can_found and not self.is_over(each))
        return min(left, key=lambda member: member.joined_no, default=None)

    def is_over(self, member: Member) -> bool:
        return member.peer in self._over

    def look(self, is_founded: bool) -> None:
        """Whose turn is over by now."""
        if self._core.ledger.learned:
            self._over, self._waits = set(), {}
            return
        now = self._core.now
        if len(self._core.members.alive) > CROWD and now - self._looked_at < CROWD_LOOKS_EVERY_S:
            return  # each look is at every member of every stage
        self._looked_at = now
        for driver in self._drivers:
            having = {member.peer for member in self._having(driver, is_founded)}
            trainers = {member.peer for member in driver.holders if not member.helps}
            waiting = len(trainers - having)  # nobody founds a run again for those who only help
            if not having or not waiting:
                self._waits.pop(driver.fragment, None)
                continue
            had, since = self._waits.get(driver.fragment, (set(), 0.0))
            if not having <= had:  # who comes back to it is no news: it might do so again and again
                self._waits[driver.fragment] = had | having, self._core.now
            elif self._core.now - since >= self._patience_s(len(trainers & having), waiting):
                self._pass_on(having)

    def _having(self, driver: RoundDriver, is_founded: bool) -> list[Member]:
        """Who has the fragment's version 0 and is to give it to others, or is to make it.  Those who made it
        wait for the founders of other stages, and nobody for them."""
        if is_founded:
            return [member for member in driver.holders if driver.standing(member).verified]
        founder = self.founder_of(driver)
        return [founder] if founder is not None and not has_founded(driver, founder) else []

    def _patience_s(self, having: int, waiting: int) -> float:
        """Somebody who gets nothing must not cost those who have it, and train, what they learned so far."""
        manifest, model = self._core.manifest, self._core.ledger.model
        staged = manifest.pipeline.stages > 1
        least = manifest.pipeline.min_per_stage if staged else manifest.run.min_peers
        count = 4 * model.chunk_count * model.chunk_elements if model is not None else 0
        usual_s = FOUNDER_PATIENCE_S * (1 << self._times_all_over) + waiting * count / FOUNDER_LEAST_BYTES_S
        return max(usual_s, FIRST_ROUND_S) if having > waiting and having >= least else usual_s

    def _pass_on(self, having: set[str]) -> None:
        names = ", ".join(m.contact.name for m in self._core.members.alive.values() if m.peer in having)
        self._core.note(f"nobody got the initial state of {names} for too long: another one founds the run")
        self._over |= having
        self.changes += 1
        self._waits.clear()
        if any(self.founder_of(each) is None for each in self._drivers):
            self._over.clear()  # all had their turn
            self._times_all_over = min(TURNS_LONGER_MOST, self._times_all_over + 1)


def has_founded(driver: RoundDriver, founder: Member | None) -> bool:
    """Of this fragment: its founder holds a version 0, and shows that it does."""
    said = driver.beat_of(founder) if founder is not None else None
    return said is not None and said.version == 0 and bool(said.digest and driver.agreement.has_shown(said))


class DonorLists:
    """Whom members that lack the newest version may ask for it: who has it, and who fetches it too."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._known: dict[int, partial_view.KnownDonors] = {}  # by fragment
        self.changes = 0  # of what members hold

    def recognise(self, member: Member, driver: RoundDriver, said: FragmentBeat) -> None:
        if driver.recognise(member, said):
            self.changes += 1

    def donors(self, member: Member, driver: RoundDriver, most: int) -> tuple[str, ...]:
        """Whom to ask: peers verified at the version, and those that hold the last round's results."""
        known = self._known_of(driver)
        fit = known.quick if member.contact.address else known.dialable  # one of two must be dialable
        if not (fit or member.contact.address):
            fit = [peer for peer in known.found if self._core.members.ways.meets(member.peer, peer)]
        return partial_view.some_of(fit, member.peer, most, int(self._core.now // DONORS_TURN_S))

    def fellows(self, member: Member, driver: RoundDriver, most: int) -> tuple[str, ...]:
        """Who else fetches the state: they give each other what they have of it."""
        joiners, alive = self._known_of(driver).joiners, self._core.members.alive
        met = self._core.members.ways.is_punched
        near = (peer for peer in partial_view.in_turn_from(joiners, member.peer) if peer in alive)
        fit = (p for p in near if member.dialable or alive[p].dialable or met(member.peer, p))
        return tuple(islice(fit, most))

    def _known_of(self, driver: RoundDriver) -> partial_view.KnownDonors:
        """Of each sort, in the order of their names."""
        members, version, now = self._core.members, driver.book.version, self._core.now
        here = members.in_order
        stamp = (members.everybody.number, self._core.ledger.eras.number, version, self.changes)
        known = self._known.get(driver.fragment)
        if known is not None:
            fresh = known.stamp == stamp
            pause_s = max(DONORS_CROWD_S, len(here) * LOOK_S_PER_MEMBER)
            if fresh or (len(here) > CROWD and now - known.made_at < pause_s):
                return known
        makers = driver.book.makers
        found: dict[str, Beat | None] = {}
        joiners: list[str] = []
        for peer in here:
            other = members.alive[peer]
            standing = other.standings.get(driver.fragment)
            if standing is None:
                continue
            if standing.verified or (peer in makers and self._is_near(other, driver)):
                found[peer] = other.beat
            if not standing.verified:
                joiners.append(peer)
        dialable = [peer for peer in found if members.alive[peer].contact.address]
        made = partial_view.KnownDonors.among(up_rates(found), dialable, joiners, stamp, now)
        self._known[driver.fragment] = made
        return made

    @staticmethod
    def _is_near(member: Member, driver: RoundDriver) -> bool:
        """It may hold what the newest version is made of; a maker that came back with nothing does not."""
        said = driver.beat_of(member)
        return said is not None and said.version >= driver.book.version - 1


class VersionZero:
    """Whether somebody holds version 0, and who is to make it where nobody does."""

    def __init__(self, core: Core, drivers: list[RoundDriver], donors: DonorLists) -> None:
        self._core = core
        self._drivers = drivers
        self._donors = donors
        self.turns = FoundersTurns(core, drivers)
        # While nothing is learned: by fragment who shows version 0 of it, with what it said then, and of what version 0
        # that is told; and whose last words were not looked at for that.
        self._witnesses: dict[int, tuple[Member, Beat | None]] = {}
        self._witnessed: object = None
        self._unheard: set[str] = set()

    def hear(self, member: Member) -> None:
        if not self._core.ledger.learned:  # or nobody would ever take them out again
            self._unheard.add(member.peer)

    @property
    def is_founded(self) -> bool:
        """It has learned something, or its version 0 is held: else that is made anew, and nobody's counts."""
        return self._core.ledger.learned or self._is_held()

    def _is_held(self) -> bool:
        """Of every fragment somebody holds version 0 as it was founded, with all else that it has of the model.

        Asked with every beat: as long as those who showed it show it, only who said something since is looked at.
        """
        alive, books = self._core.members.alive, [each.book for each in self._drivers]
        founded = [(book.digests.get(0), book.shown.get(0)) for book in books]
        of_what = (self.turns.changes, self._core.ledger.eras.number, founded)
        still = {
            number: (member, member.beat)
            for number, (member, beat) in self._witnesses.items()
            if alive.get(member.peer) is member and (member.beat is beat or self._is_shown_by(member))
        }
        if self._witnessed != of_what or len(still) < len(self._witnesses):
            still, self._witnessed, self._unheard = {}, of_what, set(alive)
        self._witnesses = still
        for peer in self._unheard:
            member = alive.get(peer)
            if member is None or self._witnesses.keys() >= member.standings.keys():
                continue
            if self._is_shown_by(member):
                self._witnesses |= dict.fromkeys(member.standings, (member, member.beat))
        self._unheard = set()
        return len(self._witnesses) == len(self._drivers)

    def _is_shown_by(self, member: Member) -> bool:
        beat = member.beat
        return (
            beat is not None and not self.turns.is_over(member) and all(map(self._is_genesis, beat.fragments))
        )

    def _is_genesis(self, said: FragmentBeat) -> bool:
        book, agreement = self._drivers[said.fragment].book, self._drivers[said.fragment].agreement
        shown = agreement.has_shown(said)
        return (said.version, said.digest, shown) == (0, book.digests.get(0), book.shown.get(0)) and bool(
            shown
        )

    def judge(self, member: Member, beat: Beat) -> Judgement:
        """Nothing has been learned yet and nobody holds version 0: of each fragment the oldest living holder whose turn
        is not over founds it, and all of them together found the run."""
        founders = [self.turns.founder_of(each) for each in self._drivers]
        mine = founders[beat.fragments[0].fragment]
        if mine is None and not member.can_found:
            needed = self._core.manifest.start.founder
            return Goal.WAIT, f"waiting for {needed}, which gives the run its initial state"
        if member is not mine and mine is not None:
            return Goal.WAIT, f"{mine.contact.name} gives the run its initial state"
        lacking = [each for each in self._drivers if not has_founded(each, founders[each.fragment])]
        if any(each.fragment in member.standings for each in lacking):
            return Goal.FOUND, "it gives the run its initial state"
        if lacking:
            missing = ", ".join(str(each.fragment) for each in lacking)
            return Goal.WAIT, f"waiting for the initial state of stage {missing}"
        self._write([founder for founder in founders if founder is not None])
        return Goal.TRAIN, "it founded version 0"

    def _write(self, founders: list[Member]) -> None:
        """`founders`: of each fragment."""
        core, drivers = self._core, self._drivers
        for driver in drivers:
            driver.abort(AbortCause.FOUNDED_ANEW, "version 0 is founded anew")
            for (
                member
            ) in driver.holders:  # whoever founded it before has another one, and may be ready for a round
                driver.standing(member).verified = False
        said = [each.beat_of(founder) for each, founder in zip(drivers, founders, strict=True)]
        known = [each for each in said if each is not None]
        first, *others = (each.digest for each in known)
        shown = tuple(each.agreement.has_shown(of_it) for each, of_it in zip(drivers, known, strict=True))
        several = tuple(founder.peer for founder in founders) if core.manifest.pipeline.stages > 1 else ()
        core.write(
            Genesis(digest=first, peer=founders[0].peer, others=tuple(others), shown=shown, founders=several)
        )
        names = list(dict.fromkeys(founder.contact.name for founder in founders))
        core.note(f"{' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} founded version 0")
        for driver, founder, of_it in zip(drivers, founders, known, strict=True):
            self._donors.recognise(founder, driver, of_it)


class TickBuilder:
    def __init__(self, core: Core, drivers: list[RoundDriver], lease_desk: LeaseDesk) -> None:
        self._core = core
        members = core.members
        self._alike = Alike(
            lambda peer: m.joined_no if (m := members.alive.get(peer)) else None, core.name, core.note
        )
        self._drivers = drivers
        self._lease_desk = lease_desk
        self._proofs: dict[int, tuple[bytes, bytes]] = {}  # fragment -> what was signed last, and its proof
        self._donors = DonorLists(core)
        self.version_zero = VersionZero(core, drivers, self._donors)

    # ---- a beat --------------------------------------------------------------------------------------

    def on_beat(self, member: Member, beat: Beat) -> str | None:
        """Take a beat in and answer it.  Returns why the member must go, if it must."""
        core = self._core
        # Why another era than the member's began; empty if that is no news to it.
        why_era = core.ledger.eras.because if beat.era < core.ledger.eras.number else ""
        for mode in core.modes:
            mode.hear(member.peer, beat)
        if beat.era == core.ledger.eras.number:
            self._alike.hear(member.peer, member.process, beat.forward, beat.era)
        beat = in_this_era(beat, core.ledger.eras.number)
        member.pace.on_beat(beat, core.now)
        if member.beat is None or _versions(member.beat) != _versions(beat):
            self._donors.changes += 1
        member.beat = beat
        self.version_zero.hear(member)
        refusal = self._lease_desk.words.hear(member, beat)
        if refusal:
            return refusal
        told = member.told
        goal, told.reason = self._judge(member, beat)
        fragments = self._fragment_ticks(member)
        told.state = state_after(told.state, goal, beat.phase, member.quarantined)
        for said in beat.fragments:
            standing = member.standings[said.fragment]
            if not (said.ready and standing.verified):
                standing.ready_since = None
            elif standing.ready_since is None:
                standing.ready_since = core.now
        leases, void = self._lease_desk.lease(member, beat)
        ways = core.members.ways.news_for(member.contact, beat, core.now)
        news = self._news_of_members(member, beat, fragments, ways)
        told.advice = self._lease_desk.words.told(member) or self._alike.told(member.peer, member.process)
        sections = [each for mode in core.modes for each in mode.tell(member.peer, beat)]
        core.tell(
            member,
            Tick,
            answers=beat.seq,
            heard_s=core.now,
            fragments=fragments,
            goal=goal,
            reason=told.reason,
            **news.told,
            leases=leases,
            void=void,
            era=core.ledger.eras.number,
            era_because=why_era,
            advice=told.advice,
            ways=ways.routes if news.roster is not None else (),
            amendments=tuple(core.ledger.amendments[beat.amended : beat.amended + AMENDMENTS_TOLD]),
            beat_s=self._next_beat_s(member),
            sections=(*sections, *ways.sections),
        )
        for mode in core.modes:
            mode.on_answered(member.peer, beat)
        for said in beat.fragments:
            self._repeat_what_is_missing(member, said, self._drivers[said.fragment])
        return None

    def _is_by_need(self) -> bool:
        """Nobody hears of all others."""
        most = 2 * self._core.manifest.round.group or partial_view.WHOLE_ROSTER
        crowded = len(self._core.members.alive) > most
        return crowded and not any(mode.whole_roster for mode in self._core.modes)

    def _next_beat_s(self, member: Member) -> float:
        """0: as the run's terms say."""
        core, in_round = self._core, self._is_counted_on(member)
        usual_s, by_need = core.manifest.net.heartbeat_s, self._is_by_need()
        return core.members.liveness.next_beat_s(member, usual_s, in_round, core.now) if by_need else 0.0

    def _is_counted_on(self, member: Member) -> bool:
        return any(each.participants.counts_on(member) for each in self._drivers)

    def _news_of_members(
        self, member: Member, beat: Beat, ticks: tuple[FragmentTick, ...], ways: RouteNews
    ) -> RosterNews:
        """Of all, or of those whom it needs."""
        members, now = self._core.members, self._core.now
        if not self._is_by_need():
            return members.roster_for(member, beat.roster_no, now)
        named = [other for tick in ticks for other in (*tick.donors, *tick.fellows)]
        named += [*ways.meets, *(each.peer for each in ways.routes)]
        flights = [each.round for each in self._drivers if each.round and each.participants.counts_on(member)]
        known = members.acquaintances
        if not known.has_met(member.peer, (named, [(f.plan.round_no, f.plan.epoch) for f in flights]), now):
            near = [other for flight in flights for other in flight.groups.near(member.peer)]
            known.introduce(member.peer, [*named, *near], now)
        asks = partial_view.RosterReader(member.peer, beat.roster_no, ways.routes)
        return known.news(asks, members.alive, now)

    def acquaint(self, circles: Iterable[Iterable[str]]) -> None:
        """They are in a round from now on: whoever lacks one of its own hears of it before the plan."""
        if not self._is_by_need():
            return
        here, known = self._core.members.alive, self._core.members.acquaintances
        peers = known.gather(circles, self._core.now)
        for member in [here[peer] for peer in peers if peer in here and known.lacks(peer, here)]:
            if member.beat is not None:
                self.on_beat(member, member.beat)

    def _fragment_ticks(self, member: Member) -> tuple[FragmentTick, ...]:
        # No digests while version 0 is being founded (again): nobody holds the old one.
        founded = self.version_zero.is_founded
        return tuple(self._fragment_tick(member, self._drivers[each], founded) for each in member.standings)

    def _fragment_tick(self, member: Member, driver: RoundDriver, founded: bool) -> FragmentTick:
        flight, standing = driver.round, driver.standing(member)
        counted = flight is not None and driver.participants.counts_on(member)
        fellows: tuple[str, ...] = ()
        if founded and not standing.verified:
            most = self._told(partial_view.FELLOWS_TOLD, FELLOWS_LEAST, standing)
            fellows = self._donors.fellows(member, driver, most)
        digests = sorted(driver.book.digests.items())
        newest = digests[-self._told(DIGESTS_TOLD, DIGESTS_LEAST, standing) :]
        said = driver.beat_of(member)
        sections = driver.lines.sections(member.peer, lambda: _beats_of(driver))
        if said is not None and said.version < 0:  # it may have a checkpoint of one of these
            saved = [
                each for each in digests if self._core.ledger.rules.is_saved(each[0]) and each not in newest
            ]
            newest = saved[-self._told(SAVED_TOLD, 1, standing) :] + newest
        return FragmentTick(
            fragment=driver.fragment,
            version=driver.book.version,
            digests=tuple(newest) if founded else (),
            verified=standing.verified,
            donors=self._donors.donors(member, driver, self._told(DONORS_TOLD, DONORS_LEAST, standing)),
            round_no=flight.plan.round_no if flight is not None and counted else 0,
            sent_seen=flight is not None and member.peer in flight.scatter.sent,
            progress_seen=standing.progress_seen,
            compare=flight.comparing.asked_of(member.peer) if flight is not None and counted else b"",
            dropped=driver.book.dropped_round,
            proof=self._proof(driver) if standing.verified else b"",
            nonce_for=said.version if said is not None else -1,
            nonce=driver.agreement.nonce(said.version) if said is not None else b"",
            refuted=driver.agreement.refuted(member, said) if said is not None else b"",
            fellows=fellows,
            sections=(*sections, *flight.sums.sections) if flight is not None and counted else sections,
        )

    def _proof(self, driver: RoundDriver) -> bytes:
        """Of versions that belong into a checkpoint: whoever reads it later can show whose state it is."""
        core, book = self._core, driver.book
        digest, last = book.digests.get(book.version), core.manifest.run.rounds
        if digest is None or not (core.ledger.rules.is_saved(book.version) or book.version == last):
            return b""
        era, number = core.ledger.eras.number, driver.fragment
        statement = statement_of(core.run_id, era, number, book.version, digest)
        if self._proofs.get(number, (b"", b""))[0] != statement:
            self._proofs[number] = (statement, core.prove(statement))
        return self._proofs[number][1]

    def _told(self, most: int, least: int, standing: Standing) -> int:
        """How long a list may be that a tick has for each fragment.  In a large run whoever has all that there is hears
        little of how to get it: it may miss the next commit, and hears of more as soon as it did."""
        if standing.verified and self._is_by_need():
            return least
        told = 1 if self._core.manifest.pipeline.stages > 1 else len(self._drivers)  # of a tick
        return max(least, most * FRAGMENTS_IN_FULL // max(FRAGMENTS_IN_FULL, told))

    def _repeat_what_is_missing(self, member: Member, said: FragmentBeat, driver: RoundDriver) -> None:
        core, flight, commits = self._core, driver.round, driver.book.commits
        behind = driver.book.version - 1 == said.version >= max(0, driver.standing(member).commit_told)
        if behind and len(core.members.alive) > CROWD:
            driver.agreement.tell_commit(member)
        for version in said.need:
            if version in commits and (driver.standing(member).vouched or said.version < 0):
                nonce = driver.agreement.nonce(version)
                amended = core.amended_for(version - 1)
                told = driver.agreement.commit_for(member, commits[version])
                core.tell(member, Committed, commit=told, nonce=nonce, amended=amended)
        if flight is None or not driver.participants.counts_on(member) or said.version != flight.plan.version:
            return
        same_round = said.round_no == flight.plan.round_no
        if not same_round or said.epoch < flight.epoch_of(member.peer):
            driver.participants.tell_plan(flight, [member])
        if flight.decision is not None and (not same_round or said.decision_no < flight.decision.decision_no):
            driver.participants.tell_decision(flight, flight.decision, [member])

    # ---- judging a member's state ----------------------------------------------------------------------

    def recheck_all(self) -> None:
        """The digest of a version has just been settled: tell every member at once; in a crowd those that rounds are
        made of, and the others by their next beats."""
        alive = self._core.members.alive
        told = list(alive) if len(alive) <= CROWD else sorted(self._in_rounds)
        for peer in told:
            member = alive.get(peer)
            if member is not None and member.beat is not None:
                self.on_beat(member, member.beat)

    @property
    def _in_rounds(self) -> set[str]:
        """Members of the rounds in flight and of the newest commits."""
        found: set[str] = set()
        for driver in self._drivers:
            found.update(driver.book.makers)
            found.update(driver.round.plan.members if driver.round is not None else ())
        return found

    def _judge(self, member: Member, beat: Beat) -> Judgement:
        """Where the member is with its least advanced fragment.  Sets its standings."""
        core = self._core
        said = [(self._drivers[each.fragment], each) for each in beat.fragments]
        for driver, of_it in said:
            self._donors.recognise(member, driver, of_it)
        zero = self.version_zero
        zero.turns.look(zero.is_founded)
        if not zero.is_founded:
            return zero.judge(member, beat)
        found = [self._judge_fragment(member, driver, of_it) for driver, of_it in said]
        if member.verified and core.finished:
            return self._finish()
        judged = min(found, key=lambda judgement: _FROM_LEAST_ADVANCED.index(judgement[0]))
        in_flight = any(driver.round is not None for driver in self._drivers)
        if judged[0] == Goal.TRAIN and core.held and not in_flight:
            return Goal.ALONE, core.held
        return judged

    def _judge_fragment(self, member: Member, driver: RoundDriver, said: FragmentBeat) -> Judgement:
        standing, version = driver.standing(member), driver.book.version
        known = driver.book.digests.get(said.version)
        of = self._core.of(driver.fragment)
        if said.version > version:
            return (
                Goal.WAIT,
                f"it holds version {said.version}{of}, the journal ends at {version}: restore the newer journal",
            )
        if said.version >= 0 and known is not None and said.digest != known:
            # A version 0 was not calculated: there is nothing to check, it is of another beginning.
            if said.version > 0 and driver.agreement.is_heard(member, said):
                return (
                    Goal.WAIT,
                    f"what it calculated as version {version}{of} is not what others did: it is checked",
                )
            self._quarantine(member, standing, said.version)
            return self._sync(
                member, driver, "its state differs from the run's; it takes the run's state again"
            )
        if standing.verified:
            standing.quarantined = False
            return Goal.TRAIN, driver.reason
        if said.version == version and known is not None and driver.agreement.has_shown(said):
            return Goal.WAIT, f"it has to prove that it holds version {version}{of}"
        if said.version == version:
            return Goal.TRAIN, f"waiting for the digest of version {version}{of} to be settled"
        here = f"version {said.version}{of}" if said.version >= 0 else f"no version yet{of}"
        return self._sync(member, driver, f"it holds {here}, the run is at {version}")

    def _finish(self) -> Judgement:
        """Who has the last version stays a while for those who are still fetching it."""
        version = self._core.ledger.version
        behind = [m for m in self._core.members.alive.values() if not m.verified]
        since_commit_s = min(driver.since_commit_s for driver in self._drivers)
        if behind and since_commit_s < FINISH_GRACE_S:
            who = "1 peer is" if len(behind) == 1 else f"{len(behind)} peers are"
            return Goal.WAIT, f"the run is complete; {who} still fetching version {version}"
        busy = (mode.busy_with(each.fragment) for mode in self._core.modes for each in self._drivers)
        manifest = self._core.manifest
        of_batch = manifest.pipeline.batch > 0 and bool(manifest.eval.source)
        look_s = max(LAST_LOOK_S, manifest.round.deadline_s) if of_batch else LAST_LOOK_S
        if since_commit_s < look_s and (told := next(filter(None, busy), "")):
            # Who is finished leaves, and its model and what it contributed with it.
            return Goal.WAIT, f"the run is complete; {told}"
        return Goal.FINISH, f"the run is complete: {version} rounds committed"

    def _sync(self, member: Member, driver: RoundDriver, reason: str) -> Judgement:
        # It was told of the commit just now and is at it: that nobody holds the new version yet is no news.
        at_it = driver.since_commit_s < self._core.manifest.net.dead_after_s
        if at_it and driver.is_arriving(member):
            return Goal.SYNC, reason
        why_wait = self._core.why_wait(driver.fragment, bool(self._donors.donors(member, driver, 1)))
        return (Goal.WAIT, why_wait) if why_wait else (Goal.SYNC, reason)

    def _quarantine(self, member: Member, standing: Standing, version: int) -> None:
        news, standing.quarantined = not member.quarantined, True
        if not news:
            return  # one thing went wrong, in however many fragments it shows
        self._core.note(f"{member.contact.name} is quarantined: its digest differs from the run's")
        if version > 0:  # a version 0 may be of an earlier beginning of this run, which was nobody's fault
            self._core.strike(member.peer, "its state differs from the run's")


def _beats_of(driver: RoundDriver) -> dict[str, FragmentBeat]:
    return {m.peer: said for m in driver.holders if (said := driver.beat_of(m)) is not None}


def _versions(beat: Beat) -> list[int]:
    return [said.version for said in beat.fragments]
