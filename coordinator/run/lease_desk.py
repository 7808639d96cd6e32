"""Leases samples to members, and takes back what lost members hold (P7).  Pure.

One of the parts of the run machine: the guidance asks it at every beat, the run machine at every turn of the clock.
It asks the drivers of all fragments what their rounds may still acknowledge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farflung.coordinator.ledger.records import CutShort, DataFixed, Granted, Released, StreamEnded
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import LOST_KEPT, Looks, Member
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.messages import UNKNOWN_LENGTH, Beat, Lease
from farflung.protocol.model_schema import BOOKS_FRAGMENT

# ---- dataset agreement -------------------------------------------------------------------------------------
# What the run's data set is, by the words of its members, and who has another one. Pure.
#
# Part of the lending. A word is a length and a fingerprint. As long as nothing that was leased is committed,
# the data set of the most members is the run's (of two that as many have: that of the oldest member), and it
# may still change. From the first commit on it is settled for good: a member that has another one is sent
# away, whoever else says so too.
#
# The length of a stream is not known before it is read to its end. An end that a member finds is its own:
# nothing beyond is leased to it, and nobody else notices. It becomes the end of every epoch when members with
# more than half of all committed tokens have found the same one. A member that says another end than the
# others loses nothing either.

# Times dead_after_s: those who are here all stand at the end of their streams, and those who are gone would have to
# agree.
ENDS_AFTER_DEAD = 20.0
FINGERPRINT_SHOWN = 8  # bytes


class DataSet(NamedTuple):
    samples: int  # UNKNOWN_LENGTH: a stream, also one that was read to its end by now
    data: bytes  # its fingerprint; empty: it has none

    def fits(self, other: DataSet) -> bool:
        """A stream may be of any length, and what has no fingerprint is not compared by it."""
        same_length = self.samples == other.samples or UNKNOWN_LENGTH in (self.samples, other.samples)
        return same_length and (not self.data or not other.data or self.data == other.data)


@dataclass
class Word:
    """What one process of a member said of its data."""

    process: bytes
    first: DataSet
    ends: int  # how many samples it has, as far as it knows


class DatasetAgreement:
    def __init__(self, core: Core, drivers: Sequence[RoundDriver]) -> None:
        self._core = core
        self._drivers = drivers
        self._words: dict[str, Word] = {}  # by peer
        self._ends: dict[str, int] = {}  # peers that have committed something -> where their stream ended
        self._changes = 0  # of words
        self._chosen_at = (-1, 0)  # the members and the words by which the run's data set was chosen last
        self._looks, self._end_looks = Looks(), Looks()
        self._all_ended_at: float | None = None  # since then everybody who is here stands at the end

    # ---- questions -------------------------------------------------------------------------------------

    @property
    def of_run(self) -> DataSet:
        leases = self._core.ledger.leases
        return DataSet(UNKNOWN_LENGTH if leases.stream else leases.samples, leases.data)

    def ends_of(self, member: Member) -> int:
        """Nothing beyond it can be read by the member."""
        word = self._word_of(member)
        return word.ends if word is not None else UNKNOWN_LENGTH

    def fits(self, member: Member) -> bool:
        """Samples of the run's may be leased to it."""
        word = self._word_of(member)
        return word is None or word.first.fits(self.of_run)

    def _word_of(self, member: Member) -> Word | None:
        """Of this very process: its former self may have had other data."""
        word = self._words.get(member.peer)
        return word if word is not None and word.process == member.process else None

    def told(self, member: Member) -> str:
        """What the member's owner should know of its data; empty: nothing."""
        leases, word = self._core.ledger.leases, self._word_of(member)
        if word is None or not leases.samples or self._core.finished:
            return ""
        ends = word.ends
        if not word.first.fits(self.of_run):
            return f"no samples are leased to it: {self._difference(word.first)}"
        if ends < leases.samples:
            on = "goes on" if leases.samples == UNKNOWN_LENGTH else f"has {leases.samples}"
            return (
                f"its stream ended after {ends} samples, and the run's {on}: nothing beyond is leased to it; "
                "every peer should read the same data to the same end"
            )
        return ""

    def _difference(self, own: DataSet) -> str:
        return f"{self._between(own, self.of_run, 'in the run')}; use the same data, in the same order"

    @staticmethod
    def _between(own: DataSet, other: DataSet, where: str) -> str:
        if not own._replace(data=b"").fits(other):
            return f"data set has {_length(own.samples)} here, {_length(other.samples)} {where}"
        return f"data set has fingerprint {_shown(own.data)} here, {_shown(other.data)} {where}"

    # ---- a beat ----------------------------------------------------------------------------------------

    def hear(self, member: Member, beat: Beat) -> str | None:
        """Returns why the member must go: its data is not the run's."""
        if not beat.samples or member.helps:
            return None
        said, word = DataSet(beat.samples, beat.data), self._word_of(member)
        before = (word.first, word.ends) if word is not None else None
        if word is None:
            self._forget_the_gone()
            self._words[member.peer] = word = Word(member.process, said, beat.samples)
        elif word.first.samples == UNKNOWN_LENGTH:
            word.ends = beat.samples
        elif not said.fits(word.first) and self._core.ledger.leases.of(member.peer):
            return f"data set changed during the run: {self._between(said, word.first, 'at first')}"
        elif said != word.first:
            word.first, word.ends = said, beat.samples
        news = (word.first, word.ends) != before
        self._changes += news
        if not self._core.ledger.leases.settled:
            self._choose()
        elif not word.first.fits(self.of_run):
            return self._difference(word.first)
        if news:
            self._on_news(member, word)
        return None

    def _on_news(self, member: Member, word: Word) -> None:
        self._ends.pop(member.peer, None)
        if word.ends != UNKNOWN_LENGTH and member.peer in self._core.ledger.peers.tokens:
            self._ends[member.peer] = word.ends
        found = word.first.samples == UNKNOWN_LENGTH != word.ends
        if found and word.ends != self._core.ledger.leases.samples:
            self._core.note(f"{member.contact.name} read its data to the end: {word.ends} samples")
        self.maybe_end()

    def _forget_the_gone(self) -> None:
        known = self._core.members.members
        if len(self._words) < 2 * len(known) + LOST_KEPT:
            return  # now and then: it looks at all of them
        self._words = {peer: word for peer, word in self._words.items() if peer in known}

    @property
    def _here(self) -> list[tuple[Member, Word]]:
        """Living members that lease data, the oldest first."""
        alive = sorted(self._core.members.alive.values(), key=lambda member: member.joined_no)
        found = [(member, self._word_of(member)) for member in alive]
        return [(member, word) for member, word in found if word is not None]

    # ---- as long as nothing is settled ------------------------------------------------------------------

    def _choose(self) -> None:
        """The run's data set is that of the most members.  What was leased of another one is void."""
        core = self._core
        in_flight = any(driver.round is not None for driver in self._drivers)
        if core.ledger.leases.samples and in_flight:
            return  # it may be settled by this very round
        stamp = (core.members.everybody.number, self._changes)
        if stamp == self._chosen_at or not self._looks.is_due(len(core.members.alive), core.now):
            return
        self._chosen_at, here = stamp, self._here
        if self._end_is_doubted(here):
            oldest = here[0][0]
            core.write(DataFixed(samples=UNKNOWN_LENGTH, peer=oldest.peer, data=core.ledger.leases.data))
            core.note("most members have not found the end of the data where the first ones did: it goes on")
        lengths = Counter(word.first.samples for _, word in here)
        samples = max(lengths, key=lengths.__getitem__, default=0)  # of two, the one that was said first
        having = [(m, word) for m, word in here if word.first.samples == samples]
        prints = Counter(word.first.data for _, word in having if word.first.data)
        data = max(prints, key=prints.__getitem__, default=b"")
        chosen, of_run = DataSet(samples, data), self.of_run
        if not having or (samples == of_run.samples and data in (of_run.data, b"")):
            return
        oldest = next(m for m, word in having if word.first.fits(chosen))
        core.write(DataFixed(samples=samples, peer=oldest.peer, data=data))
        if of_run.samples:
            core.note(f"most members have another data set than the first ones: {_length(samples)}")

    def _end_is_doubted(self, here: list[tuple[Member, Word]]) -> bool:
        """Somebody who was alone said where the stream ends, and most of those who are here now do not."""
        leases = self._core.ledger.leases
        if not leases.stream or leases.samples == UNKNOWN_LENGTH:
            return False
        return 2 * sum(word.ends != leases.samples for _, word in here) > len(here)

    # ---- the end of a stream -----------------------------------------------------------------------------

    def maybe_end(self) -> None:
        """At a word of a member, and as time passes."""
        core, leases = self._core, self._core.ledger.leases
        if not leases.stream or leases.epoch or not self._end_looks.is_due(len(core.members.alive), core.now):
            return
        weights = self._weights()
        ends = self._ends | {m.peer: word.ends for m, word in self._here}
        found: Counter[int] = Counter()
        for peer, weight in weights.items():
            found[ends.get(peer, UNKNOWN_LENGTH)] += weight
        length, weight = max(found.items(), key=lambda item: item[1], default=(UNKNOWN_LENGTH, 0))
        if 2 * weight <= weights.total() or length == UNKNOWN_LENGTH:
            length = self._end_of_those_here(weights)
        # It may have been found too late; never too early, once something is committed.
        if length < leases.samples:
            self._end(length, next((p for p in weights if ends.get(p) == length), ""))

    def _weights(self) -> Counter[str]:
        """Who has how much to say: committed tokens; before there are any, each member as much as another."""
        core, here = self._core, self._here
        if not core.ledger.leases.settled:
            return Counter(member.peer for member, _ in here)
        alive, leasing = core.members.alive, {member.peer for member, _ in here}
        return Counter(
            {
                peer: tokens
                for peer, tokens in core.ledger.peers.tokens.items()
                if peer in leasing or peer not in alive  # a member with data of its own has no say
            }
        )

    def _end_of_those_here(self, weights: Counter[str]) -> int:
        """Members that are gone can't agree.  Where all others have waited at their ends for long, the one counts by
        which more than half of them had ended."""
        core = self._core
        here = sorted(
            (word.ends, weights[member.peer]) for member, word in self._here if weights[member.peer]
        )
        if not here or here[-1][0] == UNKNOWN_LENGTH:
            self._all_ended_at = None
            return UNKNOWN_LENGTH
        if self._all_ended_at is None:
            self._all_ended_at = core.now
        if core.now - self._all_ended_at < ENDS_AFTER_DEAD * core.members.liveness.dead_after_s:
            return UNKNOWN_LENGTH
        total, so_far = sum(weight for _, weight in here), 0
        for ends, weight in here:
            so_far += weight
            if 2 * so_far > total:
                return ends
        return UNKNOWN_LENGTH

    def _end(self, samples: int, peer: str) -> None:
        self._core.write(StreamEnded(samples=samples, peer=peer))
        self._core.note(f"the data was read to its end: an epoch has {samples} samples")


def _length(samples: int) -> str:
    return "no known length" if samples == UNKNOWN_LENGTH else f"{samples} samples"


def _shown(data: bytes) -> str:
    return data[:FINGERPRINT_SHOWN].hex() or "none"


# ---- lease desk --------------------------------------------------------------------------------------------

# Times dead_after_s: how long a lost peer's leases wait for it before others get them.
RELEASE_AFTER_DEAD = 2.0
# And how long, at least, those of a peer wait that this coordinator has not seen yet: while it was away the peer
# knocked less and less often, every 10 s in the end, and what it learned meanwhile would be lost with its leases.
BACK_WITHIN_S = 30.0
LEASES_PER_PEER = 64
POSITIONS_PER_PEER = 1024  # of fragments within leases: a tick that names them all must fit into one message


class LeaseDesk:
    def __init__(self, core: Core, drivers: Sequence[RoundDriver]) -> None:
        self._core = core
        self._drivers = drivers
        self.words = DatasetAgreement(core, drivers)
        self._absent_since: dict[str, float] = {}
        self._awaited: set[str] = set()  # since this coordinator began
        self._has_looked = False
        self._looks = Looks()
        self._leases_per_peer = max(4, min(LEASES_PER_PEER, POSITIONS_PER_PEER // len(drivers)))

    def lease(self, member: Member, beat: Beat) -> tuple[tuple[Lease, ...] | None, tuple[int, ...]]:
        """(all leases of the member if it does not know them yet, those it must not use any more)."""
        core = self._core
        leases = core.ledger.leases
        using = (each for each in self._drivers if each.may_use_work_of(member.peer))
        if any(not each.participants.counts_on(member) for each in using):
            # What its former self contributed may yet be acknowledged: nothing is handed out twice.
            return None, ()
        # A member that does not hold this one learns from no samples of its own.
        books = member.standings.get(BOOKS_FRAGMENT)
        able = books is not None and books.verified and not beat.leaving
        self._cut_short(member)
        able, member.without_data = able and self.words.fits(member) and not member.helps, False
        if beat.want and leases.samples and able and not core.finished:
            self._grant(member, beat)
        mine = leases.of(member.peer)
        void = leases.foreign(member.peer, beat.have) if self._is_settled(member, beat) else ()
        if mine.keys() <= set(beat.have) and not beat.unsure:
            return None, void
        return tuple(held.as_lease(i) for i, held in sorted(mine.items())), void

    def _is_settled(self, member: Member, beat: Beat) -> bool:
        """It knows of every commit that used its work, and no round may use more of it."""
        return all(
            said.version == self._drivers[said.fragment].book.version
            and not self._drivers[said.fragment].may_use_work_of(member.peer)
            for said in beat.fragments
        )

    def _cut_short(self, member: Member) -> None:
        """A member that has read its data to the end can't use what it holds beyond: that is for others."""
        leases, ends = self._core.ledger.leases, self.words.ends_of(member)
        beyond = leases.reaching_beyond(member.peer, ends)
        # What it says now it may have said otherwise to a round that is in flight.
        sent = [each.round.scatter.sent.get(member.peer) for each in self._drivers if each.round is not None]
        used = {each.lease for said in sent if said is not None for each in said.used if each.upto > ends}
        free = tuple(each for each in beyond if each not in used)
        if free:
            self._core.write(CutShort(leases=free, samples=ends, peer=member.peer))

    def _grant(self, member: Member, beat: Beat) -> None:
        leases = self._core.ledger.leases
        mine = leases.of(member.peer)
        on_the_way = sum(h.stop - h.upto for i, h in mine.items() if i not in beat.have)
        while on_the_way < beat.want and len(mine) < self._leases_per_peer:
            found = leases.next_range(beat.want, self.words.ends_of(member))
            member.without_data = found is None
            if found is None:
                break
            lease = Lease.at(leases.next_id, found.epoch, found.start, found.stop, found.uptos)
            self._core.write(Granted(peer=member.peer, lease=lease))
            mine = leases.of(member.peer)
            on_the_way += found.stop - found.start

    def reclaim(self) -> None:
        """What peers that are gone did not get committed goes back to the pool: at once from one that took its leave,
        after a while from one that may come back."""
        core = self._core
        self.words.maybe_end()
        if not self._looks.is_due(len(core.members.alive), core.now):
            return
        holders = {held.peer for held in core.ledger.leases.held.values()}
        absent = sorted(
            peer
            for peer in holders
            if peer not in core.members.alive and not any(c.may_use_work_of(peer) for c in self._drivers)
        )
        self._absent_since = {p: self._absent_since.get(p, core.now) for p in absent}
        self._awaited = self._awaited.intersection(absent) if self._has_looked else set(absent)
        self._has_looked = True
        usual_s = RELEASE_AFTER_DEAD * core.members.liveness.dead_after_s
        for peer, since in self._absent_since.items():
            left = core.members.has_left(peer)
            patience_s = max(usual_s, BACK_WITHIN_S) if peer in self._awaited else usual_s
            if left or core.now - since >= patience_s:
                why = "left" if left else "did not come back"
                core.write(
                    Released(leases=tuple(core.ledger.leases.of(peer)), reason=f"{core.name(peer)} {why}")
                )
