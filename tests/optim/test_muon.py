"""Muon as the outer step: the same bits in numpy and in torch, whoever multiplies; and the step that all know."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor, nn

from farflung.compression.plain_codecs import encode
from farflung.coordinator.court.proofs import ChunkRules
from farflung.optim.inner import outer_matrices
from farflung.optim.outer import AdamW, Muon, advance, orthogonal, outer_step_for, sum_by_halves
from farflung.peer.builtin.llama import Llama
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest, ModelSection
from farflung.protocol.model_schema import ModelSchema, StageSpec, TensorSpec, first_difference
from farflung.protocol.outer_numbers import (
    MUON_ITERATIONS,
    MUON_LEAST_NORM,
    MUON_ONE,
    MUON_POLYNOMIAL,
    AdamWNumbers,
    MuonNumbers,
    StateForm,
    Tile,
)

Floats = NDArray[np.float32]
REST = AdamWNumbers(4e-4, 4e-5, 10, 1000, 0.9, 0.95, 0.1)
NUMBERS = MuonNumbers(REST, 0.95)
RUN = """
[outer]
step = "muon"
{outer}
[merge]
policy = "mean"
[pipeline]
batch = 8
{pipeline}
"""


def manifest(outer: str = "", pipeline: str = "") -> Manifest:
    return Manifest.from_toml(RUN.format(outer=outer, pipeline=pipeline), "run.toml")


# ---- the matrix ---------------------------------------------------------------------------------------------------


def in_floating_point(values: Tensor) -> Tensor:
    """The iteration as papers have it, in fp64."""
    x = values.double()
    x = x / max(float(x.norm()), 1e-7)
    a, b, c = MUON_POLYNOMIAL
    for _ in range(MUON_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (16, 64), (64, 16), (96, 96)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e12])
def test_it_is_the_iteration_of_the_papers_and_its_singular_values_are_about_one(
    shape: tuple[int, int], scale: float
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale
    found, wanted = torch.from_numpy(orthogonal(values.numpy())), in_floating_point(values)
    assert found.dtype == torch.float32 and found.shape == values.shape
    assert torch.allclose(found.double(), wanted, atol=2e-4)
    singular = torch.linalg.svdvals(found)
    # Of the smallest ones of a square matrix five iterations make less.
    assert singular.max() < 1.21 and singular[: max(1, min(shape) * 3 // 4)].min() > 0.6


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 70), st.integers(1, 70), st.sampled_from((1e-30, 1e-6, 1.0, 1e18))
)
def test_P1_numpy_and_torch_end_with_the_same_bits(seed: int, rows: int, columns: int, scale: float) -> None:
    chance = np.random.default_rng(seed)
    values = chance.standard_normal((rows, columns)) * scale * 10.0 ** chance.integers(-4, 1, (rows, 1))
    values[chance.random((rows, columns)) < 0.1] = 0.0
    values[chance.random((rows, columns)) < 0.1] = -0.0
    fp32 = values.astype(np.float32)
    assert by_torch(torch.from_numpy(fp32.copy())).numpy().tobytes() == orthogonal(fp32).tobytes()


def by_torch(values: Tensor) -> Tensor:
    """The same operations by another library, whose products add in another order."""
    wide = values.double()
    norm = max(math.sqrt(sum_by_halves((wide * wide).view(-1).numpy())), MUON_LEAST_NORM)
    is_tall = wide.shape[0] > wide.shape[1]
    x = (wide.t().contiguous() if is_tall else wide).mul_(MUON_ONE / norm).round_()
    a, b, c = MUON_POLYNOMIAL
    for _ in range(MUON_ITERATIONS):
        square = (x @ x.t()).mul_(1.0 / MUON_ONE).round_()
        fourth = square @ square
        square.mul_(b).add_(fourth.mul_(c / MUON_ONE)).round_()
        more = square @ x
        x.mul_(a).add_(more.mul_(1.0 / MUON_ONE)).round_()
    x.mul_(1.0 / MUON_ONE).add_(0.0)
    return (x.t().contiguous() if is_tall else x).float()


def test_P1_the_order_in_which_a_library_adds_makes_no_difference() -> None:
    """Columns in another order are other sums.  Values are small whole numbers, so that the norm is the same one."""
    chance = np.random.default_rng(3)
    values = chance.integers(-40, 41, (48, 300)).astype(np.float32)
    for _ in range(5):
        order = chance.permutation(300)
        turned = np.ascontiguousarray(values[:, order])
        assert orthogonal(turned).tobytes() == orthogonal(values)[:, order].tobytes()


def test_P1_products_are_those_of_whole_numbers() -> None:
    """Also of a matrix whose directions are all as long as they can be: no sum leaves what fp64 has exactly."""
    turned, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((24, 24)))
    for x in (np.rint(turned * 1.21 * MUON_ONE), np.rint(np.eye(24) * 1.21 * MUON_ONE)):
        whole = x.astype(np.int64).astype(object)
        exact = whole @ whole.T
        assert max(abs(int(each)) for each in exact.ravel()) < 2**53
        assert ((x @ x.T).astype(np.int64).astype(object) == exact).all()


def test_a_matrix_of_zeros_stays_one_and_a_zero_has_one_sign() -> None:
    for zeros in (np.zeros((3, 5), np.float32), -np.zeros((5, 3), np.float32)):
        assert not orthogonal(zeros).view(np.int32).any()
    half = np.zeros((4, 6), np.float32)
    half[1] = -np.arange(1.0, 7.0)
    assert not orthogonal(half)[0].view(np.int32).any()


# ---- the step -----------------------------------------------------------------------------------------------------


def stepped(numbers: MuonNumbers, tiles: Sequence[Tile], count: int, versions: int) -> tuple[bytes, bytes]:
    """A chunk's state after so many steps of a peer, and of the court."""
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(count, generator=generator), torch.zeros(count), torch.zeros(count)]
    rules = ChunkRules(numbers, "fp32", StateForm(count, 3), lambda chunk: False, lambda chunk: tuple(tiles))
    state = b"".join(part.numpy().tobytes() for part in parts)
    for version in range(1, versions + 1):
        d_n = torch.randn(count, generator=generator)
        state = rules.after(state, encode("fp32", d_n.numpy()), 0, version, 0.5)
        advance(outer_step_for(numbers), parts, d_n, version, 0.5, tiles)
    return b"".join(part.numpy().tobytes() for part in parts), state


def test_P1_a_chunk_of_matrices_and_other_values_has_the_same_bits_at_a_peer_and_in_court() -> None:
    tiles = (Tile(3, 8, 5), Tile(43, 4, 10), Tile(90, 1, 7))
    peers, courts = stepped(NUMBERS, tiles, 100, 12)
    assert peers == courts
    assert stepped(NUMBERS, (), 100, 3)[0] != stepped(NUMBERS, tiles, 100, 3)[0]


def test_what_is_in_no_matrix_takes_the_step_of_adamw() -> None:
    generator = torch.Generator().manual_seed(6)
    tile, count = Tile(10, 4, 5), 40
    parts = [torch.randn(count, generator=generator), torch.zeros(count), torch.zeros(count)]
    alone = [part.clone() for part in parts]
    for version in (1, 2, 3):
        d_n = torch.randn(count, generator=generator)
        AdamW(REST).step(alone[0], alone[1], alone[2], d_n, version)
        Muon(NUMBERS).step(parts, d_n, version, [tile])
    inside = torch.zeros(count, dtype=torch.bool)
    inside[tile.first : tile.stop] = True
    for mine, theirs in zip(parts, alone, strict=True):
        assert torch.equal(mine[~inside], theirs[~inside])
    assert not parts[2][inside].any(), "it has no second moment"
    assert not torch.isclose(parts[0][inside], alone[0][inside], atol=1e-6).all()


def test_it_is_the_step_of_torch_within_the_rounding_of_its_bf16() -> None:
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(24, 40, generator=generator)
    theirs = nn.Parameter(theta.clone())
    optimizer = torch.optim.Muon([theirs], 1e-2, 0.1, 0.95, adjust_lr_fn="match_rms_adamw")
    mine = [theta.reshape(-1), torch.zeros(960), torch.zeros(960)]
    numbers = MuonNumbers(AdamWNumbers(1e-2, 1e-2, 0, 9, 0.9, 0.95, 0.1), 0.95)
    before = theta.clone()
    for version in range(1, 21):
        d = torch.randn(24, 40, generator=generator)
        theirs.grad = d.clone()
        optimizer.step()
        Muon(numbers).step(mine, d.reshape(-1), version, [Tile(0, 24, 40)])
    off = (mine[0].view(24, 40) - theirs.detach()).norm() / (theirs.detach() - before).norm()
    assert off < 0.02
    assert mine[1].abs().max() > 0


def test_one_huge_value_makes_no_nan() -> None:
    parts = [torch.zeros(12), torch.zeros(12), torch.zeros(12)]
    for version, huge in enumerate((3e38, -3e38, 1.0), 1):
        Muon(NUMBERS).step(parts, torch.full((12,), huge), version, [Tile(0, 3, 4)])
        assert all(torch.isfinite(part).all() for part in parts)


def test_the_rate_of_a_matrix_is_as_long_a_step_as_adamw_takes() -> None:
    by = NUMBERS.at(500, Tile(0, 16, 64))
    assert by.rate == pytest.approx(REST.lr_at(500) * 0.2 * 8.0)
    assert by.decay == REST.at(500).decay and by.keep_m == pytest.approx(0.95)


# ---- which values are in a matrix ---------------------------------------------------------------------------------


def schema(shapes: Sequence[tuple[int, ...]], matrices: Sequence[int], size: int, chunks: int) -> ModelSchema:
    tensors = tuple(TensorSpec(f"w{n}", shape, "float32", "param") for n, shape in enumerate(shapes))
    return ModelSchema(tensors, size, chunks, chunks, bytes(32), matrices=tuple(matrices))


def test_tiles_are_the_whole_rows_that_lie_in_a_chunk() -> None:
    model = schema([(3,), (5, 4), (2, 2)], [1], 8, 4)
    # Values 3..23 are the matrix: its rows begin at 3, 7, 11, 15, 19; chunks at 0, 8, 16, 24.
    assert model.tiles(range(4)) == {0: (Tile(3, 1, 4),), 1: (Tile(3, 1, 4),), 2: (Tile(3, 1, 4),)}
    assert model.tiles(range(1, 2)) == {1: (Tile(3, 1, 4),)}
    whole = schema([(3,), (5, 4), (2, 2)], [1, 2], 64, 1)
    assert whole.tiles(range(1)) == {0: (Tile(3, 5, 4), Tile(23, 2, 2))}
    assert schema([(3,), (5, 4)], [], 64, 1).tiles(range(1)) == {}
    assert schema([(2, 100)], [0], 16, 13).tiles(range(13)) == {}, "a row longer than a chunk is in no tile"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 40))
def test_every_tile_lies_in_its_chunk_and_no_value_is_in_two(
    shapes: list[tuple[int, int]], size: int
) -> None:
    chunks = -(-sum(math.prod(each) for each in shapes) // size)
    model = schema(shapes, range(len(shapes)), size, chunks)
    starts = [sum(math.prod(each) for each in shapes[:n]) for n in range(len(shapes))]
    rows = {
        (start + row * columns, columns)
        for start, (count, columns) in zip(starts, shapes, strict=True)
        for row in range(count)
        if (start + row * columns) // size == (start + (row + 1) * columns - 1) // size
    }
    found = set()
    for chunk, tiles in model.tiles(range(chunks)).items():
        for tile in tiles:
            assert tile.stop <= size
            firsts = [chunk * size + tile.first + row * tile.columns for row in range(tile.rows)]
            assert not found & {(first, tile.columns) for first in firsts}
            found |= {(first, tile.columns) for first in firsts}
    assert found == rows


def test_stages_begin_with_a_chunk_of_their_own_and_nonsense_is_no_matrix() -> None:
    tensors = tuple(
        TensorSpec(f"w{number}", shape, "float32", kind)
        for number, (shape, kind) in enumerate(
            [((2, 3), "param"), ((2, 3), "buffer"), ((3, 2), "param"), ((-1, 2), "param"), ((4,), "param")]
        )
    )
    stages = (StageSpec(0, 0, 2, 1), StageSpec(1, 2, 2, 0))
    model = ModelSchema(tensors, 8, 4, 4, bytes(32), stages, matrices=(0, 1, 2, 3, 4, 99))
    assert model.tiles(range(4)) == {0: (Tile(0, 2, 3),), 2: (Tile(0, 3, 2),)}


def test_a_models_matrices_are_its_hidden_ones() -> None:
    model = Llama(ModelSection(layers=2, width=16, heads=2, context=8))
    layout = ModelLayout.of(model, 4096)
    found = layout.model_schema(model, with_matrices=True)
    assert layout.model_schema(model).matrices == ()
    names = {found.tensors[number].name for number in found.matrices}
    assert names and all(name.startswith("model.layers.") and name.endswith(".weight") for name in names)
    assert all(len(found.tensors[number].shape) == 2 for number in found.matrices)
    other = layout.model_schema(model)
    told = "hidden matrices for Muon: 0 here, 14 ('model.layers.0.self_attn.q_proj.weight' too) in the run"
    assert str(first_difference(other, found)).startswith(told)
    # What a stranger says may be nonsense.
    assert first_difference(replace(found, matrices=(99, *found.matrices)), found) is not None
    assert first_difference(replace(found, matrices=found.matrices * 2), found) is not None
    with pytest.raises(UserError, match="no hidden weight matrix"):
        flat = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 9))
        ModelLayout.of(flat, 64).model_schema(flat, with_matrices=True)


def test_the_last_layer_is_the_last_of_all_parts() -> None:
    parts = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.LayerNorm(3)]
    assert [id(p) for p in outer_matrices(parts)] == [id(parts[0].weight), id(parts[1][0].weight)]
    assert [id(p) for p in outer_matrices([nn.Sequential(*parts)])] == [id(p) for p in outer_matrices(parts)]


# ---- run.toml -----------------------------------------------------------------------------------------------------


def test_its_numbers_are_those_of_outer_and_inner() -> None:
    found = manifest("lr = 0.02\nmomentum = 0.9").outer_numbers
    assert isinstance(found, MuonNumbers)
    assert (found.momentum, found.rest.lr, found.rest.last_lr, found.parts) == (0.9, 0.02, 0.02, 3)
    usual = manifest().outer_numbers
    assert isinstance(usual, MuonNumbers) and usual.momentum == 0.95 and usual.rest.lr == 4e-4
    assert manifest("", "stages = 2").fragments == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[outer]\nstep = "muon"', '"muon" takes the gradient of a batch.*found batch = 0'),
        (RUN.format(outer="", pipeline='stages = 2\nmode = "local"'), 'found mode = "local"'),
    ],
)
def test_where_there_is_no_gradient_of_a_batch_it_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        Manifest.from_toml(text, "run.toml")
