"""While nobody answers at the door: `farflung phonebook --find` in a process of its own, where there is a book.

Owned by the agent, which turns it at every tick.  The agent itself never loads what a book needs, and believes
nothing of what is found: it goes to the peer machine, which checks the signature.  So an old join URL leads to a
coordinator that moved without a word, and a peer that was in the run follows it there.  Must not know what a record
says.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import signal
import subprocess
import sys

from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import WHEREABOUTS_BYTES
from farflung.protocol.process.log_lines import LineWriter

AFTER_S = 4.0  # of silence: a coordinator that is started again is back by then
AGAIN_S = 30.0
ENDS_WITHIN_S = 25.0
ANSWER_BYTES = 64 * 1024
RECORDS_MOST = 8


class LookingUp:
    def __init__(self, book: str, url: JoinUrl, say: LineWriter, command: tuple[str, ...] = ()) -> None:
        """`book`: as --book takes it; empty: nobody is asked.  `command`: what is run, in tests."""
        bare = str(JoinUrl.at(url.addresses, url.run, url.key))  # a token is nobody's business
        usual = (sys.executable, "-m", "farflung", "phonebook", "--json", "--book", book, "--find", bare)
        self._command = (command or usual) if book else ()
        self._book, self._say = book, say
        self._out_since: float | None = None
        self._again_at = self._until = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def turn(self, inside: bool, now: float) -> list[bytes]:
        """Records that were found since the last time."""
        if inside or not self._command:
            self._out_since = None
            return []
        if self._out_since is None:
            self._out_since, self._again_at = now, now + AFTER_S
        if self._process is not None:
            return self._look_at(self._process, now)
        if now >= self._again_at:
            self._again_at, self._until = now + AGAIN_S, now + ENDS_WITHIN_S
            self._say(f"nobody answers; asking the phone book {self._book}", routine=True)
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a book has processes of its own, which must end with it
            )
        return []

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _look_at(self, process: subprocess.Popen[bytes], now: float) -> list[bytes]:
        if process.poll() is None:
            if now >= self._until:
                self.close()
            return []
        # It has ended, so nothing waits: what it said fits into a pipe, or is cut off.
        raw = process.stdout.read(ANSWER_BYTES) if process.stdout is not None else b""
        self._process = None
        return records_in(raw)


def records_in(raw: bytes) -> list[bytes]:
    """Of the JSON that `farflung phonebook --find` prints; nothing where it is none."""
    try:
        said = json.loads(raw)
        texts = [each for each in said["records"] if isinstance(each, str)][:RECORDS_MOST]
        found = [base64.b64decode(each, validate=True) for each in texts]
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error):
        return []
    return [each for each in found if 0 < len(each) <= WHEREABOUTS_BYTES]
