"""Rows of a run for TensorBoard, Weights & Biases, or a script: one small interface, and `farflung export`.

Called by the command line.  The packages are optional and imported only by the tracker that was asked for.  To add
another tracker, write a class with `write` and `close`.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from farflung.console.history.history import History
from farflung.console.history.round_rows import Row, RunRows
from farflung.protocol.errors import UserError

LOOK_EVERY_S = 2.0


class Tracker(Protocol):
    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files below a folder.  What an earlier export wrote there is replaced, not doubled."""

    def __init__(self, folder: Path, run: RunRows) -> None:
        module = _module("torch.utils.tensorboard", "--tensorboard", "tensorboard")
        try:
            # TensorBoard drops what older files of this folder have from this step on.
            self._writer: Any = module.SummaryWriter(str(folder), purge_step=0)
        except OSError as error:
            raise UserError(f"--tensorboard {folder}: cannot write: {error.strerror}") from error
        self._writer.add_text("run", f"{run.name} ({run.run_id})", 0)

    def write(self, row: Row) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.round_no, row.wall)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One W&B run for each run of farflung, also when it is exported again: W&B passes over steps that it has."""

    def __init__(self, project: str, run: RunRows) -> None:
        module = _module("wandb", "--wandb", "wandb")
        self._run: Any = module.init(
            project=project, name=run.name, id=run.run_id, resume="allow", config=run.rules
        )

    def write(self, row: Row) -> None:
        self._run.log({**row.values, "wall": row.wall}, step=row.round_no)

    def close(self) -> None:
        self._run.finish()


class JsonLines:
    """One JSON object a round, for a script."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def write(self, row: Row) -> None:
        self._say(json.dumps({"round": row.round_no, "wall": row.wall, **row.values}))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ExportOptions:
    folder: Path
    tensorboard: Path | None = None
    wandb: str | None = None
    as_json: bool = False
    follow: bool = False


def export(options: ExportOptions, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """All rounds so far; with `follow` those to come as well, until the run is complete or somebody ends it."""
    if options.tensorboard is None and options.wandb is None and not options.as_json:
        raise UserError("say where to: --tensorboard FOLDER, --wandb PROJECT, or --json for the output")
    history, run = History(options.folder, keep=False), RunRows()
    rows = run.take(history.new_events())
    while not history.coordinators:
        if not options.follow:
            raise history.no_run
        time.sleep(LOOK_EVERY_S)
        rows = run.take(history.new_events())
    written = 0
    with ExitStack() as stack:
        trackers = [stack.enter_context(closing(each)) for each in _trackers(options, run, say)]
        while True:
            for row in rows:
                for tracker in trackers:
                    tracker.write(row)
            written += len(rows)
            if not options.follow or (run.finished and not rows):
                break
            time.sleep(LOOK_EVERY_S)
            rows = run.take(history.new_events())
    note(f"exported {written} rounds of {run.name}")


def _trackers(options: ExportOptions, run: RunRows, say: Callable[[str], None]) -> list[Tracker]:
    found: list[Tracker] = []
    if options.tensorboard is not None:
        found.append(TensorBoard(options.tensorboard, run))
    if options.wandb is not None:
        found.append(Wandb(options.wandb, run))
    return [*found, JsonLines(say)] if options.as_json else found


def _module(name: str, option: str, package: str) -> Any:
    """Also where only a part of it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{option} needs the package {package}: pip install {package}   ({error})") from error
