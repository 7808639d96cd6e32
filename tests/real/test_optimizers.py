"""The built-in trainer with inner optimizers from packages of their own, over real rounds.

Needs what `make optimizers` installs, which is not in the development set: there they are skipped.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from safetensors.torch import load_file

from farflung.optim.inner import PACKAGED

pytestmark = pytest.mark.slow


def asks_for(stage: Any, word: str, **values: object) -> None:
    stage.write_run(**values)
    path = stage.folder / "run.toml"
    text = path.read_text()
    assert text.count("[inner]\n") == 1
    path.write_text(text.replace("[inner]\n", f'[inner]\noptimizer = "{word}"\n'))


def is_here(word: str) -> bool:
    return importlib.util.find_spec(PACKAGED[word].module.partition(".")[0]) is not None


@pytest.mark.parametrize("word", PACKAGED)
def test_P1_two_peers_end_with_one_model(word: str, stage: Any) -> None:
    if not is_here(word):
        pytest.skip(f"needs {PACKAGED[word].install}")
    asks_for(stage, word, rounds=3, sync_every=3)
    stage.coordinate("--exit-when-done")
    stage.join("ann")
    stage.join("bob")
    assert [stage.wait(name) for name in ("ann", "bob", "coordinator")] == [0, 0, 0]
    ann, bob = (load_file(stage.model(name)) for name in ("ann", "bob"))
    assert ann.keys() == bob.keys() and all((ann[name] == bob[name]).all() for name in ann)
