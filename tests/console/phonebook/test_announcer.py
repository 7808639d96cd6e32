"""A run is kept in its phone books: a new record now and then, by a process that is started again when it dies."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.console.phonebook import announcer
from farflung.console.phonebook.announcer import Announcer
from farflung.console.phonebook.feeder import record_in
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl, Whereabouts
from farflung.protocol.signing import curve_key_of
from rig.waiting import eventually

SECRET = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = SECRET.public_key().public_bytes_raw()
URL = JoinUrl("here.example", 1, "demo", curve_key_of(PUBLIC))
# Writes down what it is given and says what became of it; after so many lines it dies.
BOOK = """
import sys
for at, line in enumerate(sys.stdin):
    with open(sys.argv[1], "a") as file:
        file.write(line)
    print(sys.argv[2].replace("BOOK", sys.argv[-1]), flush=True)
    if at + 1 == int(sys.argv[3]):
        sys.exit(7)
"""
REFUSED = '{"book": "BOOK", "places": 0, "problem": "nobody is there"}'
TAKEN = '{"book": "BOOK", "places": 5}'


def prove(statement: bytes) -> bytes:
    return PUBLIC + SECRET.sign(statement)


def told_in(path: Path) -> list[Whereabouts]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [said for said in map(record_in, lines) if said is not None]


def test_new_records_come_until_a_book_takes_one_and_by_another_process_when_one_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announcer, "AGAIN_S", 0.05)
    caplog.set_level(logging.INFO, "farflung.coordinator")
    path = tmp_path / "records"
    words = [sys.executable, "-c", BOOK, str(path), REFUSED, "2"]
    with Announcer(["/p2p/one", "/p2p/one"], words) as one:
        one.begin(URL, 4, prove)
        eventually(lambda: len(told_in(path)) >= 5, "five records, by three processes")
    found = told_in(path)
    assert [each.order for each in found] == sorted({each.order for each in found}), (
        "each is newer than the last"
    )
    assert {str(each.url()) for each in found} == {str(URL)} and all(each.expires_s for each in found)
    assert [text for text in caplog.messages if "nobody is there" in text] == [
        "phone book /p2p/one: not there yet: nobody is there"
    ], "people are told once"
    assert any("ended with exit code 7" in text for text in caplog.messages)


def test_a_record_that_was_taken_is_renewed_much_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "AGAIN_S", 0.05)
    monkeypatch.setattr(announcer, "RENEWED_S", 3600.0)
    path = tmp_path / "records"
    with Announcer(["/p2p/one"], [sys.executable, "-c", BOOK, str(path), TAKEN, "9"]) as one:
        one.begin(URL, 4, prove)
        eventually(lambda: one._taken, "the book took it")
        so_far = len(told_in(path))
        assert not one._threads[0].join(0.5) and one._threads[0].is_alive()
    assert 1 <= so_far <= len(told_in(path)) <= so_far + 1, "one more may have been under way"


def test_mistakes_are_told_before_anything_starts() -> None:
    with pytest.raises(UserError, match="phone book"):
        Announcer(["no place"])
