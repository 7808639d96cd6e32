"""What the doctor thinks of a machine: from facts to findings, each with what to do.  Pure.

Called by console/inspect_commands.py, which asks facts.py for the facts.  Must not know how facts are found.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import NamedTuple

from farflung.console.screen.gpu import Gpu
from farflung.peer.footprint import (
    OPTIMIZER_BYTES,
    FreeMemory,
    MemoryNeed,
    MemoryRules,
    ModelSize,
    files_bytes,
    need_of,
    of_peer,
    of_processes,
    told,
)
from farflung.protocol.caps import RESULTS_BYTES, duration, si
from farflung.protocol.manifest import Manifest
from farflung.protocol.outer_numbers import VALUE_BYTES
from farflung.protocol.round_words import AUTO, LADDER, bits_per_value

GIB = 1 << 30
OK, WARN, FAIL = "ok", "warn", "FAIL"
SLOW_RTT_S = 0.5
CLOCK_S = 5.0
LEAST_PORT = 1024  # see coordinator/reach/hole_punching.py
LITTLE_DISK_BYTES = 1 << 30
LEAST_DISK_BYTES = 64 << 20  # a journal alone may take half of it
RESERVE = 1.3  # of memory: less is a warning


class Advice(NamedTuple):
    name: str
    verdict: str
    text: str
    todo: str = ""


@dataclass(frozen=True)
class LineToCoordinator:
    """To the coordinator, as facts.py measures it."""

    rtt_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    came_from: str  # this machine's address as the coordinator sees it
    clock_ahead_s: float  # of this machine's clock
    # The line may carry more: the test ended early, or the coordinator gave no more to strangers.
    bounded: bool


class CheckpointPlace(NamedTuple):
    """One address of the join URL."""

    address: str
    problem: str  # empty: the coordinator answers there


@dataclass(frozen=True)
class RelayFacts:
    """Where peers meet that nobody can dial, as the status tells of it."""

    port: int = 0
    bytes_per_s: float = 0.0
    why_not: str = ""  # this run has none
    silent: str = ""  # why it could not be asked from here
    offered: tuple[float, ...] = ()  # bytes a second of each that a member offers, through which bytes came


@dataclass(frozen=True)
class SeenPort:
    """One port of this machine, as two sockets of the coordinator see it: HOST:PORT, empty where one did not say."""

    local_port: int
    by_door: str
    by_relay: str


class HeldPart:
    """What a peer holds of the run's model: all of it.  A mode may say otherwise (`OTHER_PARTS` in facts.py)."""

    def held_bytes(self, facts: MachineFacts) -> int | None:
        """In fp32; None: it is not known yet."""
        return facts.model_bytes

    def fellows(self, facts: MachineFacts) -> int:
        """Peers that hold the same, and so are in a round with this one."""
        return facts.alive

    def memory(self, facts: MachineFacts) -> Advice | None:
        """None: the model's size alone says whether it fits."""
        return None

    def on_line(self, facts: MachineFacts, line: LineToCoordinator) -> list[Advice]:
        """Of what else than rounds the line carries."""
        return []


@dataclass
class MachineFacts:
    """What was found out; None and empty where it was not."""

    farflung: str
    python: str
    torch: str
    cuda: str  # of torch: "", or why it cannot be used
    gpus: list[Gpu]
    cores: int
    memory_bytes: int  # available now
    shared_bytes: int  # free in /dev/shm
    home: str
    disk_bytes: int  # free where the key and the journal live
    shared_problem: str = ""  # why a file can't be written there
    disk_problem: str = ""  # likewise, where the key lives
    manifest: Manifest | None = None
    run_software: str = ""
    alive: int = 0
    model_bytes: int | None = None
    line: LineToCoordinator | None = None
    unreachable: str = ""  # why the coordinator could not be asked
    refused: str = ""
    places: tuple[CheckpointPlace, ...] = ()  # that the join URL names
    local_address: str = ""
    dialled: tuple[str, str] | None = None  # the address, and what came of it
    wants_dialling: bool = True
    relay: RelayFacts | None = None  # of the coordinator
    seen: SeenPort | None = None  # None: this coordinator names no instants
    limits: tuple[float | None, float | None] = (None, None)  # own caps, up and down, bytes per second
    lacking: str = ""  # why this installation can't be in the run: and what to do
    part: HeldPart = field(default_factory=HeldPart)
    results_limit_bytes: int = RESULTS_BYTES  # of past rounds, as the volunteer says
    results_on_disk: bool = False
    notes: list[str] = field(default_factory=list)


def examine(facts: MachineFacts) -> list[Advice]:
    findings = [_versions(facts), _gpu(facts), _cpu(facts), _memory(facts), _shared(facts), _disk(facts)]
    if facts.unreachable or facts.refused:
        findings.append(_no_answer(facts))
    if facts.line is not None:
        findings += [_rtt(facts.line), _clock(facts.line)]
    if len(facts.places) > 1:
        findings.append(_places(facts.places))
    if facts.dialled is not None or (facts.line is not None and not facts.wants_dialling):
        findings.append(_reach(facts))
    if facts.seen is not None:
        findings.append(_router(facts.seen, facts.dialled is not None and facts.dialled[1] == "yes"))
    if facts.relay is not None:
        findings.append(_relay(facts.relay, facts.dialled is None or facts.dialled[1] != "yes"))
    if facts.line is not None:
        findings.append(_bandwidth(facts.line))
        if facts.manifest is not None:
            findings.append(_round(facts, facts.manifest, facts.line))
            findings += facts.part.on_line(facts, facts.line)
            findings.append(_room(facts, facts.manifest))
    return findings


# ---- this machine -----------------------------------------------------------------------------------------


def _versions(facts: MachineFacts) -> Advice:
    here = f"farflung {facts.farflung}, Python {facts.python}, torch {facts.torch or 'not installed'}"
    if not facts.torch:
        return Advice("versions", FAIL, here, "install torch: https://pytorch.org/get-started")
    if facts.lacking:
        why, _, todo = facts.lacking.partition(": ")
        return Advice("versions", FAIL, f"{here}; {why}", todo)
    if facts.run_software and facts.run_software != facts.farflung:
        both = f"{here}; the coordinator has farflung {facts.run_software}"
        return Advice("versions", WARN, both, "install the same farflung version as the coordinator")
    return Advice("versions", OK, here)


def _gpu(facts: MachineFacts) -> Advice:
    if not facts.gpus:
        return Advice("GPU", WARN, "none found (no nvidia-smi): training runs on the CPU, slowly")
    first = facts.gpus[0]
    busy = f", {first.used:.0%} in use now" if first.used is not None and first.used > 0.2 else ""
    memory = f"{si(first.memory_used_bytes, 'B')} of {si(first.memory_bytes, 'B')} used"
    text = f"{len(facts.gpus)} x {first.name}, driver {first.driver}, {memory}{busy}"
    if facts.cuda:
        return Advice(
            "GPU",
            FAIL,
            f"{text}, but torch cannot use it: {facts.cuda}",
            "install a torch built for this driver",
        )
    if first.memory_used_bytes > 0.5 * first.memory_bytes > 0:
        return Advice("GPU", WARN, text, "another program holds most of its memory: end it first")
    return Advice("GPU", OK, text)


def _cpu(facts: MachineFacts) -> Advice:
    if facts.cores < 2:
        return Advice("CPU", WARN, "1 core: trainer and network share it", "rounds will take longer here")
    return Advice("CPU", OK, f"{facts.cores} cores")


def _memory(facts: MachineFacts) -> Advice:
    if (of_part := facts.part.memory(facts)) is not None:
        return of_part
    if facts.model_bytes is None:
        have = f"{si(facts.memory_bytes, 'B')} free"
        return Advice("memory", OK, f"{have}; the model's size is not known yet")
    rules, room, values = rules_of(facts), room_here(facts), facts.model_bytes / VALUE_BYTES
    # The weights' dtype is not known before somebody trains here: of the largest one.
    model = ModelSize(values, optimizer_bytes=_optimizer_bytes(facts), on_gpu=room.gpu_bytes is not None)
    rows = [*of_processes(), *of_peer(rules, model)]
    found = told(rows, rules, values, room)
    if not found.fits:
        return Advice("memory", FAIL, found.text, found.todo)
    tight = not _with_reserve(need_of(rows)).within(room)
    return Advice("memory", WARN if tight else OK, found.text)


def _with_reserve(need: MemoryNeed) -> MemoryNeed:
    """For what nobody knows on paper."""
    return need._replace(gpu_bytes=RESERVE * need.gpu_bytes, host_bytes=RESERVE * need.host_bytes)


def _optimizer_bytes(facts: MachineFacts) -> float:
    return OPTIMIZER_BYTES["adamw" if facts.manifest is None else facts.manifest.inner.optimizer]


def rules_of(facts: MachineFacts) -> MemoryRules:
    return MemoryRules.of(facts.manifest or Manifest(), facts.results_limit_bytes, facts.results_on_disk)


def room_here(facts: MachineFacts) -> FreeMemory:
    computes = bool(facts.gpus) and not facts.cuda
    free = facts.gpus[0].memory_bytes - facts.gpus[0].memory_used_bytes if computes else None
    return FreeMemory(free, facts.memory_bytes)


def _shared(facts: MachineFacts) -> Advice:
    need = files_bytes(rules_of(facts), (facts.part.held_bytes(facts) or 0) / VALUE_BYTES)
    text = f"{si(facts.shared_bytes, 'B')} free in /dev/shm" + (f", {si(need, 'B')} needed" if need else "")
    todo = "a file in /tmp is used instead, which may be slow; in Docker: --shm-size"
    if facts.shared_problem:
        return Advice("shared memory", WARN, f"/dev/shm can't be written: {facts.shared_problem}", todo)
    if need > facts.shared_bytes:
        return Advice("shared memory", WARN, text, todo)
    return Advice("shared memory", OK, text)


def _disk(facts: MachineFacts) -> Advice:
    """What chunks were before a round is kept there, and results if asked: for as long as the run lasts."""
    keeps = (
        "a peer keeps its key, its state and its log there: make room, or set FARFLUNG_HOME to another folder"
    )
    if facts.disk_problem:
        return Advice("disk", FAIL, f"{facts.home} can't be written: {facts.disk_problem}", keeps)
    free = f"{si(facts.disk_bytes, 'B')} free at {facts.home}"
    if facts.disk_bytes < LEAST_DISK_BYTES:
        return Advice("disk", FAIL, free, keeps)
    values = (facts.part.held_bytes(facts) or 0) / VALUE_BYTES
    need = need_of(of_peer(rules_of(facts), ModelSize(values))).disk_bytes
    text = (
        f"{free}, {si(need, 'B')} needed for what the state was before a round and what was sent"
        if need
        else free
    )
    little = facts.disk_bytes < max(need, LITTLE_DISK_BYTES)
    return Advice(
        "disk", WARN if little else OK, text, "make room for that, for logs and checkpoints" if little else ""
    )


# ---- the way to the run -----------------------------------------------------------------------------------


def _no_answer(facts: MachineFacts) -> Advice:
    if facts.refused:
        return Advice("coordinator", FAIL, facts.refused, "ask whoever gave you the URL for a new one")
    return Advice("coordinator", FAIL, facts.unreachable, "without it nobody can join")


def _places(places: tuple[CheckpointPlace, ...]) -> Advice:
    dead = [each for each in places if each.problem]
    if not dead:
        return Advice("addresses", OK, f"the coordinator answers at all {len(places)} that the URL names")
    told = "; ".join(f"{each.address}: {each.problem}" for each in dead)
    if len(dead) == len(places):
        return Advice("addresses", FAIL, told, "ask whoever gave you the URL for a new one")
    text = f"{len(places) - len(dead)} of {len(places)} answer; {told}"
    return Advice("addresses", WARN, text, "you can join by the others; tell the host of the run")


def _rtt(line: LineToCoordinator) -> Advice:
    text = (
        f"answers after {max(1.0, 1000 * line.rtt_s):.0f} ms; it sees this machine at {line.came_from or '?'}"
    )
    return Advice("coordinator", WARN if line.rtt_s > SLOW_RTT_S else OK, text)


def _clock(line: LineToCoordinator) -> Advice:
    ahead = line.clock_ahead_s
    if abs(ahead) < CLOCK_S:
        return Advice("clock", OK, f"within {max(0.1, abs(ahead)):.1f} s of the coordinator's")
    word = "ahead of" if ahead > 0 else "behind"
    text = f"{duration(abs(ahead))} {word} the coordinator's: training does not mind, times in logs differ"
    return Advice("clock", WARN, text, "set the clock (timedatectl set-ntp true)")


def nat_kind(local: str, seen: str) -> str:
    """What can be said without sending anything to third parties."""
    if not local or not seen:
        return "not known"
    if local == seen:
        return "no NAT on the way"
    shared = ipaddress.ip_address(local) in ipaddress.ip_network("100.64.0.0/10")
    return "behind the NAT of a provider" if shared else "behind a NAT"


def _reach(facts: MachineFacts) -> Advice:
    seen = facts.line.came_from if facts.line is not None else ""
    nat = nat_kind(facts.local_address, seen)
    if not facts.wants_dialling:
        return Advice(
            "reachable", OK, f"not asked for (--listen off), {nat}: whoever can be dialled owns its chunks"
        )
    assert facts.dialled is not None
    address, said = facts.dialled
    if said == "yes":
        return Advice(
            "reachable", OK, f"the coordinator dialled {address}; {nat}. Other peers may still be blocked"
        )
    forward = f"forward a port of your router and use --listen 0.0.0.0:PORT --advertise {seen or 'HOST'}:PORT"
    todo = (
        "nothing must be done: it takes part, and meets others past its router or at the relay (see below). "
    )
    todo += f"Better for all: {forward}"
    if said == "no":
        return Advice("reachable", WARN, f"nobody can dial {address} ({nat})", todo)
    return Advice("reachable", WARN, f"{address}: {said} ({nat})", todo)


def _router(seen: SeenPort, is_dialled: bool) -> Advice:
    """Can others behind routers meet this machine?  From one port both sockets must see one."""
    if not seen.by_door:
        return Advice(
            "router", OK if is_dialled else WARN, "the coordinator did not say from which port it sees you"
        )
    door_port = int(seen.by_door.rpartition(":")[2])
    if seen.by_relay and seen.by_relay != seen.by_door:
        told = f"another port for each connection (it shows {seen.by_door} and {seen.by_relay}): nobody can meet you"
        todo = "others reach you over the relay; where the router has such a setting, let it keep ports (a NAT that is "
        todo += "`endpoint-independent`, `full cone` or `open`), or forward a port"
        return Advice("router", OK if is_dialled else WARN, told, "" if is_dialled else todo)
    if door_port < LEAST_PORT:
        return Advice(
            "router", WARN, f"it shows you at port {door_port}: nobody is sent to one below {LEAST_PORT}"
        )
    if seen.by_relay:
        why = f"it keeps one port for all connections ({seen.by_door})"
        return Advice("router", OK, f"{why}: hole punching should work")
    kept = "the same as here, so probably" if door_port == seen.local_port else "it is not known whether"
    told = f"the door sees port {door_port}, {kept} others behind routers meet you; no relay can be asked as well"
    return Advice("router", OK, told)


def _relay(relay: RelayFacts, is_needed: bool) -> Advice:
    more = ""
    if relay.offered:
        count = len(relay.offered)
        more = f"{count} of a peer" if count == 1 else f"{count} of peers"
        more = f"{more}, {si(8 * sum(relay.offered), 'bit/s')}"
    if more and (relay.why_not or relay.silent):
        why = relay.why_not or f"port {relay.port} of the coordinator does not answer ({relay.silent})"
        return Advice("relay", OK, f"{more}; none of the host's: {why}")
    if relay.why_not:
        todo = "somebody in the run must be dialable: forward a port of your router" if is_needed else ""
        return Advice("relay", WARN if is_needed else OK, f"this run has none: {relay.why_not}", todo)
    if relay.silent:
        todo = f"ask the host to let TCP port {relay.port} through its firewall (docs/host.md)"
        told = f"port {relay.port} of the coordinator does not answer: {relay.silent}"
        return Advice("relay", WARN if is_needed else OK, told, todo)
    rate = si(8 * relay.bytes_per_s, "bit/s")
    use = "it is what those reach you by who can't otherwise" if is_needed else "not needed here"
    more = f", and {more}" if more else ""
    return Advice("relay", OK, f"answers on port {relay.port}, {rate} for all who use it{more}; {use}")


def _bandwidth(line: LineToCoordinator) -> Advice:
    up, down = si(8 * line.up_bytes_per_s, "bit/s"), si(8 * line.down_bytes_per_s, "bit/s")
    least = "at least " if line.bounded else ""
    return Advice("line", OK, f"{least}{up} up, {down} down, measured to the coordinator; peers may differ")


# ---- what it means for the run ----------------------------------------------------------------------------


def round_bytes(model_bytes: float, codec: str, gather_codec: str, peers: int) -> float:
    """Bytes that one of so many equal peers sends in a round; it receives as many."""
    values = model_bytes / 4
    both = (bits_per_value(codec) + bits_per_value(gather_codec)) / 8
    return values * both * (peers - 1) / max(peers, 1)


def _round(facts: MachineFacts, manifest: Manifest, line: LineToCoordinator) -> Advice:
    held = facts.part.held_bytes(facts)
    if held is None:
        return Advice("a round here", OK, "unknown until the first peer has joined")
    rules, peers = manifest.round, max(2, facts.part.fellows(facts) + 1)
    up, down = rates_of(facts, line)
    finest = LADDER[0] if rules.codec == AUTO else rules.codec
    size = round_bytes(held, finest, rules.gather_codec, peers)
    took_s = size / max(1.0, min(up, down)) + 3 * line.rtt_s
    text = f"about {duration(took_s)} with {peers} peers: {si(size, 'B')} each way ({finest}, {rules.gather_codec})"
    sending_s = (
        size * bits_per_value(finest) / (bits_per_value(finest) + bits_per_value(rules.gather_codec)) / up
    )
    if took_s > rules.round_timeout_s:
        todo = "use coarser codecs, or raise deadline_s in run.toml"
        return Advice("a round here", FAIL, f"{text}; the run gives {rules.round_timeout_s:g} s", todo)
    if sending_s > rules.scatter_grace_s and rules.codec != AUTO:
        todo = 'codec = "auto" or a coarser one; or raise scatter_grace_s in run.toml'
        late = f"{text}; sending takes {duration(sending_s)}, others wait {rules.scatter_grace_s:g} s"
        return Advice("a round here", WARN, late, todo)
    return Advice("a round here", OK, text)


def rates_of(facts: MachineFacts, line: LineToCoordinator) -> tuple[float, float]:
    """Bytes a second up and down, within the volunteer's own caps."""
    found = zip((line.up_bytes_per_s, line.down_bytes_per_s), facts.limits, strict=True)
    up, down = (rate if limit is None else min(rate, limit) for rate, limit in found)
    return up, down


def _room(facts: MachineFacts, manifest: Manifest) -> Advice:
    run = manifest.run
    text = f"'{run.name}': {facts.alive} of at most {run.max_peers} peers are there"
    if facts.alive >= run.max_peers:
        return Advice("the run", FAIL, text, "wait until somebody leaves, or raise max_peers in run.toml")
    return Advice("the run", OK, text)
