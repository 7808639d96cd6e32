"""What survives when a virtual peer is killed: checkpoints, arrived pieces, results; and the hand for the first.

Used by the simulator's peers in place of peer/state/checkpoint_thread.py.  A checkpoint appears whole, a while after
its last part was copied, or not at all: whoever is killed before has written nothing.  Some writes fail, some reads
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.kept_state import BasePath, Key
from farflung.collectives.round.effects import Install, Roll, Seal
from farflung.peer.machine import effects as do
from farflung.peer.machine.disk_words import (
    AheadKept,
    CheckpointWritten,
    Held,
    KeepingFailed,
    KeptWord,
    Reached,
    ShelfListed,
    StateRead,
)
from farflung.peer.machine.effects import Digests, Restore, SaveFragment
from farflung.peer.state.keeping_state import put_back, ways_of
from farflung.peer.state.unsent import Unsent
from farflung.protocol.frames import Payload
from farflung.protocol.mode_words import Shelved
from farflung.protocol.model_schema import Fragment
from farflung.simulator.trainer import TrainerHost

KEPT = 2
Part = tuple[bytes, list[bytes]]  # digest, chunks


@dataclass(frozen=True)
class DiskEntry:
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
    kept: list[DiskEntry] = field(default_factory=list)  # newest first

    def write(self, new: DiskEntry) -> str:
        if self.fails():
            return "the disk is full"
        there = {(k.era, k.version, min(k.parts)): k for k in [*self.kept, new]}
        self.kept = sorted(_needed(list(there.values())), key=lambda k: (k.era, k.version), reverse=True)
        return ""


def _needed(kept: list[DiskEntry]) -> list[DiskEntry]:
    """By the rule of checkpoint_manifest.py: the newest versions of each stage, and the newest whole ones."""
    ages: dict[int, set[tuple[int, int]]] = {}
    for each in kept:
        ages.setdefault(min(each.parts), set()).add((each.era, each.version))
    whole = sorted(set.intersection(*ages.values()), reverse=True)[:KEPT]
    needed = {stage: {*whole, *sorted(mine, reverse=True)[:KEPT]} for stage, mine in ages.items()}
    return [each for each in kept if (each.era, each.version) in needed[min(each.parts)]]


def is_kept(known: Mapping[int, Digests], disks: Iterable[VirtualDisk]) -> bool:
    """Some version of the run lies there, of every fragment: in one checkpoint, or in those of all stages."""
    there = [kept for disk in disks for kept in disk.kept]
    versions = [{kept.version for kept in there if kept.fits({n: of})} for n, of in known.items()]
    return bool(set.intersection(*versions))


@dataclass
class OwnDisk:
    """Beside the key of one peer: what peer/state/keeping_state.py and peer/state/unsent.py keep."""

    results_on_disk: bool = False
    # Era, version, digest, bytes.
    pieces: dict[int, tuple[int, int, bytes, bytes]] = field(default_factory=dict)
    results: dict[tuple[int, int, int], Payload] = field(default_factory=dict)  # era, version, chunk
    commits: bytes = b""  # as the coordinator signed them
    unsent: Unsent | None = None  # of a peer that left in order
    kept: KeptDisk | None = None  # the newest version, where the world's peers keep it
    stage: int = -1  # of a model that is cut into some: that these are of

    @staticmethod
    def of(results_on_disk: bool, keeps: bool) -> OwnDisk:
        return OwnDisk(results_on_disk, kept=KeptDisk() if keeps else None)

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
    def __init__(self, peer: TrainerHost, disk: VirtualDisk) -> None:
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
            whole = DiskEntry(*key, dict(self._parts))
            peer.world.after(peer.world.delay("store"), lambda: self._publish(whole))

    def _publish(self, whole: DiskEntry) -> None:
        peer = self._peer
        if peer.alive:
            problem = self._disk.write(whole)
            peer.carry_out(peer.member.on_disk(CheckpointWritten(whole.version, problem), peer.world.now()))

    def list_shelf(self) -> None:
        peer = self._peer
        if peer.alive and not self._disk.fails():
            found = [
                Shelved.of(
                    kept.version, min(kept.parts), [digest for _, (digest, _) in sorted(kept.parts.items())]
                )
                for kept in self._disk.kept
            ]
            peer.carry_out(peer.member.on_disk(ShelfListed("checkpoints", found), peer.world.now()))

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
            effects = peer.member.on_disk(StateRead(version, ["nothing read"], touched), peer.world.now())
            peer.carry_out(effects)

        peer.calculate(end)


# ---- the newest version on a peer's own disk, as kept_state.py and keeping_state.py have it ----------------------
#
# What is asked first is written first, and each thing takes a while: whoever is killed before has not written it.  A
# base appears whole or not at all.


@dataclass
class KeptDisk:
    """As KeptState."""

    bases: dict[Key, tuple[bytes, list[bytes]]] = field(default_factory=dict)  # digest, chunks
    results: dict[Key, dict[int, Payload]] = field(default_factory=dict)
    made: dict[Key, tuple[bytes, float]] = field(default_factory=dict)  # digest, by what they are multiplied
    fragments: dict[int, Fragment] = field(default_factory=dict)

    def ways(self, fragment: int) -> list[BasePath]:
        found = []
        for (era, number, base), (digest, _) in self.bases.items():
            key, made = (era, number, base), (digest, 1.0)
            while number == fragment and made is not None:
                found.append(BasePath(era, number, base, key[2], made[0]))
                key = (era, number, key[2] + 1)
                whole = len(self.results.get(key, ())) == self.fragments[number].count
                made = self.made.get(key) if whole else None  # type: ignore[assignment]
        return sorted(found, key=lambda way: (way.era, way.version, way.base), reverse=True)

    def reach(self, era: int, fragment: int) -> tuple[int, int]:
        way = next((way for way in self.ways(fragment) if way.era == era), None)
        return (way.base, way.version) if way is not None else (-1, -1)

    def base_chunks(self, way: BasePath) -> Iterator[tuple[int, bytes]]:
        chunks = self.bases[way.era, way.fragment, way.base][1]
        yield from zip(self.fragments[way.fragment].chunks, chunks, strict=True)

    def result(self, era: int, fragment: int, version: int, chunk: int) -> tuple[bytes, float] | None:
        payload = self.results.get((era, fragment, version), {}).get(chunk)
        _, factor = self.made.get((era, fragment, version), (b"", 1.0))
        return (bytes(payload), factor) if payload is not None else None

    def put(self, key: Key, payloads: Mapping[int, Payload]) -> None:
        there = self.results.get(key, {})
        if any(there.get(chunk, payload) != payload for chunk, payload in payloads.items()):
            there, _ = {}, self.made.pop(key, None)
        self.results[key] = there | dict(payloads)

    def publish(self, key: Key, digest: bytes, chunks: list[bytes]) -> None:
        era, fragment, version = key
        self.bases = {k: base for k, base in self.bases.items() if k[1] != fragment} | {key: (digest, chunks)}
        old = {k for k in self.results if k[1] == fragment and (k[0] != era or k[2] <= version)}
        self.drop(old)

    def drop(self, keys: set[Key]) -> None:
        self.results = {key: each for key, each in self.results.items() if key not in keys}
        self.made = {key: each for key, each in self.made.items() if key not in keys}


class VirtualKeeping:
    def __init__(self, peer: TrainerHost, disk: KeptDisk, fails: Callable[[], bool]) -> None:
        self._peer, self._disk, self._fails = peer, disk, fails
        disk.fragments = {each.number: each for each in peer.fragments}
        self._busy_until = 0.0
        self._factors: dict[Key, float] = {}
        self._offered: set[tuple[int, int]] = set()

    def rolled(self, effect: Roll, era: int) -> None:
        number = next(each.number for each in self._peer.held if effect.chunk in each.chunks)
        key = (era, number, effect.version)
        self._factors[key] = effect.factor
        self._write("compute", lambda: self._disk.put(key, {effect.chunk: effect.payload}))

    def sealed(self, seal: Seal, digest: bytes, era: int) -> None:
        key = (era, seal.fragment, seal.version)
        factor = self._factors.pop(key, 1.0)

        def made() -> KeptWord:
            if len(self._disk.results.get(key, ())) == self._disk.fragments[seal.fragment].count:
                self._disk.made[key] = (digest, factor)
            return Reached(era, seal.fragment, *self._disk.reach(era, seal.fragment), seal.version)

        self._write("compute", made)

    def keep(self, effect: do.KeepBase | do.KeepAhead) -> None:
        """In the peer's arithmetic: what changes a chunk comes before this or after it."""
        key = (effect.era, effect.fragment, effect.version)
        if isinstance(effect, do.KeepAhead):
            told = AheadKept(effect.fragment, effect.version, effect.round_no, effect.decision_no)

            def ahead() -> KeptWord:
                self._disk.put(key, effect.payloads)
                return told

            self._write("compute", ahead)
            return
        chunks = [
            self._peer.state.chunk_bytes(chunk) for chunk in self._disk.fragments[effect.fragment].chunks
        ]

        def base() -> KeptWord:
            if self._fails():
                return KeepingFailed("the disk is full")
            self._disk.publish(key, effect.digest, chunks)
            reach = self._disk.reach(effect.era, effect.fragment)
            return Reached(effect.era, effect.fragment, *reach, reach[1], base_of=effect.version)

        self._write("store", base)

    def recall(self, effect: do.Recall) -> Held:
        held: Held = {}
        peer, disk = self._peer, self._disk
        for fragment in peer.held:
            way = next(
                (w for w in ways_of(disk, fragment.number, effect) if put_back(disk, w, peer.state)), None
            )
            if way is None:
                continue
            held |= dict.fromkeys(fragment.chunks, (way.version, way.digest))
            if way.era != effect.era:
                continue
            of_it = {key for key in disk.results if key[:2] == (way.era, way.fragment)}
            disk.drop({key for key in of_it if key[2] > way.version + 1})
            ahead = disk.results.get((way.era, way.fragment, way.version + 1), {})
            if ahead:
                self._offered.add((way.fragment, way.version + 1))
            word = Reached(way.era, way.fragment, way.base, way.version, way.version, frozenset(ahead))
            self._write("compute", lambda word=word: word)  # type: ignore[misc]
        return held

    def offers(self, effect: do.Serve) -> bool:
        return effect.to == self._peer.peer and (effect.fragment, effect.version) in self._offered

    def _write(self, takes: str, job: Callable[[], KeptWord | None]) -> None:
        """One disk: everything in order."""
        peer = self._peer
        world = peer.world
        self._busy_until = max(self._busy_until, world.now()) + world.delay(takes)

        def done() -> None:
            if not peer.alive:
                return
            word = job()
            if word is not None:
                peer.carry_out(peer.member.on_disk(word, world.now()))

        world.after(self._busy_until - world.now(), done)
