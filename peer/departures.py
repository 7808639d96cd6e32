"""Peers of the simulator that take their leave, as on Ctrl-C, and come back as new processes.

Called by the simulator once a virtual second, and by tests at a moment of their choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farflung.peer.simulator import World
    from farflung.peer.virtual_peer import VirtualPeer

AWAY_S = (0.5, 8.0)


def let_some_leave(world: World) -> None:
    """A run without departures draws nothing here, so that its seed keeps its course."""
    for peer in list(world.peers.values()) if world.scenario.leave_per_s else ():
        if peer.alive and not peer.exit_code and world.random.random() < world.scenario.leave_per_s:
            ask_to_leave(world, peer, twice=world.random.random() < 0.3)
            _await_return(world, peer)


def ask_to_leave(world: World, peer: VirtualPeer, twice: bool = False) -> None:
    """In good order; who is asked twice goes at once."""
    world.note(f"{peer.peer} is asked to leave{' twice' if twice else ''}")
    peer.carry_out(peer.machine.take_leave("asked", world.now))
    if twice:
        peer.carry_out(peer.machine.leave("asked"))


def _await_return(world: World, peer: VirtualPeer) -> None:
    def look() -> None:
        if not peer.alive or peer.exit_code == "finished" or world.peers.get(peer.peer) is not peer:
            return  # or it is back already: it was asked once more before it had gone
        if peer.exit_code:
            world.start_again(peer.peer)
        else:
            _await_return(world, peer)

    world.after(world.random.uniform(*AWAY_S), look)
