"""The command line of `farflung checkpoint`: list, verify and export what is at a URL.

Added to the command line by console/main.py.  Works without a coordinator: that a checkpoint is a state of the run is
said by the run's signature, which the key of a join URL must have made.  Must not import torch but to export.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from farflung.checkpoints.store import Saved, Store
from farflung.peer.settings import place_of
from farflung.protocol.errors import CheckpointError, UserError
from farflung.protocol.join_url import JoinUrl

LARGE_BYTES = 200_000_000
app = typer.Typer(help="List, verify and export the checkpoints of a run.", no_args_is_help=True)

Place = Annotated[str, typer.Argument(help="Folder or URL, as given to `farflung join --checkpoints`.")]
Run = Annotated[str, typer.Option(help="Only of the run whose id begins with this.")]
Url = Annotated[
    str | None, typer.Option(help="The run's join URL: take only what its coordinator has signed.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")]


@app.command("ls")
def list_them(place: Place, run: Run = "", json_output: Json = False) -> None:
    """What is there, newest first.  Contents are not read: `verify` does that."""
    found, problems = _look(Store(place_of(place)), run)
    if json_output:
        typer.echo(json.dumps({"checkpoints": [_facts(saved) for saved in found], "problems": problems}))
        return
    _tell(problems)
    for saved in found:
        typer.echo(_line(saved))


@app.command()
def verify(place: Place, run: Run = "", url: Url = None, json_output: Json = False) -> None:
    """Read everything and compare every hash and signature.  Exit code 2 if anything is damaged, or unsigned."""
    store = Store(place_of(place))
    found, problems = _look(store, run, url)
    checked = []
    for saved in found:
        _tell_if_large(saved)
        wrong = store.problems_of(saved)
        problems += wrong
        checked.append(_facts(saved) | {"good": not wrong})
        if not json_output:
            typer.echo(f"{'damaged' if wrong else 'good   '}  {_line(saved)}")
    if json_output:
        typer.echo(json.dumps({"checkpoints": checked, "problems": problems}))
    else:
        _tell(problems)
    if problems:
        count = f"{len(problems)} file{'s' if len(problems) > 1 else ''}"
        mend = "remove what is named above" + (", if that is the run's join URL" if url is not None else "")
        raise CheckpointError(f"{place}: {count} damaged, missing or foreign; {mend}")


@app.command()
def export(
    place: Place,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("model.safetensors"),
    run: Run = "",
    version: Annotated[
        int | None, typer.Option(min=0, help="Of this version \\[the newest that is whole].")
    ] = None,
    url: Url = None,
    tied_once: Annotated[
        bool, typer.Option(help="Tied weights under one name only; load them with strict=False.")
    ] = False,
    provenance: Annotated[
        Path | None, typer.Option(help="The run's provenance.jsonl: say in the file who contributed.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Overwrite an existing file.")] = False,
) -> None:
    """Write the model alone, with its own names and dtypes, as one safetensors file for `load_state_dict`."""
    import safetensors.torch
    from safetensors import SafetensorError

    from farflung.checkpoints.export import as_state_dict, tensors_of

    if out.exists() and not force:
        raise UserError(f"{out} exists; choose another name with --out, or add --force to overwrite it")
    store = Store(place_of(place))
    for saved in _candidates(_look(store, run, url), place, version):
        _tell_if_large(saved)
        try:
            exported = tensors_of(saved.manifest.model, store.chunks(saved))
        except CheckpointError as error:
            _tell([f"not used: {error}"])
            continue
        facts = {
            "run": saved.manifest.run,
            "run_id": saved.manifest.run_id,
            "version": str(saved.manifest.version),
        } | _contributors(saved, provenance)
        try:
            safetensors.torch.save_file(as_state_dict(exported, tied_once), out, {"format": "pt"} | facts)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{out}: cannot write: {error}") from error
        if exported.frozen:
            _tell([f"not in it, because it is not trained: {', '.join(exported.frozen)}"])
        typer.echo(f"wrote version {saved.manifest.version} of {saved.manifest.run} to {out}")
        return
    raise CheckpointError(f"{place}: no checkpoint there can be read whole")


def _contributors(saved: Saved, file: Path | None) -> dict[str, str]:
    """For the head of the model's file: who contributed, if that is as the run that signed the checkpoint says."""
    from farflung.console.history.audit_provenance import facts_of, provenance_in

    if file is None:
        return {}
    found = provenance_in(file, saved.manifest.run_key, saved.manifest.version)
    if found.problems:
        raise UserError(f"{file}: {found.problems[0]}; farflung audit --provenance {file} names everything")
    if found.run_id != saved.manifest.run_id:
        raise UserError(
            f"{file}: of run {found.run_id[:8]}, the checkpoint is of {saved.manifest.run_id[:8]}"
        )
    return {"provenance": facts_of(found)}


def _candidates(looked: tuple[list[Saved], list[str]], place: str, version: int | None) -> Iterator[Saved]:
    """Newest first; all of one run."""
    found, problems = looked
    _tell([f"not used: {problem}" for problem in problems])
    runs = {saved.manifest.run_id: saved.manifest.run for saved in found}
    if len(runs) > 1:
        names = ", ".join(f"{run_id[:8]} ({name})" for run_id, name in sorted(runs.items()))
        raise UserError(f"{place}: checkpoints of several runs; choose one with --run: {names}")
    wanted = [saved for saved in found if version is None or saved.manifest.version == version]
    if not wanted:
        there = sorted({saved.manifest.version for saved in found})
        raise UserError(f"{place}: no whole checkpoint of version {version}; there are {there}")
    yield from wanted


def _look(store: Store, run: str, url: str | None = None) -> tuple[list[Saved], list[str]]:
    """With a URL: only what its coordinator has signed, and the rest is a problem."""
    key = JoinUrl.parse(url).key if url is not None else b""
    listing = store.list_saved()
    found = [saved for saved in listing.complete if saved.manifest.run_id.startswith(run)]
    if not found and not listing.problems:
        of = f" of run {run}" if run else ""
        raise UserError(
            f"{store.url}: no checkpoints{of} there; is it what `farflung join --checkpoints` was given?"
        )
    foreign = [saved for saved in found if key and saved.manifest.run_key != key]
    said = "its state is not signed by the coordinator of this join URL"
    problems = [f"{store.url.rstrip('/')}/{saved.folder}: {said}" for saved in foreign]
    return [saved for saved in found if saved not in foreign], listing.problems + problems


def _tell(problems: list[str]) -> None:
    for problem in problems:
        print(f"farflung: {problem}", file=sys.stderr)


def _tell_if_large(saved: Saved) -> None:
    """All of it is read, which takes a while."""
    size_bytes = saved.manifest.size_bytes
    if size_bytes >= LARGE_BYTES:
        _tell([f"reads version {saved.manifest.version}, {size_bytes / 1e9:.1f} GB"])


def _facts(saved: Saved) -> dict[str, Any]:
    manifest = saved.manifest
    return {
        "folder": saved.folder,
        "run": manifest.run,
        "run_id": manifest.run_id,
        "era": manifest.era,
        "version": manifest.version,
        "size_bytes": manifest.size_bytes,
        "files": len(manifest.files),
        "writer": manifest.writer,
        "run_key": manifest.run_key.hex(),
        "digests": [digest.hex() for digest in manifest.digests],
    }


def _line(saved: Saved) -> str:
    manifest = saved.manifest
    size = f"{manifest.size_bytes / 1e6:.1f} MB"
    signed = "signed by its run" if manifest.run_key else "not signed by a run"
    by = f"by {manifest.writer}, {signed}"
    return f"version {manifest.version:<8} {size:>12}  {manifest.run}  {by}  {saved.folder}"
