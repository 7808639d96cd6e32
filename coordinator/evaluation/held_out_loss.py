"""What members' losses of the same windows make together.  Pure.

Who may lie: each of them, about each number.  Every window is computed by several, so a wrong number stands beside
right ones: the median counts, and whoever is far off in many of its windows is left out.  Where no majority is to be
found, there is no figure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, median

# bf16 and fp32 differ by 4e-4 nats in a window, at most by 2e-3.
OFF_SHARE, OFF_NATS = 0.01, 0.01
OFF_WINDOWS = 0.25  # of those that two have both computed: if so many differ, they contradict each other


@dataclass(frozen=True)
class MemberLosses:
    """Of one member."""

    data: bytes = b""  # the fingerprint of the text that it read
    nats: Mapping[int, float] = field(default_factory=dict)  # by window


@dataclass(frozen=True)
class HeldOutLoss:
    loss: float | None  # nats a token; None: those who computed it contradict each other
    windows: int
    peers: tuple[str, ...]  # who counts
    outvoted: Mapping[str, str]  # who does not, and why
    means: Mapping[str, float]  # of those who count, each over its own windows


def judged(said: Mapping[str, MemberLosses]) -> HeldOutLoss | None:
    """None: nobody has computed anything."""
    said = {peer: each for peer, each in said.items() if each.nats}
    if not said:
        return None
    texts = Counter(each.data for each in said.values()).most_common()
    outvoted: dict[str, str] = {}
    if len(texts) > 1 and texts[0][1] > texts[1][1]:
        outvoted = {peer: "it reads another text" for peer, each in said.items() if each.data != texts[0][0]}
    agree = len(texts) == 1 or bool(outvoted)
    while peer := _loser(against := contradictions(_without(said, outvoted))):
        outvoted[peer] = "most of those who computed the same windows contradict it"
    counted = _without(said, outvoted)
    by_window = _by_window(counted)
    # Of windows about which no majority agrees nobody knows the loss.
    sure = [middle for each in by_window.values() if (middle := _agreed(list(each.values()))) is not None]
    agree = agree and not any(each.others for each in against.values())
    agree = agree and len(by_window) - len(sure) < max(1, OFF_WINDOWS * len(by_window))
    return HeldOutLoss(
        fmean(sure) if agree and sure else None,
        len(sure),
        tuple(counted),
        outvoted,
        {peer: fmean(each.nats.values()) for peer, each in counted.items()},
    )


def agreed_text(said: Sequence[tuple[int, ...]], asked: int) -> tuple[tuple[int, ...], int]:
    """As far as more than half of those who were asked say the same, and how many do.  Who says nothing counts against
    it: else one could wait until it is alone."""
    found: tuple[int, ...] = ()
    votes = 0
    while following := Counter(each[len(found)] for each in said if len(each) > len(found)):
        [(chosen, count)] = following.most_common(1)
        if 2 * count <= asked:
            break
        found, votes = (*found, chosen), count
        said = [each for each in said if each[: len(found)] == found]
    return found, votes


@dataclass
class Contradicted:
    """One member, by those who computed some of its windows as well."""

    others: set[str] = field(default_factory=set)  # who contradict it
    met: int = 0

    @property
    def share(self) -> float:
        """One that contradicts it is its word against that one's."""
        return len(self.others) / self.met if len(self.others) > 1 else 0.0


def contradictions(said: Mapping[str, MemberLosses]) -> dict[str, Contradicted]:
    found = {peer: Contradicted() for peer in said}
    for one, other in combinations(said, 2):
        shared = said[one].nats.keys() & said[other].nats.keys()
        off = sum(_is_off(said[one].nats[each], said[other].nats[each]) for each in shared)
        for peer, against in ((one, other), (other, one)):
            found[peer].met += bool(shared)
            if shared and off >= OFF_WINDOWS * len(shared):
                found[peer].others.add(against)
    return found


def _loser(found: Mapping[str, Contradicted]) -> str:
    """Who is left out next: contradicted by more than half, and by more than anybody else.  Empty: nobody is, or two
    parties contradict each other of which neither is the larger."""
    worst = max((each.share for each in found.values()), default=0.0)
    losers = {peer for peer, each in found.items() if each.share == worst > 0.5}
    is_split = any(found[peer].others & losers for peer in losers)
    return "" if is_split else min(losers, default="")


def _agreed(losses: list[float]) -> float | None:
    """Their median, if most are near it; of two both."""
    middle = median(losses)
    near = sum(not _is_off(each, middle) for each in losses)
    return middle if 2 * near > len(losses) else None


def _is_off(nats: float, other: float) -> bool:
    return abs(nats - other) > OFF_SHARE * abs(other) + OFF_NATS


def _without(said: Mapping[str, MemberLosses], outvoted: Mapping[str, str]) -> dict[str, MemberLosses]:
    return {peer: each for peer, each in said.items() if peer not in outvoted}


def _by_window(said: Mapping[str, MemberLosses]) -> dict[int, dict[str, float]]:
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for peer, each in said.items():
        for window, nats in each.nats.items():
            found[window][peer] = nats
    return dict(found)
