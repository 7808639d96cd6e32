"""The agent's failpoints: which effect, and which word that arrives, passes which point.

Called by the agent before each effect and after each word.  Off, each call returns at once
(protocol/process/failpoints.py).
"""

from __future__ import annotations

from farflung.collectives.round.effects import Install, Merge, Roll, Seal, SendFrame
from farflung.peer.local.words import Frozen, LoadState, Provide, WorkDone
from farflung.peer.machine import effects as do
from farflung.protocol.frames import Frame, FrameKind, Kind
from farflung.protocol.messages import (
    Beat,
    Committed,
    Decided,
    Hello,
    Knock,
    Leave,
    OpenRound,
    ProgressReport,
    Sent,
)
from farflung.protocol.process.failpoints import hit, is_armed, passing

_EFFECTS: dict[type, str] = {
    do.EnterMembers: "joining.after_welcome",
    Install: "joining.mid",
    do.Encode: "scatter.before_encode",
    Merge: "gather.before_merge",
    do.Resolve: "apply.before_resolve",
    Roll: "apply.mid",
    Seal: "apply.before_seal",
    do.Restore: "restore.before",
    do.SaveFragment: "checkpoint.before_copy",
}
_FRAMES: dict[FrameKind, str] = {
    Kind.CONTRIBUTION: "scatter.mid",
    Kind.RESULT: "gather.mid",
    Kind.MANIFEST: "serve.manifest",
    Kind.STATE: "serve.mid",
    Kind.LOGGED: "serve.logged",
}
_SAID: dict[type, str] = {
    Knock: "joining.before_knock",
    Hello: "joining.before_hello",
    Sent: "scatter.before_sent",
    ProgressReport: "gather.before_progress",
    Leave: "leave.before_word",
    LoadState: "load.before_word",
    Provide: "found.before_word",
}
_HEARD: dict[type, str] = {
    OpenRound: "open.arrived",
    Decided: "decide.arrived",
    Committed: "commit.arrived",
    Frozen: "ready.arrived",
    WorkDone: "counting.made",
}


def before_effect(effect: do.Effect) -> None:
    if not is_armed():
        return
    match effect:
        case SendFrame():
            pass  # see on_the_way
        case do.ToCoordinator(message=Beat() as beat):
            _pass("ready.before_beat" if any(each.ready for each in beat.fragments) else None)
        case do.ToCoordinator(message=said) | do.ToDoor(message=said) | do.TellTrainer(message=said):
            _pass(_SAID.get(type(said)))
        case _:
            _pass(_EFFECTS.get(type(effect)))


def on_the_way(frame: Frame) -> Frame:
    """A bulk frame leaves, perhaps with a byte that is not as it was."""
    point = _FRAMES.get(frame.header.kind) if is_armed() else None
    return Frame(frame.header, passing(point, bytes(frame.payload))) if point is not None else frame


def on_word(message: object) -> None:
    """It has arrived, and nothing was done about it yet."""
    foreseen = isinstance(message, Decided) and message.decision.foreseen
    if is_armed() and not foreseen:
        _pass(_HEARD.get(type(message)))


def _pass(point: str | None) -> None:
    if point is not None:
        hit(point)
