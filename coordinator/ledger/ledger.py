"""What the run durably knows: a fold over the journal's records and nothing else.

The run machine reads it and changes it only by `apply(record)`; a restart replays the same records and ends
in the same state (P5).  Pure: no clock, no I/O, and nothing that is not in a record.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from farflung.coordinator.ledger.leases import Leases, Reach
from farflung.coordinator.ledger.records import (
    AbortedRound,
    Admitted,
    Banned,
    CommittedRound,
    CutShort,
    DataFixed,
    DecidedOn,
    Departed,
    DigestFixed,
    DigestRefuted,
    DigestWithdrawn,
    Folded,
    FoundCheating,
    Genesis,
    Granted,
    Invited,
    ModelFixed,
    Opened,
    Paused,
    Record,
    Released,
    Resumed,
    Revoked,
    RolledBack,
    ShownFixed,
    Started,
    StreamEnded,
    Struck,
    Unbanned,
    Vouched,
)
from farflung.coordinator.ledger.register import Register
from farflung.coordinator.ledger.snapshot import packed, unpacked
from farflung.protocol.causes import DepartureCause
from farflung.protocol.digests import hash_bytes, keyed_hash
from farflung.protocol.fragments import BOOKS_FRAGMENT
from farflung.protocol.messages import UNKNOWN_LENGTH
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import Commit

ROUNDS_SHOWN = 50
DIGESTS_KEPT = 16
NORMS_KEPT = 10
SAVED_KEPT = 8  # versions of which checkpoints may exist, whose digests are kept for longer


@dataclass
class FragmentBook:
    """What is known of one fragment."""

    version: int = 0
    open_round: int = 0  # a round that was opened and neither committed nor aborted, 0 if none
    digests: dict[int, bytes] = field(default_factory=dict)
    shown: dict[int, bytes] = field(default_factory=dict)  # by version: what its holders show under its nonce
    commits: dict[int, Commit] = field(default_factory=dict)  # the last `keep_results`
    vouched: set[str] = field(default_factory=set)  # peers that have shown that they hold the run's state
    # Peer -> commits it was in, since it was last suspect.
    trust: Counter[str] = field(default_factory=Counter)
    # By version, of the last merged updates: the norm, and the mean of its members' tokens.
    norms: dict[int, tuple[float, float]] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)  # by version: tokens for each leased sample
    last_in: dict[str, int] = field(default_factory=dict)  # peer -> the newest version that has work of it
    dropped_round: int = 0  # the newest round whose work the guard threw away
    dropped_at: int = -1  # the version that it started from
    marks: dict[int, Mark] = field(default_factory=dict)  # by version


@dataclass(frozen=True)
class Mark:
    """What the books said when a version was committed: to be said again if the run goes back to it."""

    reach: Reach
    tokens: int
    loss: float | None


@dataclass
class Ledger:
    lease_samples: int
    keep_results: int
    fragments: int = 1
    every_rounds: int = 0  # the versions that are saved as checkpoints; 0: none
    incarnation: int = 0
    secret: bytes = b""
    era: int = 0  # how often the run went back to an older state
    delivered: bool = False  # somebody left with the finished model: nothing goes back behind that
    model: ModelSchema | None = None
    round_no: int = 0  # of the newest round of all fragments
    tokens: int = 0
    loss: float | None = None
    rounds: deque[CommittedRound] = field(default_factory=lambda: deque(maxlen=ROUNDS_SHOWN))
    names: dict[str, str] = field(default_factory=dict)
    # Of each peer, ever: who has the most of them decides about the data.
    committed_tokens: Counter[str] = field(default_factory=Counter)
    register: Register = field(default_factory=Register)
    books: list[FragmentBook] = field(init=False)
    leases: Leases = field(init=False)

    def __post_init__(self) -> None:
        self.leases = Leases(self.lease_samples, fragments=self.fragments)
        self.books = [FragmentBook() for _ in range(self.fragments)]

    @property
    def version(self) -> int:
        """Of the run: that of its least advanced fragment."""
        return min(book.version for book in self.books)

    @property
    def learned(self) -> bool:
        return any(book.version for book in self.books)

    def apply(self, record: Record) -> None:
        self.register.apply(record)
        match record:
            case Started(incarnation=incarnation, secret=secret):
                self.incarnation = incarnation
                self.secret = secret or self.secret
            case ModelFixed(model=model):
                self.model = model
                for book in self.books:
                    book.digests.clear()  # only before anything was learned: version 0 must be founded for this model
            case DataFixed(samples=samples, data=data):
                # Named again only before anything that was leased is committed, and while no round is in flight.
                number, stream = self.leases.next_id, samples == UNKNOWN_LENGTH
                self.leases = Leases(
                    self.lease_samples, samples, self.fragments, next_id=number, data=data, stream=stream
                )
            case StreamEnded(samples=samples):
                self.leases.end_stream(samples)
            case CutShort(leases=lease_ids, samples=samples):
                self.leases.cut_short(lease_ids, samples)
            case Genesis():
                for book, digest in zip(self.books, record.digests, strict=True):
                    book.digests[0] = digest
                for book, shown in zip(self.books, record.shown, strict=False):
                    book.shown[0] = shown
            case Admitted(peer=peer, name=name):
                self.names[peer] = name
            case Opened(plan=plan):
                self.round_no = max(self.round_no, plan.round_no)
                self.books[plan.fragment].open_round = plan.round_no
            case CommittedRound():
                self._commit(record)
            case AbortedRound(fragment=fragment):
                book = self.books[fragment]
                book.open_round = 0
                if record.dropped:
                    book.dropped_round, book.dropped_at = record.round_no, book.version
            case DigestFixed() | ShownFixed() | DigestWithdrawn() | DigestRefuted() | Vouched():
                self._know_state(self.books[record.fragment], record)
            case RolledBack(versions=versions):
                self._go_back(versions)
            case Granted(peer=peer, lease=lease):
                self.leases.grant(peer, lease)
            case Released(leases=lease_ids):
                self.leases.release(lease_ids)
            case Departed(cause=cause):
                self.delivered = self.delivered or cause is DepartureCause.FINISHED
            case DecidedOn() | FoundCheating():
                pass  # kept for the audit; nothing durable follows from them
            case Folded(ledger=raw):
                vars(self).update(vars(unpacked(raw, Ledger)))
            case Invited() | Revoked() | Struck() | Banned() | Unbanned() | Paused() | Resumed():
                pass  # the register has them

    def _know_state(
        self, book: FragmentBook, record: DigestFixed | ShownFixed | DigestWithdrawn | DigestRefuted | Vouched
    ) -> None:
        """What a version's state is, and who is heard about it."""
        match record:
            case DigestFixed(version=version, digest=digest, shown=shown):
                book.digests[version] = digest
                if shown:
                    book.shown[version] = shown
                for old in [v for v in book.digests if not self._is_kept(v, version)]:
                    del book.digests[old]
                    book.shown.pop(old, None)
            case ShownFixed(version=version, shown=shown):
                book.shown[version] = shown
            case DigestWithdrawn(version=version):
                for known in (book.digests, book.shown):
                    for void in [v for v in known if v >= version]:
                        del known[void]
            case DigestRefuted(peers=peers):
                book.vouched -= set(peers)
            case Vouched(peer=peer):
                book.vouched.add(peer)

    def _commit(self, record: CommittedRound) -> None:
        commit = record.commit
        book = self.books[commit.fragment]
        book.version = commit.version
        book.open_round = 0
        book.commits[commit.version] = commit
        book.commits.pop(commit.version - self.keep_results, None)
        self.rounds.append(record)
        book.trust.update(commit.included)
        for suspect in record.suspects:
            book.trust[suspect] = 0
        book.last_in.update(dict.fromkeys(commit.included, commit.version))
        if record.rate is not None:
            book.rates[commit.version] = record.rate
            _keep_newest(book.rates)
        if record.norm is not None:
            members = sum(weight > 0.0 for weight in commit.weights)
            book.norms[commit.version] = (record.norm, record.tokens / members)
            _keep_newest(book.norms)
        if commit.fragment == BOOKS_FRAGMENT:  # the same tokens went into every fragment
            self.tokens += record.tokens
            self.committed_tokens.update(_tokens_by(record))
            self.loss = record.loss if record.loss is not None else self.loss
        for used in record.used.values():
            self.leases.acknowledge(used, commit.fragment)
        book.marks[book.version] = Mark(self.leases.reach(commit.fragment), self.tokens, self.loss)
        # Not one that a digest is kept of, and the digest of this version is not settled yet.
        for old in [v for v in book.marks if not self._is_kept(v, book.version - 1)]:
            del book.marks[old]

    def folded(self, position: int) -> Folded:
        """All that the records up to this position made."""
        raw = packed(self)
        return Folded(position=position, ledger=raw, digest=hash_bytes(raw))

    def is_saved(self, version: int) -> bool:
        """Checkpoints of this version may exist."""
        return version > 0 and self.every_rounds > 0 and version % self.every_rounds == 0

    def nonce_of(self, fragment: int, version: int) -> bytes:
        """Under which holders of this version show that they are; nobody knows it before it is told."""
        numbers = b"".join(number.to_bytes(8, "big") for number in (self.era, fragment, version))
        return keyed_hash(hash_bytes(b"farflung/nonce/1\0", self.secret), numbers)

    def _is_kept(self, version: int, newest: int) -> bool:
        far = version <= newest - self.every_rounds * SAVED_KEPT
        return version > newest - DIGESTS_KEPT or (self.is_saved(version) and not far)

    def _go_back(self, versions: tuple[int, ...]) -> None:
        """Samples that only the lost versions had used are leased again; no lease from before counts any more."""
        self.era += 1
        reaches = []
        for fragment, (book, version) in enumerate(zip(self.books, versions, strict=True)):
            if version < book.version:
                mark = book.marks.get(version, Mark(Reach(0, 0, ()), 0, None))  # of version 0 there is none
                reaches.append(mark.reach)
                if fragment == BOOKS_FRAGMENT:
                    self.tokens, self.loss = mark.tokens, mark.loss
            else:
                reaches.append(self.leases.reach(fragment))
            book.version, book.open_round, book.dropped_at = version, 0, -1
            book.shown.clear()  # another era has other nonces
            known: dict[int, Any]
            for known in (book.digests, book.commits, book.norms, book.rates, book.marks):
                for newer in [v for v in known if v > version]:
                    del known[newer]
        self.leases.go_back(reaches)
        kept = [each for each in self.rounds if each.commit.version <= versions[each.commit.fragment]]
        self.rounds = deque(kept, maxlen=ROUNDS_SHOWN)


def _keep_newest(figures: dict[int, Any]) -> None:
    for old in sorted(figures)[:-NORMS_KEPT]:
        del figures[old]


def _tokens_by(record: CommittedRound) -> dict[str, int]:
    """Records of older versions have the sum alone: it is shared out by the weights."""
    if record.tokens_by:
        return record.tokens_by
    shares = {
        member: weight
        for member, weight in zip(record.commit.members, record.commit.weights, strict=True)
        if weight > 0.0
    }
    whole = sum(shares.values())
    return {member: round(record.tokens * share / whole) for member, share in shares.items()}
