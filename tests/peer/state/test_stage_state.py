"""The outer state of one stage: memory for its own chunks alone, under their numbers in the whole model."""

from __future__ import annotations

from io import BytesIO

import pytest
import torch

from farflung.collectives.round.effects import Install, Roll
from farflung.compression.codec import codec_named
from farflung.optim.recipes import outer_of
from farflung.peer.machine.effects import Encode
from farflung.peer.state.keeping_state import name_on_disk
from farflung.peer.state.outer_state import Files, OuterState
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Show, What
from farflung.protocol.model_schema import ModelSchema, StageSpec, TensorSpec
from farflung.protocol.run_terms import Attached, Known

ELEMENTS = 4
MANIFEST = Manifest.from_toml(
    '[run]\nname = "demo"\n[merge]\npolicy = "mean"\n[round]\ncodec = "fp32"\ngather_codec = "fp32"\n'
    '[outer]\nstep = "adamw"\nlr = 0.1\n[pipeline]\nstages = 3\nbatch = 8\n',
    "run.toml",
)
# Stages of 2, 3 and 2 chunks; the last chunk of stage 1 holds buffers.
MODEL = ModelSchema(
    (TensorSpec("w", (28,), "float32", "param"),),
    ELEMENTS,
    7,
    7,
    bytes(32),
    (StageSpec(0, 0, 2, 0), StageSpec(1, 0, 3, 1), StageSpec(2, 0, 2, 0)),
)


def attached(*stages: int) -> Attached:
    return Attached(Known(MANIFEST, bytes(16)), MODEL, stages)


def state_of(*stages: int, before: BytesIO | None = None) -> OuterState:
    """Each chunk's values are its number."""
    held = attached(*stages).held
    chunks = [float(chunk) for fragment in held for chunk in fragment.chunks]
    anchor = torch.tensor(chunks).repeat_interleave(ELEMENTS)
    return OuterState(anchor, MODEL, MANIFEST.round, outer_of(MANIFEST), files=Files(before), held=held)


def result(value: float) -> bytes:
    return codec_named("fp32").encode(torch.full((ELEMENTS,), value))


def show(what: What, chunk: int) -> Show:
    return Show(
        session=bytes(16),
        seq=1,
        question=1,
        what=what,
        fragment=1,
        version=0,
        round_no=0,
        chunk=chunk,
        peer="",
        start=0,
    )


def test_P1_a_stage_is_bit_for_bit_what_it_is_in_the_whole_model() -> None:
    whole, part = state_of(0, 1, 2), state_of(1)
    for state in (whole, part):
        state.seal(1)
        for chunk in (2, 3, 4):
            state.roll(Roll(chunk, 1, result(0.25)))
    assert part.seal(1) == whole.seal(1) and part.manifest_bytes(1) == whole.manifest_bytes(1)
    assert [part.chunk_bytes(chunk) for chunk in (2, 3, 4)] == [whole.chunk_bytes(c) for c in (2, 3, 4)]
    nonce = bytes(range(32))
    assert part.prove_holding(1, nonce) == whole.prove_holding(1, nonce)
    buffers = torch.frombuffer(bytearray(part.chunk_bytes(4)), dtype=torch.float32)[:ELEMENTS]
    assert buffers.tolist() == [3.75] * ELEMENTS, "they take the mean, without a step"


def test_it_has_no_memory_for_other_stages() -> None:
    part = state_of(1)
    for chunk in (1, 5):
        with pytest.raises((KeyError, IndexError, StopIteration)):
            part.install(Install(chunk, 0, bytes(12 * ELEMENTS)))


def test_its_slot_holds_its_own_values_alone_and_a_result_names_the_element_of_the_model() -> None:
    part = state_of(1)
    slot = torch.arange(3.0 * ELEMENTS)
    assert part.part(slot, 1).tolist() == slot.tolist()
    encode = Encode(round_no=1, slot=0, codec="fp32", order=(0, 1, 2), fragment=1)
    [(made, problem)] = list(part.encode(slot, encode))
    assert not problem and sorted(made) == [0, 1, 2]
    decoded = codec_named("fp32").decode(bytes(made[2]), ELEMENTS)
    assert decoded.tolist() == slot[8:].tolist()
    slot[1] = float("nan")
    [(_, problem)] = list(part.encode(slot, encode))
    assert "element 9 " in problem, "2 chunks of stage 0, and one more"


def test_what_chunks_were_before_is_kept_from_the_beginning_of_its_file_on() -> None:
    file = BytesIO()
    part = state_of(1, before=file)
    part.seal(1)
    part.keep_before(1, 0)
    was = part.chunk_bytes(3)
    part.roll(Roll(3, 1, result(1.0)))
    assert part.shown(show(What.BEFORE, 3)) == (0).to_bytes(8, "little") + was
    assert len(file.getvalue()) == 2 * len(was), "not behind room for stage 0"


def test_what_a_peer_keeps_of_a_stage_lies_apart_from_what_it_keeps_of_another() -> None:
    names = {name_on_disk(attached(*stages), "ann") for stages in ((), (0,), (1,))}
    assert len(names) == 3
    assert len({attached(*stages).name for stages in ((), (0,), (1,))}) == 3, "and is none of the others'"
