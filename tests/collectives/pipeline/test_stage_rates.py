"""How fast a seat can be and which stage is the narrow one, by the arithmetic of a model of a billion parameters."""

from __future__ import annotations

import math

import pytest

from farflung.collectives.pipeline.crossing import border_after
from farflung.collectives.pipeline.seats import (
    COMPUTE,
    FEW_SEATS,
    LINE_DOWN,
    LINE_UP,
    SeatPace,
    Traffic,
    borders_of,
    line_rate,
    narrowest,
    seat_pace,
    stage_rate,
    traffic_of,
)
from farflung.compression.codec import codec_named
from farflung.protocol.manifest import PipelineSection
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec, TensorSpec

MB = 1e6


def model_of(*gives: tuple[BorderTensor, ...], riders: tuple[BorderTensor, ...] = ()) -> ModelSchema:
    """Of one stage more than borders."""
    specs = [StageSpec(n, n, 1, 0, tensors) for n, tensors in enumerate((*gives, ()))]
    tensors = tuple(TensorSpec(f"w{n}", (4,), "float32", "param") for n in range(len(specs)))
    return ModelSchema(tensors, 4, len(specs), len(specs), bytes(32), tuple(specs), riders)


WIDE = (BorderTensor("float32", (2048, 2048)),)
FOUR = model_of(WIDE, WIDE, WIDE)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_bytes_are_those_of_real_crossings(codec: str) -> None:
    """But for their heads: the coordinator and the doctor have no codec."""
    gives = (BorderTensor("float32", (300, 70)), BorderTensor("int64", (9,)))
    model = model_of(gives, riders=(BorderTensor("int32", (11,), "labels"),))
    pipeline = PipelineSection(stages=2, micro=3, codec=codec)  # type: ignore[arg-type]
    real = border_after(0, model, pipeline, lambda name, elements: codec_named(name).payload_bytes(elements))
    [border] = borders_of(model, 3)
    for mine, backwards in ((border.onwards_bytes(codec), False), (border.back_bytes(codec), True)):
        assert 0 <= real.most_bytes(backwards) - mine <= 100 + 0.005 * mine


def test_a_billion_parameters_in_four_stages_on_home_lines() -> None:
    """docs/pipelines.md: two crossings up and two down in the middle, one each at the ends."""
    borders = borders_of(FOUR, 1)
    traffic = [traffic_of(borders, stage, "int8") for stage in range(4)]
    assert [round(each.up_bytes / MB, 2) for each in traffic] == [4.23, 8.45, 8.45, 4.23]
    assert [each.down_bytes for each in traffic] == [each.up_bytes for each in traffic]
    line = 200e6 / 8
    middle = seat_pace(0.138, traffic[1], line, line)
    assert middle.by == LINE_UP and math.isclose(1 / (middle.micros_per_s or 0), 0.338, rel_tol=0.01)
    assert seat_pace(0.5, traffic[1], line, line) == SeatPace(2.0, COMPUTE)
    assert line_rate(traffic_of(borders, 1, "int4"), line, line)[0] == pytest.approx(5.61, abs=0.01)


def test_what_only_goes_onwards_costs_the_way_back_nothing() -> None:
    riders = (BorderTensor("int64", (100,), "labels"),)
    [border] = borders_of(model_of((BorderTensor("float32", (10,)),), riders=riders), 2)
    assert (border.onwards_bytes("fp32"), border.back_bytes("fp32")) == (80 + 1600, 80)
    first, last = (traffic_of([border], stage, "fp32") for stage in (0, 1))
    assert traffic_of([], 1, "fp32") == Traffic(0, 0), "before anybody said what the model is"
    assert (first, last) == (Traffic(1680, 80), Traffic(80, 1680))


def test_what_is_not_known_limits_nothing_and_without_a_unit_nothing_is_said() -> None:
    assert seat_pace(0.0, Traffic(10, 10), 1.0, 1.0) == SeatPace(None)
    assert seat_pace(0.5, Traffic(10, 10), 0, 0) == SeatPace(2.0, COMPUTE)
    assert seat_pace(0.5, Traffic(10, 10), 0, 5) == SeatPace(0.5, LINE_DOWN)
    assert stage_rate([SeatPace(1.0, COMPUTE), SeatPace(None)]) is None and stage_rate([]) is None
    assert line_rate(Traffic(0, 0), 1.0, 1.0)[0] == math.inf


def of(rate: float, by: str = COMPUTE) -> SeatPace:
    return SeatPace(rate, by)


@pytest.mark.parametrize(
    ("stages", "least", "found"),
    [
        ([[of(4)] * 2, [of(4)]], 1, (1, FEW_SEATS)),  # as fast each, and one less
        ([[of(4)] * 2, [of(1), of(1)]], 1, (1, COMPUTE)),
        ([[of(4)] * 2, [of(1, LINE_UP), of(1, LINE_UP), of(1)]], 1, (1, LINE_UP)),
        ([[of(4)], []], 1, (1, FEW_SEATS)),
        ([[of(9)], [of(1)] * 2], 2, (0, FEW_SEATS)),  # however fast it is
        ([[of(4)], [SeatPace(None)]], 1, None),
        ([[of(4)]], 1, (0, COMPUTE)),
        ([[of(4)] * 2, [of(4)] * 2], 1, (0, COMPUTE)),
        ([[of(9)] * 2, [of(1)]], 1, (1, COMPUTE)),  # one less, and slow as well
        (
            [[of(16)], [of(16)] * 2, [of(33)] * 2],
            1,
            (0, FEW_SEATS),
        ),  # one more, and it is the slowest no more
    ],
)
def test_the_narrow_stage_and_why(
    stages: list[list[SeatPace]], least: int, found: tuple[int, str] | None
) -> None:
    assert narrowest(stages, [len(seats) for seats in stages], least) == found


def test_who_will_sit_down_when_a_batch_begins_is_not_missing() -> None:
    assert narrowest([[], []], [1, 1], 1) is None
    assert narrowest([[], []], [2, 1], 2) == (1, FEW_SEATS)
