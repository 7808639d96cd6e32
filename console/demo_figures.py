"""The figures that the demo shows: computed from the run's status and the models that its peers wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors.torch import load_file

from farflung.peer.builtin.corpus import load_corpus
from farflung.peer.builtin.llama import Llama, evaluate
from farflung.protocol.manifest import Manifest, ModelSection

HELD_OUT_WINDOWS = 64


@dataclass(frozen=True)
class Figures:
    loss_before: float
    loss_after: float
    models_equal: bool
    digests: set[str]
    bytes_sent: int
    bytes_data_parallel: int

    @property
    def ratio(self) -> float:
        return self.bytes_data_parallel / max(1, self.bytes_sent)


def figures(manifest: Manifest, status: dict[str, Any], models: list[Path]) -> Figures:
    fresh = Llama(manifest.model, manifest.run.seed)
    written = [path for path in models if path.is_file()]
    held_out = load_corpus().held_out
    final = {m["id"]: m for m in status["everybody"] if m["version"] == status["version"]}
    return Figures(
        loss_before=evaluate(fresh, held_out, HELD_OUT_WINDOWS),
        loss_after=_loss_of(written[0], manifest.model, held_out) if written else float("nan"),
        models_equal=len(written) == len(models) and len({_content_of(path) for path in written}) == 1,
        digests={m["digest"][:12] for m in final.values() if m["digest"]},
        bytes_sent=sum(m["tx_bytes"] for m in status["everybody"]),
        bytes_data_parallel=_data_parallel_bytes(fresh, status),
    )


def _loss_of(path: Path, sizes: ModelSection, held_out: Any) -> float:
    model = Llama(sizes)
    model.load_state_dict(load_file(path))
    return evaluate(model, held_out, HELD_OUT_WINDOWS)


def _content_of(path: Path) -> bytes:
    tensors = load_file(path)
    hasher = blake3()
    for name in sorted(tensors):
        hasher.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return hasher.digest()


def _data_parallel_bytes(model: Llama, status: dict[str, Any]) -> int:
    """Synchronous training of the same steps: a ring all-reduce of fp32 gradients at every step.

    Each of n peers sends 2 (n - 1) / n of the gradient per step; a round's `steps` are those of all its peers.
    """
    gradient_bytes = 4 * sum(p.numel() for p in model.parameters())
    total = 0.0
    for done in status["rounds"]:
        peers = len(done["included"])
        total += done["steps"] * 2 * (peers - 1) / peers * gradient_bytes
    return int(total)
