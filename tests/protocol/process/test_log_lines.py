"""What processes tell people: quiet by default, all of it with -v, JSON for machines."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest

from farflung.protocol.process.exit_codes import UNEXPECTED, USAGE
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
    say("this peer is amber-fox")
    for second in range(0, 61, 10):
        now[0] = float(second)
        say(f"version {second} is here", routine=True)
    say.failed("the disk is full")
    return out.getvalue().splitlines()


def test_what_happens_in_every_round_is_told_now_and_then() -> None:
    assert ROUTINE_EVERY_S == 30.0
    rounds = [f"farflung: version {second} is here" for second in (0, 30, 60)]
    assert told("") == ["farflung: this peer is amber-fox", *rounds, "farflung: the disk is full"]


def test_verbose_tells_all() -> None:
    assert len(told("verbose")) == 9


def test_json_lines_say_who_and_how_bad() -> None:
    lines = [json.loads(line) for line in told("verbose,json")]
    assert [line["level"] for line in lines] == ["info"] * 8 + ["error"]
    assert lines[0]["text"] == "this peer is amber-fox" and {line["who"] for line in lines} == {"peer"}


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


MISTAKE = """
import sys
from farflung.protocol.errors import UserError
from farflung.protocol.process.log_lines import mistakes_in_one_line
mistakes_in_one_line()
raise {error}
"""


def ends(error: str, choice: str = "", before: str = "") -> tuple[int, list[str]]:
    """A script in a process of its own: its exit code, and what it told people."""
    script = before + MISTAKE.replace("{error}", error)
    environment = os.environ | {LOG_VARIABLE: choice}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    return done.returncode, done.stderr.splitlines()


def test_a_mistake_in_a_script_is_one_line_and_the_exit_code_of_mistakes() -> None:
    assert ends("UserError('there is no part 9')") == (USAGE, ["farflung: there is no part 9"])
    code, lines = ends("UserError('no')", "verbose")
    assert code == USAGE and lines[0].startswith("Traceback") and lines[-1] == "farflung: no"


def test_so_it_is_from_the_first_use_of_a_public_name_on() -> None:
    """Also before a run is joined: a package that is missing, a data set that is not there."""
    script = "import farflung\nraise farflung.UserError('there is no such optimizer')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (USAGE, "farflung: there is no such optimizer\n")


def test_what_is_no_mistake_of_ours_and_a_scripts_own_way_are_left_alone() -> None:
    code, lines = ends("RuntimeError('a bug')")
    assert code == UNEXPECTED and lines[0].startswith("Traceback") and lines[-1] == "RuntimeError: a bug"
    own = "import sys\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)\n"
    assert ends("UserError('no')", before=own) == (UNEXPECTED, ["mine"])


def test_a_rank_tells_its_mistake_as_any_script_does() -> None:
    """torch.distributed has a hook of its own, in which an exit code would be lost."""
    torchs = """
import sys
def hook(*args):
    print("[rank0]:", file=sys.stderr)
    sys.__excepthook__(*args)
hook.__module__ = "torch.distributed.distributed_c10d"
sys.excepthook = hook
"""
    assert ends("UserError('no')", before=torchs) == (USAGE, ["farflung: no"])
    code, lines = ends("RuntimeError('a bug')", before=torchs)
    assert code == UNEXPECTED and lines[0] == "[rank0]:" and lines[-1] == "RuntimeError: a bug"
