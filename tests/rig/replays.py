"""Valid frames at bad moments: whatever was ever sent comes again, to anybody, at any time, most of it at moments that
are delicate.

A frame that is whole and true can arrive late: its sender was stopped, or its connection stood still.  A member can
also keep what it got, and send it on to others.  Chance alone hits no short window, so it is aimed: while a peer reads
a checkpoint, installs what it kept, rolls or seals, it is sent frames about just that, and pieces of every state that
anybody has ever held, with the list of their hashes: true ones, that nobody asked for.

`ReplayingWorld` is a world in which this happens.  It draws from a seed of its own: what else happens is as it was.
"""

from __future__ import annotations

import random
from collections import deque

from farflung.collectives.round.effects import Seal
from farflung.peer.machine.machine import PeerMachine
from farflung.peer.machine.modes import kinds_of
from farflung.protocol.frames import Frame, Header, Kind, claimed, with_payload
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import TAG, World, peer_of

Sent = tuple[str, str, bytes, bytes]  # from, to, header, payload
KINDS = kinds_of(stages=True)
KEPT = 400  # frames of all kinds, drawn evenly from all that came by
KEPT_OF_STATE = 64  # of each of the kinds below, the newest
OF_STATE = frozenset({Kind.STATE, Kind.MANIFEST, Kind.LOGGED, Kind.RESULT, Kind.HAVE})
DELICATE = frozenset({"restoring", "recalled", "roll", "sealed", "saved"})
AFTER_FAULTS_S = 40.0
NEWEST = 4  # of the states that were held, most often one of these is sent
EVERY_S = (0.05, 2.0)  # between two frames that come again without an aim


class ReplayingWorld(World):
    def __init__(self, seed: int, scenario: Scenario, machine: type[PeerMachine] = PeerMachine) -> None:
        super().__init__(seed, scenario, machine)
        self._chance = random.Random(f"replays {seed}")
        self.aimed = self._chance.choice((0.0, 0.02, 0.3, 1.0))  # at so many of the delicate moments
        self._seen: list[Sent] = []
        self._seen_count = 0
        self._of_state: dict[Kind, deque[Sent]] = {
            kind: deque(maxlen=KEPT_OF_STATE) for kind in sorted(OF_STATE)
        }
        self._states: list[list[Frame]] = []  # of each that was held: the list of its hashes, then its pieces
        self._kept_states: set[bytes] = set()  # their digests
        # A run that lost its newest version goes back when the faults are over, and reads checkpoints then.
        self._until_s = scenario.faults_until_s + AFTER_FAULTS_S
        self.replayed = 0
        self._last = peer_of(self._keys[-1])
        self.after(self._chance.uniform(*EVERY_S), self._any)

    def _frame_arrives(self, source: str, target: str, header: bytes, payload: bytes) -> None:
        super()._frame_arrives(source, target, header, payload)
        seen = (source, target, header, payload)
        said = claimed(header, TAG, KINDS)
        if said is None:
            return  # damaged on its way: others see to those
        if said.kind in self._of_state:
            self._of_state[said.kind].append(seen)
        self._seen_count += 1
        if len(self._seen) < KEPT:
            self._seen.append(seen)
        elif (place := self._chance.randrange(self._seen_count)) < KEPT:
            self._seen[place] = seen

    def _observe(self, what: str, details: object) -> None:
        super()._observe(what, details)
        if what == "sealed":
            self._keep_state(details)  # type: ignore[arg-type]
        if what in DELICATE and isinstance(details, tuple) and self._chance.random() < self.aimed:
            peer = details[0]
            if isinstance(peer, VirtualPeer):
                for _ in range(self._chance.randint(1, 3)):
                    self.after(self._chance.uniform(0.0, 0.3), lambda: self._about_state(peer))

    def _about_state(self, peer: VirtualPeer) -> None:
        if self._states and self._chance.random() < 0.5:
            frames = self._states[
                self._chance.randrange(max(0, len(self._states) - NEWEST), len(self._states))
            ]
            for frame in (frames[0], self._chance.choice(frames[1:])):
                self._again((self._last, "", frame.header.pack(), bytes(frame.payload)), peer)
            return
        there = [seen for kind in sorted(OF_STATE) for seen in self._of_state[kind]]
        if there:
            self._again(self._chance.choice(there), peer)

    def _keep_state(self, sealed: tuple[VirtualPeer, Seal, bytes, int]) -> None:
        """The list of hashes of a true state, and its pieces."""
        peer, seal, digest, _ = sealed
        if digest in self._kept_states or peer.peer in self.invariants.liars:
            return
        self._kept_states.add(digest)
        fragment = peer.fragments[seal.fragment]
        manifest = Header(Kind.MANIFEST, peer.tag, version=seal.version, chunk=fragment.first)
        frames = [with_payload(manifest, peer.state.manifest_bytes(seal.fragment))]
        for chunk in fragment.chunks:
            header = Header(Kind.STATE, peer.tag, version=seal.version, chunk=chunk)
            frames.append(with_payload(header, bytes(peer.state.piece_bytes(chunk))))
        self._states.append(frames)

    def _any(self) -> None:
        if self.now >= self._until_s:
            return
        if self._seen and self.peers:
            self._again(self._chance.choice(self._seen), None)
        self.after(self._chance.uniform(*EVERY_S), self._any)

    def _again(self, seen: Sent, at: VirtualPeer | None) -> None:
        """Late, from its sender to whom it was for; or to anybody, by the last peer, which got it or could have."""
        source, target, header, payload = seen
        if at is None:
            anybody = self._chance.choice(list(self.peers.values()))
            at = self.peers.get(target, anybody) if self._chance.random() < 0.5 else anybody
        sender = source if at.peer == target else self._last
        said = claimed(header, TAG, KINDS)
        if said is None or (said.kind.crossing and sender == source):
            return  # between two seats a connection brings each word once, and in order: that is what they build on
        if sender != at.peer and self.now < self._until_s:
            self.replayed += 1
            World._frame_arrives(self, sender, at.peer, header, payload)
