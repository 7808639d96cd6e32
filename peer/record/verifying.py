"""`farflung verify`: takes recorded inner steps again, and says how far the recorded work is from what comes of them.

Called by the command line of whoever spot-checks a volunteer, or of a volunteer itself.  Two things are looked at:

    what was sent    the recorded pseudo-gradient, encoded again, has the hashes that its author signed: exact, anywhere
    how it came      the steps taken again from the recorded beginning give that pseudo-gradient: to the bit on equal
                     hardware; elsewhere within a bound that is measured here

The bound: the span is taken again as it is, and with each gradient moved at every step by about what rounding moves
it.  How far these runs are from each other, times `MARGIN`, is what rounding can explain.

That the beginning is a true one, above all the optimizer's state, is not looked at: see docs/security.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from farflung.peer.record.measuring import Distance, binding, distance
from farflung.peer.record.stand_in import Trainer, take_again
from farflung.peer.record.work_files import REDO_VARIABLE, ROUNDING_VARIABLE, Work
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import exit_codes

# A value's rounding error, as a share of its size; sums of many such errors move a gradient by a few of them.
ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8}
MOVED_BY = 8.0  # roundings
MARGIN = 4.0
THREADS, RECORD, RUN = "FARFLUNG_THREADS", "FARFLUNG_RECORD", "FARFLUNG_RUN"
Say = Callable[[str], None]


@dataclass(frozen=True)
class VerifyOptions:
    folder: Path
    script: Path | None = None
    script_arguments: tuple[str, ...] = ()
    rounding: str = "fp32"  # of the coarsest arithmetic in the script
    repeats: int = 2  # runs with moved gradients
    threads: int = 0  # 0: as many as it was recorded with
    patience_s: float = 3600.0


def run_verify(options: VerifyOptions, say: Say) -> int:
    """The command: its exit code.  UserError for work that can't be read or taken again."""
    if options.rounding not in ROUNDING:
        raise UserError(f"--rounding {options.rounding}: there are {', '.join(ROUNDING)}")
    work = Work(options.folder)
    say(_told_of(work))
    bound = _bindings(work, say)
    return exit_codes.OK if _steps(work, options, say) and bound else exit_codes.UNEXPECTED


def _told_of(work: Work) -> str:
    head = work.head
    samples = sum(stop - start for step in head.steps for _, start, stop in step.samples)
    versions = "/".join(map(str, dict.fromkeys(head.versions)))
    made = f"{head.software}, {head.device}, {head.threads} threads"
    return (
        f"work of {head.name}: {len(head.steps)} steps on {samples} samples from version {versions} ({made}; here "
        f"torch {torch.__version__}); {work.folder}"
    )


def _bindings(work: Work, say: Say) -> bool:
    """False if the work is not what was sent."""
    found = [binding(work, sent, residual) for sent, residual in work.sent()]
    for each in found:
        where = f"fragment {each.fragment} in round {each.round_no}"
        if each.problem:
            say(f"DIFFERS  {where}: {each.problem}")
            continue
        say(f"sent     {where}: this work is what {each.peer} signed and sent, byte for byte")
        if each.residual:
            told = f"{each.residual:.2g} of the size of the work, is its own word"
            say(f"         with it goes what its codec had lost in earlier rounds; that this is true, {told}")
    if not found:
        say("unsent   nothing was signed and sent of this work: it binds nobody")
    return not any(each.problem for each in found)


def _steps(work: Work, options: VerifyOptions, say: Say) -> bool:
    recorded, again = work.delta(), _Again(work, options)
    first = again.run()
    found = distance(recorded, first)
    if found.same_bits:
        say("steps    taken again they give the same pseudo-gradient, bit for bit")
        return True
    spread = [distance(first, again.run()).relative]
    spread += [distance(first, again.run(seed)).relative for seed in range(1, options.repeats + 1)]
    bound = MARGIN * max(spread)
    say(
        f"         the same steps here are up to {max(spread):.2g} apart, moved by rounding ({options.rounding})"
    )
    apart = _told_distance(found)
    if found.relative <= bound:
        say(f"steps    taken again they are {apart}: rounding explains up to {bound:.2g}")
        return True
    say(f"DIFFERS  steps taken again are {apart}: rounding explains no more than {bound:.2g}")
    return False


def _told_distance(found: Distance) -> str:
    scale = found.norms[0] / found.norms[1] if found.norms[1] else float("inf")
    return f"{found.relative:.2g} of the work apart (cosine {found.cosine:.6f}, {scale:.3g} times as long)"


class _Again:
    def __init__(self, work: Work, options: VerifyOptions) -> None:
        self._work, self._options = work, options
        if why := _why_not(Manifest.from_canonical(work.head.manifest), len(work.head.steps)):
            raise UserError(f"{work.folder}: this work can't be taken again: {why}")

    def run(self, seed: int = 0) -> torch.Tensor:
        """`seed`: of the movement of gradients; 0: they are not moved."""
        options = self._options
        own = {
            name: value for name, value in os.environ.items() if name not in (RECORD, RUN, ROUNDING_VARIABLE)
        }
        own |= {
            REDO_VARIABLE: str(self._work.folder),
            THREADS: str(options.threads or self._work.head.threads),
        }
        if seed:
            own[ROUNDING_VARIABLE] = f"{MOVED_BY * ROUNDING[options.rounding]} {seed}"
        if options.script is None:
            command = [sys.executable, "-m", "farflung.peer.builtin.trainer"]
        elif options.script.is_file():
            command = [sys.executable, str(options.script), *options.script_arguments]
        else:
            raise UserError(f"--script {options.script}: there is no such file")
        return take_again(self._work, Trainer(tuple(command), own), options.patience_s)


def _why_not(manifest: Manifest, steps: int) -> str:
    if manifest.outer.schedule != "blocking" or manifest.round.period_s or manifest.pipeline.batch:
        return "only the blocking schedule with periods counted in steps can"
    if steps != manifest.round.sync_every:
        return f"it has {steps} steps, a period of this run {manifest.round.sync_every}"
    return ""
