"""A model in stages as people see it: one source of words and rows for the dashboard, the status and the plain line."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from console.test_dashboard import SAMPLE, screen

from farflung.console.screen.health import health, plain_line, plain_text
from farflung.console.screen.stages import batch_words, cost_words, narrow_words, stages_table
from farflung.console.screen.view import View


def stage(**changed: Any) -> dict[str, Any]:
    row = {
        "members": 2,
        "seats": 2,
        "counted": 6,
        "micros_per_s": 4.0,
        "unit_s": 0.5,
        "waiting": 3,
        "version": 7,
    }
    return row | {"up_bytes": 4_230_000, "down_bytes": 8_460_000, "prepared": False, "narrow": ""} | changed


def run(*stages: dict[str, Any], costs: dict[str, Any] | None = None) -> dict[str, Any]:
    status = copy.deepcopy(SAMPLE) | {"round": None, "leases": None}
    return status | {"stages": [*stages], "batch": {"counted": 6, "microbatches": 24, "costs": costs}}


NARROW = run(stage(), stage(narrow="line up", micros_per_s=1.25), stage(prepared=True))
COSTS = {"counting_s": 87.0, "round_s": 15.0, "rounds_cost": 0.172, "deaths_cost": 0.018, "batch": 1024}


def test_each_stage_has_a_row_and_the_narrow_one_says_why() -> None:
    rows = [line.plain for line in stages_table(NARROW, 100, 20)]
    titles = "stage seats peers counted micro/s each waiting version up down now"
    assert rows[0].split() == titles.split()
    assert rows[1].split() == ["0", "2", "2", "6/24", "4.00", "500", "ms", "3", "7", "4.2MB", "8.5MB"]
    assert rows[2].startswith("▼") and rows[2].rstrip().endswith("narrow: line up") and "1.25" in rows[2]
    assert rows[3].rstrip().endswith("its round is done")
    assert narrow_words(NARROW) == "stage 1 holds the others up: its seats' lines carry no more up"


def test_dashboard_status_and_plain_line_say_the_same() -> None:
    shown, told = screen(NARROW, 120, 36), plain_text(NARROW, 100)
    assert "stages (3): stage 1 holds the others up" in shown
    for line in stages_table(NARROW, 116, 20)[1:]:
        assert line.plain.strip() in shown
    for line in stages_table(NARROW, 100, 20):
        assert line.plain.rstrip() in told
    words = "6 of 24 microbatches counted in all stages, seats 2/2/2, narrow: stage 1 (line up)"
    assert batch_words(NARROW) == words
    held_out = NARROW | {"batch": NARROW["batch"] | {"held_out": True}}
    assert batch_words(held_out).startswith("held-out loss: 6 of 24 microbatches, seats 2/2/2")
    assert plain_line(NARROW).endswith(f"  {words}") and told.startswith(plain_line(NARROW))
    assert plain_text(SAMPLE, 100) == plain_line(SAMPLE), "a run in one piece is one line"


@pytest.mark.parametrize(("width", "height"), [(60, 14), (80, 24), (100, 30), (200, 60)])
@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_any_terminal_has_room(width: int, height: int, count: int) -> None:
    narrow = [*[stage() for _ in range(count - 1)], stage(narrow="compute")]
    shown = screen(run(*narrow, costs=COSTS | {"best": None}), width, height)
    assert f"stages ({count})" in shown or width == 60
    if width > 60:
        assert "▼" in shown and "narrow: compute" in shown, "however many there are"
    screen(run(*[{} for _ in range(count)]), width, height)
    screen(run(*[stage(narrow="x" * 500, micros_per_s=10**300, seats="q" * 90)] * count), width, height)


def test_a_run_that_gets_no_gradient_any_more_does_not_go_well() -> None:
    status = run(stage(), stage())
    for member in status["members"]:
        member |= {"alive": True, "why": "", "state": "inner", "out": ""}
    assert health(status).word == "GOING WELL"
    status["batch"]["passed_over"] = 3
    assert health(status).word == "LOOK" and "3 batches in a row gave no finite gradient" in plain_line(
        status
    )


def test_stages_that_have_no_room_are_counted() -> None:
    rows = [line.plain for line in stages_table(run(*[stage()] * 9), 80, 5)]
    assert len(rows) == 5 and rows[-1].strip() == "... 6 more stages"


def test_a_peer_says_which_stage_it_holds() -> None:
    status = run(stage(), stage())
    for at, member in enumerate(status["members"]):
        member |= {"stage": at, "batch": {"seat": 40 + at, "counted": 5, "unit_s": 0.25}}
    assert "stage" in screen(status, 100, 36).split("peers (", 1)[1]
    opened = View(page="details", selected=status["members"][1]["id"])
    assert "stage 1, seat 41: 5 microbatches counted, 250 ms of work for each" in screen(
        status, 120, 40, opened
    )


def test_a_peer_says_what_relay_it_offers_and_why_nobody_is_sent_there() -> None:
    status = run(stage(), stage())
    [one, other] = [member["id"] for member in status["members"][:2]]
    offers = {"bytes_per_s": 2_500_000, "pairs": 3, "moved_bytes": 7_000_000}
    status["relays_offered"] = [
        {"peer": one, "on": True, "why_not": ""} | offers,
        {"peer": other, "on": False, "why_not": "port 7000 of its address: nobody answers there"} | offers,
    ]
    shown = screen(status, 120, 40, View(page="details", selected=one))
    assert "offers a relay: 20.0Mbit/s for all who use it, 3 pairs now, 7.0MB passed" in shown
    shown = screen(status, 120, 40, View(page="details", selected=other))
    assert "nobody is sent there: port 7000 of its address" in shown


@pytest.mark.parametrize(
    ("best", "says"),
    [
        (None, "; a larger [pipeline] batch would cost less"),
        (3160, "; [pipeline] batch = 3160 would cost least (it is 1024)"),
        (400, "; [pipeline] batch = 400 would cost least (it is 1024)"),
        (1200, ""),
    ],
)
def test_what_a_batch_costs_and_which_way_to_turn_it(best: int | None, says: str) -> None:
    status = run(stage(), stage(), costs=COSTS | {"best": best})
    begins = "a batch takes 87 s and its round 15 s: rounds cost 17% of the computing, deaths 2%"
    assert cost_words(status) == begins + says
    assert cost_words(status) in plain_text(status, 100)
    assert begins[:40] in screen(status, 120, 50)
    assert cost_words(run(stage())) == "" and cost_words({"batch": {"costs": [1]}}) == ""
    assert re.search(r"\n$", plain_text(status, 100)) is None
