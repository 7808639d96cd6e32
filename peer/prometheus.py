"""A status as Prometheus reads it: one line for each figure, peers told apart by name and id.  Pure.

Called by `farflung status --prometheus`, whose output node_exporter's textfile collector takes up as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from farflung.peer.health import takes_part
from farflung.peer.screen_text import Record, clean, known, records

# name -> (what it is for Prometheus, what it says, key of the status)
_OF_RUN = {
    "version": ("gauge", "Committed rounds that are in the model.", "version"),
    "target_version": ("gauge", "The version at which the run is complete.", "target"),
    "tokens_total": ("counter", "Tokens whose lessons are in the model.", "tokens"),
    "tokens_per_second": ("gauge", "Of all peers that are alive.", "tokens_per_s"),
    "loss": ("gauge", "Mean over the tokens of the last round.", "loss"),
    "seconds_to_go": ("gauge", "Estimated.", "eta_s"),
}
_OF_PEER = {
    "peer_step": ("counter", "Inner steps since its trainer began.", "step"),
    "peer_tokens_per_second": ("gauge", "Of this peer.", "tokens_per_s"),
    "peer_versions_behind": ("gauge", "The run's version less its own.", "behind"),
    "peer_rounds_missed": ("gauge", "In a row.", "missed"),
    "peer_sent_bytes_total": ("counter", "By its data plane.", "tx_bytes"),
    "peer_received_bytes_total": ("counter", "By its data plane.", "rx_bytes"),
    "peer_silent_seconds": ("gauge", "Since its last word.", "heard_s"),
}


def as_metrics(status: Record) -> str:
    run, members = {"run": clean(status.get("run"))}, records(status, "members")
    alive = [member for member in members if member.get("alive") is True]
    lines: list[str] = []
    for name, (kind, told, key) in _OF_RUN.items():
        lines += _metric(name, kind, told, [(run, known(status, key))])
    part = [member for member in members if takes_part(member)]
    lines += _metric("peers_alive", "gauge", "Heard of lately.", [(run, float(len(alive)))])
    told = "Alive, with the run's state, and in the rounds."
    lines += _metric("peers_taking_part", "gauge", told, [(run, float(len(part)))])
    parity = status.get("parity")
    same = None if parity is None else float(parity is True)
    lines += _metric("parity", "gauge", "1: all peers at one version hold the same bits.", [(run, same)])
    named = [(run | {"peer": clean(m.get("name")), "id": clean(m.get("id"))}, m) for m in members]
    shown = [(labels, float(takes_part(member))) for labels, member in named]
    lines += _metric("peer_takes_part", "gauge", "0: it is gone, or left out.", shown)
    for name, (kind, told, key) in _OF_PEER.items():
        lines += _metric(name, kind, told, [(labels, known(member, key)) for labels, member in named])
    return "\n".join(lines) + "\n"


def _metric(
    name: str, kind: str, told: str, values: Sequence[tuple[dict[str, str], float | None]]
) -> list[str]:
    """Nothing at all where no value is known: 0 would be a lie."""
    shown = [
        f"farflung_{name}{{{_labels(labels)}}} {value:.12g}" for labels, value in values if value is not None
    ]
    return [f"# HELP farflung_{name} {told}", f"# TYPE farflung_{name} {kind}", *shown] if shown else []


def _labels(labels: dict[str, str]) -> str:
    safe = {key: value.replace("\\", "\\\\").replace('"', '\\"') for key, value in labels.items()}
    return ",".join(f'{key}="{value}"' for key, value in safe.items())
