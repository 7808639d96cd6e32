"""Evaluation: the loss of committed versions on text that nobody learns from, computed by members that hold them.

Where the mode begins.  Pure.  Once the digest of a version is settled, secret dice give each window of that text to
`COPIES` members; each says what its model makes of them, and held_out_loss.py what that is together.  The next version
may be committed before all have answered: what is there by then counts.  A run that is complete waits a moment for the
loss of its last version.  Without this folder nothing is evaluated.

Nobody gains or loses trust by what it says here: a figure is for people.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farflung.coordinator.evaluation.held_out_loss import HeldOutLoss, MemberLosses, agreed_text, judged
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.ledger import LedgerPart as Part
from farflung.coordinator.ledger.pace import TOLD_DIGITS, LossCurve
from farflung.coordinator.ledger.records import Record, RolledBack
from farflung.coordinator.modes.registry import Dice, LossMode, ModeTools
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.digests import bits, mask_of, mask_to_bytes
from farflung.protocol.errors import ScoreCause
from farflung.protocol.messages import Beat, OfTick
from farflung.protocol.mode_words import FiguresBeat, ScoreBeat, ScoreTick, losses_of, text_lengths
from farflung.protocol.round_words import section

COPIES = 3  # members that compute the same window, where there are so many
LEAST_WINDOWS = 4  # of who computes any: each time a model is copied there and back
RECENT = 16  # figures that are known, besides the curve
DRAWS_MOST = 2  # a window that nobody answers for is given to others once
WAIT_BEATS = 2.0  # for members that are just taking the version; and for answers that are on their way
TEXT_EVERY_S = 200.0  # a text takes a member up to 2 s
PERPLEXITY_NATS_MOST = 50.0  # above, a perplexity says nothing


# ---- record ------------------------------------------------------------------------------------------------


class Evaluated(Record, frozen=True, kw_only=True, tag="evaluated"):
    """The held-out loss of a version."""

    version: int  # of the least advanced fragment
    versions: tuple[int, ...]  # of each
    loss: float | None  # nats a token; None: those who computed it contradict each other
    perplexity: float | None
    bits_per_byte: float | None  # None: nobody said how many bytes a token has
    windows: int  # that somebody computed,
    of: int
    peers: tuple[str, ...]  # who counts
    outvoted: dict[str, str]  # who does not, and why
    means: dict[str, float]  # of each that counts, over its own windows
    text: tuple[int, ...] = ()  # token ids: how the first window begins, and how the model goes on,
    text_by: int = 0  # as so many say


RECORDS = (Evaluated,)


@dataclass
class Evaluations(Part):
    recent: list[Evaluated] = field(
        default_factory=list
    )  # the newest last: the run may go back to one of these
    curve: LossCurve = field(default_factory=LossCurve)
    written: Evaluated | None = None  # the newest with a text

    def apply(self, record: Record, ledger: Ledger) -> None:
        match record:
            case Evaluated():
                self.recent = [*self.recent[1 - RECENT :], record]
                self.curve.add(record.version, ledger.totals.tokens, record.loss)
                self.written = record if record.text else self.written
            case RolledBack(versions=versions):
                self.curve.forget_after(min(versions))
                self.recent = [each for each in self.recent if each.version <= min(versions)]
                if self.written is not None and self.written.version > min(versions):
                    self.written = None
            case _:
                pass

    @property
    def newest(self) -> Evaluated | None:
        return self.recent[-1] if self.recent else None

    @property
    def version(self) -> int:
        """The newest that is evaluated; 0: none is."""
        return self.recent[-1].version if self.recent else 0


LedgerPart = Evaluations


# ---- who computes what --------------------------------------------------------------------------------------


@dataclass
class Evaluating:
    """One version, until its loss is written."""

    versions: tuple[int, ...]  # of each fragment
    era: int
    number: int = 0  # of the draw
    draws: int = 0
    shares: dict[str, int] = field(default_factory=dict)  # peer -> a mask of windows, of this draw
    answered: set[str] = field(default_factory=set)  # of these
    said: dict[str, MemberLosses] = field(default_factory=dict)
    why_not: dict[str, ScoreCause] = field(default_factory=dict)
    writers: frozenset[str] = frozenset()  # who is to write a text, in the first draw
    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    moved_on_at: float = math.inf  # the next version was committed

    def draw(self, peers: Sequence[str], windows: Collection[int], dice: Dice) -> None:
        """Evenly, and so that nobody can foresee with whom it shares a window."""
        self.number, self.draws = 1 + dice.below(1 << 61), self.draws + 1
        self.shares, self.answered = dealt(peers, windows, dice), set()

    def hear(self, peer: str, said: ScoreBeat) -> None:
        share = self.shares.get(peer, 0)
        if said.number != self.number or not share or peer in self.answered:
            return
        self.answered.add(peer)
        if said.why_not:
            self.why_not[peer] = ScoreCause.of(said.why_not)
            return
        nats = losses_of(said.nats, share.bit_count())
        if nats is None:
            self.why_not[peer] = ScoreCause.ODD_LOSSES
            return
        if peer in self.writers and said.text:
            self.texts[peer] = said.text
        before = self.said.get(peer, MemberLosses(said.data))
        self.said[peer] = MemberLosses(
            said.data, {**before.nats, **dict(zip(bits(share), nats, strict=True))}
        )

    @property
    def version(self) -> int:
        return min(self.versions)

    @property
    def missing(self) -> int:
        """Windows of this draw that nobody has answered for: a mask."""
        there = mask_of(window for each in self.said.values() for window in each.nats)
        return _all_of(self.shares.values()) & ~there


def dealt(peers: Sequence[str], windows: Collection[int], dice: Dice) -> dict[str, int]:
    """Each window to `COPIES` of the peers, as cards of shuffled decks: evenly, and to no more peers than have some
    work of it.  A mask for each that has some."""
    shares: dict[str, int] = {}
    peers = dice.shuffled(peers)[: max(COPIES, len(windows) * COPIES // LEAST_WINDOWS)]
    deck: deque[str] = deque()
    for window in windows:
        chosen: list[str] = []
        while len(chosen) < min(COPIES, len(peers)):
            if all(peer in chosen for peer in deck):
                deck.extend(dice.shuffled(peers))
            peer = deck.popleft()
            (deck if peer in chosen else chosen).append(peer)
        for peer in chosen:
            shares[peer] = shares.get(peer, 0) | 1 << window
    return shares


def _all_of(masks: Collection[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


# ---- the mode -----------------------------------------------------------------------------------------------


class Evaluation(LossMode):
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> None:
        self._core = core
        self._dice = Dice(tools.random)
        self._now: Evaluating | None = None
        self._figures: dict[str, dict[str, float]] = {}  # of members' scripts
        self._settled: tuple[int, int, float] = 0, 0, 0.0  # era and version that may be due, and since when
        self._told_causes: frozenset[ScoreCause] = frozenset()  # by which nobody could compute anything last
        self._text_at = -math.inf  # when one was asked for last
        self._over = 0, 0  # era and version of the one that was looked at last, whatever came of it

    @property
    def _part(self) -> Evaluations:
        part: Evaluations = self._core.ledger.parts["evaluation"]
        return part

    # ---- what members hear and say -----------------------------------------------------------------------

    def tell(self, peer: str, beat: Beat) -> Sequence[OfTick]:
        now = self._now
        if now is None or peer in now.answered or not (share := now.shares.get(peer, 0)):
            return ()
        writes = now.draws == 1 and peer in now.writers
        return (ScoreTick(now.number, now.versions, mask_to_bytes(share), writes),)

    def hear(self, peer: str, beat: Beat) -> None:
        said, own = section(ScoreBeat, beat.sections), section(FiguresBeat, beat.sections)
        if said is not None and self._now is not None:
            self._now.hear(peer, said)
        self._figures.pop(peer, None)
        if own is not None:
            self._figures[peer] = {name: value for name, value in own.figures if math.isfinite(value)}

    # ---- from one version to the next --------------------------------------------------------------------

    def on_timer(self) -> bool:
        alive = self._core.members.alive
        self._figures = {peer: each for peer, each in self._figures.items() if peer in alive}
        if not self._core.manifest.eval.source or self._by_batches:
            return False
        if self._now is not None:
            return self._go_on(self._now)
        version = self._due()
        return bool(version) and self._begin(version)

    @property
    def _by_batches(self) -> bool:
        """No member may hold the whole model: they compute its loss as they compute a batch."""
        return self._core.manifest.pipeline.batch > 0

    def is_evaluated_next(self) -> bool:
        return bool(self._core.manifest.eval.source) and self._by_batches and self._due() > 0

    def on_losses(self, losses: Mapping[str, Mapping[int, float]]) -> None:
        now = Evaluating(self._versions, self._core.ledger.eras.number)
        now.said = {peer: MemberLosses(nats=each) for peer, each in losses.items()}
        self._end(now)

    def _due(self) -> int:
        """The version that is to be evaluated now; 0: none is."""
        core, ledger = self._core, self._core.ledger
        version, era = ledger.version, ledger.eras.number
        settled = all(book.version in book.digests for book in ledger.books)
        is_turn = version % core.manifest.eval_rounds == 0 or core.finished
        if (
            not (version and settled and is_turn)
            or version <= self._part.version
            or (era, version) == self._over
        ):
            return 0
        return version

    def _able(self) -> list[Member]:
        """Whose trainers hold the newest version, or are about to."""
        alive = self._core.members.alive.values()
        return [m for m in alive if not (m.helps or m.leaving or m.quarantined) and m.beat is not None]

    def _begin(self, version: int) -> bool:
        core, able = self._core, self._able()
        if self._settled[:2] != (core.ledger.eras.number, version):
            self._settled = core.ledger.eras.number, version, core.now
        here = sorted(m.peer for m in able if m.verified)
        waits = len(here) < len(able) and core.now - self._settled[2] < self._wait_s
        if waits or not here:
            return False
        self._now = Evaluating(self._versions, core.ledger.eras.number)
        self._now.draw(here, range(core.manifest.eval.windows), self._dice)
        is_long_ago = core.now - self._text_at >= TEXT_EVERY_S
        if core.manifest.model.kind and (is_long_ago or core.finished):
            self._text_at = core.now
            self._now.writers = frozenset(peer for peer, share in self._now.shares.items() if share & 1)
        return True

    @property
    def _versions(self) -> tuple[int, ...]:
        return tuple(book.version for book in self._core.ledger.books)

    @property
    def _wait_s(self) -> float:
        return WAIT_BEATS * self._core.manifest.net.heartbeat_s

    def _go_on(self, now: Evaluating) -> bool:
        """True: members are to hear of another draw."""
        core = self._core
        if core.ledger.eras.number != now.era:
            self._now = None  # that version is void
            return False
        if self._versions != now.versions:
            now.moved_on_at = min(now.moved_on_at, core.now)
        alive = core.members.alive
        waited_for = [peer for peer in now.shares if peer in alive and peer not in now.answered]
        if waited_for and core.now - now.moved_on_at < self._wait_s:
            return False
        if not waited_for and now.moved_on_at == math.inf and now.draws < DRAWS_MOST and now.missing:
            others = sorted(m.peer for m in self._able() if m.verified and m.peer not in now.why_not)
            if others:
                now.draw(others, list(bits(now.missing)), self._dice)
                return True
        self._end(now)
        return False

    def _end(self, now: Evaluating) -> None:
        core, self._now = self._core, None
        self._over = now.era, now.version
        found = judged(now.said)
        if found is None:
            counts = sorted(Counter(now.why_not.values()).items())
            why = "; ".join(
                f"{count} peer{'s' if count > 1 else ''}: {cause.told}" for cause, count in counts
            )
            causes = frozenset(now.why_not.values() or [ScoreCause.FAILED] * self._by_batches)
            is_news, self._told_causes = not causes <= self._told_causes, causes
            (core.note if is_news else core.log)(
                f"version {now.version} is not evaluated: {why or self._why_no_answer}"
            )
            return
        known = [
            each
            for peer, each in now.texts.items()
            if peer not in found.outvoted and max(each) < core.manifest.model.vocab
        ]
        text, text_by = agreed_text(known, len(now.writers))
        core.write(
            Evaluated(
                version=now.version,
                versions=now.versions,
                **figures_of(found.loss, core.manifest.bytes_per_token),
                windows=found.windows,
                of=core.manifest.eval.windows,
                peers=found.peers,
                outvoted=dict(found.outvoted),
                means=dict(found.means),
                text=text,
                text_by=text_by,
            )
        )
        for peer, why in found.outvoted.items():
            core.note(
                f"what {core.name(peer)} says of version {now.version}'s held-out loss is left out: {why}"
            )
        core.log(f"version {now.version}: {self._told(found)}")

    @property
    def _why_no_answer(self) -> str:
        if self._by_batches:
            return "no peer could compute a loss; the logs of peers have the reason"
        return "nobody answered before the next version"

    def busy_with(self, fragment: int) -> str:
        if not self._core.manifest.eval.source:
            return ""
        return (
            "its last version is evaluated" if self._now is not None or (self._due() and self._able()) else ""
        )

    # ---- for people ----------------------------------------------------------------------------------------

    def _told(self, found: HeldOutLoss | Evaluated) -> str:
        name = self._core.name
        if found.loss is None:
            each = ", ".join(f"{name(peer)} says {mean:.4f}" for peer, mean in sorted(found.means.items()))
            return f"its held-out loss is contested: {each}"
        of = len(found.peers)
        who = f"{name(found.peers[0])}'s word" if of == 1 else f"by {of} peers"
        return f"held-out loss {found.loss:.4f} nats a token ({who})"

    def status_of(self, peer: str) -> Mapping[str, Any]:
        return {"figures": self._figures[peer]} if peer in self._figures else {}

    def status(self) -> Mapping[str, Any]:
        if not self._core.manifest.eval.source:
            return {}
        core, newest = self._core, self._part.newest
        told: dict[str, Any] = {"curve": self._part.curve.told(), "next": self._next()}
        if newest is not None:
            told |= {
                "version": newest.version,
                "loss": newest.loss,
                "perplexity": newest.perplexity,
                "bits_per_byte": newest.bits_per_byte,
                "windows": newest.windows,
                "of": newest.of,
                "peers": [core.name(peer) for peer in newest.peers],
                "outvoted": {core.name(peer): why for peer, why in newest.outvoted.items()},
                "text": self._told(newest),
            }
        given, _ = text_lengths(core.manifest.model.context, core.manifest.row_tokens)
        if (written := self._part.written) is not None and len(written.text) > given:
            told["sample"] = {
                "version": written.version,
                "ids": list(written.text),
                "given": given,
                "peers": written.text_by,
            }
        return {"held_out": told}

    def _next(self) -> int:
        every, rounds = self._core.manifest.eval_rounds, self._core.manifest.run.rounds
        return min(rounds, (self._core.ledger.version // every + 1) * every)


def figures_of(loss: float | None, bytes_per_token: float) -> dict[str, float | None]:
    """What follows from the loss, each None where it is not known."""
    if loss is None:
        return {"loss": None, "perplexity": None, "bits_per_byte": None}
    perplexity = math.exp(loss) if loss < PERPLEXITY_NATS_MOST else None
    bits_per_byte = loss / math.log(2) / bytes_per_token if bytes_per_token else None
    found = {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte}
    return {name: None if each is None else round(each, TOLD_DIGITS) for name, each in found.items()}


made = Evaluation
