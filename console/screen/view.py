"""What the person at the screen has chosen: order, peer, page, pause.  Pure: `view.on_key(key, status) -> view`.

Called by the loop that reads keys, and by the dashboard, which shows what is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from farflung.console.screen.health import takes_part
from farflung.console.screen.text import Record, clean, number, records

SORTS: dict[str, Callable[[Record], tuple[object, ...]]] = {
    "joined": lambda m: (),  # as the coordinator lists them: those alive first, by when they came
    "name": lambda m: (clean(m.get("name")),),
    "not in": lambda m: (takes_part(m), not m.get("alive")),
    "tok/s": lambda m: (-number(m, "tokens_per_s"),),
    "up": lambda m: (-number(m, "tx_bytes_per_s"),),
    "behind": lambda m: (-number(m, "behind"),),
}
PAGES = ("overview", "details", "log", "help")
_NEXT = {"down": 1, "j": 1, "up": -1, "k": -1}
_SCROLL = {"pageup": 5, "pagedown": -5, "[": 1, "]": -1}
# At 80x24 none of it is cut: 16 lines of 76.
HELP = (
    "q, Ctrl-C   stop looking; in `join` and `coordinate` Ctrl-C ends the process",
    "up, down    choose a peer; Enter shows all about it; Esc goes back",
    "s           sort the peers: joined, name, not in, tok/s, up, behind",
    "p           pause the picture; p again goes on",
    "PgUp, PgDn  older and newer events and rounds",
    "l           the newest lines of the log, where there is one",
    "replay      left, right, Home, End move; + and - change speed; p holds it",
    "● takes part   ○ alive, but not in the rounds: its row says why   × offline",
    "version  = the run's state, bit for bit   ≠ another one   ? not known yet",
    "rounds   ■ it was in   ▪ it counted less   □ left out   · it was not there",
    "up/s, down/s  bytes now; the bar: how much of its connection that is",
    "lag   versions behind              miss   rounds in a row without it",
    "bad   how often it showed another state   heard   since its last word",
    "trains, ready, sends, gets, applies: where a peer is in the round",
    "joins: on its way in   fetches: it downloads the run's state",
)


@dataclass(frozen=True)
class View:
    sort: str = "joined"
    selected: str = ""  # a peer's id
    page: str = "overview"
    paused: bool = False
    scroll: int = 0  # so many of the newest events and rounds are passed over
    quit: bool = False
    has_keys: bool = True  # somebody listens to them

    def on_key(self, key: str, status: Record) -> View:
        if key in ("q", "ctrl-c"):
            return replace(self, quit=True)
        if key == "s":
            order = list(SORTS)
            return replace(self, sort=order[(order.index(self.sort) + 1) % len(order)])
        if key == "p":
            return replace(self, paused=not self.paused)
        if key in _NEXT:
            return self._move(_NEXT[key], status)
        if key in _SCROLL:
            return replace(self, scroll=max(0, self.scroll + _SCROLL[key]))
        page = {"enter": "details", "l": "log", "?": "help", "h": "help"}.get(key)
        if page is not None:
            shown = self if self.selected or page != "details" else self._move(1, status)
            return replace(shown, page="overview" if page == self.page else page)
        if key == "esc":
            return replace(self, page="overview", selected="" if self.page == "overview" else self.selected)
        return self

    def _move(self, step: int, status: Record) -> View:
        ids = [clean(member.get("id")) for member in self.ordered(status)]
        if not ids:
            return self
        at = ids.index(self.selected) + step if self.selected in ids else (0 if step > 0 else -1)
        return replace(self, selected=ids[at % len(ids)])

    def ordered(self, status: Record) -> list[Record]:
        return sorted(records(status, "members"), key=SORTS[self.sort])
