"""How much memory taking part needs, on paper: of each thing that is kept, who keeps it, where, and how large it is.

Called by the doctor before anybody joins, by a script that joins, by whoever says which stages fit, and by the table of
docs/memory.md.  A test holds it to what small runs really take.  Must not know how much memory there is here, or how
that is found; what a script's own activations take, nobody can say on paper.

A value is one number that is exchanged: a parameter that trains, or one of a buffer.  Sizes are those of the busiest
moment: a round in which all have sent and nobody is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from farflung.protocol.caps import RESULTS_BYTES, si
from farflung.protocol.limits import ROUNDS_KEPT
from farflung.protocol.manifest import Manifest
from farflung.protocol.outer_numbers import VALUE_BYTES
from farflung.protocol.round_words import AUTO, LADDER, SUM_CODEC, bits_per_value

Place = Literal["GPU", "shared", "host", "disk"]
Owner = Literal["agent", "trainer"]
SLOTS = 3  # that files are made for; pages are taken only by those that are written
SLOTS_OF_WAITING, SLOTS_USUAL = 1, 2  # written where no round fails: in "blocking", and in all others
GPU_TILES_BYTES = 14 * (16 << 20)  # two lanes of at most seven tiles each: see peer/trainer/fused.py
AGENT_BYTES, TRAINER_BYTES = 200_000_000, 400_000_000  # Python and torch, before there is any model
ADAM_BYTES = 8.0  # two moments in fp32
# Of [inner] optimizer, for a value: docs/learning.md, "On a small GPU".
OPTIMIZER_BYTES = {
    "adamw": ADAM_BYTES,
    "muon": 4.12,
    "adamw8bit": 2.04,
    "galore": 2.51,
    "apollo": 2.51,
    "apollo-mini": 0.28,
    "adam-mini": 4.01,
    "soap": 37.72,
}


class FootprintRow(NamedTuple):
    owner: Owner
    place: Place
    what: str
    size_bytes: float
    only_when: str = ""  # it is not always there


@dataclass(frozen=True)
class MemoryRules:
    """Of a run, and of this volunteer, what decides about memory."""

    state_parts: int
    codec: str = "int8"
    gather_codec: str = "int8"
    goes_on: bool = False  # training does, during rounds
    keep_results: int = 3
    is_audited: bool = True
    is_batch: bool = False  # gradients are summed, and no steps taken between rounds ...
    is_local: bool = False  # ... or steps of the stages' own
    fragments: int = 1
    results_limit_bytes: int = RESULTS_BYTES
    results_on_disk: bool = False
    group: int = 0  # members of one, where rounds are in groups
    is_evaluated: bool = False  # the run has a held-out loss

    @classmethod
    def of(
        cls, manifest: Manifest, results_limit_bytes: int = RESULTS_BYTES, results_on_disk: bool = False
    ) -> MemoryRules:
        rounds, pipeline = manifest.round, manifest.pipeline
        return cls(
            state_parts=manifest.outer_numbers.parts,
            codec=rounds.codec,
            gather_codec=rounds.gather_codec,
            goes_on=manifest.outer.schedule != "blocking",
            keep_results=rounds.keep_results,
            is_audited=manifest.merge.audit > 0,
            is_batch=pipeline.batch > 0,
            is_local=pipeline.mode == "local",
            fragments=rounds.fragments,
            results_limit_bytes=results_limit_bytes,
            results_on_disk=results_on_disk,
            group=rounds.group,
            is_evaluated=bool(manifest.eval.source),
        )


@dataclass(frozen=True)
class ModelSize:
    """What a trainer holds of one: `value_bytes` of its own dtype; `is_here`: its weights have their memory already."""

    values: float
    value_bytes: float = VALUE_BYTES
    optimizer_bytes: float = ADAM_BYTES  # for a value
    on_gpu: bool = False
    is_here: bool = False


class MemoryNeed(NamedTuple):
    gpu_bytes: float
    host_bytes: float  # `shared_bytes` are in it
    shared_bytes: float
    disk_bytes: float

    def within(self, room: FreeMemory) -> bool:
        """Where no GPU computes, all of it is the host's."""
        if room.gpu_bytes is None:
            return self.gpu_bytes + self.host_bytes <= room.host_bytes
        return self.gpu_bytes <= room.gpu_bytes and self.host_bytes <= room.host_bytes


class FreeMemory(NamedTuple):
    """Bytes that are free.  `gpu_bytes` is None where the host computes."""

    gpu_bytes: float | None
    host_bytes: float


def need_of(rows: Iterable[FootprintRow]) -> MemoryNeed:
    """Of what is always there."""
    sums = {"GPU": 0.0, "host": 0.0, "shared": 0.0, "disk": 0.0}
    for row in rows:
        if not row.only_when:
            sums[row.place] += row.size_bytes
    return MemoryNeed(sums["GPU"], sums["host"] + sums["shared"], sums["shared"], sums["disk"])


# ---- who takes part, and how


def of_peer(rules: MemoryRules, model: ModelSize, ranks: int = 1, sharded: bool = True) -> list[FootprintRow]:
    """Of a plain peer, or of an island with so many ranks on the agent's node, GPU memory being that of one rank.
    `sharded`: each rank holds its share of the model; else each holds all of it."""
    share = model.values / ranks if sharded else model.values
    return [
        *of_shared(rules, model.values),
        *of_agent(rules, model.values),
        *of_rank(rules, model, share, ranks),
    ]


def of_rank(rules: MemoryRules, model: ModelSize, share: float, ranks: int = 1) -> list[FootprintRow]:
    """Of the trainers of a node.  `share`: the values that each of them holds."""
    computes: Place = "GPU" if model.on_gpu else "host"
    many = 1 if model.on_gpu else ranks
    size, copies = model.value_bytes, ranks * share
    rows = [
        FootprintRow("trainer", computes, "gradients", many * size * share),
        FootprintRow("trainer", computes, "inner optimizer", many * model.optimizer_bytes * share),
    ]
    if not model.is_here:
        rows.insert(0, FootprintRow("trainer", computes, "weights", many * size * share))
    if model.on_gpu:
        rows.append(FootprintRow("trainer", "GPU", "tiles on their way", GPU_TILES_BYTES))
    late = "" if rules.goes_on else "after a round that was missed"
    rows += [
        FootprintRow("trainer", "host", "what was loaded", size * copies),
        FootprintRow("trainer", "host", "what is carried", VALUE_BYTES * copies, late),
    ]
    if rules.is_evaluated and ranks == 1:
        rows.append(FootprintRow("trainer", "host", "its model, while a version is evaluated", size * copies))
    if rules.fragments > 1:
        rows.append(
            FootprintRow("trainer", "host", "before a step", size * copies, "where a lease is read again")
        )
    return rows


def of_stage(rules: MemoryRules, compute_bytes: float, values: float, trained: float) -> list[FootprintRow]:
    """`compute_bytes`: parameters, buffers and sums of gradients."""
    rows = [*of_shared(rules, values), *of_agent(rules, values)]
    rows.append(FootprintRow("trainer", "GPU", "weights, buffers, sums of gradients", compute_bytes))
    if rules.is_local:
        rows.append(FootprintRow("trainer", "GPU", "inner optimizer", ADAM_BYTES * trained))
        rows.append(FootprintRow("trainer", "host", "what was loaded", VALUE_BYTES * values))
    return rows


def of_helper(rules: MemoryRules, values: float) -> list[FootprintRow]:
    """No trainer, no contributions of its own: no slot is ever written."""
    state = [row for row in of_shared(rules, values) if not row.what.startswith("slots")]
    theirs = [row for row in of_agent(rules, values) if not row.what.startswith("own")]
    return [*state, *theirs]


def of_processes(trainers: int = 1) -> list[FootprintRow]:
    """Before there is any model.  What CUDA takes of a host comes on top, and was never measured."""
    return [
        FootprintRow("agent", "host", "Python and torch", AGENT_BYTES),
        FootprintRow("trainer", "host", "Python and torch", trainers * TRAINER_BYTES),
    ]


# ---- the agent's


def of_shared(rules: MemoryRules, values: float) -> list[FootprintRow]:
    copy = VALUE_BYTES * values
    waits = not (rules.goes_on or rules.is_batch)
    slots = SLOTS_OF_WAITING if waits else SLOTS_USUAL
    rows = [
        FootprintRow("agent", "shared", "parameters and moments", rules.state_parts * copy),
        FootprintRow("agent", "shared", "slots of what was learned", slots * copy),
    ]
    late = "after a round that failed"
    rows.append(FootprintRow("agent", "shared", "slots more", (SLOTS - slots) * copy, late))
    return rows


def of_agent(rules: MemoryRules, values: float) -> list[FootprintRow]:
    sent, result = payload_bytes(rules.codec, values), payload_bytes(rules.gather_codec, values)
    kept = ROUNDS_KEPT if rules.is_audited else 0
    rows = [
        FootprintRow("agent", "host", "others' contributions to its chunks", sent),
        FootprintRow("agent", "host", "results of this round", result),
        FootprintRow("agent", "host", "results of past rounds", _results_kept(rules, result) * result),
    ]
    if rules.group:
        # Its own ones of this round and of those before, and as a root those of all groups to a part of its chunks.
        sums = payload_bytes(SUM_CODEC, values) / rules.group
        rows.append(FootprintRow("agent", "host", "sums of groups", (2 + kept) * sums))
    if rules.codec == AUTO or rules.codec not in ("fp32", "bf16", "int8"):
        late = "once a coarse codec was used" if rules.codec == AUTO else ""
        rows.append(FootprintRow("agent", "host", "own error feedback", VALUE_BYTES * values, late))
    rows.append(FootprintRow("agent", "disk", "own contribution", sent))
    rows.append(FootprintRow("agent", "disk", "own contributions, kept for audits", kept * sent))
    rows.append(
        FootprintRow("agent", "disk", "state before the round", rules.state_parts * VALUE_BYTES * values)
    )
    if rules.results_on_disk:
        rows.append(FootprintRow("agent", "disk", "results of past rounds", rules.keep_results * result))
    return rows


def payload_bytes(codec: str, values: float) -> float:
    """Of a contribution or a result in all its chunks; "auto" at its finest."""
    return bits_per_value(LADDER[0] if codec == AUTO else codec) / 8 * values


def _results_kept(rules: MemoryRules, result_bytes: float) -> int:
    """Rounds, the newest of which is always kept."""
    if rules.results_on_disk or not result_bytes:
        return 1
    return max(1, min(rules.keep_results, int(rules.results_limit_bytes // result_bytes)))


def files_bytes(rules: MemoryRules, values: float) -> float:
    """That /dev/shm must have free: all slots may be written in the worst of rounds."""
    return (rules.state_parts + SLOTS) * VALUE_BYTES * values


# ---- does it fit


class FitAnswer(NamedTuple):
    fits: bool
    text: str  # what is needed, and what is here
    todo: str  # empty: nothing


def told(rows: list[FootprintRow], rules: MemoryRules, values: float, room: FreeMemory) -> FitAnswer:
    """In one line."""
    need = need_of(rows)
    if room.gpu_bytes is None:
        parts = _of(rows, "shared"), _of(rows, "host", "agent"), _of(rows, "host", "trainer")
        text = f"about {si(need.host_bytes, 'B')} of memory needed ({_split(parts)}), {si(room.host_bytes, 'B')} free"
    else:
        parts = _of(rows, "shared"), _of(rows, "host", "agent"), _of(rows, "host", "trainer")
        text = (
            f"about {si(need.gpu_bytes, 'B')} of GPU memory and what the script's batches take, "
            f"{si(room.gpu_bytes, 'B')} free; {si(need.host_bytes, 'B')} of host memory ({_split(parts)}), "
            f"{si(room.host_bytes, 'B')} free"
        )
    if need.within(room):
        return FitAnswer(True, text, "")
    return FitAnswer(False, text, _todo(rows, rules, values, room))


def _of(rows: Iterable[FootprintRow], place: Place, owner: Owner | None = None) -> float:
    return sum(
        row.size_bytes
        for row in rows
        if row.place == place and owner in (None, row.owner) and not row.only_when
    )


def _split(parts: tuple[float, float, float]) -> str:
    shared, agent, trainer = (si(each, "B") for each in parts)
    return f"{shared} shared, {agent} the agent's, {trainer} the trainer's"


def _todo(rows: list[FootprintRow], rules: MemoryRules, values: float, room: FreeMemory) -> str:
    """What this volunteer can change, if that is enough; else what its host can; else another machine."""
    need = need_of(rows)
    if room.gpu_bytes is not None and need.gpu_bytes > room.gpu_bytes:
        return (
            "end other programs on the GPU, shard the model over several (docs/islands.md), or take an inner optimizer "
            "that keeps less (docs/learning.md)"
        )
    missing = need.host_bytes + (need.gpu_bytes if room.gpu_bytes is None else 0.0) - room.host_bytes
    result = payload_bytes(rules.gather_codec, values)
    spared = (_results_kept(rules, result) - 1) * result
    if missing <= spared:
        return 'results = "2 GB on disk" in your own config is enough (docs/memory.md); or end other programs'
    return f"{si(missing, 'B')} are missing: end other programs, or take a machine with more memory"
