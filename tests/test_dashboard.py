"""The dashboard: a pure function of the status that fits every screen and believes no text."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from farflung.peer.dashboard import clean, plain_line, render, si, sparkline

DOCS = Path(__file__).resolve().parent.parent / "docs"
SAMPLE: dict[str, Any] = json.loads((DOCS / "sample_status.json").read_text(encoding="utf-8"))
STATES = ("joining", "syncing", "inner", "ready", "scatter", "gather", "apply", "lost", "left", "quarantined")
SIZES = [(80, 24), (100, 30), (124, 32), (200, 50), (60, 13)]


def screen(status: dict[str, Any], width: int, height: int) -> str:
    """What a terminal of that size shows; fails if anything is wider or higher than it."""
    # The console is larger, so that it cannot hide a mistake by cutting or wrapping.
    console = Console(width=width + 50, height=height + 50, file=io.StringIO(), record=True)
    console.print(render(status, width, height))
    text = console.export_text()
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= height
    assert max(cell_len(line) for line in lines) <= width
    return text


def crowd(count: int) -> dict[str, Any]:
    """The sample with so many members, of all states, some with awkward values."""
    status = copy.deepcopy(SAMPLE)
    status["members"] = [
        {**SAMPLE["members"][0], "name": f"peer-{i}", "state": STATES[i % 10], "loss": None if i % 3 else 2.5}
        for i in range(count)
    ]
    return status


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("members", [0, 3, 15, 40])
def test_fits(width: int, height: int, members: int) -> None:
    text = screen(crowd(members), width, height)
    assert len(text.rstrip("\n").split("\n")) == height or members == 0 or height == 13
    for panel in ("farflung  demo", f"peers ({members})", "round 14"):
        assert panel in text
    if members > 15:
        assert "more: " in text  # nobody disappears without being counted


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_fits_with_long_and_odd_values(width: int, height: int) -> None:
    status = crowd(15)
    for member in status["members"]:
        member |= {"name": "x" * 500, "state": "y" * 500, "digest": "z" * 500, "id": "\u65e5" * 500}
        member |= {"step": 10**15, "tx_bytes": 10**300, "loss": float("nan"), "tokens_per_s": -(10**12)}
    status |= {"loss": float("inf"), "run": "r" * 500, "reason": "\u65e5" * 500, "phase": "p" * 500}
    status |= {"version": 10**9, "target": 10**9, "tokens": 10**400, "elapsed_s": 10.0**9}
    status["rounds"][-1]["excluded"] = [{"name": "n" * 500, "reason": "why " * 500}] * 9
    status["events"].append({"at_s": 10.0**9, "text": "e" * 500})
    screen(status, width, height)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_missing_keys(width: int, height: int) -> None:
    assert "no peers yet" in screen({}, width, height)
    bare: dict[str, Any] = {"members": [{}], "round": {}, "rounds": [{}], "events": [{}]}
    screen(bare, width, height)
    screen(bare | {"round": None, "members": None, "events": [None, 3], "rounds": {}}, width, height)
    for key in SAMPLE:
        screen({k: v for k, v in SAMPLE.items() if k != key}, width, height)


@pytest.mark.parametrize(("width", "height"), [(59, 30), (80, 12), (20, 3), (1, 1)])
def test_a_tiny_terminal_gets_one_line(width: int, height: int) -> None:
    assert screen(SAMPLE, width, height).count("\n") == 1


def test_what_it_says() -> None:
    text = screen(SAMPLE, 100, 30)
    for words in (
        "version 12/40 gather  3 alive, 2 participating  parity ok 9f3c",
        "loss 2.913",
        "tokens 1.2M",
        "grey-heron   ",
        "lost",
        "round 14  epoch 1  3 members  1.9 s of 60 s",
        " 84%",
        "out grey-heron: not ready at the deadline",
        "its 4 chunks moved to 2 owners",
    ):
        assert words in text
    assert "no round open" in screen(SAMPLE | {"round": None}, 100, 30)


def test_narrow_screens_keep_what_matters() -> None:
    narrow, wide = screen(SAMPLE, 80, 24), screen(SAMPLE, 124, 32)
    for title in ("peer", "state", "alive", "in", "step", "tok/s", "up", "down", "ver", "hash", "miss"):
        assert f" {title} " in narrow
    assert SAMPLE["members"][0]["id"] in wide
    assert SAMPLE["members"][0]["id"] not in narrow


def test_broken_parity_is_said_in_words() -> None:
    assert "PARITY BROKEN" in screen(SAMPLE | {"parity": False}, 80, 24)
    assert "parity unknown" in screen(SAMPLE | {"parity": None}, 80, 24)


def test_text_from_elsewhere_is_only_text() -> None:
    status = crowd(1)
    hostile = "[red]a[/] \x1b]0;owned\x07\x1b[2J\r\n\u202eb\u200d\u0301 [/nope]"
    status["members"][0]["name"] = status["run"] = status["reason"] = hostile
    status["rounds"][-1]["excluded"] = [{"name": "x", "reason": hostile}]
    status["events"].append({"at_s": 1.0, "text": hostile})
    console = Console(
        width=124, height=32, file=io.StringIO(), record=True, force_terminal=True, color_system=None
    )
    console.print(render(status, 124, 32))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("[red]a[/] ]0;owned[2Jb [/nope]") >= 3
    assert not set(shown) & set("\x1b\x07\r\u202e\u200d\u0301")
    assert clean(hostile) == "[red]a[/] ]0;owned[2Jb [/nope]"


def test_plain_line() -> None:
    assert plain_line(SAMPLE) == (
        "version 12/40 gather  loss 2.913  3 alive 2 participating  tokens 1.2M  parity ok 9f3c"
    )
    assert plain_line({}) == "version 0/0 waiting  loss -  0 alive 0 participating  tokens 0  parity unknown"
    assert "\n" not in plain_line({"phase": "a\nb", "digest": "\n", "parity": True})


def test_render_leaves_the_status_alone() -> None:
    before = copy.deepcopy(SAMPLE)
    assert screen(SAMPLE, 100, 30) == screen(SAMPLE, 100, 30)
    assert before == SAMPLE


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.9, "1.0k"),
        (1234, "1.2k"),
        (99_960, "100k"),
        (999_499, "999k"),
        (999_950, "1.0M"),
        (12.5, "12.5"),
        (-1500, "-1.5k"),
        (1e30, "?"),
        (float("nan"), "?"),
        (float("inf"), "?"),
    ],
)
def test_si(value: float, text: str) -> None:
    assert si(value) == text
    assert si(value, "B") == text + "B"


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == "▄▄"
    assert sparkline([0.0, 1.0, 2.0]) == "▁▄█"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(SAMPLE)), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(list(SAMPLE)), JSON), st.integers(1, 130), st.integers(1, 40))
def test_nonsense_fits_too(status: dict[str, Any], width: int, height: int) -> None:
    screen(status, width, height)
    plain_line(status)


def test_the_picture_in_the_docs_is_current(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_pictures", DOCS / "make_pictures.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.draw(DOCS / "sample_status.json", tmp_path / "dashboard.svg")
    new, kept = (
        re.findall(r">([^<]+)</text>", (folder / "dashboard.svg").read_text(encoding="utf-8"))
        for folder in (tmp_path, DOCS)
    )
    assert len(new) > 100
    assert new == kept, "the dashboard looks different now: run python docs/make_pictures.py"
