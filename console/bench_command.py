"""The command line of `farflung bench`.

Added to the command line by console/main.py.  Options are the fields of one dataclass, because there are many.
Must not import what is slow to load: every command reads it, and `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Annotated

import typer

app = typer.Typer(help="Measure this program on this machine and this network.", no_args_is_help=True)


@dataclasses.dataclass(frozen=True)
class AllreduceOptions:
    peers: Annotated[int, typer.Option(help="How many peers, all hosts together.")] = 4
    mb: Annotated[int, typer.Option(help="Megabytes (10^6) of fp32 values that each peer brings.")] = 100
    rounds: Annotated[int, typer.Option(help="Rounds to measure; one more warms up.")] = 5
    codec: Annotated[str, typer.Option(help="How contributions travel.")] = "fp32"
    gather_codec: Annotated[
        str, typer.Option(help="How results travel; the same as --codec if not given.")
    ] = ""
    policy: Annotated[str, typer.Option(help="Whether contributions are compared: robust, or mean.")] = (
        "robust"
    )
    fragments: Annotated[
        int, typer.Option(help="Parts of the vector, each with rounds of its own, all in flight at once.")
    ] = 1
    chunk_kb: Annotated[int, typer.Option(help="Size of a transferred piece.")] = 1024
    serve: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT: coordinate here, with one peer; others --join. Takes PORT to PORT + 2."
        ),
    ] = None
    join: Annotated[
        str | None, typer.Option(help="URL that --serve printed: bring one peer from this host.")
    ] = None
    kill_at: Annotated[
        float | None,
        typer.Option(help="Kill a peer at this fraction of the scatter (0-1) or gather (1-2) of one round."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for scripts.")] = False


def allreduce(**words: object) -> None:
    """Time the all-reduce rounds of the real program with synthetic tensors, on one machine or on many."""
    from farflung.console.bench.bench import BenchOptions, bench_allreduce
    from farflung.console.bench.figures import table

    asked = BenchOptions(**words)  # type: ignore[arg-type]
    result = bench_allreduce(asked, lambda line: print(line, flush=True))
    if asked.json or asked.serve is not None or asked.join is not None:
        print(json.dumps(result), flush=True)
    else:
        print("\n".join(table(result)))


@dataclasses.dataclass(frozen=True)
class PipelineArguments:
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


def pipeline(**words: object) -> None:
    """Time the batches of a model in stages on this machine, with trainers that take a given time."""
    from farflung.console.bench.pipeline_bench import PipelineOptions as Options
    from farflung.console.bench.pipeline_bench import bench_pipeline
    from farflung.console.bench.pipeline_figures import table as pipeline_table

    asked = Options(**words)  # type: ignore[arg-type]
    result = bench_pipeline(asked)
    print(json.dumps(result) if asked.json else "\n".join(pipeline_table(result)), flush=True)


@dataclasses.dataclass(frozen=True)
class FreezingArguments:
    schedule: Annotated[str, typer.Option(help="Of [outer] schedule; with commas, one after the other.")] = (
        "blocking,overlap"
    )
    dtype: Annotated[str, typer.Option(help="Of the model: bf16,fp32.")] = "bf16,fp32"
    layers: Annotated[
        int, typer.Option(help="Of the GPT; 9 layers are 103 million parameters, 135 are 1,000 million.")
    ] = 9
    rounds: Annotated[int, typer.Option(help="Rounds, the first three of which warm up.")] = 8
    device: Annotated[str, typer.Option(help="Where the model lies: cpu, or cuda.")] = "cpu"
    threads: Annotated[int, typer.Option(help="Of torch; 0: as many as it takes.")] = 0
    json: Annotated[bool, typer.Option("--json", help="One JSON list on stdout, for scripts.")] = False


def freezing(**words: object) -> None:
    """Time how long a round holds a trainer up: freeze and load of a GPT, with an agent that answers at once."""
    from farflung.console.bench.freezing import FreezingOptions as Options
    from farflung.console.bench.freezing import bench_freezing, row

    asked = Options(**words)  # type: ignore[arg-type]
    found = []
    for one in bench_freezing(asked):
        found.append(one)
        if not asked.json:
            print(row(one), flush=True)
    if asked.json:
        print(json.dumps(found, indent=1), flush=True)


def _with_options(function: object, options: type) -> None:
    """Give a function that takes keywords the options that are a dataclass's fields: typer reads signatures."""
    hints = inspect.get_annotations(options, eval_str=True)
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
            )
            for f in dataclasses.fields(options)
        ]
    )
    function.__annotations__ = hints


for command, options in (
    (allreduce, AllreduceOptions),
    (pipeline, PipelineArguments),
    (freezing, FreezingArguments),
):
    _with_options(command, options)
    app.command()(command)
