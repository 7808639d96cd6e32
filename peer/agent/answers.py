"""The agent's hand for peers that catch up: holds their questions back while a round needs the line, makes answers.

Owned by the agent.  When something may pass is decided in turns.py, whether there is an answer in the peer machine:
a question that was held back is put to it as if it had just arrived.  Must not know rounds, nor what state is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.swarm import given_on
from farflung.collectives.round.effects import SendFrame
from farflung.peer.agent.turns import HeldFrame, LineNow, Serving, What
from farflung.peer.line.data_line import DataLine
from farflung.peer.machine import effects as do
from farflung.peer.machine.machine import PeerMachine
from farflung.peer.state.outer_state import OuterState
from farflung.peer.worker import Pool
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, bare_answer, with_payload
from farflung.protocol.run_terms import Attached

LOOK_AGAIN_S = 0.01  # while questions wait
ROOM_S = 0.3  # of the line's rate may wait in it, outside of rounds
_HELD_BACK = frozenset({Kind.WANT_STATE, Kind.WANT_MANIFEST})


class Answering:
    def __init__(
        self,
        line: DataLine,
        attached: Attached,
        arithmetic: Pool,
        carry_out: Callable[[list[do.Effect]], None],
    ) -> None:
        self._line, self._arithmetic, self._carry_out = line, arithmetic, carry_out
        self._serving = Serving(attached.known.manifest.fragments)
        self._tag, self._parts = attached.known.tag, attached.form.parts
        self._piece_bytes = attached.form.size_bytes

    def idle_s(self) -> float:
        return LOOK_AGAIN_S if self._serving.held else 60.0

    @property
    def held(self) -> int:
        """Questions that wait: they are in no counter yet (P8)."""
        return self._serving.held

    # ---- questions -----------------------------------------------------------------------------------------

    def takes(self, sender: str, frame: Frame, machine: PeerMachine, now: float) -> bool:
        """True: a question that has to wait its turn.  The machine hears of it later."""
        part = machine.part
        if part is None or frame.header.kind not in _HELD_BACK:
            return False
        replica = part.replica_of_chunk(frame.header.chunk)
        empty = replica is None or replica.held.version == NO_VERSION
        if replica is None or (empty and not replica.source.gives(frame.header.chunk)):
            return False  # the answer is that there is none
        if not self._serving.hold(sender, frame, now):
            part.counters.count(Verdict.DUPLICATE)
        return True

    def turn(self, machine: PeerMachine, now: float) -> None:
        """At every turn of the agent's loop."""
        part = machine.part
        if part is None:
            return
        in_round, joined = bool(part.flights), machine.joined
        crossings = joined is not None and joined.takes_line
        self._serving.on_turn(in_round, lambda: self._line_now(in_round, crossings), now)
        if not self._serving.held:
            return
        for _ in range(self._serving.let_go(now)):
            part.counters.count(Verdict.STALE)

        def can(held: HeldFrame) -> bool:
            replica = part.replica_of_chunk(held.frame.header.chunk)
            is_there = replica is not None and (replica.held.serves or replica.held.version == NO_VERSION)
            # Or it would be lost without a word to its asker, which waits for it.
            return is_there and self._serving.has_room(held.to, self._line.link.answers_waiting(held.to))

        line = self._line_now(in_round, crossings)
        while (held := self._serving.next(can, line, now)) is not None:
            self._carry_out(machine.on_frame(held.to, held.frame, now))
        for held in self._serving.to_put_off(now):
            self._line.link.send(held.to, bare_answer(Kind.LATER, held.frame.header))

    def _line_now(self, in_round: bool, crossings: bool) -> LineNow:
        """`piece_s` by what the line is known to carry: what it has carried at least would be taken for far too little
        where rounds are small."""
        waiting, known, roughly = self._line.link.waiting_bytes(), self._line.known_up, self._line.rates[0]
        room = round(ROOM_S * roughly) if roughly else self._piece_bytes
        piece_s = self._piece_bytes / known if known else 0.0
        return LineNow(in_round, waiting, room, piece_s, self._piece_bytes, crossings)

    # ---- answers -------------------------------------------------------------------------------------------

    def serve(self, effect: do.ServeState | do.ServeManifest, state: OuterState) -> None:
        """Read beside the agent's loop: what was asked first is read before anything that changes it."""

        kind = Kind.STATE if isinstance(effect, do.ServeState) else Kind.MANIFEST
        header = Header(kind, self._tag, version=effect.version, chunk=effect.chunk)

        def make() -> Frame:
            if isinstance(effect, do.ServeManifest):
                return with_payload(header, state.manifest_bytes(effect.fragment))
            payload = state.piece_bytes(effect.chunk)
            if isinstance(effect, do.ServePiece):
                return given_on(header, effect.hash, payload, self._parts)
            return with_payload(header, payload)

        what = (kind, effect.chunk)
        if self._serving.start_answer(effect.to, what, self._line.link.answers_waiting(effect.to)):
            arithmetic, is_piece = self._arithmetic, isinstance(effect, do.ServeState)
            submit = partial(arithmetic.beside, effect.chunk) if is_piece else arithmetic.submit
            submit(make, partial(self._served, effect.to, what))

    def _served(self, to: str, what: What, frame: object) -> None:
        self._serving.end(to, what)
        assert isinstance(frame, Frame)
        self._carry_out([SendFrame(to, frame)])
