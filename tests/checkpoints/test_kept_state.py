"""What a peer keeps of the run on its own disk: whoever is killed when, one whole version can be had from there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from farflung.checkpoints.kept_state import BasePath, KeptState
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import StoreError
from farflung.protocol.model_schema import Fragment
from farflung.protocol.process import failpoints

CHUNK = 64
FRAGMENTS = (Fragment(0, 0, 2), Fragment(1, 2, 1))
WHAT = b"a run and a model"
POINTS = list(failpoints.KEEPING)


@pytest.fixture(autouse=True)
def nothing_breaks() -> Iterator[None]:
    yield
    failpoints.arm({})


def opened(folder: Path, what: bytes = WHAT) -> KeptState:
    return KeptState(folder / "kept", what, FRAGMENTS, CHUNK)


def state(version: int, chunk: int) -> bytes:
    """In place of arithmetic."""
    return (hash_bytes(f"{version} {chunk}".encode()) * CHUNK)[:CHUNK]


def result(version: int, chunk: int, round_no: int = 0) -> bytes:
    return f"result {version} {chunk} {round_no}".encode() * 20


def digest(version: int, fragment: Fragment) -> bytes:
    return root_of(hash_bytes(state(version, chunk)) for chunk in fragment.chunks)


def write_base(kept: KeptState, version: int, fragment: Fragment, era: int = 0) -> None:
    hashes = [hash_bytes(state(version, chunk)) for chunk in fragment.chunks]
    draft = kept.begin(era, fragment.number, version, root_of(hashes), hashes)
    try:
        for chunk in fragment.chunks:
            draft.add(state(version, chunk))
        kept.publish(draft, era, fragment.number, version)
    except OSError:
        draft.give_up()
        raise


def make(kept: KeptState, version: int, fragment: Fragment, era: int = 0) -> None:
    """A version, as the agent does it: its results chunk by chunk, and what they led to."""
    for chunk in fragment.chunks:
        kept.put(era, fragment.number, version, {chunk: result(version, chunk)})
    assert kept.made(era, fragment.number, version, digest(version, fragment), 0.5)


def newest(kept: KeptState, fragment: Fragment = FRAGMENTS[0]) -> int:
    """The newest version that can be had, with all that leads there read and compared."""
    for way in kept.ways(fragment.number):
        assert way.digest == digest(way.version, fragment)
        assert dict(kept.base_chunks(way)) == {chunk: state(way.base, chunk) for chunk in fragment.chunks}
        for version in range(way.base + 1, way.version + 1):
            for chunk in fragment.chunks:
                assert kept.result(way.era, way.fragment, version, chunk) == (result(version, chunk), 0.5)
        return way.version
    return -1


def test_a_base_and_the_results_since_lead_to_the_newest_version(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    for fragment in FRAGMENTS:
        write_base(kept, 3, fragment)
    for version in (4, 5, 6):
        make(kept, version, FRAGMENTS[0])
    kept.close()
    again = opened(tmp_path)
    assert [newest(again, fragment) for fragment in FRAGMENTS] == [6, 3]
    assert again.reach(0, 0) == (3, 6) and again.reach(1, 0) == (-1, -1)
    assert [way.version for way in again.ways(0)] == [6, 5, 4, 3]
    write_base(again, 6, FRAGMENTS[0])
    names = {path.name for path in again.folder.iterdir()}
    assert names == {"e0-f0-v6.base", "e0-f1-v3.base"}, "what a new base replaces goes, and nothing else"
    assert again.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in again.folder.iterdir()} == {0o600}
    assert again.size_bytes == sum(path.stat().st_size for path in again.folder.iterdir())


def test_a_version_counts_when_all_its_results_and_its_digest_are_there(tmp_path: Path) -> None:
    kept, fragment = opened(tmp_path), FRAGMENTS[0]
    write_base(kept, 0, fragment)
    kept.put(0, 0, 1, {0: result(1, 0)})
    assert not kept.made(0, 0, 1, digest(1, fragment), 0.5), "one result is missing"
    assert kept.reach(0, 0) == (0, 0) and kept.after(0, 0, 1) == {0}
    kept.put(0, 0, 1, {1: result(1, 1)})
    kept.sync(0, 0, 1)
    kept.close()
    again = opened(tmp_path)
    assert again.reach(0, 0) == (0, 0) and again.after(0, 0, 1) == {0, 1}
    assert again.result(0, 0, 1, 1) == (result(1, 1), 1.0)  # for whoever knows the commit
    make(again, 2, fragment)
    assert again.reach(0, 0) == (0, 0), "version 1 was never made: nothing leads to 2"
    assert again.made(0, 0, 1, digest(1, fragment), 0.5) and newest(again) == 2


def test_results_of_a_round_that_was_aborted_give_way_to_those_that_count(tmp_path: Path) -> None:
    kept, fragment = opened(tmp_path), FRAGMENTS[0]
    write_base(kept, 0, fragment)
    kept.put(0, 0, 1, {chunk: result(1, chunk, round_no=7) for chunk in fragment.chunks})
    make(kept, 1, fragment)
    assert newest(kept) == 1
    kept.close()
    assert newest(opened(tmp_path)) == 1


@pytest.mark.parametrize("what", [b"another model", b"another run"])
def test_what_is_of_another_run_or_model_is_no_version_of_this_one(tmp_path: Path, what: bytes) -> None:
    kept = opened(tmp_path)
    write_base(kept, 0, FRAGMENTS[0])
    make(kept, 1, FRAGMENTS[0])
    kept.close()
    other = opened(tmp_path, what)
    assert not other.ways(0) and not list(other.folder.iterdir())


def test_a_bit_that_flips_anywhere_is_never_read_as_what_was_written(tmp_path: Path) -> None:
    kept, fragment = opened(tmp_path), FRAGMENTS[0]
    write_base(kept, 0, fragment)
    make(kept, 1, fragment)
    kept.close()
    whole = tmp_path / "kept"
    for path in sorted(whole.iterdir()):
        raw = path.read_bytes()
        for at in range(0, 8 * len(raw), 13):
            damaged = bytearray(raw)
            damaged[at // 8] ^= 1 << at % 8
            copy = tmp_path / "damaged"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy / "kept")
            (copy / "kept" / path.name).write_bytes(damaged)
            again = opened(copy)
            for way in again.ways(0):
                assert _is_right(again, way), (path.name, at)
            again.close()


def _is_right(kept: KeptState, way: BasePath) -> bool:
    """Nothing else is read than was written: but for the factor and the digest, which show when a state is made."""
    try:
        if any(body != state(way.base, chunk) for chunk, body in kept.base_chunks(way)):
            return False
    except StoreError:
        return True  # seen
    found = [kept.result(0, 0, 1, chunk) for chunk in FRAGMENTS[0].chunks] if way.version == 1 else []
    return all(each is None or each[0] == result(1, chunk) for chunk, each in enumerate(found))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("passage", [1, 2, 3])
def test_killed_at_any_point_the_newest_version_that_counted_can_be_had(
    tmp_path: Path, point: str, passage: int
) -> None:
    """As a real process: what it had not written to the end is there in part, and what it was told counted."""
    told, wrote = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            _write_on(opened(tmp_path), f"{point}=kill@{passage}", wrote)
        finally:
            os._exit(1)
    os.close(wrote)
    with os.fdopen(told, "rb") as file:
        counted = file.read()
    assert os.WIFSIGNALED(os.waitpid(writer, 0)[1]), f"{point} was not passed {passage} times"
    kept = opened(tmp_path)
    assert newest(kept) >= counted[-1]
    assert not list(kept.folder.glob("*.new")), "what was begun is removed"
    make(kept, newest(kept) + 1, FRAGMENTS[0])  # and it goes on from there
    assert newest(kept) > counted[-1]


def _write_on(kept: KeptState, fails: str, told: int) -> None:
    fragment, version = FRAGMENTS[0], 0
    write_base(kept, version, fragment)
    os.write(told, bytes([version]))
    failpoints.arm({failpoints.VARIABLE: fails})
    while version < 20:
        version += 1
        kept.put(0, 0, version, {chunk: result(version, chunk) for chunk in fragment.chunks})
        kept.sync(0, 0, version)
        make(kept, version, fragment)
        os.write(told, bytes([version]))
        if version % 3 == 0:
            write_base(kept, version, fragment)


@pytest.mark.parametrize("point", POINTS)
def test_a_full_disk_at_any_point_costs_no_version_that_counted(tmp_path: Path, point: str) -> None:
    kept, fragment = opened(tmp_path), FRAGMENTS[0]
    write_base(kept, 0, fragment)
    make(kept, 1, fragment)
    failpoints.arm({failpoints.VARIABLE: f"{point}=raise:ENOSPC@1+"})
    with pytest.raises((StoreError, OSError)) as seen:
        make(kept, 2, fragment)
        kept.sync(0, 0, 2)
        write_base(kept, 2, fragment)
    assert os.strerror(errno.ENOSPC) in str(seen.value)
    assert newest(kept) >= 1
    failpoints.arm({})
    kept.close()
    again = opened(tmp_path)
    assert newest(again) >= 1
    make(again, newest(again) + 1, fragment)
    write_base(again, newest(again), fragment)


def test_two_processes_do_not_share_it(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    with pytest.raises(StoreError, match="kept"):
        opened(tmp_path)
    kept.close()
    opened(tmp_path)
