"""A joiner hears how far the run's state has come, and from whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from farflung.peer.agent.fetch_lines import Fetching


def test_it_tells_the_share_and_the_donors_and_then_the_end() -> None:
    said: list[str] = []
    fetching = Fetching(lambda text, routine=False, **facts: said.append(text))
    contacts: Any = [SimpleNamespace(peer="a", name="amber-fox"), SimpleNamespace(peer="b", name="dusty-elk")]
    fetching.meet(contacts)
    fetching.expect(4)
    for chunk, (sender, now) in enumerate([("a", 0.0), ("b", 1.0), ("a", 2.5)]):
        fetching.came(sender, chunk, 1000)
        fetching.taken(chunk, now)
    assert said == ["downloading the model: 75%, 2.0kB from amber-fox, 1.0kB from dusty-elk"]
    fetching.came("b", 9999, 1000)  # there is no such piece
    fetching.came("b", 3, 1000)  # a damaged one is asked for again, and is another's then
    fetching.came("a", 3, 1000)
    fetching.taken(3, 3.0)
    fetching.sealed(4.0)
    assert said[1:] == ["the model is here after 4.0 s: 3.0kB from amber-fox, 1.0kB from dusty-elk"]


def test_what_takes_long_is_told_with_what_is_left() -> None:
    said: list[str] = []
    fetching = Fetching(lambda text, routine=False, **facts: said.append(text))
    fetching.expect(10)
    for chunk in range(10):
        fetching.came("a", chunk, 1000)
        fetching.taken(chunk, 10.0 * chunk)
    assert said[0] == "downloading the model: 20%, about 80 s left, 2.0kB from a"
    assert said[-1] == "downloading the model: 100%, 10.0kB from a"


def test_what_is_quick_is_not_told() -> None:
    said: list[str] = []
    fetching = Fetching(lambda text, routine=False, **facts: said.append(text))
    fetching.expect(1)
    fetching.came("a", 0, 1000)
    fetching.taken(0, 0.0)
    fetching.sealed(0.5)
    fetching.taken(0, 1.0)  # results that are rolled on have no sender here
    assert said == []
