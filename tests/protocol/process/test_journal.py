"""Event journals: whole lines after any death, bounded, never a reason to stop.  Failpoints: off unless asked."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from farflung.peer.agent.journal_writer import RoundEvents, open_journal
from farflung.peer.local.words import Frozen
from farflung.peer.machine.trainer_proxy import TrainerProxy
from farflung.protocol.errors import UserError
from farflung.protocol.process import failpoints
from farflung.protocol.process.journal import JOURNAL_VARIABLE, EventLog, Follower, read_events
from rig.waiting import LONG_S


def test_a_line_has_its_stamps_and_its_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e")
    log.write_start(role="peer", peer="ann")
    log.write("sealed", version=3)
    start, sealed = read_events(tmp_path / "e")
    assert start["event"] == "start" and start["boot"] and start["role"] == "peer"
    assert sealed["version"] == 3 and sealed["at"] >= start["at"] and sealed["pid"] == os.getpid()


def test_the_file_is_bounded_and_each_further_one_says_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "e"
    log, follower, seen = EventLog(path, most_bytes=2000), Follower(path), []
    log.write_start(role="peer", peer="ann")
    for number in range(200):
        log.write("n", number=number)
        seen += [each["number"] for each in follower.new_events() if each["event"] == "n"]
    assert seen == list(range(200)), "a reader that keeps up misses nothing"
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * 2200
    assert len(list(tmp_path.iterdir())) == 2
    events = read_events(path)
    heads = [each for each in events if each["event"] == "start"]
    assert all(head["peer"] == "ann" for head in heads) and heads[-1]["again"]
    assert [e["number"] for e in events if e["event"] == "n"] == list(range(200))[-len(events) + len(heads) :]


def test_a_torn_line_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "e"
    EventLog(path).write("first")
    with path.open("ab") as file:
        file.write(b'{"at":1,"event":"to')
    EventLog(path).write("second")
    assert [each["event"] for each in read_events(path)] == ["first", "second"]


def test_lines_that_the_disk_does_not_take_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "e")
    real = os.write

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.write("lost")
    log.write("lost")
    monkeypatch.setattr(os, "write", real)
    log.write("found")
    assert [(each["event"], each.get("missing")) for each in read_events(tmp_path / "e")] == [("found", 2)]


def test_a_place_that_can_not_be_written_is_a_mistake_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write the event journal"):
        EventLog(tmp_path / "no" / "such" / "folder")


# ---- failpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("commit.nowhere=kill", "there is no failpoint 'commit.nowhere'"),
        ("commit.before_fsync=explode", "no action 'explode'"),
        ("commit.before_fsync", "is not POINT=ACTION"),
        ("commit.before_fsync=kill@0", "is not POINT=ACTION"),
        ("scatter.mid=sleep", "sleep needs seconds"),
        ("scatter.mid=raise:EWHAT", "not the name of an errno"),
    ],
)
def test_a_failpoint_that_can_not_be_meant_is_an_error(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        failpoints.parse(text)


def test_a_failpoint_breaks_at_its_passage_and_not_before() -> None:
    told: list[tuple[str, str]] = []
    try:
        failpoints.arm(
            {failpoints.VARIABLE: "scatter.mid=raise:EIO@3; gather.mid=raise@2+"}, lambda *w: told.append(w)
        )
        failpoints.hit("scatter.mid")
        failpoints.hit("scatter.mid")
        with pytest.raises(OSError, match="scatter.mid") as error:
            failpoints.hit("scatter.mid")
        assert error.value.errno == errno.EIO
        failpoints.hit("scatter.mid")
        failpoints.hit("gather.mid")
        for _ in range(2):
            with pytest.raises(OSError, match="gather.mid"):
                failpoints.hit("gather.mid")
        assert told == [("scatter.mid", "raise"), ("gather.mid", "raise"), ("gather.mid", "raise")]
    finally:
        failpoints.arm({})
    assert not failpoints.is_armed()


def test_corrupt_changes_one_byte_of_what_passes() -> None:
    try:
        failpoints.arm({failpoints.VARIABLE: "scatter.mid=corrupt@2"})
        assert failpoints.passing("scatter.mid", b"abc") == b"abc"
        changed = failpoints.passing("scatter.mid", b"abc")
        assert len(changed) == 3 and sum(a != b for a, b in zip(changed, b"abc", strict=True)) == 1
        assert failpoints.passing("scatter.mid", b"abc") == b"abc"
    finally:
        failpoints.arm({})


def test_kill_is_a_real_one() -> None:
    code = "from farflung.protocol.process import failpoints as f; f.arm(); f.hit('trainer.step'); print('alive')"
    environ = os.environ | {failpoints.VARIABLE: "trainer.step=kill"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == -signal.SIGKILL and done.stdout == ""


def test_every_point_is_passed_somewhere_and_no_other_is() -> None:
    """The names in the source, as a reader would look for them."""
    rooms = Path(failpoints.__file__).resolve().parents[2]
    files = [path for room in ("coordinator", "checkpoints", "peer") for path in (rooms / room).rglob("*.py")]
    source = "\n".join(path.read_text() for path in files)
    derived = {f"{name}.{when}" for name in failpoints.RECORDS for when in ("before_fsync", "after_fsync")}
    plain = set(failpoints.POINTS) - derived
    assert [point for point in sorted(plain) if f'"{point}"' not in source] == []
    assert [name for name in failpoints.RECORDS if f'"{name}"' not in source] == []


def test_each_peer_has_its_own_beside_its_key_and_needs_none(tmp_path: Path) -> None:
    said: list[str] = []
    key = tmp_path / "second.pem"
    mine = open_journal(None, key, said.append, {})
    assert mine.is_on and not mine.detailed and (tmp_path / "second.events.jsonl").exists()
    asked = open_journal(None, key, said.append, {JOURNAL_VARIABLE: str(tmp_path / "asked")})
    assert asked.detailed and (tmp_path / "asked").exists()
    assert not open_journal(None, key, said.append, {JOURNAL_VARIABLE: "off"}).is_on
    assert said == []
    assert not open_journal(None, tmp_path / "gone" / "key.pem", said.append, {}).is_on
    assert "no event journal" in said[0]


def test_a_freeze_that_crossed_a_load_is_marked_as_such(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e")
    events, machine = RoundEvents(log, {}, dict, dict), SimpleNamespace(training=TrainerProxy())  # type: ignore[arg-type]
    machine.training.on_attach()
    machine.training.load(0, 0, None)
    events.on_local(Frozen(slot=0, tokens=8, steps=2, used=(), loss=None), machine)  # type: ignore[arg-type]
    machine.training.on_loaded(0)
    events.on_local(Frozen(slot=1, tokens=8, steps=2, used=(), loss=None), machine)  # type: ignore[arg-type]
    frozen = [each for each in read_events(tmp_path / "e") if each["event"] == "frozen"]
    assert ["crossed" in each for each in frozen] == [True, False]
