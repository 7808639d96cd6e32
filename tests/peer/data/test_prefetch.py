"""`run.batches(workers=)`: the same batches as without workers, whatever was read early."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.peer.data.leased_data import Span
from farflung.peer.data.prefetch import INLINE_BYTES, Prefetch, Spans
from farflung.peer.data.text_lines import TextLines
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import LeasesNow, LoadState
from farflung.peer.trainer.api import Run
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Lease
from rig.waiting import LONG_S, eventually

MANIFEST = Manifest.model_validate(
    {
        "run": {"seed": 5},
        "round": {"sync_every": 1000, "chunk_kb": 1},
        "data": {"batch": 3, "lease_samples": 8},
    }
)


class Rows:
    """What is read says by whom, and has a little chance in it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor([place, os.getpid(), int(torch.rand(1) * 1e6), random.randrange(10**6)])


class Script:
    """A run whose agent has leased it 0 to 20, in three pieces."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        model = nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        self.words: list[object] = []
        channel: Any = SimpleNamespace(send=lambda word: None, recv=self._recv)
        self.loop = InnerLoop(channel, model, MANIFEST)
        shared = SharedState.create(folder, self.loop.layout.total_elements)
        self.words += [shared.as_message(), load(0)]
        self.loop.attach()
        pieces = (Lease(1, 0, 0, 7, 0), Lease(2, 0, 7, 8, 7), Lease(3, 0, 8, 20, 8))
        self.words.append(LeasesNow(leases=pieces))
        optimizer = RunSteps(inner, self.loop.after_step, self.loop.before_step)
        self.run = Run(SimpleNamespace(), self.loop, optimizer, "me")  # type: ignore[arg-type]

    def _recv(self, timeout_s: float) -> object | None:
        assert self.words or not timeout_s, "this would wait for ever"
        return self.words.pop(0) if self.words else None

    def read(self, count: int, **options: Any) -> list[Tensor]:
        found = []
        for batch in self.run.batches(Rows(), fingerprint=False, **options):
            found.append(batch)
            self.run.step(0.0)
            if len(found) == count:
                break
        return found


def load(version: int) -> LoadState:
    return LoadState(version=version, keep="drop", slot=0, tokens=0, steps=0, spare=0)


def places(batches: list[Tensor]) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in batches]


def test_P7_workers_read_the_same_batches_and_what_they_have_read_early_is_not_used(tmp_path: Path) -> None:
    alone, two = Script(tmp_path / "a"), Script(tmp_path / "b")
    here, there = alone.read(4), two.read(4, workers=2)
    assert places(here) == places(there) and all(len(batch) == 3 for batch in there)
    assert two.loop.machine.leases.used() == alone.loop.machine.leases.used()
    assert {int(row[1]) for batch in here for row in batch} == {os.getpid()}
    readers = {int(row[1]) for batch in there for row in batch}
    assert readers and os.getpid() not in readers


def test_P7_after_a_drop_what_was_read_early_and_does_not_come_next_is_thrown_away(tmp_path: Path) -> None:
    script = Script(tmp_path / "a")
    batches = script.run.batches(Rows(), fingerprint=False, workers=1, prefetch=3)
    first = [next(batches)]
    script.run.step(0.0)
    first.append(next(batches))
    script.words.append(load(1))  # the work of both steps is dropped
    script.run.step(0.0)
    again = [next(batches)]
    script.run.step(0.0)
    again.append(next(batches))
    assert places(again) == places(first)
    assert [each.lease for each in script.loop.machine.leases.used()] == [1]
    assert torch.equal(again[0][:, 2:], first[0][:, 2:]), "chance is that of the place"
    batches.close()  # type: ignore[attr-defined]


def test_chance_in_the_data_is_the_places_whichever_worker_reads_it(tmp_path: Path) -> None:
    one, three = (
        Script(tmp_path / "a").read(4, workers=1),
        Script(tmp_path / "b").read(4, workers=3, prefetch=1),
    )
    assert [batch[:, 2:].tolist() for batch in one] == [batch[:, 2:].tolist() for batch in three]
    assert len({tuple(batch[0, 2:].tolist()) for batch in one}) == 4


def test_what_goes_wrong_in_a_worker_is_told_in_the_script(tmp_path: Path) -> None:
    class Damaged(Rows):
        def __getitem__(self, place: int) -> Tensor:
            raise KeyError("this row is damaged")

    with pytest.raises(KeyError, match="this row is damaged"):
        list(Script(tmp_path / "a").run.batches(Damaged(), fingerprint=False, workers=1))

    class Deadly(Rows):
        def __getitem__(self, place: int) -> Tensor:
            os.kill(os.getpid(), signal.SIGKILL)
            return torch.zeros(1)

    with pytest.raises(UserError, match="a worker that reads the data set was killed"):
        list(Script(tmp_path / "b").run.batches(Deadly(), fingerprint=False, workers=1))
    with pytest.raises(UserError, match="a stream is read in its order by one process"):
        Script(tmp_path / "c").run.batches(iter_of_numbers(), workers=1)
    with pytest.raises(UserError, match="workers must not be negative, found -1"):
        Script(tmp_path / "d").run.batches(Rows(), workers=-1)


def iter_of_numbers() -> Any:
    return type("Endless", (), {"__iter__": lambda self: iter(range(9))})()


class NeedsTwo(Exception):
    """Can't be made again from what it keeps of its arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def many_kinds(spans: Spans) -> Any:
    if spans[0].start == 9:
        raise NeedsTwo("rows 9", " is damaged")
    made = torch.arange(12).reshape(3, 4)
    kinds = {
        str(dtype): made.to(dtype) for dtype in (torch.bool, torch.bfloat16, torch.uint8, torch.complex64)
    }
    return kinds | {
        "one": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "turned": made.T,
        "conj": torch.tensor([1 + 2j]).conj(),
        "large": torch.arange(INLINE_BYTES // 8 + 1),
        "learns": torch.ones(2, requires_grad=True),
        "text": "a row",
        "pair": (made[0], [made[1].numpy()]),
    }


def test_batches_of_all_kinds_come_as_they_were_made() -> None:
    spans = (Span(1, 0, 0, 1),)
    with Prefetch(1, many_kinds, 0) as pool:
        found = pool.take(spans, [])
        for name, value in many_kinds(spans).items():
            if isinstance(value, Tensor):
                assert torch.equal(found[name], value) and found[name].dtype is value.dtype, name
        assert found["learns"].requires_grad and found["text"] == "a row"
        assert found["pair"][0].tolist() == [0, 1, 2, 3] and found["pair"][1][0].tolist() == [4, 5, 6, 7]
        found["turned"].zero_()
        assert pool.take(spans, [])["turned"].sum() == 66, "what the script does to a batch stays with it"
        with pytest.raises(RuntimeError, match="NeedsTwo: rows 9 is damaged") as caught:
            pool.take((Span(1, 0, 9, 10),), [])
        assert "in many_kinds" in str(caught.value.__cause__), "where it was in the worker"


def test_what_is_not_wanted_any_more_goes_by() -> None:
    each = [(Span(1, 0, at, at + 1),) for at in range(9)]
    with Prefetch(2, lambda spans: spans[0].start, 0) as pool:
        assert pool.take(each[0], each[1:5]) == 0
        assert [pool.take(spans, ()) for spans in (each[7], each[1], each[7], each[0])] == [7, 1, 7, 0]
        assert pool.take(each[2], each[3:5]) == 2


@pytest.mark.slow
def test_workers_end_with_a_script_that_is_killed(tmp_path: Path) -> None:
    code = """
    import os, signal, sys
    from farflung.peer.data.leased_data import Span
    from farflung.peer.data.prefetch import Prefetch

    def read(spans):
        return os.getpid()

    with Prefetch(2, read, 0) as pool:
        print(pool.take((Span(1, 0, 0, 1),), []), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=LONG_S
    )
    worker = int(done.stdout)
    eventually(lambda: not runs(worker), "the worker ends, too")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_forked_worker_does_not_move_the_place_in_its_parents_files(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("".join(f"line {number}\n" for number in range(500)))
    lines = TextLines(tmp_path / "t.txt")
    place = next(lines._lines_from(0, 0))
    assert place == b"line 0\n"
    at = os.lseek(lines._files[0].fileno(), 0, os.SEEK_CUR)
    child = os.fork()
    if child == 0:
        os._exit(0 if lines[300] == "line 300" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert os.lseek(lines._files[0].fileno(), 0, os.SEEK_CUR) == at
