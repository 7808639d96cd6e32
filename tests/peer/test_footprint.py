"""Memory on paper is what is taken: what a trainer keeps, which slots are written, and what people hear of it."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farflung.peer.footprint import (
    FootprintRow,
    FreeMemory,
    MemoryNeed,
    MemoryRules,
    ModelSize,
    files_bytes,
    need_of,
    of_agent,
    of_helper,
    of_peer,
    of_shared,
    of_stage,
    payload_bytes,
    told,
)
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import FromTrainer, Frozen, LoadState, ResumeSteps, ToTrainer
from farflung.peer.room import optimizer_bytes
from farflung.peer.trainer.fused import HERE_VALUES
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.protocol.manifest import Manifest
from farflung.protocol.round_words import BITS_PER_VALUE
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World

INT8 = BITS_PER_VALUE["int8"] / 8
VALUES = 1_500_000
GB = 1e9


class Storages(TorchDispatchMode):
    """Bytes of all tensors' memory: what there is now, and the most that there was."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._see(tensor, 0 if "from_file" in str(func) else tensor.untyped_storage().nbytes())
        return made

    def _see(self, tensor: Tensor, size: int) -> None:
        """What is mapped from a file is the agent's: of no size."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = size
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key)


class Agent:
    """Commits what is frozen, at once or a period later."""

    def __init__(self, goes_on: bool) -> None:
        self._goes_on, self.words, self.version = goes_on, list[ToTrainer](), 0
        self._before: Frozen | None = None

    def begin(self, shared: SharedState) -> None:
        self.words += [
            shared.as_message(),
            LoadState(version=0, keep="drop", slot=0, tokens=0, steps=0, spare=0),
        ]

    def send(self, word: FromTrainer) -> None:
        if not isinstance(word, Frozen):
            return
        due, self._before = (self._before, word) if self._goes_on else (word, None)
        if due is not None:
            self.version += 1
            self.words.append(
                LoadState(
                    version=self.version,
                    keep="rest",
                    slot=due.slot,
                    tokens=due.tokens,
                    steps=due.steps,
                    spare=due.slot,
                )
            )
        if self._goes_on:
            self.words.append(ResumeSteps(spare=1 - word.slot))

    def recv(self, timeout_s: float) -> ToTrainer | None:
        return self.words.pop(0) if self.words else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", ["blocking", "overlap"])
def test_what_a_trainer_keeps_is_what_the_paper_says_and_tiles_are_all_that_comes_on_top(
    tmp_path: Path, schedule: str, dtype: torch.dtype
) -> None:
    manifest = Manifest.from_toml(
        f'[outer]\nschedule = "{schedule}"\n[round]\nsync_every = 2\nchunk_kb = 64\ncodec = "int8"\n',
        "run.toml",
    )
    agent = Agent(schedule == "overlap")
    with Storages() as storages:
        model = nn.Linear(VALUES // 1000, 1000, bias=False, dtype=dtype)
        inner = torch.optim.AdamW(model.parameters(), 1e-3)
        loop = InnerLoop(agent, model, manifest)
        shared = SharedState.create(tmp_path, loop.layout.total_elements)
        agent.begin(shared)
        loop.attach()
        on_top = 0
        for _ in range(6):
            model.weight.grad = torch.full_like(model.weight, 0.01)
            inner.step()
            kept = storages.now
            storages.most = kept
            loop.before_step()
            loop.after_step()
            on_top = max(on_top, storages.most - max(kept, storages.now))
        taken = storages.now
    assert agent.version >= 2
    held = ModelSize(VALUES, dtype.itemsize, optimizer_bytes=2 * dtype.itemsize)
    rows = [
        row for row in of_peer(MemoryRules.of(manifest), held) if row.owner == "trainer" and not row.only_when
    ]
    assert taken == pytest.approx(sum(row.size_bytes for row in rows), rel=0.02), rows
    assert on_top <= 10 * 4 * HERE_VALUES < 200e6, "whatever the largest tensor"


def calm(schedule: str) -> World:
    """Nothing fails and nobody is slow."""
    fragments = 3 if schedule == "streaming" else 1
    kind = Scenario(peers=3, rounds=12, schedule=schedule, fragments=fragments, chunks=3, faults_until_s=0.0)
    world = World(
        3, replace(kind, drop=0, duplicate=0, slow=0, kill_per_effect=0, cut_per_s=0, trainer_crash_per_s=0)
    )
    world.run()
    return world


@pytest.mark.usefixtures("equal_work")
@pytest.mark.parametrize(("schedule", "most"), [("blocking", 1), ("overlap", 2), ("streaming", 2)])
def test_of_three_slots_those_are_written_that_the_paper_counts(schedule: str, most: int) -> None:
    written = [[bool(slot.any()) for slot in peer.slots] for peer in calm(schedule).peers.values()]
    rules = MemoryRules(state_parts=2, goes_on=schedule != "blocking")
    (slots,) = [row for row in of_shared(rules, 1.0) if row.what.startswith("slots") and not row.only_when]
    assert slots.size_bytes == 4 * most and max(map(sum, written)) <= most
    assert all(each[0] for each in written), "somebody trained"


# ---- the paper itself


def sizes(rows: list[FootprintRow]) -> dict[str, float]:
    return {row.what: row.size_bytes for row in rows if not row.only_when}


def test_an_agent_keeps_what_it_sent_for_audits_and_results_for_those_who_were_away() -> None:
    usual = sizes(of_agent(MemoryRules(2), 1e9))
    in_memory = need_of(of_agent(MemoryRules(2), 1e9)).host_bytes
    assert in_memory == pytest.approx((1 + 1 + 2) * INT8 * GB)
    assert usual["own contribution"] + usual["own contributions, kept for audits"] == 3 * INT8 * GB
    assert usual["results of past rounds"] == pytest.approx(2 * INT8 * GB), "three are more than 2 GiB"
    assert sizes(of_agent(MemoryRules(2), 1e8))["results of past rounds"] == pytest.approx(0.3 * INT8 * GB)
    assert sizes(of_agent(MemoryRules(2, is_audited=False), 1e9))["own contributions, kept for audits"] == 0
    assert sizes(of_agent(MemoryRules(2, group=16), 1e9))["sums of groups"] == 4 * 2e9 / 16, (
        "two of them for audits"
    )
    assert sizes(of_agent(MemoryRules(2, group=16, is_audited=False), 1e9))["sums of groups"] == 2 * 2e9 / 16
    on_disk = [
        row
        for row in of_agent(MemoryRules(2, results_on_disk=True), 1e8)
        if row.what == "results of past rounds"
    ]
    assert [(row.place, round(row.size_bytes / INT8 / 1e8)) for row in on_disk] == [("host", 1), ("disk", 3)]
    coarse = sizes(of_agent(MemoryRules(2, codec="int4"), 1e9))
    assert coarse["own error feedback"] == 4 * GB and coarse["own contribution"] == payload_bytes("int4", 1e9)
    assert "own error feedback" not in sizes(of_agent(MemoryRules(2, codec="auto"), 1e9)), (
        "not before it is coarse"
    )


def test_an_island_shares_one_agent_and_splits_what_is_sharded() -> None:
    rules = MemoryRules(2)
    one, sharded, copies = (
        need_of(of_peer(rules, ModelSize(1e9, on_gpu=True), ranks, split))
        for ranks, split in ((1, True), (8, True), (8, False))
    )
    assert one.shared_bytes == sharded.shared_bytes == copies.shared_bytes == 12 * GB
    assert sharded.host_bytes == one.host_bytes, "each keeps a copy of its share alone"
    assert copies.host_bytes - one.host_bytes == 7 * 4 * GB, "each keeps one of all"
    assert sharded.gpu_bytes < one.gpu_bytes / 6 and copies.gpu_bytes == one.gpu_bytes


def test_who_helps_has_no_slot_and_a_stage_steps_of_its_own_only_where_the_run_has_them() -> None:
    rules = MemoryRules(2, is_batch=True)
    assert need_of(of_helper(rules, 1e9)).shared_bytes == 8 * GB
    assert need_of(of_helper(rules, 1e9)).gpu_bytes == 0
    sync, local = (
        need_of(of_stage(each, 8e9, 1e9, 1e9))
        for each in (rules, MemoryRules(2, is_batch=True, is_local=True))
    )
    assert sync.gpu_bytes == 8 * GB and local.gpu_bytes == 16 * GB
    assert local.host_bytes - sync.host_bytes == 4 * GB and sync.shared_bytes == 16 * GB


def test_files_are_made_for_the_worst_of_rounds() -> None:
    assert files_bytes(MemoryRules(2), 1e9) == 20 * GB and files_bytes(MemoryRules(3), 1e9) == 24 * GB


def test_one_line_says_what_is_needed_what_is_here_and_what_to_change() -> None:
    rules, model = MemoryRules(2), ModelSize(1e9, value_bytes=2, optimizer_bytes=4, on_gpu=True)
    rows = of_peer(rules, model)
    need = need_of(rows)
    enough = told(rows, rules, 1e9, FreeMemory(80e9, need.host_bytes))
    assert enough.fits and not enough.todo and "18.0GB of host memory (12.0GB shared" in enough.text

    def todo(missing_gb: float, gpu_bytes: float = 80e9) -> str:
        found = told(rows, rules, 1e9, FreeMemory(gpu_bytes, need.host_bytes - missing_gb * GB))
        assert not found.fits and "\n" not in found.text + found.todo
        return found.todo

    assert todo(1.0).startswith('results = "2 GB on disk" in your own config is enough')
    assert todo(3.0).startswith("3.0GB are missing"), "what is kept for audits is on the disk"
    assert todo(9.0).startswith("9.0GB are missing")
    assert "on the GPU" in todo(1.0, gpu_bytes=4e9)


def test_what_an_optimizer_will_keep_is_known_of_those_of_torch() -> None:
    tensors = [nn.Parameter(torch.zeros(10))]
    adam, sgd = torch.optim.AdamW(tensors, 1e-3), torch.optim.SGD(tensors, 1e-3)
    assert optimizer_bytes(adam, 4) == 8 and optimizer_bytes(sgd, 4) == 0
    assert optimizer_bytes(torch.optim.SGD(tensors, 1e-3, momentum=0.9), 2) == 2
    tensors[0].grad = torch.ones(10)
    adam.step()
    assert optimizer_bytes(adam, 4) == 0, "it is there by now"


def test_where_no_gpu_computes_all_of_it_is_the_hosts() -> None:
    need = MemoryNeed(4 * GB, 3 * GB, 2 * GB, 0)
    assert need.within(FreeMemory(None, 7 * GB)) and not need.within(FreeMemory(None, 6 * GB))
    assert need.within(FreeMemory(4 * GB, 3 * GB)) and not need.within(FreeMemory(3 * GB, 9 * GB))


def test_the_tables_of_the_page_are_what_the_paper_says() -> None:
    """docs/memory.md; `python benchmarks/memory.py --write` puts them there."""
    folder = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, str(folder / "benchmarks" / "memory.py")], capture_output=True, text=True, check=True
    )
    page = (folder / "docs" / "memory.md").read_text(encoding="utf-8")
    modes, things = ran.stdout.strip().split("\n\n")
    assert modes in page and things in page
