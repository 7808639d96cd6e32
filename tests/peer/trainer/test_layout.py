"""`ModelLayout`: every kind of model goes into the flat vector and comes back, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from farflung.peer.trainer.layout import ModelLayout, unwrap
from farflung.protocol.errors import UserError
from farflung.protocol.limits import CONTROL_ARRAY_LEN
from farflung.protocol.model_schema import ModelSchema, TensorSpec

CHUNK = 16


class Mixed(nn.Module):
    """One of everything that has to work."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.Linear(4, 3)
        self.bf16 = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.fp16 = nn.Parameter(torch.randn(2, 2).to(torch.float16))
        self.fp64 = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.frozen = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.plain.weight
        self.bn = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.ones(4), persistent=False)


def exchanged(model: nn.Module) -> dict[str, Tensor]:
    layout = ModelLayout.of(model, CHUNK)
    flat = torch.zeros(layout.total_elements)
    layout.write_anchor(model, flat)
    return layout.named_tensors(flat)


def anchor_of(layout: ModelLayout, model: nn.Module) -> Tensor:
    flat = torch.full((layout.total_elements,), torch.nan)
    layout.write_anchor(model, flat)
    return flat


def parameter_model(**tensors: Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        setattr(model, name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor))
    return model


def padding_of(layout: ModelLayout, flat: Tensor) -> Tensor:
    used = torch.zeros(layout.total_elements, dtype=torch.bool)
    for entry in layout.entries:
        used[entry.offset : entry.offset + entry.numel] = True
    return flat[~used]


# ---- where things lie


def test_entries_come_in_order_and_buffers_start_on_a_chunk_of_their_own() -> None:
    layout = ModelLayout.of(Mixed(), CHUNK)
    params = [e for e in layout.entries if e.kind == "param"]
    buffers = [e for e in layout.entries if e.kind == "buffer"]
    # A module's own parameters come before those of its children: torch's order, not ours.
    assert [e.name for e in params] == [
        "bf16", "fp16", "fp64", "scalar", "empty", "turned",
        "plain.weight", "plain.bias", "bn.weight", "bn.bias"
    ]  # fmt: skip
    assert [e.name for e in buffers] == ["bn.running_mean", "bn.running_var"]
    assert [e.offset for e in params] == [0, 5, 9, 12, 13, 13, 19, 31, 34, 37]
    assert (params[-1].offset + params[-1].numel, buffers[0].offset) == (40, 48)
    assert (layout.first_plain_chunk, layout.chunk_count, layout.total_elements) == (3, 4, 64)
    assert [f.name for f in layout.frozen] == ["frozen"]
    assert layout.aliases == (("tied.weight", "plain.weight"),)


def test_a_model_without_float_buffers_has_no_plain_chunk() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("count", torch.tensor(3))
    layout = ModelLayout.of(model, CHUNK)
    assert layout.first_plain_chunk == layout.chunk_count == 2


# ---- values in and out


def test_values_come_back_bit_for_bit_and_tensors_are_never_replaced() -> None:
    source, target = Mixed(), Mixed()
    with torch.no_grad():
        source.fp64.copy_(source.fp64.to(torch.float32))  # the one dtype that fp32 has to round
        source.bn.running_mean.fill_(0.25)
        for parameter in target.parameters():
            parameter.zero_()
    layout = ModelLayout.of(source, CHUNK)
    flat = anchor_of(layout, source)
    assert torch.equal(padding_of(layout, flat), torch.zeros(layout.total_elements - 46))
    held = {name: (id(p), p.data_ptr(), p.stride()) for name, p in target.named_parameters()}
    layout.load(target, flat)
    assert held == {name: (id(p), p.data_ptr(), p.stride()) for name, p in target.named_parameters()}
    for name, value in exchanged(source).items():
        assert torch.equal(value, exchanged(target)[name]), name
    assert torch.equal(target.turned, source.turned)
    assert torch.equal(target.frozen, torch.zeros(2, 3))  # not exchanged


def test_the_exported_tensors_make_a_state_dict() -> None:
    model = Mixed()
    layout = ModelLayout.of(model, CHUNK)
    named = layout.named_tensors(anchor_of(layout, model))
    result = Mixed().load_state_dict(named, strict=False)
    assert result.unexpected_keys == []
    assert result.missing_keys == ["frozen"]
    assert named["bf16"].dtype == torch.bfloat16
    assert named["tied.weight"].data_ptr() != named["plain.weight"].data_ptr()
    nn.Linear(4, 3).load_state_dict(exchanged(nn.Linear(4, 3)), strict=True)


def test_the_delta_is_what_was_learned_plus_the_carry() -> None:
    model = Mixed()
    layout = ModelLayout.of(model, CHUNK)
    layout.load(model, anchor_of(layout, model))
    loaded = layout.snapshot(model)
    with torch.no_grad():
        model.scalar -= 0.5
        model.bf16.fill_(2.0)
        model.bn.running_var += 1.0
    carry = torch.full((layout.total_elements,), 0.125)
    out = torch.full((layout.total_elements,), torch.nan)
    layout.write_delta(model, loaded, carry, out)
    delta = {e.name: out[e.offset : e.offset + e.numel] for e in layout.entries}
    assert delta["scalar"].item() == 0.625
    assert torch.equal(delta["bf16"], loaded[0].float() - 2.0 + 0.125)
    assert torch.equal(delta["bn.running_var"], torch.full((3,), -0.875))
    assert torch.equal(delta["turned"], torch.full((6,), 0.125))
    assert not padding_of(layout, out).any()

    layout.write_delta(model, loaded, carry, carry)  # in place
    assert torch.equal(carry, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_the_anchor_is_not_learning(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 64).to(dtype)
    layout = ModelLayout.of(model, CHUNK)
    anchor = torch.randn(layout.total_elements)  # fp32 values that bf16 cannot hold
    layout.load(model, anchor)
    loaded = layout.snapshot(model)
    out = torch.empty(layout.total_elements)
    layout.write_delta(model, loaded, None, out)
    assert torch.equal(out, torch.zeros_like(out))


def test_small_steps_of_fp64_parameters_are_not_swallowed() -> None:
    model = parameter_model(w=torch.ones(2, dtype=torch.float64))
    layout = ModelLayout.of(model, 2)
    loaded = layout.snapshot(model)
    with torch.no_grad():
        model.w -= 2.0**-40
    out = torch.empty(2)
    layout.write_delta(model, loaded, None, out)
    assert out.tolist() == [2.0**-40] * 2


def test_infinities_that_stay_give_no_nan() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    layout = ModelLayout.of(model, CHUNK)
    out = torch.empty(layout.total_elements)
    layout.write_delta(model, layout.snapshot(model), None, out)
    assert not out.any()


def test_a_snapshot_does_not_follow_the_model() -> None:
    model = nn.Linear(2, 2)
    taken = ModelLayout.of(model, CHUNK).snapshot(model)
    before = taken[0].clone()
    with torch.no_grad():
        model.weight += 1.0
    assert torch.equal(taken[0], before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_a_gpu_gives_the_same_bits_as_on_the_cpu() -> None:
    on_cpu = Mixed()
    on_gpu = copy.deepcopy(on_cpu).cuda()
    layout = ModelLayout.of(on_gpu, CHUNK)
    assert layout.model_schema(on_gpu) == ModelLayout.of(on_cpu, CHUNK).model_schema(on_cpu)
    flat = anchor_of(layout, on_gpu)
    assert torch.equal(flat, anchor_of(layout, on_cpu))
    target = torch.randn(layout.total_elements)
    deltas = []
    for model in (on_cpu, on_gpu):
        layout.load(model, flat)
        loaded = layout.snapshot(model)
        layout.load(model, target)
        deltas.append(torch.empty(layout.total_elements))
        layout.write_delta(model, loaded, flat, deltas[-1])
    assert all(torch.equal(delta, deltas[0]) for delta in deltas)


# ---- parts of the flat vector


@pytest.mark.parametrize("border", [0, 1, 7, 16, 23, 45, 48])
def test_parts_come_and_go_as_the_whole_does_wherever_the_border_lies(border: int) -> None:
    """Also within a tensor, a transposed one, and one in bf16."""
    at_once, in_parts = Mixed(), Mixed()
    layout = ModelLayout.of(at_once, CHUNK)
    borders = [0, border, layout.total_elements]
    target = torch.randn(layout.total_elements, generator=torch.Generator().manual_seed(2))
    carry = torch.randn(layout.total_elements, generator=torch.Generator().manual_seed(3))
    deltas = [torch.full_like(target, torch.nan) for _ in range(2)]
    for model, delta, cuts in ((at_once, deltas[0], [0, borders[-1]]), (in_parts, deltas[1], borders)):
        layout.load(model, target)
        loaded = layout.snapshot(model)
        with torch.no_grad():
            for tensor in (*model.parameters(), model.bn.running_mean, model.bn.running_var):
                tensor.mul_(0.5)
        for start, stop in pairwise(cuts):
            layout.write_delta(model, loaded, carry[start:stop], delta[start:stop], start)
            layout.load(model, (target - delta)[start:stop], start)
            layout.refresh(model, loaded, start, stop - start)
        again = torch.empty_like(delta)
        layout.write_delta(model, loaded, None, again)
        assert not again.any(), "refreshed copies are what the model holds"
    assert torch.equal(deltas[0], deltas[1])
    for name, value in exchanged(at_once).items():
        assert torch.equal(value, exchanged(in_parts)[name]), name


def test_loading_a_part_leaves_every_other_bit_alone() -> None:
    model = Mixed()
    layout = ModelLayout.of(model, CHUNK)
    before = {name: value.clone() for name, value in exchanged(model).items()}
    for start in range(0, layout.total_elements - 1, 5):
        part = anchor_of(layout, model)[start : start + 5]
        layout.load(model, part, start)
    for name, value in exchanged(model).items():
        assert torch.equal(value, before[name].float().to(value.dtype)), name


# ---- tied, overlapping, wrapped


def test_two_parameters_on_one_memory_are_tied() -> None:
    weight = torch.randn(4, 4)
    layout = ModelLayout.of(parameter_model(a=weight, b=nn.Parameter(weight)), CHUNK)
    assert [e.name for e in layout.entries] == ["a"]
    assert layout.aliases == (("b", "a"),)


def test_a_frozen_second_name_of_a_trained_tensor_is_tied_not_frozen() -> None:
    weight = torch.randn(4, 4)
    model = parameter_model(a=nn.Parameter(weight, requires_grad=False), b=weight)
    layout = ModelLayout.of(model, CHUNK)
    assert [e.name for e in layout.entries] == ["b"]
    assert layout.frozen == ()
    assert layout.aliases == (("a", "b"),)


def test_slices_of_one_memory_are_fine_where_they_do_not_meet() -> None:
    memory = torch.randn(4, 6)
    model = parameter_model(left=memory[:, :3], right=memory[:, 3:])
    layout = ModelLayout.of(model, CHUNK)
    layout.load(model, torch.arange(32.0))
    assert memory[0].tolist() == [0, 1, 2, 12, 13, 14]


@pytest.mark.parametrize("other", [lambda m: m[2:6], lambda m: m.t(), lambda m: m.view(torch.bfloat16)[:3]])
def test_memory_shared_in_part_is_refused(other: object) -> None:
    memory = torch.randn(6, 6)
    with pytest.raises(UserError, match="'(first|second)' and '(first|second)' share part of their memory"):
        ModelLayout.of(parameter_model(first=memory, second=other(memory)), CHUNK)  # type: ignore[operator]


def test_frozen_parameters_may_share_memory_as_they_like() -> None:
    memory = torch.randn(6)
    model = parameter_model(w=torch.randn(2), a=memory[:4], b=memory[2:])
    model.a.requires_grad_(False)
    model.b.requires_grad_(False)
    assert [f.name for f in ModelLayout.of(model, CHUNK).frozen] == ["a", "b"]


def test_an_expanded_parameter_is_refused() -> None:
    with pytest.raises(UserError, match="'w' is a view whose elements share memory"):
        ModelLayout.of(parameter_model(w=torch.randn(3, 1).expand(3, 4)), CHUNK)


def test_wrappers_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    plain = ModelLayout.of(model, CHUNK)
    assert ModelLayout.of(torch.compile(model, backend="eager"), CHUNK) == plain
    assert ModelLayout.of(nn.DataParallel(model), CHUNK) == plain
    assert unwrap(torch.compile(nn.DataParallel(model), backend="eager")) is model
    inside = nn.Sequential(torch.compile(model[0], backend="eager"), model[1])
    assert ModelLayout.of(inside, CHUNK) == plain
    flat = anchor_of(plain, model) + 1.0
    plain.load(inside, flat)
    assert torch.equal(anchor_of(plain, model)[:12], flat[:12])


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
@pytest.mark.usefixtures("process_group")
def test_ddp_is_looked_through_and_a_sharded_parameter_is_what_it_is_as_a_whole() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    model = nn.Linear(3, 3)
    assert ModelLayout.of(nn.parallel.DistributedDataParallel(model), CHUNK) == ModelLayout.of(model, CHUNK)
    values = torch.randn(4, 3)
    mesh = init_device_mesh("cpu", (1,))
    sharded = parameter_model(w=nn.Parameter(DTensor.from_local(values, mesh, [Shard(0)])))
    layout = ModelLayout.of(sharded, CHUNK)
    assert layout == ModelLayout.of(parameter_model(w=values), CHUNK)
    assert torch.equal(anchor_of(layout, sharded)[:12], values.flatten())


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
@pytest.mark.usefixtures("process_group")
def test_what_cannot_be_exchanged_of_a_sharded_model_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (1,))
    partial = DTensor.from_local(torch.randn(4), mesh, [Partial()])
    with pytest.raises(UserError, match=r"'w' holds sums that are not added up yet \(Partial"):
        ModelLayout.of(parameter_model(w=partial), CHUNK)
    model = nn.Module()
    model._fsdp_wrapped_module = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"is sharded by FSDP1: use torch's fully_shard"):
        ModelLayout.of(model, CHUNK)


# ---- what is refused


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (parameter_model(w=torch.zeros(2, dtype=torch.complex64)), "parameter 'w' has dtype complex64"),
        (parameter_model(w=torch.zeros(2).to(torch.float8_e4m3fn)), "parameter 'w' has dtype float8_e4m3fn"),
        (parameter_model(w=torch.zeros(2, device="meta")), "parameter 'w' is on the meta device"),
        (parameter_model(w=torch.eye(2).to_sparse()), "parameter 'w' is sparse"),
        (nn.LazyLinear(3), "parameter 'weight' has no shape yet"),
        (nn.ReLU(), "no trainable parameter"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
        (parameter_model(w=torch.zeros(0)), "no trainable parameter"),
    ],
)
def test_models_that_cannot_be_exchanged_are_refused_by_name(model: nn.Module, text: str) -> None:
    with pytest.raises(UserError, match=text):
        ModelLayout.of(model, CHUNK)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_a_buffer_of_an_odd_dtype_is_refused_unless_it_is_local(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2).to(dtype))
    said = f"buffer 'scale' has dtype {str(dtype).removeprefix('torch.')}.*persistent=False"
    with pytest.raises(UserError, match=said):
        ModelLayout.of(model, CHUNK)
    model.register_buffer("scale", torch.ones(2).to(dtype), persistent=False)
    assert len(ModelLayout.of(model, CHUNK).entries) == 2


def test_a_nested_parameter_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(UserError, match="parameter 'w' is a nested tensor"):
        ModelLayout.of(parameter_model(w=nested), CHUNK)


def test_a_model_of_too_many_tensors_is_told_how_many_it_may_have() -> None:
    model = nn.ParameterList(torch.zeros(1) for _ in range(CONTROL_ARRAY_LEN + 1))
    with pytest.raises(
        UserError, match=f"has {CONTROL_ARRAY_LEN + 1} tensors .*at most {CONTROL_ARRAY_LEN} can be described"
    ):
        ModelLayout.of(model, 4096).model_schema(model)


def test_a_model_that_changed_after_joining_is_named() -> None:
    model = nn.Linear(2, 2)
    layout = ModelLayout.of(model, CHUNK)
    with pytest.raises(UserError, match=r"'weight' was float32 \[2, 2\], now it is float16 \[2, 2\]"):
        layout.load(model.half(), torch.zeros(layout.total_elements))
    with pytest.raises(UserError, match="now it is gone"):
        layout.snapshot(nn.Linear(2, 2, bias=False))


# ---- comparing with other peers


def test_the_schema_says_what_is_exchanged_tied_and_frozen() -> None:
    model = Mixed()
    schema = ModelLayout.of(model, CHUNK).model_schema(model)
    assert schema.tensors[0] == TensorSpec("bf16", (5,), "bfloat16", "param")
    kinds = [spec.kind for spec in schema.tensors]
    assert kinds == ["param"] * 10 + ["buffer"] * 2 + ["frozen", "alias"]
    assert schema.tensors[-1].name == "tied.weight = plain.weight"
    assert (schema.chunk_elements, schema.chunk_count, schema.first_plain_chunk) == (CHUNK, 4, 3)
    assert schema.frozen == ModelLayout.of(model, CHUNK).frozen_hash(model)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(schema), type=ModelSchema) == schema


def test_the_schema_hash_sees_every_part_of_the_description() -> None:
    def changed(change: object) -> bytes:
        model = Mixed()
        change(model)  # type: ignore[operator]
        return ModelLayout.of(model, CHUNK).model_schema(model).hash

    hashes = {
        changed(lambda m: None),
        changed(lambda m: m.bf16.requires_grad_(False)),
        changed(lambda m: setattr(m, "frozen", nn.Parameter(torch.zeros(3, 2), requires_grad=False))),
        changed(lambda m: m.frozen.data.add_(1)),
        changed(lambda m: setattr(m, "scalar", nn.Parameter(torch.zeros(1)))),
        changed(lambda m: setattr(m, "fp16", nn.Parameter(torch.zeros(2, 2)))),
        changed(lambda m: setattr(m.tied, "weight", nn.Parameter(torch.zeros(3, 4)))),
        changed(lambda m: setattr(m, "bn", nn.Identity())),
    }
    assert len(hashes) == 8
    assert changed(lambda m: None) in hashes


def test_tying_to_another_tensor_of_the_same_shape_is_another_model() -> None:
    def tied_to(name: str) -> bytes:
        model = parameter_model(a=torch.zeros(2), b=torch.zeros(2))
        model.c = getattr(model, name)
        return ModelLayout.of(model, CHUNK).model_schema(model).hash

    assert tied_to("a") != tied_to("b")


def test_what_the_wire_cannot_carry_is_refused_with_a_way_out() -> None:
    model = nn.Linear(100, 100)
    with pytest.raises(UserError, match="10100 chunks, at most 4096.*chunk_kb.*to 1 or more"):
        ModelLayout.of(model, 1).model_schema(model)
    long = parameter_model(**{"n" * 600: torch.zeros(2)})
    with pytest.raises(UserError, match="cannot be described"):
        ModelLayout.of(long, CHUNK).model_schema(long)
    many = parameter_model(**{f"{i:03}{'n' * 500}": torch.zeros(2) for i in range(400)})
    with pytest.raises(UserError, match="400 tensors; use fewer or shorter names"):
        ModelLayout.of(many, CHUNK).model_schema(many)


def test_frozen_values_are_covered_by_their_own_hash() -> None:
    model = Mixed()
    layout = ModelLayout.of(model, CHUNK)
    before = layout.frozen_hash(model)
    assert before == layout.frozen_hash(Mixed())
    with torch.no_grad():
        model.frozen[1, 2] = -0.0
    assert layout.frozen_hash(model) != before
    trainable = nn.Linear(2, 2)
    assert ModelLayout.of(trainable, CHUNK).frozen_hash(trainable) == bytes(32)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e5m2, torch.bfloat16]
)
def test_frozen_parameters_may_have_any_dtype(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    model.codes = nn.Parameter(torch.ones(3, 2).to(dtype).t(), requires_grad=False)
    model.one = nn.Parameter(torch.ones(()).to(dtype), requires_grad=False)
    model.none = nn.Parameter(torch.ones(0).to(dtype), requires_grad=False)
    assert any(ModelLayout.of(model, CHUNK).frozen_hash(model))
