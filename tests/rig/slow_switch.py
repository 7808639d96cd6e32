"""A switch with a delay, for namespaces of a kernel that has no netem: rig/routers.py starts it in the middle.

    python slow_switch.py DELAY_S PORT PORT ...      # frames of one port leave by all others, so much later
    python slow_switch.py plain DEVICE ...           # and once in each namespace: whole checksums, no large segments

A frame that a program reads has no checksum yet, where the device was to calculate it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import heapq
import select
import socket
import struct
import sys
import time

_SIOCETHTOOL = 0x8946
_TX_CHECKSUM, _TCP_SEGMENTS, _SEGMENTS, _MERGED = 0x17, 0x1F, 0x24, 0x2C
_ALL_FRAMES, _OUTGOING = 3, 4
_LARGEST = 65600


def make_plain(devices: list[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in devices:
            for command in (_TX_CHECKSUM, _TCP_SEGMENTS, _SEGMENTS, _MERGED):
                value = array.array("B", struct.pack("II", command, 0))
                address, _ = value.buffer_info()
                with contextlib.suppress(OSError):  # this device has none
                    fcntl.ioctl(asked, _SIOCETHTOOL, struct.pack("16sP", name.encode(), address))


def switch(delay_s: float, names: list[str]) -> None:
    ports = []
    for name in names:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES))
        port.bind((name, 0))
        port.setblocking(False)
        ports.append(port)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, source, frame = heapq.heappop(waiting)
            for number, port in enumerate(ports):
                if number != source:
                    with contextlib.suppress(OSError):
                        port.send(frame)
        wait_s = max(0.0, waiting[0][0] - now) if waiting else 60.0
        for port in select.select(ports, [], [], wait_s)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame, where = port.recvfrom(_LARGEST)
                    if where[2] != _OUTGOING:
                        count += 1
                        heapq.heappush(waiting, (time.monotonic() + delay_s, count, ports.index(port), frame))


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        make_plain(sys.argv[2:])
    else:
        switch(float(sys.argv[1]), sys.argv[2:])
