"""Why a peer waits: the right cause at each stand of its machine, said once, and not for what is over at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.peer.agent.waits import NamedWait, WaitCause, WaitLines, Waits, wait_of
from farflung.peer.machine.handshake import HandshakeState
from farflung.protocol.states import Goal


def machine(
    stand: HandshakeState = HandshakeState.INSIDE,
    goal: Goal | None = Goal.TRAIN,
    reason: str = "",
    refused: str = "",
    leaving: str = "",
    helps: bool = False,
    known: bool = True,
    offer: bool = True,
    joined: bool = True,
    reads: bool = False,
    want: int = 0,
    version: int = NO_VERSION,
    **training: object,
) -> Any:
    """A peer machine, as far as its wait depends on it."""
    usual: dict[str, object] = {
        "attached": True,
        "waiting": False,
        "leases": SimpleNamespace(want=want),
        "loading": False,
    }
    usual["waits_for_round"] = training.get("waiting", False)
    part = SimpleNamespace(replicas={0: SimpleNamespace(held=SimpleNamespace(version=version))})
    member = SimpleNamespace(
        leaving=SimpleNamespace(asked=bool(leaving), reason=leaving),
        tick=SimpleNamespace(goal=goal, reason=reason) if goal is not None else None,
        training=SimpleNamespace(**usual | training),
        joined=SimpleNamespace(disk=SimpleNamespace(reads=reads), part=part) if joined else None,
    )
    return SimpleNamespace(
        member=member,
        doorway=SimpleNamespace(
            inside=stand == HandshakeState.INSIDE, stand=stand, refused=refused, helps=helps
        ),
        known=known or None,
        offer=offer or None,
    )


NEW = {"known": False, "offer": False, "joined": False, "goal": None}


@pytest.mark.parametrize(
    "at, cause, says",
    [
        (machine(HandshakeState.KNOCKING, **NEW), WaitCause.KNOCKING, "no answer from the coordinator yet"),
        (machine(HandshakeState.READING, **NEW | {"known": True}), WaitCause.TRAINER, "starting the trainer"),
        (machine(HandshakeState.READING, helps=True, **NEW | {"known": True}), WaitCause.TRAINER, "waiting for a peer"),
        (machine(HandshakeState.GREETING, joined=False), WaitCause.ENTERING, "asking to be let in"),
        (machine(HandshakeState.KNOCKING, refused="it is full"), WaitCause.REFUSED, "not admitted yet: it is full"),
        (machine(HandshakeState.KNOCKING), WaitCause.KNOCKING, "no answer from the coordinator; training goes on"),
        (machine(goal=None), WaitCause.ENTERING, "waiting for the coordinator's first word"),
        (machine(goal=Goal.FOUND), WaitCause.FOUNDING, "giving the run its first weights"),
        (machine(goal=Goal.SYNC), WaitCause.FETCHING, "downloading the model: 43%"),
        (machine(goal=Goal.SYNC, version=31, reason="it holds 31"), WaitCause.BEHIND, "it holds 31"),
        (machine(goal=Goal.WAIT, reason="nobody has it"), WaitCause.TOLD, "nobody has it"),
        (machine(goal=Goal.WAIT, reads=True, reason="nobody has it"), WaitCause.READING, "from a disk"),
        (machine(goal=Goal.ALONE, reason="the host paused it"), WaitCause.TOLD, "the host paused it"),
        (machine(attached=False), WaitCause.TRAINER, "starting the trainer"),
        (machine(waiting=True, reason="1 of 2"), WaitCause.ROUND, "waiting for the next round: 1 of 2"),
        (machine(want=128), WaitCause.DATA, "no data is leased to this peer yet"),
        (machine(leaving="Ctrl-C"), WaitCause.LEAVING, "leaving when this round is over: Ctrl-C"),
        (machine(), WaitCause.NONE, "training"),
        (machine(attached=False, helps=True), WaitCause.NONE, "helping"),
    ],
)  # fmt: skip
def test_each_stand_has_its_cause(at: Any, cause: WaitCause, says: str) -> None:
    found = wait_of(at, 0.43)
    assert found.cause == cause and says in found.text


def test_each_wait_is_said_once_and_a_short_one_is_not() -> None:
    waits = Waits()
    trainer, enters, trains = (
        NamedWait(WaitCause.TRAINER, "t"),
        NamedWait(WaitCause.ENTERING, "e"),
        NamedWait(WaitCause.NONE, "training"),
    )
    assert waits.look(trainer, 0.0) is None and waits.look(trainer, 1.0) == trainer
    assert waits.look(trainer, 2.0) is None
    assert waits.look(enters, 3.0) is None  # and that was over at once
    first, later = NamedWait(WaitCause.FETCHING, "10 %"), NamedWait(WaitCause.FETCHING, "90 %")
    assert waits.look(first, 3.5) == first and waits.look(later, 9.0) is None
    assert waits.look(trains, 10.0) == trains and waits.look(trains, 11.0) is None
    round_ = NamedWait(WaitCause.ROUND, "1 of 2")
    assert waits.look(round_, 12.0) is None and waits.look(trains, 41.0) is None, "rounds of less are usual"
    assert waits.look(round_, 50.0) is None and waits.look(round_, 80.0) == round_


def test_other_numbers_in_the_coordinators_words_are_no_news_and_other_words_are() -> None:
    waits = Waits()
    for text, said in (
        ("full: 2 peers", True),
        ("full: 3 peers", False),
        ("banned", True),
        ("full: 2 peers", True),
    ):
        wait = NamedWait(WaitCause.REFUSED, text)
        assert (waits.look(wait, 0.0) is not None) == said


def test_what_the_machine_notes_again_and_again_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[tuple[str, bool, dict[str, str]]] = []
    lines = WaitLines(lambda text, routine=False, **facts: said.append((text, routine, facts)))
    refused = machine(HandshakeState.KNOCKING, refused="this identity is already in the run", **NEW)
    for second in range(60):
        lines.note("not admitted yet: this identity is already in the run", False, refused)
        lines.turn(refused, 0.0, float(second))
    wait = "not admitted yet: this identity is already in the run"
    assert said == [(wait, False, {"wait": "refused", "why": wait})]
    lines.note("something else", True, refused)
    assert said[1:] == [("something else", True, {})]
    lines.turn(machine(), 1.0, 60.0)
    assert said[2:] == [("training", False, {"wait": "", "why": ""})]
