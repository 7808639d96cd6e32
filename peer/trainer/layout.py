"""The map between a model and one flat fp32 vector cut in chunks.

Owns: which tensors are exchanged, in which order, at which offset, and the values going in and out.
Called by: the trainer (anchor in, delta out), the public API (schema for the hello) and checkpoint export.
Must not know: the network, rounds, codecs, or how the outer step works.

Of an island of several ranks each holds only a part of the model, or a copy of what others hold, too.  The map is that
of the whole model everywhere; `held` says of each tensor which box of it is here, and what of that this rank writes.

    [ trainable parameters | padding | floating persistent buffers | padding ]
      chunk 0 ...                      first_plain_chunk ...         chunk_count

Parameters and buffers never share a chunk, because they are merged by different rules: parameters by the
outer optimizer, buffers (BatchNorm statistics) by plain averaging.  Integer and non-persistent buffers stay
local.  Frozen parameters are not sent, but must be equal everywhere: `frozen_hash` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import torch
from blake3 import blake3
from torch import Tensor, nn

from farflung.optim.inner import outer_matrices
from farflung.peer.island.blocks import Box, HeldBlock, boxes, row_major, shares, within
from farflung.peer.island.ranks import ALONE, Ranks
from farflung.peer.island.sharded import TensorCopy, box_of, level, local_of, reshard, whole_bytes
from farflung.peer.trainer.copy_queues import place_on
from farflung.peer.trainer.fused import OnValues, Owed, Recipe, TilePlace, tiles
from farflung.peer.trainer.model_tensors import Survey, dtype_name, named_tensors_of, survey, unwrap
from farflung.protocol.errors import UserError
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT, CONTROL_ARRAY_LEN, CONTROL_BIN_BYTES
from farflung.protocol.model_schema import ModelSchema, TensorSpec

# Named here because the trainer and the API take a user's model and need the module inside it.
__all__ = ["Entry", "FixedParameter", "ModelLayout", "unwrap"]


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
class FixedParameter:
    """A parameter that does not train: described and hashed, never exchanged."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LayoutPiece:
    """Values of an entry that lie here: a box of it."""

    index: int  # of the entry
    entry: Entry
    box: Box  # of the whole tensor
    here: Box  # the same values in the tensor as it lies here
    around: Box  # a box with these in it, whose values are carried one behind the other
    kept: int | None  # where that begins in what is carried; None: that is laid out as the flat vector

    def cells(self, flat: Tensor, start: int) -> Tensor:
        """Where they lie in a part of the flat vector that begins at `start`: a view."""
        strides = row_major(self.entry.shape)
        first = sum(at * stride for at, stride in zip(self.box.start, strides, strict=True))
        place = flat.storage_offset() + self.entry.offset - start + first
        return flat.as_strided(self.box.shape, strides, place)

    def tiles(self, most: int) -> Iterator[LayoutPiece]:
        """The same in pieces of at most so many values."""
        for box in tiles(self.box, most):
            here = tuple(
                a + b - c for a, b, c in zip(self.here.start, box.start, self.box.start, strict=True)
            )
            yield replace(self, box=box, here=Box(here, box.shape))

    def values(self, tensor: Tensor) -> Tensor:
        """The model's own, or those of a copy: a view."""
        return local_of(tensor).detach()[self.here.slices]

    def carried(self, carry: Tensor, start: int) -> Tensor:
        """Their places in what is carried: a view."""
        if self.kept is None:
            return self.cells(carry, start)
        values = carry[self.kept : self.kept + self.around.numel].view(self.around.shape)
        return values[self.box.seen_from(self.around).slices]


class Change(NamedTuple):
    """What becomes of a piece of the model: what is read, what changes its values by that, and where what else that
    makes goes.  The first of the places takes the values as the model then has them."""

    reads: Sequence[Tensor]
    make: Recipe
    writes: Sequence[Tensor]


_ALIGNED = 64  # bytes


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Where everything lies.  Holds no tensor: every method is handed the model it works on.

    Copies, anchors and what is carried lie in host memory, wherever the model does.
    """

    entries: tuple[Entry, ...]
    frozen: tuple[FixedParameter, ...]
    aliases: tuple[tuple[str, str], ...]  # (tied name, the entry or frozen name that holds its values)
    chunk_elements: int
    total_elements: int
    first_plain_chunk: int
    held: tuple[
        HeldBlock, ...
    ] = ()  # of each entry and then of each frozen parameter; empty: all of it is here alone
    served: tuple[
        tuple[int, tuple[HeldBlock, ...]], ...
    ] = ()  # the same of each rank whose partner this one is
    place_on: Callable[[torch.device], TilePlace] = field(default=place_on, compare=False, repr=False)

    @staticmethod
    def of(model: nn.Module, chunk_elements: int, ranks: Ranks = ALONE) -> ModelLayout:
        """All ranks make theirs at the same time."""
        module = unwrap(model)
        reshard(module)
        layout = ModelLayout.placed(survey(module), chunk_elements)
        return layout._shared_out(module, ranks)

    @staticmethod
    def placed(found: Survey, chunk_elements: int) -> ModelLayout:
        """Of what a model holds, or will hold once it is built."""
        if chunk_elements < 1:
            raise UserError(f"chunk_elements must be at least 1, not {chunk_elements}")
        entries, plain_start = _place(found.params, "param", 0, chunk_elements)
        if plain_start == 0:
            raise UserError("the model has no trainable parameter: is everything frozen?")
        buffers, total = _place(found.buffers, "buffer", plain_start, chunk_elements)
        frozen = (
            FixedParameter(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in found.frozen.items()
        )
        return ModelLayout(
            entries=(*entries, *buffers),
            frozen=tuple(frozen),
            aliases=tuple(found.aliases.items()),
            chunk_elements=chunk_elements,
            total_elements=total,
            first_plain_chunk=plain_start // chunk_elements,
        )

    def _shared_out(self, module: nn.Module, ranks: Ranks) -> ModelLayout:
        items: list[Entry | FixedParameter] = [*self.entries, *self.frozen]
        mine = [box_of(tensor) for tensor in self._tensors(module, items)]
        if ranks.count == 1 and all(box.shape == item.shape for box, item in zip(mine, items, strict=True)):
            return self
        told = ranks.gather(msgspec.msgpack.encode((self.specs, mine)))
        found = [msgspec.msgpack.decode(each, type=tuple[tuple[TensorSpec, ...], list[Box]]) for each in told]
        odd = next((rank for rank, (specs, _) in enumerate(found) if specs != self.specs), None)
        if odd is not None:
            name = next((own.name for own in self.specs if own not in found[odd][0]), "one more tensor")
            raise UserError(
                f"rank {odd} of this peer has another model than rank {ranks.rank} ({name!r}): every rank must build "
                "the same one; experts of which each rank has its own must be one DTensor, sharded over them"
            )

        def held_by(rank: int) -> tuple[HeldBlock, ...]:
            return tuple(
                shares(item.name, item.shape, [boxes_of[at] for _, boxes_of in found], rank, ranks.near)
                for at, item in enumerate(items)
            )

        served = tuple((far, held_by(far)) for far, near in ranks.partners if near == ranks.rank)
        return replace(self, held=held_by(ranks.rank), served=served)

    @property
    def chunk_count(self) -> int:
        return self.total_elements // self.chunk_elements

    # ---- what the model is, for comparing with other peers

    def model_schema(
        self, model: nn.Module, with_matrices: bool = False, ranks: Ranks = ALONE
    ) -> ModelSchema:
        """What the run compares at hello; equal on every peer that trains the same model in the same chunks.

        `with_matrices`: the run's outer step takes hidden matrices as such.
        """
        schema = ModelSchema(
            tensors=self.specs,
            chunk_elements=self.chunk_elements,
            chunk_count=self.chunk_count,
            first_plain_chunk=self.first_plain_chunk,
            frozen=self.frozen_hash(model, ranks),
            matrices=self._matrices_of(unwrap(model)) if with_matrices else (),
        )
        refuse_unsendable(schema)
        return schema

    def _matrices_of(self, model: nn.Module) -> tuple[int, ...]:
        reshard(model)
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

    def frozen_hash(self, model: nn.Module, ranks: Ranks = ALONE) -> bytes:
        """blake3 of the frozen parameters' raw bytes in name order; 32 zero bytes when there are none."""
        if not self.frozen:
            return bytes(32)
        hasher = blake3()
        for at in sorted(range(len(self.frozen)), key=lambda each: self.frozen[each].name):
            (tensor,) = self._tensors(model, [self.frozen[at]])
            held = self.held[len(self.entries) + at] if self.held else None
            for raw in whole_bytes(tensor, held, ranks):
                hasher.update(raw)
        return hasher.digest()

    # ---- values in and out.  `start`: the flat vector that is handed in is the part of the whole that begins there;
    # fragments are such parts, and their borders may lie within a tensor.

    def write_anchor(self, model: nn.Module, flat: Tensor) -> None:
        """The model's values, rounded to fp32, into `flat` [total_elements]; padding becomes zero."""
        assert flat.dtype == torch.float32 and flat.shape == (self.total_elements,), (flat.dtype, flat.shape)
        self._zero_padding(flat, 0)
        with self._tiles(model, 0, flat.numel(), to_write=True) as found:
            for values, piece, place in found:
                place.work((), partial(_as_they_are, values), (piece.cells(flat, 0),))

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
        with self._tiles(model, start, flat.numel()) as found:
            for values, piece, place in found:
                place.work((piece.cells(flat, start),), partial(_taken_by, values), ())

    def set_each(
        self, model: nn.Module, start: int, count: int, change: Callable[[LayoutPiece], Change]
    ) -> None:
        """What it makes of each piece into the model, in place; and what else it makes, into its places."""
        with self._tiles(model, start, count) as found:
            for values, piece, place in found:
                reads, make, writes = change(piece)
                place.work(reads, OnValues(values, make), writes)

    def snapshot(self, model: nn.Module) -> list[Tensor]:
        """Copies of the exchanged tensors as they lie here, in their own dtypes, in one piece of host memory."""
        locals_ = self.local_tensors(model)
        copies = host_room(locals_)
        for copy, tensor in zip(copies, locals_, strict=True):
            copy.copy_(tensor)
        return copies

    def refresh(self, model: nn.Module, copies: Sequence[Tensor], start: int, count: int) -> None:
        """Bring a part of an earlier snapshot up to date."""
        with self._tiles(model, start, count) as found:
            for values, piece, place in found:
                place.work((), partial(_as_they_are, values), (piece.values(copies[piece.index]),))

    def copied(self, model: nn.Module, start: int, count: int) -> list[Tensor]:
        """A part of the model in host memory, tile by tile, and nothing else of it."""
        copies: list[Tensor] = []
        with self._tiles(model, start, count) as found:
            for values, _, place in found:
                copies.append(torch.empty(values.shape, dtype=values.dtype))
                place.work((), partial(_as_they_are, values), (copies[-1],))
        return copies

    def put_back(self, model: nn.Module, copies: Sequence[Tensor], start: int, count: int) -> None:
        """The other way round: that part of the model as it was `copied`."""
        with self._tiles(model, start, count) as found:
            for (values, _, place), copy in zip(found, copies, strict=True):
                place.work((copy,), partial(_taken_by, values), ())

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
        with self._tiles(model, start, out.numel(), to_write=True) as found:
            for values, piece, place in found:
                then = piece.values(loaded[piece.index])
                more = () if carry is None else (piece.carried(carry, start),)
                place.work((then, *more), OnValues(values, Owed()), (piece.cells(out, start),))

    def level(self, model: nn.Module, ranks: Ranks, start: int, count: int) -> None:
        """Before a part of the model is written by all ranks: copies of one value must be equal.

        Those of parameters are, where gradients are summed over the ranks; a model of which that is not true is told
        so.  Buffers follow each rank's own samples: those of the lowest rank count.
        """
        if self.held:
            touched = [
                at
                for at, entry in enumerate(self.entries)
                if entry.offset < start + count and entry.offset + entry.numel > start
            ]
            entries = [self.entries[at] for at in touched]
            copies = [
                TensorCopy(entry.name, entry.kind == "buffer", tensor, self.held[at].twin)
                for at, entry, tensor in zip(touched, entries, self._tensors(model, entries), strict=True)
            ]
            level(copies, ranks)

    def local_tensors(self, model: nn.Module) -> list[Tensor]:
        """What is exchanged, as far as it lies here."""
        return [local_of(tensor).detach() for tensor in self._tensors(model, self.entries)]

    def tensors_of(self, model: nn.Module, start: int = 0, count: int | None = None) -> dict[str, Tensor]:
        """The model's own, by name, as far as they touch this part of the flat vector."""
        stop = self.total_elements if count is None else start + count
        found = zip(self.entries, self._tensors(model, self.entries), strict=True)
        return {e.name: t for e, t in found if e.offset < stop and e.offset + e.numel > start}

    def own_gradients(self, model: nn.Module) -> list[Tensor]:
        """As they lie here, each value on one rank alone: together they are the gradient of the whole model."""
        tensors = self._tensors(model, self.entries)
        mine = [
            t for at, t in enumerate(tensors) if not self.held or self.held[at].twin == self.held[at].rank
        ]
        return [local_of(each.grad).detach() for each in mine if each.grad is not None]

    # ---- what one rank carries of a fragment: as long as what lies here of it

    def nothing_owed(self, start: int, count: int) -> Tensor:
        if not self.held:
            return torch.zeros(count)
        return torch.zeros(sum(piece.box.numel for piece in self._found(start, count, to_write=False)))

    def owed(
        self, model: nn.Module, loaded: Sequence[Tensor], carry: Tensor | None, start: int, count: int
    ) -> Tensor:
        """As `write_delta`, of all that lies here."""
        out = self.nothing_owed(start, count)
        with self._tiles(model, start, count) as found:
            for values, piece, place in found:
                more = () if carry is None else (piece.carried(carry, start),)
                then = piece.values(loaded[piece.index])
                place.work((then, *more), OnValues(values, Owed()), (piece.carried(out, start),))
        return out

    def taken(self, part: Tensor, start: int) -> Tensor:
        """A copy of what lies here, out of a part of the flat vector."""
        out = self.nothing_owed(start, part.numel())
        for piece in self._found(start, part.numel(), to_write=False):
            piece.carried(out, start).copy_(piece.cells(part, start))
        return out

    def places(self, rank: int, part: Tensor, start: int, to_write: bool) -> Iterator[Tensor]:
        """Of a part of the flat vector what a rank has, or has to write: this one, or one that it serves."""
        seen = replace(self, held=dict(self.served).get(rank, self.held))
        for piece in seen._found(start, part.numel(), to_write):
            yield piece.cells(part, start)

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

    @contextmanager
    def _tiles(
        self, model: nn.Module, start: int, count: int, to_write: bool = False
    ) -> Iterator[Iterator[tuple[Tensor, LayoutPiece, TilePlace]]]:
        """What lies here of a part of the flat vector, as the model's own values; all work on it is done at the end.

        `to_write`: of that, what is this rank's to write.
        """
        assert start >= 0 and start + count <= self.total_elements, (start, count)
        tensors = self.local_tensors(model)
        places = {tensor.device: self.place_on(tensor.device) for tensor in tensors}

        def each() -> Iterator[tuple[Tensor, LayoutPiece, TilePlace]]:
            for piece in self._found(start, count, to_write):
                tensor = tensors[piece.index]
                place = places[tensor.device]
                for tile in piece.tiles(place.most(tensor)):
                    yield tensor[tile.here.slices], tile, place

        with torch.no_grad():
            yield each()
            for place in places.values():
                place.finish()

    def _found(self, start: int, count: int, to_write: bool) -> Iterator[LayoutPiece]:
        stop = start + count
        kept = 0
        for index, entry in enumerate(self.entries):
            first, end = max(0, start - entry.offset), min(entry.numel, stop - entry.offset)
            if first >= end:
                continue
            if not self.held:
                for box in boxes(entry.shape, first, end):
                    yield LayoutPiece(index, entry, box, box, box, None)
                continue
            held = self.held[index]
            for around in within(entry.shape, first, end, held.box):
                mine = [around]
                if to_write:
                    mine = within(entry.shape, max(first, held.first), min(end, held.stop), around)
                for box in mine:
                    yield LayoutPiece(index, entry, box, box.seen_from(held.box), around, kept)
                kept += around.numel

    def _zero_padding(self, flat: Tensor, start: int) -> None:
        plain_start = self.first_plain_chunk * self.chunk_elements
        ends = {"param": 0, "buffer": plain_start}
        for entry in self.entries:  # in order of their offsets
            ends[entry.kind] = entry.offset + entry.numel
        for first, stop in ((ends["param"], plain_start), (ends["buffer"], self.total_elements)):
            flat[max(0, first - start) : max(0, stop - start)].zero_()

    def _tensors(self, model: nn.Module, wanted: Sequence[Entry | FixedParameter]) -> list[Tensor]:
        """The model's tensors for `wanted`; a model that was changed since `of` is the user's mistake."""
        module = unwrap(model)
        reshard(module)
        named = named_tensors_of(module)
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


# ---- what is made of a tile, on the device where the model's values lie


def _as_they_are(values: Tensor) -> tuple[Tensor]:
    return (values,)


def _taken_by(values: Tensor, given: Tensor) -> tuple[()]:
    values.copy_(given)
    return ()


def host_room(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Room for copies of all of them, in one piece."""
    sizes = [-(-each.nbytes // _ALIGNED) * _ALIGNED for each in tensors]
    room, at, found = torch.empty(sum(sizes), dtype=torch.uint8), 0, []
    for tensor, size in zip(tensors, sizes, strict=True):
        found.append(room[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += size
    return found


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
