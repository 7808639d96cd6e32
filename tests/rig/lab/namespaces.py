"""What the router asks of the kernel: namespaces, one TUN device in each, and an end to whatever runs in them.

Called by the router alone, before and after it routes.  Plain system calls, so that neither root nor `ip` is needed
where the kernel lets users make user namespaces.  Knows nothing of shaping.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

TUN_PATH = "/dev/net/tun"
DEVICE = b"net0"
NETMASK = "255.255.0.0"  # so the other hosts are straight behind the device, and nothing else is
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
# linux/if_tun.h and linux/sockios.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR, IFF_UP = 0x0001, 0x1000, 0x4000, 0x1
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6, TUN_F_TSO_ECN = 1, 2, 4, 8
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
RTM_NEWLINK, NLM_F_REQUEST, NLM_F_ACK, IFLA_TXQLEN = 16, 1, 4, 13  # linux/rtnetlink.h
# The router reads at once and queues by itself; the device's own queue must never be the one that drops.
DEVICE_QUEUE_PACKETS = 10_000

_libc = ctypes.CDLL(None, use_errno=True)


class CannotBuild(Exception):
    """This machine does not let us; one line for the user."""


@dataclass
class Device:
    """One host: the router's end of its device, and its network namespace (a file that keeps it alive)."""

    tun_fd: int
    namespace_fd: int
    namespace_id: int


def enter_user_namespace_if_needed() -> bool:
    """True if one was needed: root needs none. Nobody's name changes, so that files look as they did."""
    if _libc.unshare(CLONE_NEWNET) == 0:
        return False
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(CLONE_NEWUSER) != 0:
        reason = errno.errorcode.get(ctypes.get_errno(), "?")
        raise CannotBuild(
            f"this user may make neither network nor user namespaces here ({reason}); run as root, or allow "
            "user namespaces (sysctl user.max_user_namespaces; containers: --privileged)"
        )
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True


def build_host(address: str, tcp_buffer_bytes: int | None) -> Device:
    """A fresh network namespace with the device in it; the calling process stays in there."""
    if _libc.unshare(CLONE_NEWNET) != 0:
        raise CannotBuild(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    _set_sysctl("net/ipv6/conf/default/disable_ipv6", "1")  # the router carries IPv4 only
    if tcp_buffer_bytes is not None:
        _set_sysctl("net/ipv4/tcp_rmem", f"4096 131072 {tcp_buffer_bytes}")
        _set_sysctl("net/ipv4/tcp_wmem", f"4096 65536 {tcp_buffer_bytes}")
    tun_fd = _open_tun()
    _lengthen_device_queue()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for request, words in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, NETMASK)):
            _ask(asking, request, DEVICE, struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(words)))
        for name in (b"lo", DEVICE):
            _ask(asking, SIOCSIFFLAGS, name, struct.pack("=H", IFF_UP))
    namespace_fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    return Device(tun_fd, namespace_fd, os.fstat(namespace_fd).st_ino)


def _open_tun() -> int:
    """A device belongs to the namespace that its opener is in, and goes away when the file is closed."""
    try:
        fd = os.open(TUN_PATH, os.O_RDWR | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CannotBuild(
            f"{TUN_PATH} is not there; load the kernel's tun module (containers: --device {TUN_PATH})"
        ) from None
    except OSError as error:
        hint = f"run as root, or chmod 666 {TUN_PATH}"
        raise CannotBuild(f"{TUN_PATH} may not be opened ({error.strerror}); {hint}") from None
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("=16sH22x", DEVICE, IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN)
    except OSError as error:
        raise CannotBuild(f"no TUN device with offload can be made here ({error.strerror})") from None
    return fd


def _lengthen_device_queue() -> None:
    """Over netlink, because the older ioctl is for the machine's own root alone."""
    link = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, socket.if_nametoindex(DEVICE.decode()), 0, 0)
    link += struct.pack("=HHI", 8, IFLA_TXQLEN, DEVICE_QUEUE_PACKETS)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(
            struct.pack("=IHHII", 16 + len(link), RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0) + link
        )
        (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    if error:
        raise CannotBuild(f"the queue of the device in a host cannot be set: {os.strerror(-error)}")


def _ask(asking: socket.socket, request: int, name: bytes, value: bytes) -> None:
    """One ioctl with a struct ifreq."""
    fcntl.ioctl(asking, request, struct.pack("=16s24s", name, value))


def _set_sysctl(name: str, value: str) -> None:
    """A container may show them read-only, or not at all: then the kernel's default stands."""
    path = Path("/proc/sys", name)
    if path.exists() and os.access(path, os.W_OK, effective_ids=True):
        path.write_text(value)


def kill_everything_in(namespace_ids: set[int]) -> None:
    """Until a look finds nothing: what is being killed may have forked just before."""
    while victims := [pid for pid in _process_ids() if _namespace_of(pid) in namespace_ids]:
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended by itself in between


def _process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _namespace_of(pid: int) -> int | None:
    """None for a process that has ended, and for those of other users, which cannot be in a namespace of ours."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None
