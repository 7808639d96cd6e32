"""Real peers end where one process ends that does what they did, bit for bit: the link between a run and its papers.

Each peer is a script with a torch optimizer (tests/rig/parity_script.py).  It takes down which samples it read, and
between which steps a result was there; here a plain loop learns from the same ones, and does what docs/learning.md
says of each schedule by elementary operations.  Of the run it knows what journals say: when work was frozen, who was a
member, in which order, and how each counts.

The same in virtual time, with faults, of a trainer that learns nothing: tests/whole/test_diloco_reference.py.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.model_schema import fragments_of
from rig import parity_script as script

SCRIPT = Path(script.__file__)
ROUNDS = 4
LR, MOMENTUM = 0.7, 0.9
KEPT = {"blocking": 0.0, "overlap": 0.5, "streaming": 0.0}  # of its own values, where a peer takes a result
CHUNK_KB = 16
RUN = f"""
[run]
name = "parity"
min_peers = {{peers}}
rounds = {ROUNDS}
[model]
kind = ""
[data]
source = ""
batch = 8
lease_samples = 64
[outer]
schedule = "{{schedule}}"
lr = {LR}
momentum = {MOMENTUM}
[merge]
policy = "mean"
[round]
sync_every = {{period}}
fragments = {{fragments}}
codec = "fp32"
gather_codec = "fp32"
chunk_kb = {CHUNK_KB}
deadline_s = 300.0
scatter_grace_s = 300.0
[net]
dead_after_s = 300.0
"""

pytestmark = [pytest.mark.slow, pytest.mark.hard]


@dataclass(frozen=True)
class Case:
    peers: int
    word: str = "adamw"
    schedule: str = "blocking"
    fragments: int = 1
    period: int = 10


@dataclass
class Peer:
    """What one did, and the same done again."""

    steps: list[dict[str, list[int]]]
    frozen: dict[int, list[int]]  # the fragments, by the step after which they were
    layout: ModelLayout
    word: str
    net: script.Net = field(default_factory=script.model)
    sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by fragment and version
    held: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows, self.optimizer = script.Rows().rows, script.inner(self.net, self.word)
        self.loaded = self.now()
        self.carried = torch.zeros_like(self.loaded)
        self.held = [0] * len(self.steps[0]["before"])

    def now(self) -> Tensor:
        return flat(self.net, self.layout)

    def put(self, cells: slice, values: Tensor) -> None:
        here = self.now()
        here[cells] = self.loaded[cells] = values
        parameters = dict(self.net.named_parameters())
        with torch.no_grad():
            for each in self.layout.entries:
                part = here[each.offset : each.offset + parameters[each.name].numel()]
                parameters[each.name].copy_(part.view(each.shape))

    def again(self, run: Run) -> Iterator[None]:
        """Step by step; yields where it needs a result that is not computed yet."""
        waits = run.case.schedule == "blocking"
        for number, step in enumerate(self.steps, 1):
            yield from self.take(step["before"], run)
            script.gradient(self.net, self.rows[step["rows"]])
            self.optimizer.step()
            self.optimizer.zero_grad()
            if not waits:
                yield from self.take(step["after"], run)
            for fragment in self.frozen.get(number, []):
                self.freeze(fragment, run)
            if waits:
                yield from self.take(step["after"], run)

    def steps_to_results(self) -> list[int]:
        """From each freeze to the result that it went into."""
        found, last = [], {}
        for number, step in enumerate(self.steps, 1):
            for fragment, (before, after) in enumerate(zip(step["before"], step["after"], strict=True)):
                if after > before:
                    found.append(number - last[fragment])
            last |= dict.fromkeys(self.frozen.get(number, []), number)
        return found

    def freeze(self, fragment: int, run: Run) -> None:
        cells = run.cells[fragment]
        owed = (self.loaded - self.now())[cells] + self.carried[cells]
        self.sent[fragment, self.held[fragment] + 1] = owed
        if run.case.schedule == "overlap":
            self.carried[cells] = owed
            anchor, momentum = run.at(fragment, self.held[fragment])
            self.put(cells, (anchor - owed).sub_(momentum, alpha=LR * MOMENTUM**2))

    def take(self, versions: list[int], run: Run) -> Iterator[None]:
        for fragment, version in enumerate(versions):
            if version == self.held[fragment]:
                continue
            assert version == self.held[fragment] + 1
            while not run.has(fragment, version):
                yield
            cells, (anchor, _) = run.cells[fragment], run.at(fragment, version)
            used = self.sent[fragment, version]
            learned = (self.loaded - self.now())[cells]
            # With overlap all that is carried was used; to add and subtract it would cost a bit.
            kept = learned if run.case.schedule == "overlap" else learned + self.carried[cells] - used
            value = anchor - kept
            if mix := KEPT[run.case.schedule]:
                value = torch.lerp(value, self.now()[cells], mix)
                kept = anchor - value
            self.put(cells, value)
            self.carried[cells], self.held[fragment] = kept, version


def flat(net: nn.Module, layout: ModelLayout) -> Tensor:
    values, parameters = torch.zeros(layout.total_elements), dict(net.named_parameters())
    for each in layout.entries:
        values[each.offset : each.offset + parameters[each.name].numel()] = (
            parameters[each.name].detach().flatten()
        )
    return values


class Run:
    def __init__(self, case: Case, layout: ModelLayout, commits: list[Any], peers: dict[str, Peer]) -> None:
        self.case, self.commits, self.peers = case, commits, peers
        size = layout.chunk_elements
        self.cells = [
            slice(each.first * size, (each.first + each.count) * size)
            for each in fragments_of(layout.chunk_count, case.fragments)
        ]
        begun = flat(script.model(), layout)
        self._states = [[(begun[each], torch.zeros_like(begun[each]))] for each in self.cells]

    def at(self, fragment: int, version: int) -> tuple[Tensor, Tensor]:
        return self._states[fragment][version]

    def has(self, fragment: int, version: int) -> bool:
        return version < len(self._states[fragment])

    def replay(self) -> Tensor:
        """The model at the end."""
        left, peers = self.commits, [peer.again(self) for peer in self.peers.values()]
        while left:
            for peer in peers:
                next(peer, None)
            ready = [each for each in left if self._is_sent(each)]
            assert ready, f"nobody goes on, and {len(left)} versions are not made"
            for each in ready:
                self._commit(each)
            left = [each for each in left if each not in ready]
        return torch.cat([states[-1][0] for states in self._states])

    def _is_sent(self, commit: Any) -> bool:
        return all((commit["fragment"], commit["version"]) in peer.sent for peer in self.peers.values())

    def _commit(self, commit: Any) -> None:
        fragment, version = commit["fragment"], commit["version"]
        anchor, momentum = self.at(fragment, version - 1)
        merged = torch.zeros_like(anchor)
        for peer, weight in zip(commit["members"], commit["weights"], strict=True):
            merged += weight * self.peers[peer].sent[fragment, version]
        momentum = MOMENTUM * momentum + merged
        self._states[fragment].append((anchor - LR * (merged + MOMENTUM * momentum), momentum))


def ran(stage: Any, case: Case) -> Run:
    shown = {"peers": case.peers, "schedule": case.schedule}
    text = RUN.format(**shown, period=case.period, fragments=case.fragments)
    (stage.folder / "run.toml").write_text(text)
    stage.coordinate("--exit-when-done")
    names = [f"p{number}" for number in range(case.peers)]
    for name in names:
        files = [str(stage.folder / f"{name}.pem"), str(stage.model(name))]
        stage.run_python(name, [str(SCRIPT), stage.url, *files, case.word])
    assert [stage.wait(name) for name in names] == [0] * case.peers, stage.log(names[0])[-2000:]
    layout, peers = ModelLayout.of(script.model(), CHUNK_KB * 1024 // 4), {}
    for name in names:
        events, frozen = stage.events(name), defaultdict(list)
        for each in events:
            if each["event"] == "frozen":
                frozen[each["step"]].append(each["fragment"])
        steps = json.loads(stage.model(name).with_suffix(".json").read_text())
        peers[events[0]["peer"]] = Peer(steps, frozen, layout, case.word)
    commits = [each for each in stage.events("coordinator") if each["event"] == "committed"]
    return Run(case, layout, commits, peers)


@pytest.mark.parametrize(
    "case",
    [
        Case(2),
        Case(3, "muon"),
        Case(4),
        Case(2, schedule="overlap", period=100),
        Case(3, schedule="streaming", fragments=2, period=100),
    ],
    ids=lambda case: f"{case.peers} {case.word} {case.schedule}",
)
def test_P1_real_peers_end_bit_for_bit_where_one_process_ends(stage: Any, case: Case) -> None:
    torch.set_num_threads(1)
    run = ran(stage, case)
    assert [sorted(each["members"]) for each in run.commits] == [sorted(run.peers)] * ROUNDS * case.fragments
    assert all(weight > 0 for each in run.commits for weight in each["weights"])
    samples = [sample for peer in run.peers.values() for step in peer.steps for sample in step["rows"]]
    assert len(set(samples)) == len(samples), "no two peers read the same"

    if case.schedule != "blocking":
        steps_between = [number for peer in run.peers.values() for number in peer.steps_to_results()]
        assert max(steps_between) > 0, "a result came while peers learned"
    due, begun = run.replay(), script.model()
    found = {name: load_file(stage.model(name)) for name in ("p0", f"p{case.peers - 1}")}
    layout = ModelLayout.of(begun, CHUNK_KB * 1024 // 4)
    assert float((due - flat(begun, layout)).abs().max()) > 0.01, "it has learned"
    for each in layout.entries:
        values = due[each.offset : each.offset + found["p0"][each.name].numel()].view(each.shape)
        assert all(torch.equal(weights[each.name], values) for weights in found.values()), each.name
