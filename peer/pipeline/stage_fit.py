"""Which stages of a run fit this machine: what each needs, what is here, and the words where none fits.

Called by `farflung.pipeline`, before the run hears of this peer.
Must not know: the network, other peers, which stage the coordinator will choose.

What is counted is what footprint.py says of a stage.  What the parts keep between their forward and their backward
pass comes on top, is known only when it runs, and is tried out with one microbatch as soon as the stage is built.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from farflung.peer.footprint import FreeMemory, MemoryNeed, MemoryRules, need_of, of_stage
from farflung.peer.pipeline.whole import WholeModel
from farflung.peer.room import room_on
from farflung.protocol.errors import UserError
from farflung.protocol.process.log_lines import Teller


def room_here(device: torch.device, limit: str | None = None) -> FreeMemory:
    """`limit`: "6 GB", at most so much for a stage: of the GPU, or of the host where there is none."""
    found = room_on(device)
    if limit is None:
        return found
    most = size_bytes(limit)
    if found.gpu_bytes is None:
        return found._replace(host_bytes=min(found.host_bytes, most))
    return found._replace(gpu_bytes=min(found.gpu_bytes, most))


def size_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([MG])B", text.strip())
    if found is None:
        raise UserError(f'memory: expected a size such as "500 MB" or "6 GB", found {text!r}')
    return round(float(found[1]) * (1e6 if found[2] == "M" else 1e9))


def needs_of(whole: WholeModel, rules: MemoryRules) -> list[MemoryNeed]:
    return [
        need_of(
            of_stage(
                rules,
                plan.memory_bytes,
                layout.total_elements,
                layout.first_plain_chunk * layout.chunk_elements,
            )
        )
        for plan, layout in zip(whole.plans, whole.layouts, strict=True)
    ]


def fitting_stages(needs: Sequence[MemoryNeed], room: FreeMemory) -> tuple[int, ...]:
    """Numbers of those that fit; UserError if there is none, with what the smallest needs."""
    fit = tuple(number for number, need in enumerate(needs) if need.within(room))
    if fit:
        return fit
    where = "memory" if room.gpu_bytes is None else "GPU memory"
    here = room.host_bytes if room.gpu_bytes is None else room.gpu_bytes
    beside = [need.gpu_bytes + (need.host_bytes if room.gpu_bytes is None else 0) for need in needs]
    if min(beside) <= here:  # so it is not the GPU
        where, here = "host memory", room.host_bytes
        beside = [need.host_bytes for need in needs]
    raise UserError(
        f"no stage of this run fits: the smallest needs {_gb(min(beside))} of {where}, here are {_gb(here)}; end other "
        "programs, or ask for a run with more [pipeline] stages"
    )


def say_which_fit(fitting: Sequence[int], stages: int) -> None:
    which = "all stages fit" if len(fitting) == stages else f"stages {', '.join(map(str, fitting))} fit"
    Teller.from_environment("trainer")(f"memory: {which} this machine, of {stages} that the run has")


def _gb(count: float) -> str:
    size, unit = next(
        (size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= size or size == 1e3
    )
    return f"{count / size:.1f} {unit}"
