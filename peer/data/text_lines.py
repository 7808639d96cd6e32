"""Plain text files as a data set: a line is a sample.

Called by `run.batches` for a path, and by users with several files.  Must not know leases or models.
Only where every 64th line begins is kept in memory, so that files larger than memory can be read at random.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import BinaryIO

from torch.utils.data import Dataset

from farflung.protocol.errors import UserError

_STRIDE = 64

TextPath = str | os.PathLike[str]


class TextLines(Dataset[str]):
    """The lines of one file, or of several one after the other, without their ends; lines of blanks are left out.

    Every peer needs the same files in the same order.  What is not UTF-8 becomes a replacement character.
    """

    def __init__(self, paths: TextPath | Iterable[TextPath]) -> None:
        listed: list[TextPath] = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self.paths = [os.fspath(path) for path in listed]
        self._places: list[tuple[int, int]] = []  # (file, offset) of lines 0, 64, 128, ...
        self._count = 0
        self._files: dict[int, BinaryIO] = {}
        self._process = os.getpid()
        for number, path in enumerate(self.paths):
            try:
                self._index(number, path)
            except OSError as error:
                raise UserError(f"{path}: cannot read: {error.strerror}") from error
        if not self._count:
            raise UserError(f"no line of text in {', '.join(self.paths) or 'no file'}")

    def _index(self, number: int, path: str) -> None:
        at, starts = 0, array("q")
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    if self._count % _STRIDE == 0:
                        starts.append(at)
                    self._count += 1
                at += len(line)
        self._places += [(number, start) for start in starts]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < self._count:
            raise IndexError(f"line {index} is outside [0, {self._count})")
        file, offset = self._places[index // _STRIDE]
        line = next(islice(self._lines_from(file, offset), index % _STRIDE, None))
        return line.decode("utf-8", errors="replace").rstrip("\r\n")

    def _lines_from(self, first: int, offset: int) -> Iterator[bytes]:
        if self._process != os.getpid():  # a forked worker: the places in these files are its parent's
            self._process, self._files = os.getpid(), {}
        for number in range(first, len(self.paths)):
            if number not in self._files:
                self._files[number] = open(self.paths[number], "rb")  # noqa: SIM115  kept open, closed with the process
            file = self._files[number]
            file.seek(offset if number == first else 0)
            yield from (line for line in file if line.strip())

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_files": {}}  # open files stay with their process
