"""A folder into a repository of a model hub, by huggingface_hub: all of it in one commit, or nothing.

Owns: which calls are made, what is refused before anything is sent, and that no token is ever shown.
Called by `farflung publish`.  Must not know runs or checkpoints.  Tokens are huggingface_hub's own affair: HF_TOKEN in
the environment, or `hf auth login`; another hub is HF_ENDPOINT.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farflung.protocol.errors import UserError
from farflung.protocol.process.own_files import KINDS, fits

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
