"""The codecs' Triton kernels: the torch path's bits, proven without a GPU as far as that goes, and the way back.

Without a GPU the kernels run in Triton's interpreter, which computes each operation with numpy: that proves what they
compute.  What a compiler may change is seen in the code it makes: every operation is there by itself, rounded to
nearest.  What remains, the device, is for the check before use and for the last tests here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.compression import triton_path
from farflung.compression.codec import Codec, codec_named
from farflung.compression.triton_path import CODECS, choose, device_path_in_use
from rig.pieces import pieces

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PREPARE = """
import warnings, torch
from farflung.compression import triton_kernels as kernels
from farflung.compression.codec import NonFinite, codec_named
from farflung.compression.triton_path import ThroughDevice, TritonPath, choose
import triton.language as tl
warnings.simplefilter("ignore")  # numpy tells of overflows in blocks that are refused afterwards
cpu = torch.device("cpu")
codec = codec_named(NAME)
"""
RANDOM = """
def words(work):
    try:
        return work()
    except NonFinite as error:
        return str(error)
by_torch = codec.using(None)
through = ThroughDevice(codec, TritonPath(kernels, codec, cpu), cpu)
generator = torch.Generator().manual_seed(7)
for count in (1, 255, 4095, 4096, 4097, 8192, 20_000):
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    for kind in ("any", "finite", "usual"):
        vector = bits.view(torch.float32)
        if kind != "any":
            vector = torch.where(vector.isfinite(), vector, torch.zeros(()))
        if kind == "usual":
            vector = torch.randn(count, generator=generator) * 1e-3
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            narrow = vector.to(dtype)
            payload = words(lambda: by_torch.encode(narrow))
            assert words(lambda: through.encode(narrow)) == payload, (count, kind, dtype)
        payload = words(lambda: by_torch.encode(vector))
        if isinstance(payload, str):
            continue
        assert torch.equal(through.decode(payload, count), by_torch.decode(payload, count)), (count, kind)
        for weight in (0.3, -1 / 7, 1, 0.0, -2.0**-140):
            one, other = bits.view(torch.float32).clone(), bits.view(torch.float32).clone()
            by_torch.decode_add(payload, weight, one)
            through.decode_add(payload, weight, other)
            same = (one.view(torch.int32) == other.view(torch.int32)) | (one.isnan() & other.isnan())
            assert same.all(), (count, kind, weight)
print("same")
"""
MUTATED = """
import importlib.util, pathlib, tempfile
from farflung.compression.native import first_difference
from farflung.compression.triton_path import INPUTS
text = pathlib.Path(kernels.__file__).read_text(encoding="utf-8")
with tempfile.TemporaryDirectory() as folder:
    for place, (right, wrong) in enumerate(WRONG):
        assert right in text, right
        path = pathlib.Path(folder, f"wrong_{place}.py")
        path.write_text(text.replace(right, wrong), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        through = ThroughDevice(codec, TritonPath(module, codec, cpu), cpu)
        try:
            print(first_difference(codec.using(None), through, INPUTS))
        except RuntimeError as error:
            print(error)
"""
# (what is replaced, by what): each is one way to be wrong that the check before use must notice.
WRONG = (
    ("8454660 * 2.0**-30", "8454661 * 2.0**-30"),
    ("constexpr(2.0**-125)", "constexpr(2.0**-124)"),
    ("constexpr(1 << 14)", "constexpr((1 << 14) - 1)"),
    ("1.5 * 2.0**23", "1.5 * 2.0**22"),
    ("constexpr(0x7F800000)", "constexpr(0x7FFFFFFF)"),  # NaN and infinities are encoded
    # One value too many is read, then written.
    (
        "if elements_left >= ROWS * BLOCK:\n        values",
        "if elements_left + 1 >= ROWS * BLOCK:\n        values",
    ),
    (
        "if elements_left >= ROWS * BLOCK:\n        if ADD",
        "if elements_left + 1 >= ROWS * BLOCK:\n        if ADD",
    ),
    # A division that is not quite rounded to nearest.
    ("* inverse_r[:, None]", "* (inverse_r[:, None] * 1.0000001)"),
    # Fused operations: in fp64 the product is exact, so the sum is what is rounded.
    (
        "(quotients_rb + TO_INTEGER)",
        "(values_rb.to(tl.float64) * inverse_r[:, None].to(tl.float64) + TO_INTEGER).to(tl.float32)",
    ),
    (
        "values_rb = values_rb * weight",
        "values_rb = values_rb.to(tl.float64) * tl.full([1, 1], weight, tl.float32).to(tl.float64)",
    ),
)


def interpreted(name: str, code: str) -> str:
    pytest.importorskip("triton", reason="Triton is not installed")
    program = f"NAME = {name!r}\n{PREPARE}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def block_codec(name: str) -> Codec:
    codec = codec_named(name)
    assert codec.format.block
    return codec


# ---- what the kernels compute ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", pieces(CODECS, 0))
def test_interpreted_kernels_pass_the_check_before_use(name: str) -> None:
    said = interpreted(name, "choice = choose(codec, cpu); print(choice.path is not None, choice.reason)")
    assert said == "True Triton kernels, checked on cpu"


@pytest.mark.slow
@pytest.mark.hard
@pytest.mark.parametrize("name", CODECS)
def test_interpreted_kernels_give_the_same_bits_for_random_ones(name: str) -> None:
    assert interpreted(name, RANDOM) == "same"


@pytest.mark.slow
@pytest.mark.hard
@pytest.mark.parametrize("name", CODECS)
def test_the_check_before_use_notices_wrong_arithmetic(name: str) -> None:
    differences = interpreted(name, f"WRONG = {WRONG!r}\n{MUTATED}").split("\n")
    unnoticed = [wrong for wrong, found in zip(WRONG, differences, strict=True) if not found]
    assert not unnoticed


# ---- what a compiler makes of them -------------------------------------------------------------------------------

_ARGUMENTS = {
    "bad_at": "*i32",
    "steps_at": "*i16",
    "codes_at": "*i8",
    "nibbles_at": "*i8",
    "levels_at": "*i16",
    "out_at": "*fp32",
    "weight": "fp32",
    "elements": "i32",
    "ROWS": "constexpr",
    "ADD": "constexpr",
}
_FLOAT = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?((?:add|sub|mul|fma|mad|div|rcp|ex2|sqrt)\.[\w.]*f32\w*)", re.MULTILINE
)


def ptx_of(kernel: Any, input_type: str, block: int, capability: int, *, fuse: bool) -> str:
    """The code for a GPU that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: _ARGUMENTS.get(name, f"*{input_type}") for name in names}
    fixed = {"ROWS": triton_path.PROGRAM_VALUES // block, "ADD": True}
    constants = {(names.index(name),): value for name, value in fixed.items() if name in names}
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": 4, "enable_fp_fusion": fuse}
    return str(triton.compile(ASTSource(kernel, signature, constants), target, options).asm["ptx"])


@pytest.fixture
def compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[str]]:
    """(kernel, input type, block, capability, fuse) -> the fp32 operations in the code."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from farflung.compression import triton_kernels

    def operations(name: str, *details: Any, fuse: bool = False) -> set[str]:
        ptx = ptx_of(getattr(triton_kernels, name), *details, fuse=fuse)
        assert ".ftz" not in ptx  # subnormals stay what they are
        return set(_FLOAT.findall(ptx))

    return operations


@pytest.mark.slow
@pytest.mark.parametrize("capability", pieces([80, 90, 100]))
@pytest.mark.parametrize("name", CODECS)
def test_compiled_operations_round_once_and_to_nearest(
    name: str, capability: int, compiled_kernels: Callable[..., set[str]]
) -> None:
    """In PTX `mul.f32` may be fused with an addition later on; `mul.rn.f32` may not."""
    block = block_codec(name).format.block
    allowed = {f"{what}.rn.f32{pair}" for what in ("add", "mul", "div") for pair in ("", "x2")}
    for input_type in ("fp32", "bf16", "fp16"):
        found = compiled_kernels(f"{name}_encode", input_type, block, capability)
        assert "div.rn.f32" in found and found <= allowed, found
    found = compiled_kernels(f"{name}_restore", "", block, capability)
    assert found and found <= allowed - {"div.rn.f32", "div.rn.f32x2"}, found


@pytest.mark.slow
def test_without_the_option_operations_may_be_fused(compiled_kernels: Callable[..., set[str]]) -> None:
    """So the test above would notice a launch option that has no effect any more."""
    assert "fma.rn.f32" in compiled_kernels("int8_encode", "fp32", 256, 90, fuse=True)
    assert "mul.f32" in compiled_kernels("int8_restore", "", 256, 90, fuse=True)


# ---- doing without -----------------------------------------------------------------------------------------------


def test_every_reason_to_do_without_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = block_codec("int8")
    assert device_path_in_use(codec, CPU)[0] == "plain"
    assert choose(block_codec("topk"), CPU).reason == "there are Triton kernels for int8 and int4 only"
    monkeypatch.setenv("FARFLUNG_NATIVE", "0")
    assert device_path_in_use(codec, torch.device("cuda", 0)) == ("plain", "FARFLUNG_NATIVE=0 is set")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    choice = choose(block_codec("int8"), CPU)
    assert choice.path is None and choice.reason.startswith("Triton cannot be imported: ")


def test_kernels_that_cannot_run_are_left() -> None:
    """Memory of the CPU is nowhere that a GPU's kernel could run."""
    pytest.importorskip("triton", reason="Triton is not installed")
    choice = choose(block_codec("int8"), CPU)
    assert choice.path is None and choice.reason.startswith("the Triton kernels cannot run: ")


# ---- a GPU -------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("name", CODECS)
def test_on_a_gpu_the_kernels_are_used_and_exact(name: str) -> None:
    """test_codecs.py compares all codecs on a GPU; this one makes sure that it is the kernels that are compared."""
    pytest.importorskip("triton", reason="Triton is not installed")
    codec, device = block_codec(name), torch.device("cuda")
    used, reason = device_path_in_use(codec, device)
    assert used == "triton", reason
    on_cpu = codec.using(None)
    generator = torch.Generator().manual_seed(3)
    for count in (1, 4097, (1 << 24) + 77):
        whole = torch.randn(count + 1, generator=generator)
        vector, total = whole[1:], whole.to(device)[1:]  # at an address that is not aligned
        payload = on_cpu.encode(vector)
        assert codec.encode(total) == payload
        expected = vector.clone()
        on_cpu.decode_add(payload, 0.3, expected)
        codec.decode_add(payload, 0.3, total)
        assert torch.equal(total.cpu().view(torch.int32), expected.view(torch.int32))
