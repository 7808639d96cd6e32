"""Figures for Prometheus: its text format, and the families that every farflung process has.

Used by the coordinator (coordinator/run_metrics.py) and by peers (peer/agent/metrics.py); exporter.py hands the text
out.  Names follow Prometheus: base units, `_total` for what only grows.  docs/operate.md lists them all.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PREFIX = "farflung_"
_TEXT = str.maketrans({"\\": r"\\", "\n": r"\n"})
_LABEL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass(frozen=True)
class Family:
    """One name and its values, each under labels of its own; a value of None is left out."""

    name: str
    help: str
    values: Iterable[tuple[Mapping[str, str], float | None]]
    kind: Literal["gauge", "counter"] = "gauge"


def gauge(name: str, help: str, value: float | None, **labels: str) -> Family:
    return Family(PREFIX + name, help, [(labels, value)])


def counter(name: str, help: str, value: float | None, **labels: str) -> Family:
    return Family(PREFIX + name, help, [(labels, value)], "counter")


def by_label(name: str, help: str, label: str, values: Mapping[str, float]) -> Family:
    kind: Literal["gauge", "counter"] = "counter" if name.endswith("_total") else "gauge"
    return Family(PREFIX + name, help, [({label: key}, value) for key, value in values.items()], kind)


def text_of(families: Iterable[Family]) -> str:
    """The exposition format 0.0.4."""
    lines: list[str] = []
    for family in families:
        told = [(labels, value) for labels, value in family.values if value is not None]
        if told:
            lines.append(f"# HELP {family.name} {family.help.translate(_TEXT)}")
            lines.append(f"# TYPE {family.name} {family.kind}")
        lines += [f"{family.name}{_labels(labels)} {_number(value)}" for labels, value in told]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{value.translate(_LABEL)}"' for key, value in labels.items()) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value) if isinstance(value, float) else str(int(value))


def of_process(software: str, run: str, role: str) -> list[Family]:
    """Under the names that every Prometheus client library uses."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    rss_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    plain: Mapping[str, str] = {}
    return [
        gauge("info", "Always 1; the labels say what this is.", 1, software=software, run=run, role=role),
        Family("process_resident_memory_bytes", "Memory in use.", [(plain, rss_kb * 1024)]),
        Family("process_cpu_seconds_total", "CPU time used.", [(plain, time.process_time())], "counter"),
        Family(
            "process_open_fds", "Open files and connections.", [(plain, len(os.listdir("/proc/self/fd")))]
        ),
    ]
