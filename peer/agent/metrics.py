"""What a peer tells Prometheus of itself, where its owner asked for it.

Owned by the agent, whose loop calls `on_tick`; the HTTP is the coordinator's (protocol/process/metrics.py).  Must
not know how rounds are made.
"""

from __future__ import annotations

from collections.abc import Mapping

from farflung import __version__
from farflung.collectives.link.link import Link
from farflung.peer.agent.journal_writer import verdicts_of
from farflung.peer.machine.machine import PeerMachine
from farflung.protocol.process.metrics import Exporter, Family, by_label, counter, gauge, of_process, text_of


class PeerMetrics:
    def __init__(self, address: str, run: str) -> None:
        """`address`: HOST:PORT, or empty for none."""
        self._run = run
        self._answer_s: float | None = None
        self._exporter = Exporter(address).__enter__() if address else None

    def on_answer(self, took_s: float) -> None:
        self._answer_s = took_s

    def on_tick(self, now: float, machine: PeerMachine, link: Link) -> None:
        if self._exporter is not None and self._exporter.is_due(now):
            families = of_process(__version__, self._run, "peer")
            families += of_peer(machine, verdicts_of(link.counts, machine.member), self._answer_s)
            self._exporter.tell(text_of(families).encode())

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.__exit__(None, None, None)


def of_peer(machine: PeerMachine, frames: Mapping[str, int], answer_s: float | None) -> list[Family]:
    vitals, part = machine.member.reports.vitals, machine.member.part
    version = min(replica.held.version for replica in part.replicas.values()) if part is not None else -1
    return [
        gauge("connected", "1 while this peer is a member of the run.", int(machine.doorway.inside)),
        gauge("version", "Of the state held here; -1: none yet.", version),
        gauge("in_round", "1 while a round is going on here.", int(part is not None and bool(part.flights))),
        counter("steps_total", "Inner steps of the trainer.", vitals.step),
        counter("tokens_total", "Tokens that the trainer has seen.", vitals.tokens),
        gauge("loss", "What the trainer told last.", vitals.loss),
        gauge("trainer_stuck", "1 when the trainer takes no steps though it could.", int(vitals.stuck)),
        counter("sent_bytes_total", "To other peers.", vitals.tx_bytes),
        counter("received_bytes_total", "From other peers.", vitals.rx_bytes),
        gauge(
            "line_up_bytes_per_second",
            "What the line was seen to carry; 0: not known.",
            vitals.up_bytes_per_s,
        ),
        gauge("line_down_bytes_per_second", "The same for what comes in.", vitals.down_bytes_per_s),
        gauge("answer_seconds", "From the newest answered beat to its answer.", answer_s),
        gauge(
            "saved_version", "The newest version of which a checkpoint was written; -1: none.", vitals.saved
        ),
        by_label("frames_total", "Frames of other peers by what became of them.", "verdict", frames),
    ]
