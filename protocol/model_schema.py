"""What a model looks like to the run: a line per exchanged tensor, the first difference of two, and its fragments.

A schema is made by the peer from its model, kept by the coordinator from the first peer, compared at hello.  Fragments
are the model's chunks cut into consecutive ranges, each synchronised on its own, by its own versions.  Chunks keep the
numbers that they have in the whole model everywhere outside; `index` is a chunk's place within its fragment, in plans
and masks.  No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta, Struct

from farflung.protocol import hf_config
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT, CONTROL_ARRAY_LEN, FRAGMENTS_MAX
from farflung.protocol.outer_numbers import Tile
from farflung.protocol.round_words import Count, Hash

# The same tokens go into every fragment: the commits of this one count them, and tell the loss.
BOOKS_FRAGMENT = 0


@dataclass(frozen=True, slots=True)
class Fragment:
    number: int
    first: int  # its first chunk
    count: int

    @property
    def chunks(self) -> range:
        return range(self.first, self.first + self.count)

    def index(self, chunk: int) -> int:
        return chunk - self.first


def fragments_of(chunk_count: int, fragments: int) -> tuple[Fragment, ...]:
    """All chunks are of one size, so ranges that differ by at most one chunk are balanced by bytes."""
    if fragments > chunk_count:
        chunks = "1 chunk" if chunk_count == 1 else f"{chunk_count} chunks"
        raise UserError(
            f"[round] fragments: the model has {chunks}, too few for {fragments} fragments; "
            "lower fragments or chunk_kb in run.toml"
        )
    ends = [number * chunk_count // fragments for number in range(fragments + 1)]
    return tuple(
        Fragment(number, ends[number], ends[number + 1] - ends[number]) for number in range(fragments)
    )


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    name: Annotated[str, Meta(max_length=512)]
    shape: Annotated[tuple[int, ...], Meta(max_length=16)]
    dtype: Annotated[str, Meta(max_length=32)]
    kind: Annotated[str, Meta(max_length=16)]  # param, buffer, alias, frozen


class BorderTensor(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What passes from a stage to the next one with each sample: its shape is that of one."""

    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    name: Annotated[str, Meta(max_length=512)] = ""  # of a rider

    def __str__(self) -> str:
        return f"{self.name and self.name + ' '}{self.dtype} {list(self.shape)}"


class StageSpec(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A stage of a model that is cut into several: parts [first_part, ...) in chunks of its own."""

    first_part: Count
    first_tensor: Count  # of the schema's tensors
    chunk_count: Annotated[int, Meta(ge=1, le=CHUNKS_PER_FRAGMENT)]
    plain_chunks: Count  # the last of these hold buffers
    # To the next stage, besides the riders; nothing of the last one.
    gives: Annotated[tuple[BorderTensor, ...], Meta(max_length=16)] = ()


class ModelSchema(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=CONTROL_ARRAY_LEN)]
    chunk_elements: Annotated[int, Meta(ge=1)]
    chunk_count: Annotated[int, Meta(ge=1, le=CHUNKS_PER_FRAGMENT * FRAGMENTS_MAX)]
    first_plain_chunk: Count  # from here on buffers: averaged, without momentum; with stages `chunk_count`
    frozen: Hash  # content of what is not trained: equal everywhere, never sent
    # Empty: the model is in one piece.  Else each stage is a fragment, and `is_plain` says which chunks hold buffers.
    stages: Annotated[tuple[StageSpec, ...], Meta(max_length=FRAGMENTS_MAX)] = ()
    riders: Annotated[tuple[BorderTensor, ...], Meta(max_length=16)] = ()  # over every border, in this order
    # Of a run with `[outer] step = "muon"`: which of the tensors are hidden matrices.
    matrices: Annotated[tuple[Count, ...], Meta(max_length=CONTROL_ARRAY_LEN)] = ()

    def fragments(self, count: int) -> tuple[Fragment, ...]:
        """`count`: as the manifest has it.  UserError if this model can't be cut into so many."""
        if not self.stages:
            return fragments_of(self.chunk_count, count)
        if len(self.stages) != count:
            raise UserError(f"the model is cut into {len(self.stages)} stages, the run has {count}")
        ends = list(accumulate((stage.chunk_count for stage in self.stages), initial=0))
        return tuple(
            Fragment(number, first, stop - first) for number, (first, stop) in enumerate(pairwise(ends))
        )

    def is_plain(self, chunk: int) -> bool:
        """It holds buffers: averaged, without momentum."""
        if not self.stages:
            return chunk >= self.first_plain_chunk
        end = 0
        for stage in self.stages:
            end += stage.chunk_count
            if chunk < end:
                return chunk >= end - stage.plain_chunks
        return False

    def tiles(self, chunks: range) -> dict[int, tuple[Tile, ...]]:
        """Of each of these chunks the whole rows of matrices in it; chunks without one are left out.

        A row that reaches over the border of a chunk is in neither.
        """
        matrices, size, found = set(self.matrices), self.chunk_elements, dict[int, list[Tile]]()
        at, begins = 0, {spec.first_tensor: first for spec, first in self._stages_and_first_chunks()}
        for number, tensor in enumerate(self.tensors):
            at = begins[number] * size if number in begins else at
            if tensor.kind != "param":
                continue
            start, at = at, at + math.prod(tensor.shape)
            if number not in matrices or len(tensor.shape) != 2 or min(tensor.shape) < 1:
                continue
            columns = tensor.shape[1]
            for chunk in range(max(start // size, chunks.start), min(-(-at // size), chunks.stop)):
                first_row = max(0, -(-(chunk * size - start) // columns))
                rows = min(at, (chunk + 1) * size) - start
                rows = rows // columns - first_row
                if rows > 0:
                    tile = Tile(start + first_row * columns - chunk * size, rows, columns)
                    found.setdefault(chunk, []).append(tile)
        return {chunk: tuple(each) for chunk, each in found.items()}

    def places(self) -> Iterator[tuple[TensorSpec, int]]:
        """Of each exchanged tensor, where its values begin in the flat vector of the whole model."""
        size = self.chunk_elements
        begins = {spec.first_tensor: (spec, first) for spec, first in self._stages_and_first_chunks()}
        at = {"param": 0, "buffer": self.first_plain_chunk * size}
        for number, tensor in enumerate(self.tensors):
            if number in begins:
                stage, first = begins[number]
                plain = first + stage.chunk_count - stage.plain_chunks
                at = {"param": first * size, "buffer": plain * size}
            if tensor.kind in at:
                yield tensor, at[tensor.kind]
                at[tensor.kind] += math.prod(tensor.shape)

    @property
    def aliases(self) -> dict[str, str]:
        """A tied name, and the tensor that holds its values."""
        pairs = (spec.name.split(" = ", 1) for spec in self.tensors if spec.kind == "alias")
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def _stages_and_first_chunks(self) -> Iterator[tuple[StageSpec, int]]:
        first = 0
        for stage in self.stages:
            yield stage, first
            first += stage.chunk_count

    @property
    def hash(self) -> bytes:
        return hash_bytes(msgspec.msgpack.encode(self))


def first_difference(mine: ModelSchema, run: ModelSchema) -> str | None:
    """The first field in which a model differs from the run's, in words a user can act on."""
    for index, (here, there) in enumerate(zip(mine.tensors, run.tensors, strict=False)):
        for field in ("name", "kind", "shape", "dtype"):
            ours, theirs = getattr(here, field), getattr(there, field)
            if ours != theirs:
                ours, theirs = (list(v) if isinstance(v, tuple) else v for v in (ours, theirs))
                return f"tensor {index} {there.name!r}: {field} is {ours} here, {theirs} in the run"
    if len(mine.tensors) != len(run.tensors):
        longer = max(mine.tensors, run.tensors, key=len)
        extra = longer[min(len(mine.tensors), len(run.tensors))].name
        return f"number of tensors is {len(mine.tensors)} here, {len(run.tensors)} in the run (first extra: {extra!r})"
    for field in ("chunk_elements", "chunk_count", "first_plain_chunk"):
        if getattr(mine, field) != getattr(run, field):
            return f"{field} is {getattr(mine, field)} here, {getattr(run, field)} in the run"
    if mine.stages != run.stages or mine.riders != run.riders:
        return _difference_of_stages(mine, run)
    if mine.matrices != run.matrices:
        told = (
            f"{len(each.matrices)}{_first_named(each, other)}" for each, other in ((mine, run), (run, mine))
        )
        return f"hidden matrices for Muon: {' here, '.join(told)} in the run; is the model built of the same layers?"
    if mine.frozen != run.frozen:
        return "frozen parameters: their values differ from the run's; load the same pretrained weights"
    return None


def _first_named(model: ModelSchema, other: ModelSchema) -> str:
    """The first matrix of one that is none of the other, in brackets; empty where there is none."""
    names = (spec.name for place, spec in enumerate(model.tensors) if place in model.matrices)
    others = {spec.name for place, spec in enumerate(other.tensors) if place in other.matrices}
    found = next((name for name in names if name not in others), None)
    return f" ({found!r} too)" if found is not None else ""


def _difference_of_stages(mine: ModelSchema, run: ModelSchema) -> str:
    begin, due = ([stage.first_part for stage in each.stages] for each in (mine, run))
    if begin != due:
        return f"stages: they begin at parts {begin} here, {due} in the run; name [pipeline] cuts in run.toml"
    if mine.riders != run.riders:
        here, there = (", ".join(map(str, each.riders)) or "none" for each in (mine, run))
        return f"riders: {here} here, {there} in the run; is the data the same, and are riders named alike?"
    for number, (one, other) in enumerate(zip(mine.stages, run.stages, strict=True)):
        if one.gives != other.gives:
            here, there = (", ".join(map(str, each.gives)) or "nothing" for each in (one, other))
            return f"stage {number} gives {here} here, {there} in the run; are samples as long as the others' are?"
    return "stages: they have other chunks here than in the run; name [pipeline] cuts in run.toml"


# ---- models that a run can name ----------------------------------------------------------------------------
# `[model] preset` is a row of sizes, and each key that a run writes takes the place of one. A manifest holds
# numbers alone: they are filled in before it is hashed, so a later version of a preset is another run. The
# numbers are a stranger's: values are reckoned on paper before anything is built (peer/builtin/sizes.py).

HEAD_DIM_MOST = 1024
CONTEXT_MOST = 2**20
HF_CONTEXT = 1024  # of a model that would take more, unless the run says
MLP_STEP = 64  # a width of an MLP that nobody names is a multiple of it
_PLAIN = {"rope_theta": 10_000.0, "norm_eps": 1e-5, "qk_norm": False, "tied": True}
_COLUMNS = ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "context", "vocab")


def _preset(*sizes: int, **more: Any) -> Mapping[str, Any]:
    return MappingProxyType({**dict(zip(_COLUMNS, sizes, strict=True)), **_PLAIN, **more})


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": _preset(2, 64, 4, 4, 16, 192, 64, 256),
        "15M": _preset(6, 288, 6, 6, 48, 768, 256, 32_000),
        "125M": _preset(12, 768, 12, 12, 64, 2048, 1024, 50_304),
        "350M": _preset(24, 1024, 8, 8, 128, 2816, 1024, 50_304, qk_norm=True),
        "1B": _preset(22, 2048, 32, 4, 64, 5632, 2048, 32_000, tied=False),
        "7B": _preset(32, 4096, 32, 32, 128, 11_008, 4096, 32_000, tied=False),
    }
)


def filled_in(written: Mapping[str, Any]) -> dict[str, Any]:
    """All sizes of a [model] in which these are written.  What is no number, or no preset, the manifest refuses."""
    config = written.get("config", {})
    if written.get("kind") == "hf" and isinstance(config, Mapping):
        return _as_config_says(written, config)
    if config and isinstance(config, Mapping):
        raise ValueError('[model.config]: expected kind = "hf" in [model], which it describes')
    found = dict(written)
    preset = PRESETS.get(str(found.setdefault("preset", "tiny")), PRESETS["tiny"])
    for key, value in preset.items():
        if key not in ("kv_heads", "head_dim", "mlp_width"):
            found.setdefault(key, value)
    width, heads = found["width"], found["heads"]
    if not all(isinstance(each, int) and each > 0 for each in (width, heads)):
        return {**preset, **found}
    # A script reads such numbers as it likes.
    resized = {key for key in ("width", "heads") if key in written and found.get("kind") != ""}
    found.setdefault("kv_heads", _kv_heads(heads, preset) if "heads" in resized else preset["kv_heads"])
    if resized and "head_dim" not in found and (width % heads or not 2 <= width // heads <= HEAD_DIM_MOST):
        raise ValueError(
            f"[model] width: expected a multiple of heads ({heads}), at most {HEAD_DIM_MOST} times it, found {width}; "
            "or write head_dim"
        )
    found.setdefault("head_dim", width // heads if resized else preset["head_dim"])
    found.setdefault("mlp_width", mlp_width_of(width) if "width" in resized else preset["mlp_width"])
    return found


def _as_config_says(written: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    config = hf_config.completed(config)
    sizes = hf_config.sizes_of_config(config)._asdict()
    most = config["max_position_embeddings"]
    found = {"context": min(most, HF_CONTEXT), **written, "config": config}
    for key in ("preset", *sizes):
        due = sizes.get(key, "tiny")
        if found.setdefault(key, due) != due:
            raise ValueError(f'[model] {key}: no key with kind = "hf", whose sizes [model.config] says')
    if isinstance(found["context"], int) and most < found["context"] <= CONTEXT_MOST:
        raise ValueError(
            f"[model] context: expected at most max_position_embeddings ({most}), found {found['context']}"
        )
    return found


def _kv_heads(heads: int, preset: Mapping[str, Any]) -> int:
    """Grouped as those of the preset are, where that goes."""
    is_grouped = preset["kv_heads"] < preset["heads"] and heads % preset["kv_heads"] == 0
    return int(preset["kv_heads"]) if is_grouped else heads


def mlp_width_of(width: int) -> int:
    """Three matrices of two thirds of four times the width weigh as much as two of four times the width."""
    return -(-(8 * width) // (3 * MLP_STEP)) * MLP_STEP


class ModelSizes(Protocol):
    """[model] of a manifest, with all sizes filled in."""

    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def tied(self) -> bool: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


def size_problems(model: ModelSizes, stages: int) -> list[str]:
    """What of these sizes does not go together: each line says which value, and how it must be."""
    found = []
    if model.width % model.heads and not model.qk_norm and not model.config:
        found.append(
            f"[model] width: expected a multiple of heads ({model.heads}) without qk_norm, found {model.width}: such a "
            "Llama is read by nobody else"
        )
    if model.head_dim % 2 and not model.config:
        found.append(
            f"[model] head_dim: expected an even number, found {model.head_dim}: places turn values in pairs"
        )
    if model.heads % model.kv_heads:
        found.append(f"[model] kv_heads: expected a divisor of heads ({model.heads}), found {model.kv_heads}")
    if stages > 1 and model.tied:
        found.append(
            "[model] tied: expected false with [pipeline] stages > 1, found true: embedding and head lie with "
            "different peers"
        )
    return found


def values_by_part(model: ModelSizes) -> Iterator[int]:
    """Of the embedding, each layer, and the norm with the head; a head that is tied has none of its own."""
    if model.config:
        yield from hf_config.values_by_part(model.config)
        return
    yield model.vocab * model.width
    matrices = model.width * (2 * model.head_dim * (model.heads + model.kv_heads) + 3 * model.mlp_width)
    for _ in range(model.layers):
        yield matrices + 2 * model.width + 2 * model.head_dim * model.qk_norm
    yield model.width + (0 if model.tied else model.vocab * model.width)


def values_of(model: ModelSizes) -> int:
    return sum(values_by_part(model))


def tensors_of(model: ModelSizes) -> dict[str, tuple[int, ...]]:
    """Names, as transformers has them, and shapes; a head that is tied is no tensor of its own."""
    width, queries, keys = model.width, model.heads * model.head_dim, model.kv_heads * model.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab, width)}
    of_layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (model.mlp_width, width),
        "mlp.up_proj": (model.mlp_width, width),
        "mlp.down_proj": (width, model.mlp_width),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    if model.qk_norm:
        of_layer |= {"self_attn.q_norm": (model.head_dim,), "self_attn.k_norm": (model.head_dim,)}
    for number in range(model.layers):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in of_layer.items()}
    found["model.norm.weight"] = (width,)
    return found if model.tied else found | {"lm_head.weight": (model.vocab, width)}


def parts_of(model: ModelSizes) -> int:
    return model.layers + 2


def config_for_hf(model: Any) -> dict[str, Any]:
    """config.json of a folder that `from_pretrained` and vLLM load.  A Llama with QK-norm is a Qwen 3."""
    if model.config:
        return hf_config.config_json(model.config)
    kind = "Qwen3" if model.qk_norm else "Llama"
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "attention_bias": False,
        **hf_config.NO_IDS,
        "dtype": "float32",
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.width,
        "intermediate_size": model.mlp_width,
        "max_position_embeddings": model.context,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": model.norm_eps,
        # Newer readers know the second, older ones and vLLM the first.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocab,
    }
