"""The model of the whole network: every host's two lines, joined in the middle by a core that is never the bottleneck.

A parcel from a to b goes through a's line up, then b's line down; both add their delay, jitter and loss.  Cuts apply
where a host's line begins or where two lines meet.  router.py gives it parcels and the time, and carries out what it
says; tests do the same on virtual time.  fast.py is the same, compiled.  It must not know sockets, devices or a clock.
"""

from __future__ import annotations

import math
import random
from operator import itemgetter

from rig.lab.packets import Parcel
from rig.lab.shaping import Counters, Line, LineSpec


def chance_of(seed: int, host: int, way: str) -> random.Random:
    """Of one line, `way` being up or down: what happens on it depends on no other."""
    return random.Random(f"{seed}/{host}/{way}")


class Network:
    def __init__(self, specs: list[tuple[LineSpec, LineSpec]], seed: int) -> None:
        """`specs` holds (up, down) of each host; hosts are known by their place in this list."""
        self._up = [Line(up, chance_of(seed, no, "up")) for no, (up, _) in enumerate(specs)]
        self._down = [Line(down, chance_of(seed, no, "down")) for no, (_, down) in enumerate(specs)]
        self._mute: set[int] = set()  # hosts whose line up is cut
        self._deaf: set[int] = set()  # hosts whose line down is cut
        self._cut_pairs: set[tuple[int, int]] = set()  # (from, to)
        self._worst_late_s = 0.0  # how long a parcel lay finished before `deliver` was called

    def send(self, source: int, parcel: Parcel, now_s: float) -> None:
        """The host `source` sends to `parcel.target`."""
        line = self._up[source]
        if source in self._mute:
            line.counters.cut += parcel.segments
        else:
            line.push(parcel, now_s)

    def deliver(self, now_s: float) -> list[Parcel]:
        """What has reached its target by now, in order for each target."""
        self._cross(now_s)
        delivered = []
        for line in self._down:
            for due_s, parcel in line.pop(now_s):
                self._worst_late_s = max(self._worst_late_s, now_s - due_s)
                delivered.append(parcel)
        return delivered

    def due_s(self) -> float:
        """When `deliver` has something to do next; infinity if nothing is under way.

        What has left a line up may wait for as long as the line down will hold it anyway: that saves a wake-up.
        """
        due_s = math.inf
        for line in self._up:
            target = line.next_target()
            if target is not None:
                due_s = min(due_s, line.due_s() + self._down[target].least_delay_s)
        for line in self._down:
            due_s = min(due_s, line.due_s())
        return due_s

    def cut(self, source: int, target: int | None, one_way: bool, now_s: float) -> None:
        """Without a target, the host's own line: nothing leaves it and, unless `one_way`, nothing reaches it."""
        self._cross(now_s)
        if target is not None:
            self._cut_pairs |= {(source, target)} if one_way else {(source, target), (target, source)}
            return
        self._mute.add(source)
        self._up[source].clear()
        if not one_way:
            self._deaf.add(source)
            self._down[source].clear()

    def heal(self, source: int, target: int | None, now_s: float) -> None:
        """Undoes every cut of the pair, or of the host's own line, whichever way it was."""
        self._cross(now_s)
        if target is None:
            self._mute.discard(source)
            self._deaf.discard(source)
        else:
            self._cut_pairs -= {(source, target), (target, source)}

    def set_rate(self, host: int, up: LineSpec, down: LineSpec, now_s: float) -> None:
        """Rates and queues are taken from the specs; delay, jitter and loss stay as they are."""
        self._cross(now_s)
        self._up[host].set_rate(up.rate_bit_s, up.queue_bytes, now_s)
        self._down[host].set_rate(down.rate_bit_s, down.queue_bytes, now_s)

    def take_worst_late_s(self) -> float:
        """Since it was asked last."""
        worst_s, self._worst_late_s = self._worst_late_s, 0.0
        return worst_s

    def counters(self) -> list[tuple[Counters, Counters]]:
        """(up, down) of each host."""
        return [(up.counters, down.counters) for up, down in zip(self._up, self._down, strict=True)]

    def _cross(self, now_s: float) -> None:
        """From the lines up to the lines down, with the times at which that happened."""
        crossing = [
            (due_s, source, parcel)
            for source, line in enumerate(self._up)
            for due_s, parcel in line.pop(now_s)
        ]
        crossing.sort(key=itemgetter(0))  # a queue takes parcels in the order of arrival, whoever sent them
        for due_s, source, parcel in crossing:
            line = self._down[parcel.target]
            if parcel.target in self._deaf or (source, parcel.target) in self._cut_pairs:
                line.counters.cut += parcel.segments
            else:
                line.push(parcel, due_s)
