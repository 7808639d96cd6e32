"""Inner optimizers: Muon for the weights that are matrices, AdamW for the rest, as one torch optimizer.

Called by the built-in trainer (`[inner] optimizer` in run.toml), and by researchers' own scripts:

    run = farflung.join(url, model, farflung.muon(model, lr=4e-4))

It also says which tensors `[outer] step = "muon"` is for, whose arithmetic is in muon.py.
Must not know runs or rounds.  Nothing else is needed for another optimizer: any torch optimizer will do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from farflung.protocol.errors import UserError


def muon(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    adamw: Collection[str] = (),
) -> Optimizer:
    """Muon for hidden weight matrices; AdamW for embeddings, the head, norms, biases, and the parameters in `adamw`.

    `lr` is meant as for AdamW: Muon's steps are scaled to be as large (https://arxiv.org/abs/2502.16982).  `betas` is
    AdamW's, `momentum` Muon's.  A parameter in `adamw` is named as in `model.named_parameters()`.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unknown = sorted(set(adamw) - named.keys())
    if unknown:
        raise UserError(f"muon: the model has no trainable parameter {unknown[0]!r}")
    matrices = hidden_matrices(model, adamw)
    if not matrices:
        raise UserError("muon: the model has no hidden weight matrix; use AdamW")
    chosen = {id(p) for p in matrices}
    rest = [p for p in named.values() if id(p) not in chosen]
    return MuonAdamW(
        Muon(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"),
        AdamW(rest, lr, betas, weight_decay=weight_decay) if rest else None,
    )


def hidden_matrices(model: nn.Module, but: Collection[str] = ()) -> list[nn.Parameter]:
    """What Muon is for: weights that are matrices, without tables of tokens and without those named in `but`."""
    tables = _tables(model)
    named = model.named_parameters()
    return [p for n, p in named if p.requires_grad and p.ndim == 2 and id(p) not in tables and n not in but]


def outer_matrices(parts: Sequence[nn.Module]) -> list[nn.Parameter]:
    """What `[outer] step = "muon"` is for, of a model in these parts, one after the other, or in a single one.

    Neither embeddings nor the weights of the last layer, which gives what the loss is taken of: however the model is
    cut, these are the same.
    """
    layers = [layer for part in parts for layer in part.modules()]
    tables = [each for each in layers if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    last = [each for each in layers if isinstance(each, nn.Linear)][-1:]
    but = {id(each.weight) for each in (*tables, *last)}
    found = [p for part in parts for p in part.parameters() if p.requires_grad and p.ndim == 2]
    return [p for p in found if id(p) not in but]


def _tables(model: nn.Module) -> set[int]:
    """Matrices whose rows stand for tokens: embeddings, and the head, if the last layer gives a value to each token."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    words = {each.num_embeddings for each in embeddings}
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
    return {id(m.weight) for m in embeddings} | {id(m.weight) for m in last if m.out_features in words}


class MuonAdamW(Optimizer):
    """Two optimizers as one: schedulers, scalers and checkpoints see one list of groups and one state."""

    def __init__(self, matrices: Muon, rest: AdamW | None) -> None:
        self._parts: list[Optimizer] = [matrices] if rest is None else [matrices, rest]
        groups = [
            group | {"part": number} for number, part in enumerate(self._parts) for group in part.param_groups
        ]
        super().__init__(groups, {"part": len(self._parts) - 1, **self._parts[-1].defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, part in enumerate(self._parts):
            # Each time, because loading a state dict puts new objects in their places.
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["part"] == number]
            part.step()
        return loss
