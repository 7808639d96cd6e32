"""The court's sum and step are those of the owner and of every peer, bit for bit."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from farflung.collectives.arithmetic.merge import merged_chunk
from farflung.collectives.arithmetic.merge import square_length as length_of
from farflung.collectives.round.effects import Install, Roll
from farflung.compression.codec import codec_named, codec_names
from farflung.compression.plain_codecs import encode
from farflung.coordinator.court.proofs import ChunkRules, chunk_hash, merged, square_length
from farflung.optim.recipes import outer_of
from farflung.peer.state.outer_state import OuterState
from farflung.protocol.errors import FrameError
from farflung.protocol.manifest import (
    InnerSection,
    Manifest,
    MergeSection,
    OuterSection,
    PipelineSection,
    ResultCodecName,
    RoundSection,
)
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.outer_numbers import StateForm
from farflung.protocol.round_words import AUTO, SPARSE

NAMES = tuple(codec_names())
sizes = st.sampled_from((1.0, 1e-3, 1e-30, 1e-38, 1e-44, 1e30, 3e38))


def noise(count: int, scale: float, chance: np.random.Generator) -> NDArray[np.float32]:
    wide = chance.standard_normal(count) * scale
    wide[chance.random(count) < 0.2] = 0.0
    wide[chance.random(count) < 0.1] = -0.0
    return np.clip(wide, -3.4e38, 3.4e38).astype(np.float32)


# ---- the owner's sum -----------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    st.integers(0, 2**32),
    st.sampled_from(NAMES),
    st.lists(st.tuples(st.sampled_from(NAMES), sizes), min_size=1, max_size=5),
    st.sampled_from((0, 1, 63, 300, 4097)),
)
def test_P1_a_sum_is_that_of_its_owner(
    seed: int, result_codec: str, contributions: list[tuple[str, float]], elements: int
) -> None:
    chance = np.random.default_rng(seed)
    payloads = [encode(name, noise(elements, scale, chance)) for name, scale in contributions]
    shares = chance.random(len(payloads)) + 0.01
    weights = [float(np.float32(share / shares.sum())) for share in shares]
    wanted = merged_chunk(codec_named(result_codec), elements, payloads, weights)
    assert merged(result_codec, elements, payloads, weights) == wanted


def test_P9_a_sum_that_overflows_is_held_at_the_largest_number() -> None:
    payloads = [encode("fp32", np.full(5, 3.4e38, np.float32))] * 3
    weights = [1.0, 0.5, 0.25]
    for name in NAMES:
        assert merged(name, 5, payloads, weights) == merged_chunk(codec_named(name), 5, payloads, weights)


def test_P8_no_payload_is_summed_unchecked() -> None:
    good = encode("int8", np.ones(300, np.float32))
    for bad in (b"", good[:-1], good + b"\0", encode("int8", np.ones(299, np.float32)), bytes(len(good))):
        with pytest.raises(FrameError):
            merged("fp32", 300, [good, bad], [0.5, 0.5])
    with pytest.raises(FrameError, match="the sum of 1 contributions: value 0 is nan"):
        merged("fp32", 300, [good], [float("nan")])


# ---- how long a result is ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(NAMES), sizes, st.sampled_from((1, 2, 63, 65, 300, 4097)))
def test_P1_a_length_is_that_of_its_holders(seed: int, name: str, scale: float, elements: int) -> None:
    payload = encode(name, noise(elements, scale, np.random.default_rng(seed)))
    assert square_length(name, elements, payload) == length_of(elements, payload)


# ---- the step -------------------------------------------------------------------------------------------------

ELEMENTS, CHUNKS, FIRST_PLAIN = 257, 4, 3
MODEL = ModelSchema((), ELEMENTS, CHUNKS, FIRST_PLAIN, bytes(32))
OUTERS = (
    OuterSection(),
    OuterSection(lr=0.37, momentum=0.1),
    OuterSection(lr=1.0, momentum=0.0),
    OuterSection(step="mean"),
    OuterSection(step="mean", lr=0.3, momentum=0.5),
    OuterSection(step="adamw"),
    OuterSection(step="adamw", lr=0.37),
)


RESULTS = tuple(name for name in get_args(ResultCodecName) if name != AUTO)


def run(outer: OuterSection, codec: str = "fp32", rounds: int = 30) -> Manifest:
    if codec == SPARSE:
        outer = OuterSection(step="sparse", lr=outer.lr)
    manifest = Manifest(
        inner=InnerSection(schedule="linear"), outer=outer, round=RoundSection(gather_codec=codec)
    )
    return manifest.model_copy(update={"run": manifest.run.model_copy(update={"rounds": rounds})})


def peer_state(manifest: Manifest) -> OuterState:
    return OuterState(torch.zeros(CHUNKS * ELEMENTS), MODEL, manifest.round, outer_of(manifest))


def chunk_state(form: StateForm, values: NDArray[np.float32]) -> bytes:
    """Of some numbers, the state of one chunk: a second moment is nowhere below zero."""
    parts = values.reshape(form.parts, ELEMENTS).copy()
    parts[2:] = np.abs(parts[2:])
    return parts.tobytes()


@settings(max_examples=80)
@given(
    st.integers(0, 2**32), st.sampled_from(OUTERS), st.sampled_from(RESULTS), st.sampled_from((7, 30, 100))
)
def test_P1_a_chunk_after_each_of_some_results_is_what_every_peer_holds(
    seed: int, outer: OuterSection, codec: str, rounds: int
) -> None:
    chance = np.random.default_rng(seed)
    manifest = run(outer, codec, rounds)
    rules, peer = ChunkRules.of(manifest, MODEL), peer_state(manifest)
    scale = float(chance.choice([1.0, 1e-38, 1e-44, 1e15]))
    for chunk in range(CHUNKS):
        old = chunk_state(rules.form, noise(rules.form.parts * ELEMENTS, scale, chance))
        peer.install(Install(chunk, 0, old))
        for version in range(1, 5):
            payload = encode(codec, noise(ELEMENTS, scale * float(chance.choice([1.0, 1e-3])), chance))
            factor = float(np.float32(chance.choice([1.0, chance.random(), 0.0])))  # of its commit
            peer.roll(Roll(chunk, version, payload, factor))
            old = rules.after(old, payload, chunk, version, factor)
            assert old == peer.chunk_bytes(chunk)
    peer.seal()
    assert chunk_hash(old) == peer.hash_of(CHUNKS - 1)


def test_P1_a_chunk_with_rows_of_matrices_is_after_each_result_what_every_peer_holds() -> None:
    """Two matrices over three chunks, whose last rows reach over a border, and vectors between them."""
    shapes = ((20, 16), (5,), (9, 40), (11,))
    tensors = tuple(TensorSpec(f"w{n}", shape, "float32", "param") for n, shape in enumerate(shapes))
    model = ModelSchema(tensors, ELEMENTS, CHUNKS, FIRST_PLAIN, bytes(32), matrices=(0, 2))
    manifest = Manifest(
        outer=OuterSection(step="muon", lr=0.01),
        merge=MergeSection(policy="mean"),
        pipeline=PipelineSection(batch=4),
    )
    rules, chance = ChunkRules.of(manifest, model), np.random.default_rng(4)
    assert [len(rules.tiles_of(chunk)) for chunk in range(CHUNKS)] == [1, 2, 1, 0]
    state = torch.zeros(CHUNKS * ELEMENTS)
    peer = OuterState(state, model, manifest.round, outer_of(manifest))
    for chunk in range(CHUNKS):
        old = chunk_state(rules.form, noise(rules.form.parts * ELEMENTS, 1.0, chance))
        peer.install(Install(chunk, 0, old))
        for version in range(1, 4):
            payload = encode("fp32", noise(ELEMENTS, 1.0, chance))
            peer.roll(Roll(chunk, version, payload, 0.5))
            old = rules.after(old, payload, chunk, version, 0.5)
            assert old == peer.chunk_bytes(chunk)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(OUTERS))
def test_P1_any_numbers_step_alike(seed: int, outer: OuterSection) -> None:
    """But for NaN, which two infinite values of opposite signs make: its bits are each machine's own."""
    chance = np.random.default_rng(seed)

    def any_numbers(count: int) -> NDArray[np.float32]:
        values = chance.integers(0, 2**32, count, np.uint32).view(np.float32)
        return np.where(np.isfinite(values), values, np.float32(0))

    manifest, payload = run(outer), encode("fp32", any_numbers(ELEMENTS))
    rules, peer = ChunkRules.of(manifest, MODEL), peer_state(manifest)
    state = chunk_state(rules.form, any_numbers(rules.form.parts * ELEMENTS))
    for chunk in (0, FIRST_PLAIN):
        peer.install(Install(chunk, 0, state))
        peer.roll(Roll(chunk, 1, payload))
        came, wanted = rules.after(state, payload, chunk, 1), peer.chunk_bytes(chunk)
        numbers, theirs = np.frombuffer(came, np.float32), np.frombuffer(wanted, np.float32)
        assert (np.isnan(numbers) == np.isnan(theirs)).all()
        same = numbers.view(np.uint32) == theirs.view(np.uint32)
        assert (same | np.isnan(numbers)).all()


def test_a_factor_shortens_a_gradient_and_leaves_buffers_alone() -> None:
    manifest = run(OuterSection(step="mean", lr=1.0))
    rules, peer = ChunkRules.of(manifest, MODEL), peer_state(manifest)
    payload = encode("fp32", np.ones(ELEMENTS, np.float32))
    for chunk, moved in ((0, -0.25), (FIRST_PLAIN, -1.0)):
        peer.roll(Roll(chunk, 1, payload, 0.25))
        state = np.frombuffer(peer.chunk_bytes(chunk), np.float32)
        assert (state[:ELEMENTS] == moved).all()
        assert rules.after(bytes(rules.form.size_bytes), payload, chunk, 1, 0.25) == state.tobytes()


@pytest.mark.parametrize("outer", [OuterSection(), OuterSection(step="adamw")])
def test_moments_of_zeros_may_be_left_out(outer: OuterSection) -> None:
    rules = ChunkRules.of(run(outer), MODEL)
    theta, payload = np.ones(ELEMENTS, np.float32).tobytes(), encode("fp32", np.ones(ELEMENTS, np.float32))
    whole = theta + bytes((rules.form.parts - 1) * len(theta))
    assert rules.after(theta, payload, 0, 1) == rules.after(whole, payload, 0, 1)


def test_P1_the_step_of_adamw_depends_on_the_version_and_that_of_buffers_does_not() -> None:
    rules = ChunkRules.of(run(OuterSection(step="adamw")), MODEL)
    state = chunk_state(rules.form, np.full(3 * ELEMENTS, 0.5, np.float32))
    payload = encode("fp32", np.ones(ELEMENTS, np.float32))
    assert rules.after(state, payload, 0, 1) != rules.after(state, payload, 0, 2)
    assert rules.after(state, payload, FIRST_PLAIN, 1) == rules.after(state, payload, FIRST_PLAIN, 2)
    moved = np.frombuffer(rules.after(state, payload, FIRST_PLAIN, 1), np.float32).reshape(3, -1)
    assert (moved[0] == -0.5).all() and (moved[1:] == 0.5).all(), "buffers take the mean"


def test_P8_what_is_no_state_or_no_result_is_a_frame_error() -> None:
    rules = ChunkRules.of(run(OuterSection(), "int8"), MODEL)
    old, payload = bytes(8 * ELEMENTS), encode("int8", np.ones(ELEMENTS, np.float32))
    assert len(rules.after(old, payload, 0, 1)) == 8 * ELEMENTS
    for bad in (b"", old[:-1], old + b"\0", old + old):
        with pytest.raises(FrameError, match="a state chunk of"):
            rules.after(bad, payload, 0, 1)
    for bad in (b"", payload[:-1], encode("fp32", np.ones(ELEMENTS, np.float32))):
        with pytest.raises(FrameError, match="int8 payload"):
            rules.after(old, bad, 0, 1)
