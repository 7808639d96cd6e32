"""A tick that says nothing but what a mode adds to it, for tests of one mode at a peer."""

from __future__ import annotations

from farflung.protocol.messages import OfTick, Tick


def tick_with(*sections: OfTick) -> Tick:
    return Tick(
        session=bytes(16),
        seq=1,
        answers=1,
        heard_s=0.0,
        roster_no=0,
        fragments=(),
        goal="train",
        reason="",
        era=0,
        sections=sections,
    )
