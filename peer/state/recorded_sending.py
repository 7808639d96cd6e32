"""The agent's hand for recorded work: what was sent of it, as it was signed, and what was added before it was encoded.

Owned by the agent of a peer whose owner wants its work recorded.  The trainer writes the work itself
(peer/trainer/recording.py); this adds the signed list, by which the work is bound to the contribution that others got.
A disk that takes no more costs the record, and no round.  Must not know how the work is done again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from farflung.peer.record.work_files import SentOf, write_sent
from farflung.peer.worker import Submit, Worker, nothing
from farflung.protocol.errors import StoreError
from farflung.protocol.messages import Sent
from farflung.protocol.process.log_lines import Say
from farflung.protocol.signed_words import Said


@dataclass(frozen=True)
class Sending:
    """What a round uses."""

    round_no: int
    fragment: int
    codec: str
    step: int  # the trainer's count, at the freeze


class RecordedSending:
    def __init__(self, place: Path, run_id: bytes, identity: bytes, submit: Submit, say: Say) -> None:
        self._place, self._run_id, self._identity, self._say = place, run_id, identity, say
        self._worker = Worker("record", submit)
        self._sending: dict[int, tuple[Sending, Tensor | None]] = {}  # by round
        self._told = False

    def encoding(self, sending: Sending, residual: Tensor | None) -> None:
        """In the arithmetic, right before it is encoded.  `residual`: a copy of what is added."""
        self._sending = {
            number: each
            for number, each in self._sending.items()
            if each[0].fragment != sending.fragment  # one round at a time in each
        }
        self._sending[sending.round_no] = sending, residual

    def sent(self, sent: Sent) -> None:
        """It was signed and told to the coordinator."""
        found = self._sending.get(sent.round_no)
        if found is None or not sent.hashes:
            return
        sending, residual = found
        said = Said(self._identity, sent)
        kept = SentOf(run_id=self._run_id, fragment=sending.fragment, codec=sending.codec, said=said)

        def write() -> None:
            try:
                write_sent(self._place, sending.step, kept, residual)
            except StoreError as error:
                self._worker.later(partial(self._tell, str(error)))

        self._worker.submit(write, nothing)

    def _tell(self, problem: str) -> None:
        if not self._told:
            self._told = True
            self._say(f"{problem}; training goes on")

    def close(self) -> None:
        self._worker.close(5.0)
