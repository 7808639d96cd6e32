"""The network of network.py, compiled: fast.c by its functions.  What Python's part of the router costs, it saves.

Used by router.py where emulator.py has found a library, and by the tests that hold it to network.py.  It keeps all
chance: where fast.c needs a draw, it asks here.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence

from rig.lab.network import chance_of
from rig.lab.packets import Parcel
from rig.lab.shaping import PACKET_BYTES, Counters, Jitter, LineSpec, Losses, packets_at_once

_DRAW = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int)
_JITTER = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int, ctypes.c_double)
_SINK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_uint8), ctypes.c_uint32
)
_INT, _DOUBLE, _LONG, _NETWORK = ctypes.c_int, ctypes.c_double, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "lab_new": (_NETWORK, (_INT, _DRAW, _JITTER)),
    "lab_free": (None, (_NETWORK,)),
    "lab_set_line": (None, (_NETWORK, _INT, _DOUBLE, _LONG, _LONG, _DOUBLE, _INT)),
    "lab_set_rate": (None, (_NETWORK, _INT, _DOUBLE, _LONG, _LONG, _DOUBLE)),
    "lab_send": (None, (_NETWORK, _INT, _INT, ctypes.c_char_p, ctypes.c_uint32, _DOUBLE)),
    "lab_deliver": (_INT, (_NETWORK, _DOUBLE, _SINK, ctypes.c_void_p)),
    "lab_due_s": (_DOUBLE, (_NETWORK,)),
    "lab_cut": (None, (_NETWORK, _INT, _INT, _INT, _DOUBLE)),
    "lab_heal": (None, (_NETWORK, _INT, _INT, _DOUBLE)),
    "lab_counters": (None, (_NETWORK, _INT, ctypes.POINTER(_LONG))),
    "lab_take_worst_late_s": (_DOUBLE, (_NETWORK,)),
    "lab_carry": (
        _INT,
        (_NETWORK, ctypes.POINTER(_INT), ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(_INT), _INT),
    ),
}


class FastNetwork:
    def __init__(self, library: str, specs: list[tuple[LineSpec, LineSpec]], seed: int) -> None:
        """As Network; raises OSError for a library that can't be loaded."""
        self._lib = ctypes.CDLL(library)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        lines = [spec for both in specs for spec in both]
        self._hosts = len(specs)
        chances = [chance_of(seed, number // 2, ("up", "down")[number % 2]) for number in range(len(lines))]
        losses = [Losses(spec.loss, rng) for spec, rng in zip(lines, chances, strict=True)]
        jitters = [Jitter(spec.jitter_s, rng) for spec, rng in zip(lines, chances, strict=True)]
        # Kept here, or they would be freed while C still calls them.
        self._draw = _DRAW(lambda line: losses[line].draw())
        self._jitter = _JITTER(lambda line, left_s: jitters[line].at(left_s))
        self._net = self._lib.lab_new(self._hosts, self._draw, self._jitter)
        for number, spec in enumerate(lines):
            self._lib.lab_set_line(self._net, number, *_rate(spec), spec.delay_s, bool(spec.jitter_s))

    def close(self) -> None:
        self._lib.lab_free(self._net)

    # ---- as Network ----------------------------------------------------------------------------------------------

    def send(self, source: int, parcel: Parcel, now_s: float) -> None:
        self._lib.lab_send(self._net, source, parcel.target, parcel.data, len(parcel.data), now_s)

    def deliver(self, now_s: float) -> list[Parcel]:
        delivered: list[Parcel] = []

        def take(_: int, target: int, data: ctypes._Pointer[ctypes.c_uint8], size: int) -> int:
            delivered.append(Parcel(ctypes.string_at(data, size), target))
            return 0

        self._lib.lab_deliver(self._net, now_s, _SINK(take), None)
        return delivered

    def due_s(self) -> float:
        return float(self._lib.lab_due_s(self._net))

    def cut(self, source: int, target: int | None, one_way: bool, now_s: float) -> None:
        self._lib.lab_cut(self._net, source, -1 if target is None else target, one_way, now_s)

    def heal(self, source: int, target: int | None, now_s: float) -> None:
        self._lib.lab_heal(self._net, source, -1 if target is None else target, now_s)

    def set_rate(self, host: int, up: LineSpec, down: LineSpec, now_s: float) -> None:
        for way, spec in enumerate((up, down)):
            self._lib.lab_set_rate(self._net, 2 * host + way, *_rate(spec), now_s)

    def take_worst_late_s(self) -> float:
        return float(self._lib.lab_take_worst_late_s(self._net))

    def counters(self) -> list[tuple[Counters, Counters]]:
        each = []
        for number in range(2 * self._hosts):
            found = (_LONG * 5)()
            self._lib.lab_counters(self._net, number, found)
            each.append(Counters(*found))
        return list(zip(each[::2], each[1::2], strict=True))

    # ---- as Router -----------------------------------------------------------------------------------------------

    def carry(self, tun_fds: Sequence[int], addresses: Sequence[str], watched: Sequence[int]) -> None:
        """Carry packets between the hosts' devices until one of the watched files can be read."""
        wire = [int.from_bytes(socket.inet_aton(address), sys.byteorder) for address in addresses]
        failed = self._lib.lab_carry(
            self._net,
            (_INT * len(tun_fds))(*tun_fds),
            (ctypes.c_uint32 * len(wire))(*wire),
            (_INT * len(watched))(*watched),
            len(watched),
        )
        if failed:
            raise OSError(-failed, os.strerror(-failed))


def _rate(spec: LineSpec) -> tuple[float, int, int]:
    """What fast.c knows of it: bytes a second, bytes in the queue, packets at once."""
    return spec.rate_bit_s / 8, max(spec.queue_bytes, PACKET_BYTES), packets_at_once(spec.rate_bit_s)
