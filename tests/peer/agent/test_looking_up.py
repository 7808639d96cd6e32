"""A phone book that is asked while nobody answers: in another process, now and then, and never in anybody's way."""

from __future__ import annotations

import base64
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.peer.agent.looking_up import (
    AFTER_S,
    AGAIN_S,
    ENDS_WITHIN_S,
    RECORDS_MOST,
    LookingUp,
    records_in,
)
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import WHEREABOUTS_BYTES
from rig.waiting import Patience

URL = JoinUrl("old.example", 1, "demo", bytes(range(32)), "secret-token")
SAYS = 'import json, base64; print(json.dumps({"records": [base64.b64encode(b"found").decode()]}))'


def say(text: str, routine: bool = False, **facts: str) -> None:
    pass


def looking(script: str = SAYS) -> LookingUp:
    return LookingUp("here:1", URL, say, (sys.executable, "-c", script))


def asked_until(one: LookingUp, now: float) -> list[bytes]:
    patience = Patience()
    while one._process is not None and not patience.is_over:
        if found := one.turn(False, now):
            return found
    return []


def test_it_is_asked_after_a_while_of_silence_and_what_it_finds_is_handed_on() -> None:
    one = looking()
    assert one.turn(False, 100.0) == [] and one._process is None
    assert one.turn(False, 100.0 + AFTER_S - 0.1) == [] and one._process is None
    assert one.turn(False, 100.0 + AFTER_S) == []
    assert asked_until(one, 105.0) == [b"found"]
    assert one.turn(False, 100.0 + AFTER_S + AGAIN_S - 0.1) == [] and one._process is None
    one.turn(False, 100.0 + AFTER_S + AGAIN_S)
    assert one._process is not None
    one.close()


def test_nobody_is_asked_who_is_in_contact_or_has_no_book() -> None:
    one, bookless = looking(), LookingUp("", URL, say)
    for now in (0.0, 100.0, 200.0):
        assert one.turn(True, now) == [] == bookless.turn(False, now)
        assert one._process is None and bookless._process is None


def test_a_book_that_hangs_is_ended() -> None:
    one = looking("import time; time.sleep(3600)")
    one.turn(False, 0.0)
    one.turn(False, AFTER_S)
    process = one._process
    assert process is not None
    one.turn(False, AFTER_S + ENDS_WITHIN_S)
    assert one._process is None and process.poll() is not None


def test_the_token_of_an_invitation_is_nobodys_business() -> None:
    assert "secret-token" not in " ".join(LookingUp("here:1", URL, say)._command)
    assert str(URL).partition("&t=")[0] in LookingUp("here:1", URL, say)._command


@given(st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
def test_whatever_it_prints_is_no_trouble(raw: bytes) -> None:
    records_in(raw)


@pytest.mark.parametrize(
    "records", [None, 7, {}, [7], ["?"], [""], [base64.b64encode(bytes(WHEREABOUTS_BYTES + 1)).decode()]]
)
def test_what_is_no_record(records: object) -> None:
    assert records_in(json.dumps({"records": records}).encode()) == []


def test_few_records_are_taken() -> None:
    assert len(records_in(json.dumps({"records": ["eA=="] * 100}).encode())) == RECORDS_MOST
