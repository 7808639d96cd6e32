"""The agent's hand for its own optimizer's state, if a joiner asks: a copy in a file, signed, given in pieces.

Owned by the agent.  answering.py holds the questions back while a round needs the line, as it does with the
run's state; when a copy may be made is decided in donating.py, and the trainer writes it between two steps.
Must not know what an optimizer is.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import msgspec

from farflung.collectives.errors import UserError
from farflung.collectives.frames import Frame, Header, Kind, bare_answer, with_payload
from farflung.peer import effects as do
from farflung.peer.capture import Submit
from farflung.peer.donating import Donating
from farflung.peer.identity import Identity
from farflung.peer.inheriting import DESCRIPTION, Description
from farflung.peer.inner_file import InnerFile, hash_beside
from farflung.peer.local_messages import InnerKept, KeepInner

BYTES_PER_VALUE = 24  # of the model at most: AdamW's two moments take 8, three of fp64 take 24
MORE_BYTES = 4 << 20  # for names
USUAL_BYTES = 8  # for each value: so much room is looked for

Tell = Callable[[list[do.Effect]], None]


class Donor:
    def __init__(self, identity: Identity, submit: Submit, tell: Tell) -> None:
        self._identity, self._submit, self._tell = identity, submit, tell
        self.policy = Donating()
        self._run_id = b""
        self._elements = self._piece_bytes = 0
        self._folder: Path | None = None
        self._kept: InnerFile | None = None
        self._file: mmap.mmap | None = None
        self._description = b""

    def begin(self, run_id: bytes, folder: Path, elements: int, piece_bytes: int) -> None:
        self._run_id, self._folder = run_id, folder
        self._elements, self._piece_bytes = elements, piece_bytes

    # ---- the copy ------------------------------------------------------------------------------------------

    def on_question(self, asked: Header, now: float) -> None:
        """Somebody asks.  Who begins may need a copy that has to be made first."""
        if asked.version == 0 and self._folder is not None and self.policy.copy is None:
            if self.policy.may_ask(now):
                self._make(self._folder, now)

    def _make(self, folder: Path, now: float) -> None:
        number = self.policy.make(now)
        try:
            self._kept = InnerFile(folder, "inner.out", USUAL_BYTES * self._elements)
        except UserError as error:
            self._give_up(str(error))
            return
        most = BYTES_PER_VALUE * self._elements + MORE_BYTES
        self._tell([do.Tell(KeepInner(number=number, path=str(self._kept.path), most_bytes=most))])

    def on_kept(self, kept: InnerKept, now: Callable[[], float]) -> None:
        """The trainer has written it, or says why not."""
        copy = self.policy.copy
        if copy is None or copy.number != kept.number or copy.is_made:
            return
        if kept.problem:
            self._give_up(kept.problem)
            return
        assert self._kept is not None
        with open(self._kept.path, "rb") as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        whole = memoryview(self._file)

        def sign(digest: object) -> None:
            assert isinstance(digest, bytes)
            if self.policy.copy is copy:
                self._describe(len(whole), digest)
                self.policy.made(kept.number, len(whole), now())
                told = f"{len(whole) / 1e6:.0f} MB in {kept.took_s:.2f} s"
                self._tell([do.Note(f"a joiner asks for my optimizer's state: copied {told}")])

        hash_beside(self._submit, len(whole), lambda at, most: whole[at : at + most], sign)

    def _describe(self, size: int, digest: bytes) -> None:
        said = Description(size=size, digest=digest, public=self._identity.public)
        signature = self._identity.sign(said.statement(self._run_id))
        self._description = msgspec.msgpack.encode(msgspec.structs.replace(said, signature=signature))

    def on_tick(self, now: float) -> None:
        if self.policy.is_over(now):
            made = self.policy.copy is not None and self.policy.copy.is_made
            self._drop() if made else self._give_up("the trainer did not come to it in time")

    def _give_up(self, why: str) -> None:
        self._drop()
        self._tell([do.Note(f"a joiner asks for my optimizer's state, and gets none: {why}")])

    def _drop(self) -> None:
        self.policy.drop()
        self._file, self._description = None, b""
        if self._kept is not None:
            self._kept.remove()
            self._kept = None

    def close(self) -> None:
        self._drop()

    # ---- answers -------------------------------------------------------------------------------------------

    def can(self, asked: Header) -> bool:
        """Can it be answered at all just now?  Not while the copy that it asks for is being made."""
        copy = self.policy.copy
        return asked.version != 0 or copy is None or copy.is_made

    def is_piece(self, asked: Header) -> bool:
        return asked.version != 0

    def answer(self, to: str, asked: Header, now: float) -> Frame | Callable[[], Frame]:
        """The frame, or what makes it beside the agent's loop."""
        tag, copy, file = asked.run_tag, self.policy.copy, self._file
        at = asked.chunk * self._piece_bytes
        if copy is None or file is None or not copy.is_made:
            return bare_answer(Kind.MISSING, asked)
        if asked.version == 0:
            if not self.policy.may_ask(now) or not self.policy.give(to, copy.number, 0, now):
                return bare_answer(Kind.MISSING, asked)
            head = Header(Kind.INNER, tag, decision_no=DESCRIPTION, version=copy.number)
            return with_payload(head, self._description)
        size = min(self._piece_bytes, copy.size - at)
        if size <= 0 or not self.policy.give(to, asked.version, size, now):
            return bare_answer(Kind.MISSING, asked)
        head = Header(Kind.INNER, tag, version=copy.number, chunk=asked.chunk)
        return lambda: with_payload(head, file[at : at + size])
