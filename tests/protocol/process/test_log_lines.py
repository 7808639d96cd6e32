"""What processes tell people: quiet by default, all of it with -v, JSON for machines."""

from __future__ import annotations

import io
import json
import os
import re

import pytest

from farflung.protocol.process.log_lines import (
    COORDINATOR,
    LOG_VARIABLE,
    ROUTINE_EVERY_S,
    Teller,
    choose,
    facts_of,
    json_line,
    text_of,
)


def told(choice: str) -> list[str]:
    out, now = io.StringIO(), [0.0]
    say = Teller("peer", choice, out, lambda: now[0])
    say("I am amber-fox")
    for second in range(0, 61, 10):
        now[0] = float(second)
        say(f"version {second} is here", routine=True)
    say.failed("the disk is full")
    return out.getvalue().splitlines()


def test_what_happens_in_every_round_is_told_now_and_then() -> None:
    assert ROUTINE_EVERY_S == 30.0
    rounds = [f"farflung: version {second} is here" for second in (0, 30, 60)]
    assert told("") == ["farflung: I am amber-fox", *rounds, "farflung: the disk is full"]


def test_verbose_tells_all() -> None:
    assert len(told("verbose")) == 9


def test_json_lines_say_who_and_how_bad() -> None:
    lines = [json.loads(line) for line in told("verbose,json")]
    assert [line["level"] for line in lines] == ["info"] * 8 + ["error"]
    assert lines[0]["text"] == "I am amber-fox" and {line["who"] for line in lines} == {"peer"}


def test_a_json_line_reads_as_the_text_line_that_it_would_have_been() -> None:
    assert [text_of(line) for line in told("json")] == told("")
    assert re.fullmatch(r"\d\d:\d\d:\d\d bob left", text_of(json_line(COORDINATOR, "info", "bob left")))
    for other in (
        "step 3",
        "[1, 2]",
        '{"loss": 3.0}',
        '{"who": "me", "text": "hello", "wall": "now"}',
        "[" * 99_999,
    ):
        assert text_of(other) == other and facts_of(other) == {}, "a training script's"


def test_facts_are_for_programs() -> None:
    out = io.StringIO()
    Teller("peer", "json", out)("hello", peer="abcd")
    assert facts_of(out.getvalue())["peer"] == "abcd"
    Teller("peer", "", out)("hello", peer="abcd")
    assert out.getvalue().splitlines()[1] == "farflung: hello"


def test_the_choice_reaches_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_VARIABLE, "json")
    choose(False, False)
    assert os.environ[LOG_VARIABLE] == "json"
    choose(True, True)
    assert os.environ[LOG_VARIABLE] == "verbose,json"
