"""Where a trainer computes, how much memory is free there, and the line that says whether taking part will fit.

Called by `farflung.join` and by whoever holds a stage of a pipeline.  What is needed is footprint.py's arithmetic; of
a script it is known what is trained, by which optimizer and where, so this line is nearer the truth than the doctor's.
It is a line and no refusal: what an optimizer will keep is not always known, and memory comes free.
Must not know rounds, or the network.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from farflung.peer.footprint import (
    FootprintRow,
    FreeMemory,
    MemoryRules,
    ModelSize,
    of_agent,
    of_rank,
    of_shared,
    told,
)
from farflung.peer.settings import own_config
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.host_memory import available_bytes
from farflung.protocol.process.log_lines import Teller

log = logging.getLogger(__name__)

# Of torch's own optimizers, tensors that are kept beside each parameter, of its dtype; others mostly keep two.
_KEPT = {
    "SGD": 0,
    "ASGD": 1,
    "Adagrad": 1,
    "RMSprop": 1,
    "Adadelta": 2,
    "Adafactor": 0,
    "MuonAdamW": 1,
    "Muon": 1,
}
_KEPT_USUAL = 2


def rules_here(manifest: Manifest) -> MemoryRules:
    return MemoryRules.of(manifest, *own_config({}).kept_results)


def best_device() -> torch.device:
    """The GPU that CUDA takes, where there is one; says so where there are others, which this process leaves idle."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device, count = torch.device("cuda", torch.cuda.current_device()), torch.cuda.device_count()
    if count > 1:
        Teller.from_environment("trainer")(
            f"computes on {device} ({torch.cuda.get_device_name(device)}), and not on {count - 1} more here: for each "
            "of them another peer can join, with CUDA_VISIBLE_DEVICES=NUMBER and an --identity of its own; with a "
            "training script one peer takes them all (--nproc, docs/islands.md)"
        )
    return device


def room_on(device: torch.device) -> FreeMemory:
    if device.type != "cuda":
        return FreeMemory(None, available_bytes())
    return FreeMemory(torch.cuda.mem_get_info(device)[0], available_bytes())


def rows_here(
    values: int, here: Sequence[Tensor], optimizer: Optimizer, rules: MemoryRules, ranks: int = 1
) -> list[FootprintRow]:
    """Of this peer, or of this island as far as it is on this node.

    `here`: what this rank holds of the model, which has its memory by now; `ranks`: on this node.
    """
    share = sum(each.numel() for each in here)
    size = sum(each.nbytes for each in here) / max(1, share)
    on_gpu = any(each.is_cuda for each in here)
    held = ModelSize(values, size, optimizer_bytes(optimizer, size), on_gpu, is_here=True)
    return [*of_shared(rules, values), *of_agent(rules, values), *of_rank(rules, held, share, ranks)]


def optimizer_bytes(optimizer: Optimizer, value_bytes: float) -> float:
    """For a value, what it will keep; nothing that it keeps already, which is there."""
    if optimizer.state:
        return 0.0
    kind = type(optimizer).__name__
    moments = _KEPT.get(kind, _KEPT_USUAL)
    if kind == "SGD" and any(group.get("momentum") for group in optimizer.param_groups):
        moments = 1
    return moments * value_bytes


def say_whether_it_fits(
    rows: list[FootprintRow], rules: MemoryRules, values: float, device: torch.device
) -> None:
    """One line: what is needed, what is here, and, where that is less, what to change."""
    found = told(rows, rules, values, room_on(device))
    say = Teller.from_environment("trainer")
    if found.fits:
        say(f"memory: {found.text}")
    else:
        log.warning("memory: it may not fit: %s; %s", found.text, found.todo)
