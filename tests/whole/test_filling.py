"""A true frame at the worst moment: while a checkpoint is read into the state of somebody that nobody gives anything.

Everybody is killed, and comes back with checkpoints of older versions.  One member has pieces of the version that is
lost, says that it has nothing, and sends the list of their hashes and one of them to whoever begins to read.  Each
frame is what an honest donor's late answer is; taken in, it stood as a piece of that version among those that were
read, and the mixture was hashed as a version of the run (P1), again and again (P3).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from farflung.peer.machine.effects import Restore
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Header, Kind, with_payload
from farflung.simulator.disk import VirtualCheckpoints
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import TAG, World
from rig.pieces import pieces, seeds

EACH = 3  # seeds of one test
STORMY = Scenario(
    peers=3,
    rounds=12,
    store_fails=0.0,
    every_rounds=2,
    end_s=200.0,
).without_chance()


class Aimed:
    """Sees what each version was made of, and sends pieces of the target to whoever begins to read something else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = self.restores = self.stale = 0
        self._pieces: dict[tuple[int, bytes], list[bytes]] = {}
        self._observed, self._restored = World._observe, VirtualCheckpoints.restore
        monkeypatch.setattr(World, "_observe", lambda world, *seen: self._observe(world, *seen))
        monkeypatch.setattr(VirtualCheckpoints, "restore", lambda hand, effect: self._restore(hand, effect))

    def _observe(self, world: World, what: str, details: tuple[object, ...]) -> None:
        if what == "sealed":
            peer, effect, digest, _ = details
            assert isinstance(peer, VirtualPeer) and isinstance(digest, bytes)
            version: int = effect.version  # type: ignore[attr-defined]
            chunks = [peer.state.chunk_bytes(chunk) for chunk in peer.fragments[0].chunks]
            self._pieces.setdefault((version, digest), chunks)
        self._observed(world, what, details)

    def _restore(self, hand: VirtualCheckpoints, effect: Restore) -> None:
        self._restored(hand, effect)
        self.restores += 1
        peer = hand._peer
        assert isinstance(peer, VirtualPeer) and peer.member.joined is not None
        catch = peer.member.joined.part.replicas[0].held.catch
        made = self._pieces.get((catch.chunks.target, catch.chunks.digests.get(catch.chunks.target, b"")))
        if made is None or not peer.alive:
            return
        listed = with_payload(
            Header(Kind.MANIFEST, TAG, version=catch.chunks.target), b"".join(map(hash_bytes, made))
        )
        piece = with_payload(Header(Kind.STATE, TAG, version=catch.chunks.target), made[0])
        before = peer.member.counters.as_dict()[Verdict.STALE]
        for frame in (listed, piece):
            self.sent += 1
            peer.carry_out(peer.member.on_frame("somebody", frame, peer.world.now()))
        self.stale += peer.member.counters.as_dict()[Verdict.STALE] - before


@pytest.mark.parametrize("piece", pieces(4))
def test_P1_P3_true_frames_aimed_at_who_reads_a_checkpoint_harm_nothing(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    aimed = Aimed(monkeypatch)
    for seed in seeds(piece, EACH):
        at_s = 14.0 + 0.37 * seed
        report = World(seed, replace(STORMY, blackout_at_s=at_s, faults_until_s=at_s + 2.0)).run()
        assert report.outcome == "finished"
    assert aimed.restores >= EACH and aimed.sent > 0
    assert aimed.stale == aimed.sent
