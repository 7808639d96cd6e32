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
    from farflung.console.bench.bench import BenchOptions, bench_allreduce, usual_chunk_kb
    from farflung.console.bench.figures import table

    asked = BenchOptions(**words)  # type: ignore[arg-type]
    asked = dataclasses.replace(asked, chunk_kb=usual_chunk_kb(asked.mb))
    result = bench_allreduce(asked, lambda line: print(line, flush=True))
    if asked.json or asked.serve is not None or asked.join is not None:
        print(json.dumps(result), flush=True)
    else:
        print("\n".join(table(result)))


def with_options(function: object, options: type) -> None:
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


with_options(allreduce, AllreduceOptions)
app.command()(allreduce)
