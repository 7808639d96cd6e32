"""What a replica asks of modes, and the answers where nothing has been installed.  Pure.

A mode sends work ahead of its round where a line is much slower than most (peer/slow_lines); another keeps what was
given to rounds that are over, for auditors (peer/audits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from farflung.collectives.round.member import MemberRound
from farflung.collectives.round.pieces import ChunkPiece
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import Effect, Resolve
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, Payload
from farflung.protocol.limits import FRAGMENTS_MAX
from farflung.protocol.messages import FragmentTick
from farflung.protocol.round_words import Plan
from farflung.protocol.verdicts import Verdict


def fragment_of(round_no: int) -> int | None:
    """Of an `Encode` that is for no round yet; None: it is for one."""
    return -round_no % FRAGMENTS_MAX if round_no < 0 else None


class EarlyWork:
    # ---- questions --------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of the plan that I know, by which owners get it; 0: none."""
        return 0

    @property
    def is_mine(self) -> bool:
        """I am to send my work ahead."""
        return False

    @property
    def delivered(self) -> bool:
        """What is to be my next contribution is with its owners: a round may begin with me."""
        return False

    @property
    def encode_no(self) -> int:
        """Under which it is encoded, in place of a round's number; 0: there is none."""
        return 0

    @property
    def frozen(self) -> Frozen | None:
        """What it is made of."""
        return None

    @property
    def slot(self) -> int | None:
        """That must not be written."""
        return None

    @property
    def pieces(self) -> Mapping[int, ChunkPiece]:
        return {}

    # ---- its way ----------------------------------------------------------------------------------------

    def on_tick(self, tick: FragmentTick) -> None:
        """The coordinator's word."""

    def keep_going(self, newest: Frozen | None) -> list[Effect]:
        """`newest`: what stands frozen now."""
        return []

    def on_encoded(self, round_no: int, payloads: Mapping[int, Payload]) -> bool:
        """False: that work was dropped."""
        return False

    def send(self, now: float) -> list[Effect]:
        return []

    def drop(self) -> list[Resolve]:
        """It is for no round, and never will be."""
        return []

    def forget(self, frozen: Frozen) -> None:
        """What became of this work is known."""

    # ---- its round --------------------------------------------------------------------------------------

    def ready_for(self, plan: Plan) -> Frozen | None:
        """What I contribute to this round, encoded as it wants it; some of its owners may still lack some of it."""
        return None

    def names(self, plan: Plan) -> list[Effect]:
        """Tells owners that what they have of it counts."""
        return []

    def on_lacked(self, owner: str, chunk: int) -> None:
        """It asks for that piece."""

    # ---- frames -----------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame) -> tuple[Verdict, list[Effect]]:
        return Verdict.STALE, []

    def takes(self, kind: FrameKind) -> bool:
        """It is for `on_frame`."""
        return False

    def meant(self, sender: str, frame: Frame) -> Frame | None:
        """The contribution in place of a frame that says that it counts; None: I do not keep it."""
        return frame


@dataclass(frozen=True)
class Given:
    """What I gave to one round, by chunk of the fragment: what I contributed, and in a mesh what I summed."""

    round_no: int = 0
    contribution: Mapping[int, ChunkPiece] = field(default_factory=dict)
    sums: Mapping[int, ChunkPiece] = field(default_factory=dict)

    @staticmethod
    def to(flight: MemberRound) -> Given:
        return Given(flight.plan.round_no, flight.pieces.mine, flight.sums)

    def of(self, kind: FrameKind) -> Mapping[int, ChunkPiece]:
        return self.sums if kind == Kind.SUM else self.contribution


class KeptWork:
    def on_commit(self, round_no: int, given: Given, counts: bool = True) -> None:
        """`given`: to the last round that I was in, that one or another; `counts`: what I contributed did."""

    def on_want(
        self, sender: str, header: Header, in_round: bool, now: float
    ) -> tuple[Verdict, list[Effect]]:
        """For a piece of a round that is not in flight.  `in_round`: another one is."""
        return Verdict.STALE, []


@dataclass(frozen=True)
class ReplicaModes:
    ahead: EarlyWork = field(default_factory=EarlyWork)
    kept: KeptWork = field(default_factory=KeptWork)
