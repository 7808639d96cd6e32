"""One packet as a host's TUN device hands it over: what it costs on the wire, where it goes, how to take it apart.

The kernel hands over TCP in packets of up to 64 KB that stand for many segments (TSO), each with a virtio_net_hdr
in front that says how to cut it. Passed on whole, they make the router cheap. A real line would carry the
segments one by one, so `Parcel` counts bytes and packets as the line would see them, and `slice` gives some of the
segments as a packet of their own: that is how a single segment is lost, or a slow line is fed in small pieces.

Used by the router and its model (shaping.py, network.py). Knows nothing of time, rates or sockets.
"""

from __future__ import annotations

import struct

# struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
VNET = struct.Struct("=BBHHHH")
VNET_BYTES = VNET.size
SEGMENT_BYTES = struct.Struct("=H")  # its gso_size alone
NOT_GSO = 0
NEEDS_CHECKSUM = 1  # the checksum field holds the sum of the pseudo header; the receiver need not check it
TARGET_AT = VNET_BYTES + 16
CWR, PSH, FIN = 0x80, 0x08, 0x01


class Parcel:
    """`data` is virtio_net_hdr + IPv4 packet; `segments` is the number of packets that a real line would carry."""

    __slots__ = ("data", "headers_bytes", "segment_bytes", "segments", "target", "wire_bytes")

    def __init__(self, data: bytes, target: int = -1) -> None:
        self.data = data
        self.target = target  # filled in by whoever knows the addresses
        self.wire_bytes = len(data) - VNET_BYTES
        self.segments = 1
        self.segment_bytes = self.headers_bytes = 0
        if data[1] != NOT_GSO:
            ip_bytes = (data[VNET_BYTES] & 15) * 4
            self.headers_bytes = ip_bytes + (data[VNET_BYTES + ip_bytes + 12] >> 4) * 4
            (self.segment_bytes,) = SEGMENT_BYTES.unpack_from(data, 4)
            payload_bytes = self.wire_bytes - self.headers_bytes
            self.segments = max(1, -(-payload_bytes // self.segment_bytes))
            self.wire_bytes += (self.segments - 1) * self.headers_bytes

    def slice(self, start: int, stop: int) -> Parcel:
        """Segments `start` to `stop` as a parcel of their own; its headers are what TSO would have made of them."""
        if start == 0 and stop == self.segments:
            return self
        begin = VNET_BYTES + self.headers_bytes + start * self.segment_bytes
        last = stop == self.segments
        end = len(self.data) if last else begin + (stop - start) * self.segment_bytes
        payload = self.data[begin:end]
        headers = self._headers_of(start, len(payload), last)
        flags, gso_type, _, gso_bytes, csum_start, csum_offset = VNET.unpack_from(self.data)
        if stop - start == 1:
            gso_type, gso_bytes = NOT_GSO, 0
        vnet = VNET.pack(flags, gso_type, len(headers), gso_bytes, csum_start, csum_offset)
        return Parcel(b"".join((vnet, headers, payload)), self.target)

    def _headers_of(self, start: int, payload_bytes: int, last: bool) -> bytes:
        headers = bytearray(self.data[VNET_BYTES : VNET_BYTES + self.headers_bytes])
        ip_bytes = (headers[0] & 15) * 4
        (ident,) = struct.unpack_from("!H", headers, 4)
        (sequence,) = struct.unpack_from("!I", headers, ip_bytes + 4)
        struct.pack_into("!HH", headers, 2, len(headers) + payload_bytes, (ident + start) & 0xFFFF)
        struct.pack_into("!H", headers, 10, 0)
        struct.pack_into("!H", headers, 10, checksum(bytes(headers[:ip_bytes])))
        sequence = (sequence + start * self.segment_bytes) & 0xFFFFFFFF
        struct.pack_into("!I", headers, ip_bytes + 4, sequence)
        if start:
            headers[ip_bytes + 13] &= ~CWR
        if not last:
            headers[ip_bytes + 13] &= ~(PSH | FIN)
        tcp_bytes = len(headers) - ip_bytes + payload_bytes
        pseudo = bytes(headers[12:20]) + struct.pack("!BBH", 0, headers[9], tcp_bytes)
        struct.pack_into("!H", headers, ip_bytes + 16, checksum(pseudo) ^ 0xFFFF)
        return bytes(headers)


def is_ipv4(data: bytes) -> bool:
    return len(data) >= VNET_BYTES + 20 and data[VNET_BYTES] >> 4 == 4


def checksum(data: bytes) -> int:
    """The internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF
