"""Rows for TensorBoard, Weights & Biases, MLflow, or a script: one small interface, and `farflung export`.

Called by the command line and by live_tracker.py.  The packages are optional and imported only by the tracker that was
asked for.  To add another tracker, write a class with `write` and `close`, and a row in PACKAGES.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from farflung.console.history.history import History
from farflung.console.history.round_rows import PlotRow, RunRows
from farflung.protocol.errors import UserError

LOOK_EVERY_S = 2.0
FLUSH_S = 5  # how old what TensorBoard shows may be
TAG = "farflung.run_id"  # by which a run of MLflow is found again
# Option -> what must be there, and how that is got.
PACKAGES = {
    "--tensorboard": ("tensorboard", "tensorboard"),
    "--wandb": ("wandb", "wandb"),
    "--mlflow": ("mlflow", "mlflow-skinny"),
}


class About(Protocol):
    """Whose rows they are."""

    name: str
    run_id: str
    rules: dict[str, Any]

    @property
    def group(self) -> str:
        """What it belongs to; empty: it stands for itself."""

    @property
    def key(self) -> str:
        """A figure that every row has."""


class Tracker(Protocol):
    def write(self, row: PlotRow) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which trackers, and where each of them has its place."""

    tensorboard: Path | None = None
    wandb: str | None = None
    mlflow: str | None = None

    @property
    def options(self) -> list[str]:
        found = {"--tensorboard": self.tensorboard, "--wandb": self.wandb, "--mlflow": self.mlflow}
        return [option for option, value in found.items() if value is not None]

    def check(self) -> None:
        """UserError for a package that is missing, before anything begins; nothing is imported."""
        for option in self.options:
            module, package = PACKAGES[option]
            if importlib.util.find_spec(module) is None:
                raise _missing(option, package, f"there is no module {module}")

    def open(self, about: About) -> list[Tracker]:
        found: list[Tracker] = []
        if self.tensorboard is not None:
            found.append(TensorBoard(self.tensorboard, about))
        if self.wandb is not None:
            found.append(Wandb(self.wandb, about))
        if self.mlflow is not None:
            found.append(Mlflow(self.mlflow, about))
        return found


class TensorBoard:
    """Event files below a folder, of a peer below one of its name.  What was written there of the same is replaced."""

    def __init__(self, folder: Path, about: About) -> None:
        module = _module("torch.utils.tensorboard", "--tensorboard")
        place = folder / about.name if about.group else folder
        try:
            # TensorBoard drops what older files of this folder have from this step on.
            self._writer: Any = module.SummaryWriter(str(place), purge_step=0, flush_secs=FLUSH_S)
        except OSError as error:
            raise UserError(f"--tensorboard {folder}: cannot write: {error.strerror}") from error
        self._writer.add_text("run", f"{about.name} ({about.run_id})", 0)

    def write(self, row: PlotRow) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.number, row.wall)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One W&B run for each run of farflung, also when it is exported again: W&B passes over steps that it has."""

    def __init__(self, project: str, about: About) -> None:
        module = _module("wandb", "--wandb")
        group = {"group": about.group} if about.group else {}
        self._run: Any = module.init(
            project=project, name=about.name, id=about.run_id, resume="allow", config=about.rules, **group
        )

    def write(self, row: PlotRow) -> None:
        self._run.log({**row.values, "wall": row.wall}, step=row.number)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """One MLflow run for each run of farflung, below an experiment of its group.  What it has is not written twice."""

    def __init__(self, place: str, about: About) -> None:
        """`place`: a folder, or the address of a server or a database."""
        if "://" not in place:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer ones ask whether that is meant
        module = _module("mlflow", "--mlflow")
        self._entities: Any = _module("mlflow.entities", "--mlflow")
        where = place if "://" in place else Path(place).expanduser().absolute().as_uri()
        self._client: Any = module.MlflowClient(tracking_uri=where)
        experiment = self._experiment(about.group or about.name)
        # A name with a quote in it would be another question.
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{about.run_id}'", max_results=1)
        self._run: str = found[0].info.run_id if found else self._begin(experiment, about)
        past = self._client.get_metric_history(self._run, about.key) if found else []
        self._has = max((point.step for point in past), default=-1)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _begin(self, experiment: str, about: About) -> str:
        made = self._client.create_run(experiment, run_name=about.name, tags={TAG: about.run_id})
        for key, value in about.rules.items():
            self._client.log_param(made.info.run_id, key, value)
        return str(made.info.run_id)

    def write(self, row: PlotRow) -> None:
        if row.number <= self._has:
            return
        at_ms = round(1000 * row.wall)
        points = [self._entities.Metric(_plain(n), v, at_ms, row.number) for n, v in row.values.items()]
        self._client.log_batch(self._run, metrics=points)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _plain(name: str) -> str:
    """MLflow takes letters, digits and a few signs; peers may have any name."""
    return "".join(each if each.isalnum() or each in "_-. /" else "_" for each in name)[:250]


class JsonLines:
    """One JSON object a round, for a script."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def write(self, row: PlotRow) -> None:
        self._say(json.dumps({"round": row.number, "wall": row.wall, **row.values}))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ExportOptions:
    folder: Path
    chosen: Chosen = Chosen()
    as_json: bool = False
    follow: bool = False


def export(options: ExportOptions, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """All rounds so far; with `follow` those to come as well, until the run is complete or somebody ends it."""
    if not options.chosen.options and not options.as_json:
        raise UserError(
            "say where to: --tensorboard FOLDER, --wandb PROJECT, --mlflow PLACE, or --json for the output"
        )
    history, run = History(options.folder, keep=False), RunRows()
    rows = run.take(history.new_events())
    while not history.coordinators:
        if not options.follow:
            raise history.no_run
        time.sleep(LOOK_EVERY_S)
        rows = run.take(history.new_events())
    written = 0
    with ExitStack() as stack:
        opened = [*options.chosen.open(run), *([JsonLines(say)] if options.as_json else [])]
        trackers = [stack.enter_context(closing(each)) for each in opened]
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


def _module(name: str, option: str) -> Any:
    """Also where only a part of it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(option, PACKAGES[option][1], str(error)) from error


def _missing(option: str, package: str, why: str) -> UserError:
    return UserError(f"{option} needs the package {package}: pip install {package}   ({why})")
