"""The first look at a coordinator: a definite no ends a peer at once, silence and a former life do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from farflung.peer import first_contact
from farflung.peer.first_contact import DoorAnswers, How, RememberedPlaces, check, look, problem_of
from farflung.peer.settings import OwnConfig
from farflung.protocol.errors import Refused, Unreachable
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.messages import Message, Refuse
from farflung.protocol.mode_words import StandsBy
from farflung.protocol.process.log_lines import Teller
from farflung.protocol.process.sockets import curve_raw
from rig.a_door import CHALLENGE, door, nobody

A, B = Address("a", 1), Address("b", 2)
SAY = Teller("test")
ANSWERS, SILENT, BREAKS_OFF = DoorAnswers(How.ANSWERS), DoorAnswers(How.SILENT), DoorAnswers(How.BREAKS_OFF)
REFUSES = DoorAnswers(How.REFUSES, "connection refused")


@pytest.mark.parametrize(
    "found, ends",
    [
        ({A: ANSWERS}, False),
        ({A: SILENT}, False),
        ({A: REFUSES}, True),
        ({A: BREAKS_OFF}, True),
        ({A: REFUSES, B: BREAKS_OFF}, True),
        ({A: REFUSES, B: ANSWERS}, False),
        ({A: REFUSES, B: SILENT}, False),  # it may be far away, or have no time just now
    ],
)
def test_only_where_every_address_says_no_is_it_one(found: dict[Address, DoorAnswers], ends: bool) -> None:
    told = problem_of(found)
    assert bool(told) == ends
    for place in found if ends else ():
        assert str(place) in told


def test_an_answer_is_found_and_a_wrong_key_is_told_from_a_dead_port() -> None:
    with door(CHALLENGE) as url:
        [found] = look(url).values()
        assert found == ANSWERS
        other = JoinUrl(url.host, url.port, url.run, curve_raw(zmq.curve_keypair()[0]))
        [found] = look(other).values()
        assert found == BREAKS_OFF
        with pytest.raises(Unreachable, match="does not accept the key of this join URL"):
            check(other, OwnConfig(), SAY)
    with (
        nobody() as url,
        pytest.raises(Unreachable, match="cannot connect to .*: connection refused; check that"),
    ):
        check(url, OwnConfig(), SAY)


@pytest.mark.parametrize(
    "answer", [StandsBy(whereabouts=b""), Refuse(code="busy", reason="later", retry_after_s=1.0)]
)
def test_whatever_else_a_door_says_is_the_peers_own_affair(answer: Message) -> None:
    with door(answer) as url:
        check(url, OwnConfig(), SAY)


def test_another_run_than_the_urls_is_a_refusal() -> None:
    no = Refuse(code="run", reason="it runs 'a', not 'demo'", retry_after_s=0.0)
    with door(no) as url, pytest.raises(Refused, match="runs 'a', not 'demo'"):
        check(url, OwnConfig(), SAY)


def test_one_that_takes_the_connection_and_says_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_contact, "KNOCK_S", 0.3)
    with door(None) as url:
        assert look(url) == {url.addresses[0]: SILENT}
        check(url, OwnConfig(), SAY)


def test_a_second_address_that_answers_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    with nobody() as dead, door(CHALLENGE) as url:
        both = JoinUrl.at((*dead.addresses, *url.addresses), url.run, url.key)
        check(both, OwnConfig(), SAY)
    assert capsys.readouterr().err == ""


def test_a_peer_that_was_in_the_run_or_has_a_phone_book_goes_on_looking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = OwnConfig(identity=tmp_path / "identity.pem")
    with nobody() as url:
        with pytest.raises(Unreachable):
            check(url, own, SAY)
        check(url, OwnConfig(identity=tmp_path / "identity.pem", book="file:/x"), SAY)
        RememberedPlaces(tmp_path / "state", url, SAY).save(b"a list")
        check(url, own, SAY)
    book, former = capsys.readouterr().err.splitlines()
    assert "connection refused" in book and book.endswith(". Looking in the phone book for another address")
    assert former.endswith(". This peer was in the run before and keeps trying")
