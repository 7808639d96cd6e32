"""Rules of the machines of microbatches, each broken by one line: within how many seeds does the world notice?

    python tests/rig/flow_mutations.py [100] [--only WORDS]

Each mutation is loaded as a second set of the modules of collectives/pipeline/, beside the real ones, and driven
through the seeds of flow_world.py until a promise breaks.  Exits with 1 where one survives.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from pathlib import Path
from typing import NamedTuple

import farflung.collectives.pipeline.stage_scheduler as real

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig import flow_world

FOLDER = Path(real.__file__).parent
NAMES = (
    "seats",
    "effects",
    "microbatches",
    "stage_frames",
    "neighbours",
    "work_stealing",
    "stage_scheduler",
)  # each after those that it imports


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "R4: nobody waits for HELD",
        "stage_scheduler",
        "        return not silent\n",
        "        return True\n",
    ),
    Mutation(
        "R3: newcomers are not told what is held",
        "stage_scheduler",
        "table.last_loss(self._stage - 1), table.last_change(self._stage - 1)",
        "table.last_loss(self._stage - 1), table.last_loss(self._stage - 1)",
    ),
    Mutation(
        "R2: what came back from who is gone now is not sent again",
        "stage_scheduler",
        "            if record.next and not table.lives(record.next):\n                record.next, record.again",
        "            if record.next and not record.grad and not table.lives(record.next):\n"
        "                record.next, record.again",
    ),
    Mutation(
        "R2: what is sent again is not marked",
        "stage_scheduler",
        "record.next, record.again = 0, True\n",
        "record.next = 0\n",
    ),
    Mutation(
        "R3: nobody is told what is held",
        "stage_scheduler",
        "        if self.version >= 0 and lost and changed > old:",
        "        if False:",
    ),
    Mutation(
        "R4: any HELD will do, however old",
        "stage_scheduler",
        "self._heard.get(s.number, 0) < need]",
        "self._heard.get(s.number, 0) < 1]",
    ),
    Mutation(
        "R4: who has it is not asked, and it is computed again",
        "stage_scheduler",
        "            record.next = record.next or seat\n",
        "            pass\n",
    ),
    Mutation(
        "R5: frames of who is gone are taken",
        "stage_frames",
        "    if not seat.lives:\n        return Verdict.STALE\n",
        "",
    ),
    Mutation(
        "R5: what was meant for an older seat of the same peer is taken",
        "stage_frames",
        "    if table_of(header) < mine.since:\n        return Verdict.STALE",
        "    if False:\n        return Verdict.STALE",
    ),
    Mutation(
        "R5: what moves a microbatch does not wait for its table",
        "stage_frames",
        "    return moving and table_of(header) > table.number\n",
        "    return False\n",
    ),
    Mutation(
        "R5: who is gone goes on",
        "stage_scheduler",
        "        if not table.lives(self._me):\n",
        "        if False:\n",
    ),
    Mutation(
        "a gradient is thrown away when its maker goes",
        "stage_scheduler",
        "                record.sent = record.missing = record.returned = False\n",
        "                record.sent = record.missing = record.returned = record.grad = False\n",
    ),
    Mutation(
        "nobody asks again",
        "stage_scheduler",
        "        for seat, kind, micro in self._asks.due(now):\n",
        "        for seat, kind, micro in []:\n",
    ),
    Mutation(
        "MISSING is not answered by the activation",
        "stage_scheduler",
        "        record.missing, record.sent = True, False\n",
        "        record.missing = True\n",
    ),
    Mutation(
        "room is said once and never again",
        "stage_scheduler",
        "        if now - self._told_room_at >= ROOM_AGAIN_S:\n",
        "        if False:\n",
    ),
    Mutation(
        "room is given without a limit",
        "neighbours",
        "        free = self.limit - waiting - sum(",
        "        free = 9 + self.limit - waiting - sum(",
    ),
    Mutation(
        "senders do not look at room",
        "neighbours",
        "        return [seat for seat in self._told if self.left(seat) > 0]\n",
        "        return list(self._told)\n",
    ),
    Mutation(
        "what is counted is forgotten at once",
        "stage_scheduler",
        "            record.counted = True\n            self._open",
        "            record.counted, record.has = True, False\n            self._open",
    ),
    Mutation(
        "a second activation of the same microbatch is computed too",
        "stage_scheduler",
        "        if record is not None and record.has:\n            if not self._adopt",
        "        if record is not None and record.has and record.counted:\n            if not self._adopt",
    ),
    Mutation(
        "a gradient that was counted is computed again when it comes again",
        "stage_scheduler",
        "        if record.grad and not record.counted:\n            self._queue.put",
        "        if record.grad:\n            self._queue.put",
    ),
    Mutation(
        "who asks for the gradient is not taken for the holder",
        "stage_scheduler",
        "        record.prev = seat\n        return True\n",
        "        return True\n",
    ),
    Mutation(
        "grants that were somebody's before are not marked",
        "stage_scheduler",
        "record.has, record.again = True, record.again or bool(again >> micro & 1)\n",
        "record.has = True\n",
    ),
    Mutation(
        "R6: it is taken back without a word of who has it",
        "work_stealing",
        "                self._asked_for[idle] = micro\n",
        "                self._asked_for[idle], record.next, record.sent = micro, 0, False\n",
    ),
    Mutation(
        "R6: what is begun is given back",
        "microbatches",
        "        if micro not in self._forward:\n            return None\n",
        "        if micro not in self._forward:\n            return 0\n",
    ),
    Mutation(
        "R6: a late copy of what was given back is taken",
        "microbatches",
        "        return self.given_back_to == seat and not self.has\n",
        "        return False\n",
    ),
    Mutation(
        "R6: whoever gave it back waits for it all the same",
        "stage_scheduler",
        "            self._open.discard(micro)\n            self._moved_on(micro)\n        # Or else",
        "        # Or else",
    ),
    Mutation(
        "R6: the second sending is not marked",
        "stage_frames",
        "(FOR_GOOD if record.out_for_good else 0)",
        "0",
    ),
)


def mutated(mutation: Mutation) -> flow_world.Room:
    """The modules of the room, one of them changed, under their own names while they are loaded and no longer."""
    package = "farflung.collectives.pipeline."
    before = {name: sys.modules.pop(package + name, None) for name in NAMES}
    try:
        for name in NAMES:
            text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
            if name == mutation.file:
                if text.count(mutation.old) != 1:
                    raise ValueError(
                        f"{mutation.name}: its text stands {text.count(mutation.old)} times in {name}.py"
                    )
                text = text.replace(mutation.old, mutation.new)
            module = types.ModuleType(package + name)
            sys.modules[package + name] = module
            exec(compile(text, f"{name}.py of {mutation.name}", "exec"), module.__dict__)
        found = {name: sys.modules[package + name] for name in ("effects", "stage_scheduler", "seats")}
    finally:
        for name, module_before in before.items():
            sys.modules.pop(package + name, None)
            if module_before is not None:
                sys.modules[package + name] = module_before
        importlib.invalidate_caches()
    return flow_world.Room(**found)


def caught_by(mutation: Mutation, seeds: int) -> tuple[int, str] | None:
    """The first seed whose world breaks, and how; None: all of them go well."""
    room = mutated(mutation)
    for seed in range(seeds):
        try:
            flow_world.run_seed(seed, room)
        except flow_world.Broken as problem:
            return seed, str(problem)
        except Exception as problem:  # a machine that falls over is noticed too
            return seed, repr(problem)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seeds", type=int, nargs="?", default=100)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    survived = 0
    chosen = [each for each in MUTATIONS if args.only in each.name]
    for mutation in chosen:
        found = caught_by(mutation, args.seeds)
        survived += found is None
        told = f"seed {found[0]}: {found[1][:110]}" if found else f"SURVIVES {args.seeds} seeds"
        print(f"{mutation.name}: {told}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mutations caught within {args.seeds} seeds")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
