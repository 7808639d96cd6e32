"""The command line of `farflung checkpoint`: list, verify and export what is at a URL; and what `farflung init --start`
says of it.

Added to the command line by console/main.py.  Works without a coordinator: that a checkpoint is a state of the run is
said by the run's signature, which the key of a join URL must have made.  Every command of farflung imports this module:
what reads checkpoints is imported by those here that do, and torch by the export alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farflung.peer.settings import place_of
from farflung.protocol.caps import parse_bytes
from farflung.protocol.errors import CheckpointError, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.model_schema import config_for_hf, tensors_of, values_of
from farflung.protocol.process.mode_folders import needed

if TYPE_CHECKING:
    from farflung.checkpoints.checkpoint_manifest import JoinedStages
    from farflung.checkpoints.export import Exported
    from farflung.checkpoints.store import Store
    from farflung.protocol.manifest import Manifest

LARGE_BYTES = 200_000_000
_NOT_OF_RUN = "--hf run: run {} trained the model of a script: name that model's folder, or its name on a hub"
OF_RUN = "run"  # in the place of a model's folder: the model is what the run says
# Of a mode: what transformers calls the tensors of a model in parts.
NAMES_OF_PARTS = "farflung.peer.pipeline.hf"
app = typer.Typer(help="List, verify and export the checkpoints of a run.", no_args_is_help=True)

Place = Annotated[str, typer.Argument(help="Folder or URL, as given to `farflung join --checkpoints`.")]
Run = Annotated[str, typer.Option(help="Only of the run whose id begins with this.")]
Url = Annotated[
    str | None, typer.Option(help="The run's join URL: take only what its coordinator has signed.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")]

Hf = Annotated[
    str | None,
    typer.Option(
        "--hf",
        help="Write a folder that from_pretrained and vLLM load: `run` where the run names its model; else the folder "
        "or name of the transformers model (or peft adapter) that it trained, with its config and tokenizer.",
    ),
]
MaxShard = Annotated[
    str, typer.Option("--max-shard-size", help="With --hf: larger models lie in several files and an index.")
]
Dcp = Annotated[
    Path | None,
    typer.Option(help="Write this folder for torch.distributed.checkpoint.load (torchtitan) instead."),
]


@app.command("ls")
def list_them(
    place: Place,
    run: Run = "",
    url: Url = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read everything and compare every hash and signature."),
    ] = False,
    json_output: Json = False,
) -> None:
    """What is there, newest first.

    With --verify, exit code 2 if anything is damaged, or unsigned.
    """
    store = store_at(place)
    found, problems = look(store, run, url)
    told = []
    for each in found:
        fact, line = _facts(each), _line(each)
        if verify:
            tell_if_large(each)
            wrong = [problem for part in each.parts for problem in store.problems_of(part)]
            problems += wrong
            fact, line = fact | {"good": not wrong}, f"{'damaged' if wrong else 'good   '}  {line}"
        told.append(fact)
        if not json_output:
            typer.echo(line)
    if json_output:
        typer.echo(json.dumps({"checkpoints": told, "problems": problems}))
    else:
        tell(problems)
    if problems and verify:
        count = f"{len(problems)} file{'s' if len(problems) > 1 else ''}"
        mend = "remove what is named above" + (", if that is the run's join URL" if url is not None else "")
        raise CheckpointError(f"{place}: {count} damaged, missing or foreign; {mend}")


@app.command()
def export(
    place: Place,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write \\[model.safetensors]; with --hf the folder \\[model]."),
    ] = None,
    run: Run = "",
    version: Annotated[
        int | None, typer.Option(min=0, help="Of this version \\[the newest that is whole].")
    ] = None,
    url: Url = None,
    tied_once: Annotated[
        bool,
        typer.Option("--tied-once", help="Tied weights under one name only; load them with strict=False."),
    ] = False,
    provenance: Annotated[
        Path | None, typer.Option(help="The run's provenance.jsonl: say in the file who contributed.")
    ] = None,
    hf: Hf = None,
    max_shard_size: MaxShard = "5GB",
    dcp: Dcp = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write the model alone, with its own names and dtypes, as one safetensors file for `load_state_dict`."""
    if dcp is not None and (hf is not None or provenance is not None):
        raise UserError("--dcp: such a folder has no place for --hf or --provenance; export twice")
    if hf is not None and (tied_once or provenance is not None):
        raise UserError(
            "--hf: such a folder has no place for --tied-once or --provenance; farflung publish tells who contributed"
        )
    target = dcp or out or Path("model" if hf is not None else "model.safetensors")
    _is_free(target, force, is_folder=hf is not None, is_dcp=dcp is not None)
    found, exported = newest_model(place, run, version, url)
    if hf is not None:
        write_for_transformers(found, exported, hf, target, max_shard_size)
    else:
        _write_alone(found, exported, target, tied_once, provenance, dcp is not None)
    joins = f", joined from {found.stages} stages," if found.stages else ""
    manifest = found.manifest
    typer.echo(f"wrote version {manifest.version} of {manifest.run}{joins} to {target}")


def start_of(place: str, run: str) -> tuple[str, str]:
    """What a new run begins with, for its [start]: where that is, and its hash."""
    from farflung.checkpoints.checkpoint_manifest import MANIFEST_NAME
    from farflung.checkpoints.warm_start import hash_at

    source = place_of(place.rstrip("/"))
    if not source.partition("?")[0].endswith(".safetensors"):
        store = store_at(source)
        if MANIFEST_NAME not in store.files.files(""):
            found = next(candidates(look(store, run), place, None))
            source = f"{source}/{found.parts[0].folder}"
    return source, hash_at(source)


def _is_free(target: Path, force: bool, is_folder: bool, is_dcp: bool) -> None:
    if is_dcp:
        from farflung.checkpoints.export import dcp_folder_is_free

        dcp_folder_is_free(target, force)
    elif is_folder and target.suffix == ".safetensors":
        raise UserError(f"--out {target}: with --hf a folder is written; name one")
    elif target.exists() and not force and not (is_folder and target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists; choose another name with --out, or add --force to overwrite it")


def newest_model(
    place: str, run: str, version: int | None, url: str | None = None
) -> tuple[JoinedStages, Exported]:
    """Of those there, or those of this version, the newest that can be read whole."""
    store = store_at(place)
    for found in candidates(look(store, run, url), place, version):
        tell_if_large(found)
        try:
            return found, read_model(store, found)
        except CheckpointError as error:
            tell([f"not used: {error}"])
    raise CheckpointError(f"{place}: no checkpoint there can be read whole")


def read_model(store: Store, found: JoinedStages) -> Exported:
    """CheckpointError where a file of it is damaged."""
    from farflung.checkpoints.export import tensors_of

    chunks = (chunk for part in found.parts for chunk in store.chunks(part))
    return tensors_of(found.manifest.model, chunks)


def _write_alone(
    found: JoinedStages,
    exported: Exported,
    target: Path,
    tied_once: bool,
    provenance: Path | None,
    is_dcp: bool,
) -> None:
    from farflung.checkpoints.export import as_state_dict, write_dcp

    manifest, tensors = found.manifest, as_state_dict(exported, tied_once)
    if is_dcp:
        write_dcp(tensors, target, f"{manifest.run} {manifest.run_id} version {manifest.version}")
    else:
        _save(tensors, target, _head_of(found, provenance))
    if exported.frozen:
        tell([f"not in it, because it is not trained: {', '.join(exported.frozen)}"])


def write_for_transformers(
    found: JoinedStages, exported: Exported, hf: str, folder: Path, max_shard_size: str
) -> None:
    """Under the names that `from_pretrained` loads, whatever the run called them."""
    from farflung.checkpoints.export import TrainedTensors, base_folder, write_hf_folder, write_run_folder

    if hf == OF_RUN:
        terms, tensors = of_run(found, exported, _NOT_OF_RUN)
        write_run_folder(tensors, config_for_hf(terms.model), folder, _shard_bytes(max_shard_size))
        return
    base = base_folder(hf, with_weights=bool(exported.frozen))
    named: dict[str, str] = {}
    in_parts = _in_parts(exported)
    if in_parts:
        in_words = needed(NAMES_OF_PARTS, "a model of farflung.pipeline, under transformers' names")
        named = in_words.hf_names(base, [*exported.tensors, *exported.frozen])
    trained = TrainedTensors(found.manifest.model, exported, named, untied=in_parts)
    write_hf_folder(trained, base, folder, max_shard_size)


def _shard_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except UserError as error:
        raise UserError(f"--max-shard-size: {error}") from None


def _in_parts(exported: Exported) -> bool:
    """Of a model in stages: a part's number stands before each name."""
    return all(name.partition(".")[0].isdecimal() for name in [*exported.tensors, *exported.frozen])


def of_run(found: JoinedStages, exported: Exported, if_not: str) -> tuple[Manifest, dict[str, Any]]:
    """What the run says of its model, and the tensors under transformers' names.  UserError, `if_not` with the run's
    name, where its run was one of a script."""
    terms = found.manifest.run_terms
    if terms is None or not terms.model.kind or exported.frozen:
        raise UserError(if_not.format(found.manifest.run))
    bare = _bare_names(exported, terms)
    tensors = {bare[name]: each for name, each in exported.tensors.items()}
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    if terms.model.config:  # which names there are, transformers knows
        as_told = sum(each.numel() for each in tensors.values()) == values_of(terms.model)
    else:
        as_told = shapes == tensors_of(terms.model)
    if len(tensors) < len(bare) or not as_told:
        raise UserError(if_not.format(found.manifest.run))
    return terms, tensors


def _bare_names(exported: Exported, terms: Manifest) -> dict[str, str]:
    """What transformers calls each tensor; of a model in stages a part's number stands before the name."""
    if not _in_parts(exported):
        return {name: name for name in exported.tensors}
    if terms.model.config:
        in_words = needed(NAMES_OF_PARTS, "a model of transformers in stages")
        return dict(in_words.hf_names(SimpleNamespace(**terms.model.config), exported.tensors))
    return {name: name.partition(".")[2] for name in exported.tensors}


def _head_of(found: JoinedStages, provenance: Path | None) -> dict[str, str]:
    """Of the model's file."""
    manifest = found.manifest
    facts = {"run": manifest.run, "run_id": manifest.run_id, "version": str(manifest.version)}
    return {"format": "pt"} | facts | _contributors(found, provenance)


def _save(tensors: dict[str, Any], out: Path, head: dict[str, str]) -> None:
    import safetensors.torch
    from safetensors import SafetensorError

    try:
        with _whole(out) as part:
            safetensors.torch.save_file(tensors, part, head)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out}: cannot write: {error}") from error


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Where to write it: what is whole gets its name, and of what fails half-way nothing stays."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _contributors(found: JoinedStages, file: Path | None) -> dict[str, str]:
    """For the head of the model's file: who contributed, if that is as the run that signed the checkpoint says."""
    from farflung.console.history.audit_evidence import facts_of, provenance_in

    if file is None:
        return {}
    manifest = found.manifest
    told = provenance_in(file, found.run_key, manifest.version)
    if told.problems:
        raise UserError(f"{file}: {told.problems[0]}; farflung audit --provenance {file} names everything")
    if told.run_id != manifest.run_id:
        raise UserError(f"{file}: of run {told.run_id[:8]}, the checkpoint is of {manifest.run_id[:8]}")
    return {"provenance": facts_of(told)}


def candidates(
    looked: tuple[list[JoinedStages], list[str]], place: str, version: int | None
) -> Iterator[JoinedStages]:
    """Newest first; all of one run, and whole."""
    found, problems = looked
    tell([f"not used: {problem}" for problem in problems])
    runs = {each.manifest.run_id: each.manifest.run for each in found}
    if len(runs) > 1:
        names = ", ".join(f"{run_id[:8]} ({name})" for run_id, name in sorted(runs.items()))
        raise UserError(f"{place}: checkpoints of several runs; choose one with --run: {names}")
    wanted = [each for each in found if version is None or each.manifest.version == version]
    if not wanted:
        there = sorted({each.manifest.version for each in found if not each.missing})
        raise UserError(f"{place}: no whole checkpoint of version {version}; there are {there}")
    whole = [each for each in wanted if not each.missing]
    if not whole:
        first, stage = wanted[0], wanted[0].missing[0]
        folder = f"{first.parts[0].folder.rpartition('-s')[0]}-s{stage:02d}"
        raise UserError(
            f"{place}: of version {first.manifest.version} {first.missing_text()}; copy them from where their peers "
            f"save them, beside the others: {folder}"
        )
    if whole[0] is not wanted[0]:
        newer = wanted[0]
        tell([f"not used: version {newer.manifest.version}: {newer.missing_text()}"])
    yield from whole


def store_at(place: str) -> Store:
    from farflung.checkpoints.store import Store

    return Store(place_of(place))


def look(store: Store, run: str, url: str | None = None) -> tuple[list[JoinedStages], list[str]]:
    """With a URL: only what its coordinator has signed, and the rest is a problem."""
    from farflung.checkpoints.checkpoint_manifest import joined

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
    return joined(saved for saved in found if saved not in foreign), listing.problems + problems


def tell(problems: list[str]) -> None:
    for problem in problems:
        print(f"farflung: {problem}", file=sys.stderr)


def tell_if_large(found: JoinedStages) -> None:
    """All of it is read, which takes a while."""
    if found.size_bytes >= LARGE_BYTES:
        tell([f"reads version {found.manifest.version}, {found.size_bytes / 1e9:.1f} GB"])


def _facts(found: JoinedStages) -> dict[str, Any]:
    """`stages`: how many the model has; `folders` and `missing`: which of them are there, and which are not."""
    manifest = found.manifest
    facts: dict[str, Any] = {
        "folder": found.parts[0].folder,
        "run": manifest.run,
        "run_id": manifest.run_id,
        "era": manifest.era,
        "version": manifest.version,
        "size_bytes": found.size_bytes,
        "files": sum(len(part.manifest.files) for part in found.parts),
        "writer": manifest.writer,
        "run_key": found.run_key.hex(),
        "digests": [digest.hex() for part in found.parts for digest in part.manifest.digests],
    }
    if found.stages:
        folders = {part.manifest.first_fragment: part.folder for part in found.parts}
        facts |= {"stages": found.stages, "folders": folders, "missing": list(found.missing)}
    return facts


def _line(found: JoinedStages) -> str:
    manifest = found.manifest
    size = f"{found.size_bytes / 1e6:.1f} MB"
    signed = "signed by its run" if found.run_key else "not signed by a run"
    writers = ", ".join(dict.fromkeys(part.manifest.writer for part in found.parts))
    stages = f"{found.missing_text() or f'all {found.stages} stages'}  " if found.stages else ""
    where = ", ".join(part.folder for part in found.parts)
    return (
        f"version {manifest.version:<8} {size:>12}  {manifest.run}  {stages}by {writers}, {signed}  {where}"
    )
