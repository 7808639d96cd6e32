"""What a coordinator tells Prometheus of its run.  Reads what the run machine knows, changes nothing.

Called by the server about once a second, in its own loop: so it costs no more than a pass over the members.  Must
not know how the text is handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from farflung import __version__
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.process.metrics import Family, by_label, counter, gauge, of_process, text_of


def run_metrics(
    core: Core, drivers: Sequence[RoundDriver], counts: dict[str, Any], slowest_turn_s: float
) -> bytes:
    """`counts`: the server's own; `slowest_turn_s`: of its loop since the last time."""
    families = [
        *of_process(__version__, core.manifest.run.name, "coordinator"),
        gauge(
            "loop_turn_seconds_max", "The slowest turn of the main loop since the last look.", slowest_turn_s
        ),
        *_of_run(core),
        *_of_evaluation(core),
        *_of_members(core),
        *_of_rounds(core, drivers),
        by_label("frames_total", "Frames by what became of them.", "verdict", counts["counters"]),
        counter("frames_arrived_total", "Frames, and connections that were never let in.", counts["arrived"]),
        counter("answers_undelivered_total", "Answers whose reader was gone.", counts["undelivered"]),
    ]
    return text_of(families).encode()


def _of_run(core: Core) -> list[Family]:
    ledger = core.ledger
    return [
        gauge("version", "Committed versions, of the least advanced fragment.", ledger.version),
        gauge("rounds_wanted", "Versions after which the run is complete.", core.manifest.run.rounds),
        gauge("era", "How often the run went back to an older version.", ledger.eras.number),
        gauge("finished", "1 when the run is complete.", int(core.finished)),
        counter("tokens_total", "Tokens in commits.", ledger.totals.tokens),
        gauge("loss", "Of the last commit.", ledger.totals.loss),
        gauge("uptime_seconds", "Since this process took the run over.", core.now - core.began_at),
        counter("incarnations_total", "Coordinator processes that this run has had.", ledger.incarnation),
    ]


def _of_evaluation(core: Core) -> list[Family]:
    told: dict[str, Any] = {key: each for mode in core.modes for key, each in mode.status().items()}.get(
        "held_out", {}
    )
    if "version" not in told:
        return []
    return [
        gauge("held_out_version", "The version that was evaluated last.", told["version"]),
        gauge("held_out_loss", "Of it, on text that nobody learns from, in nats a token.", told["loss"]),
        gauge("held_out_bits_per_byte", "The same by bytes of that text.", told["bits_per_byte"]),
        gauge("held_out_outvoted", "Members whose losses of it were left out.", len(told["outvoted"])),
    ]


def _of_members(core: Core) -> list[Family]:
    alive = list(core.members.alive.values())
    states = Counter(str(member.told.state) for member in alive)
    return [
        gauge("members", "Members that are here.", len(alive)),
        gauge("members_least", "No round opens with fewer.", core.manifest.run.min_peers),
        gauge("members_most", "Further ones are refused.", core.manifest.run.max_peers),
        gauge("members_verified", "Members that hold the newest version.", sum(m.verified for m in alive)),
        gauge("members_participating", "Of these, in the last round.", sum(m.participating for m in alive)),
        gauge(
            "members_dialable", "Members that others can dial.", sum(bool(m.contact.address) for m in alive)
        ),
        *_of_relay(core),
        by_label("members_by_state", "Members by what they do.", "state", states),
        gauge("tokens_per_second", "Of all members.", sum(m.pace.tokens_per_s for m in alive)),
    ]


def _of_relay(core: Core) -> list[Family]:
    ways, usage = core.members.ways, core.members.ways.usage
    found = [ways.way_of(each) for each in core.members.alive.values()]
    return [
        gauge(
            "relay_on",
            "1 where peers that nobody can dial may meet at a relay.",
            int(ways.has_relay),
        ),
        gauge("members_relayed", "Members that have tickets for it.", found.count("relayed")),
        gauge(
            "members_punched",
            "Members that met others past their routers, and need it not.",
            found.count("punched"),
        ),
        gauge("pairs_punched", "Pairs of members that did.", ways.punched),
        gauge("relay_pairs", "Pairs that are joined there now.", usage.pairs),
        gauge("relay_waiting", "Sides that wait there for the other one.", usage.waiting),
        counter("relay_bytes_total", "Bytes that it passed.", usage.moved_bytes),
        counter("relay_refused_total", "Connections to it without a good ticket.", usage.refused),
        gauge("relay_month_bytes", "Bytes that it passed in this calendar month.", usage.month_bytes),
        gauge(
            "relay_month_limit_bytes", "After so many it stops until the next month.", usage.month_limit_bytes
        ),
    ]


def _of_rounds(core: Core, drivers: Sequence[RoundDriver]) -> list[Family]:
    ledger = core.ledger
    last = ledger.totals.rounds[-1] if ledger.totals.rounds else None
    flights = [each.round for each in drivers if each.round is not None]
    families = [
        counter("rounds_total", "Rounds that were opened.", ledger.round_no),
        gauge("rounds_in_flight", "Rounds that are going on now.", len(flights)),
    ]
    if last is not None:
        families += [
            gauge("last_round_seconds", "From its opening to its commit.", last.seconds),
            gauge("last_round_members", "Whose work is in.", len(last.commit.included)),
            gauge("last_round_excluded", "Whose work is not.", len(last.excluded)),
            gauge("last_round_bytes", "Sent by all members since the commit before.", last.tx_bytes),
        ]
    return families
