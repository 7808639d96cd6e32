"""`run.save_pretrained`: the model writes itself as its library does, with the run's weights in it.

Owns: which values a model of transformers, or an adapter of peft, is given to write, and that its files are the same
on every peer.  Called by the public API.  Must not know rounds or the agent, and imports neither transformers nor peft:
the model brings what it is made of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from farflung.peer.island.sharded import is_sharded, local_of
from farflung.peer.local.memory import SharedState
from farflung.peer.trainer.layout import ModelLayout, unwrap
from farflung.peer.trainer.model_tensors import clean_name
from farflung.protocol.errors import UserError
from farflung.protocol.process.model_folder import made_aside

SAVE_PATIENCE_S = 60.0  # for a version that is just arriving
_ADAPTER_CONFIG = "adapter_config.json"


def save_pretrained(
    model: nn.Module,
    layout: ModelLayout,
    shared: SharedState,
    folder: Path,
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """With the anchor in place of what the model has learned since; whole or not at all."""
    writer: Any = unwrap(model)
    for each in (writer, tokenizer):
        if each is not None and not callable(getattr(each, "save_pretrained", None)):
            instead = ": write its weights with run.save(path)" if each is writer else ""
            raise UserError(f"{type(each).__name__} has no save_pretrained{instead}")

    # What did not train and lies on several ranks is whole on none of them.  An adapter's files are without it.
    in_parts = {clean_name(n) for n, p in writer.named_parameters() if is_sharded(p) and not p.requires_grad}
    if in_parts and not hasattr(writer, "peft_config"):
        raise UserError("the frozen parameters lie on several ranks: write the rest with run.save(path)")

    def weights() -> dict[str, Tensor]:
        """A copy: the agent may write the next version while the files are written."""
        of_run = layout.named_tensors(shared.anchor)
        named = ((clean_name(name), tensor) for name, tensor in writer.state_dict().items())
        mine = {name: tensor for name, tensor in named if name not in in_parts}
        lost = sorted(of_run.keys() - mine.keys())
        if lost:
            raise UserError(
                f"{type(writer).__name__}'s state_dict has no {lost[0]!r}: write its weights with run.save(path)"
            )
        copies: dict[object, Tensor] = {}  # what is tied stays one tensor, so that it is written once
        for name, tensor in mine.items():
            here = local_of(tensor)  # of a model on several ranks this one's part, whose place is its name
            same = (here.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if here.numel() else name
            if same not in copies:
                copies[same] = of_run.get(name, tensor.detach()).to("cpu", tensor.dtype, copy=True)
            mine[name] = copies[same]
        return mine

    with made_aside(folder) as aside:
        try:
            values = shared.copy_whole(weights, SAVE_PATIENCE_S)
            writer.save_pretrained(aside, state_dict=values, max_shard_size=max_shard_size)
            _in_one_order(writer, aside)
            if tokenizer is not None:
                tokenizer.save_pretrained(aside)
        except (SafetensorError, ValueError) as error:  # such as a generation config that contradicts itself
            told = " ".join(str(error).split())
            raise UserError(f"cannot write {folder}: {told}") from None


def _in_one_order(model: Any, folder: Path) -> None:
    """peft writes its sets, such as `target_modules`, in an order that differs from process to process."""
    for name, config in getattr(model, "peft_config", {}).items():
        sets = {key for key, value in vars(config).items() if isinstance(value, set | frozenset)}
        for path in (folder / _ADAPTER_CONFIG, folder / name / _ADAPTER_CONFIG):
            if not path.is_file() or not sets:
                continue
            said = json.loads(path.read_text(encoding="utf-8"))
            said |= {key: sorted(said[key]) for key in sets if isinstance(said.get(key), list)}
            path.write_text(json.dumps(said, indent=2, sort_keys=True), encoding="utf-8")
