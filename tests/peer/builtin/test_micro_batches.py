"""A batch in pieces, where the whole of it does not fit: the same gradient, whenever that is found."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from farflung.peer.builtin.llama import Llama
from farflung.peer.builtin.named_model import MicroBatches
from farflung.peer.builtin.sizes import STEP_SHARE, StepShape, shape_here, shape_of_step, step_bytes
from farflung.peer.footprint import FreeMemory, MemoryRules
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest, ModelSection

SIZES = ModelSection(layers=3, width=32, heads=2, context=16)
BATCH = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(1))


def gradients(model: Llama) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def whole() -> tuple[float, list[Tensor]]:
    model = Llama(SIZES, 3)
    loss = model.loss(BATCH)
    loss.backward()
    return loss.item(), gradients(model)


class Scene:
    def __init__(self, rows: int, recompute: bool = False) -> None:
        self.model, self.said = Llama(SIZES, 3), []
        self.micros = MicroBatches(self.model, StepShape(rows, recompute), nullcontext, self.hear)
        self.asked: list[int] = []

    def hear(self, text: str, routine: bool = False, **facts: str) -> None:
        self.said.append(text)

    def fits(self, most: int, with_recompute: int = 0, after: int = 0) -> None:
        """From so many calls on no more rows than these fit."""
        plain = self.model.loss

        def loss(rows: Tensor) -> Tensor:
            self.asked.append(len(rows))
            room = with_recompute if self.model.recompute else most
            if len(rows) > room and len(self.asked) > after:
                raise torch.OutOfMemoryError("CUDA out of memory.  Tried to\nand much more")
            return plain(rows)

        self.model.loss = loss  # type: ignore[method-assign]

    def is_the_same(self, exactly: bool = False) -> bool:
        loss, due = whole()
        found = self.micros.backward(BATCH)
        close = torch.equal if exactly else (lambda a, b: torch.allclose(a, b, atol=1e-6))
        return abs(found.item() - loss) < 1e-5 and all(map(close, gradients(self.model), due))


def test_the_whole_at_once_is_the_plain_step_to_the_bit() -> None:
    assert Scene(8).is_the_same(exactly=True) and Scene(100).is_the_same(exactly=True)


def test_layers_that_are_computed_again_give_the_same_bits() -> None:
    assert Scene(8, recompute=True).is_the_same(exactly=True)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7])
def test_pieces_add_up_to_the_same_gradient_also_where_the_last_is_smaller(rows: int) -> None:
    assert Scene(rows).is_the_same()


@pytest.mark.parametrize("after", [0, 1])
def test_what_does_not_fit_is_halved_and_the_batch_is_computed_anew(after: int) -> None:
    """Also where it is found in the midst of a batch: no row counts twice."""
    scene = Scene(4)
    scene.fits(2, after=after)
    assert scene.is_the_same()
    assert scene.asked[-4:] == [2, 2, 2, 2]
    assert scene.said == ["computes 2 of a batch's 8 rows at once: more does not fit"]
    scene.asked.clear()
    for parameter in scene.model.parameters():
        parameter.grad = None
    assert scene.is_the_same() and scene.asked == [2, 2, 2, 2], "and stays so"


def test_where_one_row_does_not_fit_layers_are_computed_again_and_then_it_is_told() -> None:
    scene = Scene(8)
    scene.fits(0, with_recompute=1)
    assert scene.is_the_same() and scene.asked[-8:] == [1] * 8
    assert scene.said[-1] == (
        "computes 1 of a batch's 8 rows at once, and each layer again on the way back: more does not fit"
    )
    scene = Scene(2)
    scene.fits(0)
    with pytest.raises(
        UserError, match="one row of 16 tokens does not fit .* CUDA out of memory.  Tried to$"
    ):
        scene.micros.backward(BATCH)
    assert not gradients(scene.model)


def test_nothing_is_told_where_all_of_it_fits() -> None:
    scene = Scene(8)
    scene.micros.tell(8)
    scene.micros.tell(3)  # the last batch of an epoch
    assert not scene.said


# ---- what fits, on paper -------------------------------------------------------------------------------------


def manifest(batch: int = 32, context: int = 128) -> Manifest:
    text = f"[model]\nlayers = 8\nwidth = 64\ncontext = {context}\n[data]\nbatch = {batch}\nlease_samples = 4096\n"
    return Manifest.from_toml(text, "run.toml")


def room_for(found: Manifest, rows: int, recompute: bool = False) -> float:
    return step_bytes(found, rows, recompute) / STEP_SHARE


def test_as_many_rows_as_fit_in_the_batch_or_a_half_a_quarter_of_it() -> None:
    found = manifest()
    assert shape_of_step(found, 1e12) == StepShape(32)
    assert shape_of_step(found, room_for(found, 32)) == StepShape(32)
    assert shape_of_step(found, room_for(found, 32) - 100) == StepShape(16)


def test_where_that_is_few_tokens_layers_are_computed_again_for_more_rows() -> None:
    found = manifest()
    assert shape_of_step(found, room_for(found, 15)) == StepShape(32, True)
    assert shape_of_step(found, room_for(found, 4, recompute=True)) == StepShape(4, True)
    assert shape_of_step(found, 0.0) == StepShape(1, True)
    assert step_bytes(found, 8, recompute=True) < step_bytes(found, 8) / 3


def test_a_batch_that_does_not_fit_at_once_is_no_reason_to_refuse_a_run() -> None:
    """Before, a small machine could not be in a run whose batch was made for a large one."""
    found = manifest(batch=4096)
    small = FreeMemory(None, 200e6)
    assert shape_here(found, MemoryRules.of(found), small) == StepShape(16), "2,048 tokens"
    assert shape_here(found, MemoryRules.of(found), FreeMemory(None, 64e9)) == StepShape(4096)
    on_gpu = shape_here(found, MemoryRules.of(found), FreeMemory(1e9, 64e9))
    assert on_gpu.rows < 4096, "the GPU's memory counts"
    assert shape_here(found, MemoryRules.of(found), FreeMemory(None, 0.0)) == StepShape(4096), (
        "it does not say"
    )
