"""The volunteer's own settings: what never leaves this machine.  Where they come from, and which of them wins.

Called by the command line, the public API and the agent's own entry point.  Must not know the run.  Every command of
farflung reads it, so it must not load what is slow to load, as cryptography is.

`OwnConfig` is the table: a field there is a setting, and everything else follows from it: the keys of `config.toml`
(beside the identity key), the variables of the environment (FARFLUNG_LISTEN, FARFLUNG_UPLOAD_LIMIT, ...), the options
of `farflung join`, the names that the public API passes on, and what the agent is handed.  An argument goes before
the environment, that before the file.  Of limits the strictest counts, wherever it stands, and the run's too.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import msgspec

from farflung.protocol.caps import (
    KEPT_BYTES,
    SHARDS_BYTES,
    Cap,
    ResultsLimit,
    parse_bytes,
    parse_cap,
    parse_relay,
    parse_results,
    strictest,
)
from farflung.protocol.errors import UserError

T = TypeVar("T")
_PREFIX = "FARFLUNG_"
DATA_VARIABLE = _PREFIX + "DATA"  # for the trainer, which is a process of its own
RESULTS_VARIABLE = _PREFIX + "RESULTS"  # likewise: it says how much memory is needed
METRICS_HELP = (
    "PORT or HOST:PORT where /metrics (Prometheus) and /healthz answer; a PORT: on this machine only."
)
_UPLOAD_HELP = 'For model data: "20 Mbit/s", or "none, 5 Mbit/s 08:00-18:00".'
_DOWNLOAD_HELP = "The same for what comes in."
_CHECKPOINTS_HELP = "Folder or URL (s3://...) for checkpoints of the run, to save and to resume."
_DATA_HELP = "Where this peer reads the run's token shards: file, folder or URL [as run.toml says]."
_START_HELP = "Where this peer has what the run begins with ([start] of run.toml): file, folder or URL."
_RELAY_HELP = 'A relay for peers that nobody can dial: "20 Mbit/s", or "20 Mbit/s, 1 TB a month, port 29803".'
_KEEP_HELP = 'Disk for the newest version of the runs that this peer was in; `off`: none ["100 GB"].'
_RESULTS_HELP = 'For results of past rounds, by which others catch up ["2 GB"]; or "20 GB on disk".'


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """`$FARFLUNG_HOME/identity.pem`, else `~/.config/farflung/identity.pem`."""
    try:
        home = Path(environ.get("FARFLUNG_HOME") or "~/.config/farflung").expanduser()
    except RuntimeError as error:
        raise UserError(f"no place for the identity key: {error}; set FARFLUNG_HOME to a folder") from error
    return home / "identity.pem"


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise UserError(f'expected "yes" or "no", found {text!r}')
    return text == "yes"


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 < found < math.inf:
        raise UserError(f"expected seconds, found {text!r}")
    return found


def _kept(text: str) -> int:
    return 0 if text == "off" else parse_bytes(text)


def _file(text: str) -> Path:
    return Path(text).expanduser()


def default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/farflung/shards`, else `~/.cache/farflung/shards`."""
    try:
        return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "farflung" / "shards"
    except RuntimeError as error:
        raise UserError(f"no place for shards: {error}; set XDG_CACHE_HOME to a folder") from error


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """As it was written, once it is known to be right."""

    def checked(text: str) -> str:
        parse(text)
        return text

    return checked


_CAP = _checked(parse_cap)


def place_of(text: str) -> str:
    """A URL as it is; a path in full, because the agent may be started in another folder."""
    return str(Path(text).expanduser().absolute()) if text and "://" not in text else text


def _setting(default: T, help: str = "", parse: Callable[[str], object] = str, **more: object) -> T:
    made: T = field(default=default, metadata={"help": help, "parse": parse, **more})
    return made


@dataclass(frozen=True)
class OwnConfig:
    identity: Path | None = _setting(None, "Key file of this peer [~/.config/farflung].", _file)  # noqa: RUF009
    # "": any port on the address that leads to the coordinator; "off": none.
    listen: str = _setting("", "HOST:PORT for other peers; `off`: this peer can't be dialled.")
    advertise: str = _setting("", "HOST[:PORT] that others dial, behind a forwarded port.")
    # Of limits every place that names one counts: which is the strictest depends on the time of day.
    upload_limits: tuple[str, ...] = _setting((), _UPLOAD_HELP, _CAP, name="upload_limit", merge=tuple)
    download_limits: tuple[str, ...] = _setting((), _DOWNLOAD_HELP, _CAP, name="download_limit", merge=tuple)
    checkpoints: str = _setting("", _CHECKPOINTS_HELP, place_of)
    # Without a step for so long the trainer counts as stuck; None: it depends.  No option, only file and environment.
    stuck_after: float | None = _setting(None, parse=_seconds)
    results: str = _setting("", _RESULTS_HELP, _checked(parse_results))
    # Of the newest version, and of all runs together; 0: nothing is kept.
    keep: int = _setting(KEPT_BYTES, _KEEP_HELP, _kept)
    archive: bool = _setting(
        False, "Keep what rounds were made of beside the checkpoints, for `audit --replay`.", _yes
    )
    metrics: str = _setting("", METRICS_HELP)
    data: str = _setting("", _DATA_HELP, place_of)
    start: str = _setting("", _START_HELP, place_of)
    book: str = _setting("", "A phone book in which to look the run up while nobody answers.")
    # Of token shards that lie elsewhere, for all trainers of this machine.  No option, only file and environment.
    cache_limit: int = _setting(SHARDS_BYTES, parse=parse_bytes)
    relay: str = _setting("", _RELAY_HELP, _checked(parse_relay))

    @property
    def kept_results(self) -> ResultsLimit:
        return parse_results(self.results)

    def as_json(self) -> str:
        """For the agent: an option of `python -m farflung.peer.agent.main`."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> OwnConfig:
        return msgspec.convert(json.loads(text), cls, dec_hook=lambda kind, value: kind(value))


class WrittenValue(NamedTuple):
    """A value as a person wrote it."""

    where: str  # the option, the variable, or the file and the key in it
    text: str


@dataclass(frozen=True)
class Setting:
    """A row of the table."""

    field: str  # of OwnConfig, and its type:
    kind: Any
    name: str  # in the file and as an argument, and in capitals in the environment
    parse: Callable[[str], object]
    help: str  # of its option of `farflung join`; without one there is none
    # Which of the values counts, or what of all of them; what goes first comes first.  `all` would do for permissions.
    merge: Callable[[Iterator[object]], object] = next

    def parsed(self, said: WrittenValue) -> object:
        try:
            return self.parse(said.text)
        except UserError as error:
            raise UserError(f"{said.where}: {error}") from None


def _table() -> Iterator[Setting]:
    kinds = get_type_hints(OwnConfig)
    for each in fields(OwnConfig):
        more: dict[str, Any] = {"name": each.name, **each.metadata}
        yield Setting(each.name, kinds[each.name], **more)


SETTINGS = {setting.name: setting for setting in _table()}


def own_config(
    given: Mapping[str, object], environ: Mapping[str, str] = os.environ, file: Path | None = None
) -> OwnConfig:
    """`given`: what was said as arguments, by the names in SETTINGS; None or False where nothing was."""
    variables = {name: _PREFIX + name.upper() for name in SETTINGS}
    layers = [
        {
            name: WrittenValue(name, _text_of(value))
            for name, value in given.items()
            if value is not None and value is not False
        },
        {name: WrittenValue(key, value) for name, key in variables.items() if (value := environ.get(key))},
        _read(file if file is not None else default_path(environ).with_name("config.toml")),
    ]
    found: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if said := [layer[name] for layer in layers if name in layer]:
            found[setting.field] = setting.merge(map(setting.parsed, said))
    return OwnConfig(**found)


def refuse_contradictions(own: OwnConfig) -> None:
    """What has no place without another setting.  Not for the trainer, which sees some of them alone."""
    if own.archive and not own.checkpoints:
        raise UserError("archive: it lies beside checkpoints; name a place for both with --checkpoints")


def _text_of(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _read(path: Path) -> dict[str, WrittenValue]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    for key, value in found.items():
        if key not in SETTINGS:
            near = difflib.get_close_matches(key, SETTINGS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SETTINGS)}"
            raise UserError(f"{path}: {key}: no such setting; {hint}")
        if not isinstance(value, str | int):
            raise UserError(f"{path}: {key}: expected text or a whole number, found {value!r}")
    return {key: WrittenValue(f"{path}: {key}", _text_of(value)) for key, value in found.items()}


@dataclass(frozen=True)
class Caps:
    """All limits of one direction, the run's too."""

    caps: tuple[Cap, ...]

    @classmethod
    def of(cls, *texts: str) -> Caps:
        return cls(tuple(parse_cap(text) for text in texts))

    def at(self, second_of_day: float) -> float | None:
        least: float | None = None
        for cap in self.caps:
            least = strictest(least, cap.at(second_of_day))
        return least

    def now(self) -> float | None:
        """At this hour, by this machine's clock."""
        clock = time.localtime()
        return self.at(3600 * clock.tm_hour + 60 * clock.tm_min + clock.tm_sec)
