"""Batches of a model in stages, with real agents, lines and coordinator on this machine.

Called by benchmarks/stages.py.  It starts the coordinator and the crowd (crowd.py), whose trainers take a given time
for a microbatch and compute nothing; then it reads the event logs.  So what the program itself costs shows as the
distance from an ideal that is known.  Must not know how a microbatch travels.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from stage_bench.crowd import CrowdOptions
from stage_bench.deaths import MOMENTS, DeathPlan, Moment
from stage_bench.pipeline_figures import BenchSetting, result_of
from stage_bench.sham_stage import CHUNKS, border_of, model_of

from farflung.console.bench.bench import BenchProcesses, stopped_in_good_order
from farflung.protocol.caps import parse_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.limits import FRAGMENTS_MAX, MEMBERS_PER_ROUND, MICROS_PER_BATCH
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.journal import read_events

BENCHMARKS = Path(__file__).resolve().parents[1]
PEERS_MOST = 64  # each is a process here

# Nothing is timed out, as in the other bench.  Heartbeats are those that a run has by default.
RUN_TOML = """
[run]
name = "bench"
rounds = {rounds}
min_peers = {min_peers}
max_peers = 256
[model]
kind = ""
[data]
source = ""
[outer]
step = "adamw"
[merge]
policy = "mean"
[round]
codec = "fp32"
gather_codec = "fp32"
chunk_kb = {chunk_kb}
deadline_s = 36000.0
scatter_grace_s = 36000.0
[admission]
joins_at_once = 256
[pipeline]
batch = {batch}
stages = {stages}
codec = "fp32"
min_per_stage = {min_per_stage}
rebalance_s = {rebalance_s}
"""


@dataclass(frozen=True)
class PipelineOptions:
    stages: Annotated[int, typer.Option(help="Into how many stages the model is cut.")] = 4
    seats: Annotated[str, typer.Option(help="Peers in each stage: 4, or one number for each, 3,5,5,3.")] = "4"
    unit_ms: Annotated[
        str,
        typer.Option(help="How long a trainer takes for a microbatch, there and back: one number a stage."),
    ] = "15,20,20,40"
    batch: Annotated[int, typer.Option(help="Microbatches in a batch.")] = 1500
    batches: Annotated[int, typer.Option(help="Batches to measure; one more warms up.")] = 3
    crossing_kb: Annotated[int, typer.Option(help="What a microbatch sends over a border, one way.")] = 1
    kill_every: Annotated[float, typer.Option(help="Kill a peer every so many seconds; 0: nobody dies.")] = (
        0.0
    )
    return_after: Annotated[
        float, typer.Option(help="Whoever was killed is started again so much later.")
    ] = 3.0
    kill_at: Annotated[
        str, typer.Option(help="Kill one peer a batch at these moments: counting,frozen,scatter,prepared.")
    ] = ""
    memory: Annotated[
        str, typer.Option(help="How much of the crossings each agent keeps in memory, such as 64MB.")
    ] = ""
    rebalance_s: Annotated[
        float,
        typer.Option(
            help="Every peer could hold any stage, and the coordinator looks at seats so often; 0: never."
        ),
    ] = 0.0
    slow_stage: Annotated[
        int,
        typer.Option(
            help="In the middle of each batch a peer of this stage, each time another, becomes four times as slow."
        ),
    ] = -1
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for scripts.")] = False


@dataclass(frozen=True)
class Checked:
    """Options that make sense together."""

    seats: tuple[int, ...]
    unit_s: tuple[float, ...]
    plan: DeathPlan
    manifest: Manifest


def check(asked: PipelineOptions) -> Checked:
    """UserError with one line for what cannot be."""

    def expect(holds: bool, option: str, rule: str) -> None:
        if not holds:
            raise UserError(f"--{option}: expected {rule}")

    expect(2 <= asked.stages <= FRAGMENTS_MAX, "stages", f"2 to {FRAGMENTS_MAX}, found {asked.stages}")
    seats = tuple(_by_stage("seats", asked.seats, asked.stages, int))
    unit_ms = tuple(_by_stage("unit-ms", asked.unit_ms, asked.stages, float))
    found = f"found {asked.seats!r}"
    expect(
        all(1 <= each <= MEMBERS_PER_ROUND for each in seats),
        "seats",
        f"1 to {MEMBERS_PER_ROUND} each, {found}",
    )
    expect(sum(seats) <= PEERS_MOST, "seats", f"at most {PEERS_MOST} in all, {found}")
    expect(all(0.1 <= u <= 60_000 for u in unit_ms), "unit-ms", f"0.1 to 60000 each, found {asked.unit_ms!r}")
    expect(1 <= asked.batch <= MICROS_PER_BATCH, "batch", f"1 to {MICROS_PER_BATCH}, found {asked.batch}")
    expect(1 <= asked.batches <= 10_000, "batches", f"1 to 10000, found {asked.batches}")
    expect(1 <= asked.crossing_kb <= 65536, "crossing-kb", f"1 to 65536, found {asked.crossing_kb}")
    expect(0 <= asked.kill_every <= 36000, "kill-every", f"0 to 36000, found {asked.kill_every:g}")
    expect(0 <= asked.return_after <= 36000, "return-after", f"0 to 36000, found {asked.return_after:g}")
    if asked.memory:
        parse_bytes(asked.memory)
    expect(0 <= asked.rebalance_s <= 86400, "rebalance-s", f"0 to 86400, found {asked.rebalance_s:g}")
    dies = bool(asked.kill_every or asked.kill_at)
    expect(not (asked.rebalance_s and dies), "rebalance-s", "to be given without --kill-every and --kill-at")
    last = asked.stages - 1
    expect(
        -1 <= asked.slow_stage <= last, "slow-stage", f"-1 for none, or 0 to {last}, found {asked.slow_stage}"
    )
    held = max(seats) * len(seats) if asked.rebalance_s else sum(seats)
    expect(
        held <= PEERS_MOST, "seats", f"with --rebalance-s at most {PEERS_MOST // len(seats)} each, {found}"
    )
    moments = tuple(_moment(word) for word in asked.kill_at.split(",") if word)
    expect(not (moments and asked.kill_every), "kill-at", "to be given without --kill-every")
    least = 2 if moments or asked.kill_every else 1
    expect(min(seats) >= least, "seats", f"at least {least} in each stage where peers die, {found}")
    expect(
        len(moments) < asked.batches + 1,
        "kill-at",
        f"at most {asked.batches} moments, one a batch (--batches)",
    )
    return Checked(
        seats,
        tuple(each / 1000 for each in unit_ms),
        DeathPlan(asked.kill_every, asked.return_after, moments),
        _manifest(asked, held),
    )


def _by_stage(option: str, text: str, stages: int, kind: type[int] | type[float]) -> Sequence[Any]:
    try:
        found = [kind(each) for each in text.split(",")]
    except ValueError:
        raise UserError(f"--{option}: expected numbers with commas between them, found {text!r}") from None
    found = found * stages if len(found) == 1 else found
    if len(found) != stages:
        raise UserError(
            f"--{option}: expected one number, or one for each of {stages} stages, found {text!r}"
        )
    return found


def _moment(word: str) -> Moment:
    for moment in MOMENTS:
        if word == moment:
            return moment
    raise UserError(f"--kill-at: expected some of {', '.join(MOMENTS)}, found {word!r}")


def _manifest(asked: PipelineOptions, peers: int) -> Manifest:
    text = RUN_TOML.format(
        rounds=asked.batches + 1,
        min_peers=asked.stages if asked.kill_every or asked.kill_at or asked.rebalance_s else peers,
        chunk_kb=-(-MICROS_PER_BATCH * 4 // (1024 * CHUNKS)),
        batch=asked.batch,
        stages=asked.stages,
        min_per_stage=1,
        rebalance_s=asked.rebalance_s,
    )
    return Manifest.from_toml(text, "bench")


def bench_pipeline(asked: PipelineOptions) -> dict[str, Any]:
    """The figures, as they are printed with --json."""
    checked = check(asked)
    manifest = checked.manifest
    with tempfile.TemporaryDirectory(prefix="farflung-bench-") as name, stopped_in_good_order():
        stage = BenchProcesses(Path(name))
        try:
            url = stage.coordinate(manifest, "127.0.0.1:0")
            told = CrowdOptions(
                str(url),
                name,
                checked.seats,
                checked.unit_s,
                asked.crossing_kb,
                stage.coordinator_pid,
                asked.memory,
                bool(asked.rebalance_s),
                checked.plan,
                asked.slow_stage,
            )
            found = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
            party = stage.start(
                "crowd", "stage_bench.crowd", ["--asked", _as_json(told)], {"PYTHONPATH": found}
            )
            stage.wait_for([party], None)
            crowd = party.report()
        finally:
            stage.close()
        events = read_events(Path(name) / "events.jsonl")
        peers = {each.name: read_events(each) for each in Path(name).glob("peer-*.events.jsonl")}
    border = border_of(model_of(manifest, asked.crossing_kb), manifest)
    setting = BenchSetting(
        checked.seats,
        checked.unit_s,
        asked.batch,
        border.most_bytes(False) + border.most_bytes(True),
        len(os.sched_getaffinity(0)),
    )
    return result_of(setting, events, crowd, peers)


def _as_json(told: CrowdOptions) -> str:
    return msgspec.json.encode(dataclasses.asdict(told)).decode()
