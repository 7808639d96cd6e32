"""What survives when a virtual peer is killed: checkpoints, arrived pieces, results; and the hand for the first.

Used by the simulator's peers in place of peer/state/checkpoint_thread.py.  A checkpoint appears whole, a while after
its last part was copied, or not at all: whoever is killed before has written nothing.  Some writes fail, some reads
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from farflung.checkpoints.catch_up import NO_VERSION
from farflung.collectives.round.effects import Install, Roll
from farflung.peer.machine.effects import Digests, Restore, SaveFragment
from farflung.peer.simulator.surroundings import Host
from farflung.protocol.frames import Payload
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Shelved

KEPT = 2
Part = tuple[bytes, list[bytes]]  # digest, chunks


@dataclass(frozen=True)
class Kept:
    era: int
    version: int
    parts: Mapping[int, Part]  # by fragment

    def fits(self, lacking: Mapping[int, Digests]) -> bool:
        return all(
            number in self.parts and (self.version, self.parts[number][0]) in known
            for number, known in lacking.items()
        )


@dataclass
class VirtualDisk:
    """`fails` is asked at every write and read."""

    fails: Callable[[], bool]
    kept: list[Kept] = field(default_factory=list)  # newest first

    def write(self, new: Kept) -> str:
        if self.fails():
            return "the disk is full"
        elsewhere = [k for k in self.kept if k.parts.keys() != new.parts.keys()]  # of other stages
        mine = [k for k in self.kept if k.parts.keys() == new.parts.keys()]
        others = [k for k in mine if (k.era, k.version) != (new.era, new.version)]
        kept = sorted([new, *others], key=lambda k: (k.era, k.version), reverse=True)[:KEPT]
        self.kept = [*kept, *elsewhere]
        return ""


def is_kept(known: Mapping[int, Digests], disks: Iterable[VirtualDisk]) -> bool:
    """Some version of the run lies there, of every fragment: in one checkpoint, or in those of all stages."""
    there = [kept for disk in disks for kept in disk.kept]
    versions = [{kept.version for kept in there if kept.fits({n: of})} for n, of in known.items()]
    return bool(set.intersection(*versions))


@dataclass
class OwnDisk:
    """Beside the key of one peer: what peer/state/arrived_pieces.py and peer/state/results_on_disk.py keep."""

    results_on_disk: bool = False
    # Era, version, digest, bytes.
    pieces: dict[int, tuple[int, int, bytes, bytes]] = field(default_factory=dict)
    results: dict[tuple[int, int, int], Payload] = field(default_factory=dict)  # era, version, chunk
    commits: bytes = b""  # as the coordinator signed them
    stage: int = -1  # of a model that is cut into some: that these are of

    def keep_result(self, era: int, effect: Roll, keep: int) -> None:
        if self.results_on_disk:
            self.results[era, effect.version, effect.chunk] = effect.payload
            old = [key for key in self.results if key[1] <= effect.version - keep or key[0] != era]
            for key in old:
                del self.results[key]

    def found(self, held: Iterable[Fragment]) -> dict[int, set[int]]:
        there: dict[int, set[int]] = {}
        here = {chunk for fragment in held for chunk in fragment.chunks}
        for _, version, chunk in self.results:
            if chunk in here:
                there.setdefault(version, set()).add(chunk)
        return there


class VirtualCheckpoints:
    def __init__(self, peer: Host, disk: VirtualDisk) -> None:
        self._peer, self._disk = peer, disk
        self._key = (0, NO_VERSION)
        self._parts: dict[int, Part] = {}

    def save(self, effect: SaveFragment) -> None:
        """In the peer's arithmetic: what changes a chunk comes before this or after it."""
        peer, key = self._peer, (effect.era, effect.version)
        if key != self._key:
            self._key, self._parts = key, {}
        chunks = [peer.state.chunk_bytes(chunk) for chunk in peer.fragments[effect.fragment].chunks]
        peer.world.observe("saved", (peer, effect, chunks))
        self._parts[effect.fragment] = (effect.digest, chunks)
        if len(self._parts) == len(peer.held):
            whole = Kept(*key, dict(self._parts))
            peer.world.after(peer.world.delay("store"), lambda: self._publish(whole))

    def _publish(self, whole: Kept) -> None:
        peer = self._peer
        if peer.alive:
            problem = self._disk.write(whole)
            peer.carry_out(peer.machine.on_saved(whole.version, problem))

    def list_shelf(self) -> None:
        peer = self._peer
        if peer.alive and not self._disk.fails():
            found = [
                Shelved.of(
                    kept.version, min(kept.parts), [digest for _, (digest, _) in sorted(kept.parts.items())]
                )
                for kept in self._disk.kept
            ]
            peer.carry_out(peer.machine.on_shelf("checkpoints", found))

    def restore(self, effect: Restore) -> None:
        peer = self._peer
        if not peer.alive:
            return
        peer.world.observe("restoring", (peer, effect))
        fitting = [kept for kept in self._disk.kept if kept.fits(effect.lacking)]
        found = [kept for kept in fitting if not self._disk.fails()]
        newest, broken = found[0] if found else None, fitting[0] if fitting else None
        if newest is not None:
            for number in effect.lacking:
                for chunk, raw in zip(peer.fragments[number].chunks, newest.parts[number][1], strict=True):
                    peer.calculate(partial(peer.state.install, Install(chunk, newest.version, raw)))
        version = newest.version if newest is not None else NO_VERSION

        def end() -> None:
            touched = broken is not None and newest is None
            if broken is not None and touched:  # its reading failed after the first chunk of each fragment
                for number in effect.lacking:
                    first = peer.fragments[number].first
                    peer.state.install(Install(first, broken.version, broken.parts[number][1][0]))
            effects = peer.machine.on_restored(version, ["nothing read"], touched, peer.world.now())
            peer.carry_out(effects)

        peer.calculate(end)
