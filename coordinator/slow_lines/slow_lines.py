"""Slow lines: who sends its work ahead of the rounds, to whom, in which codec, and how long it is waited for.  Pure.

Where a line is much slower than most, a round would wait for its whole contribution.  Its owner's work leaves between
rounds instead (peer/slow_lines/early_upload.py), and goes into the first round that begins when all of it is there:
nobody waits for that member to be ready, nor for what is missing of it in a round.  It owns nothing.  Its word of its
line is its own loss: whoever names too low a rate is waited for by nobody, and counts as often as its work arrives.

Called by the driver, which knows who is here.  Nobody is special where lines are alike, where half of them are slow
(then they set the pace), and where the run needs everybody.  Without this folder nobody is: a round waits for every
contribution until its grace is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median

from msgspec.structs import replace

from farflung.coordinator.modes.registry import CoordinatorMode, ModeTools
from farflung.coordinator.rounds import shares
from farflung.coordinator.rounds.round_policy import LineShares, RoundPolicy
from farflung.coordinator.rounds.round_rules import Beats, owners_for
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.digests import hash_bytes
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Beat, FragmentBeat
from farflung.protocol.mode_words import AheadBeat, AheadPlan, AheadTick
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import AUTO, LADDER, bits_per_value, section

SLOWER = 4.0  # than the line in the middle, by so many times: it is slow;
SLOWER_ROUGHLY = 8.0  # by a rate that no round has shown
ROUGHLY_LEAST_BYTES_S = 50_000  # by which less tells only that nothing was to be sent yet
STILL_SLOWER = 2.5  # and it is so until it is not slower than that by so many times
LEAST_S = 1.0  # what it would cost the others, at least; and half of it for whom it was so before
LEAST_BYTES = 256 * 1024  # shorter contributions are over before it pays
LOOK_EVERY_S = 1.0
PERIOD_MOST_S = 600.0
# An owner that does not say that it knows the plan is not waited for longer with telling the plan to senders; and after
# so long it is mute: it owns nothing of what is sent ahead for a while.
ECHO_S, MUTE_S, MUTE_FOR_S = 5.0, 30.0, 600.0
# That a contribution may take at least which is sent ahead, and so long before it gets the coarsest codec.
TIME_S = 30.0
TIME_MOST_S = 300.0


@dataclass(frozen=True)
class Slow:
    """One direction of a line, and what it would cost the others to wait for it."""

    way: str  # "up" or "down"
    bytes_per_s: float
    usual_bytes_per_s: float
    size_bytes: float  # of all that has to pass it for one round

    @property
    def seconds(self) -> float:
        return self.size_bytes / self.bytes_per_s

    @property
    def extra_s(self) -> float:
        return self.seconds - self.size_bytes / self.usual_bytes_per_s

    @property
    def told(self) -> str:
        rate, usual = (8 * each / 1e6 for each in (self.bytes_per_s, self.usual_bytes_per_s))
        return (
            f"its line carries {rate:.3g} Mbit/s {self.way}, where most carry {usual:.3g}, and "
            f"{self.size_bytes / 1e6:.3g} MB take it {self.seconds:.3g} s"
        )


def slow_lines(
    beats: Mapping[str, Beat],
    up_bytes: float,
    down_bytes: float,
    before: Set[str],
    least: int,
    rough_least: int = 0,
) -> dict[str, Slow]:
    """Who is not to be waited for, and why.  `least`: so many others a round needs."""
    found: dict[str, Slow] = {}
    directions = (
        ("up", up_bytes, {peer: _up(beat, rough_least) for peer, beat in beats.items()}),
        ("down", down_bytes, {peer: beat.down_bytes_per_s for peer, beat in beats.items()}),
    )
    for way, size, rates in directions:
        known = {peer: float(rate) for peer, rate in rates.items() if rate}
        if 2 * len(known) <= len(beats):
            continue  # what is usual is not known
        usual = median(known.values())
        for peer, rate in known.items():
            line = Slow(way, rate, usual, size)
            worse = peer not in found or line.extra_s > found[peer].extra_s
            if worse and _is_slow(line, way == "up" and beats[peer].rough, peer in before):
                found[peer] = line
    if 2 * len(found) >= len(beats) or len(beats) - len(found) < least:
        return {}
    return found


def _up(beat: Beat, rough_least: int) -> int:
    return 0 if beat.rough and beat.up_bytes_per_s < rough_least else beat.up_bytes_per_s


def _is_slow(line: Slow, rough: bool, was_slow: bool) -> bool:
    slower = STILL_SLOWER if was_slow else SLOWER_ROUGHLY if rough else SLOWER
    costs_s = LEAST_S / 2 if was_slow else LEAST_S
    return line.usual_bytes_per_s >= slower * line.bytes_per_s and line.extra_s >= costs_s


class EarlyUploads(LineShares):
    """Of one fragment.  Not durable: a coordinator that restarts looks at the lines again."""

    def __init__(self, fragment: int, manifest: Callable[[], Manifest]) -> None:
        super().__init__(fragment, manifest)
        self.least_bytes: float = LEAST_BYTES
        self.slow: dict[str, Slow] = {}
        self.plan: AheadPlan | None = None
        # In which each sends ahead until a commit has used that: what is on its way in another one would begin again.
        self._given: dict[str, str] = {}
        self._looked_at = self._committed_at = self._drawn_at = self._redrawn_at = -math.inf
        self._mute: dict[str, float] = {}  # owners that never said that they know the plan, and until when
        self._period_s = 0.0  # between the last two commits

    def on_commit(self, included: Sequence[str], now: float) -> None:
        if self._committed_at > -math.inf:
            self._period_s = min(PERIOD_MOST_S, now - self._committed_at)
        self._committed_at = now
        for peer in included:
            self._given.pop(peer, None)

    def is_due(self, now: float) -> bool:
        return now - self._looked_at >= LOOK_EVERY_S

    def look(
        self,
        beats: Mapping[str, Beat],
        can_own: Set[str],
        model: ModelSchema,
        now: float,
        name: Callable[[str], str],
    ) -> list[str]:
        """Returns what people are to hear of it."""
        self._looked_at = now
        up_bytes, down_bytes = self._sizes(model)
        before, self.slow = self.slow, {}
        if up_bytes >= self.least_bytes:
            least = self._holds().run.min_peers
            rough_least = ROUGHLY_LEAST_BYTES_S if self.least_bytes else 0
            self.slow = slow_lines(beats, up_bytes, down_bytes, before.keys(), least, rough_least)
        fast = {peer: beat for peer, beat in beats.items() if peer not in self.slow}
        if not self.slow or not can_own & fast.keys():
            self.slow, self.plan = {}, None
        else:
            can_own = can_own & fast.keys()
            heard = can_own - self._mute_ones(beats)
            self._draw_plan({peer: beats[peer] for peer in self.slow}, fast, heard or can_own, model)
        return self._news(before, name)

    def _news(self, before: Mapping[str, Slow], name: Callable[[str], str]) -> list[str]:
        told = [
            f"{name(peer)} sends its work ahead of the rounds, and no round waits for it{self._how_often(line)}: "
            f"{line.told}"
            for peer, line in self.slow.items()
            if peer not in before
        ]
        back = [peer for peer in before if peer not in self.slow]
        return told + [f"{name(peer)} does not send its work ahead of the rounds any more" for peer in back]

    def _how_often(self, line: Slow) -> str:
        """As far as it is known how long a period is."""
        rounds = math.ceil(line.seconds / self._period_s) if self._period_s else 0
        return f" (it is in about one of {rounds + 1})" if rounds else ""

    def _sizes(self, model: ModelSchema) -> tuple[float, float]:
        """(contribution, results) of all fragments: they may be on their way at once."""
        values, rules = self.values(model), self._holds().round
        codec = LADDER[0] if rules.codec == AUTO else rules.codec
        return values * bits_per_value(codec) / 8, values * bits_per_value(rules.gather_codec) / 8

    # ---- the plan ----------------------------------------------------------------------------------------------

    def _draw_plan(
        self, slow: Mapping[str, Beat], fast: Mapping[str, Beat], can_own: Set[str], model: ModelSchema
    ) -> None:
        """Owners stay as long as they can: what moves would have to be sent again.  Who comes, or comes and goes, takes
        no chunks from others while something is on its way."""
        is_fresh = not self._given or self._looked_at - self._redrawn_at >= PERIOD_MOST_S
        new = {peer: beat for peer, beat in slow.items() if peer not in self._given}
        given = self._codecs_for_long(new, model) | self._given
        self._given = {peer: given[peer] for peer in slow}
        plan, before = self.plan, self._owners_of(self.plan) if self.plan is not None else set()
        if plan is not None and before <= can_own and (not is_fresh or can_own <= set(plan.members)):
            members, owners = plan.members, plan.owners
        elif plan is not None and before & can_own and not is_fresh:
            members = tuple(sorted(can_own))
            owners = _moved(plan, members, can_own)
        else:
            codecs, peers = self.codecs_of(fast, model), list(fast)
            by_place = owners_for(fast, codecs, can_own, self._fragment, self._holds(), model)
            members = tuple(sorted(can_own))
            owners = tuple(members.index(peers[owner]) for owner in by_place)
            self._redrawn_at = self._looked_at
        drawn = AheadPlan(1, tuple(slow), tuple(self._given.values()), members, owners)
        drawn = replace(drawn, number=_number_of(drawn))
        if plan is None or drawn.number != plan.number:
            self.plan, self._drawn_at = drawn, self._looked_at

    def _mute_ones(self, beats: Mapping[str, Beat]) -> set[str]:
        """Its owners that were told of the plan long ago, and never said that they know it: nobody could send them."""
        plan, now = self.plan, self._looked_at
        self._mute = {peer: until for peer, until in self._mute.items() if until > now}
        if plan is not None and now - self._drawn_at >= MUTE_S:
            for owner in self._owners_of(plan) & beats.keys():
                said = beats[owner].of(self._fragment)
                if said is not None and plan_known(said) != plan.number:
                    self._mute[owner] = now + MUTE_FOR_S
        return set(self._mute)

    @staticmethod
    def _owners_of(plan: AheadPlan) -> set[str]:
        return {plan.members[owner] for owner in set(plan.owners)}

    @property
    def _time_s(self) -> float:
        """That a contribution may take which is sent ahead: that of a period, and what all others have."""
        return max(self._holds().round.scatter_grace_s, self._period_s, TIME_S)

    def _codecs_for_long(self, beats: Beats, model: ModelSchema) -> dict[str, str]:
        """The coarsest codec tells too little to be better than a few rounds of waiting."""
        codecs, finer = self.codecs_of(beats, model, self._time_s), LADDER[-2]
        size = bits_per_value(finer) / 8 * self.values(model)
        for peer, beat in beats.items():
            if self._holds().round.codec == AUTO and codecs[peer] == LADDER[-1] and beat is not None:
                codecs[peer] = finer if size <= TIME_MOST_S * beat.up_bytes_per_s else LADDER[-1]
        return codecs

    def sections(self, peer: str, beats: Callable[[], Mapping[str, FragmentBeat]]) -> tuple[AheadTick, ...]:
        """For a member's tick: the plan's number, and the plan if it is news.  Senders hear of it when owners have:
        what comes from nobody they know they do not keep.  For one that says nothing the others do not wait."""
        plan = self.plan
        if plan is None or peer not in (*plan.senders, *plan.members):
            return ()
        numbers = {each: plan_known(said) for each, said in beats().items()}
        is_young = self._looked_at - self._drawn_at < ECHO_S
        waits = (
            peer in plan.senders
            and is_young
            and any(numbers.get(owner, plan.number) != plan.number for owner in self._owners_of(plan))
        )
        return (AheadTick(plan.number, None if waits or numbers.get(peer) == plan.number else plan),)

    # ---- a round opens -----------------------------------------------------------------------------------------

    def shared_out(
        self,
        beats: Beats,
        can_own: Set[str],
        model: ModelSchema,
        groups: Sequence[int] = (),
        wider: Sequence[Mapping[str, float]] = (),
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        slow = {peer: beat for peer, beat in beats.items() if peer in self.slow}
        fast = {peer: beat for peer, beat in beats.items() if peer not in slow}
        plan, peers = self.plan, list(beats)
        if groups or plan is None or not can_own & fast.keys():
            return super().shared_out(beats, can_own, model, groups, wider)
        codecs = self.codecs_of(fast, model) | {peer: plan.codec_of(peer) for peer in slow}
        return tuple(codecs[peer] for peer in peers), _moved(plan, peers, can_own & fast.keys())


def plan_known(said: FragmentBeat) -> int:
    """The number of the newest one that it knows; 0: of none."""
    told = section(AheadBeat, said.sections)
    return told.number if told is not None else 0


def _moved(plan: AheadPlan, peers: Sequence[str], can_own: Set[str]) -> tuple[int, ...]:
    """The plan's owners by their place among these peers; of who is not there, or can't own now, chunks are others'."""
    names = [*peers, *(member for member in plan.members if member not in peers)]
    owners = [names.index(plan.members[owner]) for owner in plan.owners]
    able = [place for place, peer in enumerate(names) if peer in can_own]
    return shares.reassign(owners, set(owners) - set(able), able)


def _number_of(plan: AheadPlan) -> int:
    told = "\n".join(
        [",".join(part) for part in (plan.senders, plan.codecs, plan.members)] + [str(plan.owners)]
    )
    return 1 + int.from_bytes(hash_bytes(told.encode())[:7], "big")


# ---- the mode ----------------------------------------------------------------------------------------------


class SlowLinesPolicy(RoundPolicy):
    def lines(self, fragment: int, manifest: Callable[[], Manifest]) -> LineShares:
        return EarlyUploads(fragment, manifest)


class SlowLines(CoordinatorMode):
    def policy(self, fragment: int) -> RoundPolicy:
        return SlowLinesPolicy()


def made(core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> SlowLines:
    return SlowLines()
