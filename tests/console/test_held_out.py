"""One held-out loss, the same figure on every screen: dashboard, page, trackers, replay, plot and model card."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from test_dashboard import SAMPLE, screen
from test_model_card import facts
from test_recording import ALICE, BOB, journals, recorded, written
from test_trackers import Rows, add, commit, host

from farflung.checkpoints.checkpoint_manifest import JoinedStages
from farflung.console.history.live_tracker import PeerRows
from farflung.console.history.plots import picture_of
from farflung.console.history.replay import Replay
from farflung.console.model_card import card_of
from farflung.console.screen.dashboard import details
from farflung.console.web.page import chart, parts_of
from farflung.console.web.public import shown
from rig.made_model import MadeRun
from rig.public_run import public_status

TOLD: dict[str, Any] = {
    "version": 14, "loss": 2.5, "perplexity": 12.18249, "bits_per_byte": 0.9, "windows": 256, "of": 256,
    "peers": ["amber-fox", "quiet-owl"], "outvoted": {}, "text": "", "curve": [[7, 2.75], [14, 2.5]], "next": 21,
}  # fmt: skip
CONTESTED = TOLD | {"loss": None, "perplexity": None, "bits_per_byte": None}
EVENT: dict[str, Any] = {
    "event": "evaluated", "pos": 1, "version": 1, "versions": [1], "loss": 2.5, "perplexity": 12.18249,
    "bits_per_byte": 0.9, "windows": 256, "of": 256, "peers": [ALICE, BOB], "outvoted": {}, "means": {},
}  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(80, 24), (124, 32)])
def test_the_dashboard(width: int, height: int) -> None:
    assert "held out 2.500 at 14" in screen(SAMPLE | {"held_out": TOLD}, width, height)
    assert "held out contested at 14" in screen(SAMPLE | {"held_out": CONTESTED}, width, height)
    for nothing in (
        {},
        {"held_out": {"curve": [], "next": 7}},
        {"held_out": "odd"},
        {"held_out": {"version": "x"}},
    ):
        assert "held out 2" not in screen(SAMPLE | nothing, width, height)


def test_the_page_has_a_tile_and_a_second_curve() -> None:
    curve = [[1, 4.0], [7, 3.0], [14, 2.6]]
    parts = parts_of(shown(public_status() | {"curve": curve, "held_out": TOLD}))
    assert (
        "<dt>Held out</dt><dd><b>2.500</b> <span>round 14, by 2 peers; 12.2 perplexity, 0.9 bits a byte"
        in parts["tiles"]
    )
    assert parts["curve"].count('class="curve') == 2 and 'class="curve held"' in parts["curve"]
    assert "on text that nobody learns from: from 2.750 at round 7 to 2.500 at round 14" in parts["curve"]
    contested = parts_of(shown(public_status() | {"curve": curve, "held_out": CONTESTED | {"curve": []}}))
    assert "contested at round 14" in contested["tiles"] and 'class="curve held"' not in contested["curve"]
    one = parts_of(shown(public_status() | {"held_out": TOLD | {"peers": ["x"]}}))
    assert "one peer&#x27;s word" in one["tiles"] or "one peer's word" in one["tiles"]


@pytest.mark.parametrize(
    "odd", [None, 3, [], {"version": "9"}, {"version": 3, "curve": "x", "peers": 9, "loss": "<b>"}]
)
def test_a_status_that_says_odd_things_of_it_draws_a_page_all_the_same(odd: object) -> None:
    parts = parts_of(shown(public_status() | {"held_out": odd}))
    assert "<b>&lt;b" not in parts["tiles"] and "<b><b>" not in parts["tiles"]


def test_points_outside_of_the_first_curve_are_not_drawn() -> None:
    drawn = chart([(5.0, 3.0), (9.0, 2.0)], [(2.0, 99.0), (6.0, 2.9), (9.0, 2.2)])
    assert drawn.count("L") >= 2 and "99" not in drawn.partition("<svg")[2]


def test_trackers_get_it_with_the_newest_round(tmp_path: Path) -> None:
    add(tmp_path / "events.jsonl", host(commit(1, 1010.0, 3.0, [0.5, 0.5]), EVENT | {"wall": 1011.0}))
    rows = Rows(tmp_path).news()
    assert [row.number for row in rows] == [1, 1]
    assert rows[1].values == {
        "held_out/version": 1.0, "held_out/loss": 2.5, "held_out/perplexity": 12.18249, "held_out/bits_per_byte": 0.9,
    }  # fmt: skip


def of_two_versions(folder: Path) -> Path:
    files = journals()
    told = files["run.data/events.jsonl"]
    for at, version, loss in ((13.0, 1, 2.75), (25.0, 2, 2.5)):
        told.append({"at": at, "wall": 1000.0 + at, "pid": 1, **EVENT, "version": version, "loss": loss})
    told.sort(key=lambda event: event["at"])
    return written(folder, files)


def test_the_replay_and_the_plot(tmp_path: Path) -> None:
    recording = recorded(of_two_versions(tmp_path))
    replay = Replay(recording, 1.0)
    assert "held_out" not in replay.status_at(12.5)
    assert replay.status_at(14.0)["held_out"]["loss"] == 2.75
    assert replay.status_at(26.0)["held_out"] == {
        "version": 2, "loss": 2.5, "perplexity": 12.18249, "bits_per_byte": 0.9,
    }  # fmt: skip
    drawn = picture_of(recording)
    ET.fromstring(drawn)
    assert "dashed line: held out" in drawn and "held out: 2.5000 nats a token" in drawn


def test_the_model_card_has_that_of_the_newest_version_until_its_own(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.commits(1, bytes(32))
    found = JoinedStages((run.saves(nn.Linear(3, 2), 2),))
    run.commits(3, bytes(32))
    assert "held-out" not in card_of(facts(run, found), "transformers")
    journal = run.data / "events.jsonl"
    for version, loss in ((1, 2.75), (2, 2.5), (3, 1.0)):
        add(journal, [EVENT | {"wall": 3000.0, "pos": 90 + version, "version": version, "loss": loss}])
    row = "| held-out loss | 2.5000 nats a token, 0.9000 bits a byte at version 2, by 2 peers |"
    assert row in card_of(facts(run, found), "transformers"), "not of version 3"


def test_figures_of_a_peers_script_are_among_its_details_and_in_its_tracker() -> None:
    member = SAMPLE["members"][0] | {"figures": {"accuracy": 0.75, "f1": "odd"}}
    [line] = [each.plain for each in details(member, SAMPLE) if "script" in each.plain]
    assert line == "its script's figures: accuracy 0.75, f1 0"
    rows = PeerRows(1)
    plain = {"pid": 1, "wall": 1.0}
    told = [
        {**plain, "event": "start", "peer": ALICE, "process": "ab", "run": "demo"},
        {**plain, "event": "logged", "figures": {"accuracy": 0.75}},
        {**plain, "event": "trained", "step": 3, "tokens": 9},
    ]
    [row] = rows.take(told)
    assert row.values["script/accuracy"] == 0.75
