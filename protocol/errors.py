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

from farflung.protocol.verdicts import Verdict


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
