"""Where a peer is: the coordinator's word for people follows from the peer's phase and the coordinator's goal."""

from __future__ import annotations

import pytest

from farflung.protocol.states import (
    GONE,
    HERE,
    PEER_STATES,
    Goal,
    IllegalMove,
    PeerEvent,
    PeerState,
    Phase,
    Transitions,
    state_after,
)


@pytest.mark.parametrize("phase", Phase)
def test_a_peer_that_trains_is_where_it_says(phase: Phase) -> None:
    for goal in (Goal.TRAIN, Goal.ALONE, Goal.FINISH):
        assert state_after(PeerState.JOINING, goal, str(phase), quarantined=False) == PeerState(phase)


def test_a_peer_that_is_to_do_something_else_is_shown_doing_that() -> None:
    shown = {
        goal: state_after(PeerState.READY, goal, "ready", quarantined=False)
        for goal in (Goal.FOUND, Goal.SYNC, Goal.WAIT)
    }
    assert shown == {
        Goal.FOUND: PeerState.JOINING,
        Goal.SYNC: PeerState.SYNCING,
        Goal.WAIT: PeerState.WAITING,
    }
    assert state_after(PeerState.READY, Goal.SYNC, "ready", quarantined=True) == PeerState.QUARANTINED


def test_a_word_that_nobody_knows_is_shown_to_nobody() -> None:
    assert state_after(PeerState.READY, Goal.TRAIN, "\x1b[2J", quarantined=False) == PeerState.INNER


def test_who_is_gone_is_heard_of_again_only_by_being_admitted() -> None:
    assert set(HERE) | set(GONE) == set(PeerState)
    for state in GONE:
        assert PEER_STATES.after(state, PeerEvent.ADMITTED) == PeerState.JOINING
        with pytest.raises(IllegalMove, match=f"in the state {state}"):
            state_after(state, Goal.TRAIN, "inner", quarantined=False)


# ---- tables in general ------------------------------------------------------------------------------------------


TABLE: Transitions[str, str] = Transitions({"a": {"x": "b", "y": "b"}, "b": {"x": "b"}, "c": {"x": "b"}})


def test_a_move_that_is_not_in_the_table_or_leads_elsewhere_is_refused() -> None:
    TABLE.check("a", "x", "b")
    with pytest.raises(IllegalMove, match="y in the state b"):
        TABLE.after("b", "y")
    with pytest.raises(IllegalMove, match="x in the state a leads to b, not to c"):
        TABLE.check("a", "x", "c")


def test_a_table_names_no_state_that_has_no_row() -> None:
    with pytest.raises(ValueError, match="without a row"):
        Transitions({"a": {"x": "nowhere"}})


def test_a_table_is_drawn_with_one_arrow_for_each_two_states() -> None:
    assert TABLE.drawn("a", str, boxes={"alike": ["b", "c"]}).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> a",
        "    state alike {",
        "        b",
        "        c",
        "    }",
        "    alike --> b: x",
        "    a --> b: x, y",
    ]
    with pytest.raises(ValueError, match="different rows"):
        TABLE.drawn("a", str, boxes={"unlike": ["a", "b"]})
