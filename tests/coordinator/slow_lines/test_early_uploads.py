"""Slow lines: who is not waited for, by which rates; the plan by which its work leaves ahead; and when it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as replace_rules

import pytest
from msgspec.structs import replace

from farflung.coordinator.rounds.reported import NAMED_IN_S, NAMED_SHARE
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import RoundCommitted, RoundWaits
from farflung.coordinator.rounds.round_rules import RoundRules
from farflung.coordinator.slow_lines.slow_lines import (
    ECHO_S,
    LEAST_BYTES,
    LOOK_EVERY_S,
    MUTE_S,
    PERIOD_MOST_S,
    EarlyUploads,
    slow_lines,
)
from farflung.protocol.manifest import Manifest, RoundSection, RunSection
from farflung.protocol.messages import Beat, FragmentBeat, Sent
from farflung.protocol.mode_words import AheadBeat, AheadPlan, AheadTick
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Plan

MBIT = 125_000  # bytes per second
MB = 1_000_000
FIVE = ("ann", "bob", "cyd", "dan", "eve")
SLOW = "zoe"
MODEL = ModelSchema((TensorSpec("w", (24, 1 << 20), "float32", "param"),), 1 << 20, 24, 24, bytes(32))


def beat(up: float = 200, down: float = 200, rough: bool = False) -> Beat:
    return Beat(
        session=bytes(16), seq=1, roster_no=0, fragments=(FragmentBeat(0, 0, b"", 0, 0, 0, False, ()),),
        phase="inner", step=0, tokens=0, loss=None, tx_bytes=0, rx_bytes=0, up_bytes_per_s=round(up * MBIT),
        down_bytes_per_s=round(down * MBIT), have=(), want=0, samples=0, rough=rough, era=0, saved=-1,
        unsure=False, leaving=False, data=b"",
    )  # fmt: skip


def lines(up: float = 5, down: float = 20, rough: bool = False, usual: float = 200) -> dict[str, Beat]:
    return {peer: beat(usual, usual) for peer in FIVE} | {SLOW: beat(up, down, rough)}


def found(
    beats: dict[str, Beat], before: tuple[str, ...] = (), least: int = 1, size: float = 25 * MB
) -> set[str]:
    return set(slow_lines(beats, size, size, set(before), least))


# ---- whose line is slow ---------------------------------------------------------------------------------------


def test_one_of_six_is_slow_and_it_is_told_why() -> None:
    [(peer, line)] = slow_lines(lines(), 25 * MB, 25 * MB, set(), 1).items()
    assert peer == SLOW
    assert line.told == "its line carries 5 Mbit/s up, where most carry 200, and 25 MB take it 40 s"


def test_a_line_that_is_slow_downwards_alone_makes_others_wait_too() -> None:
    [line] = slow_lines(lines(up=200), 25 * MB, 25 * MB, set(), 1).values()
    assert line.way == "down" and line.seconds == pytest.approx(10)


def test_lines_that_are_alike_make_nobody_special() -> None:
    assert not found(lines(200, 200)) and not found(lines(60, 60))
    assert not found({peer: beat(5, 20) for peer in FIVE})


def test_where_half_of_the_lines_are_slow_they_set_the_pace() -> None:
    pair = {"yan": beat(5, 20), SLOW: beat(5, 20)}
    two = {peer: beat() for peer in FIVE[:2]}
    assert found(pair | {peer: beat() for peer in FIVE[:3]}) == {"yan", SLOW}
    assert not found(pair | two)


def test_a_run_that_needs_everybody_waits_for_everybody() -> None:
    assert found(lines(), least=5) == {SLOW}
    assert not found(lines(), least=6)


def test_what_costs_the_others_no_second_is_worth_no_word() -> None:
    assert not found(lines(), size=0.6 * MB)
    assert found(lines(), size=0.8 * MB) == {SLOW}


def test_a_rate_that_no_round_has_shown_must_be_far_off() -> None:
    assert found(lines(40, 200)) == {SLOW}
    assert not found(lines(40, 200, rough=True))
    assert found(lines(24, 200, rough=True)) == {SLOW}


def test_where_nothing_was_sent_yet_a_rough_word_tells_nothing() -> None:
    young = {peer: beat(0.04, 0, rough=True) for peer in FIVE} | {SLOW: beat(0.004, 0, rough=True)}
    watch = Watch()
    assert watch.looks(young) == []
    assert found(young) == {SLOW}  # but for that


def test_a_line_that_gets_faster_is_slow_until_it_is_clearly_not() -> None:
    assert not found(lines(60, 60)) and found(lines(60, 60), before=(SLOW,)) == {SLOW}
    assert not found(lines(100, 100), before=(SLOW,))


def test_without_the_rates_of_most_nothing_is_known() -> None:
    some = {peer: beat(0, 0) for peer in FIVE[:3]}
    assert not found(lines() | some)


# ---- the plan -------------------------------------------------------------------------------------------------


class Watch:
    """The driver's part: looks at the lines once a second."""

    def __init__(self, codec: str = "auto") -> None:
        manifest = Manifest(
            run=RunSection(name="demo", min_peers=1, rounds=9),
            round=RoundSection(codec=codec),
        )
        self.ahead, self.now = EarlyUploads(0, lambda: manifest), 0.0

    def looks(self, beats: dict[str, Beat], can_own: set[str] | None = None) -> list[str]:
        self.now += LOOK_EVERY_S
        assert self.ahead.is_due(self.now)
        return self.ahead.look(beats, set(beats) if can_own is None else can_own, MODEL, self.now, str)

    @property
    def plan(self) -> AheadPlan:
        assert self.ahead.plan is not None
        return self.ahead.plan


def test_the_slow_one_owns_nothing_and_the_others_all_the_same() -> None:
    watch = Watch()
    [told] = watch.looks(lines())
    assert told.startswith(
        f"{SLOW} sends its work ahead of the rounds, and no round waits for it: its line carries 5"
    )
    assert watch.plan.senders == (SLOW,) and watch.plan.members == FIVE
    counts = [watch.plan.owners.count(place) for place in range(5)]
    assert sum(counts) == 24 and max(counts) - min(counts) <= 1
    assert watch.looks(lines()) == []


def test_it_gets_the_codec_that_half_a_minute_or_a_period_has_room_for() -> None:
    watch = Watch()
    watch.looks(lines())
    assert watch.plan.codecs == ("int4",)  # 13 MB in 21 s
    thin = Watch()
    thin.looks(lines(1))
    assert thin.plan.codecs == ("int2",)  # 7 MB in 57 s: the next one would tell of a value in 144
    rare = Watch()
    rare.ahead.on_commit((), 0.0)
    rare.ahead.on_commit((), 60.0)
    rare.now = 60.0
    rare.looks(lines())
    assert rare.plan.codecs == ("int8",)


def test_what_is_on_its_way_in_one_codec_is_not_begun_again_in_another() -> None:
    watch = Watch()
    watch.looks(lines())
    watch.looks(lines(2.5))
    assert watch.plan.codecs == ("int4",)
    watch.ahead.on_commit((*FIVE, SLOW), watch.now)
    watch.looks(lines(2.5))
    assert watch.plan.codecs == ("int2",)


def test_owners_stay_as_long_as_they_can() -> None:
    watch = Watch()
    watch.looks(lines())
    first = watch.plan
    noisy = lines() | {"ann": beat(60, 200)}  # it would own two chunks of them
    watch.looks(noisy)
    assert watch.plan == first


def moved(before: AheadPlan, after: AheadPlan) -> set[str]:
    """From whom."""
    places = range(len(before.owners))
    return {before.owner_of(at) for at in places if before.owner_of(at) != after.owner_of(at)}


def test_who_comes_or_comes_and_goes_moves_nothing_but_its_own_until_what_was_on_its_way_is_used() -> None:
    watch = Watch()
    watch.looks(lines())
    first = watch.plan
    watch.looks(lines(), can_own={*FIVE, SLOW} - {"eve"})
    second = watch.plan
    assert "eve" not in second.members and second.number != first.number and moved(first, second) == {"eve"}
    watch.looks(lines() | {"fay": beat()})
    assert watch.plan == second
    watch.ahead.on_commit(FIVE, watch.now)
    watch.looks(lines() | {"fay": beat()})
    assert watch.plan == second, "of the slow one nothing was in it"
    watch.ahead.on_commit((*FIVE, SLOW), watch.now)
    watch.looks(lines())
    assert watch.plan == first, "equal plans have equal numbers"
    known = echoing(first.number) | {"fay": beat()}
    watch.looks(known)
    watch.now += PERIOD_MOST_S / 2
    watch.looks(known)
    assert watch.plan == first
    watch.now += PERIOD_MOST_S / 2
    watch.looks(known)
    assert "fay" in watch.plan.members, "nor is it for ever that something is on its way"


def knows(said: FragmentBeat, number: int) -> FragmentBeat:
    return replace(said, sections=(AheadBeat(number),))


def all_know(known: Mapping[str, int]) -> dict[str, FragmentBeat]:
    return {peer: knows(beat().fragments[0], number) for peer, number in known.items()}


def echoing(number: int, *mute: str) -> dict[str, Beat]:
    """All but these know the plan of this number."""
    return {
        peer: each if peer in mute else replace(each, fragments=(knows(each.fragments[0], number),))
        for peer, each in lines().items()
    }


def test_who_says_nothing_of_the_plan_keeps_it_from_nobody_and_owns_nothing_of_what_is_sent_ahead() -> None:
    watch = Watch()
    watch.looks(lines())
    first = watch.plan
    known = dict.fromkeys((*FIVE, SLOW), first.number) | {"bob": 0, SLOW: 0}
    while watch.now < LOOK_EVERY_S + ECHO_S:
        assert watch.ahead.sections(SLOW, lambda: all_know(known)) == (AheadTick(first.number),)
        watch.looks(echoing(first.number, "bob"))
    assert watch.ahead.sections(SLOW, lambda: all_know(known)) == (AheadTick(first.number, first),)
    while watch.now < LOOK_EVERY_S + MUTE_S:
        assert watch.plan == first
        watch.looks(echoing(first.number, "bob"))
    second = watch.plan
    assert moved(first, second) == {"bob"} and "bob" not in second.members
    for _ in range(round(2 * MUTE_S)):
        watch.looks(echoing(second.number, "bob"))
    assert watch.plan == second
    nobody = Watch()
    for _ in range(round(2 * MUTE_S)):
        nobody.looks(lines())
    assert nobody.plan.members == FIVE, "somebody has to own it"


def test_an_owner_that_misses_a_round_has_heirs_in_it_and_the_plan_stands() -> None:
    watch = Watch()
    watch.looks(lines())
    there = {peer: each for peer, each in lines().items() if peer != "bob"}
    codecs, owners = watch.ahead.shared_out(there, set(there), MODEL)
    names = list(there)
    assert dict(zip(names, codecs, strict=True))[SLOW] == "int4"
    moved = [place for place in range(24) if watch.plan.owner_of(place) != names[owners[place]]]
    assert moved and {watch.plan.owner_of(place) for place in moved} == {"bob"}
    assert SLOW not in {names[owner] for owner in owners}


def test_without_slow_lines_rounds_are_shared_out_as_ever() -> None:
    watch = Watch("int8")
    alike = {peer: beat() for peer in FIVE}
    assert watch.looks(alike) == [] and watch.ahead.plan is None
    codecs, owners = watch.ahead.shared_out(alike, set(alike), MODEL)
    assert codecs == ("int8",) * 5 and set(owners) == set(range(5))


def test_who_sends_hears_of_the_plan_when_owners_have() -> None:
    watch = Watch()
    watch.looks(lines())
    known = dict.fromkeys((*FIVE, SLOW), 0)
    number = watch.plan.number
    assert watch.ahead.sections("ann", lambda: all_know(known)) == (AheadTick(number, watch.plan),)
    assert watch.ahead.sections(SLOW, lambda: all_know(known)) == (AheadTick(number),)
    known |= dict.fromkeys(FIVE, number)
    assert watch.ahead.sections("ann", lambda: all_know(known)) == (AheadTick(number),)
    assert watch.ahead.sections(SLOW, lambda: all_know(known)) == (AheadTick(number, watch.plan),)
    assert watch.ahead.sections("stranger", lambda: all_know(known)) == ()


def test_a_line_that_is_fast_again_takes_part_as_all_others_do() -> None:
    watch = Watch()
    watch.looks(lines())
    assert watch.looks(lines(200, 200)) == [f"{SLOW} does not send its work ahead of the rounds any more"]
    assert watch.ahead.plan is None and watch.ahead.sections(SLOW, dict) == ()


def test_contributions_that_are_short_are_not_worth_it() -> None:
    watch = Watch()
    watch.ahead.least_bytes = LEAST_BYTES
    small = replace(MODEL, chunk_elements=4)
    assert watch.ahead.look(lines(0.0001, 0.0001), set(FIVE), small, 9.0, str) == []


# ---- its round ------------------------------------------------------------------------------------------------

RULES = RoundRules(
    min_peers=2, scatter_grace_s=30.0, round_timeout_s=99.0, gather_codec="fp32",
    unawaited=frozenset({SLOW}),
)  # fmt: skip
THREE = ("ann", "bob", SLOW)


def flight(rules: RoundRules = RULES) -> Round:
    return Round(Plan(1, 1, 0, THREE, (0, 1), ("fp32",) * 3), rules, opened_at=0.0)


def arrives(round_: Round, *members: str) -> None:
    for member in members:
        sent = Sent(
            session=bytes(16), seq=1, round_no=1, hashes=bytes(64), tokens=9, steps=1, loss=None, used=(),
            seat=0, counted=b"", signature=b"",
        )  # fmt: skip
        round_.on_sent(member, sent)
        for owner, mask in (("ann", 0b01), ("bob", 0b10)):
            round_.scatter.held.setdefault(owner, {})[member] = mask


def test_a_round_waits_a_moment_for_what_was_sent_ahead_to_be_named_and_no_longer() -> None:
    it = flight()
    arrives(it, "ann", "bob")
    alive = set(THREE)
    waits_s = max(NAMED_IN_S, NAMED_SHARE * 5.0)
    assert isinstance(it.next_step(5.0, alive, alive), RoundWaits)
    assert isinstance(it.next_step(5.0 + waits_s - 0.01, alive, alive), RoundWaits)
    step = it.next_step(5.0 + waits_s, alive, alive)
    assert isinstance(step, RoundCommitted) and step.decision.weights[2] == 0.0
    assert waits_s <= 0.2 * 5.0


def test_what_was_named_in_time_counts_like_any_other() -> None:
    it = flight()
    arrives(it, *THREE)
    step = it.next_step(5.0, set(THREE), set(THREE))
    assert isinstance(step, RoundCommitted) and all(step.decision.weights)


def test_others_are_waited_for_and_so_is_whoever_is_needed() -> None:
    it = flight()
    arrives(it, "ann", SLOW)
    assert isinstance(it.next_step(20.0, set(THREE), set(THREE)), RoundWaits)
    needed = flight(replace_rules(RULES, min_peers=3))
    arrives(needed, "ann", "bob")
    assert isinstance(needed.next_step(20.0, set(THREE), set(THREE)), RoundWaits)
