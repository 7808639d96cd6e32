"""Which stages of a run fit this machine: what each needs, what is here, and the words where none fits.

Called by `farflung.pipeline`, before the run hears of this peer.
Must not know: the network, other peers, which stage the coordinator will choose.

What is counted is what a stage surely needs: its parameters and the sums of its gradients where it computes, and the
shared memory of its agent; where it takes steps of its own, what its optimizer remembers.  What the parts keep between
their forward and their backward pass comes on top, is known only when it runs, and is tried out with one microbatch as
soon as the stage is built.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farflung.peer.pipeline.whole import WholeModel
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.outer_numbers import VALUE_BYTES
from farflung.protocol.process.host_memory import available_bytes

_SLOTS_WRITTEN = 2  # of the three: what is frozen, and what a round uses
_MOMENTS = 2  # of an inner optimizer, for each value: Muon has one, and AdamW for what is no matrix
_THEN = 1  # the values as they were loaded, which local steps are measured from: in host memory


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are free.  `gpu_bytes` is None where the host computes."""

    gpu_bytes: int | None
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    compute_bytes: int  # on the GPU, else in host memory beside `shared_bytes`
    shared_bytes: int  # host memory that agent and trainer share

    def fits(self, room: Room) -> bool:
        if room.gpu_bytes is None:
            return self.compute_bytes + self.shared_bytes <= room.host_bytes
        return self.compute_bytes <= room.gpu_bytes and self.shared_bytes <= room.host_bytes


def room_here(device: torch.device, limit: str | None = None) -> Room:
    """`limit`: "6 GB", at most so much for a stage: of the GPU, or of the host where there is none."""
    most = None if limit is None else size_bytes(limit)
    host = available_bytes()
    if device.type != "cuda":
        return Room(None, host if most is None else min(host, most))
    gpu = torch.cuda.mem_get_info(device)[0]
    return Room(gpu if most is None else min(gpu, most), host)


def size_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([MG])B", text.strip())
    if found is None:
        raise UserError(f'memory: expected a size such as "500 MB" or "6 GB", found {text!r}')
    return round(float(found[1]) * (1e6 if found[2] == "M" else 1e9))


def needs_of(whole: WholeModel, manifest: Manifest) -> list[Need]:
    """The outer state has as many parts as the run's outer step (parameters, momentum, ...)."""
    local = manifest.pipeline.mode == "local"
    copies = manifest.outer_numbers.parts + _SLOTS_WRITTEN + (_THEN if local else 0)
    moments_bytes = _MOMENTS * VALUE_BYTES if local else 0
    return [
        Need(
            plan.memory_bytes + moments_bytes * layout.first_plain_chunk * layout.chunk_elements,
            copies * layout.total_elements * VALUE_BYTES,
        )
        for plan, layout in zip(whole.plans, whole.layouts, strict=True)
    ]


def fitting_stages(needs: Sequence[Need], room: Room) -> tuple[int, ...]:
    """Numbers of those that fit; UserError if there is none, with what the smallest needs."""
    fit = tuple(number for number, need in enumerate(needs) if need.fits(room))
    if fit:
        return fit
    where = "memory" if room.gpu_bytes is None else "GPU memory"
    here = room.host_bytes if room.gpu_bytes is None else room.gpu_bytes
    beside = [need.compute_bytes + (need.shared_bytes if room.gpu_bytes is None else 0) for need in needs]
    if min(beside) <= here:  # so it is not the GPU
        where, here = "host memory", room.host_bytes
        beside = [need.shared_bytes for need in needs]
    raise UserError(
        f"no stage of this run fits: the smallest needs {_gb(min(beside))} of {where}, here are {_gb(here)}; end other "
        "programs, or ask for a run with more [pipeline] stages"
    )


def _gb(count: int) -> str:
    size, unit = next(
        (size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= size or size == 1e3
    )
    return f"{count / size:.1f} {unit}"
