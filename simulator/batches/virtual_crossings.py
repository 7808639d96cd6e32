"""A simulated peer's hand for crossings: what peer/crossings is for the agent, in memory and told to the invariants.

Held by a `VirtualPeer` of a run whose model is cut into stages, and by no other.
"""

from __future__ import annotations

from farflung.collectives.pipeline.effects import KeptPiece, micro_of
from farflung.collectives.round.effects import SendFrame
from farflung.peer.batches.effects import ForgetCrossings, HandOver, KeepCrossing, SendCrossing
from farflung.peer.machine.effects import ModeEffect
from farflung.protocol.frames import Payload, with_payload
from farflung.simulator.peer import VirtualPeer


class VirtualCrossings:
    def __init__(self, peer: VirtualPeer) -> None:
        self._peer, self._world = peer, peer.world
        # By version and microbatch; with the seat for which it is kept.
        self._kept: dict[tuple[int, int, KeptPiece], tuple[int, Payload]] = {}

    def carry_out(self, effect: ModeEffect) -> None:
        peer = self._peer
        match effect:
            case KeepCrossing(version=version, micro=micro, piece=piece, payload=payload):
                self._kept[version, micro, piece] = (peer.seat, payload)
            case ForgetCrossings(version=version):
                seats = {seat for key, (seat, _) in self._kept.items() if key[0] <= version}
                self._world.observe("forgotten", (peer, version, seats))
                self._kept = {key: kept for key, kept in self._kept.items() if key[0] > version}
            case SendCrossing(to=to, header=header, piece=piece):
                payload = self._get(header.version, micro_of(header), piece)
                self._world.to_peer(peer.peer, SendFrame(to, with_payload(header, payload)))
            case HandOver():
                self._hand_over(effect)
            case _:
                raise TypeError(f"no hand for {type(effect).__name__}")

    def _hand_over(self, effect: HandOver) -> None:
        hand, peer = effect.hand, self._peer
        self._world.observe("handed", (peer, hand))
        for slot, piece, size in (
            (0, KeptPiece.INPUT, hand.given_bytes),
            (1, KeptPiece.RETURNED, hand.returned_bytes),
        ):
            if size:
                peer.belt[3 * hand.place + slot] = bytes(self._get(hand.version, hand.micro, piece))
        peer.to_trainer(hand)

    def clear(self) -> None:
        """The stage that was held is given up."""
        self._kept.clear()

    def _get(self, version: int, micro: int, piece: KeptPiece) -> Payload:
        kept = self._kept.get((version, micro, piece))
        if kept is None:
            self._world.observe("lacked", (self._peer, version, micro, piece))
            raise RuntimeError(f"{self._peer.peer} has not kept {piece} of {micro}")
        return kept[1]
