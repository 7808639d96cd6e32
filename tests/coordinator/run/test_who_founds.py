"""Who gives a run its initial state that begins with a file which nobody opens on the run's word."""

from __future__ import annotations

import pytest

from farflung.protocol import messages as m
from farflung.protocol.errors import LeaveCause
from farflung.protocol.manifest import Manifest, RunSection, StartSection
from farflung.protocol.states import Goal
from rig.guests import Guest
from rig.undialled_hall import Hall

START = StartSection.model_validate({"from": "/home/host/x.safetensors", "hash": "a" * 64})
MANIFEST = Manifest(run=RunSection(name="demo"), start=START)


def hall_of(*guests: Guest) -> Hall:
    hall = Hall(MANIFEST)
    for guest in guests:
        welcome = hall.hello(guest)
        assert isinstance(welcome, m.Welcome)
        guest.session, guest.seq = welcome.session, 0
    return hall


def test_who_has_not_what_the_run_begins_with_waits_and_the_next_one_founds_it_at_once() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_of(ann)
    told = hall.beat(ann, lacks_start=True)
    assert (told.goal, told.reason) == (
        Goal.WAIT,
        "waiting for a peer that joins with --start PATH and has what the run begins with (hash aaaaaaaaaaaaaaaa...), "
        "which gives the run its initial state",
    )
    welcome = hall.hello(bob)
    assert isinstance(welcome, m.Welcome)
    bob.session, bob.seq = welcome.session, 0
    assert hall.beat(bob).goal == Goal.FOUND, "nobody's turn has to pass first"
    told = hall.beat(ann, lacks_start=True)
    assert told.goal == Goal.WAIT and told.reason.endswith("gives the run its initial state")


@pytest.mark.parametrize("said", [*LeaveCause, "'w' is [256, 32] there, its hash is 064f97f6", ""])
def test_a_good_bye_is_shown_in_the_coordinators_words_whatever_was_said(said: str) -> None:
    ann = Guest(1)
    hall = hall_of(ann)
    gone = hall.machine.core.members.alive[ann.peer]
    hall.says(ann, m.Leave(session=ann.session, seq=9, reason=str(said)))
    assert gone.told.gone_because == LeaveCause.of(str(said)).told
    assert "hash" not in gone.told.gone_because and (
        said in set(LeaveCause) or gone.told.gone_because == "it left"
    )
