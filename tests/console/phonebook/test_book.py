"""What is believed of a phone book: a run's own word until it expires, the newest of several, and no name."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from farflung.console.main import app
from farflung.console.phonebook.announcer import record_of
from farflung.console.phonebook.book import (
    LIFE_MOST_S,
    LIFE_S,
    RunQuery,
    believed,
    by_name,
    newest,
    place_of,
    wanted,
)
from farflung.console.phonebook.books import Putting, look_up
from farflung.console.phonebook.feeder import feed, record_in
from farflung.console.phonebook.hivemind_book import is_kept, key_name, run_name
from farflung.protocol.errors import Unreachable, UserError
from farflung.protocol.join_url import Address, JoinUrl, Whereabouts
from farflung.protocol.signing import curve_key_of

NOW_S = 1_800_000_000


class Run:
    def __init__(self, seed: int) -> None:
        self.secret = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
        self.public = self.secret.public_key().public_bytes_raw()
        self.key = curve_key_of(self.public)

    def prove(self, statement: bytes) -> bytes:
        return self.public + self.secret.sign(statement)

    def said(self, number: int = 1, expires_s: int = NOW_S + LIFE_S, name: str = "demo") -> Whereabouts:
        return Whereabouts(name, 1, number, (f"h{number}.example:1",), expires_s, b"").signed(self.prove)


RUN, OTHER = Run(1), Run(2)


def test_a_record_holds_until_it_expires_and_not_for_ever() -> None:
    said = RUN.said()
    assert believed(said.raw, NOW_S, RUN.key) == said
    assert believed(said.raw, NOW_S + LIFE_S - 1, RUN.key) == said
    assert believed(said.raw, NOW_S + LIFE_S, RUN.key) is None, "it has expired"
    assert believed(RUN.said(expires_s=0).raw, NOW_S, RUN.key) is None, "what members are told is no record"
    assert believed(RUN.said(expires_s=NOW_S + LIFE_MOST_S).raw, NOW_S, RUN.key) is not None
    assert believed(RUN.said(expires_s=NOW_S + LIFE_MOST_S + 1).raw, NOW_S, RUN.key) is None
    assert believed(said.raw, NOW_S, OTHER.key) is None


@given(st.permutations(range(1, 6)))
def test_of_several_the_newest_counts_whatever_is_said_besides(numbers: list[int]) -> None:
    old = RUN.said(9, expires_s=NOW_S - 1)
    forged = msgspec.structs.replace(RUN.said(8), addresses=("evil.example:1",))
    found = [RUN.said(number).raw for number in numbers] + [old.raw, forged.raw, OTHER.said(7).raw, b"x"]
    assert newest(found, NOW_S, RUN.key) == RUN.said(5)
    assert newest(found[5:], NOW_S, RUN.key) is None


def test_runs_of_one_name_are_told_apart() -> None:
    found = [RUN.said(1).raw, RUN.said(2).raw, OTHER.said(1).raw, RUN.said(3, name="other").raw, b""]
    assert {(each.key, each.number) for each in by_name(found, NOW_S, "demo")} == {
        (RUN.key, 2),
        (OTHER.key, 1),
    }


def test_what_a_node_of_hiveminds_keeps() -> None:
    said = RUN.said()
    raw, expires_s = said.raw, float(said.expires_s)
    assert is_kept(key_name(RUN.key), b"", raw, expires_s, NOW_S)
    assert is_kept(run_name("demo"), RUN.key, raw, expires_s, NOW_S)
    refused = [
        (key_name(OTHER.key), b"", raw, expires_s),
        (key_name(RUN.key), b"sub", raw, expires_s),
        (run_name("demo"), b"", raw, expires_s),
        (run_name("demo"), OTHER.key, raw, expires_s),
        (run_name("other"), RUN.key, raw, expires_s),
        ("farflung/other", b"", raw, expires_s),
        (key_name(RUN.key), b"", raw, expires_s + 60.0),  # it would push out what is newer
        (key_name(RUN.key), b"", RUN.said(expires_s=NOW_S - 1).raw, NOW_S - 1.0),
        (key_name(RUN.key), b"", b"", expires_s),
        (key_name(RUN.key), b"", "text", expires_s),
    ]
    for name, subkey, value, expires in refused:
        assert not is_kept(name, subkey, value, expires, NOW_S), (name, subkey)


# ---- words -------------------------------------------------------------------------------------------------------


def test_what_people_look_for() -> None:
    url = JoinUrl("old.example", 1, "demo", RUN.key, "tok")
    assert wanted(str(url)) == RunQuery(RUN.key, "demo", "tok")
    assert wanted(str(url).partition("k=")[2].partition("&")[0]) == RunQuery(RUN.key)
    assert wanted("demo-7") == RunQuery(name="demo-7")
    for wrong in ("", "De mo", "a" * 65, "../x"):
        with pytest.raises(UserError, match="expected a run's name"):
            wanted(wrong)


def test_how_books_are_named() -> None:
    assert place_of("/ip4/10.0.0.1/tcp/4001/p2p/QmX") == "/ip4/10.0.0.1/tcp/4001/p2p/QmX"
    for wrong in ("", "host", "10.0.0.1:1", "/ip4/10.0.0.1/tcp/1", "/p2p/a b", "/p2p/" + "a" * 300):
        with pytest.raises(UserError, match="phone book"):
            place_of(wrong)


# ---- announcing and looking up, with books of paper --------------------------------------------------------------


class Paper:
    """A book that keeps all that it is given."""

    def __init__(self, raws: list[bytes], closed: list[int]) -> None:
        self.raws, self.closed = raws, closed

    def put(self, said: Whereabouts) -> int:
        self.raws.append(said.raw)
        return 3

    def find(self, key: bytes) -> list[bytes]:
        return self.raws

    def named(self, name: str) -> list[bytes]:
        return self.raws

    def close(self) -> None:
        self.closed.append(1)


def test_what_is_announced_is_found_and_leads_to_the_new_place() -> None:
    url = JoinUrl.at((Address("a.example", 1), Address("::1", 2)), "demo", RUN.key)
    record = record_of(url, 4, 7, NOW_S + LIFE_S, RUN.prove)
    said: list[str] = []
    raws: list[bytes] = []
    closed: list[int] = []
    here, away = "/p2p/here", "/p2p/away"

    def open_book(book: str) -> Paper:
        if book == away:
            raise Unreachable("no node answers")
        return Paper(raws, closed)

    putting = Putting([here, away], open_book)
    feed([msgspec.json.encode(record.raw).decode(), "rubbish", "{}"], putting, said.append)
    assert said == [
        '{"book":"/p2p/here","places":3,"problem":""}',
        '{"book":"/p2p/away","places":0,"problem":"no node answers"}',
    ]
    found = look_up(RunQuery(RUN.key, token="tok"), [away, here], lambda: NOW_S, open_book)
    assert [str(each.url("tok")) for each in found.runs] == [
        str(JoinUrl.at(url.addresses, "demo", RUN.key, "tok"))
    ]
    assert found.problems == ["/p2p/away: no node answers"] and closed == [1]
    assert look_up(RunQuery(OTHER.key), [here], lambda: NOW_S, open_book).runs == []
    assert look_up(RunQuery(RUN.key), [here], lambda: NOW_S + LIFE_S, open_book).runs == [], "it has expired"
    assert [each.key for each in look_up(RunQuery(name="demo"), [here], lambda: NOW_S, open_book).runs] == [
        RUN.key
    ]


def test_the_process_that_speaks_with_strangers_gets_no_key_and_puts_nothing_but_a_runs_own_word() -> None:
    record = record_of(JoinUrl("h", 1, "demo", RUN.key), 4, 7, NOW_S + LIFE_S, RUN.prove)
    line = msgspec.json.encode(record.raw).decode()
    assert record_in(line) == record
    assert RUN.secret.private_bytes_raw() not in record.raw
    forged = msgspec.structs.replace(record, addresses=("evil.example:1",))
    for wrong in ("", "x", "{}", line[:-2], msgspec.json.encode(forged.raw).decode(), "\udce4"):
        assert record_in(wrong) is None


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("phonebook --book x", "phonebook: --book goes only with --find"),
        ("phonebook --find x --book y --listen z", "phonebook: --listen has no place beside --find"),
        (
            "phonebook --find x",
            "name a phone book with --book, or in FARFLUNG_BOOK; whoever hosts the run knows which",
        ),
    ],
)
def test_whoever_asks_runs_no_node(typed: str, told: str) -> None:
    assert str(CliRunner().invoke(app, typed.split()).exception) == told
