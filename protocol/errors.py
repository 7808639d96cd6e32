"""Every error the program raises on purpose, and whose fault each one is.

    FarflungError
     +-- UserError (ValueError)   the person at the keyboard can mend it; the CLI prints the text, no traceback
     |    +-- CheckpointError     a checkpoint is damaged, foreign or incomplete; another one may be good
     +-- StoreError               where checkpoints are kept does not work: a full disk, no rights, no network
     +-- Refused                  the coordinator said no, and why (code, differing field)
     +-- Deposed                  a coordinator that may not act any more: another one may lead its run
     +-- Unreachable              nobody answered in time; trying again may help
     +-- FrameError               bytes from outside broke a rule; carries the counter they end in

Called by every room.  Inside a round a network failure is data, not one of these.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from msgspec import Struct

# ---- verdicts ----------------------------------------------------------------------------------------------
# The one ledger of what became of every frame (promise P8).
#
# Each frame that reaches a process ends in exactly one of these counters. Shells and machines call
# `Counters.count`; the status and the tests read them. Knows nothing of what a frame means.


class Verdict(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    STALE = "stale"
    UNAUTHORISED = "unauthorised"
    BAD_HASH = "bad hash"
    OVERSIZE = "oversize"
    MALFORMED = "malformed"


class Counters:
    """Counts frames by verdict; `total` equals the number of frames that arrived."""

    def __init__(self) -> None:
        self._counts: Counter[Verdict] = Counter()

    def count(self, verdict: Verdict, frames: int = 1) -> Verdict:
        self._counts[verdict] += frames
        return verdict

    def since(self, earlier: Counters) -> dict[Verdict, int]:
        """What these have that the earlier ones had not, where that is anything."""
        return dict(self._counts - earlier._counts)

    def copy(self) -> Counters:
        made = Counters()
        made._counts = self._counts.copy()
        return made

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def as_dict(self) -> dict[str, int]:
        return {verdict.value: self._counts[verdict] for verdict in Verdict}


# ---- errors ------------------------------------------------------------------------------------------------


class FarflungError(Exception):
    """Base of all errors raised on purpose."""


class UserError(FarflungError, ValueError):
    """A mistake a person can mend: bad configuration, URL, model or command."""


class CheckpointError(UserError):
    """A checkpoint, or a file of one, is not what its manifest says, or of another run; the text names it."""


class StoreError(FarflungError):
    """A disk or an object store failed; trying again may help, once what the text names is mended."""


class Refused(FarflungError):
    """The coordinator refused a request; `code` is stable, the text is for people."""

    def __init__(self, code: str, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{reason} [{code}]")
        self.code = code  # such as "banned"; docs/host.md lists them
        self.reason = reason  # a sentence for people
        self.retry_after_s = retry_after_s  # 0: to try again does not help
        self.said = False  # another process of this peer's says it, and it is not to be said twice


class Deposed(FarflungError):
    """This coordinator's lease is over, or its write was refused: another one may lead the run by now."""


class Unreachable(FarflungError):
    """Nobody answered at an address within the time given."""


class FrameError(FarflungError):
    """Bytes from outside that broke a rule, before any of them was acted on."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


# ---- causes ------------------------------------------------------------------------------------------------
# Why something ended or was left out, for programs. Beside each cause stands a sentence, for people.
#
# Written by the coordinator into its records and its event journal; read by the ledger, the audit and the
# replay. A sentence may be worded anew at any time; a cause is a promise: its value stands in journals that
# are kept for years. Data only.


class AbortCause(StrEnum):
    """Of a round."""

    RESTARTED = "coordinator_restarted"
    FOUNDED_ANEW = "founded_anew"  # version 0 was
    WENT_BACK = "went_back"  # the run did, to an older state
    COMPLETE = "complete"  # the run is: nobody needs the round any more
    TIMED_OUT = "timed_out"
    NO_OWNER = "no_owner"  # nobody who is left can be dialled
    TOO_FEW = "too_few"  # whole contributions
    MEMBER_RESTARTED = "member_restarted"  # too few, and a member came back as another process
    GUARD = "guard"  # the merged update was far too long
    SHARE_LOST = "share_lost"  # of a synchronous batch: it is computed again, and the others keep theirs
    DISPUTED = "disputed"  # members contradict each other about the state that it started from
    UNKNOWN = "unknown"  # an event journal tells one that is none of these

    @property
    def of_the_round(self) -> bool:
        """Something within the round went wrong; else it was ended from outside."""
        return self not in (
            AbortCause.RESTARTED,
            AbortCause.FOUNDED_ANEW,
            AbortCause.WENT_BACK,
            AbortCause.COMPLETE,
            AbortCause.MEMBER_RESTARTED,
            AbortCause.SHARE_LOST,
            AbortCause.DISPUTED,
        )


class DepartureCause(StrEnum):
    """Of a member."""

    CLOSED = "connection_closed"
    SILENT = "silent"
    LEFT = "left"  # it said good-bye
    FINISHED = "finished"  # it said good-bye, with the finished model
    MISFIT = "misfit"  # its data is not the run's
    KICKED = "kicked"
    BANNED = "banned"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, said: LeaveCause) -> DepartureCause:
        return cls.FINISHED if said is LeaveCause.FINISHED else cls.LEFT

    @property
    def good_bye(self) -> bool:
        """The member itself may have said that it goes."""
        return self in (DepartureCause.LEFT, DepartureCause.FINISHED, DepartureCause.UNKNOWN)


class LeaveCause(StrEnum):
    """Of a peer that goes, by its own word.  This is all that is said of it: a sentence could name what lies on its
    disk, and stays on its machine."""

    FINISHED = "finished"  # with the finished model
    LEFT = "left"  # its user or its script ended it
    TRAINER = "agent"  # its trainer can't go on
    START = "start"  # this run can't begin so, or did not
    MOVES = "moves"  # to another stage

    @classmethod
    def of(cls, word: str) -> LeaveCause:
        """A peer may say anything."""
        return next((each for each in cls if each == word), cls.LEFT)

    @property
    def told(self) -> str:
        """For people, behind its name."""
        return _LEAVES[self]


_LEAVES = {
    LeaveCause.FINISHED: "finished",
    LeaveCause.LEFT: "it left",
    LeaveCause.TRAINER: "its trainer can't go on",
    LeaveCause.START: "this run does not begin as its run.toml says, or can't",
    LeaveCause.MOVES: "it moves to another stage",
}


class RelayCause(StrEnum):
    """Of a peer whose own relay lets nobody in, by its word.  As with `LeaveCause` nothing else is said."""

    NO_ORDER = "no_order"
    MONTH_OVER = "month_over"
    NOT_OPEN = "not_open"

    @classmethod
    def of(cls, word: str) -> RelayCause:
        """A peer may say anything."""
        return next((each for each in cls if each == word), cls.NOT_OPEN)

    @property
    def told(self) -> str:
        """For people."""
        return _RELAYS[self]


_RELAYS = {
    RelayCause.NO_ORDER: "its member has not heard yet for whom it is",
    RelayCause.MONTH_OVER: "it passed as many bytes as it may in a month (--relay)",
    RelayCause.NOT_OPEN: "it does not listen; its member's own output says why",
}


class ScoreCause(StrEnum):
    """Why a peer computes no held-out loss, by its word.  As with `LeaveCause` nothing else is said."""

    NO_SCRIPT = "no_script"
    UNREADABLE = "unreadable"
    FEW_ROWS = "few_rows"
    ODD_LOSSES = "odd_losses"
    FAILED = "failed"
    PASSED = "passed"

    @classmethod
    def of(cls, word: str) -> ScoreCause:
        """A peer may say anything."""
        return next((each for each in cls if each == word), cls.FAILED)

    @property
    def told(self) -> str:
        """For people, behind how many peers say so."""
        return _SCORES[self]


_SCORES = {
    ScoreCause.NO_SCRIPT: "the script computes none",
    ScoreCause.UNREADABLE: "the held-out text can't be read there; the peer's own output says why",
    ScoreCause.FEW_ROWS: "[eval] source has fewer rows than windows",
    ScoreCause.ODD_LOSSES: "what the script gives is not one finite loss a row",
    ScoreCause.FAILED: "computing it failed; the peer's own output says why",
    ScoreCause.PASSED: "the next version came first",
}


class ExclusionCause(StrEnum):
    """Of a member of a round, whose work is not in the commit."""

    SHORT_LIST = "short_hash_list"  # it does not name every chunk
    EMPTY = "nothing_to_contribute"
    UNSIGNED = "unsigned_hash_list"
    LEASES = "leases"  # it used samples that are not its own
    OTHER_SHARE = "other_share"  # of a synchronous batch: not the microbatches that it had counted
    UNUSABLE = "unusable_bytes"
    OTHER_BYTES = "other_bytes"  # not those that its hash list names
    RESTARTED = "restarted"
    DIRECTION = "direction"
    CAPTURED = "captured_group"  # its group is out as a whole
    SHORTENED = "shortened_to_nothing"
    NO_TOKENS = "no_tokens"
    LOST = "lost"
    NOT_WHOLE = "not_whole_in_time"
    NO_LIST = "no_hash_list_in_time"

    @property
    def of_its_bytes(self) -> bool:
        """What it sent was wrong; it was not just late, lost or without work."""
        return self in (ExclusionCause.UNUSABLE, ExclusionCause.OTHER_BYTES)


class NoteCause(StrEnum):
    """What a note of the coordinator is about, as far as a program asks."""

    OPENED = "opened"  # a round
    COMMITTED = "committed"
    PUNCHED = "punched"  # two peers are connected past their routers
    PARTED = "parted"  # they are no more
    NEWS = "news"


class Excluded(Struct, frozen=True):
    cause: ExclusionCause
    text: str
