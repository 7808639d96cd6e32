"""Failpoints: named places where a test can break this process on purpose.  Off unless the environment asks.

    FARFLUNG_FAILPOINTS="commit.before_fsync=kill, scatter.mid=stop@3, checkpoint.mid_write=raise:ENOSPC@1+"

A point, an action, and at which passage of the point (the first, if it is not said; `@3+`: at the third and each one
after it).  Actions: `kill` (SIGKILL), `stop` (SIGSTOP; somebody else wakes it), `sleep:S`, `raise` (an OSError: ENOSPC,
or the one named), `corrupt` (one byte of what passes changes).

Called by the shells of coordinator, agent and trainer at every step that others can see or that must survive.  Off, a
call looks at an empty dictionary and returns.  All names are in POINTS, so that a test can walk them.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from farflung.protocol.errors import UserError

VARIABLE = "FARFLUNG_FAILPOINTS"

# Of each durable record the coordinator passes two: before it is on the disk, and after, before anybody hears of it.
RECORDS = ("genesis", "admit", "depart", "lease", "open", "decide", "commit", "abort", "digest", "go_back")
# Of each of these words two: the first copy is out and the others are not; all are out.
ANNOUNCED = ("open", "decide", "commit", "abort")

COORDINATOR = {
    "start.before_listen": "the journal is read, the sockets are not open",
    "journal.mid_write": "records are in the transaction, which is not committed",
    "admit.before_answer": "a newcomer is admitted and does not know it",
    **{f"{name}.before_fsync": f"{name}: decided, not durable" for name in RECORDS},
    **{f"{name}.after_fsync": f"{name}: durable, nobody knows" for name in RECORDS},
    **{f"{name}.mid_announce": f"{name}: some members know" for name in ANNOUNCED},
}
# What happens once in the life of a journal.
JOURNAL = {
    "journal.mid_fold": "the ledger is in the place of old records, in a transaction which is not committed",
    "journal.after_fold": "it is committed",
}
AGENT = {
    "joining.before_knock": "it has told nobody that it exists",
    "joining.before_hello": "it has the manifest, and is not admitted",
    "joining.after_welcome": "it is admitted, and has said nothing yet",
    "joining.mid": "part of the run's state is here",
    "found.before_word": "its trainer is to give the run its first values",
    "counting.made": "its trainer has made something of a microbatch, in a stage of several; nobody knows",
    "ready.arrived": "its trainer's work stands frozen, nobody knows",
    "ready.before_beat": "the beat that says so",
    "open.arrived": "the plan of a round is here",
    "scatter.before_encode": "before it encodes its contribution",
    "scatter.before_sent": "encoded; the hash list is not out",
    "scatter.mid": "some chunks of its contribution are out",
    "decide.arrived": "the weights are here",
    "gather.before_merge": "before it sums a chunk that it owns",
    "gather.mid": "some results of its own are out",
    "gather.before_progress": "before it says what it holds",
    "commit.arrived": "the commit is here, nothing is applied",
    "apply.before_resolve": "before it settles what a codec left over",
    "apply.mid": "some chunks are at the new version",
    "apply.before_seal": "all are, and it does not know the digest",
    "apply.after_seal": "it knows the digest, nobody else does",
    "load.before_word": "its trainer is to load the new version",
    "serve.manifest": "it gives a joiner the hashes of its state",
    "serve.mid": "it gives a joiner chunks of its state",
    "serve.logged": "it gives a result to one that missed it",
    "restore.before": "it is to read a checkpoint",
    "leave.before_word": "its user stopped it, nobody knows",
    "checkpoint.before_copy": "a fragment is to be copied for a checkpoint",
    "checkpoint.mid_write": "part of a file is written",
    "checkpoint.before_fsync": "a file is written, not durable",
    "checkpoint.before_rename": "it is durable under another name",
    "checkpoint.after_rename": "it has its name; the folder is not durable",
    "checkpoint.before_manifest": "all files are there, and no manifest",
    "checkpoint.before_remove": "an old checkpoint is to be removed",
}
# The newest version on a peer's own disk; some of them are passed only where it trains alone.
KEEPING = {
    "keep.mid_result": "a result is on its way to the peer's own disk",
    "keep.before_sync": "results of a round that nobody else holds are written, not durable",
    "keep.before_digest": "the results of a version lie there, and not what they led to",
    "keep.mid_base": "part of a new base is written",
    "keep.before_fsync": "all of it is, not durable",
    "keep.before_rename": "it is durable under another name",
    "keep.after_rename": "it has its name; the folder is not durable",
    "keep.before_remove": "what it replaces is to be removed",
}
TRAINER = {
    "trainer.attach": "it says what its model is",
    "trainer.step": "between two inner steps",
    "freeze.mid": "a fragment of its work is in shared memory",
    "freeze.before_word": "all of it is, the agent does not know",
    "load.mid": "it has parted its own work from the old version, the new one is not in the model",
}
POINTS: Mapping[str, str] = {**COORDINATOR, **JOURNAL, **AGENT, **KEEPING, **TRAINER}
ACTIONS = ("kill", "stop", "sleep", "raise", "corrupt")


@dataclass
class Armed:
    action: str
    argument: str
    first: int  # the passage at which it happens
    always: bool  # and at each one after it
    passed: int = 0

    def is_due(self) -> bool:
        self.passed += 1
        return self.passed == self.first or (self.always and self.passed > self.first)


_armed: dict[str, Armed] = {}
_tell: Callable[[str, str], None] = lambda point, action: None  # noqa: E731


def parse(text: str) -> dict[str, Armed]:
    """What the variable says; UserError for what it can't mean."""
    found = {}
    for part in filter(None, (each.strip() for each in re.split("[,;]", text))):
        match = re.fullmatch(r"([\w.]+)=([a-z]+)(?::([\w.]+))?(?:@([1-9]\d*)(\+?))?", part)
        if match is None:
            raise UserError(f"{VARIABLE}: {part!r} is not POINT=ACTION or POINT=ACTION@NUMBER")
        point, action, argument, first, always = match.groups()
        if point not in POINTS:
            raise UserError(f"{VARIABLE}: there is no failpoint {point!r}; they are: {', '.join(POINTS)}")
        if action not in ACTIONS:
            raise UserError(f"{VARIABLE}: {point}: no action {action!r}; they are: {', '.join(ACTIONS)}")
        if action == "raise" and argument and not hasattr(errno, argument):
            raise UserError(f"{VARIABLE}: {point}: {argument!r} is not the name of an errno")
        if action == "sleep" and not re.fullmatch(r"\d+(\.\d+)?", argument or ""):
            raise UserError(f"{VARIABLE}: {point}: sleep needs seconds, as in sleep:0.5")
        found[point] = Armed(action, argument or "", int(first or 1), bool(always))
    return found


def arm(environ: Mapping[str, str] = os.environ, tell: Callable[[str, str], None] | None = None) -> None:
    """Once at the start of each process; `tell(point, action)` is called right before something is broken."""
    global _tell
    _armed.clear()
    _armed.update(parse(environ.get(VARIABLE, "")))
    if tell is not None:
        _tell = tell


def is_armed() -> bool:
    return bool(_armed)


def hit(point: str) -> None:
    """The process passes this point."""
    if _armed and (armed := _armed.get(point)) is not None and armed.action != "corrupt" and armed.is_due():
        _break(point, armed)


def passing(point: str, raw: bytes) -> bytes:
    """The same, for bytes that can be corrupted on their way."""
    if not _armed or (armed := _armed.get(point)) is None or not armed.is_due():
        return raw
    if armed.action != "corrupt":
        _break(point, armed)
        return raw
    _tell(point, "corrupt")
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 0x40]) + raw[middle + 1 :] if raw else raw


def _break(point: str, armed: Armed) -> None:
    _tell(point, armed.action)
    match armed.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal is delivered before this ends
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(float(armed.argument))
        case "raise":
            number = getattr(errno, armed.argument or "ENOSPC")
            raise OSError(number, f"{os.strerror(number)} (failpoint {point})")
