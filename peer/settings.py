"""The volunteer's own settings: what never leaves this machine.  Where they come from, and which of them wins.

Called by the command line, the public API and the agent's own entry point.  Must not know the run.

An argument goes before the environment (FARFLUNG_LISTEN, FARFLUNG_UPLOAD_LIMIT, ...), that before the file
(`config.toml` beside the identity key).  Of limits the strictest counts, wherever it stands, and the run's too.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from farflung.checkpoints.result_log import LIMIT_BYTES
from farflung.collectives.link.widening import MOST_CONNECTIONS
from farflung.peer.identity import default_path
from farflung.protocol.caps import Cap, parse_cap, strictest
from farflung.protocol.errors import UserError

KEYS = (
    "identity",
    "listen",
    "advertise",
    "upload_limit",
    "download_limit",
    "connections",
    "checkpoints",
    "stuck_after",
    "results_limit",
    "results_on_disk",
    "metrics",
)
_PREFIX = "FARFLUNG_"


@dataclass(frozen=True)
class OwnConfig:
    identity: Path | None = None  # the key file of this peer; None: the usual place
    listen: str = ""  # HOST:PORT; "": any port on the address that leads to the coordinator; "off": none
    advertise: str = ""  # HOST[:PORT] that others dial, where it differs from `listen`
    upload_limits: tuple[str, ...] = ()
    download_limits: tuple[str, ...] = ()
    connections: int = 0  # to each peer; 0: as many as the line turns out to need
    checkpoints: str = ""  # URL or folder where this peer keeps checkpoints of the run; "": nowhere
    # Seconds without a step after which the trainer counts as stuck; None: it depends.
    stuck_after: float | None = None
    results_limit: int = LIMIT_BYTES  # bytes of past rounds' results, by which others catch up
    results_on_disk: bool = False  # beside the key, and so there after a restart; else in memory
    metrics: str = ""  # [HOST:]PORT where /metrics and /healthz answer; "": nowhere

    def arguments(self) -> list[str]:
        """As options of `python -m farflung.peer.agent.main`."""
        found = ["--identity", str(self.identity)] if self.identity is not None else []
        for option, value in (
            ("--listen", self.listen),
            ("--advertise", self.advertise),
            ("--checkpoints", self.checkpoints),
            ("--metrics", self.metrics),
        ):
            found += [option, value] if value else []
        for option, limits in (
            ("--upload-limit", self.upload_limits),
            ("--download-limit", self.download_limits),
        ):
            for limit in limits:
                found += [option, limit]
        found += ["--connections", str(self.connections)] if self.connections else []
        if self.results_limit != LIMIT_BYTES:
            found += ["--results-limit", str(self.results_limit)]
        found += ["--results-on-disk"] if self.results_on_disk else []
        return found + (["--stuck-after", str(self.stuck_after)] if self.stuck_after is not None else [])

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """What `arguments` makes, for the agent to read."""
        parser.add_argument("--identity", type=Path)
        parser.add_argument("--listen", default="")
        parser.add_argument("--advertise", default="")
        parser.add_argument("--upload-limit", action="append", default=[])
        parser.add_argument("--download-limit", action="append", default=[])
        parser.add_argument("--connections", type=int, default=0)
        parser.add_argument("--checkpoints", default="")
        parser.add_argument("--stuck-after", type=float)
        parser.add_argument("--results-limit", type=int, default=LIMIT_BYTES)
        parser.add_argument("--results-on-disk", action="store_true")
        parser.add_argument("--metrics", default="")

    @classmethod
    def from_arguments(cls, asked: argparse.Namespace) -> OwnConfig:
        return cls(
            asked.identity,
            asked.listen,
            asked.advertise,
            tuple(asked.upload_limit),
            tuple(asked.download_limit),
            asked.connections,
            asked.checkpoints,
            asked.stuck_after,
            asked.results_limit,
            asked.results_on_disk,
            asked.metrics,
        )


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


def own_config(
    given: Mapping[str, str | None], environ: Mapping[str, str] = os.environ, file: Path | None = None
) -> OwnConfig:
    """`given`: what was said as arguments, by the names in KEYS; None where nothing was."""
    path = file if file is not None else default_path(environ).with_name("config.toml")
    layers = [
        {key: str(value) for key, value in given.items() if value is not None},
        {key: environ[_PREFIX + key.upper()] for key in KEYS if environ.get(_PREFIX + key.upper())},
        _read(path),
    ]
    first = {key: value for layer in reversed(layers) for key, value in layer.items()}
    limits = {
        key: tuple(layer[key] for layer in layers if key in layer)
        for key in ("upload_limit", "download_limit")
    }
    for text in (*limits["upload_limit"], *limits["download_limit"]):
        parse_cap(text)  # a mistake is told here, before anything starts
    return OwnConfig(
        Path(first["identity"]).expanduser() if "identity" in first else None,
        first.get("listen", ""),
        first.get("advertise", ""),
        limits["upload_limit"],
        limits["download_limit"],
        _connections(first.get("connections", "0")),
        place_of(first.get("checkpoints", "")),
        _seconds("stuck_after", first["stuck_after"]) if "stuck_after" in first else None,
        _bytes("results_limit", first["results_limit"]) if "results_limit" in first else LIMIT_BYTES,
        _yes("results_on_disk", first.get("results_on_disk", "no")),
        first.get("metrics", ""),
    )


def _bytes(key: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([MG])B", text.strip())
    if found is None:
        raise UserError(f'{key}: expected a size such as "500 MB" or "2 GB", found {text!r}')
    return round(float(found[1]) * (1e6 if found[2] == "M" else 1e9))


def _yes(key: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise UserError(f'{key}: expected "yes" or "no", found {text!r}')
    return text == "yes"


def _seconds(key: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 < found < math.inf:
        raise UserError(f"{key}: expected seconds, found {text!r}")
    return found


def place_of(text: str) -> str:
    """A URL as it is; a path in full, because the agent may be started in another folder."""
    return str(Path(text).expanduser().absolute()) if text and "://" not in text else text


def _connections(text: str) -> int:
    if not text.isdecimal() or int(text) > MOST_CONNECTIONS:
        raise UserError(f"connections: expected 0 (as many as needed) to {MOST_CONNECTIONS}, found {text!r}")
    return int(text)


def _read(path: Path) -> dict[str, str]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    for key, value in found.items():
        if key not in KEYS:
            raise UserError(f"{path}: {key}: no such setting; there are {', '.join(KEYS)}")
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise UserError(f"{path}: {key}: expected text or a whole number, found {value!r}")
    return {key: str(value) for key, value in found.items()}
