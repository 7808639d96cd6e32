"""The process that is the network: it holds one end of every host's TUN device and carries packets by the model's word.

emulator.py starts it and talks to it over a socket: one JSON map per message, one answer to each.  It ends, and ends
whatever runs in its hosts, when it is told to, when the socket closes, or when the process that started it dies.
It decides nothing about the lines; network.py does, or fast.c, which is the same and has this loop too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import socket
import sys
import time
from dataclasses import asdict
from typing import Any

from rig.lab.fast import FastNetwork
from rig.lab.namespaces import (
    CannotBuild,
    Device,
    build_host,
    enter_user_namespace_if_needed,
    kill_everything_in,
)
from rig.lab.network import Network
from rig.lab.packets import TARGET_AT, VNET_BYTES, Parcel, is_ipv4
from rig.lab.shaping import LineSpec

MESSAGE_BYTES = 1 << 17
PACKET_BYTES = 65_535 + VNET_BYTES
# Under load the router looks at its devices this often and not at every packet: many packets for one wake-up.
# As in fast.c, like the number below.
TURN_S = 0.0005
READS_IN_A_ROW = 64  # then the other hosts get their turn


class Router:
    def __init__(
        self, control: socket.socket, parent_fd: int, network: Network | FastNetwork, hosts: dict[str, Device]
    ) -> None:
        self._control, self._parent_fd, self._network = control, parent_fd, network
        self._addresses = list(hosts)
        self._tun_fds = [device.tun_fd for device in hosts.values()]
        self._host_of_fd = {fd: host for host, fd in enumerate(self._tun_fds)}
        self._host_of_address = {socket.inet_aton(address): host for host, address in enumerate(hosts)}
        self._stopping = False

    def run(self) -> None:
        watched = [self._control.fileno(), self._parent_fd]
        while not self._stopping:
            if isinstance(self._network, FastNetwork):
                self._network.carry(self._tun_fds, self._addresses, watched)
            else:
                self._carry(self._network, watched)
            called, _, _ = select.select(watched, [], [], 0)
            if self._parent_fd in called:
                self._stopping = True  # a process's file is readable once it is dead
            elif called:
                self._obey()

    def _carry(self, network: Network, watched: list[int]) -> None:
        """Packets between the hosts' devices, until one of the watched files can be read."""
        called = False
        while not called:
            due_s = network.due_s()
            wait_s = None if due_s == float("inf") else max(0.0, due_s - time.monotonic())
            ready, _, _ = select.select([*self._tun_fds, *watched], [], [], wait_s)
            turned_s = time.monotonic()
            for fd in ready:
                if fd in self._host_of_fd:
                    self._read(fd)
                else:
                    called = True
            for parcel in network.deliver(time.monotonic()):
                os.write(self._tun_fds[parcel.target], parcel.data)
            rest_s = turned_s + TURN_S - time.monotonic()
            if rest_s > 0 and not called:
                time.sleep(rest_s)

    def _read(self, fd: int) -> None:
        source, now_s = self._host_of_fd[fd], time.monotonic()
        for _ in range(READS_IN_A_ROW):
            try:
                data = os.read(fd, PACKET_BYTES)
            except BlockingIOError:
                return
            if is_ipv4(data):
                target = self._host_of_address.get(data[TARGET_AT : TARGET_AT + 4])
                if target is not None:  # else multicast, or an address that nobody has
                    self._network.send(source, Parcel(data, target), now_s)

    def _obey(self) -> None:
        message = self._control.recv(MESSAGE_BYTES)
        if not message:
            self._stopping = True
            return
        answer = self._answer(json.loads(message))
        self._control.send(json.dumps(answer).encode())

    def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        match order.pop("do"):
            case "cut":
                self._network.cut(**order, now_s=time.monotonic())
            case "heal":
                self._network.heal(**order, now_s=time.monotonic())
            case "set_rate":
                up, down = LineSpec(**order["up"]), LineSpec(**order["down"])
                self._network.set_rate(order["host"], up, down, time.monotonic())
            case "counters":
                return {"hosts": [[asdict(up), asdict(down)] for up, down in self._network.counters()]}
            case "effort":
                used = resource.getrusage(resource.RUSAGE_SELF)
                worst_late_s = self._network.take_worst_late_s()
                return {"cpu_s": used.ru_utime + used.ru_stime, "worst_late_s": worst_late_s}
        return {}


def build(order: dict[str, Any]) -> tuple[bool, dict[str, Device]]:
    """(whether a user namespace was needed, the hosts by address)."""
    in_user_namespace = enter_user_namespace_if_needed()
    hosts = {address: build_host(address, order["tcp_buffer_bytes"]) for address in order["addresses"]}
    return in_user_namespace, hosts


def keep_its_time() -> None:
    """A network does not wait for the hosts' processors.  Where this may not be asked for, lateness tells."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def main(control_fd: int, parent_fd: int) -> None:
    control = socket.socket(fileno=control_fd)
    order = json.loads(control.recv(MESSAGE_BYTES))
    try:
        in_user_namespace, hosts = build(order)
    except (CannotBuild, OSError) as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    fds = [device.namespace_fd for device in hosts.values()]
    if in_user_namespace:
        fds.append(os.open("/proc/self/ns/user", os.O_RDONLY))
    answer = {"user_namespace": in_user_namespace}
    socket.send_fds(control, [json.dumps(answer).encode()], fds)
    specs = [(LineSpec(**up), LineSpec(**down)) for up, down in order["lines"]]
    library, seed = order["library"], order["seed"]
    network = FastNetwork(library, specs, seed) if library else Network(specs, seed)
    keep_its_time()
    gc.disable()  # parcels form no cycles, and a pause would be a delay on every line
    try:
        Router(control, parent_fd, network, hosts).run()
    finally:
        kill_everything_in({device.namespace_id for device in hosts.values()})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
