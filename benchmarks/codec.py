"""Speed, size and error of every codec on real pseudo-gradients, and of the alternatives in the same run.

    python benchmarks/codec.py [--json] [--threads 1] [--values 1048576] [--repeats 30]

The pseudo-gradient is that of the built-in model: a few rounds of AdamW steps, the last round's difference repeated to
the length asked for.  Gaussian noise would flatter the coarse codecs: real differences have heavier tails, and
scales that vary between layers.  Speeds are of fp32 values and the best of the repeats, which is what the machine can
do while nothing else wants it; compare rows of one run only.  The first row is a plain copy of the same values, and
the columns "x copy" are a row's speed in units of that.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from farflung.compression.codec import Codec, codec_named
from farflung.compression.native import path_in_use
from farflung.peer.builtin.corpus import load_corpus
from farflung.peer.builtin.llama import Llama
from farflung.protocol.manifest import ModelSection

CODECS = ("fp32", "bf16", "int8", "int4", "int2", "topk", "sparse")
WARM_ROUNDS, INNER_STEPS, BATCH = 3, 60, 8
ABSENT = "not installed: pip install {}"


@dataclass
class Row:
    name: str
    encode_gb_s: float = 0.0
    decode_add_gb_s: float = 0.0
    bits_per_value: float = 0.0
    relative_error: float = 0.0
    note: str = ""


@dataclass
class Scheme:
    """A way to make a vector small: `pack` gives anything, `add` adds its values to a total, `size` is in bytes."""

    name: str
    pack: Callable[[Tensor], object]
    add: Callable[[object, Tensor], object]
    size: Callable[[object], int]


def pseudo_gradient(seed: int = 0) -> Tensor:
    """[n] fp32: (parameters before - after) of the last of a few rounds."""
    sizes = ModelSection(layers=4, width=96, heads=4, context=64)
    model = Llama(sizes, seed)
    text = load_corpus(2_000_000).train
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for _ in range(WARM_ROUNDS + 1):
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        for _ in range(INNER_STEPS):
            starts = torch.randint(0, text.numel() - sizes.context - 1, (BATCH,), generator=generator)
            tokens = torch.stack([text[start : start + sizes.context + 1] for start in starts.tolist()])
            loss = model.loss(tokens.to(torch.int64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return before - torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def ours() -> list[Scheme]:
    """Every codec; those with a compiled path twice."""
    schemes = []
    for name in CODECS:
        codec = codec_named(name)
        if codec.format.block:
            if path_in_use(codec)[0] == "compiled":
                schemes.append(scheme(f"{name}, compiled", codec))
            codec = codec.using(None)
        schemes.append(scheme(f"{name}, plain", codec))
    return schemes


def scheme(label: str, codec: Codec) -> Scheme:
    return Scheme(
        label,
        codec.encode,
        lambda payload, total: codec.decode_add(payload, 0.3, total),
        lambda payload: len(payload),
    )


def torch_int8() -> Scheme:
    """One scale for the whole tensor: the fastest that torch has, and too coarse."""

    def pack(vector: Tensor) -> object:
        return torch.quantize_per_tensor(vector, float(vector.abs().max()) / 127, 0, torch.qint8)

    return Scheme(
        "torch.quantize_per_tensor",
        pack,
        lambda q, total: total.add_(q.dequantize().mul_(0.3)),
        lambda q: q.numel(),
    )


def bitsandbytes_int8() -> Scheme:
    from bitsandbytes import functional

    def add(packed: object, total: Tensor) -> None:
        codes, state = packed
        total.add_(functional.dequantize_blockwise(codes, state).mul_(0.3))

    return Scheme(
        "bitsandbytes blockwise 8-bit",
        lambda vector: functional.quantize_blockwise(vector, blocksize=256),
        add,
        lambda packed: packed[0].numel() + 4 * packed[1].absmax.numel(),
    )


def torchao_int8() -> Scheme:
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    block = [256]

    def pack(vector: Tensor) -> object:
        scale, zero = choose_qparams_affine(vector, MappingType.SYMMETRIC, block, torch.int8)
        return quantize_affine(vector, block, scale, zero, torch.int8), scale, zero

    def add(packed: object, total: Tensor) -> None:
        codes, scale, zero = packed
        total.add_(dequantize_affine(codes, block, scale, zero, torch.int8).mul_(0.3))

    return Scheme(
        "torchao affine int8, 256", pack, add, lambda packed: packed[0].numel() + 4 * packed[1].numel()
    )


def hivemind_codec(kind: str) -> Scheme:
    from hivemind.compression import (
        BlockwiseQuantization,
        CompressionInfo,
        Float16Compression,
        Quantile8BitQuantization,
        Uniform8BitQuantization,
    )

    codec = {
        "float16": Float16Compression,
        "uniform 8-bit": Uniform8BitQuantization,
        "quantile 8-bit": Quantile8BitQuantization,
        "blockwise 8-bit": BlockwiseQuantization,
    }[kind]()
    return Scheme(
        f"hivemind {kind}",
        lambda vector: codec.compress(vector, CompressionInfo.from_tensor(vector)),
        lambda message, total: total.add_(codec.extract(message).mul_(0.3)),
        lambda message: len(message.buffer),
    )


def best_s(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(scheme: Scheme, vector: Tensor, repeats: int) -> Row:
    packed = scheme.pack(vector)
    total = torch.zeros_like(vector)
    scheme.add(packed, total)
    error = float((total / 0.3 - vector).norm() / vector.norm())
    encode_s = best_s(lambda: scheme.pack(vector), repeats)
    add_s = best_s(lambda: scheme.add(packed, total), repeats)
    size = 4 * vector.numel() / 1e9
    bits = 8 * scheme.size(packed) / vector.numel()
    return Row(scheme.name, size / encode_s, size / add_s, bits, error)


def copy_gb_s(vector: Tensor, repeats: int) -> float:
    out = torch.empty_like(vector)
    return 4 * vector.numel() / 1e9 / best_s(lambda: out.copy_(vector), repeats)


def baselines() -> list[tuple[str, str, Callable[[], Scheme]]]:
    """(name, what to install, how to make it)"""
    kinds = ("float16", "uniform 8-bit", "quantile 8-bit", "blockwise 8-bit")
    return [
        ("torch.quantize_per_tensor", "torch", torch_int8),
        ("bitsandbytes blockwise 8-bit", "bitsandbytes", bitsandbytes_int8),
        ("torchao affine int8, 256", "torchao", torchao_int8),
        *(
            (f"hivemind {kind}", "hivemind", lambda kind=kind: hivemind_codec(kind))  # type: ignore[misc]
            for kind in kinds
        ),
    ]


def table(vector: Tensor, repeats: int) -> list[Row]:
    rows = [measure(each, vector, repeats) for each in ours()]
    for name, package, make in baselines():
        try:
            rows.append(measure(make(), vector, repeats))
        except ModuleNotFoundError as error:
            missing = (
                package if (error.name or "").partition(".")[0] == package else f"{package} {error.name}"
            )
            rows.append(Row(name, note=ABSENT.format(missing)))
        except Exception as error:  # somebody else's code: whatever it fails with belongs in its row
            rows.append(Row(name, note=f"fails: {type(error).__name__}: {str(error).splitlines()[0][:70]}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--values", type=int, default=1 << 20, help="one chunk")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # baselines warn of their own deprecations
    if not options.json:
        print("training a small model for its pseudo-gradient ...", file=sys.stderr)
    delta = pseudo_gradient()
    vector = delta.repeat(-(-options.values // delta.numel()))[: options.values].contiguous()
    copied = copy_gb_s(vector, options.repeats)
    rows = table(vector, options.repeats)
    if options.json:
        head = {"values": len(vector), "threads": options.threads, "copy_gb_s": copied}
        print(json.dumps(head | {"rows": [asdict(row) for row in rows]}))
    else:
        show(rows, copied, options.threads)


def show(rows: list[Row], copied: float, threads: int) -> None:
    heads = f"{'encode':>8}{'x copy':>8}{'add':>8}{'x copy':>8}{'bits':>8}{'error':>9}"
    print(f"{'codec':30}{heads}   GB/s of fp32, {threads} thread(s)")
    print(f"{'a copy':30}{copied:8.2f}{1:8.2f}")
    for row in rows:
        if row.note:
            print(f"{row.name:30}{row.note}")
        else:
            speeds = (
                row.encode_gb_s,
                row.encode_gb_s / copied,
                row.decode_add_gb_s,
                row.decode_add_gb_s / copied,
            )
            figures = "".join(f"{speed:8.2f}" for speed in speeds)
            print(f"{row.name:30}{figures}{row.bits_per_value:8.3f}{row.relative_error:9.4f}")


if __name__ == "__main__":
    main()
