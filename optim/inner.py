"""Inner optimizers: Muon for the weights that are matrices, AdamW for the rest, as one torch optimizer.

Called by the built-in trainer (`[inner] optimizer` in run.toml), and by researchers' own scripts:

    run = farflung.join(url, model, farflung.muon(model, lr=4e-4))

It also says which tensors `[outer] step = "muon"` is for, whose arithmetic is in outer.py.
Must not know runs or rounds.  Nothing else is needed for another optimizer: any torch optimizer will do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
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


# ---- packaged ----------------------------------------------------------------------------------------------
# Inner optimizers from packages of their own: each one word of `[inner] optimizer`, imported where it is
# asked for.
#
# Called by recipes.py for the built-in trainer, and by scripts as `farflung.inner_optimizer(word, model,
# lr)`. The table `PACKAGED` says of each word which package it is from, what to install, and how it is made
# of a model. Learning rates are meant as for AdamW. Must not know runs or rounds: a load changes the
# parameters in place, and none of these keeps a copy of them.

Betas = tuple[float, float]
# Of a matrix that is learned in few dimensions: how many, as a share of its shorter side; GaLore's and APOLLO's own.
RANK_SHARE = 4
PROJECTED_AGAIN_STEPS = 200  # after so many a new projection is chosen; both papers' own


@dataclass(frozen=True)
class OptimizerOptions:
    """What an optimizer is made for."""

    model: nn.Module
    lr: float
    betas: Betas
    weight_decay: float
    adamw: Sequence[str] = ()  # matrices that are none of the hidden ones, though no embedding says so

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def matrices(self) -> list[nn.Parameter]:
        return hidden_matrices(self.model, self.adamw)

    @property
    def rest(self) -> list[nn.Parameter]:
        chosen = {id(matrix) for matrix in self.matrices}
        return [parameter for parameter in self.trained if id(parameter) not in chosen]

    @property
    def usual(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": self.betas, "weight_decay": self.weight_decay}


@dataclass(frozen=True)
class Packaged:
    module: str  # that has it
    install: str  # for pip
    make: Callable[[Any, OptimizerOptions], Optimizer]


def _adamw8bit(module: Any, asked: OptimizerOptions) -> Optimizer:
    """Moments in 8 bits, in blocks; of tensors with less than 4,096 values in 32."""
    made: Optimizer = module.AdamW8bit(asked.trained, **asked.usual)
    return made


def _galore(module: Any, asked: OptimizerOptions) -> Optimizer:
    """`scale` 1: the paper's quarter would make `lr` another thing than AdamW's."""
    groups = _few_dimensions(asked, scale=1.0, proj_type="std")
    made: Optimizer = module.GaLoreAdamW(groups, **asked.usual, no_deprecation_warning=True)
    return made


def _apollo(module: Any, asked: OptimizerOptions) -> Optimizer:
    groups = _few_dimensions(asked, scale=1.0, proj_type="std", proj="random", scale_type="channel")
    made: Optimizer = module.APOLLOAdamW(groups, **asked.usual)
    return made


def _apollo_mini(module: Any, asked: OptimizerOptions) -> Optimizer:
    """One dimension, and one scale for a whole matrix: the paper's own factor makes up for that."""
    options = {"scale": 128.0, "proj_type": "std", "proj": "random", "scale_type": "tensor"}
    matrices = {
        "params": asked.matrices,
        "rank": 1,
        "update_proj_gap": PROJECTED_AGAIN_STEPS,
        **options,
    }
    made: Optimizer = module.APOLLOAdamW([{"params": asked.rest}, matrices], **asked.usual)
    return made


def _few_dimensions(asked: OptimizerOptions, **options: Any) -> list[dict[str, Any]]:
    """Embeddings, norms and the like as in AdamW; matrices by their shorter side, since a group has one rank."""
    by_rank: dict[int, list[nn.Parameter]] = {}
    for matrix in asked.matrices:
        by_rank.setdefault(max(1, min(matrix.shape) // RANK_SHARE), []).append(matrix)
    gap = PROJECTED_AGAIN_STEPS
    groups = [
        {"params": found, "rank": rank, "update_proj_gap": gap, **options} for rank, found in by_rank.items()
    ]
    return [{"params": asked.rest}, *groups]


def _adam_mini(module: Any, asked: OptimizerOptions) -> Optimizer:
    """One rate for each row of a matrix.  It goes by names, which are told to it: its own are those of a few models."""
    named = [(name, p) for name, p in asked.model.named_parameters() if p.requires_grad]
    made = module.Adam_mini(named, **asked.usual, verbose=False)
    made.mlp_names = {name.lower() for name, parameter in named if parameter.ndim == 2}
    made.embd_names = made.output_names = made.wqk_names = made.wv_names = made.attn_proj_names = set()
    made.world_size = 1  # it takes every GPU of the machine for a rank that it may wait for
    found: Optimizer = made
    return found


def _soap(module: Any, asked: OptimizerOptions) -> Optimizer:
    """Adam in the directions of Shampoo's preconditioner, which the first step only measures.  The rest as in Adam: few
    rows of a table of tokens have a gradient at each step."""
    groups = [{"params": asked.matrices}, {"params": asked.rest, "max_precondition_dim": 1}]
    made: Optimizer = module.SOAP(groups, **asked.usual, precondition_frequency=10)
    return made


PACKAGED = {
    "adamw8bit": Packaged("bitsandbytes.optim", "bitsandbytes", _adamw8bit),
    "galore": Packaged("galore_torch", "galore-torch", _galore),
    "apollo": Packaged("apollo_torch", "apollo-torch", _apollo),
    "apollo-mini": Packaged("apollo_torch", "apollo-torch", _apollo_mini),
    "adam-mini": Packaged("adam_mini", "adam-mini", _adam_mini),
    "soap": Packaged("pytorch_optimizer", "pytorch-optimizer", _soap),
}
FOR_HIDDEN_MATRICES = ("muon", "galore", "apollo", "apollo-mini", "soap")  # and AdamW for the rest
WORDS = ("adamw", "muon", *PACKAGED)


def inner_optimizer(
    word: str,
    model: nn.Module,
    lr: float,
    betas: Betas = (0.9, 0.95),
    weight_decay: float = 0.1,
    adamw: Sequence[str] = (),
) -> Optimizer:
    """The optimizer that `[inner] optimizer = word` names, for a script of one's own.

    "adamw", "muon", and of packages that have to be installed: "adamw8bit", "galore", "apollo", "apollo-mini",
    "adam-mini", "soap".  `lr` is meant as for AdamW.  `adamw`: names of matrices that are treated like an embedding.
    """
    asked = OptimizerOptions(model, lr, betas, weight_decay, adamw)
    if word == "adamw":
        on_gpu = all(each.is_cuda for each in asked.trained)  # there all of it is one kernel
        return AdamW(asked.trained, lr, betas, weight_decay=weight_decay, fused=on_gpu or None)
    if word == "muon":
        return muon(model, lr, betas, weight_decay, adamw=adamw)
    if word not in PACKAGED:
        raise UserError(f"inner optimizer: expected one of {', '.join(WORDS)}, found {word!r}")
    found = PACKAGED[word]
    try:
        module = importlib.import_module(found.module)
    except ImportError as error:
        raise UserError(
            f'[inner] optimizer = "{word}" needs a package that is not here ({error.name or error}): '
            f"pip install {found.install}"
        ) from None
    return found.make(module, asked)
