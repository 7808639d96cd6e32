"""Results of past rounds: bounded in number and bytes, in memory or on disk, and what they spare others."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farflung.checkpoints.kept_state import KeptResults
from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.effects import Roll, SendFrame
from farflung.peer.machine import effects as do
from farflung.peer.machine.disk_words import ResultsFound, ResultsLost
from farflung.peer.state.keeping_state import DiskPlace, KeepingResults
from farflung.protocol.caps import RESULTS_BYTES
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import SERVED_KINDS, Frame, Kind, parse
from farflung.protocol.manifest import Manifest, RoundSection
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.process.own_files import STALE_S, left_behind
from farflung.protocol.run_terms import Attached, Known
from farflung.simulator.world import Scenario, World
from rig.waiting import PATIENCE_S

CALM = {
    "drop": 0.0,
    "duplicate": 0.0,
    "slow": 0.0,
    "kill_per_effect": 0.0,
    "cut_per_s": 0.0,
    "trainer_crash_per_s": 0.0,
    "store_fails": 0.0,
}


def filled(log: ResultLog, versions: range, chunks: int = 4, size: int = 10, fragment: int = 0) -> ResultLog:
    for version in versions:
        for chunk in range(chunks):
            log.put(fragment, version, chunk, bytes([version]) * size)
    return log


def kept(folder: Path, what: bytes = b"run and model", keep: int = 3, limit: int = 1 << 20) -> KeptResults:
    return KeptResults(folder / "x.results", what, keep, limit, payload_bytes=100)


# ---- in memory -------------------------------------------------------------------------------------------------


def test_the_log_holds_so_many_versions_and_so_many_bytes_and_always_the_newest() -> None:
    log = filled(ResultLog(3), range(1, 6))
    assert log.versions() == [3, 4, 5] and log.bytes == 120 and not log.take_warning()
    filled(log, range(6, 7))
    assert log.get(0, 6, 3) == bytes([6]) * 10 and log.get(0, 3, 3) is None
    small = filled(ResultLog(3, limit_bytes=90), range(1, 6))
    assert small.versions() == [4, 5] and small.bytes == 80
    assert "`results`" in small.take_warning() and not small.take_warning(), "people are told once"
    tiny = filled(ResultLog(3, limit_bytes=5), range(1, 6))
    assert tiny.versions() == [5] and tiny.bytes == 40


def test_the_limit_is_one_for_all_fragments() -> None:
    log = ResultLog(3, limit_bytes=100)
    for version in range(1, 4):
        filled(log, range(version, version + 1), fragment=0)
        filled(log, range(version, version + 1), chunks=2, fragment=1)
    assert log.bytes <= 100
    assert log.versions(0)[-1] == 3 and log.versions(1)[-1] == 3
    log.forget(0)
    assert log.versions(0) == [] and log.bytes == 20 * len(log.versions(1))


# ---- on disk ---------------------------------------------------------------------------------------------------


def put(results: KeptResults, versions: range, era: int = 0, chunks: int = 2) -> None:
    for version in versions:
        for chunk in range(chunks):
            results.put(era, 0, version, chunk, f"{era} {version} {chunk}".encode())


def test_what_is_on_disk_is_there_after_a_crash_and_bounded(tmp_path: Path) -> None:
    before = kept(tmp_path)
    put(before, range(1, 6))
    before.close()
    after = kept(tmp_path)
    assert after.found() == {version: {0, 1} for version in (3, 4, 5)}
    assert after.get(0, 0, 4, 1) == b"0 4 1" and after.get(0, 0, 2, 1) is None
    assert after.get(1, 0, 4, 1) is None, "of another era"
    after.close()
    one = kept(tmp_path, limit=1)
    assert one.found() == {5: {0, 1}}, "the newest stays, however little room there is"
    put(one, range(3, 4), era=1)
    assert one.found() == {3: {0, 1}}, "the run went back: those versions are made again"
    one.remove()
    assert not list(tmp_path.iterdir())


def test_a_torn_result_is_refused_and_more_can_be_kept_behind_it(tmp_path: Path) -> None:
    before = kept(tmp_path)
    put(before, range(1, 3))
    before.close()
    [first, second] = sorted((tmp_path / "x.results").iterdir())
    first.write_bytes(first.read_bytes()[:-2])
    raw = bytearray(second.read_bytes())
    raw[-1] ^= 1
    second.write_bytes(raw)
    after = kept(tmp_path)
    assert after.found() == {1: {0}, 2: {0, 1}}
    assert [after.get(0, 0, 2, chunk) for chunk in (0, 1)] == [b"0 2 0", None], "its hash is another one"
    after.put(0, 0, 1, 1, b"once more")
    after.close()
    assert kept(tmp_path).get(0, 0, 1, 1) == b"once more"


def test_results_of_another_model_are_removed_and_two_processes_do_not_share_them(tmp_path: Path) -> None:
    before = kept(tmp_path)
    put(before, range(1, 3))
    with pytest.raises(StoreError):
        kept(tmp_path)
    before.close()
    (tmp_path / "x.results" / "e0-f0-v9.results").write_bytes(b"short")
    assert kept(tmp_path, b"another model").found() == {}
    assert not list((tmp_path / "x.results").iterdir())


MODEL = ModelSchema((TensorSpec("w", (4, 4), "float32", "param"),), 4, 4, 4, bytes(32))


class Hand:
    """KeepingResults beside a machine that has the log alone."""

    def __init__(self, folder: Path) -> None:
        self.found: dict[int, set[int]] = {}
        self.is_kept, self.told = True, queue.SimpleQueue[do.Effect]()
        attached = Attached(Known(Manifest(round=RoundSection(keep_results=3)), bytes(16)), MODEL)

        def submit(job: Callable[[], object], then: Callable[[object], None]) -> None:
            then(job())

        place = DiskPlace(folder, "ann", RESULTS_BYTES, payload_bytes=100)
        self.hand = KeepingResults(
            place, attached, submit, self, lambda effects: [*map(self.told.put, effects)]
        )

    def on_disk(self, word: ResultsFound | ResultsLost, now: float) -> list[do.Effect]:
        if isinstance(word, ResultsFound):
            self.found.update(word.chunks)
            return []
        self.is_kept = False
        return [do.Note(f"kept in memory: {word.why}")]

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[do.Effect]:
        raise AssertionError("it asked itself nothing")

    def next(self) -> do.Effect:
        return self.told.get(timeout=PATIENCE_S)


def test_results_on_disk_are_served_and_found_again_and_gone_when_the_run_is_over(tmp_path: Path) -> None:
    before = Hand(tmp_path)
    before.hand.rolled(Roll(2, 7, b"result"), era=0, logged_bytes=0)
    for chunk, kind in ((2, Kind.LOGGED), (3, Kind.MISSING)):
        before.hand.serve(do.Serve("bob", Kind.LOGGED, chunk, 7, 0), era=0)
        sent = before.next()
        assert isinstance(sent, SendFrame) and (sent.to, sent.frame.header.kind) == ("bob", kind)
    before.hand.close(finished=False)
    after = Hand(tmp_path)
    after.hand.close(finished=True)
    assert after.found == {7: {2}} and not list(tmp_path.iterdir())


def test_what_peers_left_behind_that_never_came_back_is_removed(tmp_path: Path) -> None:
    Hand(tmp_path).hand.close(finished=False)
    [own] = tmp_path.glob("*.results")
    for name in ("old.results", "new.results", "old.pieces"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    long_ago = time.time() - STALE_S - 9
    for path in (own, tmp_path / "old.results", tmp_path / "old.pieces"):
        os.utime(path, (long_ago, long_ago))
    assert left_behind(own) == [tmp_path / "old.results"]
    Hand(tmp_path).hand.close(finished=False)
    assert {path.name for path in tmp_path.iterdir()} == {own.name, "new.results", "old.pieces"}


def test_without_a_disk_results_stay_in_memory_and_that_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("not a folder")
    hand = Hand(tmp_path / "state")
    told = hand.next()
    assert isinstance(told, do.Note) and "kept in memory" in told.text and not hand.is_kept
    hand.hand.rolled(Roll(2, 7, b"result"), era=0, logged_bytes=0)
    hand.hand.close(finished=True)
    assert hand.told.empty()


# ---- what it is good for ---------------------------------------------------------------------------------------


@pytest.mark.mode("recovery")
@pytest.mark.parametrize("on_disk", [False, True])
def test_P5_a_run_that_loses_everybody_goes_on_from_a_checkpoint_and_results_on_disk(on_disk: bool) -> None:
    """The checkpoint is older than the run's newest version; with the results in between nothing is lost."""
    scenario = Scenario(
        peers=3,
        rounds=9,
        every_rounds=4,
        blackout_at_s=0.0,
        faults_until_s=60.0,
        results_on_disk=on_disk,
        fragments=2,
        **CALM,  # type: ignore[arg-type]
    )
    world = World(3, scenario)

    def look() -> None:
        """Everybody is killed at a version that no checkpoint has, once somebody has applied it."""
        assert world.coordinator is not None
        books = [book.version for book in world.coordinator.core.ledger.books]
        parts = [peer.member.part for peer in world.peers.values()]
        held = [
            [replica.held.version for replica in part.replicas.values()] for part in parts if part is not None
        ]
        if min(books) == 6 and books in held:
            world._blackout()
        else:
            world.after(0.2, look)

    world.after(1.0, look)
    report = world.run()
    assert world.coordinator is not None and report.kills >= 4
    assert report.version == 9 and world.coordinator.core.ledger.eras.number == (0 if on_disk else 1)


class CutOff(World):
    """One peer is out of everybody's reach while the others commit `missed` rounds; then it comes back."""

    missed, away, got = 0, "", ()

    def _delays(self, source: str, target: str) -> list[float]:
        return [] if self.away and self.away in (source, target) else super()._delays(source, target)

    def _local_delay(self, what: str) -> float:
        """Once they are committed the others take their time, so that it is not one more."""
        slow = what == "step" and self.version >= 2 + self.missed
        return 5.0 if slow else super()._local_delay(what)

    @property
    def version(self) -> int:
        return self.coordinator.core.ledger.version if self.coordinator is not None else 0

    def look(self) -> None:
        peers = {name: peer.member.part for name, peer in self.peers.items()}
        held = {name: part.version for name, part in peers.items() if part is not None}
        if not self.away and set(held.values()) == {2} and len(held) == 3:
            self.away = min(held)
        if not self.away or self.version < 2 + self.missed:
            self.after(0.02, self.look)
            return
        self.got, self.away = (), ""

    def _frame_arrives(self, source: str, target: str, header: bytes, payload: bytes) -> None:
        if target == min(self.peers):
            kind = parse(header, len(payload), bytes(range(8)), 1 << 20).kind
            self.got = (*self.got, kind)
        super()._frame_arrives(source, target, header, payload)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("missed", [3, 4])
def test_a_peer_cut_off_for_K_rounds_catches_up_by_results_alone_and_for_one_more_by_state(
    missed: int, on_disk: bool
) -> None:
    """K = keep_results = 3; with the whole machines of peers and coordinator."""
    scenario = Scenario(
        peers=3, rounds=3 + missed, min_peers=2, faults_until_s=1.0, results_on_disk=on_disk, **CALM
    )  # type: ignore[arg-type]
    world = CutOff(5, scenario)
    world.missed = missed
    world.after(1.0, world.look)
    assert world.run().outcome == "finished"
    fetched = {kind for kind in world.got if kind in SERVED_KINDS}
    assert fetched == ({Kind.LOGGED} if missed == 3 else {Kind.MANIFEST, Kind.STATE})
