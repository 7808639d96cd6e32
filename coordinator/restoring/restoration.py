"""Puts a run together again out of what its peers keep, where the coordinator's folder is an old copy, or lost.

Driven by restoring_door.py before the run machine is made, and by the simulator.  Everybody who knocks is asked for the
commits that it keeps (`AskKept`), the newest first, until it has no older one.  `due` then makes the records that the
journal lacks.  Pure: clock and chance are arguments.

Where rounds are in groups everybody keeps the heads of all steps, and some the books (`KEEPERS` in kept_books.py): the
books of a newer step are waited for, and then the run goes on from the newest one whose books are there.

Who may lie: what counts is signed by this run's key, so a forged commit, one of another run and one with changed books
are refused.  An old one loses to a newer one.  Two commits of one number are a fork, made by two coordinators of one
key: the line of the later incarnation goes on, and people are told.  Of two runs of one key and the same rules, where
no journal says which, the one that most identities show goes on; identities cost nothing, so people are told.  Who
withholds the newest commit while nobody else has it wins that the run goes on from the one before; answers are signed
by their authors, so nobody hastens the decision in the name of another one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from farflung.coordinator.door.hello_check import other_protocol, refuse
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import Amended, ModelFixed, Record
from farflung.coordinator.ledger.run_store import RunRecords
from farflung.coordinator.restoring.kept_books import KeptSteps, Restored, books_in, name_of_model
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.limits import KEPT_COMMITS, MAX_PEERS, PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import AskStatus, FromDoor, Knock, Refuse
from farflung.protocol.mode_words import AskKept, KeptReceipts
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import Commit
from farflung.protocol.run_terms import Terms
from farflung.protocol.signed_words import kept_part
from farflung.protocol.signing import (
    Amendment,
    KeptCommit,
    SignedHead,
    curve_key_of,
    name_of,
    name_of_commit,
    peer_id_of,
    verify,
)

CODE = "restoring"
KNOCKS_EVERY_S = 10.0  # the longest pause of a peer that is out of contact
PATIENCE_S = KNOCKS_EVERY_S + 2.0  # after the first answer
NOBODY_S = KNOCKS_EVERY_S + 5.0  # after the start, where this folder has a run to go on with
ASK_AGAIN_S = 1.0  # a peer that is done knocks again so soon
NEWEST = 1 << 61
NOTES_MOST = 16


@dataclass(frozen=True)
class Own:
    """What this coordinator has itself."""

    manifest: Manifest  # as its file says
    key: bytes  # ed25519, public
    run_id: bytes = b""  # empty: no journal
    ledger: Ledger | None = None
    first: Manifest | None = None  # that its journal began with


@dataclass
class _Caller:
    below: int = NEWEST
    asked: int = 0
    done: bool = False


@dataclass
class _Evidence:
    """All that counts, whoever it came from."""

    # By run, and in it by number and name of its history; several runs: the host began anew with the same key.
    heads: dict[bytes, dict[tuple[int, bytes], KeptCommit]] = field(default_factory=dict)
    shown_by: dict[bytes, set[str]] = field(default_factory=dict)  # by run
    commits: dict[bytes, Commit] = field(default_factory=dict)
    models: dict[bytes, tuple[ModelSchema, str]] = field(default_factory=dict)  # and who showed it
    manifests: dict[bytes, Manifest] = field(default_factory=dict)
    # By run, the longest list that this run's key signed: a shorter one is its beginning.
    amendments: dict[bytes, tuple[Amendment, ...]] = field(default_factory=dict)


class Restoring:
    def __init__(self, own: Own, nonce: bytes, now: float) -> None:
        self._own, self._nonce, self._began_at = own, nonce, now
        self._callers: OrderedDict[bytes, _Caller] = OrderedDict()
        self._answered: dict[str, str] = {}  # peer -> its name
        self._first_at: float | None = None
        self._shown = _Evidence()
        self._refused: set[str] = set()
        self.notes: list[str] = []  # for people; taken by the shell
        self._heard_of, self._has_begun = (False, 0), False
        self.reason = "waiting for peers"

    # ---- at the door -------------------------------------------------------------------------------------------

    def on_door(self, caller: bytes, message: FromDoor, now: float) -> AskKept | Refuse | None:
        """The answer.  `caller`: its connection."""
        match message:
            case Knock(protocol=protocol) if protocol != PROTOCOL_VERSION:
                return other_protocol(protocol)
            case Knock(run=run) | AskStatus(run=run) if run != self._own.manifest.run.name:
                return refuse("run", f"this coordinator runs '{self._own.manifest.run.name}', not '{run}'")
            case Knock():
                known = self._caller(caller)
                if not known.done:
                    return AskKept(nonce=self._nonce, below=known.below)
            case KeptReceipts():
                return self._on_kept(self._caller(caller), message, now)
            case AskStatus():
                pass
            case _:
                return None
        return self._wait(now)

    def _wait(self, now: float) -> Refuse:
        self._look(now)
        return refuse(CODE, f"the coordinator puts the run together again: {self.reason}", ASK_AGAIN_S)

    def _caller(self, caller: bytes) -> _Caller:
        found = self._callers.setdefault(caller, _Caller())
        self._callers.move_to_end(caller)
        while len(self._callers) > MAX_PEERS:
            self._callers.popitem(last=False)
        return found

    def _on_kept(self, caller: _Caller, kept: KeptReceipts, now: float) -> AskKept | Refuse:
        if not verify(kept.identity, kept_part(kept, self._nonce), kept.signature):
            return refuse(
                "signature", "what you keep is not signed by the identity that shows it", ASK_AGAIN_S
            )
        peer, shown = peer_id_of(kept.identity), kept.kept
        why_not = self._why_not(kept) if shown is not None else ""
        if shown is not None and not why_not:
            self._take(kept, shown, peer)
            self._first_at = now if self._first_at is None else self._first_at
            caller.below, caller.asked = min(caller.below, shown.head.number), caller.asked + 1
            if caller.below > 1 and caller.asked < KEPT_COMMITS:
                return AskKept(nonce=self._nonce, below=caller.below)
        if why_not and self._is_told_of(peer):
            self.notes.append(f"{name_of(kept.identity)} shows a commit that is not taken: {why_not}")
        caller.done = True
        if len(self._answered) < MAX_PEERS:
            self._answered[peer] = name_of(kept.identity)
        return self._wait(now)

    def _why_not(self, kept: KeptReceipts) -> str:
        """Why what is shown does not count; empty: it does."""
        assert kept.kept is not None
        head, own = kept.kept.head, self._own
        if not head.is_by(own.key):
            return "it is not signed by this run's key"
        if own.run_id and head.run_id != own.run_id:
            return "it is of another run with the same key"
        if own.first is not None and head.manifest != own.first.digest:
            return "it is of a run with other rules"
        if not own.run_id and self._manifest_of(kept) is None:
            return f"it is of a run with other rules than {own.manifest.run.name}'s in the file given"
        if kept.kept.books and books_in(kept.kept) is None:
            return "its books are not what was signed, or of another version of farflung"
        return ""

    def _manifest_of(self, kept: KeptReceipts) -> Manifest | None:
        """What that run began with, if the file given is of that run: as it began, or as it was amended."""
        assert kept.kept is not None
        if hash_bytes(kept.manifest) != kept.kept.head.manifest:
            return None
        try:
            first = Manifest.from_canonical(kept.manifest)
            terms = Terms(first).believed(kept.amendments, kept.kept.head.run_id, curve_key_of(self._own.key))
        except (UserError, ValueError):
            return None
        given = self._own.manifest
        own = {"admission": given.admission, "net": first.net.model_copy(update=_relay_of(given))}
        return first.model_copy(update=own) if terms.includes(given) else None

    def _take(self, kept: KeptReceipts, shown: KeptCommit, peer: str) -> None:
        found, head = self._shown, shown.head
        self._tell_of_fork(shown)
        self._count_run(head.run_id, peer)
        heads = found.heads.setdefault(head.run_id, {})
        known = heads.get((head.number, head.after))
        if known is None or not known.books:
            heads[head.number, head.after] = shown
        for commit in kept.commits:
            if name_of_commit(commit) in head.commits:
                found.commits[name_of_commit(commit)] = commit
        books = books_in(shown)
        if kept.model is not None and books is not None and name_of_model(kept.model) == books.model:
            found.models.setdefault(books.model, (kept.model, peer))
        if not self._own.run_id and head.manifest not in found.manifests:
            manifest = self._manifest_of(kept)
            if manifest is not None:
                found.manifests[head.manifest] = manifest
        if (why_not := self._take_amendments(head, kept.amendments)) and self._is_told_of(peer):
            self.notes.append(f"{name_of(kept.identity)} shows amendments that are not believed: {why_not}")

    def _count_run(self, run_id: bytes, peer: str) -> None:
        shown_by = self._shown.shown_by
        if shown_by and run_id not in shown_by and len(self.notes) < NOTES_MOST:
            self.notes.append(
                "more than one run was begun with this key and these rules: the one that most peers show goes on; to "
                "have another one, start on a copy of its journal"
            )
        by = shown_by.setdefault(run_id, set())
        by |= {peer} if len(by) < MAX_PEERS else set()

    def _take_amendments(self, head: SignedHead, told: tuple[Amendment, ...]) -> str:
        """Anybody may show what he likes beside a true commit.  Why it does not count; empty: it does."""
        first, longest = self._own.first or self._shown.manifests.get(head.manifest), self._shown.amendments
        if first is None or len(told) <= len(longest.get(head.run_id, ())):
            return ""
        try:
            believed = Terms(first).believed(told, head.run_id, curve_key_of(self._own.key)).amendments
        except UserError as error:
            return str(error)
        longest[head.run_id] = max(longest.get(head.run_id, ()), believed, key=len)
        return ""

    def _is_told_of(self, peer: str) -> bool:
        """People hear once of somebody who shows what does not count, and not of a crowd of them."""
        told = peer not in self._refused and len(self._refused) < NOTES_MOST
        self._refused |= {peer} if told else set()
        return told

    def _tell_of_fork(self, shown: KeptCommit) -> None:
        head = shown.head
        for (number, after), other in self._shown.heads.get(head.run_id, {}).items():
            if number == head.number and after != head.after and len(self.notes) < NOTES_MOST:
                one, two = sorted((other.head.incarnation, head.incarnation))
                self.notes.append(
                    f"the run was forked: step {number} was signed twice by this run's key, by coordinators {one} and "
                    f"{two}; the line of {two} goes on, and what only the other one made is void. Was a copy of the "
                    "folder in use beside the original?"
                )

    # ---- the decision ------------------------------------------------------------------------------------------

    def due(self, now: float) -> RunRecords | None:
        """None: it waits, and `reason` says for whom."""
        if self._look(now):
            return None
        chain = self._chain()
        own = self._own
        newest = chain[0] if chain else None
        if newest is None:
            nothing = Restored(kept=None, reason=self._told(None), given_up=self._given_up(()))
            return RunRecords(own.run_id, own.first or own.manifest, (nothing,))
        books = books_in(newest)
        model = self._shown.models.get(books.model) if books is not None else None
        records: list[Record] = []
        if (own.ledger is None or own.ledger.model is None) and model is not None:
            records.append(ModelFixed(model=model[0], peer=model[1]))
        manifest = own.first or self._shown.manifests[newest.head.manifest]
        records += self._amendments(manifest, newest.head.run_id)
        named = {name for kept in chain for name in kept.head.commits}
        restored = Restored(
            kept=newest,
            older=tuple(chain[1:]),
            commits=tuple(commit for name, commit in self._shown.commits.items() if name in named),
            peers=tuple(sorted(self._answered)),
            reason=self._told(newest),
            given_up=self._given_up(chain),
        )
        return RunRecords(newest.head.run_id, manifest, (*records, restored))

    def take_notes(self) -> list[str]:
        """For people, since the last time: what is wrong, and that more have answered."""
        heard_of = (self._first_at is not None, len(self._answered))
        if heard_of != self._heard_of or not self._has_begun:
            self._heard_of, self._has_begun = heard_of, True
            self.notes.append(f"restoring: {self.reason}" if self.reason else "restoring: it is decided")
        notes, self.notes = self.notes, []
        return notes

    def _look(self, now: float) -> str:
        chain = self._chain(1)
        lacks = self._lacks(chain)
        answered = len(self._answered)
        heard = RestoringState(bool(self._own.run_id), self._began_at, self._first_at, answered, lacks)
        self.reason = why_wait(heard, now)
        if not self.reason and not chain and not self._own.run_id:
            self.reason = (
                f"nobody who keeps the books of the run has come: waiting for one, of step {lacks} best"
            )
        elif not self.reason and chain and not self._has_model(chain[0]):
            self.reason = "nobody has shown the model that the commits are of: waiting for a peer that has it"
        return self.reason

    def _lacks(self, chain: Sequence[KeptCommit]) -> int:
        """The newest step that was signed, if nobody has shown its books, and this journal has not come so far."""
        _, number = self._given_up(chain)
        return number

    def _given_up(self, chain: Sequence[KeptCommit]) -> tuple[int, int]:
        """Of that step, incarnation and number; who holds what it made is not to hold the run up for it later."""
        known = [kept.head.order for kept in chain[:1]]
        known += [KeptSteps.of(self._own.ledger).link.order] if self._own.ledger is not None else []
        newest = max((kept.head.order for kept in self._heads().values()), default=(0, 0))
        return newest if newest > max(known, default=(0, 0)) else (0, 0)

    def _has_model(self, newest: KeptCommit) -> bool:
        books, ledger = books_in(newest), self._own.ledger
        return (ledger is not None and ledger.model is not None) or (
            books is not None and books.model in self._shown.models
        )

    def _heads(self) -> dict[tuple[int, bytes], KeptCommit]:
        """Of the run that goes on."""
        shown_by = self._shown.shown_by
        run_id = max(shown_by, key=lambda each: (len(shown_by[each]), each), default=b"")
        return self._shown.heads.get(run_id, {})

    def _chain(self, most: int = KEPT_COMMITS) -> list[KeptCommit]:
        """The newest that can be put back, and those that it names before it."""
        heads = self._heads()
        whole = [kept for kept in heads.values() if kept.books]
        if not whole:
            return []
        chain = [max(whole, key=lambda kept: kept.head.order)]
        while len(chain) < most:
            head = chain[-1].head
            before = heads.get((head.number - 1, head.before))
            if before is None:
                break
            chain.append(before)
        return chain

    def _amendments(self, first: Manifest, run_id: bytes) -> Sequence[Amended]:
        """Those that this journal lacks."""
        known = tuple(self._own.ledger.amendments) if self._own.ledger is not None else ()
        terms = Terms.of(first, known)
        told = self._shown.amendments.get(run_id, ())
        try:
            terms = terms.believed(told[terms.count :], run_id, curve_key_of(self._own.key))
        except UserError as error:  # two coordinators of this key amended the run, each on its own
            self.notes.append(f"a peer shows amendments that do not follow this journal's: {error}")
        clock_s = self._own.ledger.clock.newest_s if self._own.ledger is not None else 0.0
        return [Amended(amendment=each, at_s=clock_s) for each in terms.amendments[len(known) :]]

    def _told(self, newest: KeptCommit | None) -> str:
        ledger, names = self._own.ledger, ", ".join(sorted(self._answered.values())[:8])
        lacks = self._lacks([newest] if newest is not None else [])
        void = f"; step {lacks} was made, and nobody came who keeps its books" if lacks else ""
        if newest is None:
            return f"nobody showed a commit: the run goes on from this copy of the journal{void}"
        head = newest.head
        if ledger is not None and head.order <= KeptSteps.of(ledger).link.order:
            return f"this journal lacks nothing that {names} showed{void}"
        versions = ", ".join(map(str, head.versions))
        return f"the run goes on from version {versions}, step {head.number}, as {names} showed it{void}"


def asking(manifest: Manifest, key: bytes, copy: RunRecords | None, nonce: bytes, now: float) -> Restoring:
    """`copy`: what this coordinator has of the run itself."""
    own = Own(manifest, key)
    if copy is not None:
        own = Own(manifest, key, copy.run_id, copy.ledger, copy.manifest)
    return Restoring(own, nonce, now)


def _relay_of(manifest: Manifest) -> dict[str, object]:
    return {"relay": manifest.net.relay}


# ---- how long it waits for more peers, and why
#
# Whoever comes first may have been away for long: what it keeps names holders of then, and says nothing of newer steps.
# So every living peer has the time for one more knock: a peer that is out of contact knocks every 10 s at the latest.
# Who does not come in that time, and knows of a newer commit, is told later that the run goes on without it
# (docs/operate.md).


@dataclass(frozen=True)
class RestoringState:
    """So far."""

    has_run: bool  # in its own folder
    began_at: float
    first_at: float | None  # when somebody showed something that counts
    answered: int  # peers that showed all that they keep, be it nothing
    lacks: int = 0  # a newer step, of which nobody has shown the books


def why_wait(heard: RestoringState, now: float) -> str:
    """Empty: the time has come to decide."""
    if heard.first_at is None and not heard.has_run:
        return (
            "this folder has no journal, and nobody has shown a commit of this run yet: waiting for its peers "
            f"({_count(heard.answered)} without one)"
        )
    if heard.first_at is None:
        left_s = heard.began_at + NOBODY_S - now
        return f"waiting for peers with newer commits, at most {left_s:.0f} s more" if left_s > 0.0 else ""
    left_s = heard.first_at + PATIENCE_S - now
    if left_s <= 0.0:
        return ""
    if heard.lacks:
        books = f"nobody has shown the books of step {heard.lacks}"
        return f"{books}: waiting for one who keeps them, {left_s:.0f} s more"
    return f"{_count(heard.answered)}: waiting for others who may keep newer commits, {left_s:.0f} s more"


def _count(peers: int) -> str:
    return "1 peer came" if peers == 1 else f"{peers} peers came"
