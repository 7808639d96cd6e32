"""What agent and trainer share: memory seen in two processes, folders that outlive nobody, one channel."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from farflung.peer.local import folder as folders
from farflung.peer.local import memory
from farflung.peer.local.channel import WAITING, LocalClient, LocalServer
from farflung.peer.local.folder import is_abandoned, make_folder, remove_folder, sweep_stale
from farflung.peer.local.memory import SharedState, unmap_pages
from farflung.peer.local.words import Bye, NeedSamples, ResumeSteps, Shared, Stop, to_bytes
from farflung.protocol.errors import UserError
from rig.waiting import PATIENCE_S, eventually


@pytest.fixture
def folder() -> Iterator[Path]:
    made = make_folder()  # not tmp_path: a socket's path must be short
    yield made
    remove_folder(made)


def script(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def next_word(server: LocalServer) -> tuple[bytes, object]:
    """The next thing that a trainer says, and which trainer."""
    found: tuple[bytes, object] = eventually(server.recv_nowait, "a trainer says something")
    return found


# ---- memory

OTHER_SIDE = """
import sys, msgspec
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Shared
state = SharedState.open(msgspec.json.decode(sys.argv[1], type=Shared))
state.slots[1].copy_(state.anchor * 2)
state.write_progress(7, 2**40, 1.5)
print("written", flush=True)
sys.stdin.readline()
print(state.anchor[0].item(), flush=True)
"""


def test_both_processes_see_the_same_memory(folder: Path) -> None:
    import msgspec

    state = SharedState.create(folder, 1000)
    assert state.read_progress() == (0, 0, None)
    assert [t.shape for t in (state.anchor, *state.slots)] == [(1000,)] * 4
    state.anchor.copy_(torch.arange(1000.0))
    with script(OTHER_SIDE, msgspec.json.encode(state.as_message()).decode()) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "written\n"
        assert torch.equal(state.slots[1], torch.arange(1000.0) * 2)
        assert not state.slots[0].any() and not state.slots[2].any()
        assert state.read_progress() == (7, 2**40, 1.5)
        state.anchor[0] = 42.0
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "42.0\n"


def test_there_is_a_place_for_each_part_of_the_outer_state(folder: Path) -> None:
    state = SharedState.create(folder, 10, ("params", "momentum", "second_moment"))
    assert sorted(path.name for path in state.place.iterdir() if path.stat().st_size == 40) == sorted(
        ("anchor", "momentum", "second_moment", "slot0", "slot1", "slot2")
    )
    state.moments[1].fill_(2.0)
    other = SharedState.open(state.as_message())
    assert len(other.moments) == 2 and other.moments[1].all() and not other.moments[0].any()


def test_the_files_are_private_and_take_no_room_before_they_are_written(folder: Path) -> None:
    state = SharedState.create(folder, 1 << 20)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert state.place == folder
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) < 1 << 20


def test_room_that_another_peer_was_promised_is_not_free(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two peers that start at once both see it free: the second one's first write in mid-step would be a SIGBUS."""
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(folders, "_MEMORY", tmp_path)
    first, second = folders.make_folder(), folders.make_folder()
    size = 5 * 4 * (4 << 20)
    before = folders.promised_bytes(tmp_path)
    for module in (folders, memory):
        monkeypatch.setattr(module, "free_bytes", lambda path: size + (40 << 20))
    SharedState.create(first, 4 << 20)
    assert folders.promised_bytes(tmp_path) - before > size - (1 << 20)
    with pytest.raises(UserError, match="no room for the 96 MiB that agent and trainer share"):
        SharedState.create(second, 4 << 20)
    folders.remove_folder(first)
    SharedState.create(second, 4 << 20)


def test_where_the_memory_is_too_small_the_files_go_to_another_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    for module in (folders, memory):
        monkeypatch.setattr(
            module, "free_bytes", lambda path: 1 << 40 if tmp_path in path.parents else 1 << 20
        )
    state = SharedState.create(folder, 1000)
    assert state.place.parent == tmp_path
    assert "rounds are written to disk" in caplog.text
    SharedState.open(state.as_message()).slots[2].fill_(1.0)
    assert state.slots[2].all()
    for module in (folders, memory):
        monkeypatch.setattr(module, "free_bytes", lambda path: 1 << 20)
    with pytest.raises(UserError, match="no room for the 16 MiB.*--shm-size"):
        SharedState.create(folder, 1000)


# ---- folders

HOLD = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from farflung.peer.local import folder as folders
from farflung.peer.local import folder
folder._MEMORY = folder.Path(sys.argv[1])
print(folder.make_folder(), flush=True)
sys.stdin.readline()
"""


def test_what_a_killed_peer_left_is_swept_and_what_a_living_one_holds_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_MEMORY", tmp_path)
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "farflung-notes").mkdir()  # somebody's own: it has no lock
    mine = make_folder()
    with script(HOLD, str(tmp_path)) as victim:
        assert victim.stdout is not None
        left = Path(victim.stdout.readline().strip())
        assert left.name.startswith(f"farflung-{victim.pid}-")
        assert not is_abandoned(left)
        assert sweep_stale() == []
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        assert is_abandoned(left)
        assert sweep_stale() == [left]
    assert not left.exists()
    assert mine.exists()
    assert (tmp_path / "farflung-notes").exists()


def test_a_child_process_does_not_keep_the_lock(folder: Path) -> None:
    with script("import sys; sys.stdin.readline()") as child:
        assert child.stdin is not None
        assert not is_abandoned(folder)
        child.stdin.close()
    remove_folder(folder)
    assert is_abandoned(folder)


# ---- the channel


@pytest.fixture
def server(folder: Path) -> Iterator[LocalServer]:
    made = LocalServer(folder)
    yield made
    made.close()


def test_a_trainer_is_greeted_and_words_go_both_ways(folder: Path, server: LocalServer) -> None:
    client = LocalClient(folder)
    greeting = next_word(server)
    assert isinstance(greeting, tuple) and greeting[1] is WAITING
    assert client.recv(0.0) is None
    shared = Shared(anchor="a", moments=("m",), slots=("0", "1", "2"), progress="p", elements=5)
    server.send(shared)
    assert client.recv(PATIENCE_S) == shared
    client.send(NeedSamples(samples=10, want=4))
    assert next_word(server) == (greeting[0], NeedSamples(samples=10, want=4))
    assert server.recv_nowait() is None
    client.close()


def test_a_trainer_may_come_before_its_agent(folder: Path) -> None:
    client = LocalClient(folder)
    client.send(Bye(reason="so soon"))
    server = LocalServer(folder)
    server.send(ResumeSteps(spare=0))  # nobody there yet: it goes nowhere
    assert next_word(server)[1] is WAITING
    assert next_word(server)[1] == Bye(reason="so soon")
    assert client.recv(0.0) is None
    client.close()
    server.close()


def test_the_newest_trainer_wins_and_the_older_one_is_told(folder: Path, server: LocalServer) -> None:
    old = LocalClient(folder)
    first = next_word(server)
    new = LocalClient(folder)
    second = next_word(server)
    assert first[0] != second[0]
    stop = old.recv(PATIENCE_S)
    assert isinstance(stop, Stop) and stop.code == "replaced"
    old.send(Bye(reason="I was first"))
    new.send(Bye(reason="I am the one"))
    assert next_word(server) == (second[0], Bye(reason="I am the one"))
    server.send(ResumeSteps(spare=1))
    assert new.recv(PATIENCE_S) == ResumeSteps(spare=1)
    assert old.recv(0.0) is None
    old.close()
    new.close()


def test_malformed_messages_are_dropped_with_a_word(
    folder: Path, server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(f"ipc://{folder}/trainer.sock")
    raw.send(b"")
    for bad in ([b"\xc1"], [to_bytes(ResumeSteps(spare=0))], [b"two", b"parts"], [b"", b""]):
        raw.send_multipart(bad)
    raw.send(to_bytes(Bye(reason="good")))
    assert next_word(server)[1] is WAITING
    assert next_word(server)[1] == Bye(reason="good")
    assert len(caplog.records) == 4
    raw.close(linger=0)
    context.term()


def test_last_words_are_delivered_when_the_agent_closes(folder: Path) -> None:
    server, client = LocalServer(folder), LocalClient(folder)
    next_word(server)
    server.send(Stop(code="full", reason="the run is full"))
    server.close()
    assert client.recv(PATIENCE_S) == Stop(code="full", reason="the run is full")
    client.close()


def test_a_path_too_long_for_a_socket_is_a_mistake_a_person_can_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set TMPDIR to a shorter path"):
        LocalServer(tmp_path / ("x" * 120))


def test_pages_that_were_read_can_be_let_go_and_the_values_stay(folder: Path) -> None:
    state = SharedState.create(folder, 1 << 20)
    slot = state.slots[0]
    slot.copy_(torch.arange(1 << 20))
    for start, stop in ((0, 1 << 19), (5000, 5001), (1 << 19, 1 << 20)):
        unmap_pages(slot[start:stop])
    assert torch.equal(slot, torch.arange(1 << 20).float())
    slot[7] = -1.0
    assert SharedState.open(state.as_message()).slots[0][7] == -1.0
