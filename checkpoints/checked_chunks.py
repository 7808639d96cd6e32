"""What is here of a fragment's state, chunk by chunk, each checked, and what the rest is checked by.  Pure.

    state of a chunk = the chunk at any version, verified against that version's digest
                     + the committed results since, each verified against its commit

Part of a catch-up (state_sync.py).  It believes nobody: a digest comes from the coordinator, everything else must hash
to it (P4).  Each chunk moves on its own.  Must not know who brought what, nor of whom the rest is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from farflung.collectives.round.effects import DataEffect, Install, Roll, Seal
from farflung.protocol.digests import is_piece, mask_of, root_of, split_hashes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Header, Payload
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Commit

# Results of a whole state are applied when all of a version are here: of more versions they are asked for if they are
# no more than this.
WAITING_RESULTS_BYTES = 64 << 20
CAME_KEPT = 32  # pieces that are true, and wait until the state may be changed
NO_VERSION = -1


class SignedDigests:
    """Lists of hashes that lead to digests of the run, and which pieces of state stand as they were checked by them."""

    def __init__(self) -> None:
        self.lists: dict[int, list[bytes]] = {}  # by version
        self._roots: dict[int, bytes] = {}  # version -> digest under which pieces of it were taken
        self.came_at: dict[int, int] = {}  # index of a piece -> the version that it was taken at

    def take(self, version: int, hashes: list[bytes], digest: bytes) -> None:
        self.lists[version], self._roots[version] = hashes, digest

    def recall(self, index: int, version: int, digest: bytes) -> None:
        """It was checked in a former life, by a list that is here no more."""
        self._roots[version], self.came_at[index] = digest, version

    def refuted(self, digests: Mapping[int, bytes]) -> list[int]:
        """Versions that are said to be something else by now."""
        return [version for version, root in self._roots.items() if digests.get(version, root) != root]

    def unlearn(self, version: int) -> list[int]:
        """Its list counts no more.  Returns the pieces that came by it."""
        del self._roots[version]
        self.lists.pop(version, None)
        void = [index for index, at in self.came_at.items() if at == version]
        for index in void:
            del self.came_at[index]
        return void

    def holds(self, version: int, digests: Mapping[int, bytes]) -> list[bytes]:
        """The list of this version, if it still leads to the run's digest; else nothing."""
        root = self._roots.get(version)
        return self.lists.get(version, []) if root is not None and digests.get(version) == root else []


class CheckedChunks:
    def __init__(self, fragment: Fragment, parts: int) -> None:
        """`parts`: of a chunk's state."""
        self.versions = [NO_VERSION] * fragment.count  # by index within the fragment
        self.target = NO_VERSION
        self.sealed = NO_VERSION  # the version whose Seal was asked for last
        self.digests: dict[int, bytes] = {}
        self.commits: dict[int, Commit] = {}
        self.of_use: Set[int] = set()  # versions whose pieces can be checked, and rolled on to the target
        self.stuck: set[int] = set()  # chunks whose next result nobody has: their state is fetched instead
        self.largest_result_bytes = 0  # that came; 0: none yet
        self._fragment, self._parts = fragment, parts
        self.vouched = SignedDigests()
        self.came: dict[int, Install] = {}  # chunk -> its piece, true, and not in the state yet
        self._results: dict[tuple[int, int], Payload] = {}  # (version, chunk) -> verified, not rolled yet

    # ---- what the run says ---------------------------------------------------------------------------------

    def on_commit(self, commit: Commit) -> None:
        self.commits[commit.version] = commit
        self.target = max(self.target, commit.version)

    def on_run_state(self, version: int, digests: dict[int, bytes], keep: int, has_donors: bool) -> bool:
        """Where the run is, and what the versions' digests are.  True: something was taken for the state of a version
        that it is not."""
        refuted = self.vouched.refuted(digests)
        for base in refuted:  # version 0 was founded anew, or liars had settled it
            # Chunks that came as it go; what is held from elsewhere is as good as it was.
            for index in self.vouched.unlearn(base):
                self.versions[index] = self.sealed = NO_VERSION
        self.target = max(self.target, version)
        self.digests = digests
        self.of_use = {known for known in digests if known + keep >= self.target}
        # With nobody to ask, what is held may yet become the run's newest state.
        for chunk, held in enumerate(self.versions if has_donors else ()):
            if held != NO_VERSION and held + keep < self.target:
                # The results that it would need are kept by nobody any more.
                self.versions[chunk] = self.sealed = NO_VERSION
        if self.done:
            self.vouched = SignedDigests()
        for version in [v for v in self.commits if v <= self.lowest]:
            del self.commits[version]
        return bool(refuted)

    def reset(self) -> None:
        """What is held is not the run's state: start from nothing."""
        self.versions, self.sealed = [NO_VERSION] * len(self.versions), NO_VERSION
        self.vouched = SignedDigests()
        self._results.clear()
        self.stuck.clear()

    def founded(self, version: int) -> list[DataEffect]:
        self.versions = [version] * len(self.versions)
        self.target, self.sealed = max(self.target, version), version
        return [Seal(version, self._fragment.number)]

    def go_back(self, version: int, keep: bool) -> None:
        self.commits.clear()
        self.digests, self.target = {}, version
        if keep:
            self.versions, self.sealed = [version] * len(self.versions), version

    def recalled(self, held: Mapping[int, tuple[int, bytes]]) -> None:
        """Chunks that were fetched before a crash stand in the state again: chunk -> (version, its digest or empty).

        Taken where that version can still be rolled forward; what is too old or void is fetched anew.
        """
        for chunk, (version, digest) in held.items():
            known = self.digests.get(version, b"")
            if chunk in self._fragment.chunks and version <= self.target:
                if not digest or not known or digest == known:
                    self.versions[self._fragment.index(chunk)] = version
                    if digest:
                        self.vouched.recall(self._fragment.index(chunk), version, digest)

    # ---- what comes ------------------------------------------------------------------------------------------

    def take_list(self, version: int, payload: Payload) -> Verdict:
        """The hashes of all chunks at this version."""
        digest = self.digests.get(version)
        hashes = split_hashes(bytes(payload)) if digest is not None else []
        if digest is None or len(hashes) != len(self.versions) or root_of(hashes) != digest:
            return Verdict.STALE if digest is None else Verdict.BAD_HASH
        self.vouched.take(version, hashes, digest)
        return Verdict.ACCEPTED

    def take_piece(self, header: Header, payload: Payload) -> Verdict:
        """A chunk at a version whose list is here."""
        hashes, index = self.vouched.lists.get(header.version), self._fragment.index(header.chunk)
        if hashes is None or not is_piece(hashes[index], payload, header.hash, self._parts):
            return Verdict.BAD_HASH
        if self.versions[index] >= header.version or header.chunk in self.came:
            return Verdict.DUPLICATE
        # Or a true piece of a newer version could tear a whole state, and many could fill the memory.
        if not self.lacks(index) or len(self.came) >= CAME_KEPT:
            return Verdict.STALE
        self.came[header.chunk] = Install(header.chunk, header.version, payload)
        return Verdict.ACCEPTED

    def take_result(self, header: Header, payload: Payload) -> Verdict:
        if self.versions[self._fragment.index(header.chunk)] >= header.version:
            return Verdict.STALE
        if header.version not in self.commits:
            return Verdict.STALE  # the run went back from it since it was asked for, so nothing can check it
        if not self.offer(header.version, header.chunk, payload, header.hash):
            return Verdict.BAD_HASH
        self.largest_result_bytes = max(self.largest_result_bytes, len(payload))
        return Verdict.ACCEPTED

    def offer(self, version: int, chunk: int, payload: Payload, payload_hash: bytes) -> bool:
        """A result at hand, with the hash that it was found to have.  Taken if it is what the commit says."""
        commit, index = self.commits.get(version), self._fragment.index(chunk)
        if commit is None or payload_hash != commit.hashes[32 * index : 32 * index + 32]:
            return False
        if self.versions[index] < version:
            self._results[version, chunk] = payload
        return True

    def roll(self) -> list[DataEffect]:
        """Put the pieces that came into the state, apply every result that is at hand, chunk by chunk; seal when all
        chunks have arrived.  Nothing else changes the state: who must not have it changed does not ask for this."""
        effects: list[DataEffect] = []
        came, self.came = self.came, {}
        for chunk, piece in came.items():
            index = self._fragment.index(chunk)
            if self.lacks(index) and self.vouched.lists.get(piece.version):  # or it was refuted since
                self.stuck.discard(chunk)
                self.versions[index] = self.vouched.came_at[index] = piece.version
                effects.append(piece)
        if not self._results and self.sealed != NO_VERSION and self.sealed == self.versions[0]:
            return effects  # nothing new: this is asked after every event
        next_one = self.sealed + 1
        if self._is_whole and any((next_one, chunk) not in self._results for chunk in self._fragment.chunks):
            return effects  # those that lack may be nowhere any more, and this version the newest that anybody shows
        for chunk, version in zip(self._fragment.chunks, self.versions.copy(), strict=True):
            while version != NO_VERSION and (version + 1, chunk) in self._results:
                commit = self.commits.get(version + 1)
                if commit is None:
                    break  # by what the result is multiplied is written there
                version += 1
                self.stuck.discard(chunk)  # somebody had it after all
                result = self._results.pop((version, chunk))
                effects.append(Roll(chunk, version, result, commit.factor))
            self.versions[self._fragment.index(chunk)] = version
        reached = self.lowest
        # Seal only a version that all chunks share, and only once.
        if reached != NO_VERSION and reached > self.sealed and max(self.versions) == reached:
            self.sealed = reached
            effects.append(Seal(reached, self._fragment.number))
        return effects

    # ---- what is lacking ---------------------------------------------------------------------------------------

    @property
    def lowest(self) -> int:
        return min(self.versions)

    @property
    def done(self) -> bool:
        return self.target != NO_VERSION and self.sealed == self.target

    @property
    def _is_whole(self) -> bool:
        return self.sealed != NO_VERSION and all(version == self.sealed for version in self.versions)

    @property
    def needs_commits(self) -> tuple[int, ...]:
        held = [v for v in self.versions if v != NO_VERSION]
        if not held:
            return ()
        first = min(held) + 1
        return tuple(v for v in range(first, min(first + 8, self.target + 1)) if v not in self.commits)[:8]

    @property
    def lacking(self) -> int:
        """Pieces of state that are not here: a mask by index."""
        return mask_of(index for index, version in enumerate(self.versions) if version == NO_VERSION)

    def lacks(self, index: int) -> bool:
        """A piece of state: it has none, or one that no result leads on from."""
        version = self.versions[index]
        return version == NO_VERSION or (self._fragment.first + index in self.stuck and version < self.target)

    def lacking_results(self, coming: Set[tuple[int, int]]) -> list[tuple[int, int]]:
        """(version, chunk), the oldest first: they are forgotten first, and with them the chunks that need them.
        `coming`: those that are not missed yet."""
        # Of a whole state, of so many versions before those of the first are all here; before one came it may be large.
        largest_bytes = self.largest_result_bytes or WAITING_RESULTS_BYTES
        waiting = max(1, WAITING_RESULTS_BYTES // (self._fragment.count * largest_bytes))
        last = self.sealed + waiting if self._is_whole else self.target
        results = [
            (v, chunk)
            for chunk, version in zip(self._fragment.chunks, self.versions, strict=True)
            if version != NO_VERSION
            for v in range(version + 1, min(last, self.target) + 1)
            if v in self.commits and (v, chunk) not in self._results and (v, chunk) not in coming
        ]
        return sorted(results)

    # ---- what others may have of it before it is whole -------------------------------------------------------------

    def given_at(self, chunk: int) -> int:
        """The version at which this piece came and was checked, if it is still that; else NO_VERSION.

        What was rolled on since is proven by nothing before all of it is whole."""
        index = self._fragment.index(chunk)
        held = self.versions[index]
        is_given = self.vouched.came_at.get(index) == held and self.vouched.holds(held, self.digests)
        return held if is_given else NO_VERSION

    def hash_of(self, chunk: int) -> bytes:
        """By which a piece that may be given was checked."""
        return self.vouched.holds(self.given_at(chunk), self.digests)[self._fragment.index(chunk)]

    def hashes_at(self, version: int) -> bytes:
        """The list by which the pieces of this version were checked; empty: there are none that still hold."""
        return b"".join(self.vouched.holds(version, self.digests))
