"""Outer steps, codecs and merge rules of a package, in whole runs: what farflung's own do, as a package does it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import farflung
from farflung.protocol.manifest import Manifest
from farflung.simulator.laboratory.laboratory import Laboratory
from farflung.simulator.laboratory.places import ReplicaPlace
from rig import own_rules

RUN = """
[run]
name = "own"
min_peers = 3
rounds = 6
[model]
kind = ""
[data]
source = ""
batch = 8
lease_samples = 80
[outer]
{outer}
[merge]
{merge}
audit = 0
[round]
sync_every = 5
codec = "{codec}"
gather_codec = "fp32"
chunk_kb = 1
"""
# What farflung has, as somebody would write it outside.
MODULE = """
import numpy as np

class Nesterov:
    moments = 1
    def __init__(self, lr=0.7, momentum=0.9):
        self.lr, self.mu = np.float32(lr), np.float32(momentum)
    def step(self, theta, moments, d, version):
        m, = moments
        m *= self.mu
        m += d
        theta -= (m * self.mu + d) * self.lr

class Halves:
    memory = None
    def body_bytes(self, count):
        return 2 * count
    def encode(self, values):
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    def decode(self, body, count):
        return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)

def mean(values, weights):
    total = np.zeros(values.shape[1], np.float32)
    for each, weight in zip(values, weights):
        total += each * weight
    return total

def first(values, weights):
    return values[0].copy()
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    groups = {
        "farflung.outer_steps": {"own_step": "again:Nesterov"},
        "farflung.codecs": {"halves": "again:HALVES"},
        "farflung.merge_rules": {"own_mean": "again:mean", "own_first": "again:first"},
    }
    own_rules.write_package(tmp_path, "again", groups, f"{MODULE}\nHALVES = Halves()\n")
    own_rules.forget()
    yield
    own_rules.forget()


def end(
    outer: str = "lr = 0.7\nmomentum = 0.9", codec: str = "fp32", merge: str = 'policy = "mean"'
) -> Tensor:
    """Of a run of three peers, one of which is killed and comes again: where all of them are."""
    ends: list[Tensor] = []

    def script() -> None:
        torch.manual_seed(0)
        model = nn.Linear(24, 24)
        data = torch.randn(20_000, 24, generator=torch.Generator().manual_seed(5))
        with farflung.join(None, model, torch.optim.SGD(model.parameters(), lr=0.05)) as run:
            for rows in run.batches(data):
                loss = (model(rows) - rows.flip(1)).square().mean()
                loss.backward()
                run.step(loss)
            ends.append(run.evaluate(lambda: torch.cat([p.detach().flatten() for p in model.parameters()])))

    of = Manifest.from_toml(RUN.format(outer=outer, codec=codec, merge=merge), "own")
    places = [ReplicaPlace(), ReplicaPlace(), ReplicaPlace(away_s=((11.0, 16.0),))]
    done = Laboratory(of, script, places, lambda told: None).learn()
    assert done.version == 6 and len(ends) == 3
    assert all(torch.equal(each, ends[0]) for each in ends), "P1"
    return ends[0]


def test_a_step_of_a_package_ends_a_run_where_the_same_step_of_ours_does() -> None:
    assert torch.equal(end(outer='step = "own_step"\nlr = 0.7\nmomentum = 0.9'), end())
    assert not torch.equal(end(outer='step = "own_step"\nlr = 0.7\nmomentum = 0.8'), end())


def test_a_codec_of_a_package_ends_a_run_where_the_same_codec_of_ours_does() -> None:
    ours = end(codec="bf16")
    assert torch.equal(end(codec="halves"), ours) and not torch.equal(ours, end())


def test_a_merge_rule_of_a_package_ends_a_run_where_the_same_rule_of_ours_does() -> None:
    assert torch.equal(end(merge='policy = "own_mean"'), end())
    assert not torch.equal(end(merge='policy = "own_first"'), end())
