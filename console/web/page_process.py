"""The process that serves a run's page: asks the coordinator for its status as strangers may, and hands the page out.

Started by page_keeper.py with a bound socket; it ends with the coordinator.  It holds no key of the run, its memory is
capped, and it yields to the coordinator; whatever its viewers do to it, the coordinator is asked for one status in a
while, and for fewer where nobody looks.  A text of the model comes as token ids, of which another process makes words.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from importlib import resources
from typing import IO, Any

import msgspec

from farflung.console.screen.status_client import StatusClient
from farflung.console.screen.text import Record, number
from farflung.console.web.page import ICON, event_of, page_of, parts_of, shape_of, update_of, whole_of
from farflung.console.web.page_keeper import PageSettings
from farflung.console.web.public import shown
from farflung.console.web.requests import CSS, SCRIPT, StreamPiece, gzipped, said
from farflung.console.web.requests import ICON as ICON_KIND
from farflung.console.web.server import Asset, Edition, PageServer
from farflung.protocol.errors import FarflungError
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.limits import ADDRESSES_MOST, PROTOCOL_VERSION, TEXT_GIVEN, TEXT_MADE
from farflung.protocol.messages import Challenge, Knock
from farflung.protocol.process import log_lines
from farflung.protocol.process.child import Channel, Listening, live, serve_parent

EVERY_S, EVERY_OF_A_CROWD_S = 2.0, 5.0
CROWD = 100  # members: of more a status takes the coordinator tens of milliseconds
UNSEEN_EVERY_S = 15.0
UNSEEN_AFTER_S = 30.0
FETCH_S = 5.0
SILENT_S = 8.0  # without an answer for so long, the page says that it is old
NICE = 10
# What makes words of ids, how long it may take, and how much it may say: a pipe holds as much.
WORDS_MODULE, WORDS_WITHIN_S, WORDS_BYTES = "farflung.console.generate_command", 60.0, 64 * 1024

log = logging.getLogger("farflung.page")


def pause_s(members: float, unseen_s: float) -> float:
    """How long to wait for the next look at the run."""
    if unseen_s >= UNSEEN_AFTER_S:
        return UNSEEN_EVERY_S
    return EVERY_OF_A_CROWD_S if members > CROWD else EVERY_S


class Press:
    """Makes an edition of each status, once for all viewers."""

    def __init__(self, url: str, version: str) -> None:
        self._url = url
        self._version = version
        self._begun = secrets.token_hex(4)  # numbers of another process mean nothing here
        self._count = 0
        self._parts: dict[str, str] = {}
        self._shape = ""

    def edition(self, status: Record) -> Edition:
        seen = shown(status)
        parts, shape, before = parts_of(seen), shape_of(seen), self._number
        changed = update_of(self._parts, parts)
        news: StreamPiece | None = None
        if changed or shape != self._shape:
            self._count += 1
            news = said(event_of(self._number, shape, changed if shape == self._shape else {}))
        self._parts, self._shape = parts, shape
        page = page_of(seen, parts, self._number, self._url, self._version)
        whole = said(event_of(self._number, shape, whole_of(parts)))
        return Edition(self._number, page, gzipped(page), whole, news, before)

    @property
    def _number(self) -> str:
        return f"{self._begun}-{self._count}"


def assets() -> tuple[dict[str, Asset], str]:
    """The files beside this one, by path, and a version of them that changes when one does."""
    here = resources.files("farflung.console.web")
    css, script = (here.joinpath(name).read_bytes() for name in ("page.css", "page.js"))
    version = hashlib.sha256(css + b"\0" + script).hexdigest()[:12]
    return {
        "/page.css": Asset(CSS, css),
        "/page.js": Asset(SCRIPT, script),
        "/icon.svg": Asset(ICON_KIND, ICON.encode(), "public, max-age=86400"),
    }, version


class TextReader:
    """Of the newest text in the status.  The run's host named the tokenizer, and its members the ids."""

    def __init__(self, run: str, client: StatusClient, kept: IO[bytes]) -> None:
        """`kept`: a file without a name, in which the tokenizer is fetched once."""
        self._run, self._client, self._kept = run, client, kept
        self._manifest = ""
        self._sample: Mapping[str, Any] = {}  # that is being read, or was
        self._reader: subprocess.Popen[bytes] | None = None
        self._until = 0.0
        self._found: Record = {}

    def look(self, status: Record) -> Record:
        """What is known by now: words take a moment."""
        told = status.get("held_out")
        sample = told.get("sample") if isinstance(told, Mapping) else None
        if self._reader is not None:
            self._see()
        elif isinstance(sample, Mapping) and sample != self._sample and _is_text(sample.get("ids")):
            self._begin(sample)
        return {"written": self._found} if self._found and sample else {}

    def _begin(self, sample: Mapping[str, Any]) -> None:
        if not self._manifest:
            knock = Knock(protocol=PROTOCOL_VERSION, run=self._run)
            self._manifest = self._client.ask(knock, Challenge, FETCH_S).manifest.decode()
        self._sample = sample
        asked = {
            "manifest": self._manifest,
            "ids": self._sample["ids"],
            "given": round(number(self._sample, "given")),
        }
        self._until = time.monotonic() + WORDS_WITHIN_S
        with tempfile.TemporaryFile() as question:
            question.write(json.dumps(asked).encode())
            question.seek(0)
            kept = self._kept.fileno()
            self._reader = subprocess.Popen(
                [sys.executable, "-m", WORDS_MODULE, str(kept)],
                stdin=question,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(kept,),
            )

    def _see(self) -> None:
        assert self._reader is not None and self._reader.stdout is not None
        if self._reader.poll() is None and time.monotonic() < self._until:
            return
        self._end()
        with self._reader.stdout as answer:
            said = b"" if self._reader.returncode else answer.read(WORDS_BYTES)
        self._reader = None
        try:
            given, made = json.loads(said)
        except ValueError:
            log.warning(
                "the page: no words were made of a text of the model: can its tokenizer be read here?"
            )
        else:
            self._found = {**self._sample, "began": given, "went_on": made}

    def _end(self) -> None:
        if self._reader is not None:
            self._reader.kill()
            self._reader.wait()

    def close(self) -> None:
        self._end()


def _is_text(ids: object) -> bool:
    """Of a coordinator: it may be of another version, or be taken over."""
    listed = ids if isinstance(ids, list) else []
    return 0 < len(listed) <= TEXT_GIVEN + TEXT_MADE and all(
        type(each) is int and 0 <= each < 1 << 32 for each in listed
    )


class Looking:
    """The thread that looks at the run and publishes what it sees."""

    def __init__(self, begin: PageSettings, press: Press, server: PageServer) -> None:
        url = JoinUrl.parse(begin.url)
        # Peers may dial another port than this machine does, where a router stands in between.
        places = dict.fromkeys((Address(begin.ask_host, url.port), *url.addresses))
        self._ask = JoinUrl.at(tuple(places)[:ADDRESSES_MOST], url.run, url.key)
        self._press = press
        self._server = server
        self._stop = threading.Event()
        self._server.publish(press.edition({"run": url.run, "unasked": True}))
        self._thread = threading.Thread(target=self._look, name="looking", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(FETCH_S + 1)

    def _look(self) -> None:
        status: dict[str, Any] = {}
        written: Record = {}
        heard_at = time.monotonic()
        with (
            StatusClient(self._ask) as client,
            tempfile.TemporaryFile() as kept,
            closing(TextReader(self._ask.run, client, kept)) as texts,
        ):
            while not self._stop.is_set():
                try:
                    status, heard_at = client.fetch(FETCH_S), time.monotonic()
                    written = texts.look(status)
                except FarflungError as error:
                    log.debug("the page: %s", error)
                silent_s = time.monotonic() - heard_at
                if status:
                    old = {"unanswered_s": silent_s} if silent_s >= SILENT_S else {}
                    self._server.publish(self._press.edition({**status, **old, **written}))
                self._wait(number(status, "alive"))

    def _wait(self, members: float) -> None:
        """Who comes after a while of nobody is not left with an old page."""
        begun = time.monotonic()
        while not self._stop.wait(0.2):
            now = time.monotonic()
            if now - begun >= pause_s(members, self._server.idle_s(now)):
                return


class Page:
    """`run` returns when the coordinator is gone."""

    def __init__(self, begin: PageSettings, channel: Channel[PageSettings]) -> None:
        found, version = assets()
        self._channel = channel
        self._begin, self._press = begin, Press(begin.url, version)
        self._server = PageServer(socket.socket(fileno=begin.listener), found)

    def run(self) -> None:
        self._channel.send(Listening(port=self._begin.port))
        threading.Thread(target=self._until_hung_up, daemon=True, name="end").start()
        looking = Looking(self._begin, self._press, self._server)
        try:
            self._server.serve()
        finally:
            looking.close()

    def _until_hung_up(self) -> None:
        while not self._channel.closed:
            self._channel.wait(1.0)
            for _ in self._channel.receive():
                pass  # it was told all at the beginning
        self._server.stop()


def serve(end: socket.socket) -> None:
    serve_parent(Channel(end, msgspec.msgpack.Decoder(PageSettings)), PageSettings, Page)


if __name__ == "__main__":
    log_lines.set_up_logging()
    live(serve, NICE)
