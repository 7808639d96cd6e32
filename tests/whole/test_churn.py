"""P7 under churn with a model that learns: the experiment benchmarks/learning/churn.py in small."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rig.pieces import pieces

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "learning" / "churn.py"


@pytest.fixture(scope="module")
def churn() -> ModuleType:
    torch.set_num_threads(1)
    sys.path.append(str(SCRIPT.parent))  # where its own helpers lie
    spec = importlib.util.spec_from_file_location("churn", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["churn"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.mode("recovery")  # now and then nobody is left who has the newest version
@pytest.mark.parametrize("fragments", pieces([2, 1]))
def test_P7_with_a_third_killed_in_every_round_every_sample_is_committed_once(
    churn: ModuleType, fragments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The invariants compare books and contributions to the sample at every record; here is what is left to see."""
    monkeypatch.setattr(churn, "SAMPLES", 400)
    monkeypatch.setattr(churn.Learner, "dataset_samples", 400)
    monkeypatch.setattr(churn, "STEPS", 5)
    monkeypatch.setattr(churn, "CHUNK", 2048)
    monkeypatch.setattr(churn, "CONFIG", churn.GPTConfig(layers=1, width=16, heads=2, context=16))
    asked = churn.Churn(peers=4, rounds=12, killed=0.5, fragments=fragments)
    out = churn.run(asked)
    leases = out.leases
    assert out.kills >= 6 and len(out.digests) == 1, "all who hold the last version hold the same bits"
    assert leases.leased_samples == leases.committed_samples + leases.held_samples + leases.returned_samples
    assert leases.returned_samples > 0 and churn.whole_epochs(leases) >= 1
    assert out.loss < 5.0, "it learned: ln 256 = 5.545 is where it begins"
