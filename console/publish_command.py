"""`farflung publish`: a model of a run, with a card that says who made it, as a folder and in a model hub.

Added to the command line by console/main.py.  Puts together what other rooms do: the newest whole checkpoint becomes a
folder of transformers, the journal a card, and the folder one commit of a hub.  Everything that can be refused is
refused before anything is sent.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farflung.console.checkpoint_commands import (
    MaxShard,
    Place,
    Run,
    Url,
    candidates,
    look,
    read_model,
    store_at,
    tell_if_large,
    write_for_transformers,
)
from farflung.protocol.errors import CheckpointError, UserError
from farflung.protocol.process.own_files import KINDS, fits, made_aside

if TYPE_CHECKING:
    from farflung.checkpoints.checkpoint_manifest import JoinedStages
    from farflung.checkpoints.store import Store
    from farflung.console.model_card import CardFacts

PROVENANCE = "provenance.jsonl"
app = typer.Typer(help="Publish models.")


@app.command(rich_help_panel="Afterwards")
def publish(
    place: Place,
    journal: Annotated[
        Path, typer.Option(help="The data folder of the run's coordinator, run.data: who took part.")
    ],
    hf: Annotated[
        str,
        typer.Option(
            "--hf",
            help="`run` where the run names its model; else that model, or peft adapter.",
        ),
    ],
    hub: Annotated[
        str | None, typer.Option(help="Repository, USER/NAME; logged in by HF_TOKEN or `hf auth login`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep the folder here; without --hub it is only written.")
    ] = None,
    run: Run = "",
    version: Annotated[int | None, typer.Option(min=1, help="Of this version \\[the newest].")] = None,
    url: Url = None,
    license_name: Annotated[str, typer.Option("--license", help="For the card, such as apache-2.0.")] = "",
    energy_kwh: Annotated[
        float | None, typer.Option(min=0, help="For the card, if you know what all peers used.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="A new repository is private.")] = False,
    max_shard_size: MaxShard = "5GB",
    force: Annotated[
        bool, typer.Option("--force", help="Replace weights that are not of this run; overwrite --out.")
    ] = False,
) -> None:
    """Publish a model with a card of its makers.

    Peers, tokens, commits, digest. All of it, or nothing.
    """
    if hub is None and out is None:
        raise UserError("publish: name a repository with --hub, or a folder with --out")
    if out is not None and out.exists() and not force:
        raise UserError(f"{out} exists; choose another name with --out, or add --force to overwrite it")
    # Here, since other commands answer at once.
    from farflung.console.history.audit_evidence import provenance_in
    from farflung.console.history.history import read_folder
    from farflung.console.model_card import PublisherWord, facts_of

    opened = hub_of() if hub is not None else None
    store = store_at(place)
    found = _whole(store, place, run, url, version)
    told = provenance_in(journal / PROVENANCE, found.run_key, found.manifest.version)
    facts = facts_of(found, read_folder(journal), told, PublisherWord(license_name, energy_kwh))
    with ExitStack() as ends:
        folder = out or Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="farflung-"))) / "model"
        with made_aside(folder) as aside:
            _write(store, found, hf, aside, max_shard_size)
            _add_card(facts, journal, aside)
        typer.echo(
            f"wrote version {facts.version} of {facts.run}" + (f" to {out}" if out is not None else "")
        )
        if opened is not None and hub is not None:
            typer.echo(f"published: {opened.publish(hub, folder, facts.mark, private, force)}")


def _whole(store: Store, place: str, run: str, url: str | None, version: int | None) -> JoinedStages:
    """What is published is the newest state, or the one that was asked for: never silently an older one."""
    found, problems = look(store, run, url)
    newest = max((each.manifest.age for each in found), default=None)
    if version is None and (problems or any(each.missing for each in found if each.manifest.age == newest)):
        lacking = [each.missing_text() for each in found if each.manifest.age == newest and each.missing]
        why = (problems or [f"of version {newest[1] if newest else 0} {lacking[0]}"])[0]
        raise UserError(
            f"{place}: not everything there is whole: {why}; mend it, or name the version with --version"
        )
    chosen = next(candidates((found, []), place, version))
    tell_if_large(chosen)
    return chosen


def _write(store: Store, found: JoinedStages, hf: str, folder: Path, max_shard_size: str) -> None:
    damaged = [problem for part in found.parts for problem in store.problems_of(part)]
    if damaged:
        raise CheckpointError(f"version {found.manifest.version} is damaged: {damaged[0]}")
    write_for_transformers(found, read_model(store, found), hf, folder, max_shard_size)


def _add_card(facts: CardFacts, journal: Path, folder: Path) -> None:
    from farflung.console.model_card import card_of

    adapter = folder / "adapter_config.json"
    base = ""
    if adapter.is_file():
        named = str(json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") or "")
        base = "" if Path(named).is_absolute() or Path(named).exists() else named  # a place on this machine
    card = card_of(facts, "peft" if adapter.is_file() else "transformers", base)
    (folder / "README.md").write_text(card, encoding="utf-8")
    rows = (journal / PROVENANCE).read_bytes()  # the coordinator may be writing the next one
    (folder / PROVENANCE).write_bytes(rows[: rows.rfind(b"\n") + 1])


# ---- hub ---------------------------------------------------------------------------------------------------
# A folder into a repository of a model hub, by huggingface_hub: all of it in one commit, or nothing.
#
# Owns: which calls are made, what is refused before anything is sent, and that no token is ever shown. Called
# by `farflung publish`. Must not know runs or checkpoints. Tokens are huggingface_hub's own affair: HF_TOKEN
# in the environment, or `hf auth login`; another hub is HF_ENDPOINT.

_WEIGHTS = tuple(pattern for patterns in KINDS.values() for pattern in patterns)
CARD_KEY = "farflung"


def hub_of() -> Hub:
    """UserError if huggingface_hub is not installed, or nobody is logged in, or the hub does not know the token."""
    try:
        package = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError("publish --hub needs huggingface_hub: pip install huggingface_hub") from None
    token = package.get_token()
    if not token:
        raise UserError("publish --hub: nobody is logged in; set HF_TOKEN, or run: hf auth login")
    return Hub(package, package.HfApi(), token)


class Hub:
    def __init__(self, package: Any, api: Any, token: str) -> None:
        self._package, self._api, self._token = package, api, token
        with self._told("log in"):
            api.whoami()

    def publish(self, repo: str, folder: Path, mark: dict[str, Any], private: bool, force: bool) -> str:
        """The address of the commit.  A repository with weights of something else is refused, unless forced."""
        with self._told(f"publish to {repo}"):
            self._api.create_repo(repo, private=private, exist_ok=True)
            before = self._api.repo_info(repo)
            there = {each.rfilename for each in before.siblings or ()}
            if not force:
                self._refuse_foreign(repo, before, there, mark)
            new = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
            add, delete = self._package.CommitOperationAdd, self._package.CommitOperationDelete
            operations = [add(path_in_repo=name, path_or_fileobj=str(path)) for name, path in new.items()]
            # Shards of an older version would be read beside the new ones.
            stale = sorted(name for name in there - new.keys() if fits(name, _WEIGHTS))
            operations += [delete(path_in_repo=name) for name in stale]
            # One commit: `upload_folder` cuts large ones into several.  Nobody else's may come in between.
            commit = self._api.create_commit(
                repo,
                operations,
                commit_message=f"Version {mark['version']} of run {mark['run']} ({mark['run_id'][:8]})",
                parent_commit=before.sha,
            )
            after = self._api.repo_info(repo, revision=commit.oid)
            lacking = sorted(new.keys() - {each.rfilename for each in after.siblings or ()})
        if lacking:
            raise UserError(
                f"publish to {repo}: the hub took the commit and does not show {lacking[0]}; look there"
            )
        return str(commit.commit_url)

    def _refuse_foreign(self, repo: str, info: Any, there: set[str], mark: dict[str, Any]) -> None:
        weights = sorted(name for name in there if fits(name, _WEIGHTS))
        card = info.card_data.to_dict() if info.card_data is not None else {}
        whose = card.get(CARD_KEY)
        if not weights or (isinstance(whose, dict) and whose.get("run_id") == mark["run_id"]):
            return
        raise UserError(
            f"{repo} holds weights that are not of this run ({weights[0]}); choose another name, or add --force to put "
            "this model in their place"
        )

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What the hub or the line says, on one line, and without the token, whoever wrote it there."""
        errors = importlib.import_module("huggingface_hub.errors")
        try:
            yield
        except UserError:
            raise
        except (errors.HfHubHTTPError, errors.HTTPError, OSError, RuntimeError, ValueError) as error:
            said = " ".join(f"{error}{_because(error)}".split()).replace(self._token, "***")
            raise UserError(f"could not {what}: {said or type(error).__name__}") from None


def _because(error: BaseException) -> str:
    """Of an upload that failed, huggingface_hub names the file, and why only in the cause."""
    return f" {error.__cause__}" if isinstance(error, RuntimeError) and error.__cause__ is not None else ""


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file())
