"""What the run durably knows: a fold over the journal's records and nothing else.

The run machine reads it and changes it only by `apply(record)`; a restart replays the same records and ends
in the same state (P5).  Pure: no clock, no I/O, and nothing that is not in a record.
"""

from __future__ import annotations

import math
import types
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, lru_cache
from statistics import fmean, stdev
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from farflung.coordinator.ledger.leases import CoveredRange, Leases
from farflung.coordinator.ledger.pace import LossCurve
from farflung.coordinator.ledger.records import (
    AbortedRound,
    Admitted,
    Amended,
    CommittedBatch,
    CommittedRound,
    CutShort,
    DataFixed,
    Departed,
    DigestFixed,
    DigestRefuted,
    DigestWithdrawn,
    Folded,
    Genesis,
    Granted,
    ModelFixed,
    Opened,
    Paused,
    Record,
    Released,
    Resumed,
    RolledBack,
    ShownFixed,
    Started,
    StreamEnded,
    Vouched,
)
from farflung.coordinator.modes import registry
from farflung.protocol.digests import hash_bytes, keyed_hash
from farflung.protocol.errors import DepartureCause
from farflung.protocol.messages import UNKNOWN_LENGTH
from farflung.protocol.model_schema import BOOKS_FRAGMENT, ModelSchema
from farflung.protocol.round_words import Commit
from farflung.protocol.signing import Amendment

# ---- eras --------------------------------------------------------------------------------------------------
# Who may hold which version of a fragment, and what the books said of it. Pure.
#
# Held by the ledger, changed only for records that are written. A peer may hold a version that was committed
# while it was here and had shown the run's state, or in whose round it was. It may hold nothing any more when
# it said good-bye or was sent away: whoever left without a word may be alive behind a cut line, with the
# newest state in its memory.

NOTHING = -1
# Its process does not come back with what it held: it said so, or it was told to end.
ACCOUNTED_FOR = frozenset(
    {
        DepartureCause.LEFT,
        DepartureCause.FINISHED,
        DepartureCause.MISFIT,
        DepartureCause.KICKED,
        DepartureCause.BANNED,
    }
)


@dataclass
class HolderMark:
    """A peer and one fragment."""

    reached: int = NOTHING  # the newest version that it may hold
    tokens: int = 0  # that commits took from it, ever


@dataclass(frozen=True)
class Mark:
    """What the books said when a version was committed: to be said again if the run goes back to it."""

    reach: CoveredRange
    tokens: int
    loss: float | None


@dataclass
class Eras:
    """The run went back to an older state so many times."""

    number: int = 0
    because: str = ""  # why this one began
    furthest: int = 0  # the newest version that was lost by going back
    delivered: bool = False  # somebody left with the finished model: nothing goes back behind that

    def begin(self, record: RolledBack, newest: int) -> None:
        """`newest`: of all versions that there were."""
        self.number, self.because = self.number + 1, record.reason
        self.furthest = 0 if record.undone else max(self.furthest, newest)


# ---- run clock ---------------------------------------------------------------------------------------------
# The run's own clock. A fold over records. Pure.
#
# Part of the ledger. It counts the seconds since the run began: while a coordinator runs by its monotonic
# clock, which nobody can set; while none runs by the wall clock of its machine, and never backwards. No
# peer's clock takes part, and no peer is told a time.


@dataclass
class RunClock:
    newest_s: float = 0.0  # the newest reading in any record
    began_s: float = 0.0  # when the newest coordinator started
    wall_s: float = 0.0  # and the wall clock of its machine then

    def apply(self, record: Record) -> None:
        match record:
            case Started(clock_s=clock_s, wall_s=wall_s):
                self._saw(clock_s)
                self.began_s, self.wall_s = clock_s, wall_s
            case CommittedBatch(rounds=rounds):
                self._saw(rounds[-1].at_s)
            case _:
                self._saw(getattr(record, "at_s", 0.0))

    def at_start(self, wall_s: float) -> float:
        """Of a coordinator that starts now: time went on while there was none."""
        away_s = wall_s - self.wall_s if self.wall_s and wall_s else 0.0
        return max(self.newest_s, self.began_s + away_s)

    def _saw(self, at_s: float) -> None:
        self.newest_s = max(self.newest_s, at_s)


# ---- useful members ----------------------------------------------------------------------------------------
# How many members a run can use: n*, from the dot products of the members' contributions. Part of the ledger.
# Pure.
#
# What a member learns in a round is what all have in common, and noise of its own. A mean of n members keeps
# the first, and 1/n of the power of the second. The cosine of a round (`Screening.cosine`) is the share of a
# contribution's power that is common, so (1 - cosine) / cosine is the noise against it, and with n* members
# as much noise is left in the mean as NOISE_LEFT says: further ones hardly change what a round learns. In a
# run the figure grows, as what is easy to agree on is learned.
#
# Who may lie: an owner about the products of its share, within what vectors can have. So it is for people,
# and no rule of a run follows from it.

NOISE_LEFT = 0.05  # in the mean, of the power of what members have in common
ROUNDS_LEAST = 8
ROUNDS_KEPT = 32
SURE = 2.0  # standard errors to both sides
MEMBERS_MOST = 1_000_000  # more is told as so many


@dataclass(frozen=True)
class Useful:
    members: int | None  # None: not known yet
    least: int  # 0: nothing is known
    most: int | None  # None: nobody knows
    rounds: int  # that it is from
    text: str  # for people

    def told(self) -> dict[str, Any]:
        """As a status has it."""
        return {
            "members": self.members,
            "least": self.least,
            "most": self.most,
            "rounds": self.rounds,
            "text": self.text,
        }


def useful_members(cosines: Sequence[float]) -> Useful:
    """`cosines`: of the newest rounds."""
    rounds = len(cosines)
    if rounds < ROUNDS_LEAST:
        why = f"not known yet: {rounds} of {ROUNDS_LEAST} rounds in which two or more members were compared"
        return Useful(None, 0, None, rounds, why)
    middle, off = fmean(cosines), SURE * stdev(cosines) / math.sqrt(rounds)
    least = _members_at(middle + off)
    if middle - off <= 0.0:
        why = (
            f"not known yet, {least:,} or more: in {rounds} rounds members agreed by little more than chance"
        )
        return Useful(None, least, None, rounds, why)
    members, most = _members_at(middle), _members_at(middle - off)
    text = f"about {members:,} ({least:,} to {most:,}, from {rounds} rounds)"
    return Useful(members, least, most, rounds, text)


def _members_at(cosine: float) -> int:
    if cosine >= 1.0:
        return 1
    if cosine <= 0.0:
        return MEMBERS_MOST
    return min(MEMBERS_MOST, max(1, math.ceil((1.0 - cosine) / cosine / NOISE_LEFT)))


# ---- snapshot ----------------------------------------------------------------------------------------------
# The ledger as bytes and back: what a long journal is folded into, so that a run of months has a journal of
# megabytes.
#
# Called by the ledger, for the record `Folded`. The bytes are plain data (msgpack), written and read along
# the types of the dataclasses; fields with a leading underscore follow from the others and are not in it.
# Pure.


def packed(whole: object) -> bytes:
    return msgspec.msgpack.encode(_plain(whole))


def unpacked(raw: bytes, kind: type[Any]) -> Any:
    """What was packed, which was of this kind.  Errors: those of a record that cannot be read."""
    return built(kind, msgspec.msgpack.decode(raw))


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {each: _plain(getattr(value, each)) for each in _fields(type(value))}
    if isinstance(value, dict):
        return [[_plain(key), _plain(each)] for key, each in value.items()]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, deque):
        return [value.maxlen, [_plain(each) for each in value]]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value  # msgspec's own structures, numbers, texts and bytes


@cache
def _fields(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind) if not each.name.startswith("_")}


def built(kind: Any, raw: Any) -> Any:
    if is_dataclass(kind):
        return _object(kind, raw)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        [other] = [each for each in inner if each is not types.NoneType]
        return None if raw is None else built(other, raw)
    build: Callable[[Any, Any], Any] | None = _CONTAINERS.get(origin)
    if build is not None:
        return build(kind, raw)
    if isinstance(origin, type) and issubclass(origin, dict):
        # A Counter names the type of its keys alone.
        of_key, of_value = inner if len(inner) == 2 else (*inner, int)
        return origin({built(of_key, key): built(of_value, each) for key, each in raw})
    return msgspec.convert(raw, kind)


def _object(kind: Any, raw: dict[str, Any]) -> Any:
    made = object.__new__(kind)
    for name, of_field in _fields(kind).items():
        # A snapshot from before the field was thought of says nothing of it.
        value = built(of_field, raw[name]) if name in raw else _default(kind, name)
        object.__setattr__(made, name, value)
    after = getattr(made, "after_unpacking", None)
    if after is not None:
        after()
    return made


def _default(kind: type[Any], name: str) -> Any:
    field = next(each for each in fields(kind) if each.name == name)
    if field.default_factory is not MISSING:
        return field.default_factory()
    if field.default is MISSING:
        raise msgspec.ValidationError(f"the folded ledger has no {name}")
    return field.default


def _tuple(kind: Any, raw: Any) -> tuple[Any, ...]:
    inner = get_args(kind)
    if inner[-1] is Ellipsis:
        return tuple(built(inner[0], each) for each in raw)
    return tuple(built(each, value) for each, value in zip(inner, raw, strict=True))


def _deque(kind: Any, raw: Any) -> deque[Any]:
    most, found = raw
    return deque((built(get_args(kind)[0], each) for each in found), maxlen=most)


_CONTAINERS: dict[Any, Callable[[Any, Any], Any]] = {
    list: lambda kind, raw: [built(get_args(kind)[0], each) for each in raw],
    set: lambda kind, raw: {built(get_args(kind)[0], each) for each in raw},
    tuple: _tuple,
    deque: _deque,
}


# ---- ledger ------------------------------------------------------------------------------------------------

ROUNDS_SHOWN = 50
DIGESTS_KEPT = 16
NORMS_KEPT = 10
NUMBERS_AHEAD = 1 << 20  # more than a coordinator gives between two commits, of whatever it numbers
SAVED_KEPT = 8  # versions of which checkpoints may exist, whose digests are kept for longer


@dataclass
class VersionFigures:
    """By version, of the last commits: what members and updates are measured by."""

    # Of the merged update: the norm, and the mean of its members' tokens.
    norms: dict[int, tuple[float, float]] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)  # tokens for each leased sample
    cosines: dict[int, float] = field(default_factory=dict)  # see useful members
    # When their rounds opened, on the run's clock, and the tokens of each member.
    work: dict[int, tuple[float, dict[str, int]]] = field(default_factory=dict)

    def add(self, record: CommittedRound) -> None:
        commit, merged = record.commit, record.merged
        # What it brought was learned before it opened: a round that stood still for long made the next work longer.
        self.work[commit.version] = (record.at_s - record.seconds, record.tokens_by)
        _keep_newest(self.work)
        if record.rate is not None:
            self.rates[commit.version] = record.rate
            _keep_newest(self.rates)
        if merged.cosine is not None:
            self.cosines[commit.version] = merged.cosine
            _keep_newest(self.cosines, ROUNDS_KEPT)
        if merged.norm is not None:
            members = sum(weight > 0.0 for weight in commit.weights)
            self.norms[commit.version] = (merged.norm, record.tokens / members)
            _keep_newest(self.norms)


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
    figures: VersionFigures = field(default_factory=VersionFigures)
    last_in: dict[str, int] = field(default_factory=dict)  # peer -> the newest version that has work of it
    dropped_round: int = 0  # the newest round whose work the guard threw away
    dropped_at: int = -1  # the version that it started from
    marks: dict[int, Mark] = field(default_factory=dict)  # by version
    holders: dict[str, HolderMark] = field(default_factory=dict)  # who may hold what of it

    @property
    def makers(self) -> tuple[str, ...]:
        """Members of the newest version's commit: they hear of it at once.  None where no such commit is known."""
        commit = self.commits.get(self.version)
        return commit.members if commit is not None else ()

    def may_hold(self, peer: str) -> int:
        """The newest version that it may hold."""
        holder = self.holders.get(peer)
        return holder.reached if holder is not None else NOTHING

    def reaches(self, peer: str, version: int) -> None:
        holder = self.holders.setdefault(peer, HolderMark())
        holder.reached = max(holder.reached, version)

    def forget_after(self, version: int) -> None:
        """What was committed later is void."""
        known: dict[int, Any]
        figures = self.figures.norms, self.figures.rates, self.figures.cosines, self.figures.work
        for known in (self.digests, self.shown, self.commits, self.marks, *figures):
            for newer in [v for v in known if v > version]:
                del known[newer]


class LedgerPart:
    """What a mode has to remember: a fold over the same records; this is that of one that remembers nothing."""

    def apply(self, record: Record, ledger: Ledger) -> None:
        """`ledger`: as it is with this record."""

    def kept(self) -> bytes:
        """What peers keep of it for a coordinator that loses its disk; empty: nothing."""
        return b""

    def put_back(self, version: int, kept: bytes, newest: bool) -> None:
        """What was kept at the commit of this version of the first fragment: the `newest` that was shown, or, after it,
        an older one, to which the run may go back."""

    def on_restored(self) -> None:
        """All is put back that was shown, and it may lack what was written last: numbers go on far ahead."""


@dataclass
class Totals:
    """What the run's rounds came to, for people; the same tokens went into every fragment."""

    tokens: int = 0
    loss: float | None = None
    curve: LossCurve = field(default_factory=LossCurve)  # of all rounds
    rounds: deque[CommittedRound] = field(default_factory=lambda: deque(maxlen=ROUNDS_SHOWN))

    def return_to(self, mark: Mark, version: int) -> None:
        self.tokens, self.loss = mark.tokens, mark.loss
        self.curve.forget_after(version)

    def forget_rounds_after(self, versions: Sequence[int]) -> None:
        """`versions`: of each fragment."""
        kept = [each for each in self.rounds if each.commit.version <= versions[each.commit.fragment]]
        self.rounds = deque(kept, maxlen=ROUNDS_SHOWN)


@dataclass
class PeersKnown:
    names: dict[str, str] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)  # ever: who has the most decides about the data
    here: set[str] = field(default_factory=set)  # they came in and have not gone, since the last start


@dataclass(frozen=True)
class LedgerRules:
    """Of the run's manifest, what records are folded by."""

    lease_samples: int
    keep_results: int
    fragments: int = 1
    every_rounds: int = 0  # the versions that are saved as checkpoints; 0: none

    def is_saved(self, version: int) -> bool:
        """Checkpoints of this version may exist."""
        return version > 0 and self.every_rounds > 0 and version % self.every_rounds == 0

    def is_kept(self, version: int, newest: int) -> bool:
        """The digest of this version."""
        far = version <= newest - self.every_rounds * SAVED_KEPT
        return version > newest - DIGESTS_KEPT or (self.is_saved(version) and not far)


@dataclass
class Ledger:
    rules: LedgerRules
    incarnation: int = 0
    secret: bytes = b""
    eras: Eras = field(default_factory=Eras)
    model: ModelSchema | None = None
    round_no: int = 0  # of the newest round of all fragments
    totals: Totals = field(default_factory=Totals)
    peers: PeersKnown = field(default_factory=PeersKnown)
    amendments: list[Amendment] = field(default_factory=list)
    clock: RunClock = field(default_factory=RunClock)
    paused: Paused | None = None  # by the host
    parts: dict[str, Any] = field(default_factory=dict)  # of modes, by name: each folds records as well
    books: list[FragmentBook] = field(init=False)
    leases: Leases = field(init=False)

    def __post_init__(self) -> None:
        self.leases = Leases(self.rules.lease_samples, fragments=self.rules.fragments)
        self.books = [FragmentBook() for _ in range(self.rules.fragments)]
        self.parts = {name: kind() for name, kind in registry.having("LedgerPart").items()}

    @property
    def version(self) -> int:
        """Of the run: that of its least advanced fragment."""
        return min(book.version for book in self.books)

    @property
    def learned(self) -> bool:
        return any(book.version for book in self.books)

    def after_unpacking(self) -> None:
        """The parts are plain yet.  One of a mode that was taken out can't be read: the run must not go on without."""
        kinds = registry.having("LedgerPart")
        if lost := sorted(self.parts.keys() - kinds.keys()):
            raise msgspec.ValidationError(
                f"it has records of what this coordinator was installed without: {lost}"
            )
        self.parts = {name: built(kind, self.parts.get(name, {})) for name, kind in kinds.items()}

    def apply(self, record: Record) -> None:
        self._fold(record)
        self.clock.apply(record)
        for part in self.parts.values():
            part.apply(record, self)

    def _fold(self, record: Record) -> None:
        match record:
            case Started(incarnation=incarnation, secret=secret):
                self.incarnation = incarnation
                self.peers.here.clear()
                self.secret = secret or self.secret
            case ModelFixed(model=model):
                self.model = model
                for book in self.books:
                    book.digests.clear()  # only before anything was learned: version 0 must be founded for this model
            case DataFixed() | StreamEnded() | CutShort():
                self._know_data(record)
            case Genesis():
                for book, digest in zip(self.books, record.digests, strict=True):
                    book.digests[0] = digest
                for book, shown in zip(self.books, record.shown, strict=False):
                    book.shown[0] = shown
            case Admitted(peer=peer, name=name):
                self.peers.names[peer] = name
                self.peers.here.add(peer)
            case Opened(plan=plan):
                self.round_no = max(self.round_no, plan.round_no)
                self.books[plan.fragment].open_round = plan.round_no
            case CommittedRound():
                self._commit((record,))
            case CommittedBatch(rounds=rounds):
                self._commit(rounds)
            case AbortedRound(fragment=fragment):
                book = self.books[fragment]
                book.open_round = 0
                if record.dropped:
                    book.dropped_round, book.dropped_at = record.round_no, book.version
            case DigestFixed() | ShownFixed() | DigestWithdrawn() | DigestRefuted() | Vouched():
                self._know_state(self.books[record.fragment], record)
            case RolledBack():
                self._go_back(record)
            case Amended(amendment=amendment):
                self.amendments.append(amendment)
            case Granted(peer=peer, lease=lease):
                self.leases.grant(peer, lease)
            case Released():
                self.leases.release(record.leases)
            case Departed():
                self._depart(record)
            case Folded(ledger=raw):
                vars(self).update(vars(unpacked(raw, Ledger)))
            case Paused() | Resumed():
                self.paused = record if isinstance(record, Paused) else None
            case _:
                pass  # kept for the audit, or of a mode

    def _know_data(self, record: DataFixed | StreamEnded | CutShort) -> None:
        match record:
            case DataFixed():
                self._fix_data(record)
            case StreamEnded(samples=samples):
                self.leases.end_stream(samples)
            case CutShort(leases=lease_ids, samples=samples):
                self.leases.cut_short(lease_ids, samples)

    def _fix_data(self, record: DataFixed) -> None:
        """Named again only before anything that was leased is committed, and while no round is in flight."""
        self.leases = Leases(
            self.rules.lease_samples,
            record.samples,
            self.rules.fragments,
            next_id=self.leases.next_id,
            data=record.data,
            stream=record.samples == UNKNOWN_LENGTH,
        )

    def _know_state(
        self, book: FragmentBook, record: DigestFixed | ShownFixed | DigestWithdrawn | DigestRefuted | Vouched
    ) -> None:
        """What a version's state is, and who is heard about it."""
        match record:
            case DigestFixed(version=version, digest=digest, shown=shown):
                book.digests[version] = digest
                if shown:
                    book.shown[version] = shown
                for old in [v for v in book.digests if not self.rules.is_kept(v, version)]:
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
                book.reaches(peer, book.version)

    def _commit(self, rounds: Sequence[CommittedRound]) -> None:
        """Of one fragment, or of all stages of a model at once."""
        counted = [record.counted for record in rounds]
        if any(counted):
            self._check_are_all_stages(rounds)
            self.leases.settled = True
        if rounds[-1].loss is not None and rounds[0].commit.fragment == BOOKS_FRAGMENT:
            self.totals.loss = rounds[-1].loss  # of several stages the last one knows it
        for record in rounds:
            self._on_round(record)
        if rounds[0].commit.fragment == BOOKS_FRAGMENT:
            self.totals.curve.add(rounds[0].commit.version, self.totals.tokens, rounds[-1].loss)

    def _check_are_all_stages(self, rounds: Sequence[CommittedRound]) -> None:
        """ValueError for a journal that lets some stages go on without the others."""
        due = [(number, book.version + 1) for number, book in enumerate(self.books)]
        if [(record.commit.fragment, record.commit.version) for record in rounds] != due:
            raise ValueError("a batch is committed by one round of every stage, to the next version")

    def _on_round(self, record: CommittedRound) -> None:
        commit, totals = record.commit, self.totals
        book = self.books[commit.fragment]
        book.version = commit.version
        book.open_round = 0
        book.commits[commit.version] = commit
        book.commits.pop(commit.version - self.rules.keep_results, None)
        totals.rounds.append(record)
        book.trust.update(commit.included)
        for peer in {*commit.members, *(self.peers.here & book.vouched)}:
            book.reaches(peer, commit.version)
        for peer, tokens in record.tokens_by.items():
            book.holders[peer].tokens += tokens
        for suspect in record.merged.suspects:
            book.trust[suspect] = 0
        book.last_in.update(dict.fromkeys(commit.included, commit.version))
        book.figures.add(record)
        if commit.fragment == BOOKS_FRAGMENT:  # the same tokens went into every fragment
            totals.tokens += record.tokens
            self.peers.tokens.update(record.tokens_by)
        for used in record.used.values():
            self.leases.acknowledge(used, commit.fragment)
        book.marks[book.version] = Mark(self.leases.reach(commit.fragment), totals.tokens, totals.loss)
        # Not one that a digest is kept of, and the digest of this version is not settled yet.
        for old in [v for v in book.marks if not self.rules.is_kept(v, book.version - 1)]:
            del book.marks[old]

    def folded(self, position: int) -> Folded:
        """All that the records up to this position made."""
        raw = packed(self)
        return Folded(position=position, ledger=raw, digest=hash_bytes(raw))

    def nonce_of(self, fragment: int, version: int) -> bytes:
        """Under which holders of this version show that they are; nobody knows it before it is told."""
        return _nonce_of(self.secret, fragment, version)

    # ---- going back ------------------------------------------------------------------------------------------

    def _go_back(self, record: RolledBack) -> None:
        """Samples that only the lost versions had used are leased again; no lease from before counts any more."""
        versions = record.versions
        self.eras.begin(record, max(book.version for book in self.books))
        reaches = []
        for fragment, (book, version) in enumerate(zip(self.books, versions, strict=True)):
            reaches.append(self._return_to(fragment, version))
            book.forget_after(version)
            for holder in book.holders.values():
                holder.reached = min(holder.reached, version)
        self.leases.go_back(reaches)
        self.totals.forget_rounds_after(versions)

    def _return_to(self, fragment: int, version: int) -> CoveredRange:
        """The fragment is at this version.  Returns what it has learned from."""
        book = self.books[fragment]
        # Of version 0 there is no mark.
        mark = book.marks.get(version, Mark(CoveredRange(0, 0, ()), 0, None))
        stays = version == book.version
        if fragment == BOOKS_FRAGMENT and not stays:
            self.totals.return_to(mark, version)
        reach = self.leases.reach(fragment) if stays else mark.reach
        book.version, book.open_round, book.dropped_at = version, 0, -1
        return reach

    # ---- who may hold what --------------------------------------------------------------------------------

    def _depart(self, record: Departed) -> None:
        """Whoever is accounted for holds nothing any more; when it comes again, it has to show what it holds."""
        self.eras.delivered = self.eras.delivered or record.cause is DepartureCause.FINISHED
        self.peers.here.discard(record.peer)
        for book in self.books if record.cause in ACCOUNTED_FOR else ():
            book.vouched.discard(record.peer)
            if record.peer in book.holders:
                book.holders[record.peer].reached = NOTHING


def _keep_newest(figures: dict[int, Any], most: int = NORMS_KEPT) -> None:
    for old in sorted(figures)[:-most]:
        del figures[old]


@lru_cache(maxsize=256)  # asked for with every beat, of the few versions that members hold
def _nonce_of(secret: bytes, fragment: int, version: int) -> bytes:
    numbers = b"".join(number.to_bytes(8, "big") for number in (fragment, version))
    return keyed_hash(hash_bytes(b"farflung/nonce/1\0", secret), numbers)
