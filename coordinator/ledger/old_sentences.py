"""What the sentences of older event journals mean: the only code that reads a sentence.

Called by whoever reads event journals, for events that have no `cause` yet.  The sentences are those of
that time and never change; a new cause has no place here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, TypeVar

from farflung.protocol.causes import AbortCause, DepartureCause, ExclusionCause, NoteCause

Cause = TypeVar("Cause", bound=StrEnum)
_ABORTS = (
    (AbortCause.RESTARTED, r"the coordinator restarted$"),
    (AbortCause.FOUNDED_ANEW, r"version 0 is founded anew$"),
    (AbortCause.WENT_BACK, r"the run goes back to an older state$"),
    (AbortCause.COMPLETE, r"the run is complete$"),
    (AbortCause.TIMED_OUT, r"not finished after "),
    (AbortCause.NO_OWNER, r"no living member can be dialled"),
    (AbortCause.MEMBER_RESTARTED, r"\d+ whole contributions, .* is out: it restarted during the round"),
    (AbortCause.TOO_FEW, r"\d+ whole contributions, "),
    (AbortCause.GUARD, r"the merged update has norm "),
    (AbortCause.DISPUTED, r"members claim different states of version "),
)
_DEPARTURES = (
    (DepartureCause.CLOSED, r"its connection closed$"),
    (DepartureCause.SILENT, r"nothing heard for "),
    (DepartureCause.FINISHED, r"finished$"),
    (DepartureCause.LEFT, r"it left$|the user asked it to leave$|the training script (ended|failed)$"),
    (DepartureCause.MISFIT, r"data set has \d+ samples here, "),
    (DepartureCause.BANNED, r"\d+ strikes, the last one: "),
)
_EXCLUSIONS = (
    (ExclusionCause.SHORT_LIST, r"its hash list names "),
    (ExclusionCause.EMPTY, r"it has nothing to contribute$"),
    (ExclusionCause.UNSIGNED, r"its hash list is not signed by it$"),
    (ExclusionCause.LEASES, r"it names lease |it used lease |it says it used lease "),
    (ExclusionCause.UNUSABLE, r"what \S+ got from it was unusable: "),
    (ExclusionCause.OTHER_BYTES, r"the bytes that \S+ holds are not the bytes it says it sent$"),
    (ExclusionCause.RESTARTED, r"it restarted during the round$"),
    (ExclusionCause.DIRECTION, r"its direction is not that of the others"),
    (ExclusionCause.SHORTENED, r"shortened to "),
    (ExclusionCause.NO_TOKENS, r"it counts no tokens$"),
    (ExclusionCause.LOST, r"it was lost before its contribution was safe$"),
    (ExclusionCause.NOT_WHOLE, r"its contribution was not whole in time$"),
    (ExclusionCause.NO_LIST, r"it sent no hash list in time$"),
)
_NOTES = (
    (NoteCause.OPENED, r"round \d+.* opened from"),
    (NoteCause.COMMITTED, r"version \d+.* committed by"),
)


def abort_cause(text: str) -> AbortCause:
    return _meaning(_ABORTS, text, AbortCause.UNKNOWN)


def departure_cause(text: str) -> DepartureCause:
    return _meaning(_DEPARTURES, text, DepartureCause.UNKNOWN)


def exclusion_cause(text: str) -> ExclusionCause:
    return _meaning(_EXCLUSIONS, text, ExclusionCause.UNKNOWN)


def _meaning(known: Iterable[tuple[Cause, str]], text: str, otherwise: Cause) -> Cause:
    return next((cause for cause, sentence in known if re.match(sentence, text)), otherwise)


# Event -> (its sentences, the field that has one, what it is otherwise).
_EVENTS: dict[str, tuple[Iterable[tuple[StrEnum, str]], str, StrEnum]] = {
    "aborted": (_ABORTS, "reason", AbortCause.UNKNOWN),
    "departed": (_DEPARTURES, "reason", DepartureCause.UNKNOWN),
    "note": (_NOTES, "text", NoteCause.NEWS),
}


def with_cause(event: dict[str, Any]) -> dict[str, Any]:
    """An event of a coordinator's event journal, as if it were written here and today.

    A cause that only a newer farflung knows is none; its sentence is not asked.
    """
    if event.get("event") not in _EVENTS:
        return event
    sentences, field, otherwise = _EVENTS[event["event"]]
    if "cause" in event:
        cause = next((each for each in type(otherwise) if each == event["cause"]), otherwise)
    else:
        cause = _meaning(sentences, str(event.get(field)), otherwise)
    return {**event, "cause": cause}
