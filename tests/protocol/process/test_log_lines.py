"""What processes tell people: quiet by default, all of it with -v, JSON for machines."""

from __future__ import annotations

import io
import json
import os

import pytest

from farflung.protocol.process.log_lines import LOG_VARIABLE, ROUTINE_EVERY_S, Teller, choose


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


def test_the_choice_reaches_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_VARIABLE, "json")
    choose(False, False)
    assert os.environ[LOG_VARIABLE] == "json"
    choose(True, True)
    assert os.environ[LOG_VARIABLE] == "verbose,json"
