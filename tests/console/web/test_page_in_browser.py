"""The page in a real browser: drawn, alive, readable in light and dark and on a phone, with keys, and without scripts.

Skipped where there is no Chromium (`apt install chromium`).
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

import pytest

from farflung.console.web.page_process import Press, assets
from farflung.console.web.server import PageServer
from rig.browser import Browser, BrowserMissing
from rig.public_run import empty_status, public_status
from rig.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]
URL = "farflung://train.example.org:29800/tiny-stories-1b?k=" + 43 * "A"
PHONE = 375
LEAST_CONTRAST = 4.5  # WCAG 2, AA, for text of ordinary size

# Each element with text of its own: its colour and the first ground below it that is not see-through.
COLOURS = """
[...document.querySelectorAll('body *')].filter(e => e.getClientRects().length && !e.matches('.skip') &&
  [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
    let ground = e;
    const clear = e => /, 0\\)$|transparent/.test(getComputedStyle(e).backgroundColor);
    while (ground && clear(ground)) ground = ground.parentElement;
    return [e.textContent.trim().slice(0, 30), getComputedStyle(e).color,
            getComputedStyle(ground || document.body).backgroundColor];
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        made = Browser()
    except BrowserMissing as missing:
        pytest.skip(str(missing))
    with made as browser:
        yield browser


class Site:
    def __init__(self, status: dict[str, object]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        found, version = assets()
        self.server, self.press = PageServer(self.listener, found), Press(URL, version)
        self.tell(status)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"

    def tell(self, status: dict[str, object]) -> None:
        self.server.publish(self.press.edition(status))


@contextlib.contextmanager
def site(status: dict[str, object]) -> Iterator[Site]:
    made = Site(status)
    thread = threading.Thread(target=made.server.serve)
    thread.start()
    try:
        yield made
    finally:
        made.server.stop()
        thread.join(PATIENCE_S)
        made.listener.close()


def contrast(one: str, other: str) -> float:
    """Of two colours as a browser writes them, by WCAG 2."""

    def light(colour: str) -> float:
        parts = [float(each) / 255 for each in colour.partition("(")[2].rstrip(")").split(",")[:3]]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


EVERY_LOOK = pytest.mark.parametrize(
    ("status", "dark"),
    list(itertools.product([public_status(), public_status(stages=4), empty_status()], [False, True])),
)


@EVERY_LOOK
def test_every_word_can_be_read_and_nothing_is_refused(
    browser: Browser, status: dict[str, object], dark: bool
) -> None:
    with site(status) as made:
        browser.open(made.url, dark=dark)
        browser.wait_until("document.getElementById('live').classList.contains('on')")
        colours = browser.value(COLOURS)
        assert len(colours) > 20
        pale = [each for each in colours if contrast(*each[1:]) < LEAST_CONTRAST]
        assert not pale
        assert browser.complaints == [] and all(url.startswith(made.url) for url in browser.asked)
        ground = browser.value("getComputedStyle(document.body).backgroundColor")
        assert (contrast(ground, "rgb(0, 0, 0)") < 3) == dark


@pytest.mark.parametrize("status", [public_status(), public_status(stages=4), empty_status()])
def test_on_a_phone_nothing_sticks_out(browser: Browser, status: dict[str, object]) -> None:
    with site(status) as made:
        browser.open(made.url, width=PHONE, height=800)
        assert browser.value("document.documentElement.scrollWidth") <= PHONE
        columns = "getComputedStyle(document.querySelector('.columns')).gridTemplateColumns"
        assert browser.value(f"{columns}.split(' ').length") == 1
        if status["curve"]:
            assert browser.value("document.querySelector('.plot svg').getBoundingClientRect().width") > 200


def test_news_come_by_themselves_and_the_focus_stays(browser: Browser) -> None:
    with site(public_status()) as made:
        browser.open(made.url)
        browser.wait_until("document.getElementById('live-says').textContent === 'live'")
        browser.value("document.querySelector('.scroll').focus()")
        status = public_status(tick=30)
        status["members"][1]["state"] = "gather"
        status["members"][0]["name"] = "<b>renamed</b>"
        made.tell(status)
        browser.wait_until("document.getElementById('p1').textContent.includes('receiving')")
        assert browser.value("document.getElementById('progress').textContent").startswith("Round 1,314")
        assert browser.value("document.querySelector('#p0 th').textContent") == "<b>renamed</b>"
        assert browser.value("document.activeElement.className") == "scroll"
        status["members"] = status["members"][:2]
        made.tell(status)
        browser.wait_until("document.querySelectorAll('#people tr').length === 2")
        assert browser.complaints == []


def test_a_run_of_another_shape_is_loaded_anew(browser: Browser) -> None:
    with site({"run": "tiny-stories-1b", "unasked": True}) as made:
        browser.open(made.url)
        assert "has not answered yet" in browser.value("document.body.textContent")
        browser.wait_until("document.getElementById('live').classList.contains('on')")
        made.tell(public_status(stages=3))
        browser.wait_until("document.querySelectorAll('table').length === 3")


def test_without_scripts_it_is_whole_and_says_so(browser: Browser) -> None:
    with site(public_status()) as made:
        browser.open(made.url, script=False)
        names = {name for role, name in browser.tree() if role == "StaticText"}
        assert {"tiny-stories-1b", "amber-fox", "Going on", ", again every 30 s"} <= names
        assert not any("/live" in url or ".js" in url for url in browser.asked)


def test_a_screen_reader_finds_its_way(browser: Browser) -> None:
    with site(public_status(stages=2)) as made:
        browser.open(made.url)
        tree = browser.tree()
        roles = [role for role, _ in tree]
        assert {"banner", "main", "contentinfo", "progressbar", "status"} <= set(roles)
        headings = [name for role, name in tree if role == "heading"]
        assert headings == [
            "tiny-stories-1b", "Loss", "Stages", "Who is here", "Take part", "Top contributors",
        ]  # fmt: skip
        [picture] = [name for role, name in tree if role in ("image", "img")]
        assert picture.startswith("From 6.") and "at round 1,284" in picture
        regions = {name for role, name in tree if role == "region"}
        assert {"Loss", "Stages", "Who is here", "Take part", "Top contributors"} <= regions
        assert ("columnheader", "Here for") in tree and ("rowheader", "amber-fox") in tree


def test_by_keys_alone(browser: Browser) -> None:
    with site(public_status()) as made:
        browser.open(made.url)
        browser.press("Tab")
        assert browser.value("document.activeElement.textContent") == "Skip to the run"
        assert browser.value("document.activeElement.getBoundingClientRect().left") >= 0, "it is seen now"
        reached = set()
        for _ in range(12):
            browser.press("Tab")
            reached.add(browser.value("document.activeElement.className || document.activeElement.localName"))
            outline = browser.value("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid" or "body" in reached
        assert {"scroll", "command"} <= reached


@pytest.mark.parametrize("still", [False, True])
def test_who_wants_no_motion_sees_none(browser: Browser, still: bool) -> None:
    with site(public_status()) as made:
        browser.open(made.url, still=still)
        browser.wait_until("document.getElementById('live').classList.contains('on')")
        running = browser.value("document.getAnimations().length")
        assert (running == 0) == still
