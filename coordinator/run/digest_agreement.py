"""Which digest a version of one fragment has, and who holds it.  Pure.

One of the parts of the run machine; each driver has one.  Members that have shown that they hold the run's state
name the digest of the version that they made of it.  While they all name one, it is settled.  Where they contradict
each other, also long after it was settled, a mode judges (coordinator/audits/dispute.py): it calculates one chunk,
and whoever named a digest that is proven wrong is out, be it nine of ten.  Where no mode can, what was settled stands,
else what most hold.  That a member holds a version it shows under the version's nonce; an echo of the digest shows
nothing (coordinator/court/questions.py).

Must not know what follows for a member's orders (ticks.py) or for rounds (round_driver.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec.structs import replace

from farflung.coordinator.court.questions import HoldingClaim, HoldingProof, MemberAnswer, shown_value
from farflung.coordinator.ledger.ledger import FragmentBook
from farflung.coordinator.ledger.records import (
    CommittedRound,
    DigestFixed,
    DigestRefuted,
    DigestWithdrawn,
    HowMerged,
    ShownFixed,
    Vouched,
)
from farflung.coordinator.modes.registry import DigestCase
from farflung.coordinator.rounds.reported import CommittedSums
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import Done
from farflung.coordinator.rounds.round_rules import own_part
from farflung.coordinator.rounds.weights import likeness, shortened
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import KeepEvidence
from farflung.coordinator.run.membership import Looks, Member
from farflung.protocol.digests import HASH_BYTES, bits, mask_from_bytes
from farflung.protocol.limits import AMOUNT_MAX
from farflung.protocol.messages import Committed, FragmentBeat, ProgressReport, Sent
from farflung.protocol.mode_words import MeshReport
from farflung.protocol.round_words import CROWD, Commit, Decision, GroupSums, section
from farflung.protocol.signed_words import (
    Results,
    SignedList,
    SumsOfGroups,
    inputs_of,
    is_signed,
    results_part,
)
from farflung.protocol.signed_words import sums_of_groups_part as sums_part
from farflung.protocol.signing import verify

CHECKS_AT_ONCE = 4  # of possession, by bytes
BEHIND_S = 10.0  # so long the run waits for a member that contradicts it and has to catch up first,
BEHIND_TIMES = 3  # and so often

Speaker = tuple[Member, FragmentBeat]


# ---- contradictions ----------------------------------------------------------------------------------------


class Contradictions:
    """Where members contradict each other about the newest version: the case that a mode has of it, what is proven, and
    whose word does not count any more."""

    def __init__(self, core: Core, fragment: int) -> None:
        self._core, self._number = core, fragment
        self.version = self._era = -1  # what follows is about this one, in this era
        self.case: DigestCase | None = None  # one chunk is being calculated
        # By member: what it said that the version is, untold.
        self.named: defaultdict[str, set[bytes]] = defaultdict(set)
        self.refuted: set[bytes] = set()
        self.void: dict[str, str] = {}  # members that did not prove what they said of it, and why
        self.absent: set[str] = set()  # of these: those that only said nothing, and may be right all the same
        # And of any version: who only said nothing; disputes in which a member showed its list, and nothing else.
        self._silent_once: set[str] = set()
        self._kept_waiting: Counter[str] = Counter()

    def begin_anew(self, version: int) -> bool:
        """True if this is another version, or era."""
        era = self._core.ledger.eras.number
        if (version, era) == (self.version, self._era):
            return False
        self.end()
        self.version, self._era = version, era
        self.named, self.void, self.refuted, self.absent = defaultdict(set), {}, set(), set()
        return True

    def is_open(self, peer: str, digest: bytes) -> bool:
        """Nothing is proven against what this member says."""
        return peer not in self.void and digest not in self.refuted

    @property
    def _settled(self) -> bytes | None:
        return self._core.ledger.books[self._number].digests.get(self.version)

    def look_into(self, claims: Mapping[bytes, list[str]], undefended: bool) -> bool:
        """`claims`: who names which digest.  `undefended`: nobody is left who names the settled one, and those who are
        here name another one.  True: what stands, or whose word counts, changed now."""
        case = self.case or self._begin(claims, undefended)
        if case is None:
            return len(claims) > 1
        over = case.step(claims, self._core.now)
        changed = self._judge(case, {peer for by in claims.values() for peer in by})
        if over and case.undecidable:
            self._choose(claims, case.groundless, case.silent)
            changed = True
        elif over and case.drew and set(claims) - self.refuted and case.stands:
            self._withdraw()
            changed = True
        if over:
            self.end()
        return changed

    def _begin(self, claims: Mapping[bytes, list[str]], undefended: bool) -> DigestCase | None:
        """None: nobody here can judge; what was settled and nobody names any more stands then."""
        asked = (mode.judge(self._number, undefended) for mode in self._core.modes)
        self.case = next(filter(None, asked), None)
        if self.case is not None:
            self._core.note(f"{self._of_whom(claims)}: one chunk of it is calculated")
        elif len(claims) > 1:
            self._core.note(f"{self._of_whom(claims)}: what was settled stands, else what most hold")
            self._choose(claims, {}, set())
        return self.case

    def _withdraw(self) -> None:
        """The settled digest is void: the results do not lead to it."""
        if (digest := self._settled) is not None:
            self._core.write(DigestWithdrawn(version=self.version, fragment=self._number, digest=digest))

    def end(self) -> None:
        if self.case is not None:
            self.case.close()
        self.case = None

    def _of_whom(self, claims: Mapping[bytes, list[str]]) -> str:
        names = " / ".join(", ".join(map(self._core.name, by[:5])) for by in claims.values())
        of = self._core.of(self._number)
        return f"members contradict each other about version {self.version}{of} ({names})"

    def _choose(
        self, claims: Mapping[bytes, list[str]], groundless: Mapping[str, str], silent: Set[str]
    ) -> None:
        """Nobody is left who calculated the version, or nobody can judge: what was settled stands, else what most hold.
        `groundless`: why some could not show how they came to it; `silent`: they did not even say so."""
        settled = self._settled
        kept = settled if settled in claims else max(claims, key=lambda digest: len(claims[digest]))
        for digest, by in claims.items():
            for peer in by if digest != kept else ():
                self.void[peer] = groundless.get(peer, "nobody can show how it came to that state")
                self._core.note(f"{self._core.name(peer)} takes the run's state again: {self.void[peer]}")
                if peer in silent:
                    self._was_silent(peer)

    def _was_silent(self, peer: str) -> None:
        """Whoever has fetched its state says at once that it can show nothing.  Once it may be its line."""
        self._kept_waiting[peer] += 1
        told = f"it kept everybody waiting: {self.void[peer]}"
        if self._kept_waiting[peer] > 1:
            self._core.convict(peer, f"once more {told}")
        else:
            self._core.strike(peer, told)

    def _judge(self, case: DigestCase, naming: set[str]) -> bool:
        """What follows from what the case has found so far.  `naming`: who still says so."""
        changed = False
        for peer, why in case.unproven.items():
            if peer not in self.void and peer in naming:
                self.void[peer] = why
                told = f"it named a state of version {self.version} of its own, and {why}"
                if peer in case.silent and peer not in self._silent_once:
                    # A busy machine may be late once with a few kilobytes: it is not heard about this version.  Twice
                    # it is a way to hold everybody up.
                    self._silent_once.add(peer)
                    self.absent.add(peer)
                    self._core.strike(peer, told)
                else:
                    self._core.convict(peer, told)
                changed = True
        for digest, chunk in case.wrong.items():
            if digest not in self.refuted:
                self.refuted.add(digest)
                self._convict(case, digest, chunk)
                changed = True
        return changed

    def _convict(self, case: DigestCase, digest: bytes, chunk: int) -> None:
        core, version = self._core, self.version
        peers = tuple(sorted(peer for peer, named in self.named.items() if digest in named))
        core.write(
            DigestRefuted(peers=peers, version=version, fragment=self._number, digest=digest, chunk=chunk)
        )
        case.keep(digest, peers)
        if self._settled == digest:
            self._withdraw()
        of = core.of(self._number)
        why = f"the state that it named of version {version}{of} is proven wrong in chunk {chunk}"
        for peer in peers:
            core.convict(peer, f"{why}: it lies, or its machine calculates wrongly")


# ---- agreement ---------------------------------------------------------------------------------------------


class DigestAgreement:
    def __init__(self, core: Core, fragment: int) -> None:
        self._core, self._number = core, fragment
        self.contradictions = Contradictions(core, fragment)
        self._checks: dict[str, HoldingProof] = {}  # of the newest version
        # Members behind the run that contradict it, by session: how often they did, and since when they do.
        self._behind: dict[bytes, tuple[int, float]] = {}
        self._looks = Looks()

    def is_due(self, members: int) -> bool:
        """`members`: that hold the fragment."""
        return self._looks.is_due(members, self._core.now)

    @property
    def _book(self) -> FragmentBook:
        return self._core.ledger.books[self._number]

    @property
    def reason(self) -> str:
        """Why no round may begin now; empty if none of this speaks against it."""
        if self.contradictions.case is not None:
            return self.contradictions.case.told
        if not self._behind:
            return ""
        alive = {member.session: member for member in self._core.members.alive.values()}
        for session, (_, since) in self._behind.items():
            if session in alive and self._core.now - since < BEHIND_S:
                name = alive[session].contact.name
                return f"{name} claims another state than was settled; it is heard when it has caught up"
        return ""

    def nonce(self, version: int) -> bytes:
        return self._core.ledger.nonce_of(self._number, version) if version >= 0 else b""

    def tell_commit(self, member: Member) -> None:
        """Of the newest version.  In a crowd those who were not in its round hear of it with their next beats."""
        core, book, standing = self._core, self._book, member.standings[self._number]
        commit = book.commits.get(book.version)
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
                self.contradictions.named[member.peer].add(said.digest)
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
        return newest and self.contradictions.is_open(member.peer, said.digest)

    def refuted(self, member: Member, said: FragmentBeat) -> bytes:
        """The digest that this member shall not believe any longer."""
        if any(mode.voids(self._number, said.version) for mode in self._core.modes):
            return said.digest
        found = self.contradictions
        if said.version != found.version:
            return b""
        unproven = member.peer in found.void and member.peer not in found.absent
        # Whoever has taken the run's state again, and shows that it holds it, is not to take it again without end.
        unproven = unproven and not member.standings[self._number].verified
        return said.digest if said.digest in found.refuted or unproven else b""

    def _begin_anew(self, version: int) -> None:
        if self.contradictions.begin_anew(version):
            for check in self._checks.values():
                check.close()
            self._checks = {}

    # ---- settling ------------------------------------------------------------------------------------------------

    def settle(self, speakers: Sequence[Speaker], patience_over: bool) -> bool:
        """`speakers`: living members that hold the fragment, with their beats.  True: what stands changed now."""
        book, version, found = self._book, self._book.version, self.contradictions
        self._begin_anew(version)
        changed = self._end_checks()
        settled = book.digests.get(version)
        if settled is not None and found.case is None and _nobody_contradicts(speakers, version, settled):
            return changed  # nearly always, and asked again and again
        heard = [(m, said) for m, said in speakers if m.peer in book.vouched and said.version >= 0]
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
            heard = [(m, said) for m, said in speakers if said.version == version]
        claims = self._claims(heard)
        undefended = settled is not None and bool(claims) and settled not in claims and patience_over
        if version and (len(claims) > 1 or undefended):
            changed |= found.look_into(claims, undefended)
            claims = self._claims(heard)
        else:
            found.end()
        if version == 0 or version in book.digests or len(claims) != 1:
            return changed
        [(digest, agreeing)] = claims.items()
        to_come = [each for each in self._told_at_once(heard) if self._may_still_speak(*each)]
        if to_come and 2 * len(agreeing) <= len(agreeing) + len(to_come) and not patience_over:
            return changed  # whoever speaks later and knows better is heard then; but it costs the others a dispute
        for peer in agreeing:
            found.named[peer].add(digest)
        shown = Counter(
            value for _, said in heard if said.digest == digest and (value := self.has_shown(said))
        )
        [(most, _)] = shown.most_common(1)
        self._core.write(DigestFixed(version=version, digest=digest, fragment=self._number, shown=most))
        return True

    def _claims(self, heard: Iterable[Speaker]) -> dict[bytes, list[str]]:
        """Digest -> who names it, of members whose word counts; those that came first are first."""
        claims: dict[bytes, list[str]] = {}
        for member, said in sorted(heard, key=lambda speaker: speaker[0].joined_no):
            if said.digest and self._counts(member, said) and self.has_shown(said):
                claims.setdefault(said.digest, []).append(member.peer)
        return claims

    def _told_at_once(self, heard: Sequence[Speaker]) -> Sequence[Speaker]:
        """Of the newest commit: others of a crowd hear of it with their next beats, and are heard when they have."""
        makers = set(self._book.makers)
        if len(heard) <= CROWD or not makers:
            return heard
        return [(member, said) for member, said in heard if member.peer in makers]

    def _may_still_speak(self, member: Member, said: FragmentBeat) -> bool:
        newest = self._book.version
        behind = 0 <= said.version < newest or (said.version == newest and not self.has_shown(said))
        return behind and self.contradictions.is_open(member.peer, said.digest)

    # ---- possession ------------------------------------------------------------------------------------------------

    def _check(self, member: Member, digest: bytes) -> None:
        """It shows something that nobody has shown: by the bytes of one chunk it can prove that it is right."""
        checks, void = self._checks, self.contradictions.void
        if member.peer in checks or member.peer in void or len(checks) >= CHECKS_AT_ONCE:
            return
        core, model, version = self._core, self._core.ledger.model, self._book.version
        if model is None:
            raise RuntimeError("a version of a model that nobody has named")
        fragment = model.fragments(core.ledger.rules.fragments)[self._number]
        form = core.terms.first.state_form(model.chunk_elements)
        held = HoldingClaim(member.peer, fragment, version, digest, self.nonce(version), form.size_bytes)
        checks[member.peer] = HoldingProof(held, self._core.questions, self._core.now)

    def _end_checks(self) -> bool:
        over = [check for check in self._checks.values() if check.over]
        for check in over:
            peer = check.held.peer
            del self._checks[peer]
            if check.unproven:
                self.contradictions.void[peer] = check.unproven
                self._core.strike(peer, check.unproven)
            elif self._book.shown.get(self._book.version) != check.value:
                record = ShownFixed(version=self._book.version, fragment=self._number, shown=check.value)
                self._core.write(record)
        return bool(over)

    def on_answer(self, answer: MemberAnswer) -> bool:
        """True if it was a question of this fragment."""
        case = self.contradictions.case
        if case is not None and case.on_answer(answer):
            return True
        return any(check.on_answer(answer, self._core.now) for check in self._checks.values())


def _nobody_contradicts(speakers: Sequence[Speaker], version: int, settled: bytes) -> bool:
    return all(said.version != version or said.digest in (b"", settled) for _, said in speakers)


# ---- signed results ----------------------------------------------------------------------------------------
# The witness of a fragment's rounds: checks what members sign, and keeps it until the round is over. Pure.
#
# One of the parts of a driver. Members sign the list of what they send (`Sent`), and owners what they made of
# it (`Results`), in a mesh also roots (`SumsOfGroups`); a commit rests on nothing that is not signed. Whether
# a sum is right is not judged here: that is a mode's (coordinator/audits/), which is handed all that was
# signed with the commit.

# Shortened to this or less: no honest work is, and the peer's trust begins anew.
FAR_TOO_LONG = 0.1


class SignedResults:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._said: dict[str, SignedList] = {}
        # (owner, kind) -> the statement that it was found to have signed last.
        self._proven: dict[tuple[str, type[Results] | type[SumsOfGroups]], bytes] = {}
        self._identities: dict[str, bytes] = {}
        self._weighed: tuple[Decision | None, Mapping[str, float]] = None, {}  # of the decision that stands

    def problem(self, member: Member, sent: Sent) -> str:
        """Why this hash list is none, or empty."""
        before = self._said.get(member.peer)
        if before is not None and before.sent.round_no == sent.round_no:
            return ""  # the first one counts
        if not is_signed(member.identity, self._core.run_id, sent):
            return "its hash list is not signed by it"
        self._said[member.peer] = SignedList(member.identity, sent)
        return ""

    def proven(self, member: Member, flight: Round, report: ProgressReport) -> ProgressReport:
        """The report, without sums that its sender has not signed to be made of what the others sent."""
        decision = flight.merged_by
        if decision is None or report.decision_no != decision.decision_no:
            return report
        of_mesh = section(MeshReport, report.sections)
        if of_mesh is not None and of_mesh.sums is not None:
            of_group = self._of_group(member, flight, decision, of_mesh.sums)
            if of_group is None or not self._is_proven(member, flight, of_group, of_mesh.sums.signature):
                report = replace(report, sections=(replace(of_mesh, sums=None),))
        if not report.merged:
            return report
        codec = flight.rules.gather_codec
        results: Results | SumsOfGroups = (
            SumsOfGroups.of(decision, codec, report)
            if flight.plan.roots
            else Results.of(flight.plan, decision, codec, report)
        )
        if self._is_proven(member, flight, results, report.signature):
            return report
        return replace(report, merged=b"", merged_hashes=b"", lengths=b"")

    def _of_group(self, member: Member, flight: Round, decision: Decision, sums: GroupSums) -> Results | None:
        """What it signs for, if it is in a group."""
        if not flight.plan.roots or member.peer not in flight.groups.of:
            return None
        if self._weighed[0] is not decision:  # asked of all owners, with every report
            self._weighed = decision, dict(zip(flight.plan.members, decision.weights, strict=True))
        group, weights = flight.groups.members[flight.groups.of[member.peer]], self._weighed[1]
        return Results.of_group(decision, group, tuple(weights[peer] for peer in group), sums)

    def _is_proven(
        self, member: Member, flight: Round, said: Results | SumsOfGroups, signature: bytes
    ) -> bool:
        run_id, kind = self._core.run_id, type(said)
        statement = results_part(run_id, said) if isinstance(said, Results) else sums_part(run_id, said)
        if self._proven.get((member.peer, kind)) == statement:
            return True
        problem = self._problem_of(member, flight, said)
        if not problem and not verify(member.identity, statement, signature):
            problem = "they are not signed by it"
        if problem:
            told = f"results of {member.contact.name} in round {said.round_no} do not count: {problem}"
            self._core.log(told)
            return False
        self._proven[member.peer, kind], self._identities[member.peer] = statement, member.identity
        return True

    def _problem_of(self, member: Member, flight: Round, said: Results | SumsOfGroups) -> str:
        mask = mask_from_bytes(said.chunks)
        if mask & ~flight.groups.shares.get(member.peer, 0):
            return "it does not own these chunks"
        if len(said.hashes) != HASH_BYTES * mask.bit_count():
            return "as many hashes as chunks are due"
        # Whether sums of groups are those that their owners signed is looked at when all words of them are here.
        return self._inputs_problem(flight, said) if isinstance(said, Results) else ""

    @staticmethod
    def _inputs_problem(flight: Round, results: Results) -> str:
        lists = [flight.scatter.sent[peer].hashes for peer in results.included]
        chunks = map(_place, bits(mask_from_bytes(results.chunks)))
        due = (hashes[at : at + HASH_BYTES] for at in chunks for hashes in lists)
        if inputs_of(due) != results.inputs:
            return "they are made of other bytes than the members signed"
        return ""

    def on_commit(self, commit: Commit, flight: Round, processes: Mapping[str, bytes]) -> CommittedSums:
        assert flight.decision is not None  # or there were nothing to commit
        said = {peer: each for peer, each in self._said.items() if each.sent.round_no == commit.round_no}
        known, makers = (dict(self._identities), dict(processes)), dict(flight.gather.makers)
        sums = flight.sums.used(makers, flight.decision)
        made = CommittedSums(flight.plan, flight.decision, commit, said, makers, *known, sums)
        for each in (self._said, self._proven, self._identities):
            each.clear()
        self._core.do(KeepEvidence(commit, tuple(said.values())))
        return made


def _place(chunk: int) -> int:
    return chunk * HASH_BYTES


def record_of(
    core: Core, flight: Round, done: Done, merged: str, counted: Mapping[str, bytes]
) -> CommittedRound:
    """What the journal has of a round that is at its end."""
    commit, sent = done.commit, flight.scatter.sent
    included = commit.included
    tokens = {m: flight.believed.tokens.get(m, sent[m].tokens) for m in included}
    losses = [(sent[m].loss, tokens[m]) for m in included]
    known = [(loss, weight) for loss, weight in losses if loss is not None and loss == loss]
    weight = sum(w for _, w in known)
    amounts = [m.beat.tx_bytes for m in core.members.members.values() if m.beat is not None]
    tx_bytes = sum(min(amount, AMOUNT_MAX) for amount in amounts)
    return CommittedRound(
        commit=commit,
        used={m: sent[m].used for m in included},
        excluded=dict(flight.excluded),
        tokens=sum(tokens.values()),
        tokens_by=tokens,
        rate=flight.believed.rate,
        steps=sum(min(sent[m].steps, AMOUNT_MAX) for m in included),
        loss=sum(loss * w for loss, w in known) / weight if weight else None,
        seconds=core.now - flight.opened_at,
        tx_bytes=core.pace.sent_since_commit(tx_bytes),
        merged=HowMerged(
            text=merged,
            clipped=shortened(flight.screening, flight.believed, included),
            suspects=flight.suspects(FAR_TOO_LONG),
            norm=done.norm,
            cosine=likeness(flight.screening, included),
        ),
        groups=flight.plan.groups or (),
        counted=dict(counted),
        at_s=core.clock_s,
    )
