"""Other people's loops: what is said where their package is not there.

That the adapters work is in tests/real/test_adapters.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import farflung
from rig.pretrained_models import made

ROOT = Path(__file__).resolve().parents[3]


def test_without_its_package_an_adapter_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(farflung.UserError, match="hf_join needs transformers and accelerate: pip install"):
        farflung.hf_join(object())
    with pytest.raises(farflung.UserError, match="lightning_run needs lightning: pip install lightning"):
        farflung.lightning_run([])


def test_a_trainer_that_would_end_with_a_model_of_its_own_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    own = {"eval_strategy": "steps", "save_strategy": "steps", "report_to": "none", "use_cpu": True}
    args = transformers.TrainingArguments(str(tmp_path), load_best_model_at_end=True, **own)
    rows = [{"input_ids": [1], "labels": [1]}]
    trainer = transformers.Trainer(made(transformers, "gpt2"), args, train_dataset=rows, eval_dataset=rows)
    with pytest.raises(
        farflung.UserError, match="load_best_model_at_end this peer would end with a model of its own"
    ):
        farflung.hf_join(trainer)


def test_adapters_are_short() -> None:
    for name in ("hf", "lightning"):
        lines = (ROOT / "peer" / "adapters" / f"{name}.py").read_text(encoding="utf-8").splitlines()
        assert len(lines) < 100, (
            "what a loop needs to be told is little: the rest belongs behind farflung.join"
        )
