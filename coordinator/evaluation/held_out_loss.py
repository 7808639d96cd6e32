"""What members' losses of the same windows make together.  Pure.

Who may lie: each of them, about each number.  Every window is computed by several, so a wrong number stands beside
right ones: the median counts, and whoever is far off in many of its windows is left out.  Where no majority is to be
found, there is no figure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

# bf16 and fp32 differ by 4e-4 nats in a window, at most by 2e-3.
OFF_SHARE, OFF_NATS = 0.01, 0.01
OFF_WINDOWS = 0.25  # of those that two others computed as well: whoever is off in so many is left out


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
    counted = _without(said, outvoted)
    for peer, share in _off(counted).items():
        if share >= OFF_WINDOWS:
            outvoted[peer] = f"it is off in {share:.0%} of the windows that two others computed as well"
    counted = _without(said, outvoted)
    by_window = _by_window(counted)
    doubtful = sum(
        len(each) > 1 and _is_off(max(each.values()), min(each.values())) for each in by_window.values()
    )
    agree = agree and doubtful < max(1, OFF_WINDOWS * len(by_window))
    medians = [median(each.values()) for each in by_window.values()]
    return HeldOutLoss(
        fmean(medians) if agree and medians else None,
        len(by_window),
        tuple(counted),
        outvoted,
        {peer: fmean(each.nats.values()) for peer, each in counted.items()},
    )


def _off(said: Mapping[str, MemberLosses]) -> dict[str, float]:
    """Of each: in which share of its windows it is far from the median of three or more."""
    compared: Counter[str] = Counter()
    off: Counter[str] = Counter()
    for each in _by_window(said).values():
        if len(each) < 3:
            continue
        middle = median(each.values())
        for peer, nats in each.items():
            compared[peer] += 1
            off[peer] += _is_off(nats, middle)
    return {peer: off[peer] / count for peer, count in compared.items()}


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
