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

from farflung.console.screen.dashboard import render
from farflung.console.screen.embedded import TimeShares
from farflung.console.screen.health import health, plain_line
from farflung.console.screen.live import keys_of
from farflung.console.screen.text import clean, sparkline
from farflung.console.screen.view import PAGES, SORTS, View
from farflung.protocol.caps import si

DOCS = Path(__file__).resolve().parents[2] / "docs"
SAMPLE: dict[str, Any] = json.loads((DOCS / "sample_status.json").read_text(encoding="utf-8"))
STATES = ("joining", "syncing", "inner", "ready", "scatter", "gather", "apply", "lost", "left", "quarantined")
SIZES = [(80, 24), (100, 30), (124, 32), (200, 50), (60, 14)]


def screen(status: dict[str, Any], width: int, height: int, *more: Any) -> str:
    """What a terminal of that size shows; fails if anything is wider or higher than it."""
    # The console is larger, so that it cannot hide a mistake by cutting or wrapping.
    console = Console(width=width + 50, height=height + 50, file=io.StringIO(), record=True)
    console.print(render(status, width, height, *more))
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
    assert len(text.rstrip("\n").split("\n")) == height or height == 14
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
        "▲ LOOK  2 of 4 take part. grey-heron: nothing heard for 5 s (5.6 s ago)",
        "version 12/40  gather, 58 s left  3 alive, 2 take part  parity ok 9f3c",
        "loss 2.913",
        "1.2M tokens, 11.6k/s  74 s gone, about 3 min to go",
        "● amber-fox      gets 81%",
        "× grey-heron     lost",
        "○ lime-wren      fetches    it holds version 9, the run is at 12",
        "round 14  epoch 1  3 members  1.9 s of 60 s",
        " 84%",
        "waiting for dusty-elk 51%, amber-fox 81%",
        "its 4 chunks moved to 2 owners",
    ):
        assert words in text
    assert "out grey-heron: not ready" in screen(SAMPLE, 160, 40)
    calm = SAMPLE | {"round": None, "reason": "inner steps: 0 of at least 2 peers are ready"}
    assert "no round open" in screen(calm, 100, 30)
    assert "inner steps: 0 of at least 2" in screen(calm, 100, 30)


def test_narrow_screens_keep_what_matters() -> None:
    narrow, wide = screen(SAMPLE, 80, 24), screen(SAMPLE, 200, 50)
    for title in ("peer", "does", "step", "tok/s", "up/s", "down/s", "ver", "lag"):
        assert f" {title} " in narrow
    assert "it holds version 9, the run is at 12" in narrow, "why somebody is not in comes before its figures"
    assert SAMPLE["members"][0]["id"] in wide
    assert SAMPLE["members"][0]["id"] not in narrow


def test_every_page_and_order_fits() -> None:
    own = {
        "title": "you",
        "text": "x" * 300,
        "computes": 0.5,
        "waits": 0.5,
        "network": 0.0,
        "log": ["y" * 300] * 80,
    }
    for width, height in SIZES:
        for page in PAGES:
            view = View(page=page, selected=SAMPLE["members"][1]["id"], paused=True, scroll=2)
            screen(SAMPLE, width, height, view, own)
            screen({}, width, height, view, {"url": "u" * 50})
    for sort in SORTS:
        screen(crowd(40), 80, 24, View(sort=sort, selected=SAMPLE["members"][1]["id"]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"phase": "finished"}, "✔ DONE"),
        ({"parity": False}, "✖ BROKEN"),
        ({"members": []}, "… WAITING  nobody is here"),
        ({"unasked": True}, "… CONNECTING"),
        ({"phase": "waiting", "reason": "1 of at least 2 peers"}, "… WAITING  1 of at least 2 peers"),
        ({"unanswered_s": 7.0}, "▲ NO ANSWER  no word from the coordinator for 7.0 s; training goes on"),
        ({"members": SAMPLE["members"][:2]}, "● GOING WELL  both peers take part"),
        (
            {"members": [SAMPLE["members"][0], SAMPLE["members"][3]]},
            "● GOING WELL  1 take part, on the way in: lime",
        ),
    ],
)
def test_one_glance(change: dict[str, Any], says: str) -> None:
    assert says in screen(SAMPLE | change, 80, 24)


def test_a_peer_that_is_alive_but_not_in_is_the_first_thing_said() -> None:
    late = SAMPLE["members"][1] | {
        "why": "round 12: its contribution was not whole in time",
        "state": "inner",
    }
    verdict = health(SAMPLE | {"members": [SAMPLE["members"][0], late]})
    assert verdict.word == "LOOK"
    assert verdict.text == "1 of 2 take part. dusty-elk: round 12: its contribution was not whole in time"


def test_who_is_left_out_of_the_round_that_goes_on_is_told_at_once() -> None:
    out = SAMPLE["members"][1] | {"out": "its contribution was not whole in time"}
    status = SAMPLE | {"members": [SAMPLE["members"][0], out]}
    assert health(status).text.startswith("1 of 2 take part. dusty-elk: not in this round: its contribution")
    assert "○ dusty-elk      gets 51%   not in this round: its contribution was" in screen(status, 80, 24)


def test_who_holds_the_next_round_up_is_named() -> None:
    ready, trains = ({**SAMPLE["members"][n], "state": state} for n, state in ((0, "ready"), (1, "inner")))
    status = SAMPLE | {"round": None, "phase": "inner", "phase_left_s": 7.6, "members": [ready, trains]}
    assert "waiting for dusty-elk; the round opens without them in 7.6 s" in screen(status, 80, 24)
    assert "waiting for" not in screen(status | {"phase_left_s": None}, 80, 24)


def test_no_figure_of_the_top_is_cut_off_in_a_small_terminal() -> None:
    long = SAMPLE | {"tokens": 123_400_000, "elapsed_s": 5000.0, "eta_s": 90_000.0}
    assert "123M tokens, 11.6k/s  83 min gone, about 25 h to go" in screen(long, 80, 24)


def test_keys_choose_what_is_shown() -> None:
    view = View()
    for key in ("down", "down"):
        view = view.on_key(key, SAMPLE)
    assert view.selected == SAMPLE["members"][1]["id"]
    assert view.on_key("up", SAMPLE).selected == SAMPLE["members"][0]["id"]
    assert view.on_key("s", SAMPLE).ordered(SAMPLE)[0]["name"] == "amber-fox"
    shown = view.on_key("enter", SAMPLE)
    assert "takes part: yes" in screen(SAMPLE, 80, 24, shown)
    assert shown.on_key("enter", SAMPLE).page == shown.on_key("esc", SAMPLE).page == "overview"
    assert "○ alive, but not in the rounds" in screen(SAMPLE, 80, 24, view.on_key("?", SAMPLE))
    assert "PAUSED" in screen(SAMPLE, 80, 24, view.on_key("p", SAMPLE))
    assert view.on_key("q", SAMPLE).quit and not view.on_key("x", SAMPLE).quit
    assert View().on_key("down", {}).selected == ""


def test_what_terminals_send_becomes_keys() -> None:
    assert keys_of("q\x1b[A\x1bOB\r\x1b[5~\x1b") == ["q", "up", "down", "enter", "pageup", "esc"]
    assert keys_of("\x1b[1;5Dp\x1b[200~s") == ["p", "s"]  # what nobody knows is no key
    assert keys_of("") == []


def test_time_goes_where_the_steps_show_it() -> None:
    shares = TimeShares()
    for now, (state, step) in enumerate(
        [("inner", 0), ("inner", 5), ("inner", 5), ("ready", 5), ("gather", 5)]  # one step takes two looks
    ):
        shares.count({"state": state, "step": step}, float(now))
    found = shares.shares()
    assert found["computes"] == pytest.approx(0.5, abs=0.02)
    assert found["waits"] == pytest.approx(found["network"], abs=0.01)
    assert TimeShares().shares() == {}


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
    assert plain_line(SAMPLE).startswith(
        "version 12/40 gather  loss 2.913  3 alive 2 participating  tokens 1.2M  parity ok 9f3c  LOOK: 2 of 4"
    )
    assert plain_line({}).startswith(
        "version 0/0 waiting  loss -  0 alive 0 participating  tokens 0  parity unknown"
    )
    data = {"leased": 3400, "committed": 3200, "held": 40, "returned": 160}
    told = "  3400 samples leased = 3200 committed + 40 held + 160 returned"
    assert plain_line({"leases": data}).endswith(told)
    assert "\n" not in plain_line({"phase": "a\nb", "digest": "\n", "parity": True})


def test_how_far_a_batch_is() -> None:
    status = SAMPLE | {"round": None, "leases": None, "batch": {"counted": 6, "microbatches": 24}}
    assert "6 of 24 microbatches counted" in screen(status, 100, 30)
    assert plain_line(status).endswith("  6 of 24 microbatches counted")


def test_accounts_and_clipped_members_where_the_status_has_them() -> None:
    data = {"leased": 3400, "committed": 3200, "held": 40, "returned": 160}
    told = "  3400 samples leased = 3200 committed + 40 held + 160 returned"
    assert plain_line({"leases": data}).endswith(told)
    status = copy.deepcopy(SAMPLE)
    status["rounds"][-1]["clipped"] = [{"name": "dusty-elk", "reason": "its norm is 2.4 x the median"}]
    assert "less dusty-elk: its norm is 2.4 x the median" in screen(status, 200, 40)
    assert "■■■■□■■■■■■▪" in screen(status, 80, 24)


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


@settings(max_examples=50)
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
