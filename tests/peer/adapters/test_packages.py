"""Other people's loops: what is said where their package is not there.

That the adapters work is in tests/real/test_adapters.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import farflung

ROOT = Path(__file__).resolve().parents[3]


def test_without_its_package_an_adapter_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(farflung.UserError, match="hf_join needs transformers and accelerate: pip install"):
        farflung.hf_join(object())
    with pytest.raises(farflung.UserError, match="lightning_run needs lightning: pip install lightning"):
        farflung.lightning_run([])


def test_adapters_are_short() -> None:
    for name in ("hf", "lightning"):
        lines = (ROOT / "peer" / "adapters" / f"{name}.py").read_text(encoding="utf-8").splitlines()
        assert len(lines) < 105, (
            "what a loop needs to be told is little: the rest belongs behind farflung.join"
        )
