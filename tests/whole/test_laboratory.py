"""`farflung simulate`: scripts as replicas of a run in virtual time, on the machines and arithmetic of production."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farflung
from farflung.peer.state.outer_state import OuterState
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.simulator.laboratory.laboratory import Laboratory, SimulatedRun
from farflung.simulator.laboratory.places import ReplicaPlace, places_in
from farflung.simulator.laboratory.replica import ScriptFailed
from rig import parity_script as parity

RUN = """
[run]
name = "lab"
min_peers = 2
rounds = {rounds}
[model]
kind = ""
[data]
source = ""
batch = 8
lease_samples = 80
[outer]
lr = 0.7
momentum = 0.9
[merge]
policy = "mean"
[round]
sync_every = 10
codec = "{codec}"
gather_codec = "{codec}"
chunk_kb = 16
"""


def manifest(rounds: int = 4, codec: str = "int8") -> Manifest:
    return Manifest.from_toml(RUN.format(rounds=rounds, codec=codec), "lab")


def simulated(
    script: Callable[[], None], places: list[ReplicaPlace], of: Manifest | None = None
) -> SimulatedRun:
    return Laboratory(of or manifest(), script, places, lambda done: None).learn()


def plain(model: nn.Module | None = None, size: int = 8) -> None:
    torch.manual_seed(0)
    model = model or nn.Linear(size, size)
    with farflung.join(None, model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
        for rows in run.batches(torch.ones(8000, size) / size):
            loss = model(rows).square().mean()
            loss.backward()
            run.step(loss)


# Muon's products are in bf16: a last bit of a mean becomes more.
@pytest.mark.parametrize(("word", "within"), [("adamw", 1e-5), ("muon", 1e-3)])
def test_replicas_end_where_a_plain_loop_ends(word: str, within: float) -> None:
    """DiLoCo, written down: AdamW or Muon inside, Nesterov's momentum on the mean of what the replicas changed."""
    read: list[list[tuple[int, Tensor]]] = []
    ends: list[list[Tensor]] = []

    def script() -> None:
        net, mine = parity.model(), list[tuple[int, Tensor]]()
        read.append(mine)
        with farflung.join(None, net, parity.inner(net, word)) as run:
            for rows in run.batches(parity.Rows()):
                mine.append((run.version, rows))
                run.step(parity.gradient(net, rows))
            ends.append(run.evaluate(lambda: [p.clone() for p in net.parameters()]))

    of = manifest(rounds=3, codec="fp32")
    simulated(script, [ReplicaPlace()] * 2, of)
    nets = [parity.model() for _ in read]
    inner = [parity.inner(net, word) for net in nets]
    anchor = [p.detach().clone() for p in nets[0].parameters()]
    momentum = [torch.zeros_like(p) for p in anchor]
    for version in range(of.run.rounds):
        steps = dict.fromkeys(nets, 0)
        for net, optimizer, rows_of in zip(nets, inner, read, strict=True):
            for rows in [rows for at, rows in rows_of if at == version]:
                steps[net] += 1
                parity.gradient(net, rows)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for place, (value, m) in enumerate(zip(anchor, momentum, strict=True)):
                changed = [steps[net] * (value - [*net.parameters()][place]) for net in nets]
                merged = (changed[0] + changed[1]) / sum(steps.values())
                m.mul_(0.9).add_(merged)
                value.sub_((merged + m * 0.9) * 0.7)
                for net in nets:
                    [*net.parameters()][place].copy_(value)
    assert len(ends) == 2
    for end in ends:
        for found, value in zip(end, anchor, strict=True):
            torch.testing.assert_close(found, value, rtol=within, atol=within)


def test_a_simulation_gives_the_same_numbers_each_time_with_random_numbers_of_every_kind() -> None:
    def script() -> None:
        plain(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)))

    def drawing() -> None:
        drawn.append((random.random(), float(torch.rand(1))))
        script()

    drawn: list[tuple[float, float]] = []
    first = simulated(drawing, [ReplicaPlace()] * 3)
    random.seed(99)
    torch.manual_seed(99)
    again = simulated(drawing, [ReplicaPlace()] * 3)
    assert first == again
    assert drawn[:3] == drawn[3:] and len(set(drawn[:3])) == 3, "each replica has numbers of its own"


@pytest.mark.parametrize("mbit", [1.0, 0.05])
def test_a_round_takes_as_long_as_the_line_needs_for_its_bytes(mbit: float) -> None:
    """Two peers: a contribution and a result of half of the values each, one after the other or nearly so."""
    values = 256 * 256
    outcome = simulated(
        lambda: plain(size=256), [ReplicaPlace(up=f"{mbit} Mbit/s", delay_ms=50)] * 2, manifest(codec="fp32")
    )
    spans = [b.at_s - a.at_s - 10 for a, b in zip(outcome.rounds[:-1], outcome.rounds[1:], strict=True)]
    ideal_s = 2 * 4 * values / 2 * 8 / 1e6 / mbit
    assert all(ideal_s <= each <= 1.4 * ideal_s for each in spans), (spans, ideal_s)
    sent = outcome.rounds[-1].sent_bytes
    assert 4 * values <= sent <= 1.15 * 4 * values
    fast = simulated(lambda: plain(size=256), [ReplicaPlace(delay_ms=50)] * 2, manifest(codec="fp32"))
    assert fast.seconds < outcome.seconds - 2 * ideal_s and fast.waited < outcome.waited


def test_a_peer_that_is_away_is_missed_for_as_long_and_comes_back() -> None:
    away = ReplicaPlace(away_s=((25.0, 65.0),))
    outcome = simulated(plain, [ReplicaPlace(), ReplicaPlace(), away], manifest(rounds=12))
    included = [each.included for each in outcome.rounds]
    assert outcome.version == 12 and included[0] == 3 and included[-1] == 3 and 2 in included


def test_a_peer_that_comes_back_goes_on_with_its_optimizer_and_with_what_it_had_not_sent() -> None:
    """A file of each on its own disk, in a real run."""
    knew: list[float] = []
    rates: list[float] = []

    def script() -> None:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: rates.append(float(optimizer.param_groups[0]["lr"])))
        with farflung.join(None, model, optimizer) as run:
            if run.version:
                knew.append(float(optimizer.state[model.weight]["step"]) if optimizer.state else 0.0)
                rates.clear()
            for rows in run.batches(torch.ones(8000, 64) / 64):
                loss = (model(rows) - 1).square().mean()
                loss.backward()
                run.step(loss)

    of = Manifest.from_toml(
        RUN.format(rounds=12, codec="fp32")
        .replace("lr = 0.7\nmomentum = 0.9", 'step = "sparse"')
        .replace('codec = "fp32"\ngather_codec = "fp32"', ""),
        "lab",
    )
    away = ReplicaPlace(away_s=((55.0, 60.0),))
    world = Laboratory(of, script, [ReplicaPlace(), ReplicaPlace(), away], lambda done: None)
    took: list[float] = []
    take_up = OuterState.take_up

    def seen(state: OuterState, fragment: int, residual_n: Tensor, share: float) -> None:
        took.append(float(residual_n.norm()))
        take_up(state, fragment, residual_n, share)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OuterState, "take_up", seen)
        assert world.learn().version == 12
    assert len(knew) == 1 and 40 <= knew[0] <= 60, "steps of its first life"
    assert len(took) == 1 and took[0] > 0
    assert set(rates) == {0.1}, "no small steps"


def test_at_the_end_one_replica_evaluates_for_all_and_before_each_for_itself() -> None:
    asked: list[str] = []

    def script() -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        with farflung.join(None, model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
            for rows in run.batches(torch.ones(8000, 8) / 8):
                loss = model(rows).square().mean()
                loss.backward()
                run.step(loss)
                if run.step_count == 15:
                    run.evaluate(lambda: asked.append("meanwhile"))
            for each in (1.0, 2.0):
                run.log(f"end_{each:.0f}", run.evaluate(lambda: asked.append("end") or each))  # noqa: B023

    outcome = simulated(script, [ReplicaPlace()] * 3)
    assert sorted(asked) == ["end", "end", "meanwhile", "meanwhile", "meanwhile"]
    assert {(name, value) for _, name, value in outcome.figures} == {("end_1", 1.0), ("end_2", 2.0)}


def test_the_first_of_the_file_may_come_last() -> None:
    places = [ReplicaPlace(joins_s=45.0, step_s=2.0), ReplicaPlace(), ReplicaPlace()]
    outcome = simulated(plain, places, manifest(rounds=12))
    first, last = outcome.rounds[0], outcome.rounds[-1]
    assert (first.included, last.included) == (2, 3)
    assert 18 <= first.steps <= 20 < last.steps < 30, "each has its own speed"


def test_a_peer_that_is_away_at_the_end_is_not_waited_for() -> None:
    away = ReplicaPlace(away_s=((25.0, 900.0),))
    outcome = simulated(plain, [ReplicaPlace(), ReplicaPlace(), away])
    assert outcome.version == 4 and outcome.rounds[-1].included == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"admission": {"mode": "token"}},
        {"checkpoint": {"every_rounds": 2}},
        {"round": {"group": 2}},
        {"round": {"period_s": 12.0}},
        {"outer": {"schedule": "streaming"}, "round": {"fragments": 2}},
        {
            "outer": {"step": "sparse", "momentum": "auto"},
            "round": {"codec": "topk", "gather_codec": "sparse"},
        },
    ],
)
def test_whatever_a_run_may_be_it_comes_to_its_end(changes: dict[str, dict[str, Any]]) -> None:
    content = manifest().model_dump()
    of = Manifest.model_validate(
        content | {section: content[section] | keys for section, keys in changes.items()}
    )
    assert simulated(lambda: plain(size=64), [ReplicaPlace()] * 4, of).version == 4


def test_a_slow_peer_brings_what_it_has() -> None:
    outcome = simulated(plain, [ReplicaPlace(), ReplicaPlace(), ReplicaPlace(step_s=3.0)], manifest(rounds=8))
    assert all(each.included == 3 for each in outcome.rounds[1:])
    assert outcome.rounds[-1].steps < 30
    assert outcome.seconds < 1.3 * 8 * 10


def test_what_a_script_logs_and_evaluates_is_told_with_the_version() -> None:
    def script() -> None:
        model = nn.Linear(8, 8)
        with farflung.join(None, model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
            for rows in run.batches(torch.ones(8000, 8)):
                run.step(model(rows).square().mean())
            run.log("end", run.evaluate(lambda: run.version))

    outcome = simulated(script, [ReplicaPlace()] * 2)
    assert outcome.figures[-1] == (4, "end", 4.0)


@pytest.mark.parametrize("number", [0, 1])
def test_a_script_that_fails_ends_the_simulation_with_its_own_error(number: int) -> None:
    started: list[int] = []

    def script() -> None:
        mine = len(started)
        started.append(mine)
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        with farflung.join(None, model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
            for count, rows in enumerate(run.batches(torch.ones(8000, 8))):
                run.step(model(rows).square().mean())
                if mine == number and count == 12:
                    raise ZeroDivisionError("of the script")

    with pytest.raises(ScriptFailed) as failed:
        simulated(script, [ReplicaPlace()] * 2)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_a_run_that_can_never_go_on_is_told_so() -> None:
    started: list[None] = []

    def script() -> None:
        started.append(None)
        if len(started) == 2:
            return
        plain()

    with pytest.raises(UserError, match="the run has stood still for .* of its time, at version 0: "):
        simulated(script, [ReplicaPlace()] * 2)


@pytest.mark.parametrize(
    ("script", "changes", "peers", "told"),
    [
        (lambda: None, {}, 2, "without farflung.join"),
        (plain, {}, 1, r"min_peers is 2, and there are 1 peers"),
        (plain, {"pipeline": {"batch": 8, "micro": 4}}, 2, r"\[pipeline\] batch"),
    ],
)
def test_what_cannot_be_simulated_is_told_at_once(
    script: Callable[[], None], changes: dict[str, Any], peers: int, told: str
) -> None:
    of = Manifest.model_validate(manifest().model_dump() | changes) if changes else manifest()
    with pytest.raises(UserError, match=told):
        simulated(script, [ReplicaPlace()] * peers, of)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "peers"),
        ("[[peers]]\nup = '5'", "has no unit"),
        ("[[peers]]\nup = '5 Mbit/s 08:00-18:00'", "without hours"),
        ("[[peers]]\nstep_s = 0", "step_s"),
        ("[[peers]]\nspeed = 1", "speed"),
        ("[[peers]]\ncount = 200\n[[peers]]\ncount = 200", "at most 256"),
        ("[[peers]]\njoins_s = 9\naway_s = [[5, 14]]", "that follow joins_s and each other"),
        ("[[peers]", "line 1"),
    ],
)
def test_a_mistake_in_the_file_of_lines_is_told_with_its_name(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "home.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=told) as refused:
        places_in(path)
    assert str(path) in str(refused.value)


def test_each_peer_of_the_file_has_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "home.toml"
    path.write_text(
        "[[peers]]\ncount = 2\nup = '5 Mbit/s'\n[[peers]]\nstep_s = 2.5\naway_s = [[1, 2], [3, 4]]\n"
    )
    fast, _, slow = places_in(path)
    assert (fast.up, fast.step_s, slow.step_s, slow.away_s) == ("5 Mbit/s", 1.0, 2.5, ((1, 2), (3, 4)))
