"""The text that a run holds out, and what the model makes of some of its windows.

Called by the inner loop, between two steps, with the run's version in the model; runs in the trainer.  Windows lie at
even distances and are the same each time, so that versions are compared on the same text.  What can't be read is no
reason to stop training: the answer says so, and only this peer's owner hears what lies on this machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from farflung.peer.builtin.corpus import Windows, held_out_rows, row_of_window
from farflung.peer.local.words import Score, Scored
from farflung.protocol.digests import bits, mask_from_bytes
from farflung.protocol.errors import ScoreCause, StoreError, UserError
from farflung.protocol.limits import NATS_MOST
from farflung.protocol.manifest import Manifest
from farflung.protocol.mode_words import text_lengths

log = logging.getLogger(__name__)

READ_AGAIN_S = 300.0  # what could not be read
LOOKED_AT = 3  # rows of the text, by which it is known again
TEXT_S = 2.0  # so long a text is written at most: training waits

Losses = Callable[[Tensor], Tensor]  # rows [B, T] -> nats a token of each [B]
Writes = Callable[[list[int], int], Iterator[int]]  # ids, at most so many -> those that come after them
# What a rank of this peer says -> what each of them says.
Gather = Callable[[bytes], Sequence[bytes]]


class HeldOutText:
    """Opened once, if it can be; and tried again now and then as long as it can't."""

    def __init__(
        self,
        manifest: Manifest,
        own_place: str,
        losses: Losses,
        gather: Gather = lambda mine: [mine],
        writes: Writes | None = None,
    ) -> None:
        """`own_place`: where this peer's owner has the run's data.  `writes`: of a model that can."""
        self._manifest, self._own_place, self._losses = manifest, own_place, losses
        self._gather, self._writes = gather, writes
        self._rows: Windows | None = None
        self._data = b""
        self._why_not = self._open()

    def _open(self) -> str:
        """Why not; empty: it is open."""
        self._tried_at = time.monotonic()
        wanted = self._manifest.eval.windows
        try:
            rows = held_out_rows(self._manifest, self._own_place)
            if len(rows) < wanted:
                told = "nothing is evaluated here: [eval] source has %d rows, fewer than windows (%d)"
                log.warning(told, len(rows), wanted)
                return ScoreCause.FEW_ROWS
            self._data = fingerprint(rows)
        except (OSError, StoreError, UserError) as error:
            log.warning("nothing is evaluated here: %s", error)
            return ScoreCause.UNREADABLE
        self._rows = rows
        return ""

    def answer(self, score: Score) -> Scored:
        if self._rows is None and time.monotonic() - self._tried_at >= READ_AGAIN_S:
            self._why_not = self._open()
        mask, of = mask_from_bytes(score.windows), self._manifest.eval.windows
        windows = [each for each in bits(mask) if each < of]
        why_not, rows = self._why_not, list[Tensor]()
        try:
            rows = self._read(self._rows, windows) if self._rows is not None else []
        except (OSError, StoreError, UserError) as error:
            log.warning("nothing is evaluated here: %s", error)
            why_not = ScoreCause.UNREADABLE
        # Ranks compute together, or none does.
        if told := next(filter(None, self._gather(why_not.encode())), b""):
            return Scored(number=score.number, why_not=told.decode())
        if (nats := self._nats(rows)) is None:
            return Scored(number=score.number, why_not=ScoreCause.ODD_LOSSES)
        text = self._text(rows[0]) if score.text and windows[:1] == [0] else ()
        return Scored(number=score.number, nats=nats.astype("<f4").tobytes(), data=self._data, text=text)

    def _read(self, rows: Windows, windows: Sequence[int]) -> list[Tensor]:
        of = self._manifest.eval.windows
        return [rows[row_of_window(len(rows), window, of)] for window in windows]

    def _text(self, row: Tensor) -> tuple[int, ...]:
        """Its first ids, and what the model makes of them as far as it comes in time."""
        if self._writes is None:
            return ()
        given, most = text_lengths(self._manifest.model.context, self._manifest.row_tokens)
        until, ids = time.monotonic() + TEXT_S, [int(each) for each in row[:given]]
        made = list[int]()
        for each in self._writes(ids, most):
            made.append(each)
            if time.monotonic() >= until:
                break
        return (*ids, *made)

    def _nats(self, rows: list[Tensor]) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
        """As many rows at once as a step has.  None: what came is not one finite loss for each."""
        most, found = self._manifest.data.batch, [torch.zeros(0)]
        for first in range(0, len(rows), most):
            some = torch.stack(rows[first : first + most])
            made = self._losses(some)
            if not isinstance(made, Tensor) or made.shape != (len(some),):
                shape = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
                log.warning(
                    "nothing is evaluated here: of %d rows the script gave %s, not a loss each",
                    len(some),
                    shape,
                )
                return None
            found.append(made.detach().float().cpu())
        nats: np.ndarray[tuple[int], np.dtype[np.float32]] = torch.cat(found).numpy()
        return nats if bool((nats >= 0).all() and (nats <= NATS_MOST).all()) else None


def fingerprint(rows: Windows) -> bytes:
    hasher = blake3(len(rows).to_bytes(8, "little"))
    for at in range(LOOKED_AT):
        hasher.update(rows[row_of_window(len(rows), at, LOOKED_AT)].numpy().astype("<i8").tobytes())
    return hasher.digest()


def made(
    manifest: Manifest, own_place: str, losses: Losses, gather: Gather, writes: Writes | None
) -> HeldOutText | None:
    return HeldOutText(manifest, own_place, losses, gather, writes) if manifest.eval.source else None
