"""Which digest a version of one fragment has, and who holds it.  Pure.

One of the parts of the run machine; each driver has one.  Members that have shown that they hold the run's state
name the digest of the version that they made of it.  While they all name one, it is settled.  Where they contradict
each other, also long after it was settled, a mode judges (coordinator/audits/digest_judge.py): it calculates one chunk,
and whoever named a digest that is proven wrong is out, be it nine of ten.  Where no mode can, what was settled stands,
else what most hold.  That a member holds a version it shows under the version's nonce; an echo of the digest shows
nothing (coordinator/court/holding_proof.py).

Must not know what follows for a member's orders (ticks.py) or for rounds (round_driver.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from farflung.coordinator.court.holding_proof import HoldingClaim, HoldingProof, shown_value
from farflung.coordinator.court.questions import MemberAnswer
from farflung.coordinator.ledger.ledger import FragmentBook
from farflung.coordinator.ledger.records import (
    DigestFixed,
    DigestRefuted,
    DigestWithdrawn,
    ShownFixed,
    Vouched,
)
from farflung.coordinator.modes.mode import DigestCase
from farflung.coordinator.rounds.groups import own_part
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Member
from farflung.protocol.messages import Committed, FragmentBeat
from farflung.protocol.round_words import CROWD, Commit

CHECKS_AT_ONCE = 4  # of possession, by bytes
BEHIND_S = 10.0  # so long the run waits for a member that contradicts it and has to catch up first,
BEHIND_TIMES = 3  # and so often

Speaker = tuple[Member, FragmentBeat]


class DigestAgreement:
    def __init__(self, core: Core, fragment: int) -> None:
        self._core = core
        self._number = fragment
        self._version = -1  # all below is about this one, in this era
        self._era = -1
        self._named: dict[str, set[bytes]] = {}  # by member: what it said that the version is, untold
        self._refuted: set[bytes] = set()
        self._void: dict[str, str] = {}  # members that did not prove what they said of it, and why
        # Of these: those that only said nothing, and may be right all the same; then the same of any version.
        self._absent: set[str] = set()
        self._silent_once: set[str] = set()
        self._dispute: DigestCase | None = None
        self._checks: dict[str, HoldingProof] = {}
        # Disputes in which a member showed its list, and nothing else.
        self._kept_waiting: Counter[str] = Counter()
        # Members behind the run that contradict it, by session: how often they did, and since when they do.
        self._behind: dict[bytes, tuple[int, float]] = {}

    @property
    def _book(self) -> FragmentBook:
        return self._core.ledger.books[self._number]

    @property
    def reason(self) -> str:
        """Why no round may begin now; empty if none of this speaks against it."""
        if self._dispute is not None:
            return self._dispute.told
        if not self._behind:
            return ""
        alive = {member.session: member for member in self._core.members.alive.values()}
        for session, (_, since) in self._behind.items():
            if session in alive and self._core.now - since < BEHIND_S:
                name = alive[session].contact.name
                return f"{name} claims another state than was settled; it is heard when it has caught up"
        return ""

    @property
    def disputed(self) -> bool:
        """One chunk of the newest version is being calculated: nothing may be built on it before that."""
        return self._dispute is not None

    def nonce(self, version: int) -> bytes:
        return self._core.ledger.nonce_of(self._number, version) if version >= 0 else b""

    def tell_commit(self, member: Member) -> None:
        """Of the newest version.  In a crowd those who were not in its round hear of it with their next beats."""
        core, standing, commit = (
            self._core,
            member.standings[self._number],
            self._book.commits.get(self._book.version),
        )
        # Others than those who hold the run's state would roll results onto a state that is not the run's.
        if commit is not None and standing.vouched:
            standing.commit_told = commit.version
            nonce, amended = self.nonce(commit.version), core.amended_for(commit.version - 1)
            kept, told = core.kept_by(member.peer), self.commit_for(member, commit)
            core.tell(member, Committed, commit=told, nonce=nonce, amended=amended, kept=kept)

    def commit_for(self, member: Member, commit: Commit) -> Commit:
        """In a mesh whole for whoever keeps it, and else with that member's own part: the others are many."""
        whole = not self._core.manifest.round.group or self._core.is_keeper(member.peer)
        return commit if whole else own_part(commit, member.peer)

    # ---- one member's word ---------------------------------------------------------------------------------------

    def recognise(self, member: Member, said: FragmentBeat) -> bool:
        """Take in what a beat says that the member holds.  True if it is verified now and was not, or the reverse."""
        book, standing = self._book, member.standings[self._number]
        self._begin_anew(book.version)
        known = book.digests.get(said.version)
        shows = said.version >= 0 and known is not None and said.digest == known
        standing.vouched = standing.vouched or shows
        value = shown_value(said.shown, self.nonce(said.version))
        self._look_behind(member, said, contradicts=known is not None and not shows and bool(said.digest))
        holds = False
        if said.version == book.version and said.digest:
            # Whoever was told a digest, and fetched what has it, is not its author, however wrong it is.
            if member.peer in book.vouched and not shows:
                self._named.setdefault(member.peer, set()).add(said.digest)
            holds = shows and bool(value) and value == book.shown.get(said.version)
            if shows and value and not holds:
                self._check(member, said.digest)
        changed, standing.verified = holds != standing.verified, holds
        if holds and (member.peer not in book.vouched or book.may_hold(member.peer) < book.version):
            self._core.write(Vouched(peer=member.peer, fragment=self._number))
        return changed

    def _look_behind(self, member: Member, said: FragmentBeat, contradicts: bool) -> None:
        """Rounds may follow each other faster than an honest member rolls on: the run waits for one that knows better,
        but not for ever, and not for whoever says so again and again."""
        behind = 0 <= said.version < self._book.version and member.peer in self._book.vouched
        times, since = self._behind.get(member.session, (0, self._core.now - BEHIND_S))
        if contradicts and behind and times < BEHIND_TIMES and self._core.now - since >= BEHIND_S:
            self._behind[member.session] = times + 1, self._core.now

    def has_shown(self, said: FragmentBeat) -> bytes:
        """Under the nonce of the version that it says it holds; empty: nothing."""
        return shown_value(said.shown, self.nonce(said.version))

    def is_heard(self, member: Member, said: FragmentBeat) -> bool:
        """It has held the run's state, so what it says against the settled digest is looked into."""
        return member.peer in self._book.vouched and self._counts(member, said)

    def _counts(self, member: Member, said: FragmentBeat) -> bool:
        """It names a state of the newest version, and nothing is proven against that."""
        newest = said.version == self._book.version
        return newest and member.peer not in self._void and said.digest not in self._refuted

    def refuted(self, member: Member, said: FragmentBeat) -> bytes:
        """The digest that this member shall not believe any longer."""
        if any(mode.voids(self._number, said.version) for mode in self._core.modes):
            return said.digest
        if said.version != self._version:
            return b""
        unproven = member.peer in self._void and member.peer not in self._absent
        # Whoever has taken the run's state again, and shows that it holds it, is not to take it again without end.
        unproven = unproven and not member.standings[self._number].verified
        return said.digest if said.digest in self._refuted or unproven else b""

    def _begin_anew(self, version: int) -> None:
        era = self._core.ledger.era
        if (version, era) == (self._version, self._era):
            return
        if self._dispute is not None:
            self._dispute.close()
        for check in self._checks.values():
            check.close()
        self._version, self._era, self._dispute = version, era, None
        self._named, self._void, self._checks = {}, {}, {}
        self._refuted, self._absent = set(), set()

    # ---- settling ------------------------------------------------------------------------------------------------

    def settle(self, speakers: Sequence[Speaker], patience_over: bool) -> bool:
        """`speakers`: living members that hold the fragment, with their beats.  True: what stands changed now."""
        book, version = self._book, self._book.version
        self._begin_anew(version)
        changed = self._end_checks()
        settled = book.digests.get(version)
        if settled is not None and self._dispute is None and _nobody_contradicts(speakers, version, settled):
            return changed  # nearly always, and asked again and again
        heard = [
            (member, said) for member, said in speakers if member.peer in book.vouched and said.version >= 0
        ]
        commit = book.commits.get(version)
        if not heard and commit is not None:
            # All who showed the run's state have left.  Whoever made this version may be back with it, from its own
            # disk, before it has shown it here: its word is what it would have been, had it stayed.
            heard = [
                (m, said) for m, said in speakers if m.peer in commit.members and said.version == version
            ]
        if patience_over and all(said.version < version for _, said in heard):
            # All who ever showed the run's state are gone, or lack what only others have.  Who fetched it chunk by
            # chunk, each checked by its hash, and rolled on is right; and where it is not, those who come back, or
            # are given what they lack, contradict it.
            heard = [(member, said) for member, said in speakers if said.version == version]
        claims = self._claims(heard)
        undefended = settled is not None and bool(claims) and settled not in claims and patience_over
        if version and (len(claims) > 1 or undefended):
            changed |= self._contest(claims, undefended)
            claims = self._claims(heard)
        elif self._dispute is not None:
            self._end_dispute()
        if version == 0 or version in book.digests or len(claims) != 1:
            return changed
        [(digest, agreeing)] = claims.items()
        to_come = [each for each in self._told_at_once(heard) if self._may_still_speak(*each)]
        if to_come and 2 * len(agreeing) <= len(agreeing) + len(to_come) and not patience_over:
            return changed  # whoever speaks later and knows better is heard then; but it costs the others a dispute
        for peer in agreeing:
            self._named.setdefault(peer, set()).add(digest)
        shown = Counter(self._values(heard, digest)).most_common(1)[0][0]
        self._core.write(DigestFixed(version=version, digest=digest, fragment=self._number, shown=shown))
        return True

    def _claims(self, heard: Iterable[Speaker]) -> dict[bytes, list[str]]:
        """Digest -> who names it, of members whose word counts; those that came first are first."""
        claims: dict[bytes, list[str]] = {}
        for member, said in sorted(heard, key=lambda speaker: speaker[0].joined_no):
            if said.version == self._version and said.digest and self._counts(member, said):
                if self.has_shown(said):
                    claims.setdefault(said.digest, []).append(member.peer)
        return claims

    def _told_at_once(self, heard: Sequence[Speaker]) -> Sequence[Speaker]:
        """Of the newest commit: others of a crowd hear of it with their next beats, and are heard when they have."""
        makers = set(self._book.makers)
        if len(heard) <= CROWD or not makers:
            return heard
        return [(member, said) for member, said in heard if member.peer in makers]

    def _may_still_speak(self, member: Member, said: FragmentBeat) -> bool:
        if member.peer in self._void or said.digest in self._refuted:
            return False
        return 0 <= said.version < self._version or (
            said.version == self._version and not self.has_shown(said)
        )

    def _values(self, heard: Iterable[Speaker], digest: bytes) -> list[bytes]:
        found = [self.has_shown(said) for _, said in heard if said.digest == digest]
        return [value for value in found if value]

    # ---- disputes --------------------------------------------------------------------------------------------------

    def _contest(self, claims: Mapping[bytes, list[str]], undefended: bool) -> bool:
        """`undefended`: nobody is left who names the settled digest, and those who are here name another one."""
        if self._dispute is None and not self._begin(claims, undefended):
            return len(claims) > 1
        assert self._dispute is not None
        over = self._dispute.step(claims, self._core.now)
        changed = self._judge(self._dispute, {peer for by in claims.values() for peer in by})
        if over and self._dispute.undecidable:
            self._choose(claims, self._dispute.groundless, self._dispute.silent)
            self._end_dispute()
            return True
        if over:
            left = set(claims) - self._refuted
            if self._dispute.drew and left and self._dispute.stands:
                self._withdraw()
                changed = True
            self._end_dispute()
        return changed

    def _begin(self, claims: Mapping[bytes, list[str]], undefended: bool) -> bool:
        """False: nobody here can judge; what was settled and nobody names any more stands then."""
        asked = (mode.judge(self._number, undefended) for mode in self._core.modes)
        self._dispute = next(filter(None, asked), None)
        if self._dispute is not None:
            self._core.note(f"{self._of_whom(claims)}: one chunk of it is calculated")
        elif len(claims) > 1:
            self._core.note(f"{self._of_whom(claims)}: what was settled stands, else what most hold")
            self._choose(claims, {}, set())
        return self._dispute is not None

    def _withdraw(self) -> None:
        """The settled digest is void: the results do not lead to it."""
        digest = self._book.digests.get(self._version)
        if digest is not None:
            self._core.write(DigestWithdrawn(version=self._version, fragment=self._number, digest=digest))

    def _end_dispute(self) -> None:
        if self._dispute is not None:
            self._dispute.close()
        self._dispute = None

    def _of_whom(self, claims: Mapping[bytes, list[str]]) -> str:
        names = " / ".join(", ".join(map(self._core.name, by[:5])) for by in claims.values())
        of = self._core.of(self._number)
        return f"members contradict each other about version {self._version}{of} ({names})"

    def _choose(
        self, claims: Mapping[bytes, list[str]], groundless: Mapping[str, str], silent: Set[str]
    ) -> None:
        """Nobody is left who calculated the version, or nobody can judge: what was settled stands, else what most hold.
        `groundless`: why some could not show how they came to it; `silent`: they did not even say so."""
        settled = self._book.digests.get(self._version)
        kept = settled if settled in claims else max(claims, key=lambda digest: len(claims[digest]))
        for digest, by in claims.items():
            for peer in by if digest != kept else ():
                self._void[peer] = groundless.get(peer, "nobody can show how it came to that state")
                self._core.note(f"{self._core.name(peer)} takes the run's state again: {self._void[peer]}")
                if peer in silent:
                    self._was_silent(peer)

    def _was_silent(self, peer: str) -> None:
        """Whoever has fetched its state says at once that it can show nothing.  Once it may be its line."""
        self._kept_waiting[peer] += 1
        told = f"it kept everybody waiting: {self._void[peer]}"
        if self._kept_waiting[peer] > 1:
            self._core.convict(peer, f"once more {told}")
        else:
            self._core.strike(peer, told)

    def _judge(self, dispute: DigestCase, naming: set[str]) -> bool:
        """What follows from what the dispute has found so far.  `naming`: who still says so."""
        changed = False
        for peer, why in dispute.unproven.items():
            if peer not in self._void and peer in naming:
                self._void[peer] = why
                told = f"it named a state of version {self._version} of its own, and {why}"
                if peer in dispute.silent and peer not in self._silent_once:
                    # A busy machine may be late once with a few kilobytes: it is not heard about this version.  Twice
                    # it is a way to hold everybody up.
                    self._silent_once.add(peer)
                    self._absent.add(peer)
                    self._core.strike(peer, told)
                else:
                    self._core.convict(peer, told)
                changed = True
        for digest, chunk in dispute.wrong.items():
            if digest not in self._refuted:
                self._refuted.add(digest)
                self._convict(dispute, digest, chunk)
                changed = True
        return changed

    def _convict(self, dispute: DigestCase, digest: bytes, chunk: int) -> None:
        core, version = self._core, self._version
        peers = tuple(sorted(peer for peer, named in self._named.items() if digest in named))
        core.write(
            DigestRefuted(peers=peers, version=version, fragment=self._number, digest=digest, chunk=chunk)
        )
        dispute.keep(digest, peers)
        if self._book.digests.get(version) == digest:
            self._withdraw()
        of = core.of(self._number)
        why = f"the state that it named of version {version}{of} is proven wrong in chunk {chunk}"
        for peer in peers:
            core.convict(peer, f"{why}: it lies, or its machine calculates wrongly")

    # ---- possession ------------------------------------------------------------------------------------------------

    def _check(self, member: Member, digest: bytes) -> None:
        """It shows something that nobody has shown: by the bytes of one chunk it can prove that it is right."""
        if member.peer in self._checks or member.peer in self._void or len(self._checks) >= CHECKS_AT_ONCE:
            return
        core, model = self._core, self._core.ledger.model
        if model is None:
            raise RuntimeError("a version of a model that nobody has named")
        fragment = model.fragments(core.ledger.fragments)[self._number]
        form = core.terms.first.state_form(model.chunk_elements)
        held = HoldingClaim(
            member.peer, fragment, self._version, digest, self.nonce(self._version), form.size_bytes
        )
        self._checks[member.peer] = HoldingProof(held, self._core.questions, self._core.now)

    def _end_checks(self) -> bool:
        over = [check for check in self._checks.values() if check.over]
        for check in over:
            peer = check.held.peer
            del self._checks[peer]
            if check.unproven:
                self._void[peer] = check.unproven
                self._core.strike(peer, check.unproven)
            elif self._book.shown.get(self._version) != check.value:
                record = ShownFixed(version=self._version, fragment=self._number, shown=check.value)
                self._core.write(record)
        return bool(over)

    def on_answer(self, answer: MemberAnswer) -> bool:
        """True if it was a question of this fragment."""
        if self._dispute is not None and self._dispute.on_answer(answer):
            return True
        return any(check.on_answer(answer, self._core.now) for check in self._checks.values())


def _nobody_contradicts(speakers: Sequence[Speaker], version: int, settled: bytes) -> bool:
    return all(said.version != version or said.digest in (b"", settled) for _, said in speakers)
