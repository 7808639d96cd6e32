"""What nvidia-smi tells of the GPUs here: for the screen of `join`, and for `farflung doctor`.

Needs no torch and no CUDA in this process.  Where there is no nvidia-smi, there are no GPUs to tell of.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import NamedTuple

_ASKED = ("name", "utilization.gpu", "memory.used", "memory.total", "driver_version", "temperature.gpu")
_PATIENCE_S = 10.0
_MIB = 1 << 20


class Gpu(NamedTuple):
    name: str
    used: float | None  # of its time, 0 to 1
    memory_used_bytes: int
    memory_bytes: int
    driver: str
    celsius: float | None


def read_gpus() -> list[Gpu]:
    """Takes some tens of milliseconds: not for a loop that must not wait."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []  # a driver that hangs or is gone: as good as no GPU, and the doctor says so
    return gpus_in(done.stdout) if done.returncode == 0 else []


def gpus_in(text: str) -> list[Gpu]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(_ASKED):
            name, used, memory, total, driver, celsius = cells
            share = _number(used)
            found.append(
                Gpu(
                    name,
                    share / 100 if share is not None else None,
                    int(_number(memory) or 0) * _MIB,
                    int(_number(total) or 0) * _MIB,
                    driver,
                    _number(celsius),
                )
            )
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        return None
