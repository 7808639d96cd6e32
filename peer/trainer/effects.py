"""What the trainer's machine tells its shell to do, in order.  Types only; no effect holds a tensor.

Made by machine.py; carried out by its loop on a model, and by the simulator's trainer on numbers that can be counted.
Effects are carried out one after the other before the machine hears of anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from farflung.peer.data.leased_data import Span
from farflung.peer.local.words import FromTrainer, Frozen, Keep, Score, Shared


class TrainerState(StrEnum):
    """Where a trainer stands; which moves there are says MOVES in machine.py."""

    ATTACHING = "attaching"  # some fragment has not been loaded yet
    STEPPING = "stepping"  # inner steps are taken
    WITHOUT_DATA = "without data"  # the next step needs samples, and none are leased
    HELD_UP = "held up"  # a fragment is to be frozen whose last freeze the agent has not answered
    AT_BARRIER = "at the barrier"  # frozen; the agent has not said of every fragment how to go on
    OVER = "over"  # the run goes on without this trainer, whose steps are its own affair from now on
    REFUSED = "refused"  # it may not take part, or its agent is gone


# ---- the agent's memory


@dataclass(frozen=True, slots=True)
class OpenShared:
    """Open the memory that the agent shares.  It must have room for exactly this model."""

    word: Shared


@dataclass(frozen=True, slots=True)
class WriteAnchor:
    """Found the run: the model's values are its first ones."""


# ---- the model


@dataclass(frozen=True, slots=True)
class LoadAnchor:
    """Take the anchor into a fragment of the model.

    keep   what becomes of the fragment's unmerged work, see words.py
    slot   rest: what the commit used; restore: what to take over
    mix    how much of its own values the model keeps
    """

    fragment: int
    version: int
    keep: Keep
    slot: int
    steps: int  # that are owed after it
    used_steps: int = 0  # rest: so many of the oldest unmerged steps stand in the slot
    mix: float = 0.0


@dataclass(frozen=True, slots=True)
class Freeze:
    """Write all that is owed of a fragment into a slot."""

    fragment: int
    slot: int


@dataclass(frozen=True, slots=True)
class GoAhead:
    """Go ahead by what the momentum will do (optim/recipes.py); what stands in the slot is still owed."""

    fragment: int
    slot: int


@dataclass(frozen=True, slots=True)
class CopyFragments:
    """Copy these fragments: they must not learn from the step that comes."""

    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PutBack:
    """These fragments become again what they were at the last `CopyFragments`."""

    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForgetLoss:
    """The mean loss begins anew."""


@dataclass(frozen=True, slots=True)
class ComputeScore:
    """With the anchor in the model, which is afterwards as it was; say `Scored`."""

    word: Score


# ---- the agent, the script


@dataclass(frozen=True, slots=True)
class SayWord:
    word: FromTrainer


@dataclass(frozen=True, slots=True)
class SayFrozen:
    """All that was frozen after one step.  The mean loss is the shell's: it puts that into the words."""

    words: tuple[Frozen, ...]


@dataclass(frozen=True, slots=True)
class ReadSamples:
    """The samples of the next batch.  They count as handed out only once `hand_out` says so."""

    span: Span
    more: tuple[Span, ...] = ()  # of the leases behind it


@dataclass(frozen=True, slots=True)
class Warn:
    text: str


# ---- what comes next: after a step, and where a wait ends, one of these is the last effect


@dataclass(frozen=True, slots=True)
class GoOn:
    """Take the next step."""


@dataclass(frozen=True, slots=True)
class WaitBefore:
    """Take no step before the machine says `GoOn`, `RunOver` or `EndWithRefusal`; meanwhile tell it what the agent
    says."""

    stand: TrainerState


@dataclass(frozen=True, slots=True)
class RunOver:
    """The run is over for this trainer.  `stopped`: the agent has ended, and hears nothing any more."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class EndWithRefusal:
    """Not to be mended by waiting: the script ends with this."""

    code: str
    reason: str


OnModel = (
    OpenShared
    | WriteAnchor
    | LoadAnchor
    | Freeze
    | GoAhead
    | CopyFragments
    | PutBack
    | ForgetLoss
    | ComputeScore
)
Effect = OnModel | SayWord | SayFrozen | ReadSamples | Warn | GoOn | WaitBefore | RunOver | EndWithRefusal
