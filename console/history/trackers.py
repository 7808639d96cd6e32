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
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from farflung.console.history.history import History, Told
from farflung.protocol.errors import UserError
from farflung.protocol.model_schema import BOOKS_FRAGMENT
from farflung.protocol.process.journal import Event

# ---- round rows --------------------------------------------------------------------------------------------
# A run as numbers, a row for each committed round: what experiment trackers and spreadsheets want.
#
# Called by `farflung export` and live_tracker.py with what the history's reader has found. Pure. Nothing here
# rests on clocks: what a peer tells of a round is told before its commit.

KEPT_ROUNDS = 256  # what peers told of rounds that were never committed is forgotten after so many


@dataclass(frozen=True)
class PlotRow:
    """One committed round; of a peer's own rows one look at it."""

    number: int  # of the round: only ever grows, also where a run has fragments or goes back to an earlier version
    wall: float  # seconds since 1970
    values: dict[str, float]  # by a name with one slash, such as "run/loss"


@dataclass
class RunRows:
    """The fold over a run's events: peers' events of a round have to be there before the coordinator's."""

    key: ClassVar[str] = "run/version"  # in every row
    group: ClassVar[str] = ""  # a run stands for itself
    name: str = ""
    run_id: str = ""
    rules: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    _names: dict[str, str] = field(default_factory=dict)
    _alive: set[str] = field(default_factory=set)
    _versions: dict[int, int] = field(default_factory=dict)  # of each fragment
    _frozen: dict[tuple[str, int], Event] = field(default_factory=dict)  # (peer, fragment)
    _sent: dict[tuple[int, str], Event] = field(default_factory=dict)  # (round, peer) -> what it had frozen
    _last_wall: float | None = None
    _round: int = 0  # the newest that was committed

    @property
    def finished(self) -> bool:
        rounds, fragments = int(self.rules.get("rounds") or 0), int(self.rules.get("fragments") or 1)
        done = sum(version >= rounds for version in self._versions.values())
        return rounds > 0 and done >= fragments

    def take(self, told: Iterable[Told]) -> list[PlotRow]:
        """The rounds that were committed."""
        rows: list[PlotRow] = []
        for process, event in told:
            if not process.is_host:
                self._tell_peers(process.peer, event)
            elif (row := self._tell(event)) is not None:
                rows.append(row)
        return rows

    def _tell_peers(self, peer: str, event: Event) -> None:
        if event.get("event") == "frozen":
            self._frozen[peer, int(event.get("fragment") or 0)] = event
        elif event.get("event") == "sent" and "round" in event:
            frozen = self._frozen.get((peer, int(event.get("fragment") or 0)))
            if frozen is not None:
                self._sent[int(event["round"]), peer] = frozen

    def _tell(self, event: Event) -> PlotRow | None:
        """An event of the coordinator's journal; a row if it is a commit."""
        match event.get("event"):
            case "start":
                self._begin(event)
            case "admitted":
                self._names[str(event["peer"])] = str(event.get("name") or event["peer"])
                self._alive.add(str(event["peer"]))
            case "departed":
                self._alive.discard(str(event["peer"]))
            case "committed":
                self._round = int(event["round"])
                return self._row(event)
            case "evaluated":
                return self._held_out(event)
        return None

    def _held_out(self, event: Event) -> PlotRow:
        """With the round that was committed last: a tracker takes no older one."""
        values = {"held_out/version": float(event["version"])}
        for key in ("loss", "perplexity", "bits_per_byte"):
            if event.get(key) is not None:
                values[f"held_out/{key}"] = float(event[key])
        return PlotRow(self._round, float(event["wall"]), values)

    def _begin(self, event: Event) -> None:
        self.run_id, self.name = (
            str(event.get("run_id") or event.get("run") or ""),
            str(event.get("run") or ""),
        )
        self.rules = dict(event.get("rules") or {})
        if not event.get("again"):
            self._alive.clear()  # whoever is still there is admitted anew

    def _row(self, event: Event) -> PlotRow:
        round_no, wall, fragment = int(event["round"]), float(event["wall"]), int(event.get("fragment") or 0)
        self._versions[fragment] = int(event["version"])
        shares = dict(
            zip(map(str, event.get("members") or []), map(float, event.get("weights") or []), strict=False)
        )
        values = {
            "run/version": float(event["version"]),
            "run/alive": float(len(self._alive)),
            "round/took_part": float(sum(share > 0 for share in shares.values())),
            "round/left_out": float(len(event.get("excluded") or {})),
            "round/seconds": float(event.get("seconds") or 0.0),
            "round/sent_bytes": float(event.get("tx_bytes") or 0.0),
        }
        if event.get("norm") is not None:
            values["run/update_norm"] = float(event["norm"])
        # The others' rounds merge what the same tokens taught other parts of the model.
        if fragment == BOOKS_FRAGMENT:
            values |= self._learned(event, wall)
        for peer, share in shares.items():
            name = self._names.get(peer, peer)
            values[f"weight/{name}"] = share
            frozen = self._sent.get((round_no, peer), {})
            values |= {
                f"{key}/{name}": float(frozen[key]) for key in ("loss", "step") if frozen.get(key) is not None
            }
        self._sent = {key: told for key, told in self._sent.items() if round_no - KEPT_ROUNDS < key[0]}
        return PlotRow(round_no, wall, values)

    def _learned(self, event: Event, wall: float) -> dict[str, float]:
        tokens = int(event.get("tokens") or 0)
        self.tokens += tokens
        found = {"run/tokens": float(self.tokens)}
        if event.get("loss") is not None:
            found["run/loss"] = float(event["loss"])
        if self._last_wall is not None and wall > self._last_wall:
            found["run/tokens_per_s"] = tokens / (wall - self._last_wall)
        self._last_wall = wall
        return found


# ---- trackers ----------------------------------------------------------------------------------------------

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
