"""How a model's values come from a device and go there: streams, pinned staging memory, registered host memory.

Called by the layout of a model, which asks for the `TilePlace` of each device, and by the inner loop, which says what
host memory lasts.  Must not know what is copied.

What is decided is in fused.py, which is tested with queues that are late in every order; this file holds the calls of
CUDA alone (docs/gpu.md says what was run on a GPU).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from farflung.peer.trainer.fused import ACROSS_VALUES, Across, Here, TilePlace

log = logging.getLogger(__name__)


def place_on(device: torch.device) -> TilePlace:
    return Here() if device.type == "cpu" else _across(device)


@functools.cache
def _across(device: torch.device) -> TilePlace:
    """One for each device: staging memory is made once."""
    if device.type == "cuda":
        return Across([CudaQueue(device), CudaQueue(device)])
    return Across([PlainQueue(device)])


class PlainQueue:
    """Of a device without queues that are known here: everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms: dict[int, Tensor] = {}

    def follow(self) -> None:
        pass

    def put(self, work: Callable[[], None]) -> None:
        work()

    def wait(self) -> None:
        pass

    def there(self, value: Tensor) -> Tensor:
        return value.to(self._device, copy=True)

    def reaches(self, value: Tensor) -> bool:
        return False

    def room(self, like: Tensor, number: int) -> Tensor:
        room = self._rooms.get(number)
        if room is None:
            room = self._rooms[number] = self._new_room(8 * ACROSS_VALUES)
        return room[: like.nbytes].view(like.dtype).view(like.shape)

    def _new_room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)


class CudaQueue(PlainQueue):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def put(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def wait(self) -> None:
        self._stream.synchronize()

    def there(self, value: Tensor) -> Tensor:
        return value.to(self._device, non_blocking=True, copy=True)

    def reaches(self, value: Tensor) -> bool:
        return value.is_contiguous() and LASTING.is_registered(value)

    def _new_room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Lasting:
    """Host memory that lasts: each piece of it is registered with CUDA when the first tile of it passes.

    Registering gives a mapping its pages, so a slot that no round writes costs nothing.
    """

    def __init__(self, register: Callable[[int, int], bool], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister
        self._known: dict[int, tuple[int, bool | None]] = {}  # address: size, whether it is registered

    def add(self, values: Iterable[Tensor]) -> tuple[int, ...]:
        """What `end` must be told before the memory goes."""
        added = []
        for each in values:
            storage = each.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._known:
                self._known[storage.data_ptr()] = (storage.nbytes(), None)
                added.append(storage.data_ptr())
        return tuple(added)

    def is_registered(self, value: Tensor) -> bool:
        address = value.untyped_storage().data_ptr()
        size, registered = self._known.get(address, (0, False))
        if registered is None:
            registered = self._register(address, size)
            self._known[address] = (size, registered)
        return registered

    def end(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            _, registered = self._known.pop(address, (0, False))
            if registered:
                self._unregister(address)


def _register(address: int, size: int) -> bool:
    code = int(_cudart().cudaHostRegister(address, size, 0))
    if code:
        log.warning(
            "CUDA does not register %d MB of host memory (error %d); rounds are copied through staging memory, slower",
            size // 1_000_000,
            code,
        )
    return code == 0


def _unregister(address: int) -> None:
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


LASTING = Lasting(_register, _unregister)
