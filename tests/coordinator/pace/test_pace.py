"""Whom a round waits for, what a member's tick says of it, and that few can't call all others."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from farflung.coordinator.modes.registry import ModeTools
from farflung.coordinator.pace.pace import PaceMode, made
from farflung.protocol.manifest import Manifest
from farflung.protocol.mode_words import CallTick, PaceBeat
from rig.made_run import BARE_BEAT, MadeRun, holding

TOOLS = ModeTools(lambda count: bytes(count), lambda *_: None, lambda: None, lambda _: None, lambda _: True)


class Host(MadeRun):
    def __init__(self, *names: str, manifest: Manifest | None = None) -> None:
        super().__init__(manifest or Manifest())
        found = made(self.core, self.drivers, TOOLS)
        assert isinstance(found, PaceMode)
        self.mode = found
        self.here = {name: self.enters(name) for name in names}
        for name in names:
            self.steps(name)

    def steps(self, name: str, *versions: int) -> None:
        """It is here with these versions, and takes steps."""
        member = self.here[name]
        self.says(member, fragments=holding(*versions or [0] * len(self.drivers)))
        for standing in member.standings.values():
            standing.ready_since = None

    def is_ready(self, *names: str, early: tuple[int, ...] = ()) -> None:
        sections = (PaceBeat(early),) if early else ()
        for name in names:
            member = self.here[name]
            said = member.beat
            assert said is not None
            fragments = tuple(replace(each, ready=True) for each in said.fragments)
            self.says(member, fragments=fragments, sections=sections)
            for standing in member.standings.values():
                standing.ready_since = self.core.now

    def call(self, name: str) -> tuple[tuple[int, int, float], ...]:
        told = self.mode.tell(self.here[name].peer, BARE_BEAT)
        assert all(isinstance(each, CallTick) for each in told) and len(told) <= 1
        return told[0].rounds if told else ()  # type: ignore[union-attr]


def test_who_is_slower_than_a_third_is_called_until_it_is_ready() -> None:
    host = Host("ann", "bob", "cyd")
    assert host.call("bob") == ()
    host.is_ready("ann")
    host.core.now += 2.5
    assert host.call("bob") == host.call("cyd") == ((0, 0, 2.5),)
    assert host.call("ann") == (), "it is ready"
    host.is_ready("bob")
    assert host.call("bob") == () and host.call("cyd") == ((0, 0, 2.5),)


@pytest.mark.parametrize(("members", "due"), [(2, 1), (3, 1), (4, 2), (6, 2), (7, 3), (8, 3)])
def test_fewer_than_a_third_call_nobody(members: int, due: int) -> None:
    """Whoever says that it is ready may lie, and each call costs the others steps."""
    names = "abcdefgh"[:members]
    host = Host(*names)
    for at, name in enumerate(names[:-1]):
        assert bool(host.call(names[-1])) == (at >= due), at
        host.core.now += 1.0
        host.is_ready(name)
    assert host.call(names[-1]) == ((0, 0, float(members - 1 - due)),), "since the last of that third"


def test_who_is_ready_early_calls_nobody() -> None:
    host = Host("ann", "bob", "cyd")
    host.is_ready("ann", early=(0,))
    assert not host.call("cyd")
    host.is_ready("bob")
    assert host.call("cyd")


def test_only_those_that_could_be_in_the_round_count() -> None:
    host = Host("ann", "bob", "cyd", "dan")
    host.is_ready("ann")
    assert not host.call("bob")
    host.says(host.here["cyd"], leaving=True)
    assert host.call("bob")
    host.here["ann"].standings[0].verified = False
    assert not host.call("bob"), "nobody knows what it holds"


def test_a_member_at_another_version_is_not_called() -> None:
    host = Host("ann", "bob", "cyd")
    host.commits()
    host.steps("ann", 1)
    host.is_ready("ann")
    assert not host.call("bob"), "it holds version 0"
    host.steps("bob", 1)
    assert host.call("bob") == ((0, 1, 0.0),)


def test_a_round_that_is_open_waits_for_nobody_more() -> None:
    host = Host("ann", "bob", "cyd")
    host.is_ready("ann", "cyd")
    assert host.call("bob")
    host.opens(host.here["ann"], host.here["cyd"])
    assert not host.call("bob")
    host.drivers[0].round = None
    host.steps("ann"), host.steps("cyd")
    assert not host.call("bob"), "that round was given up, and all take steps again"


def test_each_fragment_has_its_own_call() -> None:
    host = Host("ann", "bob", manifest=Manifest.model_validate({"round": {"fragments": 2}}))
    host.is_ready("ann")
    assert host.call("bob") == ((0, 0, 0.0), (1, 0, 0.0))
    host.opens(host.here["ann"], fragment=0)
    assert host.call("bob") == ((1, 0, 0.0),)


def test_by_the_clock_and_in_batches_nobody_is_called() -> None:
    host = Host("ann", "bob", manifest=Manifest.model_validate({"round": {"period_s": 60.0}}))
    host.is_ready("ann")
    assert not host.call("bob")
    batches = MadeRun(Manifest.model_validate({"pipeline": {"batch": 4}, "merge": {"policy": "mean"}}))
    assert made(batches.core, batches.drivers, TOOLS) is None


def test_a_slow_line_sets_nobody_the_pace_and_is_not_called() -> None:
    host = Host("ann", "bob", "cyd", "dan")
    host.drivers[0].lines.slow = {host.here["dan"].peer: object()}
    host.is_ready("dan")
    assert not host.call("bob")
    host.is_ready("ann")
    assert host.call("bob") and host.call("cyd")
    host.steps("dan")
    assert not host.call("dan")
