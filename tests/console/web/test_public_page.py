"""The page as HTML: what is public and what is not, whatever names say, what changes, and how much it is."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.console.web.page import (
    axis_of,
    chart,
    event_of,
    page_of,
    parts_of,
    shape_of,
    summary,
    update_of,
    whole_of,
)
from farflung.console.web.page_process import (
    CROWD,
    EVERY_OF_A_CROWD_S,
    EVERY_S,
    UNSEEN_AFTER_S,
    UNSEEN_EVERY_S,
    Press,
    TextReader,
    pause_s,
)
from farflung.console.web.public import PEOPLE_SHOWN, shown
from farflung.coordinator.run.status import status_json
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Challenge
from farflung.protocol.states import PeerState, RunPhase
from rig.crowd import crowd
from rig.public_run import VERSION, empty_status, public_status
from rig.waiting import eventually

URL = "farflung://train.example.org:29800/tiny-stories-1b?k=" + 43 * "A"
EVIL = "<img src=x onerror=alert(1)>\"'&</tbody><script>"
FIRST_VIEW_BYTES = 100_000


def page(status: dict[str, Any], url: str = URL) -> str:
    seen = shown(status)
    return page_of(seen, parts_of(seen), "begun-1", url, "v").decode()


class Reader(HTMLParser):
    """Every element and attribute, and whether each is closed in its turn."""

    EMPTY = ("meta", "link", "path", "rect", "circle", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


EVERY_RUN = pytest.mark.parametrize(
    "status", [public_status(), public_status(stages=4), empty_status(), {}, {"unasked": True}]
)


@EVERY_RUN
def test_a_page_is_whole_html_with_landmarks_and_headed_tables_and_nothing_of_others(
    status: dict[str, Any],
) -> None:
    read = Reader(page(status))
    for landmark in ("header", "main", "footer", "h1", "title"):
        assert len(read.all(landmark)) == 1, landmark
    assert read.all("html")[0]["lang"] == "en"
    ids = [each["id"] for _, each in read.elements if "id" in each]
    assert len(ids) == len(set(ids))
    for section in read.all("section"):
        assert section["aria-labelledby"] in ids
    tables = len(read.all("table"))
    assert tables == 2 + bool(status.get("stages")) == len(read.all("thead"))
    assert all(each.get("scope") in ("col", "row") for each in read.all("th"))
    for tag, attributes in read.elements:
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
        for name in ("src", "href"):
            assert "//" not in (attributes.get(name) or ""), "nothing comes from elsewhere"
        assert tag != "style" and (tag != "script" or "src" in attributes), "the policy forbids it"


def test_what_a_run_does_stands_on_it() -> None:
    text = Reader(page(public_status())).text
    for word in ("tiny-stories-1b", f"Round {VERSION:,} of 4,000", "amber-fox", "about 3 days to go", URL):
        assert word in text, word
    assert text.count("brave-newt") == 1, (
        "it is gone: on the list of those who taught it, and not among those here"
    )
    assert "not in rounds yet" in text


def test_a_pipeline_has_a_row_for_each_stage_and_says_which_is_narrow() -> None:
    text = Reader(page(public_status(stages=4))).text
    assert [f"Stage {n}" in text for n in range(5)] == [True] * 4 + [False]
    assert "Stage 1 holds the others up: its peers' lines carry no more up." in text
    assert "210 of 512 microbatches of this batch are counted." in text
    status = public_status(stages=4)
    status["batch"] |= {"held_out": True}
    assert "The held-out loss is computed: 210 of 512 microbatches." in Reader(page(status)).text


# ---- what the model writes ----------------------------------------------------------------------------------


def written(**changes: object) -> dict[str, Any]:
    text = {
        "version": 1280,
        "ids": [1, 2, 3],
        "given": 1,
        "peers": 3,
        "began": "Once",
        "went_on": " upon\ta time\n",
    }
    return public_status() | {"written": text | changes}


def test_what_the_model_writes_stands_on_it() -> None:
    html = page(written())
    text = Reader(html).text
    assert "What it writes" in text and "Once upon   a time" in text
    assert "From the first words of a held-out text, at round 1,280; 3 peers say the same." in text
    assert "<span>Once</span> upon" in html
    assert "one peer's word" in Reader(page(written(peers=1))).text
    assert "What it writes" not in page(public_status())


def test_whatever_a_model_writes_is_shown_as_text_and_moves_nothing() -> None:
    html = page(written(began=EVIL, went_on="\x1b[2J\u202e\x00" + 9000 * "x"))
    assert "<img" not in html and "\x1b" not in html and "\u202e" not in html and "\x00" not in html
    assert EVIL in Reader(html).text and 1000 < html.count("x") < 4000


@pytest.mark.parametrize(
    "told", [None, 3, [], {}, {"version": "x"}, {"version": 3, "began": 5, "went_on": [1]}]
)
def test_an_odd_text_in_the_status_costs_the_page_nothing(told: object) -> None:
    Reader(page(public_status() | {"written": told}))


class Asked:
    """Of a coordinator, the manifest of its run."""

    def __init__(self, toml: str = "") -> None:
        self.manifest = Manifest.from_toml(toml, "run.toml")
        self.asked = 0

    def ask(self, question: object, kind: type, seconds: float) -> Challenge:
        self.asked += 1
        return Challenge(protocol=1, run_id=bytes(16), nonce=bytes(32), manifest=self.manifest.canonical())


def sample(text: str, version: int = 4) -> dict[str, Any]:
    return {"version": version, "ids": list(text.encode()), "given": 4, "peers": 3}


def status_with(told: object) -> dict[str, Any]:
    return {"held_out": {"sample": told}}


@contextlib.contextmanager
def text_reader(asked: Asked) -> Iterator[TextReader]:
    with tempfile.TemporaryFile() as kept, closing(TextReader("tiny", asked, kept)) as reader:  # type: ignore[arg-type]
        yield reader


def test_a_text_is_put_into_words_by_another_process_and_the_last_one_stays_until_it_is_done() -> None:
    asked = Asked()
    with text_reader(asked) as reader:
        assert reader.look({}) == {} and reader.look(status_with(None)) == {} and not asked.asked
        first = status_with(sample("Once upon"))
        assert reader.look(first) == {}, "words take a moment"
        found = eventually(lambda: reader.look(first), "there are words")
        assert found == {"written": {**sample("Once upon"), "began": "Once", "went_on": " upon"}}
        second = status_with(sample("Then came", version=6))
        assert reader.look(second) == found
        eventually(lambda: reader.look(second)["written"]["version"] == 6, "then those of the next version")
        assert reader.look({}) == {}, "the run went back"
        assert asked.asked == 1


def test_a_text_that_gives_no_words_costs_the_page_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The tokenizer can't be read: its place is a port of this machine, where a stranger's URL may not lead."""
    place = f"https://127.0.0.1:9/tokenizer.json#{'ab' * 32}"
    source = "https://a.example/x.bin"
    asked = Asked(f'[model]\nvocab = 300\n[data]\nsource = "{source}"\ntokenizer = "{place}"\n')
    told = status_with(sample("Once upon"))
    with text_reader(asked) as reader:
        assert reader.look(told) == {}
        eventually(lambda: reader.look(told) or caplog.text, "it says so")
        assert "no words were made of a text of the model" in caplog.text
        assert reader.look(told) == {} and reader._reader is None, "it is not tried again"


@pytest.mark.parametrize(
    "told",
    [[], {}, {"ids": 3}, {"ids": []}, {"ids": [1, True]}, {"ids": [-1]}, {"ids": [1 << 32]}, {"ids": ["a"]},
     {"ids": [1] * 145}],
)  # fmt: skip
def test_no_process_is_started_for_what_is_no_text(told: object) -> None:
    with text_reader(Asked()) as reader:
        assert reader.look(status_with(told)) == {} and reader._reader is None


@pytest.mark.parametrize("admission", ["token", "allowlist", "something new", None])
def test_how_to_join_is_shown_only_where_anybody_may(admission: str | None) -> None:
    html = page(public_status() | {"admission": admission})
    assert "farflung://" not in html and "k=" not in html
    assert "farflung join" in page(public_status())


def test_a_run_of_an_own_model_says_that_a_script_is_needed() -> None:
    plain, own = (page(public_status() | {"needs_script": needs}) for needs in (False, True))
    assert "--script" not in plain and "farflung join --script train.py &quot;farflung://" in own
    assert "It trains by a script of its own" in Reader(own).text


def test_a_finished_run_asks_nobody_to_join() -> None:
    html = page(public_status() | {"phase": str(RunPhase.FINISHED)})
    assert "farflung://" not in html and "The run is complete" in html


def test_no_sentence_of_the_coordinator_and_no_address_is_on_the_page() -> None:
    """Each text of the status but names is one that must not be seen."""
    status = public_status(stages=2)
    hidden = ("192.0.2.77:4000", "10.1.2.3", "secret-token")
    for member in status["members"]:
        member |= {"why": hidden[0], "left_out": hidden[1], "digest": hidden[2], "gone_because": hidden[0]}
    status |= {"reason": hidden[0], "unjudged": hidden[1], "events": [{"at_s": 1.0, "text": hidden[2]}]}
    status["stages"][1] |= {"narrow": hidden[0], "reason": hidden[1], "digest": hidden[2]}
    status["rounds"] = [{"version": 1, "loss": 2.0, "merged": hidden[2], "excluded": [{"reason": hidden[0]}]}]
    for phase in RunPhase:
        html = page(status | {"phase": str(phase)})
        assert not [word for word in hidden if word in html], phase
    assert "id-of-amber-fox" not in html


@pytest.mark.parametrize("state", list(PeerState))
def test_every_state_of_a_peer_has_words(state: PeerState) -> None:
    member = {"name": "n", "state": str(state), "alive": True, "why": "", "here_s": 1.0}
    [person] = shown({"members": [member], "alive": 1}).people
    assert person.does and "_" not in person.does


def test_words_of_strangers_are_words() -> None:
    status = public_status()
    for each in (*status["members"], *status["contributors"]):
        each["name"] = EVIL
    status |= {"run": EVIL, "software": EVIL, "phase": EVIL, "admission": EVIL}
    html = page(status, url="farflung://x/" + EVIL)
    assert "<img" not in html and "<script>" not in html
    read = Reader(html)
    assert len(read.all("script")) == 1 and not read.all("img")
    assert "<img src=x onerror=alert(1)>" in read.text, "it is shown as it was written"


@settings(max_examples=30)
@given(st.text(max_size=60), st.text(max_size=60))
def test_no_name_breaks_the_page_or_an_event(name: str, other: str) -> None:
    status = public_status()
    status["members"][0]["name"] = status["contributors"][0]["name"] = name
    status |= {"run": other}
    before = [tag for tag, _ in Reader(page(public_status())).elements]
    assert [tag for tag, _ in Reader(page(status)).elements] == before
    seen = shown(status)
    event = event_of("1", shape_of(seen), whole_of(parts_of(seen))).decode()
    assert event.count("\n") == 3 and event.endswith("\n\n")
    assert all(ord(each) >= 32 for each in event.replace("\n", ""))


def test_two_of_the_same_name_are_told_apart() -> None:
    members = [
        {"name": "same", "id": each, "alive": True, "why": "", "state": "inner"}
        for each in ("abcdef", "xyz123")
    ]
    assert [each.name for each in shown({"members": members}).people] == ["same · abcd", "same · xyz1"]


numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=4),
    st.integers(),
    st.floats(),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=30)
@given(st.lists(numbers, max_size=8), numbers)
def test_no_figure_breaks_the_page(odd: list[Any], other: Any) -> None:
    """A coordinator of another version may send anything that JSON can hold."""
    keys = ("version", "target", "loss", "tokens", "tokens_per_s", "eta_s", "elapsed_s", "alive")
    status = public_status(stages=2) | dict(zip(keys, odd, strict=False))
    status["members"][0] |= {
        "here_s": other,
        "stage": other,
        "tokens_per_s": other,
        "alive": other,
        "state": other,
    }
    status["contributors"][0] |= {"tokens": other}
    status["curve"] = [[1, other], [other, 2.0], other, [3, 2.5]]
    status["stages"][0] |= {"members": other, "micros_per_s": other, "counted": other}
    Reader(page(status))


# ---- updates ---------------------------------------------------------------------------------------------------


def parts(status: dict[str, Any]) -> dict[str, str]:
    return parts_of(shown(status))


def test_an_update_is_what_changed_and_nothing_else() -> None:
    before, after = parts(public_status()), parts(public_status() | {"tokens_per_s": 1.0})
    assert update_of(before, before) == {}
    assert set(update_of(before, after)) == {"tiles"}
    status = public_status()
    status["members"][3]["state"] = "scatter"
    assert set(update_of(before, parts(status))) == {"p3"}


@pytest.mark.parametrize("left", [0, 1, 5])
def test_a_table_with_other_rows_is_sent_whole(left: int) -> None:
    status = public_status()
    status["members"] = status["members"][:left]
    update = update_of(parts(public_status()), parts(status))
    assert "people" in update and not any(re.fullmatch(r"p\d+", key) for key in update)
    assert update["people"].count("<tr") == max(1, left)


def test_updates_put_together_are_the_page() -> None:
    """What a viewer has after any updates is what a page that is loaded then has."""
    held: dict[str, str] = {}
    bodies: dict[str, str] = {}
    before: dict[str, str] = {}
    for status in (public_status(), public_status(tick=5), empty_status(), public_status(tick=9)):
        now = parts(status)
        update = whole_of(now) if not before else update_of(before, now)
        for body in ("people", "leaders"):
            if body in update:
                bodies[body] = update.pop(body)
                held = {k: v for k, v in held.items() if not re.fullmatch(body[0] + r"\d+", k)}
                held |= {
                    k: v for k, v in now.items() if re.fullmatch(body[0] + r"\d+", k) and v in bodies[body]
                }
        held |= update
        assert held == now
        before = now


def test_a_run_of_another_shape_is_loaded_anew() -> None:
    assert shape_of(shown(public_status())) == shape_of(shown(public_status(tick=3)))
    for other in (public_status(stages=3), public_status() | {"admission": "token"}, empty_status()):
        assert shape_of(shown(other)) != shape_of(shown(public_status()))


def test_the_press_numbers_what_is_new_and_says_nothing_where_nothing_is() -> None:
    press = Press(URL, "v")
    first, same, next_ = (press.edition(public_status(tick=tick)) for tick in (0, 0, 1))
    assert first.number == same.number == next_.before != next_.number and same.news is None
    assert next_.news is not None and f'data-seen="{next_.number}"'.encode() in next_.page
    assert next_.news.plain.startswith(f"id: {next_.number}\n".encode())
    assert len(next_.news.plain) < len(next_.whole.plain) / 2
    other = press.edition(empty_status())
    assert other.news is not None and json.loads(other.news.plain.splitlines()[1][6:])["parts"] == {}
    assert Press(URL, "v").edition(public_status()).number != first.number, "another process began"


def test_a_page_of_a_thousand_members_is_small() -> None:
    machine = crowd(1000)
    status = json.loads(status_json(machine.core, machine.drivers, machine.counters, 1.0))
    status["contributors"] = public_status()["contributors"] * 9
    for number, each in enumerate(status["contributors"]):
        each["name"] = f"a rather long name, with the number {number}"
    html = page(status | {"curve": public_status()["curve"]})
    assert len(html.encode()) < FIRST_VIEW_BYTES * 0.6, "style sheet and script come to it"
    assert f"1,000 here, 1,000 in the rounds; the first {PEOPLE_SHOWN} are shown." in html


def test_the_coordinator_is_asked_less_where_nobody_looks_and_where_many_take_part() -> None:
    assert pause_s(3, 0.0) == EVERY_S
    assert pause_s(CROWD + 1, 0.0) == EVERY_OF_A_CROWD_S > EVERY_S
    assert pause_s(3, UNSEEN_AFTER_S) == UNSEEN_EVERY_S > EVERY_OF_A_CROWD_S


# ---- the curve -------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_an_axis_goes_from_one_round_number_to_another_around_all_values(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    axis = axis_of(low, high)
    slack = 1e-6 * axis.step
    assert axis.low - slack <= low and high <= axis.high + slack
    assert 2 <= len(axis.ticks) <= 7


def test_a_curve_says_in_words_what_it_shows() -> None:
    curve = [(1.0, 5.0), (2.0, 2.0), (3.0, 2.5)]
    assert summary(curve) == "From 5.000 at round 1 to 2.500 at round 3; the lowest was 2.000, at round 2."
    assert "<svg" in chart(curve) and summary(curve) in chart(curve)
    assert "<svg" not in chart(curve[:1]) and "<svg" not in chart([])


def test_an_older_coordinators_curve_is_that_of_its_last_rounds() -> None:
    rounds = [{"version": 7, "loss": 3.0}, {"version": 8, "loss": None}, {"version": 9, "loss": 2.5}]
    assert shown({"rounds": rounds}).curve == ((7.0, 3.0), (9.0, 2.5))
