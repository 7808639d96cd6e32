"""What an inner optimizer keeps beside the parameters: its tensors, and how many bytes of them for each parameter.

    python benchmarks/learning/optimizer_state.py      of every word of [inner] optimizer, after two steps

Used by learning.py for its table, and by the tests of optimizers.  Some keep lists of tensors, or objects that hold
some; a tensor that several parameters share is counted once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from farflung.optim.inner import WORDS, inner_optimizer
from farflung.peer.builtin.llama import Llama
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import ModelSection

SIZES = ModelSection(layers=4, width=256, heads=8, context=128)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """In a fixed order, each once."""
    found: dict[tuple[int, int], Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for tensor in _tensors_in(optimizer.state.get(parameter, {})):
                if tensor.numel():
                    found.setdefault((tensor.data_ptr(), tensor.numel()), tensor)
    return list(found.values())


def state_bytes(optimizer: Optimizer) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(optimizer))


def bytes_per_parameter(optimizer: Optimizer) -> float:
    count = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    return state_bytes(optimizer) / count


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        # A tensor that is made of others, as of 8 bits and scales.
        parts = getattr(value, "__tensor_flatten__", None)
        if parts is None:
            yield value.detach()
        else:
            for name in parts()[0]:
                yield from _tensors_in(getattr(value, name))
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
    elif type(value).__module__.partition(".")[0] not in ("builtins", "torch"):
        yield from _tensors_in(getattr(value, "__dict__", {}))  # such as the projector of GaLore


def main() -> None:
    torch.set_num_threads(1)
    for word in WORDS:
        model = Llama(SIZES)
        try:
            optimizer = inner_optimizer(word, model, 1e-3)
        except UserError as error:
            print(f"{word:12} not run: {error}")
            continue
        for _ in range(2):
            model.loss(torch.randint(0, 256, (1, SIZES.context + 1))).backward()
            optimizer.step()
            optimizer.zero_grad()
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{word:12} {bytes_per_parameter(optimizer):6.2f} bytes a parameter, of {count:,}", flush=True)


if __name__ == "__main__":
    main()
