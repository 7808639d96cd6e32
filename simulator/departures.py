"""Who goes in a simulated run, and comes back: peers that are asked to leave, and deaths close to each other.

Called by the world.  Deaths between two effects are the world's own, and few, since any party may be hit by them at
any time; those here are so many that within one batch of a pipeline several seats of several stages go, and others
sit down meanwhile.  A run without them draws nothing here, so that its seed keeps its course.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Protocol

from farflung.simulator.peer import VirtualPeer

AWAY_S = (0.5, 8.0)  # how long somebody who was asked to leave stays away
DEATHS_FROM_S = 3.0  # before that hardly anybody is there


class DepartureWorld(Protocol):
    """The simulated world, as those who go see it."""

    random: random.Random
    now: float

    @property
    def peers(self) -> Mapping[str, VirtualPeer]: ...
    @property
    def calm(self) -> bool: ...
    def after(self, delay_s: float, action: Callable[[], object]) -> None: ...
    def note(self, text: str) -> None: ...
    def start_again(self, peer: str) -> None: ...


# ---- deaths --------------------------------------------------------------------------------------------------------


def let_some_die(world: DepartureWorld, per_s: float, kill: Callable[[str], None]) -> None:
    """At random times; of a stage with a single seat nobody, since its sums would be gone and nobody could ask them."""
    if not per_s:
        return

    def strike() -> None:
        if world.calm:
            return
        seated = [peer for peer in world.peers.values() if peer.alive and not peer.exit_code and peer.seat]
        stages = [_stage_of(peer) for peer in seated]
        able = [peer for peer, stage in zip(seated, stages, strict=True) if stages.count(stage) > 1]
        if able:
            kill(world.random.choice(able).peer)
        world.after(world.random.expovariate(per_s), strike)

    world.after(DEATHS_FROM_S + world.random.expovariate(per_s), strike)


def _stage_of(peer: VirtualPeer) -> int:
    return peer.held[0].number if peer.held else -1


# ---- those who take their leave, as on Ctrl-C, and come back as new processes ----------------------------------------


def let_some_leave(world: DepartureWorld, per_s: float) -> None:
    """Once a virtual second."""
    for peer in list(world.peers.values()) if per_s else ():
        if peer.alive and not peer.exit_code and world.random.random() < per_s:
            ask_to_leave(world, peer, twice=world.random.random() < 0.3)
            _await_return(world, peer)


def ask_to_leave(world: DepartureWorld, peer: VirtualPeer, twice: bool = False) -> None:
    """In good order; a peer that is asked twice goes at once."""
    world.note(f"{peer.peer} is asked to leave{' twice' if twice else ''}")
    peer.carry_out(peer.machine.take_leave("asked", world.now))
    if twice:
        peer.carry_out(peer.machine.leave("asked"))


def _await_return(world: DepartureWorld, peer: VirtualPeer) -> None:
    def look() -> None:
        if not peer.alive or peer.exit_code == "finished" or world.peers.get(peer.peer) is not peer:
            return  # or it is back already: it was asked once more before it had gone
        if peer.exit_code:
            world.start_again(peer.peer)
        else:
            _await_return(world, peer)

    world.after(world.random.uniform(*AWAY_S), look)
