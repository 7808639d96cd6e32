"""`farflung simulate`: a whole run on this machine, in virtual time, and how its recipes compare.

Added to the command line by console/main.py.  What a recipe is, run.toml says; each --try changes it.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import msgspec
import typer

from farflung.console.history.picture import refuse_other_names
from farflung.protocol.caps import duration, si
from farflung.protocol.errors import FarflungError, UserError

if TYPE_CHECKING:
    from farflung.protocol.manifest import Manifest
    from farflung.simulator.laboratory.laboratory import SimulatedRound, SimulatedRun
    from farflung.simulator.laboratory.places import ReplicaPlace
    from farflung.simulator.laboratory.replica import Body

PEERS = 4
TOLD = 10  # rounds of a recipe
app = typer.Typer(help="Runs in virtual time.")


@app.command(rich_help_panel="Try")
def simulate(
    run_toml: Annotated[Path, typer.Argument(help="The run's description; `farflung init` writes one.")],
    script_arguments: Annotated[list[str] | None, typer.Argument(help="Passed on to --script.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="Your own training script instead of the built-in one.")
    ] = None,
    peers: Annotated[
        int | None, typer.Option(min=1, max=256, help=f"So many, all alike \\[{PEERS}].")
    ] = None,
    lines: Annotated[
        Path | None,
        typer.Option(
            help="A file of peers: their speed, their lines, when they are away (docs/simulate.md)."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="In place of run.toml's, such as round.sync_every=50."
        ),
    ] = None,
    tried: Annotated[
        list[str] | None,
        typer.Option(
            "--try", metavar="KEY=VALUE...", help="A run with these; several times: they are compared."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw loss over tokens: a file .svg or .png.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """A run of many peers on this machine, in virtual time: what it learns, sends, and waits for.

    Arguments of your own script come last, after --.
    """
    recipes = [tuple(each.split()) for each in tried or [""]]
    if lines is not None and peers is not None:
        raise UserError("--peers: the file of --lines says how many there are; give one of the two")
    if plot is not None:  # said before hours of work, and not after them
        refuse_other_names(plot)
    from farflung.coordinator.run_files import read_manifest

    manifests = [read_manifest(run_toml, [*(changes or ()), *recipe]) for recipe in recipes]
    from farflung.simulator.laboratory.places import ReplicaPlace, places_in

    places = places_in(lines) if lines is not None else [ReplicaPlace()] * (peers or PEERS)
    body = _body(script, script_arguments or ())
    done: list[TriedRecipe] = []
    try:
        for recipe, manifest in zip(recipes, manifests, strict=True):
            done += _tried(recipe, manifest, body, places, is_alone=len(recipes) == 1)
    finally:  # whatever ends it, what is done is shown
        if json_output and done:
            typer.echo(json.dumps({"recipes": [each.facts() for each in done]}))
        elif done:
            _show(done)
        if plot is not None and done:
            _draw(plot, manifests[0].run.name, done)
    if len(done) < len(recipes):
        raise typer.Exit(1)


def _body(script: Path | None, arguments: Sequence[str]) -> Body:
    if script is not None and not script.is_file():
        raise UserError(f"--script {script}: there is no such file")
    from farflung.simulator.laboratory.replica import script_at

    if script is None:
        import torch

        from farflung.peer.builtin.trainer import train

        torch.set_num_threads(1)  # as `farflung join` has it
        return lambda: train(None)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    return script_at(script)


@dataclass(frozen=True)
class TriedRecipe:
    name: str  # of the recipe
    run: SimulatedRun
    took_s: float

    def facts(self) -> dict[str, Any]:
        run: dict[str, Any] = msgspec.to_builtins(self.run)
        return {"set": self.name, **run, "tokens": self.run.tokens, "took_s": self.took_s}


def _tried(
    recipe: Sequence[str], manifest: Manifest, body: Body, places: Sequence[ReplicaPlace], is_alone: bool
) -> list[TriedRecipe]:
    """Empty where the script failed, which is said: another recipe may do better."""
    from farflung.simulator.laboratory.laboratory import Laboratory
    from farflung.simulator.laboratory.replica import ScriptFailed

    what = f"run '{manifest.run.name}', {len(places)} peers, {manifest.run.rounds} rounds"
    _tell(f"{what}: {', '.join(recipe)}" if recipe else what)
    every = max(1, manifest.run.rounds // TOLD)
    began = time.monotonic()

    def tell(done: SimulatedRound) -> None:
        if done.fragment == 0 and done.version % every == 0:
            loss = "" if done.loss is None else f", loss {done.loss:.4f}"
            who = f"{done.included} of {done.members} peers"
            _tell(f"  version {done.version} after {duration(done.at_s)}{loss}, {who}")

    with _one_voice():
        try:
            found = Laboratory(manifest, body, places, tell).learn()
        except ScriptFailed as failed:
            cause = failed.__cause__
            if isinstance(cause, FarflungError) and is_alone:
                raise cause from None
            if isinstance(cause, FarflungError):
                _tell(f"farflung: {cause}")
            elif cause is not None:
                _tell(f"farflung: the script of {failed} failed")
                traceback.print_exception(cause.with_traceback(_of_script(cause.__traceback__)))
            return []
    return [TriedRecipe(", ".join(recipe) or "as it is", found, time.monotonic() - began)]


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Without what called it."""
    own = trace
    while own is not None and own.tb_frame.f_globals.get("__name__") != "__main__":
        own = own.tb_next
    return own or trace


# ---- what is said of it ------------------------------------------------------------------------------------


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(done: Sequence[TriedRecipe]) -> None:
    wide = max(len(name) for name in ("recipe", *(each.name for each in done)))
    rows = [_row(each.run, each.took_s) for each in done]
    heads = [*dict.fromkeys(head for row in rows for head in row)]
    typer.echo(" ".join([f"{'recipe':{wide}}", *(f"{head:>{max(10, len(head))}}" for head in heads)]))
    for each, row in zip(done, rows, strict=True):
        told = [f"{row.get(head, '-'):>{max(10, len(head))}}" for head in heads]
        typer.echo(" ".join([f"{each.name:{wide}}", *told]))


def _row(outcome: SimulatedRun, took_s: float) -> dict[str, str]:
    row = {
        "version": f"{outcome.version} of {outcome.of}",
        "loss": "-" if outcome.loss is None else f"{outcome.loss:.4f}",
        "steps": str(outcome.steps),
        "tokens": si(outcome.tokens),
        "time": duration(outcome.seconds),
        "tokens/s": si(outcome.tokens / outcome.seconds) if outcome.seconds else "-",
        "sent/peer": f"{si(outcome.sent_bytes)}B",
        "waiting": f"{outcome.waited:.1%}",
        "took": f"{took_s:.1f} s",
    }
    if outcome.held_out:
        row["[eval]"] = f"{outcome.held_out[-1][1]:.4f}"
    return row | {name: f"{value:.4f}" for _, name, value in outcome.figures}


def _draw(path: Path, run: str, done: Sequence[TriedRecipe]) -> None:
    """The held-out loss where the run has one, else that of the peers' steps."""
    from farflung.console.history.curves import draw

    held_out = all(each.run.held_out for each in done)
    curves = {}
    for each in done:
        rounds = [one for one in each.run.rounds if one.fragment == 0]
        versions = [one.version for one in rounds]
        tokens = dict(zip(versions, itertools.accumulate(one.tokens for one in rounds), strict=True))
        points = [(one.version, one.loss) for one in rounds if one.loss is not None]
        points = each.run.held_out if held_out else points
        curves[each.name] = [(tokens.get(version, 0), loss) for version, loss in points]
    if not any(curves.values()):
        raise UserError("--plot: there is no loss to draw; the script passes it to run.step(loss)")
    draw(path, f"{run}: {'held-out loss' if held_out else 'loss of the peers'}", "tokens", curves)


# ---- what scripts print ------------------------------------------------------------------------------------


class _Shown:
    """stdout, where all replicas print the same: the first one's lines are shown, beside the run's own."""

    def __init__(self, shown: TextIO, aloud: ContextVar[bool]) -> None:
        self._shown, self._aloud = shown, aloud

    def write(self, text: str) -> int:
        if self._aloud.get():
            self._shown.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


@contextmanager
def _one_voice() -> Iterator[None]:
    """What all scripts print and warn of is shown once.  Afterwards the process has its own main module again."""
    from farflung.simulator.laboratory.replica import ALOUD

    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text, before = record.getMessage(), len(said)
        said.add(text)
        return len(said) > before

    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.addFilter(is_new)
    logging.getLogger().addHandler(handler)
    main = sys.modules["__main__"]
    try:
        with redirect_stdout(cast(TextIO, _Shown(sys.stderr, ALOUD))):
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        sys.modules["__main__"] = main
