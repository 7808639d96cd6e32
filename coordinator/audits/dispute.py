"""A dispute about one version of a fragment: members that held the version before it name different digests.  Pure.

Nobody votes.  What a chunk becomes is determined to the bit by what it was and by the committed results, so one chunk
in which the sides differ decides:

    1. each side shows its list of chunk hashes, whose root is the digest that it named, signed
    2. of the first chunk that differs, somebody shows what it was (its hash stands in the list of a settled version)
       and the results since (their hashes stand in the commits)
    3. the step is calculated here; every list that has another hash there is refuted

Of each side a few members are asked at once.  Whoever shows no list, or another one than it named, does not hold what
it says, and does not count any more.  Who can't show what the chunk was may be honest (it fetched the state from
others) and says so at once: somebody else of its side is asked.  With more than two sides the
next two are compared, until one is left.  Against a settled digest that nobody defends any more, whoever names another
one shows so much of a few chunks that nobody could foresee.  Used by the settling of the run machine, which knows who
claims what and who is here, and does what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from farflung.coordinator.court.proofs import ChunkRules, FalseClaim, step_factors, step_rules
from farflung.coordinator.court.questions import MemberAnswer, Questions, WantedProof
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import KeepProof
from farflung.coordinator.run.membership import Member
from farflung.protocol.digests import HASH_BYTES, drawn_chunk, hash_at, hash_bytes, root_of, split_hashes
from farflung.protocol.errors import FrameError
from farflung.protocol.messages import What
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Commit
from farflung.protocol.signed_words import claim_part
from farflung.protocol.signing import verify

VERSION_BYTES = 8
ASKED_AT_ONCE = 16  # of a side, for its list: a league of many that show nothing must not take turns at it
TRIED_AT_ONCE = 4  # of a side, for what the chunk was: that is many more bytes

# (state of a chunk, the payload of a committed result, which chunk of the model, the version made, the commit's factor)
# -> its next state.
NextState = Callable[[bytes, bytes, int, int, float], bytes]
IsSigned = Callable[[str, bytes, bytes], bool]  # (peer, the digest that it claims, signature)


@dataclass(frozen=True)
class DisputedVersion:
    """What the run knows about the version in dispute."""

    fragment: Fragment
    version: int
    state_bytes: int  # of one chunk
    result_bytes_most: int
    digests: Mapping[int, bytes]  # settled ones, of versions before it
    commits: Mapping[int, Commit]
    next_state: NextState
    is_signed: IsSigned
    drawn: tuple[int, ...] = ()  # chunks that a digest is looked at in which nobody here contradicts


@dataclass(frozen=True)
class ClaimList:
    """The list of chunk hashes behind a digest, and who signed for it."""

    hashes: tuple[bytes, ...]
    by: str
    signature: bytes


@dataclass(frozen=True)
class Refuted:
    """A digest whose list has another hash than the step gives, and all that a third party needs to see that."""

    digest: bytes
    claim: ClaimList
    chunk: int  # of the model
    base: int  # the settled version that the step starts from
    base_hashes: tuple[bytes, ...]
    before: bytes
    results: tuple[bytes, ...]  # of the versions after it
    factors: tuple[float, ...]  # of the commits of these


@dataclass
class _Showing:
    """One member's way to show what the chunk was, and the results since."""

    by: str
    chunk: int
    base: int = -1
    before: bytes = b""
    results: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Step:
    """What a chunk became, by its hash, and from what that was calculated."""

    chunk: int
    truth: bytes
    base: int
    base_hashes: tuple[bytes, ...]
    before: bytes
    results: tuple[bytes, ...]
    factors: tuple[float, ...]


class Dispute:
    def __init__(self, case: DisputedVersion, questions: Questions) -> None:
        self.case = case
        self.refuted: dict[bytes, Refuted] = {}  # by digest
        self.unproven: dict[str, str] = {}  # members that do not hold what they named, and why that is so
        self.groundless: dict[str, str] = {}  # members that can't show how they came to it
        self.silent: set[str] = set()  # of these: those that did not even say so
        self._questions = questions
        self._mine: dict[int, Callable[[MemberAnswer], None]] = {}
        self._lists: dict[bytes, ClaimList] = {}
        self._attempts: dict[tuple[str, int], _Showing] = {}  # by member and chunk: each thing is asked once
        self._base_lists: dict[int, tuple[bytes, ...]] = {}  # of settled versions before it
        self._looked_at: dict[int, _Step] = {}  # by chunk: what was calculated
        self._asked_of: set[tuple[str, WantedProof]] = set()

    def step(self, claims: Mapping[bytes, list[str]], now: float) -> bool:
        """`claims`: who names which digest, of members that are here.  True when it is over: at most one digest is
        left, and it was looked at in the chunks that were drawn."""
        sides = {
            digest: heard
            for digest, by in sorted(claims.items())
            if digest not in self.refuted and (heard := [peer for peer in by if peer not in self.unproven])
        }
        unseen = [chunk for chunk in self.case.drawn if chunk not in self._looked_at]
        if not sides or (len(sides) == 1 and not unseen):
            return True
        for digest, by in sides.items():
            for peer in by[:ASKED_AT_ONCE] if digest not in self._lists else ():
                self._ask_list(peer, digest, now)
        known = [digest for digest in sides if digest in self._lists][:2]
        if len(known) == 2 or len(known) == len(sides):
            chunk = self._first_difference(*known) if len(known) == 2 else unseen[0]
            able = [[peer for peer in sides[digest] if peer not in self.groundless] for digest in known]
            for peers in able:
                for peer in peers[:TRIED_AT_ONCE]:
                    self._try(peer, chunk, now)
            return not any(able)
        return False

    @property
    def wrong(self) -> dict[bytes, int]:
        """Digests that are proven wrong, each in which chunk."""
        return {digest: proof.chunk for digest, proof in self.refuted.items()}

    @property
    def drew(self) -> bool:
        return bool(self.case.drawn)

    @property
    def undecidable(self) -> bool:
        """Once it is over: nobody could show what came before."""
        return bool(self.groundless) and not self.refuted and not self._looked_at

    @property
    def stands(self) -> bool:
        """Every chunk that was drawn has been calculated."""
        return self._looked_at.keys() >= set(self.case.drawn)

    def close(self) -> None:
        for number in self._mine:
            self._questions.drop(number)
        self._mine.clear()

    @property
    def told(self) -> str:
        """For people: where it stands."""
        return f"members claim different states of version {self.case.version}; the coordinator checks one chunk of it"

    # ---- asking ----------------------------------------------------------------------------------------------

    def _wants_hashes(self, version: int) -> WantedProof:
        fragment = self.case.fragment
        most = HASH_BYTES * fragment.count
        return WantedProof(What.HASHES, fragment.number, version, fragment.first, most)

    def _ask_list(self, peer: str, digest: bytes, now: float) -> None:
        self._ask(
            peer, self._wants_hashes(self.case.version), now, lambda answer: self._on_list(answer, digest)
        )

    def _ask(self, peer: str, wanted: WantedProof, now: float, take: Callable[[MemberAnswer], None]) -> None:
        if (peer, wanted) not in self._asked_of:
            self._asked_of.add((peer, wanted))
            self._mine[self._questions.ask(peer, wanted, now)] = take

    def on_answer(self, answer: MemberAnswer) -> bool:
        """True if it was an answer to a question of this dispute."""
        take = self._mine.pop(answer.number, None)
        if take is None:
            return False
        if answer.raw is None:
            of_list = answer.wanted.what is What.HASHES and answer.wanted.version == self.case.version
            blame = self._prove_nothing if of_list else self._has_no_ground
            self.silent |= {answer.of} if answer.silent else set()
            blame(answer.of, f"it did not show {_NAMES[answer.wanted.what]}: {answer.why_none}")
        else:
            take(answer)
        return True

    def _prove_nothing(self, peer: str, why: str) -> None:
        self.unproven.setdefault(peer, why)

    def _has_no_ground(self, peer: str, why: str) -> None:
        self.groundless.setdefault(peer, why)

    def _first_difference(self, one: bytes, other: bytes) -> int:
        pairs = zip(self._lists[one].hashes, self._lists[other].hashes, strict=True)
        return self.case.fragment.first + next(at for at, (a, b) in enumerate(pairs) if a != b)

    def _try(self, peer: str, chunk: int, now: float) -> None:
        """Ask this member for whatever its proof of the chunk still lacks."""
        attempt = self._attempts.setdefault((peer, chunk), _Showing(peer, chunk))
        number, case = self.case.fragment.number, self.case
        if not attempt.before:
            most = VERSION_BYTES + case.state_bytes
            self._ask(peer, WantedProof(What.BEFORE, number, case.version, chunk, most), now, self._on_before)
        elif attempt.base not in self._base_lists:
            self._ask(peer, self._wants_hashes(attempt.base), now, self._on_base_list)
        elif self._base_lists[attempt.base][chunk - case.fragment.first] != hash_bytes(attempt.before):
            told = f"what it shows of version {attempt.base} is not the state that the run settled"
            self._has_no_ground(peer, told)
        else:
            for version in range(attempt.base + 1, case.version + 1):
                if version not in attempt.results:
                    wanted = WantedProof(What.RESULT, number, version, chunk, case.result_bytes_most)
                    self._ask(peer, wanted, now, self._on_result)

    # ---- answers -----------------------------------------------------------------------------------------------

    def _on_list(self, answer: MemberAnswer, digest: bytes) -> None:
        hashes = tuple(split_hashes(answer.raw or b""))
        if len(hashes) != self.case.fragment.count or root_of(hashes) != digest:
            self._prove_nothing(
                answer.of, "the hashes that it shows are not those of the digest that it named"
            )
        elif not self.case.is_signed(answer.of, digest, answer.signature):
            self._prove_nothing(answer.of, "its list of hashes is not signed by it")
        else:
            self._lists.setdefault(digest, ClaimList(hashes, answer.of, answer.signature))
            for step in self._looked_at.values():
                self._refute_by(step)  # it came when that chunk had been calculated

    def _on_base_list(self, answer: MemberAnswer) -> None:
        hashes, version = tuple(split_hashes(answer.raw or b"")), answer.wanted.version
        if len(hashes) != self.case.fragment.count or root_of(hashes) != self.case.digests[version]:
            told = f"the hashes that it shows of version {version} are not those that the run settled"
            self._has_no_ground(answer.of, told)
        else:
            self._base_lists[version] = hashes

    def _on_before(self, answer: MemberAnswer) -> None:
        raw, case, attempt = answer.raw or b"", self.case, self._attempts[answer.of, answer.wanted.chunk]
        base = int.from_bytes(raw[:VERSION_BYTES], "little")
        if len(raw) != VERSION_BYTES + case.state_bytes or base >= case.version:
            told = "what it shows is no state of a chunk before that version"
            return self._has_no_ground(answer.of, told)
        if base not in case.digests or any(v not in case.commits for v in range(base + 1, case.version + 1)):
            told = f"the run keeps no commits since version {base} any more"
            return self._has_no_ground(answer.of, told)
        attempt.base, attempt.before = base, raw[VERSION_BYTES:]
        return None

    def _on_result(self, answer: MemberAnswer) -> None:
        raw, wanted = answer.raw or b"", answer.wanted
        index = wanted.chunk - self.case.fragment.first
        if hash_bytes(raw) != hash_at(self.case.commits[wanted.version].hashes, index):
            told = f"the result that it shows is not the one that version {wanted.version} was committed with"
            return self._has_no_ground(answer.of, told)
        attempt = self._attempts[answer.of, wanted.chunk]
        attempt.results[wanted.version] = raw
        if len(attempt.results) == self.case.version - attempt.base:
            self._decide(attempt)
        return None

    def _decide(self, attempt: _Showing) -> None:
        state = attempt.before
        base_hashes = self._base_lists[attempt.base]  # or no result had been asked for
        results = tuple(attempt.results[version] for version in sorted(attempt.results))
        factors = tuple(self.case.commits[version].factor for version in sorted(attempt.results))
        try:
            multiplied = zip(results, factors, strict=True)
            for version, (payload, factor) in enumerate(multiplied, attempt.base + 1):
                state = self.case.next_state(state, payload, attempt.chunk, version, factor)
        except FrameError as error:
            return self._has_no_ground(attempt.by, f"nothing follows from what it shows: {error}")
        truth, base = hash_bytes(state), attempt.base
        step = _Step(attempt.chunk, truth, base, base_hashes, attempt.before, results, factors)
        self._looked_at[attempt.chunk] = step
        return self._refute_by(step)

    def _refute_by(self, step: _Step) -> None:
        index = step.chunk - self.case.fragment.first
        for digest, claim in self._lists.items():
            if claim.hashes[index] != step.truth and digest not in self.refuted:
                shown = step.base, step.base_hashes, step.before, step.results, step.factors
                self.refuted[digest] = Refuted(digest, claim, step.chunk, *shown)


_NAMES = {
    What.HASHES: "the hashes of its chunks",
    What.BEFORE: "what the chunk was before",
    What.RESULT: "the result that made the version",
    What.STATE: "a chunk of its state",
    What.CONTRIBUTION: "a contribution",
    What.SUM: "what its group adds up",
}


# ---- digest judge ------------------------------------------------------------------------------------------
# Judges the digests that members contradict each other about: calculated and proven, never voted. Pure.
#
# Part of the mode. One chunk of the version in question is calculated here, from what members
# show; whoever named a digest that is proven wrong is out, be it nine of ten, and what proves it is kept for
# whoever was not there. Without the mode what was settled stands, else what most hold
# (coordinator/run/digest_agreement.py).

CHUNKS_DRAWN = 8  # that a state is looked at in which nobody defends the settled one
RESULT_SLACK_BYTES = 4096  # a payload's head, over the largest codec


class DigestJudge(Dispute):
    """Of the newest version of one fragment."""

    def __init__(self, core: Core, fragment: int, undefended: bool) -> None:
        """`undefended`: nobody is left who names the settled digest, and those who are here name another one."""
        model, book = core.ledger.model, core.ledger.books[fragment]
        if model is None:
            raise RuntimeError("a version of a model that nobody has named")
        self._core, self._number = core, fragment
        of = model.fragments(core.ledger.rules.fragments)[fragment]
        self._rules = rules = ChunkRules.of(core.terms.first, model, core.terms)
        case = DisputedVersion(
            of,
            book.version,
            rules.form.size_bytes,
            rules.form.part_bytes + RESULT_SLACK_BYTES,
            {version: digest for version, digest in book.digests.items() if version < book.version},
            book.commits,
            rules.after,
            lambda peer, digest, signature: self._is_signed(
                core.members.members.get(peer), digest, signature
            ),
            _drawn(core.ledger.nonce_of(fragment, book.version), of) if undefended else (),
        )
        super().__init__(case, core.questions)

    def _is_signed(self, member: Member | None, digest: bytes, signature: bytes) -> bool:
        core, version = self._core, self.case.version
        claim = claim_part(core.run_id, core.ledger.eras.number, self._number, version, digest)
        return member is not None and verify(member.identity, claim, signature)

    def keep(self, digest: bytes, peers: Collection[str]) -> None:
        """For whoever was not there: what was claimed, and what it should have been."""
        proof, core, rules = self.refuted[digest], self._core, self._rules
        maker, version = core.members.members.get(proof.claim.by), self.case.version
        if maker is None or maker.peer not in peers:
            return  # it has gone, and its key with it; or it was told what it signed
        of_base = rules.outer_of(proof.chunk, proof.base + 1)
        if any(rules.outer_of(proof.chunk, v) != of_base for v in range(proof.base + 2, version + 1)):
            return  # such a file holds one step for all its versions, and the host changed it in between
        claim = FalseClaim(
            run_id=core.run_id,
            era=core.ledger.eras.number,
            fragment=self._number,
            version=version,
            chunk=self.case.fragment.index(proof.chunk),
            maker=maker.identity,
            claimed=b"".join(proof.claim.hashes),
            claim=proof.claim.signature,
            base=proof.base,
            base_hashes=b"".join(proof.base_hashes),
            before=proof.before,
            results=proof.results,
            rules=step_rules(rules, proof.chunk, version),
            factors=step_factors(rules, proof.chunk, proof.factors),
        )
        core.do(KeepProof(claim, tuple(peers)))


def _drawn(nonce: bytes, fragment: Fragment) -> tuple[int, ...]:
    found = {drawn_chunk(hash_bytes(nonce, bytes([at])), fragment.count) for at in range(CHUNKS_DRAWN)}
    return tuple(fragment.first + index for index in sorted(found))
