"""farflung: train one model on computers that are far apart, slow to reach, and free to come and go.

The public API, and nothing else, is here:

    run = farflung.join("farflung://...", model, inner_optimizer)

This file runs before every module of the package, also in the coordinator, which must start without torch.
So the names are looked up when they are first used, not when farflung is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farflung.optim.inner import inner_optimizer, muon
    from farflung.peer.adapters.hf import hf_join
    from farflung.peer.adapters.lightning import lightning_run
    from farflung.peer.data.text_lines import TextLines
    from farflung.peer.data.token_shards import TokenShards
    from farflung.peer.pipeline.api import pipeline
    from farflung.peer.pipeline.hf import hf_parts
    from farflung.peer.pipeline.parts import parts_of
    from farflung.peer.trainer.api import Run, join
    from farflung.protocol.errors import Refused, UserError

__all__ = [
    "join",
    "Run",
    "TextLines",
    "TokenShards",
    "muon",
    "inner_optimizer",
    "pipeline",
    "parts_of",
    "hf_parts",
    "hf_join",
    "lightning_run",
    "Refused",
    "UserError",
    "__version__",
]

__version__ = "0.1.0"

_HOME_OF = {
    "join": "farflung.peer.trainer.api",
    "Run": "farflung.peer.trainer.api",
    "TextLines": "farflung.peer.data.text_lines",
    "TokenShards": "farflung.peer.data.token_shards",
    "muon": "farflung.optim.inner",
    "inner_optimizer": "farflung.optim.inner",
    "pipeline": "farflung.peer.pipeline.api",
    "parts_of": "farflung.peer.pipeline.parts",
    "hf_parts": "farflung.peer.pipeline.hf",
    "hf_join": "farflung.peer.adapters.hf",
    "lightning_run": "farflung.peer.adapters.lightning",
    "Refused": "farflung.protocol.errors",
    "UserError": "farflung.protocol.errors",
}

# Hidden from type checkers: they would take it as leave to accept every misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'farflung' has no attribute {name!r}; it has {', '.join(__all__)}")
        # From the first use on, a mistake in a script that nobody there catches is one line and an exit code.
        importlib.import_module("farflung.protocol.process.log_lines").mistakes_in_one_line()
        folders = importlib.import_module("farflung.protocol.process.mode_folders")
        value = getattr(folders.needed(_HOME_OF[name], f"farflung.{name}"), name)
        globals()[name] = value  # the next use finds it without coming here
        return value

    def __dir__() -> list[str]:
        return sorted(set(globals()) | set(__all__))
