"""Are the codecs' GPU kernels exact on this device, and how fast are they beside a copy on it?

    python benchmarks/codec_cuda.py [--values 134217728] [--repeats 50]

Needs a CUDA device and Triton.  Ends with exit code 1 where a path is not used, a byte differs, or a kernel is slower
than half of the device's copy bandwidth.  Two measures of that, both in units of a copy from the device to itself:

    x copy      values each second: how long encoding takes, beside copying the same fp32 values
    bandwidth   bytes read and written each second; a copy moves 8 for a value, encoding int8 moves 5

The second is the stricter for encoding, the first for adding; both must reach a half.  Times are of the device, by its
own events, the median of the repeats; the tensors are far larger than any cache.  The last rows are whole calls with
the transfer, so they show the line between device and host, and the torch operations that run without these kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from farflung.compression.codec import Codec, codec_named
from farflung.compression.triton_path import CODECS, TritonPath, device_path_for, device_path_in_use

GOAL = 0.5
WEIGHT = 0.3
CHECKED_VALUES = 3_000_001  # compared with the CPU's bytes; the last block is not full


def device_s(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def call_s(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def exact(codec: Codec, vector: Tensor) -> bool:
    """The bytes and the sums of the torch path on a CPU, for each type of input."""
    on_cpu = codec.using(None)
    part = vector[:CHECKED_VALUES]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        narrow = part.to(dtype)
        payload = on_cpu.encode(narrow.cpu())
        total, expected = part.clone(), part.clone().cpu()
        codec.decode_add(payload, WEIGHT, total)
        on_cpu.decode_add(payload, WEIGHT, expected)
        same = torch.equal(total.cpu().view(torch.int32), expected.view(torch.int32))
        if codec.encode(narrow) != payload or not same:
            return False
    return True


def kernels(name: str, path: TritonPath, vector: Tensor, copied_s: float, repeats: int) -> bool:
    """Prints a row for each kernel; tells whether all reach the goal."""
    total = torch.zeros_like(vector)
    fine = True
    for dtype in (torch.float32, torch.bfloat16):
        values = vector.to(dtype)
        coded = path.encode_on_device(values)
        moved = values.nbytes + coded.room.nbytes
        took_s = device_s(lambda values=values: path.encode_on_device(values), repeats)  # type: ignore[misc]
        short = str(dtype).removeprefix("torch.")
        fine &= row(f"{name} encode {short}", vector, moved, took_s, copied_s)
    moved = 2 * vector.nbytes + coded.room.nbytes
    took_s = device_s(lambda: path.restore_on_device(coded, WEIGHT, total, add=True), repeats)
    return row(f"{name} decode and add", vector, moved, took_s, copied_s) and fine


def row(label: str, vector: Tensor, moved_bytes: int, took_s: float, copied_s: float) -> bool:
    speed = copied_s / took_s
    bandwidth = moved_bytes / (2 * vector.nbytes) * speed
    fine = min(speed, bandwidth) >= GOAL
    note = "" if fine else f"  below {GOAL}"
    print(f"{label:34}{vector.nbytes / 1e9 / took_s:10.0f}{speed:9.2f}{bandwidth:11.2f}{note}")
    return fine


def whole_calls(name: str, codec: Codec, vector: Tensor, repeats: int) -> None:
    payload = codec.encode(vector)
    total = torch.zeros_like(vector)
    for label, each in (("Triton", codec), ("torch", codec.using(None))):
        encode_s = call_s(lambda each=each: each.encode(vector), repeats)  # type: ignore[misc]
        add_s = call_s(lambda each=each: each.decode_add(payload, WEIGHT, total), repeats)  # type: ignore[misc]
        for what, took_s in (("encode", encode_s), ("decode and add", add_s)):
            print(f"{f'{name} {what}, {label}, bytes on host':42}{vector.nbytes / 1e9 / took_s:10.2f} GB/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--values", type=int, default=1 << 27)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: torch.cuda.is_available() is False", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {options.values} values")
    generator = torch.Generator(device).manual_seed(1)
    vector = torch.randn(options.values, generator=generator, device=device)
    out = torch.empty_like(vector)
    copied_s = device_s(lambda: out.copy_(vector), options.repeats)
    print(f"{'on the device':34}{'GB/s fp32':>10}{'x copy':>9}{'bandwidth':>11}")
    row("a copy", vector, 2 * vector.nbytes, copied_s, copied_s)
    fine = True
    codecs: list[tuple[str, Codec]] = []
    for name in CODECS:
        codec = codec_named(name)
        assert codec.format.block
        path = device_path_for(codec, device)
        if path is None:
            print(f"{name}: not used: {device_path_in_use(codec, device)[1]}")
            fine = False
            continue
        same = exact(codec, vector)
        print(f"{name}: {'the same bits as' if same else 'DIFFERS FROM'} the torch path on the CPU")
        fine &= kernels(name, path, vector, copied_s, options.repeats) and same
        codecs.append((name, codec))
    few = max(3, options.repeats // 10)
    for name, codec in codecs:
        whole_calls(name, codec, vector, few)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
