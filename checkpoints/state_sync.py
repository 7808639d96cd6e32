"""Catching up: bring every chunk of outer state to the run's version, from whoever has the bytes.  Pure.

    state of a chunk = the chunk at any version, verified against that version's digest
                     + the committed results since, each verified against its commit

One machine serves a peer that joins with nothing, one that missed a commit, and one that has just taken part
(its results are at hand, so nothing is fetched).  Owned by the peer machine; returns effects.  It believes
nobody: a digest comes from the coordinator, everything else must hash to it (P4).

Each fragment has a catch-up of its own, and in it each chunk moves on its own.  A donor that moves on to a newer
version while it serves is no trouble: its chunks come at the newer version, and the manifest of that version is
fetched too.

Others may catch up at the same time (swarm.py).  What one of them has is asked of it and of no donor, the rarest
pieces first: so a donor, whose line may be the narrowest of all, gives each piece about once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set

from farflung.checkpoints.sources import GAIN, Most, RequestBudget, RequestInFlight, Sources
from farflung.checkpoints.swarm import NOTHING, Holding, Swarm
from farflung.checkpoints.vouched import SignedDigests
from farflung.collectives.round.effects import DataEffect, Install, Roll, Seal, SendFrame
from farflung.protocol.digests import is_piece, mask_of, root_of, split_hashes
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, Payload
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Commit
from farflung.protocol.verdicts import Verdict

ASKED_OF_ONE_DONOR = 4  # pieces in flight per donor: chunks in flight bound the memory of both ends
# Results in flight per donor: as many as pieces at least, and more where they are small.
RESULTS_IN_FLIGHT_BYTES, RESULTS_OF_ONE_DONOR = 1 << 20, 64
# Results of a whole state are applied when all of a version are here: of more versions they are asked for if they are
# no more than this.
WAITING_RESULTS_BYTES = 64 << 20
UNVOUCHED_KEPT = 12  # pieces of state that came before the list of their hashes
CAME_KEPT = 32  # pieces that are true, and wait until the state may be changed
NO_VERSION = -1
UNTRIED_PATIENCE = 10  # times the patience with a donor, for what donors owe a fellow, before one was timed

Key = tuple[FrameKind, int, int]  # what is asked for: (kind of want, version, chunk)


class StateSync:
    def __init__(
        self, fragment: Fragment, run_tag: bytes, retry_s: float, parts: int, asker: str = ""
    ) -> None:
        """`parts`: of a chunk's state."""
        self.fragment = fragment
        self._parts = parts
        self.versions = [NO_VERSION] * fragment.count  # by index within the fragment
        self.target = NO_VERSION
        self.digests: dict[int, bytes] = {}
        self.commits: dict[int, Commit] = {}
        self._of_use: set[int] = set()  # versions whose pieces can be checked, and rolled on to the target
        self.donors: tuple[str, ...] = ()
        self.sealed = NO_VERSION  # the version whose Seal was asked for last
        self._run_tag = run_tag
        self._retry_s = retry_s
        self._vouched = SignedDigests()
        self._came: dict[int, Install] = {}  # chunk -> its piece, true, and not in the state yet
        self._results: dict[tuple[int, int], Payload] = {}  # (version, chunk) -> verified, not rolled yet
        self._largest_result_bytes = 0  # that came; 0: none yet
        self._asked: dict[Key, RequestInFlight] = {}
        self._shunned: dict[Key, set[str]] = {}  # donors that did not have it, until all have been tried
        self._pause_until: dict[Key, float] = {}  # all were tried: not again before
        self._stuck: set[int] = set()  # chunks whose next result nobody has: their state is fetched instead
        self._now = 0.0
        self._of = Sources(retry_s, asker)
        self.fellows = Swarm(fragment, run_tag, retry_s, asker)
        self._unvouched: dict[int, tuple[str, Frame]] = {}  # chunk -> who sent it, until the manifest is here
        self._stalled: set[str] = set()  # owe pieces, and gave none for longer than donors take
        self._dropped: list[str] = []  # donors that are not asked any more, not told yet

    # ---- what the peer machine tells it -----------------------------------------------------------------

    def reset(self) -> None:
        """What I hold is not the run's state: start from nothing."""
        self.versions, self.sealed = [NO_VERSION] * len(self.versions), NO_VERSION
        self._vouched.clear()
        self._results.clear()
        self._ask_again()
        self._stuck.clear()
        self.set_aside()
        self.fellows.forgive()

    def set_aside(self) -> None:
        """What was asked for is waited for no more, and what has come is not used: what is still missing later is asked
        for again."""
        self._came.clear()
        self._asked.clear()
        self._unvouched.clear()

    def founded(self, version: int = 0) -> list[DataEffect]:
        """The trainer wrote the initial state, or a checkpoint was read: everything is at this version."""
        self.reset()  # whatever was fetched from an earlier founder is not this state
        self.versions = [version] * len(self.versions)
        self.target, self.sealed = max(self.target, version), version
        return [Seal(version, self.fragment.number)]

    def go_back(self, version: int, keep: bool) -> None:
        """The run is at an older version again.  `keep`: all that I hold is of that version."""
        self.reset()
        self.commits.clear()
        self._of.forgive()  # what was true of the old era may have come since, and looked like a lie
        self.digests, self.donors, self.target = {}, (), version
        if keep:
            self.versions, self.sealed = [version] * len(self.versions), version

    def on_commit(self, commit: Commit) -> None:
        self.commits[commit.version] = commit
        self.target = max(self.target, commit.version)

    def on_run_state(
        self,
        version: int,
        digests: dict[int, bytes],
        donors: tuple[str, ...],
        keep: int,
        fellows: tuple[str, ...] = (),
    ) -> None:
        """The coordinator's word: where the run is, what the versions' digests are, whom to ask, who else asks."""
        self._of.welcome(self.fellows.are(name for name in fellows if name not in donors))
        for base in self._vouched.refuted(digests):
            self._unlearn(base)
        if digests.keys() - self.digests.keys():
            # Who was just leaving a version had no piece of it to give, and has one of the next.
            self._ask_again((Kind.WANT_STATE,))
        self.target = max(self.target, version)
        self.digests = digests
        self._of_use = {known for known in digests if known + keep >= self.target}
        if donors != self.donors:
            self.donors = donors
            self._ask_again()
        # With nobody to ask, what is held may yet become the run's newest state.
        for chunk, held in enumerate(self.versions if donors else ()):
            if held != NO_VERSION and held + keep < self.target:
                # The results that it would need are kept by nobody any more.
                self.versions[chunk] = NO_VERSION
                self.sealed = NO_VERSION
        if self.done:
            self._vouched.clear()
            self._of.forgive()
        for version in [v for v in self.commits if v <= self.lowest]:
            del self.commits[version]

    def came_back(self) -> None:
        """To the others, who may have closed their lines to me: what was asked for may never come."""
        self._asked.clear()
        self._of.welcome([*self.donors, *self.fellows.names])
        self._ask_again()

    def _ask_again(self, kinds: Collection[Kind] = tuple(Kind)) -> None:
        """Of all donors, at once: why they did not give it is over."""
        for key in [key for key in {*self._shunned, *self._pause_until} if key[0] in kinds]:
            self._shunned.pop(key, None)
            self._pause_until.pop(key, None)

    def _unlearn(self, base: int) -> None:
        """What was taken for the state of this version is not it: version 0 was founded anew, or liars had settled it.
        Chunks that came as it go; what I hold from elsewhere is as good as it was."""
        self._unvouched.clear()
        for index in self._vouched.unlearn(base):
            self.versions[index] = NO_VERSION
            self.sealed = NO_VERSION

    def recalled(self, held: Mapping[int, tuple[int, bytes]]) -> None:
        """Chunks that were fetched before a crash stand in the state again: chunk -> (version, its digest or empty).

        Taken where that version can still be rolled forward; what is too old or void is fetched anew.
        """
        for chunk, (version, digest) in held.items():
            known = self.digests.get(version, b"")
            if chunk in self.fragment.chunks and version <= self.target:
                if not digest or not known or digest == known:
                    self.versions[self.fragment.index(chunk)] = version
                    if digest:
                        self._vouched.recall(self.fragment.index(chunk), version, digest)

    def offer(self, version: int, chunk: int, payload: Payload, payload_hash: bytes) -> bool:
        """A result at hand, with the hash that it was found to have.  Taken if it is what the commit says."""
        commit, index = self.commits.get(version), self.fragment.index(chunk)
        if commit is None or payload_hash != commit.hashes[32 * index : 32 * index + 32]:
            return False
        if self.versions[index] < version:
            self._results[version, chunk] = payload
        return True

    @property
    def lowest(self) -> int:
        return min(self.versions)

    @property
    def needs_commits(self) -> tuple[int, ...]:
        held = [v for v in self.versions if v != NO_VERSION]
        if not held:
            return ()
        first = min(held) + 1
        return tuple(v for v in range(first, min(first + 8, self.target + 1)) if v not in self.commits)[:8]

    @property
    def done(self) -> bool:
        return self.target != NO_VERSION and self.sealed == self.target

    # ---- moving on ---------------------------------------------------------------------------------------

    def roll(self) -> list[DataEffect]:
        """Put the pieces that came into the state, apply every result that is at hand, chunk by chunk; seal when all
        chunks have arrived.  Nothing else changes the state: who must not have it changed does not ask for this."""
        effects: list[DataEffect] = []
        came, self._came = self._came, {}
        for chunk, piece in came.items():
            index = self.fragment.index(chunk)
            if self._lacks(index) and self._vouched.list_of(piece.version):  # or it was refuted since
                self._stuck.discard(chunk)
                self.versions[index] = self._vouched.came_at[index] = piece.version
                effects.append(piece)
        if not self._results and self.sealed != NO_VERSION and self.sealed == self.versions[0]:
            return effects  # nothing new: this is asked after every event
        next_one = self.sealed + 1
        if self._is_whole and any((next_one, chunk) not in self._results for chunk in self.fragment.chunks):
            return effects  # those that lack may be nowhere any more, and this version the newest that anybody shows
        for chunk, version in zip(self.fragment.chunks, self.versions.copy(), strict=True):
            while version != NO_VERSION and (version + 1, chunk) in self._results:
                commit = self.commits.get(version + 1)
                if commit is None:
                    break  # by what the result is multiplied is written there
                version += 1
                self._stuck.discard(chunk)  # somebody had it after all
                result = self._results.pop((version, chunk))
                effects.append(Roll(chunk, version, result, commit.factor))
            self.versions[self.fragment.index(chunk)] = version
        reached = self.lowest
        # Seal only a version that all chunks share, and only once.
        if reached != NO_VERSION and reached > self.sealed and max(self.versions) == reached:
            self.sealed = reached
            effects.append(Seal(reached, self.fragment.number))
        return effects

    @property
    def _is_whole(self) -> bool:
        return self.sealed != NO_VERSION and all(version == self.sealed for version in self.versions)

    def ask(self, now: float, coming: Set[tuple[int, int]] = frozenset()) -> list[DataEffect]:
        """Requests for what is missing, spread over donors and fellows, at most a few in flight at each of them.

        `coming`: (version, chunk) of results that are not missed yet.
        """
        self._now = now
        sources = tuple(dict.fromkeys((*self.donors, *self.fellows.names)))
        late, forgetful = (of(self._asked.values(), now) for of in (self._of.late, self._of.forgetful))
        most = self._most
        for key, asked in list(self._asked.items()):
            lost = self._of.never_heard_of(asked, most) or (asked.heavy and asked.donor in forgetful)
            if lost or asked.donor in late or asked.donor not in sources:
                self._refused(key)
        if late:
            self._all_may_be_asked_again(list(self._shunned))
        # A piece whose list nobody will bring any more would never be asked for again.
        may_wait = {c for c, kept in self._unvouched.items() if self._may_be_listed(kept[1].header.version)}
        self._unvouched = {chunk: self._unvouched[chunk] for chunk in may_wait}
        self._stalled = self._of.stalled(self.donors, self._asked.values(), now)
        trusted = self._of.trusted(self.donors)
        room = RequestBudget(self._of, sources, self._asked.values(), most)
        effects: list[DataEffect] = [*self.fellows.questions(now)] if self._lacking else []
        for key in self._missing(coming):
            kind, version, chunk = key
            heavy = kind == Kind.WANT_STATE
            free = [d for d in self._sources_of(key, trusted, room) if d not in self._shunned.get(key, ())]
            if not free:
                continue
            # The quickest first.  While there is enough to ask for, all are kept busy anyway.
            donor = min(
                free,
                key=lambda d: (self._of.is_silent(d), room.load[d], self._of.took_s(d), self._of.place(d)),
            )
            self._asked[key] = self._of.asked(donor, heavy, now, is_result=kind == Kind.WANT_LOGGED)
            room.take(self._asked[key])
            effects.append(SendFrame(donor, Frame(Header(kind, self._run_tag, version=version, chunk=chunk))))
        self._take_from_the_slow([d for d in sources if not room.load[d] and self._answers(d, trusted)])
        return effects

    @property
    def _most(self) -> Most:
        # Before the first one came they may be large.
        results = RESULTS_IN_FLIGHT_BYTES // (self._largest_result_bytes or RESULTS_IN_FLIGHT_BYTES)
        return Most(ASKED_OF_ONE_DONOR, min(max(results, ASKED_OF_ONE_DONOR), RESULTS_OF_ONE_DONOR))

    def _answers(self, source: str, trusted: Collection[str]) -> bool:
        return not self._of.is_silent(source) and (source not in self.donors or source in trusted)

    def _sources_of(self, key: Key, trusted: Collection[str], room: RequestBudget) -> list[str]:
        """Of whom this may be asked now: of no donor what a fellow has, nor what one is about to have."""
        kind, version, chunk = key
        heavy = kind == Kind.WANT_STATE
        donors = [donor for donor in trusted if room.has(donor, heavy)]
        if kind == Kind.WANT_MANIFEST:
            listing = [f for f in self.fellows.at(version) if room.has(f, heavy) and self._of.is_good(f)]
            return listing if version != self.target else donors + listing
        if not heavy:
            return donors
        having = self._having(chunk)
        if not having:
            index = self.fragment.index(chunk)
            return [] if self.fellows.is_coming(index, self._now, self._patience_s()) else donors
        able = [fellow for fellow in having if room.has(fellow, heavy)]
        return able or [donor for donor in donors if self._is_no_slower(donor, having)]

    def _having(self, chunk: int) -> list[str]:
        """Fellows that have this piece and answer; which of its versions it is can be checked."""
        shunned = self._shunned.get((Kind.WANT_STATE, 0, chunk), ())
        versions = {*self._vouched.versions, self.target} & self._of_use
        having = self.fellows.having(self.fragment.index(chunk), versions)
        out = {*shunned, *self._stalled}  # who puts off and gives nothing takes no donor's place
        return [f for f in having if f not in out and self._of.is_good(f) and not self._of.is_silent(f)]

    def _is_no_slower(self, donor: str, fellows: list[str]) -> bool:
        """Than the quickest of these, all of which are busy."""
        paces = [pace_s for fellow in fellows if (pace_s := self._of.piece_s(fellow)) is not None]
        mine_s = self._of.piece_s(donor)
        if mine_s is None:
            return self._of.is_worth_a_try(donor, fellows, self._asked.values(), self._now)
        return bool(paces) and mine_s <= GAIN * min(paces)

    def _patience_s(self) -> float:
        """So long a donor may owe a fellow a piece: they wait in the same line as I do."""
        known = any(self._of.took_s(donor, heavy=True) for donor in self.donors)
        take_s = self._of.pieces_take_s(self.donors, self._asked.values(), self._now)
        return self._retry_s * (1 if known else UNTRIED_PATIENCE) + 2 * take_s

    @property
    def _is_spreading(self) -> bool:
        """Among fellows many are idle until more has come to them: it is the end when all has been asked for."""
        asked = sum(asked.heavy for asked in self._asked.values()) + len(self._unvouched)
        return bool(self.fellows.names) and asked < self._lacking.bit_count()

    @property
    def _lacking(self) -> int:
        """Pieces of state that are not here: a mask by index."""
        return mask_of(index for index, version in enumerate(self.versions) if version == NO_VERSION)

    def _take_from_the_slow(self, idle: list[str]) -> None:
        """At the end somebody that answers has nothing left to do: it is asked for what waits at a silent donor, or
        at one that takes much longer.  Before it only for what somebody owes that gives nothing."""
        if not idle:
            return
        is_early = self._is_spreading
        waiting = Counter(asked.donor for asked in self._asked.values() if asked.heavy)
        for key, asked in reversed(list(self._asked.items())):  # what was asked last comes last
            waiting[asked.donor] -= asked.heavy
            if is_early and asked.donor not in self._stalled:
                continue
            before = waiting[asked.donor] if asked.heavy else 0
            having = self._having(key[2]) if asked.heavy else []
            able = [
                d for d in idle if d not in self._shunned.get(key, ()) and (d in self.donors or d in having)
            ]
            quick = [d for d in able if self._of.is_quicker(d, asked, before, self._now)]
            if quick or self._of.is_silent(asked.donor):
                self._refused(key)
                idle = [d for d in idle if d not in quick[:1]]

    def take_dropped(self) -> list[str]:
        """Donors that gave wrong bytes too often, each told once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _all_may_be_asked_again(self, keys: Iterable[Key]) -> None:
        """Of these, what every donor that answers was asked for in vain, after a pause.

        A donor that fell silent was tried."""
        trusted = self._of.trusted(self.donors)
        answering = {donor for donor in trusted if not self._of.is_silent(donor)} or set(trusted)
        for key in keys:
            if self._shunned.get(key, set()) >= answering:
                self._shunned.pop(key)
                self._pause_until[key] = self._now + self._retry_s
                if key[0] == Kind.WANT_LOGGED:
                    # The donors themselves came later: none kept this result, but they hold what it led to.
                    self._stuck.add(key[2])

    def _lacks(self, index: int) -> bool:
        """A piece of state: it has none, or one that no result leads on from."""
        version = self.versions[index]
        return version == NO_VERSION or (self.fragment.first + index in self._stuck and version < self.target)

    def _missing(self, coming: Set[tuple[int, int]]) -> list[Key]:
        keys: list[Key] = []
        held = list(zip(self.fragment.chunks, self.versions, strict=True))
        whole = [c for index, c in enumerate(self.fragment.chunks) if self._lacks(index)]
        if whole and self.target in self.digests:
            told = self.fellows.versions(self._lacking) & self._of_use
            keys += [
                (Kind.WANT_MANIFEST, version, self.fragment.first)
                for version in sorted({self.target, *told} - self._vouched.versions, reverse=True)
            ]
            lacking = [c for c in whole if c not in self._unvouched and c not in self._came]
            keys += [(Kind.WANT_STATE, 0, chunk) for chunk in self.fellows.rarest_first(lacking)]
        last = self.sealed + self._versions_waiting if self._is_whole else self.target
        results = [
            (v, chunk)
            for chunk, version in held
            if version != NO_VERSION
            for v in range(version + 1, min(last, self.target) + 1)
            if v in self.commits and (v, chunk) not in self._results and (v, chunk) not in coming
        ]
        # The oldest first: they are forgotten first, and with them the chunks that need them.
        keys += [(Kind.WANT_LOGGED, v, chunk) for v, chunk in sorted(results)]
        return [
            key for key in keys if key not in self._asked and self._pause_until.get(key, 0.0) <= self._now
        ]

    @property
    def _versions_waiting(self) -> int:
        """Of so many versions results may be here before those of the first are all here."""
        # Before the first one came they may be large.
        largest_bytes = self._largest_result_bytes or WAITING_RESULTS_BYTES
        return max(1, WAITING_RESULTS_BYTES // (self.fragment.count * largest_bytes))

    # ---- what others may have of me before I am whole --------------------------------------------------------

    def given_at(self, chunk: int) -> int:
        """The version at which this piece came and was checked, if it is still that; else NO_VERSION.

        What was rolled on since is proven by nothing before all of it is whole."""
        index = self.fragment.index(chunk)
        version = self._vouched.given_at(index, self.versions[index], self.digests)
        return NO_VERSION if version is None else version

    def hash_of(self, chunk: int) -> bytes:
        """By which a piece that may be given was checked."""
        return self._vouched.holds(self.given_at(chunk), self.digests)[self.fragment.index(chunk)]

    def hashes_at(self, version: int) -> bytes:
        """The list by which my pieces of this version were checked; empty: I have none that still holds."""
        return b"".join(self._vouched.holds(version, self.digests))

    def arrived(self) -> Holding:
        """Pieces of one version, of that which most are at."""
        at = [self.given_at(chunk) for chunk in self.fragment.chunks]
        most = Counter(held for held in at if held != NO_VERSION).most_common(1)
        version = most[0][0] if most else NOTHING
        asked = [key[2] for key, asked in self._asked.items() if asked.heavy and asked.donor in self.donors]
        owed = {self.fragment.index(chunk) for chunk in (*asked, *self._unvouched)}
        has = mask_of(index for index, held in enumerate(at) if held == version != NO_VERSION)
        return Holding(self.target if version == NOTHING and owed else version, has, mask_of(owed))

    # ---- answers of donors -------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame) -> Verdict:
        """MANIFEST, STATE, LOGGED or MISSING; the payload already matched the hash in its own header."""
        header = frame.header
        if header.chunk not in self.fragment.chunks:
            return Verdict.MALFORMED
        waited_for = dict(self._asked)
        match header.kind:
            case Kind.MANIFEST:
                verdict = self._on_manifest(sender, header, frame.payload)
                if verdict == Verdict.ACCEPTED:
                    self._take_unvouched(header.version)
            case Kind.STATE:
                verdict = self._on_state(sender, frame)
            case Kind.LOGGED:
                verdict = self._on_logged(sender, header, frame.payload)
            case Kind.HAVE:
                return self.fellows.on_have(sender, frame, self._now)
            case Kind.LATER:
                for key in self._meant_by(sender, header):
                    self._of.put_off(self._asked[key], self._now)
                return Verdict.ACCEPTED
            case _:
                self._on_missing(sender, header)
                verdict = Verdict.ACCEPTED
        if verdict == Verdict.BAD_HASH:
            self._strike(sender)
            return verdict
        for key in waited_for.keys() - self._asked.keys():
            self._of.answered(sender, waited_for[key], self._now, header.kind == Kind.STATE)
        return verdict

    def on_spoiled(self, sender: str, header: Header) -> None:
        """An answer of a donor arrived damaged: somebody else is asked, and this one for less and less."""
        wants: Mapping[FrameKind, Kind] = {
            Kind.STATE: Kind.WANT_STATE,
            Kind.LOGGED: Kind.WANT_LOGGED,
            Kind.MANIFEST: Kind.WANT_MANIFEST,
        }
        kind = wants[header.kind]
        self._strike(sender)
        self._refused_by(sender, (kind, 0 if kind == Kind.WANT_STATE else header.version, header.chunk))

    def _strike(self, donor: str) -> None:
        if self._of.strike(donor):
            self._dropped.append(donor)
            self._shunned.clear()  # with one donor less, those that are left are all asked again

    def _on_manifest(self, sender: str, header: Header, payload: Payload) -> Verdict:
        """Of the version that was asked for, or of a newer one: a donor may have no other any more."""
        closed = [
            key
            for key, asked in self._asked.items()
            if key[0] == Kind.WANT_MANIFEST and key[1] <= header.version and asked.donor == sender
        ]
        digest = self.digests.get(header.version)
        hashes = split_hashes(bytes(payload)) if digest is not None else []
        if digest is None or len(hashes) != len(self.versions) or root_of(hashes) != digest:
            for key in closed:
                self._refused(key)
            return Verdict.STALE if digest is None else Verdict.BAD_HASH
        self._asked.pop((Kind.WANT_MANIFEST, header.version, self.fragment.first), None)
        for key in closed:
            self._refused(key)  # of a newer version alone, so that it does not have the older one
        self._vouched.take(header.version, hashes, digest)
        return Verdict.ACCEPTED

    def _may_be_listed(self, version: int) -> bool:
        """The list of its hashes may come: it is asked for, or will be."""
        wanted = (Kind.WANT_MANIFEST, version, self.fragment.first)
        return version in self.digests and (version == self.target or wanted in self._asked)

    def _take_unvouched(self, version: int) -> None:
        """What came before the manifest that has just arrived."""
        waiting = {
            chunk: kept for chunk, kept in self._unvouched.items() if kept[1].header.version == version
        }
        for chunk, (sender, frame) in waiting.items():
            del self._unvouched[chunk]
            if self._on_state(sender, frame) == Verdict.BAD_HASH:
                self._strike(sender)

    def _on_state(self, sender: str, frame: Frame) -> Verdict:
        header, payload = frame.header, frame.payload
        key, index = (Kind.WANT_STATE, 0, header.chunk), self.fragment.index(header.chunk)
        manifest = self._vouched.list_of(header.version)
        if manifest is None:
            asked, room = self._asked.get(key), len(self._unvouched) < UNVOUCHED_KEPT
            if asked is not None and asked.donor == sender and room and self._may_be_listed(header.version):
                self._asked.pop(key)
                self._unvouched[header.chunk] = (sender, frame)
                return Verdict.ACCEPTED
            # Its version is not vouched for (not yet, or not any more): another donor, or this one later.
            self._refused_by(sender, key)
            return Verdict.STALE
        if not is_piece(manifest[index], payload, header.hash, self._parts):
            self._refused_by(sender, key)
            return Verdict.BAD_HASH
        self._asked.pop(key, None)  # a late answer is as good as one in time
        if self.versions[index] >= header.version or header.chunk in self._came:
            return Verdict.DUPLICATE
        # Or a true piece of a newer version could tear a whole state, and many could fill the memory.
        if not self._lacks(index) or len(self._came) >= CAME_KEPT:
            return Verdict.STALE
        self.fellows.came(index, sender)
        self._came[header.chunk] = Install(header.chunk, header.version, payload)
        return Verdict.ACCEPTED

    def _on_logged(self, sender: str, header: Header, payload: Payload) -> Verdict:
        key = (Kind.WANT_LOGGED, header.version, header.chunk)
        if self.versions[self.fragment.index(header.chunk)] >= header.version:
            return Verdict.STALE
        if header.version not in self.commits:
            return Verdict.STALE  # the run went back from it since it was asked for, so nothing can check it
        if not self.offer(header.version, header.chunk, payload, header.hash):
            self._refused_by(sender, key)
            return Verdict.BAD_HASH
        self._asked.pop(key, None)
        self._largest_result_bytes = max(self._largest_result_bytes, len(payload))
        return Verdict.ACCEPTED

    def _on_missing(self, sender: str, header: Header) -> None:
        for key in self._meant_by(sender, header):
            self.fellows.denied(sender)
            self._refused(key)

    def _meant_by(self, sender: str, header: Header) -> list[Key]:
        """The question that MISSING or LATER names, if it was asked of that donor and is open."""
        named = (header.decision_no, header.version, header.chunk)
        return [
            key
            for key, asked in self._asked.items()
            if asked.donor == sender and named == (int(key[0]), key[1], key[2])
        ]

    def _refused_by(self, sender: str, key: Key) -> None:
        """Only the donor that was asked can spoil its own answer."""
        asked = self._asked.get(key)
        if asked is not None and asked.donor == sender:
            self._refused(key)

    def _refused(self, key: Key) -> None:
        """This donor did not give it: another is asked; when all were tried, all are asked again after a pause."""
        asked = self._asked.pop(key, None)
        if asked is None:
            return
        self._shunned.setdefault(key, set()).add(asked.donor)
        self._all_may_be_asked_again([key])
