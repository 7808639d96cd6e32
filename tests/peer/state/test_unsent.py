"""What a coarse codec has not sent yet outlives its agent, where it ends in order, and belongs to a state."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest
import torch

from farflung.compression.codec import share_after
from farflung.optim.recipes import outer_of
from farflung.peer.machine.effects import Encode
from farflung.peer.state.outer_state import OuterState
from farflung.peer.state.unsent import SUFFIX, UnsentWork
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.run_terms import Attached, Known

ELEMENTS, CHUNKS, FRAGMENTS = 4096, 4, 2
MODEL = ModelSchema((), ELEMENTS, CHUNKS, CHUNKS, bytes(32))
ERA, VERSION, PEER = 3, 40, "a-peer"
VERSIONS = {0: VERSION, 1: VERSION}


def manifest(codec: str = "topk") -> Manifest:
    step = "sparse" if codec == "topk" else "nesterov"
    return Manifest.from_toml(
        f'[outer]\nstep = "{step}"\n[round]\nfragments = 2\ncodec = "{codec}"\n', "run.toml"
    )


class Life:
    """Of one agent."""

    def __init__(self, folder: Path, of: Manifest | None = None) -> None:
        of = of or manifest()
        self.codec = of.round.codec
        self.state = OuterState(torch.zeros(CHUNKS * ELEMENTS), MODEL, of.round, outer_of(of))
        self.unsent = UnsentWork(folder, PEER, Attached(Known(of, bytes(16)), MODEL))
        self.unsent.read()

    def contribute(self, fragment: int = 0, era: int = ERA, version: int = VERSION) -> None:
        self.unsent.of_before.take_up(self.state, fragment, era, version)
        slot = torch.randn(CHUNKS * ELEMENTS, generator=torch.Generator().manual_seed(fragment))
        for _ in self.state.encode(slot, Encode(1, 0, self.codec, (0, 1), fragment)):
            pass
        self.state.resolve(slot, True, fragment)

    def take_up(self, fragment: int = 0, era: int = ERA, version: int = VERSION) -> torch.Tensor | None:
        self.unsent.of_before.take_up(self.state, fragment, era, version)
        return self.state.unsent().get(fragment)

    def end(self, era: int = ERA) -> None:
        self.unsent.write(self.state, era, VERSIONS)


@pytest.fixture
def left(tmp_path: Path) -> dict[int, torch.Tensor]:
    first = Life(tmp_path)
    first.contribute(0)
    first.contribute(1)
    first.end()
    return first.state.unsent()


def files(folder: Path) -> list[Path]:
    return list(folder.glob(f"*{SUFFIX}"))


def test_what_was_not_sent_is_there_after_a_restart(tmp_path: Path, left: dict[int, torch.Tensor]) -> None:
    [path] = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    next_life = Life(tmp_path)
    assert next_life.state.unsent() == {}
    for fragment in (0, 1):
        found = next_life.take_up(fragment)
        assert found is not None and torch.equal(found, left[fragment].bfloat16().float())
    assert float(left[0].norm()) > 0 and not torch.equal(left[0], left[1])


def test_it_is_taken_up_once(tmp_path: Path, left: dict[int, torch.Tensor]) -> None:
    second = Life(tmp_path)
    assert files(tmp_path) == []
    second.contribute()
    kept = second.state.unsent()[0].clone()
    assert torch.equal(second.take_up(), kept)  # type: ignore[arg-type]
    assert Life(tmp_path).take_up() is None, "the second life was killed"


def test_what_a_short_life_did_not_take_up_is_left_for_the_next(
    tmp_path: Path, left: dict[int, torch.Tensor]
) -> None:
    second = Life(tmp_path)
    second.contribute(0)
    second.end()
    third = Life(tmp_path)
    found = third.take_up(1)
    assert found is not None and torch.equal(found, left[1].bfloat16().float())
    assert third.take_up(0) is not None


@pytest.mark.parametrize(
    ("era", "version"), [(ERA + 1, VERSION), (ERA, VERSION - 1), (ERA, VERSION + 61)], ids=str
)
def test_of_a_state_that_is_gone_nothing_is_taken_up(
    tmp_path: Path, left: dict[int, torch.Tensor], era: int, version: int
) -> None:
    life = Life(tmp_path)
    assert life.take_up(0, era, version) is None
    assert life.take_up(0) is None, "not later either"


def test_what_is_old_counts_for_less(tmp_path: Path, left: dict[int, torch.Tensor]) -> None:
    found = Life(tmp_path).take_up(0, ERA, VERSION + 10)
    assert found is not None and torch.equal(found, left[0].bfloat16().float() * share_after(10))
    assert share_after(0) == 1.0 and 0.55 < share_after(10) < 0.65 and share_after(61) == 0.0


def test_a_run_that_goes_back_forgets_it(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.contribute(0)
    life.contribute(1)
    life.state.forget_unsent(0)
    assert set(life.state.unsent()) == {1}
    life.contribute(0)
    assert set(life.state.unsent()) == {0, 1}, "and begins again"


def test_a_codec_that_loses_little_keeps_nothing(tmp_path: Path, left: dict[int, torch.Tensor]) -> None:
    dense = Life(tmp_path, manifest("int8"))
    dense.contribute()
    assert dense.state.unsent() == {}


@pytest.mark.parametrize("damage", ["cut", "empty", "other model", "no version"])
def test_a_damaged_file_is_told_and_costs_nothing_else(
    tmp_path: Path, left: dict[int, torch.Tensor], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    [path] = files(tmp_path)
    raw = path.read_bytes()
    other = raw.replace(b"[8192]", b"[4096]")
    told = raw.replace(f'"{ERA} {VERSION}"'.encode(), b'"no one"')
    path.write_bytes({"cut": raw[:-7], "empty": b"", "other model": other, "no version": told}[damage])
    with caplog.at_level(logging.WARNING):
        life = Life(tmp_path)
    assert "what was not sent yet when this peer left is lost" in caplog.text
    assert life.take_up() is None and files(tmp_path) == []


def test_where_nothing_may_be_kept_nothing_is(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.unsent = UnsentWork(tmp_path, PEER, Attached(Known(manifest(), bytes(16)), MODEL), may_keep=False)
    life.contribute()
    life.end()
    assert files(tmp_path) == []


def test_a_full_disk_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(tmp_path / "never made")
    life.contribute()
    with caplog.at_level(logging.WARNING):
        life.end()
    assert "what was not sent yet is lost, since it cannot be kept" in caplog.text
