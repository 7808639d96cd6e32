"""What an inner optimizer remembers, through files and back: whatever it lies in, and nothing that nobody knows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from farflung.peer.record import optimizer_state
from farflung.peer.record.optimizer_state import OptimizerState, Unrecordable, put_together, taken_apart
from farflung.peer.record.work_files import Form, Known, Nothing, Placed, Several
from farflung.peer.trainer.recording import Held, Recording
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest


class Projector:
    """As GaLore keeps one for each matrix."""

    def __init__(self) -> None:
        raise AssertionError("what is read is never called")


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(optimizer_state.KINDS, "projector", (Projector.__module__, "Projector"))
    monkeypatch.setitem(sys.modules, Projector.__module__, SimpleNamespace(Projector=Projector))
    made = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    weight, bias = made.param_groups[0]["params"]
    projector = Projector.__new__(Projector)
    projector.__dict__ |= {"rank": 2, "kind": "std", "matrix": torch.rand(3, 2).t(), "again": None}
    made.state[weight] = {"projector": projector, "GG": [torch.eye(3), []], "step": 4, "seen": torch.ones(1)}
    made.state[bias] = {"Q": [], "step": 1.5}
    return made


def test_lists_and_known_objects_are_tensors_and_plain_values_and_come_back(optimizer: Any) -> None:
    state = taken_apart(optimizer)
    leaves = {"rank": 2, "kind": "std", "matrix": Placed((1, 0)), "again": None}
    assert state.more == {
        "0.projector": Known("projector", leaves),
        "0.GG": Several((Placed(), Nothing())),
        "1.Q": Nothing(),
    }
    assert set(state.tensors) == {"0.projector/matrix", "0.GG/0", "0.seen"}
    assert state.numbers == {"0.step": 4, "1.step": 1.5}
    more = msgspec.json.decode(msgspec.json.encode(state.more), type=dict[str, Form])
    state = replace(state, more=more, tensors={name: each.clone() for name, each in state.tensors.items()})
    weight, bias = optimizer.param_groups[0]["params"]
    before = dict(optimizer.state[weight])
    put_together(optimizer, state)
    after = optimizer.state[weight]
    assert after.keys() == before.keys() and optimizer.state[bias] == {"Q": [], "step": 1.5}
    assert type(after["projector"]) is Projector and after["projector"] is not before["projector"]
    assert vars(after["projector"]).keys() == vars(before["projector"]).keys()
    assert torch.equal(after["projector"].matrix, before["projector"].matrix)
    assert after["projector"].matrix.stride() == (1, 2), "products of it have the same bits"
    assert torch.equal(after["GG"][0], torch.eye(3)) and after["GG"][1] == []
    state.tensors["0.seen"].zero_()
    assert float(after["seen"]) == 1.0, "what is put back is a copy: it may be taken again"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (SimpleNamespace(rank=2), "0.it, a SimpleNamespace"),
        ([[torch.ones(1)]], "0.it/0, a list"),
        ([print], "0.it/0, a builtin_function_or_method"),
        ((1, 2), "0.it, a tuple"),
    ],
)
def test_what_no_record_can_hold_is_named(optimizer: Any, value: object, told: str) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"it": value}
    with pytest.raises(Unrecordable, match=told):
        taken_apart(optimizer)


def test_training_goes_on_where_nothing_can_be_recorded_and_that_is_said_once(
    optimizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.state[weight] = {"it": SimpleNamespace()}
    recording = Recording(tmp_path, Manifest(), "ann", nn.Linear(1, 1), optimizer)
    for _ in range(2):
        recording.begins(Held(versions=[], loaded=[], carries=[]))
        recording.on_read()
        recording.on_rates()()
    assert caplog.text.count("nothing is recorded, as this optimizer's work can't be taken again") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"more": {"0.it": Known("os.system", {"a": 1})}}, "an object of an unknown kind, 'os.system'"),
        ({"more": {"0.it": Several((Placed(),))}}, "has no tensor 0.it/0"),
        ({"more": {"0.it": Placed((0, 0))}, "tensors": {"0.it": torch.ones(2, 2)}}, "laid out as"),
        ({"more": {"0.it": Known("gone", {})}}, "pip install no-such-package-here"),
        ({"more": {"7.it": Nothing()}}, "another number of parameters"),
        ({"numbers": {"zero.it": 1}}, "another number of parameters"),
    ],
)
def test_a_state_that_is_damaged_or_asks_for_more_makes_nothing(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: str
) -> None:
    monkeypatch.setitem(optimizer_state.KINDS, "gone", ("no_such_package_here.projector", "P"))
    with pytest.raises(UserError, match=told):
        put_together(optimizer, OptimizerState(**changes))
