"""When a peer saves the run's state, as a checkpoint and on its own disk, and when it reads it back.  Pure.

Part of the peer machine.  A checkpoint is of one version: each fragment's state is taken when that fragment is
there and the coordinator has confirmed its digest (P4), so fragments that are ahead of others do no harm.
Reading one back is for a run whose newest state nobody holds; whether the run goes back to it, the coordinator says.
And for a newcomer that meets all donors at a relay: the whole state would pass the narrowest place of the run, while
from a checkpoint of a few versions before only results do.  Nobody trusts the place: what is read counts if its hashes
lead to a digest that the coordinator names.
It also takes up what had arrived of the state before this peer was killed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.collectives.round.member import MemberRound
from farflung.peer.machine.disk_words import AheadKept, Held, KeepingFailed, KeptWord, Reached, Undone
from farflung.peer.machine.effects import (
    Digests,
    DropSave,
    Effect,
    KeepAhead,
    KeepBase,
    ListShelf,
    Note,
    Recall,
    Restore,
    SaveFragment,
    Undo,
)
from farflung.peer.machine.held_fragment import Empty, Rolling
from farflung.peer.machine.replicas import Replica
from farflung.protocol.limits import SHELVED_TOLD
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import FragmentTick, Tick
from farflung.protocol.mode_words import Shelved, ShelvedList
from farflung.protocol.round_words import RelayRoute
from farflung.protocol.run_terms import Known
from farflung.protocol.signing import curve_key_of, proves, statement_of
from farflung.protocol.states import Goal

OWN_TOLD = 16  # versions of what I hold; of what other stages have less is said
OTHERS_TOLD = 2  # of each
READ_AGAIN_S = 30.0  # no good checkpoint was there: somebody may bring one
STARVED_S = 20.0  # holding nothing, and no donor gave anything
TORN_S = 60.0  # the same, between two versions, with donors that are named
EVERY_MOST = 64  # versions between two bases, however small results are: to read it back takes as many steps
TRY_AGAIN_S = 600.0  # after a disk that failed
PATIENCE_S = 60.0  # with a disk that says nothing, while a round waits for it
AT_RELAY = "those who hold the state are met at a relay only: I look for a recent checkpoint first"


class Saving:
    def __init__(self, known: Known, enabled: bool, pinned: bytes = b"") -> None:
        """`enabled`: the shell has a place to write to; `pinned`: the coordinator's key, as the join URL has it."""
        self.saved = NO_VERSION
        self._enabled, self._pinned = enabled, pinned
        self._run_id = known.run_id
        self._every, self._rounds = known.manifest.checkpoint.every_rounds, known.manifest.run.rounds
        self._tried = NO_VERSION
        self._busy = False
        self._taken: set[int] = set()  # fragments of the version that is being saved
        self._list_due = enabled

    def follow(self, manifest: Manifest) -> None:
        """The run may end elsewhere than it was to."""
        self._rounds = manifest.run.rounds

    def begin_era(self, ticks: Sequence[FragmentTick], replicas: Sequence[Replica]) -> None:
        """The run is at another version again, and makes the later ones anew.  What was saved is of it still if it is
        not later, and the run went back."""
        self._tried = NO_VERSION
        version, mine = min(tick.version for tick in ticks), min(replica.held.version for replica in replicas)
        if self.saved > version or version > mine:
            self.saved = NO_VERSION

    def due_list(self) -> list[Effect]:
        """At start, since what a former process saved, or others who share the place, is as good as what I save; and
        after each save."""
        due, self._list_due = self._list_due, False
        return [ListShelf()] if due else []

    def is_due(self, version: int) -> bool:
        if not self._enabled or not self._every or version <= 0:
            return False
        return version % self._every == 0 or version == self._rounds

    def due_saves(self, replicas: Sequence[Replica], era: int) -> list[Effect]:
        """Asked at every tick, before anything newer is applied."""
        effects: list[Effect] = []
        late = [replica for replica in replicas if replica.fragment.number not in self._taken]
        # The state that the run ends with is worth more than the one that a slow disk is still writing: nobody would
        # save it later.
        ends = any(replica.held.version == self._rounds and replica.held.serves for replica in replicas)
        is_newer = any(replica.held.version > self._tried for replica in late)
        if self._busy and (is_newer or (ends and self._tried < self._rounds)):
            effects.append(DropSave(self._tried))
            self._busy = False
        for replica in replicas:
            held, version, number = replica.held, replica.held.version, replica.fragment.number
            if not self.is_due(version) or not held.serves:
                continue
            if not self._busy and version > self._tried:
                self._busy, self._tried, self._taken = True, version, set()
            if self._busy and version == self._tried and number not in self._taken:
                self._taken.add(number)
                proof, digest = held.proof, held.digest
                if proof and not self._fits(proof, statement_of(self._run_id, era, number, version, digest)):
                    effects.append(Note(f"the coordinator's signature of version {version} does not fit"))
                    proof = b""
                round_no = replica.rounds.last_commit.made(version)
                effects.append(SaveFragment(version, number, digest, round_no, era, proof))
        return effects

    def _fits(self, proof: bytes, statement: bytes) -> bool:
        return proves(proof, statement) and (not self._pinned or curve_key_of(proof[:32]) == self._pinned)

    def on_saved(self, version: int, problem: str) -> list[Effect]:
        """`problem`: why the checkpoint was not written, else empty.  Nothing, if that one had been given up."""
        if not self._busy or version != self._tried:
            return []
        self._busy = False
        if problem:
            return [Note(problem)]
        self.saved, self._list_due = version, True
        return [Note(f"checkpoint of version {version} saved"), *self.due_list()]


class RestoringOwn:
    def __init__(self, enabled: bool, worth: int = 0) -> None:
        """`enabled`: the shell has a place to read from.  `worth`: the results of so many versions can be had, and are
        fewer bytes than the state."""
        self._enabled, self._worth = enabled, worth
        self._at_relay: frozenset[str] = frozenset()  # whom I meet nowhere else
        self._begun: set[int] = set()  # fragments that were read although donors are there: once each
        self._lacking: frozenset[int] = frozenset()  # fragments whose state is being written
        self._again_at = 0.0
        self._tried: dict[int, Digests] = {}
        self.unread: dict[int, Digests] = {}  # of the last time: what was wanted, and is not to be had
        # Fragment -> how much of it is here, where it is not whole, and since when.
        self._has: dict[int, tuple[int, float]] = {}

    def on_ways(self, ways: Sequence[RelayRoute]) -> None:
        """By which I reach those whom I can't dial and did not meet past my router."""
        self._at_relay = frozenset(way.peer for way in ways)

    def due_restore(self, tick: Tick, replicas: Sequence[Replica], loading: bool, now: float) -> list[Effect]:
        """Asked at every tick: read from a checkpoint the fragments of which I hold nothing, or too little, and nobody
        gives me anything.  What I hold of the others stays."""
        learned = any(word.version > 0 for word in tick.fragments)
        has = {
            replica.fragment.number: _progress(replica)
            for replica in replicas
            if _is_not_whole(replica) or _is_torn(replica)
        }
        if not self._enabled or self._lacking or not learned or not has:
            self._has = {}
            return []
        before = self._has
        self._has = {
            number: before[number] if before.get(number, (-1, now))[0] == progress else (progress, now)
            for number, progress in has.items()
        }
        empty = {number for number, progress in has.items() if not progress}
        # The least advanced fragment has to wait; another one may be on its way.
        alone = tick.goal == Goal.WAIT
        starved = {
            word.fragment: word.digests
            for word in tick.fragments
            # Joiners may all have the same pieces of it, given by somebody who is gone; or have taken in pieces of a
            # newer version, and nobody can give the others: also those named as donors may be torn by them.
            if now - self._has.get(word.fragment, (0, now))[1] >= self._patience_s(word, empty)
            or (alone and word.fragment in empty and (not word.donors or len(empty) == len(replicas)))
        }
        if loading or now < self._again_at:
            return []
        spared = {
            word.fragment: self._near(word)
            for word in tick.fragments
            if word.fragment in empty - starved.keys() - self._begun and self._is_far(word)
        }
        self._begun.update(spared)
        lacking = starved | {number: near for number, near in spared.items() if near}
        if not lacking:
            return []
        self._lacking = frozenset(lacking)
        for replica in replicas:
            if replica.fragment.number in lacking:
                replica.held.fill()
        told = [] if starved else [Note(AT_RELAY)]
        self._tried = lacking
        return [*told, Restore(lacking)]

    def _patience_s(self, word: FragmentTick, empty: Collection[int]) -> float:
        """Without a piece.  What is torn may lose rounds by being read, so donors have longer to heal it."""
        return STARVED_S if word.fragment in empty or not word.donors else TORN_S

    def _is_far(self, word: FragmentTick) -> bool:
        """All who would give me this fragment's state are met at a relay."""
        return bool(word.donors) and self._at_relay.issuperset(word.donors)

    def _near(self, word: FragmentTick) -> Digests:
        """Versions from which it is less to fetch results than the state."""
        return tuple(known for known in word.digests if word.version - known[0] <= self._worth)

    def on_end(self, version: int, now: float) -> frozenset[int]:
        """The fragments that were to be read."""
        read, self._lacking = self._lacking, frozenset()
        # What is newer than what was read was tried before it.
        self.unread = {
            number: tuple(known for known in tried if known[0] > version)
            for number, tried in self._tried.items()
        }
        self._again_at = now if version != NO_VERSION else now + READ_AGAIN_S
        return read


def _is_not_whole(replica: Replica) -> bool:
    return isinstance(replica.held.stand, Empty)


def _is_torn(replica: Replica) -> bool:
    """Between two versions of the run: it shows neither."""
    return isinstance(replica.held.stand, Rolling)


def _progress(replica: Replica) -> int:
    """It grows with each piece that comes, and with each that moves on."""
    return sum(version - NO_VERSION for version in replica.held.chunks.versions)


def _pieces(replica: Replica) -> int:
    """How many are here, of whatever version."""
    return sum(version != NO_VERSION for version in replica.held.chunks.versions)


def is_empty(replica: Replica) -> bool:
    return _is_not_whole(replica) and not _pieces(replica)


# ---- what had arrived before this peer was killed -----------------------------------------------------
#
# Asked once, when the coordinator first says where the run is; what is found is only a beginning, and
# everything else is fetched as ever (checkpoints/state_sync.py).


@dataclass
class WhyWaiting:
    """Why this peer waits, as it was told last."""

    told: str = ""

    def hear(self, reason: str) -> str:
        """Empty: it is no news."""
        before, self.told = self.told, reason
        return reason if reason != before else ""


class Recalling:
    def __init__(self, enabled: bool) -> None:
        """`enabled`: the shell has a place where pieces may lie."""
        self._due = enabled
        self._busy = False  # they are being read into the state

    @property
    def is_open(self) -> bool:
        """What lies on the disk may be the run's newest state."""
        return self._due or self._busy

    def due_recall(self, tick: Tick, replicas: Sequence[Replica]) -> list[Effect]:
        """Asked at every tick."""
        if not self._due or tick.goal == Goal.FOUND:
            return []
        self._due = False
        if not all(map(is_empty, replicas)):
            return []
        self._busy = True
        for replica in replicas:
            replica.held.fill()
        known = {word.fragment: (word.version, word.digests) for word in tick.fragments}
        return [Recall(tick.era, known)]

    def on_end(self, held: Held, replicas: Sequence[Replica]) -> list[Effect]:
        if not self._busy:
            return []  # they were asked for by whoever held another stage here
        self._busy = False
        for replica in replicas:
            replica.unfilled(touched=True, recalled=held)
        if not any(map(_pieces, replicas)):
            return []
        kept = sum(map(_pieces, replicas))
        of = sum(replica.fragment.count for replica in replicas)
        versions = {version for version, _ in held.values()}
        if kept == of and len(versions) == 1:
            return [Note(f"version {versions.pop()} of the state lies on this peer's own disk")]
        return [Note(f"{kept} of {of} pieces of the state had arrived before; only the others are fetched")]


# ---- what can be brought, and going back by one version ---------------------------------------------


class Shelf:
    """Which versions of the run this peer can bring without anybody's help, beside the state that it holds; told in
    every beat.

    Checkpoints that lie whole where this peer reads and writes them, what else lies on its disk, and its own state as
    it was before the last round.  Where the newest state of a stage is lost, all stages can only go back to a
    version that each of them can bring: so all that there is has to be said, also what a former process wrote,
    and what others wrote into the same place.
    """

    def __init__(self) -> None:
        self._found: dict[str, ShelvedList] = {}  # by place

    def put(self, place: str, found: Iterable[Shelved]) -> None:
        """All that lies there whole.  What was found there before counts no more."""
        self._found[place] = tuple(found)

    def strike(self, fragment: int, unread: Digests) -> None:
        """It was tried, and could not be read: it may be damaged, or its place is out of reach."""
        for place, found in self._found.items():
            kept = [each for each in found if not any(_is_one(each, fragment, known) for known in unread)]
            self._found[place] = tuple(kept)

    def told(self, replicas: Sequence[Replica]) -> ShelvedList:
        """The newest first: more than a beat takes may lie there."""
        held = {replica.fragment.number for replica in replicas}
        before = [
            Shelved.of(was[0], replica.fragment.number, was[1:])
            for replica in replicas
            if (was := replica.held.before)
        ]
        found = sorted({each for there in self._found.values() for each in there}, key=_newest_first)
        mine = [each for each in found if each.first in held]
        others: list[Shelved] = []
        for each in found:
            if each.first not in held and sum(other.first == each.first for other in others) < OTHERS_TOLD:
                others.append(each)
        return tuple([*before, *mine[:OWN_TOLD], *others][:SHELVED_TOLD])


def _newest_first(stored: Shelved) -> tuple[int, int, bytes]:
    return -stored.version, stored.first, stored.tags


def _is_one(stored: Shelved, fragment: int, known: tuple[int, bytes]) -> bool:
    version, digest = known
    return stored.version == version and stored.is_of(fragment, digest)


class Undoing:
    """Going back by one version without a byte from anybody: out of what each chunk was before the last round.

    The shell has kept it since the round began.  It is asked for as soon as the run says that it is at that version
    again, and the trainer reads the state no more.  Its fragments are filled (held_fragment.py) from the moment at
    which the run goes back until the answer is here.  What comes of it is hashed like every other state: where a disk
    gave something else, nothing of the fragment is held, as if nothing had been asked for.
    """

    def __init__(self) -> None:
        self._due: dict[int, int] = {}  # fragment -> version
        self._asked: dict[int, int] = {}  # fragment -> era in which the shell was asked
        self._era = 0

    def begin(self, back: dict[int, int], era: int) -> frozenset[int]:
        """The run begins an era; these fragments go back to these versions, and no others do.  Returns those of an
        older era that nothing was written into yet."""
        given_up = frozenset(self._due)
        self._due, self._era = dict(back), era
        return given_up

    def take_due(self, loading: bool) -> list[Undo]:
        """`loading`: the trainer reads the state."""
        if loading:
            return []
        due = [Undo(number, version) for number, version in self._due.items() if number not in self._asked]
        for undo in due:
            del self._due[undo.fragment]
            self._asked[undo.fragment] = self._era
        return due

    def on_undone(self, undone: Undone) -> bool:
        """False: it was asked for by whoever held another stage here."""
        if self._asked.get(undone.fragment) != undone.era:
            return False
        del self._asked[undone.fragment]
        return True


# ---- the newest version on this peer's own disk -------------------------------------------------------
#
# A base, the whole state at one version, and the results of each version since (checkpoints/kept_state.py).  A base is
# due when there is none that leads to what is held, and when the results since the last one are as many bytes as a
# base: so what a round writes is about twice its results.  Only what the coordinator has confirmed becomes one (P4).
#
# A round whose results nobody else holds commits when they lie on this disk: else a peer that trains alone could lose,
# in the moment between the commit and the disk, the version that the run is at.  A disk that fails holds up nothing.


class Keeping:
    def __init__(self, me: str, place: str, every: int) -> None:
        """`place`: for people; empty: nothing is kept.  `every`: versions after which the results since a base are as
        many bytes as it is."""
        self._me, self._place, self._every = me, place, max(1, min(every, EVERY_MOST))
        self._era = 0
        self._chains: dict[int, tuple[int, int]] = {}  # fragment -> (base, newest version)
        self._writing: dict[int, int] = {}  # fragment -> version of the base that is being written
        # Fragment -> (round, decision), and until when it is waited for.
        self._ahead: dict[int, tuple[tuple[int, int], float]] = {}
        self._lies_ahead: dict[
            int, int
        ] = {}  # fragment -> version whose results lie on the disk before it is made
        self._again_at = float("-inf")
        self._told = ""

    @property
    def version(self) -> int:
        """Of the least advanced fragment; NO_VERSION: nothing that could be used lies there.  A version whose results
        lay there before its commit can be had from the disk before the disk has said that it is made."""
        held = [(of, version + 1) for of, (_, version) in self._chains.items()]
        return min((after - (self._lies_ahead.get(of) != after) for of, after in held), default=NO_VERSION)

    def parting(self, version: int, stages: Sequence[int]) -> list[Effect]:
        """`version`: of what nobody else holds; 0 or less: that is no loss."""
        if version <= 0:
            return []
        of = f"stage {', '.join(map(str, stages))} of the run" if stages else "the run"
        held = f"You hold the last copy of {of} (version {version})."
        if self.version >= version:
            return [Note(f"{held} It is kept in {self._place}; run the same command to continue.")]
        if self.version >= 0:
            return [Note(f"{held} Version {self.version} of it is kept in {self._place}.")]
        why = 'keep = "off"' if not self._place else self._told or "its first version was still being written"
        return [Note(f"{held} It is not kept on this disk: {why}.")]

    def begin_era(self, era: int) -> None:
        self._era = era
        self._chains, self._writing, self._ahead, self._lies_ahead = {}, {}, {}, {}

    def due(self, replicas: Sequence[Replica], now: float) -> list[Effect]:
        """Asked at every tick, before anything newer is applied."""
        effects: list[Effect] = []
        if not self._place or now < self._again_at:
            return effects
        for replica in replicas:
            number, version = replica.fragment.number, replica.held.version
            base, _ = self._chains.get(number, (NO_VERSION, NO_VERSION))
            is_due = base == NO_VERSION or version - base >= self._every
            if replica.held.serves and is_due and number not in self._writing:
                self._writing[number] = version
                effects.append(KeepBase(self._era, number, version, replica.held.digest))
        return effects

    def hold_back(self, flight: MemberRound, now: float) -> tuple[bool, list[Effect]]:
        """Whether the coordinator shall not hear yet what I hold of this round: nobody else holds it."""
        (_, _, got, of), decision = flight.counts, flight.deciding.newest
        alone = flight.plan.members == (self._me,) and got == of
        if not self._place or not alone or decision is None or now < self._again_at:
            return False, []
        number, key = flight.plan.fragment, (flight.plan.round_no, decision.decision_no)
        asked, until = self._ahead.get(number, ((0, 0), 0.0))
        if asked == key:
            return now < until, []
        self._ahead[number] = (key, now + PATIENCE_S)
        payloads = {
            flight.first_chunk + index: piece.payload for index, piece in flight.pieces.results.items()
        }
        return True, [KeepAhead(self._era, number, flight.plan.version + 1, *key, payloads)]

    def on_kept(self, word: KeptWord, now: float) -> list[Effect]:
        match word:
            case AheadKept(fragment, version, round_no, decision_no):
                if fragment in self._ahead and self._ahead[fragment][0] == (round_no, decision_no):
                    self._ahead[fragment] = ((round_no, decision_no), now)
                    self._lies_ahead[fragment] = version
            case Reached(era=era) if era == self._era:
                self._on_reached(word)
            case KeepingFailed(problem=problem):
                self._chains, self._writing, self._lies_ahead = {}, {}, {}
                self._again_at = now + TRY_AGAIN_S
                news, self._told = problem != self._told, problem
                told = f"the newest version is not kept on this disk: {problem}; training goes on"
                return [Note(told)] if news else []
        return []

    def _on_reached(self, word: Reached) -> None:
        if word.base_of == self._writing.get(word.fragment):
            del self._writing[word.fragment]
        if word.version < word.made:  # some results are missing: only a new base leads there
            self._chains.pop(word.fragment, None)
        else:
            self._chains[word.fragment] = (word.base, word.version)
