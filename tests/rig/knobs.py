"""Knobs of the machines, drawn anew for each seed: patiences, bounds and shares at which the rules turn.

A promise must hold whatever these are; with the values of production a seed meets only the moments that these allow.
Every constant below is a number that only the module in which it stands reads, when its rules act: so it is set there,
and put back.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

ROOM = "farflung."
# Module, constant, and by which factors it may be multiplied.  Whole numbers stay whole, and at least 1.
SHORTER_OR_LONGER = (0.25, 0.5, 2.0, 4.0)
FEWER_OR_MORE = (0.5, 2.0)
_KNOBS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("checkpoints.state_sync", "UNVOUCHED_KEPT", FEWER_OR_MORE),
    ("checkpoints.fetcher", "BACKOFF_MOST", FEWER_OR_MORE),
    ("checkpoints.fetcher", "FIRST_ASKED", FEWER_OR_MORE),
    ("checkpoints.fetcher", "LATER_BELIEVED_S", SHORTER_OR_LONGER),
    ("checkpoints.swarm", "TELL_EVERY_S", SHORTER_OR_LONGER),
    ("collectives.pipeline.stage_scheduler", "ROOM_AGAIN_S", SHORTER_OR_LONGER),
    ("collectives.pipeline.microbatches", "SILENT_S", SHORTER_OR_LONGER),
    ("collectives.pipeline.work_stealing", "GIVES_EVERY_S", SHORTER_OR_LONGER),
    ("collectives.pipeline.work_stealing", "QUIET_S", SHORTER_OR_LONGER),
    ("collectives.round.member", "ARRIVING_PATIENCE", FEWER_OR_MORE),
    ("collectives.round.member", "BACKOFF_MOST", FEWER_OR_MORE),
    ("collectives.round.member", "IN_VAIN", FEWER_OR_MORE),
    # Longer, a round of 12 s, as in these worlds, is over before what follows from the doubt is done (seed 551).
    ("collectives.round.member", "DOUBTED_S", (0.25, 0.5)),
    ("peer.audits.auditor", "ASKED_AGAIN_S", SHORTER_OR_LONGER),
    ("peer.audits.auditor", "GIVEN_MOST", FEWER_OR_MORE),
    ("collectives.round.member", "ASK_AT_ONCE", FEWER_OR_MORE),
    ("coordinator.batches.batches", "SEAT_EVERY_S", SHORTER_OR_LONGER),
    ("coordinator.batches.batch_book", "BEATS_AHEAD", FEWER_OR_MORE),
    ("coordinator.court.questions", "ASK_AGAIN_S", SHORTER_OR_LONGER),
    ("coordinator.rounds.owners", "ROUNDS_NOT_WAITED", FEWER_OR_MORE),
    ("coordinator.run.round_driver", "RETRY_S", SHORTER_OR_LONGER),
    ("coordinator.restoring.kept_books", "KEEP_AGAIN_S", SHORTER_OR_LONGER),
    ("coordinator.recovery.recovery", "AWAIT_DEAD", FEWER_OR_MORE),
    ("coordinator.run.ticks", "DONORS_TURN_S", SHORTER_OR_LONGER),
    ("coordinator.run.machine", "RECONNECT_GRACE_S", SHORTER_OR_LONGER),
    ("coordinator.run.digest_agreement", "CHECKS_AT_ONCE", FEWER_OR_MORE),
    ("peer.audits.auditor", "ASK_AGAIN_S", SHORTER_OR_LONGER),
    ("peer.machine.checkpoint_policy", "READ_AGAIN_S", SHORTER_OR_LONGER),
    ("peer.machine.checkpoint_policy", "STARVED_S", SHORTER_OR_LONGER),
    ("peer.machine.handshake", "RETRY_S", SHORTER_OR_LONGER),
)
# Those of modes that were taken out are not there.
KNOBS = tuple(each for each in _KNOBS if importlib.util.find_spec((ROOM + each[0]).rpartition(".")[0]))
OFTEN = 0.3  # each of them, in a seed that turns any


@contextmanager
def turned(seed: int) -> Iterator[dict[str, float]]:
    """Half of the seeds turn none.  Yields what was turned: «module.NAME» and its value."""
    draw = random.Random(f"knobs {seed}")
    turned_now: dict[str, float] = {}
    before: list[tuple[ModuleType, str, float]] = []
    turns_any = draw.random() < 0.5
    try:
        for name, constant, factors in KNOBS:
            wanted, factor = draw.random() < OFTEN, draw.choice(factors)
            if not (turns_any and wanted):
                continue
            module = importlib.import_module(ROOM + name)
            usual = getattr(module, constant)
            value = max(1, round(usual * factor)) if isinstance(usual, int) else usual * factor
            turned_now[f"{name}.{constant}"] = value
            before.append((module, constant, usual))
            setattr(module, constant, value)
        yield turned_now
    finally:
        for module, constant, usual in reversed(before):
            setattr(module, constant, usual)
