"""A coordinator that moves, with the real program: its phone book leads somebody new to it, and its peers follow it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import moved
import pytest

from farflung.protocol.join_url import JoinUrl
from rig.waiting import LONG_S, eventually

pytestmark = pytest.mark.slow

FARFLUNG = [sys.executable, "-m", "farflung"]


@contextlib.contextmanager
def running(*words: str) -> Iterator[str]:
    """A command that goes on; the first line that it prints."""
    process = subprocess.Popen([*FARFLUNG, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(LONG_S)


def found(book: str, url: str) -> list[str]:
    ended = subprocess.run(
        [*FARFLUNG, "phonebook", "--json", "--book", book, "--find", url],
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    return [str(each) for each in json.loads(ended.stdout)["runs"]]


@pytest.mark.skipif(importlib.util.find_spec("hivemind") is None, reason="NOT RUN: hivemind is not installed")
@pytest.mark.hard
def test_an_old_url_leads_to_a_coordinator_that_moved_without_a_word(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('run.name = "moved"\nnet.relay = "off"\n')
    with running("phonebook", "--listen", f"127.0.0.1:{moved.free_port()}") as place:
        words = ["coordinate", str(run), "--plain", "--json", "--listen", "127.0.0.1:0", "--announce", place]
        with running(*words) as line:
            old = JoinUrl.parse(json.loads(line)["url"])
            eventually(lambda: found(place, str(old)) == [str(old)], "it is announced", LONG_S)
        with running(*words, "--public", "new.example:7") as line:
            new = JoinUrl.parse(json.loads(line)["url"])
            assert new.addresses == (("new.example", 7),) and new.key == old.key
            eventually(lambda: found(place, f"{old}&t=mine") == [f"{new}&t=mine"], "it moved", LONG_S)


@pytest.mark.hard
@pytest.mark.parametrize("how", moved.FOLLOW)
def test_peers_follow_a_coordinator_that_moved(how: str, tmp_path: Path) -> None:
    """How fast, is for a machine of its own: `python benchmarks/moved.py`."""
    if how == "book" and importlib.util.find_spec("hivemind") is None:
        pytest.skip("NOT RUN: hivemind is not installed")
    figures = moved.moved(tmp_path, 2, how)
    assert set(figures) == {how, *{"told": ["file"], "book": ["newcomer"]}.get(how, [])}
