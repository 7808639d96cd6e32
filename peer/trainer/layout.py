"""The map between a model and one flat fp32 vector cut in chunks.

Owns: which tensors are exchanged, in which order, at which offset, and the values going in and out.
Called by: the trainer (anchor in, delta out), the public API (schema for the hello) and checkpoint export.
Must not know: the network, rounds, codecs, or how the outer step works.

    [ trainable parameters | padding | floating persistent buffers | padding ]
      chunk 0 ...                      first_plain_chunk ...         chunk_count

Parameters and buffers never share a chunk, because they are merged by different rules: parameters by the
outer optimizer, buffers (BatchNorm statistics) by plain averaging.  Integer and non-persistent buffers stay
local.  Frozen parameters are not sent, but must be equal everywhere: `frozen_hash` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from blake3 import blake3
from torch import Tensor, nn

from farflung.optim.inner import outer_matrices
from farflung.peer.trainer.model_tensors import Survey, dtype_name, named_tensors_of, survey, unwrap
from farflung.protocol.errors import UserError
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT, CONTROL_ARRAY_LEN, CONTROL_BIN_BYTES
from farflung.protocol.model_schema import ModelSchema, TensorSpec

# Named here because the trainer and the API take a user's model and need the module inside it.
__all__ = ["Entry", "Frozen", "ModelLayout", "unwrap"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place in the flat vector; its elements lie in row-major order whatever its strides are."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    numel: int
    kind: Literal["param", "buffer"]


@dataclass(frozen=True, slots=True)
class Frozen:
    """A parameter that does not train: described and hashed, never exchanged."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Values [first, stop) of an entry, in row-major order."""

    index: int  # of the entry
    offset: int  # of the entry in the flat vector
    first: int
    stop: int
    numel: int  # of the whole entry

    @property
    def is_whole(self) -> bool:
        return self.stop - self.first == self.numel

    def cells(self, start: int) -> slice:
        """Where it lies in a part of the flat vector that begins at `start`."""
        return slice(self.offset + self.first - start, self.offset + self.stop - start)


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Where everything lies.  Holds no tensor: every method is handed the model it works on."""

    entries: tuple[Entry, ...]
    frozen: tuple[Frozen, ...]
    aliases: tuple[tuple[str, str], ...]  # (tied name, the entry or frozen name that holds its values)
    chunk_elements: int
    total_elements: int
    first_plain_chunk: int

    @staticmethod
    def of(model: nn.Module, chunk_elements: int) -> ModelLayout:
        return ModelLayout.placed(survey(unwrap(model)), chunk_elements)

    @staticmethod
    def placed(found: Survey, chunk_elements: int) -> ModelLayout:
        """Of what a model holds, or will hold once it is built."""
        if chunk_elements < 1:
            raise UserError(f"chunk_elements must be at least 1, not {chunk_elements}")
        entries, plain_start = _place(found.params, "param", 0, chunk_elements)
        if plain_start == 0:
            raise UserError("the model has no trainable parameter: is everything frozen?")
        buffers, total = _place(found.buffers, "buffer", plain_start, chunk_elements)
        frozen = (Frozen(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in found.frozen.items())
        return ModelLayout(
            entries=(*entries, *buffers),
            frozen=tuple(frozen),
            aliases=tuple(found.aliases.items()),
            chunk_elements=chunk_elements,
            total_elements=total,
            first_plain_chunk=plain_start // chunk_elements,
        )

    @property
    def chunk_count(self) -> int:
        return self.total_elements // self.chunk_elements

    # ---- what the model is, for comparing with other peers

    def model_schema(self, model: nn.Module, with_matrices: bool = False) -> ModelSchema:
        """What the run compares at hello; equal on every peer that trains the same model in the same chunks.

        `with_matrices`: the run's outer step takes hidden matrices as such.
        """
        schema = ModelSchema(
            tensors=self.specs,
            chunk_elements=self.chunk_elements,
            chunk_count=self.chunk_count,
            first_plain_chunk=self.first_plain_chunk,
            frozen=self.frozen_hash(model),
            matrices=self._matrices_of(unwrap(model)) if with_matrices else (),
        )
        refuse_unsendable(schema)
        return schema

    def _matrices_of(self, model: nn.Module) -> tuple[int, ...]:
        hidden = {id(parameter) for parameter in outer_matrices([model])}
        named = named_tensors_of(model)
        found = self.places_of({entry.name for entry in self.entries if id(named.get(entry.name)) in hidden})
        refuse_no_matrix(found)
        return found

    def places_of(self, names: Collection[str]) -> tuple[int, ...]:
        """Among `specs`, of the exchanged tensors with these names."""
        return tuple(number for number, entry in enumerate(self.entries) if entry.name in names)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        specs = [TensorSpec(e.name, e.shape, e.dtype, e.kind) for e in self.entries]
        specs += [TensorSpec(f.name, f.shape, f.dtype, "frozen") for f in self.frozen]
        # Which name it is tied to is part of the model: "a = b" and "a = c" train differently.
        specs += [TensorSpec(f"{name} = {of}", (), "", "alias") for name, of in self.aliases]
        return tuple(specs)

    def frozen_hash(self, model: nn.Module) -> bytes:
        """blake3 of the frozen parameters' raw bytes in name order; 32 zero bytes when there are none."""
        if not self.frozen:
            return bytes(32)
        hasher = blake3()
        in_name_order = sorted(self.frozen, key=lambda item: item.name)
        for tensor in self._tensors(model, in_name_order):
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            hasher.update(raw.numpy().data)
        return hasher.digest()

    # ---- values in and out.  `start`: the flat vector that is handed in is the part of the whole that begins there;
    # fragments are such parts, and their borders may lie within a tensor.

    def write_anchor(self, model: nn.Module, flat: Tensor) -> None:
        """The model's values, rounded to fp32, into `flat` [total_elements]; padding becomes zero."""
        self.write_each(model, flat, lambda entry, tensor: tensor.detach())

    def write_each(self, model: nn.Module, flat: Tensor, value_of: Callable[[Entry, Tensor], Tensor]) -> None:
        """What `value_of` gives for each of the model's tensors, of its shape, into `flat`; padding becomes zero."""
        for entry, tensor in zip(self.entries, self._tensors(model, self.entries), strict=True):
            self._cells(flat, entry).copy_(value_of(entry, tensor))
        self._zero_padding(flat, 0)

    def buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of the exchanged ones, by name."""
        wanted = [entry for entry in self.entries if entry.kind == "buffer"]
        found = zip(wanted, self._tensors(model, wanted), strict=True)
        return {entry.name: tensor.detach().clone() for entry, tensor in found}

    def load(self, model: nn.Module, flat: Tensor, start: int = 0) -> None:
        """`flat` into the model, in place: optimizers and compiled code hold its tensors."""
        with torch.no_grad():
            for tensor, piece in self._pieces(model, start, flat.numel()):
                _write(tensor, piece, flat[piece.cells(start)])

    def write_values(self, model: nn.Module, out: Tensor, start: int) -> None:
        """The inverse of `load`: a part of the model's values in fp32, padding zero."""
        self._zero_padding(out, start)
        for tensor, piece in self._pieces(model, start, out.numel()):
            out[piece.cells(start)].copy_(_read(tensor, piece))

    def snapshot(self, model: nn.Module, device: torch.device | str | None = None) -> list[Tensor]:
        """Copies of the exchanged tensors in the model's own dtypes, on `device` or where they are."""
        copies = []
        for tensor in self._tensors(model, self.entries):
            where = tensor.device if device is None else device
            copies.append(tensor.detach().to(where, copy=True))
        return copies

    def refresh(self, model: nn.Module, copies: Sequence[Tensor], start: int, count: int) -> None:
        """Bring a part of an earlier snapshot up to date."""
        for tensor, piece in self._pieces(model, start, count):
            _write(copies[piece.index], piece, _read(tensor, piece))

    def put_back(self, model: nn.Module, copies: Sequence[Tensor], start: int, count: int) -> None:
        """The other way round: a part of the model as it was in an earlier snapshot."""
        with torch.no_grad():
            for tensor, piece in self._pieces(model, start, count):
                _write(tensor, piece, _read(copies[piece.index], piece))

    def write_delta(
        self,
        model: nn.Module,
        loaded: Sequence[Tensor],
        carry: Tensor | None,
        out: Tensor,
        start: int = 0,
    ) -> None:
        """out = (loaded - now) + carry in fp32, padding zero; `out` may be `carry` itself.

        `loaded` is a snapshot taken right after `load`, not the anchor: what rounding the anchor to bf16
        changed was never learned, and must not be sent as if it were.
        """
        self._zero_padding(out, start)
        for tensor, piece in self._pieces(model, start, out.numel()):
            then, now = _read(loaded[piece.index], piece), _read(tensor, piece)
            delta = _difference(then, now.to(then.device)).to("cpu", torch.float32)
            cells = piece.cells(start)
            out[cells].copy_(delta if carry is None else delta + carry[cells])

    def named_tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` as a state dict, tied names too, in memory of its own; frozen parameters are not in it."""
        named: dict[str, Tensor] = {}
        for entry in self.entries:
            named[entry.name] = self._cells(flat, entry).to(getattr(torch, entry.dtype), copy=True)
        for name, of in self.aliases:
            if of in named:  # an alias of a frozen parameter stays with the frozen ones
                named[name] = named[of].clone()
        return named

    # ---- helpers

    def _cells(self, flat: Tensor, entry: Entry) -> Tensor:
        assert flat.dtype == torch.float32, flat.dtype
        assert flat.shape == (self.total_elements,), flat.shape
        return flat[entry.offset : entry.offset + entry.numel].view(entry.shape)

    def _pieces(self, model: nn.Module, start: int, count: int) -> Iterator[tuple[Tensor, Piece]]:
        """The model's tensors that reach into the part of the flat vector, each with the piece of it that does."""
        assert start >= 0 and start + count <= self.total_elements, (start, count)
        stop = start + count
        found = [
            Piece(index, e.offset, max(0, start - e.offset), min(e.numel, stop - e.offset), e.numel)
            for index, e in enumerate(self.entries)
            if e.offset < stop and e.offset + e.numel > start
        ]
        tensors = self._tensors(model, [self.entries[piece.index] for piece in found])
        yield from zip(tensors, found, strict=True)

    def _zero_padding(self, flat: Tensor, start: int) -> None:
        plain_start = self.first_plain_chunk * self.chunk_elements
        ends = {"param": 0, "buffer": plain_start}
        for entry in self.entries:  # in order of their offsets
            ends[entry.kind] = entry.offset + entry.numel
        for first, stop in ((ends["param"], plain_start), (ends["buffer"], self.total_elements)):
            flat[max(0, first - start) : max(0, stop - start)].zero_()

    def _tensors(self, model: nn.Module, wanted: Sequence[Entry | Frozen]) -> list[Tensor]:
        """The model's tensors for `wanted`; a model that was changed since `of` is the user's mistake."""
        named = named_tensors_of(unwrap(model))
        tensors = []
        for item in wanted:
            tensor = named.get(item.name)
            if tensor is None or tuple(tensor.shape) != item.shape or dtype_name(tensor.dtype) != item.dtype:
                now = "gone" if tensor is None else f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                raise UserError(
                    f"the model changed after it joined the run: {item.name!r} was {item.dtype} "
                    f"{list(item.shape)}, now it is {now}; build and convert the model before joining"
                )
            tensors.append(tensor)
        return tensors


def _place(
    tensors: Mapping[str, Tensor], kind: Literal["param", "buffer"], start: int, chunk_elements: int
) -> tuple[list[Entry], int]:
    """Entries one after the other from `start`, and where the next whole chunk begins."""
    entries = []
    offset = start
    for name, tensor in tensors.items():
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        entries.append(Entry(name, shape, dtype, offset, tensor.numel(), kind))
        offset += tensor.numel()
    return entries, -(-offset // chunk_elements) * chunk_elements


def _read(tensor: Tensor, piece: Piece) -> Tensor:
    """[stop - first]; a view where the tensor is contiguous."""
    return tensor.detach().reshape(-1)[piece.first : piece.stop]


def _write(tensor: Tensor, piece: Piece, values_n: Tensor) -> None:
    """In place; what lies outside the piece keeps its bits."""
    if piece.is_whole:
        tensor.copy_(values_n.view(tensor.shape))
        return
    whole_n = tensor.detach().reshape(-1).clone()
    whole_n[piece.first : piece.stop].copy_(values_n)
    tensor.copy_(whole_n.view(tensor.shape))


def _difference(then: Tensor, now: Tensor) -> Tensor:
    """then - now in fp32, or fp64 for fp64 tensors, whose small steps fp32 would swallow."""
    wide = torch.float64 if then.dtype == torch.float64 else torch.float32
    # Equal values have learned nothing; -inf in an attention mask would otherwise give inf - inf = nan.
    return (then.to(wide) - now.to(wide)).masked_fill_(then == now, 0.0)


def refuse_no_matrix(matrices: Collection[int]) -> None:
    if not matrices:
        raise UserError(
            '[outer] step = "muon": the model has no hidden weight matrix, which is what Muon is for; write step = '
            '"adamw" in run.toml'
        )


def refuse_unsendable(schema: ModelSchema) -> None:
    """The bounds of the wire, told as what the user can do about them."""
    most = max((stage.chunk_count for stage in schema.stages), default=schema.chunk_count)
    if most > CHUNKS_PER_FRAGMENT:
        needed_kb = -(-most * schema.chunk_elements * 4 // (CHUNKS_PER_FRAGMENT * 1024))
        raise UserError(
            f"{'a stage of ' if schema.stages else ''}the model makes {most} chunks, at most {CHUNKS_PER_FRAGMENT} are "
            f"allowed: set chunk_kb in [round] of run.toml to {needed_kb} or more"
        )
    if len(schema.tensors) > CONTROL_ARRAY_LEN:
        raise UserError(
            f"the model has {len(schema.tensors)} tensors (tied and frozen too), at most {CONTROL_ARRAY_LEN} can be "
            "described to the run: keep the experts of a layer in one tensor, or freeze by leaving modules out"
        )
    try:
        text = msgspec.msgpack.encode(schema)
        msgspec.msgpack.decode(text, type=ModelSchema)
    except msgspec.MsgspecError as error:
        raise UserError(f"this model cannot be described to the run: {error}") from None
    if len(text) > CONTROL_BIN_BYTES:
        raise UserError(
            f"the model's description has {len(text)} bytes, at most {CONTROL_BIN_BYTES} are allowed: "
            f"it has {len(schema.tensors)} tensors; use fewer or shorter names"
        )
